"""Floating point for arrays of any shape: fused multiply-add, and AMD's minimum and maximum.

NumPy's own f16, f32 and f64 operations round to nearest even and keep subnormals, which is what the
kernels ask for (``.amdhsa_float_round_mode_32 0``, ``.amdhsa_float_denorm_mode_32 3``).
"""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.floats import fma32, fma64
from iree_lnbwd.emulator.launch import Array


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` in f16, rounded once.

    The sum in f64 is exact, except where one side is so small that it changes no f16.
    """
    result: Array = (a.astype(np.float64) * b + c).astype(np.float16)
    return result


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` in f32, rounded once."""
    return fma32(a, b, c)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` in f64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return fma64(a.reshape(-1), b.reshape(-1), c.reshape(-1)).reshape(a.shape)


def maximum(a: Array, b: Array) -> Array:
    """The larger one; the other one where one is NaN; +0 is larger than -0."""
    return _extreme(np.fmax(a, b), a, b, np.logical_and)


def minimum(a: Array, b: Array) -> Array:
    """The smaller one; the other one where one is NaN; -0 is smaller than +0."""
    return _extreme(np.fmin(a, b), a, b, np.logical_or)


def _extreme(of_numbers: Array, a: Array, b: Array, negative: np.ufunc) -> Array:
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return of_numbers
    sign = negative(np.signbit(a), np.signbit(b))
    return np.where(zeros, np.where(sign, -0.0, 0.0).astype(of_numbers.dtype), of_numbers)
