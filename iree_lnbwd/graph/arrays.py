"""The caller's arrays at the edge of a graph: in the host's memory, or in a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from iree_lnbwd.graph.tensors import TensorAttributes, packed_stride, reach
from iree_lnbwd.runtime.frameworks import dlpack, interop, pytorch
from iree_lnbwd.runtime.frameworks.framework import Framework
from iree_lnbwd.runtime.iree_module import aligned_empty
from iree_lnbwd.runtime.storage import Extent


class Arrays(Protocol):
    """How arrays of one kind are checked, seen and made."""

    def checked(self, name: str, array: Any, tensor: TensorAttributes, *, written: bool) -> Any:
        """The array of a tensor.

        Args:
            name: For messages.
            array: The caller's.
            tensor: What it must be like.
            written: Whether its values are replaced.

        Raises:
            TypeError, ValueError: Naming the array, what came and what was expected.
        """

    def extent(self, name: str, array: Any, tensor: TensorAttributes) -> Extent:
        """The memory from the first to the last element of an array that was checked."""

    def is_aligned(self, array: Any) -> bool:
        """Whether a module for strided rows can use it where it lies."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Any:
        """A new array; its address is a multiple of ``alignment``, where one can ask for it."""


def of(name: str, array: Any) -> Arrays:
    """How arrays like this one are checked, seen and made.

    Raises:
        TypeError, ValueError: It is no array; the message names it.
    """
    framework = interop.on_gpu(name, array)
    return _HostArrays() if framework is None else _GpuArrays(framework, array)


def seen(array: Any, order: Sequence[int], shape: tuple[int, ...]) -> Any:
    """An array with its dimensions in another order, and then of another shape.

    It is a view if the elements follow each other in that order, and a copy if not.
    """
    array = reordered(array, order)
    return array if tuple(array.shape) == shape else array.reshape(shape)


def reordered(array: Any, order: Sequence[int]) -> Any:
    """A view of an array with its dimensions in another order."""
    if tuple(order) == tuple(range(len(order))):
        return array
    return array.permute(*order) if pytorch.is_torch(array) else array.transpose(*order)


class _HostArrays:
    """NumPy's arrays, and those of other libraries as NumPy's views of their memory."""

    def checked(self, name: str, array: Any, tensor: TensorAttributes, *, written: bool) -> Any:
        if written and interop.is_immutable(array):
            raise ValueError(f"{name}: expected an array that can be written, got JAX's")
        found = (interop.memory_of if written else interop.to_numpy)(name, array)
        steps = tuple(step // found.itemsize for step in found.strides)
        whole = not any(step % found.itemsize for step in found.strides)
        _check(name, found, steps if whole else found.strides, tensor)
        if written and not found.flags.writeable:
            raise ValueError(f"{name}: expected an array that can be written, got another")
        return found

    def extent(self, name: str, array: Any, tensor: TensorAttributes) -> Extent:
        return _extent(name, array.__array_interface__["data"][0], tensor)

    def is_aligned(self, array: Any) -> bool:
        return bool(array.flags.aligned)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Any:
        return aligned_empty(shape, dtype, alignment)


class _GpuArrays:
    """The arrays of one library on a GPU."""

    def __init__(self, framework: Framework, like: Any) -> None:
        self._framework = framework
        self._like = like

    def checked(self, name: str, array: Any, tensor: TensorAttributes, *, written: bool) -> Any:
        if written and interop.is_immutable(array):
            raise ValueError(f"{name}: expected an array that can be written, got JAX's")
        described = self._framework.describe(name, array)
        is_torch = pytorch.is_torch(array)
        strides = array.stride() if is_torch else dlpack.exported(name, array).strides
        _check(name, described, strides or packed_stride(described.shape), tensor)
        return array.detach() if is_torch and written else array

    def extent(self, name: str, array: Any, tensor: TensorAttributes) -> Extent:
        (address,), _ = self._framework.addresses((array,))
        return _extent(name, address, tensor)

    def is_aligned(self, array: Any) -> bool:
        return self._framework.describe("", array).strides is not None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Any:
        return self._framework.empty(self._like, shape, dtype)


def _check(name: str, array: Any, strides: Sequence[int], tensor: TensorAttributes) -> None:
    """Expects an array with the dimensions, type and strides of a tensor."""
    assert tensor.data_type is not None
    if tuple(array.shape) != tensor.dim:
        raise ValueError(f"{name}: expected shape {tensor.dim}, got {tuple(array.shape)}")
    if array.dtype != tensor.data_type.numpy:
        raise TypeError(
            f"{name}: expected element type {tensor.data_type.numpy}, for {tensor.data_type}, got "
            f"{array.dtype}"
        )
    wanted = zip(tensor.dim, tensor.stride, strides, strict=True)
    if any(size > 1 and ours != theirs for size, ours, theirs in wanted):
        raise ValueError(
            f"{name}: expected strides of {tensor.stride} elements, got {tuple(strides)}"
        )


def _extent(name: str, address: int, tensor: TensorAttributes) -> Extent:
    assert tensor.data_type is not None
    return Extent(name, address, reach(tensor.dim, tensor.stride) * tensor.data_type.numpy.itemsize)
