"""Loads the C++ of `iree_lnbwd.jax`, XLA's custom call, and is called by it.

On GPUs, C++ is told what a call launches before XLA runs it, so that XLA can record calls into its
command buffers. On the CPU, the first call of a kind is computed here, and C++ runs the others. The
wheels of a release have it; otherwise it is compiled, which needs a C++ compiler, once for each
version of JAX. Where neither can be, XLA computes the norms by its own kernels, and a warning says
so.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import logging
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from iree_lnbwd import notices
from iree_lnbwd.calls import modules
from iree_lnbwd.disk import folders
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.errors import CompileError, DeviceError, plain
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri, gpu_of
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.native import prebuilt
from iree_lnbwd.native.calls import NativeCall, native_call, native_host_call
from iree_lnbwd.native.libraries import NativeLibrary
from iree_lnbwd.native.sources import JAX
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import WEIGHT, names
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import MOST_ROWS, NormSpec
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.gpu_driver import Graph
from iree_lnbwd.runtime.stream_module import LaunchSequence

TARGET = "iree_lnbwd_norm"  # XLA's name of the custom call

_COMPILERS = ("c++", "g++", "clang++")
_GPU = "cuda"  # JAX's name of the platform, and ours of its driver
_CPU = "cpu"  # JAX's name of the platform
_XLA_NAMES = {_GPU: "CUDA", _CPU: "cpu"}
_HOST = DeviceUri.parse(DEFAULT_DEVICE)
_HOST_NUMBER = -1  # C++'s, in place of a GPU's
_MESSAGE = (ctypes.c_void_p, ctypes.c_size_t)
_CALL = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t)  # its rows, and its spec as text
_Prepare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, *_CALL, *_MESSAGE)
_Compute = ctypes.CFUNCTYPE(ctypes.c_int, *_CALL, ctypes.POINTER(ctypes.c_int64), *_MESSAGE)

_SCRATCH_ALIGNMENT = 256  # XLA's memory may begin at less; the C++ looks for it
_SETS = "sets"  # of the weight: their number and their rows, beside the fields of a spec
_LAYOUTS_KEPT = 1024  # kinds of calls on the CPU whose arrays are known
_PROCESS = os.getpid()  # a child of ``fork`` has none of the threads

_log = logging.getLogger(__name__)
_graphs: dict[Graph, Graph] = {}
_preparing = threading.Lock()


def platforms(spec: NormSpec, rows: int) -> tuple[str, ...]:
    """JAX's platforms where the custom call computes a norm: GPUs, or the CPU if there is none.

    If none that was built ahead fits, the custom call is compiled the first time on a machine. This
    takes a few seconds and is logged; the result is kept in the cache on disk. The module is there
    when this returns.

    Args:
        spec: The norm.
        rows: M, on all devices.
    """
    if not 0 < rows <= MOST_ROWS:
        return ()
    if _gpus():
        return (_GPU,) if _is_registered(_GPU) and _are_on(spec, _gpus()) else ()
    is_on_cpu = jax.default_backend() == _CPU
    return (_CPU,) if is_on_cpu and _is_registered(_CPU) and _are_on(spec, (_HOST,)) else ()


def text_of(spec: NormSpec, sets: Sets | None) -> str:
    """A call's spec and sets, as XLA's custom call has them and C++ knows calls by."""
    own = {} if sets is None else {_SETS: sets}
    return json.dumps(spec.to_dict() | own, sort_keys=True)


def _read(text: bytes) -> tuple[NormSpec, Sets | None]:
    """The inverse of `text_of`."""
    values = json.loads(text)
    sets = values.pop(_SETS, None)
    return NormSpec.from_dict(values), sets and Sets(*sets)


def scratch_bytes(spec: NormSpec, rows: int, sets: Sets | None = None) -> int | None:
    """The size of the scratch that XLA gives a call, as its last result; None if it takes none.

    A recorded call may use no memory but its arguments and results, so the size is known before it
    runs. It is enough for every GPU of this process.

    Args:
        spec: The norm, for which `platforms` are not none.
        rows: M, on one device; at least 1.
        sets: Those of the weight there, where it has some.
    """
    if not _gpus():
        return None
    needed = (_launches(_module(spec, uri), rows, sets).scratch_bytes for uri in _gpus())
    return max(needed) + _SCRATCH_ALIGNMENT


@functools.cache
def _gpus() -> tuple[DeviceUri, ...]:
    """One of each kind of GPU that JAX has in this process."""
    try:
        devices = jax.local_devices(backend=_GPU)
    except RuntimeError:  # JAX has no such platform, or no such device
        return ()
    every = (DeviceUri(_GPU, device.local_hardware_id) for device in devices)
    return tuple({gpu_of(uri): uri for uri in every}.values())


@functools.cache
def _is_registered(platform: str) -> bool:
    """Makes the custom call known to XLA, if it can be had."""
    try:
        library = load()
        if platform == _GPU:
            prepare, run = library.iree_lnbwd_jax_prepare_on_gpu, library.iree_lnbwd_jax_on_gpu
            register(_XLA_NAMES[platform], {"initialize": prepare, "execute": run})
        else:
            register(_XLA_NAMES[platform], {"execute": library.iree_lnbwd_jax_on_cpu})
    except Exception as error:  # tools that are not ours may raise anything
        notices.warn(f"iree_lnbwd.jax: XLA computes the norms, for the custom call failed: {error}")
        return False
    return True


@functools.cache
def _are_on(spec: NormSpec, uris: tuple[DeviceUri, ...]) -> bool:
    """Compiles and loads a module for each device, if they can be had and C++ can launch them."""
    try:
        for uri in uris:
            module = _module(spec, uri)
            if uri.driver == _GPU:
                _launches(module, 1, Sets(1, 1) if spec.weight_sets else None)
    except (CompileError, DeviceError) as error:
        notices.warn(f"iree_lnbwd.jax: XLA computes {spec.name}, for its module failed: {error}")
        return False
    return True


@functools.cache
def _module(spec: NormSpec, uri: DeviceUri) -> Norm:
    """The module of all calls in this process, which what was lowered for it goes on to fit."""
    return modules.loaded(spec, uri, _say_compiling)


def _launches(module: Norm, rows: int, sets: Sets | None) -> LaunchSequence:
    with _preparing:
        return module.launches(rows, sets)


def register(platform: str, stages: Mapping[str, Any]) -> None:
    """Makes functions of the library the custom call of a platform, by XLA's name.

    Args:
        platform: XLA's name of it.
        stages: By XLA's name of the stage.
    """
    capsules = {stage: jax.ffi.pycapsule(handler) for stage, handler in stages.items()}
    jax.ffi.register_ffi_target(TARGET, capsules, platform=platform)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if it is not in the cache and none that was built ahead fits.

    Raises:
        OSError, RuntimeError: It cannot be had.
    """
    kept = NativeLibrary.of("jax", JAX.name, (*JAX.texts(), jaxlib.__version__))
    if (path := kept.kept() or _prebuilt()) is not None:
        return _loaded(path)
    (source,) = JAX.files
    what = f"{source.name} for JAX {jax.__version__}"
    with kept.locked(lambda: notices.log(_log, "another process compiles %s", what)) as waited:
        if (path := kept.kept()) is not None:
            return _loaded(path)
        if not waited:
            return _built(kept, what)
    return _built(kept, what)


