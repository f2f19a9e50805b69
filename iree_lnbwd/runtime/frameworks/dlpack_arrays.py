"""Arrays on a GPU of any library that supports DLPack (CuPy, JAX)."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import GpuArray
from iree_lnbwd.ops.layouts import ACCESS_BYTES
from iree_lnbwd.runtime.frameworks import dlpack
from iree_lnbwd.runtime.frameworks.framework import type_name


class _DlPackOnGpu:
    """Any other library (CuPy, JAX): calls use the default stream, and wait for the result."""

    waits = True

    def signature(self, names: Sequence[str], arrays: Sequence[Any]) -> Hashable:
        return tuple(  # with the type: some libraries' arrays may not be written to
            None if array is None else (type(array), self.describe(name, array))
            for name, array in zip(names, arrays, strict=True)
        )

    def describe(self, name: str, array: Any) -> GpuArray:
        if not hasattr(array, "__dlpack_device__"):
            raise TypeError(
                f"{name}: expected an array with DLPack, as input or output is, got "
                f"{type_name(array)}"
            )
        kind, index = dlpack.place(name, array)
        driver = dlpack.GPU_DRIVERS.get(kind)
        if driver is None:
            raise ValueError(
                f"{name}: expected an array on a GPU, as input or output is, got one elsewhere"
            )
        given = dlpack.exported(name, array)
        return GpuArray(
            shape=given.shape,
            dtype=given.dtype or str(getattr(array, "dtype", "an unknown one")),
            device=str(DeviceUri(driver, index)),
            contiguous=given.strides is None or _is_dense(given.shape, given.strides),
            writable=given.writable,
            strides=given.strides if given.address % ACCESS_BYTES == 0 else None,
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        exported = [dlpack.exported("array", array) for array in arrays]
        return [one.address for one in exported], exported

    def capsule(self, array: Any) -> object:
        return array.__dlpack__(**dlpack.on_default_stream(array))

    def copy(self, name: str, array: Any) -> Any:
        described = self.describe(name, array)
        new = self.empty(array, described.shape, described.dtype)
        try:
            new[...] = array
        except TypeError as error:  # such arrays are immutable
            raise ValueError(
                f"{name}: expected a contiguous array on {described.device} at an aligned address, "
                f"got one that {type(array).__module__} would have to copy, and cannot"
            ) from error
        return new

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        empty_like = namespace(like).empty_like
        try:
            return empty_like(like, shape=shape, dtype=dtype, order="C")
        except TypeError:  # the library takes no order argument
            return empty_like(like, shape=shape, dtype=dtype)

    def empty_like(self, like: Any) -> Any:
        return namespace(like).empty_like(like)

    def assign(self, to: Any, array: Any) -> None:
        to[...] = array

    def is_captured(self) -> bool:
        return False

    def clear(self, array: Any) -> None:
        if hasattr(array, "fill"):  # without it arrays are immutable, and new arrays are zeros
            array.fill(0)

    def stream(self, device: DeviceUri) -> int:
        return dlpack.DEFAULT_STREAMS[device.driver]


ON_GPU = _DlPackOnGpu()


def namespace(array: Any) -> Any:
    """The namespace with ``empty_like``: that of the array API, else the library's package."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(type(array).__module__.split(".")[0])


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
