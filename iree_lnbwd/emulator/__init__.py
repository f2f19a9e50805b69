"""Runs GPU kernels on a machine that has no GPU, and faults on what hardware would hide.

`Module` runs any module that IREE compiled for a GPU. What there is, and how to use it for other
kernels: README.md beside this file. Nothing here knows what a kernel computes, or needs anything of
the package around it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iree_lnbwd.emulator.executor import Executor
    from iree_lnbwd.emulator.launch import Binding, Fault, Launch, Unknown
    from iree_lnbwd.emulator.memory import GlobalMemory, SharedMemory
    from iree_lnbwd.emulator.module import Module, unsupported
    from iree_lnbwd.emulator.ptx import PtxExecutor
    from iree_lnbwd.emulator.ptx_parser import PtxError
    from iree_lnbwd.emulator.vm import VmError

__all__ = [
    "Binding",
    "Executor",
    "Fault",
    "GlobalMemory",
    "Launch",
    "Module",
    "PtxError",
    "PtxExecutor",
    "SharedMemory",
    "Unknown",
    "VmError",
    "unsupported",
]

# The modules that have them, loaded when one is asked for: who reads executables needs no more.
_MODULES = ("launch", "executor", "memory", "vm", "ptx_parser", "ptx", "module")


def __getattr__(name: str) -> Any:
    """What this package says it has.

    Raises:
        AttributeError: It does not say so.
    """
    if name in __all__:
        for module in _MODULES:
            home = importlib.import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
