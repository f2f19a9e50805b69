"""The backwards of PyTorch's own norms stay whole in inductor's graphs while ours run them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._inductor import decomposition, lowering

from iree_lnbwd.ops.operands import Op
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.backwards import is_narrow
from iree_lnbwd.torch.inductor.calls import PYTORCHS
from iree_lnbwd.torch.override_places import is_in_place


def keep(is_placed: Callable[[], bool]) -> None:
    """Has inductor ask, from now on, whether to take such a backward apart.

    An entry without an answer leaves the operator whole. No entry at all would not do: inductor
    asserts that there is none for an operator that has a kernel, and its caches do not see it.

    Args:
        is_placed: Whether the pass is in inductor's configuration, whose identity the caches see.
    """
    for operator, gradients in PYTORCHS.items():
        theirs = decomposition.decompositions.get(operator)
        if theirs is not None:
            ours = _entry(operator, gradients.op, theirs, is_placed)
            decomposition.decompositions[operator] = ours
    decomposition.fast_random_decomps.cache_clear()  # a copy


def kept() -> tuple[str, ...]:
    """What stays whole now, for the identity of graphs."""
    return tuple(
        f"{operator} on {device_type}"
        for operator, gradients in PYTORCHS.items()
        for device_type in ("cpu", "cuda")
        if is_in_place(device_type, gradients.op)
    )


def _entry(
    operator: Any, op: Op, theirs: Callable[..., Any], is_placed: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def decompose(grad_output: Tensor, input: Tensor, *others: Any, **named: Any) -> Any:
        if is_placed() and _is_ours(op, grad_output, input, *others):
            if operator not in lowering.lowerings:
                lowering.make_fallback(
                    operator, lowering.require_contiguous, warn=False, override_decomp=True
                )
            return NotImplemented
        return theirs(grad_output, input, *others, **named)

    return decompose


def _is_ours(op: Op, grad_output: Tensor, input: Tensor, *others: Any) -> bool:
    """Whether our kernel would take a call, once it is compiled."""
    tensors = [each for each in others if isinstance(each, Tensor)]
    return (
        is_in_place(input.device.type, op)
        and not is_narrow(others[0])
        and supported.are_taken(input, grad_output, *tensors)
        and graphs.is_dense(input)
        and graphs.is_dense(grad_output)
        and graphs.have_one_shape(input, grad_output)
    )
