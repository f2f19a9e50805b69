"""The kernels of a module for the CPU as functions of this process, for callers with threads.

A .vmfb for the CPU holds ELF libraries without dependencies. Each has a function that returns a
table of its kernels: IREE's ``iree/hal/local/executable_library.h``, version 0.6. The system's
loader loads them, and runs code of theirs; so only what IREE has loaded as well comes here.
"""

from __future__ import annotations

import ctypes
import io
import os
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from iree_lnbwd.disk import folders

_ELF = b"\x7fELF"
_QUERY = "iree_hal_executable_library_query"
_VERSION = 6  # of the tables below; another one has other fields
PLAIN = (1, 1, 1)  # threads of a workgroup: the kernel's own
_NAME = "kernels.so"


class _Environment(ctypes.Structure):
    """What a library may use of its process: constants, imports, and facts about the CPU."""

    _fields_ = (
        ("constants", ctypes.c_void_p),
        ("import_thunk", ctypes.c_void_p),
        ("import_functions", ctypes.c_void_p),
        ("import_contexts", ctypes.c_void_p),
        ("processor", ctypes.c_uint64 * 8),
    )


class _Header(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("features", ctypes.c_uint32),
        ("sanitizer", ctypes.c_uint32),
    )


class _Attributes(ctypes.Structure):
    """Of a kernel."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("local_memory_pages", ctypes.c_uint16),
        ("constants", ctypes.c_uint8),
        ("bindings", ctypes.c_uint8),
        ("threads_x", ctypes.c_uint32),
        ("threads_y", ctypes.c_uint32),
        ("threads_z", ctypes.c_uint16),
        ("parameters", ctypes.c_uint16),
        ("reserved", ctypes.c_uint64 * 5),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("header", ctypes.POINTER(_Header)),
        ("imports", ctypes.c_uint32),
        ("import_symbols", ctypes.c_void_p),
        ("exports", ctypes.c_uint32),
        ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("attributes", ctypes.POINTER(_Attributes)),
        ("parameters", ctypes.c_void_p),
        ("occupancy", ctypes.c_void_p),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("tags", ctypes.c_void_p),
        ("parameter_names", ctypes.c_void_p),
        ("source_locations", ctypes.c_void_p),
        ("stage_locations", ctypes.c_void_p),
        ("constants", ctypes.c_uint32),
        ("source_files", ctypes.c_uint32),
        ("sources", ctypes.c_void_p),
    )


class Dispatch(ctypes.Structure):
    """What all workgroups of a launch are called with."""

    _fields_ = (
        ("threads_x", ctypes.c_uint32),
        ("threads_y", ctypes.c_uint32),
        ("threads_z", ctypes.c_uint16),
        ("constants_size", ctypes.c_uint16),
        ("workgroups_x", ctypes.c_uint32),
        ("workgroups_y", ctypes.c_uint32),
        ("workgroups_z", ctypes.c_uint16),
        ("most_at_once", ctypes.c_uint8),
        ("pointers_size", ctypes.c_uint8),
        ("constants", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    )


class Workgroup(ctypes.Structure):
    """What one workgroup is called with."""

    _fields_ = (
        ("x", ctypes.c_uint32),
        ("y", ctypes.c_uint32),
        ("z", ctypes.c_uint16),
        ("reserved", ctypes.c_uint16),
        ("processor", ctypes.c_uint32),
        ("local_memory", ctypes.c_void_p),
        ("local_memory_size", ctypes.c_uint32),
    )


# A kernel, from Python. It keeps the interpreter's lock: a workgroup takes less time than the lock
# takes to go to another thread and back.
Function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class UnservedError(Exception):
    """A library that cannot be loaded here, or needs what callers of kernels do not have."""


class HostKernel(NamedTuple):
    """One kernel.

    Attributes:
        function: Its address.
        constants: The number of 32-bit constants that it takes.
        bindings: How many pointers it takes.
    """

    function: int
    constants: int
    bindings: int


class HostLibraries:
    """The libraries of a module, loaded until nothing refers to this object.

    Attributes:
        kernels: By name.
    """

    def __init__(self, vmfb: bytes) -> None:
        """Loads them.

        Args:
            vmfb: A module that IREE has loaded on this CPU.

        Raises:
            UnservedError: The module has other code, a kernel needs more than pointers and
                constants, or the system does not load the libraries.
        """
        self.kernels: Mapping[str, HostKernel] = {}
        found: dict[str, HostKernel] = {}
        for elf in _libraries(vmfb):
            handle, query = _loaded(elf)
            # Not at the process's end: other threads may be in a kernel.
            weakref.finalize(self, _close, handle).atexit = False
            for name, kernel in _kernels(query):
                if name in found:
                    raise UnservedError(f"two kernels {name}")
                found[name] = kernel
        if not found:
            raise UnservedError("no library for this system's loader")
        self.kernels = found


# What kernels are called with. They get no imports; and of the CPU, what they were compiled for.
_ENVIRONMENT = _Environment()
ENVIRONMENT = ctypes.addressof(_ENVIRONMENT)


def _libraries(vmfb: bytes) -> Iterator[bytes]:
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        for name in archive.namelist():
            if (content := archive.read(name)).startswith(_ELF):
                yield content


def _loaded(elf: bytes) -> tuple[int, Callable[..., int | None]]:
    """The loader's handle of a library, and its function that returns the table.

    The loader knows a file by its name, and would give an older library for a name that comes
    again. A folder's name never does.
    """
    try:
        with folders.temporary() as folder:
            path = Path(folder) / _NAME
            path.write_bytes(elf)
            library = ctypes.CDLL(os.fspath(path), os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise UnservedError(str(error)) from error
    try:
        query = library[_QUERY]
    except AttributeError as error:
        _close(library._handle)
        raise UnservedError(str(error)) from error
    query.restype, query.argtypes = ctypes.c_void_p, (ctypes.c_uint32, ctypes.c_void_p)
    return library._handle, query


def _close(handle: int) -> None:
    dlclose = ctypes.CDLL(None).dlclose
    dlclose.argtypes = (ctypes.c_void_p,)
    dlclose(handle)


def _kernels(query: Callable[..., int | None]) -> Iterator[tuple[str, HostKernel]]:
    """The table of a library; it must not ask for more than callers have."""
    at = query(_VERSION, ENVIRONMENT)
    if at is None:
        raise UnservedError(f"a library without a table of version {_VERSION}")
    table = _Library.from_address(at)
    header = table.header.contents
    asks = {
        "version": header.version != _VERSION,
        "features": header.features,
        "a sanitizer": header.sanitizer,
        "imports": table.imports,
        "constants of its own": table.constants,
        "attributes of its kernels": not table.attributes,
        "names of its kernels": not table.names,
    }
    if why := ", ".join(what for what, is_so in asks.items() if is_so):
        raise UnservedError(f"a library of another kind: {why}")
    for place in range(table.exports):
        of = table.attributes[place]
        name = (table.names[place] or b"").decode()
        if of.flags or of.local_memory_pages or (of.threads_x, of.threads_y, of.threads_z) != PLAIN:
            raise UnservedError(f"the kernel {name} is launched in another way")
        yield name, HostKernel(table.functions[place] or 0, of.constants, of.bindings)
