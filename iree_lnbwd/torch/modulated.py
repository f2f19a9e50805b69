"""Norms whose scale and shift are those of a sample: AdaLN, as diffusion transformers have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.sets import of_samples
from iree_lnbwd.torch.functions import layer_norm, rms_norm
from iree_lnbwd.torch.supported import wide


def modulated_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """``layer_norm(input) * (1 + scale) + shift``, with a scale and a shift for each sample.

    One kernel each way; the gradients of scale and shift are sums over a sample's rows, and the
    output is rounded once. Compilation, ``create_graph=True`` and ``torch.func``: as `layer_norm`.
    Autocast changes no type.

    Args:
        input: [B, ..., *normalized_shape]: B samples.
        normalized_shape: The trailing dimensions to normalize.
        scale: [B, *normalized_shape], or [B, 1, ..., *normalized_shape] with all dimensions of
            ``input``; on the same device. Its element type may be another, unless one is f64.
        shift: As ``scale``; None means zeros.
        eps: Added to the variance.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.

    Example:
        >>> x, (shift, scale) = torch.randn(2, 5, 8), torch.randn(2, 2, 8)
        >>> modulated_layer_norm(x, 8, scale, shift).shape
        torch.Size([2, 5, 8])
    """
    weight, bias, rows = _of_samples(input, normalized_shape, scale, shift)
    if torch.jit.is_tracing():
        return _traced(
            layer_norm(input.to(wide(input.dtype)), normalized_shape, eps=eps), input, scale, shift
        )
    if weight.shape[0] == 0:  # no samples
        return _modulated(layer_norm(input, normalized_shape, eps=eps), scale, shift)
    return layer_norm(
        *(input, normalized_shape, weight, bias, eps), weight_offset=1.0, rows_per_set=rows
    )


def modulated_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """``rms_norm(input) * (1 + scale) + shift``; as `modulated_layer_norm`.

    Args:
        input: As `modulated_layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        scale: As `modulated_layer_norm`.
        shift: As ``scale``; None means none.
        eps: As `rms_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.
    """
    weight, bias, rows = _of_samples(input, normalized_shape, scale, shift)
    if torch.jit.is_tracing():
        return _traced(
            rms_norm(input.to(wide(input.dtype)), normalized_shape, eps=eps), input, scale, shift
        )
    if weight.shape[0] == 0:  # no samples
        return _modulated(rms_norm(input, normalized_shape, eps=eps), scale, shift)
    return rms_norm(
        *(input, normalized_shape, weight, eps), bias=bias, weight_offset=1.0, rows_per_set=rows
    )


def _modulated(normalized: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """By PyTorch, of no samples: so that gradients reach scale and shift."""
    parts = (normalized, scale.sum(), *(() if shift is None else (shift.sum(),)))
    return normalized + sum(part.to(normalized.dtype) for part in parts[1:])


def _traced(normalized: Tensor, input: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """By PyTorch: a trace would keep the number of a sample's rows, for inputs with another."""

    def of_rows(tensor: Tensor) -> Tensor:
        """With the dimensions between a sample's and the normalized ones."""
        for _ in range(input.ndim - tensor.ndim):
            tensor = tensor.unsqueeze(1)
        return tensor.to(normalized.dtype)

    output = normalized * (1 + of_rows(scale))
    return (output if shift is None else output + of_rows(shift)).to(input.dtype)


def _of_samples(
    input: Tensor, normalized_shape: int | Sequence[int], scale: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor | None, int]:
    """Scale and shift as sets of weights, and the rows of a sample."""
    tensors = {"input": input, "scale": scale, "shift": shift}
    for name, tensor in tensors.items():
        if not (isinstance(tensor, Tensor) or (tensor is None and name == "shift")):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if input.is_nested:
        raise ValueError("input: expected samples of one number of rows, got a nested tensor")
    there = {name: tensor.shape for name, tensor in tensors.items() if tensor is not None}
    flat, rows = of_samples(there.pop("input"), normalized_shape, there)
    return _of_shape(scale, flat), None if shift is None else _of_shape(shift, flat), rows


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One that has it gets no node of autograd's, which the host would take time for."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)
