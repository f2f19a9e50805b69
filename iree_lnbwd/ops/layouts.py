"""A call's arrays where they lie: which of them a module for strided rows takes without a copy."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from iree_lnbwd.ops.arguments import (
    AnyArray,
    Array,
    BoundCall,
    GpuArray,
    as_dense,
    flat_shapes,
)
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Kind, Operand
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import Strides, alone, arranged

ACCESS_BYTES = 16  # what a GPU's kernels may assume of a row's address


def in_place(call: BoundCall, out: Mapping[str, AnyArray] | None = None) -> BoundCall | None:
    """A call for a module with strided rows, of arrays as they were given.

    Args:
        call: As `bind_arrays` has it, of at least one row.
        out: By ATen's names, the caller's storage for results of M rows.

    Returns:
        Its arrays of M rows are their memory, or dense copies. None where such a module is not
        worth it, or the storage is none for it: all arrays are dense, or have to be copied.
    """
    strides = strides_of(call, out or {})
    return None if strides is None else placed(call, strides)


def strides_of(call: BoundCall, out: Mapping[str, AnyArray]) -> Strides | None:
    """Those with which the most of a call's arrays are used where they are; None as `in_place`."""
    if call.spec is None or 0 in call.shape:
        return None
    family, dims = call.spec.family, call.spec.normalized_shape
    cells = {
        name: array
        for name, array in (*call.arrays.items(), *out.items())
        if family.named(name).kind is Kind.CELLS
    }
    if all(is_dense(array) for array in cells.values()):
        return None
    leading = call.shape[: len(call.shape) - len(dims)]
    arrays = tuple((name, leading_strides(array, len(dims))) for name, array in cells.items())
    multiples = tuple(
        (name, multiple(call.spec, family.named(name)))
        for name, array in cells.items()
        if isinstance(array, GpuArray)
    )
    return arranged(leading, call.spec.columns, arrays, tuple(out), multiples)


def multiple(spec: NormSpec, operand: Operand) -> int:
    """What a GPU's strides must be multiples of, so that each row begins where an access may."""
    size = DTYPES[spec.element_type(operand.element)].numpy.itemsize
    return math.gcd(ACCESS_BYTES, spec.columns * size) // size


def placed(call: BoundCall, strides: Strides | None = None) -> BoundCall:
    """A call as a module with strided rows takes it.

    Args:
        call: As `bind_arrays` has it.
        strides: Those of its rows; None if all arrays are to be dense.
    """
    assert call.spec is not None
    shapes = flat_shapes(call)
    rows, columns = shapes[Kind.CELLS]
    strides = alone(rows, columns) if strides is None else strides
    given = dict(strides.given)
    arrays = {}
    for name, array in call.arrays.items():
        kind = call.spec.family.named(name).kind
        if kind is not Kind.CELLS:
            arrays[name] = as_dense(array, shapes[kind])
        elif name in given:
            arrays[name] = memory_of(array, strides.extent(name, rows))
        else:
            arrays[name] = as_dense(array, (rows * columns,))
    return call._replace(spec=with_strided_rows(call.spec), arrays=arrays, strides=strides)


@functools.lru_cache  # takes microseconds, and calls are alike
def with_strided_rows(spec: NormSpec | None) -> NormSpec | None:
    """The same computation, of rows that lie where a call says."""
    return None if spec is None else replace(spec, strided_rows=True)


def memory_of(array: AnyArray, extent: int) -> AnyArray:
    """An array's memory, so many elements from its first on."""
    if isinstance(array, GpuArray):
        return replace(array, shape=(extent,), contiguous=True, strides=None)
    return memory(array, extent)


def memory(array: Array, extent: int) -> Array:
    """As `memory_of`, of one in the host's memory."""
    found: Array = np.lib.stride_tricks.as_strided(
        array, (extent,), (array.itemsize,), writeable=array.flags.writeable
    )
    return found


def is_dense(array: AnyArray) -> bool:
    """Whether an array's elements follow each other."""
    return array.contiguous if isinstance(array, GpuArray) else array.flags.c_contiguous


def leading_strides(array: AnyArray, trailing: int) -> tuple[int, ...] | None:
    """The strides of an array's first dimensions, in elements.

    Args:
        array: The array.
        trailing: How many dimensions a row has.

    Returns:
        None if its rows are not dense, or its elements are at no multiple of their size.
    """
    if isinstance(array, GpuArray):
        strides = array.strides
        if strides is None:
            return None
    else:
        size = array.itemsize
        if not array.flags.aligned or any(stride % size for stride in array.strides):
            return None
        strides = tuple(stride // size for stride in array.strides)
    first = len(array.shape) - trailing
    expected = 1
    of_row = zip(array.shape[first:], strides[first:], strict=True)
    for length, stride in reversed(tuple(of_row)):
        if length > 1 and stride != expected:
            return None
        expected *= length
    return strides[:first]
