"""The results of vector instructions, lane by lane.

Sources: AMD's "CDNA3" and "RDNA3 Instruction Set Architecture" documents, chapters on vector ALU
instructions. Where they leave a result open, the comment says what is done here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from iree_lnbwd.emulator.amdgcn.floats import fma_f32, fma_f64, maximum, minimum
from iree_lnbwd.emulator.amdgcn.opcodes import WITH_A_CONSTANT
from iree_lnbwd.emulator.floats import flush32
from iree_lnbwd.emulator.integers import (
    leading_zeros,
    population,
    reverse_bits,
    sign_bits,
    trailing_zeros,
)
from iree_lnbwd.emulator.launch import Array

_U32, _U64, _F32 = np.uint32, np.uint64, np.float32


@dataclass(frozen=True)
class Vector:
    """One instruction's arithmetic.

    Attributes:
        results: Types of what it writes, in the order of its operands.
        sources: Types of what it reads.
        compute: From arrays of the sources to one of the result, or a tuple of them.
        accumulates: The destination is its last source as well.
        selects: It takes one of its first two sources, by a mask.
        low_apart: The lower word of its 64-bit result depends on nothing but lower words.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]
    accumulates: bool = False
    selects: bool = False
    low_apart: bool = False


def _op(results: str, sources: str, compute: Callable[..., Any]) -> Vector:
    return Vector(tuple(results.split()), tuple(sources.split()), compute)


def _wide(value: Array) -> Array:
    return value.astype(_U64)


def _add_carry(a: Array, b: Array, carry: Array | int = 0) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b) + np.asarray(carry, _U64)
    return total.astype(_U32), total >> _U64(32) != 0


def _subtract_borrow(a: Array, b: Array, borrow: Array | int = 0) -> tuple[Array, Array]:
    taken = _wide(b) + np.asarray(borrow, _U64)
    return (_wide(a) - taken).astype(_U32), taken > _wide(a)


def _mad_u64_u32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = _wide(a) * _wide(b)
    total = product + c
    return total, total < product


_MAD_U64_U32 = Vector(("u64", "mask"), ("u32", "u32", "u64"), _mad_u64_u32, low_apart=True)


def _low_24(value: Array) -> Array:
    return value & _U32(0xFFFFFF)


def _signed_low_24(value: Array) -> Array:
    return value << np.int32(8) >> np.int32(8)


def _bits_of(value: Array, offset: Array, count: Array) -> Array:
    kept = (_U64(1) << _wide(count & _U32(31))) - _U64(1)
    return (_wide(value) >> _wide(offset & _U32(31)) & kept).astype(_U32)


def _permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    data = _wide(high) << _U64(32) | _wide(low)
    result = np.zeros(np.broadcast_shapes(data.shape, selector.shape), _U32)
    for n in range(4):
        chosen = selector >> _U32(8 * n) & _U32(0xFF)
        byte = data >> (_wide(chosen & _U32(7)) * _U64(8)) & _U64(0xFF)
        # 8 to 11: the sign of bytes 1, 3, 5, 7.
        sign_at = (_wide(chosen & _U32(3)) * _U64(2) + _U64(1)) * _U64(8) + _U64(7)
        sign = (data >> sign_at & _U64(1)) * _U64(0xFF)
        byte = np.where(chosen >= 8, sign, byte)
        byte = np.where(chosen == 12, _U64(0), byte)
        byte = np.where(chosen >= 13, _U64(0xFF), byte)
        result |= byte.astype(_U32) << _U32(8 * n)
    return result


def _reciprocal_f32(x: Array) -> Array:
    # Hardware is good to 1 ulp and flushes subnormals; which of the neighbours it gives is not
    # documented. Code must not depend on it: this is the nearest.
    exact = np.float64(1.0) / flush32(x).astype(np.float64)
    return flush32(exact.astype(_F32))


def _square_root_f32(x: Array) -> Array:
    # As for the reciprocal: hardware is good to 1 ulp.
    return flush32(np.sqrt(flush32(x)))


def _power_f32(x: Array) -> Array:
    # As for the reciprocal: 2 to a power, good to 1 ulp.
    return flush32(np.exp2(flush32(x).astype(np.float64)).astype(_F32))


def _logarithm_f32(x: Array) -> Array:
    return np.log2(flush32(x).astype(np.float64)).astype(_F32)


