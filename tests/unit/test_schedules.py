"""Schedules: what is legal, what is chosen, and that nothing illegal is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.products import PRODUCTS, Product, find_product, standing_for
from iree_lnbwd.hardware.targets import Target, find_target, targets
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, RMS_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import (
    FewRows,
    Forward,
    OnePass,
    RowBlocks,
    Schedule,
    TwoPass,
    WholeTensors,
)
from iree_lnbwd.schedules.rules import registers_of_thread
from iree_lnbwd.vmfb.executables import exports

GPUS = [target for target in targets() if target.backend != "cpu"]
CPUS = [target for target in targets() if target.backend == "cpu"]
SPEC = NormSpec((4096,), "bf16")
LEGAL = OnePass(
    workgroups=132, groups=2, warps=8, vector=8, ahead=2, slots=3, rereads=True, stages_weight=True
)

FEW = FewRows(rows=132, warps=16, tile=32, tile_vector=2)


def gpu(name: str) -> Target:
    return find_target(name)


def test_a_legal_schedule_has_no_complaint() -> None:
    assert LEGAL.illegal(SPEC, gpu("sm_90")) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"groups": 5}, "1280 threads, at most 1024"),
        ({"warps": 33, "groups": 1}, "1056 threads, at most 1024"),
        ({"vector": 3}, "cp.async copies (4, 8, 16) bytes"),
        ({"ahead": 8, "slots": 9}, "bytes of shared memory, at most 232448"),
        ({"ahead": 1}, "1 rows ahead do not go with 3 slots"),
        ({"ahead": 4}, "4 rows ahead do not go with 3 slots"),
        ({"ahead": 2, "slots": 0}, "2 rows ahead do not go with 0 slots"),
        ({"vector": 1, "warps": 32, "groups": 1}, "cp.async copies"),
        ({"ahead": 1, "slots": 0}, "a row that is loaded twice is not loaded ahead"),
        ({"ahead": 1, "slots": 0, "rereads": False}, "the weight is copied with the first row"),
        ({"stages_weight": False, "widens_weight": True}, "a weight in registers is not widened"),
        (
            {"ahead": 0, "slots": 0, "rereads": False, "widens_weight": True},
            "the weight is widened before the first row",
        ),
        ({"finalize_slices": 33}, "1056 threads add up partial rows, at most 1024"),
        ({"finalize_rows": 0}, "a number below 1"),
        ({"workgroups": 0}, "a number below 1"),
        ({"vector": 0}, "a number below 1"),
        ({"warps": 0}, "a number below 1"),
    ],
)
def test_each_rule_names_what_it_forbids(change: dict[str, Any], why: str) -> None:
    illegal = dataclasses.replace(LEGAL, **change).illegal(SPEC, gpu("sm_90"))
    assert illegal is not None
    assert why in illegal


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 0}, "a number below 1"),
        ({"tile": 0}, "a number below 1"),
        ({"warps": 64}, "2048 threads, at most 1024"),
        ({"warps": 12}, "powers of 2"),
        ({"tile": 48}, "powers of 2"),
        ({"tile_vector": 16}, "16 columns do not divide 8"),
        ({"tile": 4, "tile_vector": 8}, "8 columns of a tile of 4"),
        ({"warps": 2}, "64 threads for 64 sums"),
        ({"tile": 4}, "512 threads for 8 sums"),
        ({"warps": 4, "tile": 32, "tile_vector": 2}, None),
        ({"warps": 2, "tile": 16}, "more than 32 elements of a row to a thread"),
    ],
)
def test_each_rule_of_few_rows_names_what_it_forbids(
    change: dict[str, Any], why: str | None
) -> None:
    few = dataclasses.replace(FEW, **change)
    illegal = dataclasses.replace(LEGAL, few_rows=few).illegal(SPEC, gpu("sm_90"))
    if why is None:
        assert illegal is None
        return
    assert illegal is not None
    assert illegal.startswith("few rows: ")
    assert why in illegal


def test_few_rows_and_their_columns_find_them_in_the_cache() -> None:
    for target in GPUS:
        for columns in (1, 769, 4096, 8192):
            spec = NormSpec((columns,), "bf16", grad_output_dtype="f32")
            chosen = schedules.choose(spec, target)
            few = chosen.few_rows if isinstance(chosen, OnePass) else None
            fit = standing_for(target.name).l2_bytes // 2 // (columns * 6)
            assert few is not None
            assert few.rows == min(1024, fit)


def test_few_rows_need_shared_memory() -> None:
    wide = FewRows(rows=132, warps=32, tile=64, tile_vector=8)
    assert wide.illegal(SPEC, gpu("sm_90"), 8) is None
    illegal = wide.illegal(SPEC, gpu("gfx1100"), 8)
    assert illegal is not None
    assert "bytes of shared memory, at most 65536" in illegal


@pytest.mark.parametrize("rows", [None, 132, 133])
def test_which_rows_take_which_form(rows: int | None) -> None:
    spec = NormSpec((4096,), "bf16", rows=rows)
    how = dataclasses.replace(LEGAL, few_rows=FEW)
    expected = {None: (FEW, how), 132: (FEW,), 133: (how,)}
    assert schedules.forms(how, spec) == expected[rows]
    said = schedules.paths(how, spec)
    assert [path.partition(": ")[0] for path in said] == {
        None: ["M <= 132", "M > 132"],
        132: ["one kernel"],
        133: ["one pass"],
    }[rows]


def test_a_path_says_where_accesses_cross_the_borders_of_rows() -> None:
    said = "4 elements an access"
    how = OnePass(8, 1, 1, vector=4, ahead=2, slots=3)
    assert how.path(NormSpec((1024,), "bf16")).endswith(said)
    assert how.path(NormSpec((1023,), "bf16")).endswith(f"{said} across the borders of rows")


def test_lanes_are_never_fewer_than_subgroups() -> None:
    # IREE 3.13 sums wrongly where they are; wave64's 33 subgroups would fit no workgroup anyway.
    small = dataclasses.replace(gpu("sm_90"), subgroup_size=8)
    assert OnePass(1, 1, 9, 8).illegal(SPEC, small) == "more subgroups than lanes"
    assert TwoPass(1, 9, 8, 1, 1).illegal(SPEC, small) == "more subgroups than lanes"


def test_groups_of_several_subgroups_need_barriers_of_their_own() -> None:
    spec = NormSpec((1024,), "bf16")
    sixteen = OnePass(1, groups=16, warps=2, vector=8)
    why = "16 groups of several subgroups, at most 15 can wait by themselves"
    assert sixteen.illegal(spec, gpu("sm_90")) == why
    assert dataclasses.replace(sixteen, groups=15).illegal(spec, gpu("sm_75")) is None
    two = dataclasses.replace(sixteen, groups=2)
    assert two.illegal(spec, gpu("gfx942")) == why.replace("16", "2", 1).replace("15", "0")
    # Who waits for nobody else needs none.
    assert dataclasses.replace(two, warps=1).illegal(spec, gpu("gfx942")) is None
    assert dataclasses.replace(two, groups=1).illegal(spec, gpu("gfx942")) is None


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_workgroups_without_staging_are_filled(dtype: str, target: Target) -> None:
    """By one row, or by groups that need not wait for each other."""
    for columns in (64, 256, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 8192):
        chosen = schedules.choose(NormSpec((columns,), dtype), target)
        if isinstance(chosen, OnePass) and not chosen.slots:
            assert chosen.groups * chosen.threads(target) >= 128, (columns, chosen)


@pytest.mark.parametrize("ahead", [1, 2])
def test_rows_in_place_take_a_slot_less(ahead: int) -> None:
    ring = dataclasses.replace(LEGAL, groups=1, ahead=ahead, slots=ahead + 1)
    in_place = dataclasses.replace(ring, slots=ahead)
    assert (ring.in_place, in_place.in_place) == (False, True)
    assert in_place.illegal(SPEC, gpu("sm_90")) is None
    row = 4096 * (2 + 2)
    assert ring.shared_bytes(SPEC, gpu("sm_90")) - in_place.shared_bytes(SPEC, gpu("sm_90")) == row


@pytest.mark.parametrize(
    ("columns", "resident", "target", "pads"),
    [
        (5457, 1, "sm_90", True),  # two workgroups would fit, and leave the L1 cache 28 KiB
        (5847, 1, "sm_90", False),  # one alone fits
        (5457, 2, "sm_90", False),  # two are wanted
        (2049, 1, "sm_90", False),  # two fit and leave enough
        (5456, 1, "sm_90", True),  # accesses of two elements need the cache wherever rows begin
        (5457, 1, "sm_80", False),  # not known there
    ],
)
def test_padding_leaves_the_l1_cache_its_part(
    columns: int, resident: int, target: str, pads: bool
) -> None:
    how = OnePass(132, 1, 8, 2, ahead=2, slots=2, rereads=True, stages_weight=True)
    how = dataclasses.replace(how, resident=resident)
    spec = NormSpec((columns,), "f32", op=RMS_NORM_BACKWARD.name)
    used = sum(how.row_bytes(spec, gpu(target)))
    assert (how.padding(spec, gpu(target)) > 0) == pads
    if pads:
        whole = how.shared_bytes(spec, gpu(target))
        assert whole >= used + how.padding(spec, gpu(target))
        assert 2 * (whole + 1024) > 228 << 10 > whole + 1024
        assert how.illegal(spec, gpu(target)) is None


def test_a_padded_module_asks_for_as_much_as_its_schedule_says() -> None:
    spec, target = NormSpec((5457,), "f32", op=RMS_NORM_BACKWARD.name), gpu("sm_90")
    how = OnePass(132, 1, 8, 2, ahead=2, slots=2, rereads=True, stages_weight=True)
    assert how.padding(spec, target) > 0
    vmfb, _ = compiler.build(spec, target, schedule=how)
    rows = next(one for one in exports(vmfb) if one.kernel == "rows")
    assert rows.shared_bytes == how.shared_bytes(spec, target)


def test_cp_async_needs_sm_80() -> None:
    assert LEGAL.illegal(SPEC, gpu("sm_75")) is not None
    assert LEGAL.illegal(SPEC, gpu("gfx942")) is not None


def test_an_illegal_schedule_is_not_compiled() -> None:
    illegal = dataclasses.replace(LEGAL, groups=5)
    with pytest.raises(ValueError, match=r"schedule: illegal for .* on sm_90: 1280 threads"):
        compiler.build(SPEC, gpu("sm_90"), schedule=illegal)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_every_width_has_a_home_that_is_legal(target: Target, dtype: str) -> None:
    for columns in (1, 2, 7, 64, 769, 1000, 1024, 4095, 4096, 12288, 16384, 65536, 262144, 1000003):
        chosen = schedules.choose(NormSpec((columns,), dtype), target)
        assert isinstance(chosen, OnePass | TwoPass)
        assert chosen.illegal(NormSpec((columns,), dtype), target) is None


def test_usual_widths_take_one_pass_and_the_widest_two() -> None:
    target = gpu("sm_90")
    assert isinstance(schedules.choose(NormSpec((8192,), "f32"), target), OnePass)
    assert isinstance(schedules.choose(NormSpec((1 << 20,), "f32"), gpu("sm_80")), TwoPass)
    assert isinstance(schedules.choose(NormSpec((65536,), "f64"), gpu("sm_80")), TwoPass)


def test_two_gated_rows_in_f32_are_not_kept_in_registers() -> None:
    """As it was fitted, a schedule of fewer columns spilled 118 of them, and took twice as long."""
    spec = NormSpec((24576,), "f32", op=RMS_NORM_BACKWARD.name, gate="after")
    chosen = schedules.choose(spec, gpu("sm_90"))
    assert isinstance(chosen, OnePass)
    assert chosen.slots > 0


# Columns up to which every GPU has room for several gradients. The smallest has the least, for
# layer norm's odd rows in 16 bits.
_MOST_OF_SEVERAL = 98304


def _drawn(rng: random.Random, least: int, most: int) -> NormSpec:
    """A backward in f32 or 16 bits, with what it may have beside x, dy and weights."""
    dtype = rng.choice(("f32", "f16", "bf16"))
    more: dict[str, Any] = rng.choice(
        (
            {},
            {"residual_dtype": dtype},
            {"from_output": True},
            {"gate": rng.choice(("after", "before"))},
            {"grad_outputs": rng.randint(2, 4)},
        )
    )
    op = rng.choice([op.name for op in OPS.values() if op.is_backward])
    return NormSpec((rng.randint(least, most),), dtype, op=op, **more)


@pytest.mark.drawn
@pytest.mark.parametrize("target", [t for t in GPUS if t.backend == "cuda"], ids=lambda t: t.name)
@pytest.mark.parametrize("part", range(10))
def test_no_width_up_to_131072_takes_two_passes_on_nvidia(target: Target, part: int) -> None:
    """In a row's posts, no workgroup but the last has other columns, and few processors idle."""
    rng = random.Random(f"{target.name} {part}")
    for _ in range(20):
        spec = _drawn(rng, 18433, 131072)
        chosen = schedules.choose(spec, target)
        if spec.gate is not None:  # two passes are faster than what is loaded late
            assert not (isinstance(chosen, OnePass) and chosen.loads_late), spec
            continue
        if spec.grad_outputs > 1 and spec.columns > _MOST_OF_SEVERAL:
            continue
        assert isinstance(chosen, OnePass), spec
        assert chosen.illegal(spec, target) is None
        if chosen.posts:
            product = standing_for(target.name)
            busy = chosen.workgroups * chosen.cluster
            assert 0.7 * product.processors <= busy <= chosen.resident * product.processors, spec


