"""A .vmfb in IREE's runtime: its context on a device, and its function's arguments in memory."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import iree.runtime as rt
import numpy as np
from iree.runtime.dtypes import map_dtype_to_hal_element_type

from iree_lnbwd.errors import IREE_ERRORS, NOT_IN_A_CHILD, DeviceError, reason
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.spec import TensorType
from iree_lnbwd.runtime import host_threads
from iree_lnbwd.runtime.host_threads import HostThreads
from iree_lnbwd.vmfb.description import OpenedModule, vm_module

_HOST = DeviceUri.parse(DEFAULT_DEVICE)
_ON_THE_CALLERS_THREAD = DeviceUri.parse("local-sync")
_WORKERS = "--task_topology_group_count"
_MOST_FOR_THREADS = 16  # devices for other numbers of threads, or other CPUs
_HOST_MEMORY = int(rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE)
_HOST_USAGE = int(rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING)


class IreeModule:
    """A module on a device. Calls from several threads take turns.

    On the CPU, a call runs on as many threads as its caller allows (`host_threads`). So there is a
    device for each such number, and the module is loaded on those that its callers need. A child
    of ``fork`` opens devices of its own, because the threads of the parent's are gone.
    """

    def __init__(
        self, uri: DeviceUri, module: OpenedModule, *, source: str, alignment: int
    ) -> None:
        """Opens the device and loads the module on it.

        Args:
            uri: The device.
            module: The module to load.
            source: Where it came from, for messages.
            alignment: Bytes; the alignment of host memory that a module on the CPU assumes.

        Raises:
            DeviceError: The device is absent or cannot run it.
        """
        self._uri = uri
        self._read = functools.partial(vm_module, vmfb=module.vmfb, source=source)
        self._load = functools.partial(
            _Loaded,
            uri,
            source=source,
            alignment=alignment,
            entry=module.description.spec.op,
        )
        self._loaded: WeakKeyDictionary[_Device, _Loaded] = WeakKeyDictionary()
        device = _DEVICES.open(uri)
        self._loaded[device] = self._load(device.hal, module.instance, module.module)

    def run(
        self,
        inputs: Sequence[Array],
        results: Sequence[Array],
        numbers: Sequence[int] = (),
        *,
        has_gaps: bool = False,
    ) -> None:
        """Computes from NumPy arrays, and numbers that follow them, into NumPy arrays.

        Args:
            inputs: What is read.
            results: What is written.
            numbers: Those that follow the arrays.
            has_gaps: Whether parts of results are not written, and stay.
        """
        loaded = self._here()
        sent = [loaded.memory.send(array) for array in inputs]
        room = loaded.memory.send_room if has_gaps else loaded.memory.room_for
        received = [room(array) for array in results]
        loaded.invoke([buffer.view for buffer in (*sent, *received)], numbers, len(results))
        for buffer, array in zip(received, results, strict=True):
            loaded.memory.receive(buffer, array)

    def run_in_place(
        self,
        arrays: Sequence[tuple[TensorType, object, tuple[int, ...]]],
        results: int,
        numbers: Sequence[int] = (),
    ) -> None:
        """Computes on arrays in the device's memory, and returns when the results are complete.

        Args:
            arrays: The name, the DLPack capsule, and the shape in the module of each argument; the
                results are the last of them.
            results: The number of results.
            numbers: Those that follow the arrays.

        Raises:
            ValueError: IREE does not take the memory, naming the argument.
        """
        loaded = self._here()
        views = []
        for argument, capsule, shape in arrays:
            try:
                buffer = loaded.device.from_dlpack_capsule(capsule).get_buffer()
            except IREE_ERRORS as error:
                raise ValueError(f"{argument.name}: {reason(error)}") from error
            views.append(_view(buffer, shape, DTYPES[argument.dtype].numpy))
        loaded.invoke(views, numbers, results)

    def _here(self) -> _Loaded:
        """The module on the device for this process, and for the threads that the caller allows."""
        device = _DEVICES.open(self._uri)
        loaded = self._loaded.get(device)
        if loaded is None:
            with _DEVICES.opening:
                loaded = self._loaded.get(device)
                if loaded is None:
                    instance = rt.VmInstance()
                    loaded = self._load(device.hal, instance, self._read(instance))
                    self._loaded[device] = loaded
        return loaded


class _Loaded:
    """A module on a device of this process."""

    def __init__(
        self,
        uri: DeviceUri,
        device: rt.HalDevice,
        instance: rt.VmInstance,
        module: rt.VmModule,
        *,
        source: str,
        alignment: int,
        entry: str,
    ) -> None:
        self.device = device
        self.memory: _Memory = (
            _HostMemory(self.device, alignment)
            if uri.backend == "cpu"
            else _DeviceMemory(self.device)
        )
        self._lock = threading.Lock()
        try:
            hal_module = rt.create_hal_module(instance, self.device)
            self._context = rt.VmContext(instance, modules=[hal_module, module])
        except IREE_ERRORS as error:
            raise DeviceError(f"device: {uri} cannot run {source}: {reason(error)}") from error
        self._function = module.lookup_function(entry)

    def invoke(
        self, views: Sequence[rt.HalBufferView], numbers: Sequence[int], results: int
    ) -> None:
        """Calls the function, and returns when it is done."""
        arguments = rt.VmVariantList(len(views) + len(numbers))
        for view in views:
            arguments.push_ref(view)
        for number in numbers:
            arguments.push_int(number)
        with self._lock:
            self._context.invoke(self._function, arguments, rt.VmVariantList(results))


class _Buffer(NamedTuple):
    """An array as a device sees it.

    Attributes:
        view: The buffer view that the module gets.
        array: The memory behind ``view`` if it is the host's; nothing else keeps it.
    """

    view: rt.HalBufferView
    array: Array


class _Memory(Protocol):
    """How arrays get to a device and back."""

    def send(self, array: Array) -> _Buffer:
        """A buffer with the array's content."""

    def room_for(self, array: Array) -> _Buffer:
        """A buffer for the array's later content."""

    def send_room(self, array: Array) -> _Buffer:
        """As `room_for`, with the array's content, of which parts stay."""

    def receive(self, buffer: _Buffer, array: Array) -> None:
        """The buffer's content, in the array that it was made for."""


