"""Kernels on a stream of the caller's, through the GPU vendor's driver library.

IREE's device is not used for this, because it has one stream of its own. IREE 3.13's CUDA driver
can neither wait for another stream's event nor export one of its own (``import_timepoint`` and
``export_timepoint`` are not implemented). To keep order with the caller's stream, the host would
have to wait at both ends of a call. A kernel that is launched on the caller's stream is in order
already, and can be captured into a graph.

The APIs are CUDA's driver API and HIP's, which mirrors it. The HIP half has never run: it is
written from HIP's reference.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from iree_lnbwd.errors import NOT_IN_A_CHILD, DeviceError
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.vmfb.executables import Export

_LIBRARIES = MappingProxyType({"cuda": "libcuda.so.1", "rocm": "libamdhip64.so"})

_P, _I, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint

# The name of each function in each driver, and its arguments. Functions that are called often get
# ready-made C values, which saves their conversion.
_FUNCTIONS: Mapping[str, tuple[str, str, tuple[Any, ...] | None]] = MappingProxyType(
    {
        "init": ("cuInit", "hipInit", (_U,)),
        "device": ("cuDeviceGet", "hipDeviceGet", (_P, _I)),
        "context": ("cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain", (_P, _I)),
        "push": ("cuCtxPushCurrent_v2", "hipCtxPushCurrent", (_P,)),
        "get": ("cuCtxGetCurrent", "hipCtxGetCurrent", (_P,)),
        "pop": ("cuCtxPopCurrent_v2", "hipCtxPopCurrent", (_P,)),
        "synchronize": ("cuStreamSynchronize", "hipStreamSynchronize", (_P,)),
        "settle": ("cuCtxSynchronize", "hipDeviceSynchronize", ()),
        "load": ("cuModuleLoadData", "hipModuleLoadData", (_P, _P)),
        "unload": ("cuModuleUnload", "hipModuleUnload", (_P,)),
        "function": ("cuModuleGetFunction", "hipModuleGetFunction", (_P, _P, ctypes.c_char_p)),
        "attribute": ("cuFuncSetAttribute", "hipFuncSetAttribute", (_P, _I, _I)),
        "launch": ("cuLaunchKernel", "hipModuleLaunchKernel", None),
        "allocate": ("cuMemAlloc_v2", "hipMalloc", (_P, ctypes.c_size_t)),
        "free": ("cuMemFree_v2", "hipFree", (_P,)),
        "upload": ("cuMemcpyHtoD_v2", "hipMemcpyHtoD", (_P, _P, ctypes.c_size_t)),
        "download": ("cuMemcpyDtoH_v2", "hipMemcpyDtoH", (_P, _P, ctypes.c_size_t)),
        "fill": ("cuMemsetD8_v2", "hipMemsetD8", (_P, ctypes.c_ubyte, ctypes.c_size_t)),
        "new event": ("cuEventCreate", "hipEventCreateWithFlags", (_P, _U)),
        "record": ("cuEventRecord", "hipEventRecord", (_P, _P)),
        "wait": ("cuEventSynchronize", "hipEventSynchronize", (_P,)),
        "elapsed": ("cuEventElapsedTime", "hipEventElapsedTime", (_P, _P, _P)),
        "forget event": ("cuEventDestroy_v2", "hipEventDestroy", (_P,)),
    }
)
# For CUDA only: HIP's graphs take other structures, which could not be tried here.
_GRAPH_FUNCTIONS: Mapping[str, tuple[str, tuple[Any, ...] | None]] = MappingProxyType(
    {
        "new graph": ("cuGraphCreate", (_P, _U)),
        "add": ("cuGraphAddKernelNode_v2", (_P, _P, _P, ctypes.c_size_t, _P)),
        "instantiate": ("cuGraphInstantiateWithFlags", (_P, _P, ctypes.c_ulonglong)),
        "set": ("cuGraphExecKernelNodeSetParams_v2", None),
        "run": ("cuGraphLaunch", None),
        "captures": ("cuStreamIsCapturing", (_P, _P)),
        "forget": ("cuGraphDestroy", (_P,)),
        "destroy": ("cuGraphExecDestroy", (_P,)),
    }
)
_MOST_DYNAMIC_SHARED_BYTES = 8  # the attribute's number, in both APIs
# These say that a launch's arguments are in one buffer, in both APIs.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0


class Driver:
    """One GPU, by its vendor's driver.

    Attributes:
        uri: Which GPU.
    """

    def __init__(self, uri: DeviceUri) -> None:
        """Opens the GPU.

        Raises:
            DeviceError: It is absent.
        """
        self.uri = uri
        self._process = os.getpid()
        name = _LIBRARIES[uri.backend]
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            raise DeviceError(f"device: {uri} is absent: {name} is not on this machine") from error
        vendor = list(_LIBRARIES).index(uri.backend)
        self._functions: dict[str, Any] = {}
        for ours, (*names, parameters) in _FUNCTIONS.items():
            self._functions[ours] = getattr(library, names[vendor])
            self._functions[ours].argtypes = parameters
        if self.has_graphs:
            for ours, (theirs, parameters) in _GRAPH_FUNCTIONS.items():
                self._functions[ours] = getattr(library, theirs)
                self._functions[ours].argtypes = parameters
        device, context = _I(), _P()
        self._call("init", 0)
        self._call("device", ctypes.byref(device), uri.index)
        self._call("context", ctypes.byref(context), device)
        self._context, self._context_value = context, context.value
        self._get, self._seen = self._functions["get"], _P()
        self._seen_at = ctypes.byref(self._seen)

    @property
    def context(self) -> int:
        """The driver's handle of this GPU's context."""
        return self._context_value or 0

    def entry_point(self, function: str) -> int:
        """Address of one of the driver's functions, for code that calls it directly.

        Args:
            function: Our name of it.
        """
        return ctypes.cast(self._functions[function], _P).value or 0

    @property
    def has_graphs(self) -> bool:
        """Whether `graph` can make one."""
        return self.uri.backend == "cuda"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this GPU the calling thread's current one, for the length of a block."""
        self._call("push", self._context)
        try:
            yield
        finally:
            self._call("pop", ctypes.byref(_P()))

    def is_current(self) -> bool:
        """Whether this GPU is the calling thread's current one. For one thread at a time.

        Raises:
            DeviceError: In a child of ``fork``.
        """
        self.check_process()
        self._get(self._seen_at)
        return self._seen.value == self._context_value

    def kernels(self, exports: Sequence[Export]) -> dict[str, LoadedKernel]:
        """Loads code, which stays loaded as long as one of its kernels is referenced.

        Raises:
            DeviceError: The driver refuses the code: it is for another GPU.
        """
        with self.current():
            images = {export.code: _Image(self, export.code) for export in exports}
            return {
                export.kernel: LoadedKernel(self, images[export.code], export) for export in exports
            }

    def graph(self, launches: Sequence[DriverLaunch]) -> Graph:
        """A graph of kernels; the GPU has graphs.

        Args:
            launches: Any of the kernels, in order.
        """
        with self.current():
            return Graph(self, launches)

    def upload(self, data: bytes) -> DeviceMemory:
        """A copy in the GPU's memory, complete when this returns."""
        with self.current():
            memory = DeviceMemory(self, len(data))
            self._call("upload", memory.pointer, data, len(data))
            self._call("synchronize", None)
        return memory

    def reserve(self, size: int) -> DeviceMemory:
        """Memory of the GPU, of so many bytes; what is in it is not known.

        Raises:
            DeviceError: There is not as much.
        """
        with self.current():
            return DeviceMemory(self, size)

    def write(self, pointer: int, data: Array) -> None:
        """Copies an array, which is contiguous, into the GPU's memory; done when this returns."""
        with self.current():
            self._call("upload", pointer, data.ctypes.data, data.nbytes)
            self._call("synchronize", None)

    def read(self, pointer: int, into: Array) -> None:
        """Fills an array, which is contiguous, from the GPU's memory, after all that is queued."""
        with self.current():
            self._call("settle")
            self._call("download", into.ctypes.data, pointer, into.nbytes)

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Sets so many bytes of the GPU's memory; done when this returns."""
        with self.current():
            self._call("fill", pointer, byte, size)
            self._call("settle")

    def event(self) -> Event:
        """A new event, for times on a stream."""
        with self.current():
            return Event(self)

    def synchronize(self, stream: int) -> None:
        """Waits until everything on a stream is done."""
        with self.current():
            self._call("synchronize", stream)

    def check_process(self) -> None:
        """Expects a process in which this GPU can be used.

        Raises:
            DeviceError: In a child of ``fork``.
        """
        if os.getpid() != self._process:
            raise DeviceError(f"device: {self.uri} {NOT_IN_A_CHILD}")

    def _call(self, function: str, *arguments: Any) -> None:
        self.check_process()
        status = self._functions[function](*arguments)
        if status:
            name = self._functions[function].__name__
            raise DeviceError(f"device: {self.uri}: {name} failed with {status}")

    def _release(self, function: str, handle: ctypes.c_void_p) -> None:
        """Releases memory or code that queued work may still use; ignores the driver's errors."""
        if os.getpid() != self._process:
            return  # it belongs to the parent process
        if not self._functions["push"](self._context):
            self._functions["settle"]()
            self._functions[function](handle)
            self._functions["pop"](ctypes.byref(_P()))


