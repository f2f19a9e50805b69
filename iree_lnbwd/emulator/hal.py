"""The GPU that a host program uses: buffers, command buffers and dispatches, on emulated memory.

The functions of IREE's HAL module (compiler/src/iree/compiler/Dialect/HAL/hal.imports.mlir), as far
as host programs of kernels use them. Each request is carried out at once, in the program's order,
so fences are always reached. Dispatches of a command buffer without a barrier between them are
checked as if they ran side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from iree_lnbwd.emulator.executor import Executor
from iree_lnbwd.emulator.launch import Binding, Bytes, Launch
from iree_lnbwd.emulator.memory import Buffer, GlobalMemory
from iree_lnbwd.emulator.vm import Imports, Steps, VmError
from iree_lnbwd.vmfb.executables import Export, exports_of_executable

_WHOLE = (1 << 64) - 1  # a length that means "to the end"
_MOVED_IN_STEP, _READ_IN_STEP = 1 << 16, 1 << 5  # bytes that the host moves, and of code
_DRIVERS = {"cuda-nvptx-fb": "cuda", "rocm-hsaco-fb": "hip"}

# iree/hal/buffer_view.h, iree_hal_element_type_t: a class, what it is of that class, and its bits.
_CLASS, _BITS, _INTEGERS = 28, (1 << 24) - 1, 1

# Makes the executor of an executable's code in one format, e.g. "cuda-nvptx-fb".
MakeExecutor = Callable[[str, bytes], Executor]


@dataclass(frozen=True, eq=False)
class Span:
    """A piece of a buffer: HAL's buffer."""

    buffer: Buffer
    offset: int
    length: int

    def part(self, offset: int, length: int) -> Span:
        """A piece of the piece.

        Raises:
            VmError: It is out of bounds.
        """
        length = self.length - offset if length == _WHOLE else length
        if offset > self.length or offset + length > self.length:
            raise VmError(
                f"bytes {offset} to {offset + length} of a piece of {self.buffer.name} that has "
                f"{self.length}"
            )
        return Span(self.buffer, self.offset + offset, length)

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.buffer.address + self.offset


@dataclass(frozen=True, eq=False)
class View:
    """A piece of a buffer with a shape: HAL's buffer view."""

    span: Span
    element_type: int
    shape: tuple[int, ...]


@dataclass(eq=False)
class _Loaded:
    exports: tuple[Export, ...]
    executors: dict[bytes, Executor]  # by code


@dataclass(eq=False)
class _Commands:
    """A command buffer; buffers that are given at execution are slots of a table."""

    recorded: list[Callable[[Sequence[Span]], None]] = field(default_factory=list)


