"""`warmup`: what a model's norms need, compiled and loaded ahead."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from iree_lnbwd.errors import shown
from iree_lnbwd.torch import kernels, overrides
from iree_lnbwd.torch.modules import NORMS, AddLayerNorm, AddRMSNorm, check_model
from iree_lnbwd.torch.override_warmup import InPlace
from iree_lnbwd.torch.replacement.classes import ReplacedNorm, form_of, own_class, stand_in

_PLAIN: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)


def warmup(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    tune: bool = False,
) -> None:
    """Compiles and loads the modules that a model's norms need.

    The norms are those of the classes of this package, those that `replace_norms` replaced, and
    while `enable` is in force, ``nn.LayerNorm``, ``nn.RMSNorm`` and their subclasses. Each is run
    on a row of zeros, forward and backward, with zeros in place of its parameters: these may be
    sharded, or on the meta device. Norms that take a residual are run backward with and without a
    gradient of the sum. Under ``torch.autocast``, the modules for autocast are compiled.

    Args:
        model: With norms, or one itself.
        dtype: Element type of the norms' inputs; None takes that of their weights.
        residual_dtype: Element type of the residuals; None takes that of the inputs.
        weight_dtype: Element type that the weights will have, as FSDP2's ``param_dtype``; None
            takes the one that they have.
        device: Device of the inputs; None takes that of the weights. A norm without a weight takes
            the type and the device of the model's first parameter, or PyTorch's defaults.
        tune: Find the fastest schedules first, as `iree_lnbwd.tune`, for norms on a GPU that were
            not tuned there before. This takes less than a minute for each module, once for a user
            and a kind of GPU.

    Raises:
        TypeError, ValueError: Naming the argument; also with ``tune``, if a norm is on no GPU, and
            without ``device``, if one is on the meta device.
        CompileError, DeviceError: As `layer_norm`, also where `enable` would go to PyTorch's.
        OSError: As `iree_lnbwd.tune`.
    """
    check_model(model)
    if not isinstance(tune, bool):
        raise TypeError(f"tune: expected a bool, got {shown(tune)}")
    zeros = functools.partial(_zeros, dtype=weight_dtype, device=device)
    norms = [
        stand_in(norm, cls, zeros)
        for norm in model.modules()
        if (cls := _class_of(norm)) is not None
    ]

    def first() -> Tensor:
        """As the model's first parameter, but empty."""
        floating = (p for p in model.parameters() if p.is_floating_point())
        return next((zeros(p.new_empty(0)) for p in floating), torch.empty(0, device=device))

    rows = [_rows(norm, first, dtype, residual_dtype) for norm in norms]
    for inputs in rows:
        if tune and not inputs[0].is_cuda:
            raise ValueError(
                f"tune: expected False for norms on no GPU, got True and one on {inputs[0].device}"
            )
    for norm, inputs in zip(norms, rows, strict=True):
        _run_once(norm, inputs)
    if tune:
        kernels.tune({_shape(norm) for norm in norms})
        for norm, inputs in zip(norms, rows, strict=True):
            _run_once(norm, inputs)


def _class_of(module: nn.Module) -> type[nn.Module] | None:
    """The class whose forward makes a module's calls; None of what is to be left alone.

    A subclass of PyTorch's may do more around the call, and take an input of another shape.
    """
    if isinstance(module, (*NORMS, ReplacedNorm)):
        return own_class(module)
    if not overrides.status().enabled:
        return None
    return next((cls for cls in _PLAIN if isinstance(module, cls)), None)


def _zeros(
    parameter: Tensor, dtype: torch.dtype | None, device: torch.device | str | int | None
) -> Tensor:
    """In place of a parameter, on one device."""
    if device is None and parameter.is_meta:
        raise ValueError(
            "device: expected the one that the model will be on, for a model on the meta device, "
            "got None"
        )
    return torch.zeros(
        parameter.shape,
        dtype=dtype or parameter.dtype,
        device=parameter.device if device is None else device,
    )


def _shape(norm: nn.Module) -> tuple[int, ...]:
    of = form_of(norm) if isinstance(norm, ReplacedNorm) else norm
    return tuple(of.normalized_shape)


def _rows(
    norm: nn.Module,
    first: Callable[[], Tensor],
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> list[Tensor]:
    """A row of zeros of these element types: an input, and a residual where the norm takes one.

    ``first`` returns a tensor of the type and device of what has no weight.
    """
    weight = form_of(norm).parameters(norm)[0] if isinstance(norm, ReplacedNorm) else norm.weight
    like = first() if weight is None else weight
    shape = _shape(norm)
    if isinstance(norm, ReplacedNorm) and form_of(norm).channels_first:
        shape = (*shape, 1, 1)
    dtypes = (dtype, dtype if residual_dtype is None else residual_dtype)
    return [
        torch.zeros(
            1,
            *shape,
            dtype=dtype or like.dtype,
            device=like.device,
            requires_grad=True,
        )
        for dtype in dtypes[: 2 if isinstance(norm, AddLayerNorm | AddRMSNorm) else 1]
    ]


def _run_once(norm: nn.Module, rows: Sequence[Tensor]) -> None:
    """In both directions, of these inputs."""
    with InPlace() if type(norm) in _PLAIN else contextlib.nullcontext():
        results = norm.forward(*rows)  # not by a call: no hooks
        outputs = results if isinstance(results, tuple) else (results,)
        differentiated = [*rows, *(p for p in norm.parameters() if p.requires_grad)]
        for used in range(1, 1 + len(outputs)):
            zeros = [torch.zeros_like(output) for output in outputs[:used]]
            torch.autograd.grad(outputs[:used], differentiated, zeros, retain_graph=True)
