"""What the PyTorch tests share: the random arguments of the other tests as tensors, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from support import Arguments, assert_matches_reference, random_arguments, random_generator
from torch import Tensor

from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.operands import GRAD_BIAS, VARIANTS, names
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.torch import layer_norm
from iree_lnbwd.torch.operator_table import ALL_GRADIENTS, ALL_NORMS, Gradients, Norm

TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}


def to_tensor(array: Array | None, device: str) -> Any:
    if array is None:
        return None
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def to_array(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensors_of(spec: NormSpec, call: BoundCall) -> list[Any]:
    """In the order of the op's table; the statistics with the dimension that PyTorch's have."""
    tensors = {name: to_tensor(array.copy(), "cpu") for name, array in call.arrays.items()}
    for name in names(spec.family.statistics):
        if name in tensors:
            tensors[name] = tensors[name].view(-1, 1)
    if spec.has(GRAD_BIAS) and not spec.family.reads_bias:  # its type counts
        shape = call.shape_of(spec.family.named(GRAD_BIAS.name))
        tensors.setdefault("bias", torch.ones(shape, dtype=TORCH_DTYPES[spec.beta_dtype]))
    return [tensors.get(argument.name) for argument in spec.family.arguments]


def operator_of(spec: NormSpec, sets: Sets | None, eps: float) -> tuple[Norm | Gradients, Any]:
    """The operator that computes a spec, and its options.

    Args:
        spec: What it computes.
        sets: Those of the weight, where it has some.
        eps: Of a backward that has no use for it.
    """
    told_apart = (spec.op, spec.from_output, spec.family.gate)
    op = next(op for op in VARIANTS if (op.name, op.from_output, op.gate) == told_apart)
    dims, of_sets = [spec.columns], () if sets is None else (sets.rows_per_set,)
    if op.is_backward:
        of_op = (each for each in ALL_GRADIENTS if (each.op, each.takes_sets) == (op, bool(sets)))
        given_eps = eps if spec.eps is None else spec.eps
        return next(of_op), (dims, spec.output_mask, given_eps, spec.weight_offset, *of_sets)
    asked = (op, spec.residual_dtype is not None, True, bool(sets))
    norm = next(
        each
        for each in ALL_NORMS
        if (each.op, each.takes_residual, each.own_forward, each.takes_sets) == asked
    )
    output_dtype = None if spec.output_dtype is None else TORCH_DTYPES[spec.output_dtype]
    return norm, (dims, spec.eps, spec.weight_offset, False, output_dtype, *of_sets)


def taken(operator: Norm | Gradients, tensors: list[Any]) -> list[Any]:
    """What an operator takes of the arguments of its op."""
    of = operator.arguments
    own = of if isinstance(operator, Gradients) else names(of)  # type: ignore[arg-type]
    every = zip(operator.op.arguments, tensors, strict=True)
    return [tensor for argument, tensor in every if argument.name in own]


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of one forward and backward, and the arguments that they were made from."""

    arguments: Arguments
    grad_output: Tensor
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def differentiated(self) -> list[Tensor]:
        return [
            t for t in (self.input, self.weight, self.bias) if t is not None and t.requires_grad
        ]

    def forward(self) -> Tensor:
        arguments = self.arguments
        return layer_norm(
            self.input, arguments.normalized_shape, self.weight, self.bias, arguments.eps
        )

    def forward_by_pytorch(self) -> Tensor:
        arguments = self.arguments
        return torch.nn.functional.layer_norm(
            self.input, arguments.normalized_shape, self.weight, self.bias, arguments.eps
        )

    def gradients(self, output: Tensor) -> LayerNormGrads:
        """By name; None where a tensor does not require one."""
        found = iter(torch.autograd.grad(output, self.differentiated, self.grad_output))
        return LayerNormGrads(
            *(
                next(found) if tensor is not None and tensor.requires_grad else None
                for tensor in (self.input, self.weight, self.bias)
            )
        )


def random_operands(
    spec: NormSpec,
    leading: tuple[int, ...],
    *,
    device: str = "cpu",
    bias: bool = True,
) -> Operands:
    """Random tensors, all of which require gradients."""
    arguments = random_arguments(random_generator(), spec, leading)
    # The judge shall allow for the rounding of the statistics, which are PyTorch's.
    arguments = replace(
        arguments, mean=None, rstd=None, bias=arguments.bias if bias else None,
        output_mask=(True, spec.has_weight, bias),
    )  # fmt: skip
    parameters = (arguments.input, arguments.weight, arguments.bias)
    x, weight, beta = (
        None if array is None else to_tensor(array, device).requires_grad_() for array in parameters
    )
    return Operands(arguments, to_tensor(arguments.grad_output, device), x, weight, beta)


def assert_right(gradients: LayerNormGrads, arguments: Arguments) -> None:
    """Of the right type, and within the derived tolerance of the f64 reference."""
    assert_matches_reference(LayerNormGrads(*map(to_array, gradients)), arguments)
