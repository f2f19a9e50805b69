"""The metadata of a code object on the launches of its kernels.

Source: LLVM's AMDGPU guide, "Code Object V5 Metadata"; the MessagePack specification.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from iree_lnbwd.emulator.launch import Dim3, Fault

_OWNER, _METADATA = b"AMDGPU\0", 32  # NT_AMDGPU_METADATA
_DEEPEST = 8  # tables inside each other


class Metadata(NamedTuple):
    """Of one kernel.

    Attributes:
        max_threads: Of a workgroup, at most; 0 where it does not say.
        required_size: Of a workgroup, exactly; zeros where it does not say.
    """

    max_threads: int = 0
    required_size: Dim3 = (0, 0, 0)


def of_kernels(notes: bytes) -> dict[str, Metadata]:
    """From the notes of a code object, by the names of the kernels.

    Raises:
        Fault: They are damaged.
    """
    at = 0
    while at < len(notes):
        owner, length, kind = struct.unpack_from("<III", notes, at)
        content = at + 12 + _padded(owner)
        if notes[at + 12 : at + 12 + owner] == _OWNER and kind == _METADATA:
            root = _Reader(notes[content : content + length]).value()
            return {str(kernel[".name"]): _of_kernel(kernel) for kernel in root["amdhsa.kernels"]}
        at = content + _padded(length)
    return {}


def _of_kernel(kernel: dict[str, Any]) -> Metadata:
    x, y, z = kernel.get(".reqd_workgroup_size", (0, 0, 0))
    return Metadata(
        int(kernel.get(".max_flat_workgroup_size", 0)),
        (int(x), int(y), int(z)),
    )


def _padded(length: int) -> int:
    return -(-length // 4) * 4


class _Reader:
    """MessagePack, of the types that metadata has."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self, depth: int = 0) -> Any:
        """The next value, with all that is in it."""
        tag = self._number(1)
        if tag <= 0x7F:
            return tag
        if tag <= 0x8F or tag in (0xDE, 0xDF):
            count = tag & 15 if tag <= 0x8F else self._number(2 << tag - 0xDE)
            items = self._items(2 * count, depth)
            return dict(zip(items[::2], items[1::2], strict=True))
        if tag <= 0x9F or tag in (0xDC, 0xDD):
            return self._items(tag & 15 if tag <= 0x9F else self._number(2 << tag - 0xDC), depth)
        if tag <= 0xBF or tag in (0xD9, 0xDA, 0xDB):
            length = tag & 31 if tag <= 0xBF else self._number(1 << tag - 0xD9)
            return self._bytes(length).decode()
        if tag in (0xC2, 0xC3):
            return tag == 0xC3
        if 0xCC <= tag <= 0xCF:
            return self._number(1 << tag - 0xCC)
        raise Fault(f"a code object whose metadata has the MessagePack tag {tag:#x}")

    def _items(self, count: int, depth: int) -> list[Any]:
        if depth == _DEEPEST or count > len(self._data) - self._at:
            raise Fault(f"a code object whose metadata has {count} items inside {depth} others")
        return [self.value(depth + 1) for _ in range(count)]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "big")

    def _bytes(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise Fault("a code object whose metadata ends early")
        self._at += count
        return taken
