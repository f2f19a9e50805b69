"""The model of a schedule on paper: its arithmetic, and that it orders what was measured."""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import PRODUCTS, Product, find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward, OnePass, TwoPass, cost_model
from iree_lnbwd.schedules.cost_model import Estimate, estimate

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import swept

SM_90, H200 = find_target("sm_90"), find_product("h200")
BF16 = NormSpec((4096,), "bf16")
WALKING = OnePass(132, 2, 8, 8, ahead=2, slots=3, stages_weight=True)
NARROW = NormSpec((512,), "bf16")
NARROW_WALKING = OnePass(264, 8, 1, 8, ahead=2, slots=3, resident=2)
WIDE = NormSpec((49152,), "bf16")
CLUSTERS = OnePass(15, 1, 12, 8, ahead=2, slots=2, rereads=True, cluster=8)
AMD = [p for p in PRODUCTS.values() if find_target(p.target).backend == "rocm"]


def on_h200(one: OnePass | TwoPass | Forward, spec: NormSpec = BF16) -> Estimate:
    assert one.illegal(spec, SM_90) is None
    return estimate(spec, SM_90, H200, one)


def test_every_amd_product_is_known() -> None:
    assert len(AMD) >= 7
    for product in (*AMD, H200, find_product("h100")):
        assert cost_model.knows(product)
    assert not cost_model.knows(find_product("t4"))


def test_by_hand() -> None:
    """16384 rows for 264 groups of 8 subgroups, two rows of dy and x ahead of each."""
    paper = on_h200(WALKING)
    assert (paper.resident, paper.waves) == (1, 1)
    assert paper.steps == 63
    assert paper.last_step == pytest.approx(16384 / 264 - 62)
    assert paper.occupancy == 16 / 64
    assert paper.idle == 0
    assert paper.bytes_in_flight == 2 * 2 * 2 * 4096 * 2
    # 1400 cycles at 1980 MHz of 4800 GB/s, a 132nd, of which two thirds are read
    assert paper.bytes_wanted == pytest.approx(1400 / 1.98e9 * 4.8e12 / 132 * 2 / 3, abs=1)
    assert 0.85 < paper.share < 1


def test_a_cluster_too_many_takes_twice_the_time() -> None:
    """As it did on an H200: 15 clusters of 8 fit, and the 16th waits for the others to end."""
    fits, waits = on_h200(CLUSTERS, WIDE), on_h200(replace(CLUSTERS, workgroups=16), WIDE)
    assert (fits.waves, waits.waves) == (1, 2)
    assert waits.share == pytest.approx(fits.share * 0.53, abs=0.03)


@pytest.mark.parametrize(
    "worse",
    [
        replace(NARROW_WALKING, groups=1),  # too few bytes under way
        replace(NARROW_WALKING, groups=2, ahead=0, slots=0),  # groups wait for each row
        replace(NARROW_WALKING, workgroups=66),  # half of the processors
        replace(NARROW_WALKING, vector=1, ahead=1, slots=0),  # eight times as many accesses
        replace(NARROW_WALKING, workgroups=272),  # of which 264 fit at once
        TwoPass(66, 8, 8, 4, 4, resident=2),
    ],
)
def test_what_is_worse(worse: OnePass | TwoPass) -> None:
    assert on_h200(worse, NARROW).share < 0.9 * on_h200(NARROW_WALKING, NARROW).share


def test_registers_that_are_missing() -> None:
    crowded = replace(WALKING, groups=4, rereads=False)
    assert on_h200(crowded).registers == crowded.registers_available(SM_90) == 64
    assert on_h200(crowded).share < 0.8 * on_h200(WALKING).share


def test_posts_are_awaited_where_they_are_not_received_later() -> None:
    spec = NormSpec((200_000,), "bf16")
    later = OnePass(
        *(7, 1, 16, 4), ahead=2, slots=3, rereads=True, cluster=18, defers=True, posts=True
    )
    assert later.illegal(spec, SM_90) is None
    at_once, received_later = (on_h200(o, spec) for o in (replace(later, defers=False), later))
    assert at_once.share < received_later.share
    assert received_later.waves == 1  # of 132 processors, not of 120 that neighbours fill


def test_two_passes_stay_below_three_fifths() -> None:
    assert on_h200(TwoPass(66, 8, 8, 4, 4, resident=2)).share <= 3 / 5


@pytest.mark.parametrize("product", AMD, ids=lambda product: product.name)
@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm"])
def test_amd(product: Product, op: str) -> None:
    target = find_target(product.target)
    for columns, dtype in itertools.product((1024, 4096, 65536), ("bf16", "f32")):
        spec = NormSpec((columns,), dtype, op=op, eps=1e-5 if op == "rms_norm" else None)
        one = schedules.choose(spec, target, product)
        assert isinstance(one, OnePass | TwoPass | Forward)
        few, many = (estimate(spec, target, product, one, registers=n) for n in (32, 250))
        assert many.resident <= few.resident
        for paper in (few, many, estimate(spec, target, product, one)):
            assert 0 < paper.occupancy <= 1
            assert 0 < paper.share < 1
            assert 0 <= paper.idle < 1
            assert 0 < paper.last_step <= 1


def test_compute_units_by_hand() -> None:
    """120 registers leave 4 waves to each SIMD of CDNA 3 (scripts/results/isa_amd.md)."""
    target, product = find_target("gfx942"), find_product("mi300x")
    one = OnePass(1216, 1, 4, 8)
    paper = estimate(BF16, target, product, one, registers=120)
    assert (paper.resident, paper.limit, paper.waves) == (4, "registers", 1)
    assert paper.occupancy == 16 / 32
    assert paper.bytes_in_flight == 4 * 4096 * 2 * 2
    assert paper.partial == 1216 * 2 * 4 * 2 / (16384 * 3 * 2)  # of f32, and of bf16
    assert estimate(BF16, target, product, one, registers=200).waves == 2


def test_it_orders_what_was_measured() -> None:
    """Of each width, its pick is near the best of the forms that the committed sweeps have."""
    cells: dict[swept.Cell, list[tuple[float, float]]] = {}
    for one in swept.read(swept.path_of("h200")):
        if one.schedule.illegal(one.cell.spec, SM_90) is None:
            said = on_h200(one.schedule, one.cell.spec).share
            cells.setdefault(one.cell, []).append((said, one.share))
    several = [found for found in cells.values() if len(found) > 4]
    assert len(several) >= 40
    regrets = [1 - max(f, key=lambda o: o[0])[1] / max(share for _, share in f) for f in several]
    middle = [1 - statistics.median(s for _, s in f) / max(s for _, s in f) for f in several]
    assert statistics.median(regrets) < 0.5 * statistics.median(middle)


def test_rows_that_a_spec_fixes() -> None:
    fixed = NormSpec((4096,), "bf16", rows=100)
    assert estimate(fixed, SM_90, H200, WALKING).steps == 1
    assert estimate(fixed, SM_90, H200, WALKING, rows=1000).steps == 4
    assert on_h200(WALKING).said.startswith("1 workgroup to a processor (limit: ")
