"""What a host program asks of a GPU in a call: kernels, fills and copies. Nothing of it is run.

The host program is IREE's bytecode. It runs in the emulator's interpreter, on memory that is only
addresses; so the number of rows and the size of tensors cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from iree_lnbwd.emulator.hal import Hal, Span, View
from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Launch, Unknown
from iree_lnbwd.emulator.memory import Buffer, GlobalMemory
from iree_lnbwd.emulator.module import ELEMENT_TYPES, FORMATS
from iree_lnbwd.emulator.vm import Program, Steps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import RowStrides, Strides
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb.description import Description
from iree_lnbwd.vmfb.raw_interface import values_of

_ROWS = (1, 5, 37, 1 << 10, 1 << 20)
_ALIGNMENT = 256


def asked(
    vmfb: bytes,
    described: Description,
    sets: Sets = matrix.SOME_SETS,
    more: Sequence[int] = (),
) -> dict[str, list[Any]]:
    """What calls of several numbers of rows ask for, in order, by the number of rows.

    Each kernel comes with its workgroups, constants and bindings: which argument or piece of
    scratch, from where, and how many bytes. Addresses and what the host program computes for itself
    do not show.

    Args:
        vmfb: The module.
        described: What it says of itself.
        sets: Those of the weight, where the spec has some.
        more: Further numbers of rows, where the spec has no fixed one.

    Raises:
        Fault, VmError: The host program failed.
    """
    spec = described.spec
    counts = (spec.rows,) if spec.rows is not None else _ROWS
    if spec.rows is None:
        counts = (*counts, *matrix.both_sides(spec, described.schedule), *more)
    return {str(rows): _of_call(vmfb, described, rows, sets) for rows in sorted(set(counts))}


def _of_call(vmfb: bytes, described: Description, rows: int, given: Sets) -> list[Any]:
    ledger, steps = _Ledger(), Steps()
    format_ = FORMATS[described.target.backend]
    hal = Hal(ledger, format_, lambda *_: _Idle(), steps, ledger.note_launch)
    program = Program(vmfb, hal.imports, steps)
    views = []
    sets = given.for_rows(rows) if described.spec.weight_sets else None
    strides = some_strides(described.spec) if described.spec.strided_rows else None
    for argument in described.spec.arguments:
        dtype, shape = DTYPES[argument.dtype].numpy, argument.dims(rows, sets, strides)
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = ledger.allocate(f"argument {argument.name}", nbytes)
        views.append(View(Span(buffer, 0, nbytes), ELEMENT_TYPES[dtype.name], shape))
    program.call(described.spec.op, *views, *values_of(described.spec, rows, sets, strides))
    return ledger.asked


def some_strides(spec: NormSpec) -> Strides:
    """Other ones for each argument, in runs of three rows."""
    count, each = 3, spec.columns
    strided = [argument.name for argument in spec.arguments if argument.is_strided]
    given = (
        (name, RowStrides(_ALIGNMENT * place + 2 * count * each, 2 * each))
        for place, name in enumerate(strided)
    )
    return Strides(count, each, tuple(given))


class _Ledger(GlobalMemory):
    """Memory without content, which notes what the host does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self._all: list[Buffer] = []
        self._end = _ALIGNMENT

    def allocate(
        self, name: str, nbytes: int, *, data: Array | None = None, write_once: bool = False
    ) -> Buffer:
        """A buffer of addresses; scratch is numbered in its order."""
        made = super().allocate(name, 0, write_once=write_once)
        made.address, made.nbytes = self._end, nbytes
        self._end += (nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        self._all.append(made)
        return made

    def note_launch(self, launch: Launch) -> None:
        """A kernel."""
        places = [[*self._place(b.address), b.nbytes] for b in launch.bindings]
        self.asked.append(
            [launch.kernel, list(launch.workgroup_count), list(launch.constants), places]
        )

    def begin(self, launch: Launch) -> None:
        """Nothing of a kernel is checked."""

    def barrier(self) -> None:
        """Nothing is checked against what comes after it."""

    def release(self, buffer: Buffer) -> None:
        """It keeps its addresses."""

    def fill(self, buffer: Buffer, offset: int, nbytes: int, pattern: Bytes) -> None:
        """A fill by the host."""
        self.asked.append(["fill", buffer.name, offset, nbytes, pattern.tobytes().hex()])

    def write(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """A copy by the host."""
        self.asked.append(["write", buffer.name, offset, data.tobytes().hex()])

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        """There is no content: a copy shows where it comes from."""
        self.asked.append(["read", buffer.name, offset, nbytes])
        return np.zeros(0, np.uint8)

    def _place(self, address: int) -> tuple[str, int]:
        for buffer in self._all:
            if buffer.address <= address <= buffer.address + buffer.nbytes:
                return buffer.name, address - buffer.address
        raise Fault(f"no buffer at {address:#x}")


class _Idle:
    """Kernels that do nothing."""

    def subgroup_size(self, kernel: str) -> int:
        """Nothing asks which."""
        return 1

    def unknown(self, launch: Launch) -> list[Unknown]:
        """Nothing is run."""
        return []

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        """Nothing is run."""