@pytest.mark.drawn
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("part", range(10))
def test_no_width_up_to_18432_takes_two_passes(target: Target, part: int) -> None:
    """Nor with a residual, a gate or several gradients, nor from the output; f64 may."""
    rng = random.Random(f"{target.name} {part}")
    widest = (NormSpec((18432 - part,), dtype) for dtype in ("f32", "bf16"))
    for spec in (*widest, *(_drawn(rng, 1, 18432) for _ in range(20))):
        chosen = schedules.choose(spec, target)
        assert isinstance(chosen, OnePass), spec
        assert chosen.illegal(spec, target) is None


@pytest.mark.parametrize(
    ("columns", "dtype", "cluster"),
    [(87000, "bf16", 15), (24035, "f32", 5), (109517, "f32", 22)],
)
def test_few_workgroups_post_a_rows_sums(columns: int, dtype: str, cluster: int) -> None:
    """Of 264 at once, 255 that are 15 to a row were faster than all of them, 22 to a row."""
    product = find_product("h200_as_sm_80")
    one = schedules.choose(NormSpec((columns,), dtype), gpu("sm_80"), product)
    assert isinstance(one, OnePass)
    assert one.posts
    assert one.cluster == cluster


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_rows_that_are_loaded_twice_by_workgroups_that_post_fit_the_cache(dtype: str) -> None:
    """All that is read at once, on GPUs without cp.async, where it is read again."""
    t4 = find_product("t4")
    for columns in (24576, 65536, 100000, 131072):
        one = schedules.choose(spec := NormSpec((columns,), dtype), gpu("sm_75"), t4)
        assert isinstance(one, OnePass)
        assert one.posts
        assert one.loads_twice
        row = 2 * one.own_columns(spec) * DTYPES[dtype].numpy.itemsize
        assert row * one.workgroups * one.cluster <= 2 / 3 * t4.l2_bytes


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_two_passes_by_narrow_accesses_have_more_of_them_under_way(target: Target) -> None:
    """Where a row has 8 columns more, one access has 8 columns, and where 1 more, one."""
    whole, half, single = (
        schedules.choose(NormSpec(((1 << 20) + n,), "bf16"), target) for n in (8, 4, 1)
    )
    for two in (whole, half, single):
        assert isinstance(two, TwoPass)
    of_each = [(two.vector, two.rows, two.resident) for two in (whole, half, single)]  # type: ignore[union-attr]
    assert of_each == [(8, 4, 2), (4, 8, 2), (1, 16, 4)]


