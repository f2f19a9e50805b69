"""Norms whose scale and shift are those of a sample: AdaLN, as diffusion transformers have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from iree_lnbwd.jax.functions import checked_array, layer_norm, rms_norm
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.sets import of_samples


def modulated_layer_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    scale: jax.Array,
    shift: jax.Array | None = None,
    eps: float = DEFAULT_EPS,
) -> jax.Array:
    """``layer_norm(input) * (1 + scale) + shift``, with a scale and a shift for each sample.

    One kernel forward. The gradients of scale and shift are sums over a sample's rows, and the
    output is rounded once. Otherwise as `layer_norm`.

    Args:
        input: [B, ..., *normalized_shape]: B samples.
        normalized_shape: The trailing dimensions to normalize.
        scale: [B, *normalized_shape], or [B, 1, ..., *normalized_shape] with all dimensions of
            ``input``. Its element type may be another, unless one is f64.
        shift: As ``scale``; None means zeros.
        eps: As `layer_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.

    Example:
        >>> x, (shift, scale) = jax.numpy.ones((2, 5, 8)), jax.numpy.ones((2, 2, 8))
        >>> modulated_layer_norm(x, 8, scale, shift).shape
        (2, 5, 8)
    """
    given, rows = _of_samples(input, normalized_shape, scale, shift)
    if not input.shape[0]:
        return _modulated(layer_norm(input, normalized_shape, eps=eps), **given)
    normalized: jax.Array = layer_norm(
        *(input, normalized_shape, given["scale"], given.get("shift"), eps),
        weight_offset=1.0,
        rows_per_set=rows,
    )
    return normalized


def modulated_rms_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    scale: jax.Array,
    shift: jax.Array | None = None,
    eps: float | None = None,
) -> jax.Array:
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
        TypeError, ValueError: As `layer_norm`.
    """
    given, rows = _of_samples(input, normalized_shape, scale, shift)
    if not input.shape[0]:
        return _modulated(rms_norm(input, normalized_shape, eps=eps), **given)
    normalized: jax.Array = rms_norm(
        *(input, normalized_shape, given["scale"], eps),
        bias=given.get("shift"),
        weight_offset=1.0,
        rows_per_set=rows,
    )
    return normalized


def _modulated(normalized: jax.Array, **parameters: jax.Array) -> jax.Array:
    """By JAX, of no samples: so that gradients reach scale and shift."""
    return normalized + sum(each.sum().astype(normalized.dtype) for each in parameters.values())


def _of_samples(
    input: Any, normalized_shape: int | Sequence[int], scale: Any, shift: Any
) -> tuple[dict[str, jax.Array], int]:
    """Scale and shift as sets of weights, by name, and the rows of a sample."""
    given = {"input": input, "scale": scale, **({} if shift is None else {"shift": shift})}
    arrays = {name: checked_array(name, array) for name, array in given.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    flat, rows = of_samples(shapes.pop("input"), normalized_shape, shapes)
    return {name: arrays[name].reshape(flat) for name in shapes}, rows
