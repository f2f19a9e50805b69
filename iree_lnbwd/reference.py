"""The reference in NumPy, in f64: the gradients, and how far a right answer may differ."""

from __future__ import annotations

from collections.abc import Sequence

from iree_lnbwd.arguments import DEFAULT_EPS, Array, LayerNormGrads, bind
from iree_lnbwd.verification.judge import F64, LAMBDA, Comparison, Judgement, compare, judge

__all__ = ["F64", "LAMBDA", "Comparison", "Judgement", "compare", "judge", "layer_norm_backward"]


def layer_norm_backward(
    grad_output: Array,
    input: Array,
    normalized_shape: int | Sequence[int],
    mean: Array | None = None,
    rstd: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    *,
    eps: float = DEFAULT_EPS,
) -> LayerNormGrads:
    """The gradients in f64, from the same arguments as `iree_lnbwd.layer_norm_backward`.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    call = bind(grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask, eps)
    return judge(call).expected
