"""The four ops as methods of whatever computes them: the functions, a bundle, the reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from iree_lnbwd.ops.arguments import (
    DEFAULT_EPS,
    LayerNormGrads,
    NormOutput,
    Options,
    Results,
    RMSNormGrads,
    check_options,
    named_gradients,
    variant_of,
)
from iree_lnbwd.ops.operands import (
    BIAS,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Op,
    names,
)


class Norms(ABC):
    """Computes the norms and their gradients."""

    @abstractmethod
    def _compute(self, given: Sequence[Any], options: Options, device: str | None) -> Results:
        """The results of an op, from its arguments in the order of its table."""

    def _call(
        self,
        op: Op,
        given: Mapping[str, Any],
        normalized_shape: object,
        output_mask: object,
        eps: object,
        weight_offset: object,
        gate_first: object,
        device: str | None,
        rows_per_set: object,
        output_dtype: object = None,
        grad_input_copy_dtype: object = None,
        grad_input_sum_dtype: object = None,
    ) -> Results:
        """As `_compute`, from arguments by name, of which an op has not all."""
        family = variant_of(op, given, gate_first)
        options = check_options(
            *(family, normalized_shape, output_mask, eps, weight_offset),
            has_bias=given.get(BIAS.name) is not None,
            output_dtype=output_dtype,
            rows_per_set=rows_per_set,
            grad_input_copy_dtype=grad_input_copy_dtype,
            grad_input_sum_dtype=grad_input_sum_dtype,
        )
        return self._compute([given.get(n) for n in names(family.arguments)], options, device)

    def layer_norm(
        self,
        input: Any,
        normalized_shape: int | Sequence[int],
        weight: Any = None,
        bias: Any = None,
        eps: float = DEFAULT_EPS,
        *,
        residual: Any = None,
        weight_offset: float = 0.0,
        output_dtype: Any = None,
        rows_per_set: int = 1,
        gate: Any = None,
        gate_first: bool = False,
        device: str | None = None,
    ) -> NormOutput:
        """Layer normalization, with the statistics that its backward takes.

        The arguments and the first three results are those of ``aten::native_layer_norm``. Where
        there is a residual, ``input + residual`` is rounded to the residual's element type, and
        that sum is what is normalized. Element types, arrays, devices and compilation: as
        `layer_norm_backward`.

        With a ``gate``, the whole formula is computed in the type of sums and rounded once, at the
        end: ``norm(input) * silu(gate)``, or ``norm(input * silu(gate))``. Models round between:
        Qwen3-Next before the weight is multiplied by, Mamba2 before and after it.

        Args:
            input: [..., *normalized_shape], any number of rows, zero too.
            normalized_shape: The trailing dimensions to normalize.
            weight: [*normalized_shape], or [G, *normalized_shape]: G sets, of which row r takes
                ``(r // rows_per_set) % G``. None means ones.
            bias: As ``weight``, with as many sets; None means zeros.
            eps: Added to the biased variance: 0, or neither 0 nor infinite in the type of sums.
            residual: As ``input``, of any element type that mixes with it; None means none.
            weight_offset: Added to the weight, in the type of sums: 1.0 for Gemma's ``1 + weight``.
            output_dtype: The element type of the output: "f32", "f16", "bf16", or a type of NumPy
                or PyTorch. The output is rounded to it once. f64 goes with f64 alone. None means
                that of ``input``.
            rows_per_set: Neighbouring rows that take one set of weights: 1 for a weight for each
                head of [..., heads, head_dim], and the rows of a sample for a scale and a shift of
                each sample. 1 without sets.
            gate: As ``input``, of any element type that mixes with it: z, of which ``silu(z)`` is a
                factor of the output. It comes alone, without a residual. None means none.
            gate_first: Whether ``input * silu(gate)`` is what is normalized. Otherwise the gate
                comes last, after the bias.
            device: As `layer_norm_backward`.

        Returns:
            The output and the statistics, in new arrays of ``input``'s library.

        Raises:
            TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
        """
        given = {
            "input": input,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "gate": gate,
        }
        results = self._call(
            *(LAYER_NORM, given, normalized_shape, (), eps, weight_offset, gate_first, device),
            *(rows_per_set, output_dtype),
        )
        return results  # type: ignore[return-value]

    def rms_norm(
        self,
        input: Any,
        normalized_shape: int | Sequence[int],
        weight: Any = None,
        eps: float | None = None,
        *,
        bias: Any = None,
        residual: Any = None,
        weight_offset: float = 0.0,
        output_dtype: Any = None,
        rows_per_set: int = 1,
        gate: Any = None,
        gate_first: bool = False,
        device: str | None = None,
    ) -> NormOutput:
        """RMS normalization, with the statistic that its backward takes.

        The arguments are those of ``aten::_fused_rms_norm``, and others by name. The output is
        rounded once, after the weight and the bias.

        Args:
            input: As `layer_norm`.
            normalized_shape: The trailing dimensions to normalize.
            weight: As `layer_norm`; None means ones.
            eps: Added to the mean of the squares, as `layer_norm`. None means the machine epsilon
                of f32, or of f64 for f64 data, as PyTorch has it.
            bias: As ``weight``, with as many sets; None means none. ATen's op has none.
            residual: As `layer_norm`.
            weight_offset: As `layer_norm`.
            output_dtype: As `layer_norm`.
            rows_per_set: As `layer_norm`.
            gate: As `layer_norm`.
            gate_first: As `layer_norm`.
            device: As `layer_norm_backward`.

        Returns:
            The output and ``rstd``, in new arrays of ``input``'s library; ``mean`` is None.

        Raises:
            TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
        """
        given = {
            "input": input,
            "residual": residual,
            "weight": weight,
            "bias": bias,
            "gate": gate,
        }
        results = self._call(
            *(RMS_NORM, given, normalized_shape, (), eps, weight_offset, gate_first, device),
            *(rows_per_set, output_dtype),
        )
        return results  # type: ignore[return-value]

    def layer_norm_backward(
        self,
        grad_output: Any,
        input: Any,
        normalized_shape: int | Sequence[int],
        mean: Any = None,
        rstd: Any = None,
        weight: Any = None,
        bias: Any = None,
        output_mask: tuple[bool, ...] | None = None,
        *,
        eps: float = DEFAULT_EPS,
        grad_residual: Any = None,
        output: Any = None,
        weight_offset: float = 0.0,
        rows_per_set: int = 1,
        gate: Any = None,
        gate_first: bool = False,
        grad_input_copy_dtype: Any = None,
        grad_input_sum_dtype: Any = None,
        device: str | None = None,
    ) -> LayerNormGrads:
        """Gradients of layer normalization with respect to its input, weight and bias.

        The arguments are those of ``aten::native_layer_norm_backward``. Element types are f32, f16,
        bf16 (``ml_dtypes.bfloat16``) and f64; f64 does not mix with the others. Sums are in f32
        (f64 for f64). The formula is in ``ir/README.md``.

        The first call for a spec and device compiles it (about half a second) and keeps the module
        in an on-disk cache, ``$IREE_LNBWD_CACHE``.

        Arrays may be NumPy's, PyTorch's, or any that support DLPack, all of one kind and in one
        place. `iree_lnbwd.Norm` says how calls on a GPU are ordered.

        With the forward's ``output`` in place of ``input``, a caller need not keep the input:
        ``xhat = (output - bias) / g``, where ``g = weight_offset + weight``. If ``|g|`` is below
        1e-5, it is divided by 1e-5 with g's sign, so that nothing is divided by zero. The output
        was rounded, which is an error of ``u * |output| / |g|`` in xhat, where u is half the
        distance of 1 and the next number of its type: large if the bias is large against g. Where g
        is zero, the output does not tell xhat, and this column's ``grad_weight`` means nothing.

        Args:
            grad_output: [..., *normalized_shape], the gradient that reached the output. Or a list
                of up to four, all of one type, which are added up in this order: the gradients of
                an output with several uses. Each sum is rounded, to their type if ``input`` has it,
                too, and else to that of sums.
            input: [..., *normalized_shape], any number of rows, zero too; None with ``output``.
            normalized_shape: The trailing dimensions that were normalized.
            mean: [...], with or without trailing dimensions of 1, f32 (f64 for f64 data). Used as
                given. If ``mean`` and ``rstd`` are None, both are recomputed from ``input``. None
                with ``output``, which needs no mean, but ``rstd``.
            rstd: As ``mean``: 1 / sqrt(biased variance + eps).
            weight: As `layer_norm`; None means ones, and no ``grad_weight``. The gradient of G sets
                has zeros in those that no row takes.
            bias: As ``weight``, with as many sets; only its element type matters, to
                ``grad_bias``. With ``output``, its values matter too; None means zeros.
            output_mask: Which of the three gradients to compute, or of the four with a gate; None
                means all.
            eps: Used if the statistics are recomputed, as `layer_norm`.
            grad_residual: As ``input``: the gradient that reached ``residual_output`` past the
                norm. It is added to ``grad_input`` before that is rounded. None means none.
            output: As ``input``: what the forward returned, in its place. ``grad_input`` has its
                element type.
            weight_offset: Added to the weight, in the type of sums, as in the forward.
            rows_per_set: As `layer_norm`.
            gate: As in the forward, with the ``input`` of the forward: neither ``output`` nor
                ``grad_residual`` nor several gradients go with it. The values of ``bias`` count
                for ``grad_gate`` unless the gate comes first.
            gate_first: As in the forward.
            grad_input_copy_dtype: "f16" or "bf16", or such a type of NumPy or PyTorch: the gradient
                of an input of f32 is stored once more, rounded to it, for readers of that type.
                ``output_mask`` has to ask for ``grad_input``. None means no copy, as with a gate.
            grad_input_sum_dtype: Such a type, or "f32" ("f64" for data of f64): the gradient of the
                input is summed over rows, too, before it is rounded. That is the gradient of a bias
                that was added to the input. ``output_mask`` has to ask for ``grad_input``. None
                means no sum, as with a gate, with sets of weights and with a copy.
            device: IREE device URI: "local-task" (the CPU), "cuda", "hip", "cuda://1". None takes
                the device that ``input`` is on.

        Returns:
            The gradients, in new arrays of ``input``'s library; None where not asked for. With a
            gate, `iree_lnbwd.GatedNormGrads`; with a copy, `iree_lnbwd.NormGradsWithCopy`; with a
            sum, `iree_lnbwd.NormGradsWithSum`.

        Raises:
            TypeError, ValueError: Before anything is compiled or run, naming the argument, what
                came and what was expected.
            DeviceError: The device is absent or no target fits it.
            CompileError: The compiler is missing or failed.
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
            "gate": gate,
        }
        results = self._call(
            *(LAYER_NORM_BACKWARD, given, normalized_shape, output_mask, eps),
            *(weight_offset, gate_first, device, rows_per_set),
            grad_input_copy_dtype=grad_input_copy_dtype,
            grad_input_sum_dtype=grad_input_sum_dtype,
        )
        return results  # type: ignore[return-value]

    def rms_norm_backward(
        self,
        grad_output: Any,
        input: Any,
        normalized_shape: int | Sequence[int],
        rstd: Any = None,
        weight: Any = None,
        output_mask: tuple[bool, ...] | None = None,
        *,
        bias: Any = None,
        eps: float | None = None,
        grad_residual: Any = None,
        output: Any = None,
        weight_offset: float = 0.0,
        rows_per_set: int = 1,
        gate: Any = None,
        gate_first: bool = False,
        grad_input_copy_dtype: Any = None,
        grad_input_sum_dtype: Any = None,
        device: str | None = None,
    ) -> RMSNormGrads:
        """Gradients of RMS normalization with respect to its input and weight, and to a bias.

        The arguments are those of ``aten::_fused_rms_norm_backward``, and others by name.

        Args:
            grad_output: As `layer_norm_backward`.
            input: As `layer_norm_backward`.
            normalized_shape: The trailing dimensions that were normalized.
            rstd: [...], with or without trailing dimensions of 1, f32 (f64 for f64 data):
                1 / sqrt(mean of squares + eps). None means that it is recomputed from ``input``.
            weight: As `layer_norm_backward`; None means ones, and no ``grad_weight``.
            output_mask: Which of the two gradients to compute, or of the three with a bias, and
                last that of the gate, if there is one; None means all.
            bias: As `layer_norm_backward`; None means none, and no ``grad_bias``.
            eps: Used if ``rstd`` is recomputed; None as in `rms_norm`.
            grad_residual: As `layer_norm_backward`.
            output: As `layer_norm_backward`.
            weight_offset: As `layer_norm_backward`.
            rows_per_set: As `layer_norm`.
            gate: As `layer_norm_backward`.
            gate_first: As `layer_norm_backward`.
            grad_input_copy_dtype: As `layer_norm_backward`.
            grad_input_sum_dtype: As `layer_norm_backward`.
            device: As `layer_norm_backward`.

        Returns:
            The gradients, in new arrays of ``input``'s library; None where not asked for. With a
            gate, `iree_lnbwd.GatedNormGrads`; with a copy, `iree_lnbwd.NormGradsWithCopy`; with a
            sum, `iree_lnbwd.NormGradsWithSum`.

        Raises:
            TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
        """
        given = {
            **named_gradients(grad_output),
            "input": input,
            "rstd": rstd,
            "weight": weight,
            "bias": bias,
            "grad_residual": grad_residual,
            "output": output,
            "gate": gate,
        }
        results = self._call(
            *(RMS_NORM_BACKWARD, given, normalized_shape, output_mask, eps),
            *(weight_offset, gate_first, device, rows_per_set),
            grad_input_copy_dtype=grad_input_copy_dtype,
            grad_input_sum_dtype=grad_input_sum_dtype,
        )
        return results  # type: ignore[return-value]
