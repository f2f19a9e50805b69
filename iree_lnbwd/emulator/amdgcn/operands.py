"""Operands: registers, constants and their modifiers, read and written as a type.

A type is a letter and a width: "u32", "i64", "f16", ...; "b32" is 32 bits that no arithmetic looks
at. "mask" is a bit for each lane, in scalar registers, and reads as booleans.

Decoding an operand makes a function of a `Group` that reads it. Scalar instructions see [waves],
vector instructions [waves, lanes], or [waves, 1] where all lanes have the same.

Source: LLVM's AMDGPU guide, "Syntax of AMDGPU Instruction Operands"; the ISA documents' tables of
inline constants.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.waves import Group, Register, register
from iree_lnbwd.emulator.launch import Array

Reader = Callable[[Group], Array]

_NUMPY: dict[str, type[np.generic]] = {
    "u16": np.uint16,
    "i16": np.int16,
    "f16": np.float16,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "i64": np.int64,
    "f64": np.float64,
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
}
_UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {16: np.uint16, 32: np.uint32, 64: np.uint64}
_FLOAT_CONSTANTS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0")
_INVERSE_TWO_PI = "0.15915494"
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
_FLOAT_FORMAT = {16: "<e", 32: "<f", 64: "<d"}


def width(kind: str) -> int:
    """Bits of a type."""
    return int(kind[1:])


def numpy_type(kind: str) -> type[np.generic]:
    """What NumPy calls a type."""
    return _NUMPY[kind]


@dataclass(frozen=True)
class Operand:
    """What an operand says, before it is known how it is read.

    Attributes:
        text: As it stands.
        register: What it names; None for a constant.
        half: 1 for the upper 16 bits ("v1.h"), 0 for the lower ("v1.l"), None where not said.
        negated, absolute: Its modifiers, for floating point.
    """

    text: str
    register: Register | None
    half: int | None = None
    negated: bool = False
    absolute: bool = False


def operand(instruction: Instruction, text: str) -> Operand:
    """Parses an operand.

    Raises:
        Fault: It is not understood.
    """
    inner, negated, absolute = text, False, False
    if found := re.fullmatch(r"neg\((.*)\)", inner):
        inner, negated = found[1], True
    elif inner.startswith("-") and not _INTEGER.match(inner) and inner not in _FLOAT_CONSTANTS:
        inner, negated = inner[1:], True
    if found := re.fullmatch(r"\|(.*)\||abs\((.*)\)", inner):
        inner, absolute = found[1] or found[2], True
    half = None
    if inner.endswith((".l", ".h")):
        half = int(inner.endswith(".h"))
        inner = inner[:-2]
    found_register = register(inner)
    if found_register is None and _bits(inner, "b32") is None:
        raise instruction.fault(f"operand not understood: {text}")
    return Operand(inner, found_register, half, negated, absolute)


def is_literal(text: str) -> bool:
    """Whether it is an integer that takes a word of its own behind the instruction."""
    return _INTEGER.match(text) is not None and not -16 <= int(text, 0) <= 64


def _bits(text: str, kind: str) -> int | None:
    """The bits of a constant, read as a type; None where it is none."""
    bits = width(kind)
    if _INTEGER.match(text):
        value = int(text, 0)
        inline = not is_literal(text)
        if kind == "f64" and not inline:
            return (value & 0xFFFFFFFF) << 32  # a literal is the upper half
        if bits == 64 and not inline and not 0 <= value < 1 << 31:
            return None  # the documents differ on whether such a literal has a sign
        return value & ((1 << bits) - 1)
    if text in _FLOAT_CONSTANTS or text.startswith(_INVERSE_TWO_PI):
        form = _FLOAT_FORMAT[bits]
        return int.from_bytes(struct.pack(form, float(text)), "little")
    return None


def constant(instruction: Instruction, text: str, kind: str) -> Array:
    """A constant as an array of one element.

    Raises:
        Fault: It is no constant.
    """
    bits = _bits(text, kind)
    if bits is None:
        raise instruction.fault(f"expected a constant, got {text}")
    return np.array([bits], _UNSIGNED[width(kind)]).view(_NUMPY[kind])


def scalar_reader(instruction: Instruction, text: str, kind: str) -> Reader:
    """Reads an operand of a scalar instruction: [waves]."""
    what = operand(instruction, text)
    if what.negated or what.absolute or what.half is not None:
        raise instruction.fault(f"a scalar operand takes no modifier: {text}")
    if what.register is None:
        value = constant(instruction, what.text, kind)
        return lambda group: value
    if what.register.vector:
        raise instruction.fault(f"expected a scalar operand, got {text}")
    return _scalars(instruction, what.register, kind)


def _scalars(instruction: Instruction, source: Register, kind: str, half: int = 0) -> Reader:
    index, dtype = source.index, _NUMPY[kind]
    _check_count(instruction, source, kind)
    if width(kind) == 64:
        return lambda group: _joined(group.scalar(index), group.scalar(index + 1)).view(dtype)
    if width(kind) == 16:
        shift = np.uint32(16 * half)
        return lambda group: (group.scalar(index) >> shift).astype(np.uint16).view(dtype)
    return lambda group: group.scalar(index).view(dtype)


def _check_count(instruction: Instruction, source: Register, kind: str) -> None:
    expected = max(1, width(kind) // 32)
    if source.count != expected:
        raise instruction.fault(f"{kind} takes {expected} registers, got {source.count}")


def _joined(low: Array, high: Array) -> Array:
    result: Array = low | high.astype(np.uint64) << np.uint64(32)
    return result


def vector_reader(
    instruction: Instruction, text: str, kind: str, *, half: int | None = None
) -> Reader:
    """Reads an operand of a vector instruction: [waves, lanes] or [waves, 1].

    Args:
        instruction: For messages.
        text: The operand.
        kind: The type to read it as.
        half: Which 16 bits of a 32-bit register, where the operand itself does not say.
    """
    what = operand(instruction, text)
    if (what.negated or what.absolute) and kind[0] not in "fb":
        raise instruction.fault(f"{kind} takes no floating-point modifier: {text}")
    read = _plain_reader(instruction, what, kind, half)
    return _modified(read, what, kind)


def mask_reader(instruction: Instruction, text: str) -> Reader:
    """Reads a lane mask: booleans [waves, lanes]."""
    what = operand(instruction, text)
    if what.register is None:
        bits = constant(instruction, what.text, "i64")
        if bits[0] not in (0, -1):
            raise instruction.fault(f"a lane mask cannot be {text}")
        value = np.array([[bits[0] == -1]])
        return lambda group: value
    if what.register.vector:
        raise instruction.fault(f"expected a lane mask in scalar registers, got {text}")
    index = what.register.index
    return lambda group: group.mask(index)


def _plain_reader(instruction: Instruction, what: Operand, kind: str, half: int | None) -> Reader:
    source, dtype = what.register, _NUMPY[kind]
    if source is None:
        value = constant(instruction, what.text, kind)[None]
        if half and value[0, 0] != 0:
            raise instruction.fault(f"the upper half of a constant: {what.text}")
        return lambda group: value
    if not source.vector:
        read = _scalars(instruction, source, kind, half or 0)
        return lambda group: read(group)[:, None]
    _check_count(instruction, source, kind)
    index = source.index
    if width(kind) == 64:
        return lambda group: _joined(group.vector(index), group.vector(index + 1)).view(dtype)
    if width(kind) == 32:
        return lambda group: group.vector(index).view(dtype)
    upper = what.half if what.half is not None else half
    shift = np.uint32(16 if upper else 0)
    return lambda group: (group.vector(index) >> shift).astype(np.uint16).view(dtype)


def _modified(read: Reader, what: Operand, kind: str) -> Reader:
    if not what.negated and not what.absolute:
        return read
    unsigned = _UNSIGNED[width(kind)]
    sign = unsigned(1 << (width(kind) - 1))
    keep = unsigned(~sign) if what.absolute else unsigned(~unsigned(0))
    flip = sign if what.negated else unsigned(0)
    dtype = _NUMPY[kind]
    return lambda group: (read(group).view(unsigned) & keep ^ flip).view(dtype)


def destination(instruction: Instruction, text: str, *, vector: bool, kind: str = "") -> Operand:
    """Parses an operand that is written.

    Args:
        instruction: For messages.
        text: The operand.
        vector: It is in vector registers.
        kind: The type of what is written; empty for any number of registers.

    Raises:
        Fault: It is no register of that kind, or not as many as the type takes.
    """
    what = operand(instruction, text)
    if what.register is None or what.register.vector != vector or what.negated or what.absolute:
        expected = "a vector" if vector else "a scalar"
        raise instruction.fault(f"expected {expected} register to write, got {text}")
    if kind:
        _check_count(instruction, what.register, kind)
    return what


def write_scalar(group: Group, target: Register, kind: str, value: Array) -> None:
    """Writes the result of a scalar instruction: [waves]."""
    bits = value.view(_UNSIGNED[width(kind)])
    if width(kind) == 64:
        group.set_scalar(target.index, bits.astype(np.uint32))
        group.set_scalar(target.index + 1, (bits >> np.uint64(32)).astype(np.uint32))
    else:
        group.set_scalar(target.index, bits)


def write_vector(
    group: Group,
    target: Operand,
    kind: str,
    value: Array,
    where: Array | None,
    *,
    half: int | None = None,
) -> None:
    """Writes the result of a vector instruction: [waves, lanes] or [waves, 1].

    Args:
        group: Where.
        target: A vector register.
        kind: What the value is.
        value: To be written.
        where: The lanes; None for those that EXEC has.
        half: Which 16 bits a 16-bit value goes to, the others are kept; None: the lower, and the
            others become 0.
    """
    assert target.register is not None
    index = target.register.index
    bits = value.view(_UNSIGNED[width(kind)])
    if width(kind) == 64:
        group.set_vector(index, bits.astype(np.uint32), where)
        group.set_vector(index + 1, (bits >> np.uint64(32)).astype(np.uint32), where)
    elif width(kind) == 32:
        group.set_vector(index, bits, where)
    else:
        half = target.half if target.half is not None else half
        words = bits.astype(np.uint32)
        if half is not None:
            kept = group.waves.vectors[index][group.index]
            words = kept & np.uint32(0xFFFF0000) | words
            if half:
                words = kept & np.uint32(0xFFFF) | bits.astype(np.uint32) << np.uint32(16)
        group.set_vector(index, words, where)