def _reciprocal_square_root_f32(x: Array) -> Array:
    exact = np.float64(1.0) / np.sqrt(flush32(x).astype(np.float64))
    return flush32(exact.astype(_F32))


def _coarse_f64(exact: Array) -> Array:
    # Hardware is good to 2^29 ulp, from which code goes on to what it needs. More than that is not
    # given here, so that code which does not go on is found out.
    return (exact.view(_U64) & ~_U64((1 << 28) - 1)).view(np.float64)


@dataclass(frozen=True)
class _Format:
    """A floating-point type, and the numbers that the documents have for it in a division.

    Attributes:
        kind: Its name.
        unsigned: Of its bits.
        fraction_bits: The lowest.
        top: The exponent of Inf and NaN.
        scale: The power of two that the sides of a division are scaled by.
        far: Exponents that differ so much need it.
        tiny: A numerator of this exponent, or less, needs it.
        underflow: The difference of the exponents of a quotient that is 0.
    """

    kind: str
    unsigned: type[Any]
    fraction_bits: int
    top: int
    scale: int
    far: int
    tiny: int
    underflow: int

    @property
    def number(self) -> type[Any]:
        """NumPy's type."""
        return np.float32 if self.unsigned is np.uint32 else np.float64

    @property
    def bias(self) -> int:
        """The exponent of 1."""
        return self.top >> 1

    def exponent(self, x: Array) -> Array:
        """As it is in the bits."""
        field: Array = x.view(self.unsigned) >> self.unsigned(self.fraction_bits)
        result: Array = (field & self.unsigned(self.top)).astype(np.int32)
        return result

    def is_subnormal(self, x: Array) -> Array:
        """Smaller than every normal number, and not 0."""
        result: Array = (self.exponent(x) == 0) & (x != 0)
        return result


_FORMATS = (
    _Format("f32", np.uint32, 23, 0xFF, scale=64, far=96, tiny=23, underflow=-150),
    _Format("f64", np.uint64, 52, 0x7FF, scale=128, far=768, tiny=53, underflow=-1075),
)


def _div_scale(
    form: _Format, value: Array, denominator: Array, numerator: Array
) -> tuple[Array, Array]:
    """Scales one side of a division that would leave the range; the mask says: scale it back.

    The documents leave open what is returned where nothing is scaled: the value. Where both
    quotients are subnormal they scale the denominator up, which overflows and helps nothing; the
    sequence of a division comes out right if it is scaled down.
    """
    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    up, down = np.ldexp(value, form.scale), np.ldexp(value, -form.scale)
    of_denominator = value.view(form.unsigned) == denominator.view(form.unsigned)
    of_numerator = value.view(form.unsigned) == numerator.view(form.unsigned)
    exponents = form.exponent(numerator) - form.exponent(denominator)
    tiny_reciprocal = form.is_subnormal((form.number(1) / denominator).astype(form.number))
    tiny_quotient = form.is_subnormal((numerator / denominator).astype(form.number))
    nan = np.full_like(value, np.nan)
    yes = np.ones(value.shape, np.bool_)
    cases = [  # the first that holds: what is returned, and the mask
        ((numerator == 0) | (denominator == 0), nan, ~yes),
        (exponents >= form.far, np.where(of_denominator, up, value), yes),
        (form.is_subnormal(denominator), up, ~yes),
        (tiny_reciprocal & tiny_quotient, np.where(of_denominator, down, value), yes),
        (tiny_reciprocal, down, ~yes),
        (tiny_quotient, np.where(of_numerator, up, value), yes),
        (form.exponent(numerator) <= form.tiny, up, ~yes),
    ]
    conditions = [condition for condition, _, _ in cases]
    scaled = np.select(conditions, [result for _, result, _ in cases], value)
    return scaled.astype(form.number), np.select(conditions, [mask for _, _, mask in cases], ~yes)


def _div_fmas(form: _Format, a: Array, b: Array, c: Array, scale: Array) -> Array:
    # The CDNA3 document says 2^32 of f32. Scaling by what div_scale has, undone, is what that needs
    # and what hardware was measured to do: up where the third source is at least 2, down below.
    plain = (fma_f32 if form.kind == "f32" else fma_f64)(a, b, c)
    large = form.exponent(np.broadcast_to(c, plain.shape)) > form.bias
    power = np.where(large, form.scale, -form.scale)
    return np.where(scale, np.ldexp(plain, power), plain).astype(form.number)


