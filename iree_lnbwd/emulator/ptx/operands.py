"""Operands of PTX instructions: registers, constants, addresses."""

from __future__ import annotations

import re

import numpy as np

from iree_lnbwd.emulator.launch import Array
from iree_lnbwd.emulator.ptx.parser import Kernel, PtxError
from iree_lnbwd.emulator.ptx.parser import address as address_parts
from iree_lnbwd.emulator.ptx.threads import Reader, Selection, Threads, Writer
from iree_lnbwd.emulator.ptx.types import DTYPES

_IMMEDIATE = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|cluster_ctarank|cluster_nctarank)$"
)


class Operands:
    """The operands of a kernel's instructions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._used: dict[str, np.dtype[np.generic]] = {}

    @property
    def register_bytes(self) -> int:
        """The bytes of all registers that the decoded instructions name, in one thread."""
        return sum(dtype.itemsize for dtype in self._used.values())

    def reader(self, operand: str, type_: str) -> Reader:
        """The values of a source operand, of a type."""
        dtype = DTYPES[type_]
        if _SPECIAL.match(operand):
            name = operand[1:]
            return lambda threads, to: threads.special[name][to].astype(dtype)
        if operand.startswith("%") or operand in self.kernel.registers:
            declared = self.dtype_of(operand)
            if declared == dtype:
                return lambda threads, to: threads.register(operand, declared)[to]
            if np.bool_ in (declared, dtype) or declared.itemsize < dtype.itemsize:
                raise PtxError(f"{operand} is narrower than {type_}")
            if declared.itemsize == dtype.itemsize:
                return lambda threads, to: threads.register(operand, declared)[to].view(dtype)
            narrow = f"u{dtype.itemsize}"  # the lower bits of a wider register

            def read_lower(threads: Threads, to: Selection) -> Array:
                return threads.register(operand, declared)[to].astype(narrow).view(dtype)

            return read_lower
        if operand.startswith("!"):
            inner = self.reader(operand[1:], type_)
            return lambda threads, to: ~inner(threads, to)
        if (variable := self.kernel.variables.get(operand)) is not None and variable.content:
            return lambda threads, to: np.array([threads.symbols[operand]], np.uint64).view(dtype)
        constant = self._constant(operand, dtype)
        return lambda threads, to: constant

    def _constant(self, operand: str, dtype: np.dtype[np.generic]) -> Array:
        if operand in self.kernel.variables:
            return np.array([self._symbol(operand)], np.int64).astype(dtype)
        if _FLOAT.match(operand):
            bits = np.array([int(operand[2:], 16)], f"u{(len(operand) - 2) // 2}")
            if bits.itemsize != dtype.itemsize:
                raise PtxError(f"expected a constant of {dtype.itemsize} bytes, got {operand}")
            return bits.view(dtype)
        if not _IMMEDIATE.match(operand):
            raise PtxError(f"expected an operand, got {operand}")
        number = int(operand.rstrip("U"), 0)
        if not -(1 << 63) <= number < 1 << 64:
            raise PtxError(f"expected a number of 64 bits, got {operand}")
        if dtype == np.bool_:
            return np.array([number != 0])
        mask = (1 << dtype.itemsize * 8) - 1
        return np.array([number & mask], f"u{dtype.itemsize}").view(dtype)

    def _symbol(self, name: str) -> int:
        """Address of a variable in its state space; extern shared memory begins after the rest."""
        variable = self.kernel.variables[name]
        if variable.space == "shared" and not variable.nbytes:
            return self.kernel.nbytes["shared"]
        return variable.offset

    def writer(self, operand: str) -> Writer:
        """Where a result goes; nowhere for ``_``."""
        if operand == "_":
            return lambda threads, to, values: None
        dtype = self.dtype_of(operand)
        return lambda threads, to, values: threads.write(operand, dtype, to, values)

    def dtype_of(self, register: str) -> np.dtype[np.generic]:
        """The unsigned type that a register is kept as."""
        if register not in self._used:
            declared = self.kernel.type_of(register)
            if declared not in DTYPES:
                raise PtxError(f"{register} is of the type {declared}, which is not known")
            dtype = DTYPES[declared]
            self._used[register] = dtype if dtype == np.bool_ else np.dtype(f"u{dtype.itemsize}")
        return self._used[register]

    def address(self, operand: str) -> Reader:
        """Addresses as int64."""
        base, offset = address_parts(operand)
        if base.startswith("%"):
            dtype = self.dtype_of(base)
            if dtype.itemsize == 8:
                return lambda threads, to: threads.register(base, dtype)[to].view(np.int64) + offset
            # 32-bit addresses of shared memory: the sum wraps around.
            low = np.uint32(offset & 0xFFFFFFFF)
            return lambda threads, to: (threads.register(base, dtype)[to] + low).astype(np.int64)
        start = self.reader(base, "s64")
        return lambda threads, to: start(threads, to) + offset