@pytest.mark.drawn
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)])
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
def test_a_gpu_takes_kernels_of_ours_whatever_is_asked(
    target: Target, mask: tuple[bool, bool, bool], eps: float | None
) -> None:
    for columns, dtype in itertools.product((1, 7, 64, 1000, 4096, 20000, 65536), DTYPES):
        spec = NormSpec((columns,), dtype, output_mask=mask, eps=eps)
        assert isinstance(schedules.choose(spec, target), OnePass | TwoPass)


def test_what_falls_off_the_fast_path_says_why() -> None:
    assert WholeTensors("asked for").path(SPEC).endswith("(asked for)")


@pytest.mark.drawn
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_forwards_of_every_width_are_legal(target: Target, op: str) -> None:
    """Rows are kept if they fit, and at least half of their threads have a chunk."""
    for columns in (1, 5, 64, 128, 769, 1000, 4096, 16384, 65536, 1000003):
        for dtype in ("f32", "bf16", "f64"):
            for rows in (None, 1, 37, 100_000):
                spec = NormSpec((columns,), dtype, op=op, eps=1e-5, rows=rows)
                how = schedules.choose(spec, target)
                assert isinstance(how, Forward)
                assert how.illegal(spec, target) is None
                assert how.steps(spec) == 1 or not how.in_registers
                assert how.threads == 2 or columns > how.threads // 2 * how.vector
                assert how.reads_once or columns > 4096


