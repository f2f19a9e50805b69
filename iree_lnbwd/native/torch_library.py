"""What the library of C++ operators of `iree_lnbwd.torch` is compiled from.

It uses no API of Python's, so one serves all versions of Python. Of PyTorch's ABI it uses what
changes with each release: LibTorch's stable ABI lacks autograd's nodes, sets of dispatch keys, the
kernel that an operator had before, kernels with state, and the cache of autocast.
"""

from __future__ import annotations

from pathlib import Path

from iree_lnbwd.native.libraries import OWN_COPIES, THREADS

_HERE = Path(__file__).parent

NAME = "iree_lnbwd_torch.so"
SOURCES = (_HERE / "torch_native.cpp", _HERE / "torch_overrides.cpp")
# OpenMP's pragmas are in PyTorch's headers. Its library is not named: it is the one of PyTorch.
COMPILED = ("-O2", "-fopenmp")
LINKED = (*OWN_COPIES, *THREADS)


def texts() -> tuple[str, ...]:
    """All that decides what is in it, but for PyTorch."""
    sources = (*SOURCES, *sorted(_HERE.glob("*.h")))
    return (*(path.read_text(encoding="utf-8") for path in sources), *COMPILED, *LINKED)
