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
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.torch import layer_norm

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
