"""Global, shared and local memory that detect errors which hardware hides.

Besides their bytes, both keep who last wrote and who last read each *cell*. A cell has as many
neighbouring bytes as the narrowest access so far. From this they find reads of bytes that were
never written, and races:

* global memory: two threads of one launch (or of launches that no barrier of the host separates)
  touch a cell, one of them writes, and no barrier of their workgroup came between.
* shared memory: two threads of a workgroup touch a cell, one of them writes, and no barrier came
  between that both take part in: of the workgroup, of a group of its subgroups, or of a subgroup.
  (Bulk copies are ordered by mbarriers as well; see `SharedMemory.copy_in_bulk`.)

Accesses are arrays over the lanes that take part; other lanes are not in them. Values are bytes,
because memory does not know types; view them as the type that they have.
"""

from iree_lnbwd.emulator.memory.cells import POISON, workgroups_at_once
from iree_lnbwd.emulator.memory.global_memory import Buffer, GlobalMemory
from iree_lnbwd.emulator.memory.local_memory import LocalMemory
from iree_lnbwd.emulator.memory.shared_memory import SharedMemory

__all__ = [
    "POISON",
    "Buffer",
    "GlobalMemory",
    "LocalMemory",
    "SharedMemory",
    "workgroups_at_once",
]