@pytest.mark.drawn
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_forwards_with_sets_are_legal_at_every_width(target: Target, op: str) -> None:
    rng = random.Random(f"{target.name} {op}")
    for columns in (*range(1, 60), *(rng.randint(60, 20000) for _ in range(20))):
        for dtype in ("f32", "bf16"):
            more = rng.choice(({}, {"residual_dtype": dtype}, {"gate": "before"}, {"rows": 37}))
            spec = NormSpec((columns,), dtype, op=op, eps=1e-5, weight_sets=True, **more)
            how = schedules.choose(spec, target)
            assert isinstance(how, Forward)
            assert all(form.illegal(spec, target) is None for form in how.forms(spec)), spec


@pytest.mark.drawn
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_fused_residual_leaves_the_order_of_a_rows_sums(target: Target, op: str) -> None:
    """So that the sum with a residual has the bits of one that was made before."""
    for columns in (
        1,
        5,
        64,
        96,
        128,
        136,
        769,
        1000,
        4096,
        8200,
        12288,
        16384,
        20480,
        32768,
        65536,
    ):
        for dtype, residual in itertools.product(("f32", "bf16"), repeat=2):
            fused = NormSpec((columns,), dtype, op=op, eps=1e-5, residual_dtype=residual)
            alone = NormSpec((columns,), residual, op=op, eps=1e-5, weight_dtype=dtype)
            assert order(fused, target) == order(alone, target)