class DeviceMemory:
    """DeviceMemory of the GPU, until this object is gone or `free` is called.

    Attributes:
        pointer: Its address.
        size: Its bytes.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        """Allocates; the GPU is the current one."""
        self.size = size
        address = _P()
        driver._call("allocate", ctypes.byref(address), size)
        self.pointer = address.value or 0
        self._finalizer = weakref.finalize(self, driver._release, "free", address)
        self._finalizer.atexit = False

    def free(self) -> None:
        """Gives it back, after all that is queued; from then on nothing may use it."""
        self._finalizer()

    def stay(self) -> None:
        """Leaves it where it is when this object is gone."""
        self._finalizer.detach()


class Event:
    """A mark on a stream, which keeps the time when the GPU gets there."""

    def __init__(self, driver: Driver) -> None:
        """Use `Driver.event`."""
        self._driver, self._handle = driver, _P()
        driver._call("new event", ctypes.byref(self._handle), 0)
        weakref.finalize(self, driver._release, "forget event", self._handle).atexit = False

    def record(self, stream: int) -> None:
        """Puts it on a stream; the GPU is the current one."""
        self._driver._call("record", self._handle, stream)

    def microseconds_since(self, before: Event) -> float:
        """The time between two recorded events, once both have happened.

        The GPU is the current one. The resolution is half a microsecond (CUDA driver API,
        cuEventElapsedTime).
        """
        milliseconds = ctypes.c_float()
        self._driver._call("wait", self._handle)
        self._driver._call("elapsed", ctypes.byref(milliseconds), before._handle, self._handle)
        return milliseconds.value * 1e3


class _Image:
    """Loaded code, until this object is gone."""

    def __init__(self, driver: Driver, code: bytes) -> None:
        self.module = _P()
        driver._call("load", ctypes.byref(self.module), code)
        self._finalizer = weakref.finalize(self, driver._release, "unload", self.module)
        self._finalizer.atexit = False

    def stay(self) -> None:
        """Leaves the code loaded when this object is gone."""
        self._finalizer.detach()


class LoadedKernel:
    """One kernel, in loaded code.

    Attributes:
        export: The module's description of it.
    """

    def __init__(self, driver: Driver, image: _Image, export: Export) -> None:
        """Looks the kernel up; the GPU is the current one."""
        self.export = export
        self._driver = driver
        self._image = image
        self._function = _P()
        driver._call("function", ctypes.byref(self._function), image.module, export.kernel.encode())
        if export.shared_bytes:
            driver._call(
                "attribute", self._function, _MOST_DYNAMIC_SHARED_BYTES, export.shared_bytes
            )

    def launch(self, workgroups: tuple[int, int, int], constants: Sequence[int]) -> DriverLaunch:
        """A launch without its pointers and its stream.

        Args:
            workgroups: Along x, y and z.
            constants: 32 bits each.
        """
        return DriverLaunch(self, self._driver, self._function, workgroups, constants)

    def stay(self) -> None:
        """Leaves the code loaded when this object is gone."""
        self._image.stay()


class _KernelNode(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h."""

    _fields_ = (
        ("function", _P),
        ("workgroups", _U * 3),
        ("threads", _U * 3),
        ("shared_bytes", _U),
        ("parameters", _P),
        ("extra", _P),
        ("kernel", _P),
        ("context", _P),
    )


