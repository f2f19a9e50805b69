"""The norms with their gradients, for JAX's automatic differentiation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from iree_lnbwd.jax import calls
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    GRAD_OUTPUT,
    MORE_GRAD_OUTPUTS,
    OPS,
    RESIDUAL,
    RESIDUAL_OUTPUT,
    Element,
    Gate,
    Op,
    names,
)
from iree_lnbwd.ops.spec import NormSpec

Arrays = tuple[jax.Array, ...]

_GRAD_OUTPUTS = names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Differentiated:
    """Which inputs of a forward need a gradient, by name."""

    inputs: frozenset[str]


class Way(NamedTuple):
    """What a norm saves and returns beside its output.

    Attributes:
        memory_efficient: Whether the output is saved for the backward, in place of the input.
        forks: Whether a norm without a residual returns its input, too.
        uses: How often it returns the output: once for each of its uses.
        rows_per_set: Neighbouring rows that take one set of weights; None without sets.
    """

    memory_efficient: bool
    forks: bool
    uses: int
    rows_per_set: int | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalize(spec: NormSpec, way: Way, *arrays: jax.Array) -> Arrays:
    """A forward, without its statistics.

    Args:
        spec: Of a forward.
        way: What it saves and returns.
        arrays: Its inputs, in order.

    Returns:
        The output, for each of its uses, whose gradients are added in the backward; and the sum
        that was normalized if there is a residual, or the input if it forks. The gradient that
        reaches this one is added in the backward, too.
    """
    return _returned(spec, way, arrays, calls.function(spec, way.rows_per_set)(*arrays))


def _forward(spec: NormSpec, way: Way, *given: Any) -> tuple[Arrays, Any]:
    inputs = names(spec.inputs)
    values = tuple(each.value for each in given)
    arrays = dict(zip(inputs, values, strict=True))
    asked = {name for name, each in zip(inputs, given, strict=True) if each.perturbed}
    results = calls.function(spec, way.rows_per_set)(*arrays.values())
    computed = dict(zip(names(spec.results), results, strict=True))
    arrays["input"] = computed.get(RESIDUAL_OUTPUT.name, arrays["input"])
    read = names(_backward_of(spec, way).inputs)
    saved = {name: array for name, array in (arrays | computed).items() if name in read}
    return _returned(spec, way, values, results), (saved, _Differentiated(frozenset(asked)))


def _backward(spec: NormSpec, way: Way, residuals: Any, reached: Sequence[Any]) -> Sequence[Any]:
    saved, differentiated = residuals
    asked = differentiated.inputs
    outputs, past_the_norm = reached[: way.uses], reached[way.uses :]
    wanted = {"grad_" + name for name in asked} | (
        {"grad_input"} if RESIDUAL.name in asked else set()
    )
    op = _backward_of(spec, way)
    past = past_the_norm[0] if past_the_norm and "grad_input" in wanted else None
    if isinstance(past, SymbolicZero):
        past = None
    used = [each for each in outputs if not isinstance(each, SymbolicZero)] or outputs[:1]
    of_data = spec.residual_dtype or spec.dtype
    gradients = op.gradients if spec.has_bias else op.masked
    backward = NormSpec(
        spec.normalized_shape,
        of_data,
        grad_output_dtype=spec.element_type(Element.Y),
        weight_dtype=spec.gamma_dtype if spec.has_weight else None,
        bias_dtype=spec.beta_dtype if spec.has_bias else None,
        has_weight=spec.has_weight,
        has_bias=spec.has_bias if op.takes_bias else None,
        output_mask=tuple(gradient in wanted for gradient in names(gradients)),
        op=op.name,
        residual_dtype=None if past is None else of_data,
        grad_outputs=len(used),
        weight_offset=spec.weight_offset,
        from_output=way.memory_efficient,
        weight_sets=spec.weight_sets,
        gate=spec.gate,
        gate_dtype=spec.gate_dtype,
    )
    arrays = {**saved, **dict(zip(_GRAD_OUTPUTS, used, strict=False)), "grad_residual": past}
    data = saved[backward.family.data.name]
    arrays = {name: _instantiated(arrays[name], like=data) for name in names(backward.inputs)}
    computed = dict(
        zip(
            names(backward.results),
            calls.function(backward, way.rows_per_set)(*arrays.values()),
            strict=True,
        )
    )
    computed["grad_residual"] = computed.get("grad_input")  # the sum's gradient is that of both
    return tuple(
        computed["grad_" + given.name].astype(DTYPES[given.dtype].numpy)
        if given.name in asked
        else None
        for given in spec.inputs
    )


normalize.defvjp(_forward, _backward, symbolic_zeros=True)


def _backward_of(spec: NormSpec, way: Way) -> Op:
    """The op of a forward's gradients."""
    name = f"{spec.op}_backward"
    if spec.gate is not None:
        return GATED[Gate(spec.gate)][name]
    return (FROM_OUTPUT if way.memory_efficient else OPS)[name]


def _returned(spec: NormSpec, way: Way, inputs: Arrays, results: Arrays) -> Arrays:
    computed = dict(zip(names(spec.results), results, strict=True))
    outputs = (computed["output"],) * way.uses
    if way.forks:
        return (*outputs, inputs[names(spec.inputs).index("input")])
    return (*outputs, *(computed[n] for n in (RESIDUAL_OUTPUT.name,) if n in computed))


def _instantiated(array: Any, like: jax.Array) -> jax.Array:
    """A gradient's values, where JAX knows that they are zero."""
    if isinstance(array, SymbolicZero):
        return jnp.zeros_like(like, dtype=array.dtype)
    return array
