"""Arrays in an emulated GPU's memory. What is known of them they say by DLPack, as CuPy's do."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from emulated_driver import EmulatedDriver

from iree_lnbwd.calls import modules
from iree_lnbwd.emulator.memory import Buffer
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.frameworks import dlpack

_CUDA = 2  # kDLCUDA
_NAME, _VERSIONED = b"dltensor", b"dltensor_versioned"
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_CODES = {dtype: code for code, dtype in dlpack._DTYPES.items()}
_BYTE = (1, 8)  # kDLUInt
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Namespace:
    """What makes such arrays."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver = driver

    def asarray(self, array: Array, *, shift: int = 0) -> EmulatedArray:
        """A copy, so many bytes from where its memory begins."""
        made = self._empty(array.shape, array.dtype, shift=shift)
        made[...] = array
        return made

    def spread(self, array: Array) -> EmulatedArray:
        """A copy with nothing in every second element."""
        room = self._empty((*array.shape, 2), array.dtype)
        made = EmulatedArray(self, room.buffer, 0, array.shape, array.dtype, every=2)
        made[...] = array
        return made

    def beside_others(self, array: Array, *, count: int = 3, shift: int = 0) -> EmulatedArray:
        """A copy whose rows have others beside them, as q of a packed q, k and v; those are -77."""
        shape = (*array.shape[:-1], count, array.shape[-1])
        room = self.asarray(np.full(shape, -77, array.dtype), shift=shift)
        steps = [count * array.shape[-1]]
        for length in reversed(array.shape[1:-1]):
            steps.insert(0, steps[0] * length)
        view = room._view(array.shape, (*steps, 1))
        view.room = room
        view[...] = array
        return view

    def empty_like(
        self, like: EmulatedArray, *, shape: Any = None, dtype: Any = None
    ) -> EmulatedArray:
        """As the array API has it, with a shape of its own."""
        return self._empty(
            like.shape if shape is None else shape, like.dtype if dtype is None else dtype
        )

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], shift: int = 0) -> EmulatedArray:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        buffer = self.driver.allocate(f"array {shape}", nbytes + shift)
        return EmulatedArray(self, buffer, shift, shape, dtype)


class EmulatedArray:
    """One of them."""

    def __init__(
        self,
        namespace: Namespace,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        every: int = 1,
    ) -> None:
        """A piece of memory; ``every`` is the stride of the last dimension."""
        self.buffer, self.offset, self.shape, self.dtype = buffer, offset, tuple(shape), dtype
        self._namespace = namespace
        self._memory = namespace.driver.memory
        steps = [every]
        for length in reversed(self.shape[1:]):
            steps.insert(0, steps[0] * length)
        self._steps = tuple(steps[: len(self.shape)])
        self._given: list[object] = []
        self.room: EmulatedArray | None = None

    def __array_namespace__(self) -> Namespace:
        return self._namespace

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, *, stream: int | None = None) -> object:
        assert stream == dlpack.DEFAULT_STREAMS["cuda"]
        ndim = len(self.shape)
        shape, steps = ((ctypes.c_int64 * ndim)(*n) for n in (self.shape, self._steps))
        code, bits = _CODES.get(self.dtype, _BYTE)
        address = self.buffer.address + self.offset if 0 not in self.shape else 0
        tensor = dlpack._DLTensor(
            address, _CUDA, 0, ndim, dlpack._DType(code, bits, 1), shape, steps, 0
        )
        return self._capsule(tensor, shape, steps)

    def _capsule(self, tensor: dlpack._DLTensor, *kept: object) -> object:
        self._given.append((tensor, *kept))
        return _new_capsule(ctypes.addressof(tensor), _NAME, None)

    def __setitem__(self, everything: object, values: Array | EmulatedArray) -> None:
        values = values.numpy() if isinstance(values, EmulatedArray) else values
        size = self.dtype.itemsize
        for at, value in zip(self._places(), values.reshape(-1), strict=True):
            self._memory.write(self.buffer, at, np.atleast_1d(value).view(np.uint8)[:size])

    def transpose(self, *order: int) -> EmulatedArray:
        """The same memory, with the dimensions in another order."""
        return self._view([self.shape[i] for i in order], [self._steps[i] for i in order])

    def reshape(self, shape: tuple[int, ...]) -> EmulatedArray:
        """The same memory if its elements follow each other, and else a copy."""
        packed = EmulatedArray(self._namespace, self.buffer, self.offset, shape, self.dtype)
        places = packed._places()
        if places == self._places():
            return packed
        return self._namespace.asarray(self.numpy().reshape(shape))

    def _view(self, shape: Sequence[int], steps: Sequence[int]) -> EmulatedArray:
        view = EmulatedArray(self._namespace, self.buffer, self.offset, tuple(shape), self.dtype)
        view._steps = tuple(steps)
        return view

    def fill(self, value: int) -> None:
        """The same number everywhere."""
        self[...] = np.full(self.shape, value, self.dtype)

    def numpy(self) -> Array:
        """Its values."""
        size = self.dtype.itemsize
        found = [self._memory.read(self.buffer, at, size) for at in self._places()]
        return np.concatenate([*found, np.empty(0, np.uint8)]).view(self.dtype).reshape(self.shape)

    def _places(self) -> list[int]:
        """Where each element is in the buffer, in bytes."""
        places = np.full(self.shape, self.offset, np.int64)
        for axis, step in enumerate(self._steps):
            shape = [1] * len(self.shape)
            shape[axis] = -1
            places += np.arange(self.shape[axis]).reshape(shape) * step * self.dtype.itemsize
        return [int(place) for place in places.reshape(-1)]


class ReadOnlyArray(EmulatedArray):
    """One that says so, as DLPack 1.0 has it."""

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> object:
        assert max_version is not None
        return super().__dlpack__(stream=stream)

    def _capsule(self, tensor: dlpack._DLTensor, *kept: object) -> object:
        managed = dlpack._Versioned((1, 0), None, None, _READ_ONLY, tensor)
        self._given.append((managed, *kept))
        return _new_capsule(ctypes.addressof(managed), _VERSIONED, None)


@contextlib.contextmanager
def emulated_gpu(target: Target) -> Iterator[Namespace]:
    """Arrays on an emulated GPU, on which the public functions compute."""
    driver = EmulatedDriver(target.backend)
    with (
        mock.patch.object(gpu_module, "Driver", return_value=driver),
        mock.patch.object(modules, "target_of", return_value=target),
    ):
        modules.loaded.cache_clear()
        yield Namespace(driver)
        modules.loaded.cache_clear()
