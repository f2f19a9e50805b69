"""Local memory: spilled registers and arrays of each thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.launch import Bytes, Fault, Lanes
from iree_lnbwd.emulator.memory.cells import POISON, check_alignment, check_written

Flags = npt.NDArray[np.bool_]


class LocalMemory:
    """Each lane's own memory: spilled registers and arrays."""

    def __init__(self, nbytes: int, *, lanes: int, first_lane: int = 0) -> None:
        """Memory that was never written: ``nbytes`` for each lane."""
        self._nbytes = nbytes
        self._first_lane = first_lane
        self._data = np.full((lanes, nbytes), POISON, np.uint8)
        self._written = np.zeros((lanes, nbytes), np.bool_)
        self._unknown: Flags | None = None  # what was written of registers that were not

    def load(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
        """Each lane reads ``nbytes`` neighbouring bytes of its own: [T, nbytes].

        Raises:
            Fault: Out of bounds, misaligned or never written.
        """
        at = self._locate(lanes, addresses, nbytes)
        written = self._written[lanes[:, None], at]
        check_written(written, lanes + self._first_lane, addresses, "local memory")
        return self._data[lanes[:, None], at]

    def store(
        self, lanes: Lanes, addresses: Lanes, values: Bytes, unknown: Flags | None = None
    ) -> None:
        """Each lane writes neighbouring bytes of its own: [T, nbytes].

        Args:
            lanes: The lanes.
            addresses: Of each.
            values: The bytes.
            unknown: Of which lanes they depend on what was never written: [T].

        Raises:
            Fault: Out of bounds or misaligned.
        """
        at = self._locate(lanes, addresses, values.shape[1])
        self._data[lanes[:, None], at] = values
        self._written[lanes[:, None], at] = True
        if self._unknown is None and unknown is not None and unknown.any():
            self._unknown = np.zeros_like(self._written)
        if self._unknown is not None:
            self._unknown[lanes[:, None], at] = False if unknown is None else unknown[:, None]

    def unknown(self, lanes: Lanes, addresses: Lanes, nbytes: int) -> Flags:
        """Of which lanes bytes depend on what was never written: [T]."""
        if self._unknown is None:
            return np.zeros(len(lanes), np.bool_)
        at = self._locate(lanes, addresses, nbytes)
        unknown: Flags = np.logical_or.reduce(self._unknown[lanes[:, None], at], axis=1)
        return unknown

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