def _div_fixup(form: _Format, quotient: Array, denominator: Array, numerator: Array) -> Array:
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    one = form.number(1)
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), -one, one)
    infinite_d, infinite_n = np.isinf(denominator), np.isinf(numerator)
    zero_d, zero_n = denominator == 0, numerator == 0
    zero = sign * form.number(0)
    result: Array = np.select(
        [
            np.isnan(numerator),
            np.isnan(denominator),
            (zero_d & zero_n) | (infinite_d & infinite_n),
            zero_d | infinite_n,
            infinite_d | zero_n,
            form.exponent(numerator) - form.exponent(denominator) < form.underflow,
        ],
        [numerator, denominator, form.number(np.nan), sign * form.number(np.inf), zero, zero],
        np.copysign(quotient, sign),
    )
    return result.astype(form.number)


def _class(form: _Format, x: Array, wanted: Array) -> Array:
    bits: Array = x.view(form.unsigned)
    exponent = form.exponent(x)
    fraction = bits & form.unsigned((1 << form.fraction_bits) - 1)
    quiet = (bits >> form.unsigned(form.fraction_bits - 1)).astype(_U32) & _U32(1)
    kind = np.select(
        [exponent == form.top, exponent > 0, fraction != 0], [_U32(9), _U32(8), _U32(7)], _U32(6)
    )
    kind = np.where(np.signbit(x), _U32(11) - kind, kind)
    kind = np.where((exponent == form.top) & (fraction != 0), quiet, kind)
    chosen: Array = wanted.view(_U32) >> kind & _U32(1) != 0
    return chosen


def _to_integer(x: Array, kind: type[np.int32] | type[np.uint32]) -> Array:
    """Towards zero; NaN is 0, and what does not fit is the nearest that does."""
    limits = np.iinfo(kind)
    value = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    result: Array = np.clip(value, float(limits.min), float(limits.max)).astype(kind)
    return result


def round_to_bf16(x: Array) -> Array:
    """f32 to the bits of bf16, to nearest even; NaN stays NaN."""
    bits = x.view(_U32)
    rounded = bits + _U32(0x7FFF) + (bits >> _U32(16) & _U32(1))
    return np.where(np.isnan(x), bits | _U32(0x400000), rounded) >> _U32(16)


def pack(low: Array, high: Array) -> Array:
    """Two arrays of 16 bits as the halves of one of 32."""
    result: Array = low.view(np.uint16).astype(_U32) | (
        high.view(np.uint16).astype(_U32) << _U32(16)
    )
    return result


def _pack_bf16(low: Array, high: Array) -> Array:
    result: Array = round_to_bf16(low) | round_to_bf16(high) << _U32(16)
    return result


def _select(low: Array, high: Array, mask: Array) -> Array:
    return np.where(mask, high, low)


def _shift_left(amount: Array, value: Array) -> Array:
    result: Array = value << (amount & amount.dtype.type(31))
    return result


def _shift_right(amount: Array, value: Array) -> Array:
    result: Array = value >> (amount & amount.dtype.type(31)).astype(value.dtype)
    return result


def _shift_left_64(amount: Array, value: Array) -> Array:
    return value << _wide(amount & _U32(63))


def _shift_right_64(amount: Array, value: Array) -> Array:
    result: Array = value >> (amount & _U32(63)).astype(value.dtype)
    return result


ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    "ceil": np.ceil,
    "floor": np.floor,
    "trunc": np.trunc,
    "rndne": np.rint,  # to nearest even
}


