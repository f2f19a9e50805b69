"""One result of a norm: what is expected, and how far a right one may differ."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from iree_lnbwd.ops.dtypes import DType
from iree_lnbwd.verification.row_block import F64

# The tolerance of what has to match to the bit. It is below the distance of any two numbers of a
# type but f64's subnormal ones, whose sums are exact. (Zero could not be divided by.)
_TO_THE_BIT = 5e-324


class Judged(NamedTuple):
    """The expected values of one result, and their tolerances.

    Attributes:
        expected: In f64.
        tolerance: The same shape.
    """

    expected: F64
    tolerance: F64

    @classmethod
    def rounded_once(cls, value: F64, off: F64, result: DType) -> Judged:
        """What is computed within ``off`` of ``value``, and then rounded to the result's type.

        Where zero times an unbounded error says nothing, anything is tolerated.
        """
        rounding = result.unit_roundoff * (np.abs(value) + off)
        tolerance = off + np.maximum(rounding, result.smallest_subnormal)
        return cls(value, np.where(np.isnan(tolerance), np.inf, tolerance))

    @classmethod
    def to_the_bit(cls, value: F64) -> Judged:
        """What every right computation rounds alike."""
        return cls(value, np.full_like(value, _TO_THE_BIT))
