"""Arithmetic of floats: one rounding to nearest even."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from iree_lnbwd.emulator import floats
from iree_lnbwd.emulator.ptx.types import (
    DTYPES,
    Array,
    Function,
    Semantics,
    UnknownInstructionError,
)


def float_arithmetic(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """Sums, products, quotients and fused multiply-adds."""
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
    widen = {"f16": f16_to_f32, "bf16": floats.from_bf16}.get(half)
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


def f16_to_f32(bits: Array) -> Array:
    """The numbers that bits of f16 stand for."""
    return bits.view(np.float16).astype(np.float32)


def _fma_half(a: Array, b: Array, c: Array) -> Array:
    """A fused multiply-add of two-byte floats, in f32, rounded to odd: it is rounded once."""
    total = floats.sum_to_odd(a.astype(np.float64) * b, c.astype(np.float64))
    kept = total.astype(np.float32)
    inexact = np.isfinite(total) & (kept.astype(np.float64) != total)
    too_far = np.abs(kept.astype(np.float64)) > np.abs(total)
    cut = np.where(too_far, kept.view(np.uint32) - np.uint32(1), kept.view(np.uint32))
    return np.where(inexact, cut | np.uint32(1), kept.view(np.uint32)).view(np.float32)


def _by_halves(function: Function, half: str) -> Function:
    """Applies an operation to both halves of a register, each of the type ``half``."""
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
        ("f16", f16_to_f32, floats.to_f16),
        ("bf16", floats.from_bf16, floats.to_bf16),
    ):
        for name in (*simple, "fma"):
            table[type_, name] = _half(to_f32, from_f32, simple.get(name, _fma_half))
            table[f"{type_}x2", name] = _by_halves(table[type_, name], type_)
    for name in (*simple, "fma"):
        table["f32x2", name] = _by_halves(table["f32", name], "f32")
    return table


_ARITHMETIC = _arithmetic()


def one_operand(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """Reciprocals, roots, powers and logarithms."""
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
