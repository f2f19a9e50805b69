"""All norms that a module may compute, by its parameters, buffers and attributes."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM, Gate
from iree_lnbwd.torch.replacement import clamped
from iree_lnbwd.torch.replacement.classes import own_class
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.sampling import vectors_of
from iree_lnbwd.torch.replacement.watched import NotPlainError, notes_of

_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, torch.finfo(torch.float32).eps)
_VOLUMES, _SEQUENCES = 5, 3  # how many dimensions they have
ANY_WIDTHS = (48, 7, 64)  # of samples for modules without a width: the first, and others


def candidates_of(module: nn.Module) -> Iterator[Form]:
    """All forms that the parameters, buffers and attributes of a module allow."""
    arguments = arguments_of(module)
    if len(arguments) == 2:
        yield from _gated(module, *arguments)
        return
    vectors = vectors_of(module)
    shapes = {tuple(vector.shape) for vector in vectors.values()}
    if len(shapes) > 1 or len(vectors) > 2:
        raise NotPlainError(f"expected at most two parameters of one shape, got {len(vectors)}")
    shape = next(iter(shapes), None)
    dims = _normalized_shape(module) if shape is None else shape
    any_width = not dims if shape is None else math.prod(shape) == 1
    long = tuple(size for size in dims if size != 1)
    is_flattened = not any_width and shape is not None and len(long) == 1 < len(dims)
    if any_width:
        dims = ANY_WIDTHS[:1]
    elif is_flattened:
        dims = long
    epsilons = _epsilons(module)
    weight_and_bias = (*vectors, None, None)[:2]
    roles = dict.fromkeys(itertools.permutations(weight_and_bias, 2))
    if vectors.keys() <= module._buffers.keys():  # some are there to be read by others alone
        roles[None, None] = None
    (argument,) = arguments
    for (weight, bias), (eps, eps_name) in itertools.product(roles, epsilons):
        kinds = [(LAYER_NORM, False, False)]
        columns = max(1, math.prod(dims))  # a weight may have none
        clamps = (False, True)[: 1 + clamped.is_possible(eps**2 / columns)]
        clamps = clamps if bias is None else (False,)  # what is clamped has none
        kinds += [(RMS_NORM, *each) for each in itertools.product((False, True), clamps)]
        for op, is_l2, is_clamped in kinds:
            has_weight = weight is not None
            may_be_heads = has_weight and len(dims) > 1 and not is_clamped
            offsets, heads = (0.0, 1.0)[: 1 + has_weight], (False, True)[: 1 + may_be_heads]
            for offset, of_heads in itertools.product(offsets, heads):
                yield Form(
                    op, dims, eps, eps_name, weight, bias, offset, argument=argument, is_l2=is_l2,
                    is_clamped=is_clamped, is_flattened=is_flattened, any_width=any_width,
                    of_heads=of_heads,
                )  # fmt: skip


def _epsilons(module: nn.Module) -> list[tuple[float, str | None]]:
    """Numbers that may be eps, and the attributes that hold them."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, float) and value >= 0
    }
    named = sorted(attributes.items(), key=lambda item: "eps" not in item[0])  # of equal ones
    return [*((v, n) for n, v in named), *((eps, None) for eps in _USUAL_EPS)]


def _gated(module: nn.Module, argument: str, gate_argument: str) -> Iterator[Form]:
    """RMS norms with a weight and a gate, of whole rows or of groups in them."""
    vectors = vectors_of(module)
    ((name, weight),) = vectors.items() if len(vectors) == 1 else (("", None),)
    if weight is None or weight.dim() != 1:
        raise NotPlainError("its forward takes 2 arguments, and it has no weight of a row's length")
    dims = tuple(weight.shape)
    options = (Gate, _groups(module, *dims), _epsilons(module), (0.0, 1.0))
    for gate, groups, (eps, eps_name), offset in itertools.product(*options):
        yield Form(
            RMS_NORM, dims, eps, eps_name, name, weight_offset=offset, argument=argument, gate=gate,
            gate_argument=gate_argument, groups=groups,
        )  # fmt: skip


def _groups(module: nn.Module, columns: int) -> list[int]:
    """How many a row may have: an attribute says it, or how long they are."""
    numbers = {value for value in vars(module).values() if type(value) is int and value > 1}
    numbers = {each for each in numbers if each < columns and columns % each == 0}
    return sorted({1, *numbers, *(columns // each for each in numbers)})


def layouts_of(form: Form) -> Iterator[Form]:
    """A candidate in all layouts of its input: as most norms take it, then as few alone do."""
    yield form
    if len(form.normalized_shape) != 1:
        return
    if form.gate is not None:
        yield replace(form, ranks=(_SEQUENCES,))
        return
    yield replace(form, channels_first=True)
    if form.is_flattened:  # a weight of [N, 1, 1, 1] goes with no image
        yield replace(form, channels_first=True, ranks=(_VOLUMES,))
    for channels_first in (False, True):
        yield replace(form, channels_first=channels_first, ranks=(_SEQUENCES,))


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names of what its forward takes."""
    try:
        return tuple(inspect.signature(own_class(module).forward).parameters)[1:]
    except (TypeError, ValueError) as error:
        raise NotPlainError("its forward does not say which arguments it takes") from error


def shape_name_of(module: nn.Module, form: Form) -> str | None:
    """The attribute that holds the dimensions, if its forward reads them there."""
    name = "normalized_shape"
    is_it = _normalized_shape(module) == form.normalized_shape
    return name if is_it and name in notes_of(module).read else None


def _normalized_shape(module: nn.Module) -> tuple[int, ...]:
    """The module's attribute, as a tuple; an empty one if it has none."""
    dims = vars(module).get("normalized_shape", ())
    dims = dims if isinstance(dims, tuple) else (dims,)
    return dims if all(type(size) is int for size in dims) else ()
