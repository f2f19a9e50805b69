"""What a module computes, as a function of JAX's arrays: by the module or by XLA."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from iree_lnbwd.jax import formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.ops.operands import Kind, names
from iree_lnbwd.ops.spec import NormSpec

Arrays = tuple[jax.Array, ...]


@functools.cache
def function(spec: NormSpec) -> Callable[..., Arrays]:
    """`formulas.compute` for a spec, by our module where it runs and is faster.

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
    """By the module on its platforms, and by XLA on all others."""
    by_xla = functools.partial(formulas.compute, spec)
    x = arrays[0]
    rows = math.prod(x.shape[: x.ndim - len(spec.normalized_shape)])
    is_known = isinstance(rows, int)  # not the symbol of a shape that `jax.export` leaves open
    ours = jax_native.platforms(spec, rows) if is_known else ()
    if not ours:
        return by_xla(*arrays)
    branches = dict.fromkeys(ours, _partitioned(spec))
    return jax.lax.platform_dependent(*arrays, default=by_xla, **branches)  # type: ignore[no-any-return]


@functools.cache
def _partitioned(spec: NormSpec) -> Callable[..., Arrays]:
    """`_launched` under ``jit``, on each device for the rows that are there.

    XLA would bring all rows to all devices. Normalized dimensions are brought together, as XLA does
    for its own.
    """
    launched = custom_partitioning(functools.partial(_launched, spec))
    family, dims = spec.family, len(spec.normalized_shape)
    arguments = [family.named(name).kind for name in names(spec.inputs)]
    results = [family.named(name).kind for name in names(spec.results)]

    def partition(mesh: Any, given: Sequence[Any], _: Any) -> tuple[Any, ...]:
        leading = len(given[0].shape) - dims
        rows = (*given[0].sharding.spec, *(None,) * len(given[0].shape))[:leading]
        axes = [axis for each in rows for axis in (each if isinstance(each, tuple) else (each,))]
        axes = [axis for axis in axes if axis is not None]
        shardings = {
            Kind.CELLS: NamedSharding(mesh, PartitionSpec(*rows, *(None,) * dims)),
            Kind.ROWS: NamedSharding(mesh, PartitionSpec(*rows)),
            Kind.COLUMNS: NamedSharding(mesh, PartitionSpec(*(None,) * dims)),
        }

        def of_a_device(*arrays: jax.Array) -> Arrays:
            found = _launched(spec, *arrays)
            return tuple(
                _sum(array, axes) if axes and kind is Kind.COLUMNS else array
                for array, kind in zip(found, results, strict=True)
            )

        on_results = tuple(shardings[kind] for kind in results)
        return mesh, of_a_device, on_results, tuple(shardings[kind] for kind in arguments)

    def rule(mesh: Any, given: Sequence[Any], _: Any) -> tuple[str, dict[str, Any]]:
        leading = [f"r{i}" for i in range(given[0].rank - dims)]
        normalized = [f"n{i}" for i in range(dims)]
        letters = {
            Kind.CELLS: " ".join([*leading, *normalized]),
            Kind.ROWS: " ".join(leading),
            Kind.COLUMNS: " ".join(normalized),
        }
        sides = (", ".join(letters[kind] for kind in kinds) for kinds in (arguments, results))
        return " -> ".join(sides), {"need_replication_factors": tuple(normalized)}

    launched.def_partition(partition, sharding_rule=rule)
    return launched  # type: ignore[no-any-return]


def _sum(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Of the parts on the devices along axes of the mesh, in the type of sums."""
    wide = jax.numpy.promote_types(array.dtype, np.float32)
    return jax.lax.psum(array.astype(wide), tuple(axes)).astype(array.dtype)


def _launched(spec: NormSpec, *arrays: jax.Array) -> Arrays:
    """By XLA's custom call; there is at least one row."""
    x = arrays[0]
    rows = math.prod(x.shape[: x.ndim - len(spec.normalized_shape)])
    scratch = jax_native.scratch_bytes(spec, rows)

    def computed(*arrays: jax.Array) -> Arrays:
        results = formulas.compute(spec, *arrays)
        if scratch is None:
            return results
        byte = arrays[0].reshape(-1)[0].astype(np.uint8)  # on the same devices as the arrays
        return (*results, jax.numpy.broadcast_to(byte, (scratch,)))

    call = jax.ffi.ffi_call(jax_native.TARGET, jax.eval_shape(computed, *arrays))
    results = call(*arrays, spec=json.dumps(spec.to_dict(), sort_keys=True), rows=np.int64(rows))
    return tuple(results[: len(spec.results)])
