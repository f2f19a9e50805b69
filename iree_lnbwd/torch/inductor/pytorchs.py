"""The backwards of PyTorch's own norms stay whole in inductor's graphs while ours run them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._inductor import decomposition, lowering

from iree_lnbwd.torch import supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.backwards import is_narrow
from iree_lnbwd.torch.inductor.calls import PYTORCHS, as_ours
from iree_lnbwd.torch.inductor.served import Backward
from iree_lnbwd.torch.operator_table import Gradients
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
            ours = _entry(operator, gradients, theirs, is_placed)
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
    operator: Any,
    gradients: Gradients,
    theirs: Callable[..., Any],
    is_placed: Callable[[], bool],
) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    @functools.wraps(theirs)
    def decompose(*arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **named}
        if is_placed() and _is_ours(gradients, given):
            if operator not in lowering.lowerings:
                lowering.make_fallback(
                    operator, lowering.require_contiguous, warn=False, override_decomp=True
                )
            return NotImplemented
        return theirs(*arguments, **named)

    return decompose


def _is_ours(gradients: Gradients, given: Mapping[str, Any]) -> bool:
    """Whether our kernel would take a call, once it is compiled.

    Args:
        gradients: What it computes.
        given: The arguments by PyTorch's names.
    """
    grad_output, input, rstd = given["grad_out"], given["input"], given["rstd"]
    if not is_in_place(input.device.type, gradients.op) or is_narrow(given["normalized_shape"]):
        return False
    there = [each for each in given.values() if isinstance(each, Tensor)]
    if not (
        supported.are_taken(input, grad_output, *there)
        and graphs.is_dense(input)
        and graphs.is_dense(grad_output)
        and graphs.have_one_shape(input, grad_output)
    ):
        return False
    if rstd.dtype in supported.HALF:  # on the CPU: our kernel computes others
        return True
    tensors, options = as_ours(gradients, given)
    kinds = dict(zip(gradients.arguments, map(supported.kind, tensors), strict=True))
    return not Backward(gradients, kinds, options).is_left_out()
