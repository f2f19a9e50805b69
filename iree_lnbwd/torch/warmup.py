"""`warmup`: what a model's norms need, compiled and loaded ahead."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from iree_lnbwd.errors import CompileError, shown
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.torch import overrides, tensor_calls
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.modules import (
    NORMS,
    WITH_HEADS,
    AddLayerNorm,
    AddRMSNorm,
    GatedLayerNorm,
    GatedRMSNorm,
    check_model,
)
from iree_lnbwd.torch.operator_table import (
    ALL_GRADIENTS,
    ALL_NORMS,
    CHECKED,
    Gradients,
    Norm,
    operator,
)
from iree_lnbwd.torch.override_warmup import InPlace
from iree_lnbwd.torch.replacement import shards
from iree_lnbwd.torch.replacement.classes import ReplacedNorm, form_of, own_class, stand_in
from iree_lnbwd.torch.replacement.modulated import ReplacedWrapper, modulated

_PLAIN: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
_OURS: tuple[Norm | Gradients, ...] = (*ALL_NORMS, *ALL_GRADIENTS)
_CHECKED = {each.operator: operator(each.name + CHECKED) for each in _OURS}


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
    sharded (by FSDP1 and ZeRO-3, too), pruned, parametrized, or on the meta device. Norms of
    which the input alone says how long rows are (weightless RMS norms are such) are left out. Norms
    that take a residual are run backward with and without a gradient of the sum. Under
    ``torch.autocast``, the modules for autocast are compiled; ``no_grad`` and inference mode change
    nothing.

    Args:
        model: With norms, or one itself.
        dtype: Element type of the norms' inputs; None takes that of their weights.
        residual_dtype: Element type of the residuals; None takes that of the inputs.
        weight_dtype: Element type that the weights will have, as FSDP2's ``param_dtype``; None
            takes the one that they have.
        device: Device of the inputs; None takes that of the weights. A norm without a weight takes
            the type and the device of the model's first parameter, or PyTorch's defaults.
        tune: Find the fastest schedules first, as `iree_lnbwd.tune`, for norms on a GPU that were
            not tuned there before. This compiles and times up to 48 schedules of each module, once
            for a user and a kind of GPU.

    Raises:
        TypeError, ValueError: Naming the argument; also with ``tune``, if a norm is on no GPU, and
            without ``device``, if one is on the meta device.
        CompileError, DeviceError: As `iree_lnbwd.layer_norm`: a call would go to PyTorch's
            operators. What else there is to load, is loaded.
        OSError: As `iree_lnbwd.tune`.
    """
    check_model(model)
    if not isinstance(tune, bool):
        raise TypeError(f"tune: expected a bool, got {shown(tune)}")
    REFUSALS.forget()
    with torch.inference_mode(False), torch.enable_grad():
        _warm_up(model, dtype, residual_dtype, _Like(weight_dtype, device), tune)
    if reasons := REFUSALS.reasons:
        raise CompileError(reasons[0])


