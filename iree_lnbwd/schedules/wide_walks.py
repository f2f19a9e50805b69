"""How clusters walk over wide rows of a forward, and keep the weights in shared memory: by rules.

A wide row's weights come from the L2 cache, two bytes or eight for each column, and take as many
instructions as the row: more where they are cut. A cluster that walks reads and cuts them once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import widest_access, widest_vector
from iree_lnbwd.schedules.forward import WORD_BYTES, Forward, bytes_of, normalized, weighs
from iree_lnbwd.schedules.rules import alike

_LINE_BYTES = 128
_REGISTER_FILE = 1 << 16  # of the H200's multiprocessor
_BESIDE_ELEMENTS = 22  # registers of a thread, besides a row's elements
_BUSY = 0.95  # clusters, to those that run at once, that are enough


@dataclass(frozen=True)
class _Walk:
    """One way to walk.

    Attributes:
        threads: Of a multiprocessor at once, at most.
        row_bytes: Likewise, bytes of rows.
        least_bytes: With fewer bytes of rows at once, a walk is slower than none.
        slots: Rows of a workgroup in shared memory, the most that fit; 1 where rows are loaded.
        waves: There may be so many times as many clusters as run at once: where their number must
            be a multiple, so that rows begin alike, and fewer would leave too much of a GPU idle.
        packs: As in `Forward`.
        rereads: As in `Forward`.
        fetches: Whether the next row of the walk is fetched into the L2 cache.
    """

    threads: int
    row_bytes: int
    least_bytes: int = 0
    slots: tuple[int, ...] = (1,)
    waves: int = 1
    packs: bool = False
    rereads: bool = False
    fetches: bool = False


# From 6992 schedules of 90 widths from 14469 to 131064, on an H200. Ranges of columns, with a mean
# and without, by the bytes of an element, and by whether accesses of 16 bytes divide a row, others
# of several elements do, or none does.
_COPIED = _Walk(640, 96_000, slots=(3,), packs=True)
_PAIRS = _Walk(1120, 62_000, fetches=True)
_CUT = _Walk(1030, 66_000, waves=2, rereads=True, fetches=True)
_STAGED = _Walk(896, 128_000)
_NARROW_RMS = _Walk(1024, 96_000, slots=(3,), waves=2, packs=True)
_F32_RMS = _Walk(736, 56_000, slots=(4, 3))
_ANY = 1 << 31
_ODD_F32 = (
    (range(92_000), _STAGED),
    (range(92_000, _ANY), replace(_CUT, row_bytes=64_000, waves=3)),
)
_ODD_NARROW_RMS = ((range(58_000, 116_000), _NARROW_RMS),)
_ODD_F32_RMS = ((range(50_000, 116_000), _F32_RMS),)
_WALKS: dict[tuple[bool, int, str], tuple[tuple[range, _Walk], ...]] = {
    (True, 2, "whole"): ((range(60_000, 81_000), replace(_COPIED, packs=False)),),
    (True, 2, "divided"): ((range(24_000), _COPIED), (range(24_000, _ANY), _PAIRS)),
    (True, 2, "cut"): ((range(22_500), _COPIED), (range(22_500, _ANY), _CUT)),
    (True, 4, "whole"): (
        (range(30_000, 90_000), replace(_STAGED, row_bytes=90_000, least_bytes=70_000)),
        (range(90_000, 100_000), replace(_STAGED, fetches=True)),
    ),
    (True, 4, "divided"): _ODD_F32,
    (True, 4, "cut"): _ODD_F32,
    (False, 2, "divided"): _ODD_NARROW_RMS,
    (False, 2, "cut"): _ODD_NARROW_RMS,
    (False, 4, "divided"): _ODD_F32_RMS,
    (False, 4, "cut"): _ODD_F32_RMS,
}


def walk_over(way: Forward, spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """The same way to share a row out, by clusters that walk; None if that is slower, or illegal.

    Without weights, a walk saves nothing. RMS norms with a residual were slower.
    """
    walk, two = _walk(spec), spec.has(RESIDUAL)
    if walk is None or not weighs(spec) or spec.gate is not None or spec.weight_sets:
        return None
    if two and not spec.family.centres:
        return None
    most, of_row = _most(way, walk, spec), _row_bytes(way, spec)
    if most * of_row < walk.least_bytes and not two:
        return None
    for resident in range(most, 0, -1):
        for slots in (1,) if two else walk.slots:
            clusters = _clusters(way, walk, spec, product.walkers(resident, way.cluster))
            one = replace(
                way,
                early=True,
                packs=walk.packs and not two,
                rereads=walk.rereads and way.shifted(spec) and not two,
                resident=resident,
                walks=clusters,
                slots=slots,
                stages_weights=True,
                ahead=clusters if walk.fetches and not two else 0,
            )
            if one.fits(spec, target):
                return one
    return None


def _clusters(way: Forward, walk: _Walk, spec: NormSpec, at_once: int) -> int:
    """How many there are, if so many run at once."""
    counts = [alike(n * at_once, spec.columns, way.vector) for n in range(1, walk.waves + 1)]
    busy = (c for n, c in enumerate(counts, 1) if c >= _BUSY * n * at_once)
    return next(busy, counts[-1])


def _walk(spec: NormSpec) -> _Walk | None:
    """The way for such rows, if there is one.

    Copies of rows that all begin with a line of memory are slow: 72000 columns in bf16 have 65 % of
    the ceiling with them, and 86 without; 80008 have 86 and 77 (H200).
    """
    size, dtypes = bytes_of(normalized(spec)), (normalized(spec),)
    vector = widest_vector(spec.columns, dtypes)
    kind = "divided" if vector > 1 else "cut"
    kind = "whole" if vector == widest_access(dtypes) else kind
    walks = _WALKS.get((spec.family.centres, size, kind), ())
    found = next((walk for columns, walk in walks if spec.columns in columns), None)
    begins_lines = spec.columns * size % _LINE_BYTES == 0
    return None if found and found.slots[0] > 1 and begins_lines else found


def _most(way: Forward, walk: _Walk, spec: NormSpec) -> int:
    """Workgroups of a multiprocessor at once, as the row and registers decide; at least one."""
    size, elements = bytes_of(normalized(spec)), way.chunks * way.vector
    words, two = elements * size // WORD_BYTES, spec.has(RESIDUAL)
    held = (words if walk.packs and not two else elements) + two * words
    if way.shifted(spec) and (two or not walk.rereads):
        held += (1 + two) * words
    threads = min(walk.threads, _REGISTER_FILE // (held + _BESIDE_ELEMENTS))
    return max(1, min(threads // way.threads, walk.row_bytes // _row_bytes(way, spec)))


def _row_bytes(way: Forward, spec: NormSpec) -> int:
    """Of a row, that a workgroup has."""
    return spec.columns * bytes_of(normalized(spec)) // way.cluster
