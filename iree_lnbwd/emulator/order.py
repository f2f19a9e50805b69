"""What happened before what in a cluster of workgroups: vector clocks of its warps.

Each warp counts, and knows of every warp of its cluster up to which count all that it did happened
before. What it does itself it marks with its own count. To release is to leave what it knows in a
message; it then counts on, so that what it does next is not in the message. To acquire is to learn
what a message says. An access is ordered after another one if its warp knows the mark of the other.

Facts are further numbers that only grow and are known in the same way.

A warp is one: its lanes count together. Source: Lamport, "Time, Clocks, and the Ordering of Events
in a Distributed System", 1978; Mattern, "Virtual Time and Global States of Distributed Systems",
1989.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Lanes

Knowledge = npt.NDArray[np.int32]  # a row for each warp or message


class Order:
    """What the warps of some workgroups know.

    Lanes count from the first thread of the first of these workgroups.
    """

    def __init__(
        self, *, size: int, workgroups: int, threads: int, subgroup_size: int, facts: int
    ) -> None:
        """Warps that know nothing of each other.

        Args:
            size: Workgroups of a cluster.
            workgroups: How many there are: whole clusters.
            threads: Of a workgroup.
            subgroup_size: Threads of a warp.
            facts: Of a cluster. All are 0.
        """
        self._threads, self._subgroup_size = threads, subgroup_size
        self.warps = -(-threads // subgroup_size)  # of a workgroup
        self._of_cluster = size * self.warps
        warps = np.arange(workgroups * self.warps)
        self._known = np.zeros((warps.size, self._of_cluster + facts), np.int32)
        self._known[warps, warps % self._of_cluster] = 1

    def messages(self, count: int) -> Knowledge:
        """Messages that say nothing."""
        return np.zeros((count, self._known.shape[1]), np.int32)

    def warp(self, lanes: Lanes) -> Lanes:
        """The number of each thread's warp in its workgroup."""
        return lanes % self._threads // self._subgroup_size

    def now(self, lanes: Lanes) -> Lanes:
        """The mark of what each thread does now."""
        warps = self._warps(lanes)
        marks: Lanes = self._known[warps, warps % self._of_cluster].astype(np.int64)
        return marks

    def knows(self, lanes: Lanes, ranks: Lanes) -> Knowledge:
        """Up to which mark each thread knows the warps of a workgroup of a rank: [T, warps]."""
        columns = (ranks * self.warps)[:, None] + np.arange(self.warps)
        known: Knowledge = self._known[self._warps(lanes)[:, None], columns]
        return known

    def fact(self, lanes: Lanes, numbers: Lanes) -> Knowledge:
        """What each thread knows of facts: [T], or [T, n] for ``n`` facts each."""
        warps = self._warps(lanes)
        return self._known[
            warps if numbers.ndim == 1 else warps[:, None], self._of_cluster + numbers
        ]

    def find_out(self, lanes: Lanes, numbers: Lanes, values: Lanes) -> None:
        """Each thread finds that a fact has come to a value."""
        at = self._warps(lanes), self._of_cluster + numbers
        np.maximum.at(self._known, at, values.astype(np.int32))

    def release(self, messages: Knowledge, numbers: Lanes, lanes: Lanes) -> None:
        """Each thread adds what it knows to one of the messages."""
        warps = self._warps(lanes)
        pairs = np.unique(numbers * len(self._known) + warps)  # the lanes of a warp say the same
        to, by = np.divmod(pairs, len(self._known))
        _join(messages, to, self._known[by])
        self._count_on(np.unique(warps))

    def acquire(self, messages: Knowledge, numbers: Lanes, lanes: Lanes) -> None:
        """Each thread learns what one of the messages says."""
        pairs = np.unique(self._warps(lanes) * len(messages) + numbers)
        warps, of = np.divmod(pairs, len(messages))
        _join(self._known, warps, messages[of])

    def meet(self, lanes: Lanes, groups: Lanes) -> None:
        """The threads of each group meet: all of them learn what any of them knows.

        Args:
            lanes: The threads: [T].
            groups: The number of each one's group, from 0: [T].
        """
        if lanes.size:
            messages = self.messages(int(groups.max()) + 1)
            self.release(messages, groups, lanes)
            self.acquire(messages, groups, lanes)

    def _warps(self, lanes: Lanes) -> Lanes:
        return lanes // self._threads * self.warps + self.warp(lanes)

    def _count_on(self, warps: Lanes) -> None:
        self._known[warps, warps % self._of_cluster] += 1


def _join(target: Knowledge, numbers: Lanes, rows: Knowledge) -> None:
    """Rows of the target, of ascending numbers, become the highest of themselves and of rows."""
    if numbers.size:
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        at = numbers[first]
        target[at] = np.maximum(target[at], np.maximum.reduceat(rows, first))
