"""Sets of weights: which set a row takes, and how many rows a set has."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from iree_lnbwd.errors import shown

# Rows of a long run of neighbours that have one set, at least. Then workgroups may come in more
# waves, each with fewer sets, and all teams of a workgroup have one set. Heads, whose runs are of
# one row, took 4 to 7 % longer in two waves (H200).
LEAST_RUN = 64


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


def of_samples(
    input: Sequence[int],
    normalized_shape: int | Sequence[int],
    parameters: Mapping[str, Sequence[int]],
) -> tuple[tuple[int, ...], int]:
    """The shape of sets that are those of samples, and the rows of each.

    Args:
        input: Its shape: [B, ..., *normalized_shape], of B samples.
        normalized_shape: The trailing dimensions to normalize.
        parameters: By name, the shapes of what each sample has:
            [B, *normalized_shape], or [B, 1, ..., *normalized_shape].

    Raises:
        ValueError: A shape is another; its name, what came and what was expected.
    """
    dims = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    leading = tuple(input[: max(0, len(input) - len(dims))])
    if not leading or tuple(input[len(leading) :]) != dims:
        expected = ", ".join(("B", "...", *map(str, dims)))
        raise ValueError(f"input: expected shape ({expected}), got {tuple(input)}")
    flat, whole = (leading[0], *dims), (leading[0], *(1 for _ in leading[1:]), *dims)
    for name, shape in parameters.items():
        if tuple(shape) not in (flat, whole):
            expected = " or ".join(map(str, dict.fromkeys((flat, whole))))
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(shape)}")
    # A sample without rows takes none of any set's.
    return flat, max(1, math.prod(leading[1:]))
