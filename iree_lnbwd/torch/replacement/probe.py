"""Finds the norm that a module computes, by running its forward on samples.

A module has a form if on the samples its output is as far from the f64 reference as that form may
be, by the same tolerance that this package's own outputs are held to: in f32, and in the element
types that the model uses. What it is in further types is tried, too; where it is not the form, its
own forward computes. The samples hold what near-norms get wrong: rows of other scales, zeros,
outliers, NaN, negative and large weights, eps that counts, inputs of other shapes, training and
evaluation.

That tolerance allows for one rounding to the output's type. Classes of models round more often:
Llama's rounds the normalized row, and some round before they add the bias. So each element may
differ by two units of roundoff of ``xhat * weight`` more, and in half types by one for each
operator that returns such a type; by as many of ``mean * rstd * weight``, where a mean is
subtracted. A replaced module may thus differ from what it was in the last bits of half types, and
is the one with fewer roundings.

The gradients must be the form's, too. No derivative is missing if they agree to half the digits of
f32: rounding, in whatever order sums are added, is far below that, and a term of the formula far
above. f64 is not tried: classes that compute in f32 lose its precision, and replaced ones do not.

All that the forward reads from the module must be constant, but for what a form reads at each call.
A forward runs on samples only after `effects` saw that it has none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from iree_lnbwd.torch.replacement import constants, shards
from iree_lnbwd.torch.replacement.candidates import (
    arguments_of,
    candidates_of,
    layouts_of,
    shape_name_of,
)
from iree_lnbwd.torch.replacement.checks import (
    around_eps,
    check_eps,
    check_gradients,
    check_nan,
    check_outputs,
    check_widths,
    check_zeros,
    order_of,
    ranks_of,
)
from iree_lnbwd.torch.replacement.classes import own_class, parameter_names, stand_in
from iree_lnbwd.torch.replacement.element_types import autocast_of, output_type_of, output_types_of
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.judging import check_output, reference
from iree_lnbwd.torch.replacement.sampling import (
    OTHER_SHAPE,
    RAISED,
    ZEROS,
    Sample,
    as_rows,
)
from iree_lnbwd.torch.replacement.tracing import calls_pytorchs, check_effects
from iree_lnbwd.torch.replacement.watched import NotPlainError, notes_of, watched_class

_SAME = 2.0**-22  # relative; of outputs in f32
_MOST_COLUMNS = 1 << 18  # samples have 12 rows


class Outcome(NamedTuple):
    """What was found of a module.

    Attributes:
        form: The norm that it computes; None if it is none.
        reason: Why it is none.
        read: The attributes that its forward read until that was found, and the keys of their
            values (see `constants`). It holds of all modules where these are equal.
        calls_pytorchs: Whether its forward calls a norm of PyTorch's, whose backward `enable`
            replaces.
    """

    form: Form | None
    reason: str | None
    read: Mapping[str, Hashable]
    calls_pytorchs: bool = False

    def holds_of(self, module: nn.Module) -> bool:
        """Whether another module of the class, whose parameters have these shapes, is the same."""
        return all(_key(module, name) == value for name, value in self.read.items())


def _key(module: nn.Module, name: str) -> Hashable:
    """Of an attribute, which is not got: that could compute it. Of what may change, a new one."""
    try:
        return constants.key(vars(module).get(name, constants.ABSENT))
    except constants.NotConstantError:
        return object()


def find(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, ...] | None],
    dtypes: Collection[torch.dtype],
) -> Outcome:
    """The form of a module, whose parameters are not read: they may be sharded or have no memory.

    Args:
        module: `check` let it pass.
        shapes: Those of its parameters and buffers.
        dtypes: The element types that the model uses.
    """
    # Whatever the caller's defaults and modes are.
    with (
        torch.device("cpu"),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        form, reason, read, calls = None, None, set[str](), False
        try:
            watched = stand_in(
                module,
                watched_class(own_class(module)),
                {name: _without_memory(module, name, shape) for name, shape in shapes.items()},
            )
            try:
                calls = calls_pytorchs(watched)
                form = _find(watched, dtypes)
            finally:
                there = {name for name, shape in shapes.items() if shape is not None}
                read = notes_of(watched).read - there
        except NotPlainError as error:
            reason = str(error)
    if form is not None:
        form = replace(form, fixed=frozenset(read - {form.eps_name, form.shape_name}))
    return Outcome(form, reason, {name: _key(module, name) for name in read}, calls)


def _find(module: nn.Module, dtypes: Collection[torch.dtype]) -> Form:
    candidates = tuple(candidates_of(module))
    first = candidates[0]
    if 1 in first.normalized_shape or 0 in first.normalized_shape:
        raise NotPlainError(f"its parameters have shape {first.normalized_shape}")
    if math.prod(first.normalized_shape) > _MOST_COLUMNS:
        raise NotPlainError(f"its rows have more than {_MOST_COLUMNS} elements")
    reasons: list[str] = []
    for layout in layouts_of(first):
        # What takes images, whatever it makes of them, says by them what it is.
        if layout.ranks is not None and not all(map(_says_nothing, reasons)):
            break
        try:
            tried = [
                replace(each, channels_first=layout.channels_first, ranks=layout.ranks)
                for each in candidates
            ]
            check_effects(module, tried[0])
            best = _best(module, tried)
        except NotPlainError as error:
            reasons.append(str(error))
            continue
        return _completed(module, best, dtypes)
    # Of a module that takes channels first, that it does not take them last says nothing.
    ran = (reason for reason in reasons if not _says_nothing(reason))
    raise NotPlainError(next(ran, reasons[0]))


def _says_nothing(reason: str) -> bool:
    """Whether a module does not take an input of such a layout."""
    return reason.startswith((RAISED, OTHER_SHAPE))


def _completed(module: nn.Module, found: Form, dtypes: Collection[torch.dtype]) -> Form:
    """A form that f32 outputs are near to, with all that is to be known of it."""
    found = replace(found, shape_name=shape_name_of(module, found))
    check_outputs(module, found, torch.float32)
    found = replace(found, ranks=ranks_of(module, found))
    check_eps(module, found)
    check_nan(module, found)
    around = around_eps(module, found) if found.is_clamped else ()
    for training, scales in itertools.product((True, False), {(), around}):
        check_gradients(module, found, training, scales)
    is_free = {found.weight_name, found.bias_name, found.shape_name} == {None}
    if found.any_width or (is_free and len(found.normalized_shape) == 1):
        check_widths(module, found)
    outputs = output_types_of(module, found, dtypes)
    output_type, types = output_type_of(outputs, dtypes)
    found = replace(found, output_type=output_type, types=types, order=order_of(module, found))
    return replace(
        found,
        on_gpus=autocast_of(module, found, "cuda"),
        on_cpus=autocast_of(module, found, "cpu"),
    )


def check(module: nn.Module) -> Mapping[str, tuple[int, ...] | None]:
    """Expects what every norm is, before anything is run.

    Returns:
        The shapes of the parameters and buffers, by name; None of one that is not there.

    Raises:
        NotPlainError: The module is something else.
    """
    if (holder := shards.holder(module)) is not None:
        raise NotPlainError(f"{holder} holds parts of its parameters; replace norms before that")
    if any(name != "parametrizations" for name, _ in module.named_children()):
        raise NotPlainError("it has modules of its own")
    if hasattr(own_class(module).forward, "_torchdynamo_orig_callable"):
        raise NotPlainError("torch.compile compiled its forward by itself")
    arguments = arguments_of(module)
    if len(arguments) not in (1, 2):
        raise NotPlainError(f"its forward takes {len(arguments)} arguments, expected 1 or 2")
    if any(map(is_lazy, module.parameters())):
        raise NotPlainError("its parameters are not initialized yet")
    with torch.no_grad():
        parameters = {name: getattr(module, name) for name in parameter_names(module)}
    parameters |= {
        name: buffer for name, buffer in module._buffers.items()
        if buffer is None or buffer.is_floating_point()
    }  # fmt: skip
    return {name: None if p is None else tuple(p.shape) for name, p in parameters.items()}


def _without_memory(module: nn.Module, name: str, shape: tuple[int, ...] | None) -> Tensor | None:
    """In place of a parameter or a buffer."""
    if shape is None:
        return None
    if name in module._buffers:
        return torch.empty(shape, device="meta")
    own = module._parameters.get(name)  # of another one, parametrizations compute it
    return nn.Parameter(
        torch.empty(shape, device="meta"), requires_grad=own is None or own.requires_grad
    )


def _best(module: nn.Module, candidates: Sequence[Form]) -> Form:
    """The candidate that a module's f32 outputs are nearest to, if they are near enough."""
    sample = Sample(module, candidates[0], torch.float32)
    output = sample.output()
    read = notes_of(module).read
    candidates = [c for c in candidates if c.eps_name is None or c.eps_name in read]
    given = [rows[:ZEROS].double() for rows in (sample.rows, sample.gates) if rows is not None]
    got = as_rows(output, candidates[0])[:ZEROS].double()

    def distance(form: Form) -> float:
        """Relative to the largest element of each row; that of zeros is only checked."""
        apart = (got - reference(sample.module, form, *given)).abs().flatten(1).amax(1)
        size = got.abs().flatten(1).amax(1).clamp(min=1e-300)
        return float(torch.nan_to_num(apart / size, nan=np.inf).max())

    with torch.no_grad():
        apart = {form: distance(form) for form in candidates}
    best = min(apart, key=apart.__getitem__)
    # Without eps and with a clamp at one, they are the same in all but the shortest rows.
    alike = [form for form in apart if apart[form] <= apart[best] + _SAME < math.inf]
    if any(form.is_clamped for form in alike):
        best = _first_around_eps(module, alike) or best
    check_output(sample, best, output)
    return best


def _first_around_eps(module: nn.Module, candidates: Sequence[Form]) -> Form | None:
    """The first candidate that a module's outputs are near to where eps counts."""
    for form in candidates:
        with contextlib.suppress(NotPlainError):
            check_eps(module, form)
            check_zeros(module, form)
            return form
    return None
