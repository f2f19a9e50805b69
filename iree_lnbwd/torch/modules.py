"""The norms as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iree_lnbwd.errors import shown
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.spec import check_number
from iree_lnbwd.torch.functions import (
    add_layer_norm,
    add_rms_norm,
    check_output_dtype,
    layer_norm,
    rms_norm,
)
from iree_lnbwd.torch.gated import gated_layer_norm, gated_rms_norm
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.operator_table import PYTORCHS_LAYER_NORM


class _WithOptions(nn.Module):
    """What our norms have beside PyTorch's."""

    memory_efficient: bool = False
    weight_offset: float = 0.0
    output_dtype: torch.dtype | str | None = None

    def _set_options(
        self,
        memory_efficient: bool,
        weight_offset: object,
        output_dtype: torch.dtype | str | None = None,
    ) -> None:
        check_output_dtype(output_dtype)
        switch.place()
        self.output_dtype = output_dtype
        self.memory_efficient = memory_efficient
        self.weight_offset = check_number(weight_offset, "weight_offset")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As PyTorch's norms: what the weight and its offset add up to, is one; a bias is zero."""
        super().reset_parameters()
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.weight_offset)
        if isinstance(bias := getattr(self, "bias", None), Tensor):
            nn.init.zeros_(bias)

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` asks for first."""
        raise RuntimeError(
            f"torch.jit.script: expected modules without autograd functions in Python, got "
            f"{type(self).__name__} of iree_lnbwd.torch; torch.export and torch.compile take it"
        )

    def extra_repr(self) -> str:
        """As PyTorch's norms, and the options that are not the default."""
        options = (
            name
            for name in (
                *("memory_efficient", "weight_offset", "output_dtype", "own_forward"),
                *("gate_first", "heads"),
            )
            if hasattr(self, name)
        )
        changed = (name for name in options if getattr(self, name) != getattr(type(self), name))
        said = (f"{name}={getattr(self, name)}" for name in changed)
        return ", ".join((super().extra_repr(), *said))


class _WithHeads(_WithOptions):
    """A weight and a bias for each head, if they are asked for."""

    heads: int | None = None

    def _set_heads(self, heads: object) -> None:
        """Gives the parameters that there are a dimension more."""
        if heads is None:
            return
        if not isinstance(heads, int) or isinstance(heads, bool):
            raise TypeError(f"heads: expected an int or None, got {shown(heads)}")
        if heads < 1:
            raise ValueError(f"heads: expected an int >= 1, got {shown(heads)}")
        if self.weight is None:
            raise ValueError(f"heads: expected None without elementwise_affine, got {heads}")
        self.heads = heads
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(self, name, nn.Parameter(parameter.new_empty((heads, *parameter.shape))))

    def _check_heads(self, input: Tensor) -> None:
        """Expects them right before the normalized dimensions: else rows take others' weights."""
        if self.heads is None or not isinstance(input, Tensor):
            return
        expected = (self.heads, *self.normalized_shape)
        if tuple(input.shape[-len(expected) :]) != expected:
            said = ", ".join(("...", *map(str, expected)))
            raise ValueError(
                f"input: expected shape ({said}), of {self.heads} heads, got {tuple(input.shape)}"
            )


class LayerNorm(_WithHeads, nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose backward is this package's: same arguments, same state_dict.

    ``memory_efficient``, ``weight_offset``, ``output_dtype`` and ``own_forward`` are those of
    `layer_norm`. With ``heads``, there is a weight and a bias for each head: they are of shape
    [heads, *normalized_shape], and inputs of [..., heads, *normalized_shape].
    """

    own_forward: bool = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = DEFAULT_EPS,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
        weight_offset: float = 0.0,
        output_dtype: torch.dtype | str | None = None,
        own_forward: bool = False,
        heads: int | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_heads(heads)
        self._set_options(memory_efficient, weight_offset, output_dtype)
        self.own_forward = own_forward

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape."""
        if type(input) is Tensor and not torch.compiler.is_dynamo_compiling():
            # As `layer_norm` finds out; a module looks for an attribute in several places, which
            # takes a step as long as a norm of few rows does.
            own = self.__dict__
            parameters, shape = own["_parameters"], own["normalized_shape"]
            weight = parameters.get("weight")
            if (
                weight is not None
                and weight.ndim == 1
                and len(shape) == 1
                and "bias" in parameters
                and "heads" not in own
                and own.get("own_forward") is False
                and own.get("memory_efficient") is False
                and own.get("weight_offset") == 0.0
                and own.get("output_dtype") is None
            ):
                output: Tensor = PYTORCHS_LAYER_NORM.output_alone(
                    input, weight, parameters["bias"], shape[0], own["eps"]
                )
                return output
        if self.heads is not None:
            self._check_heads(input)
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
            output_dtype=self.output_dtype,
            own_forward=self.own_forward,
        )


class AddLayerNorm(_WithOptions, nn.LayerNorm):
    """`add_layer_norm` with the parameters, arguments and state_dict of ``torch.nn.LayerNorm``.

    ``memory_efficient``, ``weight_offset`` and ``output_dtype`` are those of `add_layer_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = DEFAULT_EPS,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
        weight_offset: float = 0.0,
        output_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_options(memory_efficient, weight_offset, output_dtype)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., *normalized_shape] to the normalized sum and the sum."""
        return add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
            output_dtype=self.output_dtype,
        )


class _RMSNorm(_WithOptions, nn.RMSNorm):
    """``torch.nn.RMSNorm``, which has no bias, with one."""

    def _set_bias(self, bias: bool) -> None:
        if bias and self.weight is None:
            raise ValueError(f"bias: expected False without elementwise_affine, got {shown(bias)}")
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if bias else None

    def extra_repr(self) -> str:
        """As PyTorch's, and whether there is a bias."""
        return super().extra_repr() + ", bias=True" * (self.bias is not None)


