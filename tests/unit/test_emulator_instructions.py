"""Each PTX instruction against exact arithmetic: Python's integers and fractions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import evaluate, run_kernel
from support import random_generator

from iree_lnbwd.emulator import Fault
from iree_lnbwd.ops.arguments import Array

_COUNT = 160
_INTEGERS = {f"{kind}{bits}": (kind, bits) for kind in "us" for bits in (16, 32, 64)}
# Bits of the significand, and the exponent of the smallest normal number.
_FLOATS = {"f64": (53, -1022), "f32": (24, -126), "f16": (11, -14), "bf16": (8, -126)}
_NUMPY = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def integers(rng: np.random.Generator, type_: str) -> Array:
    """Random bits, the ends of the range, and small numbers."""
    kind, bits = _INTEGERS[type_]
    dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    random = rng.integers(0, (1 << bits) - 1, _COUNT, dtype=np.uint64, endpoint=True)
    values: Array = random.astype(f"u{bits // 8}").view(dtype)
    limits = np.iinfo(dtype)
    edges = np.array([limits.min, limits.max, 0, 1, 2, limits.max - 1, limits.min + 1], dtype)
    values[: 3 * len(edges)] = rng.choice(edges, 3 * len(edges))
    values[-40:] = rng.integers(0, 70, 40).astype(dtype)
    return values


def floats(rng: np.random.Generator, type_: str) -> Array:
    """Random bits, numbers of like size, special ones, and small integers, which make ties."""
    dtype: np.dtype[Any] = np.dtype(_NUMPY[type_])
    bits = rng.integers(0, 1 << 8 * dtype.itemsize, _COUNT, dtype=np.uint64)
    values: Array = bits.astype(f"u{dtype.itemsize}").view(dtype)
    values[:60] = rng.standard_normal(60).astype(dtype)
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, 1.0, -1.0]).astype(dtype)
    values[60:90] = rng.choice(special, 30)
    values[90:120] = rng.integers(-(1 << 12), 1 << 12, 30).astype(dtype)
    rng.shuffle(values)
    return values


def numbers(values: Array) -> list[float]:
    """As Python's floats."""
    with np.errstate(all="ignore"):  # signalling NaN among the random bits
        as_list: list[float] = values.astype(np.float64).tolist()
    return as_list


def rounded(exact: Fraction, type_: str, *, zero: float) -> float:
    """The nearest number of a type, ties to even; where the exact value is zero, ``zero``."""
    if exact == 0:
        return zero
    digits, least = _FLOATS[type_]
    sign = 1 if exact > 0 else -1
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, least) - digits + 1)
    value = round(magnitude / step) * step
    if value >= Fraction(2) ** (2 - least):  # the exponent ranges are symmetric but for this
        return math.copysign(math.inf, sign)
    return math.copysign(float(value), sign)


def expected_float(
    type_: str, exactly: Callable[..., Fraction], approximately: Callable[..., float], *args: float
) -> float:
    """One rounding of the exact result; infinities, NaN and signs of zero by f64 arithmetic."""
    if not all(map(math.isfinite, args)):
        return approximately(*args)
    return rounded(exactly(*map(Fraction, args)), type_, zero=approximately(*args))


def assert_same_floats(actual: Array, expected: list[float], what: str) -> None:
    """Equal to the bit; NaN is the canonical one."""
    dtype = actual.dtype
    with np.errstate(all="ignore"):
        wanted = np.array(expected, np.float64).astype(dtype)
    unsigned = f"u{dtype.itemsize}"
    bits = wanted.view(unsigned).copy()
    bits[np.isnan(np.array(expected))] = np.iinfo(unsigned).max >> 1
    wrong = actual.view(unsigned) != bits
    assert not wrong.any(), f"{what}: {actual[wrong][:4]}, expected {wanted[wrong][:4]}"


def _divided(a: int, b: int) -> int:
    return int(Fraction(a, b)) if b else 0  # int() of a fraction rounds toward zero


_BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul.lo": lambda a, b, _: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, _: min(a, b),
    "max": lambda a, b, _: max(a, b),
}


