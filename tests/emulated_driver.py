"""A driver whose GPU is the emulator: what calls on a stream launch runs there, under its rules.

It has `gpu_driver.Driver`'s interface, as far as kernels on a stream need it. A stream's work is
done as soon as it is put there. A graph runs the kernels that it was made of, and no others.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from iree_lnbwd.emulator.executor import Executor
from iree_lnbwd.emulator.launch import Binding, Launch
from iree_lnbwd.emulator.memory import Buffer, GlobalMemory
from iree_lnbwd.emulator.module import EXECUTORS, FORMATS
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.vmfb.executables import Export


class Uploaded(NamedTuple):
    """As `gpu_driver.DeviceMemory`, of an upload."""

    pointer: int
    driver: EmulatedDriver

    def stay(self) -> None:
        """Notes that it is to stay."""
        self.driver.staying.add(self.pointer)


@dataclass(frozen=True)
class Reserved:
    """As `gpu_driver.DeviceMemory`."""

    driver: EmulatedDriver
    buffer: Buffer

    @property
    def pointer(self) -> int:
        """Its address."""
        return self.buffer.address

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.buffer.nbytes

    def free(self) -> None:
        """Gives it back."""
        if not self.buffer.released:
            self.driver.memory.release(self.buffer)


class EmulatedEvent:
    """As `gpu_driver.Event`; a microsecond passes with each kernel, and no other time."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self._driver, self._at = driver, -1

    def record(self, stream: int) -> None:
        """Puts it on a stream."""
        self._at = len(self._driver.launches)

    def microseconds_since(self, before: EmulatedEvent) -> float:
        """Kernels between two events."""
        assert 0 <= before._at <= self._at
        return float(self._at - before._at)


