"""The operators of ours, in one table; their schemas derive from the table of the ops."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from iree_lnbwd.ops.arguments import NormOutput
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    GRAD_INPUT_COPY,
    GRAD_INPUT_SUM,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RESIDUAL,
    RESIDUAL_OUTPUT,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    WITH_COPY,
    WITH_SUM,
    Gate,
    Op,
    Operand,
    When,
    names,
)

NAMESPACE = "iree_lnbwd"
_SETS = ", SymInt rows_per_set"
Given = TypeVar("Given")  # a tensor, or what stands for one


def in_order(op: Op, **given: Given | None) -> tuple[Given | None, ...]:
    """The arguments of an op in the order of its table, and None for those that are not given."""
    return tuple(map(given.get, names(op.arguments)))


def operator(name: str) -> Any:
    """An operator of ``torch.ops.iree_lnbwd``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@dataclass(frozen=True)
class Gradients:
    """An operator that computes gradients.

    Attributes:
        name: Of ``torch.ops.iree_lnbwd``.
        op: What it computes.
        takes_sets: Whether weight and bias have sets.
    """

    name: str
    op: Op
    takes_sets: bool = False

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the tensors that it takes."""
        return names(self.op.arguments)

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that it returns."""
        return names(self.op.results)

    @functools.cached_property
    def differentiated(self) -> tuple[str, ...]:
        """The names of what the results are the gradients of."""
        return tuple(name.removeprefix("grad_") for name in names(self.op.gradients))

    @functools.cached_property
    def stores_copy(self) -> bool:
        """Whether it returns the gradient of the input twice."""
        return GRAD_INPUT_COPY in self.op.results

    @functools.cached_property
    def sums_input(self) -> bool:
        """Whether it returns the sum of the gradient of the input over rows."""
        return GRAD_INPUT_SUM in self.op.results

    @functools.cached_property
    def _own_types(self) -> tuple[str, ...]:
        """The options that are the types of results."""
        return ("grad_input_copy_dtype",) * self.stores_copy + (
            "grad_input_sum_dtype",
        ) * self.sums_input

    def schema(self, suffix: str = "") -> str:
        """The tensors in the order of the op's table, and then the options.

        Args:
            suffix: Of another operator's name, which takes and returns the same.
        """
        options = (
            f"bool[{len(self.op.gradients)}] output_mask, {_eps(self.op)}, float weight_offset"
        )
        options += _SETS if self.takes_sets else ""
        options += "".join(f", ScalarType {name}" for name in self._own_types)
        return _schema(self.name + suffix, self.op.arguments, options, self.results)

    def options(self, given: Sequence[Any]) -> dict[str, Any]:
        """What a call gives behind the tensors, by the names of `torch.tensor_calls.backward`."""
        own = [*["rows_per_set"] * self.takes_sets, *self._own_types]
        named = ("normalized_shape", "output_mask", "eps", "weight_offset", *own)
        return dict(zip(named, given, strict=True))

    @functools.cached_property
    def operator(self) -> Any:
        """It, registered."""
        return operator(self.name)


