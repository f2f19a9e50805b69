"""Layer normalization in PyTorch: PyTorch's forward, this package's backward.

``layer_norm`` is a drop-in for ``torch.nn.functional.layer_norm``, ``LayerNorm`` for
``torch.nn.LayerNorm``, and ``replace_layer_norm`` swaps the ones that a model has.

Both directions are operators of PyTorch's dispatcher, ``torch.ops.iree_lnbwd.layer_norm`` and
``.layer_norm_backward``. They are registered with ``torch.library.Library`` and a
``torch.autograd.Function``. ``torch.compile`` and ``torch.export`` can see through operators that
are registered in this way, and it takes the least time in a call. For tensors on a GPU,
`torch_native` replaces them by C++, if it can be compiled.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iree_lnbwd import functional, notices, torch_native
from iree_lnbwd.arguments import DEFAULT_EPS, Options
from iree_lnbwd.operands import LAYER_NORM_BACKWARD
from iree_lnbwd.runtime.frameworks import pytorch
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

__all__ = ["LayerNorm", "layer_norm", "replace_layer_norm", "warmup"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_DEVICE_TYPES = ("cpu", "cuda", "meta")  # PyTorch calls AMD GPUs "cuda" too

# A tensor's device and element type; None for a tensor that is not given.
_TensorKind = tuple[torch.device, torch.dtype] | None

_log = logging.getLogger(__name__)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Normalizes ``input`` over its trailing dimensions, as ``torch.nn.functional.layer_norm``.

    The forward is PyTorch's own, so the output has its bits; the backward is this package's. The
    first backward for a row length, element types and a device compiles a module. This takes about
    a second and is logged; the module is kept on disk. `warmup` compiles it ahead of time.

    PyTorch's own backward is used if it is itself to be differentiated (``create_graph=True``), and
    under the transforms of ``torch.func``.

    The first use on a GPU compiles the operators in C++, too (see `torch_native.load`).

    Args:
        input: [..., *normalized_shape], on the CPU or a GPU; f32, f16, bf16 or f64. Any strides;
            what is not contiguous is copied.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape], on the same device; None means ones. Its element type may be
            another than ``input``'s, unless one is f64.
        bias: As ``weight``; None means zeros.
        eps: Added to the variance.

    Returns:
        The shape and element type of ``input`` (f32 under ``torch.autocast`` on a GPU).

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    if input is None:  # PyTorch's dispatcher refuses everything else that is no tensor
        raise TypeError("input: expected a tensor, got None")
    dims = (
        (normalized_shape,)
        if isinstance(normalized_shape, int | torch.SymInt)
        else normalized_shape
    )
    output: Tensor = torch.ops.iree_lnbwd.layer_norm.default(input, dims, weight, bias, eps)
    return output


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose backward is this package's: same arguments, same state_dict."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


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
    device: torch.device | str | int | None = None,
) -> None:
    """Compiles and loads the modules that the backward of a model's `LayerNorm` modules needs.

    Each of them is run on a row of zeros, forward and backward; no parameter's ``grad`` changes.
    Under ``torch.autocast``, the modules for autocast are compiled.

    Args:
        model: With `LayerNorm` modules, or one itself.
        dtype: Element type of the layer norms' inputs; None takes that of their weights, or
            PyTorch's default.
        device: Device of the inputs; None takes that of the weights, or PyTorch's default.
    """
    _check_model(model)
    for norm in model.modules():
        if not isinstance(norm, LayerNorm):
            continue
        weight, bias = (
            None if p is None else p.detach().requires_grad_(p.requires_grad)
            for p in (norm.weight, norm.bias)
        )
        row = torch.zeros(
            1,
            *norm.normalized_shape,
            dtype=dtype or (None if weight is None else weight.dtype),
            device=(None if weight is None else weight.device) if device is None else device,
            requires_grad=True,
        )
        output = layer_norm(row, norm.normalized_shape, weight, bias, norm.eps)
        torch.autograd.backward(output, torch.zeros_like(output))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _forward(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's forward: output, mean and rstd."""
    kind = (input.device, input.dtype)
    weight_kind, bias_kind = _kind(weight), _kind(bias)
    _check_kinds(kind, weight=weight_kind, bias=bias_kind)
    if _takes_kinds(kind, weight_kind, bias_kind):
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
    wide = (None if tensor is None else tensor.float() for tensor in (weight, bias))
    output, mean, rstd = torch.native_layer_norm(input.float(), normalized_shape, *wide, eps)
    return output.to(input.dtype), mean, rstd


