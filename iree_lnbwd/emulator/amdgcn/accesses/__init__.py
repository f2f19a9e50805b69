"""Loads and stores: global and scalar memory, buffers, scratch, LDS; exchanges through LDS.

Sources: AMD's ISA documents ("Vector Memory Buffer Instructions", "Flat Memory Instructions", "Data
Share Operations", "Scalar Memory Operations").

A load's registers hold its data at once; `waits` makes sure that nobody reads them before s_waitcnt
allows it. Cache policies (glc, slc, dlc, sc0, sc1, nt) change nothing here.
"""

from iree_lnbwd.emulator.amdgcn.accesses.buffers import SCRATCH_WORDS
from iree_lnbwd.emulator.amdgcn.accesses.items import LOADS, STORES
from iree_lnbwd.emulator.amdgcn.accesses.table import ACCESSES

__all__ = ["ACCESSES", "LOADS", "SCRATCH_WORDS", "STORES"]
