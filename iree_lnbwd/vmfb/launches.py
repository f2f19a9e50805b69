"""The launches of a module: its kernels, their order and their operands, stated once.

`host_program` turns this statement into the text that IREE compiles: each kernel's bindings and
workgroups, and the public function. The statement is also part of the module's reflection, beside
its spec, for callers who launch the kernels on a stream of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from iree_lnbwd.disk.json_values import int_of, object_of, of_type, wrong
from iree_lnbwd.errors import shown
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    ADDED_BIAS,
    GATE,
    GRAD_BIAS,
    GRAD_GATE,
    GRAD_INPUT,
    GRAD_INPUT_COPY,
    GRAD_INPUT_SUM,
    GRAD_OUTPUT,
    GRAD_RESIDUAL,
    GRAD_WEIGHT,
    INPUT,
    MEAN,
    MORE_GRAD_OUTPUTS,
    OUTPUT,
    PARTIAL_DBETA,
    PARTIAL_DGAMMA,
    PARTIAL_DX,
    POSTED_SUMS,
    RESIDUAL,
    RESIDUAL_OUTPUT,
    RSTD,
    SUM_H,
    SUM_HX,
    WEIGHT,
    Access,
    Kind,
    Operand,
)
from iree_lnbwd.ops.spec import MOST_COLUMNS, MOST_ROWS, NormSpec
from iree_lnbwd.schedules import (
    FewRows,
    Forward,
    OnePass,
    RowBlocks,
    Schedule,
    TwoPass,
    WholeTensors,
    choose_statistics,
    forms,
    most_few_rows,
)
from iree_lnbwd.schedules.set_waves import cost_of_partial_row
from iree_lnbwd.vmfb.counts import (
    DIVISOR_NUMBERS,
    MOST_COUNT,
    SETS_NUMBERS,
    Count,
    CountInWaves,
    OfSet,
    OfSets,
    Plain,
    RowCount,
    RowShare,
    Shares,
    count_from_json,
    names_of,
    strides_of,
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``ir/``, with every operand that it can have.

    A module's kernel has only those that its spec has.

    Attributes:
        name: Its name in the module's code.
        reads: The operands that its first pointers point to.
        writes: The operands that its other pointers point to.
        ahead: As `PlannedLaunch.ahead`.
    """

    name: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    ahead: tuple[Operand, ...] = ()

    @property
    def bindings(self) -> tuple[Operand, ...]:
        """What its pointers point to, as its file in ``ir/`` numbers them."""
        return (*self.reads, *self.writes)


_READ = (GRAD_OUTPUT, INPUT, MEAN, RSTD, WEIGHT)
_GRADIENTS = (GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS)
_PARTIALS = (PARTIAL_DGAMMA, PARTIAL_DBETA)
_SUMS = (SUM_H, SUM_HX)
_ROWS = Kernel(
    "rows",
    (*_READ, GRAD_RESIDUAL, ADDED_BIAS, *MORE_GRAD_OUTPUTS, GATE),
    (GRAD_INPUT, *_PARTIALS, GRAD_GATE, GRAD_INPUT_COPY, PARTIAL_DX),
    ahead=(*_READ[:-1], GRAD_RESIDUAL, *MORE_GRAD_OUTPUTS, GATE),
)
# Its workgroups post sums, and read what others have posted.
_POSTING_ROWS = replace(_ROWS, reads=(*_ROWS.reads, POSTED_SUMS), ahead=(*_ROWS.ahead, POSTED_SUMS))
_UNSENT = Kernel("unsent", (), (POSTED_SUMS,))
_FEW_ROWS = Kernel(
    "few_rows",
    (*_READ, GRAD_RESIDUAL, ADDED_BIAS, *MORE_GRAD_OUTPUTS, GATE),
    (*_GRADIENTS, GRAD_GATE, GRAD_INPUT_COPY),
)
_ROW_SUMS = Kernel("row_sums", (*_READ, ADDED_BIAS, *MORE_GRAD_OUTPUTS, GATE), _SUMS)
_COLUMNS = Kernel(
    "columns",
    (*_READ, *_SUMS, GRAD_RESIDUAL, ADDED_BIAS, *MORE_GRAD_OUTPUTS, GATE),
    (GRAD_INPUT, *_PARTIALS, GRAD_GATE, GRAD_INPUT_COPY, PARTIAL_DX),
)
_FINALIZE = Kernel("finalize", (*_PARTIALS, PARTIAL_DX), (GRAD_WEIGHT, GRAD_BIAS, GRAD_INPUT_SUM))
_NORMALIZE = Kernel(
    "normalize",
    (INPUT, RESIDUAL, WEIGHT, ADDED_BIAS, GATE),
    (OUTPUT, MEAN, RSTD, RESIDUAL_OUTPUT),
    ahead=(INPUT, RESIDUAL, WEIGHT, ADDED_BIAS, GATE),
)
_NORMALIZE_FEW = replace(_NORMALIZE, name="normalize_few")
KERNELS = {
    kernel.name: kernel
    for kernel in (
        replace(_ROWS, writes=(*_ROWS.writes, POSTED_SUMS)),  # as their file numbers them
        *(_UNSENT, _FEW_ROWS, _ROW_SUMS, _COLUMNS, _FINALIZE),
        *(_NORMALIZE, _NORMALIZE_FEW),
    )
}


