"""Each vector instruction against Python's integers and fractions, lane by lane."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from amdgcn_waves import WAVES, Registers, fault_of
from support import random_generator
from test_emulator_instructions import rounded

from iree_lnbwd.ops.arguments import Array

_LANES = 64
_SHAPE = (WAVES, _LANES)
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_NAMES = {"u": "u", "i": "i", "b": "u", "f": "f"}


def random(rng: np.random.Generator, kind: str) -> Array:
    """Random bits, the ends of the range, and small numbers."""
    bits = int(kind[1:])
    if kind[0] == "f":
        return _random_floats(rng, bits)
    values = rng.integers(0, (1 << bits) - 1, _SHAPE, np.uint64, endpoint=True)
    edges = [0, 1, 2, 31, 32, 63, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    chosen = rng.choice(np.array(edges, np.uint64), _SHAPE)
    values = np.where(rng.random(_SHAPE) < 0.4, chosen, values)
    return values.astype(f"u{bits // 8}").view(f"{_NAMES[kind[0]]}{bits // 8}")


def _random_floats(rng: np.random.Generator, bits: int) -> Array:
    unsigned, dtype = f"u{bits // 8}", f"f{bits // 8}"
    values = rng.integers(0, (1 << bits) - 1, _SHAPE, np.uint64, endpoint=True)
    anything: Array = values.astype(unsigned).view(dtype)
    # Signalling NaN are quiet after any operation; that is not what is tested here.
    anything = np.where(np.isnan(anything), np.array(np.nan, dtype), anything)
    near = rng.standard_normal(_SHAPE).astype(dtype)
    few = rng.integers(-4096, 4096, _SHAPE).astype(dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    special = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, 1.0], dtype), _SHAPE)
    return np.choose(rng.integers(0, 4, _SHAPE), [anything, near, few, special])


def number(value: Any) -> Any:
    """A NumPy scalar as Python's number."""
    return value.item()


# The same of gfx11, which reads and writes halves of registers.
OF_HALVES: dict[str, Callable[[int, int], int]] = {
    "v_add_nc_u16": operator.add,
    "v_sub_nc_u16": operator.sub,
    "v_mul_lo_u16": operator.mul,
    "v_and_b16": operator.and_,
    "v_or_b16": operator.or_,
    "v_xor_b16": operator.xor,
    "v_lshlrev_b16": lambda a, b: b << (a & 15),
    "v_lshrrev_b16": lambda a, b: b >> (a & 15),
    "v_ashrrev_i16": lambda a, b: _signed(b, 16) >> (a & 15),
}


@pytest.mark.parametrize("name", OF_HALVES)
def test_integers_in_halves(name: str) -> None:
    rng = random_generator()
    old, a, b = (random(rng, "u32")[:, :32] for _ in range(3))
    registers = Registers(32)
    registers.fill({"v0": old, "v4": a, "v5": b})
    got = registers.run(f"{name} v0.h, v4.l, v5.h", generation=11).read("v0")
    for at in np.ndindex(got.shape):
        exact = OF_HALVES[name](number(a[at]) & 0xFFFF, number(b[at]) >> 16) & 0xFFFF
        assert number(got[at]) == exact << 16 | number(old[at]) & 0xFFFF


_COUNT = {16: 1, 32: 1, 64: 2}


def _name(letter: str, first: int, kind: str) -> str:
    count = _COUNT[int(kind[1:])]
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + 1}]"


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (value >> bits - 1 << bits)


