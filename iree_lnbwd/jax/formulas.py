"""The family's formulas in JAX, which XLA compiles where no kernel of ours runs.

They are those of ``ir/README.md``: sums in f32 (f64 for f64), and one rounding of each result. They
are also the derivatives of our kernels, so that gradients can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import names
from iree_lnbwd.ops.spec import LEAST_WEIGHT, NormSpec


def compute(spec: NormSpec, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """What a module for the spec computes.

    Args:
        spec: Of a forward, or of a backward whose statistics are given.
        arrays: The spec's inputs in order, of any leading dimensions: [..., *normalized_shape] for
            M x N, [...] for M, and [*normalized_shape] for N.

    Returns:
        The spec's results in order, of such shapes.
    """
    given = dict(zip(names(spec.inputs), arrays, strict=True))
    computed = (_gradients if spec.family.is_backward else _outputs)(spec, given)
    return tuple(
        computed[result.name].astype(DTYPES[result.dtype].numpy) for result in spec.results
    )


def _outputs(spec: NormSpec, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    axes = _normalized(spec)
    x = _wide(spec, given["input"])
    computed = {}
    if spec.residual_dtype is not None:
        x = _rounded(x + _wide(spec, given["residual"]), DTYPES[spec.residual_dtype].numpy)
        computed["residual_output"] = x
    if spec.family.centres:
        mean = x.mean(axes, keepdims=True)
        computed["mean"] = mean.squeeze(axes)
        x = x - mean
    rstd = 1 / jnp.sqrt((x * x).mean(axes, keepdims=True) + spec.eps)
    computed["rstd"] = rstd.squeeze(axes)
    y = x * rstd
    if spec.has_weight:
        y = y * _beside(y, _gamma(spec, given))
    if spec.has_bias:
        y = y + _beside(y, _wide(spec, given["bias"]))
    return computed | {"output": y}


def _gradients(spec: NormSpec, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    axes = _normalized(spec)
    dy = _wide(spec, given["grad_output"])
    rows = tuple(range(dy.ndim - len(axes)))
    rstd = jnp.expand_dims(given["rstd"], axes)
    xhat = _from_output(spec, given) if spec.from_output else _from_input(spec, given)
    h = dy * _beside(dy, _gamma(spec, given)) if spec.has_weight else dy
    inner = h - xhat * (h * xhat).mean(axes, keepdims=True)
    if spec.family.centres:
        inner = inner - h.mean(axes, keepdims=True)
    dx = rstd * inner
    if spec.residual_dtype is not None:
        dx = dx + _wide(spec, given["grad_residual"])
    return {
        "grad_input": dx,
        "grad_weight": (dy * xhat).sum(rows),
        "grad_bias": dy.sum(rows),
    }


def _from_input(spec: NormSpec, given: dict[str, jax.Array]) -> jax.Array:
    """``xhat`` of a backward."""
    axes = _normalized(spec)
    x = _wide(spec, given["input"])
    if spec.family.centres:
        x = x - jnp.expand_dims(given["mean"], axes)
    return x * jnp.expand_dims(given["rstd"], axes)


def _from_output(spec: NormSpec, given: dict[str, jax.Array]) -> jax.Array:
    """``xhat`` of a backward that has the output instead."""
    y = _wide(spec, given["output"])
    if spec.has_bias:
        y = y - _beside(y, _wide(spec, given["bias"]))
    if not spec.has_weight:
        return y
    gamma = _beside(y, _gamma(spec, given))
    least = jnp.copysign(jnp.asarray(LEAST_WEIGHT, gamma.dtype), gamma)
    return y / jnp.where(jnp.abs(gamma) < LEAST_WEIGHT, least, gamma)


def _normalized(spec: NormSpec) -> tuple[int, ...]:
    """The axes of the normalized dimensions, from the end."""
    return tuple(range(-len(spec.normalized_shape), 0))


def _wide(spec: NormSpec, array: jax.Array) -> jax.Array:
    """In the type of sums."""
    return array.astype(DTYPES[spec.acc_dtype].numpy)


def _beside(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """An array of N with the dimensions of one of M x N: users may forbid JAX to add them."""
    return jnp.expand_dims(columns, tuple(range(rows.ndim - columns.ndim)))


def _gamma(spec: NormSpec, given: dict[str, jax.Array]) -> jax.Array:
    return spec.weight_offset + _wide(spec, given["weight"])


def _rounded(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """To the numbers of another type; XLA may leave out the rounding of a cast there and back."""
    if array.dtype == dtype:
        return array
    kind = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(array, kind.nexp, kind.nmant).astype(dtype)
    # Else XLA rounds once for each use, which costs the CPU more than the norm.
    return jax.lax.optimization_barrier(rounded).astype(array.dtype)
