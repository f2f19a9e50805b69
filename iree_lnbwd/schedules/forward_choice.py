"""Which schedule forwards take on a GPU, and statistics that a backward recomputes: by rules."""

from __future__ import annotations

import math
from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import ADDED_BIAS, RESIDUAL
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.cluster_choice import choose_clustered
from iree_lnbwd.schedules.elements import most_elements, widest_access, widest_vector, words
from iree_lnbwd.schedules.forward import (
    WORD_BYTES,
    Forward,
    bytes_of,
    normalized,
    weighs,
)
from iree_lnbwd.schedules.forward_rows import (
    HEAD_ELEMENTS,
    LEAST_OF_MORE,
    LEAST_THREADS,
    has_more,
    has_two,
    is_head,
    is_slow,
)
from iree_lnbwd.schedules.forward_sets import (
    ELEMENTS_OF_SETS,
    IDLE_OF_SETS,
    LESS_IDLE_OF_SETS,
    PACKED_ELEMENTS_OF_SETS,
    WARPS_OF_SETS,
    has_known_sets,
    has_sets,
    is_known,
    registers_of_sets,
)
from iree_lnbwd.schedules.rules import FEWEST_THREADS, MOST_BUSY
from iree_lnbwd.schedules.shifted_choice import choose_shifted

# Rules for all GPUs, from 7021 schedules of 71 widths from 64 to 65536, on an H200.
# Elements of a row that a thread has at best, by their bytes.
_ELEMENTS = {2: 22, 4: 8, 8: 8}
_ELEMENTS_OF_NARROW_ACCESSES = 10  # of 4 bytes or less
# Likewise, of rows that have more of these, with a mean and without. This and what follows about
# subgroups is from the schedules that `LEAST_OF_MORE` is from.
_MORE_OF_NARROW_ACCESSES = {True: 14, False: 12}
# Where a subgroup keeps a whole row with a mean, no sum goes through shared memory: elements of its
# threads at most, by their bytes.
_ELEMENTS_OF_SUBGROUP = {2: 32, 4: 16}
# Accesses half as wide are taken if they leave so much fewer columns idle: a layer norm of 1032 in
# bf16 went from 84 % of the ceiling to 94.
_LESS_IDLE = 0.85
_IDLE_OF_HALVED = 1.25  # as below, of these
_HEAD_WARPS = 8  # of a workgroup, of rows of a head's width
# Columns that threads cover, to the fewest: up to which the elements of each decide.
_IDLE = {2: 1.07, 4: 1.25, 8: 1.25}
_FEWEST_CHUNKS = 2  # of a thread: with one, too few loads are under way
# Threads of a row at most. With 16 bits, fewer of them load as many bytes, until each has as many
# elements as there may be; and fewer still if there are two sums, which each thread loads.
_THREADS = 512
_NARROW_THREADS = 256
_CENTRED_THREADS = 128
_BUSY = 1024  # threads of a multiprocessor that there should be at once, which caps their registers
_BUSIER = 1536  # likewise, of a biased row without a residual that has few words in each
_FEW_WORDS = 16  # 32-bit words of a row that a thread has, in the type of sums
# Rows of 32 bits are always loaded with their weights, up to so many columns and elements of a
# thread. So are those of narrow accesses, with fewer columns.
_EARLY_COLUMNS = 2048
_EARLY_COLUMNS_OF_NARROW_ACCESSES = 1024
# Rows of 16 bits without a mean, alone and in wider accesses, up to so many columns: RMS norms of
# 264, 340, 580 and 640 columns in bf16 went from 92 to 97 % of the ceiling to 99 (H200). Of rows
# that are narrower than a head's, those with a mean, too, if a thread has more than a few elements:
# of 72 and 88 columns, RMS norms took 6 and 8 % less time so, and layer norms 2 and 4 (H100).
_EARLY_COLUMNS_OF_16_BITS = 768
_BUSY_EARLY = 832  # threads of a multiprocessor that there should be at once then
_EARLY_ELEMENTS_OF_THREAD = 8
# Rows of more threads than that stay narrow: 4096 x 16384 in bf16 took an H200 63.1 us in place of
# 67.5, with three workgroups on a multiprocessor in place of two.
_PACKED_THREADS = 256
# RMS norms of 16 bits with a gate: threads at once, by whether each has few elements. By 300
# schedules of five widths from 1024 to 8192, on an H200, with the gate before the norm and after.
# Where a row has more than 256 threads, workgroups are rounded up: with three of 320 threads in
# place of two, 10240 columns went from 97 % of a copy to 108, and 9224 columns took 7 % less time.
_FEW_GATED_ELEMENTS = 16
_BUSY_GATED = {True: 1280, False: 768}
_REGISTER_FILE = 1 << 16  # of the H200's multiprocessor, where the numbers are from
_FEW_ROWS = 256  # up to which a call has few
_FEW_ELEMENTS = 1 << 20  # likewise
# Of 16 bits, where threads have more: 512 x 768 in bf16 took an H200 2.9 us, and 2.1 as few rows.
_MORE_FEW_ROWS = 768
_MOST_THREADS = 1024  # that share a row that is not in registers
_WARPS = 4  # subgroups of a workgroup whose rows are narrow
_FEW_WARPS = 2  # likewise, of rows that fill one, or begin early and fill two
_SHARED_BYTES = 1 << 16  # of a wide row without a residual; of a wider one, too few fit