class _LayerNormFunction(torch.autograd.Function):
    """The autograd formula of ``iree_lnbwd::layer_norm``.

    The forward calls ATen instead of the operator again, so that a compiler may fuse it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        output, mean, rstd = _forward(input, normalized_shape, weight, bias, eps)
        if mean.dtype in _HALF:
            # On the CPU they are too coarse to be of use, so the backward recomputes them.
            ctx.save_for_backward(input, weight, bias, None, None)
        else:
            ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.normalized_shape = normalized_shape
        ctx.eps = eps
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        of_input, _, of_weight, of_bias, _ = ctx.needs_input_grad
        mask = (of_input, of_weight, of_bias)
        if torch.is_grad_enabled():
            dx, dgamma, dbeta = _differentiable_backward(
                grad_output, (input, weight, bias), ctx.normalized_shape, ctx.eps, mask
            )
        else:
            run = (
                _layer_norm_backward
                if _are_plain(grad_output, input, mean, rstd, weight, bias)
                else torch.ops.iree_lnbwd.layer_norm_backward.default
            )
            dx, dgamma, dbeta = run(
                grad_output,
                input,
                ctx.normalized_shape,
                mean,
                rstd,
                weight,
                bias,
                mask,
                ctx.eps,
            )
        return dx, None, dgamma, dbeta, None


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher can be skipped, because nothing observes these tensors."""
    return (
        all(
            tensor is None or (type(tensor) in (Tensor, nn.Parameter) and pytorch.is_plain(tensor))
            for tensor in tensors
        )
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()
    )


