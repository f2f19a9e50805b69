"""RMS norms of which the divisor is clamped from below, as `torch.nn.functional.normalize` does.

Rows that are long enough are an RMS norm without eps, in both directions. Shorter ones are divided
by a constant: their output is linear in the row, so their gradient lacks the term of the root. The
kernels know no such rows. They tell the root of each row, and what is short is mended afterwards.
On the CPU this is left out where no row is short; a GPU is not asked, because that would wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iree_lnbwd.torch import supported
from iree_lnbwd.torch.operator_table import OWN_RMS_NORM, in_order
from iree_lnbwd.torch.operators import are_pytorchs_rules_needed

# The mean square at the clamp, in units of what the kernels add to it: lost in rounding.
_FAR_ABOVE = 2.0**27


def is_possible(least_square: float) -> bool:
    """Whether what the kernels add in f32, so that zeros stay zeros, is lost at such a clamp."""
    return bool(_FAR_ABOVE * torch.finfo(torch.float32).tiny <= least_square < math.inf)


def takes(input: Tensor) -> bool:
    """Whether `rms_norm` does; of others the rules are PyTorch's, or a compiler's."""
    if torch.compiler.is_compiling() or type(input) not in (Tensor, nn.Parameter):
        return False
    return not input.is_nested and input.numel() > 0 and not are_pytorchs_rules_needed()


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    weight_offset: float,
    least_square: float,
) -> Tensor:
    """Divides rows by the root of their mean square, or of a number that is larger.

    Args:
        input: [..., *normalized_shape]; `takes` took it.
        normalized_shape: The trailing dimensions.
        weight: [*normalized_shape]; None means ones.
        weight_offset: Added to the weight.
        least_square: That number; `is_possible` took it.

    Returns:
        The shape and element type of ``input``.
    """
    options = (tuple(normalized_shape), weight_offset, least_square)
    found: Tensor = _Clamped.apply(input, weight, *options)
    return found


def normalized(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    weight_offset: float,
    least_square: float,
) -> Tensor:
    """As `rms_norm`, by PyTorch's operators in the type of sums, which can be differentiated."""
    x = input.to(supported.wide(input.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    length = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    y = x / (length / math.prod(normalized_shape) ** 0.5).clamp_min(math.sqrt(least_square))
    return y if weight is None else y * _gamma(weight, weight_offset, x.dtype)


def _gamma(weight: Tensor, weight_offset: float, sums: torch.dtype) -> Tensor:
    return weight.to(sums) + weight_offset


def _places(is_short: Tensor) -> Tensor | slice | None:
    """The places of rows of which some are short; None if there are none.

    On the CPU, those of the short ones. A GPU is not asked how many there are.
    """
    if not is_short.is_cpu:
        return slice(None)
    places = is_short.view(-1).nonzero().view(-1)
    return places if places.numel() else None


def _put(mended: Tensor, rows: Tensor, places: Tensor | slice) -> None:
    """Rows that were mended into all; of a slice, they are these."""
    if isinstance(places, Tensor):
        rows[places] = mended


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        dims: tuple[int, ...],
        weight_offset: float,
        least_square: float,
    ) -> Tensor:
        sums, limit = supported.wide(input.dtype), 1 / math.sqrt(least_square)
        added = torch.finfo(sums).tiny
        tensors = (input, weight, None)  # no bias
        output, rstd = OWN_RMS_NORM.operator(*tensors, dims, added, weight_offset, False, None)
        output, is_short = output.contiguous(), rstd > limit
        if (places := _places(is_short)) is not None:
            rows = output.view(-1, math.prod(dims))
            factor = torch.where(is_short, limit / rstd, 1.0).view(-1, 1)[places]
            _put(rows[places].mul_(factor), rows, places)
            rstd = torch.where(is_short, limit, rstd)
        ctx.save_for_backward(input, weight, rstd, is_short)
        ctx.dims, ctx.added, ctx.offset, ctx.least_square = dims, added, weight_offset, least_square
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, rstd, is_short = ctx.saved_tensors
        mask = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            of_each = _differentiable(ctx, grad, (input, weight), mask)
        else:
            ours = OWN_RMS_NORM.gradients
            tensors = in_order(ours.op, grad_output=grad, input=input, rstd=rstd, weight=weight)
            all_three = (*mask, False)
            of_each = ours.operator(*tensors, ctx.dims, all_three, ctx.added, ctx.offset)[:2]
            if mask[0] and (places := _places(is_short)) is not None:
                columns = math.prod(ctx.dims)
                factor = rstd.new_tensor(1 / math.sqrt(ctx.least_square))
                if weight is not None:
                    factor = factor * _gamma(weight, ctx.offset, rstd.dtype).flatten()
                linear = (grad.reshape(-1, columns)[places] * factor).to(input.dtype)
                of_input = of_each[0].contiguous()
                rows = of_input.view(-1, columns)
                found = rows[places]
                torch.where(is_short.view(-1, 1)[places], linear, found, out=found)
                _put(found, rows, places)
                of_each = (of_input, of_each[1])
        asked = (g if wanted else None for g, wanted in zip(of_each, mask, strict=True))
        return (*asked, None, None, None)


def _differentiable(
    ctx: Any, grad: Tensor, operands: Sequence[Tensor | None], mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Of aliases: the input may depend on the weight, and its gradient is not to go through it."""
    aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in operands]
    input, weight = aliases
    assert input is not None
    output = normalized(input, ctx.dims, weight, ctx.offset, ctx.least_square)
    asked = [alias for alias, wanted in zip(aliases, mask, strict=True) if wanted]
    grads = torch.autograd.grad(output, asked, grad.to(output.dtype), create_graph=True)
    computed = iter(grads)
    return tuple(next(computed) if wanted else None for wanted in mask)
