"""Which schedule forwards take whose rows clusters share, and fetch ahead: by rules."""

from __future__ import annotations

import itertools
from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import widest_access, widest_vector
from iree_lnbwd.schedules.forward import WORD_BYTES, Forward, bytes_of, normalized
from iree_lnbwd.schedules.rules import MOST_BUSY, own_columns, registers_of_thread
from iree_lnbwd.schedules.wide_walks import walk_over

# From 1849 schedules of 34 widths from 14800 to 131072, on an H100; for rows with a mean, and for
# those of f32 that begin anywhere in an access, from 6992 of 90 widths on an H200.
_MOST_ALONE = {2: 16384, 4: 14336}  # columns that one workgroup keeps, by the bytes of an element
_CLUSTERS = (2, 4, 8)
# Elements of a row that a thread has, by their bytes: the fewest that leave so few threads. Only if
# no cluster has ways with as few, there are more of them.
_ELEMENTS = {2: (32,), 4: (16, 20, 24)}
_THREADS = (range(128, 513), range(128, 705))
# Rows of f32 with a mean, and rows without one: from so many columns on, threads have more
# elements, those that leave the fewest idle; by whether accesses of 16 bytes divide a row.
_LEAST_OF_MORE = {True: {True: 30_000, False: 0}, False: {True: 1 << 31, False: 40_000}}
_MORE_ELEMENTS = {True: (32, 28, 24), False: (20, 24, 28, 32)}
# Likewise, of 16 bits with a mean: from so many columns on, accesses divide a row, if they have
# several elements. So nothing is cut.
_LEAST_OF_DIVIDED = 24_000
_LEAST_OF_EIGHT = 19_000  # columns of f32 with a mean, in accesses of 16 bytes, for clusters of 8
_LEAST_PACKED = 100_000  # columns of 16 bits with a mean, which stay narrow
_LEAST_OF_LARGER = 22_500  # columns of 16 bits that begin anywhere, for clusters of more than two
_IDLE = 1.1  # columns that threads cover, to the fewest, up to which the largest cluster is taken
# Bytes of rows that a multiprocessor should have at once, at most, with a mean and without: a mean
# takes another sum, in which less is on its way. With fewer than enough, there is one row more.
_AT_ONCE = {True: 80_000, False: 62_000}
_ENOUGH = 45_000
# Of more, those at work and those that are fetched meanwhile push each other out of the L2 cache.
_MOST_AHEAD = 80_000
# Threads at once, of rows of 16 bits with a mean: with fewer, more rows are better than rows ahead.
_FEWEST_THREADS = 768
_AS_MANY = 0.9  # of the most bytes: of ways that have about as many, the largest cluster is taken
# Registers of a thread besides its elements, by their bytes; and where rows begin anywhere in an
# access, so that it has them in two alignments.
_BESIDE, _BESIDE_SHIFTED = {2: 24, 4: 16}, 16


