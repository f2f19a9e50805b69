"""Which kernels of a module run, in which order and on what: its host program, as a value.

IREE's host program in the .vmfb says the same. This one is for callers who bring a stream of their
own to launch the kernels on. It travels in the module's reflection, beside its spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import BACKWARD, GRAD_INPUT, INPUT, Kind, names
from iree_lnbwd.schedules import FewRows, OnePass, Schedule, TwoPass, forms, row_statistics
from iree_lnbwd.spec import GRADIENTS, LayerNormSpec
from iree_lnbwd.targets import Target

_INPUTS = names(BACKWARD.inputs)
_STATISTICS = names(BACKWARD.statistics)
_OF_COLUMNS = names(result for result in BACKWARD.results if result.kind is Kind.COLUMNS)


@dataclass(frozen=True)
class RowCount:
    """A number that follows from M: ``min(ceil(M / per), most) + more``.

    Attributes:
        per: Rows that count for one.
        most: None where there is no upper bound.
        more: What is there for any M.
    """

    per: int = 1
    most: int | None = None
    more: int = 0

    def of(self, rows: int) -> int:
        """The number for M rows."""
        count = -(-rows // self.per)
        return self.more + (count if self.most is None else min(count, self.most))


Count = int | RowCount


@dataclass(frozen=True)
class PlannedLaunch:
    """One kernel.

    Attributes:
        kernel: Its name in the module's code.
        workgroups: Along x, y and z.
        bindings: What its pointers point to: arguments of the spec, or scratch.
        constants: 32-bit numbers that follow the pointers.
    """

    kernel: str
    workgroups: tuple[Count, Count, Count]
    bindings: tuple[str, ...]
    constants: tuple[Count, ...]


@dataclass(frozen=True)
class Scratch:
    """Memory between kernels, and for results that nobody asked for.

    Attributes:
        name: As bindings speak of it.
        bytes: For each of ``count``.
        count: How often.
    """

    name: str
    bytes: int
    count: Count


@dataclass(frozen=True)
class Plan:
    """All of a call.

    Attributes:
        scratch: To have ready, with anything in it.
        kernels: In order; each may start when the one before is done.
        most_rows: It is for no more rows than these; None where it is for any number.
    """

    scratch: tuple[Scratch, ...]
    kernels: tuple[PlannedLaunch, ...]
    most_rows: int | None = None


@dataclass(frozen=True)
class LaunchPlans:
    """What calls of a module launch, for at least one row.

    Attributes:
        plans: The first of them that is for so many rows is what a call takes.
    """

    plans: tuple[Plan, ...]

    def of(self, rows: int) -> Plan:
        """The plan of a call with M rows."""
        return next(p for p in self.plans if p.most_rows is None or rows <= p.most_rows)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaunchPlans:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: A field is unknown, missing or has a bad value.
        """
        return cls(tuple(map(_plan, values["plans"])))


def count_of(count: Count, rows: int) -> int:
    """A count for M rows."""
    return count if isinstance(count, int) else count.of(rows)


def launches(spec: LayerNormSpec, target: Target, schedule: Schedule) -> LaunchPlans | None:
    """What a call launches; None where only IREE's host program says it.

    That is where IREE itself made the kernels: of whole tensors.
    """
    if not isinstance(schedule, OnePass | TwoPass):
        return None
    plans = []
    for form in forms(schedule, spec):
        if isinstance(form, FewRows):
            plans.append(_of_few_rows(spec, form))
        elif isinstance(form, OnePass | TwoPass):
            plans.append(_of_partial_rows(spec, target, form))
    if spec.recompute_eps is not None:
        plans = [_with_statistics(plan, spec, target) for plan in plans]
    return LaunchPlans(tuple(plans))


def _with_statistics(plan: Plan, spec: LayerNormSpec, target: Target) -> Plan:
    """The same, after a kernel that recomputes mean and rstd."""
    rows = RowCount()
    acc_bytes = DTYPES[spec.acc_dtype].numpy.itemsize
    workgroups = RowCount(row_statistics(spec, target).rows)
    kernel = PlannedLaunch(
        "row_statistics", (workgroups, 1, 1), (INPUT.name, *_STATISTICS), (rows,)
    )
    statistics = (Scratch(name, acc_bytes, rows) for name in _STATISTICS)
    return replace(plan, scratch=(*statistics, *plan.scratch), kernels=(kernel, *plan.kernels))


