"""Shared memory (LDS) of workgroups: who touched it since which barrier, and copies into it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes
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
        self._stride = -(-nbytes // WIDEST) * WIDEST
        self._data = np.full(workgroups * self._stride, POISON, np.uint8)
        self._cells = Cells(workgroups * self._stride)
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
        check_written(written, lanes + self._first_lane, addresses, "shared memory")
        now = self._now[lanes][:, None]
        self._check_race(written, now, lanes, addresses, "reads what was written by")
        mine = self._with_readers(cells.read[at], now, lanes)
        cells.read[at] = mine
        # Of lanes that read a cell at once, only one has left its stamp.
        seen = cells.read[at]
        if (differs := seen != mine).any():
            cells.read[at[differs]] = (mine & ~_WHO | self._several(seen, mine, lanes))[differs]
        return gather(self._data, offsets, nbytes, alignment)

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
        scatter(self._data, offsets, values, alignment)

    def load_of(self, workgroups: Lanes, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
        """As `load`, from the memory of other workgroups; ``clusters.Cluster`` finds the races."""
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes, workgroups)
        self._check_under_way(at, lanes, addresses, "is read")
        check_written(self._cells.write[at], lanes + self._first_lane, addresses, "shared memory")
        return gather(self._data, offsets, nbytes, nbytes)

    def store_of(self, workgroups: Lanes, lanes: Lanes, addresses: Lanes, values: Bytes) -> None:
        """As `store`, to the memory of other workgroups; ``clusters.Cluster`` finds the races."""
        nbytes = values.shape[1]
        offsets, at = self._locate(lanes, addresses, nbytes, nbytes, workgroups)
        self._check_under_way(at, lanes, addresses, "is written")
        self._note_write_of_another(at)
        scatter(self._data, offsets, values, nbytes)

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
        scatter(self._data, offsets, values, nbytes)

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
                scatter(self._data, offsets, copy.values[done], nbytes)
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
        check_alignment(addresses, alignment, lanes + self._first_lane, "shared memory")
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