class _HostMemory:
    """The CPU uses the arrays in place; only misaligned or read-only arrays are copied."""

    def __init__(self, device: rt.HalDevice, alignment: int) -> None:
        self._allocator = device.allocator
        self._alignment = alignment

    def send(self, array: Array) -> _Buffer:
        if self._is_aligned(array) and array.flags.writeable:
            return self._import(array)
        aligned = aligned_empty(array.shape, array.dtype, self._alignment)
        np.copyto(aligned, array)
        return self._import(aligned)

    def room_for(self, array: Array) -> _Buffer:
        direct = self._is_aligned(array) and array.flags.c_contiguous
        return self._import(
            array if direct else aligned_empty(array.shape, array.dtype, self._alignment)
        )

    def send_room(self, array: Array) -> _Buffer:
        room = self.room_for(array)
        if room.array is not array:
            np.copyto(room.array, array)
        return room

    def receive(self, buffer: _Buffer, array: Array) -> None:
        if buffer.array is not array:
            np.copyto(array, buffer.array)

    def _is_aligned(self, array: Array) -> bool:
        if not array.flags.aligned:
            return False
        return self._alignment == 1 or array.ctypes.data % self._alignment == 0

    def _import(self, array: Array) -> _Buffer:
        buffer = self._allocator.import_host_allocation(
            array, memory_type=_HOST_MEMORY, allowed_usage=_HOST_USAGE
        )
        return _Buffer(_view(buffer, array.shape, array.dtype), array)


class _DeviceMemory:
    """A GPU gets copies in its own memory."""

    def __init__(self, device: rt.HalDevice) -> None:
        self._device = device

    def send(self, array: Array) -> _Buffer:
        view = self._device.allocator.allocate_buffer_copy(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            device=self._device,
            buffer=array,
            element_type=map_dtype_to_hal_element_type(array.dtype),
        )
        return _Buffer(view, array)

    def send_room(self, array: Array) -> _Buffer:
        return self.send(array)

    def room_for(self, array: Array) -> _Buffer:
        buffer = self._device.allocator.allocate_buffer(
            memory_type=rt.MemoryType.DEVICE_LOCAL,
            allowed_usage=rt.BufferUsage.DEFAULT,
            allocation_size=array.nbytes,
        )
        return _Buffer(_view(buffer, array.shape, array.dtype), array)

    def receive(self, buffer: _Buffer, array: Array) -> None:
        # DeviceArray.to_host is not used: in IREE 3.13 it registers the array's pages with CUDA,
        # which fails in other threads. It releases them some time after it has returned, and CUDA
        # may refuse the next copy to one of them.
        staging = self._device.allocator.allocate_buffer(
            memory_type=rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE,
            allowed_usage=rt.BufferUsage.TRANSFER_TARGET | rt.BufferUsage.MAPPING_SCOPED,
            allocation_size=array.nbytes,
        )
        semaphore = self._device.create_semaphore(0)
        copied = rt.HalFence.create_at(semaphore, 1)
        self._device.queue_copy(
            buffer.view.get_buffer(),
            staging,
            wait_semaphores=rt.HalFence.create_at(semaphore, 0),
            signal_semaphores=copied,
        )
        copied.wait()
        raw = staging.map().asarray((array.nbytes,), np.dtype(np.uint8))
        np.copyto(array, raw.view(array.dtype).reshape(array.shape))


