"""Which schedule forwards take whose rows begin anywhere in an access: by rules."""

from __future__ import annotations

from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL, Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import widest_access, widest_vector
from iree_lnbwd.schedules.forward import WORD_BYTES, Forward, bytes_of, normalized, weighs
from iree_lnbwd.schedules.ir_types import itemsize
from iree_lnbwd.schedules.rules import alike, own_columns

# From 1317 schedules of 44 widths from 67 to 98277, on an H200.
_LEAST_COLUMNS = 64
# Widths of rows for which other accesses are faster: of 16 bits, of a pair of elements, with a mean
# and without; and of a single one, by their bytes, too.
_IN_PAIRS = {True: (range(3000), range(12289, 1 << 31)), False: (range(2000),)}
_ONE_BY_ONE = {
    2: {True: range(193, 3000), False: range(257, 420)},
    4: {True: range(193, 561), False: range(257, 390)},
}
_WIDEST_F32 = 24576  # columns
# Where workgroups walk over rows with a mean, they cut the weights once for all of their rows: the
# fewest columns of such rows, by the bytes of an element. In 16 bits, rows of some widths are
# faster in single elements, or in pairs, and clusters of two share others. From 1144 schedules of
# 77 widths from 395 to 18004, on an H200.
_LEAST_OF_WALKS = {2: 193, 4: 6145}
_ONE_BY_ONE_OF_WALKS, _IN_PAIRS_OF_WALKS = range(193, 700), range(3000)
_IN_TWO, _ELEMENTS_IN_TWO = range(16385, 18433), 24
# Threads that a multiprocessor should have at once then, and those of a pair that is better than
# one workgroup alone.
_BUSY_WALKS, _BUSY_PAIR = {2: 512, 4: 256}, {2: 640, 4: 256}
# Where a subgroup has a row, so many copy theirs together: 901 columns in bf16 went from 73 % of
# the ceiling to 92. Where several have one, and threads few elements, more are at once, if the
# cache has room: 1163 columns went from 76 to 79. From 404 schedules of 20 widths, 713 to 3601.
_SUBGROUPS_OF_WALKS = 8
# Where a workgroup of 16 bits has one row, and such threads leave room for two of them or more, the
# weights wait in shared memory: 10629 columns in bf16 went from 83 % of the ceiling to 88. From 361
# schedules of 11 widths.
_BUSY_STAGED, _BUSY_STAGED_PAIR, _STAGED_SLOTS = 640, 704, 3
_LIGHT_ELEMENTS, _BUSY_LIGHT_WALKS = 24, 640
_FREE_THREADS = 512  # at once, up to which registers have room for a row in two alignments
_FREE_ROW_THREADS = 480  # and a workgroup has fewer than that
# Slots, best first. With a fourth of several workgroups, more rows than so many bytes are at once,
# and push each other out of the L2 cache.
_SLOTS = {2: (4, 3), 4: (3,)}
_MOST_AT_ONCE = 14_400_000
# Elements of a row that a thread has, by their bytes: with few threads, and with more.
_ELEMENTS = {2: (32, 32), 4: (24, 28)}
_FEW_THREADS = 256
_ROW_THREADS = 128  # of a workgroup, where a row has fewer
# Threads that a multiprocessor should have at once, which caps their registers.
_BUSY = {2: 1280, 4: 1024}
# Likewise, where a row has fewer threads than a workgroup: of threads with few elements, and of
# those with so many. On an H200, RMS norms of 1331 columns in f32 went from 82 % of the ceiling to
# 98, of 1163 in bf16 from 80 to 83.
_BUSY_NARROW_ROWS = {2: 1280, 4: 1024}
_FULL_ELEMENTS = {2: 32, 4: 24}
_BUSY_FULL_NARROW_ROWS = {2: 1024, 4: 896}
_BUSY_WITH_GATE = {2: 1024, 4: 832}
_BUSY_WITH_RESIDUAL = {2: 832, 4: 0}
_BUSIER = 1536  # of large workgroups whose rows leave registers free


