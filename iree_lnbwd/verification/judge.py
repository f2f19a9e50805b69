"""The judge: what a right answer is, in NumPy and in f64, and how far it may differ.

The formulas are in ``ir/README.md``. Rows are processed in blocks, so that memory stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES, name_of
from iree_lnbwd.verification.backward import gradients
from iree_lnbwd.verification.forward import outputs
from iree_lnbwd.verification.row_block import F64


@dataclass(frozen=True)
class Judgement:
    """The expected results, and how far each element of a computed one may differ.

    Attributes:
        expected: f64, by ATen's name, in the caller's shapes. Gradients that were not asked for
            are missing.
        tolerance: f64, of the same names and shapes.
    """

    expected: Mapping[str, F64]
    tolerance: Mapping[str, F64]


@dataclass(frozen=True)
class Comparison:
    """How far a computed result is from the expected one.

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
    """The expected results of a bound call, and their tolerances.

    The tolerance of each element is the output's unit roundoff times its magnitude, plus the
    accumulator's unit roundoff times the magnitudes that were added up for it, times the number of
    roundings: a few for each product, ``LAMBDA * sqrt(length)`` for each sum. If a product is
    subnormal, its rounding is half a step between subnormal numbers instead, because none of our
    code flushes them. (Their sums are exact.) ``residual_output`` has to match to the bit.

    If the variance plus eps is zero but for its rounding errors, its root says nothing, and any
    number or infinity is tolerated, but no NaN.
    """
    if call.spec is None:
        return Judgement({}, {})
    # Inf and NaN are valid data here, so there is no warning about them.
    with np.errstate(all="ignore"):
        judged = gradients(call) if call.spec.family.is_backward else outputs(call)
    expected, tolerance = {}, {}
    for name, result in judged.items():
        shape = call.shape_of(call.spec.family.named(name))
        expected[name] = result.expected.reshape(shape)
        tolerance[name] = result.tolerance.reshape(shape)
    return Judgement(expected, tolerance)


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
