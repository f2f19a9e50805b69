"""The choice of a schedule: the fastest measured one, or the first legal one of several rules.

Measured are those of the product, or of the product that it has schedules from (`measured_files`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from iree_lnbwd.hardware.products import Product, standing_for
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, MOST_GRAD_OUTPUTS, RMS_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import (
    WHOLE_LINES,
    copied_vector,
    most_elements,
    vector_of,
    widest_access,
    words,
)
from iree_lnbwd.schedules.few_rows import FewRows
from iree_lnbwd.schedules.finalize import with_finalize
from iree_lnbwd.schedules.fitted import fitted
from iree_lnbwd.schedules.forward import Forward
from iree_lnbwd.schedules.forward_choice import choose_forward
from iree_lnbwd.schedules.ir_types import reads_more
from iree_lnbwd.schedules.measured import Key
from iree_lnbwd.schedules.measured_files import serving, shares
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.posted_choice import posted
from iree_lnbwd.schedules.row_blocks import RowBlocks
from iree_lnbwd.schedules.rules import (
    alike,
    rows_of_a_subgroup,
    touched_columns,
    wait_by_themselves,
)
from iree_lnbwd.schedules.schedule import Schedule
from iree_lnbwd.schedules.set_waves import with_all_at_once
from iree_lnbwd.schedules.two_pass import TwoPass

# One pass, staged by cp.async: rules of thumb, from an H200, for widths near no measured one.
_STAGED_WARPS = 16  # of a multiprocessor, if rows are divided among that many
_STAGED_CHUNKS = (
    2,
    3,
    4,
    1,
    6,
    8,
)  # of a thread, best first: two of them keep enough loads under way
_NARROW_ELEMENTS = 8  # of a thread, where a subgroup has several rows
_WORDS_IN_REGISTERS = 24  # 32-bit words of a row that a thread holds; with more, registers spill
# Steps ahead, slots, and whether the weight is staged; best first.
_FETCHES = ((2, 3, True), (1, 2, True), (1, 2, False))
_WIDE_FETCHES = ((1, 2, False), (1, 1, False))
_WIDE_VECTOR = WHOLE_LINES  # elements; with more, registers spill, too

# One pass without staging: rules of thumb, because no such GPU was available.
_DIRECT_THREADS = 256  # of a workgroup
_LEAST_DIRECT_THREADS = 192  # a workgroup with these counts as filled
_DIRECT_WORKGROUPS = 4  # to a multiprocessor
# Threads at once, on AMD's GPUs, of what a workgroup is spread over. Workgroups that cannot run at
# once only add partial rows: by paper, four of 1024 threads to a compute unit take half as long
# again as one (2254 schedules of MI300X, 2428 of RX 7900 XTX).
_DIRECT_AT_ONCE = _DIRECT_WORKGROUPS * _DIRECT_THREADS
_DIRECT_CHUNKS = (2, 3, 4, 1, 6, 8, 12, 16)  # of a thread, best first

# One pass over rows that are too wide for the rules above: by paper, because no GPU that needs them
# was available. Registers have the sums of a row's columns, and little else.
_WIDE_THREADS = (1024, 768, 512)  # of a multiprocessor's only workgroup, best first

# Columns up to which a gate is loaded late on NVIDIA's GPUs. Beyond, two passes took 7 to 26 % less
# time in 10 of 11 cells (gated RMS norms of 24576 to 70001 columns in bf16 and f32, by the modules
# of sm_80 and sm_90, on an H200). Up to there they did in 5 of 9 cells. Several gradients were not
# timed.
_MOST_GATED_LATE = 18_432
# The part of its registers that a thread may lack by the estimate, beside several gradients:
# nothing spills yet, by ptxas's reports; and some 100 bytes do, which comes before loading them
# late.
_NONE_SPILLED, _FEW_SPILLED = 0.05, 0.15

# Few rows. The number of threads and the narrowest tile were the fastest on an H200, at 4096
# columns over all numbers of rows.
_MOST_FEW_ROWS = 1024  # a rule of thumb
_FEW_THREADS = 512  # of a workgroup
_FEW_TILES = (32, 64, 128)  # columns of a workgroup
_FEW_VECTOR = 4  # columns of a thread: a rule of thumb

# Two passes.
# Workgroups for each multiprocessor. Without the cap on registers that they imply, a call at
# 2048 x 32768 in bf16 took 13 us more, of 171, on an H200.
_TWO_PASS_WORKGROUPS = 2
_MOST_TWO_PASS_CHUNKS = 8  # of a thread of the first pass: a rule of thumb
_TWO_PASS_THREADS = 256  # of a workgroup: a rule of thumb
_TWO_PASS_ROWS = 4  # of a thread of the second pass: a rule of thumb
# Where accesses are narrower, more rows, so that as many bytes are under way; and more workgroups,
# where registers have room for them. Layer norm's 33333 columns by single elements, sm_80's modules
# on an H100: 18 % of the ceiling in bf16 without both, 21 by more rows alone, 38 by both.
_MOST_TWO_PASS_ROWS = 16
_TWO_PASS_NARROW_WORKGROUPS = 4  # from a quarter of the widest access down
_QUARTER = 4

# Row blocks, on a CPU.
_CPU_WORKGROUPS = 64  # enough for many threads, few enough for their partial rows to be cheap
_LEAST_CELLS = 1 << 13  # of a workgroup: its partial row, and its beginning, take less time
# Rows of a block, by the bytes of column sums up to which they hold: half of a first-level cache of
# 32 KiB, and a rule of thumb for the second-level cache.
_BLOCK_ROWS = ((1 << 14, 1), (1 << 18, 2))
_MOST_BLOCK_ROWS = 4  # beyond both: a rule of thumb
# Bytes of sums for a block's rows up to which the next block fits the second-level cache beside it.
_MOST_FETCHED = 1 << 17
_LEAST_FETCHED = (
    4  # bytes of an element: with 2, forwards at 4096 columns took up to a tenth longer
)
_CHUNK_OVERHEAD = 8  # as much time as these elements take: a rule of thumb


def choose(spec: NormSpec, target: Target, product: Product | None = None) -> Schedule:
    """The schedule for a spec on a target.

    Args:
        spec: What is computed.
        target: The target to run on.
        product: One of the target's products; None takes the one that stands for the target.

    Raises:
        ValueError: The product belongs to another target.
    """
    if product is not None and product.target != target.name:
        raise ValueError(
            f"product: expected one of {target.name} ({', '.join(target.aliases)}), "
            f"got {product.name} of {product.target}"
        )
    if target.backend == "cpu":
        return _row_blocks(spec, target)
    product = product or standing_for(target.name)
    if not spec.family.is_backward:
        return choose_forward(spec, target, product)
    for candidate in alternatives(spec, target, product):
        if candidate.illegal(spec, target) is None:
            return completed(candidate, spec, target, product)
    return with_finalize(two_pass(spec, target, product), spec, target, product)


def alternatives(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """What `choose` completes the first legal one of, best first, for a backward on a GPU."""
    for one in chain(measured(spec, target, product), nearby(spec, target, product)):
        yield from _beside_sum(one, spec, target)
    reasoned = chain(
        _staged(spec, target, product),
        _direct(spec, target, product),
        _wide(spec, target, product),
    )
    if not reads_more(spec):
        yield from _with_posted(_fitting(reasoned, spec, target), spec, target, product)
        return
    yield from _fitting(reasoned, spec, target)
    if spec.grad_outputs > 1:
        yield from spilling(spec, target, product)
    is_wide = spec.columns > _MOST_GATED_LATE and target.backend == "cuda"
    if spec.gate is None or not is_wide:
        late = _loaded_late(spec, target, product)
        yield from _with_posted(_fitting(late, spec, target), spec, target, product)


def _beside_sum(one: OnePass, spec: NormSpec, target: Target) -> Iterator[OnePass]:
    """What was measured without a sum of dx, for a spec that may have one.

    Where registers have no room for that sum, rows leave theirs, and are read again from shared
    memory. With a residual in bf16, 12608 x 768 took an H200 33 us before, and 25 since; without
    the sum, it takes 24.
    """
    if spec.grad_input_sum_dtype is None:
        yield one
        return
    again = (replace(one, rereads=True),) if one.slots > 0 and not one.rereads else ()
    yield from _fitting(iter((one, *again)), spec, target)


def _fitting(some: Iterator[OnePass], spec: NormSpec, target: Target) -> Iterator[OnePass]:
    """Those whose threads have registers enough."""
    return (one for one in some if one.registers(spec, target) <= one.registers_available(target))


def _with_posted(
    reasoned: Iterator[OnePass], spec: NormSpec, target: Target, product: Product
) -> Iterator[OnePass]:
    """The same, and those of workgroups that post sums, before those that hold a row at most.

    Layer norm's backwards by sm_80's modules, on an H100: of 20480 columns in f32, with one slot,
    78 % of the ceiling, and 94; of 20001, loaded twice, 42 and 91, and in bf16 48 and 71.
    """
    several = posted(spec, target, product)
    for one in reasoned:
        holds_one = one.loads_twice or one.slots == 1
        if holds_one and target.has_cp_async and one.illegal(spec, target) is None:
            yield from several
        yield one
    yield from several


def completed(one: OnePass, spec: NormSpec, target: Target, product: Product) -> OnePass:
    """A schedule with the numbers that follow from the others.

    These are its last kernel's, those of few rows, and how many workgroups run at once.
    """
    one = with_finalize(with_all_at_once(one, spec, target, product), spec, target, product)
    with_few = replace(one, few_rows=_few_rows(spec, target, product, one.few_vector(spec)))
    return with_few if with_few.illegal(spec, target) is None else one


def choose_statistics(spec: NormSpec, target: Target) -> Forward:
    """How a backward recomputes its statistics on a GPU."""
    return choose_forward(spec, target, standing_for(target.name))


def measured(
    spec: NormSpec, target: Target, product: Product, *, spilled: float = _NONE_SPILLED
) -> Iterator[OnePass]:
    """Schedules that were measured as the fastest of this width.

    Args:
        spec: What is computed.
        target: Where.
        product: The GPU.
        spilled: The part of its registers that a thread may lack beside several gradients.
    """
    known = serving(product)
    for kind in _kinds(spec):
        if kind in known and _fits(known[kind], kind, spec, target, spilled):
            yield _usual(known[kind], spec)


def nearby(
    spec: NormSpec, target: Target, product: Product, *, spilled: float = 0.0
) -> Iterator[OnePass]:
    """Those that were measured as the fastest of widths near it, fitted to it, as `measured`."""
    for kind in _kinds(spec):
        for one in fitted(spec, target, serving(product), shares(product), kind):
            if _fits(one, kind, spec, target, spilled):
                yield _usual(one, spec)


def spilling(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Those of `measured` and `nearby` that spill a little beside several gradients."""
    given = (spec, target, product)
    return chain(measured(*given, spilled=_FEW_SPILLED), nearby(*given, spilled=_FEW_SPILLED))


