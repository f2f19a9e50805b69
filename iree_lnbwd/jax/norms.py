"""The norms with their gradients, for JAX's automatic differentiation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.jax import calls
from iree_lnbwd.operands import OPS, RESIDUAL, RESIDUAL_OUTPUT, names
from iree_lnbwd.spec import NormSpec

Arrays = tuple[jax.Array, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Differentiated:
    """Which inputs of a forward need a gradient, by name."""

    inputs: frozenset[str]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalize(spec: NormSpec, memory_efficient: bool, *arrays: jax.Array) -> Arrays:
    """A forward, without its statistics.

    Args:
        spec: Of a forward.
        memory_efficient: Whether the output is saved for the backward, in place of the input.
        arrays: Its inputs, in order.

    Returns:
        The output, and with a residual the sum that was normalized.
    """
    return _returned(spec, calls.function(spec)(*arrays))


def _forward(spec: NormSpec, memory_efficient: bool, *given: Any) -> tuple[Arrays, Any]:
    inputs = names(spec.inputs)
    arrays = dict(zip(inputs, (each.value for each in given), strict=True))
    asked = {name for name, each in zip(inputs, given, strict=True) if each.perturbed}
    results = calls.function(spec)(*arrays.values())
    computed = dict(zip(names(spec.results), results, strict=True))
    arrays["input"] = computed.get(RESIDUAL_OUTPUT.name, arrays["input"])
    needed = {"output", "bias"} if memory_efficient else {"input", "mean"}
    saved = {
        name: array
        for name, array in (arrays | computed).items()
        if name in needed | {"rstd", "weight"}
    }
    return _returned(spec, results), (saved, _Differentiated(frozenset(asked)))


def _backward(
    spec: NormSpec, memory_efficient: bool, residuals: Any, reached: Sequence[Any]
) -> Sequence[Any]:
    saved, differentiated = residuals
    asked = differentiated.inputs
    grads = dict(zip(_results(spec), reached, strict=True))
    wanted = {"grad_" + name for name in asked} | (
        {"grad_input"} if RESIDUAL.name in asked else set()
    )
    op = OPS[f"{spec.op}_backward"]
    past = grads.get(RESIDUAL_OUTPUT.name)
    if "grad_input" not in wanted or isinstance(past, SymbolicZero):
        past = None
    of_data = spec.residual_dtype or spec.dtype
    backward = NormSpec(
        spec.normalized_shape,
        of_data,
        grad_output_dtype=spec.dtype,
        weight_dtype=spec.gamma_dtype if spec.has_weight else None,
        bias_dtype=spec.beta_dtype if spec.has_bias else None,
        has_weight=spec.has_weight,
        has_bias=spec.has_bias if memory_efficient else None,
        output_mask=tuple(gradient in wanted for gradient in names(op.masked)),
        op=op.name,
        residual_dtype=None if past is None else of_data,
        weight_offset=spec.weight_offset,
        from_output=memory_efficient,
    )
    arrays = {**saved, "grad_output": grads["output"], "grad_residual": past}
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


def _results(spec: NormSpec) -> tuple[str, ...]:
    """The names of what a norm returns."""
    statistics = names(spec.family.statistics)
    return tuple(name for name in names(spec.results) if name not in statistics)


def _returned(spec: NormSpec, results: Arrays) -> Arrays:
    computed = dict(zip(names(spec.results), results, strict=True))
    return tuple(computed[name] for name in _results(spec))


def _instantiated(array: Any, like: jax.Array) -> jax.Array:
    """A gradient's values, where JAX knows that they are zero."""
    if isinstance(array, SymbolicZero):
        return jnp.zeros_like(like, dtype=array.dtype)
    return array
