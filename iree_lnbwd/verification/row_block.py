"""What the judge knows of a block of rows: xhat and gamma in f64, and how far ours may be off.

Names ending in ``off`` are error bounds: the largest error that a correct computation in the
accumulator's type can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.ops.dtypes import DTYPES, DType
from iree_lnbwd.ops.spec import LEAST_WEIGHT, NormSpec

F64 = npt.NDArray[np.float64]

# Rounding errors of a sum of n terms add up like a random walk: at most LAMBDA * sqrt(n) * u times
# the sum of the terms' magnitudes, but for a probability of 2 exp(-LAMBDA**2 / 2) for each sum.
# Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SISC 41(5), 2019.
# Errors of like numbers, added one after the other, do not: no sum of ours is long (ir/README.md).
LAMBDA = 4.0

# Square root, then division; each correctly rounded, or a GPU's approximation within two.
_RSTD_ROUNDINGS = 4
_INVERSE_ROUNDINGS = 2  # a division

_BLOCK_ELEMENTS = 1 << 20


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a million elements in all, or single rows, so that memory stays small."""
    step = max(1, _BLOCK_ELEMENTS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of a call's accumulator.

    Attributes:
        accumulator: The type of sums.
        row_u: Of a sum over N columns, relative to the sum of its terms' magnitudes.
        column_u: Of a sum over M rows.
    """

    accumulator: DType
    row_u: float
    column_u: float

    @classmethod
    def of(cls, spec: NormSpec, rows: int) -> Arithmetic:
        """For a spec, and M rows; of a weight with sets, the most rows of a set."""
        accumulator = DTYPES[spec.acc_dtype]
        u = accumulator.unit_roundoff * LAMBDA
        return cls(accumulator, u * spec.columns**0.5, u * max(rows, 1) ** 0.5)

    @property
    def u(self) -> float:
        """The unit roundoff: of one product or one addition, relative to it."""
        return self.accumulator.unit_roundoff

    @property
    def step(self) -> float:
        """The distance of subnormal numbers. Our code flushes none of them."""
        return self.accumulator.smallest_subnormal

    def constant_off(self, number: float) -> float:
        """The error of a number that is a constant of the accumulator's type in our code."""
        return abs(number - float(self.accumulator.numpy.type(number)))


@dataclass(frozen=True)
class Gamma:
    """What xhat is multiplied by.

    Attributes:
        value: ``weight_offset + weight``, or ones: [N], or [m, N] where rows take several sets.
        off: Likewise.
    """

    value: F64
    off: F64

    @classmethod
    def of(cls, call: BoundCall, block: slice, arithmetic: Arithmetic) -> Gamma:
        """Of a block of a call's rows. Without an offset it is the weight, which is exact."""
        assert call.spec is not None
        value = of_columns(call, "weight", block)
        if value is None:
            return cls(np.ones(call.spec.columns), np.zeros(call.spec.columns))
        offset = call.spec.weight_offset
        if offset == 0:
            return cls(value, np.zeros_like(value))
        value += offset
        return cls(value, arithmetic.u * np.abs(value) + arithmetic.constant_off(offset))


def of_columns(call: BoundCall, name: str, block: slice) -> F64 | None:
    """What a block of rows takes of a parameter: [N], or [m, N] of sets; None without it."""
    if name not in call.arrays:
        return None
    array = call.arrays[name]
    if call.sets is not None:
        array = array[call.sets.of_rows(call.rows)[block]]
    values: F64 = array.astype(np.float64)
    return values


def divisor(g: F64) -> F64:
    """What an output without its bias is divided by: a weight, kept away from zero.

    Below `LEAST_WEIGHT` in magnitude it is that, with g's sign; a zero has one, too.
    """
    return np.where(np.abs(g) < LEAST_WEIGHT, np.copysign(LEAST_WEIGHT, g), g)


@dataclass(frozen=True)
class Normalized:
    """A block of m rows, normalized.

    Attributes:
        mean: [m, 1]; zeros where the op does not centre, or reads no mean.
        mean_off: [m, 1].
        rstd: [m, 1].
        rstd_relative: How far rstd may be off, relative to it: [m, 1].
        xhat: [m, N].
        xhat_off: [m, N].
    """

    mean: F64
    mean_off: F64
    rstd: F64
    rstd_relative: F64
    xhat: F64
    xhat_off: F64

    @classmethod
    def of(
        cls,
        call: BoundCall,
        block: slice,
        x: F64,
        arithmetic: Arithmetic,
        x_off: F64 | None = None,
    ) -> Normalized:
        """A block of a call's rows, by the call's statistics if it has them, else by its own.

        Args:
            call: Says how.
            block: The rows.
            x: What is normalized: [m, N].
            arithmetic: Of the call.
            x_off: How far ours may be from it: [m, N]. None means not at all.
        """
        assert call.spec is not None
        centres = call.spec.family.centres
        if "rstd" in call.arrays:
            rstd = call.arrays["rstd"][block].astype(np.float64)[:, None]
            zeros = np.zeros_like(rstd)
            mean = call.arrays["mean"][block].astype(np.float64)[:, None] if centres else zeros
            mean_off, rstd_relative = zeros, zeros
        else:
            mean, mean_off, rstd, rstd_relative = _statistics(call.spec, x, arithmetic, x_off)
        xhat = (x - mean) * rstd
        roundings = 2 if centres else 1
        xhat_off = (
            np.abs(xhat) * (roundings * arithmetic.u + rstd_relative)
            + mean_off * np.abs(rstd) * (1 + rstd_relative)
            + arithmetic.step
        )
        if x_off is not None:
            xhat_off += x_off * np.abs(rstd) * (1 + rstd_relative)
        return cls(mean, mean_off, rstd, rstd_relative, xhat, xhat_off)

    @classmethod
    def of_output(
        cls, call: BoundCall, block: slice, y: F64, gamma: Gamma, arithmetic: Arithmetic
    ) -> Normalized:
        """A block of a call's rows, from the forward's output: ``(y - beta) / g'``.

        The tolerance covers a division, and a product with a rounded ``1 / g'``.

        Args:
            call: Has the bias, if there is one, and rstd.
            block: The rows.
            y: The stored output: [m, N].
            gamma: ``g``, of the block.
            arithmetic: Of the call.
        """
        rstd = call.arrays["rstd"][block].astype(np.float64)[:, None]
        zeros = np.zeros_like(rstd)
        u, step = arithmetic.u, arithmetic.step
        bias = of_columns(call, "bias", block)
        has_bias = bias is not None
        scaled = y if bias is None else y - bias
        xhat = scaled / divisor(gamma.value)
        # The divisor is off as g is, and as the constant is. If g may be on either side of zero,
        # so may the divisor.
        size = np.abs(gamma.value)
        least = np.maximum(size - gamma.off, LEAST_WEIGHT)
        inverse_off = np.where(
            (gamma.off > 0) & (size <= gamma.off),
            2 / LEAST_WEIGHT,
            1 / least - 1 / np.maximum(size, LEAST_WEIGHT),
        )
        inverse_off += (least <= LEAST_WEIGHT) * (
            arithmetic.constant_off(LEAST_WEIGHT) / LEAST_WEIGHT**2
        )
        inverse_off += float(np.finfo(arithmetic.accumulator.numpy).tiny)  # GPUs may flush it
        roundings = _INVERSE_ROUNDINGS + 1 + has_bias
        xhat_off = (
            roundings * u * np.abs(xhat) + (1 + roundings * u) * np.abs(scaled) * inverse_off + step
        )
        return cls(zeros, zeros, rstd, zeros, xhat, xhat_off)


def shifted(
    call: BoundCall, block: slice, row: Normalized, gamma: Gamma, arithmetic: Arithmetic
) -> tuple[F64, F64]:
    """What a norm gives of a block, ``xhat * gamma + beta``, and its error: [m, N]."""
    scaled = row.xhat * gamma.value
    beta = of_columns(call, "bias", block)
    value = scaled if beta is None else scaled + beta
    off = (
        np.abs(gamma.value) * row.xhat_off
        + np.abs(row.xhat) * gamma.off
        + arithmetic.u * (np.abs(scaled) + np.abs(value))
        + arithmetic.step  # rstd * gamma may be subnormal
    )
    return value, off


def _statistics(
    spec: NormSpec, x: F64, arithmetic: Arithmetic, x_off: F64 | None
) -> tuple[F64, F64, F64, F64]:
    """Mean, its error, rstd and its relative error, of each row, as columns."""
    assert spec.eps is not None
    u, step, row_u = arithmetic.u, arithmetic.step, arithmetic.row_u
    if spec.family.centres:
        mean = x.mean(axis=1, keepdims=True)
        mean_off = (row_u + 2 * u) * np.abs(x).mean(axis=1, keepdims=True) + step
        square = x.var(axis=1, keepdims=True)
    else:
        mean, mean_off = np.zeros((2, len(x), 1))
        square = (x * x).mean(axis=1, keepdims=True)
    # The variance is of values centred on the computed mean, whose error enters squared.
    if x_off is not None:
        # The values are off, too: their squares by twice the product, and by its own square.
        centred = np.abs(x - mean)
        square_off = (2 * centred * x_off + x_off**2).mean(axis=1, keepdims=True)
        if spec.family.centres:
            mean_off += x_off.mean(axis=1, keepdims=True)
    else:
        square_off = np.zeros_like(square)
    square_off += (row_u + 5 * u) * square + mean_off**2 + 2 * step
    # Relative to the sum with eps, which a negative eps makes small. It is infinite only where an
    # element is, and then rstd is zero.
    total = square + spec.eps
    total_off = square_off + arithmetic.constant_off(spec.eps) + u * np.abs(total)
    relative = np.where(np.isinf(total), 0.0, np.minimum(total_off / total, 1.0))
    rstd_relative = np.expm1(-np.log1p(-relative) / 2) + _RSTD_ROUNDINGS * u
    return mean, mean_off, 1 / np.sqrt(total), rstd_relative
