"""The GPU code in a .vmfb: IREE's executables, and the kernels that each exports.

The format is IREE's ``cuda_executable_def.fbs`` and ``hip_executable_def.fbs``, which are alike: a
header of 64 bytes, then a FlatBuffer.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass

_MAGIC = {"cuda-nvptx-fb": b"CDA1", "rocm-hsaco-fb": b"HIP1"}  # by format
_HEADER_BYTES = 64
_READ_ONLY = 1


@dataclass(frozen=True)
class Export:
    """One kernel.

    Attributes:
        kernel: Its name in the code.
        threads: Threads of a workgroup, along x, y and z.
        shared_bytes: Bytes of dynamic shared memory, which the launch must provide.
        writable: Whether it may write, for each pointer that it takes.
        constants: The number of 32-bit constants that it takes, after the pointers.
        code: The image that holds it: PTX text with a final zero, or an AMD code object.
    """

    kernel: str
    threads: tuple[int, int, int]
    shared_bytes: int
    writable: tuple[bool, ...]
    constants: int
    code: bytes

    @property
    def bindings(self) -> int:
        """How many pointers it takes."""
        return len(self.writable)


def exports(vmfb: bytes, *formats: str) -> tuple[Export, ...]:
    """The kernels of all executables for GPUs in a module.

    Args:
        vmfb: The module's bytes.
        formats: The formats to read, e.g. "cuda-nvptx-fb"; if empty, all.

    Raises:
        ValueError: An executable is damaged.
    """
    wanted = [_MAGIC[name] for name in formats or _MAGIC]
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        files = [archive.read(name) for name in archive.namelist()]
    return tuple(
        export for file in files if file[:4] in wanted for export in exports_of_executable(file)
    )


def exports_of_executable(executable: bytes) -> tuple[Export, ...]:
    """The kernels of one executable.

    Raises:
        ValueError: It is damaged, or not for a GPU.
    """
    if executable[:4] not in _MAGIC.values():
        expected = ", ".join(map(repr, _MAGIC.values()))
        raise ValueError(f"executable: expected one of {expected}, got {executable[:4]!r}")
    data = executable[_HEADER_BYTES:]
    try:
        root = _Table(data, _u32(data, 0))
        images = [_with_end(table.string(0)) for table in root.tables(1)]
        return tuple(
            Export(
                kernel=table.string(1).decode(),
                threads=struct.unpack_from("<3I", data, table.field(2)),
                shared_bytes=table.u32(3),
                writable=tuple(not flags & _READ_ONLY for flags in table.u64s(5)),
                constants=table.u32(4),
                code=images[table.u32(0)],
            )
            for table in root.tables(0)
        )
    except (IndexError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"executable: damaged: {error}") from error


def _with_end(image: bytes) -> bytes:
    """CUDA takes PTX as a C string."""
    return image + b"\0"


@dataclass(frozen=True)
class _Table:
    """A table of a FlatBuffer; fields are numbered as the schema lists them."""

    data: bytes
    at: int

    def field(self, number: int) -> int:
        """The offset of a field; 0 if it has its default."""
        vtable: int = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        size, entry = _u16(self.data, vtable), 4 + 2 * number
        offset = _u16(self.data, vtable + entry) if entry < size else 0
        return self.at + offset if offset else 0

    def u32(self, number: int) -> int:
        """A number."""
        at = self.field(number)
        return _u32(self.data, at) if at else 0

    def string(self, number: int) -> bytes:
        """A string or a vector of bytes."""
        at = self._followed(number)
        return self.data[at + 4 : at + 4 + _u32(self.data, at)]

    def u64s(self, number: int) -> tuple[int, ...]:
        """A vector of numbers."""
        at = self._followed(number)
        count = _u32(self.data, at) if self.field(number) else 0
        return struct.unpack_from(f"<{count}Q", self.data, at + 4)

    def tables(self, number: int) -> list[_Table]:
        """A vector of tables."""
        at = self._followed(number)
        count = _u32(self.data, at)
        if count > len(self.data) // 4:  # before memory is allocated for so many
            raise IndexError(f"a vector of {count} tables")
        places = [at + 4 + 4 * i for i in range(count)]
        return [_Table(self.data, place + _u32(self.data, place)) for place in places]

    def _followed(self, number: int) -> int:
        at = self.field(number)
        return at + _u32(self.data, at)


def _u16(data: bytes, at: int) -> int:
    number: int = struct.unpack_from("<H", data, at)[0]
    return number


def _u32(data: bytes, at: int) -> int:
    number: int = struct.unpack_from("<I", data, at)[0]
    return number
