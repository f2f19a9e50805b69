"""What is checked of a module on samples: shapes, modes, eps, NaN, lengths of rows, gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from iree_lnbwd.torch.replacement.candidates import ANY_WIDTHS
from iree_lnbwd.torch.replacement.form import Form, Order, Types
from iree_lnbwd.torch.replacement.judging import check_output, reference
from iree_lnbwd.torch.replacement.sampling import Sample, as_rows, run, vectors_of
from iree_lnbwd.torch.replacement.tracing import traced
from iree_lnbwd.torch.replacement.watched import NotPlainError

_OTHER_LEADING = ((), (12,), (3, 4), (12, 1), (12, 1, 1), (1, 3, 4), (1, 2, 3, 2))
_AROUND_EPS = (0.03, 0.3, 1.0, 3.0, 30.0)  # of a row, in units of the root of eps
_HALF_THE_DIGITS = 2.0**-12  # of f32
_LEAST_EPS = 1e-30  # squares of smaller rows are subnormal in f32


def check_outputs(module: nn.Module, form: Form, dtype: torch.dtype) -> torch.dtype:
    """Expects those of the form, in all shapes, orders and modes; their element type."""
    sample = Sample(module, form, dtype)
    roundings = roundings_of(module, form, (dtype, dtype, dtype))
    for training, turned in itertools.product((True, False), (False, True)):
        output = sample.output(training=training, turned=turned)
        check_output(sample, form, output, roundings)
    if form.channels_first and vectors_of(module) and _takes_sequences(sample, form):
        raise NotPlainError("it normalizes another dimension of sequences than of images")
    for leading in _OTHER_LEADING:
        try:
            other = sample.output(leading)
        except NotPlainError:
            continue  # it does not take such dimensions
        if not leading:
            other = torch.cat((other[None], as_rows(output, form)[1:]))
            check_output(sample, replace(form, channels_first=False), other, roundings)
        else:
            check_output(sample, form, other, roundings)
    return output.dtype


def roundings_of(module: nn.Module, form: Form, types: Types) -> int:
    """How many more roundings than one an output may have, in units of ``xhat * weight``.

    Those of a mean are in units of the mean itself.
    """
    if {*types} == {torch.float32}:
        return 2
    return max(2, traced(module, form, types).roundings)


def ranks_of(module: nn.Module, form: Form) -> tuple[int, ...]:
    """The numbers of dimensions that a module takes, whatever their sizes are."""
    sample = Sample(module, form, torch.float32)
    taken, refused = {sample.inputs()[0].dim()}, set[int]()
    for leading in _OTHER_LEADING:
        x, *_ = sample.inputs(leading)
        try:
            sample.output(leading)
            taken.add(x.dim())
        except NotPlainError:
            refused.add(x.dim())
    return tuple(sorted(taken - refused))


def _takes_sequences(sample: Sample, form: Form) -> bool:
    """Whether a module takes channels last, too, in inputs with fewer dimensions."""
    (columns,) = form.normalized_shape
    leading = (3, 4) if columns != 4 else (4, 3)
    try:
        run(sample.module, sample.rows.reshape(*leading, columns))
    except NotPlainError:
        return False
    return True


def check_eps(module: nn.Module, form: Form) -> None:
    """Expects eps where it counts: in rows of about its size."""
    if scales := around_eps(module, form):
        sample = Sample(module, form, torch.float32, scales=scales)
        check_output(sample, form, sample.output())


def check_zeros(module: nn.Module, form: Form) -> None:
    """Expects what the form makes of a row of zeros, which it may divide by their length."""
    sample = Sample(module, form, torch.float32, scales=(1.0, 0.0))
    check_output(sample, form, sample.output())


def around_eps(module: nn.Module, form: Form) -> tuple[float, ...]:
    """Scales of rows in which eps counts; none if squares of such rows do not."""
    eps = None if form.eps is None else form.eps_of(module, form.row_shape)
    if eps is None or eps < _LEAST_EPS:
        return ()
    return tuple(math.sqrt(eps) * s for s in _AROUND_EPS)


def check_nan(module: nn.Module, form: Form) -> None:
    """Expects what every norm makes of a NaN: its row, and no other; and of one in a gate."""
    sample = Sample(module, form, torch.float32)
    sample.rows[0].view(-1)[-1] = math.nan
    if sample.gates is not None:
        sample.gates[1].view(-1)[-1] = math.nan
    check_output(sample, form, sample.output())


def check_widths(module: nn.Module, form: Form) -> None:
    """Expects the same norm of rows of other lengths."""
    for width in ANY_WIDTHS[1:]:
        other = replace(form, normalized_shape=(width,))
        sample = Sample(module, other, torch.float32)
        check_output(sample, other, sample.output())


def check_gradients(module: nn.Module, form: Form, training: bool, scales: Sequence[float]) -> None:
    """Expects the gradients of the form, in f32, of rows of such scales."""
    sample = Sample(module, form, torch.float32, scales=scales)
    sample.module.train(training)
    inputs = dict(zip(("input", "gate"), sample.inputs(), strict=False))
    with torch.enable_grad():
        grad_output = sample.random(*inputs["input"].shape)
        asked = {**inputs, **dict(sample.module.named_parameters())}
        for tensor in asked.values():
            tensor.requires_grad_()
        output = run(sample.module, *inputs.values())
        if not output.requires_grad:
            raise NotPlainError("its output has no gradient")
        check_output(sample, form, output.detach())
        found = torch.autograd.grad(output, list(asked.values()), grad_output, allow_unused=True)
        wide = {name: t.detach().double().requires_grad_() for name, t in asked.items()}
        vectors = {**vectors_of(sample.module), **wide}
        wide_inputs = (as_rows(wide[name], form) for name in inputs)
        y = reference(sample.module, form, *wide_inputs, vectors=vectors)
        rows = as_rows(grad_output, form).double()
        expected = torch.autograd.grad(y, list(wide.values()), rows)
    for name, ours, theirs in zip(asked, expected, found, strict=True):
        if theirs is None:
            raise NotPlainError(f"it has no gradient of {name}")
        if name in inputs:
            columns = math.prod(form.row_shape)
            ours, theirs = (as_rows(g, form).reshape(-1, columns) for g in (ours, theirs))
            size = ours.abs().amax(1, keepdim=True)
        else:
            size = ours.abs().max()
        are_near = (ours - theirs).abs() <= _HALF_THE_DIGITS * size
        if not bool((are_near | (ours.isnan() & theirs.isnan())).all()):
            raise NotPlainError(f"its gradient of {name} is not that of the norm")


def order_of(module: nn.Module, form: Form) -> Order:
    """The rule for the output's order in memory that holds for all orders of the input."""
    left = list(Order)
    sample = Sample(module, form, torch.float32)
    plain, turned = sample.inputs(), sample.inputs(turned=True)
    dims = (-2, -3) if form.of_heads else (-1, -2)  # of heads with others inside: see `holds_for`
    swapped = tuple(x.transpose(*dims).contiguous().transpose(*dims) for x in plain)
    for inputs in (plain, turned, swapped):
        with torch.no_grad():
            output = run(sample.module, *inputs)
        check_output(sample, form, output)
        input = inputs[0]
        left = [o for o in left if o.strides(input, form.channels_first) == output.stride()]
    if not left:
        raise NotPlainError("its output's order in memory follows none of the known rules")
    return left[0]
