"""The caller's storage for the results, and the checks before it is written to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from iree_lnbwd.errors import counted
from iree_lnbwd.ops import dtypes, layouts
from iree_lnbwd.ops.arguments import AnyArray, Array, GpuArray, Results, results_type
from iree_lnbwd.ops.operands import Kind, Op, Operand
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import arranged
from iree_lnbwd.runtime.frameworks import dlpack, interop
from iree_lnbwd.runtime.frameworks.framework import Framework, type_name
from iree_lnbwd.vmfb.raw_interface import storage_name

_BYTE = np.dtype(np.uint8)
_MOST_WORK = 1 << 16  # of NumPy, to find a common byte: more than arrays of few dimensions take


class Extent(NamedTuple):
    """The memory of an argument.

    Attributes:
        name: For messages.
        address: The address of its first byte.
        nbytes: From its first byte to its last.
        gaps: The array, if other memory lies between its rows. Nothing is read or written.
    """

    name: str
    address: int
    nbytes: int
    gaps: Array | None = None


def extent(name: str, array: Array) -> Extent:
    """The memory of a NumPy array."""
    if array.flags.c_contiguous or not array.size:
        return Extent(name, array.__array_interface__["data"][0], array.nbytes)
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    begin = array.__array_interface__["data"][0] + sum(step for step in steps if step < 0)
    return Extent(name, begin, sum(map(abs, steps)) + array.itemsize, array)


def check_apart(inputs: Sequence[Extent], results: Sequence[Extent]) -> None:
    """Expects storage for results that shares memory with nothing else in a call.

    Some kernels read a row again when parts of its result are written, and others do not. So the
    result of shared memory could not be promised.

    Raises:
        ValueError: Two of them share memory; the message names both.
    """
    for place, result in enumerate(results):
        for other in (*inputs, *results[:place]):
            begins = max(result.address, other.address)
            ends = min(result.address + result.nbytes, other.address + other.nbytes)
            if begins >= ends:
                continue
            if result.gaps is None and other.gaps is None:
                raise ValueError(
                    f"{result.name}: expected memory of its own, got memory of which {other.name} "
                    f"has {ends - begins} bytes, too"
                )
            if _meet(result, other):
                raise ValueError(
                    f"{result.name}: expected memory of its own, got rows of which {other.name} "
                    "has elements, too"
                )


def _meet(one: Extent, other: Extent) -> bool:
    """Whether two have a byte in common, or might."""
    first, second = (
        dlpack.view_of(each.address, (each.nbytes,), None, _BYTE, keeper=None)
        if each.gaps is None
        else each.gaps
        for each in (one, other)
    )
    try:
        return bool(np.shares_memory(first, second, _MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def named(out: object, op: Op) -> Results:
    """The caller's storage as the results of an op.

    Raises:
        TypeError: It is not a sequence of as many; ``grad_bias`` of an RMS norm may be missing.
    """
    of = results_type(op)
    if isinstance(out, of):
        return out
    count = len(of._fields)
    least = count - len(of._field_defaults)
    if not isinstance(out, tuple | list) or not least <= len(out) <= count:
        raise TypeError(
            f"out: expected {of.__name__} or {counted(count, 'array')}, got {type(out).__name__}"
            + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        )
    return of(*out)


def checked(
    framework: Framework | None,
    out: Results,
    spec: NormSpec,
    shapes: Mapping[str, tuple[int, ...]],
    device: str,
) -> Results:
    """The caller's arrays for the results: NumPy's, or the known facts about a GPU's.

    Args:
        framework: That of ``input``; None if it is in the host's memory.
        out: The arrays.
        spec: Gives the results and their types.
        shapes: The shapes of the results, by name.
        device: The device that a GPU's arrays must be on.

    Raises:
        TypeError, ValueError: Naming the array, what came and what was expected.
    """
    view = interop.memory_of if framework is None else framework.describe
    arrays: dict[str, Any] = {}
    for result_name, array in out._asdict().items():
        name = storage_name(result_name)
        if array is not None and result_name not in shapes:
            raise ValueError(
                f"{name}: expected None, for this module does not compute it, got "
                f"{type_name(array)}"
            )
        if interop.is_immutable(array):
            raise ValueError(f"{name}: expected an array that can be written, got JAX's")
        arrays[name] = None if array is None else view(name, array)
    for result in spec.results:
        name = storage_name(result.name)
        array = arrays[name]
        dtype = dtypes.DTYPES[result.dtype].numpy
        if array is None:
            raise ValueError(f"{name}: expected an array, got None")
        if array.shape != shapes[result.name]:
            raise ValueError(f"{name}: expected shape {shapes[result.name]}, got {array.shape}")
        if array.dtype != dtype:
            raise TypeError(f"{name}: expected element type {result.dtype}, got {array.dtype}")
        on_gpu = isinstance(array, GpuArray)
        if not layouts.is_dense(array):
            _check_rows(name, array, spec, spec.family.named(result.name))
        if on_gpu and array.device != device:
            raise ValueError(f"{name}: expected one on {device}, got {array.device}")
        if not (array.writable if on_gpu else array.flags.writeable):
            raise ValueError(f"{name}: expected an array that can be written, got another")
    return type(out)(*arrays.values())


def _check_rows(name: str, array: AnyArray, spec: NormSpec, result: Operand) -> None:
    """Expects rows with two strides, which share no element."""
    trailing = len(spec.normalized_shape)
    leading = tuple(array.shape[: array.ndim - trailing])
    strides = own = None
    if result.kind is Kind.CELLS:
        own = layouts.leading_strides(array, trailing)
        strides = arranged(leading, spec.columns, ((name, own),), (name,))
    if strides is None:
        raise ValueError(
            f"{name}: expected a contiguous array"
            + (", or dense rows with two strides" if result.kind is Kind.CELLS else "")
            + ", got one whose elements do not follow each other in memory"
        )
    if not strides.of(name).are_apart(math.prod(leading), spec.columns, strides.inner_count):
        raise ValueError(
            f"{name}: expected a contiguous array, or rows that share no element, got strides "
            f"{own} of {leading}"
        )
