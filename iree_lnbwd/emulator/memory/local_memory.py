"""Local memory: spilled registers and arrays of each thread."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.launch import Bytes, Fault, Lanes
from iree_lnbwd.emulator.memory.cells import POISON, check_alignment, check_written


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
        check_written(written, lanes + self._first_lane, addresses, "local memory")
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
        check_alignment(addresses, nbytes, lanes + self._first_lane, "local memory")
        outside = (addresses < 0) | (addresses + nbytes > self._nbytes)
        if outside.any():
            raise Fault(
                f"byte {addresses[outside][0]} is out of bounds of local memory, which has "
                f"{self._nbytes}",
                lanes[outside] + self._first_lane,
            )
        return addresses[:, None] + np.arange(nbytes)