def order(spec: NormSpec, target: Target) -> tuple[int, ...]:
    """What decides which numbers are added when."""
    how = schedules.choose(spec, target)
    assert isinstance(how, Forward)
    return how.vector, how.threads, how.chunks, how.steps(spec), how.span(spec)


@pytest.mark.parametrize(
    ("changes", "target", "why"),
    [
        ({"threads": 0}, "sm_90", "a number below 1"),
        ({"threads": 256}, "generic", "workgroups of threads need a GPU"),
        ({"rows": 8}, "sm_90", "2048 threads, at most 1024"),
        ({"rows": 1, "threads": 16, "chunks": 4}, "sm_90", "16 threads, in subgroups of 32"),
        ({"rows": 32, "threads": 1}, "sm_90", "a row has at least 2 threads"),
        ({"rows": 2, "threads": 48}, "sm_90", "48 threads are neither subgroups nor a power of 2"),
        ({"vector": 3}, "sm_90", "N is no multiple of 3"),
        ({"chunks": 8}, "sm_90", "more than 32 elements of a row to a thread at once"),
        ({"threads": 64}, "sm_90", "the registers of a row's threads cannot hold it"),
        (
            {"in_shared_memory": True},
            "sm_90",
            "a row stays in registers or in shared memory, not in both",
        ),
        ({"in_registers": False, "rows": 2}, "sm_90", "a workgroup reads a single row again"),
        ({"in_registers": False, "early": True}, "sm_90", "a row that is not in registers has its"),
        (
            {"in_registers": False, "in_shared_memory": True, "threads": 32, "rows": 32},
            "sm_90",
            "of shared memory, at",
        ),
    ],
)
def test_an_illegal_forward_says_why(changes: dict[str, Any], target: str, why: str) -> None:
    legal = Forward(rows=1, threads=256, vector=8, chunks=2, in_registers=True)
    spec = NormSpec((4096,), "bf16", op="layer_norm", eps=1e-5)
    assert legal.illegal(spec, find_target("sm_90")) is None
    said = dataclasses.replace(legal, **changes).illegal(spec, find_target(target))
    assert said is not None
    assert why in said


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("target", CPUS, ids=lambda target: target.name)
def test_cpus_run_row_blocks_of_every_width(target: Target, dtype: str) -> None:
    for columns in (2, 3, 7, 64, 65, 769, 1000, 1024, 4096, 65536, 1000003):
        spec = NormSpec((columns,), dtype)
        chosen = schedules.choose(spec, target)
        assert isinstance(chosen, RowBlocks)
        assert chosen.illegal(spec, target) is None
        covered = -(-columns // chosen.vector) * chosen.vector
        assert covered < 1.5 * columns  # what a last chunk does twice


@pytest.mark.parametrize("target", CPUS, ids=lambda target: target.name)
def test_wider_vectors_of_narrower_accumulators(target: Target) -> None:
    for dtype, acc_bytes in (("bf16", 4), ("f32", 4), ("f64", 8)):
        chosen = schedules.choose(NormSpec((4096,), dtype), target)
        assert isinstance(chosen, RowBlocks)
        assert chosen.vector * acc_bytes == target.accumulator_bytes


@pytest.mark.parametrize(
    ("op", "dtype", "columns", "fetches_ahead"),
    [
        ("layer_norm_backward", "bf16", 4096, True),
        ("layer_norm_backward", "f32", 16384, True),
        ("layer_norm_backward", "f32", 16385, False),  # the next block would not fit the cache
        ("layer_norm", "f32", 4096, True),
        ("layer_norm", "f32", 65536, False),
        ("layer_norm", "bf16", 4096, False),
        ("rms_norm", "f16", 1024, False),
    ],
)
def test_cpus_fetch_ahead_where_it_was_faster(
    op: str, dtype: str, columns: int, fetches_ahead: bool
) -> None:
    eps = None if op.endswith("_backward") else 1e-5
    chosen = schedules.choose(NormSpec((columns,), dtype, op=op, eps=eps), gpu("host"))
    assert isinstance(chosen, RowBlocks)
    assert chosen.fetches_ahead is fetches_ahead


@pytest.mark.parametrize(
    ("how", "spec", "target", "why"),
    [
        (RowBlocks(64, 2, 16), SPEC, "sm_90", "it is for a CPU's threads and caches"),
        (RowBlocks(64, 2, 16), NormSpec((15,)), "host", "16 elements, a row has 15"),
        (RowBlocks(0, 2, 16), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 0, 16), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 2, 0), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 2, 16, share=0), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 2, 16, most_workgroups=0), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 2, 16, least=0), SPEC, "host", "a number below 1"),
        (RowBlocks(64, 2, 16, least=513), SPEC, "host", "at least 513 rows, at most 512"),
        (RowBlocks(64, 2, 16, span_chunks=0), SPEC, "host", "a number below 1"),
        (LEGAL, SPEC, "host", "workgroups of threads need a GPU"),
    ],
)
def test_rules_of_row_blocks(how: Schedule, spec: NormSpec, target: str, why: str) -> None:
    assert not isinstance(how, WholeTensors)
    illegal = how.illegal(spec, gpu(target))
    assert illegal is not None
    assert why in illegal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 64, 100000])
