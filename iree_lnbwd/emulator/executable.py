"""The executables inside a module: the kernels' code, and what their launches need.

Source of the layouts: IREE, runtime/src/iree/schemas/cuda_executable_def.fbs and
hip_executable_def.fbs (they have the same fields).
"""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.emulator.flatbuffer import Table
from iree_lnbwd.emulator.launch import Dim3

_FORMATS = {b"CDA1": "cuda-nvptx-fb", b"HIP1": "rocm-hsaco-fb"}
_READ_ONLY = 1
_HEADER_BYTES = 64  # iree_flatbuffer_file_header_t: the identifier again, a version, the length


@dataclass(frozen=True)
class Export:
    """A kernel as the host sees it.

    Attributes:
        name: Of the kernel.
        code: Which of the executable's codes it is in.
        workgroup_size: Threads along x, y, z.
        shared_bytes: Dynamic shared memory of a workgroup.
        constants: How many 32-bit push constants it takes.
        writable: Of each binding, whether the kernel may write to it.
    """

    name: str
    code: int
    workgroup_size: Dim3
    shared_bytes: int
    constants: int
    writable: tuple[bool, ...]


@dataclass(frozen=True)
class Executable:
    """Kernels that were compiled together.

    Attributes:
        format: IREE's name: "cuda-nvptx-fb" or "rocm-hsaco-fb".
        exports: The kernels.
        codes: PTX text, or AMD code objects.
    """

    format: str
    exports: tuple[Export, ...]
    codes: tuple[bytes, ...]


def read(data: bytes) -> Executable:
    """An executable from the bytes that the host program creates it from.

    Raises:
        ValueError: It is of a format that is not known.
    """
    start = next((i for i in (_HEADER_BYTES, 0) if data[i + 4 : i + 8] in _FORMATS), None)
    if start is None:
        raise ValueError(f"executable: expected one of {list(_FORMATS)}, got {data[:8]!r}")
    root = Table.root(data[start:])
    exports = []
    for table in root.tables(0):
        x, y, z = table.struct(2, 3)
        exports.append(
            Export(
                name=table.bytes(1).decode(),
                code=table.uint(0),
                workgroup_size=(x, y, z),
                shared_bytes=table.uint(3),
                constants=table.uint(4),
                writable=tuple(not flags & _READ_ONLY for flags in table.uints(5, 8)),
            )
        )
    codes = tuple(table.bytes(0) for table in root.tables(1))
    return Executable(_FORMATS[data[start + 4 : start + 8]], tuple(exports), codes)
