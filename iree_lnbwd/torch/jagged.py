"""Norms of jagged nested tensors: those of the rows that they hold, whatever their lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def is_jagged(tensor: Tensor) -> bool:
    """Whether a tensor is nested, with the layout that autograd and compilers take."""
    return tensor.is_nested and tensor.layout is torch.jagged


def by_values(
    compute: Callable[[Mapping[str, Tensor | None]], Sequence[Tensor]],
    tensors: Mapping[str, Tensor | None],
    normalized_shape: Sequence[int],
) -> tuple[Tensor, ...]:
    """What an operator computes of jagged tensors: its results with the input's shape.

    Args:
        compute: The operator, on dense tensors.
        tensors: By name: ``input``, ``residual``, ``gate`` and the parameters.
        normalized_shape: The trailing dimensions.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.
    """
    input = tensors["input"]
    assert input is not None
    ragged = input._ragged_idx
    if ragged >= input.ndim - len(normalized_shape):
        raise ValueError(
            f"input: expected normalized dimensions of one length, got dimension {ragged} of "
            f"{input.ndim} with many"
        )
    dense = {**tensors, "input": input.values()}
    for name in ("residual", "gate"):
        if (other := tensors.get(name)) is None:
            continue
        if not is_jagged(other) or other.shape != input.shape:
            raise ValueError(
                f"{name}: expected a jagged tensor with the offsets of input, got shape "
                f"{tuple(other.shape)}"
            )
        dense[name] = other.values()
    return tuple(
        torch.nested.nested_tensor_from_jagged(
            values, input.offsets(), input.lengths(), jagged_dim=ragged
        )
        for values in compute(dense)
        if values.shape == dense["input"].shape  # not the statistics
    )
