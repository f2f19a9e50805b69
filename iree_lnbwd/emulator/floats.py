"""Float operations that NumPy lacks or rounds twice: fused multiply-add, bf16, canonical NaN."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

_HALF_WAY = np.uint64(1 << 28)  # the bits of an f64 below an f32's, half way between two of them
_BELOW_F32 = np.uint64((1 << 29) - 1)
_ONE = np.uint64(1)
_SMALLEST_NORMAL_F32 = np.float32(2.0**-126)
_SPLITTER = 2.0**27 + 1  # Veltkamp's, for f64
# The range in which no intermediate of the error-free transforms overflows or loses low bits.
_LEAST_EXPONENT, _MOST_EXPONENT = -400, 400


def fma32(a: F32, b: F32, c: F32) -> F32:
    """Is a * b + c, rounded once to nearest even.

    The product of two f32 is exact in f64. The sum in f64 is then rounded to f32, a second time:
    that differs from one rounding only where the first ended half way between two f32, or in the
    range of f32's subnormals. Those are recomputed from a sum rounded to odd, which is safe to
    round again (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008).
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    product = a.astype(np.float64) * b
    total = product + c
    result = total.astype(np.float32)
    doubtful = (total.view(np.uint64) & _BELOW_F32) == _HALF_WAY
    doubtful |= (np.abs(result) <= _SMALLEST_NORMAL_F32) & (total != 0)
    if doubtful.any():
        addend = c[doubtful].astype(np.float64)
        result[doubtful] = sum_to_odd(product[doubtful], addend).astype(np.float32)
    return result


def fma64(a: F64, b: F64, c: F64) -> F64:
    """Is a * b + c, rounded once to nearest even.

    By Boldo and Melquiond's algorithm (as `fma32`), and in exact arithmetic for operands so large
    or small that its steps would not be exact.
    """
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    sum_high, sum_low = _two_sum(c, low)
    total, rest = _two_sum(high, sum_high)
    result = total + sum_to_odd(sum_low, rest)
    operands = np.stack([a, b, c])
    exponents = np.frexp(operands)[1]
    wild = (operands != 0) & ((exponents < _LEAST_EXPONENT) | (exponents > _MOST_EXPONENT))
    special = (wild | ~np.isfinite(operands)).any(axis=0)
    for i in np.flatnonzero(special):
        result[i] = _fma_exact(float(a[i]), float(b[i]), float(c[i]))
    zero = ~special & ((a == 0) | (b == 0))
    result[zero] = (a * b + c)[zero]
    return result


def to_bf16(values: F32) -> U16:
    """The bits of the nearest bf16, ties to even; NaN is 0x7fff."""
    bits = values.view(np.uint32)
    one = np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & one)) >> np.uint32(16)
    result = rounded.astype(np.uint16)
    result[np.isnan(values)] = 0x7FFF
    return result


def from_bf16(bits: U16) -> F32:
    """The same numbers as f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(values: F32 | F64) -> U16:
    """The bits of the nearest f16, ties to even; NaN is 0x7fff."""
    result = values.astype(np.float16).view(np.uint16)
    result[np.isnan(values)] = 0x7FFF
    return result


def with_canonical_nan(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Every NaN with all bits set but the sign, as NVIDIA's arithmetic makes it; in place."""
    if (wrong := np.isnan(values)).any():
        unsigned = np.dtype(f"u{values.itemsize}")
        values.view(unsigned)[wrong] = np.iinfo(unsigned).max >> 1
    return values


def flush32(values: F32) -> F32:
    """Subnormals to zero of the same sign."""
    small = np.abs(values) < _SMALLEST_NORMAL_F32
    return np.where(small, np.copysign(np.float32(0), values), values)


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """Is a + b, and what rounding took off it (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """Is a * b, and what rounding took off it (Dekker)."""
    product = a * b
    a_high, b_high = _upper_half(a), _upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _upper_half(a: F64) -> F64:
    scaled = _SPLITTER * a
    return scaled - (scaled - a)


def sum_to_odd(a: F64, b: F64) -> F64:
    """Is a + b, where it is inexact rounded to the neighbour whose last bit is one."""
    total, error = _two_sum(a, b)
    bits = total.view(np.uint64)
    inexact = np.isfinite(error) & (error != 0) & (bits & _ONE == 0)
    away = np.signbit(error) == np.signbit(total)
    return np.where(inexact, np.where(away, bits + _ONE, bits - _ONE), bits).view(np.float64)


def _fma_exact(a: float, b: float, c: float) -> float:
    if not all(np.isfinite((a, b, c))):
        with np.errstate(all="ignore"):
            # Finite operands must not overflow where Inf or NaN decides the result.
            product = np.float64(np.sign(a)) * np.sign(b) if np.isfinite((a, b)).all() else a * b
            return float(product + c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if a == 0 or b == 0 else 0.0  # a sum that cancels is +0
    try:
        return float(exact)
    except OverflowError:
        return math.copysign(math.inf, 1 if exact > 0 else -1)
