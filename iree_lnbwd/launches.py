"""The launches of a module: its kernels, their order and their operands, stated once.

`host_program` turns this statement into the text that IREE compiles: each kernel's bindings and
workgroups, and the public function. The statement is also part of the module's reflection, beside
its spec, for callers who launch the kernels on a stream of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import (
    BACKWARD,
    GRAD_INPUT,
    INPUT,
    PARTIAL_DBETA,
    PARTIAL_DGAMMA,
    SUM_H,
    SUM_HX,
    WEIGHT,
    Kind,
    names,
)
from iree_lnbwd.schedules import FewRows, OnePass, Schedule, TwoPass, forms, row_statistics
from iree_lnbwd.spec import GRADIENTS, NormSpec
from iree_lnbwd.targets import Target

_INPUTS = names(BACKWARD.inputs)
_STATISTICS = names(BACKWARD.statistics)
_OF_COLUMNS = names(result for result in BACKWARD.results if result.kind is Kind.COLUMNS)
_PARTIALS = names((PARTIAL_DGAMMA, PARTIAL_DBETA))
_SUMS = names((SUM_H, SUM_HX))


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


Count = int | RowCount


@dataclass(frozen=True)
class PlannedLaunch:
    """One kernel.

    Attributes:
        kernel: Its name in the module's code.
        workgroups: Along x, y and z.
        reads: The operands that its first pointers point to: arguments of the spec, or scratch.
        writes: The operands that its other pointers point to.
        constants: 32-bit numbers that follow the pointers.
        ahead: The operands that it reads ahead of their use. They are not marked as read-only,
            because marked loads are moved to the place where their values are used.
    """

    kernel: str
    workgroups: tuple[Count, Count, Count]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    constants: tuple[Count, ...]
    ahead: tuple[str, ...] = ()

    @property
    def bindings(self) -> tuple[str, ...]:
        """What its pointers point to, in order."""
        return (*self.reads, *self.writes)


@dataclass(frozen=True)
class Scratch:
    """Memory between kernels, and for results that nobody asked for.

    Attributes:
        name: Its name in bindings.
        bytes: Bytes for each of ``count``.
        count: The number of pieces of that size.
    """

    name: str
    bytes: int
    count: Count


@dataclass(frozen=True)
class Plan:
    """All launches of a call.

    Attributes:
        scratch: Memory that must be there; its content does not matter.
        kernels: In order; each may start when the one before is done.
        most_rows: The most rows that it is for; None if it is for any number.
    """

    scratch: tuple[Scratch, ...]
    kernels: tuple[PlannedLaunch, ...]
    most_rows: int | None = None


@dataclass(frozen=True)
class LaunchPlans:
    """The plans of a module, for calls of at least one row.

    Attributes:
        plans: A call takes the first plan that is for its number of rows.
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


def launches(spec: NormSpec, target: Target, schedule: Schedule) -> LaunchPlans | None:
    """The launches of a call; None if only IREE's host program knows them.

    That is the case if IREE itself makes the kernels, from whole tensors.
    """
    if not isinstance(schedule, OnePass | TwoPass):
        return None
    plans = []
    for form in forms(schedule, spec):
        if isinstance(form, FewRows):
            plans.append(_of_few_rows(spec, form))
        elif isinstance(form, OnePass | TwoPass):
            plans.append(_of_partial_rows(spec, target, form))
    if spec.eps is not None:
        plans = [_with_statistics(plan, spec, target) for plan in plans]
    return LaunchPlans(tuple(plans))


def _with_statistics(plan: Plan, spec: NormSpec, target: Target) -> Plan:
    """The same, after a kernel that recomputes mean and rstd."""
    rows = RowCount()
    workgroups = RowCount(row_statistics(spec, target).rows)
    kernel = PlannedLaunch(
        "row_statistics", (workgroups, 1, 1), (INPUT.name,), _STATISTICS, (rows,)
    )
    statistics = (_scratch(spec, name, rows) for name in _STATISTICS)
    return replace(plan, scratch=(*statistics, *plan.scratch), kernels=(kernel, *plan.kernels))


