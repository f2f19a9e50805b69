"""A gate's factor in f64, and how far ours may be off: ``ir/math/gate.mlir`` has the formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.ops.operands import GATE
from iree_lnbwd.verification.row_block import F64, Arithmetic

# Of exp(-|z|): the rest of the division by ln 2, a polynomial, and a power of 2.
_EXP_ROUNDINGS = 4
# Of a sigmoid: the exponential, a sum, its inverse (a GPU's is within two), and a product.
_SIGMOID_ROUNDINGS = _EXP_ROUNDINGS + 1 + 2 + 1
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
        u, step = arithmetic.u, arithmetic.step
        e = np.exp(-np.abs(z))
        sigmoid, other = (np.where((z < 0) == below, e, 1.0) / (1 + e) for below in (True, False))
        silu = z * sigmoid
        # The exponential may be subnormal. Its error is multiplied by z, as far as it is not zero.
        size = np.minimum(np.abs(z), _LARGEST[arithmetic.accumulator.name])
        relative = _SIGMOID_ROUNDINGS * u
        off = (relative + u) * np.abs(silu) + (size + 1) * 2 * step
        slope = sigmoid + silu * other
        slope_off = (
            (relative + u) * sigmoid
            + (2 * relative + 3 * u) * np.abs(silu * other)
            + (2 * size + 4) * 2 * step
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