def specs(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
) -> tuple[NormSpec, ...]:
    """The modules that a model's norms need, forward and backward; none is compiled or loaded.

    The norms are those of the classes of this package, and those that `replace_norms` replaced;
    of the latter, not those of which the input alone says how long rows are. They are what
    ``iree-lnbwd bundle --model`` puts into a file, and what `warmup` loads on one device: on CPUs,
    the backward of a layer norm in half precision computes its statistics again, and on GPUs it
    takes them.

    Args:
        model: As `warmup`; nothing of it is read but types and shapes.
        dtype: As `warmup`.
        residual_dtype: As `warmup`.
        weight_dtype: As `warmup`.

    Returns:
        Each once, for CPUs and GPUs.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_model(model)
    on_cpu = _Like(weight_dtype, "cpu")
    with torch.inference_mode(False), torch.enable_grad(), REFUSALS.asked() as asked, _Checked():
        _warm_up(model, dtype, residual_dtype, on_cpu, tune=False, plain=False)
    both = ((spec, replace(spec, eps=None) if spec.family.is_backward else spec) for spec in asked)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(both)))


class _Checked(TorchDispatchMode):
    """Within it, every call comes to Python: C++ asks for no module of a call that it knows."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """The results, of our operators by Python."""
        return _CHECKED.get(function, function)(*arguments, **(named or {}))


class _Like(NamedTuple):
    """What parameters will be.

    Attributes:
        dtype: Their element type; None takes the one that they have.
        device: As ``dtype``.
    """

    dtype: torch.dtype | None
    device: torch.device | str | int | None

    def zeros(self, parameter: Tensor, shape: Sequence[int]) -> Tensor:
        """In place of a parameter, of which the memory is not read.

        Raises:
            ValueError: It is on the meta device, and nobody said where it will be.
        """
        if self.device is None and parameter.is_meta:
            raise ValueError(
                "device: expected the one that the model will be on, for a model on the meta "
                "device, got None"
            )
        return torch.zeros(
            tuple(shape),
            dtype=parameter.dtype if self.dtype is None else self.dtype,
            device=parameter.device if self.device is None else self.device,
        )


class _Norm(NamedTuple):
    """A norm of the model, and its dimensions."""

    module: nn.Module
    shape: tuple[int, ...]


def _warm_up(
    model: nn.Module,
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    like: _Like,
    tune: bool,
    plain: bool = True,
) -> None:
    """As `warmup`; ``plain`` says whether PyTorch's own norms count, while `enable` serves them."""
    norms = []
    for module in model.modules():
        if (cls := _class_of(module)) is not None and (plain or cls not in _PLAIN):
            if (shape := _shape(module)) is None:
                continue
            norms.append(_Norm(stand_in(module, cls, _parameters(module, shape, like)), shape))

    def first() -> Tensor:
        """As the model's first parameter, but empty."""
        floating = (p for p in model.parameters() if p.is_floating_point())
        empty = (like.zeros(parameter, (0,)) for parameter in floating)
        return next(empty, torch.empty(0, device=like.device))

    rows = [_rows(norm, first, dtype, residual_dtype) for norm in norms]
    for norm, inputs in _modulated(model, like, dtype):
        norms.append(norm)
        rows.append(inputs)
    for inputs in rows:
        if tune and not inputs[0].is_cuda:
            raise ValueError(
                f"tune: expected False for norms on no GPU, got True and one on {inputs[0].device}"
            )
    for norm, inputs in zip(norms, rows, strict=True):
        _run_once(norm.module, inputs)
    if tune:
        tensor_calls.tune({norm.shape for norm in norms})
        for norm, inputs in zip(norms, rows, strict=True):
            _run_once(norm.module, inputs)