def _arithmetic() -> dict[str, Vector]:
    table = {}
    for kind in ("f16", "f32", "f64"):
        two = f"{kind} {kind}"
        table[f"v_add_{kind}"] = _op(kind, two, np.add)
        table[f"v_sub_{kind}"] = _op(kind, two, np.subtract)
        table[f"v_subrev_{kind}"] = _op(kind, two, lambda a, b: b - a)
        table[f"v_mul_{kind}"] = _op(kind, two, np.multiply)
        for suffix in ("", "_num"):  # gfx12 says num
            table[f"v_max{suffix}_{kind}"] = _op(kind, two, maximum)
            table[f"v_min{suffix}_{kind}"] = _op(kind, two, minimum)
    for suffix in ("", "_num"):
        for name, of_two in (("max", maximum), ("min", minimum)):
            table[f"v_{name}3{suffix}_f32"] = _op(
                "f32", "f32 f32 f32", lambda a, b, c, of=of_two: of(of(a, b), c)
            )
    for name, rounding in ROUNDINGS.items():
        table[f"v_{name}_f32"] = _op("f32", "f32", rounding)
    for kind, fma in (("f32", fma_f32), ("f64", fma_f64)):
        three = f"{kind} {kind} {kind}"
        table[f"v_fma_{kind}"] = _op(kind, three, fma)
        table[f"v_fmac_{kind}"] = Vector((kind,), (kind,) * 3, fma, accumulates=True)
    for name in WITH_A_CONSTANT:
        table[name] = _op("f32", "f32 f32 f32", fma_f32)
    for kind in ("u32", "i32"):
        table[f"v_max_{kind}"] = _op(kind, f"{kind} {kind}", np.maximum)
        table[f"v_min_{kind}"] = _op(kind, f"{kind} {kind}", np.minimum)
    for name in ("_u32", "_nc_u32"):  # gfx10 and later say nc: no carry
        table[f"v_add{name}"] = _op("u32", "u32 u32", np.add)
        table[f"v_sub{name}"] = _op("u32", "u32 u32", np.subtract)
        table[f"v_subrev{name}"] = _op("u32", "u32 u32", lambda a, b: b - a)
    for name in ("v_addc_co_u32", "v_add_co_ci_u32"):  # gfx9; gfx10 and later
        table[name] = _op("u32 mask", "u32 u32 mask", _add_carry)
    for name in ("v_subb_co_u32", "v_sub_co_ci_u32"):
        table[name] = _op("u32 mask", "u32 u32 mask", _subtract_borrow)
    for name in ("v_subbrev_co_u32", "v_subrev_co_ci_u32"):
        table[name] = _op(
            "u32 mask", "u32 u32 mask", lambda a, b, borrow: _subtract_borrow(b, a, borrow)
        )
    return table


