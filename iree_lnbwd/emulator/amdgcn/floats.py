"""Floating point that NumPy does not have: fused multiply-add, and AMD's minimum and maximum.

NumPy's own f16, f32 and f64 operations round to nearest even and keep subnormals, which is what the
kernels ask for (``.amdhsa_float_round_mode_32 0``, ``.amdhsa_float_denorm_mode_32 3``).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from iree_lnbwd.emulator.launch import Array

_F32_TIE = np.uint64(1 << 28)  # a sum in f64 that lies half-way between two f32
_F32_REST = np.uint64((1 << 29) - 1)  # the bits of an f64 that an f32 lacks
_F32_SMALLEST_NORMAL = 2.0**-126


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` in f32, rounded once.

    The product of two f32 is exact in f64. The sum is rounded to f64 and then to f32, which is
    wrong only where the first rounding hides on which side of a tie the sum lies: there it is
    rounded to odd first (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums").
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    doubtful = (total.view(np.uint64) & _F32_REST) == _F32_TIE
    doubtful |= np.abs(total) < _F32_SMALLEST_NORMAL
    if doubtful.any():
        product, addend = (np.broadcast_to(v, total.shape)[doubtful] for v in (product, addend))
        total[doubtful] = _sum_to_odd(product, addend)
    result: Array = total.astype(np.float32)
    return result


def _sum_to_odd(a: Array, b: Array) -> Array:
    """``a + b`` in f64, rounded to odd: where inexact, the neighbour whose last bit is 1."""
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)  # Knuth's two-sum: exact
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    # Towards the exact sum: away from zero where the error has the sum's sign.
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` in f64, rounded once: by exact fractions where all three are finite."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result = a * b + c
    exact = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    for at in zip(*np.nonzero(exact), strict=True):
        value = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if value:
            result[at] = _nearest_f64(value)
    return result


def _nearest_f64(value: Fraction) -> float:
    try:
        return float(value)  # correctly rounded
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


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


def flush_subnormals(x: Array) -> Array:
    """Subnormal f32 become zeros of their sign."""
    return np.where(np.abs(x) < np.float32(_F32_SMALLEST_NORMAL), np.copysign(np.float32(0), x), x)
