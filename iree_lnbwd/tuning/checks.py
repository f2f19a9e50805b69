"""Whether a candidate computes what it should: calls that take every form of it, judged in f64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.errors import counted
from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward, OnePass, Schedule, TwoPass, most_few_rows
from iree_lnbwd.tuning.on_gpu import sets_of_calls
from iree_lnbwd.verification.judge import Judgement, compare, judge
from iree_lnbwd.verification.matrix import (
    ADVERSARIAL_ROWS,
    SOME_SETS,
    adversarial_call,
    random_call,
)

_FEW_ROWS = (1, 37)
_STEPS = 5  # rows of each walker in the large call: more than any schedule fetches ahead
_MOST_ELEMENTS = 1 << 24  # of the large call, unless one of many rows has more: takes a second
_COMPARED_ROWS = 128  # of the large call; sums over rows are of all rows


@dataclass(frozen=True)
class Check:
    """One call, and what is right.

    Attributes:
        name: For messages.
        call: The call.
        judgement: Of all its rows.
        compared: The rows of which results are compared.
        is_finite: Whether no result of it can be NaN.
    """

    name: str
    call: BoundCall
    judgement: Judgement
    compared: Array
    is_finite: bool

    def wrong(self, results: Mapping[str, Array]) -> str | None:
        """What is wrong about the results of this call, by name; None if nothing is."""
        assert self.call.spec is not None
        for name, expected in self.judgement.expected.items():
            actual, tolerance = (
                results[name].reshape(expected.shape),
                self.judgement.tolerance[name],
            )
            if self.is_finite and _has_unwritten(actual):
                return f"{name} of {self.name}: some elements were not written"
            if self.call.spec.family.named(name).kind is not Kind.COLUMNS:
                actual, expected, tolerance = (
                    array[self.compared] for array in (actual, expected, tolerance)
                )
            found = compare(actual, expected, tolerance)
            if not found.passed:
                return (
                    f"{name} of {self.name}: its error is {found.error:.3g}, "
                    f"{found.ratio:.3g} of what is allowed"
                )
        return None


def checks(spec: NormSpec, candidates: Iterable[Schedule]) -> Iterator[Check]:
    """Calls that take every form of every candidate: of a row, of few rows, and of many."""
    rng = np.random.default_rng(0)
    for rows in _FEW_ROWS:
        yield _check(f"{rows} random rows", random_call(spec, rows, rng), is_finite=True)
    yield _check("adversarial rows", adversarial_call(spec, rng), is_finite=False)
    rows = _many_rows(spec, candidates)
    for sets in sets_of_calls(spec, rows):
        call = random_call(spec, rows, rng, sets or SOME_SETS)
        said = "" if sets is None else f" of {counted(sets.number, 'set')}"
        yield _check(f"{rows} random rows{said}", call, is_finite=True)


def _check(name: str, call: BoundCall, *, is_finite: bool) -> Check:
    rows = call.rows
    if rows <= max(_COMPARED_ROWS, ADVERSARIAL_ROWS):
        compared = np.arange(rows)
    else:  # the first, the last, and some between
        between = np.random.default_rng(0).choice(rows, _COMPARED_ROWS, replace=False)
        compared = np.unique([0, rows - 1, *between])
    return Check(name, call, judge(call), compared, is_finite)


def _many_rows(spec: NormSpec, candidates: Iterable[Schedule]) -> int:
    """So many that no form is for few rows, and walkers take several, but not equally many."""
    few = walkers = 0
    for candidate in candidates:
        few = max(few, most_few_rows(candidate, spec) or 0)
        match candidate:
            case OnePass():
                walkers = max(walkers, candidate.workgroups * candidate.groups)
            case TwoPass():
                walkers = max(walkers, candidate.workgroups * candidate.rows)
            case Forward():
                walkers = max(walkers, candidate.rows)
    wanted = min(_STEPS * walkers + _STEPS // 2, _MOST_ELEMENTS // spec.columns)
    return max(few + 1, wanted) | 1


def _has_unwritten(array: Array) -> bool:
    """Whether an element has all bits set, as `on_gpu` leaves results before a call."""
    bits = array.view(f"u{array.itemsize}")
    return bool(np.any(bits == np.iinfo(bits.dtype).max))