@pytest.mark.parametrize("type_", _INTEGERS)
@pytest.mark.parametrize("opcode", _BINARY)
def test_integer_arithmetic(opcode: str, type_: str) -> None:
    rng = random_generator()
    bits = _INTEGERS[type_][1]
    a, b = integers(rng, type_), integers(rng, type_)
    actual = evaluate(f"{opcode}.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    for x, y, got in zip(a.tolist(), b.tolist(), actual.tolist(), strict=True):
        assert (got - _BINARY[opcode](x, y, bits)) % (1 << bits) == 0, (x, y, got)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_division(type_: str) -> None:
    rng = random_generator()
    a, b = integers(rng, type_), integers(rng, type_)
    b[b == 0] = 7
    bits = _INTEGERS[type_][1]
    quotient = evaluate(f"div.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    remainder = evaluate(f"rem.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    for x, y, q, r in zip(
        a.tolist(), b.tolist(), quotient.tolist(), remainder.tolist(), strict=True
    ):
        assert (q - _divided(x, y)) % (1 << bits) == 0, (x, y, q)
        assert r == x - _divided(x, y) * y, (x, y, r)


@pytest.mark.parametrize("type_", ["u16", "s16", "u32", "s32"])
def test_wide_products(type_: str) -> None:
    rng = random_generator()
    kind, bits = _INTEGERS[type_]
    wide = f"{kind}{2 * bits}"
    a, b, c = integers(rng, type_), integers(rng, type_), integers(rng, wide)
    product = evaluate(f"mul.wide.{type_} {{d}}, {{0}}, {{1}}", [a, b], c.dtype)
    total = evaluate(f"mad.wide.{type_} {{d}}, {{0}}, {{1}}, {{2}}", [a, b, c], c.dtype)
    for x, y, z, p, t in zip(*(v.tolist() for v in (a, b, c, product, total)), strict=True):
        assert p == x * y
        assert (t - (x * y + z)) % (1 << 2 * bits) == 0


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_multiply_and_add(part: str, type_: str) -> None:
    rng = random_generator()
    bits = _INTEGERS[type_][1]
    a, b, c = (integers(rng, type_) for _ in range(3))
    actual = evaluate(f"mad.{part}.{type_} {{d}}, {{0}}, {{1}}, {{2}}", [a, b, c], a.dtype)
    for x, y, z, got in zip(*(v.tolist() for v in (a, b, c, actual)), strict=True):
        product = x * y >> bits if part == "hi" else x * y
        assert (got - product - z) % (1 << bits) == 0


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("opcode", ["and", "or", "xor", "not"])
def test_logic(opcode: str, bits: int) -> None:
    rng = random_generator()
    a, b = (integers(rng, f"u{bits}") for _ in range(2))
    if opcode == "not":
        actual = evaluate(f"not.b{bits} {{d}}, {{0}}", [a], a.dtype)
        expected = [x ^ (1 << bits) - 1 for x in a.tolist()]
    else:
        actual = evaluate(f"{opcode}.b{bits} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
        python = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[opcode]
        expected = [python(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert actual.tolist() == expected


@pytest.mark.parametrize("opcode", ["and", "or", "xor"])
def test_logic_of_predicates(opcode: str) -> None:
    rng = random_generator()
    a, b = rng.integers(0, 2, (2, _COUNT)).astype(np.bool_)
    actual = evaluate(f"{opcode}.pred {{d}}, {{0}}, {{1}}", [a, b], np.bool_, predicates=2)
    python = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[opcode]
    assert actual.tolist() == [python(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_not_of_a_predicate() -> None:
    a = random_generator().integers(0, 2, _COUNT).astype(np.bool_)
    actual = evaluate("not.pred {d}, {0}", [a], np.bool_, predicates=1)
    assert actual.tolist() == [not x for x in a.tolist()]


@pytest.mark.parametrize(
    "opcode", ["shl.b32", "shl.b64", "shr.u32", "shr.s32", "shr.u64", "shr.s64"]
)
def test_shifts(opcode: str) -> None:
    rng = random_generator()
    name, type_ = opcode.split(".")
    bits = int(type_[1:])
    a = integers(rng, type_.replace("b", "u"))
    by = rng.integers(0, 2 * bits, _COUNT, dtype=np.uint32)  # beyond all bits too
    actual = evaluate(f"{opcode} {{d}}, {{0}}, {{1}}", [a, by], a.dtype)
    for x, n, got in zip(a.tolist(), by.tolist(), actual.tolist(), strict=True):
        want = x << n if name == "shl" else x >> n
        assert (got - want) % (1 << bits) == 0, (x, n, got)


def test_funnel_shifts() -> None:
    rng = random_generator()
    low, high, by = (integers(rng, "u32") for _ in range(3))
    for mode in ("wrap", "clamp"):
        left = evaluate(f"shf.l.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}}", [low, high, by], np.uint32)
        right = evaluate(f"shf.r.{mode}.b32 {{d}}, {{0}}, {{1}}, {{2}}", [low, high, by], np.uint32)
        for x, y, n, got_left, got_right in zip(
            *(v.tolist() for v in (low, high, by, left, right)), strict=True
        ):
            both, n = y << 32 | x, n % 32 if mode == "wrap" else min(n, 32)
            assert got_left == (both << n >> 32) % (1 << 32)
            assert got_right == (both >> n) % (1 << 32)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_extract_bit_field(type_: str) -> None:
    rng = random_generator()
    kind, bits = _INTEGERS[type_]
    a = integers(rng, type_)
    start, length = rng.integers(0, bits + 8, (2, _COUNT), dtype=np.uint32)
    actual = evaluate(f"bfe.{type_} {{d}}, {{0}}, {{1}}, {{2}}", [a, start, length], a.dtype)
    for x, s, n, got in zip(*(v.tolist() for v in (a, start, length, actual)), strict=True):
        # The manual's own pseudocode, a bit at a time.
        source = x % (1 << bits)
        sign = source >> min(s + n - 1, bits - 1) & 1 if kind == "s" and n else 0
        field = sum(
            (source >> s + i & 1 if i < n and s + i < bits else sign) << i for i in range(bits)
        )
        assert got % (1 << bits) == field, (x, s, n)


@pytest.mark.parametrize("bits", [32, 64])
def test_insert_bit_field(bits: int) -> None:
    rng = random_generator()
    a, b = (integers(rng, f"u{bits}") for _ in range(2))
    start, length = rng.integers(0, bits + 8, (2, _COUNT), dtype=np.uint32)
    actual = evaluate(
        f"bfi.b{bits} {{d}}, {{0}}, {{1}}, {{2}}, {{3}}", [a, b, start, length], a.dtype
    )
    for x, y, s, n, got in zip(*(v.tolist() for v in (a, b, start, length, actual)), strict=True):
        for i in range(min(n, bits)):
            if s + i < bits:
                y = y & ~(1 << s + i) | (x >> i & 1) << s + i
        assert got == y


def test_permute_bytes() -> None:
    rng = random_generator()
    a, b, selector = (integers(rng, "u32") for _ in range(3))
    actual = evaluate("prmt.b32 {d}, {0}, {1}, {2}", [a, b, selector], np.uint32)
    for x, y, s, got in zip(*(v.tolist() for v in (a, b, selector, actual)), strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        want = []
        for place in range(4):
            choice = s >> 4 * place & 15
            byte = source[choice & 7]
            want.append((255 if byte & 128 else 0) if choice & 8 else byte)
        assert got.to_bytes(4, "little") == bytes(want)


@pytest.mark.parametrize("bits", [32, 64])
def test_count_bits(bits: int) -> None:
    a = integers(random_generator(), f"u{bits}")
    ones = evaluate(f"popc.b{bits} {{d}}, {{0}}", [a], np.uint32)
    zeros = evaluate(f"clz.b{bits} {{d}}, {{0}}", [a], np.uint32)
    assert ones.tolist() == [x.bit_count() for x in a.tolist()]
    assert zeros.tolist() == [bits - x.bit_length() for x in a.tolist()]
    turned = evaluate(f"brev.b{bits} {{d}}, {{0}}", [a], f"u{bits // 8}")
    assert turned.tolist() == [int(f"{x:0{bits}b}"[::-1], 2) for x in a.tolist()]


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_find_bit(type_: str) -> None:
    a, bits = integers(random_generator(), type_), int(type_[1:])
    a[:3] = 0, 1, np.iinfo(a.dtype).max
    a[3] = a.dtype.type(0) - a.dtype.type(type_[0] == "s")  # -1 has no other bit than its sign
    places = [max(x, ~x).bit_length() - 1 for x in a.tolist()]
    at = evaluate(f"bfind.{type_} {{d}}, {{0}}", [a], np.uint32)
    assert at.tolist() == [place & 0xFFFFFFFF for place in places]
    shift = evaluate(f"bfind.shiftamt.{type_} {{d}}, {{0}}", [a], np.uint32)
    assert shift.tolist() == [bits - 1 - place if place >= 0 else 0xFFFFFFFF for place in places]


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
def test_negate_and_absolute_of_integers(type_: str) -> None:
    a = integers(random_generator(), type_)
    bits = _INTEGERS[type_][1]
    negated = evaluate(f"neg.{type_} {{d}}, {{0}}", [a], a.dtype)
    absolute = evaluate(f"abs.{type_} {{d}}, {{0}}", [a], a.dtype)
    for x, n, m in zip(a.tolist(), negated.tolist(), absolute.tolist(), strict=True):
        assert (n + x) % (1 << bits) == 0
        assert (m - abs(x)) % (1 << bits) == 0


_EXACT = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
}


@pytest.mark.parametrize("type_", _FLOATS)
@pytest.mark.parametrize("opcode", _EXACT)
def test_float_arithmetic(opcode: str, type_: str) -> None:
    rng = random_generator()
    a, b = floats(rng, type_), floats(rng, type_)
    actual = evaluate(f"{opcode}.rn.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    exactly, approximately = _EXACT[opcode]
    expected = [
        expected_float(type_, exactly, approximately, x, y)
        for x, y in zip(numbers(a), numbers(b), strict=True)
    ]
    assert_same_floats(actual, expected, f"{opcode}.{type_}")


@pytest.mark.parametrize("type_", _FLOATS)
def test_fused_multiply_add(type_: str) -> None:
    rng = random_generator()
    a, b, c = (floats(rng, type_) for _ in range(3))
    # Sums that nearly cancel, and ones that end near the middle between two numbers.
    with np.errstate(all="ignore"):
        c[:50] = -(a[:50] * b[:50])
        c[50:70] = (a[50:70] * b[50:70]) * np.asarray(2.0 ** _FLOATS[type_][0], a.dtype)
    actual = evaluate(f"fma.rn.{type_} {{d}}, {{0}}, {{1}}, {{2}}", [a, b, c], a.dtype)

    def by_f64(x: float, y: float, z: float) -> float:
        if math.isfinite(x) and math.isfinite(y):
            product = math.copysign(1.0, x) * math.copysign(1.0, y) * (0.0 if x * y == 0 else 1.0)
            return product + z if not math.isfinite(z) or product == 0 else 0.0
        return x * y + z

    expected = [
        expected_float(type_, lambda x, y, z: x * y + z, by_f64, *operands)
        for operands in zip(*(numbers(v) for v in (a, b, c)), strict=True)
    ]
    assert_same_floats(actual, expected, f"fma.{type_}")


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_division_square_root_reciprocal(type_: str) -> None:
    rng = random_generator()
    a, b = floats(rng, type_), floats(rng, type_)
    pairs = list(zip(numbers(a), numbers(b), strict=True))

    def divided(x: float, y: float) -> float:
        with np.errstate(all="ignore"):
            return float(np.float64(x) / np.float64(y))

    def quotient(x: float, y: float) -> float:
        if y == 0:
            return divided(x, y)
        return expected_float(type_, lambda p, q: p / q, divided, x, y)

    actual = evaluate(f"div.rn.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    assert_same_floats(actual, [quotient(x, y) for x, y in pairs], "div")
    actual = evaluate(f"rcp.rn.{type_} {{d}}, {{0}}", [a], a.dtype)
    assert_same_floats(actual, [quotient(1.0, x) for x, _ in pairs], "rcp")

    def root(x: float) -> float:
        if x == 0 or not math.isfinite(x) or x < 0:
            return x if x == 0 or x == math.inf else math.nan
        exact = Fraction(x)
        # Enough digits that cutting off the rest cannot change the rounding of an inexact root.
        scale = 1 << 2400
        digits = math.isqrt(exact.numerator * scale // exact.denominator)
        return rounded(Fraction(digits, 1 << 1200), type_, zero=0.0)

    actual = evaluate(f"sqrt.rn.{type_} {{d}}, {{0}}", [a], a.dtype)
    assert_same_floats(actual, [root(x) for x, _ in pairs], "sqrt")


@pytest.mark.parametrize(
    "opcode", ["rsqrt.approx.f32", "rcp.approx.ftz.f32", "ex2.approx.f32", "lg2.approx.f32"]
)
def test_approximations(opcode: str) -> None:
    """Within the 2 ulp that the manual allows."""
    a = np.abs(random_generator().standard_normal(_COUNT)).astype(np.float32) + np.float32(0.01)
    exact = {
        "rsqrt": lambda x: 1 / math.sqrt(x),
        "rcp": lambda x: 1 / x,
        "ex2": lambda x: 2.0**x,
        "lg2": math.log2,
    }[opcode.partition(".")[0]]
    actual = evaluate(f"{opcode} {{d}}, {{0}}", [a], np.float32)
    expected = np.array([exact(float(x)) for x in a])
    assert (np.abs(actual - expected) <= 2 * np.spacing(np.abs(expected).astype(np.float32))).all()


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("opcode", ["min", "max", "min.NaN", "max.NaN"])
def test_least_and_greatest(opcode: str, type_: str) -> None:
    rng = random_generator()
    a, b = floats(rng, type_), floats(rng, type_)
    actual = evaluate(f"{opcode}.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    name, _, keeps_nan = opcode.partition(".")

    def pick(x: float, y: float) -> float:
        if math.isnan(x) or math.isnan(y):
            return math.nan if keeps_nan else y if math.isnan(x) else x
        order = sorted((x, y), key=lambda v: (v, math.copysign(1, v)))
        return order[0] if name == "min" else order[1]

    pairs = zip(numbers(a), numbers(b), strict=True)
    assert_same_floats(actual, [pick(x, y) for x, y in pairs], opcode)


@pytest.mark.parametrize("type_", ["f32", "f64", "f16", "bf16"])
def test_negate_and_absolute_of_floats(type_: str) -> None:
    a = floats(random_generator(), type_)
    unsigned = f"u{a.itemsize}"
    sign = 1 << 8 * a.itemsize - 1
    negated = evaluate(f"neg.{type_} {{d}}, {{0}}", [a], a.dtype)
    absolute = evaluate(f"abs.{type_} {{d}}, {{0}}", [a], a.dtype)
    assert negated.view(unsigned).tolist() == [x ^ sign for x in a.view(unsigned).tolist()]
    assert absolute.view(unsigned).tolist() == [x & sign - 1 for x in a.view(unsigned).tolist()]


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_copysign(type_: str) -> None:
    """The sign of the first operand, the rest of the second: NaN have signs, too."""
    rng = random_generator()
    a, b = floats(rng, type_), floats(rng, type_)
    unsigned = f"u{a.itemsize}"
    sign = 1 << 8 * a.itemsize - 1
    actual = evaluate(f"copysign.{type_} {{d}}, {{0}}, {{1}}", [a, b], a.dtype)
    bits = zip(a.view(unsigned).tolist(), b.view(unsigned).tolist(), strict=True)
    assert actual.view(unsigned).tolist() == [x & sign | y & sign - 1 for x, y in bits]


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("opcode", ["add", "mul", "fma"])
def test_pairs_of_halves(opcode: str, type_: str) -> None:
    """The two halves are computed like two numbers."""
    rng = random_generator()
    operands = [np.resize(floats(rng, type_), 64) for _ in range(3 if opcode == "fma" else 2)]
    names = ", ".join(f"{{{n}}}" for n in range(len(operands)))
    single = evaluate(f"{opcode}.rn.{type_} {{d}}, {names}", operands, operands[0].dtype)
    half = f"u{single.itemsize}"
    both = np.dtype(f"u{2 * single.itemsize}")
    packed = [operand.view(both) for operand in operands]
    double = evaluate(f"{opcode}.rn.{type_}x2 {{d}}, {names}", packed, both)
    assert double.view(half).tolist() == single.view(half).tolist()


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("opcode", ["add", "sub", "fma"])
def test_halves_with_f32(opcode: str, half: str) -> None:
    """A half is what it is in f32."""
    rng = random_generator()
    narrow = [np.resize(floats(rng, half), 64) for _ in range(2 if opcode == "fma" else 1)]
    wide = np.resize(floats(rng, "f32"), 64)
    names = ", ".join(f"{{{n}}}" for n in range(len(narrow) + 1))
    mixed = evaluate(f"{opcode}.rn.f32.{half} {{d}}, {names}", [*narrow, wide], np.float32)
    widened = [evaluate(f"cvt.f32.{half} {{d}}, {{0}}", [a], np.float32) for a in narrow]
    single = evaluate(f"{opcode}.rn.f32 {{d}}, {names}", [*widened, wide], np.float32)
    assert mixed.view(np.uint32).tolist() == single.view(np.uint32).tolist()


def test_flush_to_zero() -> None:
    """Subnormal operands and results are zeros of their sign; without .ftz they are not."""
    tiny = np.float32(1e-40)
    a = np.array([tiny, -tiny, 1.0, 2e-38] * 8, np.float32)
    b = np.array([0.0, -0.0, tiny, -1.5e-38] * 8, np.float32)
    flushed = evaluate("add.rn.ftz.f32 {d}, {0}, {1}", [a, b], np.float32)
    kept = evaluate("add.rn.f32 {d}, {0}, {1}", [a, b], np.float32)
    assert flushed[:4].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert np.signbit(flushed[:2]).tolist() == [False, True]
    assert kept[:4].tolist() == (a + b)[:4].tolist()


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@pytest.mark.parametrize("type_", [*_INTEGERS, "f16", "f32", "f64"])
def test_comparisons(type_: str) -> None:
    rng = random_generator()
    make = floats if type_.startswith("f") else integers
    a, b = make(rng, type_), make(rng, type_)
    b[:40] = a[:40]
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    for name in _COMPARISONS:
        python = getattr(operator, name)
        actual = evaluate(f"setp.{name}.{type_} {{d}}, {{0}}, {{1}}", [a, b], np.bool_)
        nan = [x != x or y != y for x, y in pairs]
        want = [python(x, y) and not n for (x, y), n in zip(pairs, nan, strict=True)]
        assert actual.tolist() == want, name
        if type_.startswith("f"):
            actual = evaluate(f"setp.{name}u.{type_} {{d}}, {{0}}, {{1}}", [a, b], np.bool_)
            assert actual.tolist() == [
                python(x, y) or n for (x, y), n in zip(pairs, nan, strict=True)
            ], name
    if type_.startswith("f"):
        for name, wanted in (("nan", True), ("num", False)):
            actual = evaluate(f"setp.{name}.{type_} {{d}}, {{0}}, {{1}}", [a, b], np.bool_)
            assert actual.tolist() == [n == wanted for n in nan], name


def test_a_comparison_of_packed_halves_sets_a_predicate_for_each() -> None:
    rng = random_generator()
    pairs = rng.standard_normal((2, 64, 2)).astype(np.float16)
    pairs[0, 3], pairs[1, 4] = np.nan, pairs[0, 4]
    packed = [each.view(np.uint32)[:, 0] for each in pairs]
    for name, compare in (("lt", np.less), ("ge", np.greater_equal)):
        for half, destination in enumerate(("{d}|%p11", "%p11|{d}")):
            instruction = f"setp.{name}.f16x2 {destination}, {{0}}, {{1}}"
            actual = evaluate(instruction, packed, np.bool_)
            np.testing.assert_array_equal(actual, compare(*pairs[:, :, half]))


def test_comparison_with_a_predicate() -> None:
    rng = random_generator()
    a, b = integers(rng, "s32"), integers(rng, "s32")
    p = rng.integers(0, 2, _COUNT).astype(np.bool_)
    for logic, python in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        actual = evaluate(
            f"setp.lt.{logic}.s32 {{d}}, {{0}}, {{1}}, {{2}}", [a, b, p], np.bool_, predicates=1
        )
        want = [
            python(x < y, q) for x, y, q in zip(a.tolist(), b.tolist(), p.tolist(), strict=True)
        ]
        assert actual.tolist() == want


@pytest.mark.parametrize(
    ("type_", "dtype"), [("b32", "u4"), ("b64", "u8"), ("f32", "f4"), ("b16", "u2")]
)
def test_selection(type_: str, dtype: str) -> None:
    rng = random_generator()
    a, b = rng.integers(0, 1 << 16, (2, _COUNT)).astype(dtype)
    p = rng.integers(0, 2, _COUNT).astype(np.bool_)
    actual = evaluate(f"selp.{type_} {{d}}, {{0}}, {{1}}, {{2}}", [a, b, p], dtype, predicates=1)
    assert actual.tolist() == [
        x if q else y for x, y, q in zip(a.tolist(), b.tolist(), p.tolist(), strict=True)
    ]


@pytest.mark.parametrize("source", _INTEGERS)
@pytest.mark.parametrize("to", _INTEGERS)
def test_conversions_of_integers(source: str, to: str) -> None:
    a = integers(random_generator(), source)
    kind, bits = _INTEGERS[to]
    dtype = np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
    limits = np.iinfo(dtype)
    actual = evaluate(f"cvt.{to}.{source} {{d}}, {{0}}", [a], dtype)
    assert [(x - y) % (1 << bits) for x, y in zip(actual.tolist(), a.tolist(), strict=True)] == [
        0
    ] * _COUNT
    saturated = evaluate(f"cvt.sat.{to}.{source} {{d}}, {{0}}", [a], dtype)
    assert saturated.tolist() == [min(max(x, limits.min), limits.max) for x in a.tolist()]


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("f32", "f64"),
        ("f16", "f64"),
        ("bf16", "f64"),
        ("f64", "f32"),
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f64", "f16"),
        ("f32", "f16"),
        ("f32", "bf16"),
    ],
)
def test_conversions_of_floats(source: str, to: str) -> None:
    a = floats(random_generator(), source)
    if _FLOATS[source][0] > _FLOATS[to][0]:  # ties, and the neighbours of ties
        narrow = np.dtype(_NUMPY[to])
        with np.errstate(all="ignore"):
            here = a.astype(narrow).astype(a.dtype)
            above = (
                (here.astype(narrow).view(f"u{narrow.itemsize}") + 1).view(narrow).astype(a.dtype)
            )
            middle = here + (above - here) / 2
        a[::3] = middle[::3]
        a[1::3] = np.nextafter(middle[1::3], np.inf)
    widens = _FLOATS[source][0] < _FLOATS[to][0]
    rounding = "" if widens else "rn."
    actual = evaluate(f"cvt.{rounding}{to}.{source} {{d}}, {{0}}", [a], _NUMPY[to])
    expected = [expected_float(to, lambda x: x, lambda x: x, x) for x in numbers(a)]
    assert_same_floats(actual, expected, f"cvt.{to}.{source}")


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_conversion_of_two_to_halves(to: str) -> None:
    """The first source is the upper half."""
    rng = random_generator()
    a, b = floats(rng, "f32"), floats(rng, "f32")
    both = evaluate(f"cvt.rn.{to}x2.f32 {{d}}, {{0}}, {{1}}", [a, b], np.uint32)
    for values, half in ((a, both >> 16), (b, both & 0xFFFF)):
        one = evaluate(f"cvt.rn.{to}.f32 {{d}}, {{0}}", [values], np.uint16)
        assert half.tolist() == one.tolist()


@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("to", ["f32", "f64"])
def test_conversions_of_integers_to_floats(source: str, to: str) -> None:
    a = integers(random_generator(), source)
    actual = evaluate(f"cvt.rn.{to}.{source} {{d}}, {{0}}", [a], _NUMPY[to])
    assert_same_floats(actual, [rounded(Fraction(x), to, zero=0.0) for x in a.tolist()], to)


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("to", ["u32", "s32", "s64"])
@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
def test_conversions_of_floats_to_integers(rounding: str, to: str, source: str) -> None:
    rng = random_generator()
    a = floats(rng, source)
    a[:80] = (rng.standard_normal(80) * 1000).astype(a.dtype)
    a[:20] = rng.integers(-40, 40, 20).astype(a.dtype) + a.dtype.type(0.5)
    kind, bits = _INTEGERS[to]
    limits = np.iinfo(np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}"))
    roundings: dict[str, Callable[[Fraction], int]] = {
        "rni": round,
        "rzi": math.trunc,
        "rmi": math.floor,
        "rpi": math.ceil,
    }
    python = roundings[rounding]

    def want(x: float) -> int:
        if math.isnan(x):
            return int(limits.min) if bits == 64 else 0
        if math.isinf(x):
            return int(limits.max if x > 0 else limits.min)
        return min(max(python(Fraction(x)), int(limits.min)), int(limits.max))

    actual = evaluate(f"cvt.{rounding}.{to}.{source} {{d}}, {{0}}", [a], limits.dtype)
    assert actual.tolist() == [want(x) for x in numbers(a)]


def test_moves_that_pack_and_unpack() -> None:
    rng = random_generator()
    a, b = (integers(rng, "u16") for _ in range(2))
    packed = evaluate("mov.b32 {d}, {{{0}, {1}}}", [a, b], np.uint32)
    assert packed.tolist() == [y << 16 | x for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    for instruction, want in (("mov.b32 {{{d}, _}}, {0}", a), ("mov.b32 {{_, {d}}}, {0}", b)):
        assert evaluate(instruction, [packed], np.uint16).tolist() == want.tolist()
    wide = integers(rng, "u64")
    upper = evaluate("mov.b64 {{_, {d}}}, {0}", [wide], np.uint32)
    assert upper.tolist() == [x >> 32 for x in wide.tolist()]


def test_immediates() -> None:
    """Hexadecimal, decimal, negative and float ones."""
    a = integers(random_generator(), "u32")
    for word, value in (
        ("0x3F800000", 0x3F800000),
        ("-7", -7),
        ("12U", 12),
        ("0f3F800000", 0x3F800000),
    ):
        actual = evaluate(f"add.u32 {{d}}, {{0}}, {word}", [a], np.uint32)
        assert actual.tolist() == [(x + value) % (1 << 32) for x in a.tolist()]
    doubles = np.ones(32)
    actual = evaluate("add.rn.f64 {d}, {0}, 0d3FF8000000000000", [doubles], np.float64)
    assert (actual == 2.5).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "vabsdiff.u32 %r5, %r0, %r0, %r0",
        "add.rz.f32 %r5, %r0, %r0",
        "st.async.b32 [%rd0], %r0",
        "bar.red.popc.u32 %r5, 0, %p0",
    ],
)
def test_unknown_instruction(instruction: str) -> None:
    opcode = instruction.partition(" ")[0]
    with pytest.raises(Fault, match=f"unknown instruction {opcode}.*line [0-9]+: {opcode}"):
        run_kernel(f"\t{instruction};", [64])


POLICY = "createpolicy.fractional.L2::evict_last.b64 %rd40, 1.0;"
HINTED = """
\tadd.s64 %rd30, %rd0, %rd20;
\tadd.s64 %rd31, %rd1, %rd20;
\tld.global.L1::evict_last.L2::cache_hint.b32 %r20, [%rd30], %rd40;
\tst.global.b32 [%rd31], %r20;
"""


def test_a_load_with_a_cache_policy_reads_the_same() -> None:
    values = np.arange(64, dtype=np.uint32)
    results = run_kernel(f"\t{POLICY}{HINTED}", [values, values.size])
    np.testing.assert_array_equal(results[1].reshape(-1), values)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (HINTED, "a cache hint that createpolicy has not made"),
        (f"\tmov.u64 %rd40, 7;{HINTED}", "a cache hint that createpolicy has not made"),
        (f"\t{POLICY}{HINTED.replace('], %rd40;', '];')}", "unknown instruction"),
        (f"\t{POLICY.replace('last', 'first')}{HINTED}", "unknown instruction"),
        (f"\t{POLICY}{HINTED.replace('L2::cache_hint.', '')}", "unknown instruction"),
    ],
)
def test_a_cache_hint_is_a_policy(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run_kernel(body, [np.zeros(64, np.uint32), 64])
