"""Builds the C++ of `iree_lnbwd.jax`, XLA's custom call, and tells it what calls launch.

The build needs a C++ compiler, once for each version of JAX. Without one, XLA computes the norms by
its own kernels, and a warning says so.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import logging
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import jax
import jaxlib

from iree_lnbwd import folders, functional, notices
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.native_calls import native_call
from iree_lnbwd.native_libraries import NativeLibrary
from iree_lnbwd.operands import WEIGHT, names
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.gpu_driver import Graph
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target
from iree_lnbwd.user_folders import UnusableError

TARGET = "iree_lnbwd_norm"  # XLA's name of the custom call

_HERE = Path(__file__).parent
_SOURCE, _HEADER = _HERE / "jax_native.cpp", _HERE / "kernel_calls.h"
_FLAGS = ("-O2", "-std=c++17", "-DNDEBUG", "-shared", "-fPIC")
_LIBRARY = "iree_lnbwd_jax.so"
_COMPILERS = ("c++", "g++", "clang++")
_PLATFORM = "cuda"  # JAX's name of the platform, and ours of its driver
_XLA_PLATFORM = "CUDA"  # XLA's
_Prepare = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_size_t),
)

_log = logging.getLogger(__name__)
_modules: set[Norm] = set()  # C++ may launch their kernels
_graphs: dict[Graph, Graph] = {}
_preparing = threading.Lock()


@functools.cache
def platforms() -> tuple[str, ...]:
    """XLA's platforms where the custom call can be used: those that this process has GPUs of.

    The first time on a machine it is compiled. This takes a few seconds and is logged; the result
    is kept in the cache on disk.
    """
    try:
        jax.local_devices(backend=_PLATFORM)
    except RuntimeError:  # JAX has no such platform, or no GPU
        return ()
    try:
        register(_XLA_PLATFORM, load().iree_lnbwd_jax_on_gpu)
    except Exception as error:  # tools that are not ours may raise anything
        notices.warn(f"iree_lnbwd.jax: XLA computes the norms, for the custom call failed: {error}")
        return ()
    return (_PLATFORM,)


def register(platform: str, handler: Any) -> None:
    """Makes a function of the library the custom call of a platform, by XLA's name."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform=platform)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if it is not in the cache.

    Raises:
        OSError, RuntimeError: It cannot be had.
    """
    texts = (path.read_text(encoding="utf-8") for path in (_SOURCE, _HEADER))
    kept = NativeLibrary.of("jax", _LIBRARY, (*texts, *_FLAGS, jaxlib.__version__))
    if (path := kept.kept()) is not None:
        return _loaded(path)
    notices.log(_log, "compiling %s for JAX %s", _SOURCE.name, jax.__version__)
    with folders.temporary() as folder:
        path = Path(folder) / _LIBRARY
        _build(path)
        library = _loaded(path)
        try:
            kept.keep(path.read_bytes())
        except UnusableError as error:
            notices.warn(f"compiled custom call not cached: {error}")
    return library


def prepare(spec: NormSpec, uri: DeviceUri, rows: int, text: bytes) -> None:
    """Tells C++ what a call launches.

    Args:
        spec: What it computes.
        uri: The device.
        rows: M, at least 1.
        text: Its spec, as XLA's custom call has it.

    Raises:
        CompileError, DeviceError: The module cannot be had.
    """
    norm = functional.loaded(spec, uri, _say_compiling)
    with _preparing:
        sequence = norm.launches(rows)
        pointers = [*names(spec.arguments), *([WEIGHT.name] if sequence.fixed else [])]
        call = native_call(sequence, pointers, _graphs)
        numbers = [
            number
            for each in call
            for number in (
                (_array(each), ctypes.c_size_t(len(each)))
                if isinstance(each, tuple)
                else (ctypes.c_int64(each),)
            )
        ]
        _modules.add(norm)
        size = ctypes.c_size_t(len(text))
        remember = load().iree_lnbwd_jax_remember
        if remember(ctypes.c_int32(uri.index), ctypes.c_int64(rows), text, size, *numbers):
            raise RuntimeError(f"C++ refuses the launches of {spec.name}")


def _array(numbers: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(f"no C++ compiler ({', '.join(_COMPILERS)}) on the PATH")
    command = [*compiler.split(), *_FLAGS, "-I", jax.ffi.include_dir(), str(_SOURCE)]
    done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed with {done.returncode}: {done.stderr.strip()}")


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.iree_lnbwd_jax_set_prepare(_on_new_call)
    return library


def _prepare_new(
    device: int, rows: int, spec: int, spec_size: int, message: int, message_size: int
) -> int:
    """Prepares a call that XLA is about to run for the first time, in a thread of XLA's."""
    try:
        text = ctypes.string_at(spec, spec_size)
        uri = DeviceUri(_PLATFORM, device)
        prepare(NormSpec.from_dict(json.loads(text)), uri, rows, text)
    except BaseException as error:  # none gets through C++
        what = f"{type(error).__name__}: {error}".encode()[: message_size - 1]
        ctypes.memmove(message, what + b"\0", len(what) + 1)
        return 1
    return 0


def _say_compiling(spec: NormSpec, target: Target) -> None:
    notices.log(_log, "compiling %s for %s", spec.name, target.name)


_on_new_call = _Prepare(_prepare_new)


@atexit.register
def _stop() -> None:
    """From now on no thread of XLA's calls Python; what it launches stays loaded."""
    if load.cache_info().currsize:
        load().iree_lnbwd_jax_set_prepare(_Prepare())