@pytest.mark.parametrize("mask", [m for m in itertools.product((True, False), repeat=3) if any(m)])
def test_a_cpu_takes_row_blocks_for_whatever_is_asked(
    mask: tuple[bool, bool, bool], columns: int, dtype: str
) -> None:
    spec = NormSpec((columns,), dtype, output_mask=mask)
    assert isinstance(schedules.choose(spec, gpu("generic")), RowBlocks)


def test_what_is_assumed_of_the_hosts_memory() -> None:
    assert schedules.host_alignment(RowBlocks(64, 2, 16)) == 1
    assert schedules.host_alignment(WholeTensors()) == 64


@pytest.mark.drawn
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=lambda product: product.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_product_can_be_chosen_for(dtype: str, product: Product) -> None:
    target = gpu(product.target)
    for columns in (1, 64, 1000, 4096, 16384, 65536):
        spec = NormSpec((columns,), dtype)
        chosen = schedules.choose(spec, target, product)
        assert isinstance(chosen, OnePass | TwoPass)
        assert chosen.illegal(spec, target) is None
        if product.stands_for_target:
            assert chosen == schedules.choose(spec, target)


def test_a_larger_product_has_more_workgroups_and_more_few_rows() -> None:
    spec = NormSpec((5120,), "f32")
    small, large = (
        schedules.choose(spec, gpu("sm_89"), find_product(name)) for name in ("rtx4090", "l40s")
    )
    assert isinstance(small, OnePass)
    assert isinstance(large, OnePass)
    assert (small.workgroups, large.workgroups) == (128, 142)
    assert small.few_rows is not None
    assert large.few_rows is not None
    assert small.few_rows.rows < large.few_rows.rows


