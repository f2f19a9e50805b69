"""Loads the C++ of `iree_lnbwd.torch`, its operators and PyTorch's, and tells it of calls.

The wheels of a release have it compiled for releases of PyTorch. For others, and in a clone, it is
compiled here: this needs a C++ compiler and ninja, once for each version of PyTorch
(``torch.compile`` needs a C compiler for its launchers, too). Without them the operators stay in
Python: the gradients are the same, and calls take more of the host's time.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from iree_lnbwd import notices
from iree_lnbwd.calls.calling import HostCall
from iree_lnbwd.disk import folders
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.native import prebuilt
from iree_lnbwd.native.calls import NativeCall, native_call, native_host_call
from iree_lnbwd.native.libraries import NativeLibrary
from iree_lnbwd.native.sources import TORCH
from iree_lnbwd.ops.arguments import Options
from iree_lnbwd.ops.operands import VARIANTS, Op, Operand, names
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime.gpu_driver import Graph
from iree_lnbwd.runtime.gpu_module import GpuModule, KnownCall
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.operator_table import ALL_GRADIENTS, ALL_NORMS, AUTOCAST, OUTPUT, WITH_OUTPUT

_NUMBERS = {op: number for number, op in enumerate(VARIANTS)}
# The names of a call's pointers in C++, before those of its scratch.
_POINTERS = {op: names((*op.inputs, *op.results)) for op in VARIANTS}
_KINDS_KEPT = 4096
_NO_STRIDES = (-1, -1)  # of an argument that is dense, or copied
_PROCESS = os.getpid()  # a child of fork has none of the threads

_log = logging.getLogger(__name__)
_remembered: set[Hashable] = set()
_modules: set[GpuModule] = set()  # C++ may launch their kernels
_graphs: dict[Graph, Graph] = {}
_loading, _remembering = threading.Lock(), threading.Lock()


class _Build:
    """What `status` says of the operators. Threads may read it at any time."""

    def __init__(self) -> None:
        self.said = "not loaded yet"
        self.since: float | None = None  # by the clock of the process, while it takes long

    def has_begun(self, said: str) -> None:
        """They are not there yet."""
        self.said, self.since = said, time.perf_counter()

    def have_ended(self, are_there: bool) -> None:
        """There will be no others."""
        self.since = None
        self.said = "in place" if are_there else "could not be built; the log says why"


_BUILD = _Build()


def status() -> str:
    """What became of the operators in C++; while they are compiled, for how long."""
    since = _BUILD.since
    if since is None:
        return _BUILD.said
    return f"{_BUILD.said} for {time.perf_counter() - since:.0f} s"


@functools.cache
def load() -> bool:
    """Loads the C++ operators, which from then on run in place of the Python ones.

    If none that were built ahead fit this PyTorch, they are compiled the first time on a machine.
    This takes ten to forty seconds and is logged; the result is kept in the cache on disk. If the
    cache cannot be used, there is a warning, and the next process compiles them again.

    Returns:
        Whether they are there. If not, a warning was logged that says why.
    """
    with _loading:  # the first thread loads them, the others wait
        are_there, not_kept = _loaded()
        _BUILD.have_ended(are_there)
    if not_kept is not None:
        notices.warn(f"compiled operators not cached: {not_kept}")
    return are_there


@functools.cache
def can_be_had() -> bool:
    """Whether there is what `load` needs: what was built before, or a compiler and ninja."""
    if _library().kept() is not None or _prebuilt() is not None:
        return True
    compiler = shlex.split(os.environ.get("CXX", "c++"))[:1]  # as PyTorch looks for it
    return all(map(shutil.which, (*compiler, "ninja")))


@functools.cache
def _library() -> NativeLibrary:
    """Its place in the cache."""
    version = (torch.__version__, str(torch.version.git_version))
    return NativeLibrary.of("torch", TORCH.name, (*TORCH.texts(), *version))


@functools.cache
def _prebuilt() -> Path | None:
    """What was built ahead and fits this PyTorch."""
    if torch.version.debug:  # its classes may be others
        return None
    release = ".".join(torch.__version__.split(".")[:2])
    include = Path(torch.__file__).parent / "include"
    return prebuilt.fitting(f"torch-{release}", prebuilt.sources_digest(TORCH.texts()), include)


@functools.cache
def _loaded() -> tuple[bool, UnusableError | None]:
    """Whether the operators are there, and why they were not kept."""
    library = _library()
    names = ", ".join(path.name for path in TORCH.files)
    what = f"{names} for PyTorch {torch.__version__}"
    try:
        if _load_kept(library) or _load_prebuilt(library):
            return True, None
        _BUILD.has_begun("waiting for another process, which compiles them,")
        with library.locked(lambda: notices.log(_log, "another process compiles %s", what)) as late:
            if _load_kept(library):
                return True, None
            if not late:
                return True, _build_and_keep(library, what)
        return True, _build_and_keep(library, what)
    except Exception as error:  # tools that are not ours may raise anything
        message = "the C++ operators could not be built; using the slower Python ones: %s"
        notices.log(_log, message, error)
        return False, None


def _load_kept(library: NativeLibrary) -> bool:
    """Loads what was built before, if there is any."""
    if (kept := library.kept()) is None:
        return False
    torch.ops.load_library(kept)
    _put_in_place()
    return True


def _load_prebuilt(library: NativeLibrary) -> bool:
    """Loads what was built ahead, if it fits. It is kept, so that nothing looks again."""
    if (path := _prebuilt()) is None:
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:  # as from a disk whose files may not be run
        notices.log(_log, "the operators that were built ahead cannot be loaded: %s", error)
        return False
    _put_in_place()
    with contextlib.suppress(UnusableError):
        library.keep(path.read_bytes())
    return True


def _build_and_keep(library: NativeLibrary, what: str) -> UnusableError | None:
    """Builds and loads the operators; why they were not kept."""
    notices.log(_log, "compiling %s: once, and usually for ten to forty seconds", what)
    start = time.perf_counter()
    _BUILD.has_begun("being compiled, once, usually in ten to forty seconds:")
    with notices.repeated(_log, "still compiling %s", what):
        content = _build_and_load()
    notices.log(_log, "compiling %s took %.0f s", what, time.perf_counter() - start)
    _put_in_place()
    try:
        library.keep(content)
    except UnusableError as error:
        return error
    return None


@functools.cache
def _put_in_place() -> None:
    """Tells C++ of the ops and the norms, whose operators it then registers."""
    ours = torch.ops.iree_lnbwd
    if os.getpid() != _PROCESS:
        ours.tell_of_fork()
    for op, number in _NUMBERS.items():
        rows = ([*map(_row, operands)] for operands in (op.arguments, op.results))
        described = ours.describe_op(op.name, op.is_backward, op.data.name, *rows)
        assert described == number
    for gradients in ALL_GRADIENTS:
        ours.register_gradients(gradients.name, number_of(gradients.op), gradients.takes_sets)
    for number, norm in enumerate(ALL_NORMS):
        each = (norm, norm.gradients, norm.from_output)
        ours.register_norm(
            number,
            *(word for one in each for word in (one.name, number_of(one.op))),
            norm.takes_residual,
            norm.own_forward,
            norm.takes_sets,
            norm in AUTOCAST,
        )
        if norm in WITH_OUTPUT:
            ours.register_output(number, norm.name + OUTPUT)
    _put_functions_in_place()


def _put_functions_in_place() -> None:
    """Functions of Python's in C++, if there are any: PyTorch takes longer to call an operator."""
    address = torch.ops.iree_lnbwd.maker_of_functions()
    if not address or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return
    objects = (ctypes.py_object,) * 3
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, *objects)(address)
    for number, norm in enumerate(ALL_NORMS):
        if norm in WITH_OUTPUT:
            plain = (number, Tensor, torch.nn.Parameter)
            norm.compute_alone_by(make(*plain, norm.output_alone), make(*plain, None))


