"""The reference in NumPy, in f64: the family's ops, and how far a right answer may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iree_lnbwd.arguments import (
    DEFAULT_EPS,
    Array,
    LayerNormGrads,
    NormOutput,
    RmsNormGrads,
    bind,
    named_gradients,
)
from iree_lnbwd.operands import LAYER_NORM, LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD, Op
from iree_lnbwd.verification.judge import Comparison, Judgement, compare, judge
from iree_lnbwd.verification.rows import F64, LAMBDA

__all__ = [
    "F64",
    "LAMBDA",
    "Comparison",
    "Judgement",
    "compare",
    "judge",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]


def layer_norm_backward(
    grad_output: Array,
    input: Array | None,
    normalized_shape: int | Sequence[int],
    mean: Array | None = None,
    rstd: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    *,
    eps: float = DEFAULT_EPS,
    grad_residual: Array | None = None,
    output: Array | None = None,
    weight_offset: float = 0.0,
) -> LayerNormGrads:
    """The gradients in f64, from the same arguments as `iree_lnbwd.layer_norm_backward`.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    given = {
        **named_gradients(grad_output),
        "input": input,
        "mean": mean,
        "rstd": rstd,
        "weight": weight,
        "bias": bias,
        "grad_residual": grad_residual,
        "output": output,
    }
    options = {"output_mask": output_mask, "eps": eps, "weight_offset": weight_offset}
    expected = _expected(LAYER_NORM_BACKWARD, given, normalized_shape, options)
    return LayerNormGrads(*map(expected.get, LayerNormGrads._fields))


def rms_norm_backward(
    grad_output: Array,
    input: Array | None,
    normalized_shape: int | Sequence[int],
    rstd: Array | None = None,
    weight: Array | None = None,
    output_mask: tuple[bool, bool] = (True, True),
    *,
    eps: float | None = None,
    grad_residual: Array | None = None,
    output: Array | None = None,
    weight_offset: float = 0.0,
) -> RmsNormGrads:
    """The gradients in f64, from the same arguments as `iree_lnbwd.rms_norm_backward`.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    given = {
        **named_gradients(grad_output),
        "input": input,
        "rstd": rstd,
        "weight": weight,
        "grad_residual": grad_residual,
        "output": output,
    }
    options = {"output_mask": output_mask, "eps": eps, "weight_offset": weight_offset}
    expected = _expected(RMS_NORM_BACKWARD, given, normalized_shape, options)
    return RmsNormGrads(*map(expected.get, RmsNormGrads._fields))


def layer_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = DEFAULT_EPS,
    *,
    residual: Array | None = None,
    weight_offset: float = 0.0,
) -> NormOutput:
    """The output and the statistics in f64, from the same arguments as `iree_lnbwd.layer_norm`.

    With a residual, the sum is rounded to the residual's type, and that is what is normalized.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    given = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    options = {"eps": eps, "weight_offset": weight_offset}
    expected = _expected(LAYER_NORM, given, normalized_shape, options)
    return NormOutput(*map(expected.get, NormOutput._fields))


def rms_norm(
    input: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    residual: Array | None = None,
    weight_offset: float = 0.0,
) -> NormOutput:
    """The output and rstd in f64, from the same arguments as `iree_lnbwd.rms_norm`.

    With a residual, the sum is rounded to the residual's type, and that is what is normalized.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    given = {"input": input, "residual": residual, "weight": weight}
    options = {"eps": eps, "weight_offset": weight_offset}
    expected = _expected(RMS_NORM, given, normalized_shape, options)
    return NormOutput(*map(expected.get, NormOutput._fields))


def _expected(
    op: Op,
    given: Mapping[str, Array | None],
    normalized_shape: int | Sequence[int],
    options: Mapping[str, Any],
) -> Mapping[str, F64]:
    return judge(bind(op.name, given, normalized_shape, **options)).expected
