"""What a module's host program asks of the CPU: its own bytecode, interpreted by the emulator."""

from __future__ import annotations

from collections.abc import Mapping

from iree_lnbwd import NormSpec
from iree_lnbwd.emulator.hal import Hal, Span, View, _Loaded, _text
from iree_lnbwd.emulator.launch import Launch, Unknown
from iree_lnbwd.emulator.memory import GlobalMemory
from iree_lnbwd.emulator.module import ELEMENT_TYPES
from iree_lnbwd.emulator.vm import Program, Steps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime.host_library import PLAIN, HostLibraries
from iree_lnbwd.vmfb.executables import Export


class _Nothing:
    """Runs no kernel: what a host program asks for does not depend on results."""

    def subgroup_size(self, kernel: str) -> int:
        return 1

    def unknown(self, launch: Launch) -> list[Unknown]:
        return []

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        pass


class _HostHal(Hal):
    """A CPU that has every feature."""

    def __init__(self, libraries: HostLibraries) -> None:
        super().__init__(GlobalMemory(), "embedded-elf-x86_64", lambda *_: _Nothing(), Steps())
        self._libraries = libraries

    def _query(self, device: Hal, category: bytes, key: bytes) -> tuple[int, int]:
        match _text(category), _text(key):
            case "hal.device.id", pattern:
                return 1, int(pattern.startswith("local"))
            case (("hal.executable.format" | "hal.cpu"), _):
                return 1, 1
        return 0, 0

    def _create_executable(
        self, device: Hal, affinity: int, name: bytes, data: bytes, constants: bytes | None
    ) -> _Loaded:
        assert not constants
        found = [
            Export(name, PLAIN, 0, (True,) * kernel.bindings, kernel.constants, b"")
            for name, kernel in self._libraries.kernels.items()
        ]
        return _Loaded(tuple(found), {b"": _Nothing()})


def dispatches(vmfb: bytes, spec: NormSpec, rows: int) -> tuple[list[Launch], Mapping[str, int]]:
    """What the public function dispatches for M rows, and where its arguments are, by name."""
    hal = _HostHal(HostLibraries(vmfb))
    program = Program(vmfb, hal.imports, Steps())
    views = {}
    for argument in spec.arguments:
        dtype, shape = DTYPES[argument.dtype].numpy, argument.dims(rows)
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        span = Span(hal.memory.allocate(argument.name, nbytes), 0, nbytes)
        views[argument.name] = View(span, ELEMENT_TYPES[dtype.name], shape)
    program.call(spec.op, *views.values())
    return hal.launches, {name: view.span.address for name, view in views.items()}
