"""Conversions between types (cvt)."""

from __future__ import annotations

from typing import Any

import numpy as np

from iree_lnbwd.emulator import floats
from iree_lnbwd.emulator.ptx.float_arithmetic import f16_to_f32
from iree_lnbwd.emulator.ptx.types import (
    DTYPES,
    Array,
    Function,
    Semantics,
    UnknownInstructionError,
    is_float,
)

_ROUNDINGS: dict[str, Function] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_NARROW = ("f16", "bf16")


def cvt(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """From one type to another, or two floats to the halves of a register."""
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
    widen = {"f16": f16_to_f32, "bf16": floats.from_bf16}.get(source, lambda a: a)
    rounding = next((word for word in how if word in _ROUNDINGS), "")

    def function(a: Array) -> Array:
        values = widen(a)
        if "ftz" in how and values.dtype == np.float32:
            values = floats.flush32(values)
        if rounding:
            values = _ROUNDINGS[rounding](values)
        if is_float(to):
            return _to_float(values, to, how)
        if values.dtype.kind == "f":
            return _to_integer(values, DTYPES[to])
        if "sat" in how:
            limits = np.iinfo(DTYPES[to])
            # Through objects: no NumPy type holds both int64 and uint64.
            values = np.clip(values.astype(object), int(limits.min), int(limits.max))
        return values.astype(DTYPES[to])

    if source in ("f32", "f64", *_NARROW) and not is_float(to) and not rounding:
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