def _row(operand: Operand) -> str:
    """A row of the table, in words that C++ knows."""
    words = (operand.kind.value, operand.element.value, operand.access.name, operand.when.name)
    return " ".join((operand.name, *words))


def _build_and_load() -> bytes:
    """Builds the operators in a folder of our own, loads them, and returns the library."""
    from torch.utils import cpp_extension  # imports setuptools, which only this function needs

    with folders.temporary() as folder, _standard_streams():
        cpp_extension.load(
            Path(TORCH.name).stem,
            list(map(str, TORCH.files)),
            extra_cflags=list(TORCH.compiled),
            extra_ldflags=list(TORCH.linked),
            build_directory=folder,
            is_python_module=False,
        )
        return (Path(folder) / TORCH.name).read_bytes()


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


def number_of(op: Op) -> int:
    """What C++ calls an op."""
    return _NUMBERS[op]


def remember(
    tensors: Sequence[Tensor | None], options: Options, known: KnownCall | HostCall
) -> None:
    """Lets the C++ operators launch the kernels themselves for calls of a kind.

    Args:
        tensors: Of a call of that kind, in the order of its op's table.
        options: Of the call.
        known: Computes such calls; on a GPU, it is kept. What IREE's device runs stays in Python.
    """
    on_host = isinstance(known, HostCall)
    key = (known, options, *map(_host_kind, tensors)) if on_host else known
    with _remembering:
        if key in _remembered:
            return
        if len(_remembered) >= _KINDS_KEPT:  # another thread may be in such a call: modules stay
            _forget_calls()
        _remembered.add(key)
        if (call := _numbers(known, _POINTERS[options.op])) is None:
            return
        op, normalized_shape, mask, weight_offset, eps, _, rows_per_set, *_ = options
        own = options.result_dtype
        result_dtype = None if own is None else supported.BY_NAME[own]
        given = (tensors, normalized_shape, mask, eps, weight_offset, result_dtype, rows_per_set)
        strides = [] if known.strides is None else _strides(known.strides, op)
        torch.ops.iree_lnbwd.remember(number_of(op), *given, **call._asdict(), strides=strides)


