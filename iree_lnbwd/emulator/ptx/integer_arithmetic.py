"""Arithmetic of integers and bits; of floats, what has the same names (`float_arithmetic`)."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator import floats, integers
from iree_lnbwd.emulator.ptx.float_arithmetic import float_arithmetic
from iree_lnbwd.emulator.ptx.types import (
    DTYPES,
    Array,
    Function,
    Semantics,
    UnknownInstructionError,
    bits_of,
    is_float,
)


def _twice(type_: str) -> str:
    return f"{type_[0]}{2 * bits_of(type_)}"


def _wide_product(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
    return a.astype(wide) * b.astype(wide)


def _high_product(a: Array, b: Array) -> Array:
    """The upper half of the product of two integers of one type."""
    if a.itemsize < 8:
        return (_wide_product(a, b) >> (8 * a.itemsize)).astype(a.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    a1, a0, b1, b0 = ua >> half, ua & low, ub >> half, ub & low
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # the product of what the signed bits are as unsigned numbers
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(a.dtype)


def mul(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The low or high half of a product, or all of it."""
    *how, type_ = modifiers
    if is_float(type_):
        return float_arithmetic(opcode, modifiers)
    products: dict[str, tuple[str, Function]] = {
        "lo": (type_, np.multiply),
        "hi": (type_, _high_product),
        "wide": (_twice(type_) if how == ["wide"] else "", _wide_product),
    }
    (kind,) = how
    result, function = products[kind]
    return Semantics(result, (type_, type_), function)


def mad(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A product and a sum."""
    if is_float(modifiers[-1]):  # "mad" of floats is "fma"
        return float_arithmetic("fma", modifiers)
    product = mul("mul", modifiers)

    def function(a: Array, b: Array, c: Array) -> Array:
        return product.function(a, b) + c

    return Semantics(product.result, (*product.sources, product.result), function)


def add_or_sub(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A sum or a difference."""
    *how, type_ = modifiers
    if is_float(type_):
        return float_arithmetic(opcode, modifiers)
    if how:
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_, type_), {"add": np.add, "sub": np.subtract}[opcode])


