"""The loaded modules of each op, with the arguments of its function in their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iree_lnbwd.ops.arguments import (
    GradsWithMore,
    LayerNormGrads,
    NormOutput,
    RMSNormGrads,
    named_gradients,
)
from iree_lnbwd.ops.operands import LAYER_NORM, LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD
from iree_lnbwd.runtime.op import Norm

# Each call takes the arguments of a method of `calls.norms.Norms` but ``normalized_shape`` and
# ``weight_offset`` and ``gate_first``, which the module has. ``output_mask`` and ``eps`` are None,
# or what the module was compiled for. ``out`` and the errors are those of `Norm._call`.


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
        gate: Any = None,
        out: NormOutput | Sequence[Any] | None = None,
    ) -> NormOutput:
        """The output and the statistics; as `iree_lnbwd.layer_norm`."""
        given = self._given(input=input, residual=residual, weight=weight, bias=bias, gate=gate)
        results = self._call(given, None, eps, out, rows_per_set)
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
        gate: Any = None,
        out: NormOutput | Sequence[Any] | None = None,
    ) -> NormOutput:
        """The output and ``rstd``; as `iree_lnbwd.rms_norm`."""
        given = self._given(input=input, residual=residual, weight=weight, bias=bias, gate=gate)
        results = self._call(given, None, eps, out, rows_per_set)
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
        output_mask: tuple[bool, ...] | None = None,
        *,
        eps: float | None = None,
        grad_residual: Any = None,
        output: Any = None,
        rows_per_set: int = 1,
        gate: Any = None,
        out: LayerNormGrads | GradsWithMore | Sequence[Any] | None = None,
    ) -> LayerNormGrads:
        """The gradients; as `iree_lnbwd.layer_norm_backward`."""
        given = self._given(
            **named_gradients(grad_output),
            **{"input": input, "output": output, "mean": mean, "rstd": rstd, "weight": weight},
            **{"bias": bias, "grad_residual": grad_residual, "gate": gate},
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
        gate: Any = None,
        out: RMSNormGrads | GradsWithMore | Sequence[Any] | None = None,
    ) -> RMSNormGrads:
        """The gradients; as `iree_lnbwd.rms_norm_backward`."""
        given = self._given(
            **named_gradients(grad_output),
            **{"input": input, "output": output, "rstd": rstd, "weight": weight},
            **{"bias": bias, "grad_residual": grad_residual, "gate": gate},
        )
        results = self._call(given, output_mask, eps, out, rows_per_set)
        return results  # type: ignore[return-value]


CLASSES: Mapping[str, type[LayerNorm | RMSNorm | LayerNormBackward | RMSNormBackward]] = {
    LAYER_NORM.name: LayerNorm,
    RMS_NORM.name: RMSNorm,
    LAYER_NORM_BACKWARD.name: LayerNormBackward,
    RMS_NORM_BACKWARD.name: RMSNormBackward,
}