_24 = 0xFFFFFF
# Result, sources, and what a lane computes of Python's integers, before it is cut to the result.
INTEGERS: dict[str, tuple[str, str, Callable[..., int]]] = {
    "v_mov_b32_e32": ("b32", "b32", lambda a: a),
    "v_mov_b64_e32": ("b64", "b64", lambda a: a),
    "v_not_b32_e32": ("u32", "u32", lambda a: ~a),
    "v_bfrev_b32_e32": ("u32", "u32", lambda a: int(f"{a:032b}"[::-1], 2)),
    "v_ffbh_u32_e32": ("i32", "u32", lambda a: 32 - a.bit_length() if a else -1),
    "v_clz_i32_u32_e32": ("i32", "u32", lambda a: 32 - a.bit_length() if a else -1),
    "v_ffbl_b32_e32": ("i32", "u32", lambda a: (a & -a).bit_length() - 1),
    "v_ctz_i32_b32_e32": ("i32", "u32", lambda a: (a & -a).bit_length() - 1),
    "v_ffbh_i32_e32": ("i32", "i32", lambda a: 32 - max(a, ~a).bit_length() if a + 1 >> 1 else -1),
    "v_cls_i32_e32": ("i32", "i32", lambda a: 32 - max(a, ~a).bit_length() if a + 1 >> 1 else -1),
    "v_bcnt_u32_b32": ("u32", "u32 u32", lambda a, b: a.bit_count() + b),
    "v_med3_u32": ("u32", "u32 u32 u32", lambda *abc: sorted(abc)[1]),
    "v_med3_i32": ("i32", "i32 i32 i32", lambda *abc: sorted(abc)[1]),
    "v_and_b32_e32": ("u32", "u32 u32", operator.and_),
    "v_or_b32_e32": ("u32", "u32 u32", operator.or_),
    "v_xor_b32_e32": ("u32", "u32 u32", operator.xor),
    "v_xnor_b32_e32": ("u32", "u32 u32", lambda a, b: ~(a ^ b)),
    "v_or3_b32": ("u32", "u32 u32 u32", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | c),
    "v_bfi_b32": ("u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c),
    "v_bfe_u32": ("u32", "u32 u32 u32", lambda a, b, c: a >> (b & 31) & (1 << (c & 31)) - 1),
    "v_alignbit_b32": ("u32", "u32 u32 u32", lambda a, b, c: (a << 32 | b) >> (c & 31)),
    "v_lshlrev_b32_e32": ("u32", "u32 u32", lambda a, b: b << (a & 31)),
    "v_lshrrev_b32_e32": ("u32", "u32 u32", lambda a, b: b >> (a & 31)),
    "v_ashrrev_i32_e32": ("i32", "u32 i32", lambda a, b: b >> (a & 31)),
    "v_lshlrev_b64": ("u64", "u32 u64", lambda a, b: b << (a & 63)),
    "v_lshrrev_b64": ("u64", "u32 u64", lambda a, b: b >> (a & 63)),
    "v_ashrrev_i64": ("i64", "u32 i64", lambda a, b: b >> (a & 63)),
    "v_lshl_or_b32": ("u32", "u32 u32 u32", lambda a, b, c: a << (b & 31) & _M32 | c),
    "v_lshl_add_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a << (b & 31)) + c),
    "v_add_lshl_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a + b & _M32) << (c & 31)),
    "v_lshl_add_u64": ("u64", "u64 u32 u64", lambda a, b, c: (a << (b & 7)) + c),
    "v_add3_u32": ("u32", "u32 u32 u32", lambda a, b, c: a + b + c),
    "v_xad_u32": ("u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c),
    "v_add_u32_e32": ("u32", "u32 u32", operator.add),
    "v_sub_u32_e32": ("u32", "u32 u32", operator.sub),
    "v_subrev_u32_e32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_add_nc_u32_e32": ("u32", "u32 u32", operator.add),
    "v_sub_nc_u32_e32": ("u32", "u32 u32", operator.sub),
    "v_subrev_nc_u32_e32": ("u32", "u32 u32", lambda a, b: b - a),
    "v_min_u32_e32": ("u32", "u32 u32", min),
    "v_max_u32_e32": ("u32", "u32 u32", max),
    "v_min_i32_e32": ("i32", "i32 i32", min),
    "v_max_i32_e32": ("i32", "i32 i32", max),
    "v_mul_lo_u32": ("u32", "u32 u32", operator.mul),
    "v_mul_hi_u32": ("u32", "u32 u32", lambda a, b: a * b >> 32),
    "v_mul_u32_u24_e32": ("u32", "u32 u32", lambda a, b: (a & _24) * (b & _24)),
    "v_mul_hi_u32_u24_e32": ("u32", "u32 u32", lambda a, b: (a & _24) * (b & _24) >> 32),
    "v_mad_u32_u24": ("u32", "u32 u32 u32", lambda a, b, c: (a & _24) * (b & _24) + c),
    "v_mad_i32_i24": (
        "i32",
        "i32 i32 i32",
        lambda a, b, c: _signed(a & _24, 24) * _signed(b & _24, 24) + c,
    ),
    "v_pack_b32_f16": ("b32", "b16 b16", lambda a, b: a | b << 16),
    "v_add_u16_e32": ("u16", "u16 u16", operator.add),
    "v_sub_u16_e32": ("u16", "u16 u16", operator.sub),
    "v_subrev_u16_e32": ("u16", "u16 u16", lambda a, b: b - a),
    "v_mul_lo_u16_e32": ("u16", "u16 u16", operator.mul),
    "v_lshlrev_b16_e32": ("u16", "u16 u16", lambda a, b: b << (a & 15)),
    "v_lshrrev_b16_e32": ("u16", "u16 u16", lambda a, b: b >> (a & 15)),
    "v_ashrrev_i16_e32": ("i16", "u16 i16", lambda a, b: b >> (a & 15)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    result, sources, exactly = INTEGERS[name]
    rng = random_generator()
    values = [random(rng, kind) for kind in sources.split()]
    names = [_name("v", 4 + 2 * n, kind) for n, kind in enumerate(sources.split())]
    registers = Registers(_LANES)
    words = [v.astype(np.uint32) if v.itemsize == 2 else v for v in values]
    registers.fill(dict(zip(names, words, strict=True)))
    registers.run(f"{name} {', '.join([_name('v', 0, result), *names])}")
    bits = int(result[1:])
    got = registers.read(_name("v", 0, result), f"u{bits // 8}")
    for at in np.ndindex(_SHAPE):
        expected = exactly(*(number(value[at]) for value in values)) & (1 << bits) - 1
        assert got[at] == expected, [hex(number(value[at])) for value in values]


# Sources, what a lane computes, and whether it carries; the last source is the carry that comes in.
CARRIES: dict[str, tuple[int, Callable[..., int]]] = {
    "v_add_co_u32_e64": (2, lambda a, b: a + b),
    "v_sub_co_u32_e64": (2, lambda a, b: a - b),
    "v_subrev_co_u32_e64": (2, lambda a, b: b - a),
    "v_addc_co_u32_e64": (3, lambda a, b, c: a + b + c),
    "v_subb_co_u32_e64": (3, lambda a, b, c: a - b - c),
    "v_subbrev_co_u32_e64": (3, lambda a, b, c: b - a - c),
    "v_add_co_ci_u32_e64": (3, lambda a, b, c: a + b + c),
    "v_sub_co_ci_u32_e64": (3, lambda a, b, c: a - b - c),
    "v_subrev_co_ci_u32_e64": (3, lambda a, b, c: b - a - c),
}


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("name", CARRIES)
def test_carries(name: str, lanes: int) -> None:
    count, exactly = CARRIES[name]
    rng = random_generator()
    active = rng.random((WAVES, lanes)) < 0.8
    registers = Registers(lanes, active)
    a, b = (random(rng, "u32")[:, :lanes] for _ in range(2))
    carry = rng.random((WAVES, lanes)) < 0.5
    words = np.packbits(carry, axis=1, bitorder="little").view(f"u{lanes // 8}")[:, 0]
    registers.fill({"v0": a, "v4": a, "v5": b, _mask(lanes, 10): words})
    sources = ["v4", "v5", _mask(lanes, 10)][:count]
    registers.run(f"{name} {', '.join(['v0', _mask(lanes, 8), *sources])}")
    result, carried = registers.read("v0"), registers.mask(_mask(lanes, 8))
    for at in np.ndindex((WAVES, lanes)):
        exact = exactly(*(number(v[at]) for v in (a, b, carry)[:count]))
        if active[at]:
            assert result[at] == exact & _M32
            assert carried[at] == (not 0 <= exact <= _M32)
        else:
            assert result[at] == a[at]
            assert not carried[at]


def _mask(lanes: int, first: int) -> str:
    return f"s{first}" if lanes == 32 else f"s[{first}:{first + 1}]"


@pytest.mark.parametrize("table", [0x00, 0x01, 0x02, 0x10, 0x36, 0x80, 0x96, 0xCA, 0xFF])
def test_bits_by_a_table(table: int) -> None:
    rng = random_generator()
    values = [random(rng, "u32") for _ in range(3)]
    registers = Registers(_LANES)
    registers.fill(dict(zip(("v4", "v5", "v6"), values, strict=True)))
    got = registers.run(f"v_bitop3_b32 v0, v4, v5, v6 bitop3:{table:#x}").read("v0")
    for at in np.ndindex(_SHAPE):
        a, b, c = (number(value[at]) for value in values)
        places = ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1 for n in range(32))
        assert number(got[at]) == sum((table >> place & 1) << n for n, place in enumerate(places))


def test_accumulation_registers() -> None:
    value = random(random_generator(), "u32")
    registers = Registers(_LANES)
    registers.fill({"v3": value})
    registers.run("v_accvgpr_write_b32 a3, v3", "v_accvgpr_write_b32 a4, 1")
    registers.run("v_accvgpr_read_b32 v0, a3", "v_accvgpr_read_b32 v1, a4")
    assert np.array_equal(registers.read("v0"), value)
    assert (registers.read("v1") == 1).all()
    # What was never written may be copied, and not be used.
    copied = registers.run("v_accvgpr_read_b32 v2, a5")
    assert "v2 is used and was never written" in fault_of(copied, "v_readfirstlane_b32 s0, v2")


def test_multiply_and_add_of_64_bits() -> None:
    rng = random_generator()
    a, b, c = (random(rng, kind) for kind in ("u32", "u32", "u64"))
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b, "v[6:7]": c})
    registers.run("v_mad_u64_u32 v[0:1], s[8:9], v4, v5, v[6:7]")
    got, carried = registers.read("v[0:1]", np.uint64), registers.mask("s[8:9]")
    for at in np.ndindex(_SHAPE):
        exact = number(a[at]) * number(b[at]) + number(c[at])
        assert got[at] == exact & _M64
        assert carried[at] == (exact > _M64)


def test_byte_permutation() -> None:
    rng = random_generator()
    high, low = random(rng, "u32"), random(rng, "u32")
    selectors = rng.integers(0, 16, (*_SHAPE, 4), np.uint8)
    registers = Registers(_LANES)
    registers.fill({"v4": high, "v5": low, "v6": selectors.view(np.uint32)[..., 0]})
    got = registers.run("v_perm_b32 v0, v4, v5, v6").read("v0")
    for at in np.ndindex(_SHAPE):
        data = (number(high[at]) << 32 | number(low[at])).to_bytes(8, "little")
        expected = bytes(_permuted(data, int(selector)) for selector in selectors[at])
        assert number(got[at]).to_bytes(4, "little") == expected


def _permuted(data: bytes, selector: int) -> int:
    if selector < 8:
        return data[selector]
    if selector < 12:
        return 0xFF if data[2 * (selector - 8) + 1] & 0x80 else 0
    return 0 if selector == 12 else 0xFF


_EXACT: dict[str, tuple[int, Callable[..., Fraction], Callable[..., float]]] = {
    "add": (2, operator.add, operator.add),
    "sub": (2, operator.sub, operator.sub),
    "subrev": (2, lambda a, b: b - a, lambda a, b: b - a),
    "mul": (2, operator.mul, operator.mul),
    "fma": (3, lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
}
FLOATS = [
    *(f"v_{name}_{kind}" for name in ("add", "sub", "subrev", "mul") for kind in ("f16", "f32")),
    "v_add_f64",
    "v_mul_f64",
    "v_fma_f32",
    "v_fma_f64",
]


def same(got: Any, expected: float) -> bool:
    """The same number, and the same sign of zero; any NaN is NaN."""
    got = float(got)
    if math.isnan(expected):
        return math.isnan(got)
    return got == expected and math.copysign(1, got) == math.copysign(1, expected)


def exact_float(name: str, kind: str, *values: Any) -> float:
    """One rounding of the exact result; infinities, NaN and signs of zero by f64 arithmetic."""
    _, exactly, approximately = _EXACT[name]
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        if name == "fma" and all(map(math.isfinite, numbers[:2])):
            return numbers[2]  # whatever the product, which f64 may not hold
        return approximately(*numbers)
    exact = exactly(*map(Fraction, numbers))
    zero = approximately(*numbers) if name != "fma" else _zero_of_fma(*numbers)
    return rounded(exact, kind, zero=zero)


def _zero_of_fma(a: float, b: float, c: float) -> float:
    """A sum is -0 where both of its terms are."""
    negative = math.copysign(1, a) * math.copysign(1, b) < 0 and math.copysign(1, c) < 0
    return -0.0 if negative else 0.0


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    what, kind = name.split("_")[1:]
    count = _EXACT[what][0]
    rng = random_generator()
    values = [random(rng, kind) for _ in range(count)]
    registers = Registers(_LANES)
    names = [_name("v", 4 + 2 * n, kind) for n in range(count)]
    words = [v.view(np.uint16).astype(np.uint32) if v.itemsize == 2 else v for v in values]
    registers.fill(dict(zip(names, words, strict=True)))
    registers.run(
        f"{name}{'_e32' if count == 2 else ''} {', '.join([_name('v', 0, kind), *names])}"
    )
    got = registers.read(
        _name("v", 0, kind), np.uint32 if kind == "f16" else f"f{int(kind[1:]) // 8}"
    )
    got = got.astype(np.uint16).view(np.float16) if kind == "f16" else got
    for at in np.ndindex(_SHAPE):
        lane = [value[at] for value in values]
        assert same(got[at], exact_float(what, kind, *lane)), (lane, got[at])


def test_multiply_and_accumulate() -> None:
    rng = random_generator()
    a, b, c = (random(rng, "f32") for _ in range(3))
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b, "v0": c})
    got = registers.run("v_fmac_f32_e32 v0, v4, v5").read("v0", np.float32)
    for at in np.ndindex(_SHAPE):
        assert same(got[at], exact_float("fma", "f32", a[at], b[at], c[at]))


