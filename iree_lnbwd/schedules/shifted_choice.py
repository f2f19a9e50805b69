"""Which schedule forwards take whose rows begin anywhere in an access: by rules."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import widest_access, widest_vector
from iree_lnbwd.schedules.forward import WORD_BYTES, Forward, bytes_of, normalized
from iree_lnbwd.schedules.rules import own_columns

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
# Elements of a row that a thread has, by their bytes: with few threads, and with more.
_ELEMENTS = {2: (32, 32), 4: (24, 28)}
_FEW_THREADS = 256
_ROW_THREADS = 128  # of a workgroup, where a row has fewer
# Threads that a multiprocessor should have at once, which caps their registers.
_BUSY = {2: 1280, 4: 1024}
_BUSY_NARROW_ROWS = 1024
_BUSY_WITH_GATE = {2: 1024, 4: 832}
_BUSY_WITH_RESIDUAL = {2: 832, 4: 0}
_BUSIER = 1536  # of large workgroups whose rows leave registers free


def choose_shifted(spec: NormSpec, target: Target) -> Forward | None:
    """A schedule of accesses that go across the borders of rows; None where others are faster.

    How a row is shared out follows from what is normalized and from the op, as in `choose_forward`.
    """
    size, vector = bytes_of(normalized(spec)), widest_access((normalized(spec),))
    if not _is_worth_it(spec, size):
        return None
    threads, chunks = _shared_out(spec, target, size, vector)
    rows = max(1, _ROW_THREADS // threads)
    packs, rereads, busy = _in_registers(spec, size, threads)
    one = Forward(
        rows=rows,
        threads=threads,
        vector=vector,
        chunks=chunks,
        in_registers=True,
        packs=packs,
        resident=max(1, busy // (rows * threads)),
        rereads=rereads,
    )
    return one if one.illegal(spec, target) is None else None


def _is_worth_it(spec: NormSpec, size: int) -> bool:
    """Whether such accesses are faster than those that divide a row. No other operand counts.

    So an addition and a norm have the bits of a norm with a residual.
    """
    paired = widest_vector(spec.columns, (normalized(spec),)) * size
    columns, centres = spec.columns, spec.family.centres
    if size not in _ELEMENTS or paired > WORD_BYTES or columns < _LEAST_COLUMNS:
        return False
    if size < WORD_BYTES and paired > size:
        return all(columns not in widths for widths in _IN_PAIRS[centres])
    is_known = size < WORD_BYTES or columns <= _WIDEST_F32
    return is_known and columns not in _ONE_BY_ONE[size][centres]


def _in_registers(spec: NormSpec, size: int, threads: int) -> tuple[bool, bool, int]:
    """Whether a row is packed, whether it is read once more, and how many threads are at once."""
    is_narrow, centres = size < WORD_BYTES, spec.family.centres
    if spec.has(RESIDUAL):
        return False, False, _BUSY_WITH_RESIDUAL[size]
    if spec.gate is not None:
        return False, False, _BUSY_WITH_GATE[size]
    if threads < _ROW_THREADS and is_narrow:
        return False, False, _BUSY_NARROW_ROWS
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


def _way(spec: NormSpec, target: Target, vector: int, elements: int) -> tuple[int, int]:
    """Likewise, with so many elements of a row to a thread, or fewer."""
    chunks = own_columns(spec, 1, vector) // vector
    least, lanes = -(-chunks * vector // elements), target.subgroup_size
    if least <= lanes:
        threads = max(4, 1 << (least - 1).bit_length())
    else:
        threads = -(-least // lanes) * lanes
    return threads, -(-chunks // threads)
