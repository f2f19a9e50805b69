"""Just enough of the FlatBuffers format to read the executables in a module.

https://flatbuffers.dev/internals/: offsets are relative to where they stand; a table begins with
the distance back to its vtable, which has the place of each field.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table inside a buffer; fields go by their number in the schema."""

    buffer: bytes
    start: int

    @classmethod
    def root(cls, buffer: bytes) -> Table:
        """The table that a buffer is about."""
        return cls(buffer, _uint(buffer, 0, 4))

    def uint(self, field: int, size: int = 4) -> int:
        """A number; 0 where the field is absent."""
        at = self._field(field)
        return 0 if at is None else _uint(self.buffer, at, size)

    def struct(self, field: int, count: int) -> tuple[int, ...]:
        """The 32-bit numbers of a struct; zeros where it is absent."""
        at = self._field(field)
        if at is None:
            return (0,) * count
        return tuple(_uint(self.buffer, at + 4 * i, 4) for i in range(count))

    def bytes(self, field: int) -> bytes:
        """A string or a vector of bytes."""
        at = self._vector(field)
        if at is None:
            return b""
        return self.buffer[at + 4 : at + 4 + _uint(self.buffer, at, 4)]

    def uints(self, field: int, size: int) -> tuple[int, ...]:
        """A vector of numbers."""
        data = self._items(field, size)
        return tuple(_uint(self.buffer, at, size) for at in data)

    def tables(self, field: int) -> tuple[Table, ...]:
        """A vector of tables."""
        return tuple(
            Table(self.buffer, at + _uint(self.buffer, at, 4)) for at in self._items(field, 4)
        )

    def _items(self, field: int, size: int) -> range:
        at = self._vector(field)
        if at is None:
            return range(0)
        return range(at + 4, at + 4 + size * _uint(self.buffer, at, 4), size)

    def _vector(self, field: int) -> int | None:
        at = self._field(field)
        return None if at is None else at + _uint(self.buffer, at, 4)

    def _field(self, field: int) -> int | None:
        distance = int.from_bytes(self.buffer[self.start : self.start + 4], "little", signed=True)
        vtable = self.start - distance
        place = 4 + 2 * field
        if place >= _uint(self.buffer, vtable, 2):
            return None
        offset = _uint(self.buffer, vtable + place, 2)
        return self.start + offset if offset else None


def _uint(buffer: bytes, at: int, size: int) -> int:
    return int.from_bytes(buffer[at : at + size], "little")
