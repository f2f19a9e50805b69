"""The outputs of the family's norms in f64, and how far right ones may differ."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Element
from iree_lnbwd.verification.expectation import Judged
from iree_lnbwd.verification.gate import Silu
from iree_lnbwd.verification.row_block import Arithmetic, Gamma, Normalized, blocks, shifted


def outputs(call: BoundCall) -> dict[str, Judged]:
    """The results of a forward call, by ATen's name, as [M, N] or [M].

    The sum with the residual is made as our code makes it, with the same two roundings, and is
    normalized as it is stored: so it has no error, and has to match to the bit. The tolerance of
    the output covers both orders of its products, ``(x - mean) * rstd`` first and ``rstd * gamma``
    first, and multiply-adds.

    A gate is a factor of what comes before it, without a rounding to a narrow type.
    """
    assert call.spec is not None
    shape = (call.rows, call.spec.columns)
    arithmetic = Arithmetic.of(call.spec, call.rows)
    step, gate_first = arithmetic.step, call.spec.gate_first
    sums = np.empty(shape if "residual" in call.arrays else 0)
    y, y_off = np.empty((2, *shape))
    mean, mean_off, rstd, rstd_off = np.empty((4, call.rows, 1))
    for block in blocks(*shape):
        x = _summed(call, block).astype(np.float64)
        gate = Silu.of(call, block, arithmetic)
        x, x_off = gate.times(x) if gate is not None and gate_first else (x, None)
        row = Normalized.of(call, block, x, arithmetic, x_off)
        gamma = Gamma.of(call, block, arithmetic)
        y[block], off = shifted(call, block, row, gamma, arithmetic)
        y_off[block] = off + np.abs(x - row.mean) * step  # the product may be subnormal
        if gate is not None and not gate_first:
            y[block], y_off[block] = gate.times(y[block], y_off[block])
        mean[block], mean_off[block] = row.mean, row.mean_off
        rstd[block], rstd_off[block] = row.rstd, row.rstd * row.rstd_relative
        if "residual" in call.arrays:
            sums[block] = x
    values = {"output": (y, y_off), "mean": (mean, mean_off), "rstd": (rstd, rstd_off)}
    return {
        result.name: Judged.rounded_once(*values[result.name], DTYPES[result.dtype])
        if result.name in values
        else Judged.to_the_bit(sums)
        for result in call.spec.results
    }


def _summed(call: BoundCall, block: slice) -> Array:
    """What is normalized: the input; with a residual their sum, rounded as it is stored.

    The sum is rounded to the accumulator's type and from that to the residual's.
    """
    x: Array = call.arrays["input"][block]
    if "residual" not in call.arrays:
        return x
    assert call.spec is not None
    wide = DTYPES[call.spec.acc_dtype].numpy
    total: Array = x.astype(wide) + call.arrays["residual"][block].astype(wide)
    return total.astype(DTYPES[call.spec.element_type(Element.RESIDUAL)].numpy)