@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed(name: str, kind: str) -> None:
    """Halves of each source, as op_sel and op_sel_hi choose; signs, as neg_lo and neg_hi say."""
    rng = random_generator()
    count, bits = _EXACT[name][0], int(kind[1:])
    pairs = [np.stack([random(rng, kind), random(rng, kind)], axis=-1) for _ in range(count)]
    choices = {
        key: rng.integers(0, 2, count).tolist()
        for key in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    }
    registers = Registers(_LANES)
    names = [_name("v", 4 + 2 * n, f"b{2 * bits}") for n in range(count)]
    words = [pair.view(f"u{bits // 4}")[..., 0] for pair in pairs]
    registers.fill(dict(zip(names, words, strict=True)))
    said = " ".join(f"{key}:[{','.join(map(str, of))}]" for key, of in choices.items())
    target = _name("v", 0, f"b{2 * bits}")
    registers.run(f"v_pk_{name}_{kind} {', '.join([target, *names])} {said}")
    got = registers.read(target, f"u{bits // 4}")[..., None].view(f"f{bits // 8}")
    for half, (chosen, signs) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi"))):
        for at in np.ndindex(_SHAPE):
            values = [pair[at][choices[chosen][n]] for n, pair in enumerate(pairs)]
            values = [-v if choices[signs][n] else v for n, v in enumerate(values)]
            assert same(got[at][half], exact_float(name, kind, *values)), (said, values)