class RMSNorm(_WithHeads, _RMSNorm):
    """``torch.nn.RMSNorm`` by this package's kernels: same arguments, same state_dict.

    With ``bias=True`` it has a bias, too, as ``torch.nn.LayerNorm`` has. ``memory_efficient``,
    ``weight_offset`` and ``output_dtype`` are those of `rms_norm`, and ``heads`` is that of
    `LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        memory_efficient: bool = False,
        weight_offset: float = 0.0,
        output_dtype: torch.dtype | str | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_bias(bias)
        self._set_heads(heads)
        self._set_options(memory_efficient, weight_offset, output_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape."""
        if self.heads is not None:
            self._check_heads(x)
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            bias=self.bias,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
            output_dtype=self.output_dtype,
        )


class AddRMSNorm(_RMSNorm):
    """`add_rms_norm` with the parameters, arguments and state_dict of `RMSNorm`.

    ``memory_efficient``, ``weight_offset`` and ``output_dtype`` are those of `add_rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        memory_efficient: bool = False,
        weight_offset: float = 0.0,
        output_dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_bias(bias)
        self._set_options(memory_efficient, weight_offset, output_dtype)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., *normalized_shape] to the normalized sum and the sum."""
        return add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            bias=self.bias,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
            output_dtype=self.output_dtype,
        )


class GatedLayerNorm(_WithOptions, nn.LayerNorm):
    """`gated_layer_norm` with the parameters, arguments and state_dict of ``torch.nn.LayerNorm``.

    ``gate_first`` and ``weight_offset`` are those of `gated_layer_norm`.
    """

    gate_first: bool = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = DEFAULT_EPS,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        gate_first: bool = False,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_options(False, weight_offset)
        self.gate_first = gate_first

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        """Two of [..., *normalized_shape] to the same shape."""
        return gated_layer_norm(
            input,
            gate,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            gate_first=self.gate_first,
            weight_offset=self.weight_offset,
        )


class GatedRMSNorm(_RMSNorm):
    """`gated_rms_norm` with the parameters, arguments and state_dict of `RMSNorm`.

    ``gate_first`` and ``weight_offset`` are those of `gated_rms_norm`.
    """

    gate_first: bool = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        gate_first: bool = False,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_bias(bias)
        self._set_options(False, weight_offset)
        self.gate_first = gate_first

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:
        """Two of [..., *normalized_shape] to the same shape."""
        return gated_rms_norm(
            input,
            gate,
            self.normalized_shape,
            self.weight,
            self.eps,
            bias=self.bias,
            gate_first=self.gate_first,
            weight_offset=self.weight_offset,
        )


WITH_HEADS = (LayerNorm, RMSNorm)
NORMS = (*WITH_HEADS, AddLayerNorm, AddRMSNorm, GatedLayerNorm, GatedRMSNorm)


def check_model(model: object) -> None:
    """Expects a module.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