def _differentiable_backward(
    grad_output: Tensor,
    differentiated: tuple[Tensor, Tensor | None, Tensor | None],
    normalized_shape: Sequence[int],
    eps: float,
    mask: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """The gradients by PyTorch's own operators, which can be differentiated again."""
    output, _, _ = _forward(differentiated[0], normalized_shape, *differentiated[1:], eps)
    wanted = [tensor for tensor, asked in zip(differentiated, mask, strict=True) if asked]
    gradients = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    return tuple(next(gradients) if asked else None for asked in mask)


def _layer_norm_with_autograd(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``iree_lnbwd::layer_norm`` with autograd on."""
    if torch._C._are_functorch_transforms_active():
        # torch.func differentiates and batches ATen's operators.
        return _forward(input, normalized_shape, weight, bias, eps)[0]
    if input.is_cuda and torch.cuda.is_available() and torch_native.load():
        # From now on the dispatcher takes the C++ operators, which are registered for CUDA by name.
        output: Tensor = torch.ops.iree_lnbwd.layer_norm.default(
            input, normalized_shape, weight, bias, eps
        )
        return output
    return _LayerNormFunction.apply(input, normalized_shape, weight, bias, eps)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``iree_lnbwd::layer_norm`` with autograd off."""
    return _forward(input, normalized_shape, weight, bias, eps)[0]


def _layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``iree_lnbwd::layer_norm_backward``."""
    asked = (output_mask[0], output_mask[1] and weight is not None, output_mask[2])
    if not any(asked):
        return None, None, None
    if input.numel() == 0:  # an empty sum is zero
        gradients = _empty_gradients(input, normalized_shape, weight, bias, asked)
        return tuple(None if g is None else g.zero_() for g in gradients)  # type: ignore[return-value]
    _check_kinds(
        (input.device, input.dtype),
        grad_output=(grad_output.device, grad_output.dtype),
        mean=_kind(mean),
        rstd=_kind(rstd),
        weight=_kind(weight),
        bias=_kind(bias),
    )
    computed, known = functional.call(
        (grad_output, input, mean, rstd, weight, bias, None),
        Options(LAYER_NORM_BACKWARD, tuple(normalized_shape), asked, 0.0, eps),
        compiling=_say_compiling,
    )
    if known is not None and mean is not None and torch_native.load():
        torch_native.remember(
            torch_native.CallKind(
                input.device,
                known.rows,
                known.module.spec.columns,
                grad_output.dtype,
                input.dtype,
                None if weight is None else weight.dtype,
                None if bias is None else bias.dtype,
                (output_mask[0], output_mask[1], output_mask[2]),
            ),
            known,
        )
    return computed  # type: ignore[return-value]


def _empty_gradients(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    asked: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Storage for the gradients."""
    of_weight = input if weight is None else weight
    of_bias = of_weight if bias is None else bias
    return (
        input.new_empty(input.shape) if asked[0] else None,
        of_weight.new_empty(normalized_shape) if asked[1] and weight is not None else None,
        of_bias.new_empty(normalized_shape) if asked[2] else None,
    )


def _kind(tensor: Tensor | None) -> _TensorKind:
    return None if tensor is None else (tensor.device, tensor.dtype)


@functools.lru_cache
def _takes_kinds(input: _TensorKind, weight: _TensorKind, bias: _TensorKind) -> bool:
    """Whether PyTorch's forward takes these types together; on GPUs, it takes one type only."""
    assert input is not None
    parameters = {kind[1] for kind in (weight, bias) if kind is not None}
    mixed_on_cpu = input[0].type == "cpu" and parameters == {torch.float32}
    return parameters <= {input[1]} or mixed_on_cpu


@functools.lru_cache
def _check_kinds(input: _TensorKind, **others: _TensorKind) -> None:
    """Expects tensors that the op has a module for.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.
    """
    assert input is not None
    device, dtype = input
    if device.type not in _DEVICE_TYPES:
        raise ValueError(f"input: expected a tensor on the CPU or on a GPU, got one on {device}")
    for name, kind in {"input": input, **others}.items():
        if kind is None:
            continue
        if kind[0] != device:
            raise ValueError(f"{name}: expected a tensor on {device} like input, got {kind[0]}")
        if kind[1] not in _DTYPES:
            expected = ", ".join(map(str, _DTYPES))
            raise TypeError(f"{name}: expected an element type of {expected}, got {kind[1]}")
        if kind[1] != dtype and torch.float64 in (kind[1], dtype):
            raise TypeError(f"{name}: expected {dtype} like input, got {kind[1]}")


def _say_compiling(spec: NormSpec, target: Target) -> None:
    notices.log(_log, "compiling %s for %s; it is kept on disk", spec.name, target.name)


# PyTorch keeps its operators' kernels, and so this module, until after the interpreter's end.
# IREE's devices and modules must be closed before that.
atexit.register(functional.loaded.cache_clear)


def _fake_layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _empty_gradients(input, normalized_shape, weight, bias, output_mask)


# These have no defaults, because PyTorch omits arguments with their default value from a call.
_library = torch.library.Library("iree_lnbwd", "DEF")
_library.define(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_BACKWARD = (
    "(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor? rstd, "
    "Tensor? weight, Tensor? bias, bool[3] output_mask, float eps) -> (Tensor, Tensor, Tensor)"
)
_library.define("layer_norm_backward" + _BACKWARD, tags=(torch.Tag.pt2_compliant_tag,))
# The C++ operators call these for new kinds of call and for mixed types.
_library.define("layer_norm_backward_checked" + _BACKWARD)
_library.define(
    "layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)
_library.impl("layer_norm", _layer_norm, "CompositeExplicitAutograd")
_library.impl("layer_norm", _layer_norm_with_autograd, "Autograd")
_library.impl("layer_norm", _layer_norm, "FuncTorchBatchedDecomposition")
_library.impl("layer_norm_backward", _layer_norm_backward, "CompositeExplicitAutograd")
_library.impl("layer_norm_backward_checked", _layer_norm_backward, "CompositeExplicitAutograd")
_library.impl("layer_norm_forward", _forward, "CompositeImplicitAutograd")
# As PyTorch's own layer norm: under autocast in f32 on GPUs, and in the input's type on the CPU.
torch.library.register_autocast("iree_lnbwd::layer_norm", "cuda", torch.float32, lib=_library)
torch.library.register_fake("iree_lnbwd::layer_norm", _layer_norm, lib=_library)
torch.library.register_fake(
    "iree_lnbwd::layer_norm_backward", _fake_layer_norm_backward, lib=_library
)
