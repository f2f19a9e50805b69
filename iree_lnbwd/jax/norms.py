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
from iree_lnbwd.ops.operands import OPS, RESIDUAL, RESIDUAL_OUTPUT, Element, names
from iree_lnbwd.ops.spec import NormSpec

Arrays = tuple[jax.Array, ...]


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
    """

    memory_efficient: bool
    forks: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalize(spec: NormSpec, way: Way, *arrays: jax.Array) -> Arrays:
    """A forward, without its statistics.

    Args:
        spec: Of a forward.
        way: What it saves and returns.
        arrays: Its inputs, in order.

    Returns:
        The output; and the sum that was normalized if there is a residual, or the input if it
        forks. The gradient that reaches this one is added in the backward.
    """
    return _returned(spec, way, arrays, calls.function(spec)(*arrays))


def _forward(spec: NormSpec, way: Way, *given: Any) -> tuple[Arrays, Any]:
    inputs = names(spec.inputs)
    values = tuple(each.value for each in given)
    arrays = dict(zip(inputs, values, strict=True))
    asked = {name for name, each in zip(inputs, given, strict=True) if each.perturbed}
    results = calls.function(spec)(*arrays.values())
    computed = dict(zip(names(spec.results), results, strict=True))
    arrays["input"] = computed.get(RESIDUAL_OUTPUT.name, arrays["input"])
    needed = {"output", "bias"} if way.memory_efficient else {"input", "mean"}
    saved = {
        name: array
        for name, array in (arrays | computed).items()
        if name in needed | {"rstd", "weight"}
    }
    return _returned(spec, way, values, results), (saved, _Differentiated(frozenset(asked)))


def _backward(spec: NormSpec, way: Way, residuals: Any, reached: Sequence[Any]) -> Sequence[Any]:
    saved, differentiated = residuals
    asked = differentiated.inputs
    grad_output, *past_the_norm = reached
    wanted = {"grad_" + name for name in asked} | (
        {"grad_input"} if RESIDUAL.name in asked else set()
    )
    op = OPS[f"{spec.op}_backward"]
    past = past_the_norm[0] if past_the_norm and "grad_input" in wanted else None
    if isinstance(past, SymbolicZero):
        past = None
    of_data = spec.residual_dtype or spec.dtype
    gradients = op.gradients if spec.has_bias else op.masked
    backward = NormSpec(
        spec.normalized_shape,
        of_data,
        grad_output_dtype=spec.element_type(Element.Y),
        weight_dtype=spec.gamma_dtype if spec.has_weight else None,
        bias_dtype=spec.beta_dtype if spec.has_bias else None,
        has_weight=spec.has_weight,
        has_bias=spec.has_bias if way.memory_efficient or not op.atens_bias else None,
        output_mask=tuple(gradient in wanted for gradient in names(gradients)),
        op=op.name,
        residual_dtype=None if past is None else of_data,
        weight_offset=spec.weight_offset,
        from_output=way.memory_efficient,
    )
    arrays = {**saved, "grad_output": grad_output, "grad_residual": past}
    data = saved[backward.family.data.name]
    arrays = {name: _instantiated(arrays[name], like=data) for name in names(backward.inputs)}
    computed = dict(
        zip(names(backward.results), calls.function(backward)(*arrays.values()), strict=True)
    )
    computed["grad_residual"] = computed.get("grad_input")  # the sum's gradient is that of both
    return tuple(
        computed["grad_" + given.name].astype(DTYPES[given.dtype].numpy)
        if given.name in asked
        else None
        for given in spec.inputs
    )


normalize.defvjp(_forward, _backward, symbolic_zeros=True)


def _returned(spec: NormSpec, way: Way, inputs: Arrays, results: Arrays) -> Arrays:
    computed = dict(zip(names(spec.results), results, strict=True))
    if way.forks:
        return computed["output"], inputs[names(spec.inputs).index("input")]
    return tuple(computed[n] for n in ("output", RESIDUAL_OUTPUT.name) if n in computed)


def _instantiated(array: Any, like: jax.Array) -> jax.Array:
    """A gradient's values, where JAX knows that they are zero."""
    if isinstance(array, SymbolicZero):
        return jnp.zeros_like(like, dtype=array.dtype)
    return array