def div(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A quotient, also an approximate one of floats."""
    *how, type_ = modifiers
    if is_float(type_) and set(how) & {"approx", "full"}:  # within 2 ulp of what rn gives
        how = [word for word in how if word not in ("approx", "full")]
        return float_arithmetic("div", (*how, type_))
    return div_or_rem(opcode, modifiers)


def div_or_rem(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A quotient or a remainder."""
    *how, type_ = modifiers
    if is_float(type_):
        return float_arithmetic(opcode, modifiers)
    if how:
        raise UnknownInstructionError(opcode)

    def function(a: Array, b: Array) -> Array:
        # By zero: "machine-specific" in the manual, all ones on every GPU so far.
        safe = np.where(b == 0, b.dtype.type(1), b)
        if a.dtype.kind == "i":
            quotient = np.abs(a).view(f"u{a.itemsize}") // np.abs(safe).view(f"u{a.itemsize}")
            quotient = quotient.view(a.dtype)
            quotient = np.where((a < 0) != (safe < 0), -quotient, quotient)
        else:
            quotient = a // safe
        if opcode == "rem":
            return np.where(b == 0, a, a - quotient * safe)
        return np.where(b == 0, np.full(1, -1).astype(a.dtype), quotient)

    return Semantics(type_, (type_, type_), function)


def shift(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A shift of all bits; by too many, as by all of them."""
    (type_,) = modifiers
    bits = bits_of(type_)

    def function(a: Array, b: Array) -> Array:
        amount = np.minimum(b, bits - 1).astype(a.dtype)
        shifted = np.left_shift(a, amount) if opcode == "shl" else np.right_shift(a, amount)
        if a.dtype.kind == "i":  # more than all bits: the sign, as of all but one
            return shifted
        return np.where(b >= bits, a.dtype.type(0), shifted)

    return Semantics(type_, (type_, "u32"), function)


def logic(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """An operation bit by bit."""
    (type_,) = modifiers
    functions: dict[str, Function] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
    }
    return Semantics(type_, (type_,) if opcode == "not" else (type_, type_), functions[opcode])


def abs_or_neg(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """Without a sign, or with the other."""
    *how, type_ = modifiers
    sign_bits = {"f16": 0x8000, "bf16": 0x8000, "f16x2": 0x80008000, "bf16x2": 0x80008000}
    if type_ in sign_bits:
        sign = DTYPES[type_].type(sign_bits[type_])
        by_bits = {"neg": lambda a: a ^ sign, "abs": lambda a: a & ~sign}
        return Semantics(type_, (type_,), by_bits[opcode])
    functions: dict[str, Function] = {"neg": np.negative, "abs": np.abs}
    function = functions[opcode]
    if how == ["ftz"]:
        return Semantics(type_, (type_,), lambda a: floats.flush32(function(a)))
    if how:
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_,), function)


def copysign(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The second operand, with the sign of the first (PTX ISA, "copysign")."""
    if modifiers not in (("f32",), ("f64",)):
        raise UnknownInstructionError(opcode)
    (type_,) = modifiers
    return Semantics(type_, (type_, type_), lambda a, b: np.copysign(b, a))


def min_or_max(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The smaller or the larger of two."""
    *how, type_ = modifiers
    if type_ not in ("f32", "f64"):
        if how or is_float(type_):
            raise UnknownInstructionError(opcode)
        return Semantics(type_, (type_, type_), {"min": np.minimum, "max": np.maximum}[opcode])
    if set(how) - {"ftz", "NaN"}:
        raise UnknownInstructionError(opcode)

    def function(a: Array, b: Array) -> Array:
        if "ftz" in how:
            a, b = floats.flush32(a), floats.flush32(b)
        pick = np.minimum if opcode == "min" else np.maximum
        pick_number = np.fmin if opcode == "min" else np.fmax
        result = (pick if "NaN" in how else pick_number)(a, b)
        zeros = (a == 0) & (b == 0)  # -0 is less than +0 here
        signs = np.signbit(a) | np.signbit(b) if opcode == "min" else np.signbit(a) & np.signbit(b)
        result = np.where(zeros, np.where(signs, a.dtype.type(-0.0), a.dtype.type(0.0)), result)
        return floats.with_canonical_nan(result)

    return Semantics(type_, (type_, type_), function)


def _low_bits(count: Array) -> Array:
    """That many ones."""
    wide, bits = count.dtype.type, 8 * count.itemsize
    ones = wide((1 << bits) - 1)
    return np.where(count == 0, wide(0), ones >> (wide(bits) - np.maximum(count, wide(1))))


def bit_field(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """Takes bits out of a number, or puts them into one."""
    (type_,) = modifiers
    bits = bits_of(type_)
    if opcode == "bfe":

        def extract(a: Array, start: Array, length: Array) -> Array:
            unsigned = a.view(f"u{a.itemsize}")
            wide = unsigned.dtype.type
            begin = np.minimum(start & 255, bits).astype(unsigned.dtype)
            count = np.minimum(length & 255, bits).astype(unsigned.dtype)
            moved = np.where(begin >= bits, wide(0), unsigned >> np.minimum(begin, wide(bits - 1)))
            mask = _low_bits(np.minimum(count, wide(bits) - begin))
            last = np.minimum(begin.astype(np.int64) + count - 1, bits - 1)
            sign = unsigned >> np.maximum(last, 0).astype(unsigned.dtype) & wide(1)
            fills = (a.dtype.kind == "i") & (count > 0) & (sign == 1)
            return np.where(fills, moved & mask | ~mask, moved & mask).view(a.dtype)

        return Semantics(type_, (type_, "u32", "u32"), extract)

    def insert(a: Array, b: Array, start: Array, length: Array) -> Array:
        wide = a.dtype.type
        begin = np.minimum(start & 255, bits).astype(a.dtype)
        count = np.minimum(length & 255, bits).astype(a.dtype)
        by = np.minimum(begin, wide(bits - 1))
        mask = np.where(begin >= bits, wide(0), _low_bits(count) << by)
        return (b & ~mask) | (a << by & mask)

    return Semantics(type_, (type_, type_, "u32", "u32"), insert)


def prmt(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """Bytes of two registers, as a selector says."""
    (type_,) = modifiers  # the modes f4e and so on would be further modifiers

    def function(a: Array, b: Array, selector: Array) -> Array:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(np.broadcast_shapes(a.shape, selector.shape), np.uint32)
        for place in range(4):
            choice = (selector >> np.uint32(4 * place)).astype(np.uint64)
            byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(choice & np.uint64(8), sign, byte)
            result |= byte.astype(np.uint32) << np.uint32(8 * place)
        return result

    return Semantics(type_, (type_, type_, type_), function)


def funnel_shift(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """A word of two that are shifted together."""
    direction, mode, type_ = modifiers

    def function(a: Array, b: Array, c: Array) -> Array:
        amount = (c & np.uint32(31) if mode == "wrap" else np.minimum(c, 32)).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        if direction == "r":
            return (both >> amount).astype(np.uint32)
        return (both << amount >> np.uint64(32)).astype(np.uint32)

    if direction not in "lr" or mode not in ("wrap", "clamp") or type_ != "b32":
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_, type_, "u32"), function)


def count_bits(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """How many bits are set, or are zero above the highest."""
    (type_,) = modifiers

    def leading_zeros(a: Array) -> Array:
        return np.where(a == 0, bits_of(type_), integers.leading_zeros(a)).astype(np.uint32)

    functions: dict[str, Function] = {"popc": integers.population, "clz": leading_zeros}
    return Semantics("u32", (type_,), functions[opcode])


def reversed_bits(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The bits in the other order."""
    (type_,) = modifiers
    if type_ not in ("b32", "b64"):
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_,), integers.reverse_bits)


def find_bit(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The place of the highest bit that is not the sign; how far that is from the highest bit."""
    *how, type_ = modifiers
    if type_ not in ("u32", "s32", "u64", "s64") or how not in ([], ["shiftamt"]):
        raise UnknownInstructionError(opcode)
    above = integers.leading_zeros if type_[0] == "u" else integers.sign_bits

    def find(a: Array) -> Array:
        distance = above(a)
        place = distance if how else np.where(distance < 0, -1, bits_of(type_) - 1 - distance)
        return place.astype(np.int32).view(np.uint32)

    return Semantics("u32", (type_,), find)
