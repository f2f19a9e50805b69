"""What a module computes, as a function of JAX's arrays: by the module or by XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from iree_lnbwd.jax import formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.jax.partitions import partitioned
from iree_lnbwd.jax.rows_of_sets import rows_of
from iree_lnbwd.ops.operands import Kind, names
from iree_lnbwd.ops.spec import NormSpec

Arrays = tuple[jax.Array, ...]


@functools.cache
def function(spec: NormSpec, rows_per_set: int | None = None) -> Callable[..., Arrays]:
    """`formulas.compute` for a spec, by our module where it runs and is faster.

    It can be differentiated: its derivatives are XLA's. Under ``vmap`` the batch counts as rows.
    Where each of a batch has parameters of its own, or gradients of parameters, or other sets for
    its rows than the one before it, XLA computes it.
    """
    by_xla = functools.partial(formulas.compute, spec, rows_per_set=rows_per_set)
    batched = jax.custom_batching.custom_vmap(functools.partial(_placed, spec, rows_per_set))
    kinds = [spec.family.named(name).kind for name in names(spec.inputs)]
    has_sums = any(spec.family.named(r.name).kind is Kind.COLUMNS for r in spec.results)

    def vmap(size: int, are_batched: list[bool], *arrays: jax.Array) -> tuple[Arrays, Any]:
        everywhere = (True,) * len(spec.results)
        given = dict(zip(names(spec.inputs), zip(arrays, are_batched, strict=True), strict=True))
        alone = any(
            batch and kind is Kind.COLUMNS for batch, kind in zip(are_batched, kinds, strict=True)
        )
        if rows_per_set is not None and not alone:
            weight, _ = given["weight"]
            cells, has_batch = next(iter(given.values()))  # every op's first has M rows
            of_one = rows_of(cells.shape[1:] if has_batch else cells.shape, spec.normalized_shape)
            alone = of_one % (weight.shape[0] * rows_per_set) != 0
        if alone or has_sums:
            axes = tuple(0 if batch else None for batch in are_batched)
            return jax.vmap(by_xla, axes, axis_size=size)(*arrays), everywhere
        rows = (
            array
            if batch or kind is Kind.COLUMNS
            else jax.numpy.broadcast_to(array, (size, *array.shape))
            for array, batch, kind in zip(arrays, are_batched, kinds, strict=True)
        )
        return batched(*rows), everywhere

    batched.def_vmap(vmap)
    differentiable = jax.custom_jvp(batched)

    def jvp(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
        return differentiable(*primals), jax.jvp(by_xla, primals, tangents)[1]

    differentiable.defjvp(jvp)
    return differentiable  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _placed(spec: NormSpec, rows_per_set: int | None, *arrays: jax.Array) -> Arrays:
    """By the module on its platforms, and by XLA on all others."""
    by_xla = functools.partial(formulas.compute, spec, rows_per_set=rows_per_set)
    rows = rows_of(arrays[0].shape, spec.normalized_shape)
    sizes = (rows, *(array.shape[0] for array in arrays if array.ndim))
    # not the symbols of shapes that `jax.export` leaves open
    are_known = all(isinstance(size, int) for size in sizes)
    ours = jax_native.platforms(spec, rows) if are_known else ()
    if not ours:
        return by_xla(*arrays)
    branches = dict.fromkeys(ours, partitioned(spec, rows_per_set))
    return jax.lax.platform_dependent(*arrays, default=by_xla, **branches)  # type: ignore[no-any-return]
