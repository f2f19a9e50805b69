"""Sums over rows, for the judge."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.verification.row_block import F64


class ColumnSums:
    """Sums over rows, more exact than NumPy's, which adds rows one after the other.

    NumPy's sum of many equal f64 numbers has a larger error than the tolerance allows.
    """

    def __init__(self, columns: int) -> None:
        self._sums, self._lost = np.zeros((2, columns))

    def add(self, rows: F64) -> None:
        """Adds a block of rows [m, N] pairwise, and keeps the error of adding it to the others."""
        while len(rows) > 1:
            half = len(rows) // 2
            odd = rows[2 * half :]
            rows = rows[:half] + rows[half : 2 * half]
            rows[: len(odd)] += odd
        for row in rows:
            total = self._sums + row  # Knuth's exact sum of two
            added = total - self._sums
            self._lost += (self._sums - (total - added)) + (row - added)
            self._sums = total

    @property
    def total(self) -> F64:
        """The sums over all blocks, one for each column."""
        return np.where(np.isfinite(self._lost), self._sums + self._lost, self._sums)
