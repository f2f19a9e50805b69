"""Where the rows of a call's arrays are, if they do not follow each other.

Row r of an array begins at ``(r // inner_count) * outer + (r % inner_count) * inner``, counted in
elements from its first. ``inner_count`` is that of a call, the two strides are an array's own. The
columns of a row follow each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_STRIDE = 2**31 - 1  # kernels get strides as numbers of 32 bits


class RowStrides(NamedTuple):
    """Those of an array, in elements.

    Attributes:
        outer: From a run of ``inner_count`` rows to the next.
        inner: From a row to the next in a run.
    """

    outer: int
    inner: int

    def first(self, row: int, inner_count: int) -> int:
        """Where a row begins."""
        run, place = divmod(row, inner_count)
        return run * self.outer + place * self.inner

    def extent(self, rows: int, columns: int, inner_count: int) -> int:
        """How many elements there are from the first row's first to the last of any."""
        last_run, _ = divmod(max(rows, 1) - 1, inner_count)
        most_in_run = min(rows, inner_count) - 1
        if last_run == 0:
            return max(most_in_run, 0) * self.inner + columns
        # The last run may have fewer rows than the one before it.
        whole = (last_run - 1) * self.outer + most_in_run * self.inner
        return max(whole, self.first(rows - 1, inner_count)) + columns

    def are_apart(self, rows: int, columns: int, inner_count: int) -> bool:
        """Whether no row shares an element with another, for certain."""
        runs = -(-rows // inner_count)
        smaller, larger = sorted(((self.outer, runs), (self.inner, min(rows, inner_count))))
        if smaller[1] == 1 or larger[1] == 1:
            return all(stride >= columns or count == 1 for stride, count in (smaller, larger))
        (stride, count), (between, _) = smaller, larger
        return stride >= columns and between >= (count - 1) * stride + columns


class Strides(NamedTuple):
    """Those of a call.

    Attributes:
        inner_count: Rows of a run; at least 2. A run of all rows has one stride, the inner one.
        columns: N.
        given: The arrays whose rows do not follow each other as in a dense array, by ATen's names.
    """

    inner_count: int
    columns: int
    given: tuple[tuple[str, RowStrides], ...] = ()

    def of(self, name: str) -> RowStrides:
        """Those of an array: a dense one's, if nothing else is said."""
        return dict(self.given).get(name) or dense(self.inner_count, self.columns)

    def extent(self, name: str, rows: int) -> int:
        """As `RowStrides.extent`, of an array of the call."""
        return self.of(name).extent(rows, self.columns, self.inner_count)


def dense(inner_count: int, columns: int) -> RowStrides:
    """Those of rows that follow each other; the outer one is 0 if it is none for kernels."""
    outer = inner_count * columns
    return RowStrides(outer if outer <= MOST_STRIDE else 0, columns)


def alone(rows: int, columns: int) -> Strides:
    """Those of a call whose arrays are all dense."""
    return Strides(_one_run(rows), columns)


def _one_run(rows: int) -> int:
    return max(rows, 2)


@functools.lru_cache(maxsize=1024)  # takes microseconds, and calls are alike
def arranged(
    leading: tuple[int, ...],
    columns: int,
    arrays: tuple[tuple[str, tuple[int, ...] | None], ...],
    fixed: tuple[str, ...] = (),
    multiples: tuple[tuple[str, int], ...] = (),
) -> Strides | None:
    """The strides with which the most of a call's arrays can be used where they are.

    Args:
        leading: The dimensions whose product is M, at least 1.
        columns: N.
        arrays: By name, the strides of these dimensions, in elements; None for an array that has
            to be copied in any case.
        fixed: The names of those that cannot be copied.
        multiples: By name, a number that each stride must be a multiple of.

    Returns:
        Those of the arrays that are not dense and fit; the others have to be copied, or are dense.
        None if the fixed ones do not fit, or where no array would be used in place that is not
        dense.
    """
    places = [place for place, size in enumerate(leading) if size > 1]
    sizes = [leading[place] for place in places]
    if not sizes:
        return None  # a row is dense
    rows = math.prod(sizes)
    given = {
        name: None if strides is None else [strides[place] for place in places]
        for name, strides in arrays
    }
    least = dict(multiples)
    best: tuple[int, Strides] | None = None
    for split in range(len(sizes)):
        inner_count = math.prod(sizes[split:]) if split else _one_run(rows)
        own = dense(inner_count, columns) if split else RowStrides(0, columns)
        if split and own.outer == 0:  # results would not fit
            continue
        found: dict[str, RowStrides] = {}
        for name, strides in given.items():
            pair = None if strides is None else _two(sizes, strides, split)
            if pair is not None and all(
                0 <= stride <= MOST_STRIDE and stride % least.get(name, 1) == 0 for stride in pair
            ):
                found[name] = pair
        if not all(name in found for name in fixed):
            continue
        if best is None or len(found) > best[0]:
            odd = tuple((name, pair) for name, pair in found.items() if pair != own)
            best = len(found), Strides(inner_count, columns, odd)
    return None if best is None or not best[1].given else best[1]


def _two(sizes: Sequence[int], strides: Sequence[int], split: int) -> RowStrides | None:
    """The strides of rows in runs of the dimensions from one on; None if there are more than two.

    Args:
        sizes: The dimensions, each more than 1.
        strides: Theirs.
        split: The first dimension of a run; 0 if all are one run.
    """
    inner = _one(sizes[split:], strides[split:])
    outer = _one(sizes[:split], strides[:split])
    return None if inner is None or outer is None else RowStrides(outer, inner)


def _one(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of dimensions that one walks over; None if there is more than one."""
    for place in range(len(sizes) - 1):
        if strides[place] != sizes[place + 1] * strides[place + 1]:
            return None
    return strides[-1] if strides else 0