# Two f16 that are added, and their sum: rounding to even, subnormals, overflow, zeros, NaN.
_SUMS_OF_F16 = [
    (0x6800, 0x3C00, 0x6800),  # 2048 + 1 is half way, and 2048 is even
    (0x6801, 0x3C00, 0x6802),  # 2050 + 1 is half way, and 2052 is even
    (0x0001, 0x03FF, 0x0400),  # subnormals that make the smallest normal number
    (0x0400, 0x8001, 0x03FF),
    (0x7BFF, 0x4BFF, 0x7BFF),  # 65504 + 15.99 is nearer to it than to 65536
    (0x7BFF, 0x4C00, 0x7C00),  # 65504 + 16 is half way to Inf
    (0x8000, 0x8000, 0x8000),
    (0x8000, 0x0000, 0x0000),
    (0x7C00, 0xFC00, None),  # NaN
    (0x7E00, 0x3C00, None),
]


@pytest.mark.parametrize(("a", "b", "total"), _SUMS_OF_F16)
def test_packed_f16_rounds_to_even_and_keeps_subnormals(a: int, b: int, total: int | None) -> None:
    """In each half by itself: the other one adds 1 and 2."""
    registers = Registers(_LANES)
    for shift in (0, 16):
        other = 16 - shift
        words = {"v4": a << shift | 0x3C00 << other, "v5": b << shift | 0x4000 << other}
        registers.fill({name: np.full(_SHAPE, word, np.uint32) for name, word in words.items()})
        got = registers.run("v_pk_add_f16 v0, v4, v5").read("v0")
        assert (got >> np.uint32(other) & 0xFFFF == 0x4200).all()
        half = (got >> np.uint32(shift)).astype(np.uint16)
        assert np.isnan(half.view(np.float16)).all() if total is None else (half == total).all()


def test_packed_f16_of_a_scalar_and_a_constant() -> None:
    """A constant is in the lower half, from where op_sel_hi takes it for both."""
    halves = random(random_generator(), "u32").view(np.float16)[:, :2]  # of a scalar, by waves
    registers = Registers(_LANES)
    registers.fill({"s4": np.ascontiguousarray(halves).view(np.uint32)[:, 0]})
    said = "op_sel:[1,0] op_sel_hi:[0,0] neg_lo:[0,1]"
    got = registers.run(f"v_pk_add_f16 v0, s4, -2.0 {said}").read("v0")[..., None].view(np.float16)
    for wave, lane in np.ndindex(_SHAPE):
        low, high = got[wave, lane]
        assert same(low, exact_float("add", "f16", halves[wave, 1], 2.0))
        assert same(high, exact_float("add", "f16", halves[wave, 0], -2.0))


def test_packed_move() -> None:
    rng = random_generator()
    a, b = (random(rng, "u64") for _ in range(2))
    registers = Registers(_LANES)
    registers.fill({"v[4:5]": a, "v[6:7]": b})
    registers.run("v_pk_mov_b32 v[0:1], v[4:5], v[6:7] op_sel:[1,0]")
    assert (registers.read("v0") == a >> np.uint64(32)).all()
    assert (registers.read("v1") == b & np.uint64(_M32)).all()


@pytest.mark.parametrize("name", ["mix_f32", "mixlo_f16", "mixhi_f16"])
def test_mixed_precision(name: str) -> None:
    """Sources are f32, or a half of a register as f16; the documents round f16 results twice."""
    rng = random_generator()
    words = [random(rng, "u32") for _ in range(4)]
    sixteen, upper = [1, 0, 1], [1, 0, 0]
    registers = Registers(_LANES)
    registers.fill({f"v{n}": word for n, word in enumerate(words)})
    registers.run(f"v_fma_{name} v0, v1, -v2, |v3| op_sel:[1,0,0] op_sel_hi:[1,0,1]")
    got = registers.read("v0")
    for at in np.ndindex(_SHAPE):
        sources = []
        for n in range(3):
            bits = number(words[n + 1][at])
            if sixteen[n]:
                half = bits >> 16 if upper[n] else bits & 0xFFFF
                sources.append(float(np.uint16(half).view(np.float16)))
            else:
                sources.append(float(np.uint32(bits).view(np.float32)))
        exact = exact_float("fma", "f32", sources[0], -sources[1], abs(sources[2]))
        if name == "mix_f32":
            assert same(got[at].view(np.float32), exact)
            continue
        half = number(got[at]) >> 16 if name == "mixhi_f16" else number(got[at]) & 0xFFFF
        finite = math.isfinite(exact)
        expected = rounded(Fraction(exact), "f16", zero=exact) if finite else exact
        assert same(np.uint16(half).view(np.float16), expected)
        kept = 0xFFFF if name == "mixhi_f16" else 0xFFFF0000
        assert number(got[at]) & kept == number(words[0][at]) & kept


