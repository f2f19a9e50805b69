"""What our libraries of C++ are compiled from, here or ahead.

Of Python's API they use the stable part, if any, so one serves all versions of Python. JAX's uses
the API of XLA's custom calls, which is C. PyTorch's uses what changes with each release: LibTorch's
stable ABI lacks autograd's nodes, sets of dispatch keys, the kernel that an operator had before,
kernels with state, and the cache of autocast.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from iree_lnbwd.native.libraries import OWN_COPIES, THREADS

_HERE = Path(__file__).parent
# In a step of a model, the code of a call is not in the caches. So calls go to where they end: the
# stubs of the linker are a fifth of what a small norm would fetch.
_NO_STUBS = ("-fno-plt", "-fvisibility-inlines-hidden")


class Sources(NamedTuple):
    """Those of a library.

    Attributes:
        name: The library's file.
        files: What is compiled.
        headers: Those of ours that it reads.
        compiled: Flags of the compiler.
        linked: Flags of the linker.
    """

    name: str
    files: tuple[Path, ...]
    headers: tuple[Path, ...]
    compiled: tuple[str, ...]
    linked: tuple[str, ...]

    def texts(self) -> tuple[str, ...]:
        """All that decides what is in the library, but for what it is compiled for."""
        read = (path.read_text(encoding="utf-8") for path in (*self.files, *self.headers))
        return (*read, *self.compiled, *self.linked)


TORCH = Sources(
    "iree_lnbwd_torch.so",
    files=(
        _HERE / "torch_native.cpp",
        _HERE / "torch_overrides.cpp",
        _HERE / "torch_python.cpp",
    ),
    headers=tuple(sorted(_HERE.glob("*.h"))),
    # OpenMP's pragmas are in PyTorch's headers. Its library is not named: it is the one of PyTorch.
    compiled=("-O2", "-fopenmp", *_NO_STUBS),
    linked=(*OWN_COPIES, *THREADS, "-Wl,-Bsymbolic-functions"),
)
JAX = Sources(
    "iree_lnbwd_jax.so",
    files=(_HERE / "jax_native.cpp",),
    headers=(_HERE / "host_calls.h", _HERE / "kernel_calls.h"),
    compiled=("-O2", "-std=c++17", "-DNDEBUG"),
    linked=(*OWN_COPIES, *THREADS),
)
