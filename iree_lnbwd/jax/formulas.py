"""The family's formulas in JAX, which XLA compiles where no kernel of ours runs.

They are those of ``ir/README.md``: sums in f32 (f64 for f64), and one rounding of each result. They
are also the derivatives of our kernels, so that gradients can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from iree_lnbwd.jax import rows_of_sets
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import GRAD_OUTPUT, MORE_GRAD_OUTPUTS, names
from iree_lnbwd.ops.spec import LEAST_WEIGHT, NormSpec


def compute(
    spec: NormSpec, *arrays: jax.Array, rows_per_set: int | None = None
) -> tuple[jax.Array, ...]:
    """What a module for the spec computes.

    Args:
        spec: Of a forward, or of a backward whose statistics are given.
        arrays: The spec's inputs in order, of any leading dimensions: [..., *normalized_shape] for
            M x N, [...] for M, [*normalized_shape] for N, and [G, *normalized_shape] for G x N.
        rows_per_set: Neighbouring rows that take one set of weights; None without sets.

    Returns:
        The spec's results in order, of such shapes.
    """
    given = dict(zip(names(spec.inputs), arrays, strict=True))
    norm = _Norm(spec, given, rows_per_set)
    computed = (norm.gradients if spec.family.is_backward else norm.outputs)()
    return tuple(
        computed[result.name].astype(DTYPES[result.dtype].numpy) for result in spec.results
    )


class _Norm:
    """One call of a norm, with its arrays by ATen's names."""

    def __init__(
        self, spec: NormSpec, given: dict[str, jax.Array], rows_per_set: int | None
    ) -> None:
        self._spec, self._given, self._rows_per_set = spec, given, rows_per_set
        self._axes = tuple(range(-len(spec.normalized_shape), 0))  # from the end

    def outputs(self) -> dict[str, jax.Array]:
        """The results of a forward."""
        spec = self._spec
        x = self._wide("input")
        computed = {}
        if spec.residual_dtype is not None:
            x = _rounded(x + self._wide("residual"), DTYPES[spec.residual_dtype].numpy)
            computed["residual_output"] = x
        if spec.gate_first:
            x = x * self._silu()
        if spec.family.centres:
            mean = self._mean(x)
            computed["mean"] = mean.squeeze(self._axes)
            x = x - mean
        rstd = 1 / jnp.sqrt(self._mean(x * x) + spec.eps)
        computed["rstd"] = rstd.squeeze(self._axes)
        y = self._scaled(x * rstd)
        if spec.gate is not None and not spec.gate_first:
            y = y * self._silu()
        return computed | {"output": y}

    def gradients(self) -> dict[str, jax.Array]:
        """The results of a backward."""
        spec = self._spec
        dy = self._gradient_of_output()
        computed = {}
        xhat = self._from_output() if spec.from_output else self._from_input()
        if spec.gate is not None and not spec.gate_first:
            computed["grad_gate"] = dy * self._scaled(xhat) * self._slope()
            dy = dy * self._silu()
        h = dy * self._of_rows(self._gamma(), dy) if spec.has_weight else dy
        inner = h - xhat * self._mean(h * xhat)
        if spec.family.centres:
            inner = inner - self._mean(h)
        dx = jnp.expand_dims(self._given["rstd"], self._axes) * inner
        if spec.gate_first:
            computed["grad_gate"] = self._wide("input") * self._slope() * dx
            dx = dx * self._silu()
        if spec.residual_dtype is not None:
            dx = dx + self._wide("grad_residual")
        return computed | {
            "grad_input": dx,
            "grad_weight": self._summed(dy * xhat),
            "grad_bias": self._summed(dy),
        }

    def _gradient_of_output(self) -> jax.Array:
        """The sum of all that reached the output; each addition rounds."""
        stored = DTYPES[self._spec.dy_sum_dtype].numpy
        total = self._wide(GRAD_OUTPUT.name)
        for more in names(MORE_GRAD_OUTPUTS):
            if more in self._given:
                total = _rounded(total + self._wide(more), stored)
        return total

    def _from_input(self) -> jax.Array:
        """``xhat`` of a backward."""
        x = self._wide("input")
        if self._spec.gate_first:
            x = x * self._silu()
        if self._spec.family.centres:
            x = x - jnp.expand_dims(self._given["mean"], self._axes)
        return x * jnp.expand_dims(self._given["rstd"], self._axes)

    def _from_output(self) -> jax.Array:
        """``xhat`` of a backward that has the output instead."""
        y = self._wide("output")
        if self._spec.has_bias:
            y = y - self._of_rows(self._wide("bias"), y)
        if not self._spec.has_weight:
            return y
        gamma = self._of_rows(self._gamma(), y)
        least = jnp.copysign(jnp.asarray(LEAST_WEIGHT, gamma.dtype), gamma)
        return y / jnp.where(jnp.abs(gamma) < LEAST_WEIGHT, least, gamma)

    def _scaled(self, xhat: jax.Array) -> jax.Array:
        """With weight and bias, before a gate that comes last."""
        y = xhat * self._of_rows(self._gamma(), xhat) if self._spec.has_weight else xhat
        return y + self._of_rows(self._wide("bias"), y) if self._spec.has_bias else y

    def _silu(self) -> jax.Array:
        z = self._wide("gate")
        return z * _sigmoids(z)[0]

    def _slope(self) -> jax.Array:
        """The derivative of `_silu`."""
        z = self._wide("gate")
        sigmoid, other = _sigmoids(z)
        return sigmoid + z * sigmoid * other

    def _gamma(self) -> jax.Array:
        return self._spec.weight_offset + self._wide("weight")

    def _wide(self, name: str) -> jax.Array:
        """In the type of sums."""
        return self._given[name].astype(DTYPES[self._spec.acc_dtype].numpy)

    def _mean(self, cells: jax.Array) -> jax.Array:
        """Of each row."""
        return cells.mean(self._axes, keepdims=True)

    def _of_rows(self, columns: jax.Array, cells: jax.Array) -> jax.Array:
        """A parameter with the dimensions of M x N: users may forbid JAX to add them."""
        if self._rows_per_set is not None:
            return rows_of_sets.spread(columns, cells.shape, self._rows_per_set)
        return jnp.expand_dims(columns, tuple(range(cells.ndim - columns.ndim)))

    def _summed(self, cells: jax.Array) -> jax.Array:
        """A parameter's gradient."""
        if self._rows_per_set is not None:
            dims, sets = self._spec.normalized_shape, self._given["weight"].shape[0]
            return rows_of_sets.summed(cells, (sets, *dims), self._rows_per_set)
        return cells.sum(tuple(range(cells.ndim - len(self._axes))))


def _sigmoids(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of ``z`` and ``-z``, as in ``ir/math/gate.mlir``: XLA's is inexact where it is small."""
    is_below = z < 0
    e = jnp.exp(jnp.where(is_below, z, -z))  # has a derivative at 0, too
    of_size = 1 / (1 + e)
    return jnp.where(is_below, e * of_size, of_size), jnp.where(is_below, of_size, e * of_size)


def _rounded(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """To the numbers of another type; XLA may leave out the rounding of a cast there and back."""
    if array.dtype == dtype:
        return array
    kind = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(array, kind.nexp, kind.nmant).astype(dtype)
    # Else XLA rounds once for each use, which costs the CPU more than the norm.
    return jax.lax.optimization_barrier(rounded).astype(array.dtype)