@dataclass(frozen=True)
class Norm:
    """An operator that is differentiable.

    Attributes:
        name: Of ``torch.ops.iree_lnbwd``.
        op: What it computes.
        gradients: The operator of its gradients.
        from_output: The operator that computes them from the output, without the input.
        takes_residual: Whether it normalizes ``input + residual``.
        own_forward: Whether the forward is this package's, not PyTorch's.
        takes_sets: Whether weight and bias have sets.
    """

    name: str
    op: Op
    gradients: Gradients
    from_output: Gradients
    takes_residual: bool = False
    own_forward: bool = True
    takes_sets: bool = False

    @functools.cached_property
    def all_arguments(self) -> tuple[str, ...]:
        """The names of the op's arguments."""
        return names(self.op.arguments)

    @functools.cached_property
    def arguments(self) -> tuple[Operand, ...]:
        """The tensors that it takes."""
        return tuple(a for a in self.op.arguments if self.takes_residual or a is not RESIDUAL)

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that it returns, the statistics too."""
        return names(r for r in self.op.results if self.takes_residual or r is not RESIDUAL_OUTPUT)

    def schema(self, suffix: str = "") -> str:
        """As `Gradients.schema`."""
        return _schema(self.name + suffix, self.arguments, self._options(), self.results)

    def output_schema(self) -> str:
        """Of the operator that returns the output alone, over the last dimension."""
        name = self.name + OUTPUT
        return _schema(name, self.arguments, self._options(), ("output",), "int[1]")

    def _options(self) -> str:
        options = _eps(self.op)
        if self.own_forward:  # PyTorch's has no others
            options += ", float weight_offset, bool memory_efficient, ScalarType? output_dtype"
        return options + (_SETS if self.takes_sets else "")

    @functools.cached_property
    def operator(self) -> Any:
        """It, registered."""
        return operator(self.name)

    @functools.cached_property
    def output_alone(self) -> Any:
        """What the operator that returns the output alone calls, and nothing else."""
        return operator(self.name + OUTPUT)._op

    @functools.cached_property
    def plain_output(self) -> Any:
        """As `output_alone`, but None for all that is not plain.

        Plain are tensors on the CPU or a GPU, of one element type, with parameters of one
        dimension, while nothing is between a caller and the operator: no transform, no mode.
        """
        return lambda *_arguments: None

    def compute_alone_by(self, output_alone: Any, plain_output: Any) -> None:
        """Replaces them, by what takes and returns the same."""
        vars(self).update(output_alone=output_alone, plain_output=plain_output)

    @property
    def packet(self) -> Any:
        """It and its overloads, of which it has one."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)

    def returned(self, results: NormOutput) -> tuple[Tensor, ...]:
        """The results in the order that it returns them."""
        return tuple(getattr(results, name) for name in self.results)

    def completed(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """All arguments of the op, from those that it takes."""
        given = dict(zip(names(self.arguments), tensors, strict=True))
        return tuple(given.get(name) for name in self.all_arguments)


def _schema(
    name: str,
    arguments: Iterable[Operand],
    options: str,
    results: Sequence[str],
    dims: str = "SymInt[]",
) -> str:
    # No defaults, because PyTorch omits arguments with their default value from a call.
    tensors = ", ".join(
        f"Tensor{'' if a.when is When.ALWAYS or a is RESIDUAL else '?'} {a.name}" for a in arguments
    )
    returned = ", ".join("Tensor" for _ in results)
    return f"{name}({tensors}, {dims} normalized_shape, {options}) -> ({returned})"


def _eps(op: Op) -> str:
    return "float eps" if op.centres else "float? eps"


_OF_LAYER_NORM = (
    Gradients("layer_norm_backward", LAYER_NORM_BACKWARD),
    Gradients("layer_norm_backward_from_output", FROM_OUTPUT[LAYER_NORM_BACKWARD.name]),
)
_OF_RMS_NORM = (
    Gradients("rms_norm_backward", RMS_NORM_BACKWARD),
    Gradients("rms_norm_backward_from_output", FROM_OUTPUT[RMS_NORM_BACKWARD.name]),
)
GRADIENTS = (*_OF_LAYER_NORM, *_OF_RMS_NORM)
PYTORCHS_LAYER_NORM = Norm("layer_norm", LAYER_NORM, *_OF_LAYER_NORM, own_forward=False)
OWN_LAYER_NORM = Norm("own_layer_norm", LAYER_NORM, *_OF_LAYER_NORM)
OWN_RMS_NORM = Norm("rms_norm", RMS_NORM, *_OF_RMS_NORM)
ADD_LAYER_NORM = Norm("add_layer_norm", LAYER_NORM, *_OF_LAYER_NORM, takes_residual=True)
ADD_RMS_NORM = Norm("add_rms_norm", RMS_NORM, *_OF_RMS_NORM, takes_residual=True)


def _gated(name: str, op: Op, gate: Gate) -> Norm:
    """A norm with a gate; the output is never kept in place of its input."""
    gradients = Gradients(f"{name}_backward", GATED[gate][f"{op.name}_backward"])
    return Norm(name, GATED[gate][op.name], gradients, gradients)


GATED_LAYER_NORM = _gated("gated_layer_norm", LAYER_NORM, Gate.AFTER)
GATED_RMS_NORM = _gated("gated_rms_norm", RMS_NORM, Gate.AFTER)
LAYER_NORM_OF_GATED = _gated("layer_norm_of_gated", LAYER_NORM, Gate.BEFORE)
RMS_NORM_OF_GATED = _gated("rms_norm_of_gated", RMS_NORM, Gate.BEFORE)
GATED_NORMS = (GATED_LAYER_NORM, GATED_RMS_NORM, LAYER_NORM_OF_GATED, RMS_NORM_OF_GATED)
NORMS = (PYTORCHS_LAYER_NORM, OWN_LAYER_NORM, OWN_RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM)


def _of_sets(norm: Norm) -> Norm:
    """The same, whose weight has sets."""
    gradients, from_output = (
        replace(each, name=f"{each.name}_of_sets", takes_sets=True)
        for each in (norm.gradients, norm.from_output)
    )
    return replace(
        norm,
        name=f"{norm.name}_of_sets",
        gradients=gradients,
        from_output=from_output,
        takes_sets=True,
    )


OF_SETS = {
    norm.name: _of_sets(norm)
    for norm in (OWN_LAYER_NORM, OWN_RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM, *GATED_NORMS)
}
ALL_NORMS = (*NORMS, *GATED_NORMS, *OF_SETS.values())
# In graphs of inductor's alone, by the name of the operator without a copy or a sum.
WITH_COPIES = {
    each.name: Gradients(f"{each.name}_with_copy", WITH_COPY[each.op]) for each in GRADIENTS
}
WITH_SUMS = {each.name: Gradients(f"{each.name}_with_sum", WITH_SUM[each.op]) for each in GRADIENTS}
_OF_NORMS = dict.fromkeys(each for norm in ALL_NORMS for each in (norm.gradients, norm.from_output))
ALL_GRADIENTS = (*_OF_NORMS, *WITH_COPIES.values(), *WITH_SUMS.values())

# As the installed PyTorch's own norms: under autocast in f32 on GPUs, if it has a rule for them,
# and in the input's type on the CPU. The norms of sums keep the types that they are given: those of
# the residual stream.
AUTOCAST = tuple(
    norm
    for norm, theirs in (
        (PYTORCHS_LAYER_NORM, "aten::layer_norm"),
        (OWN_LAYER_NORM, "aten::layer_norm"),
        (OWN_RMS_NORM, "aten::rms_norm"),
    )
    if torch._C._dispatch_has_kernel_for_dispatch_key(theirs, "AutocastCUDA")
)

# What the C++ operators call in Python: for calls that they do not know, for the transforms of
# ``torch.func``, and for gradients that are differentiated again.
CHECKED, BY_ATEN, DIFFERENTIABLE = "_checked", "_by_aten", "differentiable_gradients"

# Statistics as objects of Python's, and a shape whose integers may be symbols, take longer than a
# few rows do. So eager calls of these norms take an operator with this suffix.
OUTPUT = "_output"
WITH_OUTPUT = (PYTORCHS_LAYER_NORM, OWN_LAYER_NORM, OWN_RMS_NORM)