def _comparisons() -> dict[str, Vector]:
    relations: dict[str, Callable[[Array, Array], Array]] = {
        "eq": np.equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    of_integers = relations | {"ne": np.not_equal}
    # n: not, true of NaN as well; lg: less or greater; o, u: (un)ordered.
    of_floats = relations | {
        "lg": lambda a, b: (a < b) | (a > b),
        "neq": np.not_equal,
        "nlt": lambda a, b: ~(a < b),
        "nle": lambda a, b: ~(a <= b),
        "ngt": lambda a, b: ~(a > b),
        "nge": lambda a, b: ~(a >= b),
        "nlg": lambda a, b: ~((a < b) | (a > b)),
        "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        "u": lambda a, b: np.isnan(a) | np.isnan(b),
    }
    table = {}
    for kind in ("u16", "i16", "f16", "u32", "i32", "f32", "u64", "i64", "f64"):
        for name, relation in (of_floats if kind[0] == "f" else of_integers).items():
            table[f"v_cmp_{name}_{kind}"] = _op("mask", f"{kind} {kind}", relation)
    for form in _FORMATS:
        name, classify = f"v_cmp_class_{form.kind}", functools.partial(_class, form)
        table[name] = _op("mask", f"{form.kind} b32", classify)
    return table


def _divisions() -> dict[str, Vector]:
    table = {}
    for form in _FORMATS:
        kind = form.kind
        three = f"{kind} {kind} {kind}"
        for name, results, sources, compute in (
            ("scale", f"{kind} mask", three, _div_scale),
            ("fmas", kind, f"{three} mask", _div_fmas),
            ("fixup", kind, three, _div_fixup),
        ):
            compute_form: Callable[..., Any] = functools.partial(compute, form)
            table[f"v_div_{name}_{kind}"] = _op(results, sources, compute_form)
    return table


def _of_16_bits() -> dict[str, Vector]:
    table = {}
    for name, compute in (("add", np.add), ("sub", np.subtract)):
        for infix in ("", "_nc"):  # gfx10 and later say nc: no carry
            table[f"v_{name}{infix}_u16"] = _op("u16", "u16 u16", compute)
    table["v_subrev_u16"] = _op("u16", "u16 u16", lambda a, b: b - a)
    table["v_mul_lo_u16"] = _op("u16", "u16 u16", np.multiply)
    for name, logic in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        table[f"v_{name}_b16"] = _op("u16", "u16 u16", logic)
    for name, kind, shift in (
        ("v_lshlrev_b16", "u16", np.left_shift),
        ("v_lshrrev_b16", "u16", np.right_shift),
        ("v_ashrrev_i16", "i16", np.right_shift),
    ):
        table[name] = _op(
            kind, f"u16 {kind}", lambda a, b, shift=shift: shift(b, (a & 15).astype(b.dtype))
        )
    return table


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def by_table(table: int) -> Vector:
    """Three bits make a number; the result has the bit that the table has there.

    Source: LLVM, "BitOp3_Op": of the number, the first source has the highest bit.
    """

    def compute(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros((1, 1), _U32)
        for n in (n for n in range(8) if table >> n & 1):
            result = result | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return result

    return _op("u32", "u32 u32 u32", compute)


def _bit_counts() -> dict[str, Vector]:
    table: dict[str, Vector] = {}
    for names, kind, count in (  # gfx9; gfx11 and later
        (("v_ffbh_u32", "v_clz_i32_u32"), "u32", leading_zeros),
        (("v_ffbl_b32", "v_ctz_i32_b32"), "u32", trailing_zeros),
        (("v_ffbh_i32", "v_cls_i32"), "i32", sign_bits),
    ):
        table |= dict.fromkeys(names, _op("i32", kind, count))
    table["v_bcnt_u32_b32"] = _op("u32", "u32 u32", lambda a, b: population(a) + b)
    return table


VECTOR: Mapping[str, Vector] = MappingProxyType(
    _arithmetic()
    | _bit_counts()
    | _comparisons()
    | _divisions()
    | _of_16_bits()
    | {
        "v_mov_b32": _op("b32", "b32", np.copy),
        "v_mov_b64": Vector(("b64",), ("b64",), np.copy, low_apart=True),
        "v_mov_b16": _op("b16", "b16", np.copy),
        "v_accvgpr_read_b32": _op("b32", "b32", np.copy),
        "v_accvgpr_write_b32": _op("b32", "b32", np.copy),
        "v_cndmask_b32": Vector(("b32",), ("b32", "b32", "mask"), _select, selects=True),
        "v_cndmask_b16": Vector(("u16",), ("u16", "u16", "mask"), _select, selects=True),
        "v_and_b32": _op("u32", "u32 u32", np.bitwise_and),
        "v_or_b32": _op("u32", "u32 u32", np.bitwise_or),
        "v_xor_b32": _op("u32", "u32 u32", np.bitwise_xor),
        "v_xnor_b32": _op("u32", "u32 u32", lambda a, b: ~(a ^ b)),
        "v_not_b32": _op("u32", "u32", np.bitwise_not),
        "v_bfrev_b32": _op("u32", "u32", reverse_bits),
        "v_med3_u32": _op("u32", "u32 u32 u32", _median),
        "v_med3_i32": _op("i32", "i32 i32 i32", _median),
        "v_or3_b32": _op("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
        "v_and_or_b32": _op("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
        "v_bfe_u32": _op("u32", "u32 u32 u32", _bits_of),
        "v_bfi_b32": _op("u32", "u32 u32 u32", lambda mask, a, b: mask & a | ~mask & b),
        "v_perm_b32": _op("u32", "u32 u32 u32", _permute_bytes),
        "v_alignbit_b32": _op(
            "u32",
            "u32 u32 u32",
            lambda a, b, c: (
                (_wide(a) << _U64(32) | _wide(b)) >> _wide(c & _U32(31)) & _U64(0xFFFFFFFF)
            ).astype(_U32),
        ),
        "v_lshlrev_b32": _op("u32", "u32 u32", _shift_left),
        "v_lshrrev_b32": _op("u32", "u32 u32", _shift_right),
        "v_ashrrev_i32": _op("i32", "u32 i32", _shift_right),
        "v_lshlrev_b64": _op("u64", "u32 u64", _shift_left_64),
        "v_lshrrev_b64": _op("u64", "u32 u64", _shift_right_64),
        "v_ashrrev_i64": _op("i64", "u32 i64", _shift_right_64),
        "v_lshl_or_b32": _op("u32", "u32 u32 u32", lambda a, b, c: _shift_left(b, a) | c),
        "v_lshl_add_u32": _op("u32", "u32 u32 u32", lambda a, b, c: _shift_left(b, a) + c),
        "v_add_lshl_u32": _op("u32", "u32 u32 u32", lambda a, b, c: _shift_left(c, a + b)),
        "v_lshl_add_u64": Vector(
            ("u64",),
            ("u64", "u32", "u64"),
            lambda a, b, c: (a << _wide(b & _U32(7))) + c,
            low_apart=True,
        ),
        "v_add3_u32": _op("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
        "v_xad_u32": _op("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
        "v_add_co_u32": _op("u32 mask", "u32 u32", _add_carry),
        "v_sub_co_u32": _op("u32 mask", "u32 u32", _subtract_borrow),
        "v_subrev_co_u32": _op("u32 mask", "u32 u32", lambda a, b: _subtract_borrow(b, a)),
        "v_mul_lo_u32": _op("u32", "u32 u32", np.multiply),
        "v_mul_hi_u32": _op(
            "u32", "u32 u32", lambda a, b: (_wide(a) * _wide(b) >> _U64(32)).astype(_U32)
        ),
        "v_mul_hi_u32_u24": _op(
            "u32",
            "u32 u32",
            lambda a, b: (_wide(_low_24(a)) * _wide(_low_24(b)) >> _U64(32)).astype(_U32),
        ),
        "v_mul_u32_u24": _op("u32", "u32 u32", lambda a, b: _low_24(a) * _low_24(b)),
        "v_mad_u32_u24": _op("u32", "u32 u32 u32", lambda a, b, c: _low_24(a) * _low_24(b) + c),
        "v_mad_i32_i24": _op(
            "i32",
            "i32 i32 i32",
            lambda a, b, c: _signed_low_24(a) * _signed_low_24(b) + c,
        ),
        "v_mad_u64_u32": _MAD_U64_U32,
        "v_mad_co_u64_u32": _MAD_U64_U32,
        "v_rcp_f32": _op("f32", "f32", _reciprocal_f32),
        # The same number; it only raises another exception. Divisions of integers have it.
        "v_rcp_iflag_f32": _op("f32", "f32", _reciprocal_f32),
        "v_rsq_f32": _op("f32", "f32", _reciprocal_square_root_f32),
        "v_exp_f32": _op("f32", "f32", _power_f32),
        "v_log_f32": _op("f32", "f32", _logarithm_f32),
        "v_sqrt_f32": _op("f32", "f32", _square_root_f32),
        "v_ldexp_f32": _op("f32", "f32 i32", np.ldexp),
        "v_ldexp_f64": _op("f64", "f64 i32", np.ldexp),
        "v_rcp_f64": _op("f64", "f64", lambda x: _coarse_f64(1 / x)),
        "v_rsq_f64": _op("f64", "f64", lambda x: _coarse_f64(1 / np.sqrt(x))),
        "v_sqrt_f64": _op("f64", "f64", lambda x: _coarse_f64(np.sqrt(x))),
        "v_cvt_f32_f16": _op("f32", "f16", lambda x: x.astype(_F32)),
        "v_cvt_f16_f32": _op("f16", "f32", lambda x: x.astype(np.float16)),
        "v_cvt_f32_f64": _op("f32", "f64", lambda x: x.astype(_F32)),
        "v_cvt_f64_f32": _op("f64", "f32", lambda x: x.astype(np.float64)),
        "v_cvt_f32_u32": _op("f32", "u32", lambda x: x.astype(_F32)),
        "v_cvt_f32_i32": _op("f32", "i32", lambda x: x.astype(_F32)),
        "v_cvt_u32_u16": _op("u32", "u16", lambda x: x.astype(_U32)),
        "v_cvt_i32_i16": _op("i32", "i16", lambda x: x.astype(np.int32)),
        "v_cvt_f64_u32": _op("f64", "u32", lambda x: x.astype(np.float64)),
        "v_cvt_f64_i32": _op("f64", "i32", lambda x: x.astype(np.float64)),
        "v_cvt_u32_f32": _op("u32", "f32", lambda x: _to_integer(x, np.uint32)),
        "v_cvt_i32_f32": _op("i32", "f32", lambda x: _to_integer(x, np.int32)),
        "v_cvt_pk_bf16_f32": _op("b32", "f32 f32", _pack_bf16),
        "v_cvt_pk_f16_f32": _op(
            "b32", "f32 f32", lambda a, b: pack(a.astype(np.float16), b.astype(np.float16))
        ),
        "v_pack_b32_f16": _op("b32", "f16 f16", pack),
    }
)
