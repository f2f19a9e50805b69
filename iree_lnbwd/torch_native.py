"""Builds the C++ of `iree_lnbwd.torch`, its operators and PyTorch's, and tells it of calls.

The build needs a C++ compiler and ninja, once for each version of PyTorch (``torch.compile`` needs
a C compiler for its launchers, too). Without them the operators stay in Python: the gradients are
the same, and calls take more of the host's time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from iree_lnbwd import folders, notices
from iree_lnbwd.native_calls import native_call
from iree_lnbwd.native_libraries import OWN_COPIES, NativeLibrary
from iree_lnbwd.operands import GRAD_RESIDUAL, OPS, RESIDUAL, RESIDUAL_OUTPUT, Op, names
from iree_lnbwd.runtime.gpu_driver import Graph
from iree_lnbwd.runtime.gpu_module import GpuModule, KnownCall
from iree_lnbwd.user_folders import UnusableError

_HERE = Path(__file__).parent
_SOURCES = (_HERE / "torch_native.cpp", _HERE / "torch_overrides.cpp")
_HEADERS = tuple(_HERE / f"{name}.h" for name in ("kernel_calls", "torch_calls", "torch_norms"))
_FLAGS = ("-O2",)
_LIBRARY = "iree_lnbwd_torch.so"
# The names of a call's pointers in C++, before those of its scratch. Calls with a residual stay in
# Python.
_POINTERS = {
    op: names(
        operand
        for operand in (*op.inputs, *op.results)
        if operand not in (RESIDUAL, GRAD_RESIDUAL, RESIDUAL_OUTPUT)
    )
    for op in OPS.values()
}
_NUMBERS = {op: number for number, op in enumerate(OPS.values())}  # of the enum Op in C++
_KINDS_KEPT = 4096

_log = logging.getLogger(__name__)
_remembered: set[CallKind] = set()
_modules: set[GpuModule] = set()  # C++ may launch their kernels
_graphs: dict[Graph, Graph] = {}
_loading, _remembering = threading.Lock(), threading.Lock()


@functools.cache
def load() -> bool:
    """Loads the C++ operators, which from then on run in place of the Python ones.

    The first time on a machine they are compiled. This takes ten to forty seconds and is logged;
    the result is kept in the cache on disk. If the cache cannot be used, there is a warning, and
    the next process compiles them again.

    Returns:
        Whether they are there. If not, a warning was logged that says why.
    """
    with _loading:  # the first thread loads them, the others wait
        are_there, not_kept = _loaded()
    if not_kept is not None:
        notices.warn(f"compiled operators not cached: {not_kept}")
    return are_there


@functools.cache
def _loaded() -> tuple[bool, UnusableError | None]:
    """Whether the operators are there, and why they were not kept."""
    version = (torch.__version__, str(torch.version.git_version))
    texts = (path.read_text(encoding="utf-8") for path in (*_SOURCES, *_HEADERS))
    library = NativeLibrary.of("torch", _LIBRARY, (*texts, *_FLAGS, *OWN_COPIES, *version))
    try:
        if (kept := library.kept()) is not None:
            torch.ops.load_library(kept)
            return True, None
        sources = " and ".join(path.name for path in _SOURCES)
        message = "compiling %s for PyTorch %s: once, and usually for ten to forty seconds"
        notices.log(_log, message, sources, torch.__version__)
        start = time.perf_counter()
        content = _build_and_load()
        notices.log(_log, "compiling %s took %.0f s", sources, time.perf_counter() - start)
    except Exception as error:  # tools that are not ours may raise anything
        message = "the operators run in Python, for those in C++ cannot be had: %s"
        notices.log(_log, message, error)
        return False, None
    try:
        library.keep(content)
    except UnusableError as error:
        return True, error
    return True, None


def _build_and_load() -> bytes:
    """Builds the operators in a folder of our own, loads them, and returns the library."""
    from torch.utils import cpp_extension  # imports setuptools, which only this function needs

    with folders.temporary() as folder, _standard_streams():
        cpp_extension.load(
            Path(_LIBRARY).stem,
            list(map(str, _SOURCES)),
            extra_cflags=list(_FLAGS),
            extra_ldflags=list(OWN_COPIES),
            build_directory=folder,
            is_python_module=False,
        )
        return (Path(folder) / _LIBRARY).read_bytes()


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """PyTorch flushes these streams before a build, even if they are closed, as in daemons."""
    with contextlib.ExitStack() as stack:
        if _is_closed(sys.stdout):
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if _is_closed(sys.stderr):
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _is_closed(stream: object) -> bool:
    return stream is None or bool(getattr(stream, "closed", False))


class CallKind(NamedTuple):
    """The facts that calls have in common if they launch the same kernels.

    Attributes:
        op: What they compute.
        device: The device of all tensors.
        rows: M.
        columns: N.
        grad_output: Its element type; None of a forward.
        input: Its element type.
        weight: Its element type; None if there is none.
        bias: Its element type; None if there is none.
        output_mask: As the caller gave it, filled up with False.
        eps: Of a forward, as the caller gave it; None of a backward, which gets the statistics.
    """

    op: Op
    device: torch.device
    rows: int
    columns: int
    grad_output: torch.dtype | None
    input: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    output_mask: tuple[bool, bool, bool]
    eps: float | None


def number_of(op: Op) -> int:
    """What C++ calls an op."""
    return _NUMBERS[op]


def remember(kind: CallKind, known: KnownCall) -> None:
    """Lets the C++ operators launch the kernels themselves for calls of a kind.

    Args:
        kind: The facts known about the calls.
        known: Computes them; it is kept. Calls that IREE's device runs stay in Python.
    """
    with _remembering:
        if kind in _remembered:
            return
        if len(_remembered) >= _KINDS_KEPT:  # another thread may be in such a call: modules stay
            torch.ops.iree_lnbwd.forget()
            _remembered.clear()
        _remembered.add(kind)
        _modules.add(known.module)
        if (sequence := known.sequence) is None:
            return
        torch.ops.iree_lnbwd.remember(
            number_of(kind.op),
            *kind[1:],
            **native_call(sequence, _POINTERS[kind.op], _graphs)._asdict(),
        )


@atexit.register
def _forget() -> None:
    """Releases the modules; PyTorch no longer calls an operator."""
    if _remembered:
        torch.ops.iree_lnbwd.forget()
    _graphs.clear()
    _modules.clear()
