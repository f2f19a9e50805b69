"""The norms as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iree_lnbwd.arguments import DEFAULT_EPS
from iree_lnbwd.errors import shown
from iree_lnbwd.spec import check_number
from iree_lnbwd.torch import kernels
from iree_lnbwd.torch.functions import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class _WithOptions(nn.Module):
    """What our norms have beside PyTorch's.

    The classes have the options, too, for modules that `replace_layer_norm` did not construct.
    """

    memory_efficient: bool = False
    weight_offset: float = 0.0

    def reset_parameters(self) -> None:
        """As PyTorch's norms: what the weight and its offset add up to, is one."""
        super().reset_parameters()
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.weight_offset)

    def extra_repr(self) -> str:
        """As PyTorch's norms, and the options that are not the default."""
        options = (
            name
            for name in ("memory_efficient", "weight_offset", "own_forward")
            if hasattr(self, name)
        )
        changed = (name for name in options if getattr(self, name) != getattr(type(self), name))
        said = (f"{name}={getattr(self, name)}" for name in changed)
        return ", ".join((super().extra_repr(), *said))


class _LayerNorm(_WithOptions, nn.LayerNorm):
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
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.memory_efficient = memory_efficient
        self.weight_offset = check_number(weight_offset, "weight_offset")
        self.reset_parameters()


class LayerNorm(_LayerNorm):
    """``torch.nn.LayerNorm`` whose backward is this package's: same arguments, same state_dict.

    ``memory_efficient``, ``weight_offset`` and ``own_forward`` are those of `layer_norm`.
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
        own_forward: bool = False,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            memory_efficient=memory_efficient,
            weight_offset=weight_offset,
        )
        self.own_forward = own_forward

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape."""
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
            own_forward=self.own_forward,
        )


class AddLayerNorm(_LayerNorm):
    """`add_layer_norm` with the parameters, arguments and state_dict of ``torch.nn.LayerNorm``.

    ``memory_efficient`` and ``weight_offset`` are those of `add_layer_norm`.
    """

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
        )


class _RMSNorm(_WithOptions, nn.RMSNorm):
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        memory_efficient: bool = False,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.memory_efficient = memory_efficient
        self.weight_offset = check_number(weight_offset, "weight_offset")
        self.reset_parameters()


class RMSNorm(_RMSNorm):
    """``torch.nn.RMSNorm`` by this package's kernels: same arguments, same state_dict.

    ``memory_efficient`` and ``weight_offset`` are those of `rms_norm`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape."""
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
        )


class AddRMSNorm(_RMSNorm):
    """`add_rms_norm` with the parameters, arguments and state_dict of ``torch.nn.RMSNorm``.

    ``memory_efficient`` and ``weight_offset`` are those of `add_rms_norm`.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., *normalized_shape] to the normalized sum and the sum."""
        return add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            memory_efficient=self.memory_efficient,
            weight_offset=self.weight_offset,
        )


def replace_layer_norm(model: nn.Module) -> nn.Module:
    """Makes every ``torch.nn.LayerNorm`` of a model a `LayerNorm`, in place.

    The modules stay the same objects, so parameters, hooks, and references to them are kept.
    Subclasses of ``torch.nn.LayerNorm`` are not changed, because they may compute something else.
    Call this before functions that capture the modules' methods, such as ``torch.compile``.

    Returns:
        The model.
    """
    _check_model(model)
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm
    return model


def warmup(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    tune: bool = False,
) -> None:
    """Compiles and loads the modules that a model's norms need, of the classes of this package.

    Each of them is run on a row of zeros, forward and backward; no parameter's ``grad`` changes.
    Those that take a residual are run backward with and without a gradient of the sum. Under
    ``torch.autocast``, the modules for autocast are compiled.

    Args:
        model: With norms, or one itself.
        dtype: Element type of the norms' inputs; None takes that of their weights, or PyTorch's
            default.
        residual_dtype: Element type of the residuals; None takes that of the inputs.
        device: Device of the inputs; None takes that of the weights, or PyTorch's default.
        tune: Find the fastest schedules first, as `iree_lnbwd.tune`, for norms on a GPU that were
            not tuned there before. This takes less than a minute for each module, once for a user
            and a kind of GPU.

    Raises:
        TypeError, ValueError: Naming the argument; also with ``tune``, if a norm is on no GPU.
        CompileError, DeviceError, OSError: As `iree_lnbwd.tune`.
    """
    _check_model(model)
    if not isinstance(tune, bool):
        raise TypeError(f"tune: expected a bool, got {shown(tune)}")
    norms = [
        norm
        for norm in model.modules()
        if isinstance(norm, LayerNorm | RMSNorm | AddLayerNorm | AddRMSNorm)
    ]
    rows = [_rows(norm, dtype, residual_dtype, device) for norm in norms]
    if tune:
        for inputs in rows:
            if not inputs[0].is_cuda:
                raise ValueError(
                    f"tune: expected False for norms on no GPU, got True and one on "
                    f"{inputs[0].device}"
                )
    for norm, inputs in zip(norms, rows, strict=True):
        _run_once(norm, inputs)
    if tune:
        kernels.tune({tuple(norm.normalized_shape) for norm in norms})
        for norm, inputs in zip(norms, rows, strict=True):
            _run_once(norm, inputs)


def _rows(
    norm: nn.Module,
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    device: torch.device | str | int | None,
) -> list[Tensor]:
    """A row of zeros of these element types: an input, and a residual where the norm takes one."""
    weight = norm.weight
    dtypes = (dtype, dtype if residual_dtype is None else residual_dtype)
    return [
        torch.zeros(
            1,
            *norm.normalized_shape,
            dtype=weight.dtype if dtype is None and weight is not None else dtype,
            device=weight.device if device is None and weight is not None else device,
            requires_grad=True,
        )
        for dtype in dtypes[: 2 if isinstance(norm, AddLayerNorm | AddRMSNorm) else 1]
    ]


def _run_once(norm: nn.Module, rows: Sequence[Tensor]) -> None:
    """In both directions, of these inputs."""
    results = norm.forward(*rows)  # not by a call: no hooks
    outputs = results if isinstance(results, tuple) else (results,)
    differentiated = [*rows, *(p for p in norm.parameters() if p.requires_grad)]
    for used in range(1, 1 + len(outputs)):
        zeros = [torch.zeros_like(output) for output in outputs[:used]]
        torch.autograd.grad(outputs[:used], differentiated, zeros, retain_graph=True)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