def _prebuilt() -> Path | None:
    """What was built ahead and fits this JAX. Its headers change with few of its releases."""
    major = jaxlib.__version__.partition(".")[0]
    include = Path(jax.ffi.include_dir())
    return prebuilt.fitting(f"jax-{major}", prebuilt.sources_digest(JAX.texts()), include)


def _built(library: NativeLibrary, what: str) -> ctypes.CDLL:
    """Compiles the library, loads it and keeps it."""
    notices.log(_log, "compiling %s: once, and usually for a few seconds", what)
    start = time.perf_counter()
    with folders.temporary() as folder:
        path = Path(folder) / JAX.name
        with notices.repeated(_log, "still compiling %s", what):
            _build(path)
        loaded = _loaded(path)
        notices.log(_log, "compiling %s took %.0f s", what, time.perf_counter() - start)
        try:
            library.keep(path.read_bytes())
        except UnusableError as error:
            notices.warn(f"compiled custom call not cached: {error}")
    return loaded


def prepare(uri: DeviceUri, rows: int, text: bytes) -> None:
    """Tells C++ what a call launches, whose kernels stay loaded.

    Args:
        uri: The device.
        rows: M, at least 1.
        text: What it computes, by `text_of`.

    Raises:
        CompileError, DeviceError: The module cannot be had.
    """
    spec, sets = _read(text)
    norm = _module(spec, uri)
    with _preparing:
        sequence = norm.launches(rows, sets)
        pointers = [*names(spec.arguments), *([WEIGHT.name] if sequence.fixed else [])]
        _remember(uri.index, rows, text, native_call(sequence, pointers, _graphs))