def _host_kind(tensor: Tensor | None) -> object:
    """What counts for a call on the CPU beside its shape."""
    layout = None if tensor is None or tensor.is_contiguous() else tensor.stride()
    return supported.kind(tensor), layout


def _strides(strides: Strides, op: Op) -> list[int]:
    """Those of a call's rows, as C++ has them: of the rows of a run, and of each argument."""
    given = dict(strides.given)
    numbers = [strides.inner_count]
    for argument in op.arguments:
        numbers += given.get(argument.name, _NO_STRIDES)
    return numbers


def _numbers(known: KnownCall | HostCall, pointers: Sequence[str]) -> NativeCall | None:
    """What C++ launches; None where IREE's device runs it."""
    if isinstance(known, HostCall):
        on_host = known.norm.on_host(known.rows, known.sets, known.strides)
        return None if on_host is None else native_host_call(on_host, pointers)
    _modules.add(known.module)
    on_gpu = known.sequence
    return None if on_gpu is None else native_call(on_gpu, pointers, _graphs)


def forget() -> None:
    """Lets C++ ask Python again for calls of all kinds: their modules may be others now."""
    with _remembering:
        _forget_calls()


def _forget_calls() -> None:
    if _remembered:
        torch.ops.iree_lnbwd.forget()
        _remembered.clear()


@atexit.register
def _forget() -> None:
    """Releases the modules; PyTorch no longer calls an operator."""
    _forget_calls()
    _graphs.clear()
    _modules.clear()