def test_mixed_precision_of_halves_of_scalars() -> None:
    """As LLVM has it where all lanes have the same f16 weight."""
    words = random(random_generator(), "u32")[:, 0]  # of a scalar, by waves
    halves = np.ascontiguousarray(words).view(np.float16).reshape(-1, 2)
    registers = Registers(_LANES)
    registers.fill({"s4": words})
    for upper in (0, 1):
        said = f"op_sel:[{upper},0,0] op_sel_hi:[1,0,0]"
        got = registers.run(f"v_fma_mix_f32 v0, s4, 1.0, 0 {said}").read("v0").view(np.float32)
        for wave, lane in np.ndindex(_SHAPE):
            exact = exact_float("fma", "f32", float(halves[wave, upper]), 1.0, 0.0)
            assert same(got[wave, lane], exact)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_extremes(name: str, kind: str) -> None:
    rng = random_generator()
    a, b = random(rng, kind), random(rng, kind)
    registers = Registers(_LANES)
    wide = {"v4": a, "v5": b}
    if kind == "f16":
        wide = {n: v.view(np.uint16).astype(np.uint32) for n, v in wide.items()}
    registers.fill(wide)
    got = registers.run(f"v_{name}_{kind}_e32 v0, v4, v5").read("v0")
    got = got.view(np.float32) if kind == "f32" else got.astype(np.uint16).view(np.float16)
    pick = max if name == "max" else min
    for at in np.ndindex(_SHAPE):
        pair = [float(v) for v in (a[at], b[at]) if not math.isnan(v)]
        expected = pick(pair, key=lambda v: (v, math.copysign(1, v))) if pair else math.nan
        assert same(got[at], expected)


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "ne": operator.ne,
    "lg": lambda a, b: a < b or a > b,
    "neq": operator.ne,
    "nlt": lambda a, b: not a < b,
    "nle": lambda a, b: not a <= b,
    "ngt": lambda a, b: not a > b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b),
}


@pytest.mark.parametrize("kind", ["u32", "i32", "u64", "i64", "f32", "f64"])
def test_comparisons(kind: str) -> None:
    """A bit for each active lane, 0 for the others; v_cmpx writes EXEC."""
    rng = random_generator()
    floats = kind[0] == "f"
    a, b = random(rng, kind), random(rng, kind)
    b = np.where(rng.random(_SHAPE) < 0.3, a, b)
    active = rng.random(_SHAPE) < 0.7
    names = _name("v", 4, kind), _name("v", 6, kind)
    known = [
        n
        for n in _RELATIONS
        if (n != "ne" if floats else n in ("eq", "lt", "le", "gt", "ge", "ne"))
    ]
    for name in known:
        registers = Registers(_LANES, active)
        registers.fill(dict(zip(names, (a, b), strict=True)))
        registers.run(f"v_cmp_{name}_{kind}_e64 s[8:9], {', '.join(names)}")
        pairs = zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        expected = np.array([_RELATIONS[name](*pair) for pair in pairs]).reshape(_SHAPE) & active
        assert (registers.mask("s[8:9]") == expected).all(), name
        registers.run(f"v_cmpx_{name}_{kind}_e64 {', '.join(names)}")
        assert (registers.mask("exec") == expected).all(), name


@pytest.mark.parametrize("bits", [32, 64])
def test_classes(bits: int) -> None:
    rng = random_generator()
    unsigned = np.dtype(f"u{bits // 8}")
    x = rng.integers(0, (1 << bits) - 1, _SHAPE, unsigned, endpoint=True)
    inf = int(np.array(np.inf, f"f{bits // 8}").view(unsigned))
    quiet = int(np.array(np.nan, f"f{bits // 8}").view(unsigned))
    edges = [0, 1, inf, quiet, inf + 1, int(np.array(1, f"f{bits // 8}").view(unsigned))]
    edges += [edge | 1 << bits - 1 for edge in edges[:3]]
    x = np.where(rng.random(_SHAPE) < 0.7, rng.choice(np.array(edges, unsigned), _SHAPE), x)
    wanted = rng.integers(0, 1 << 10, _SHAPE, np.uint32)
    registers = Registers(_LANES)
    source = _name("v", 4, f"u{bits}")
    registers.fill({source: x, "v6": wanted})
    got = registers.run(f"v_cmp_class_f{bits}_e32 vcc, {source}, v6").mask("vcc")
    for at in np.ndindex(_SHAPE):
        assert got[at] == bool(number(wanted[at]) >> _class(number(x[at]), bits) & 1)


def _class(word: int, bits: int) -> int:
    fraction_bits = {32: 23, 64: 52}[bits]
    negative, fraction = word >> bits - 1, word & (1 << fraction_bits) - 1
    exponent = word >> fraction_bits & (1 << bits - 1 - fraction_bits) - 1
    if exponent + 1 == 1 << bits - 1 - fraction_bits:
        if fraction:
            return fraction >> fraction_bits - 1
        return 2 if negative else 9
    if exponent:
        return 3 if negative else 8
    if fraction:
        return 4 if negative else 7
    return 5 if negative else 6


def test_selection_and_its_signs() -> None:
    rng = random_generator()
    a, b = random(rng, "f32"), random(rng, "f32")
    mask = rng.integers(0, _M64, WAVES, np.uint64)
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b, "s[8:9]": mask})
    got = registers.run("v_cndmask_b32_e64 v0, -v4, |v5|, s[8:9]").read("v0")
    expected = np.where(
        registers.mask("s[8:9]"), b.view("u4") & 0x7FFFFFFF, a.view("u4") ^ (1 << 31)
    )
    assert (got == expected).all()


_CONVERSIONS: dict[str, tuple[str, str, Callable[[Any], float]]] = {
    "v_cvt_f32_f16": ("f32", "f16", float),
    "v_cvt_f64_f32": ("f64", "f32", float),
    "v_cvt_u32_u16": ("u32", "u16", float),
    "v_cvt_i32_i16": ("i32", "i16", float),
    "v_cvt_f64_u32": ("f64", "u32", float),
    "v_cvt_f64_i32": ("f64", "i32", float),
    "v_cvt_f32_u32": ("f32", "u32", lambda x: rounded(Fraction(int(x)), "f32", zero=0.0)),
    "v_cvt_f32_i32": ("f32", "i32", lambda x: rounded(Fraction(int(x)), "f32", zero=0.0)),
    "v_cvt_f16_f32": ("f16", "f32", lambda x: _narrowed(float(x), "f16")),
    "v_cvt_f32_f64": ("f32", "f64", lambda x: _narrowed(float(x), "f32")),
    "v_cvt_u32_f32": ("u32", "f32", lambda x: _truncated(float(x), 0, _M32)),
    "v_cvt_i32_f32": ("i32", "f32", lambda x: _truncated(float(x), -(1 << 31), (1 << 31) - 1)),
}


