"""What the tests of all norms share: their table, random tensors, and the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import assert_right, random_generator
from torch import Tensor
from torch_support import TORCH_DTYPES, to_array

from iree_lnbwd.ops.arguments import bind, results_type
from iree_lnbwd.ops.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Op,
    names,
)
from iree_lnbwd.torch import add_layer_norm, add_rms_norm, layer_norm, rms_norm

EPS = 1e-3


@dataclass(frozen=True)
class Form:
    """A public function.

    Attributes:
        function: It.
        op: What it computes.
        backward: Its gradients.
        arguments: The names of the tensors that it takes.
        options: Given to it in every call.
    """

    function: Callable[..., Any]
    op: Op
    backward: Op
    arguments: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def takes_residual(self) -> bool:
        """Whether there is a sum."""
        return "residual" in self.arguments

    def __call__(self, tensors: Mapping[str, Any], dims: Any, **options: Any) -> tuple[Tensor, ...]:
        """What it returns, in a tuple."""
        given = {name: tensors[name] for name in self.arguments if name in tensors}
        found = self.function(
            normalized_shape=dims, **given, **{"eps": EPS, **self.options, **options}
        )
        return found if isinstance(found, tuple) else (found,)


_LAYER_NORM = ("weight", "bias")
FORMS = {
    "layer_norm": Form(
        layer_norm, LAYER_NORM, LAYER_NORM_BACKWARD, ("input", *_LAYER_NORM), {"own_forward": True}
    ),
    "rms_norm": Form(rms_norm, RMS_NORM, RMS_NORM_BACKWARD, ("input", "weight"), {}),
    "biased_rms_norm": Form(rms_norm, RMS_NORM, RMS_NORM_BACKWARD, ("input", *_LAYER_NORM), {}),
    "add_layer_norm": Form(
        add_layer_norm, LAYER_NORM, LAYER_NORM_BACKWARD, ("input", "residual", *_LAYER_NORM), {}
    ),
    "add_rms_norm": Form(
        add_rms_norm, RMS_NORM, RMS_NORM_BACKWARD, ("input", "residual", *_LAYER_NORM), {}
    ),
}


def random_tensors(
    form: Form,
    leading: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: str = "f32",
    *,
    residual: str | None = None,
    parameters: str | None = None,
    without: tuple[str, ...] = (),
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Random tensors for a form, by name, all of which require gradients.

    Args:
        form: The function.
        leading: The dimensions before ``dims``.
        dims: The dimensions to normalize.
        dtype: Of the input, and of what has no other.
        residual: Element type of the residual.
        parameters: Element type of weight and bias.
        without: The parameters that are not there.
        device: Of all.
    """
    seed = int(random_generator().integers(2**62))
    generator = torch.Generator().manual_seed(seed)
    types = {"residual": residual or dtype} | dict.fromkeys(_LAYER_NORM, parameters or dtype)
    tensors = {}
    for name in form.arguments:
        if name in without:
            continue
        shape = dims if name in _LAYER_NORM else (*leading, *dims)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values += 1.0 if name == "weight" else 0.25
        tensors[name] = values.to(device, TORCH_DTYPES[types.get(name, dtype)]).requires_grad_()
    return tensors


def random_like(tensor: Tensor) -> Tensor:
    """Random numbers of a tensor's shape, element type and device."""
    seed = int(random_generator().integers(2**62))
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(tensor.device, tensor.dtype)


def gradients_of(
    outputs: tuple[Tensor, ...], tensors: Mapping[str, Tensor], reached: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """By name, of those that require one."""
    asked = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = torch.autograd.grad(outputs, list(asked.values()), reached)
    return dict(zip(asked, found, strict=True))


def assert_gradients_right(
    form: Form,
    tensors: Mapping[str, Tensor],
    dims: tuple[int, ...],
    reached: tuple[Tensor, ...],
    gradients: Mapping[str, Tensor],
    *,
    eps: float | None = EPS,
    weight_offset: float = 0.0,
    kept: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Of the right types, and within the derived tolerance of the f64 reference.

    Args:
        form: The function.
        tensors: Its arguments.
        dims: The dimensions that were normalized.
        reached: The gradients of its outputs.
        gradients: By name, of those that were asked for.
        eps: As it was given.
        weight_offset: As it was given.
        kept: The output and rstd, where the gradients were computed from them.
    """
    given = {name: to_array(tensor) for name, tensor in tensors.items()}
    normalized = tensors["input"].detach()
    if form.takes_residual:
        wide = torch.float64 if normalized.dtype == torch.float64 else torch.float32
        residual = tensors["residual"].detach()
        normalized = (normalized.to(wide) + residual.to(wide)).to(residual.dtype)
    given |= {"input": to_array(normalized), "grad_output": to_array(reached[0])}
    if kept is not None:
        del given["input"]
        given |= dict(zip(("output", "rstd"), map(to_array, kept), strict=True))
    if len(reached) > 1:
        given["grad_residual"] = to_array(reached[1])
    found = dict(gradients)
    if form.takes_residual:
        # One gradient of both, cast to the input's type.
        of_sum = found.pop("residual", None)
        if of_sum is not None:
            if "input" in found:
                assert torch.equal(found["input"], of_sum.to(tensors["input"].dtype))
            found["input"] = of_sum
    masked = names(form.backward.gradients if "bias" in given else form.backward.masked)
    mask = tuple(name.removeprefix("grad_") in found for name in masked)
    given.pop("residual", None)
    call = bind(
        form.backward.name,
        given,
        dims,
        mask,
        eps=eps,
        weight_offset=weight_offset,
    )
    of = results_type(form.backward)
    assert_right(of(*(to_array(found.get(n.removeprefix("grad_"))) for n in masked)), call)


def bits(tensor: Tensor) -> bytes:
    """Of its elements."""
    return np.asarray(to_array(tensor)).tobytes()