@dataclass(frozen=True, eq=False)
class _Device:
    """An open device. Modules hold it weakly, so that it can be closed while they live."""

    hal: rt.HalDevice


class _Key(NamedTuple):
    """What devices are told apart by.

    Attributes:
        uri: The device.
        threads: Those that it computes with; None where nobody can choose them.
    """

    uri: DeviceUri
    threads: HostThreads | None


class _Devices:
    """The devices of this process: one of each kind, which all modules share.

    A device holds threads and descriptors, and on a GPU a context.
    """

    def __init__(self) -> None:
        self.opening = threading.RLock()
        self._of_this_process: dict[_Key, _Device] = {}
        self._of_the_parent: set[DeviceUri] = set()
        os.register_at_fork(after_in_child=self._begin_anew)
        atexit.register(self._of_this_process.clear)  # while IREE can still release them

    def open(self, uri: DeviceUri) -> _Device:
        """The device of that name, for the calling thread.

        Raises:
            DeviceError: It is absent, or cannot be had in this process.
        """
        key = _Key(uri, host_threads.of_caller() if uri == _HOST else None)
        if (device := self._of_this_process.get(key)) is not None:
            return device
        with self.opening:
            if (device := self._of_this_process.get(key)) is not None:
                return device
            if uri.backend != "cpu" and uri in self._of_the_parent:
                raise DeviceError(f"device: {uri} {NOT_IN_A_CHILD}")
            try:
                device = _Device(_create(*key))
            except IREE_ERRORS as error:
                raise DeviceError(f"device: {uri} is absent: {reason(error)}") from error
            self._of_this_process[key] = device
            self._close_the_oldest()
            return device

    def _close_the_oldest(self) -> None:
        """Keeps few devices for other threads; a device that a call is on closes after it."""
        with_threads = [key for key in self._of_this_process if key.threads is not None]
        for key in with_threads[:-_MOST_FOR_THREADS]:
            del self._of_this_process[key]

    def _begin_anew(self) -> None:
        """Forgets the devices in a child of ``fork``, where the parent's threads do not exist.

        Releasing a device would wait for its threads, so none is ever released.
        """
        if self._of_this_process:
            rt._binding.disable_leak_checker()  # it would report them on standard error
        for device in self._of_this_process.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
        self._of_the_parent.update(key.uri for key in self._of_this_process)
        self._of_this_process.clear()
        self.opening = threading.RLock()


_DEVICES = _Devices()


def open_device(uri: DeviceUri) -> rt.HalDevice:
    """A device of IREE's, which all of this process share.

    Raises:
        DeviceError: It is absent, or cannot be had in this process.
    """
    return _DEVICES.open(uri).hal


def _create(uri: DeviceUri, threads: HostThreads | None) -> rt.HalDevice:
    """A new device, by a driver of our own: a cached one has threads, in one process."""
    if threads is None:
        return rt._binding.create_hal_driver(uri.driver).create_device_by_uri(str(uri))
    if threads.number == 1:
        return _create(_ON_THE_CALLERS_THREAD, None)
    with host_threads.confined(threads):
        rt.flags.parse_flags(f"{_WORKERS}={threads.number}")
        try:
            return _create(uri, None)
        finally:
            rt.flags.parse_flags(f"{_WORKERS}=0")  # IREE's default, for other devices


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], alignment: int) -> Array:
    """A new array whose address is a multiple of ``alignment`` and of its elements' alignment."""
    if alignment <= dtype.alignment:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    storage = np.empty(size + alignment, np.uint8)
    start = -storage.ctypes.data % alignment
    return storage[start : start + size].view(dtype).reshape(shape)


def _view(buffer: rt.HalBuffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> rt.HalBufferView:
    return rt.HalBufferView(buffer, shape, map_dtype_to_hal_element_type(dtype))