def _narrowed(x: float, kind: str) -> float:
    return rounded(Fraction(x), kind, zero=x) if math.isfinite(x) else x


def _truncated(x: float, low: int, high: int) -> float:
    if math.isnan(x):
        return 0.0
    return float(min(max(math.trunc(x) if math.isfinite(x) else x, low), high))


@pytest.mark.parametrize("name", _CONVERSIONS)
def test_conversions(name: str) -> None:
    result, kind, exactly = _CONVERSIONS[name]
    x = random(random_generator(), kind)
    registers = Registers(_LANES)
    words = x.view(np.uint16).astype(np.uint32) if x.itemsize == 2 else x
    registers.fill({_name("v", 4, kind): words})
    registers.run(f"{name}_e32 {_name('v', 0, result)}, {_name('v', 4, kind)}")
    bits = int(result[1:])
    got = registers.read(_name("v", 0, result), f"u{max(4, bits // 8)}")
    typed = got.astype(f"u{bits // 8}").view(f"{result[0]}{bits // 8}")
    for at in np.ndindex(_SHAPE):
        assert same(typed[at], exactly(x[at]) + 0.0 if result[0] in "ui" else exactly(x[at]))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_packed_conversions(kind: str) -> None:
    rng = random_generator()
    a, b = random(rng, "f32"), random(rng, "f32")
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b})
    got = registers.run(f"v_cvt_pk_{kind}_f32 v0, v4, v5").read("v0")
    for half, values in enumerate((a, b)):
        for at in np.ndindex(_SHAPE):
            bits = number(got[at]) >> 16 * half & 0xFFFF
            wide = np.uint32(bits << 16).view(np.float32)
            value = wide if kind == "bf16" else np.uint16(bits).view(np.float16)
            assert same(value, _narrowed(float(values[at]), kind))


@pytest.mark.parametrize(
    ("name", "exactly"),
    [
        ("v_rcp_f32", lambda x: 1 / x),
        ("v_rcp_iflag_f32", lambda x: 1 / x),
        ("v_sqrt_f32", math.sqrt),
        ("v_log_f32", math.log2),
        ("v_rsq_f32", lambda x: 1 / math.sqrt(x)),
    ],
)
def test_approximations_are_good_to_an_ulp(name: str, exactly: Callable[[float], float]) -> None:
    x = np.exp(random_generator().uniform(-80, 80, _SHAPE)).astype(np.float32)
    registers = Registers(_LANES)
    registers.fill({"v4": x})
    got = registers.run(f"{name}_e32 v0, v4").read("v0", np.float32)
    for at in np.ndindex(_SHAPE):
        exact = exactly(float(x[at]))
        assert abs(float(got[at]) - exact) <= abs(exact) * 2.0**-23


@pytest.mark.parametrize(
    ("name", "exactly"),
    [
        ("v_rcp_f64", lambda x: 1 / x),
        ("v_sqrt_f64", math.sqrt),
        ("v_rsq_f64", lambda x: 1 / math.sqrt(x)),
    ],
)
def test_approximations_of_f64_are_no_better_than_promised(
    name: str, exactly: Callable[[float], float]
) -> None:
    """Good to 2^29 ulp, so that code which counts on more goes wrong here as well."""
    x = np.exp(random_generator().uniform(-300, 300, _SHAPE))
    registers = Registers(_LANES)
    registers.fill({"v[4:5]": x})
    got = registers.run(f"{name}_e32 v[0:1], v[4:5]").read("v[0:1]", np.float64)
    for at in np.ndindex(_SHAPE):
        exact = exactly(float(x[at]))
        assert abs(float(got[at]) - exact) <= abs(exact) * 2.0 ** (29 - 53)
    errors = [abs(float(got[at]) / exactly(float(x[at])) - 1) for at in np.ndindex(_SHAPE)]
    assert max(errors) > 2.0**-27


# What compilers make of y / x: y in v[2:3] or v7, x in v[4:5] or v8.
_DIVISIONS = {
    "f32": (
        "v_div_scale_f32 v9, s[2:3], v8, v8, v7",
        "v_rcp_f32_e32 v10, v9",
        "v_fma_f32 v11, -v9, v10, 1.0",
        "v_fmac_f32_e32 v10, v11, v10",
        "v_div_scale_f32 v11, vcc, v7, v8, v7",
        "v_mul_f32_e32 v12, v11, v10",
        "v_fma_f32 v13, -v9, v12, v11",
        "v_fmac_f32_e32 v12, v13, v10",
        "v_fma_f32 v9, -v9, v12, v11",
        "v_div_fmas_f32 v9, v9, v10, v12",
        "v_div_fixup_f32 v0, v9, v8, v7",
    ),
    "f64": (
        "v_div_scale_f64 v[6:7], s[2:3], v[4:5], v[4:5], v[2:3]",
        "v_rcp_f64_e32 v[8:9], v[6:7]",
        "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0",
        "v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]",
        "v_fma_f64 v[10:11], -v[6:7], v[8:9], 1.0",
        "v_fma_f64 v[8:9], v[8:9], v[10:11], v[8:9]",
        "v_div_scale_f64 v[10:11], vcc, v[2:3], v[4:5], v[2:3]",
        "v_mul_f64 v[12:13], v[10:11], v[8:9]",
        "v_fma_f64 v[6:7], -v[6:7], v[12:13], v[10:11]",
        "v_div_fmas_f64 v[6:7], v[6:7], v[8:9], v[12:13]",
        "v_div_fixup_f64 v[0:1], v[6:7], v[4:5], v[2:3]",
    ),
}


@pytest.mark.parametrize("of_one", [True, False])
@pytest.mark.parametrize("kind", _DIVISIONS)
def test_division(kind: str, of_one: bool) -> None:
    """The sequence that compilers make gives the nearest number, where that is normal."""
    rng = random_generator()
    dtype = np.dtype(f"f{int(kind[1:]) // 8}")
    x, y = (_wide_range(rng, kind) for _ in range(2))
    y = np.ones(_SHAPE, dtype) if of_one else y
    registers = Registers(_LANES)
    registers.fill({"v7": y, "v8": x} if kind == "f32" else {"v[2:3]": y, "v[4:5]": x})
    registers.run(*_DIVISIONS[kind])
    got = registers.read(_name("v", 0, kind), dtype)
    limits = np.finfo(dtype)
    for at in np.ndindex(_SHAPE):
        expected = _divided(float(y[at]), float(x[at]), kind)
        if math.isinf(expected) and math.isfinite(y[at]) and x[at]:
            continue  # the documents do not say how an overflow comes out of the last two steps
        if 0 < abs(expected) < limits.smallest_normal:  # is scaled, and rounded again
            assert abs(float(got[at]) - expected) <= limits.smallest_subnormal
        else:
            assert same(got[at], expected), (y[at], x[at])


