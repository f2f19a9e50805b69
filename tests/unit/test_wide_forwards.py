"""Which schedules forwards of wide rows take, on GPUs with clusters."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import Product, find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward, candidates

SM_90, H100, H200 = find_target("sm_90"), find_product("h100"), find_product("h200")
DRAWN = random.Random(20261127).sample(range(16385, 131073), 24)


def choice(spec: NormSpec, product: Product = H200) -> Forward:
    one = schedules.choose(spec, SM_90, product)
    assert isinstance(one, Forward)
    return one


def wide_forwards() -> Iterator[tuple[NormSpec, Forward]]:
    """Forwards of wide rows of several kinds, each with its choice."""
    for op, dtype, columns in itertools.product((LAYER_NORM, RMS_NORM), ("bf16", "f32"), DRAWN):
        plain = NormSpec((columns,), dtype, op=op.name, eps=1e-5)
        added = dataclasses.replace(plain, residual_dtype=dtype)
        gated = [] if op.centres else [dataclasses.replace(plain, gate="after")]
        yield from ((spec, choice(spec)) for spec in (plain, added, *gated))


def test_wide_forwards_read_rows_once() -> None:
    """Layer norms of 16 bits are faster by narrower accesses, where these divide a row."""
    for spec, one in wide_forwards():
        assert one.in_registers, spec
        assert one.cluster > 1, spec
        size = DTYPES[spec.dtype].numpy.itemsize
        divides = spec.family.centres and size == 2 and spec.columns % one.vector == 0
        assert one.vector * size == 16 or divides, spec


def test_clusters_that_walk_fit_a_multiprocessor() -> None:
    """Else some would begin when others end; and no GPU with clusters is left without a choice."""
    walking = [(spec, one) for spec, one in wide_forwards() if one.walks]
    assert len(walking) > 60
    for spec, one in walking:
        assert one.stages_weights or one.cluster == 2, spec
        wanted = one.resident * (one.shared_bytes(spec, SM_90) + 1024)
        assert wanted <= SM_90.shared_bytes + 1024, spec
        at_once = H200.walkers(one.resident, one.cluster)
        assert min(one.walks % at_once, -one.walks % at_once) < 8, spec


def test_rows_ahead_fit_the_cache_beside_those_at_work() -> None:
    """More of them pushed each other out; most wide rows are fetched ahead."""
    l2_bytes = H200.l2_bytes
    some = [(spec, one) for spec, one in wide_forwards() if one.ahead]
    assert len(some) > 100
    for spec, one in some:
        tensors = 1 + bool(spec.residual_dtype or spec.gate)
        row = tensors * spec.columns * DTYPES[spec.dtype].numpy.itemsize
        at_once = H200.processors * one.resident // one.cluster
        assert one.ahead == (one.walks or at_once)
        assert min(one.ahead, at_once) * row < l2_bytes / 4, spec


def test_wide_rows_are_shared_out_by_what_is_normalized() -> None:
    """A fused residual, a gate behind the norm and another product leave a row's bits alone."""
    shared_out: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for spec, one in wide_forwards():
        ways = shared_out.setdefault((spec.op, spec.dtype, spec.columns), set())
        ways |= {(w.cluster, w.threads, w.vector, w.chunks) for w in (one, choice(spec, H100))}
    assert {len(ways) for ways in shared_out.values()} == {1}


def test_rows_that_are_apart_are_not_fetched_ahead() -> None:
    spec = NormSpec((40000,), "bf16", op=RMS_NORM.name, eps=1e-5)
    dense, strided = choice(spec), choice(dataclasses.replace(spec, strided_rows=True))
    assert dense.ahead > 0
    assert strided.ahead == 0
    assert (strided.cluster, strided.threads) == (dense.cluster, dense.threads)


def test_candidates_fetch_as_many_rows_ahead_as_they_have_at_once() -> None:
    spec = NormSpec((40000,), "bf16", op=LAYER_NORM.name, eps=1e-5)
    chosen = choice(spec)
    found = candidates.sample(spec, SM_90, H200, chosen, 24, seed=7)
    assert len(found) > 1
    for one in found:
        assert isinstance(one, Forward)
        assert one.ahead == chosen.ahead * one.resident // chosen.resident
        assert candidates.shares_out_alike(one, chosen)


def test_candidates_walk_and_do_not() -> None:
    """Those that walk fetch the next row of their walk, and keep the weights where it is chosen."""
    spec = NormSpec((24035,), "bf16", op=LAYER_NORM.name, eps=1e-5)
    chosen = choice(spec)
    assert chosen.stages_weights
    found = [one for one in candidates.forwards(spec, SM_90, H200) if isinstance(one, Forward)]
    assert {one.walks > 0 for one in found} == {False, True}
    for one in found:
        assert one.stages_weights == (one.walks > 0)
        assert not one.walks or one.ahead == one.walks
