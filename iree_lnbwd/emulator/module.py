"""A compiled module on an emulated GPU: its own host program and its own kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from iree_lnbwd.emulator.amdgcn import AmdgcnExecutor, disassemble
from iree_lnbwd.emulator.executor import Executor
from iree_lnbwd.emulator.hal import Hal, Span, View
from iree_lnbwd.emulator.launch import Array, Binding, Fault, Launch, Unknown
from iree_lnbwd.emulator.memory import GlobalMemory
from iree_lnbwd.emulator.ptx import PtxExecutor
from iree_lnbwd.emulator.vm import Program, Steps, imported
from iree_lnbwd.vmfb.executables import exports

# iree/hal/buffer_view.h: iree_hal_element_types_t.
ELEMENT_TYPES: Mapping[str, int] = {
    "bool": 0x13000008,
    **{f"int{bits}": 0x11000000 | bits for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": 0x12000000 | bits for bits in (8, 16, 32, 64)},
    **{f"float{bits}": 0x21000000 | bits for bits in (16, 32, 64)},
    "bfloat16": 0x22000010,
}

Edit = Callable[[str], str]


def _ptx(code: bytes, edit: Edit) -> Executor:
    text = code.partition(b"\0")[0].decode(errors="replace")  # a C string
    return PtxExecutor(edit(text))


def _amdgcn(code: bytes, edit: Edit) -> Executor:
    return AmdgcnExecutor(edit(disassemble(code)))


def _amdgcn_as_far_as_known(code: bytes, edit: Edit) -> Executor:
    return AmdgcnExecutor(edit(disassemble(code, as_far_as_known=True)))


# The makers of executors for code, by an executable's format.
EXECUTORS: Mapping[str, Callable[[bytes, Edit], Executor]] = {
    "cuda-nvptx-fb": _ptx,
    "rocm-hsaco-fb": _amdgcn,
}

FORMATS: Mapping[str, str] = {"cuda": "cuda-nvptx-fb", "rocm": "rocm-hsaco-fb"}


# The same, of what is known of a code where something is not.
_AS_FAR_AS_KNOWN: Mapping[str, Callable[[bytes, Edit], Executor]] = {
    "cuda-nvptx-fb": _ptx,
    "rocm-hsaco-fb": _amdgcn_as_far_as_known,
}


def unsupported(vmfb: bytes, backend: str, *, edit: Edit = lambda text: text) -> list[Unknown]:
    """The unknown parts of a module: of its host program, and of its kernels. Nothing is run.

    Args:
        vmfb: Its bytes.
        backend: "cuda" or "rocm".
        edit: Changes the kernels' text before it is read.

    Returns:
        Each instruction, directive, and property of a launch; none if all are known. Data may still
        make a kernel fault.

    Raises:
        ValueError: There is no emulator for the backend, or an executable is damaged;
            PtxError where its text is no PTX.
        VmError: The module cannot be read.
    """
    if FORMATS.get(backend) not in EXECUTORS:
        raise ValueError(f"backend: there is no emulator for {backend!r}")
    format_ = FORMATS[backend]
    hal = Hal(GlobalMemory(), format_, lambda _, code: EXECUTORS[format_](code, edit), Steps())
    found = [
        Unknown("", 0, f"import {name}", "not known to the emulator")
        for name in imported(vmfb)
        if name not in hal.imports
    ]
    for export in exports(vmfb, format_):
        try:
            executor = _AS_FAR_AS_KNOWN[format_](export.code, edit)
            launch = Launch(
                kernel=export.kernel,
                workgroup_count=(1, 1, 1),
                workgroup_size=export.threads,
                subgroup_size=executor.subgroup_size(export.kernel),
                shared_bytes=export.shared_bytes,
                constants=(0,) * export.constants,
                bindings=tuple(Binding(0, 0, writable) for writable in export.writable),
            )
            found += executor.unknown(launch)
        except Fault as fault:
            found.append(Unknown(export.kernel, 0, "", fault.what))
    return found


class Module:
    """A module that is loaded on an emulated GPU.

    Attributes:
        memory: The GPU's memory.
        launches: Every dispatch so far, as the host program asked for it.
    """

    def __init__(
        self,
        vmfb: bytes,
        backend: str,
        *,
        lockstep: bool = False,
        edit: Edit = lambda text: text,
        progress: Callable[[Launch], None] = lambda launch: None,
    ) -> None:
        """Loads a module.

        Args:
            vmfb: Its bytes.
            backend: "cuda" or "rocm".
            lockstep: See `GlobalMemory`.
            edit: Changes the kernels' text before it is read: for tests that break it on purpose.
            progress: Is told of every dispatch before it runs.

        Raises:
            ValueError: There is no emulator for the backend, or an executable is damaged;
                PtxError where its text is no PTX.
            Fault: A code object is damaged.
            VmError: The module is not for this backend, or cannot be read.
        """
        if FORMATS.get(backend) not in EXECUTORS:
            raise ValueError(f"backend: there is no emulator for {backend!r}")
        self.memory = GlobalMemory(lockstep=lockstep)
        steps = Steps()
        hal = Hal(
            self.memory,
            FORMATS[backend],
            lambda format_, code: EXECUTORS[format_](code, edit),
            steps,
            progress,
        )
        self.launches = hal.launches
        self._program = Program(vmfb, hal.imports, steps)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of what can be called."""
        return self._program.functions

    def input(self, name: str, array: Array) -> View:
        """An argument that the module reads.

        Raises:
            ValueError: It is of a type that is not known.
            Fault: There is not so much memory.
        """
        type_ = _element_type(name, array.dtype)
        buffer = self.memory.allocate(name, array.nbytes, data=array)
        return View(Span(buffer, 0, buffer.nbytes), type_, array.shape)

    def output(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, write_once: bool = True
    ) -> View:
        """The caller's storage for a result or for scratch, which was never written.

        Args:
            name: For messages.
            shape: Its shape.
            dtype: Its element type.
            write_once: No byte of it may be written twice.

        Raises:
            ValueError: It is of a type that is not known.
            Fault: There is not so much memory.
        """
        type_ = _element_type(name, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self.memory.allocate(name, nbytes, write_once=write_once)
        return View(Span(buffer, 0, buffer.nbytes), type_, shape)

    def call(self, function: str, *arguments: View | float) -> tuple[Any, ...]:
        """Calls a function of the module.

        Args:
            function: Its name.
            arguments: In the order of its signature: tensors from `input` or `output`, and Python
                numbers as scalars.

        Returns:
            Its results, a ``View`` for each tensor, a Python number for each scalar. Integers are
            unsigned, because their types have no sign.

        Raises:
            Fault: A kernel did what no kernel may do.
            VmError: The arguments are not what the function takes, or the host program failed.
        """
        return self._program.call(function, *arguments)

    def read(self, view: View, dtype: np.dtype[Any]) -> Array:
        """The content of a result.

        Raises:
            Fault: Part of it was never written.
            ValueError: Its size does not match its shape and the type.
        """
        span = view.span
        if span.length != math.prod(view.shape) * dtype.itemsize:
            raise ValueError(
                f"view: expected {dtype} of shape {view.shape}, got {span.length} bytes"
            )
        data = self.memory.read(span.buffer, span.offset, span.length)
        return data.view(dtype).reshape(view.shape)


def _element_type(name: str, dtype: np.dtype[Any]) -> int:
    if dtype.name not in ELEMENT_TYPES:
        raise ValueError(f"{name}: expected one of {', '.join(ELEMENT_TYPES)}, got {dtype}")
    return ELEMENT_TYPES[dtype.name]
