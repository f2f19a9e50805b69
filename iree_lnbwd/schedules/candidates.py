"""Schedules that are worth timing on a GPU, beside the chosen one.

The sums of a forward's rows have one order for any M, and with a residual or without (see
`forward_choice.choose_forward`). So the candidates of a forward differ only in what no sum depends
on. The rules behind that order follow from what `forwards` yields, which is timed for their sake.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.choosing import alternatives, completed, two_pass
from iree_lnbwd.schedules.elements import (
    WHOLE_LINES,
    across_borders,
    most_elements,
    vector_of,
    widest_vector,
)
from iree_lnbwd.schedules.finalize import with_finalize
from iree_lnbwd.schedules.forward import Forward, normalized
from iree_lnbwd.schedules.forward_choice import choose_forward, threads_of_row
from iree_lnbwd.schedules.ir_types import reads_more
from iree_lnbwd.schedules.one_pass import AHEAD_OF_LATER_SUMS, OnePass
from iree_lnbwd.schedules.posted_choice import Way, fitting
from iree_lnbwd.schedules.rules import (
    MOST_BUSY,
    alike,
    rows_of_a_subgroup,
    touched_columns,
)
from iree_lnbwd.schedules.schedule import Schedule
from iree_lnbwd.schedules.two_pass import TwoPass

# What is worth a try: rules of thumb, where nothing else is said.
_MOST_ELEMENTS = 32  # of a row, a thread's
_FEWEST = 8  # elements of a row, a thread's
_REREADS = 16  # elements from which on rows may be worth reading again
_IDLE = 1.35  # columns that threads cover, by those that there are
_CLUSTERS = (1, 2, 4, 8)  # workgroups that share a row
_CLUSTERED_COLUMNS = 4096  # of each of them, at least
_RESIDENT = (1, 2, 3)  # workgroups to a multiprocessor
_WARPS = (6, 8, 12, 16, 20, 24, 32)  # of a workgroup
_BUSY = range(
    8, 49
)  # warps of a multiprocessor, which holds 64 (sm_80, sm_90) or 48 (sm_86, sm_89)
# Steps ahead, slots, whether subgroups copy in bulk, and whether x is copied later than dy.
_FETCHES = (
    *((ahead, slots, False, False) for ahead, slots in ((0, 0), (1, 0), (1, 1), (1, 2), (2, 2))),
    *((ahead, slots, False, False) for ahead, slots in ((2, 3), (3, 3), (3, 4))),
    *((slots, slots, True, False) for slots in (1, 2, 3)),
    (2, 2, True, True),
)
_SPILLS = 1.15  # of the registers there are; the estimate may be wrong by so much
_DX = ((False, False), (True, False), (True, True))  # rows read again, sums received later
_WEIGHTS = ((False, False), (True, False), (True, True))  # staged, widened
_EVEN_PROCESSORS = 128  # which divide the usual numbers of rows

_TWO_PASS_WARPS = (4, 8, 16)
_TWO_PASS_AT_ONCE = (2, 4, 8)  # chunks, and rows, of a thread
_REASONED = 12  # schedules that measurements nearby and rules have to say, at most

_FORWARD_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a workgroup that has several subgroups
_FORWARD_RESIDENT = (1, 2, 3, 4, 6, 8, 12, 16)
_FORWARD_THREADS = (128, 256, 512, 1024)  # of a row that registers do not keep


def sample(
    spec: NormSpec, target: Target, product: Product, chosen: Schedule, count: int, seed: int
) -> tuple[Schedule, ...]:
    """The chosen schedule, those of other rules and measurements, and a random sample.

    All are legal, and no two are equal. Few rows take the chosen form in all of them.

    Args:
        spec: What is computed.
        target: A GPU target.
        product: The GPU, or one like it, with its own number of processors.
        chosen: What is taken without tuning; it comes first.
        count: How many, at least 1; there are fewer where few are legal.
        seed: The same arguments give the same schedules.
    """
    reasoned = itertools.islice(_reasoned(spec, target, product, chosen), _REASONED)
    first = list(dict.fromkeys((chosen, *reasoned)))[:count]
    others = [
        other
        for other in dict.fromkeys(_others(spec, target, product, chosen))
        if other not in first
    ]
    more = random.Random(seed).sample(others, min(count - len(first), len(others)))
    return (*first, *more)


def shares_out_alike(one: Forward, other: Forward) -> bool:
    """Whether two schedules share a row out among threads in the same way.

    Then its sums have the same order, and the same bits.
    """
    return (
        replace(
            one,
            rows=other.rows,
            most_few_rows=other.most_few_rows,
            early=other.early,
            lasts=other.lasts,
            resident=other.resident,
            ahead=other.ahead,
        )
        == other
    )


def one_pass(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """The legal schedules that keep a multiprocessor busy and might keep rows in registers."""
    widest = vector_of(spec)
    vectors = {widest, min(widest, WHOLE_LINES), *across_borders(spec)}
    lates = (False, True) if reads_more(spec) else (False,)
    shared_out = [
        (cluster, vector, chunks)
        for cluster in (_CLUSTERS if target.has_clusters else (1,))
        for vector in sorted(vectors)
        for chunks in range(1, 1 + _MOST_ELEMENTS // vector)
        if cluster == 1 or spec.columns // cluster >= _CLUSTERED_COLUMNS
    ]
    for cluster, vector, chunks in shared_out:
        columns = touched_columns(spec, vector) // cluster
        elements = chunks * vector
        threads = -(-columns // elements)
        warps = -(-threads // target.subgroup_size)
        rows = rows_of_a_subgroup(threads, target) if cluster == 1 else 1
        padded = warps * elements * (target.subgroup_size // rows)
        if (warps > 1 and padded > _IDLE * columns) or (vector > 1 and elements < _FEWEST):
            continue
        for resident, wanted in itertools.product(_RESIDENT, _WARPS):
            groups = max(1, wanted // warps) if cluster == 1 else 1
            if warps * groups * resident not in _BUSY:
                continue
            groups *= rows
            most = {product.walkers(resident, cluster) // target.spread}
            if cluster == 1:
                most.add(resident * _EVEN_PROCESSORS)
            step = groups * spec.columns
            workgroups = {alike(each, step, vector) for each in most}
            for fetch, (rereads, defers), weight, walkers, late in itertools.product(
                _FETCHES, _DX, _WEIGHTS, sorted(workgroups), lates
            ):
                ahead, slots, bulk, x_later = fetch
                if defers and (cluster == 1 or ahead < AHEAD_OF_LATER_SUMS):
                    continue
                one = OnePass(
                    workgroups=walkers,
                    groups=groups,
                    warps=warps,
                    subgroup_rows=rows,
                    vector=vector,
                    ahead=ahead,
                    slots=slots,
                    rereads=rereads,
                    stages_weight=weight[0],
                    widens_weight=weight[1],
                    resident=resident,
                    cluster=cluster,
                    defers=defers,
                    bulk=bulk,
                    x_later=x_later,
                    loads_late=late,
                )
                useless = (
                    (bulk and slots == 1 and _holds_another(one, spec, target))
                    or (x_later and replace(one, x_later=False).illegal(spec, target) is None)
                    or (rereads and elements < _REREADS)
                    or (one.in_place and not rereads)
                    or (one.widens_weight and slots > 0 and spec.gamma_dtype == spec.acc_dtype)
                )
                if useless or not one.has_room(spec, target):
                    continue
                if one.registers(spec, target) > _SPILLS * one.registers_available(target):
                    continue
                if one.illegal(spec, target) is None:
                    yield with_finalize(one, spec, target, product)


def _holds_another(one: OnePass, spec: NormSpec, target: Target) -> bool:
    """Whether shared memory could hold another row."""
    more = replace(one, ahead=one.ahead + 1, slots=one.slots + 1, x_later=False)
    return more.illegal(spec, target) is None


def _reasoned(
    spec: NormSpec, target: Target, product: Product, chosen: Schedule
) -> Iterator[Schedule]:
    """What rules and measurements have to say beside the choice, for a backward."""
    if isinstance(chosen, OnePass | TwoPass):
        found = (
            completed(one, spec, target, product)
            for one in alternatives(spec, target, product)
            if one.illegal(spec, target) is None
        )
        yield from _with_few_rows_of(chosen, found, spec, target)


def _others(
    spec: NormSpec, target: Target, product: Product, chosen: Schedule
) -> Iterator[Schedule]:
    """Every schedule that is worth a try."""
    match chosen:
        case Forward():
            yield from _forwards(spec, target, chosen)
        case OnePass() | TwoPass():
            yield from _with_few_rows_of(chosen, one_pass(spec, target, product), spec, target)
            if isinstance(chosen, OnePass) and chosen.posts:
                yield from _with_few_rows_of(chosen, _posting(spec, target, product), spec, target)
            if isinstance(chosen, TwoPass) or chosen.loads_late:  # by paper alone
                two = with_finalize(two_pass(spec, target, product), spec, target, product)
                yield from _two_passes(spec, target, product, two)


def _posting(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Those of rows that several workgroups share, and whose sums they post in memory."""
    vectors = {min(vector_of(spec), WHOLE_LINES), *across_borders(spec)}
    for warps, resident, fetch, (_, defers), vector in itertools.product(
        _WARPS, _RESIDENT, _FETCHES, _DX[1:], sorted(vectors)
    ):
        ahead, slots, bulk, _ = fetch
        if not bulk and warps * resident in _BUSY:
            way = Way(warps, resident, ahead, slots, defers)
            for one in fitting(spec, target, product, way, vector):
                yield with_finalize(one, spec, target, product)


