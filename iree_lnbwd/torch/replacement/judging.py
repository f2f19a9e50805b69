"""Whether an output is near enough to that of a norm in f64: see `probe` for how near."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.dtypes import DTYPES, name_of
from iree_lnbwd.ops.operands import GATED, Gate
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.replacement import clamped
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.sampling import Sample, as_rows, vectors_of
from iree_lnbwd.torch.replacement.watched import NotPlainError
from iree_lnbwd.verification.judge import compare, judge


def check_output(sample: Sample, form: Form, output: Tensor, roundings: int = 2) -> None:
    """Expects an output within its tolerance.

    Args:
        sample: What it was computed from.
        form: The norm.
        output: As the module returned it.
        roundings: More than one, in units of ``xhat * weight``.
    """
    dims = form.row_shape
    given, offset = _arrays(sample, form)
    eps = None if form.eps is None else form.eps_of(sample.module, dims)
    added = torch.finfo(torch.float32).tiny if form.is_clamped else eps
    options: dict[str, Any] = {"eps": added, "weight_offset": offset}
    if form.gate is not None:
        options["gate_first"] = form.gate is Gate.BEFORE
    if form.groups > 1:
        dims = (dims[-1] // form.groups,)
    if form.groups > 1 or form.of_heads:
        options["rows_per_set"] = 1
    judged = judge(bind(form.op.name, given, dims, **options))
    expected, tolerance = (
        each["output"].reshape(sample.rows.shape) for each in (judged.expected, judged.tolerance)
    )
    got = interop.to_numpy("output", as_rows(output, form).contiguous())
    name = name_of(got.dtype)
    if name is None:
        raise NotPlainError(f"its output has another element type: {output.dtype}")
    if form.is_clamped:
        assert eps is not None
        linear, is_short = _short_rows(given, offset, eps)
        roundoff_of_three = 3 * DTYPES[name].unit_roundoff  # of the clamp, the quotient, the output
        expected = np.where(is_short, linear, expected)
        tolerance = np.where(is_short, roundoff_of_three * np.abs(linear), tolerance)
    scaled = expected if given["bias"] is None else expected - given["bias"].astype(np.float64)
    roundoff = DTYPES[name].unit_roundoff
    if name == "f32" and roundings > 2:  # they were in a half type
        roundoff = max(DTYPES[name_of(a.dtype) or name].unit_roundoff
                       for a in given.values() if a is not None)  # fmt: skip
    with np.errstate(all="ignore"):
        more = roundings * (roundoff * np.abs(scaled) + DTYPES[name].smallest_subnormal)
        if form.op.centres and roundings > 2:
            more = more + roundings * roundoff * _off_centre(given, form, eps or 0.0)
    compared = compare(got, expected, tolerance + more)
    if not compared.passed:
        what = "a layer norm" if form.op.centres else "an L2 norm" if form.is_l2 else "an RMS norm"
        raise NotPlainError(
            f"its output in {name} is {compared.ratio:.3g} times its tolerance from {what}'s"
        )


def reference(
    module: nn.Module,
    form: Form,
    rows: Tensor,
    gates: Tensor | None = None,
    *,
    vectors: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """What a form computes of rows, in f64, with a module's vectors or others."""
    named = vectors_of(module) if vectors is None else vectors
    weight, bias = (
        None if name is None else named[name].double()
        for name in (form.weight_name, form.bias_name)
    )
    dims = form.row_shape
    weight, bias, offset = form.scaling(weight, bias, dims, rows)
    eps = None if form.eps is None else form.eps_of(module, dims)
    if form.is_clamped:
        assert eps is not None
        return clamped.normalized(rows, dims, weight, offset, eps)
    if form.gate is None or gates is None:
        sets = 1 if form.of_heads else None
        return aten.normalized(form.op, rows, weight, bias, dims, eps, offset, sets)[0]
    op = GATED[form.gate][form.op.name]
    if form.groups == 1:
        return aten.gated(op, (rows, weight, bias, gates), dims, eps, offset)[0]
    assert weight is not None
    grouped = (form.grouped(rows), form.grouped(weight), None, form.grouped(gates))
    dims = (dims[-1] // form.groups,)
    return aten.gated(op, grouped, dims, eps, offset, 1)[0].flatten(-2)


def _short_rows(
    given: Mapping[str, np.ndarray | None], offset: float, least_square: float
) -> tuple[np.ndarray, np.ndarray]:
    """What rows shorter than a clamp become, of all rows, and which are."""
    rows = np.asarray(given["input"], np.float64)
    axes, weight = tuple(range(1, rows.ndim)), given["weight"]
    gamma = 1.0 if weight is None else np.asarray(weight, np.float64) + offset
    with np.errstate(all="ignore"):
        is_short = np.square(rows).mean(axes, keepdims=True) < least_square
        return rows / math.sqrt(least_square) * gamma, is_short


def _off_centre(given: Mapping[str, np.ndarray | None], form: Form, eps: float) -> Any:
    """How large the mean of each row is, as what the output gets of it."""
    rows = np.asarray(given["input"], np.float64)
    axes = tuple(range(-len(form.row_shape), 0))
    mean, variance = rows.mean(axes, keepdims=True), rows.var(axes, keepdims=True)
    weight = given["weight"]
    return (
        np.abs(mean) / np.sqrt(variance + eps)
        * (1.0 if weight is None else np.abs(np.asarray(weight, np.float64)))
    )  # fmt: skip


def _arrays(sample: Sample, form: Form) -> tuple[Mapping[str, np.ndarray | None], float]:
    """What the judge takes for a form of ours, and the weight's offset."""
    named = vectors_of(sample.module)
    weight, bias = (
        None if name is None else named[name].detach()
        for name in (form.weight_name, form.bias_name)
    )
    weight, bias, offset = form.scaling(weight, bias, form.row_shape, sample.rows)
    named = {"input": sample.rows, "weight": weight, "bias": bias, "gate": sample.gates}
    tensors = {
        name: None if tensor is None else tensor.contiguous() for name, tensor in named.items()
    }
    if form.groups > 1:
        tensors = {n: None if t is None else form.grouped(t) for n, t in tensors.items()}
    return interop.views(None, tensors), offset  # type: ignore[return-value]