class Hal:
    """One emulated device.

    Attributes:
        memory: Its memory.
        launches: Every dispatch so far.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        executable_format: str,
        make_executor: MakeExecutor,
        steps: Steps,
        progress: Callable[[Launch], None] = lambda launch: None,
    ) -> None:
        """A device that takes executables of one format.

        Args:
            memory: Its memory.
            executable_format: E.g. "cuda-nvptx-fb".
            make_executor: Makes the executor of a code.
            steps: The host program's steps; commands take some of them.
            progress: Is called with every dispatch before it runs.
        """
        self.memory = memory
        self.launches: list[Launch] = []
        self._format = executable_format
        self._make_executor = make_executor
        self._steps = steps
        self._progress = progress
        self._transients = 0

    @property
    def imports(self) -> Imports:
        """HAL's functions by name."""
        none = _nothing
        return {
            "hal.allocator.allocate": lambda _a, _q, _t, _u, size: self._allocate(size),
            "hal.buffer.assert": self._assert_buffer,
            "hal.buffer.length": lambda span: span.length,
            "hal.buffer.load": self._load,
            "hal.buffer.subspan": lambda span, offset, length: span.part(offset, length),
            "hal.buffer.allocation.preserve": none,
            "hal.buffer.allocation.discard": lambda _: 0,
            "hal.buffer.allocation.is_terminal": lambda _: 0,
            "hal.buffer_view.assert": self._assert_view,
            "hal.buffer_view.buffer": lambda view: view.span,
            "hal.buffer_view.create": self._create_view,
            "hal.buffer_view.dim": lambda view, index: view.shape[index],
            "hal.buffer_view.element_type": lambda view: view.element_type,
            "hal.buffer_view.rank": lambda view: len(view.shape),
            "hal.command_buffer.create": lambda *_: _Commands(),
            "hal.command_buffer.finalize": none,
            "hal.command_buffer.begin_debug_group": none,
            "hal.command_buffer.end_debug_group": none,
            "hal.command_buffer.advise_buffer": none,
            "hal.command_buffer.execution_barrier": self._record_barrier,
            "hal.command_buffer.dispatch": self._record_dispatch,
            "hal.command_buffer.fill_buffer": self._record_fill,
            "hal.command_buffer.copy_buffer": self._record_copy,
            "hal.command_buffer.update_buffer": self._record_update,
            "hal.device.allocator": lambda device: device,
            "hal.device.query.i64": self._query,
            "hal.device.queue.alloca": lambda *arguments: self._allocate(arguments[7]),
            "hal.device.queue.dealloca": lambda *arguments: self._release(arguments[4]),
            "hal.device.queue.fill": lambda *a: self._fill(a[4].part(a[5], a[6]), a[7], a[8]),
            "hal.device.queue.copy": lambda *a: self._copy(
                a[4].part(a[5], a[8]), a[6].part(a[7], a[8])
            ),
            "hal.device.queue.update": lambda *a: self._update(a[4], a[5], a[6].part(a[7], a[8])),
            "hal.device.queue.barrier": none,
            "hal.device.queue.flush": none,
            "hal.device.queue.execute": lambda *arguments: self._execute(arguments[4], []),
            "hal.device.queue.execute.indirect": lambda *arguments: self._execute(
                arguments[4], [span.part(offset, length) for span, offset, length in arguments[6]]
            ),
            "hal.devices.count": lambda: 1,
            "hal.devices.get": lambda index: self if index == 0 else None,
            "hal.executable.create": self._create_executable,
            "hal.executable.lookup.function": self._look_up,
            "hal.fence.create": lambda *_: object(),
            "hal.fence.join": lambda *_: object(),
            "hal.fence.query": lambda _: 0,
            "hal.fence.signal": none,
            "hal.fence.await": lambda *_: 0,
        }

    def _query(self, device: Hal, category: bytes, key: bytes) -> tuple[int, int]:
        """The answer to a query about the device, and whether the query is known."""
        match _text(category), _text(key):
            case "hal.device.id", pattern:
                return 1, int(pattern.rstrip("*") == _DRIVERS[self._format])
            case "hal.executable.format", name:
                return 1, int(name == self._format)
        return 0, 0

    def _create_executable(
        self, device: Hal, affinity: int, name: bytes, data: bytes, constants: bytes | None
    ) -> _Loaded:
        if constants:
            raise VmError("executables with specialization constants are not known")
        self._steps.take(len(data) // _READ_IN_STEP)
        exports = exports_of_executable(data)
        codes = {export.code for export in exports}
        return _Loaded(exports, {code: self._make_executor(_text(name), code) for code in codes})

    def _look_up(self, loaded: _Loaded, name: bytes) -> int:
        names = [export.kernel for export in loaded.exports]
        if _text(name) not in names:
            raise VmError(f"no kernel {_text(name)}; the executable has {', '.join(names)}")
        return names.index(_text(name))

    def _allocate(self, size: int) -> Span:
        self._transients += 1
        return Span(self.memory.allocate(f"transient {self._transients}", size), 0, size)

    def _release(self, span: Span) -> None:
        self.memory.release(span.buffer)

    def _assert_buffer(
        self, span: Span, message: bytes, _allocator: Hal, minimum: int, _types: int, _usage: int
    ) -> None:
        if span.length < minimum:
            raise VmError(f"{_text(message)}: {span.length} bytes, expected {minimum} or more")

    def _assert_view(
        self, view: View, message: bytes, element_type: int, encoding: int, shape: list[int]
    ) -> None:
        if view.shape != tuple(shape) or not _is_like(view.element_type, element_type):
            raise VmError(
                f"{_text(message)}: expected shape {tuple(shape)} of type {element_type:#x}, got "
                f"{view.shape} of type {view.element_type:#x}"
            )

    def _create_view(
        self, span: Span, offset: int, length: int, element_type: int, _e: int, shape: list[int]
    ) -> View:
        return View(span.part(offset, length), element_type, tuple(shape))

    def _load(self, span: Span, offset: int, length: int) -> int:
        part = span.part(offset, length)
        return int.from_bytes(
            self.memory.read(part.buffer, part.offset, length).tobytes(), "little"
        )

    def _record_barrier(self, commands: _Commands, *_: int) -> None:
        commands.recorded.append(lambda table: self.memory.barrier())

    def _record_dispatch(
        self,
        commands: _Commands,
        loaded: _Loaded,
        function: int,
        x: int,
        y: int,
        z: int,
        flags: int,
        constants: list[int],
        bindings: list[tuple[int, int, Span | None, int, int]],
    ) -> None:
        export = loaded.exports[function]
        executor = loaded.executors[export.code]

        def dispatch(table: Sequence[Span]) -> None:
            spans = [_resolve(span, slot, table).part(at, n) for _, slot, span, at, n in bindings]
            self._dispatch(export, executor, (x, y, z), constants, spans)

        commands.recorded.append(dispatch)

    def _record_fill(
        self,
        commands: _Commands,
        target: Span | None,
        offset: int,
        length: int,
        slot: int,
        pattern: int,
        width: int,
        flags: int,
    ) -> None:
        commands.recorded.append(
            lambda table: self._fill(
                _resolve(target, slot, table).part(offset, length), pattern, width
            )
        )

    def _record_copy(
        self,
        commands: _Commands,
        source_slot: int,
        target_slot: int,
        source: Span | None,
        source_offset: int,
        target: Span | None,
        target_offset: int,
        length: int,
        flags: int,
    ) -> None:
        commands.recorded.append(
            lambda table: self._copy(
                _resolve(source, source_slot, table).part(source_offset, length),
                _resolve(target, target_slot, table).part(target_offset, length),
            )
        )

    def _record_update(
        self,
        commands: _Commands,
        source: bytes,
        source_offset: int,
        target: Span | None,
        target_offset: int,
        length: int,
        slot: int,
        flags: int,
    ) -> None:
        commands.recorded.append(
            lambda table: self._update(
                source, source_offset, _resolve(target, slot, table).part(target_offset, length)
            )
        )

    def _execute(self, commands: _Commands, table: Sequence[Span]) -> None:
        self.memory.barrier()
        for command in commands.recorded:
            self._steps.take()
            command(table)

    def _dispatch(
        self,
        export: Export,
        executor: Executor,
        counts: tuple[int, int, int],
        constants: list[int],
        spans: list[Span],
    ) -> None:
        if len(constants) != export.constants or len(spans) != export.bindings:
            raise VmError(
                f"{export.kernel}: {len(constants)} constants and {len(spans)} bindings, expected "
                f"{export.constants} and {export.bindings}"
            )
        launch = Launch(
            kernel=export.kernel,
            workgroup_count=counts,
            workgroup_size=export.threads,
            subgroup_size=executor.subgroup_size(export.kernel),
            shared_bytes=export.shared_bytes,
            constants=tuple(constants),
            bindings=tuple(
                Binding(span.address, span.length, writable)
                for span, writable in zip(spans, export.writable, strict=True)
            ),
        )
        self.launches.append(launch)
        self._progress(launch)
        self.memory.begin(launch)
        executor.run(launch, self.memory)

    def _fill(self, target: Span, pattern: int, width: int) -> None:
        if width not in (1, 2, 4, 8) or target.length % width:
            raise VmError(f"a fill of {target.length} bytes with a pattern of {width}")
        self._steps.take(target.length // _MOVED_IN_STEP)
        unit = np.frombuffer(pattern.to_bytes(8, "little")[:width], np.uint8)
        self.memory.fill(target.buffer, target.offset, target.length, unit)

    def _copy(self, source: Span, target: Span) -> None:
        self._steps.take(target.length // _MOVED_IN_STEP)
        data = self.memory.read(source.buffer, source.offset, source.length)
        self.memory.write(target.buffer, target.offset, data)

    def _update(self, source: bytes, offset: int, target: Span) -> None:
        if offset + target.length > len(source):
            raise VmError(
                f"an update with bytes {offset} to {offset + target.length} of {len(source)}"
            )
        data: Bytes = np.frombuffer(source[offset : offset + target.length], np.uint8)
        self.memory.write(target.buffer, target.offset, data)


def _is_like(element_type: int, expected: int) -> bool:
    """Whether types are equal; integers of one width are, signed or not, as in IREE's runtime."""
    both_integers = element_type >> _CLASS == expected >> _CLASS == _INTEGERS
    mask = _BITS if both_integers else ~0
    return element_type & mask == expected & mask


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _nothing(*_: object) -> None:
    """A function that has nothing to do here."""


def _resolve(span: Span | None, slot: int, table: Sequence[Span]) -> Span:
    """A buffer, or the one in its slot of the table that came with the execution."""
    return table[slot] if span is None else span