def _wide_range(rng: np.random.Generator, kind: str) -> Array:
    dtype = np.dtype(f"f{int(kind[1:]) // 8}")
    most = math.log(np.finfo(dtype).max)
    x = np.exp(rng.uniform(1 - most, most - 1, _SHAPE)).astype(dtype)
    signed = (x * rng.choice([-1, 1], _SHAPE)).astype(dtype)
    return np.where(rng.random(_SHAPE) < 0.3, random(rng, kind), signed)


def _divided(y: float, x: float, kind: str) -> float:
    sign = math.copysign(1, x) * math.copysign(1, y)
    if math.isnan(x) or math.isnan(y) or (x == 0 == y) or (math.isinf(x) and math.isinf(y)):
        return math.nan
    if x == 0 or math.isinf(y):
        return sign * math.inf
    if math.isinf(x) or y == 0:
        return sign * 0.0
    return rounded(Fraction(y) / Fraction(x), kind, zero=sign * 0.0)


def test_inactive_lanes_are_kept() -> None:
    rng = random_generator()
    active = rng.random(_SHAPE) < 0.5
    a, old = random(rng, "u32"), random(rng, "u32")
    registers = Registers(_LANES, active)
    registers.fill({"v0": old, "v4": a})
    got = registers.run("v_not_b32_e32 v0, v4").read("v0")
    assert (got == np.where(active, ~a, old)).all()


def test_a_dual_instruction_reads_before_it_writes() -> None:
    rng = random_generator()
    a, b = (random(rng, "u32")[:, :32] for _ in range(2))
    registers = Registers(32)
    registers.fill({"v0": a, "v1": b})
    registers.run("v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0", generation=11)
    assert (registers.read("v0") == b).all()
    assert (registers.read("v1") == a).all()


def test_the_halves_of_a_dual_instruction_share_a_constant() -> None:
    rng = random_generator()
    a, b = (rng.integers(-99, 99, (WAVES, 32)).astype(np.float32) for _ in range(2))
    registers = Registers(32)
    registers.fill({"v2": a, "v3": b})
    registers.run(
        "v_dual_fmamk_f32 v0, v2, 0x42280000, v3 :: v_dual_fmaak_f32 v1, v2, v3, 0x42280000",
        generation=11,
    )
    assert (registers.read("v0", np.float32) == a * 42 + b).all()
    assert (registers.read("v1", np.float32) == a * b + 42).all()


def test_scalars_and_constants_as_sources() -> None:
    registers = Registers(_LANES)
    registers.fill({"s4": np.arange(WAVES, dtype=np.uint32), "v4": np.ones(_SHAPE, np.uint32)})
    registers.run(
        "v_add_u32_e32 v0, s4, v4", "v_add_u32_e32 v1, -16, v4", "v_add_f32_e64 v2, 0.5, 4.0"
    )
    assert (registers.read("v0") == np.arange(WAVES)[:, None] + 1).all()
    assert (registers.read("v1", np.int32) == -15).all()
    assert (registers.read("v2", np.float32) == 4.5).all()


def test_clamp() -> None:
    x = np.array([-1.0, 0.25, 2.0, np.nan], np.float32)
    registers = Registers(_LANES)
    registers.fill({"v4": np.resize(x, _SHAPE)})
    got = registers.run("v_add_f32_e64 v0, v4, 0 clamp").read("v0", np.float32)
    assert (got == np.resize(np.array([0, 0.25, 1, 0], np.float32), _SHAPE)).all()


def test_sdwa_selects_bits() -> None:
    rng = random_generator()
    words = random(rng, "u32")
    registers = Registers(_LANES)
    registers.fill({"v4": words})
    registers.run("v_cvt_f32_f16_sdwa v0, v4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1")
    expected = (words >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(registers.read("v0", np.float32), expected, equal_nan=True)


def test_sdwa_writes_bits_and_zeros() -> None:
    rng = random_generator()
    a, b = random(rng, "u32"), random(rng, "u32")
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b})
    registers.run(
        "v_xor_b32_sdwa v0, v4, v5 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD "
        "src1_sel:DWORD",
        "v_xor_b32_sdwa v1, v4, v5 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD "
        "src1_sel:DWORD",
    )
    assert np.array_equal(registers.read("v0"), (a ^ b) << np.uint32(16))
    assert np.array_equal(registers.read("v1"), ((a ^ b) & np.uint32(0xFF)) << np.uint32(8))


def test_sdwa_selects_what_has_a_sign() -> None:
    """A half that is taken for a number with a sign is one."""
    rng = random_generator()
    a, b = random(rng, "u32"), random(rng, "u32")
    registers = Registers(_LANES)
    registers.fill({"v4": a, "v5": b, "s6": np.full(WAVES, 3, np.uint32)})
    registers.run(
        "v_ashrrev_i16_sdwa v0, s6, v5 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD "
        "src1_sel:WORD_1",
        "v_cmp_lt_i16_sdwa vcc, v4, v5 src0_sel:WORD_1 src1_sel:WORD_0",
    )
    got, less = registers.read("v0"), registers.mask("vcc")
    for at in np.ndindex(_SHAPE):
        assert got[at] == _signed(number(b[at]) >> 16, 16) >> 3 & 0xFFFF
        assert less[at] == (_signed(number(a[at]) >> 16, 16) < _signed(number(b[at]), 16))


