"""A gate's factor in f64, and how far ours may be off: ``ir/math/gate.mlir`` has the formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.ops.operands import GATE
from iree_lnbwd.verification.row_block import F64, Arithmetic

# Of exp(-|z|): the rest of the division by ln 2, a polynomial, and a power of 2. On a GPU it is 3
# of its power of 2 (2^-22.5 by NVIDIA's PTX ISA, ``ex2.approx``; AMD's are within 2), and a sum.
_EXP_ROUNDINGS = 4
# Of a gate of 16 bits on a GPU: its power of 2, and 2 |z| of the exponent, a product with 1 / ln 2,
# which is rounded.
_POWER_ROUNDINGS = 3
_BYTES_BY_POWER = 2  # an element of such a gate
# Of a sigmoid beside its exponential: a sum, its inverse (a GPU's is within two), and a product.
_SIGMOID_ROUNDINGS = 1 + 2 + 1
# A sigmoid beyond is so small that z times it is less than the step of any type of sums.
_LARGEST = {"f32": 110.0, "f64": 760.0}


@dataclass(frozen=True)
class Silu:
    """Of a block of a gate: its factor, and the factor's derivative.

    Attributes:
        value: ``silu(z)``: [m, N].
        off: [m, N].
        slope: ``silu'(z)``: [m, N].
        slope_off: [m, N].
        arithmetic: Of the call.
    """

    value: F64
    off: F64
    slope: F64
    slope_off: F64
    arithmetic: Arithmetic

    @classmethod
    def of(cls, call: BoundCall, block: slice, arithmetic: Arithmetic) -> Silu | None:
        """Of a block of a call's rows; None without a gate.

        Infinities are as the formula has them: ``silu(-inf)`` and both slopes are NaN.
        """
        if GATE.name not in call.arrays:
            return None
        z = call.arrays[GATE.name][block].astype(np.float64)
        u = arithmetic.u
        e = np.exp(-np.abs(z))
        sigmoid, other = (np.where((z < 0) == below, e, 1.0) / (1 + e) for below in (True, False))
        silu = z * sigmoid
        size = np.minimum(np.abs(z), _LARGEST[arithmetic.accumulator.name])
        exp_roundings: F64 | float = _EXP_ROUNDINGS
        if call.arrays[GATE.name].dtype.itemsize == _BYTES_BY_POWER:
            # A sigmoid is off by as much of its exponential as the other sigmoid is large.
            exp_roundings = np.maximum(exp_roundings, (2 * size + _POWER_ROUNDINGS) * other)
        # The exponential may be subnormal, and flushed by GPUs. Its error is multiplied by z, as
        # far as it is not zero.
        normal = arithmetic.accumulator.smallest_normal
        least = np.where(e < 2 * normal, normal, arithmetic.step)
        relative = (exp_roundings + _SIGMOID_ROUNDINGS) * u
        off = (relative + u) * np.abs(silu) + (size + 1) * 2 * least
        slope = sigmoid + silu * other
        slope_off = (
            (relative + u) * sigmoid
            + (2 * relative + 3 * u) * np.abs(silu * other)
            + (2 * size + 4) * 2 * least
        )
        return cls(silu, off, slope, slope_off, arithmetic)

    def times(self, values: F64, values_off: F64 | float = 0.0) -> tuple[F64, F64]:
        """The product with the factor, and its error."""
        return product((self.value, self.off), (values, values_off), self.arithmetic)

    def times_slope(self, values: F64, values_off: F64 | float = 0.0) -> tuple[F64, F64]:
        """The product with the derivative, and its error."""
        return product((self.slope, self.slope_off), (values, values_off), self.arithmetic)


def product(
    one: tuple[F64, F64 | float], other: tuple[F64, F64 | float], arithmetic: Arithmetic
) -> tuple[F64, F64]:
    """A product of two values that may be off, and its own error."""
    (a, a_off), (b, b_off) = one, other
    value = a * b
    off = np.abs(a) * b_off + np.abs(b) * a_off + a_off * b_off
    return value, off + arithmetic.u * np.abs(value) + arithmetic.step
