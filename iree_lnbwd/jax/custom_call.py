"""XLA's custom call of a norm, on the rows of one device."""

from __future__ import annotations

import functools

import jax
import numpy as np

from iree_lnbwd.jax import formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.jax.rows_of_sets import rows_of
from iree_lnbwd.ops.operands import WEIGHT, names
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec


def launched(spec: NormSpec, rows_per_set: int | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """By XLA's custom call; there is at least one row."""
    rows = rows_of(arrays[0].shape, spec.normalized_shape)
    sets = None
    if rows_per_set is not None:
        weight = arrays[names(spec.inputs).index(WEIGHT.name)]
        sets = Sets(weight.shape[0], rows_per_set).for_rows(rows)
    scratch = jax_native.scratch_bytes(spec, rows, sets)
    by_xla = functools.partial(formulas.compute, spec, rows_per_set=rows_per_set)

    def computed(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results = by_xla(*arrays)
        if scratch is None:
            return results
        byte = arrays[0].reshape(-1)[0].astype(np.uint8)  # on the same devices as the arrays
        return (*results, jax.numpy.broadcast_to(byte, (scratch,)))

    call = jax.ffi.ffi_call(jax_native.TARGET, jax.eval_shape(computed, *arrays))
    results = call(*arrays, spec=jax_native.text_of(spec, sets), rows=np.int64(rows))
    return tuple(results[: len(spec.results)])
