"""Sums over rows, for the judge."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.ops.arguments import BoundCall
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
        """The sums over all blocks, one for each column: [N]."""
        return np.where(np.isfinite(self._lost), self._sums + self._lost, self._sums)


class CallSums:
    """Sums over a call's rows: over all, or over those of each set of weights."""

    def __init__(self, call: BoundCall, columns: int) -> None:
        self._set_of_rows = None if call.sets is None else call.sets.of_rows(call.rows)
        self._sums = [ColumnSums(columns) for _ in range(call.sets.number if call.sets else 1)]

    def add(self, block: slice, rows: F64) -> None:
        """Adds a block of rows [m, N]."""
        if self._set_of_rows is None:
            self._sums[0].add(rows)
            return
        sets = self._set_of_rows[block]
        for one in np.unique(sets):
            self._sums[one].add(rows[sets == one])

    @property
    def total(self) -> F64:
        """The sums over all blocks: [1, N], or [G, N]."""
        return np.stack([sums.total for sums in self._sums])