def test_halves_of_registers() -> None:
    """gfx11 names halves, and keeps the one that it does not write; gfx9 clears it."""
    rng = random_generator()
    old, word = (random(rng, "u32")[:, :32] for _ in range(2))
    registers = Registers(32)
    registers.fill({"v0": old, "v4": word})
    got = registers.run("v_mov_b16_e32 v0.h, v4.l", generation=11).read("v0")
    assert (got == (word << np.uint32(16) | old & np.uint32(0xFFFF))).all()
    registers.run("v_mov_b16_e32 v0.l, v4.h", generation=11)
    assert (registers.read("v0") & 0xFFFF == word >> np.uint32(16)).all()
    nine = Registers(_LANES)
    nine.fill({"v0": np.full(_SHAPE, _M32, np.uint32), "v4": np.ones(_SHAPE, np.float32)})
    assert (nine.run("v_cvt_f16_f32_e32 v0, v4").read("v0") == 0x3C00).all()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("v_frobnicate_b32 v0, v1", "instruction not known: v_frobnicate_b32"),
        ("v_add_f32_e32 v0, v1, v2 mul:2", "modifiers not known: mul"),
        ("v_add_f32_e32 v0, v1", "operands were not expected"),
        ("v_add_u32_e32 v0, -v1, v2", "no floating-point modifier"),
        ("v_add_f64 v0, v[2:3], v[4:5]", "f64 takes 2 registers"),
        ("v_mov_b32_e32 v0, v2.x", "operand not understood"),
        ("v_mov_b64_e32 v[0:1], 0x80000000", "operand not understood|expected a constant"),
        ("v_mov_b32_dpp v0, v1 row_left:1", "modifiers not known"),
        ("v_add_f32_e32 s0, v1, v2", "expected a vector register"),
        ("v_pk_add_f16 v0, v1, 1.0", "the upper half of a constant: 1.0"),
        ("v_pk_add_f16 v0, v1, 0x3c003c00", "a literal of packed f16: 0x3c003c00"),
        ("v_pk_add_f16 v0, -v1, v2", "a packed operand takes neg_lo and neg_hi, got -v1"),
        ("v_pk_add_f16 v[0:1], v1, v2", "b32 takes 1 registers, got 2"),
    ],
)
def test_what_is_not_known_is_said(text: str, what: str) -> None:
    assert re.search(what, fault_of(Registers(_LANES), text))


def test_unwritten_registers() -> None:
    """Computing on them is no fault; what depends on the result is."""
    registers = Registers(_LANES)
    registers.fill({"v1": np.ones(_SHAPE, np.uint32), "s[8:9]": np.zeros(WAVES, np.uint64)})
    registers.run("v_add_u32_e32 v0, v1, v2")
    assert "v0 is used and was never written" in fault_of(registers, "v_readlane_b32 s0, v0, 0")
    # A selection depends on what it selects alone.
    registers.run("v_cndmask_b32_e64 v3, v1, v2, s[8:9]", "v_readlane_b32 s0, v3, 0")
    # The lower word of a product depends on lower words alone.
    registers.fill({"v4": np.ones(_SHAPE, np.uint32)})
    registers.run("v_mad_u64_u32 v[6:7], s[10:11], v1, v1, v[4:5]", "v_readlane_b32 s0, v6, 0")
    assert "v7" in fault_of(registers, "v_readlane_b32 s0, v7, 0")
    assert "s10" in fault_of(registers, "s_mov_b64 s[0:1], s[10:11]")


def test_unwritten_lanes_move() -> None:
    """What one lane left unwritten is unknown in the lane that reads it."""
    first_only = np.zeros(_SHAPE, np.bool_)
    first_only[:, 0] = True
    registers = Registers(_LANES, first_only)
    registers.run("v_mov_b32_e32 v1, 7", "s_mov_b64 exec, -1")
    registers.run("v_mov_b32_dpp v0, v1 quad_perm:[1,0,0,0] row_mask:0xf bank_mask:0xf")
    registers.run("v_readlane_b32 s0, v0, 2")
    assert (registers.read("s0") == 7).all()
    assert "v0 is used" in fault_of(registers, "v_readlane_b32 s0, v0, 0")


def test_powers_of_two_are_good_to_an_ulp() -> None:
    x = random_generator().uniform(-125, 127, _SHAPE).astype(np.float32)
    registers = Registers(_LANES)
    registers.fill({"v4": x})
    got = registers.run("v_exp_f32_e32 v0, v4").read("v0", np.float32)
    for at in np.ndindex(_SHAPE):
        exact = 2.0 ** float(x[at])
        assert abs(float(got[at]) - exact) <= exact * 2.0**-23


def test_roundings() -> None:
    x = random_generator().choice(np.array([-2.5, 3.5, 0.7, -0.2, 1e30], np.float32), _SHAPE)
    registers = Registers(_LANES)
    registers.fill({"v4": x})
    exactly: dict[str, Callable[[float], int]] = {
        "ceil": math.ceil,
        "floor": math.floor,
        "trunc": math.trunc,
        "rndne": round,
    }
    for name, function in exactly.items():
        got = registers.run(f"v_{name}_f32_e32 v0, v4").read("v0", np.float32)
        expected = [[float(function(float(value))) for value in row] for row in x]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("suffix", ["", "_num"])
def test_extremes_of_three(suffix: str) -> None:
    """Of what is a number, whatever the others are."""
    a = random_generator().choice(np.array([np.nan, 1.0, -3.0, 8.0], np.float32), (3, *_SHAPE))
    registers = Registers(_LANES)
    registers.fill({f"v{n + 1}": values for n, values in enumerate(a)})
    registers.run(f"v_max3{suffix}_f32 v4, v1, v2, v3", f"v_min3{suffix}_f32 v5, v1, v2, v3")
    np.testing.assert_array_equal(registers.read("v4", np.float32), np.fmax.reduce(a))
    np.testing.assert_array_equal(registers.read("v5", np.float32), np.fmin.reduce(a))


def test_halves_are_selected_by_a_mask() -> None:
    rng = random_generator()
    old, a = (random(rng, "u32")[:, :32] for _ in range(2))
    mask = rng.integers(0, _M32, WAVES, np.uint32)
    registers = Registers(32)
    registers.fill({"v0": old, "v4": a, "s0": mask})
    got = registers.run("v_cndmask_b16 v0.h, v4.l, 0x3c00, s0", generation=11).read("v0")
    chosen = np.where(registers.mask("s0"), np.uint32(0x3C00), a & np.uint32(0xFFFF))
    assert (got == (chosen << np.uint32(16) | old & np.uint32(0xFFFF))).all()