def test_a_product_of_another_target_is_refused() -> None:
    why = r"product: expected one of sm_90 \(h100, h200\), got t4 of sm_75"
    with pytest.raises(ValueError, match=why):
        schedules.choose(SPEC, gpu("sm_90"), find_product("t4"))


@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.name)
@pytest.mark.parametrize("columns", [768, 1024, 12288, 65536])
@pytest.mark.parametrize("workgroups", [1, 4, 41, 128, 132, 264, 396, 1216])
def test_the_last_kernel_of_any_number_of_workgroups_is_legal(
    workgroups: int, columns: int, target: Target
) -> None:
    spec = NormSpec((columns,))
    one = schedules.with_finalize(
        TwoPass(workgroups, 4, 1, 1, 1), spec, target, standing_for(target.name)
    )
    assert one.illegal(spec, target) is None
    assert one.finalize_slices * one.finalize_columns % target.subgroup_size == 0
    step = one.finalize_slices * one.finalize_rows
    assert workgroups % step == 0 or workgroups > 4 * one.finalize_rows


@pytest.mark.parametrize(
    "how",
    [
        LEGAL,
        dataclasses.replace(LEGAL, few_rows=FEW),
        TwoPass(66, 8, 8, 1, 4),
        WholeTensors("why"),
        RowBlocks(64, 2, 16),
        RowBlocks(64, 2, 16, fetches_ahead=False),
    ],
)
def test_schedules_survive_a_manifest(how: Schedule) -> None:
    assert schedules.schedule_from_dict(schedules.schedule_to_dict(how)) == how


def test_what_inspect_says_of_a_form_has_no_plural_of_one_and_no_weights_of_none() -> None:
    one = RowBlocks(block=1, vector=1, workgroups=1)
    assert "1 row at a time; 1 workgroup, " in one.path(SPEC)
    for has_weight in (True, False):
        spec = NormSpec((4096,), op="rms_norm", eps=1e-5, has_weight=has_weight)
        said = schedules.paths(schedules.choose(spec, gpu("sm_90")), spec)
        assert all(("weights are read" in path) == has_weight for path in said)
        assert not any(
            "dy" in p for p in schedules.paths(schedules.choose(spec, find_target("host")), spec)
        )


# --- AMD's registers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "threads", "registers"),
    [
        # Of a compute unit's 512 KiB, in eights.
        ("gfx90a", 1024, 128),
        ("gfx942", 768, 168),
        ("gfx950", 512, 255),
        # Of the 768 KiB of two compute units, in 24s.
        ("gfx1100", 1024, 192),
        ("gfx1201", 768, 240),
        ("gfx1201", 512, 255),
    ],
)
def test_registers_of_a_thread_on_amd(target: str, threads: int, registers: int) -> None:
    lanes = gpu(target).subgroup_size
    assert registers_of_thread(threads // lanes, gpu(target)) == registers


def test_layer_norms_that_only_rdna_has_registers_for() -> None:
    spec = NormSpec((60000,), "bf16")
    assert isinstance(schedules.choose(spec, gpu("gfx942")), TwoPass)
    one = schedules.choose(spec, gpu("gfx1100"))
    assert isinstance(one, OnePass)
    assert one.rereads
    assert (one.workgroups, one.warps) == (48, 32)  # one to each workgroup processor


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_no_more_workgroups_than_run_at_once_on_amd(target: str) -> None:
    """Others would add partial rows alone: 1024 threads to what a workgroup is spread over."""
    amd = gpu(target)
    most = 1024 * standing_for(target).processors // amd.spread
    for columns in (64, 1024, 4096, 8192, 12288, 16384, 32768, 65536):
        for dtype in ("bf16", "f32"):
            one = schedules.choose(NormSpec((columns,), dtype), amd)
            if isinstance(one, OnePass):
                threads = one.subgroups * amd.subgroup_size
                assert threads * one.workgroups <= most, (columns, dtype, one)
