"""Global memory: named buffers, who touched them when, and which launches are ordered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes, Launch
from iree_lnbwd.emulator.memory.cells import (
    POISON,
    WIDEST,
    Cells,
    Stamps,
    check_alignment,
    check_written,
    gather,
    scatter,
)

_GUARD_BYTES = 1 << 20  # between buffers, so that a near miss hits nothing
_FIRST_ADDRESS = 1 << 32  # no 32-bit number is an address
_BASE_ALIGNMENT = 256
# Bytes of buffers with their stamps, 1 to 16 for each byte. A program that asks for more than a GPU
# has gets a fault, and does not exhaust the machine's memory.
_CAPACITY = 4 << 30
_PIECE = 1 << 24  # bytes that the host moves at once

# A stamp of global memory: the launch, the barriers that the workgroup has passed, and who. There
# is no launch 0: stamp 0 means never written, and 1 means written by the host.
_LAUNCH = 1 << 44
_PASSED_BITS = 24
_ANYONE = (1 << _PASSED_BITS) - 1  # several threads of several workgroups
# Any thread, by an atomic access: several threads of a workgroup leave less than 2^22 of those.
_ATOMICALLY = _ANYONE - 1
_FIRST_WORKGROUP = 1 << 23  # "several threads of workgroup w" is this plus w
_HOST = 1
_MOST_LAUNCHES = 1 << 18
_MOST_PASSED = (_LAUNCH >> _PASSED_BITS) - 1


@dataclass(eq=False)
class Buffer:
    """An allocation in global memory.

    Attributes:
        name: For messages.
        address: Of its first byte.
        nbytes: Its length.
        write_once: It is an output: no byte may be written twice.
        released: The host has freed it.
        constant: It is part of the code: any kernel may read it.
    """

    name: str
    address: int
    nbytes: int
    write_once: bool
    _data: Bytes
    _cells: Cells
    _windows: list[tuple[int, int, bool]] = field(default_factory=list)
    released: bool = False
    constant: bool = False


class GlobalMemory:
    """Named buffers in one 64-bit address space.

    Host code allocates, writes and reads buffers. Kernels load and store between `begin` and the
    next `begin`, inside the bindings of their launch.
    """

    def __init__(self, *, lockstep: bool = False) -> None:
        """Memory without buffers.

        Args:
            lockstep: The threads of a subgroup run in step, so each of their instructions is
                ordered after the ones before it. This holds on AMD GPUs. PTX does not promise it,
                but compilers for NVIDIA GPUs (IREE's among them) rely on it.
        """
        self._buffers: list[Buffer] = []  # by address
        self._bound: list[Buffer] = []  # by the launch
        self._next_address = _FIRST_ADDRESS
        self._lockstep = lockstep
        self._launch = Launch("", (0, 1, 1), (1, 1, 1), 1, 0, (), ())
        self._number = 0  # of the launch
        self._passed = np.zeros(0, np.int64)  # barriers, by workgroup
        self._ordered_before = (
            _LAUNCH  # accesses with lower stamps came before a barrier of the host
        )
        self._used = 0  # bytes, with their stamps

    def allocate(
        self, name: str, nbytes: int, *, data: Array | None = None, write_once: bool = False
    ) -> Buffer:
        """A new buffer; without ``data`` reading it is a fault until it is written.

        Args:
            name: For messages.
            nbytes: Its length; 0 is one that no access fits into.
            data: Its content, of that many bytes.
            write_once: It is an output: no byte may be written twice.

        Raises:
            Fault: There is not so much memory.
        """
        padded = -(-nbytes // WIDEST) * WIDEST

        def claim(more: int) -> None:
            if self._used + more > _CAPACITY:
                raise Fault(
                    f"no memory for {name} of {nbytes} bytes: {self._used} and {more} bytes with "
                    f"their stamps, the emulator has {_CAPACITY}"
                )
            self._used += more

        claim(2 * padded)  # as many of stamps
        content = np.full(padded, POISON, np.uint8)
        if data is not None:
            content[:nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        buffer = Buffer(
            name=name,
            address=self._next_address,
            nbytes=nbytes,
            write_once=write_once,
            _data=content,
            _cells=Cells(padded, written=0 if data is None else _HOST, claim=claim),
        )
        after = buffer.address + padded + _GUARD_BYTES
        self._next_address = -(-after // _BASE_ALIGNMENT) * _BASE_ALIGNMENT
        self._buffers.append(buffer)
        return buffer

    def constant(self, name: str, data: bytes) -> Buffer:
        """A buffer that belongs to the code; allocated once, it is the same for every launch."""
        for buffer in self._buffers:
            known = buffer._data[: buffer.nbytes].tobytes() if buffer.constant else None
            if buffer.name == name and known == data:
                return buffer
        made = self.allocate(name, len(data), data=np.frombuffer(data, np.uint8))
        made.constant = True
        made._windows = [(0, made.nbytes, False)]
        return made

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> Bytes:
        """A copy of what a buffer holds, for the host.

        Raises:
            Fault: Part of it was never written, or it is out of bounds.
        """
        self._check_host(buffer, offset, nbytes)
        count, first = 0, -1
        for start, size in _pieces(offset, nbytes):
            missing = self.unwritten(buffer, start, size)
            if missing.size and not count:
                first = int(missing[0])
            count += missing.size
        if count:
            raise Fault(
                f"{count} bytes of {buffer.name} were never written, the first at byte {first}"
            )
        return buffer._data[offset : offset + nbytes].copy()

    def write(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        """The host (a fill, a copy) writes bytes into a buffer.

        Raises:
            Fault: Out of bounds, or an output is written twice.
        """
        self._check_host(buffer, offset, data.size)
        for start, size in _pieces(0, data.size):
            self._write(buffer, offset + start, data[start : start + size])

    def fill(self, buffer: Buffer, offset: int, nbytes: int, pattern: Bytes) -> None:
        """The host fills a piece of a buffer with a pattern of 1, 2, 4 or 8 bytes.

        Raises:
            Fault: Out of bounds, or an output is written twice.
        """
        self._check_host(buffer, offset, nbytes)
        data = np.tile(pattern, -(-min(nbytes, _PIECE) // pattern.size))
        for start, size in _pieces(offset, nbytes):
            self._write(buffer, start, data[:size])

    def _write(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        ends = offset | data.size | WIDEST
        unit = ends & -ends  # the largest cells that begin and end where the data does
        at = np.arange(offset, offset + data.size, unit)
        cells = buffer._cells.index(at, unit, unit)
        if buffer.write_once and buffer._cells.write[cells].any():
            raise Fault(f"{buffer.name} is written twice at byte {offset}")
        buffer._data[offset : offset + data.size] = data
        buffer._cells.write[cells] = _HOST

    def unwritten(self, buffer: Buffer, offset: int, nbytes: int) -> Lanes:
        """Offsets in a buffer of the bytes in a range that were never written."""
        cells = buffer._cells
        at = np.flatnonzero(
            cells.write[offset // cells.size : -(-(offset + nbytes) // cells.size)] == 0
        )
        at = ((at + offset // cells.size)[:, None] * cells.size + np.arange(cells.size)).reshape(-1)
        return at[(at >= offset) & (at < offset + nbytes)]

    def release(self, buffer: Buffer) -> None:
        """The host frees a buffer; from now on nothing may touch it.

        Raises:
            Fault: It was freed before.
        """
        self._check_host(buffer, 0, 0)
        buffer.released = True
        self._used -= buffer._data.nbytes + buffer._cells.nbytes
        buffer._data, buffer._cells, buffer._windows = buffer._data[:0].copy(), Cells(0), []

    def barrier(self) -> None:
        """Later launches are ordered after all earlier ones; without it they run side by side."""
        self._ordered_before = (self._number + 1) * _LAUNCH

    def workgroup_barrier(self, workgroups: Lanes) -> None:
        """All threads of these workgroups have met, so their earlier accesses are ordered.

        Raises:
            Fault: They have met more often than can be counted.
        """
        self._passed[workgroups] += 1
        if self._passed[workgroups].max(initial=0) > _MOST_PASSED:
            raise Fault(f"more than {_MOST_PASSED} barriers of a workgroup")

    def begin(self, launch: Launch) -> None:
        """A launch begins; it may touch only its bindings.

        Raises:
            Fault: There are more threads, or launches, than can be told apart; a binding is outside
                of every buffer, or in one that was freed.
        """
        if not 0 < launch.threads <= _FIRST_WORKGROUP or launch.lanes > _FIRST_WORKGROUP:
            raise Fault(
                f"workgroups {launch.workgroup_count} of {launch.workgroup_size}: {launch.lanes} "
                f"threads, the emulator takes 1 to {_FIRST_WORKGROUP}"
            ).of(launch)
        if self._number == _MOST_LAUNCHES:
            raise Fault(f"more than {_MOST_LAUNCHES} launches").of(launch)
        self._launch = launch
        self._number += 1
        self._passed = np.zeros(launch.workgroups, np.int64)
        for buffer in self._bound:
            buffer._windows = []
        self._bound = []
        for number, binding in enumerate(launch.bindings):
            buffer = self._buffer_at(binding.address)
            start = binding.address - buffer.address
            if start + binding.nbytes > buffer.nbytes:
                raise Fault(
                    f"binding {number} ends at byte {start + binding.nbytes} of {buffer.name}, "
                    f"which has {buffer.nbytes}"
                ).of(launch)
            if buffer.released:
                raise Fault(f"binding {number} is {buffer.name}, which was given back").of(launch)
            buffer._windows.append((start, start + binding.nbytes, binding.writable))
            self._bound.append(buffer)

    def load(
        self, lanes: Lanes, addresses: Lanes, nbytes: int, *, alignment: int | None = None
    ) -> Bytes:
        """Each lane reads ``nbytes`` neighbouring bytes.

        Args:
            lanes: The threads that read, of the whole launch: [T].
            addresses: Where each reads: [T].
            nbytes: 1 to 16.
            alignment: That addresses must have; None: as much as ``nbytes``.

        Returns:
            Bytes of shape [T, nbytes].

        Raises:
            Fault: Out of bounds, misaligned, never written, or written by another thread of this
                launch.
        """
        alignment = nbytes if alignment is None else alignment
        result = np.empty((len(lanes), nbytes), np.uint8)
        for buffer, part in self._by_buffer(lanes, addresses):
            who = lanes[part]
            offsets = addresses[part] - buffer.address
            check_alignment(offsets, alignment, who, buffer.name)
            _check_windows(buffer, offsets, nbytes, who, write=False)
            cells = buffer._cells
            if any(writable for _, _, writable in buffer._windows):
                at = cells.index(offsets, nbytes, alignment)
                self._note_reads(buffer, at, who, offsets)
            elif not cells.write.all():
                at = cells.index(offsets, nbytes, alignment)
                check_written(cells.write[at], who, offsets, buffer.name)
            result[part] = gather(buffer._data, offsets, nbytes, alignment)
        return result

    def store(
        self, lanes: Lanes, addresses: Lanes, values: Bytes, *, alignment: int | None = None
    ) -> None:
        """Each lane writes neighbouring bytes.

        Args:
            lanes: The threads that write, of the whole launch: [T].
            addresses: Where each writes: [T].
            values: What: [T, nbytes], 1 to 16 bytes.
            alignment: That addresses must have; None: as much as the bytes are.

        Raises:
            Fault: Out of bounds, misaligned, read-only, written twice where that is forbidden, or
                touched by another thread of this launch.
        """
        nbytes = values.shape[1]
        alignment = nbytes if alignment is None else alignment
        for buffer, part in self._by_buffer(lanes, addresses):
            who = lanes[part]
            offsets = addresses[part] - buffer.address
            check_alignment(offsets, alignment, who, buffer.name)
            _check_windows(buffer, offsets, nbytes, who, write=True)
            at = buffer._cells.index(offsets, nbytes, alignment)
            self._note_writes(buffer, at, who, offsets)
            scatter(buffer._data, offsets, values[part], alignment)

    def load_atomic(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
        """As `load`, by relaxed accesses of a whole GPU: others may store there so at any time.

        Raises:
            Fault: As there; no race with other atomic accesses.
        """
        result = np.empty((len(lanes), nbytes), np.uint8)
        for buffer, part in self._by_buffer(lanes, addresses):
            offsets = self._atomic(buffer, lanes[part], addresses[part], nbytes, write=False)
            result[part] = gather(buffer._data, offsets, nbytes, nbytes)
        return result

    def store_atomic(self, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """As `store`, by relaxed accesses of a whole GPU; of several at once, the last stays.

        Raises:
            Fault: As there; no race with other atomic accesses.
        """
        nbytes = values.shape[1]
        for buffer, part in self._by_buffer(lanes, addresses):
            offsets = self._atomic(buffer, lanes[part], addresses[part], nbytes, write=True)
            scatter(buffer._data, offsets, values[part], nbytes)

    def change_atomic(
        self, lanes: Lanes, addresses: Lanes, nbytes: int, change: Callable[[int, Array], Array]
    ) -> Bytes:
        """Each lane in turn reads a number, and stores another in its place, relaxed.

        Args:
            lanes: The threads, of the whole launch: [T].
            addresses: Where: [T].
            nbytes: Of a number.
            change: What is there after a lane of that place in ``lanes``, for what was there: [1].

        Returns:
            Bytes of shape [T, nbytes], which were there before.

        Raises:
            Fault: As of `store_atomic`.
        """
        result = np.empty((len(lanes), nbytes), np.uint8)
        for number in range(len(lanes)):
            one = slice(number, number + 1)
            before = self.load_atomic(lanes[one], addresses[one], nbytes)
            after = change(number, before.view(f"u{nbytes}")[0])
            self.store_atomic(lanes[one], addresses[one], after.view(np.uint8)[None])
            result[one] = before
        return result

    def _atomic(
        self, buffer: Buffer, lanes: Lanes, addresses: Lanes, nbytes: int, *, write: bool
    ) -> Lanes:
        """Where atomic accesses are in a buffer; each is one that the launch may make."""
        offsets: Lanes = addresses - buffer.address
        check_alignment(offsets, nbytes, lanes, buffer.name)
        _check_windows(buffer, offsets, nbytes, lanes, write=write)
        at = buffer._cells.index(offsets, nbytes, nbytes)
        cells = buffer._cells
        now = self._stamps(lanes)
        if write and buffer.write_once and cells.write[at].any():
            raise Fault(f"{buffer.name} is written twice at byte {offsets[0]}", lanes)
        if not write:
            check_written(cells.write[at], lanes, offsets, buffer.name)
        how = "writes" if write else "reads"
        for stamps, done in ((cells.write, "written"), *([(cells.read, "read")] if write else [])):
            before = stamps[at]
            plain = np.where(before & _ANYONE == _ATOMICALLY, 0, before)
            self._check_race(
                plain, now, buffer, lanes, offsets, f"{how} atomically what was {done} by"
            )
        (cells.write if write else cells.read)[at] = now & ~_ANYONE | _ATOMICALLY
        return offsets

    def _stamps(self, lanes: Lanes) -> Stamps:
        """The stamps that accesses of these lanes leave now: [T, 1]."""
        passed = self._passed[lanes // self._launch.threads] << _PASSED_BITS
        return (self._number * _LAUNCH + passed + lanes)[:, None]

    def _workgroup_of(self, stamps: Stamps) -> Lanes:
        """The workgroup of a stamp; -1 if it is of several workgroups."""
        who = stamps & _ANYONE
        one = np.where(who < _FIRST_WORKGROUP, who // self._launch.threads, who - _FIRST_WORKGROUP)
        return np.where(who == _ANYONE, -1, one)

    def _note_reads(self, buffer: Buffer, at: Lanes, lanes: Lanes, offsets: Lanes) -> None:
        cells = buffer._cells
        now = self._stamps(lanes)
        written = cells.write[at]
        check_written(written, lanes, offsets, buffer.name)
        self._check_race(written, now, buffer, lanes, offsets, "reads what was written by")
        mine = self._with_readers(cells.read[at], now)
        cells.read[at] = mine
        # Of lanes that read a cell at once, only one has left its stamp.
        seen = cells.read[at]
        if (differs := seen != mine).any():
            workgroup = self._workgroup_of(mine)
            alike = (workgroup >= 0) & (self._workgroup_of(seen) == workgroup)
            several = mine & ~_ANYONE | _FIRST_WORKGROUP + workgroup
            cells.read[at[differs & alike]] = several[differs & alike]
            cells.read[at[differs & ~alike]] |= _ANYONE

    def _with_readers(self, before: Stamps, now: Stamps) -> Stamps:
        """The stamps of cells that are read again."""
        again = (before >= self._ordered_before) & (before & _ANYONE != now & _ANYONE)
        if not again.any():
            return np.broadcast_to(now, before.shape)
        workgroup = self._workgroup_of(now)
        alike = (before // _LAUNCH == self._number) & (self._workgroup_of(before) == workgroup)
        several = np.where(alike, _FIRST_WORKGROUP + workgroup, _ANYONE)
        return np.where(again, now & ~_ANYONE | several, now)

    def _note_writes(self, buffer: Buffer, at: Lanes, lanes: Lanes, offsets: Lanes) -> None:
        cells = buffer._cells
        now = self._stamps(lanes)
        written = cells.write[at]
        if buffer.write_once and written.any():
            twice = written.any(axis=1)
            raise Fault(f"{buffer.name} is written twice at byte {offsets[twice][0]}", lanes[twice])
        self._check_race(written, now, buffer, lanes, offsets, "writes what was written by")
        self._check_race(cells.read[at], now, buffer, lanes, offsets, "writes what was read by")
        cells.write[at] = now
        written = cells.write[at]
        if (lost := written != now).any():
            self._report(lost, written, buffer, lanes, offsets, "writes at once with")

    def _check_race(
        self, before: Stamps, now: Stamps, buffer: Buffer, lanes: Lanes, offsets: Lanes, how: str
    ) -> None:
        """Nothing orders the access that left a stamp and this one, of another thread."""
        racing = (before >= self._ordered_before) & (before & _ANYONE != now & _ANYONE)
        if not racing.any():
            return
        same_launch = before // _LAUNCH == now // _LAUNCH
        alike = same_launch & (self._workgroup_of(before) == self._workgroup_of(now))
        racing &= ~(alike & (before >> _PASSED_BITS < now >> _PASSED_BITS))
        if self._lockstep:
            size = self._launch.subgroup_size
            one = (before & _ANYONE) < _FIRST_WORKGROUP
            thread, other = ((n & _ANYONE) % self._launch.threads // size for n in (now, before))
            racing &= ~(alike & one & (thread == other))
        if racing.any():
            self._report(racing, before, buffer, lanes, offsets, how)

    def _report(
        self, racing: Array, before: Stamps, buffer: Buffer, lanes: Lanes, offsets: Lanes, how: str
    ) -> None:
        row, column = np.argwhere(racing)[0]
        stamp = int(before[row, column])
        who = stamp & _ANYONE
        named = [int(lanes[row])]
        if stamp // _LAUNCH != self._number:
            whom = "another dispatch, with no barrier between"
        elif who >= _FIRST_WORKGROUP:
            whom = "others"
        else:
            whom, named = "the second", [*named, who]
        raise Fault(
            f"race in {buffer.name} at byte {offsets[row]}: the first thread {how} {whom}", named
        )

    def _by_buffer(self, lanes: Lanes, addresses: Lanes) -> list[tuple[Buffer, slice | Lanes]]:
        """The buffers that addresses are in, each with its part of the lanes: nearly always one."""
        if not len(addresses):
            return []
        low, high = self._number_at(int(addresses.min())), self._number_at(int(addresses.max()))
        if low == high and low >= 0:
            return [(self._buffers[low], slice(None))]
        bases = [buffer.address for buffer in self._buffers]
        numbers = np.searchsorted(bases, addresses, side="right") - 1
        if (wild := numbers < 0).any():
            address = int(addresses[wild][0])
            raise Fault(f"address {address:#x} is out of bounds of every buffer", lanes[wild])
        return [(self._buffers[n], np.flatnonzero(numbers == n)) for n in np.unique(numbers)]

    def _number_at(self, address: int) -> int:
        """Of the buffer that begins nearest below an address; -1 where none does."""
        return bisect_right(self._buffers, address, key=lambda buffer: buffer.address) - 1

    def _buffer_at(self, address: int) -> Buffer:
        number = self._number_at(address)
        if number < 0 or address > (found := self._buffers[number]).address + found.nbytes:
            raise Fault(f"address {address:#x} is in no buffer")
        return found

    def _check_host(self, buffer: Buffer, offset: int, nbytes: int) -> None:
        if buffer.released:
            raise Fault(f"{buffer.name} is used, which was given back")
        if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
            raise Fault(
                f"bytes {offset} to {offset + nbytes} are out of bounds of {buffer.name}, which "
                f"has {buffer.nbytes}"
            )


def _pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each piece that is processed at once."""
    for start in range(offset, offset + nbytes, _PIECE):
        yield start, min(_PIECE, offset + nbytes - start)


def _check_windows(
    buffer: Buffer, offsets: Lanes, nbytes: int, lanes: Lanes, *, write: bool
) -> None:
    """Expects accesses that lie within one binding each, and that it allows."""
    low, high = int(offsets.min()), int(offsets.max()) + nbytes
    windows = [(start, stop) for start, stop, writable in buffer._windows if writable or not write]
    if any(start <= low and high <= stop for start, stop in windows):
        return

    def outside(of: list[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        inside = np.zeros(len(offsets), np.bool_)
        for start, stop in of:
            inside |= (offsets >= start) & (offsets + nbytes <= stop)
        return ~inside

    if not (bad := outside(windows)).any():
        return
    if write and not outside([(start, stop) for start, stop, _ in buffer._windows]).any():
        raise Fault(f"a store to read-only {buffer.name} at byte {offsets[bad][0]}", lanes[bad])
    bounds = ", ".join(f"{start} to {stop}" for start, stop in windows) or "none"
    raise Fault(
        f"out of bounds: byte {offsets[bad][0]} of {buffer.name} ({buffer.nbytes} bytes, of which "
        f"bound: {bounds})",
        lanes[bad],
    )