def _remember(device: int, rows: int, text: bytes, call: NativeCall) -> None:
    """Tells C++ of a call."""
    numbers = [
        number
        for each in call
        for number in (
            (_array(each), ctypes.c_size_t(len(each)))
            if isinstance(each, tuple)
            else (ctypes.c_int64(each),)
        )
    ]
    size = ctypes.c_size_t(len(text))
    remember = load().iree_lnbwd_jax_remember
    if remember(ctypes.c_int32(device), ctypes.c_int64(rows), text, size, *numbers):
        raise RuntimeError(f"C++ refuses the launches of {text.decode()}")


def _array(numbers: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH")
    flags = (*JAX.compiled, "-shared", "-fPIC", *JAX.linked, "-I", jax.ffi.include_dir())
    command = [*compiler.split(), *flags, *map(str, JAX.files)]
    done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed with {done.returncode}: {done.stderr.strip()}")


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.iree_lnbwd_jax_set_python(_on_new_call, _on_host_call)
    return library


def _prepare_new(
    device: int, rows: int, spec: int, spec_size: int, message: int, message_size: int
) -> int:
    """Prepares a kind of call that XLA is about to run or record, in a thread of XLA's."""
    with _Told(message, message_size) as told:
        prepare(DeviceUri(_GPU, device), rows, ctypes.string_at(spec, spec_size))
    return told.failed


def _compute(
    rows: int, spec: int, spec_size: int, pointers: Any, message: int, message_size: int
) -> int:
    """Computes a call on the CPU, in a thread of XLA's, from XLA's memory into XLA's memory.

    C++ is told of it, and runs the next of its kind on XLA's threads.
    """
    with _Told(message, message_size) as told:
        text = ctypes.string_at(spec, spec_size)
        layout = _layout(text, rows)
        arrays = [array.at(pointers[place]) for place, array in enumerate(layout.arrays)]
        norm = _module(layout.spec, _HOST)
        norm.fill(arrays[: layout.inputs], arrays[layout.inputs :], layout.sets)
        if (sequence := norm.on_host(rows, layout.sets)) is not None:
            _remember(_HOST_NUMBER, rows, text, native_host_call(sequence, sequence.arguments))
    return told.failed


class _Told:
    """A block whose exceptions C++ is told of, for none gets through it.

    Attributes:
        failed: 1 if there was one, else 0.
    """

    def __init__(self, message: int, size: int) -> None:
        self._message, self._size = message, size
        self.failed = 0

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if error is not None:
            what = plain(f"{type(error).__name__}: {error}").encode()[: self._size - 1]
            ctypes.memmove(self._message, what + b"\0", len(what) + 1)
            self.failed = 1
        return True


class _ArrayAt(NamedTuple):
    """An array whose address a call says."""

    memory: Any  # the type of its bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def at(self, address: int) -> Array:
        return np.ndarray(self.shape, self.dtype, self.memory.from_address(address))


class _Layout(NamedTuple):
    """The arrays of a call: the inputs, and then the results."""

    spec: NormSpec
    sets: Sets | None
    arrays: tuple[_ArrayAt, ...]
    inputs: int


@functools.lru_cache(maxsize=_LAYOUTS_KEPT)
def _layout(text: bytes, rows: int) -> _Layout:
    spec, sets = _read(text)
    arrays = []
    for each in (*spec.inputs, *spec.results):
        dtype, shape = DTYPES[each.dtype].numpy, each.dims(rows, sets)
        memory = ctypes.c_char * (math.prod(shape) * dtype.itemsize)
        arrays.append(_ArrayAt(memory, dtype, shape))
    return _Layout(spec, sets, tuple(arrays), len(spec.inputs))


def _say_compiling(spec: NormSpec, target: Target) -> None:
    notices.log(_log, "compiling %s for %s", spec.name, target.name)


_on_new_call = _Prepare(_prepare_new)
_on_host_call = _Compute(_compute)


@atexit.register
def _stop() -> None:
    """From now on no thread of XLA's calls Python; what it launches stays loaded."""
    if load.cache_info().currsize and os.getpid() == _PROCESS:
        try:
            jax.effects_barrier()  # what is still to be printed may need a norm
        finally:
            load().iree_lnbwd_jax_set_python(_Prepare(), _Compute())