class DriverLaunch:
    """A launch, made once and used often, by one thread at a time.

    Its arguments are where the driver reads them, so a call only fills in the pointers.

    Attributes:
        function: The driver's handle of the kernel.
        workgroups: Along x, y and z.
        threads: The same of each workgroup.
        shared_bytes: Of each workgroup.
        constants: 32 bits each.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        driver: Driver,
        function: ctypes.c_void_p,
        workgroups: tuple[int, int, int],
        constants: Sequence[int],
    ) -> None:
        """Use `LoadedKernel.launch`."""
        export = kernel.export
        self.function = function.value or 0
        self.workgroups = workgroups
        self.threads = export.threads
        self.shared_bytes = export.shared_bytes
        self.constants = tuple(constants)
        numbers = (_U * len(constants))(*constants)
        size = 8 * export.bindings + ctypes.sizeof(numbers)
        self._arguments = ctypes.create_string_buffer(bytes(8 * export.bindings) + bytes(numbers))
        self._pointers = (ctypes.c_uint64 * export.bindings).from_buffer(self._arguments)
        self._size = ctypes.c_size_t(size)
        self._extra = (_P * 5)(
            _BUFFER_POINTER,
            ctypes.addressof(self._arguments),
            _BUFFER_SIZE,
            ctypes.addressof(self._size),
            _END,
        )
        self._shape = tuple(map(_U, (*workgroups, *export.threads, export.shared_bytes)))
        self._function = function
        self._launch = driver._functions["launch"]
        self._kernel = kernel  # keeps the code loaded
        self._node = _KernelNode(
            function=function,
            workgroups=workgroups,
            threads=export.threads,
            shared_bytes=export.shared_bytes,
            extra=ctypes.addressof(self._extra),
        )
        self.node_at = ctypes.byref(self._node)

    def fill(self, pointers: Sequence[int]) -> None:
        """Sets the arguments.

        Args:
            pointers: One for each binding.
        """
        self._pointers[:] = pointers  # type: ignore[call-overload] # takes any sequence

    def stay(self) -> None:
        """Leaves the kernel's code loaded when this object is gone."""
        self._kernel.stay()

    def run(self, stream: int) -> None:
        """Puts the kernel on a stream; the GPU is the current one.

        Args:
            stream: The driver's handle of it.

        Raises:
            DeviceError: The driver refuses.
        """
        shape = (self._function, *self._shape)
        if status := self._launch(*shape, _P(stream), None, self._extra):
            name = self._kernel.export.kernel
            raise DeviceError(f"device: launching {name} failed with {status}")


