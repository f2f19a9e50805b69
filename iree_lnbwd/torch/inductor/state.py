"""Whether the pass may act in this process, and what it did."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple


class Folded(NamedTuple):
    """What the pass did to norms.

    Attributes:
        forwards: That became inductor's own code.
        additions: That went into a kernel of ours.
        casts: That went into a kernel of ours.
        backwards: Of narrow rows, or without a module, that became inductor's own code.
        scales: Of outputs, that became weights of a backward of ours.
        sums: Over rows of an input's gradient, that a backward of ours computes.
    """

    forwards: int = 0
    additions: int = 0
    casts: int = 0
    backwards: int = 0
    scales: int = 0
    sums: int = 0


class _State:
    """Any number of threads may call."""

    def __init__(self) -> None:
        self.is_on = True
        self.has_arrived = False  # in inductor's configuration
        self.displaced_by: tuple[str, ...] | None = None
        self._folded = Folded()
        self._lock = threading.Lock()
        # A thread that holds the lock does not exist in a forked process.
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def add(self, folded: Folded) -> None:
        """Counts what was done to a graph."""
        with self._lock:
            self._folded = Folded(*map(sum, zip(self._folded, folded, strict=True)))

    def folded(self) -> Folded:
        """All of it."""
        with self._lock:
            return self._folded


STATE = _State()