def _of_few_rows(spec: NormSpec, form: FewRows) -> Plan:
    """One kernel, for tiles of columns and for rows."""
    tiles = form.tiles(spec)
    workgroups = RowCount(more=tiles) if spec.output_mask[0] else tiles
    kernel = PlannedLaunch("few_rows", (workgroups, 1, 1), _INPUTS, GRADIENTS, (RowCount(),))
    return Plan(_unasked(spec, GRADIENTS), (kernel,), form.rows if spec.rows is None else None)


def _of_partial_rows(spec: NormSpec, target: Target, form: OnePass | TwoPass) -> Plan:
    """Partial rows of the column sums, and a kernel that adds them up."""
    rows = RowCount()
    written = (GRAD_INPUT.name, *_PARTIALS)
    kernels = []
    sums: tuple[str, ...] = ()
    if isinstance(form, OnePass):
        walkers = RowCount(form.groups, form.workgroups)
        ahead = tuple(name for name in _INPUTS if name != WEIGHT.name)
        kernels.append(
            PlannedLaunch("rows", (walkers, 1, 1), _INPUTS, written, (rows,), ahead=ahead)
        )
    else:
        walkers = RowCount(form.rows, form.workgroups)
        tiles = math.ceil(spec.columns / form.tile(target))
        if spec.has(GRAD_INPUT):
            sums = _SUMS
            kernels.append(PlannedLaunch("row_sums", (rows, 1, 1), _INPUTS, sums, (rows,)))
        reads = (*_INPUTS, *(sums or _STATISTICS))  # if no kernel reads row sums
        kernels.append(PlannedLaunch("columns", (tiles, walkers, 1), reads, written, (rows,)))
    if any(spec.has(result) for result in BACKWARD.results if result.kind is Kind.COLUMNS):
        tiles = math.ceil(spec.columns / form.finalize_columns)
        kernels.append(PlannedLaunch("finalize", (tiles, 1, 1), _PARTIALS, _OF_COLUMNS, (walkers,)))
    scratch = (
        *(_scratch(spec, name, walkers) for name in _PARTIALS),
        *(_scratch(spec, name, rows) for name in sums),
        *_unasked(spec, {name for kernel in kernels for name in kernel.writes}),
    )
    return Plan(scratch, tuple(kernels))


def _scratch(spec: NormSpec, name: str, count: Count) -> Scratch:
    """Memory for an operand: so many rows of it, or so many elements."""
    operand = BACKWARD.named(name)
    size = DTYPES[spec.element_type(operand.element)].numpy.itemsize
    return Scratch(name, size * (1 if operand.kind is Kind.ROWS else spec.columns), count)


def _unasked(spec: NormSpec, written: Collection[str]) -> tuple[Scratch, ...]:
    """Memory for gradients that nobody asked for, but that kernels have a pointer to.

    Kernels do not use the pointer to ``grad_input``; they write the other gradients anyway.
    """
    return tuple(
        Scratch(result.name, 0, 1) if result.kind is Kind.CELLS else _scratch(spec, result.name, 1)
        for result in BACKWARD.results
        if result.name in written and not spec.has(result)
    )


def _plan(values: Mapping[str, Any]) -> Plan:
    scratch = tuple(
        Scratch(one["name"], one["bytes"], _count(one["count"])) for one in values["scratch"]
    )
    kernels = []
    for one in values["kernels"]:
        x, y, z = map(_count, one["workgroups"])
        named = {key: tuple(one[key]) for key in ("reads", "writes", "ahead")}
        constants = tuple(map(_count, one["constants"]))
        kernels.append(
            PlannedLaunch(one["kernel"], workgroups=(x, y, z), constants=constants, **named)
        )
    return Plan(scratch, tuple(kernels), values["most_rows"])


def _count(value: Any) -> Count:
    return value if isinstance(value, int) else RowCount(**value)