def choose_forward(spec: NormSpec, target: Target, product: Product) -> Forward:
    """A schedule that follows from rules: for any N, and for a backward's statistics, too.

    A thread has the elements of a few accesses. A wide row takes more subgroups, and then more
    elements of each thread, as long as registers hold them; then it is shared by a cluster, or
    kept in shared memory, and the widest is read again.

    How a row is shared out among threads follows from what is normalized, with a residual their
    sum, and from the op. So the sums of a row have one order and the same bits, whether the
    residual is fused or added before, and for any M.

    Args:
        spec: What is computed; a forward, or a backward that recomputes its statistics.
        target: The GPU target to run on.
        product: One of the target's products: a fixed number of rows is spread over its processors.
    """
    across = _across(spec, target, product)
    if across is not None:
        return replace(across, most_few_rows=_most_few_rows(spec, target, early=False))
    vector = _vector(spec, target)
    way = _shared_out(spec, target, vector)
    if way is None:
        return _wide(spec, target, vector)
    chunks, threads = way
    rows = _rows_of_workgroup(spec, target, product, vector, way)
    early = _is_early(spec, target, vector, way)
    busy = _busy(spec, target, vector, way)
    is_free = _is_free(spec, target, vector)
    return Forward(
        rows=rows,
        threads=threads,
        vector=vector,
        chunks=chunks,
        in_registers=True,
        most_few_rows=_most_few_rows(spec, target, early=early),
        early=early,
        packs=_packs(spec, target, vector, way),
        resident=1 if is_free else max(1, busy // (rows * threads)),
    )


def _rows_of_workgroup(
    spec: NormSpec, target: Target, product: Product, vector: int, way: tuple[int, int]
) -> int:
    """As many as fill some subgroups, and no fewer than fill one."""
    threads, lanes = way[1], target.subgroup_size
    is_light_head = bytes_of(normalized(spec)) < WORD_BYTES and not spec.family.centres
    of_sets, packs = has_sets(spec, vector), _packs(spec, target, vector, way)
    is_wide_short = _is_short(spec, target, vector) and threads > lanes
    if is_head(spec, vector) and not is_light_head:
        warps = _HEAD_WARPS
    elif of_sets and packs:
        warps = _WARPS
    elif _fits_subgroup(spec, target, vector, way) or is_wide_short:
        warps = _FEW_WARPS
    else:
        warps = WARPS_OF_SETS if of_sets and threads >= lanes else _WARPS
    rows = max(1, warps * lanes // threads)
    if spec.rows is not None:
        rows = min(rows, -(-spec.rows // product.processors))
    fill = max(1, lanes // threads)  # a subgroup
    return -(-rows // fill) * fill


def _packs(spec: NormSpec, target: Target, vector: int, way: tuple[int, int]) -> bool:
    """Whether rows stay as narrow as they came."""
    (chunks, threads), lanes = way, target.subgroup_size
    if has_two(spec) or bytes_of(normalized(spec)) >= WORD_BYTES or target.backend != "cuda":
        return False
    if threads <= lanes and has_known_sets(spec, target, vector):
        return chunks * vector >= PACKED_ELEMENTS_OF_SETS
    return spec.has(ADDED_BIAS) and threads > _PACKED_THREADS


def _busy(spec: NormSpec, target: Target, vector: int, way: tuple[int, int]) -> int:
    """Threads of a multiprocessor that there should be at once."""
    (chunks, threads), packs = way, _packs(spec, target, vector, way)
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    if _is_short(spec, target, vector):
        return _BUSY_EARLY
    if has_sets(spec, vector):
        each = registers_of_sets(spec, target, vector, way, packs=packs)
        return min(MOST_BUSY, _REGISTER_FILE // each)
    is_gated_rms = spec.gate is not None and not spec.family.centres
    if is_gated_rms and is_narrow and target.backend == "cuda":
        has_few = chunks * vector <= _FEW_GATED_ELEMENTS
        busy = _BUSY_GATED[has_few]
        return busy if has_few or threads <= _PACKED_THREADS else -(-busy // threads) * threads
    few_words = chunks * vector * words(spec) <= _FEW_WORDS
    is_light = is_narrow and few_words and not has_two(spec)
    is_busier = is_light and spec.has(ADDED_BIAS)
    return _BUSIER if is_busier or packs else _BUSY


def _is_free(spec: NormSpec, target: Target, vector: int) -> bool:
    """Whether nothing caps the registers of threads.

    So it is for f32 rows of two tensors, for many narrow accesses, and for rows of a head's width.
    """
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    has_many = is_slow(spec, vector) and (has_two(spec) or not has_more(spec, target))
    return (spec.has(RESIDUAL) and not is_narrow) or has_many or is_head(spec, vector)


def _across(spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """A schedule whose rows clusters share, or begin anywhere in an access; None for others."""
    shifted = choose_shifted(spec, target, product)
    if shifted is not None and shifted.cluster > 1:
        return shifted
    return choose_clustered(spec, target, product) or shifted


def _is_short(spec: NormSpec, target: Target, vector: int) -> bool:
    """Whether a row comes in narrow accesses, and so few that its weights are loaded with it."""
    is_short = spec.columns <= _EARLY_COLUMNS_OF_NARROW_ACCESSES
    comes_slowly = is_slow(spec, vector) and has_more(spec, target)
    return is_short and comes_slowly and not has_two(spec)


def _is_early(spec: NormSpec, target: Target, vector: int, way: tuple[int, int]) -> bool:
    """Whether weights are loaded with many rows, too.

    They would take registers beside a gate's, until the row's sums are there: bf16 of 128 and 2048
    columns went from 91 and 85 % of the ceiling to 98 and 90, f32 of 7160 from 88 to 104 (H200,
    after the norm).
    """
    if not weighs(spec) or spec.gate is not None:
        return False
    if has_sets(spec, vector) or _is_short(spec, target, vector):
        return True
    of_head = is_head(spec, vector)
    if bytes_of(normalized(spec)) < WORD_BYTES:
        is_alone = target.backend == "cuda" and not (spec.has(RESIDUAL) or is_slow(spec, vector))
        if spec.columns < LEAST_OF_MORE and not of_head:
            return is_alone and way[0] * vector > _FEW_WORDS
        if spec.family.centres or of_head:
            return not spec.family.centres
        return is_alone and spec.columns <= _EARLY_COLUMNS_OF_16_BITS
    has_few = way[0] * vector <= _EARLY_ELEMENTS_OF_THREAD and spec.columns <= _EARLY_COLUMNS
    in_subgroup = _fits_subgroup(spec, target, vector, way)
    return of_head or has_few or in_subgroup or spec.has(RESIDUAL)


def _most_few_rows(spec: NormSpec, target: Target, *, early: bool) -> int:
    """How many rows are few; 0 if a kernel of their own would not differ."""
    differs = weighs(spec) and (not early or target.has_cache_policies)
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    most = _MORE_FEW_ROWS if is_narrow and has_more(spec, target) else _FEW_ROWS
    return min(most, _FEW_ELEMENTS // spec.columns) if differs else 0


def _vector(spec: NormSpec, target: Target) -> int:
    """Elements of an access: as many as divide a row, or half of them."""
    widest = widest_vector(spec.columns, (normalized(spec),))
    half = max(1, widest // 2)
    covered = {
        vector: vector * math.prod(way)
        for vector in (widest, half)
        if (way := _shared_out(spec, target, vector)) is not None
    }
    less_idle = LESS_IDLE_OF_SETS if has_sets(spec, widest) else _LESS_IDLE
    may_halve = is_known(spec, target, widest) and not is_slow(spec, half)
    if may_halve and len(covered) > 1 and covered[half] <= less_idle * covered[widest]:
        return half
    return widest


def _fits_subgroup(spec: NormSpec, target: Target, vector: int, way: tuple[int, int]) -> bool:
    """Whether a row with a mean stays in a subgroup, in accesses that are not narrow."""
    (chunks, threads), lanes = way, target.subgroup_size
    most = _ELEMENTS_OF_SUBGROUP.get(bytes_of(normalized(spec)), 0)
    may_fit = is_known(spec, target, vector) and not is_slow(spec, vector)
    # Half a subgroup, only where the widest accesses divide a row: else 508 columns in bf16 went
    # from 95 % of the ceiling to 92.
    is_whole = threads == lanes or spec.columns % widest_access((normalized(spec),)) == 0
    fits = threads <= lanes and chunks * vector <= most
    return spec.family.centres and may_fit and is_whole and fits


def _shared_out(spec: NormSpec, target: Target, vector: int) -> tuple[int, int] | None:
    """Vectors of a thread, and the threads of a row; None if registers cannot keep it.

    Few threads are to be idle. Among ways that leave about as few, a thread has about as many
    elements as the rules say.
    """
    size, vectors = bytes_of(normalized(spec)), spec.columns // vector
    lanes, centres = target.subgroup_size, spec.family.centres
    most, in_narrow_accesses = most_elements(spec), is_slow(spec, vector)
    ways = []
    for chunks in range(_FEWEST_CHUNKS, most // vector + 1):
        threads = threads_of_row(-(-vectors // chunks), lanes, vectors)
        most_threads = _THREADS
        if size < WORD_BYTES and (chunks + 1) * vector <= most and not in_narrow_accesses:
            most_threads = _CENTRED_THREADS if centres else _NARROW_THREADS
        if threads <= most_threads:
            ways.append((-(-vectors // threads), threads))
    if not ways:
        return None
    least = min(chunks * threads for chunks, threads in ways)
    of_slow = (
        _MORE_OF_NARROW_ACCESSES[centres]
        if has_more(spec, target)
        else _ELEMENTS_OF_NARROW_ACCESSES
    )

    def misses(way: tuple[int, int]) -> float:
        if _fits_subgroup(spec, target, vector, way):
            return -way[0]
        usual = HEAD_ELEMENTS[size] if is_head(spec, vector) else _ELEMENTS[size]
        usual = ELEMENTS_OF_SETS[size] if has_sets(spec, vector) else usual
        best = of_slow if in_narrow_accesses else usual
        return abs(math.log2(way[0] * vector / best))

    is_halved = vector < widest_vector(spec.columns, (normalized(spec),))
    idle = _IDLE_OF_HALVED if is_halved else _IDLE[size]
    idle = IDLE_OF_SETS if has_known_sets(spec, target, vector) else idle
    return min((way for way in ways if math.prod(way) <= idle * least), key=misses)


def threads_of_row(least: int, lanes: int, vectors: int) -> int:
    """At least so many, as a row may have: a power of 2 of a subgroup's, or several subgroups.

    Args:
        least: The fewest.
        lanes: Threads of a subgroup.
        vectors: Accesses of the row.
    """
    threads = max(FEWEST_THREADS, min(LEAST_THREADS, vectors), least)
    return 1 << (threads - 1).bit_length() if threads <= lanes else -(-threads // lanes) * lanes


def _wide(spec: NormSpec, target: Target, vector: int) -> Forward:
    """For rows that registers cannot keep."""
    size = bytes_of(normalized(spec))
    fits = size < WORD_BYTES and spec.columns * size <= _SHARED_BYTES
    threads = min(_MOST_THREADS, target.max_threads) // (2 if fits else 1)
    shared = _in_steps(spec, vector, threads, in_shared_memory=True)
    if (fits or spec.has(RESIDUAL)) and shared.illegal(spec, target) is None:
        return shared
    return _in_steps(spec, vector, threads, in_shared_memory=False)


def _in_steps(spec: NormSpec, vector: int, threads: int, *, in_shared_memory: bool) -> Forward:
    """A row in as few steps as registers allow; it stays in shared memory, or is read again."""
    vectors = spec.columns // vector
    steps = -(-vectors // (threads * (most_elements(spec) // vector)))
    return Forward(
        rows=1,
        threads=threads,
        vector=vector,
        chunks=-(-vectors // (threads * steps)),
        in_registers=False,
        in_shared_memory=in_shared_memory,
        resident=_BUSY // threads if in_shared_memory else 1,
    )
