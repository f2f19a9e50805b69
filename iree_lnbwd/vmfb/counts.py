"""Numbers of a launch that each call decides: from M, its sets of weights, and its strides."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from iree_lnbwd.disk.json_values import int_of, object_of, of_type, wrong
from iree_lnbwd.ops.operands import CELLS_NAMES
from iree_lnbwd.ops.sets import LEAST_RUN, Sets
from iree_lnbwd.ops.strides import RowStrides, Strides

MOST_COUNT = 2**31 - 1  # of numbers in files
# Waves of workgroups that sets are shared out to: the first in which four of five workgroups have a
# set. RMS norms' backwards of 5 to 56 heads ran at seven numbers of waves on an H200, with seven
# widths and types. With 85 to 86 % of the places taken, one wave took up to 4 % less time than two;
# with 80 %, 3 less to 2 more; with 73 %, 6 more (`head_waves.csv` in ``scripts/results/h200``).
WAVES = (1, 2, 4, 8)
_BUSY = 4, 5
# Where a set's rows are neighbours, waves are chosen by what they cost, in 1/100000 of a call's
# time: a place without a set costs a quarter of its part, and twice as many waves, which have half
# of the sets each, save 0.7 %, as workgroups read rows that are nearer. By 44 cells on an H200
# (`waves.csv` in ``scripts/results/h200``): the number of waves was within 1.9 % of the best, and
# within 0.2 % on average.
_WHOLE = 100_000
IDLE = _WHOLE // 4
NEAR = tuple(round(700 * math.log2(waves)) for waves in range(1, 9))  # of so many waves
PARTIAL = _WHOLE // 1000  # of a thousandth of a row's time
MOST_COST = 2**62


@dataclass(frozen=True)
class RowCount:
    """A number that follows from M: ``min(ceil(M / per), most) + more``.

    Attributes:
        per: Rows that count as one.
        most: The upper bound; None if there is none.
        more: A number that is added for any M.
    """

    per: int = 1
    most: int | None = None
    more: int = 0

    def of(self, rows: int) -> int:
        """The number for M rows."""
        count = -(-rows // self.per)
        return self.more + (count if self.most is None else min(count, self.most))


@dataclass(frozen=True)
class CountInWaves(RowCount):
    """Workgroups for sets of weights, as many as cost the least where a set's rows are neighbours.

    Attributes:
        lost: What each costs by its partial row, in thousandths of the time of a row.
    """

    lost: int = 1


@dataclass(frozen=True)
class RowShare:
    """The rows of a CPU's workgroup: an equal part of M for each workgroup, in whole blocks.

    Attributes:
        block: Rows of a block.
        workgroups: How many share the rows, while that gives none of them too few or too many.
        least: The fewest rows of one, but for the last.
        most: The most rows of one, unless that took more than ``most_workgroups``.
        most_workgroups: At least ``workgroups``.
    """

    block: int
    workgroups: int
    least: int
    most: int
    most_workgroups: int

    def of(self, rows: int) -> int:
        """The number for M >= 1 rows."""
        blocks = -(-rows // self.block)
        few, many = (
            -(-blocks // workgroups) * self.block
            for workgroups in (self.workgroups, self.most_workgroups)
        )
        return min(max(few, self.least), max(self.most, many))


@dataclass(frozen=True)
class Shares:
    """How many workgroups M rows are shared out to.

    Attributes:
        share: The rows of each; the last may have fewer.
    """

    share: RowShare

    def of(self, rows: int) -> int:
        """The number for M >= 1 rows."""
        return -(-rows // self.share.of(rows))


Plain = int | RowCount | RowShare | Shares


@dataclass(frozen=True)
class OfSet:
    """A number for the rows of one set of weights: of the first, which has the most.

    Attributes:
        of_set: As it follows from so many rows. The upper bound of a `RowCount` is how many run at
            once, for all sets together: `of_each_set` has the part of one.
    """

    of_set: Plain


@dataclass(frozen=True)
class OfSets:
    """The same, times the number of sets.

    Attributes:
        of_sets: As it follows from the rows of one set.
    """

    of_sets: Plain


@dataclass(frozen=True)
class SetsNumber:
    """A number that a call's sets of weights have.

    Attributes:
        of_call: Its name: a field of `Sets`.
    """

    of_call: str


@dataclass(frozen=True)
class StridesNumber:
    """A number that the strides of a call's rows have.

    Attributes:
        of_strides: Its name: one of `DIVISOR_NUMBERS`, or an operand's, a dot and a field of
            `RowStrides`.
    """

    of_strides: str


Count = Plain | OfSet | OfSets | SetsNumber | StridesNumber
SETS_NUMBERS = tuple(map(SetsNumber, Sets._fields))
# The rows of a run, and what a kernel multiplies a row's number by to divide it by them: the two
# halves of 2^64 / inner_count, rounded up. The highest 64 bits of the product are the quotient, for
# numbers of 32 bits and a divisor of at least 2.
DIVISOR_NUMBERS = tuple(map(StridesNumber, ("inner_count", "inverse_high", "inverse_low")))


def strides_of(name: str) -> tuple[StridesNumber, ...]:
    """The numbers of an operand's strides."""
    return tuple(StridesNumber(f"{name}.{field}") for field in RowStrides._fields)


