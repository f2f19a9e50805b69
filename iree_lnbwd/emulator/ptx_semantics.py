"""The results of PTX instructions without side effects, as functions of arrays over lanes.

`find` takes an opcode with its modifiers apart and says which types its operands have and what it
computes from them. Source: NVIDIA, "Parallel Thread Execution ISA", chapter 9.7. Types are PTX's
("s32", "f32", "b16", ...); a function gets one array for each source operand, of the NumPy type of
`DTYPES`, and returns one of its result's.

Arithmetic rounds to nearest even and keeps subnormals, but for ``.ftz``. NaN results are NVIDIA's
canonical NaN. Instructions with ``.approx`` are computed as exactly as NumPy does; hardware may be
off by the ulps that the manual states, so their results are not comparable bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iree_lnbwd.emulator import floats, integers

Array = Any  # over lanes, of a type of DTYPES; NumPy's own types lose track in such arithmetic

# f16 and bf16 stay bits: NumPy has no bf16, and its f16 arithmetic is f32's, rounded.
DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    **{f"{kind}8": np.dtype(np.uint8) for kind in "bu"},
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
}

Function = Callable[..., Array]


class UnknownInstructionError(ValueError):
    """An instruction, or a form of one, that is not implemented."""


@dataclass(frozen=True)
class Semantics:
    """What an instruction computes.

    Attributes:
        result: Type of the result.
        sources: Types of the source operands.
        function: From sources to result.
    """

    result: str
    sources: tuple[str, ...]
    function: Function


def find(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The semantics of an instruction.

    Raises:
        UnknownInstructionError: Naming it.
    """
    finder = _FINDERS.get(opcode)
    if finder is None or not modifiers:
        raise UnknownInstructionError(".".join((opcode, *modifiers)))
    try:
        found = finder(opcode, modifiers)
    except (KeyError, ValueError) as error:
        raise UnknownInstructionError(".".join((opcode, *modifiers))) from error
    if {found.result, *found.sources} - DTYPES.keys():
        raise UnknownInstructionError(".".join((opcode, *modifiers)))
    return found


# Integers.


def _is_float(type_: str) -> bool:
    return type_.startswith(("f", "bf"))


def _bits(type_: str) -> int:
    return DTYPES[type_].itemsize * 8


def _twice(type_: str) -> str:
    return f"{type_[0]}{2 * _bits(type_)}"


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


