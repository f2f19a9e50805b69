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

# From 1849 schedules of 34 widths from 14800 to 131072, on an H100.
_MOST_ALONE = {2: 16384, 4: 14336}  # columns that one workgroup keeps, by the bytes of an element
_CLUSTERS = (2, 4, 8)
# Elements of a row that a thread has, by their bytes: the fewest that leave so few threads. Only if
# no cluster has ways with as few, there are more of them.
_ELEMENTS = {2: (32,), 4: (16, 20, 24)}
_THREADS = (range(128, 513), range(128, 705))
# Wide rows of f32 with a mean take accesses that divide them, a thread has more elements, by those
# of an access, and nothing is fetched ahead. From 2620 schedules of 16 widths from 20001 to 120005,
# on an H200.
_LEAST_OF_F32_WITH_MEAN = {4: 42_000, 2: 30_000, 1: 30_000}  # columns
_ELEMENTS_OF_F32_WITH_MEAN = {4: (24, 28, 32), 2: (28, 32), 1: (20, 24)}
# Bytes of rows that a multiprocessor should have at once, at most, with a mean and without: a mean
# takes another sum, in which less is on its way. With fewer than enough, there is one row more.
_AT_ONCE = {True: 80_000, False: 62_000}
_ENOUGH = 45_000
# Of more, those at work and those that are fetched meanwhile push each other out of the L2 cache.
_MOST_AHEAD = 80_000
# Threads at once, of rows with a mean: with fewer, more rows are better than rows ahead.
_FEWEST_THREADS = 768
_AS_MANY = 0.9  # of the most bytes: of ways that have about as many, the largest cluster is taken
# Registers of a thread besides its elements, by their bytes; and where rows begin anywhere in an
# access, so that it has them in two alignments.
_BESIDE, _BESIDE_SHIFTED, _BESIDE_F32_WITH_MEAN = {2: 24, 4: 16}, 16, 12


def choose_clustered(spec: NormSpec, target: Target, product: Product) -> Forward | None:
    """A schedule for rows that no workgroup keeps alone; None where no cluster keeps one either.

    How a row is shared out follows from what is normalized and from the op, as in `choose_forward`.
    """
    dtypes = (normalized(spec),)
    size = bytes_of(normalized(spec))
    if spec.columns <= _MOST_ALONE.get(size, spec.columns) or not target.has_clusters:
        return None
    whole = widest_vector(spec.columns, dtypes)
    vectors = (whole,) if _is_f32_with_mean(spec) else (widest_access(dtypes), whole)
    for vector, threads in itertools.product(vectors, _THREADS):
        ways = [w for cluster in _CLUSTERS if (w := _way(spec, target, vector, cluster, threads))]
        if ways:
            at_once = [_fitting(spec, target, way) for way in ways]
            enough = _AS_MANY * max(at_once)
            largest = max(n for n, most in enumerate(at_once) if most >= enough)
            return _ahead(spec, target, product, ways[largest])
    return None


def _way(
    spec: NormSpec, target: Target, vector: int, cluster: int, some_threads: range
) -> Forward | None:
    """So many workgroups share a row, of some threads each; None if that is not legal."""
    vectors = own_columns(spec, cluster, vector) // vector
    size, lanes = bytes_of(normalized(spec)), target.subgroup_size
    is_narrow = size < WORD_BYTES and not spec.gate_first and not spec.has(RESIDUAL)
    ways = _ELEMENTS_OF_F32_WITH_MEAN[vector] if _is_f32_with_mean(spec) else _ELEMENTS[size]
    for chunks in (elements // vector for elements in ways):
        way = Forward(
            rows=1,
            threads=-(-vectors // (chunks * lanes)) * lanes,
            vector=vector,
            chunks=chunks,
            in_registers=True,
            packs=is_narrow and not spec.family.centres,
            cluster=cluster,
        )
        if way.threads in some_threads and way.illegal(spec, target) is None:
            return way
    return None


def _is_f32_with_mean(spec: NormSpec) -> bool:
    """Whether a row is of f32, has two sums, and is as wide as those that were measured."""
    if not spec.family.centres or bytes_of(normalized(spec)) != WORD_BYTES:
        return False
    vector = widest_vector(spec.columns, (normalized(spec),))
    return spec.columns >= _LEAST_OF_F32_WITH_MEAN[vector]


def _ahead(spec: NormSpec, target: Target, product: Product, way: Forward) -> Forward:
    """The same, with rows ahead and as many workgroups at once as leave room for them.

    Where that is not worth it, there are as many workgroups as registers allow.
    """
    tensors = 2 if spec.has(RESIDUAL) or spec.gate is not None else 1
    wanted, most = _wanted(spec, target, way, tensors), _most(spec, target, way, tensors)
    is_fetched = not (spec.strided_rows or _is_f32_with_mean(spec))
    fits = is_fetched and wanted * _bytes(spec, way, tensors) <= _MOST_AHEAD
    needs_threads = spec.family.centres and tensors == 1 and wanted < most
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
    beside = _BESIDE_F32_WITH_MEAN if _is_f32_with_mean(spec) else _BESIDE[size]
    held += _BESIDE_SHIFTED + words if way.shifted(spec) else beside
    registers = held + (tensors - 1) * words
    subgroups = way.threads // target.subgroup_size
    counts = range(MOST_BUSY // way.threads, 1, -1)
    return next((n for n in counts if registers_of_thread(subgroups * n, target) >= registers), 1)
