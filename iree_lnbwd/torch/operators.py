"""The registration of the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from iree_lnbwd import torch_native
from iree_lnbwd.arguments import Results
from iree_lnbwd.operands import LAYER_NORM_BACKWARD, names
from iree_lnbwd.torch import aten, kernels
from iree_lnbwd.torch.autograd import NormFunction, Options
from iree_lnbwd.torch.jagged import by_values, is_jagged
from iree_lnbwd.torch.norms import (
    GRADIENTS,
    NAMESPACE,
    OWN_LAYER_NORM,
    OWN_NORMS,
    OWN_RMS_NORM,
    PYTORCHS_LAYER_NORM,
    Gradients,
    Norm,
)

_library = torch.library.Library(NAMESPACE, "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _are_pytorchs_rules_needed() -> bool:
    """Whether ATen's operators are to run, because PyTorch differentiates and batches those.

    That is under the transforms of ``torch.func``, and for derivatives in forward mode.
    """
    is_forward_mode: bool = forward_ad._current_level >= 0
    return is_forward_mode or torch._C._are_functorch_transforms_active()


# --- PyTorch's layer norm, with our backward: C++ replaces these -----------------------------


def _layer_norm_with_autograd(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``iree_lnbwd::layer_norm`` with autograd on."""
    if _are_pytorchs_rules_needed():
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    if is_jagged(input):
        tensors = {"input": input, "weight": weight, "bias": bias}
        (nested,) = by_values(
            lambda t: (
                PYTORCHS_LAYER_NORM.operator(t["input"], normalized_shape, weight, bias, eps),
            ),
            tensors,
            normalized_shape,
        )
        return nested
    if input.is_cuda and torch.cuda.is_available() and torch_native.load():
        # From now on the dispatcher takes the C++ operators, which are registered for CUDA by name.
        output: Tensor = PYTORCHS_LAYER_NORM.operator(input, normalized_shape, weight, bias, eps)
        return output
    options = Options(normalized_shape, eps, 0.0, False)
    (output,) = NormFunction.apply(PYTORCHS_LAYER_NORM, options, input, None, weight, bias)
    return output


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """``iree_lnbwd::layer_norm`` with autograd off."""
    return aten.layer_norm(input, normalized_shape, weight, bias, eps)[0]


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
) -> Results:
    tensors = (grad_output, input, mean, rstd, weight, bias, None)
    return kernels.fake_backward(LAYER_NORM_BACKWARD, tensors, normalized_shape, output_mask)


# These have no defaults, because PyTorch omits arguments with their default value from a call.
_library.define(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
    "-> Tensor",
    tags=_TAGS,
)
_BACKWARD = (
    "(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? mean, Tensor? rstd, "
    "Tensor? weight, Tensor? bias, bool[3] output_mask, float eps) -> (Tensor, Tensor, Tensor)"
)
_library.define("layer_norm_backward" + _BACKWARD, tags=_TAGS)
# The C++ operators call these for new kinds of call and for mixed types.
_library.define("layer_norm_backward_checked" + _BACKWARD)
_library.define(
    "layer_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)
_library.impl("layer_norm", _layer_norm, "CompositeExplicitAutograd")
_library.impl("layer_norm", _layer_norm_with_autograd, "Autograd")
_library.impl("layer_norm", _layer_norm, "FuncTorchBatchedDecomposition")
for _name in ("layer_norm_backward", "layer_norm_backward_checked"):
    _library.impl(_name, kernels.layer_norm_backward, "CompositeExplicitAutograd")
_library.impl("layer_norm_forward", aten.layer_norm, "CompositeImplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::layer_norm", _layer_norm, lib=_library)
torch.library.register_fake(
    f"{NAMESPACE}::layer_norm_backward", _fake_layer_norm_backward, lib=_library
)

# --- the others, by their table --------------------------------------------------------------


def _register(norm: Norm) -> None:
    """A norm whose forward is ours."""
    count, taken = len(norm.arguments), names(norm.arguments)

    def run(compute: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        tensors = norm.completed(arguments[:count])
        dims, eps, weight_offset, _ = arguments[count:]
        return norm.returned(compute(norm.op, tensors, dims, eps, weight_offset))

    def without_autograd(*arguments: Any) -> tuple[Tensor, ...]:
        return run(kernels.forward, arguments)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        return run(kernels.fake_forward, arguments)

    def by_aten(*arguments: Any) -> tuple[Tensor, ...]:
        return run(aten.norm, arguments)

    def with_autograd(*arguments: Any) -> tuple[Tensor, ...]:
        if _are_pytorchs_rules_needed():
            return by_aten(*arguments)
        if is_jagged(arguments[0]):
            given, options = dict(zip(taken, arguments, strict=False)), arguments[count:]
            return by_values(lambda t: norm.operator(*t.values(), *options), given, options[0])
        tensors = norm.completed(arguments[:count])
        found: tuple[Tensor, ...] = NormFunction.apply(norm, Options(*arguments[count:]), *tensors)
        return found

    _library.define(norm.schema, tags=_TAGS)
    _library.impl(norm.name, without_autograd, "CompositeExplicitAutograd")
    _library.impl(norm.name, with_autograd, "Autograd")
    _library.impl(norm.name, by_aten, "FuncTorchBatchedDecomposition")
    torch.library.register_fake(f"{NAMESPACE}::{norm.name}", fake, lib=_library)


def _register_gradients(gradients: Gradients) -> None:
    op, count = gradients.op, len(gradients.op.arguments)

    def run(*arguments: Any) -> Results:
        return kernels.backward(op, arguments[:count], *arguments[count:])[0]

    def fake(*arguments: Any) -> Results:
        dims, mask, *_ = arguments[count:]
        return kernels.fake_backward(op, arguments[:count], dims, mask)

    _library.define(gradients.schema, tags=_TAGS)
    _library.impl(gradients.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{gradients.name}", fake, lib=_library)


for _norm in OWN_NORMS:
    _register(_norm)
for _gradients in GRADIENTS:
    _register_gradients(_gradients)

# As the installed PyTorch's own norms: under autocast in f32 on GPUs, if it has a rule for them,
# and in the input's type on the CPU. The norms of sums keep the types that they are given: those of
# the residual stream.
for _norm, _theirs in (
    (PYTORCHS_LAYER_NORM, "aten::layer_norm"),
    (OWN_LAYER_NORM, "aten::layer_norm"),
    (OWN_RMS_NORM, "aten::rms_norm"),
):
    if torch._C._dispatch_has_kernel_for_dispatch_key(_theirs, "AutocastCUDA"):
        torch.library.register_autocast(
            f"{NAMESPACE}::{_norm.name}", "cuda", torch.float32, lib=_library
        )