def _of_few_rows(spec: LayerNormSpec, form: FewRows) -> Plan:
    """One kernel, for tiles of columns and for rows."""
    tiles = math.ceil(spec.columns / form.tile) if any(spec.output_mask[1:]) else 0
    workgroups = RowCount(more=tiles) if spec.output_mask[0] else tiles
    kernel = PlannedLaunch("few_rows", (workgroups, 1, 1), (*_INPUTS, *GRADIENTS), (RowCount(),))
    return Plan(_unasked(spec, GRADIENTS), (kernel,), form.rows if spec.rows is None else None)


def _of_partial_rows(spec: LayerNormSpec, target: Target, form: OnePass | TwoPass) -> Plan:
    """Partial rows of the column sums, and a kernel that adds them up."""
    acc_bytes = DTYPES[spec.acc_dtype].numpy.itemsize
    partials = ("partial_dgamma", "partial_dbeta")
    rows = RowCount()
    if isinstance(form, OnePass):
        walkers = RowCount(form.groups, form.workgroups)
        kernels = [
            PlannedLaunch("rows", (walkers, 1, 1), (*_INPUTS, GRAD_INPUT.name, *partials), (rows,))
        ]
        sums: tuple[str, ...] = ()
    else:
        walkers = RowCount(form.rows, form.workgroups)
        tiles = math.ceil(spec.columns / form.tile(target))
        kernels, sums, read = [], (), _STATISTICS  # where nobody reads row sums
        if spec.output_mask[0]:
            sums = read = ("sum_h", "sum_hx")
            kernels.append(PlannedLaunch("row_sums", (rows, 1, 1), (*_INPUTS, *sums), (rows,)))
        bindings = (*_INPUTS, *read, GRAD_INPUT.name, *partials)
        kernels.append(PlannedLaunch("columns", (tiles, walkers, 1), bindings, (rows,)))
    written: tuple[str, ...] = (GRAD_INPUT.name,)
    if any(spec.output_mask[1:]):
        tiles = math.ceil(spec.columns / form.finalize_columns)
        kernels.append(
            PlannedLaunch("finalize", (tiles, 1, 1), (*partials, *_OF_COLUMNS), (walkers,))
        )
        written = GRADIENTS
    scratch = (
        *(Scratch(name, spec.columns * acc_bytes, walkers) for name in partials),
        *(Scratch(name, acc_bytes, rows) for name in sums),
        *_unasked(spec, written),
    )
    return Plan(scratch, tuple(kernels))


def _unasked(spec: LayerNormSpec, written: Sequence[str]) -> tuple[Scratch, ...]:
    """For gradients that kernels have a pointer to, and that nobody asked for.

    That of ``grad_input`` is not followed; the others are written by the way.
    """
    pieces = []
    for result in BACKWARD.results:
        if result.name in written and not spec.has(result):
            size = DTYPES[spec.element_type(result.element)].numpy.itemsize
            of_columns = result.kind is Kind.COLUMNS
            pieces.append(Scratch(result.name, spec.columns * size if of_columns else 0, 1))
    return tuple(pieces)


def _plan(values: Mapping[str, Any]) -> Plan:
    scratch = tuple(
        Scratch(one["name"], one["bytes"], _count(one["count"])) for one in values["scratch"]
    )
    kernels = []
    for one in values["kernels"]:
        x, y, z = map(_count, one["workgroups"])
        bindings, constants = tuple(one["bindings"]), tuple(map(_count, one["constants"]))
        kernels.append(PlannedLaunch(one["kernel"], (x, y, z), bindings, constants))
    return Plan(scratch, tuple(kernels), values["most_rows"])


def _count(value: Any) -> Count:
    return value if isinstance(value, int) else RowCount(**value)
