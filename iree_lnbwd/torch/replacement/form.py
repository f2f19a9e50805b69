"""The norm that a module computes, as a value."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from iree_lnbwd.operands import Op
from iree_lnbwd.torch.functions import layer_norm, rms_norm


class OutputType(enum.Enum):
    """The element type of a norm's output."""

    INPUTS = "the input's"
    WEIGHTS = "the weight's"
    PROMOTED = "what the input's and the weight's promote to"

    def of(self, input: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """It, from the element types of the input and of the weight."""
        if weight is None or self is OutputType.INPUTS:
            return input
        return weight if self is OutputType.WEIGHTS else torch.promote_types(input, weight)


@dataclass(frozen=True)
class Form:
    """A norm of one tensor.

    Attributes:
        op: What it computes.
        normalized_shape: The dimensions that are normalized.
        eps: Added to the variance; None as in ``rms_norm``.
        eps_name: The module's attribute that holds it; None if it is written in the code.
        weight_name: The module's attribute that holds the weight; None if there is none.
        bias_name: As ``weight_name``.
        weight_offset: Added to the weight.
        channels_first: Whether dimension 1 is normalized, and not the last one.
        argument: The name of the input in the module's forward.
        output_type: Outside of autocast.
        is_cast_by_autocast: Whether autocast on GPUs widens the output to f32, as that of PyTorch's
            own norms. If not, autocast changes nothing.
    """

    op: Op
    normalized_shape: tuple[int, ...]
    eps: float | None
    eps_name: str | None = None
    weight_name: str | None = None
    bias_name: str | None = None
    weight_offset: float = 0.0
    channels_first: bool = False
    argument: str = "input"
    output_type: OutputType = OutputType.INPUTS
    is_cast_by_autocast: bool = True

    def __str__(self) -> str:
        parts = ["layer norm" if self.op.centres else "RMS norm"]
        if self.weight_name is None:
            parts.append("no weight")
        if self.weight_offset:
            parts.append(f"{self.weight_offset:g} + {self.weight_name}")
        if self.channels_first:
            parts.append("channels first")
        if self.output_type is not OutputType.INPUTS:
            parts.append(f"output in {self.output_type.value} type")
        return ", ".join(parts)

    def parameters(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The weight and the bias of a module of this form."""
        weight = None if self.weight_name is None else getattr(module, self.weight_name)
        bias = None if self.bias_name is None else getattr(module, self.bias_name)
        return weight, bias

    def __call__(self, module: nn.Module, input: Tensor) -> Tensor:
        """The output of a module of this form, by this package's functions.

        A layer norm without an offset has PyTorch's forward, and so its bits. An RMS norm is
        rounded once, after the weight.
        """
        device = input.device.type
        if not self.is_cast_by_autocast and device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._computed(module, input)
        return self._computed(module, input)

    def _computed(self, module: nn.Module, input: Tensor) -> Tensor:
        weight, bias = self.parameters(module)
        eps: Any = self.eps if self.eps_name is None else getattr(module, self.eps_name)
        dims, offset = self.normalized_shape, self.weight_offset
        of_weight = None if weight is None else weight.dtype
        wanted = self.output_type.of(input.dtype, of_weight)
        if self.output_type is not OutputType.INPUTS:
            input = input.to(torch.promote_types(input.dtype, wanted))
        if self.channels_first:
            input = input.movedim(1, -1)
        if self.op.centres:
            output = layer_norm(input, dims, weight, bias, eps, weight_offset=offset)
        else:
            output = rms_norm(input, dims, weight, eps, weight_offset=offset)
        if self.channels_first:
            output = output.movedim(-1, 1)
        return output if self.output_type is OutputType.INPUTS else output.to(wanted)
