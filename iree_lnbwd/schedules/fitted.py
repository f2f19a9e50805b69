"""Measured schedules of other widths, fitted to a width that was not measured."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import (
    WHOLE_LINES,
    most_elements,
    vector_of,
    widest_vector,
)
from iree_lnbwd.schedules.forward import WORD_BYTES
from iree_lnbwd.schedules.ir_types import itemsize
from iree_lnbwd.schedules.measured import Key
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.rules import QUARTERS, alike, rows_of_a_subgroup, touched_columns

_UNASKED = -1  # a place before those of a source's ways
_ROUNDING = 1e-9  # of sums in another order
_OCTAVES = 1.0  # between the widths: from so far on, a measurement says nothing
# What a way to fit costs, in powers of 2 of time: what the measured schedule lacks counts in full,
# and differences from it for so much. Chosen by 2100 fits of 105 widths that an H200 timed, and
# what checks cost by 3500 of 247, each width without what was measured near it; each half of the
# widths gained. Beside these, single modules differ by 5 %, which nothing foretells: so a near
# source that needs few changes is preferred. The fastest schedule of a width is its only source:
# where sweeps' slower ones spoke of a width near by, the choice was slower more often than faster.
_DISTANCE = 0.4
_WARPS = 0.8
_GROUPS = 0.3
_CHUNKS = 0.4
_IDLE = 0.3  # columns that threads cover and a row does not have
_QUARTERS = 0.5  # subgroups that some quarters of a multiprocessor have less
_SHIFTED = 0.1  # accesses across the borders of rows, where the measured ones are not
# In clusters: rows in twice as many alignment phases as the measured ones. And bulk
# copies of rows that begin at one, where the measured ones do not. By 26 random widths (H200).
_MORE_PHASES = 0.15
_FEWER_PHASES = 0.15
_CHECKED_ANEW = 0.15  # columns that threads check for, where the measured ones need not
_ELEMENTWISE = 0.15  # accesses of one element
# Each vector that a row's last subgroup lacks where copies are in bulk, beside a gate. Two cost
# nothing. Of 7440, 7416 and 7200 columns in f32, 2, 3 and 4 of 5 are lacking, and the shares of the
# ceiling are 92, 84 and 64 % (RMS norm, H200). ptxas has a branch around each, in all subgroups, in
# place of a predicate. 7296 columns lack 3, all of them whole, and have 94. Rows in 16 bits that
# begin anywhere in an access are left out: at nine widths from 2123 to 6515, all were slower so.
_LACKING = 0.2
_FEW_LACKING = 2
# Two subgroups to a workgroup, each a team: modulated layer norms of 984 to 1112 columns in bf16
# reached 66 to 72 % of the ceiling so, and 86 to 92 with four subgroups or without teams (H200).
_FEW_TEAMS = 0.4
# The least part of all clusters that may walk: rows of each are in one alignment phase. On an
# H200 (layer norm, bf16), 64 of 66 and 28 of 30 took 3 to 6 % less time than all of them, whose
# threads had other columns then; 12 of 15 took more.
_LEAST_ALIKE = 0.9
_CROWDED = 0.3  # less L1 cache than copies need (`targets.Target.roomy_shared_bytes`)
# Registers of threads that check which of their columns there are, beside the estimate: by ptxas's
# reports. With rows fetched into registers, each of two rows is checked.
_CHECKED = 1.05
_CHECKED_AHEAD = 1.1
# Of rows that are not read again, beside a gate: registers hold more then. An RMS norm's backward
# of 12064 columns in f32 needs some 180 where the estimate is 148. It spilled, and reached 60 % of
# the ceiling (H200); 12288 columns, which need no checks, 92.
_CHECKED_BESIDE = 1.2
# Where single elements are read, a few spilled registers cost less than a second pass.
_SINGLE = 1.1


def fitted(
    spec: NormSpec,
    target: Target,
    known: Mapping[Key, OnePass],
    shares: Mapping[Key, float],
    kind: Key,
) -> Iterator[OnePass]:
    """Schedules for a spec from those of widths near its own, best first.

    A thread keeps about as many vectors of a row. The subgroups of a row, or the rows of a
    subgroup, follow from that, and a workgroup has about as many subgroups as before, in as many
    groups as that takes. How rows are fetched and where the weight is kept stay as they were
    measured.

    Args:
        spec: What is computed.
        target: Where.
        known: The measured schedules of a product of the target.
        shares: Of the ceiling, that they reached.
        kind: Those of this op, source, residual and element size count, whatever their width.
    """
    columns, most_walking = spec.columns, _most_walking(known)
    # A source costs at least so much, whatever has to change. That is found soon; what changes, and
    # whether it is legal, takes longer. So only sources that may come next are asked.
    queue: list[tuple[float, int, int, _Way | None]] = []
    sources = list(known.items())
    for number, (key, _) in enumerate(sources):
        distance = abs(math.log2(columns / key.columns))
        if key._replace(columns=columns) == kind and distance < _OCTAVES:
            least = -math.log2(shares[key]) + _DISTANCE * distance
            queue.append((least - _ROUNDING, number, _UNASKED, None))
    heapq.heapify(queue)
    while queue:
        _, number, _, way = heapq.heappop(queue)
        if way is None:
            key, one = sources[number]
            ways = _ways(key, one, spec, target, shares[key], most_walking)
            for place, found in enumerate(ways):
                heapq.heappush(queue, (found.cost, number, place, found))
        elif _is_legal(way, spec, target, kind):
            yield way.schedule


class _Way(NamedTuple):
    """A schedule that fits a spec.

    Attributes:
        cost: Of what changes.
        schedule: It.
        measured: The one that it was made of.
        source: What that was measured for.
    """

    cost: float
    schedule: OnePass
    measured: OnePass
    source: NormSpec


def _is_legal(way: _Way, spec: NormSpec, target: Target, kind: Key) -> bool:
    """Whether it can be compiled, and has registers enough.

    What was measured with fewer gradients says nothing of these: those that choose look at the
    estimate.
    """
    if way.schedule.illegal(spec, target) is not None:
        return False
    says_nothing = kind.grad_outputs < spec.grad_outputs
    return says_nothing or _fits(way.schedule, spec, way.measured, way.source, target)


def _ways(
    key: Key,
    one: OnePass,
    spec: NormSpec,
    target: Target,
    share: float,
    most_walking: Mapping[tuple[int, int], int],
) -> Iterator[_Way]:
    """Those that follow from one measured schedule, with the fewest vectors of a thread first."""
    columns, distance = spec.columns, abs(math.log2(spec.columns / key.columns))
    is_shifted, widest = one.shifted(spec), vector_of(spec)
    widest_measured = widest_vector(key.columns, (spec.dtype, spec.dy_dtype))
    if not (is_shifted or _same_accesses(one, widest, widest_measured)):
        return
    source = replace(spec, normalized_shape=(key.columns,))
    vectors, subgroups = one.cluster * one.vector, one.subgroups
    touched = touched_columns(spec, one.vector)
    most_walk = _most_to_walk(one, source, most_walking)
    old = one.chunks(source, target)
    # A rule of thumb, unless it was measured otherwise; then registers alone limit it.
    most = most_elements(spec) if old * one.vector <= most_elements(spec) else math.inf
    for chunks in range(max(1, old - 1), old + 2):
        if chunks * one.vector > most:
            continue
        threads = -(-touched // (vectors * chunks))
        warps = -(-threads // target.subgroup_size)
        rows = rows_of_a_subgroup(threads, target) if one.cluster == 1 else 1
        groups = max(1, round(subgroups / warps)) * rows
        workgroups = alike(most_walk, groups * columns, one.vector)
        if one.cluster > 1 and workgroups < _LEAST_ALIKE * most_walk:
            continue
        way = replace(
            one,
            workgroups=workgroups,
            warps=warps,
            groups=groups,
            subgroup_rows=rows,
        )
        crowds = way.crowds(spec, target) and not one.crowds(source, target)
        checks = not one.bulk and _checks(way, spec, target) and not _checks(one, source, target)
        cost = (
            -math.log2(share)
            + (_SHIFTED if is_shifted and not one.shifted(source) else 0)
            + (_CHECKED_ANEW if checks else 0)
            + (_ELEMENTWISE if one.vector == 1 and not one.bulk else 0)
            + (_CROWDED if crowds else 0)
            + (_FEW_TEAMS if way.teams(spec, target) == way.subgroups == 2 else 0)
            + _alignment_cost(way, spec, source)
            + _lacking_cost(way, one, spec, source, target)
            + _QUARTERS * math.log2(_in_quarters(way))
            + _IDLE * math.log2(way.cluster * way.padded_columns(spec, target) / columns)
            + _DISTANCE * distance
            + _WARPS * abs(math.log2(way.subgroups / subgroups))
            + _GROUPS * abs(math.log2(_groups(way) / _groups(one)))
            + _CHUNKS * abs(math.log2(way.chunks(spec, target) / old))
        )
        yield _Way(cost, way, one, source)


def _fits(way: OnePass, spec: NormSpec, one: OnePass, source: NormSpec, target: Target) -> bool:
    """Whether registers suffice, by the estimate or by a measured schedule that took as many."""
    wanted, available = _registers(way, spec, target), way.registers_available(target)
    measured = available >= one.registers_available(target)
    return wanted <= (max(available, _registers(one, source, target)) if measured else available)


def _registers(one: OnePass, spec: NormSpec, target: Target) -> float:
    estimate = one.registers(spec, target)
    if one.vector == 1 and not one.bulk:
        return estimate / _SINGLE
    if one.shifted(spec) or one.bulk:  # the estimate has its checks, or there are none
        return estimate
    if not _checks(one, spec, target):
        return estimate
    if spec.gate is not None and not one.rereads:
        return estimate * _CHECKED_BESIDE
    return estimate * (_CHECKED_AHEAD if one.ahead and not one.slots else _CHECKED)


def _checks(one: OnePass, spec: NormSpec, target: Target) -> bool:
    """Whether threads check which of their columns there are: they cover more than a row."""
    return one.cluster * one.padded_columns(spec, target) > spec.columns


def _in_quarters(one: OnePass) -> float:
    """A multiprocessor's subgroups, if all quarters had as many as the fullest, to those it has."""
    subgroups = one.subgroups * one.resident
    return -(-subgroups // QUARTERS) * QUARTERS / subgroups


def _groups(one: OnePass) -> float:
    """Of a workgroup, those of a subgroup as one."""
    return one.groups / one.subgroup_rows


def _alignment_cost(one: OnePass, spec: NormSpec, source: NormSpec) -> float:
    """Of other alignment phases than where it was measured."""
    more = math.log2(one.alignment_phases(spec) / one.alignment_phases(source))
    if one.bulk:
        return _FEWER_PHASES if more < 0 else 0.0
    return _MORE_PHASES * max(0.0, more) if one.cluster > 1 else 0.0


def _lacking_cost(
    way: OnePass, one: OnePass, spec: NormSpec, source: NormSpec, target: Target
) -> float:
    """Of more vectors that a row's last subgroup lacks than where it was measured."""
    is_narrow = itemsize(spec, Element.X) < WORD_BYTES
    if spec.gate is None or not one.bulk or (is_narrow and way.shifted(spec)):
        return 0.0
    few = max(_FEW_LACKING, one.vectors_lacking(source, target))
    return _LACKING * max(0, way.vectors_lacking(spec, target) - few)


def _most_walking(known: Mapping[Key, OnePass]) -> dict[tuple[int, int], int]:
    """Of clusters of a size, so many to a multiprocessor: some widths have a few clusters less."""
    most: dict[tuple[int, int], int] = {}
    for one in known.values():
        kind = (one.cluster, one.resident)
        most[kind] = max(most.get(kind, 0), one.workgroups)
    return most


def _most_to_walk(one: OnePass, source: NormSpec, most: Mapping[tuple[int, int], int]) -> int:
    """Workgroups, or clusters, that a fit has at most.

    They are all that run at once, unless fewer were measured though rows did not ask for that.
    """
    if one.cluster == 1:
        return one.workgroups
    all_of_them = most[one.cluster, one.resident]
    asked = alike(all_of_them, one.groups * source.columns, one.vector)
    return one.workgroups if one.workgroups < asked else all_of_them


def _same_accesses(one: OnePass, widest: int, widest_measured: int) -> bool:
    """Whether a row of the widest access can be read as it was measured, and no slower.

    Accesses that are wider than for whole lines gain nothing. Narrower ones than the widest, but
    not single elements, may have been the fastest of a row that has as wide ones; and shared memory
    that is filled in bulk is read by them, too.
    """
    measured = one.vector
    narrower = (one.bulk or widest == widest_measured) and 1 < measured <= widest
    return measured == widest or narrower or min(measured, widest) >= WHOLE_LINES