def choose_shifted(spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """A schedule of accesses that go across the borders of rows; None where others are faster.

    How a row is shared out follows from what is normalized and from the op, as in `choose_forward`.
    """
    size, vector = bytes_of(normalized(spec)), widest_access((normalized(spec),))
    if not _is_worth_it(spec, target, size):
        return None
    cluster = 2 if _takes_two(spec, target, size) else 1
    if cluster > 1:
        threads, chunks = _way(spec, target, vector, _ELEMENTS_IN_TWO, cluster)
    else:
        threads, chunks = _shared_out(spec, target, size, vector)
    rows = max(1, _ROW_THREADS // threads)
    packs, rereads, busy = _in_registers(spec, size, threads, chunks * vector)
    one = Forward(
        rows=rows,
        threads=threads,
        vector=vector,
        chunks=chunks,
        in_registers=True,
        packs=packs,
        resident=max(cluster, busy // (rows * threads)),
        cluster=cluster,
        rereads=rereads,
    )
    if (walking := _walking(one, spec, target, product)) is not None:
        return walking
    return one if one.illegal(spec, target) is None else None


def _walks(spec: NormSpec, target: Target, size: int) -> bool:
    """Whether rows are such that workgroups walk over them, whatever other operands there are."""
    return target.has_bulk_copies and spec.family.centres and spec.columns >= _LEAST_OF_WALKS[size]


def _takes_two(spec: NormSpec, target: Target, size: int) -> bool:
    """Whether clusters of two share rows that one workgroup would hold alone with many threads."""
    is_such = size < WORD_BYTES and spec.columns in _IN_TWO
    return is_such and target.has_clusters and _walks(spec, target, size)


def _walking(one: Forward, spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """The same, with workgroups that walk over the rows; None if that is slower, or not legal.

    Without weights, a walk saves nothing. Wider ones than x leave no registers for rows.
    """
    size, in_subgroups = bytes_of(normalized(spec)), one.threads <= target.subgroup_size
    of_weights = max(itemsize(spec, element) for element in (Element.GAMMA, Element.BETA))
    if not (_walks(spec, target, size) and weighs(spec)) or of_weights > size:
        return None
    rows = _SUBGROUPS_OF_WALKS if in_subgroups else one.rows
    threads = rows * one.threads
    if size < WORD_BYTES and rows == one.cluster == 1:
        staged = _staged(one, spec, target, product)
        if staged is not None:
            return staged
    is_pair = one.cluster > 1 or 2 * threads <= _BUSY_PAIR[size]
    usual = max(_BUSY_WALKS[size] // threads, 2 if is_pair else 1)
    is_light = rows > 1 and not in_subgroups and one.chunks * one.vector <= _LIGHT_ELEMENTS
    more = [(_BUSY_LIGHT_WALKS // threads, _SLOTS[size][0])] if is_light else []
    for resident, slots in (*more, *((usual, slots) for slots in _SLOTS[size])):
        workgroups = alike(product.walkers(resident, one.cluster), rows * spec.columns, one.vector)
        is_free = usual * threads <= _FREE_THREADS and threads < _FREE_ROW_THREADS
        way = replace(
            one,
            rows=rows,
            early=True,
            packs=size < WORD_BYTES,
            resident=resident,
            rereads=not is_free,
            walks=rows * workgroups,
            slots=slots,
        )
        at_once = slots * way.walks * spec.columns * size
        is_least = resident == 1 or (resident == usual and slots == _SLOTS[size][-1])
        if (is_least or at_once <= _MOST_AT_ONCE) and way.fits(spec, target):
            return way
    return None


def _staged(one: Forward, spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """The same, with weights in shared memory; None where there is no room for two workgroups."""
    is_pair = 2 * one.threads <= _BUSY_STAGED_PAIR
    resident = max(_BUSY_STAGED // one.threads, 2 if is_pair else 1)
    way = replace(
        one,
        early=True,
        packs=True,
        resident=resident,
        rereads=False,
        walks=alike(product.walkers(resident, 1), spec.columns, one.vector),
        slots=_STAGED_SLOTS,
        stages_weights=True,
    )
    return way if resident > 1 and way.fits(spec, target) else None


def _is_worth_it(spec: NormSpec, target: Target, size: int) -> bool:
    """Whether such accesses are faster than those that divide a row. No other operand counts.

    So an addition and a norm have the bits of a norm with a residual.
    """
    paired = widest_vector(spec.columns, (normalized(spec),)) * size
    columns, centres = spec.columns, spec.family.centres
    if size not in _ELEMENTS or paired > WORD_BYTES or columns < _LEAST_COLUMNS:
        return False
    walks = size < WORD_BYTES and _walks(spec, target, size)
    if size < WORD_BYTES and paired > size:
        in_pairs = (_IN_PAIRS_OF_WALKS,) if walks else _IN_PAIRS[centres]
        return all(columns not in widths for widths in in_pairs)
    is_known = size < WORD_BYTES or columns <= _WIDEST_F32
    one_by_one = _ONE_BY_ONE_OF_WALKS if walks else _ONE_BY_ONE[size][centres]
    return is_known and columns not in one_by_one


def _in_registers(spec: NormSpec, size: int, threads: int, elements: int) -> tuple[bool, bool, int]:
    """Whether a row is packed, whether it is read once more, and how many threads are at once."""
    is_narrow, centres = size < WORD_BYTES, spec.family.centres
    if spec.has(RESIDUAL):
        return False, False, _BUSY_WITH_RESIDUAL[size]
    if spec.gate is not None:
        return False, False, _BUSY_WITH_GATE[size]
    if threads < _ROW_THREADS:
        is_full = elements >= _FULL_ELEMENTS[size] or (is_narrow and centres)
        return False, False, (_BUSY_FULL_NARROW_ROWS if is_full else _BUSY_NARROW_ROWS)[size]
    if not is_narrow:
        return False, False, _BUSY[size]
    if threads <= _BUSY[size] // 3:
        return True, centres, _BUSY[size]
    # A multiprocessor has two such workgroups, or one. Layer norms keep their rows wide, and RMS
    # norms leave room for one more: with 16001 columns, 71 % and 89, in place of 67 and 86.
    return not centres, not centres, _BUSY[size] if centres else _BUSIER


def _shared_out(spec: NormSpec, target: Target, size: int, vector: int) -> tuple[int, int]:
    """The threads of a row, and the vectors of a thread."""
    few, more = _ELEMENTS[size]
    threads, chunks = _way(spec, target, vector, few)
    return (threads, chunks) if threads <= _FEW_THREADS else _way(spec, target, vector, more)


def _way(
    spec: NormSpec, target: Target, vector: int, elements: int, cluster: int = 1
) -> tuple[int, int]:
    """Likewise, with so many elements of a row to a thread, or fewer."""
    chunks = own_columns(spec, cluster, vector) // vector
    least, lanes = -(-chunks * vector // elements), target.subgroup_size
    if least <= lanes:
        threads = max(4, 1 << (least - 1).bit_length())
    else:
        threads = -(-least // lanes) * lanes
    return threads, -(-chunks // threads)