def _mul(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if _is_float(type_):
        return _float_arithmetic(opcode, modifiers)
    products: dict[str, tuple[str, Function]] = {
        "lo": (type_, np.multiply),
        "hi": (type_, _high_product),
        "wide": (_twice(type_) if how == ["wide"] else "", _wide_product),
    }
    (kind,) = how
    result, function = products[kind]
    return Semantics(result, (type_, type_), function)


def _mad(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    if _is_float(modifiers[-1]):  # "mad" of floats is "fma"
        return _float_arithmetic("fma", modifiers)
    product = _mul("mul", modifiers)

    def function(a: Array, b: Array, c: Array) -> Array:
        return product.function(a, b) + c

    return Semantics(product.result, (*product.sources, product.result), function)


def _add_or_sub(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if _is_float(type_):
        return _float_arithmetic(opcode, modifiers)
    if how:
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_, type_), {"add": np.add, "sub": np.subtract}[opcode])


def _div_or_rem(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if _is_float(type_):
        return _float_arithmetic(opcode, modifiers)
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


def _shift(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    bits = _bits(type_)

    def function(a: Array, b: Array) -> Array:
        amount = np.minimum(b, bits - 1).astype(a.dtype)
        shifted = np.left_shift(a, amount) if opcode == "shl" else np.right_shift(a, amount)
        if a.dtype.kind == "i":  # more than all bits: the sign, as of all but one
            return shifted
        return np.where(b >= bits, a.dtype.type(0), shifted)

    return Semantics(type_, (type_, "u32"), function)


def _logic(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    functions: dict[str, Function] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
    }
    return Semantics(type_, (type_,) if opcode == "not" else (type_, type_), functions[opcode])


def _abs_or_neg(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
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


def _copysign(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The second operand, with the sign of the first (PTX ISA, "copysign")."""
    if modifiers not in (("f32",), ("f64",)):
        raise UnknownInstructionError(opcode)
    (type_,) = modifiers
    return Semantics(type_, (type_, type_), lambda a, b: np.copysign(b, a))


def _min_or_max(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if type_ not in ("f32", "f64"):
        if how or _is_float(type_):
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


def _bit_field(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    bits = _bits(type_)
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


def _prmt(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
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


def _funnel_shift(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
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


def _count_bits(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers

    def leading_zeros(a: Array) -> Array:
        return np.where(a == 0, _bits(type_), integers.leading_zeros(a)).astype(np.uint32)

    functions: dict[str, Function] = {"popc": integers.population, "clz": leading_zeros}
    return Semantics("u32", (type_,), functions[opcode])


def _reversed_bits(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    if type_ not in ("b32", "b64"):
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_,), integers.reverse_bits)


def _find_bit(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The place of the highest bit that is not the sign; how far that is from the highest bit."""
    *how, type_ = modifiers
    if type_ not in ("u32", "s32", "u64", "s64") or how not in ([], ["shiftamt"]):
        raise UnknownInstructionError(opcode)
    above = integers.leading_zeros if type_[0] == "u" else integers.sign_bits

    def find(a: Array) -> Array:
        distance = above(a)
        place = distance if how else np.where(distance < 0, -1, _bits(type_) - 1 - distance)
        return place.astype(np.int32).view(np.uint32)

    return Semantics("u32", (type_,), find)


# Floats.


def _float_arithmetic(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if how[-1:] == ["f32"]:
        return _mixed_arithmetic(opcode, how[:-1], type_)
    if set(how) - {"rn", "ftz", "sat"}:
        raise UnknownInstructionError(opcode)
    count = 3 if opcode == "fma" else 2
    plain = _ARITHMETIC[type_, opcode]

    def function(*operands: Array) -> Array:
        if "ftz" in how and type_ == "f32":
            return floats.flush32(plain(*map(floats.flush32, operands)))
        return plain(*operands)

    def saturated(*operands: Array) -> Array:
        result = function(*operands)
        return np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)

    if "sat" in how and type_ != "f32":
        raise UnknownInstructionError(opcode)
    return Semantics(type_, (type_,) * count, saturated if "sat" in how else function)


def _mixed_arithmetic(opcode: str, how: Sequence[str], half: str) -> Semantics:
    """With the last operand and the result in f32, what is before it in two-byte floats."""
    widen = {"f16": _f16_to_f32, "bf16": floats.from_bf16}.get(half)
    if widen is None or opcode not in ("add", "sub", "fma") or set(how) - {"rn"}:
        raise UnknownInstructionError(opcode)
    plain = _ARITHMETIC["f32", opcode]

    def function(*operands: Array) -> Array:
        return plain(*map(widen, operands[:-1]), operands[-1])

    return Semantics("f32", (*(half,) * (2 if opcode == "fma" else 1), "f32"), function)


def _canonical(function: Function) -> Function:
    return lambda *operands: floats.with_canonical_nan(function(*operands))


def _half(to_f32: Function, from_f32: Function, function: Function) -> Function:
    """Arithmetic of two-byte floats, through f32.

    It has more than twice their digits, so that +, - and * round right in two steps (Figueroa,
    "When is double rounding innocuous?", 1995).
    """
    return lambda *operands: from_f32(function(*map(to_f32, operands)))


def _f16_to_f32(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def _fma_half(a: Array, b: Array, c: Array) -> Array:
    """Of two-byte floats in f32: rounded to odd, so that the rounding to come is the only one."""
    total = floats.sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64))
    kept = total.astype(np.float32)
    inexact = np.isfinite(total) & (kept.astype(np.float64) != total)
    too_far = np.abs(kept.astype(np.float64)) > np.abs(total)
    cut = np.where(too_far, kept.view(np.uint32) - np.uint32(1), kept.view(np.uint32))
    return np.where(inexact, cut | np.uint32(1), kept.view(np.uint32)).view(np.float32)


def _by_halves(function: Function, half: str) -> Function:
    """Of both halves of a register, each of the type ``half``."""
    dtype = DTYPES[half]
    bits, word = f"u{dtype.itemsize}", np.dtype(f"u{2 * dtype.itemsize}").type
    width = word(8 * dtype.itemsize)

    def both(*operands: Array) -> Array:
        low = function(*(o.astype(bits).view(dtype) for o in operands))
        high = function(*((o >> width).astype(bits).view(dtype) for o in operands))
        return low.view(bits).astype(word) | high.view(bits).astype(word) << width

    return both


def _arithmetic() -> dict[tuple[str, str], Function]:
    simple: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    table: dict[tuple[str, str], Function] = {}
    for type_ in ("f32", "f64"):
        for name in simple:
            table[type_, name] = _canonical(simple[name])
        table[type_, "div"] = _canonical(np.divide)
    table["f32", "fma"] = _canonical(floats.fma32)
    table["f64", "fma"] = _canonical(floats.fma64)
    for type_, to_f32, from_f32 in (
        ("f16", _f16_to_f32, floats.to_f16),
        ("bf16", floats.from_bf16, floats.to_bf16),
    ):
        for name in (*simple, "fma"):
            table[type_, name] = _half(to_f32, from_f32, simple.get(name, _fma_half))
            table[f"{type_}x2", name] = _by_halves(table[type_, name], type_)
    for name in (*simple, "fma"):
        table["f32x2", name] = _by_halves(table["f32", name], "f32")
    return table


_ARITHMETIC = _arithmetic()


def _one_operand(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if type_ not in ("f32", "f64") or set(how) - {"rn", "approx", "ftz"}:
        raise UnknownInstructionError(opcode)
    functions: dict[str, Function] = {
        "rcp": lambda a: a.dtype.type(1) / a,
        "sqrt": np.sqrt,
        "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
        "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
        "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype),
    }
    function = _canonical(functions[opcode])
    if "ftz" in how:
        flushed = function
        return Semantics(type_, (type_,), lambda a: floats.flush32(flushed(floats.flush32(a))))
    return Semantics(type_, (type_,), function)


def _div(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, type_ = modifiers
    if _is_float(type_) and set(how) & {"approx", "full"}:  # within 2 ulp of what rn gives
        how = [word for word in how if word not in ("approx", "full")]
        return _float_arithmetic("div", (*how, type_))
    return _div_or_rem(opcode, modifiers)


# Comparisons and selections.

_COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _float_comparison(name: str) -> Function:
    if name == "num":
        return lambda a, b: ~_unordered(a, b)
    if name == "nan":
        return _unordered
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        ordered = _COMPARISONS[name[:2]]
        return lambda a, b: ordered(a, b) | _unordered(a, b)
    ordered = _COMPARISONS[name]
    return lambda a, b: ordered(a, b) & ~_unordered(a, b)  # also "ne" is false of NaN


def _setp(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    name, *how, type_ = modifiers
    is_float = _is_float(type_)
    if is_float and type_ not in ("f32", "f64"):
        raise UnknownInstructionError(opcode)
    plain = _float_comparison(name) if is_float else _COMPARISONS[name]
    flushes = "ftz" in how

    def compare(a: Array, b: Array) -> Array:
        return plain(floats.flush32(a), floats.flush32(b)) if flushes else plain(a, b)

    how = [word for word in how if word != "ftz"]
    if not how:
        return Semantics("pred", (type_, type_), compare)
    (logic,) = how
    combinations: dict[str, Function] = {
        "and": np.logical_and,
        "or": np.logical_or,
        "xor": np.logical_xor,
    }
    combine = combinations[logic]
    return Semantics(
        "pred", (type_, type_, "pred"), lambda a, b, other: combine(compare(a, b), other)
    )


def _selp(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    return Semantics(type_, (type_, type_, "pred"), lambda a, b, chosen: np.where(chosen, a, b))


def _mov(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    return Semantics(type_, (type_,), lambda a: a)


# Conversions.

_ROUNDINGS: dict[str, Function] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_NARROW = ("f16", "bf16")


def _cvt(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    *how, to, source = modifiers
    if to in ("f16x2", "bf16x2"):
        if how != ["rn"] or source != "f32":
            raise UnknownInstructionError(opcode)
        narrow = floats.to_f16 if to == "f16x2" else floats.to_bf16

        def pack(high: Array, low: Array) -> Array:
            upper = narrow(high).astype(np.uint32) << np.uint32(16)
            return upper | narrow(low).astype(np.uint32)

        return Semantics(to, (source, source), pack)
    if set(how) - {"rn", "ftz", "sat", *_ROUNDINGS}:
        raise UnknownInstructionError(opcode)
    return Semantics(to, (source,), _conversion(to, source, tuple(how)))


def _conversion(to: str, source: str, how: tuple[str, ...]) -> Function:
    widen = {"f16": _f16_to_f32, "bf16": floats.from_bf16}.get(source, lambda a: a)
    rounding = next((word for word in how if word in _ROUNDINGS), "")

    def function(a: Array) -> Array:
        values = widen(a)
        if "ftz" in how and values.dtype == np.float32:
            values = floats.flush32(values)
        if rounding:
            values = _ROUNDINGS[rounding](values)
        if _is_float(to):
            return _to_float(values, to, how)
        if values.dtype.kind == "f":
            return _to_integer(values, DTYPES[to])
        if "sat" in how:
            limits = np.iinfo(DTYPES[to])
            # Through objects: no NumPy type holds both int64 and uint64.
            values = np.clip(values.astype(object), int(limits.min), int(limits.max))
        return values.astype(DTYPES[to])

    if source in ("f32", "f64", *_NARROW) and not _is_float(to) and not rounding:
        raise UnknownInstructionError("cvt")
    return function


def _to_float(values: Array, to: str, how: tuple[str, ...]) -> Array:
    """Rounded once to nearest even."""
    if "sat" in how:
        values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)
    if to == "f16":
        return floats.to_f16(values if values.dtype.kind == "f" else values.astype(np.float64))
    if to == "bf16":
        if values.dtype != np.float32:
            raise UnknownInstructionError("cvt")
        return floats.to_bf16(values)
    result = floats.with_canonical_nan(values.astype(DTYPES[to]))
    return floats.flush32(result) if "ftz" in how and to == "f32" else result


def _to_integer(values: Array, dtype: np.dtype[Any]) -> Array:
    """Beyond the range: its end; NaN: 0 (and the largest of 64-bit types: the manual)."""
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max) + 1
    inside = (values >= low) & (values < high)
    result = np.where(inside, values, 0).astype(dtype)
    result[values >= high] = limits.max
    result[values < low] = limits.min
    if dtype.itemsize == 8:
        result[np.isnan(values)] = limits.min if dtype.kind == "i" else limits.max
    return result


_FINDERS: dict[str, Callable[[str, tuple[str, ...]], Semantics]] = {
    "add": _add_or_sub,
    "sub": _add_or_sub,
    "mul": _mul,
    "mad": _mad,
    "fma": _float_arithmetic,
    "div": _div,
    "rem": _div_or_rem,
    "min": _min_or_max,
    "max": _min_or_max,
    "abs": _abs_or_neg,
    "neg": _abs_or_neg,
    "copysign": _copysign,
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _logic,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel_shift,
    "bfe": _bit_field,
    "bfi": _bit_field,
    "prmt": _prmt,
    "popc": _count_bits,
    "clz": _count_bits,
    "brev": _reversed_bits,
    "bfind": _find_bit,
    "rcp": _one_operand,
    "sqrt": _one_operand,
    "rsqrt": _one_operand,
    "ex2": _one_operand,
    "lg2": _one_operand,
    "setp": _setp,
    "selp": _selp,
    "mov": _mov,
    "cvt": _cvt,
}
