"""The loaded modules of each op, with the arguments of its function in their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iree_lnbwd.ops.arguments import LayerNormGrads, NormOutput, RMSNormGrads, gradients_of
from iree_lnbwd.ops.operands import LAYER_NORM, LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD
from iree_lnbwd.runtime.op import Norm

# Each call takes the arguments of a method of `calls.norms.Norms` but ``normalized_shape`` and
# ``weight_offset``, which the module has. ``output_mask`` and ``eps`` are None, or what the module
# was compiled for. ``out`` and the errors are those of `Norm._call`.


class LayerNorm(Norm):
    """A module that computes `iree_lnbwd.layer_norm`."""

    def __call__(
        self,
        input: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float | None = None,
        *,
        residual: Any = None,
        rows_per_set: int = 1,
        out: NormOutput | Sequence[Any] | None = None,
    ) -> NormOutput:
        """The output and the statistics; as `iree_lnbwd.layer_norm`."""
        results = self._call((input, residual, weight, bias), None, eps, out, rows_per_set)
        return results  # type: ignore[return-value]


class RMSNorm(Norm):
    """A module that computes `iree_lnbwd.rms_norm`."""

    def __call__(
        self,
        input: Any,
        weight: Any = None,
        eps: float | None = None,
        *,
        bias: Any = None,
        residual: Any = None,
        rows_per_set: int = 1,
        out: NormOutput | Sequence[Any] | None = None,
    ) -> NormOutput:
        """The output and ``rstd``; as `iree_lnbwd.rms_norm`."""
        results = self._call((input, residual, weight, bias), None, eps, out, rows_per_set)
        return results  # type: ignore[return-value]


class LayerNormBackward(Norm):
    """A module that computes `iree_lnbwd.layer_norm_backward`."""

    def __call__(
        self,
        grad_output: Any,
        input: Any = None,
        mean: Any = None,
        rstd: Any = None,
        weight: Any = None,
        bias: Any = None,
        output_mask: tuple[bool, bool, bool] | None = None,
        *,
        eps: float | None = None,
        grad_residual: Any = None,
        output: Any = None,
        rows_per_set: int = 1,
        out: LayerNormGrads | Sequence[Any] | None = None,
    ) -> LayerNormGrads:
        """The gradients; as `iree_lnbwd.layer_norm_backward`."""
        self._expect_source(input, output, mean, rstd)
        dy, *more = gradients_of(grad_output)
        given = (
            (dy, output, rstd, weight, bias, grad_residual, *more)
            if self.spec.from_output
            else (dy, input, mean, rstd, weight, bias, grad_residual, *more)
        )
        results = self._call(given, output_mask, eps, out, rows_per_set)
        return results  # type: ignore[return-value]


class RMSNormBackward(Norm):
    """A module that computes `iree_lnbwd.rms_norm_backward`."""

    def __call__(
        self,
        grad_output: Any,
        input: Any = None,
        rstd: Any = None,
        weight: Any = None,
        output_mask: tuple[bool, ...] | None = None,
        *,
        bias: Any = None,
        eps: float | None = None,
        grad_residual: Any = None,
        output: Any = None,
        rows_per_set: int = 1,
        out: RMSNormGrads | Sequence[Any] | None = None,
    ) -> RMSNormGrads:
        """The gradients; as `iree_lnbwd.rms_norm_backward`."""
        self._expect_source(input, output, None, rstd)
        data = output if self.spec.from_output else input
        dy, *more = gradients_of(grad_output)
        given = (dy, data, rstd, weight, bias, grad_residual, *more)
        results = self._call(given, output_mask, eps, out, rows_per_set)
        return results  # type: ignore[return-value]


CLASSES: Mapping[str, type[LayerNorm | RMSNorm | LayerNormBackward | RMSNormBackward]] = {
    LAYER_NORM.name: LayerNorm,
    RMS_NORM.name: RMSNorm,
    LAYER_NORM_BACKWARD.name: LayerNormBackward,
    RMS_NORM_BACKWARD.name: RMSNormBackward,
}