class _Modulated(nn.Module):
    """What a replaced wrapper makes of its norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor, factor: Tensor, *shift: Tensor) -> Tensor:
        """A row for each."""
        return modulated(self.norm, input, factor, *shift)


def _modulated(
    model: nn.Module, like: _Like, dtype: torch.dtype | None
) -> Iterator[tuple[_Norm, list[Tensor]]]:
    """What the replaced wrappers of a model call, and a row of zeros for each input."""
    for wrapper in model.modules():
        if not isinstance(wrapper, ReplacedWrapper):
            continue
        modulation: Any = form_of(wrapper)
        for name, has_shift in modulation.norms.items():
            norm = getattr(wrapper, name)
            if not isinstance(norm, ReplacedNorm) or (shape := _shape(norm)) is None:
                continue
            made = stand_in(norm, own_class(norm), _parameters(norm, shape, like))
            floating = (p for p in wrapper.parameters() if p.is_floating_point())
            factor = like.zeros(next(floating, torch.empty(0)), (1, 1, *shape))
            row = factor if dtype is None else factor.to(dtype)
            rows = [row, factor, factor][: 2 + has_shift]
            yield _Norm(_Modulated(made), shape), [r.clone().requires_grad_() for r in rows]


def _class_of(module: nn.Module) -> type[nn.Module] | None:
    """The class whose forward makes a module's calls; None of what is to be left alone.

    A subclass of PyTorch's may do more around the call, and take an input of another shape.
    """
    if isinstance(module, ReplacedWrapper):
        return None
    if isinstance(module, (*NORMS, ReplacedNorm)):
        return own_class(module)
    if not overrides.status().enabled:
        return None
    return next((cls for cls in _PLAIN if isinstance(module, cls)), None)


def _shape(norm: nn.Module) -> tuple[int, ...] | None:
    """The dimensions that a norm will normalize in a forward; None if its input alone knows.

    Where it has a weight for each head, the heads come before them.
    """
    form = form_of(norm) if isinstance(norm, ReplacedNorm) else None
    if form is not None and form.any_width:
        return None
    if form is None or form.shape_name is not None:
        shape = getattr(norm, "normalized_shape" if form is None else form.shape_name or "")
    elif (name := form.weight_name or form.bias_name) is None or shards.holder(norm) is not None:
        shape = form.normalized_shape
    else:
        vector = _tensor(norm, name)
        shape = (vector.numel(),) if form.is_flattened else vector.shape
    heads = (norm.heads,) if isinstance(norm, WITH_HEADS) and norm.heads is not None else ()
    return (*heads, *((shape,) if isinstance(shape, int) else shape))


def _parameters(
    norm: nn.Module, shape: Sequence[int], like: _Like
) -> dict[str, nn.Parameter | None]:
    """Zeros in place of a norm's weight and bias, whatever computes these."""
    names: tuple[str | None, ...] = ("weight", "bias")
    if isinstance(norm, ReplacedNorm):
        names = (form_of(norm).weight_name, form_of(norm).bias_name)
    # What is computed has a gradient if anything does that it is computed from.
    others = any(p.requires_grad for p in norm.parameters()) or not list(norm.parameters())
    made: dict[str, nn.Parameter | None] = {}
    for name in filter(None, names):
        tensor, own = _tensor(norm, name), norm._parameters.get(name)
        learns = name not in norm._buffers and (others if own is None else own.requires_grad)
        made[name] = None if tensor is None else nn.Parameter(
            like.zeros(tensor, shape), requires_grad=learns
        )  # fmt: skip
    return made


def _tensor(norm: nn.Module, name: str) -> Any:
    """A norm's weight or bias; parametrized ones are computed."""
    with torch.no_grad():
        return getattr(norm, name, None)


def _rows(
    norm: _Norm,
    first: Callable[[], Tensor],
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> list[Tensor]:
    """A row of zeros of these types: an input, and a residual or a gate where the norm takes one.

    ``first`` returns a tensor of the type and device of what has no weight.
    """
    module, shape = norm
    is_replaced = isinstance(module, ReplacedNorm)
    weight = form_of(module).parameters(module)[0] if is_replaced else module.weight
    like = first() if weight is None else weight
    leading: tuple[int, ...] = (1,)
    if is_replaced and form_of(module).channels_first:
        rank = min(form_of(module).ranks or (4,))
        shape = (*shape, *(1 for _ in range(rank - 2)))
    elif is_replaced and (ranks := form_of(module).ranks):
        leading = tuple(1 for _ in range(max(ranks) - len(shape)))
    has_sum = isinstance(module, AddLayerNorm | AddRMSNorm)
    is_gated = isinstance(module, GatedLayerNorm | GatedRMSNorm) or (
        is_replaced and form_of(module).gate is not None
    )
    dtypes = (dtype, residual_dtype if has_sum and residual_dtype is not None else dtype)
    return [
        torch.zeros(
            *leading,
            *shape,
            dtype=like.dtype if dtype is None else dtype,
            device=like.device,
            requires_grad=True,
        )
        for dtype in dtypes[: 2 if has_sum or is_gated else 1]
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
