"""The registration of the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import _cast
from torch.autograd import forward_ad

from iree_lnbwd.ops.arguments import Results
from iree_lnbwd.torch import aten, lasting, tensor_calls
from iree_lnbwd.torch.autograd import NormFunction, Options, differentiable
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.operator_table import (
    ALL_GRADIENTS,
    ALL_NORMS,
    AUTOCAST,
    BY_ATEN,
    CHECKED,
    DIFFERENTIABLE,
    NAMESPACE,
    OUTPUT,
    WITH_OUTPUT,
    Gradients,
    Norm,
)

_library = lasting.library("DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)


def are_pytorchs_rules_needed() -> bool:
    """Whether ATen's operators are to run, because PyTorch differentiates and batches those.

    That is under the transforms of ``torch.func``, and for derivatives in forward mode.
    """
    is_forward_mode: bool = forward_ad._current_level >= 0
    return is_forward_mode or torch._C._are_functorch_transforms_active()


def _register(norm: Norm) -> None:
    """A norm. C++ replaces its kernels on the CPU and on GPUs, and calls those with a suffix."""
    count = len(norm.arguments)

    def run(compute: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        tensors = norm.completed(arguments[:count])
        options = Options(*arguments[count:])
        own = (options.output_dtype,) if norm.own_forward else ()
        return norm.returned(compute(norm.op, tensors, *options[:3], *own, *options.sets))

    def without_autograd(*arguments: Any) -> tuple[Tensor, ...]:
        return run(tensor_calls.forward if norm.own_forward else aten.pytorchs, arguments)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        switch.observe()
        return run(tensor_calls.fake_forward if norm.own_forward else aten.pytorchs, arguments)

    def by_aten(*arguments: Any) -> tuple[Tensor, ...]:
        return run(aten.norm if norm.own_forward else aten.pytorchs, arguments)

    def with_autograd(*arguments: Any) -> tuple[Tensor, ...]:
        if are_pytorchs_rules_needed():
            return by_aten(*arguments)
        tensors = norm.completed(arguments[:count])
        found: tuple[Tensor, ...] = NormFunction.apply(norm, Options(*arguments[count:]), *tensors)
        return found

    _library.define(norm.schema(), tags=_TAGS)
    _library.impl(norm.name, without_autograd, "CompositeExplicitAutograd")
    _library.impl(norm.name, with_autograd, "Autograd")
    _library.impl(norm.name, by_aten, "FuncTorchBatchedDecomposition")
    torch.library.register_fake(f"{NAMESPACE}::{norm.name}", fake, lib=_library)
    _library.define(norm.schema(CHECKED))
    _library.impl(norm.name + CHECKED, without_autograd, "CompositeExplicitAutograd")
    _library.define(norm.schema(BY_ATEN))
    _library.impl(norm.name + BY_ATEN, by_aten, "CompositeImplicitAutograd")


def _register_gradients(gradients: Gradients) -> None:
    op, count = gradients.op, len(gradients.op.arguments)

    def run(*arguments: Any) -> Results:
        return tensor_calls.backward(op, arguments[:count], **gradients.options(arguments[count:]))

    def fake(*arguments: Any) -> Results:
        options = gradients.options(arguments[count:])
        dims, mask = options["normalized_shape"], options["output_mask"]
        own = (options.get(f"grad_input_{what}_dtype") for what in ("copy", "sum"))
        return tensor_calls.fake_backward(op, arguments[:count], dims, mask, *own)

    _library.define(gradients.schema(), tags=_TAGS)
    torch.library.register_fake(f"{NAMESPACE}::{gradients.name}", fake, lib=_library)
    _library.define(gradients.schema(CHECKED))
    for name in (gradients.name, gradients.name + CHECKED):
        _library.impl(name, run, "CompositeExplicitAutograd")


def _register_output(norm: Norm) -> None:
    """A norm's output alone: by the norm, for all that tells operators apart."""

    def output(*arguments: Any) -> Tensor:
        found: Tensor = norm.operator(*arguments)[0]
        return found

    _library.define(norm.output_schema(), tags=_TAGS)
    for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
        _library.impl(norm.name + OUTPUT, output, key)


for _norm in ALL_NORMS:
    _register(_norm)
for _norm in WITH_OUTPUT:
    _register_output(_norm)
for _gradients in ALL_GRADIENTS:
    _register_gradients(_gradients)

# C++ calls it for gradients that are to be differentiated again.
_library.define(
    f"{DIFFERENTIABLE}(int norm, Tensor grad_output, Tensor? grad_residual, Tensor input, "
    "Tensor? weight, Tensor? bias, Tensor? gate, SymInt[] normalized_shape, float? eps, "
    "float weight_offset, SymInt? rows_per_set, bool[] mask) -> Tensor[]"
)


def _differentiable(
    number: int,
    grad_output: Tensor,
    grad_residual: Tensor | None,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None,
    mask: Sequence[bool],
) -> list[Tensor]:
    """The gradients that the mask asks for."""
    norm = ALL_NORMS[number]
    options = Options(normalized_shape, eps, weight_offset, rows_per_set=rows_per_set)
    there = {"input": input, "weight": weight, "bias": bias, "gate": gate}
    operands = tuple(there[name] for name in norm.gradients.differentiated)
    found = differentiable(norm.op, options, grad_output, grad_residual, operands, mask)
    return [gradient for gradient in found if gradient is not None]


_library.impl(DIFFERENTIABLE, _differentiable, "CompositeImplicitAutograd")


def _register_autocast(norm: Norm) -> None:
    """A norm under autocast, in f32; with an output of a type that is said, in the given types."""

    def under_autocast(*arguments: Any) -> tuple[Tensor, ...]:
        is_said = norm.own_forward and arguments[-1] is not None
        given = arguments if is_said else _cast(arguments, "cuda", torch.float32)
        with torch._C._ExcludeDispatchKeyGuard(_OF_AUTOCAST):
            found: tuple[Tensor, ...] = norm.operator(*given)
        return found

    _library.impl(norm.name, under_autocast, _AUTOCAST)


_AUTOCAST = "AutocastCUDA"
_OF_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
for _norm in AUTOCAST:
    # C++ may be there already, if PyTorch's import has ended in `enable`.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{_norm.name}", _AUTOCAST):
        _register_autocast(_norm)
