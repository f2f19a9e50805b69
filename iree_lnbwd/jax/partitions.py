"""The custom call under ``jit`` with sharded arrays, on each device for the rows that are there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from iree_lnbwd.jax import custom_call
from iree_lnbwd.ops.operands import Kind, names
from iree_lnbwd.ops.spec import NormSpec

Arrays = tuple[jax.Array, ...]


class Places(NamedTuple):
    """What of the dimensions of rows may be sharded.

    Attributes:
        dims: The first so many. The others are brought together.
        of_sets: Whether each set has the rows of one place of the first dimension, and goes where
            that goes.
    """

    dims: int
    of_sets: bool

    @classmethod
    def of(cls, leading: Sequence[int], sets: int | None, rows_per_set: int | None) -> Places:
        """Those of one call.

        Args:
            leading: The dimensions of rows.
            sets: G; None without sets.
            rows_per_set: Neighbouring rows that take one set; None without sets.
        """
        if sets in (None, 1) or rows_per_set is None:
            return cls(len(leading), of_sets=False)
        assert sets is not None
        if leading and (leading[0], math.prod(leading[1:])) == (sets, rows_per_set):
            return cls(len(leading), of_sets=True)
        # Those whose each place begins with the first set.
        known = range(len(leading), -1, -1)
        whole = (d for d in known if math.prod(leading[d:]) % (sets * rows_per_set) == 0)
        return cls(next(whole, 0), of_sets=False)


@functools.cache
def partitioned(spec: NormSpec, rows_per_set: int | None) -> Callable[..., Arrays]:
    """`custom_call.launched` under ``jit``, on each device for the rows that are there.

    XLA would bring all rows to all devices. Normalized dimensions are brought together, as XLA does
    for its own; and rows that cannot tell their set where they are.
    """
    launched = custom_partitioning(functools.partial(custom_call.launched, spec, rows_per_set))
    family, dims = spec.family, len(spec.normalized_shape)
    arguments = [spec.kind_of(family.named(name)) for name in names(spec.inputs)]
    results = [spec.kind_of(family.named(name)) for name in names(spec.results)]

    def places_of(shapes: Sequence[Sequence[int]]) -> Places:
        sets = shapes[arguments.index(Kind.SETS)][0] if spec.weight_sets else None
        return Places.of(shapes[0][: len(shapes[0]) - dims], sets, rows_per_set)

    def partition(mesh: Any, given: Sequence[Any], _: Any) -> tuple[Any, ...]:
        places = places_of([each.shape for each in given])
        leading = len(given[0].shape) - dims
        rows = (*given[0].sharding.spec, *(None,) * leading)[: min(leading, places.dims)]
        rows = (*rows, *(None,) * (leading - len(rows)))
        of_sets = rows[0] if places.of_sets else None
        shardings = {
            Kind.CELLS: NamedSharding(mesh, PartitionSpec(*rows, *(None,) * dims)),
            Kind.ROWS: NamedSharding(mesh, PartitionSpec(*rows)),
            Kind.COLUMNS: NamedSharding(mesh, PartitionSpec(*(None,) * dims)),
            Kind.SETS: NamedSharding(mesh, PartitionSpec(of_sets, *(None,) * dims)),
        }
        summed = rows[1:] if places.of_sets else rows
        axes = [axis for each in summed for axis in (each if isinstance(each, tuple) else (each,))]
        axes = [axis for axis in axes if axis is not None]

        def of_a_device(*arrays: jax.Array) -> Arrays:
            own = math.prod(arrays[0].shape[1:leading]) if places.of_sets else rows_per_set
            found = custom_call.launched(spec, own, *arrays)
            return tuple(
                _sum(array, axes) if axes and kind in (Kind.COLUMNS, Kind.SETS) else array
                for array, kind in zip(found, results, strict=True)
            )

        on_results = tuple(shardings[kind] for kind in results)
        return mesh, of_a_device, on_results, tuple(shardings[kind] for kind in arguments)

    def rule(mesh: Any, given: Sequence[Any], _: Any) -> tuple[str, dict[str, Any]]:
        places = places_of([each.shape for each in given])
        leading = [f"r{i}" for i in range(given[0].rank - dims)]
        normalized = [f"n{i}" for i in range(dims)]
        of_sets = leading[0] if places.of_sets else "g"
        letters = {
            Kind.CELLS: " ".join([*leading, *normalized]),
            Kind.ROWS: " ".join(leading),
            Kind.COLUMNS: " ".join(normalized),
            Kind.SETS: " ".join([of_sets, *normalized]),
        }
        sides = (", ".join(letters[kind] for kind in kinds) for kinds in (arguments, results))
        together = [*leading[places.dims :], *normalized]
        if spec.weight_sets and not places.of_sets:
            together.append(of_sets)
        return " -> ".join(sides), {"need_replication_factors": tuple(together)}

    launched.def_partition(partition, sharding_rule=rule)
    return launched  # type: ignore[no-any-return]


def _sum(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Of the parts on the devices along axes of the mesh, in the type of sums."""
    wide = jax.numpy.promote_types(array.dtype, np.float32)
    return jax.lax.psum(array.astype(wide), tuple(axes)).astype(array.dtype)
