"""Global and shared memory that detect errors which hardware hides.

Besides their bytes, both keep who last wrote and who last read each *cell*. A cell has as many
neighbouring bytes as the narrowest access so far. From this they find reads of bytes that were
never written, and races:

* global memory: two threads of one launch (or of launches that no barrier of the host separates)
  touch a cell, one of them writes, and no barrier of their workgroup came between.
* shared memory: two threads of a workgroup touch a cell, one of them writes, and no barrier came
  between that both take part in: of the workgroup, of a group of its subgroups, or of a subgroup.
  (Bulk copies are ordered by mbarriers as well; see `SharedMemory.copy_in_bulk`.)

Accesses are arrays over the lanes that take part; other lanes are not in them. Values are bytes,
because memory does not know types; view them as the type that they have.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes, Launch

_GUARD_BYTES = 1 << 20  # between buffers, so that a near miss hits nothing
_FIRST_ADDRESS = 1 << 32  # no 32-bit number is an address
_BASE_ALIGNMENT = 256
_WIDEST = 16  # bytes of one access, and of a cell before a narrower access came
# Bytes of buffers with their stamps, 1 to 16 for each byte. A program that asks for more than a GPU
# has gets a fault, and does not exhaust the machine's memory.
_CAPACITY = 4 << 30
_AT_ONCE = 1 << 30  # of the registers, shared and local memory of the workgroups that run together
_PIECE = 1 << 24  # bytes that the host moves at once
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF  # what memory holds before anything was written: NaN in every float type

Stamps = npt.NDArray[np.int64]

# A stamp of global memory: the launch, the barriers that the workgroup has passed, and who. There
# is no launch 0: stamp 0 means never written, and 1 means written by the host.
_LAUNCH = 1 << 44
_PASSED_BITS = 24
_ANYONE = (1 << _PASSED_BITS) - 1  # several threads of several workgroups
_FIRST_WORKGROUP = 1 << 23  # "several threads of workgroup w" is this plus w
_HOST = 1
_MOST_LAUNCHES = 1 << 18
_MOST_PASSED = (_LAUNCH >> _PASSED_BITS) - 1


class _Cells:
    """A stamp of the last write and of the last read for each cell of a piece of memory."""

    def __init__(
        self, nbytes: int, *, written: int = 0, claim: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Cells of the widest access.

        Args:
            nbytes: Of the memory.
            written: The stamp of the last write.
            claim: Is told how many bytes more the stamps take before they do.
        """
        self.size = _WIDEST
        self._claim = claim
        count = -(-nbytes // _WIDEST)
        self.write = np.full(count, written, np.int64)
        self.read = np.zeros(count, np.int64)

    @property
    def nbytes(self) -> int:
        """Of all stamps."""
        return self.write.nbytes + self.read.nbytes

    def index(self, offsets: Lanes, nbytes: int, alignment: int) -> Lanes:
        """The cells of each access: [T, cells of one access]."""
        unit = min(nbytes & -nbytes, alignment)
        if unit < self.size:
            finer = self.size // unit
            self._claim((finer - 1) * self.nbytes)
            self.write, self.read = np.repeat(self.write, finer), np.repeat(self.read, finer)
            self.size = unit
        first = (offsets // self.size)[:, None]
        count = nbytes // self.size
        return first if count == 1 else first + np.arange(count)


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
    _cells: _Cells
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
        padded = -(-nbytes // _WIDEST) * _WIDEST

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
            _cells=_Cells(padded, written=0 if data is None else _HOST, claim=claim),
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
        ends = offset | data.size | _WIDEST
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
        buffer._data, buffer._cells, buffer._windows = buffer._data[:0].copy(), _Cells(0), []

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
            _check_alignment(offsets, alignment, who, buffer.name)
            _check_windows(buffer, offsets, nbytes, who, write=False)
            cells = buffer._cells
            if any(writable for _, _, writable in buffer._windows):
                at = cells.index(offsets, nbytes, alignment)
                self._note_reads(buffer, at, who, offsets)
            elif not cells.write.all():
                at = cells.index(offsets, nbytes, alignment)
                _check_written(cells.write[at], who, offsets, buffer.name)
            result[part] = _gather(buffer._data, offsets, nbytes, alignment)
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
            _check_alignment(offsets, alignment, who, buffer.name)
            _check_windows(buffer, offsets, nbytes, who, write=True)
            at = buffer._cells.index(offsets, nbytes, alignment)
            self._note_writes(buffer, at, who, offsets)
            _scatter(buffer._data, offsets, values[part], alignment)

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
        _check_written(written, lanes, offsets, buffer.name)
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


def workgroups_at_once(shared_bytes: int, thread_bytes: int, threads: int) -> int:
    """How many workgroups may run together, so that they need little memory.

    Args:
        shared_bytes: Shared memory of one workgroup.
        thread_bytes: Registers and local memory of a thread, with the notes on them.
        threads: Threads of a workgroup.

    Raises:
        Fault: Not even one may run.
    """
    needed = (1 + 2 * 8) * shared_bytes + thread_bytes * threads  # stamps, where cells are bytes
    if needed > _AT_ONCE:
        raise Fault(
            f"a workgroup with {shared_bytes} bytes of shared memory and {threads} threads of "
            f"{thread_bytes} takes {needed}, the emulator has {_AT_ONCE}"
        )
    return _AT_ONCE // max(1, needed)


# A stamp of shared memory: the epochs of the workgroup, of the group and of the subgroup, and who.
# Each epoch counts from the last barrier of the next wider set of threads.
_EPOCH_BITS, _GROUP_EPOCH_BITS, _SUBGROUP_EPOCH_BITS = 46, 30, 12
_MOST_EPOCHS = {
    _EPOCH_BITS: (1 << 63 - _EPOCH_BITS) - 1,
    _GROUP_EPOCH_BITS: (1 << _EPOCH_BITS - _GROUP_EPOCH_BITS) - 1,
    _SUBGROUP_EPOCH_BITS: (1 << _GROUP_EPOCH_BITS - _SUBGROUP_EPOCH_BITS) - 1,
}
_EPOCH = 1 << _EPOCH_BITS  # barriers that the workgroup has passed
# The stamp of a write by another workgroup, or by a bulk copy: it is in no epoch of this one.
_BY_ANOTHER = 1
_WHO = (
    1 << _SUBGROUP_EPOCH_BITS
) - 1  # a thread, or several of one subgroup, of one group, or of several
_SEVERAL = _WHO
_FIRST_SUBGROUP = 1 << 10  # "several of subgroup s" is this plus s
_FIRST_GROUP = 1 << 11  # "several of group g" is this plus g
_NO_GROUP = -1
_NO_FENCE = -1  # in place of the stamp of a fence


@dataclass
class _Copy:
    """Asynchronous copies of one instruction, for the lanes whose copy is under way."""

    lanes: Lanes
    offsets: Lanes
    values: Bytes
    groups: Lanes


class SharedMemory:
    """The shared memory (LDS) of some workgroups, each with its own.

    Lanes count from the first thread of the first of these workgroups; addresses from 0 in each
    workgroup's memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        workgroups: int,
        threads: int,
        subgroup_size: int,
        first_lane: int = 0,
        has_bulk_copies: bool = False,
    ) -> None:
        """Memory that was never written.

        Args:
            nbytes: Bytes of one workgroup.
            workgroups: The number of workgroups.
            threads: Threads of one workgroup.
            subgroup_size: Threads that run in step.
            first_lane: What lane 0 is in the launch, for messages.
            has_bulk_copies: `copy_in_bulk` may come, so fences between stores and it are followed.
        """
        self.nbytes = nbytes
        self._threads = threads
        self._subgroup_size = subgroup_size
        self._subgroups = -(-threads // subgroup_size)
        self._first_lane = first_lane
        self._stride = -(-nbytes // _WIDEST) * _WIDEST
        self._data = np.full(workgroups * self._stride, POISON, np.uint8)
        self._cells = _Cells(workgroups * self._stride)
        lanes = np.arange(workgroups * threads)
        self._base = lanes // threads * self._stride
        thread = lanes % threads
        self._now: Stamps = _EPOCH + thread
        who = np.full(_WHO + 1, -1)
        who[:threads] = np.arange(threads) // subgroup_size
        who[_FIRST_SUBGROUP : _FIRST_SUBGROUP + self._subgroups] = np.arange(self._subgroups)
        self._subgroup_of_who = who
        self._group = np.full(workgroups * threads, _NO_GROUP)  # of each lane
        self._copies: list[_Copy] = []
        self._under_way = np.zeros(0, np.bool_)  # cells that an asynchronous copy will write
        self._committed = np.zeros(workgroups * threads, np.int64)
        # Of cells that a lane of the workgroup wrote last: the stamp of its first fence since.
        self._has_bulk_copies = has_bulk_copies
        self._fenced = np.zeros(0, np.int64)

    def load(
        self, lanes: Lanes, addresses: Lanes, nbytes: int, *, alignment: int | None = None
    ) -> Bytes:
        """Each lane reads ``nbytes`` neighbouring bytes: [T, nbytes].

        Args:
            lanes: The threads that read: [T].
            addresses: Where, in their workgroup's memory: [T].
            nbytes: 1 to 16.
            alignment: That addresses must have; None: as much as ``nbytes``.

        Raises:
            Fault: Out of bounds, misaligned, never written, still being copied, or a race.
        """
        alignment = nbytes if alignment is None else alignment
        offsets, at = self._locate(lanes, addresses, nbytes, alignment)
        cells = self._cells
        self._check_under_way(at, lanes, addresses, "is read")
        written = cells.write[at]
        _check_written(written, lanes + self._first_lane, addresses, "shared memory")
        now = self._now[lanes][:, None]
        self._check_race(written, now, lanes, addresses, "reads what was written by")
        mine = self._with_readers(cells.read[at], now, lanes)
        cells.read[at] = mine
        # Of lanes that read a cell at once, only one has left its stamp.
        seen = cells.read[at]
        if (differs := seen != mine).any():
            cells.read[at[differs]] = (mine & ~_WHO | self._several(seen, mine, lanes))[differs]
        return _gather(self._data, offsets, nbytes, alignment)

    def store(
        self, lanes: Lanes, addresses: Lanes, values: Bytes, *, alignment: int | None = None
    ) -> None:
        """Each lane writes neighbouring bytes: [T, nbytes].

        Raises:
            Fault: Out of bounds, misaligned, still being copied to, or a race.
        """
        nbytes = values.shape[1]
        alignment = nbytes if alignment is None else alignment
        offsets, at = self._locate(lanes, addresses, nbytes, alignment)
        self._check_under_way(at, lanes, addresses, "is written")
        self._note_writes(at, lanes, addresses)
        _scatter(self._data, offsets, values, alignment)

    def load_of(self, workgroups: Lanes, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
        """As `load`, from the memory of other workgroups; ``clusters.Cluster`` finds the races."""
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes, workgroups)
        self._check_under_way(at, lanes, addresses, "is read")
        _check_written(self._cells.write[at], lanes + self._first_lane, addresses, "shared memory")
        return _gather(self._data, offsets, nbytes, nbytes)

    def store_of(self, workgroups: Lanes, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """As `store`, to the memory of other workgroups; ``clusters.Cluster`` finds the races."""
        nbytes = values.shape[1]
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes, workgroups)
        self._check_under_way(at, lanes, addresses, "is written")
        self._note_write_of_another(at)
        _scatter(self._data, offsets, values, nbytes)

    def copy_in_bulk(self, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """Each lane's bulk copy writes bytes, which ``mbarriers.Mbarriers`` follows: [T, nbytes].

        That does not tell the lanes of a subgroup apart, and knows of no proxies. So here is found:

        * another lane of the subgroup has touched the bytes, and no barrier came since.
        * a lane has stored to them, and then made no fence that comes before the copy.

        Raises:
            Fault: As of a store; or one of these.
        """
        nbytes = values.shape[1]
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes)
        self._check_under_way(at, lanes, addresses, "is copied to again")
        cells = self._cells
        for stamps in (cells.write[at], cells.read[at]):
            if (racing := self._unmet(stamps, lanes).any(axis=1)).any():
                raise Fault(
                    f"race in shared memory at byte {addresses[racing][0]}: a bulk copy writes "
                    "what another thread of the subgroup touches, with no barrier between",
                    lanes[racing] + self._first_lane,
                )
        fences = self._fenced[at]
        missing: npt.NDArray[np.bool_] = (fences == _NO_FENCE) | self._unmet(fences, lanes)
        if (early := missing.any(axis=1)).any():
            raise Fault(
                f"a bulk copy to byte {addresses[early][0]} of shared memory, to which a thread "
                "has stored: no fence.proxy.async of that thread came between",
                lanes[early] + self._first_lane,
            )
        self._note_write_of_another(at)
        _scatter(self._data, offsets, values, nbytes)

    def fence(self, lanes: Lanes) -> tuple[Lanes, Lanes, int]:
        """What these lanes have stored comes before later bulk copies (fence.proxy.async).

        Returns:
            The lanes of stores that no fence came after until now, their addresses, and how many
            bytes each of them has.
        """
        stored = np.flatnonzero(self._fenced == _NO_FENCE)
        workgroups, addresses = np.divmod(stored * self._cells.size, max(1, self._stride))
        by = workgroups * self._threads + (self._cells.write[stored] & _WHO)
        fences = np.zeros(self._now.size, np.bool_)
        fences[lanes] = True
        own = fences[by]
        self._fenced[stored[own]] = self._now[by[own]]
        return by[own], addresses[own], self._cells.size

    def unmet(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> npt.NDArray[np.bool_]:
        """Whether another lane of its subgroup wrote, and no barrier came since: of each lane."""
        _, at = self._locate(lanes, addresses, nbytes, nbytes)
        unmet: npt.NDArray[np.bool_] = np.logical_or.reduce(
            self._unmet(self._cells.write[at], lanes), axis=1
        )
        return unmet

    def check(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> None:
        """Expects aligned addresses in bounds of a workgroup's memory.

        Raises:
            Fault: One is not.
        """
        self._expect(lanes, addresses, nbytes, nbytes)

    def cluster_barrier(self, lanes: Lanes) -> None:
        """These lanes have met all others of their cluster, and their accesses are ordered."""
        self._begin_epoch(lanes, _EPOCH_BITS)

    def barrier(self, workgroups: Lanes) -> None:
        """All threads of these workgroups have met, so their earlier accesses are ordered."""
        lanes = workgroups[:, None] * self._threads + np.arange(self._threads)
        self._begin_epoch(lanes.reshape(-1), _EPOCH_BITS)

    def group_barrier(self, lanes: Lanes, groups: Lanes) -> None:
        """These lanes, whole groups of subgroups that have a barrier of their own, have met.

        Args:
            lanes: The threads: [T].
            groups: The number of each one's barrier: [T].

        Raises:
            Fault: A thread has met others before, at another barrier than this.
        """
        strange = (self._group[lanes] != groups) & (self._group[lanes] != _NO_GROUP)
        if strange.any():
            raise Fault(
                f"barrier {groups[strange][0]}, after one at barrier "
                f"{self._group[lanes[strange][0]]}: what orders what is not followed",
                lanes[strange] + self._first_lane,
            )
        self._group[lanes] = groups
        self._begin_epoch(lanes, _GROUP_EPOCH_BITS)

    def subgroup_barrier(self, lanes: Lanes) -> None:
        """These lanes, whole subgroups but for those that exited, have met."""
        self._begin_epoch(lanes, _SUBGROUP_EPOCH_BITS)

    def _begin_epoch(self, lanes: Lanes, bits: int) -> None:
        """From now on, accesses of these lanes are in another epoch of the given kind."""
        epoch = (self._now[lanes] >> bits) + 1
        most = _MOST_EPOCHS[bits]
        if (full := epoch & most == 0).any():
            raise Fault(
                f"more than {most} barriers, with none of more threads between",
                lanes[full] + self._first_lane,
            )
        self._now[lanes] = (epoch << bits) + lanes % self._threads

    def copy_async(self, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """Each lane starts a copy of bytes into shared memory: [T, nbytes].

        The bytes arrive when the lane waits for the copy's group; until then nobody may touch them.

        Raises:
            Fault: As of a store.
        """
        nbytes = values.shape[1]
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes)
        self._check_under_way(at, lanes, addresses, "is copied to again")
        self._note_writes(at, lanes, addresses)
        self._under_way[at] = True
        self._copies.append(_Copy(lanes, offsets, values, self._committed[lanes]))

    def commit(self, lanes: Lanes) -> None:
        """Each lane closes its group: the copies it started since the last one."""
        self._committed[lanes] += 1

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Each lane waits until at most ``pending`` of its groups are under way."""
        self._finish(lanes, self._committed[lanes] - pending)

    def wait_all(self, lanes: Lanes) -> None:
        """Each lane waits for all its copies, also of the group that is open."""
        self._finish(lanes, self._committed[lanes] + 1)

    def _finish(self, lanes: Lanes, before: Lanes) -> None:
        """Copies of the lanes' groups below ``before`` arrive."""
        limit = np.zeros_like(self._committed)
        limit[lanes] = before
        remaining = []
        for copy in self._copies:
            done = copy.groups < limit[copy.lanes]
            if done.any():
                nbytes = copy.values.shape[1]
                offsets, who = copy.offsets[done], copy.lanes[done]
                at = self._index(offsets, nbytes, nbytes)
                self._under_way[at] = False
                self._note_store(at, self._now[who][:, None])
                _scatter(self._data, offsets, copy.values[done], nbytes)
            if not done.all():
                left = ~done
                remaining.append(
                    _Copy(
                        copy.lanes[left], copy.offsets[left], copy.values[left], copy.groups[left]
                    )
                )
        self._copies = remaining

    def _locate(
        self,
        lanes: Lanes,
        addresses: Lanes,
        nbytes: int,
        alignment: int,
        workgroups: Lanes | None = None,
    ) -> tuple[Lanes, Lanes]:
        """Offsets in the memory of all workgroups, and cells, of accesses that are in bounds."""
        self._expect(lanes, addresses, nbytes, alignment)
        base = self._base[lanes] if workgroups is None else workgroups * self._stride
        offsets = addresses + base
        return offsets, self._index(offsets, nbytes, alignment)

    def _expect(self, lanes: Lanes, addresses: Lanes, nbytes: int, alignment: int) -> None:
        _check_alignment(addresses, alignment, lanes + self._first_lane, "shared memory")
        outside = (addresses < 0) | (addresses + nbytes > self.nbytes)
        if outside.any():
            raise Fault(
                f"byte {addresses[outside][0]} is out of bounds of shared memory, which has "
                f"{self.nbytes}",
                lanes[outside] + self._first_lane,
            )

    def _index(self, offsets: Lanes, nbytes: int, alignment: int) -> Lanes:
        at = self._cells.index(offsets, nbytes, alignment)
        if (count := len(self._cells.write)) != len(self._under_way):
            self._under_way = _of_finer_cells(self._under_way, count)
            if self._has_bulk_copies:
                self._fenced = _of_finer_cells(self._fenced, count)
        return at

    def _note_writes(self, at: Lanes, lanes: Lanes, addresses: Lanes) -> None:
        cells = self._cells
        now = self._now[lanes][:, None]
        self._check_race(cells.write[at], now, lanes, addresses, "writes what was written by")
        self._check_race(cells.read[at], now, lanes, addresses, "writes what was read by")
        self._note_store(at, now)
        self._check_race(cells.write[at], now, lanes, addresses, "writes at once with")

    def _note_store(self, at: Lanes, now: Stamps) -> None:
        self._cells.write[at] = now
        if self._has_bulk_copies:
            self._fenced[at] = _NO_FENCE

    def _note_write_of_another(self, at: Lanes) -> None:
        self._cells.write[at] = _BY_ANOTHER
        if self._has_bulk_copies:
            self._fenced[at] = 0

    def _with_readers(self, before: Stamps, now: Stamps, lanes: Lanes) -> Stamps:
        """The stamps of cells that are read again."""
        same_epoch = before >> _EPOCH_BITS == now >> _EPOCH_BITS
        if not same_epoch.any():
            return np.broadcast_to(now, before.shape)
        again = (before & _WHO) == (now & _WHO)
        several = now & ~_WHO | self._several(before, now, lanes)
        return np.where(same_epoch & ~again, several, now)

    def _several(self, before: Stamps, now: Stamps, lanes: Lanes) -> Stamps:
        """The stamp's "who" for several threads: of one subgroup, of one group, or of several."""
        subgroup, group = self._subgroup_of_who[now & _WHO], self._group_of(now, lanes)
        one_subgroup = (subgroup >= 0) & (self._subgroup_of_who[before & _WHO] == subgroup)
        one_group = (group >= 0) & (self._group_of(before, lanes) == group)
        wider = np.where(one_group, _FIRST_GROUP + group, _SEVERAL)
        return np.where(one_subgroup, _FIRST_SUBGROUP + subgroup, wider)

    def _group_of(self, stamps: Stamps, lanes: Lanes) -> Lanes:
        """The group that left a stamp, as far as it was one, in the workgroup of each lane."""
        who = stamps & _WHO
        subgroup = self._subgroup_of_who[who]
        first = (lanes // self._threads * self._threads)[:, None] + subgroup * self._subgroup_size
        several = np.where(who == _SEVERAL, _NO_GROUP, who - _FIRST_GROUP)
        return np.where(subgroup >= 0, self._group[first], several)

    def _check_race(
        self, before: Stamps, now: Stamps, lanes: Lanes, addresses: Lanes, how: str
    ) -> None:
        """Nothing orders the access that left a stamp and this one, of another thread."""
        racing = (before >> _EPOCH_BITS == now >> _EPOCH_BITS) & (before & _WHO != now & _WHO)
        if not racing.any():
            return
        subgroups = self._subgroup_of_who[before & _WHO], self._subgroup_of_who[now & _WHO]
        racing &= ~_ordered(before, now, *subgroups, _SUBGROUP_EPOCH_BITS)
        if not racing.any():
            return
        groups = self._group_of(before, lanes), self._group_of(now, lanes)
        racing &= ~_ordered(before, now, *groups, _GROUP_EPOCH_BITS)
        if not racing.any():
            return
        row, column = np.argwhere(racing)[0]
        lane = int(lanes[row])
        who = int(before[row, column]) & _WHO
        several = who >= _FIRST_SUBGROUP
        other = lane // self._threads * self._threads + who
        raise Fault(
            f"race in shared memory at byte {addresses[row]}: the first thread {how} "
            f"{'others' if several else 'the second'}, with no barrier between",
            [n + self._first_lane for n in ([lane] if several else [lane, other])],
        )

    def _unmet(self, before: Stamps, lanes: Lanes) -> npt.NDArray[np.bool_]:
        """Which stamps are of other lanes of a lane's subgroup, and no barrier came since."""
        now = self._now[lanes][:, None]
        subgroups = self._subgroup_of_who[before & _WHO], self._subgroup_of_who[now & _WHO]
        unmet: npt.NDArray[np.bool_] = (
            (before >> _SUBGROUP_EPOCH_BITS == now >> _SUBGROUP_EPOCH_BITS)
            & (subgroups[0] == subgroups[1])
            & (before & _WHO != now & _WHO)
        )
        return unmet

    def _check_under_way(self, at: Lanes, lanes: Lanes, addresses: Lanes, how: str) -> None:
        if self._copies and (hit := self._under_way[at].any(axis=1)).any():
            raise Fault(
                f"byte {addresses[hit][0]} of shared memory {how} while an asynchronous copy to it "
                "is under way",
                lanes[hit] + self._first_lane,
            )


def _of_finer_cells(notes: Array, count: int) -> Array:
    """Notes on cells that were divided into so many; on none before, nothing."""
    return np.repeat(notes, count // notes.size) if notes.size else np.zeros(count, notes.dtype)


def _ordered(before: Stamps, now: Stamps, theirs: Lanes, ours: Lanes, bits: int) -> Array:
    """Both are of one subgroup (or group), which has met at a barrier between the two."""
    met: Array = (ours >= 0) & (theirs == ours) & (before >> bits < now >> bits)
    return met


class LocalMemory:
    """Each lane's own memory: spilled registers and arrays."""

    def __init__(self, nbytes: int, *, lanes: int, first_lane: int = 0) -> None:
        """Memory that was never written: ``nbytes`` for each lane."""
        self._nbytes = nbytes
        self._first_lane = first_lane
        self._data = np.full((lanes, nbytes), POISON, np.uint8)
        self._written = np.zeros((lanes, nbytes), np.bool_)

    def load(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
        """Each lane reads ``nbytes`` neighbouring bytes of its own: [T, nbytes].

        Raises:
            Fault: Out of bounds, misaligned or never written.
        """
        at = self._locate(lanes, addresses, nbytes)
        written = self._written[lanes[:, None], at]
        _check_written(written, lanes + self._first_lane, addresses, "local memory")
        return self._data[lanes[:, None], at]

    def store(self, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """Each lane writes neighbouring bytes of its own: [T, nbytes].

        Raises:
            Fault: Out of bounds or misaligned.
        """
        at = self._locate(lanes, addresses, values.shape[1])
        self._data[lanes[:, None], at] = values
        self._written[lanes[:, None], at] = True

    def _locate(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> Lanes:
        _check_alignment(addresses, nbytes, lanes + self._first_lane, "local memory")
        outside = (addresses < 0) | (addresses + nbytes > self._nbytes)
        if outside.any():
            raise Fault(
                f"byte {addresses[outside][0]} is out of bounds of local memory, which has "
                f"{self._nbytes}",
                lanes[outside] + self._first_lane,
            )
        return addresses[:, None] + np.arange(nbytes)


def _check_alignment(offsets: Lanes, alignment: int, lanes: Lanes, name: str) -> None:
    if (wrong := offsets & (alignment - 1)).any():
        first = np.flatnonzero(wrong)
        raise Fault(
            f"misaligned: byte {offsets[first[0]]} of {name}, expected a multiple of {alignment}",
            lanes[first],
        )


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


def _check_written(stamps: Array, lanes: Lanes, offsets: Lanes, name: str) -> None:
    if not stamps.all():
        missing = ~stamps.all(axis=1)
        raise Fault(
            f"a read of {name} at byte {offsets[missing][0]}, which nobody wrote", lanes[missing]
        )


def _gather(data: Bytes, offsets: Lanes, nbytes: int, alignment: int) -> Bytes:
    words, index = _words(data, offsets, nbytes, alignment)
    return words[index].view(np.uint8).reshape(len(offsets), nbytes)


def _scatter(data: Bytes, offsets: Lanes, values: Bytes, alignment: int) -> None:
    words, index = _words(data, offsets, values.shape[1], alignment)
    words[index] = np.ascontiguousarray(values).view(words.dtype).reshape(index.shape)


def _words(data: Bytes, offsets: Lanes, nbytes: int, alignment: int) -> tuple[Array, Lanes]:
    """Memory in the widest words that accesses are made of, and the words of each: [T, words]."""
    unit = min(nbytes & -nbytes, alignment, max(_WORDS))
    words = data.view(_WORDS[unit])
    first = (offsets // unit)[:, None]
    return words, first if nbytes == unit else first + np.arange(nbytes // unit)
