"""The norms with a gate, as functions of PyTorch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from iree_lnbwd.jax.functions import checked_array, layer_norm, rms_norm
from iree_lnbwd.ops.arguments import DEFAULT_EPS


def gated_layer_norm(
    input: jax.Array,
    gate: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = DEFAULT_EPS,
    *,
    gate_first: bool = False,
    weight_offset: float = 0.0,
) -> jax.Array:
    """``layer_norm(input) * silu(gate)``; with ``gate_first``, ``layer_norm(input * silu(gate))``.

    `layer_norm` with its ``gate``, with the arguments of `iree_lnbwd.torch.gated_layer_norm`.

    Args:
        input: As `layer_norm`.
        gate: As ``input``, of any element type that mixes with it: f64 does not.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        bias: As `layer_norm`.
        eps: As `layer_norm`.
        gate_first: As `layer_norm`.
        weight_offset: As `layer_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    options: Any = {"weight_offset": weight_offset, "gate_first": gate_first}
    options["gate"] = checked_array("gate", gate)
    normalized: jax.Array = layer_norm(input, normalized_shape, weight, bias, eps, **options)
    return normalized


def gated_rms_norm(
    input: jax.Array,
    gate: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    eps: float | None = None,
    *,
    bias: jax.Array | None = None,
    gate_first: bool = False,
    weight_offset: float = 0.0,
) -> jax.Array:
    """``rms_norm(input) * silu(gate)``; with ``gate_first``, ``rms_norm(input * silu(gate))``.

    The first is Qwen3-Next's gated norm, and fla's; the second is Mamba2's. As `gated_layer_norm`.

    Args:
        input: As `layer_norm`.
        gate: As `gated_layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: As `rms_norm`.
        bias: As `rms_norm`.
        gate_first: As `layer_norm`.
        weight_offset: As `layer_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError: As `layer_norm`.
    """
    options: Any = {"bias": bias, "weight_offset": weight_offset, "gate_first": gate_first}
    options["gate"] = checked_array("gate", gate)
    normalized: jax.Array = rms_norm(input, normalized_shape, weight, eps, **options)
    return normalized
