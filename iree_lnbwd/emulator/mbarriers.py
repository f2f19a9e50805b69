"""Barriers in shared memory (PTX mbarrier), and what completes their phases.

That is st.async, and copies in bulk (cp.async.bulk).

An mbarrier is in one phase after another. A phase is over when no arrivals are pending and as many
bytes have come as were expected (the tx-count is 0). The parity of a phase is that of its number,
from 0. A wait names a parity, and means the phase that it is in now, or the one before.

Bytes that a thread sends to a workgroup of its cluster, or copies to its own in bulk, are there
when the phase is over to which they count, and for those who know so: a thread that waited for that
phase, and whoever is ordered after it (`order.Order`). A send, or such a copy, happens after all
that its thread did before. Hence:

* Who touches bytes that were sent knows that their phase is over.
* Who sends bytes to a place knows that all who touched it before have done so.
* Who sends to a phase, or arrives in it, knows that the phase before is over; else what he does may
  count to that one.
* A phase is over only after all waits for the one before; else these might miss it, since the
  phase after has the same parity.

A bulk copy is made by another proxy than stores are. Hence a thread that has stored to a place, or
initialised an mbarrier, makes a fence before a copy to that place, or one that tells this mbarrier.

Source: PTX ISA, "mbarrier", "st.async", "fence" (mbarrier_init), "barrier.cluster",
"cp.async.bulk", "fence.proxy", "Async proxy".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.clusters import Cluster
from iree_lnbwd.emulator.launch import Fault, Lanes
from iree_lnbwd.emulator.memory import SharedMemory
from iree_lnbwd.emulator.order import Order

MOST = 64  # mbarriers of a workgroup that are followed
_NBYTES = 8  # of an mbarrier
_MOST_COUNT = (1 << 20) - 1  # of arrivals and of bytes
_NONE = -1  # no phase, no mbarrier, not waiting


def notes_on(shared_bytes: int, warps: int, size: int) -> int:
    """Bytes that it takes to follow a workgroup's shared memory and mbarriers.

    Args:
        shared_bytes: Of the workgroup.
        warps: Of it.
        size: Workgroups of a cluster.
    """
    of_cells = (warps + 4) * shared_bytes  # 4-byte cells; for each, 4 bytes a warp, and 12
    told = 4 * size * (warps + MOST)
    return of_cells + warps * told + MOST * (2 * told + 16 * warps)


class Mbarriers:
    """The mbarriers of some workgroups, and what st.async and bulk copies wrote to their memory.

    Lanes count from the first thread of the first of these workgroups. An mbarrier has a number
    among all of these workgroups.
    """

    def __init__(
        self,
        shared: SharedMemory,
        cluster: Cluster,
        order: Order,
        *,
        size: int,
        workgroups: int,
        threads: int,
        first_lane: int = 0,
    ) -> None:
        """None of them.

        Args:
            shared: The memory that they are in.
            cluster: Of these workgroups.
            order: Of their warps, with `MOST` facts for each workgroup of a cluster.
            size: Workgroups of a cluster.
            workgroups: How many there are: whole clusters.
            threads: Of a workgroup.
            first_lane: What lane 0 is in the launch, for messages.
        """
        self._shared, self._cluster, self._order = shared, cluster, order
        self._size, self._threads, self._first_lane = size, threads, first_lane
        # Workgroups have mbarriers at the same addresses, mostly.
        self._places: list[int] = []
        self._place_at = np.full(-(-shared.nbytes // _NBYTES), _NONE, np.int64)
        count = workgroups * MOST
        self._count = np.zeros(count, np.int64)  # arrivals of a phase; 0: there is no mbarrier
        self._pending = np.zeros(count, np.int64)
        self._bytes = np.zeros(count, np.int64)  # the tx-count
        self._phase = np.zeros(count, np.int64)
        self._begun_by = np.full(count, _NONE, np.int64)  # a lane
        self._begun_at = np.zeros(count, np.int64)  # in the order of its warp
        # Barriers of the cluster that this lane had come to when it made the mbarrier known.
        self._known_after = np.full(count, _NONE, np.int64)
        self._is_fenced = np.zeros(count, np.bool_)  # since it was initialised, for bulk copies
        # In the phases of each parity. What was told two phases before is no news: all who tell
        # something know that the phase between is over.
        self._told = order.messages(2 * count)
        self._sent = np.full(count, _NONE, np.int64)  # the last phase that bytes were sent to
        self._seen = np.full((count, order.warps), _NONE, np.int64)  # by each warp: a phase's end
        self._seen_at = np.zeros((count, order.warps), np.int64)  # in the warp's order
        self._waits_for = np.full(workgroups * threads, _NONE, np.int64)  # each lane: for a phase
        self._waits_at = np.zeros(workgroups * threads, np.int64)
        # Of each cell: who touched it, in the order of each warp of its workgroup, and the phase
        # that bytes were sent to it in.
        self._is_mbarrier = np.zeros(cluster.cells, np.bool_)
        self._touched = np.zeros((cluster.cells, order.warps), np.int32)
        self._sent_by = np.zeros(cluster.cells, np.int32)  # the fact that tells of its phases
        self._sent_in = np.full(cluster.cells, _NONE, np.int64)

    def initialise(self, lanes: Lanes, addresses: Lanes, counts: Lanes) -> None:
        """Each thread makes an mbarrier for so many arrivals a phase (mbarrier.init).

        Raises:
            Fault: There is one; the count or the address cannot be; a race in shared memory.
        """
        self._shared.check(lanes, addresses, _NBYTES)
        if (wrong := (counts < 1) | (counts > _MOST_COUNT)).any():
            raise self._fault(
                f"an mbarrier of {counts[wrong][0]} arrivals: expected 1 to {_MOST_COUNT}",
                lanes[wrong],
            )
        for address in np.unique(addresses):
            if self._place_at[address // _NBYTES] == _NONE:
                if len(self._places) == MOST:
                    raise self._fault(f"more than {MOST} mbarriers of a workgroup", lanes)
                self._place_at[address // _NBYTES] = len(self._places)
                self._places.append(int(address))
        workgroups = lanes // self._threads
        numbers = workgroups * MOST + self._place_at[addresses // _NBYTES]
        if (again := self._count[numbers] > 0).any() or np.unique(numbers).size < numbers.size:
            one = lanes[again] if again.any() else lanes
            raise self._fault(f"{self._name(numbers[:1])} is initialised twice", one)
        self._shared.store(lanes, addresses, np.zeros((lanes.size, _NBYTES), np.uint8))
        self._count[numbers] = self._pending[numbers] = counts
        self._begun_by[numbers] = lanes
        self._begun_at[numbers] = self._order.now(lanes)
        self._is_mbarrier[self._cluster.cells_of(workgroups, addresses, _NBYTES)] = True

    def make_known(self, lanes: Lanes) -> None:
        """Others may use the mbarriers that these threads made, after a barrier of the cluster."""
        new = np.flatnonzero((self._known_after == _NONE) & np.isin(self._begun_by, lanes))
        self._known_after[new] = self._cluster.arrived(self._begun_by[new])
        self._is_fenced[new] = True

    def fence(self, lanes: Lanes) -> None:
        """What these threads have stored and initialised comes before bulk copies that follow."""
        stored, addresses, nbytes = self._shared.fence(lanes)
        self._touch(stored, self._cluster.cells_of(stored // self._threads, addresses, nbytes))
        self._is_fenced |= np.isin(self._begun_by, lanes)

    def arrive(self, lanes: Lanes, addresses: Lanes, expected: Lanes) -> None:
        """Each thread expects so many bytes more and arrives (mbarrier.arrive.expect_tx).

        Raises:
            Fault: There is no mbarrier, or no arrival is pending; the arrival may come too early.
        """
        numbers = self._find(lanes, lanes // self._threads, addresses)
        self._check_phase(lanes, numbers, "arrives at")
        self._order.release(self._told, self._messages(numbers), lanes)
        np.subtract.at(self._pending, numbers, 1)
        if (surplus := self._pending[numbers] < 0).any():
            raise self._fault(
                f"an arrival at {self._name(numbers[surplus])}, and none is pending in its phase "
                f"{self._phase[numbers[surplus]][0]}",
                lanes[surplus],
            )
        self._add(lanes, numbers, expected)

    def send(
        self,
        lanes: Lanes,
        workgroups: Lanes,
        addresses: Lanes,
        nbytes: int,
        of: Lanes,
        mbarriers: Lanes,
        what: str = "st.async",
    ) -> None:
        """Each thread sends bytes to a workgroup of its cluster (st.async); they are in bounds.

        Args:
            lanes: The threads: [T].
            workgroups: Whose memory the bytes go to: [T].
            addresses: In it: [T].
            nbytes: Of each.
            of: The workgroup whose mbarrier is told: [T].
            mbarriers: Its address there: [T].
            what: That is, for messages.

        Raises:
            Fault: See above; there is no such mbarrier, or it does not expect them.
        """
        if (apart := workgroups != of).any():
            raise self._fault(
                "st.async to one workgroup with the mbarrier of another one", lanes[apart]
            )
        numbers = self._find(lanes, of, mbarriers)
        at = self._cluster.cells_of(workgroups, addresses, nbytes)
        self._check_no_mbarrier(lanes, addresses, at)
        self._check_phase(lanes, numbers, "sends to")
        self._check_arrived(lanes, addresses, at, "is sent again")
        ranks = self._cluster.rank(workgroups * self._threads)
        known = self._order.knows(lanes, ranks)[:, None]
        if (racing := (self._touched[at] > known).any(axis=(1, 2))).any():
            raise self._fault(
                f"race in shared memory at byte {addresses[racing][0]}: {what} writes what its "
                "workgroup may still read",
                lanes[racing],
            )
        phases = self._phase[numbers]
        self._sent_by[at], self._sent_in[at] = self._facts(numbers)[:, None], phases[:, None]
        self._sent[numbers] = phases
        self._order.release(self._told, self._messages(numbers), lanes)
        self._add(lanes, numbers, np.full(lanes.size, -nbytes))

    def copy(self, lanes: Lanes, addresses: Lanes, nbytes: int, mbarriers: Lanes) -> None:
        """Each thread copies bytes to its own workgroup (cp.async.bulk), as by `send`.

        Raises:
            Fault: As of `send`; or no fence came since the mbarrier was initialised.
        """
        own = lanes // self._threads
        numbers = self._find(lanes, own, mbarriers)
        if (hidden := ~self._is_fenced[numbers]).any():
            raise self._fault(
                f"a bulk copy tells {self._name(numbers[hidden])}: no fence.mbarrier_init or "
                "fence.proxy.async after it was initialised",
                lanes[hidden],
            )
        self.send(lanes, own, addresses, nbytes, own, mbarriers, "a bulk copy")

    def wait(self, lanes: Lanes, addresses: Lanes, parities: Lanes) -> npt.NDArray[np.bool_]:
        """Which of the threads need not wait: the phase of a parity is over (mbarrier.try_wait).

        Raises:
            Fault: There is no mbarrier; the parity is none.
        """
        numbers = self._find(lanes, lanes // self._threads, addresses)
        if (wrong := parities > 1).any():
            raise self._fault(f"a parity of {parities[wrong][0]}: expected 0 or 1", lanes[wrong])
        now = self._phase[numbers]
        meant = np.where(now % 2 == parities, now, now - 1)
        before = self._waits_for[lanes]
        meant = np.where(before == _NONE, meant, before)
        passes: npt.NDArray[np.bool_] = meant < now
        self._waits_for[lanes] = np.where(passes, _NONE, meant)
        self._waits_at[lanes] = numbers
        self._see(lanes[passes], numbers[passes], meant[passes])
        return passes

    def may_pass(self, lanes: Lanes) -> npt.NDArray[np.bool_]:
        """As `wait`, of threads that go on waiting."""
        may: npt.NDArray[np.bool_] = self._waits_for[lanes] < self._phase[self._waits_at[lanes]]
        return may

    def lacks(self, lane: int) -> str:
        """What a thread waits for at an mbarrier."""
        number = self._waits_at[lane : lane + 1]
        return f"{self._name(number)} has {self._state(number)}"

    def note(self, lanes: Lanes, workgroups: Lanes, addresses: Lanes, nbytes: int) -> None:
        """Threads touch shared memory with loads and stores, their own workgroup's or another's.

        Accesses that are out of bounds are the memory's to tell.

        Raises:
            Fault: An mbarrier is there, or bytes that may still be under way.
        """
        inside = self._cluster.inside(addresses, nbytes)
        lanes, workgroups, addresses = lanes[inside], workgroups[inside], addresses[inside]
        at = self._cluster.cells_of(workgroups, addresses, nbytes)
        self._check_no_mbarrier(lanes, addresses, at)
        self._check_arrived(lanes, addresses, at, "is touched")
        own = workgroups == lanes // self._threads
        self._touch(lanes[own], at[own])

    def end(self, lanes: Lanes, alive: npt.NDArray[np.bool_]) -> None:
        """Threads end.

        Raises:
            Fault: They are the last ones of a workgroup, to which bytes were sent or will be that
                none of its threads has waited for.
        """
        remain = alive.copy()
        remain[lanes] = False
        lives = np.logical_or.reduce(remain.reshape(-1, self._threads), axis=1)
        ended = np.unique(lanes // self._threads)
        ended = ended[~lives[ended]]
        numbers = (ended[:, None] * MOST + np.arange(len(self._places))).reshape(-1)
        unseen = self._sent[numbers] > self._seen[numbers].max(axis=1)
        if (open_ := unseen | (self._bytes[numbers] != 0)).any():
            one = numbers[open_][:1]
            last = lanes[lanes // self._threads == one[0] // MOST]
            raise self._fault(
                "a workgroup ends, and none of its threads has waited for bytes that are sent to "
                f"it: {self._name(one)} has {self._state(one)}",
                last[-1:],
            )

    def _touch(self, lanes: Lanes, at: Lanes) -> None:
        self._touched[at, self._order.warp(lanes)[:, None]] = self._order.now(lanes)[:, None]

    def _find(self, lanes: Lanes, workgroups: Lanes, addresses: Lanes) -> Lanes:
        """The numbers of mbarriers that each thread may use."""
        self._shared.check(lanes, addresses, _NBYTES)
        place = self._place_at[addresses // _NBYTES]
        numbers = workgroups * MOST + place
        if (none := (place == _NONE) | (self._count[numbers] == 0)).any():
            raise self._fault(
                f"byte {addresses[none][0]} of shared memory is no mbarrier that was initialised",
                lanes[none],
            )
        after = self._known_after[numbers]
        met = (after != _NONE) & (self._cluster.passed(lanes) > after)
        others = workgroups != lanes // self._threads
        if (unknown := others & (after == _NONE)).any():
            raise self._fault(
                "another workgroup's mbarrier: no fence.mbarrier_init after it was initialised",
                lanes[unknown],
            )
        if (early := others & ~met).any():
            raise self._fault(
                "another workgroup's mbarrier: no barrier of the cluster since it was initialised",
                lanes[early],
            )
        makers = self._begun_by[numbers]
        known = self._order.knows(lanes, self._cluster.rank(makers))
        ordered = known[np.arange(lanes.size), self._order.warp(makers)] >= self._begun_at[numbers]
        ordered &= others | ~self._shared.unmet(lanes, addresses, _NBYTES)
        if (racing := ~met & ~ordered).any():
            raise self._fault(
                f"{self._name(numbers[racing])} may not be initialised yet: no barrier came since",
                lanes[racing],
            )
        return numbers

    def _see(self, lanes: Lanes, numbers: Lanes, phases: Lanes) -> None:
        """Threads learn that phases are over, and what those say who arrived and sent in them."""
        self._order.acquire(self._told, 2 * numbers + phases % 2, lanes)
        self._order.find_out(lanes, self._facts(numbers), phases + 1)
        warps = self._order.warp(lanes)
        self._seen[numbers, warps] = phases
        self._seen_at[numbers, warps] = self._order.now(lanes)

    def _add(self, lanes: Lanes, numbers: Lanes, nbytes: Lanes) -> None:
        """Adds to the tx-counts; phases may be over then."""
        np.add.at(self._bytes, numbers, nbytes)
        if (beyond := np.abs(self._bytes[numbers]) > _MOST_COUNT).any():
            raise self._fault(
                f"{self._name(numbers[beyond])} has {self._state(numbers[beyond])}: expected at "
                f"most {_MOST_COUNT}",
                lanes[beyond],
            )
        if (surplus := (self._pending[numbers] == 0) & (self._bytes[numbers] < 0)).any():
            raise self._fault(
                f"more bytes than expected: {self._name(numbers[surplus])} has "
                f"{self._state(numbers[surplus])}",
                lanes[surplus],
            )
        over = np.unique(numbers[(self._pending[numbers] == 0) & (self._bytes[numbers] == 0)])
        if over.size:
            self._check_not_missed(lanes, over)
            self._phase[over] += 1
            self._pending[over] = self._count[over]

    def _check_not_missed(self, lanes: Lanes, numbers: Lanes) -> None:
        """Phases are over; those who waited for the ones before have seen that these are over."""
        phases = self._phase[numbers]
        of_workgroup = self._cluster.rank(numbers // MOST * self._threads) * self._order.warps
        columns = of_workgroup[:, None] + np.arange(self._order.warps)
        told = self._told[self._messages(numbers)[:, None], columns]
        missed = (self._seen[numbers] == phases[:, None] - 1) & (self._seen_at[numbers] > told)
        bad = missed.any(axis=1)
        blocked = np.flatnonzero(self._waits_for != _NONE)
        late = blocked[self._waits_for[blocked] < self._phase[self._waits_at[blocked]]]
        bad |= np.isin(numbers, self._waits_at[late])
        if bad.any():
            raise self._fault(
                f"phase {phases[bad][0]} of {self._name(numbers[bad])} is over while a thread may "
                "still wait for the one before, and would miss it",
                lanes[-1:],
            )

    def _check_phase(self, lanes: Lanes, numbers: Lanes, what: str) -> None:
        phases = self._phase[numbers]
        if (early := self._order.fact(lanes, self._facts(numbers)) < phases).any():
            raise self._fault(
                f"a thread {what} phase {phases[early][0]} of {self._name(numbers[early])}, and "
                "nothing tells it that the phase before is over",
                lanes[early],
            )

    def _check_arrived(self, lanes: Lanes, addresses: Lanes, at: Lanes, what: str) -> None:
        known = self._order.fact(lanes, self._sent_by[at].astype(np.int64))
        if (racing := (known <= self._sent_in[at]).any(axis=1)).any():
            raise self._fault(
                f"byte {addresses[racing][0]} of shared memory {what} by a thread that does not "
                "know that what was sent to it has arrived: no wait for its phase came before",
                lanes[racing],
            )

    def _check_no_mbarrier(self, lanes: Lanes, addresses: Lanes, at: Lanes) -> None:
        if (hit := self._is_mbarrier[at].any(axis=1)).any():
            raise self._fault(
                f"byte {addresses[hit][0]} of shared memory is touched, and belongs to an mbarrier",
                lanes[hit],
            )

    def _facts(self, numbers: Lanes) -> Lanes:
        """Of a cluster: how many phases of an mbarrier are over."""
        return numbers % (self._size * MOST)

    def _messages(self, numbers: Lanes) -> Lanes:
        """What is told in the phase that each mbarrier is in."""
        return 2 * numbers + self._phase[numbers] % 2

    def _name(self, numbers: Lanes) -> str:
        return f"the mbarrier at byte {self._places[int(numbers[0]) % MOST]}"

    def _state(self, numbers: Lanes) -> str:
        number = int(numbers[0])
        return (
            f"{self._pending[number]} of {self._count[number]} arrivals pending and a tx-count of "
            f"{self._bytes[number]} bytes in phase {self._phase[number]}"
        )

    def _fault(self, what: str, lanes: Lanes) -> Fault:
        return Fault(what, lanes + self._first_lane)
