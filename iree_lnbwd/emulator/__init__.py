"""Runs GPU kernels on a machine that has no GPU, and faults on errors that hardware would hide.

`Module` runs any module that IREE compiled for a GPU. README.md in this folder describes the parts,
and how to use them for other kernels. Nothing here knows what a kernel computes, or needs the
package around it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iree_lnbwd.emulator.executor import Executor
    from iree_lnbwd.emulator.launch import Binding, Fault, Launch, Unknown
    from iree_lnbwd.emulator.memory import GlobalMemory, SharedMemory
    from iree_lnbwd.emulator.module import Module, unsupported
    from iree_lnbwd.emulator.ptx import PtxError, PtxExecutor
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

# The modules that have these names, loaded on first use: readers of executables need none of them.
_MODULES = ("launch", "executor", "memory", "vm", "ptx", "module")


def __getattr__(name: str) -> Any:
    """A public name of this package, loaded on first use.

    Raises:
        AttributeError: There is no such name.
    """
    if name in __all__:
        for module in _MODULES:
            home = importlib.import_module(f"{__name__}.{module}")
            if hasattr(home, name):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names that are here and those that are loaded on first use."""
    return sorted({*globals(), *__all__})