class EmulatedDriver:
    """One emulated GPU.

    Attributes:
        memory: Its memory.
        launches: All that ran.
        reserved: All memory that was reserved, and what of it was given back.
        graphs: How often a graph ran.
        has_graphs: Whether `graph` can make one: as on hardware, where it is CUDA's.
        staying: Kernels, and addresses of memory, that are to stay when their objects are gone.
    """

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self.staying: set[str | int] = set()
        self.has_graphs = backend == "cuda"
        self.memory = GlobalMemory()
        self.launches: list[Launch] = []
        self._make_executor = EXECUTORS[FORMATS[backend]]
        self.reserved: list[Reserved] = []
        self._ends: dict[int, int] = {}  # of each piece of memory, by where it begins
        self._starts: list[int] = []
        # What a kernel's null pointer, of scratch that a call does not need, leads to.
        self._nothing = self.memory.allocate("a null pointer", 0)

    def allocate(
        self, name: str, nbytes: int, data: Array | None = None, *, write_once: bool = False
    ) -> Buffer:
        """Memory that kernels can be given."""
        buffer = self.memory.allocate(name, nbytes, data=data, write_once=write_once)
        self._add(buffer.address, nbytes)
        return buffer

    def divide(self, buffer: Buffer, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """From now on no kernel that is given a piece of it goes beyond that piece."""
        for start, size in zip(starts, sizes, strict=True):
            self._add(buffer.address + start, size)

    def kernels(self, exports: Sequence[Export]) -> dict[str, EmulatedKernel]:
        """Code, read."""
        codes = {export.code for export in exports}
        executors = {code: self._make_executor(code, lambda text: text) for code in codes}
        return {e.kernel: EmulatedKernel(self, executors[e.code], e) for e in exports}

    def graph(self, launches: Sequence[EmulatedLaunch]) -> EmulatedGraph:
        """A graph of kernels."""
        assert self.has_graphs
        return EmulatedGraph(self, tuple(launch.kernel for launch in launches))

    def upload(self, data: bytes) -> Uploaded:
        """A copy in its memory."""
        buffer = self.allocate("upload", len(data), np.frombuffer(data, np.uint8))
        return Uploaded(buffer.address, self)

    def reserve(self, size: int) -> Reserved:
        """Memory that nothing is in yet."""
        self.reserved.append(Reserved(self, self.allocate("reserved", size)))
        return self.reserved[-1]

    def write(self, pointer: int, data: Array) -> None:
        """Copies an array into its memory."""
        buffer, at = self._place(pointer)
        self.memory.write(buffer, at, data.reshape(-1).view(np.uint8))

    def read(self, pointer: int, into: Array) -> None:
        """Fills an array from its memory."""
        buffer, at = self._place(pointer)
        into.reshape(-1).view(np.uint8)[:] = self.memory.read(buffer, at, into.nbytes)

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Sets bytes of its memory."""
        buffer, at = self._place(pointer)
        self.memory.fill(buffer, at, size, np.array([byte], np.uint8))

    def event(self) -> EmulatedEvent:
        """A new event."""
        return EmulatedEvent(self)

    def synchronize(self, stream: int) -> None:
        """Waits for what is done."""

    def check_process(self) -> None:
        """It works in any."""

    def is_current(self) -> bool:
        """Whether it is the calling thread's."""
        return True

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the calling thread's."""
        yield

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._starts, start)
        self._ends[start] = start + size

    def _place(self, pointer: int) -> tuple[Buffer, int]:
        """The reserved memory that a pointer points into, and where."""
        for each in self.reserved:
            if each.pointer <= pointer < each.pointer + each.size:
                return each.buffer, pointer - each.pointer
        raise AssertionError(f"{pointer:#x} was not reserved")

    def _end(self, pointer: int) -> int:
        """Of the piece that a pointer points into."""
        place = bisect.bisect_right(self._starts, pointer)
        return self._ends[self._starts[place - 1]]

    def _binding(self, pointer: int, writable: bool) -> Binding:
        if pointer == 0:
            return Binding(self._nothing.address, 0, writable)
        return Binding(pointer, self._end(pointer) - pointer, writable)

    def run(self, kernel: EmulatedKernel, launch: EmulatedLaunch) -> None:
        """One kernel, after all that came before."""
        export = kernel.export
        ran = Launch(
            kernel=export.kernel,
            workgroup_count=launch.workgroups,
            workgroup_size=export.threads,
            subgroup_size=kernel.executor.subgroup_size(export.kernel),
            shared_bytes=export.shared_bytes,
            constants=tuple(launch.constants),
            bindings=tuple(map(self._binding, launch.pointers, export.writable)),
        )
        self.launches.append(ran)
        self.memory.barrier()
        self.memory.begin(ran)
        kernel.executor.run(ran, self.memory)


@dataclass(frozen=True)
class EmulatedKernel:
    """As `gpu_driver.LoadedKernel`."""

    driver: EmulatedDriver
    executor: Executor
    export: Export

    def launch(self, workgroups: tuple[int, int, int], constants: Sequence[int]) -> EmulatedLaunch:
        """A launch that lacks its pointers and its stream."""
        return EmulatedLaunch(self, workgroups, constants)


@dataclass
class EmulatedLaunch:
    """As `gpu_driver.DriverLaunch`."""

    kernel: EmulatedKernel
    workgroups: tuple[int, int, int]
    constants: Sequence[int]
    pointers: Sequence[int] = ()

    def fill(self, pointers: Sequence[int]) -> None:
        """Sets the arguments."""
        self.pointers = tuple(pointers)

    def stay(self) -> None:
        """Notes that its kernel is to stay."""
        self.kernel.driver.staying.add(self.kernel.export.kernel)

    def run(self, stream: int) -> None:
        """Runs it."""
        self.kernel.driver.run(self.kernel, self)


@dataclass(frozen=True)
class EmulatedGraph:
    """As `gpu_driver.Graph`."""

    driver: EmulatedDriver
    kernels: tuple[EmulatedKernel, ...]

    def run(self, launches: Sequence[EmulatedLaunch], stream: int) -> None:
        """Runs them."""
        assert tuple(launch.kernel for launch in launches) == self.kernels
        self.driver.graphs += 1
        for launch in launches:
            launch.run(stream)
