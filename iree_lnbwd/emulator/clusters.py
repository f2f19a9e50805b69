"""Clusters: workgroups that reach each other's shared memory (PTX, since sm_90).

A thread that has passed as many ordered barriers of its cluster as another is in the same *epoch*.
Nothing but such a barrier orders loads and stores of two workgroups. So two accesses to a cell race
if they are in one epoch, one of them comes from another workgroup, and one of them writes.

A barrier is ordered if all threads come to it with `arrive` or `arrive.release`. After one that
some come to with `arrive.relaxed`, all have begun, but none of their accesses is ordered.

A workgroup is known to have begun once its cluster has met, and its memory is gone when it ends. So
there is a barrier before the first access of another workgroup to its memory, and an ordered one
after the last. What `st.async` writes has an order of its own (`mbarriers.Mbarriers`).

Source: PTX ISA, "barrier.cluster", "mapa", "Cluster of CTAs"; CUDA C++ Programming Guide,
"Distributed Shared Memory".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Fault, Lanes
from iree_lnbwd.emulator.order import Order

MOST_WORKGROUPS = 8  # of a cluster, on every GPU that has them
_CELL = 4  # bytes: the narrowest access to another workgroup's memory
_WINDOW_BITS = 24  # of an address in one workgroup's memory, in that of a cluster
_NEVER = -1


def address_of(addresses: Lanes, ranks: Lanes) -> Lanes:
    """Where a cluster has bytes of the shared memory of its workgroup of a rank (``mapa``)."""
    return (ranks + 1 << _WINDOW_BITS) | addresses


class Cluster:
    """How far the threads of some clusters are, and who touched whose shared memory when.

    Lanes count from the first thread of the first of these workgroups.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        size: int,
        workgroups: int,
        threads: int,
        first_lane: int = 0,
        order: Order | None = None,
    ) -> None:
        """Workgroups that have just begun.

        Args:
            nbytes: Of shared memory, of a workgroup.
            size: Workgroups of a cluster.
            workgroups: How many there are: whole clusters.
            threads: Of a workgroup.
            first_lane: What lane 0 is in the launch, for messages.
            order: Is told of ordered barriers, if it is followed.
        """
        self._size, self._threads, self._first_lane = size, threads, first_lane
        self._nbytes, self._cells = nbytes, -(-nbytes // _CELL)
        count = self.cells = workgroups * self._cells
        # The epoch of the last access to each cell of a kind.
        self._last = {
            (access, where): np.full(count, _NEVER, np.int64)
            for access in ("read", "write")
            for where in ("own", "another's")
        }
        self._arrived = np.zeros(workgroups * threads, np.int64)  # times
        self._passed = np.zeros(workgroups * threads, np.int64)
        self._epochs = np.zeros(workgroups * threads, np.int64)  # ordered ones that it has passed
        self._came_ordered = np.zeros(workgroups * threads, np.bool_)  # to the last one
        # Of two barriers in turn, for each cluster: threads may come to the next one while others
        # have yet to leave the last one.
        barriers = workgroups // size * 2
        self._number = np.zeros(barriers, np.int64)
        self._is_ordered = np.zeros(barriers, np.bool_)
        self._order = order
        self._told = None if order is None else order.messages(barriers)
        self._reached = np.full(workgroups, _NEVER, np.int64)  # from another one, in which epoch

    def rank(self, lanes: Lanes) -> Lanes:
        """The rank of each thread's workgroup in its cluster."""
        return lanes // self._threads % self._size

    def locate(self, lanes: Lanes, addresses: Lanes) -> tuple[Lanes, Lanes]:
        """The workgroup whose memory each address is in, and where in it.

        Raises:
            Fault: The cluster has no such workgroup.
        """
        ranks = (addresses >> _WINDOW_BITS) - 1
        own = lanes // self._threads
        if (wild := ranks >= self._size).any():
            raise self._fault(
                f"rank {ranks[wild][0]} of a cluster of {self._size} workgroups", lanes[wild]
            )
        workgroups = np.where(ranks < 0, own, own - self.rank(lanes) + ranks)
        return workgroups, addresses & ((1 << _WINDOW_BITS) - 1)

    def arrived(self, lanes: Lanes) -> Lanes:
        """How many barriers of its cluster each thread has come to."""
        return self._arrived[lanes]

    def passed(self, lanes: Lanes) -> Lanes:
        """How many barriers of its cluster each thread has waited for."""
        return self._passed[lanes]

    def arrive(self, lanes: Lanes, *, ordered: bool) -> None:
        """Threads come to the barrier of their cluster, and do not wait yet.

        Args:
            lanes: The threads.
            ordered: What they did before is to be ordered before what others do after the barrier.

        Raises:
            Fault: They did so before, and have not waited since.
        """
        self._check_arrived(lanes, 0, "arrives at the cluster's barrier twice")
        self._arrived[lanes] += 1
        self._came_ordered[lanes] = ordered
        barriers = self._barriers(lanes)
        first = barriers[self._number[barriers] != self._arrived[lanes]]
        self._number[barriers] = self._arrived[lanes]
        self._is_ordered[first] = True
        if not ordered:
            self._is_ordered[barriers] = False
        if self._order is not None and self._told is not None:
            self._told[first] = 0
            if ordered:
                self._order.release(self._told, barriers, lanes)

    def passes(
        self, lanes: Lanes, alive: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_], Lanes]:
        """Which of the threads that wait need not: all others of their cluster have arrived.

        Returns:
            Whether each thread passes; those that pass an ordered barrier.

        Raises:
            Fault: A thread waits that has not arrived.
        """
        self._check_arrived(lanes, 1, "waits for a cluster's barrier that it has not come to")
        passed = self.may_pass(lanes, alive)
        self._passed[lanes[passed]] += 1
        ordered = lanes[passed & self._is_ordered[self._barriers(lanes)]]
        self._epochs[ordered] += 1
        if self._order is not None and self._told is not None:
            self._order.acquire(self._told, self._barriers(ordered), ordered)
        return passed, ordered

    def may_pass(self, lanes: Lanes, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """As `passes`, of threads that go on waiting."""
        most = np.iinfo(np.int64).max
        of_cluster = np.where(alive, self._arrived, most).reshape(-1, self._size * self._threads)
        least = of_cluster.min(axis=1)
        may: npt.NDArray[np.bool_] = (
            least[lanes // (self._size * self._threads)] >= self._arrived[lanes]
        )
        return may

    def note(
        self, lanes: Lanes, workgroups: Lanes, addresses: Lanes, nbytes: int, *, writes: bool
    ) -> None:
        """Threads touch shared memory, their own workgroup's or another's of their cluster.

        Accesses that are out of bounds are the memory's to tell.

        Raises:
            Fault: A race; or they have come to a barrier and not waited; or nothing says that the
                other workgroup has begun.
        """
        inside = self.inside(addresses, nbytes)
        lanes, workgroups, addresses = lanes[inside], workgroups[inside], addresses[inside]
        own = workgroups == lanes // self._threads
        self._check_may_touch(lanes, own)
        epochs = self._epochs[lanes]
        at = self.cells_of(workgroups, addresses, nbytes)
        for where, part in (("own", own), ("another's", ~own)):
            if not part.any():
                continue
            if writes and where == "another's":
                self._check_apart(at[part], lanes[part])
            against = [("write", "another's")]
            if writes:
                against.append(("read", "another's"))
            if where == "another's":
                against += [("write", "own"), *([("read", "own")] if writes else [])]
            self._check_races(against, at[part], lanes[part], addresses[part])
            self._last["write" if writes else "read", where][at[part]] = epochs[part, None]
        np.maximum.at(self._reached, workgroups[~own], epochs[~own])

    def check_send(self, lanes: Lanes, workgroups: Lanes, addresses: Lanes, nbytes: int) -> None:
        """Expects that threads may send bytes (``st.async``), as far as it is told here.

        Raises:
            Fault: As of `note`, but for accesses of the workgroup whose memory it is.
        """
        self._check_may_touch(lanes, workgroups == lanes // self._threads)
        at = self.cells_of(workgroups, addresses, nbytes)
        self._check_apart(at, lanes)
        against = [("write", "another's"), ("read", "another's")]
        self._check_races(against, at, lanes, addresses)

    def inside(self, addresses: Lanes, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which accesses are within the bounds of a workgroup's memory."""
        inside: npt.NDArray[np.bool_] = (addresses >= 0) & (addresses + nbytes <= self._nbytes)
        return inside

    def cells_of(self, workgroups: Lanes, addresses: Lanes, nbytes: int) -> Lanes:
        """The cells of accesses that are in bounds, of `cells` in all: [T, cells of one]."""
        first = workgroups * self._cells + addresses // _CELL
        return first[:, None] + np.arange(-(-nbytes // _CELL))

    def end(self, lanes: Lanes) -> None:
        """Threads end.

        Raises:
            Fault: Since they met the others last, one of them has touched their memory.
        """
        if (late := self._reached[lanes // self._threads] >= self._epochs[lanes]).any():
            raise self._fault(
                "a workgroup ends, and no barrier of its cluster since another touched its memory",
                lanes[late],
            )

    def check_lives(self, lanes: Lanes, workgroups: Lanes, alive: npt.NDArray[np.bool_]) -> None:
        """Expects workgroups not all of whose threads have ended.

        Raises:
            Fault: Of one, all have.
        """
        lives = np.logical_or.reduce(alive.reshape(-1, self._threads), axis=1)
        if (gone := ~lives[workgroups]).any():
            raise self._fault("shared memory of a workgroup that has ended", lanes[gone])

    def check_there(self, lanes: Lanes, workgroups: Lanes, alive: npt.NDArray[np.bool_]) -> None:
        """Expects workgroups none of whose threads has ended.

        Raises:
            Fault: One has.
        """
        there = np.logical_and.reduce(alive.reshape(-1, self._threads), axis=1)
        if (gone := ~there[workgroups]).any():
            raise self._fault("shared memory of a workgroup that has ended", lanes[gone])

    def _barriers(self, lanes: Lanes) -> Lanes:
        """The one that each thread came to last."""
        return lanes // (self._size * self._threads) * 2 + self._arrived[lanes] % 2

    def _check_may_touch(self, lanes: Lanes, own: npt.NDArray[np.bool_]) -> None:
        """Threads may touch shared memory now: their own workgroup's, or another's."""
        ordered = lanes[self._came_ordered[lanes]]
        self._check_arrived(
            ordered, 0, "touches shared memory between coming to a barrier and waiting"
        )
        if (early := ~own & (self._passed[lanes] == 0)).any():
            raise self._fault(
                "another workgroup's memory before a barrier of the cluster: it may not have begun",
                lanes[early],
            )

    def _check_apart(self, at: Lanes, lanes: Lanes) -> None:
        if np.unique(at).size < at.size:
            raise self._fault("two threads write at once to one place", lanes)

    def _check_races(
        self, against: list[tuple[str, str]], at: Lanes, lanes: Lanes, addresses: Lanes
    ) -> None:
        for access, whose in against:
            races = self._last[access, whose][at] == self._epochs[lanes][:, None]
            if races.any():
                row = int(np.flatnonzero(races.any(axis=1))[0])
                raise self._fault(
                    f"race in shared memory at byte {addresses[row]} with another "
                    "workgroup: no barrier of the cluster came between",
                    lanes[row : row + 1],
                )

    def _fault(self, what: str, lanes: Lanes) -> Fault:
        return Fault(what, lanes + self._first_lane)

    def _check_arrived(self, lanes: Lanes, times: int, what: str) -> None:
        if (wrong := self._arrived[lanes] - self._passed[lanes] != times).any():
            raise self._fault(f"a thread {what}", lanes[wrong])