@dataclass(frozen=True)
class PlannedLaunch:
    """One kernel.

    Attributes:
        kernel: Its name in the module's code.
        workgroups: Along x, y and z.
        reads: The operands that its first pointers point to: arguments of the spec, or scratch.
        writes: The operands that its other pointers point to.
        constants: 32-bit numbers that follow the pointers.
        ahead: The operands that it reads ahead of their use, or changes. They are not marked as
            read-only, because marked loads are moved to the place where their values are used.
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
    def from_dict(cls, values: Any, spec: NormSpec) -> LaunchPlans:
        """The inverse of `to_dict`, of values from a file.

        Args:
            values: What was parsed.
            spec: What the module computes.

        Raises:
            ValueError: A field is unknown, missing or has a bad value; the message names it.
        """
        given = of_type(list, object_of(values, "launches", ("plans",))["plans"], "plans")
        plans = tuple(_plan(value, f"plans[{i}]", spec) for i, value in enumerate(given))
        most = [plan.most_rows for plan in plans]
        few = [rows for rows in most if type(rows) is int]
        if most != [*few, None] or few != sorted(set(few)):
            raise ValueError(
                "plans: expected one or more, each for more rows, and the last for any number, got "
                f"{shown(most)}"
            )
        return cls(plans)


def launches(spec: NormSpec, target: Target, schedule: Schedule) -> LaunchPlans | None:
    """The launches of a call; None if only IREE's host program knows them.

    That is the case if IREE itself makes the kernels, from whole tensors.
    """
    if isinstance(schedule, Forward):
        *few, many = schedule.forms(spec)
        most = most_few_rows(schedule, spec)
        of_few = (Plan((), (_normalize(_NORMALIZE_FEW, spec, how),), most) for how in few)
        return LaunchPlans((*of_few, Plan((), (_normalize(_NORMALIZE, spec, many),))))
    if isinstance(schedule, WholeTensors):
        return None
    if isinstance(schedule, RowBlocks) and not spec.family.is_backward:
        return LaunchPlans((Plan((), (_normalize(_NORMALIZE, spec, schedule),)),))
    plans = []
    for form in forms(schedule, spec):
        if isinstance(form, FewRows):
            plans.append(_of_few_rows(spec, form))
        elif isinstance(form, OnePass | TwoPass | RowBlocks):
            plans.append(_of_partial_rows(spec, target, form))
    if spec.eps is not None:
        how = schedule if isinstance(schedule, RowBlocks) else choose_statistics(spec, target)
        plans = [_with_statistics(plan, spec, how) for plan in plans]
    return LaunchPlans(tuple(plans))


def _launch(
    kernel: Kernel, spec: NormSpec, x: Count, y: Count = 1, *, constants: tuple[Count, ...]
) -> PlannedLaunch:
    """A kernel with the operands that the spec has."""
    reads, writes, ahead = (
        tuple(operand.name for operand in _own(spec, operands) if takes(spec, operand))
        for operands in (kernel.reads, kernel.writes, kernel.ahead)
    )
    if spec.weight_sets:
        constants = (*constants, *SETS_NUMBERS)
    if spec.strided_rows:
        constants = (*constants, *_strides_numbers(spec, (*reads, *writes)))
    return PlannedLaunch(kernel.name, (x, y, 1), reads, writes, constants, ahead)


def _strides_numbers(spec: NormSpec, bindings: tuple[str, ...]) -> tuple[Count, ...]:
    """What a kernel needs to find rows: nothing if it has none."""
    strided = [name for name in bindings if spec.family.named(name).kind is Kind.CELLS]
    of_each = (number for name in strided for number in strides_of(name))
    return (*DIVISOR_NUMBERS, *of_each) if strided else ()


def _of_set(spec: NormSpec, count: Plain) -> Plain | OfSet:
    """A number for the rows that share sums of columns: all, or those of a set."""
    return OfSet(count) if spec.weight_sets else count


def _of_sets(spec: NormSpec, count: Plain) -> Plain | OfSets:
    """How many there are of them in a call: for all rows, or for all sets."""
    return OfSets(count) if spec.weight_sets else count


def _own(spec: NormSpec, operands: tuple[Operand, ...]) -> Iterator[Operand]:
    """The operands, with the output in place of the input if the spec is from that."""
    return (spec.family.data if operand is INPUT else operand for operand in operands)


def takes(spec: NormSpec, operand: Operand) -> bool:
    """Whether kernels of the spec have a pointer to the operand.

    Backward kernels on GPUs always have one to the weight. If there is none, they get ones.
    """
    own = spec.family.find(operand.name)
    if own is None or own.access is Access.TYPE_ALONE:
        return False
    return spec.has(own) or not (own.is_option or not spec.family.is_backward)


def _normalize(kernel: Kernel, spec: NormSpec, how: Forward | RowBlocks) -> PlannedLaunch:
    """The kernel of a forward."""
    if isinstance(how, RowBlocks):
        share = RowShare(1, how.workgroups, how.least, MOST_ROWS, how.most_workgroups)
        return _on_cpu(kernel, spec, Shares(share), constants=(RowCount(), share))
    most = how.walks // how.rows if how.walks else None
    return _launch(kernel, spec, RowCount(how.rows, most), how.cluster, constants=(RowCount(),))


def _on_cpu(
    kernel: Kernel, spec: NormSpec, x: Count, *, constants: tuple[Count, ...]
) -> PlannedLaunch:
    """As `_launch`: kernels for CPUs have no pointer to a weight that is not there.

    No compiler for CPUs moves loads that are marked as read-only.
    """
    reads = tuple(read for read in kernel.reads if read is not WEIGHT or spec.has_weight)
    return _launch(replace(kernel, reads=reads, ahead=()), spec, x, constants=constants)


def _with_statistics(plan: Plan, spec: NormSpec, how: Forward | RowBlocks) -> Plan:
    """The same, after a kernel that recomputes the statistics."""
    rows = RowCount()
    normalized = (INPUT, GATE) if spec.gate_first else (INPUT,)
    statistics_alone = replace(_NORMALIZE, reads=normalized, ahead=normalized, writes=(MEAN, RSTD))
    launch = _normalize(statistics_alone, spec, how)
    statistics = (_scratch(spec, name, rows) for name in launch.writes)
    return replace(plan, scratch=(*statistics, *plan.scratch), kernels=(launch, *plan.kernels))


def _of_few_rows(spec: NormSpec, form: FewRows) -> Plan:
    """One kernel, for tiles of columns and for rows."""
    tiles = form.tiles(spec)
    has_rows = spec.wants_dx or spec.has(GRAD_GATE)
    workgroups = RowCount(more=tiles) if has_rows else tiles
    launch = _launch(_FEW_ROWS, spec, workgroups, constants=(RowCount(),))
    return Plan(_unasked(spec, launch.writes), (launch,), form.rows if spec.rows is None else None)


def _of_partial_rows(spec: NormSpec, target: Target, form: OnePass | TwoPass | RowBlocks) -> Plan:
    """Partial rows of the column sums, and a kernel that adds them up."""
    rows = RowCount()
    kernels = []
    sums: tuple[str, ...] = ()
    axes: tuple[Count, Count]
    posted: tuple[Scratch, ...] = ()
    partial_rows: Plain
    if isinstance(form, OnePass):
        partial_rows = walkers = RowCount(form.groups, form.workgroups)
        if (lost := cost_of_partial_row(form, spec, target)) is not None:
            partial_rows = walkers = CountInWaves(form.groups, form.workgroups, lost=lost)
        walk, axes = _ROWS, (_of_sets(spec, walkers), form.cluster)
        if form.posts:
            axes = (form.cluster, walkers)
        if form.posts_sums(spec):
            walk, begun = _POSTING_ROWS, RowCount(form.unsent_rows)
            kernels.append(_launch(_UNSENT, spec, begun, constants=(rows,)))
            posted = (Scratch(POSTED_SUMS.name, form.posted_bytes, rows),)
        kernels.append(_launch(walk, spec, *axes, constants=(rows,)))
    elif isinstance(form, RowBlocks):
        share = RowShare(form.block, form.workgroups, form.least, form.share, form.most_workgroups)
        partial_rows = Shares(share)
        workgroups = _of_sets(spec, partial_rows)
        kernels.append(_on_cpu(_ROWS, spec, workgroups, constants=(rows, _of_set(spec, share))))
    else:
        partial_rows = walkers = RowCount(form.rows, form.workgroups)
        tiles = math.ceil(spec.columns / form.tile(target))
        columns = _COLUMNS
        if spec.wants_dx:
            kernels.append(_launch(_ROW_SUMS, spec, rows, constants=(rows,)))
            sums = kernels[0].writes
        else:
            columns = replace(columns, reads=tuple(o for o in columns.reads if o not in _SUMS))
        # Those of all sets may be too many to count along y.
        axes = (_of_sets(spec, walkers), tiles) if spec.weight_sets else (tiles, walkers)
        kernels.append(_launch(columns, spec, *axes, constants=(rows,)))
    if any(spec.has(gradient) for gradient in _FINALIZE.writes):
        tiles = math.ceil(spec.columns / form.finalize_columns)
        each = (_of_set(spec, partial_rows),)
        kernels.append(_launch(_FINALIZE, spec, _of_sets(spec, tiles), constants=each))
    all_partial_rows = _of_sets(spec, partial_rows)
    teams = 1 if isinstance(form, RowBlocks) else form.teams(spec, target)
    partials = [operand for operand in _FINALIZE.reads if takes(spec, operand)]
    scratch = (
        *(_scratch(spec, partial.name, all_partial_rows, each=teams) for partial in partials),
        *posted,
        *(_scratch(spec, name, rows) for name in sums),
        *_unasked(spec, {name for kernel in kernels for name in kernel.writes}),
    )
    return Plan(scratch, tuple(kernels))


def _scratch(spec: NormSpec, name: str, count: Count, *, each: int = 1) -> Scratch:
    """Memory for an operand: so many times so many rows of it, or elements."""
    operand = spec.family.named(name)
    size = each * DTYPES[spec.element_type(operand.element)].numpy.itemsize
    return Scratch(name, size * (1 if operand.kind is Kind.ROWS else spec.columns), count)


def _unasked(spec: NormSpec, written: Collection[str]) -> tuple[Scratch, ...]:
    """Memory for gradients that nobody asked for, but that kernels have a pointer to.

    Kernels do not use the pointers to ``grad_input`` and ``grad_gate``, unless the latter needs
    the former; they write the other gradients anyway.
    """
    return tuple(
        _scratch(spec, result.name, _of_sets(spec, 1))
        if result.kind is not Kind.CELLS
        else _scratch(spec, result.name, RowCount())
        if result == GRAD_INPUT and spec.wants_dx
        else Scratch(result.name, 0, 1)
        for result in spec.family.results
        if result.name in written and not spec.has(result)
    )


# Of numbers in files. A row of scratch has N elements of at most 8 bytes.
_MOST_BYTES = 8 * MOST_COLUMNS
_AXES = 3  # of workgroups


def _plan(values: Any, place: str, spec: NormSpec) -> Plan:
    given = object_of(values, place, names_of(Plan))
    pieces, launches = (of_type(list, given[n], f"{place}.{n}") for n in ("scratch", "kernels"))
    scratch = tuple(_piece(one, f"{place}.scratch[{i}]") for i, one in enumerate(pieces))
    # Kernels of a backward multiply by gamma even if the op has none.
    bound = {*(a.name for a in spec.arguments), *(piece.name for piece in scratch), WEIGHT.name}
    kernels = tuple(_kernel(one, f"{place}.kernels[{i}]", bound) for i, one in enumerate(launches))
    most = given["most_rows"]
    if most is not None:
        int_of(most, f"{place}.most_rows", least=1, most=MOST_COUNT)
    return Plan(scratch, kernels, most)


def _piece(values: Any, place: str) -> Scratch:
    given = object_of(values, place, names_of(Scratch))
    return Scratch(
        of_type(str, given["name"], f"{place}.name"),
        int_of(given["bytes"], f"{place}.bytes", least=0, most=_MOST_BYTES),
        count_from_json(given["count"], f"{place}.count"),
    )


def _kernel(values: Any, place: str, bound: Collection[str]) -> PlannedLaunch:
    given = object_of(values, place, names_of(PlannedLaunch))

    def listed(name: str) -> list[Any]:
        return of_type(list, given[name], f"{place}.{name}")

    def named(name: str) -> tuple[str, ...]:
        for value in listed(name):
            if not isinstance(value, str) or value not in bound:
                raise wrong(f"{place}.{name}", f"some of {', '.join(sorted(bound))}", value)
        return tuple(listed(name))

    if len(axes := listed("workgroups")) != _AXES:
        raise wrong(f"{place}.workgroups", f"{_AXES} counts", axes)
    x, y, z = (count_from_json(value, f"{place}.workgroups") for value in axes)
    constants = listed("constants")
    return PlannedLaunch(
        kernel=of_type(str, given["kernel"], f"{place}.kernel"),
        workgroups=(x, y, z),
        reads=named("reads"),
        writes=named("writes"),
        constants=tuple(count_from_json(value, f"{place}.constants") for value in constants),
        ahead=named("ahead"),
    )
