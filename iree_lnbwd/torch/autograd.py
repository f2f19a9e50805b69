"""The autograd formula of all norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from iree_lnbwd.ops.arguments import NormOutput, results_of
from iree_lnbwd.ops.operands import Op, names
from iree_lnbwd.runtime.frameworks import pytorch
from iree_lnbwd.torch import aten, sharding, supported, tensor_calls
from iree_lnbwd.torch.operator_table import Norm

INPUT_NOT_SAVED = (
    "memory_efficient: expected a backward that is not differentiated itself, got "
    "create_graph=True; the input was not saved"
)


class Options(NamedTuple):
    """The options of a norm.

    Attributes:
        normalized_shape: The trailing dimensions.
        eps: Added to the variance; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        memory_efficient: Whether the output is saved for the backward, in place of the input.
        output_dtype: Of the output; None means that of the input.
        rows_per_set: Neighbouring rows that take one set of weights; None where there are no sets.
    """

    normalized_shape: Sequence[int]
    eps: float | None
    weight_offset: float = 0.0
    memory_efficient: bool = False
    output_dtype: torch.dtype | None = None
    rows_per_set: int | None = None

    @property
    def sets(self) -> tuple[int, ...]:
        """``rows_per_set``, if there are sets: the last option of an operator that takes it."""
        return () if self.rows_per_set is None else (self.rows_per_set,)


class NormFunction(torch.autograd.Function):
    """A norm and its gradients.

    It takes a `Norm`, its `Options` and the tensors of the op's table, and returns what the
    operator returns.
    """

    @staticmethod
    def forward(
        ctx: Any, norm: Norm, options: Options, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The results, and what the backward needs."""
        if options.memory_efficient and norm.from_output is norm.gradients:
            raise ValueError("memory_efficient: expected False of a norm with a gate, got True")
        given = dict(zip(norm.all_arguments, tensors, strict=True))
        results = _forward(norm, options, tensors)
        data = results.residual_output if norm.takes_residual else given["input"]
        mean, rstd = results.mean, results.rstd
        ctx.mark_non_differentiable(*(s for s in (mean, rstd) if s is not None))
        if options.memory_efficient:
            data, mean = results.output, None
        elif rstd.dtype in supported.HALF:
            # PyTorch's on the CPU; too coarse to be of use, so the backward recomputes them.
            mean = rstd = None
        parameters = (given["weight"], given.get("bias"), given.get("gate"))
        ctx.save_for_backward(data, mean, rstd, *parameters)
        ctx.norm, ctx.options = norm, options
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return norm.returned(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors, from those of the results."""
        norm, needed = ctx.norm, ctx.needs_input_grad[2:]
        asked = dict(zip(norm.all_arguments, needed, strict=True))
        asked["input"] = asked["input"] or asked.get("residual", False)  # they have one gradient
        reached = dict(zip(norm.results, grads, strict=True))
        grad_output = reached["output"]
        grad_residual = reached.get("residual_output") if asked["input"] else None
        found: dict[str, Tensor | None] = {"input": grad_residual}
        if grad_output is not None:  # else the gradient went past the norm
            mask = tuple(asked[name] for name in norm.gradients.differentiated)
            gradients = _gradients(
                norm, ctx.options, grad_output, grad_residual, ctx.saved_tensors, mask
            )
            found = dict(zip(norm.gradients.differentiated, gradients, strict=True))
        found["residual"] = found["input"]
        return (
            None,
            None,
            *(
                _of_type(found.get(name), dtype) if wanted else None
                for name, wanted, dtype in zip(norm.all_arguments, needed, ctx.dtypes, strict=True)
            ),
        )


def _of_type(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == dtype else gradient.to(dtype)


def _forward(norm: Norm, options: Options, tensors: Sequence[Tensor | None]) -> NormOutput:
    if not norm.own_forward:  # ATen's instead of the operator again, so that a compiler may fuse it
        return aten.pytorchs(norm.op, tensors, *options[:3])
    if _are_plain(*tensors):
        own_options = (options.output_dtype, *options.sets)
        return tensor_calls.forward(norm.op, tensors, *options[:3], *own_options)
    sharding.register()
    given = dict(zip(norm.all_arguments, tensors, strict=True))
    with torch._C._AutoDispatchBelowAutograd():
        own = (given[name] for name in names(norm.arguments))
        found = norm.operator(*own, *options[:5], *options.sets)
    return results_of(norm.op, dict(zip(norm.results, found, strict=True)))  # type: ignore[return-value]


def _gradients(
    norm: Norm,
    options: Options,
    grad_output: Tensor,
    grad_residual: Tensor | None,
    saved: Sequence[Tensor | None],
    mask: tuple[bool, ...],
) -> Sequence[Tensor | None]:
    """In the order of the mask: by this package's backward, or by what can be differentiated."""
    data, mean, rstd, weight, bias, gate = saved
    assert data is not None
    if torch.is_grad_enabled():
        if options.memory_efficient:
            raise RuntimeError(INPUT_NOT_SAVED)
        return differentiable(
            norm.op, options, grad_output, grad_residual, _operands(norm, saved), mask
        )
    gradients = norm.from_output if options.memory_efficient else norm.gradients
    op = gradients.op
    given = {
        "grad_output": grad_output,
        op.data.name: data,
        "mean": mean,
        "rstd": rstd,
        "weight": weight,
        "bias": bias,
        "grad_residual": grad_residual,
        "gate": gate,
    }
    tensors = tuple(map(given.get, gradients.arguments))  # autograd adds up those of several uses
    dims, eps, weight_offset, *_ = options
    if _are_plain(*tensors):
        return tensor_calls.backward(op, tensors, dims, mask, eps, weight_offset, *options.sets)
    sharding.register()
    own = (dims, mask, eps, weight_offset, *options.sets)
    found: Sequence[Tensor | None] = gradients.operator(*tensors, *own)
    return found


def _operands(norm: Norm, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What the gradients are of, in their order, of what is saved for a backward."""
    data, _, _, *parameters = saved
    there = dict(zip(("input", "weight", "bias", "gate"), (data, *parameters), strict=True))
    return tuple(there[name] for name in norm.gradients.differentiated)


def differentiable(
    op: Op,
    options: Options,
    grad_output: Tensor,
    grad_residual: Tensor | None,
    operands: Sequence[Tensor | None],
    mask: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Gradients by PyTorch's own operators, which can be differentiated again.

    Args:
        op: The norm's forward.
        options: Its options.
        grad_output: The gradient that reached the output.
        grad_residual: That which reached the sum past the norm.
        operands: What was normalized, the weight, and the bias; and the gate of a gated norm.
        mask: Which gradients of these to compute, in this order.
    """
    # Of aliases: the input may depend on the weight, and this gradient is not to go through it.
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in operands]
    input, weight, bias, *gate = aliases
    assert input is not None
    if gate:
        given = (input, weight, bias, *gate)
        output = aten.gated(op, given, *options[:3], *options.sets)[0]
    else:
        output, _, _ = aten.normalized(op, input, weight, bias, *options[:3], *options.sets)
    asked = [alias for alias, wanted in zip(aliases, mask, strict=False) if wanted]
    grads = torch.autograd.grad(output, asked, grad_output.to(output.dtype), create_graph=True)
    computed = iter(grads)
    found = [next(computed) if wanted else None for wanted in mask]
    if grad_residual is not None and found[0] is not None:
        found[0] = found[0] + grad_residual
    return found


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher can be skipped, because nothing observes these tensors."""
    return (
        # Compiled autograd traces this; its tensors look like plain ones.
        not torch.compiler.is_dynamo_compiling()
        and all(
            tensor is None or (type(tensor) in (Tensor, nn.Parameter) and pytorch.is_plain(tensor))
            for tensor in tensors
        )
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._autograd._profiler_enabled()
    )
