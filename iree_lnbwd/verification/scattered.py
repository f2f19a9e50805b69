"""Calls whose rows lie apart in memory: what modules with strided rows are verified with.

Between the rows of what is read there are NaNs, which spoil each sum that they come into. What lies
between the rows of a result has to stay as it is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from iree_lnbwd.ops.arguments import Array, BoundCall, Results, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.layouts import ACCESS_BYTES
from iree_lnbwd.ops.strides import RowStrides, Strides, dense
from iree_lnbwd.runtime import Norm

_DENSE = 0.2  # of the arrays
_MOST_GAP = 3  # accesses between rows
_OTHER_ROWS = (0, 0, 1, 2)  # between rows, too: of an array two or three times as wide
_SEED = 2026


class ScatteredNorm:
    """A module with strided rows, on the CPU, that computes dense calls with their rows apart."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self._rng = np.random.default_rng(_SEED)

    def run(self, call: BoundCall) -> Results:
        """Computes a dense call for the module's spec.

        Raises:
            RuntimeError: What lies between the rows of a result was written.
        """
        if call.rows == 0:
            return self._norm.run(call)
        apart = scattered(call, self._rng)
        spec, rows = self._norm.spec, call.rows
        results = [
            _unwritten(argument.dims(rows, call.sets, apart.strides), argument.dtype)
            for argument in spec.results
        ]
        arrays = [apart.arrays[given.name] for given in spec.inputs]
        self._norm.fill(arrays, results, call.sets, apart.strides, rows)
        computed = {}
        for result, memory in zip(spec.results, results, strict=True):
            shape = call.shape_of(spec.family.named(result.name))
            found = memory
            if result.is_strided:
                cells = cells_of(apart, result.name)
                found = memory[cells]
                check_between(result.name, memory, cells)
            computed[result.name] = found.reshape(shape)
        return results_of(spec.family, computed)


def scattered(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    """A dense call with its rows apart, in memory of their own; results have strides, too.

    Args:
        call: For a spec with strided rows; at least one row.
        rng: Chooses the strides. They fit a GPU's accesses.
    """
    assert call.spec is not None
    spec, rows = call.spec, call.rows
    longest = max(rows, 2)
    inner_count = int(rng.choice([longest, 2, 3, min(longest, 7), longest - 1 or 2]))
    inner_count = max(inner_count, 2)
    given = tuple(
        (argument.name, _some_strides(rows, spec.columns, inner_count, argument.dtype, rng))
        for argument in spec.arguments
        if argument.is_strided
    )
    strides = Strides(inner_count, spec.columns, given)
    apart = call._replace(strides=strides)
    arrays = dict(call.arrays)
    for argument in spec.inputs:
        if argument.is_strided:
            array = arrays[argument.name]
            memory = np.full(strides.extent(argument.name, rows), np.nan, array.dtype)
            memory[cells_of(apart, argument.name)] = array.reshape(rows, spec.columns)
            arrays[argument.name] = memory
    return apart._replace(arrays=arrays)


def _some_strides(
    rows: int, columns: int, inner_count: int, dtype: str, rng: np.random.Generator
) -> RowStrides:
    """Strides of rows that share no element: dense, runs one after the other, or side by side.

    Each array has its own, so that a result may be a slice of a wide array where x is dense.
    """
    if rng.random() < _DENSE:
        return dense(inner_count, columns)
    size = DTYPES[dtype].numpy.itemsize
    multiple = math.gcd(ACCESS_BYTES, columns * size) // size
    first, second = (multiple * int(gap) for gap in rng.integers(0, _MOST_GAP + 1, 2))
    first += columns * int(rng.choice(_OTHER_ROWS))
    runs = -(-rows // inner_count)
    if runs > 1 and rng.integers(2):
        outer = columns + first
        return RowStrides(outer, outer * runs + second)
    inner = columns + first
    return RowStrides(inner * inner_count + second, inner)


def cells_of(call: BoundCall, name: str) -> npt.NDArray[np.intp]:
    """Where the elements of an array are in its memory: [M, N]."""
    assert call.strides is not None
    run, place = np.divmod(np.arange(call.rows), call.strides.inner_count)
    outer, inner = call.strides.of(name)
    found: npt.NDArray[np.intp] = (run * outer + place * inner)[:, None] + np.arange(
        call.strides.columns
    )
    return found


def _unwritten(dims: tuple[int, ...], dtype: str) -> Array:
    """Memory that says where it was written."""
    kind: np.dtype[Any] = DTYPES[dtype].numpy
    return np.full(math.prod(dims) * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(dims)


def check_between(name: str, memory: Array, cells: npt.NDArray[np.intp]) -> None:
    """Expects memory between rows as `_unwritten` made it.

    Raises:
        RuntimeError: It was written to.
    """
    between = np.ones(memory.shape, bool)
    between[cells] = False
    if (memory[between].view(np.uint8) != 0xFF).any():
        raise RuntimeError(f"{name}: what lies between its rows was written")
