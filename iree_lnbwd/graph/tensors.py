"""The tensors of a graph: dimensions, strides, element type and uid, as in hipDNN and cuDNN."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from iree_lnbwd.errors import shown
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.spec import MOST_DIMENSIONS, check_number

LEAST_UID, MOST_UID = -(2**63), 2**63 - 1  # they are int64 there


class DataType(Enum):
    """An element type; the value is its name in hipDNN's JSON."""

    HALF = "half"
    BFLOAT16 = "bfloat16"
    FLOAT = "float"
    DOUBLE = "double"

    @property
    def dtype(self) -> str:
        """MLIR's name, as everywhere else in this package."""
        return _DTYPES[self]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type that holds it."""
        return dtypes.DTYPES[self.dtype].numpy

    @property
    def statistics(self) -> DataType:
        """The type of the statistics of such data, which is FLOAT, or DOUBLE for DOUBLE."""
        return _OF_DTYPES[dtypes.DTYPES[self.dtype].accumulator]

    def __str__(self) -> str:
        """Its name."""
        return self.value


_DTYPES = {
    DataType.HALF: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT: "f32",
    DataType.DOUBLE: "f64",
}
_OF_DTYPES = {ours: theirs for theirs, ours in _DTYPES.items()}


@dataclass(frozen=True)
class TensorAttributes:
    """A tensor of a graph.

    Attributes:
        uid: Its number in the graph; None until it is set or the graph is validated.
        name: For messages.
        dim: Its dimensions, each at least 1; () until they are set or inferred.
        stride: The distance of neighbours in each dimension, in elements; () as ``dim``.
        data_type: The type of its elements; None as ``dim``.
        is_virtual: Whether it is only between nodes, so that no array is given for it.
        value: The number that it is, if it is passed by value; exact in ``data_type``.
    """

    uid: int | None = None
    name: str = ""
    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    data_type: DataType | None = None
    is_virtual: bool = False
    value: float | None = None


def check_data_type(value: object, place: str) -> DataType:
    """An element type; also NumPy's and PyTorch's are taken.

    Raises:
        ValueError: It is none of them; the message names the place.
    """
    if isinstance(value, DataType):
        return value
    known = dtypes.meant(value)
    if known is None:
        expected = ", ".join(f"DataType.{each.name}" for each in DataType)
        raise ValueError(f"{place}: expected {expected}, got {shown(value)}")
    return _OF_DTYPES[known]


def check_sizes(value: object, place: str) -> tuple[int, ...]:
    """Dimensions or strides: ints of at least 1.

    Raises:
        TypeError, ValueError: Naming the place, what came and what was expected.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{place}: expected a sequence of ints, got {type(value).__name__}")
    if len(value) > MOST_DIMENSIONS:
        raise ValueError(f"{place}: expected at most {MOST_DIMENSIONS} ints, got {len(value)}")
    return tuple(check_int(size, f"{place}[{i}]", least=1) for i, size in enumerate(value))


def check_int(value: object, place: str, *, least: int, most: int = MOST_UID) -> int:
    """An int; NumPy's are taken, too.

    Raises:
        TypeError, ValueError: Naming the place, what came and what was expected.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{place}: expected an int, got {type(value).__name__}")
    if not least <= number <= most:
        raise ValueError(f"{place}: expected an int from {least} to {most}, got {shown(value)}")
    return number


def rounded(value: object, data_type: DataType, place: str) -> float:
    """A finite number as an element type holds it.

    Raises:
        TypeError, ValueError: Naming the place, what came and what was expected.
    """
    with np.errstate(over="ignore"):
        return check_number(float(data_type.numpy.type(check_number(value, place))), place)


def packed_stride(dim: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps.

    Args:
        dim: The dimensions.
        order: From the slowest to the fastest of them; None means as they stand.
    """
    strides = [1] * len(dim)
    step = 1
    for axis in reversed(range(len(dim)) if order is None else order):
        strides[axis] = step
        step *= dim[axis]
    return tuple(strides)


def memory_order(stride: Sequence[int], among: Sequence[int]) -> tuple[int, ...]:
    """Some of the dimensions, from the slowest to the fastest."""
    return tuple(sorted(among, key=lambda axis: (-stride[axis], axis)))


def is_packed(dim: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the elements follow each other in memory, if dimensions are taken in this order."""
    expected = packed_stride(dim, order)
    return all(
        size == 1 or ours == theirs
        for size, ours, theirs in zip(dim, stride, expected, strict=True)
    )


def reach(dim: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(dim, stride, strict=True))


def overlaps(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements could be in one place."""
    reached = 0
    for step, size in sorted(zip(stride, dim, strict=True)):
        if size == 1:
            continue
        if step <= reached:
            return True
        reached += (size - 1) * step
    return False