def _usual(one: OnePass, spec: NormSpec) -> OnePass:
    """As it is where more is read than dy and x: nothing waits for the row after."""
    return replace(one, defers=False) if reads_more(spec) else one


def _fits(one: OnePass, kind: Key, spec: NormSpec, target: Target, spilled: float) -> bool:
    """Whether a GPU has what a schedule was measured with, and registers for what it reads more.

    The GPU may have less shared memory than the measured one. Where registers for a gate were
    spilled, an RMS norm's backward took twice as long (H200, 128 columns in bf16). Beside several
    gradients, schedules of one spilled up to 950 bytes (ptxas 12.9).

    Args:
        one: The schedule.
        kind: What it was measured for.
        spec: What is computed.
        target: Where.
        spilled: The part of a thread's registers that several gradients may lack.
    """
    if not one.has_room(spec, target):
        return False
    is_alike = kind.has_gate == (spec.gate is not None) and kind.grad_outputs == spec.grad_outputs
    if not reads_more(spec) or (is_alike and kind.op == spec.op):
        return True
    lacking = spilled if spec.gate is None else 0.0
    return one.registers(spec, target) <= (1 + lacking) * one.registers_available(target)


def _kinds(spec: NormSpec) -> tuple[Key, ...]:
    """What a measurement may be about that serves a spec, best first.

    That of the very op comes before those of the plain op and of plain layer normalization, which
    serve others as well. With sets of weights, only rows of dy and x alone were measured. Of mixed
    sizes, the wider counts: on an H200, with dy in bf16 beside x in f32, layer norm's backwards of
    768 columns went from 77 to 87 % of the ceiling.
    """
    size = max(DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype))
    adds, columns = spec.residual_dtype is not None, spec.columns
    gated = (
        Key(spec.op, size, columns, has_gate=True),
        Key(RMS_NORM_BACKWARD.name, size, columns, has_gate=True),
    )
    several = (
        Key(spec.op, size, columns, adds, spec.from_output, grad_outputs=number)
        for number in range(spec.grad_outputs, MOST_GRAD_OUTPUTS + 1)
    )
    has_sets_alone = spec.weight_sets and spec.gate is None and not (adds or spec.from_output)
    return (
        *(gated if spec.gate is not None else ()),
        *((Key(spec.op, size, columns, has_sets=True),) if has_sets_alone else ()),
        *(several if spec.grad_outputs > 1 else ()),
        Key(spec.op, size, columns, has_residual=adds, from_output=spec.from_output),
        Key(spec.op, size, columns),
        Key(LAYER_NORM_BACKWARD.name, size, columns),
    )