def _with_few_rows_of(
    chosen: OnePass | TwoPass, found: Iterator[OnePass], spec: NormSpec, target: Target
) -> Iterator[OnePass]:
    """Those that go with the chosen form of few rows, each with that form."""
    few_rows = chosen.few_rows if isinstance(chosen, OnePass) else None
    for one in found:
        with_few = replace(one, few_rows=few_rows)
        if with_few.illegal(spec, target) is None:
            yield with_few


def _two_passes(
    spec: NormSpec, target: Target, product: Product, chosen: TwoPass
) -> Iterator[TwoPass]:
    for warps, chunks, rows, resident in itertools.product(
        _TWO_PASS_WARPS, _TWO_PASS_AT_ONCE, _TWO_PASS_AT_ONCE, _RESIDENT
    ):
        one = replace(chosen, warps=warps, chunks=chunks, rows=rows, resident=resident)
        tiles = -(-spec.columns // one.tile(target))
        one = replace(one, workgroups=max(1, resident * product.processors // tiles))
        if one.illegal(spec, target) is None:
            yield with_finalize(one, spec, target, product)


def forwards(spec: NormSpec, target: Target, product: Product) -> Iterator[Forward]:
    """The legal schedules of a forward that keep a row where the chosen one does.

    They share a row out among threads in any way, so most have other last bits than the chosen one.
    """
    chosen = choose_forward(spec, target, product)
    widest = max(chosen.vector, widest_vector(spec.columns, (normalized(spec),)))
    halved = (widest >> times for times in range(widest.bit_length()))
    for vector in (chosen.vector,) if chosen.shifted(spec) else halved:
        own = replace(chosen, vector=vector).own_columns(spec)
        for chunks in range(1, 1 + most_elements(spec) // vector):
            of_row = -(-own // (vector * chunks))
            several: tuple[int, ...] = _FORWARD_THREADS
            if chosen.in_registers:
                several = (threads_of_row(of_row, target.subgroup_size, own // vector),)
            for threads, packs in itertools.product(several, (False, True)):
                if chosen.in_registers and threads * chunks * vector > _IDLE * own:
                    continue
                way = replace(chosen, threads=threads, vector=vector, chunks=chunks, packs=packs)
                yield from _forwards(spec, target, way)


def _forwards(spec: NormSpec, target: Target, chosen: Forward) -> Iterator[Forward]:
    """Those that share a row out as it is chosen."""
    fill = max(1, target.subgroup_size // chosen.threads)  # rows of a subgroup
    for rows, resident, swaps_early, swaps_rereads, walks in itertools.product(
        _FORWARD_ROWS, _FORWARD_RESIDENT, (False, True), (False, True), {chosen.walks > 0, False}
    ):
        step = rows * fill * spec.columns
        walkers = chosen.walks * resident // (chosen.resident * rows * fill)
        walked = rows * fill * alike(walkers, step, chosen.vector) if walks else 0
        ahead = chosen.ahead * resident // chosen.resident
        one = replace(
            chosen,
            rows=rows * fill,
            resident=resident,
            ahead=walked if walks and ahead else ahead,
            early=chosen.early != swaps_early,
            rereads=chosen.rereads != swaps_rereads,
            walks=walked,
            stages_weights=walks and chosen.stages_weights,
        )
        if one.rows * one.threads * resident > MOST_BUSY and resident > 1:
            continue
        if one.illegal(spec, target) is None:
            yield one
