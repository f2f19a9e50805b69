"""Runs GPU kernels on a machine that has no GPU, and faults on what hardware would hide.

`Module` runs any module that IREE compiled for a GPU; `EmulatedLayerNormBackward` those of this
package. What there is, and how to use it for other kernels: README.md beside this file.
"""

from iree_lnbwd.emulator.launch import Binding, Executor, Fault, Launch
from iree_lnbwd.emulator.memory import GlobalMemory, SharedMemory
from iree_lnbwd.emulator.module import Module
from iree_lnbwd.emulator.op import EmulatedLayerNormBackward, check_target
from iree_lnbwd.emulator.ptx import PtxExecutor
from iree_lnbwd.emulator.ptx_parser import PtxError
from iree_lnbwd.emulator.vm import VmError

__all__ = [
    "Binding",
    "EmulatedLayerNormBackward",
    "Executor",
    "Fault",
    "GlobalMemory",
    "Launch",
    "Module",
    "PtxError",
    "PtxExecutor",
    "SharedMemory",
    "VmError",
    "check_target",
]