def _staged(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """By cp.async, best first.

    Each multiprocessor has one workgroup, of 16 warps if rows can be divided among them. Then a
    thread has its full share of registers, and two rows in flight for each group cover the latency
    of memory. A thread has more than two chunks only if a row needs them.
    """
    if not target.has_cp_async:
        return
    vector = copied_vector(spec)
    for chunks in _ordered(_STAGED_CHUNKS, spec, target, vector):
        if chunks * vector > most_elements(spec):
            continue
        warps, rows = _shared_out(spec, target, vector, chunks)
        rereads = chunks * vector * words(spec) > _WORDS_IN_REGISTERS
        fetches = _WIDE_FETCHES if rereads else _FETCHES
        groups = max(1, _STAGED_WARPS // warps) * rows
        each = min(vector, _WIDE_VECTOR) if rereads else vector
        for ahead, slots, stages_weight in fetches:
            yield OnePass(
                workgroups=alike(product.processors, groups * spec.columns, each),
                groups=groups,
                warps=warps,
                subgroup_rows=rows,
                vector=each,
                ahead=ahead,
                slots=slots,
                rereads=rereads,
                stages_weight=stages_weight,
            )


def _direct(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Without staging, best first: small workgroups, several of them on a multiprocessor.

    Filled workgroups come first: filled by a row, or by groups that wait separately.
    """
    vector = vector_of(spec)

    def schedule(chunks: int) -> OnePass:
        warps, rows = _shared_out(spec, target, vector, chunks)
        groups = max(1, _DIRECT_THREADS // (warps * target.subgroup_size))
        groups = groups if wait_by_themselves(groups, warps, target) else 1
        at_once = _DIRECT_WORKGROUPS
        if target.backend == "rocm":
            threads = groups * warps * target.subgroup_size
            at_once = max(1, min(at_once, _DIRECT_AT_ONCE // threads))
        return OnePass(
            workgroups=at_once * (product.processors // target.spread),
            groups=rows * groups,
            warps=warps,
            vector=vector,
            subgroup_rows=rows,
        )

    def shortcomings(one: OnePass) -> tuple[bool, int]:
        threads = one.groups * one.threads(target)
        row_words = one.chunks(spec, target) * vector * words(spec)
        return row_words > _WORDS_IN_REGISTERS, max(0, _LEAST_DIRECT_THREADS - threads)

    yield from sorted(
        map(schedule, _ordered(_DIRECT_CHUNKS, spec, target, vector)), key=shortcomings
    )


def _wide(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Wide rows, best first: staged; kept in registers; or kept by the caches alone.

    Two passes read dy and x from memory twice. One pass reads them again from the caches, if these
    have room for a row of each multiprocessor.
    """
    processors = product.processors // target.spread
    whole = vector_of(spec)
    ways = [(whole, 0, 0, False), (min(whole, _WIDE_VECTOR), 0, 0, True)]
    # Staged, a thread reads these ahead of a row's sums, and spills them: 292 bytes (ptxas, sm_80).
    if target.has_cp_async and not (spec.residual_dtype or spec.from_output):
        copied = min(copied_vector(spec), _WIDE_VECTOR)
        ways = [(copied, ahead, slots, True) for ahead, slots, _ in _WIDE_FETCHES] + ways
    for vector, ahead, slots, rereads in ways:
        for threads in _WIDE_THREADS:
            yield OnePass(
                workgroups=alike(processors, spec.columns, vector),
                groups=1,
                warps=threads // target.subgroup_size,
                vector=vector,
                ahead=ahead,
                slots=slots,
                rereads=rereads,
            )


def _loaded_late(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Rows that are read again, beside other gradients of the output or a gate, best first.

    These are loaded when they are used, for the sums and for dx, because registers have no room for
    them. They come from memory once; two passes load each of them twice.
    """
    for one in chain(_staged(spec, target, product), _wide(spec, target, product)):
        if one.rereads:
            yield replace(one, loads_late=True)


def _few_rows(spec: NormSpec, target: Target, product: Product, vector: int) -> FewRows | None:
    """For as many rows of dy and x as fit half of the L2 cache, because they are read twice.

    With more rows than a limit, of any width, the workgroups of the columns take too long. The
    tiles are as narrow as possible without outnumbering the multiprocessors.
    """
    sizes = (DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype))
    rows = min(_MOST_FEW_ROWS, product.l2_bytes // 2 // (spec.columns * sum(sizes)))
    if rows == 0 or spec.grad_input_sum_dtype is not None:
        return None
    tiles = (t for t in _FEW_TILES if spec.columns <= t * product.processors)
    return FewRows(
        rows=rows,
        warps=_FEW_THREADS // target.subgroup_size,
        tile=next(tiles, _FEW_TILES[-1]),
        tile_vector=min(vector, _FEW_VECTOR),
    )


def two_pass(spec: NormSpec, target: Target, product: Product) -> TwoPass:
    """As many small workgroups as fit a multiprocessor's registers; none waits for another."""
    vector = vector_of(spec)
    narrower = widest_access((spec.dtype, spec.dy_dtype)) // vector
    resident = _TWO_PASS_NARROW_WORKGROUPS if narrower >= _QUARTER else _TWO_PASS_WORKGROUPS
    one = TwoPass(
        workgroups=1,
        warps=_TWO_PASS_THREADS // target.subgroup_size,
        vector=vector,
        chunks=min(_MOST_TWO_PASS_CHUNKS, most_elements(spec) // vector),
        rows=min(_MOST_TWO_PASS_ROWS, _TWO_PASS_ROWS * narrower),
        resident=resident,
    )
    tiles = -(-spec.columns // one.tile(target))
    return replace(one, workgroups=max(1, resident * product.processors // tiles))


def _row_blocks(spec: NormSpec, target: Target) -> RowBlocks:
    """Blocks of rows in the cache; larger blocks load and store the column sums less often."""
    acc = DTYPES[spec.acc_dtype].numpy.itemsize
    widest = target.accumulator_bytes // acc
    vectors = [1 << i for i in range(widest.bit_length()) if 1 << i <= spec.columns]
    # A last chunk that overlaps does work twice; a narrow vector does it slowly.
    vector = min(reversed(vectors), key=lambda v: -(-spec.columns // v) * (v + _CHUNK_OVERHEAD))
    sums = 2 * spec.columns * acc
    block = next((rows for cache, rows in _BLOCK_ROWS if sums <= cache), _MOST_BLOCK_ROWS)
    itemsize = DTYPES[spec.dtype].numpy.itemsize
    fits = block * spec.columns * acc <= _MOST_FETCHED
    gains = spec.family.is_backward or itemsize >= _LEAST_FETCHED
    most = RowBlocks(_CPU_WORKGROUPS, block, vector).share
    least = min(max(1, _LEAST_CELLS // (spec.columns * block)) * block, most)
    return RowBlocks(_CPU_WORKGROUPS, block, vector, least=least, fetches_ahead=fits and gains)


def _ordered(chunks: Sequence[int], spec: NormSpec, target: Target, vector: int) -> Sequence[int]:
    """Numbers of chunks, best first: of a row that fits a subgroup, with the fewest lanes idle."""
    if spec.columns > vector * target.subgroup_size:
        return chunks

    def shortcomings(each: int) -> tuple[int, int]:
        _, rows = _shared_out(spec, target, vector, each)
        elements = each * vector
        return target.subgroup_size // rows * elements, abs(elements - _NARROW_ELEMENTS)

    return sorted(chunks, key=shortcomings)


def _shared_out(spec: NormSpec, target: Target, vector: int, chunks: int) -> tuple[int, int]:
    """Subgroups of a row, and rows of a subgroup."""
    threads = -(-touched_columns(spec, vector) // (vector * chunks))
    return -(-threads // target.subgroup_size), rows_of_a_subgroup(threads, target)
