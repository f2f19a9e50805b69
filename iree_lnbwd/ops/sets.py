"""Sets of weights: which set a row takes, and how many rows a set has."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iree_lnbwd.errors import shown


class Sets(NamedTuple):
    """The sets of weights of a call: row r takes set ``(r // rows_per_set) % number``.

    Attributes:
        number: G, at least 1.
        rows_per_set: Neighbouring rows that take one set, at least 1.
    """

    number: int
    rows_per_set: int

    def of_rows(self, rows: int) -> npt.NDArray[np.intp]:
        """The set of each of M rows."""
        found: npt.NDArray[np.intp] = np.arange(rows) // self.rows_per_set % self.number
        return found

    def most_rows(self, rows: int) -> int:
        """How many of M rows the first set has; no other has more."""
        rounds, rest = divmod(rows, self.number * self.rows_per_set)
        return rounds * self.rows_per_set + min(rest, self.rows_per_set)

    def for_rows(self, rows: int) -> Sets:
        """The same, of M rows, with numbers that kernels have the bits for."""
        return self._replace(rows_per_set=min(self.rows_per_set, max(rows, 1)))


def check_rows_per_set(value: object) -> int:
    """``rows_per_set`` as an int >= 1; NumPy's ints are taken, too.

    Raises:
        TypeError, ValueError: It is none.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise TypeError(f"rows_per_set: expected an int, got {type(value).__name__}")
    if number < 1:
        raise ValueError(f"rows_per_set: expected an int >= 1, got {shown(number)}")
    return number
