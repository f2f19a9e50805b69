"""An emulated GPU for C++ that launches kernels through the addresses of a driver's functions."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from emulated_driver import EmulatedDriver, EmulatedLaunch

from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.runtime.gpu_driver import _KernelNode

CONTEXT = 1


class NativeGraph(NamedTuple):
    """As `gpu_driver.Graph`."""

    handles: tuple[int, ...]


class NativeDriver(EmulatedDriver):
    """Its launches come from C++, by a function's address, with the host's memory.

    The memory is copied to the emulated GPU before each kernel, and back.

    Attributes:
        errors: What went wrong in launches; C++ is told only that something did.
        capturing: What it says of a stream: whether the caller is capturing it.
    """

    def __init__(self, *, has_graphs: bool = False) -> None:
        super().__init__("cuda")
        self.has_graphs = has_graphs
        self.capturing = False
        self.context = CONTEXT
        self.uri = None
        self._launches: list[tuple[Any, list[tuple[str, int]]]] = []
        self._nodes: dict[int, list[tuple[Any, ...]]] = {}  # of each graph: launches
        self._one_at_a_time = threading.RLock()
        p, u = ctypes.c_void_p, ctypes.c_uint
        pointer = ctypes.POINTER(p)
        node = ctypes.POINTER(_KernelNode)
        self._functions = {
            "get": ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._get),
            "push": ctypes.CFUNCTYPE(ctypes.c_int, p)(lambda _: 1),
            "pop": ctypes.CFUNCTYPE(ctypes.c_int, pointer)(lambda _: 1),
            "launch": ctypes.CFUNCTYPE(ctypes.c_int, p, *(u,) * 7, p, pointer, pointer)(self._run),
            "captures": ctypes.CFUNCTYPE(ctypes.c_int, p, ctypes.POINTER(ctypes.c_int))(
                self._captures
            ),
            "set": ctypes.CFUNCTYPE(ctypes.c_int, p, p, node)(self._set),
            "run": ctypes.CFUNCTYPE(ctypes.c_int, p, p)(self._run_graph),
        }
        self.errors: list[BaseException] = []

    def entry_point(self, name: str) -> int:
        """As `gpu_driver.Driver`."""
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def graph(self, launches: Sequence[EmulatedLaunch]) -> Any:
        """As `gpu_driver.Driver`; its handle is its number, and those of nodes are theirs."""
        assert self.has_graphs
        graph = len(self._nodes) + 1
        self._nodes[graph] = [()] * len(launches)
        return NativeGraph((graph, *range(1, len(launches) + 1)))

    def knows(self, sequence: Any, sizes: Mapping[str, int]) -> None:
        """Launches that may come, which get numbers for handles.

        Args:
            sequence: The launches, a `LaunchSequence` of this driver.
            sizes: Bytes of the operands, by name, but for scratch and a weight of ones.
        """
        ends = (*sequence.scratch, sequence.scratch_bytes)[1:]
        pieces = zip(sequence.scratch_names, sequence.scratch, ends, strict=True)
        sizes = {**sizes, **{name: end - start for name, start, end in pieces}}
        for launch, bindings in zip(sequence.launches, sequence.bindings, strict=True):
            self._launches.append((launch, [(name, sizes.get(name, 0)) for name in bindings]))
            launch.function, launch.threads = len(self._launches), launch.kernel.export.threads
            launch.shared_bytes = launch.kernel.export.shared_bytes

    def _get(self, at: Any) -> int:
        at[0] = CONTEXT
        return 0

    def _captures(self, _stream: int, at: Any) -> int:
        at[0] = self.capturing
        return 0

    def _set(self, graph: int, node: int, at: Any) -> int:
        kernel = at[0]
        extra = (ctypes.c_void_p * 5).from_address(kernel.extra)
        shape = (*kernel.workgroups, *kernel.threads)
        self._nodes[graph][node - 1] = (
            kernel.function,
            shape,
            kernel.shared_bytes,
            _content(extra),
        )
        return 0

    def _run_graph(self, graph: int, _stream: int) -> int:
        self.graphs += 1
        return max(self._attempt(*node) for node in self._nodes[graph])

    def _run(self, function: int, *given: Any) -> int:
        *shape, shared_bytes, _stream, parameters, extra = given
        return self._attempt(function, tuple(shape), shared_bytes, _content(extra), parameters)

    def _attempt(self, *given: Any) -> int:
        try:
            with self._one_at_a_time:
                self._emulate(*given)
        except BaseException as error:  # it would not get through C++
            self.errors.append(error)
            return 1
        return 0

    def _emulate(
        self,
        function: int,
        shape: tuple[int, ...],
        shared_bytes: int,
        content: bytes,
        parameters: Any = None,
    ) -> None:
        launch, bindings = self._launches[function - 1]
        assert shape == (*launch.workgroups, *launch.threads)
        assert shared_bytes == launch.shared_bytes
        assert not parameters
        assert len(content) == 8 * len(bindings) + 4 * len(launch.constants)
        host = np.frombuffer(content, np.uint64, len(bindings)).tolist()
        constants = np.frombuffer(content, np.uint32, offset=8 * len(bindings))
        assert tuple(constants) == tuple(launch.constants)
        arrays: list[Array | None] = []
        buffers: list[Any] = []
        for (name, size), address in zip(bindings, host, strict=True):
            if address in self._starts:  # the module's ones, which are there already
                arrays.append(None)
                buffers.append(address)
                continue
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            arrays.append(array)
            buffers.append(self.allocate(name, array.nbytes, array.copy()))
        launch.fill([b if isinstance(b, int) else b.address for b in buffers])
        launch.run(0)
        for changed, buffer in zip(arrays, buffers, strict=True):
            if changed is not None:
                changed[:] = self.memory.read(buffer, 0, changed.nbytes)


def _content(extra: Any) -> bytes:
    """The arguments of a launch, from what the driver is given of them."""
    assert [extra[place] for place in (0, 2, 4)] == [1, 2, None]
    size = ctypes.cast(extra[3], ctypes.POINTER(ctypes.c_size_t))[0]
    return ctypes.string_at(extra[1], size)
