"""The judge: layer-norm backward in NumPy, in f64, and how far a right answer may differ.

The formulas are in ``ir/README.md``. Rows are processed in blocks, so that memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iree_lnbwd.arguments import Array, BoundCall, LayerNormGrads
from iree_lnbwd.dtypes import DTYPES, name_of
from iree_lnbwd.spec import GRADIENTS

F64 = npt.NDArray[np.float64]

# Rounding errors of a sum of n terms add up like a random walk: at most LAMBDA * sqrt(n) * u times
# the sum of the terms' magnitudes, but for a probability of 2 exp(-LAMBDA**2 / 2) for each sum.
# Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SISC 41(5), 2019.
LAMBDA = 4.0

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Judgement:
    """The expected gradients, and how far each element of a computed one may differ.

    Attributes:
        expected: f64, rounded to nothing narrower.
        tolerance: f64, the same shapes.
    """

    expected: LayerNormGrads
    tolerance: LayerNormGrads


@dataclass(frozen=True)
class Comparison:
    """How far a computed gradient is from the expected one.

    Attributes:
        error: Largest absolute error over the finite elements.
        tolerance: The tolerance of the element whose error / tolerance is largest.
        ratio: The largest error / tolerance; infinite where an element is wrongly finite,
            infinite or NaN.
    """

    error: float
    tolerance: float
    ratio: float

    @property
    def passed(self) -> bool:
        """Whether every element is within its tolerance."""
        return self.ratio <= 1.0


def judge(call: BoundCall) -> Judgement:
    """The expected gradients of a bound call, and their tolerances.

    The tolerance of each element is the output's unit roundoff times its magnitude, plus the
    accumulator's unit roundoff times the magnitudes that were added up for it, times the number of
    roundings: a few for each product, ``LAMBDA * sqrt(length)`` for each sum. If a product is
    subnormal, its rounding is half a step between subnormal numbers instead, because none of our
    code flushes them. (Their sums are exact.) The tolerance covers both orders of dx's products:
    ``rstd`` last, and on GPUs ``rstd`` first, where ``rstd / N`` may itself be subnormal.
    """
    if call.spec is None:
        nothing = LayerNormGrads(None, None, None)
        return Judgement(nothing, nothing)
    columns = call.spec.columns
    accumulator = DTYPES[call.spec.acc_dtype]
    u, step = accumulator.unit_roundoff, accumulator.smallest_subnormal
    row_u = u * LAMBDA * np.sqrt(columns)
    column_u = u * LAMBDA * np.sqrt(max(call.rows, 1))

    dx, dx_tolerance = np.empty((2, call.rows, columns))
    dgamma, dgamma_tolerance, dbeta, dbeta_tolerance = (_ColumnSums(columns) for _ in range(4))
    gamma = (
        call.arrays["weight"].astype(np.float64) if "weight" in call.arrays else np.ones(columns)
    )
    # Inf and NaN are valid data here, so there is no warning about them.
    with np.errstate(all="ignore"):
        for block in _blocks(call.rows, columns):
            dy, x = (call.arrays[n][block].astype(np.float64) for n in ("grad_output", "input"))
            mean, rstd, mean_off, rstd_off = _statistics(call, block, x, row_u)
            xhat = (x - mean) * rstd
            xhat_off = np.abs(xhat) * (2 * u + rstd_off) + mean_off * np.abs(rstd) + step
            h = dy * gamma
            mean_h = h.mean(axis=1, keepdims=True)
            mean_hx = (h * xhat).mean(axis=1, keepdims=True)
            dx[block] = rstd * (h - mean_h - xhat * mean_hx)

            abs_h = np.abs(h)
            mean_h_off = (row_u + 2 * u) * abs_h.mean(axis=1, keepdims=True) + 2 * step
            mean_hx_off = (row_u + 3 * u) * np.abs(h * xhat).mean(axis=1, keepdims=True) + (
                abs_h * xhat_off + (np.abs(xhat) + 1) * step
            ).mean(axis=1, keepdims=True)
            terms = abs_h + np.abs(mean_h) + np.abs(xhat * mean_hx)
            dx_tolerance[block] = np.abs(rstd) * (
                (4 * u + rstd_off) * terms
                + mean_h_off
                + np.abs(xhat) * mean_hx_off
                + np.abs(mean_hx) * xhat_off
                + 3 * step
            )
            # rstd / N, its products with the two sums, of which the second is multiplied by xhat,
            # and the two that these are added to.
            dx_tolerance[block] += (
                columns * (np.abs(mean_h) + np.abs(xhat * mean_hx)) + np.abs(xhat) + 3
            ) * (step / 2)
            dgamma.add(dy * xhat)
            dbeta.add(dy)
            dgamma_tolerance.add(
                (column_u + 2 * u) * np.abs(dy * xhat) + np.abs(dy) * xhat_off + step
            )
            dbeta_tolerance.add(column_u * np.abs(dy))
    shapes = (call.shape, call.spec.normalized_shape, call.spec.normalized_shape)
    outputs = {result.name: DTYPES[result.dtype] for result in call.spec.results}
    expected: list[F64 | None] = []
    tolerance: list[F64 | None] = []
    for name, shape, value, off in zip(
        GRADIENTS,
        shapes,
        (dx, dgamma.total, dbeta.total),
        (dx_tolerance, dgamma_tolerance.total, dbeta_tolerance.total),
        strict=True,
    ):
        if name not in outputs:
            expected.append(None)
            tolerance.append(None)
            continue
        output = outputs[name]
        rounding = output.unit_roundoff * (np.abs(value) + off)
        rounding = np.maximum(rounding, output.smallest_subnormal)
        expected.append(value.reshape(shape))
        tolerance.append((off + rounding).reshape(shape))
    return Judgement(LayerNormGrads(*expected), LayerNormGrads(*tolerance))


class _ColumnSums:
    """Sums over rows, more exact than NumPy's, which adds rows one after the other.

    NumPy's sum of many equal f64 numbers has a larger error than the tolerance allows.
    """

    def __init__(self, columns: int) -> None:
        self._sums, self._lost = np.zeros((2, columns))

    def add(self, rows: F64) -> None:
        """Adds a block of rows [m, N] pairwise, and keeps the error of adding it to the others."""
        while len(rows) > 1:
            half = len(rows) // 2
            odd = rows[2 * half :]
            rows = rows[:half] + rows[half : 2 * half]
            rows[: len(odd)] += odd
        for row in rows:
            total = self._sums + row  # Knuth's exact sum of two
            added = total - self._sums
            self._lost += (self._sums - (total - added)) + (row - added)
            self._sums = total

    @property
    def total(self) -> F64:
        """The sums over all blocks, one for each column."""
        return np.where(np.isfinite(self._lost), self._sums + self._lost, self._sums)


def compare(actual: Array, expected: F64, tolerance: F64) -> Comparison:
    """How far ``actual`` is from ``expected``, in units of ``tolerance``.

    If the expected value is infinite or NaN, the actual value must be infinite or NaN, too (the
    order of additions decides which). If the expected value is finite but beyond the output type's
    range, rounding to infinity is right.
    """
    name = name_of(actual.dtype)
    assert name is not None
    limit = DTYPES[name].largest
    got = actual.astype(np.float64)
    with np.errstate(all="ignore"):
        overflows = np.isfinite(expected) & (np.abs(expected) + tolerance > limit)
        got = np.where(overflows, np.clip(got, -limit, limit), got)
        want = np.where(overflows, np.clip(expected, -limit, limit), expected)
        error = np.abs(got - want)
        ratio = np.where(
            np.isfinite(want),
            np.where(np.isfinite(got), error / tolerance, np.inf),
            np.where(np.isfinite(got), np.inf, 0.0),
        )
    if ratio.size == 0:
        return Comparison(0.0, 0.0, 0.0)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    finite = error[np.isfinite(error)]
    return Comparison(float(finite.max(initial=0.0)), float(tolerance[worst]), float(ratio[worst]))


def _statistics(
    call: BoundCall, block: slice, x: F64, row_u: float
) -> tuple[F64, F64, F64 | float, F64 | float]:
    """Mean and rstd as columns, the error of a computed mean, and the relative error of rstd."""
    if "mean" in call.arrays:
        given = (call.arrays[name][block].astype(np.float64)[:, None] for name in ("mean", "rstd"))
        mean, rstd = given
        return mean, rstd, 0.0, 0.0
    assert call.spec is not None
    assert call.spec.eps is not None
    accumulator = DTYPES[call.spec.acc_dtype]
    u, step = accumulator.unit_roundoff, accumulator.smallest_subnormal
    mean = x.mean(axis=1, keepdims=True)
    var = x.var(axis=1, keepdims=True)
    rstd = 1 / np.sqrt(var + call.spec.eps)
    mean_off = (row_u + 2 * u) * np.abs(x).mean(axis=1, keepdims=True) + step
    # Relative to var + eps, which a negative eps makes small. The variance is of values centred on
    # the computed mean, whose error enters squared.
    var_off = (row_u + 4 * u) * var + mean_off**2 + 2 * step
    rstd_off = var_off * rstd**2 / 2 + 2 * u
    return mean, rstd, mean_off, rstd_off


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))