class Graph:
    """Launches of the same kernels one after another, put on a stream at once.

    The driver needs half as much time for this as for single launches. For one thread at a time.
    """

    def __init__(self, driver: Driver, launches: Sequence[DriverLaunch]) -> None:
        """Use `Driver.graph`."""
        graph, self._runnable = _P(), _P()
        driver._call("new graph", ctypes.byref(graph), 0)
        self._nodes: list[ctypes.c_void_p] = []
        for launch in launches:
            node, before = _P(), (_P * 1)(*self._nodes[-1:])
            driver._call(
                "add", ctypes.byref(node), graph, before, len(self._nodes[-1:]), launch.node_at
            )
            self._nodes.append(node)
        driver._call("instantiate", ctypes.byref(self._runnable), graph, 0)
        self._set, self._run = driver._functions["set"], driver._functions["run"]
        # Setting arguments names nodes of this graph, so it is kept as long as its executable form.
        weakref.finalize(self, driver._release, "forget", graph).atexit = False
        weakref.finalize(self, driver._release, "destroy", self._runnable).atexit = False

    @property
    def handles(self) -> tuple[int, ...]:
        """The driver's handles of the executable graph and, in order, of its nodes."""
        return tuple(handle.value or 0 for handle in (self._runnable, *self._nodes))

    def run(self, launches: Sequence[DriverLaunch], stream: int) -> None:
        """Puts the kernels on a stream; the GPU is the current one.

        Args:
            launches: Of the graph's kernels, filled in.
            stream: The driver's handle of it.

        Raises:
            DeviceError: The driver refuses.
        """
        status = 0
        for node, launch in zip(self._nodes, launches, strict=True):
            status = status or self._set(self._runnable, node, launch.node_at)
        if status := status or self._run(self._runnable, _P(stream)):
            raise DeviceError(f"device: running a graph of kernels failed with {status}")
