"""How far gradients from the output may be from those from the input.

A backward from the output computes xhat from a number that was rounded when the forward stored it,
and divides by a weight that is kept away from zero. With y the stored output, off by at most ``d``
from ``xhat * g + beta``, and g' the divisor:

    |(y - beta) / g' - xhat|  <=  d / |g'|  +  |xhat| * |1 - g / g'|

d is half a unit in y's last place, ``u * |y|``, so the first term is ``u * |xhat + beta / g|``
where no divisor is kept away: as small as y's own rounding if the bias is not large against g. The
second term is zero there. Where g is zero, nothing of xhat is in y, and the bound is
``d / LEAST_WEIGHT + |xhat|``: what the two gradients of that weight differ by is not bounded by
y's precision. The gradient of the input does not suffer as much: g is a factor of its terms.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.ops.dtypes import DType
from iree_lnbwd.verification.row_block import F64, divisor, of_columns
from iree_lnbwd.verification.sums import CallSums


def rounding_of(output: F64, dtype: DType) -> F64:
    """How far a stored output may be from the number that was rounded to it, once."""
    return np.maximum(dtype.unit_roundoff * np.abs(output), dtype.smallest_subnormal / 2)


def xhat_difference(xhat: F64, g: F64, output_off: F64) -> F64:
    """The bound above: [M, N].

    Args:
        xhat: From the input: [M, N].
        g: The weight with its offset: [N], or [M, N].
        output_off: ``d``: [M, N].
    """
    by = divisor(g)
    off: F64 = output_off / np.abs(by) + np.abs(xhat) * np.abs(1 - g / by)
    return off


def gradients_difference(call: BoundCall, output_off: F64) -> Mapping[str, F64]:
    """How far the exact gradients from the output may be from those from the input.

    Args:
        call: A backward from the input, with its statistics.
        output_off: ``d``: [M, N].

    Returns:
        Bounds by ATen's name, as [M, N], [1, N] or [G, N], of all gradients that the op has.
    """
    assert call.spec is not None
    have = {name: array.astype(np.float64) for name, array in call.arrays.items()}
    rstd = have["rstd"][:, None]
    mean = have["mean"][:, None] if "mean" in have else np.zeros_like(rstd)
    every = slice(None)
    weight = of_columns(call, "weight", every)
    g = np.ones(call.spec.columns) if weight is None else weight + call.spec.weight_offset
    dy = have["grad_output"]
    xhat = (have["input"] - mean) * rstd
    off = xhat_difference(xhat, g, output_off)
    h = dy * g
    # dx = rstd * (h - mean_N(h) - xhat * mean_N(h * xhat)); both factors of the product are off.
    mean_hx = np.abs((h * xhat).mean(axis=1, keepdims=True))
    mean_hx_off = (np.abs(h) * off).mean(axis=1, keepdims=True)
    grad_weight = CallSums(call, call.spec.columns)
    grad_weight.add(every, np.abs(dy) * off)
    return {
        "grad_input": np.abs(rstd) * (mean_hx * off + (np.abs(xhat) + off) * mean_hx_off),
        "grad_weight": grad_weight.total,
        "grad_bias": np.zeros_like(grad_weight.total),
    }