def choose_clustered(spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """A schedule for rows that no workgroup keeps alone; None where no cluster keeps one either.

    How a row is shared out follows from what is normalized and from the op, as in `choose_forward`.
    """
    size = bytes_of(normalized(spec))
    if spec.columns <= _MOST_ALONE.get(size, spec.columns) or not target.has_clusters:
        return None
    for vector, threads in itertools.product(_vectors(spec), _THREADS):
        most = _most_of_cluster(spec, vector)
        clusters = [cluster for cluster in _CLUSTERS if cluster <= most]
        ways = [w for cluster in clusters if (w := _way(spec, target, vector, cluster, threads))]
        if ways:
            way = _of_few_idle(ways) if _covers_most(spec) else _of_most_at_once(spec, target, ways)
            return walk_over(way, spec, target, product) or _ahead(spec, target, product, way)
    return None


def _vectors(spec: NormSpec) -> tuple[int, ...]:
    """Elements of an access: those to take, best first."""
    dtypes = (normalized(spec),)
    widest, whole = widest_access(dtypes), widest_vector(spec.columns, dtypes)
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    divides = whole > 1 and spec.columns >= _LEAST_OF_DIVIDED
    return (whole,) if is_narrow and spec.family.centres and divides else (widest, whole)


def _most_of_cluster(spec: NormSpec, vector: int) -> int:
    """The most workgroups that may share a row: two, where 16 bits with a mean are copied."""
    is_narrow, is_shifted = bytes_of(normalized(spec)) < WORD_BYTES, spec.columns % vector != 0
    if not spec.family.centres:
        return _CLUSTERS[-1]
    if is_narrow and is_shifted and spec.columns < _LEAST_OF_LARGER:
        return 2
    is_f32 = not is_narrow and not is_shifted
    return 4 if is_f32 and spec.columns < _LEAST_OF_EIGHT else _CLUSTERS[-1]


def _has_more(spec: NormSpec) -> bool:
    """Whether threads have more elements of f32."""
    is_whole = spec.columns % widest_access((normalized(spec),)) == 0
    is_wide = spec.columns >= _LEAST_OF_MORE[spec.family.centres][is_whole]
    return bytes_of(normalized(spec)) == WORD_BYTES and is_wide


def _covers_most(spec: NormSpec) -> bool:
    """Whether a way is taken by how few of its threads are idle."""
    return _has_more(spec) or (bytes_of(normalized(spec)) < WORD_BYTES and spec.family.centres)


def _covered(way: Forward) -> int:
    """Columns that threads have places for."""
    return way.cluster * way.threads * way.chunks * way.vector


def _of_few_idle(ways: list[Forward]) -> Forward:
    """The largest cluster of those that leave few threads idle."""
    fewest = min(map(_covered, ways))
    return max((w for w in ways if _covered(w) <= _IDLE * fewest), key=lambda w: w.cluster)


def _of_most_at_once(spec: NormSpec, target: Target, ways: list[Forward]) -> Forward:
    """The largest cluster of those that have the most bytes of rows at once."""
    at_once = [_fitting(spec, target, way) for way in ways]
    enough = _AS_MANY * max(at_once)
    return ways[max(n for n, most in enumerate(at_once) if most >= enough)]


def _way(
    spec: NormSpec, target: Target, vector: int, cluster: int, some_threads: range
) -> Forward | None:
    """So many workgroups share a row, of some threads each; None if that is not legal."""
    vectors = own_columns(spec, cluster, vector) // vector
    size, lanes = bytes_of(normalized(spec)), target.subgroup_size
    is_narrow = size < WORD_BYTES and not spec.gate_first and not spec.has(RESIDUAL)
    elements = _MORE_ELEMENTS[spec.family.centres] if _has_more(spec) else _ELEMENTS[size]
    ways = [
        Forward(
            rows=1,
            threads=-(-vectors // (chunks * lanes)) * lanes,
            vector=vector,
            chunks=chunks,
            in_registers=True,
            packs=is_narrow and (not spec.family.centres or spec.columns >= _LEAST_PACKED),
            cluster=cluster,
        )
        for chunks in (one // vector for one in elements)
    ]
    legal = [w for w in ways if w.threads in some_threads and w.illegal(spec, target) is None]
    if not legal:
        return None
    return min(legal, key=_covered) if _has_more(spec) else legal[0]


def _ahead(spec: NormSpec, target: Target, product: Product, way: Forward) -> Forward:
    """The same, with rows ahead and as many workgroups at once as leave room for them.

    Where that is not worth it, there are as many workgroups as registers allow.
    """
    tensors = 2 if spec.has(RESIDUAL) or spec.gate is not None else 1
    wanted, most = _wanted(spec, target, way, tensors), _most(spec, target, way, tensors)
    is_fetched = not spec.strided_rows
    fits = is_fetched and wanted * _bytes(spec, way, tensors) <= _MOST_AHEAD
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    needs_threads = is_narrow and spec.family.centres and tensors == 1 and wanted < most
    is_busy = wanted * way.threads >= _FEWEST_THREADS
    if fits and (is_busy or not needs_threads):
        return replace(way, resident=wanted, ahead=product.processors * wanted // way.cluster)
    return replace(way, resident=most)


def _fitting(spec: NormSpec, target: Target, way: Forward) -> float:
    """Bytes of rows at once, where as many ahead fit the cache beside them."""
    at_once = _wanted(spec, target, way) * _bytes(spec, way)
    return at_once if at_once <= _MOST_AHEAD else 0.0


def _bytes(spec: NormSpec, way: Forward, tensors: int = 1) -> float:
    """Of rows, that a workgroup has."""
    return tensors * spec.columns * bytes_of(normalized(spec)) / way.cluster


def _wanted(spec: NormSpec, target: Target, way: Forward, tensors: int = 1) -> int:
    """Workgroups that a multiprocessor should hold at once, while others' rows are fetched."""
    each, at_once = _bytes(spec, way, tensors), _AT_ONCE[spec.family.centres]
    wanted = max(1, min(_most(spec, target, way, tensors), int(at_once // each)))
    return wanted if wanted * each >= _ENOUGH else wanted + 1


def _most(spec: NormSpec, target: Target, way: Forward, tensors: int = 1) -> int:
    """Workgroups that a multiprocessor has registers for; one at least."""
    elements, size = way.chunks * way.vector, bytes_of(normalized(spec))
    words = elements * size // WORD_BYTES
    held = words if way.packs else elements
    held += _BESIDE_SHIFTED + words if way.shifted(spec) else _BESIDE[size]
    registers = held + (tensors - 1) * words
    subgroups = way.threads // target.subgroup_size
    counts = range(MOST_BUSY // way.threads, 1, -1)
    return next((n for n in counts if registers_of_thread(subgroups * n, target) >= registers), 1)
