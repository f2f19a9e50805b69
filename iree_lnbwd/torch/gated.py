"""The norms with a gate as functions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.torch import sharding
from iree_lnbwd.torch.functions import call, check_flag, has_sets
from iree_lnbwd.torch.operator_table import (
    GATED_LAYER_NORM,
    GATED_RMS_NORM,
    LAYER_NORM_OF_GATED,
    OF_SETS,
    RMS_NORM_OF_GATED,
    Norm,
)


def gated_layer_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = DEFAULT_EPS,
    *,
    gate_first: bool = False,
    weight_offset: float = 0.0,
    rows_per_set: int = 1,
) -> Tensor:
    """``layer_norm(input) * silu(gate)``; with ``gate_first``, ``layer_norm(input * silu(gate))``.

    Both directions are this package's, one kernel each. The whole formula is computed in f32 (f64
    for f64) and rounded once, at the end. Under ``torch.autocast`` the tensors keep the types that
    they are given. Compilation, ``create_graph=True`` and ``torch.func``: as `layer_norm`.

    Args:
        input: As `layer_norm`.
        gate: As ``input``, of any element type that mixes with it: f64 does not.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        bias: As ``weight``; None means zeros.
        eps: Added to the variance.
        gate_first: Whether the gate is a factor of what is normalized, and not of the output.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        rows_per_set: As `layer_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    norms = (GATED_LAYER_NORM, LAYER_NORM_OF_GATED)
    options = (weight_offset, gate_first, rows_per_set)
    return _call(norms, input, gate, normalized_shape, weight, bias, eps, *options)


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    gate_first: bool = False,
    weight_offset: float = 0.0,
    rows_per_set: int = 1,
) -> Tensor:
    """``rms_norm(input) * silu(gate)``; with ``gate_first``, ``rms_norm(input * silu(gate))``.

    The first is Qwen3-Next's gated norm, and fla's; the second is Mamba2's. As `gated_layer_norm`.

    Args:
        input: As `layer_norm`.
        gate: As `gated_layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: As `layer_norm`.
        eps: As `rms_norm`.
        bias: As `rms_norm`.
        gate_first: As `gated_layer_norm`.
        weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
        rows_per_set: As `layer_norm`.

    Returns:
        The shape and element type of ``input``.

    Raises:
        TypeError, ValueError, RuntimeError: Naming the tensor, what came and what was expected.
    """
    norms = (GATED_RMS_NORM, RMS_NORM_OF_GATED)
    options = (weight_offset, gate_first, rows_per_set)
    return _call(norms, input, gate, normalized_shape, weight, bias, eps, *options)


def _call(
    norms: tuple[Norm, Norm],
    input: Tensor,
    gate: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    weight_offset: float,
    gate_first: object,
    rows_per_set: int,
) -> Tensor:
    """The output of one of two norms, whose gate is after it or before it."""
    check_flag("gate_first", gate_first)
    if not isinstance(gate, Tensor):
        raise TypeError(f"gate: expected a tensor, got {type(gate).__name__}")
    if type(gate) is not Tensor:
        sharding.register()
    tensors = {"input": input, "weight": weight, "bias": bias, "gate": gate}
    after, before = norms
    norm = before if gate_first else after
    options = (eps, weight_offset, False, None)
    if has_sets(weight, normalized_shape, rows_per_set):
        of_sets = OF_SETS[norm.name].packet
        return call(of_sets, tensors, normalized_shape, *options, rows_per_set)[0]
    return call(norm.packet, tensors, normalized_shape, *options)[0]
