"""What a module computes, as a function of JAX's arrays: by its kernels or by XLA."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from iree_lnbwd import jax_native
from iree_lnbwd.jax import formulas
from iree_lnbwd.operands import Kind, names
from iree_lnbwd.spec import MOST_ROWS, NormSpec

Arrays = tuple[jax.Array, ...]


@functools.cache
def function(spec: NormSpec) -> Callable[..., Arrays]:
    """`formulas.compute` for a spec, by our kernels where they run.

    It can be differentiated: its derivatives are XLA's. Under ``vmap`` the batch counts as rows.
    Where each of a batch has parameters of its own, or gradients of parameters, XLA computes it.
    """
    by_xla = functools.partial(formulas.compute, spec)
    batched = jax.custom_batching.custom_vmap(functools.partial(_placed, spec))
    kinds = [spec.family.named(name).kind for name in names(spec.inputs)]
    has_sums = any(spec.family.named(r.name).kind is Kind.COLUMNS for r in spec.results)

    def vmap(size: int, are_batched: list[bool], *arrays: jax.Array) -> tuple[Arrays, Any]:
        everywhere = (True,) * len(spec.results)
        alone = any(
            batch and kind is Kind.COLUMNS for batch, kind in zip(are_batched, kinds, strict=True)
        )
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


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _placed(spec: NormSpec, *arrays: jax.Array) -> Arrays:
    """By the kernels on their platforms, and by XLA on all others."""
    by_xla = functools.partial(formulas.compute, spec)
    x = arrays[0]
    rows = math.prod(x.shape[: x.ndim - len(spec.normalized_shape)])
    ours = jax_native.platforms() if 0 < rows <= MOST_ROWS else ()
    if not ours:
        return by_xla(*arrays)
    launched = functools.partial(_launched, spec, rows)
    branches = dict.fromkeys(ours, launched)
    return jax.lax.platform_dependent(*arrays, default=by_xla, **branches)  # type: ignore[no-any-return]


def _launched(spec: NormSpec, rows: int, *arrays: jax.Array) -> Arrays:
    """By the kernels, on XLA's stream."""
    results = jax.eval_shape(functools.partial(formulas.compute, spec), *arrays)
    call = jax.ffi.ffi_call(jax_native.TARGET, results)
    return tuple(
        call(*arrays, spec=json.dumps(spec.to_dict(), sort_keys=True), rows=np.int64(rows))
    )