def _of_strides(number: StridesNumber, strides: Strides) -> int:
    name, _, field = number.of_strides.partition(".")
    if field:
        return int(getattr(strides.of(name), field))
    count = strides.inner_count
    inverse = -(-(1 << 64) // count)
    return {
        "inner_count": count,
        "inverse_high": inverse >> 32,
        "inverse_low": inverse & 0xFFFFFFFF,
    }[name]


def of_each_set(count: RowCount, sets: Sets, rows: int) -> int:
    """How many workgroups each set of M rows has at most.

    A workgroup has one set. In one wave, 48 sets of 132 workgroups would have two each, and 36
    would have none; in two waves, they have five.

    Args:
        count: Of workgroups; its upper bound is how many run at once.
        sets: The sets of a call.
        rows: M.
    """
    at_once = count.most
    assert at_once is not None, count
    if isinstance(count, CountInWaves) and sets.rows_per_set >= LEAST_RUN:
        each = _each_of_least_cost(at_once, count.lost, sets.number, rows)
    else:
        each = _each_of_busy_waves(at_once, sets.number)
    return min(max(each, 1), at_once)


def _each_of_busy_waves(at_once: int, sets: int) -> int:
    each = 0
    for waves in WAVES:
        each = waves * at_once // sets
        if each * sets >= least_busy(waves * at_once):
            break
    return each


def _each_of_least_cost(at_once: int, lost: int, sets: int, rows: int) -> int:
    """Of as few waves as cost the least; each wave has a set at least."""
    found, least = 0, MOST_COST
    for waves, near in enumerate(NEAR, 1):
        each = waves * at_once // sets
        if not each or waves > sets:
            continue
        all_of_them = each * sets
        idle = IDLE * (waves * at_once - all_of_them) // all_of_them
        cost = idle + PARTIAL * lost * all_of_them // rows - near
        if cost < least:
            found, least = each, cost
    return found


def least_busy(workgroups: int) -> int:
    """How many of them have to have a set."""
    of, all_of_them = _BUSY
    return -(-of * workgroups // all_of_them)


def count_of(
    count: Count, rows: int, sets: Sets | None = None, strides: Strides | None = None
) -> int:
    """A count for M rows, and for the sets of weights and the strides of rows that a call has."""
    if isinstance(count, int):
        return count
    if isinstance(count, StridesNumber):
        assert strides is not None, count
        return _of_strides(count, strides)
    if not isinstance(count, OfSet | OfSets | SetsNumber):
        return count.of(rows)
    assert sets is not None, count
    if isinstance(count, SetsNumber):
        return int(getattr(sets, count.of_call))
    plain = count.of_set if isinstance(count, OfSet) else count.of_sets
    if isinstance(plain, RowCount) and plain.most is not None:
        plain = replace(plain, most=of_each_set(plain, sets, rows))
    each = count_of(plain, sets.most_rows(rows))
    return each if isinstance(count, OfSet) else sets.number * each


def count_from_json(value: Any, place: str) -> Count:
    """A count as a file has it.

    Raises:
        TypeError, ValueError: Naming the place in the file, what was expected and what came.
    """
    if isinstance(value, dict):
        for kind in (OfSet, OfSets):
            (name,) = names_of(kind)
            if name in value:
                of_rows = _plain(object_of(value, place, (name,))[name], f"{place}.{name}")
                return kind(of_rows)
        if "of_call" in value:
            named = object_of(value, place, names_of(SetsNumber))["of_call"]
            if named not in Sets._fields:
                raise wrong(f"{place}.of_call", f"one of {', '.join(Sets._fields)}", named)
            return SetsNumber(named)
        if "of_strides" in value:
            named = object_of(value, place, names_of(StridesNumber))["of_strides"]
            return StridesNumber(_strides_number(named, f"{place}.of_strides"))
    return _plain(value, place)


def _strides_number(value: Any, place: str) -> str:
    name, _, field = of_type(str, value, place).partition(".")
    is_divisor = StridesNumber(value) in DIVISOR_NUMBERS
    if not (is_divisor or (name in CELLS_NAMES and field in RowStrides._fields)):
        raise wrong(place, "inner_count, or an operand's stride", value)
    return str(value)


def _plain(value: Any, place: str) -> Plain:
    if not isinstance(value, dict):
        return int_of(value, place, least=1, most=MOST_COUNT)
    if "share" in value:
        return Shares(_share(object_of(value, place, names_of(Shares))["share"], f"{place}.share"))
    if "block" in value:
        return _share(value, place)
    kind = CountInWaves if "lost" in value else RowCount
    given = object_of(value, place, names_of(kind))
    count = RowCount(
        int_of(given["per"], f"{place}.per", least=1, most=MOST_COUNT),
        None
        if given["most"] is None
        else int_of(given["most"], f"{place}.most", least=1, most=MOST_COUNT),
        int_of(given["more"], f"{place}.more", least=0, most=MOST_COUNT),
    )
    if kind is RowCount:
        return count
    lost = int_of(given["lost"], f"{place}.lost", least=1, most=MOST_COUNT)
    return CountInWaves(count.per, count.most, count.more, lost)


def _share(value: Any, place: str) -> RowShare:
    given = object_of(value, place, names_of(RowShare))
    return RowShare(
        *(
            int_of(given[name], f"{place}.{name}", least=1, most=MOST_COUNT)
            for name in names_of(RowShare)
        )
    )


def names_of(kind: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))
