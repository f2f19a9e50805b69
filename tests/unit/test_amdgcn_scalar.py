"""Each scalar instruction against Python's integers, wave by wave, with SCC."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from amdgcn_waves import WAVES, Registers, fault_of
from support import random_generator
from test_emulator_instructions import rounded

from iree_lnbwd.ops.arguments import Array

_REPEATS = 40
_M32 = (1 << 32) - 1


def _random(rng: np.random.Generator, kind: str) -> Array:
    bits = int(kind[1:])
    edges = [0, 1, 2, 31, 33, 63, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1]
    values = rng.integers(0, (1 << bits) - 1, WAVES, np.uint64, endpoint=True)
    values = np.where(
        rng.random(WAVES) < 0.5, rng.choice(np.array(edges, np.uint64), WAVES), values
    )
    return values.astype(f"u{bits // 8}").view(f"{kind[0]}{bits // 8}")


def _name(first: int, kind: str) -> str:
    return f"s{first}" if kind.endswith("32") else f"s[{first}:{first + 1}]"


def _overflows(exact: int) -> bool:
    return not -(1 << 31) <= exact < 1 << 31


def _first_set(value: int) -> int:
    return (value & -value).bit_length() - 1


def _bits(value: int, field: int) -> int:
    return value >> (field & 31) & (1 << min(field >> 16 & 0x7F, 32)) - 1


# Result, sources, the result of Python's integers before it is cut, and SCC of sources and the
# result as it was cut; None where SCC is kept.
_Case = tuple[str, str, Callable[..., int], Callable[..., bool] | None]


def _cases() -> dict[str, _Case]:
    def not_zero(*values: int) -> bool:
        return values[-1] != 0

    logic: dict[str, Callable[[int, int], int]] = {
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
        "and_not1": lambda a, b: a & ~b,
        "or_not1": lambda a, b: a | ~b,
    }
    cases: dict[str, _Case] = {}
    for bits in (32, 64):
        u, i, most = f"u{bits}", f"i{bits}", bits - 1
        for name, function in logic.items():
            cases[f"s_{name}_b{bits}"] = (u, f"{u} {u}", function, not_zero)
        cases[f"s_not_b{bits}"] = (u, u, lambda a: ~a, not_zero)
        cases[f"s_mov_b{bits}"] = (u, u, lambda a: a, None)
        cases[f"s_brev_b{bits}"] = (
            u,
            u,
            lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2),
            None,
        )
        cases[f"s_ff1_i32_b{bits}"] = ("i32", u, _first_set, None)
        cases[f"s_ctz_i32_b{bits}"] = ("i32", u, _first_set, None)
        of_sign = "s_{}_i32" if bits == 32 else "s_{}_i32_i64"
        for name in (f"s_flbit_i32_b{bits}", f"s_clz_i32_u{bits}"):
            cases[name] = (
                "i32",
                u,
                lambda a, bits=bits: bits - a.bit_length() if a else -1,
                None,
            )
        for name in ("flbit", "cls"):
            cases[of_sign.format(name)] = (
                "i32",
                i,
                lambda a, bits=bits: -1 if a in (0, -1) else bits - max(a, ~a).bit_length(),
                None,
            )
        cases[f"s_bcnt0_i32_b{bits}"] = (
            "u32",
            u,
            lambda a, bits=bits: bits - a.bit_count(),
            not_zero,
        )
        cases[f"s_bcnt1_i32_b{bits}"] = ("u32", u, lambda a: a.bit_count(), not_zero)
        shifts: tuple[tuple[str, str, Callable[..., int]], ...] = (
            (f"s_lshl_b{bits}", u, lambda a, b, most=most: a << (b & most)),
            (f"s_lshr_b{bits}", u, lambda a, b, most=most: a >> (b & most)),
            (f"s_ashr_i{bits}", i, lambda a, b, most=most: a >> (b & most)),
        )
        for name, kind, function in shifts:
            cases[name] = (kind, f"{kind} u32", function, not_zero)
    return cases | {
        "s_add_u32": ("u32", "u32 u32", operator.add, lambda a, b, _: a + b > _M32),
        "s_sub_u32": ("u32", "u32 u32", operator.sub, lambda a, b, _: b > a),
        "s_add_i32": ("i32", "i32 i32", operator.add, lambda a, b, _: _overflows(a + b)),
        "s_sub_i32": ("i32", "i32 i32", operator.sub, lambda a, b, _: _overflows(a - b)),
        "s_add_nc_u64": ("u64", "u64 u64", operator.add, None),
        "s_sub_nc_u64": ("u64", "u64 u64", operator.sub, None),
        "s_mul_i32": ("i32", "i32 i32", operator.mul, None),
        "s_mul_u64": ("u64", "u64 u64", operator.mul, None),
        "s_mul_hi_u32": ("u32", "u32 u32", lambda a, b: a * b >> 32, None),
        "s_mul_hi_i32": ("i32", "i32 i32", lambda a, b: a * b >> 32, None),
        "s_min_u32": ("u32", "u32 u32", min, lambda a, b, _: a < b),
        "s_max_u32": ("u32", "u32 u32", max, lambda a, b, _: a > b),
        "s_min_i32": ("i32", "i32 i32", min, lambda a, b, _: a < b),
        "s_max_i32": ("i32", "i32 i32", max, lambda a, b, _: a > b),
        "s_abs_i32": ("i32", "i32", abs, not_zero),
        "s_bfe_u32": ("u32", "u32 u32", _bits, not_zero),
        "s_sext_i32_i16": ("i32", "i32", lambda a: (a & 0xFFFF ^ 0x8000) - 0x8000, None),
        "s_sext_i32_i8": ("i32", "i32", lambda a: (a & 0xFF ^ 0x80) - 0x80, None),
        "s_pack_ll_b32_b16": ("u32", "u32 u32", lambda a, b: a & 0xFFFF | b << 16, None),
        **{
            f"s_lshl{n}_add_u32": (
                "u32",
                "u32 u32",
                lambda a, b, n=n: (a << n) + b,
                lambda a, b, _, n=n: (a << n) + b > _M32,
            )
            for n in range(1, 5)
        },
    }


_CASES = _cases()


@pytest.mark.parametrize("name", _CASES)
def test_arithmetic(name: str) -> None:
    result, sources, exactly, scc = _CASES[name]
    rng = random_generator()
    bits = int(result[1:])
    for _ in range(_REPEATS):
        values = [_random(rng, kind) for kind in sources.split()]
        names = [_name(4 + 2 * n, kind) for n, kind in enumerate(sources.split())]
        registers = Registers(64)
        registers.fill(dict(zip(names, values, strict=True)))
        before = rng.random(WAVES) < 0.5
        registers.group.set_scc(before)
        registers.run(f"{name} {', '.join([_name(0, result), *names])}")
        got = registers.read(_name(0, result), f"u{bits // 8}")
        for wave in range(WAVES):
            numbers = [value[wave].item() for value in values]
            expected = exactly(*numbers) & (1 << bits) - 1
            assert got[wave] == expected, numbers
            flag = before[wave] if scc is None else scc(*numbers, expected)
            assert registers.group.scc()[wave] == flag, numbers


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("bit", [0, 1])
def test_a_bit_is_set(bit: int, bits: int) -> None:
    """Of what was there; others stay, and so does SCC."""
    rng = random_generator()
    for _ in range(_REPEATS):
        start, which = _random(rng, f"u{bits}"), _random(rng, "u32")
        registers = Registers(64)
        registers.fill({_name(0, f"u{bits}"): start, "s4": which})
        before = rng.random(WAVES) < 0.5
        registers.group.set_scc(before)
        registers.run(f"s_bitset{bit}_b{bits} {_name(0, f'u{bits}')}, s4")
        got = registers.read(_name(0, f"u{bits}"), f"u{bits // 8}")
        for wave in range(WAVES):
            one = 1 << int(which[wave]) % bits
            exact = int(start[wave]) | one if bit else int(start[wave]) & ~one
            assert got[wave] == exact
        assert (registers.group.scc() == before).all()


@pytest.mark.parametrize("name", ["s_addc_u32", "s_subb_u32", "s_add_co_ci_u32", "s_sub_co_ci_u32"])
def test_carries(name: str) -> None:
    rng = random_generator()
    sign = 1 if "add" in name else -1
    for _ in range(_REPEATS):
        a, b, carry = _random(rng, "u32"), _random(rng, "u32"), rng.random(WAVES) < 0.5
        registers = Registers(64)
        registers.fill({"s4": a, "s5": b})
        registers.group.set_scc(carry)
        got = registers.run(f"{name} s0, s4, s5").read("s0")
        for wave in range(WAVES):
            exact = int(a[wave]) + sign * (int(b[wave]) + int(carry[wave]))
            assert got[wave] == exact & _M32
            assert registers.group.scc()[wave] == (not 0 <= exact <= _M32)


_RELATIONS = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


@pytest.mark.parametrize("name", _RELATIONS)
@pytest.mark.parametrize("kind", ["u32", "i32", "u64"])
def test_comparisons(kind: str, name: str) -> None:
    rng = random_generator()
    for _ in range(_REPEATS):
        a, b = _random(rng, kind), _random(rng, kind)
        registers = Registers(64)
        registers.fill({_name(4, kind): a, _name(6, kind): b})
        registers.run(f"s_cmp_{name}_{kind} {_name(4, kind)}, {_name(6, kind)}")
        assert (registers.group.scc() == _RELATIONS[name](a, b)).all()


@pytest.mark.parametrize("name", _RELATIONS)
def test_comparisons_with_16_bits(name: str) -> None:
    """Of i32 they have a sign, of u32 they have not."""
    for kind, immediate in (("i32", -2), ("u32", 0xFFFE)):
        a = np.array([immediate & _M32, 0, 0x7FFFFFFF], np.uint32)
        registers = Registers(64)
        registers.fill({"s4": a})
        registers.run(f"s_cmpk_{name}_{kind} s4, 0xfffe")
        typed = a.view(np.int32) if kind == "i32" else a
        assert (registers.group.scc() == _RELATIONS[name](typed.astype(np.int64), immediate)).all()


def test_arithmetic_with_16_bits() -> None:
    start = np.array([5, 0x7FFFFFFF, 0x80000000], np.uint32)
    registers = Registers(64)
    registers.fill({"s4": start, "s5": start})
    registers.run("s_movk_i32 s0, 0x8000", "s_mulk_i32 s5, 0xfffe", "s_addk_i32 s4, 0xffff")
    assert (registers.read("s0", np.int32) == -0x8000).all()
    assert (registers.read("s4") == start - np.uint32(1)).all()
    assert registers.group.scc().tolist() == [False, False, True]
    assert (registers.read("s5") == start * np.uint32(_M32 - 1)).all()


def _floats(rng: np.random.Generator, kind: str) -> Array:
    dtype = f"f{int(kind[1:]) // 8}"
    special = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], dtype), WAVES)
    near = (rng.standard_normal(WAVES) * 8).astype(dtype)
    return np.where(rng.random(WAVES) < 0.3, special, near)


def _filled(values: dict[str, Array]) -> Registers:
    """Registers with floats; f16 are in the lower half, and the upper one is full of ones."""
    registers = Registers(32)
    for name, value in values.items():
        narrow = value.dtype == np.float16
        words = value.view(np.uint16) | np.uint32(0xFFFF0000) if narrow else value.view(np.uint32)
        registers.fill({name: words})
    return registers


@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_arithmetic_of_floats(name: str, kind: str) -> None:
    """An f16 leaves zeros in the upper half."""
    rng, exactly = random_generator(), getattr(operator, name)
    for _ in range(_REPEATS):
        a, b = (rng.integers(-1000, 1000, WAVES) / 64 for _ in range(2))
        dtype = f"f{int(kind[1:]) // 8}"
        registers = _filled({"s4": a.astype(dtype), "s5": b.astype(dtype)})
        got = registers.run(f"s_{name}_{kind} s0, s4, s5", generation=12).read("s0")
        for wave in range(WAVES):
            exact = Fraction(exactly(Fraction(a[wave]), Fraction(b[wave])))
            expected = np.array(rounded(exact, kind, zero=0.0), dtype)
            typed = got[wave : wave + 1].view(dtype)
            assert typed[0] == expected
            assert len(typed) == 1 or typed[1] == 0


def test_a_fused_multiply_add_is_rounded_once() -> None:
    a = np.array([1 + 2.0**-12, 3.0, 1e20], np.float32)
    d = np.array([-1.0, 0.5, -1e30], np.float32)
    registers = _filled({"s0": d, "s4": a, "s5": a})
    got = registers.run("s_fmac_f32 s0, s4, s5", generation=12).read("s0", np.float32)
    for wave in range(WAVES):
        exact = Fraction(float(a[wave])) ** 2 + Fraction(float(d[wave]))
        assert got[wave] == rounded(exact, "f32", zero=0.0)


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_extremes_of_floats(kind: str) -> None:
    """The number where the other is NaN; -0 is less than +0."""
    dtype = f"f{int(kind[1:]) // 8}"
    a, b = np.array([np.nan, -0.0, 2.0], dtype), np.array([1.0, 0.0, -3.0], dtype)
    registers = _filled({"s4": a, "s5": b})
    registers.run(f"s_min_num_{kind} s0, s4, s5", f"s_max_num_{kind} s1, s5, s4", generation=12)
    least, most = (
        registers.read(name).astype(f"u{a.itemsize}").view(dtype) for name in ("s0", "s1")
    )
    assert least.tolist() == [1.0, 0.0, -3.0]
    assert np.signbit(least).tolist() == [False, True, True]
    assert most.tolist() == [1.0, 0.0, 2.0]
    assert not np.signbit(most).any()


def _negated(relation: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    return lambda a, b: not relation(a, b)


_OF_FLOATS: dict[str, Callable[[float, float], bool]] = _RELATIONS | {
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "neq": operator.ne,
}
for _name_of in ("lg", "gt", "ge", "lt", "le"):
    _OF_FLOATS[f"n{_name_of}"] = _negated(_OF_FLOATS[_name_of])


@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("name", _OF_FLOATS)
def test_comparisons_of_floats(name: str, kind: str) -> None:
    rng = random_generator()
    for _ in range(_REPEATS):
        a, b = _floats(rng, kind), _floats(rng, kind)
        registers = _filled({"s4": a, "s5": b})
        registers.run(f"s_cmp_{name}_{kind} s4, s5", generation=12)
        expected = [_OF_FLOATS[name](float(a[n]), float(b[n])) for n in range(WAVES)]
        assert registers.group.scc().tolist() == expected


def test_conversions() -> None:
    x = np.array([-2.5, 3.7, 1e30], np.float32)
    registers = _filled({"s4": x, "s6": np.array([1.5, -2.0, 0.25], np.float16)})
    registers.fill({"s5": np.array([3, -7, 1 << 24], np.int32)})
    registers.run(
        "s_cvt_i32_f32 s0, s4",
        "s_cvt_u32_f32 s1, s4",
        "s_cvt_f32_i32 s2, s5",
        "s_cvt_f32_u32 s3, s5",
        "s_cvt_f32_f16 s7, s6",
        "s_cvt_f16_f32 s8, s4",
        "s_cvt_hi_f32_f16 s9, s6",
        generation=12,
    )
    assert registers.read("s0", np.int32).tolist() == [-2, 3, (1 << 31) - 1]
    assert registers.read("s1").tolist() == [0, 3, _M32]
    assert registers.read("s2", np.float32).tolist() == [3.0, -7.0, 2.0**24]
    assert registers.read("s3", np.float32).tolist() == [3.0, 2.0**32, 2.0**24]
    assert registers.read("s7", np.float32).tolist() == [1.5, -2.0, 0.25]
    assert registers.read("s8").tolist() == [0xC100, 0x4366, 0x7C00]
    assert np.isnan(registers.read("s9", np.float32)).all()


def test_roundings() -> None:
    x = np.array([-2.5, 3.5, 0.7], np.float32)
    registers = _filled({"s4": x})
    names = ("ceil", "floor", "trunc", "rndne")
    registers.run(*(f"s_{name}_f32 s{n}, s4" for n, name in enumerate(names)), generation=12)
    got = [registers.read(f"s{n}", np.float32).tolist() for n in range(4)]
    assert got == [[-2.0, 4.0, 1.0], [-3.0, 3.0, 0.0], [-2.0, 3.0, 0.0], [-2.0, 4.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "exactly"),
    [("rcp", lambda x: 1 / x), ("sqrt", math.sqrt), ("rsq", lambda x: 1 / math.sqrt(x))],
)
def test_approximations_are_good_to_an_ulp(name: str, exactly: Callable[[float], float]) -> None:
    for _ in range(_REPEATS):
        x = np.exp(random_generator().uniform(-80, 80, WAVES)).astype(np.float32)
        registers = _filled({"s4": x})
        got = registers.run(f"v_s_{name}_f32 s0, s4", generation=12).read("s0", np.float32)
        for wave in range(WAVES):
            exact = exactly(float(x[wave]))
            assert abs(float(got[wave]) - exact) <= abs(exact) * 2.0**-23


def test_selection() -> None:
    registers = Registers(64)
    a, b = np.arange(3, dtype=np.uint32), np.arange(3, 6, dtype=np.uint32)
    registers.fill({"s4": a, "s5": b})
    chosen = np.array([True, False, True])
    registers.group.set_scc(chosen)
    registers.run("s_cselect_b32 s0, s4, s5", "s_cselect_b64 s[2:3], -1, 0")
    assert (registers.read("s0") == np.where(chosen, a, b)).all()
    assert (registers.mask("s[2:3]") == chosen[:, None]).all()


_SAVES: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda source, mask: source & mask,
    "or": lambda source, mask: source | mask,
    "xor": lambda source, mask: source ^ mask,
    "andn2": lambda source, mask: source & ~mask,
    "and_not1": lambda source, mask: source & ~mask,
}


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("name", _SAVES)
def test_exec_is_saved_and_combined(name: str, lanes: int) -> None:
    rng = random_generator()
    active = rng.random((WAVES, lanes)) < 0.5
    mask = rng.integers(0, (1 << lanes) - 1, WAVES, np.uint64).astype(f"u{lanes // 8}")
    mask[0] = 0
    registers = Registers(lanes, active)
    source, target = ("s4", "s0") if lanes == 32 else ("s[4:5]", "s[0:1]")
    registers.fill({source: mask})
    given = registers.mask(source)
    registers.run(f"s_{name}_saveexec_b{lanes} {target}, {source}")
    expected = _SAVES[name](given, active)
    assert (registers.mask(target) == active).all()
    assert (registers.group.active == expected).all()
    assert (registers.group.scc() == expected.any(axis=1)).all()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("s_frob_b32 s0, s1", "instruction not known"),
        ("s_mov_b32 s0, v1", "expected a scalar operand"),
        ("s_mov_b32 s0, -s1", "takes no modifier"),
        ("s_mov_b64 s0, 0", "u64 takes 2 registers"),
        ("s_add_u32 s0, s1", "operands were not expected"),
        ("s_mov_b32 s0, s9", "s9 is used and was never written"),
        ("s_addc_u32 s0, 0, 0", "scc is read and was never written"),
    ],
)
def test_what_is_wrong_is_said(text: str, what: str) -> None:
    assert what in fault_of(Registers(64), text)
