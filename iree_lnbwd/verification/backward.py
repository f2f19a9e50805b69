"""The gradients of the family's norms in f64, and how far right ones may differ."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import GRAD_OUTPUT, MORE_GRAD_OUTPUTS
from iree_lnbwd.verification.expectation import Judged
from iree_lnbwd.verification.gate import Silu, product
from iree_lnbwd.verification.row_block import F64, Arithmetic, Gamma, Normalized, blocks, shifted
from iree_lnbwd.verification.sums import CallSums


def gradients(call: BoundCall) -> dict[str, Judged]:
    """The gradients that a call asks for, by ATen's name, as [M, N], [1, N] or [G, N].

    The tolerance covers both orders of dx's products: ``rstd`` last, and on GPUs ``rstd`` first,
    where ``rstd / N`` may itself be subnormal. It covers ``grad_residual`` added to the rest, and
    added earlier.
    """
    assert call.spec is not None
    columns = call.spec.columns
    summed = call.rows if call.sets is None else call.sets.most_rows(call.rows)
    arithmetic = Arithmetic.of(call.spec, summed)
    u, step, column_u = arithmetic.u, arithmetic.step, arithmetic.column_u
    dx, dx_off, dz, dz_off = np.empty((4, call.rows, columns))
    dgamma, dgamma_off, dbeta, dbeta_off, total, total_off = (
        CallSums(call, columns) for _ in range(6)
    )
    for block in blocks(call.rows, columns):
        gamma = Gamma.of(call, block, arithmetic)
        dy = _gradient_of_output(call, block)
        data = call.arrays[call.spec.family.data.name][block].astype(np.float64)
        gate, first = Silu.of(call, block, arithmetic), call.spec.gate_first
        given, dy_off, x_off = (data if first else dy), np.zeros((1, 1)), None
        if gate is not None and first:
            data, x_off = gate.times(data)
        elif gate is not None:
            dy, dy_off = gate.times(dy)
        row = (
            Normalized.of_output(call, block, data, gamma, arithmetic)
            if call.spec.from_output
            else Normalized.of(call, block, data, arithmetic, x_off)
        )
        dv, dv_off = _dx(call, block, (dy, dy_off), row, gamma, arithmetic)
        if gate is not None:
            other = (dv, dv_off) if first else shifted(call, block, row, gamma, arithmetic)
            dz[block], dz_off[block] = product(gate.times_slope(given), other, arithmetic)
        if gate is not None and first:
            dv, dv_off = gate.times(dv, dv_off)
        dx[block], dx_off[block] = dv, dv_off
        dgamma.add(block, dy * row.xhat)
        dgamma_off.add(
            block,
            (column_u + 2 * u) * np.abs(dy * row.xhat)
            + np.abs(dy) * row.xhat_off
            + dy_off * (np.abs(row.xhat) + row.xhat_off)
            + step,
        )
        dbeta.add(block, dy)
        dbeta_off.add(block, column_u * np.abs(dy) + dy_off)
        total.add(block, dv)
        total_off.add(block, column_u * np.abs(dv) + (1 + column_u) * dv_off)
    values = {
        "grad_gate": (dz, dz_off),
        "grad_input": (dx, dx_off),
        "grad_weight": (dgamma.total, dgamma_off.total),
        "grad_bias": (dbeta.total, dbeta_off.total),
        "grad_input_sum": (total.total, total_off.total),
    }
    rounded = Judged.rounded_once(*values["grad_input"], DTYPES[call.spec.dtype])
    values["grad_input_copy"] = (dx, rounded.tolerance)
    return {
        result.name: Judged.rounded_once(*values[result.name], DTYPES[result.dtype])
        for result in call.spec.results
    }


def _gradient_of_output(call: BoundCall, block: slice) -> F64:
    """The sum of a block's gradients of the output, rounded as our code rounds each partial sum.

    That is to the accumulator's type, and from that to the type of these sums.
    """
    assert call.spec is not None
    first, *more = (
        call.arrays[given.name][block]
        for given in (GRAD_OUTPUT, *MORE_GRAD_OUTPUTS)
        if given.name in call.arrays
    )
    wide, stored = (DTYPES[name].numpy for name in (call.spec.acc_dtype, call.spec.dy_sum_dtype))
    total: Array = first
    for gradient in more:
        total = np.add(total, gradient, dtype=wide).astype(stored)
    return total.astype(np.float64)


def _dx(
    call: BoundCall,
    block: slice,
    of_output: tuple[F64, F64],
    row: Normalized,
    gamma: Gamma,
    arithmetic: Arithmetic,
) -> tuple[F64, F64]:
    """A block of dx, and of its errors before it is rounded.

    Args:
        call: The call.
        block: Its rows.
        of_output: The gradient of the norm's output, and how far ours may be off.
        row: The rows, normalized.
        gamma: What they are multiplied by.
        arithmetic: Of the call.
    """
    assert call.spec is not None
    dy, dy_off = of_output
    u, step, row_u = arithmetic.u, arithmetic.step, arithmetic.row_u
    xhat, rstd, abs_xhat, abs_rstd = row.xhat, row.rstd, np.abs(row.xhat), np.abs(row.rstd)
    h = dy * gamma.value
    abs_h = np.abs(h)
    # Its own rounding is counted with the terms it is part of.
    h_off = np.abs(dy) * gamma.off + dy_off * (np.abs(gamma.value) + gamma.off)
    if call.spec.family.centres:
        mean_h = h.mean(axis=1, keepdims=True)
        mean_h_off = ((row_u + 2 * u) * abs_h + h_off).mean(axis=1, keepdims=True) + 2 * step
    else:
        mean_h, mean_h_off = np.zeros((2, len(h), 1))
    mean_hx = (h * xhat).mean(axis=1, keepdims=True)
    mean_hx_off = (row_u + 3 * u) * np.abs(h * xhat).mean(axis=1, keepdims=True) + (
        abs_h * row.xhat_off + abs_xhat * h_off + (abs_xhat + 1) * step
    ).mean(axis=1, keepdims=True)
    dx = rstd * (h - mean_h - xhat * mean_hx)
    terms = abs_h + np.abs(mean_h) + np.abs(xhat * mean_hx)
    off = abs_rstd * (
        (4 * u + row.rstd_relative) * terms
        + h_off
        + mean_h_off
        + (abs_xhat + row.xhat_off) * mean_hx_off  # one column: xhat is zero, and off by much
        + np.abs(mean_hx) * row.xhat_off
        + 3 * step
    )
    # rstd / N, its products with the two sums, of which the second is multiplied by xhat, and the
    # two that these are added to.
    off += (call.spec.columns * (np.abs(mean_h) + np.abs(xhat * mean_hx)) + abs_xhat + 3) * (
        step / 2
    )
    if "grad_residual" in call.arrays:
        more = call.arrays["grad_residual"][block].astype(np.float64)
        dx += more
        off += u * (abs_rstd * terms + 2 * np.abs(more))
    return dx, off
