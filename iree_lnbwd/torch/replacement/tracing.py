"""A module run without memory: whether it has effects, what it calls, and how often it rounds."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from iree_lnbwd.torch.replacement import effects
from iree_lnbwd.torch.replacement.candidates import candidates_of, layouts_of
from iree_lnbwd.torch.replacement.classes import stand_in
from iree_lnbwd.torch.replacement.form import Form, Types
from iree_lnbwd.torch.replacement.sampling import input_shape, run, vectors_of
from iree_lnbwd.torch.replacement.watched import NotPlainError


def check_effects(module: nn.Module, form: Form) -> None:
    """Expects a forward and a backward without effects, before either runs on values."""
    types = (torch.float32, torch.float32, torch.float32)
    for training in (True, False):
        traced(module, form, types, training=training)


def traced(module: nn.Module, form: Form, types: Types, *, training: bool = True) -> effects.Trace:
    """What a module calls for such element types, forward and backward."""
    with effects.observed() as mode:
        made = empty_vectors(module, types[1], "cpu")
        sample = stand_in(module, type(module), made).train(training)
        inputs = [each.requires_grad_() for each in empty_inputs(form, types, "cpu")]
        mode.begin()
        output = run(sample, *inputs)
        trace = mode.trace
        if output.requires_grad:
            asked = [*inputs, *(p for p in sample.parameters() if p.requires_grad)]
            try:
                torch.autograd.grad(output.sum(), asked, allow_unused=True)
            except NotPlainError as error:
                raise NotPlainError(str(error).replace("forward", "backward")) from error
            except Exception as error:  # code that is not ours
                raise NotPlainError(f"its backward raised {type(error).__name__}") from error
    return trace


def calls_pytorchs(module: nn.Module) -> bool:
    """Whether the forward calls a norm of PyTorch's on a GPU, tried without one."""
    for form in layouts_of(next(candidates_of(module))):
        with contextlib.suppress(NotPlainError), effects.observed() as mode:
            sample = stand_in(module, type(module), empty_vectors(module, None, "cuda"))
            inputs = empty_inputs(form, (None, None, None), "cuda")
            mode.begin()
            with torch.no_grad():
                run(sample, *inputs)
            return mode.trace.calls_pytorchs
    return False


def empty_inputs(form: Form, types: Types, device: str) -> tuple[Tensor, ...]:
    """An input, and a gate if there is one, without values."""
    of_each = (types[0],) if form.gate is None else (types[0], types[2])
    return tuple(torch.empty(input_shape(form), dtype=t, device=device) for t in of_each)


def empty_vectors(
    module: nn.Module, dtype: torch.dtype | None, device: str
) -> dict[str, Tensor | None]:
    """Parameters and buffers without values."""
    made: dict[str, Tensor | None] = dict.fromkeys((*module._parameters, *module._buffers))
    for name, vector in vectors_of(module).items():
        empty = torch.empty(vector.shape, dtype=dtype, device=device)
        made[name] = empty if name in module._buffers else nn.Parameter(
            empty, requires_grad=vector.requires_grad)  # fmt: skip
    return made
