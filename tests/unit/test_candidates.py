"""Candidates: legal, none twice, the choice first, and forwards all of one order of sums."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.products import find_product, standing_for
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import Forward, OnePass, TwoPass, WholeTensors, candidates
from iree_lnbwd.schedules.provenance import source_of

H200 = find_product("h200")
SM_90 = find_target("sm_90")
CASES = (
    (NormSpec((6656,), "bf16"), "sm_90"),
    (NormSpec((768,), "f32", op="rms_norm_backward", residual_dtype="f32"), "gfx942"),
    (NormSpec((1111,), "bf16", from_output=True), "sm_75"),
    (NormSpec((64,), "f64"), "gfx1100"),
    (NormSpec((65536,), "bf16"), "sm_80"),
    (NormSpec((6656,), "bf16", op="layer_norm", eps=1e-5), "sm_90"),
    (NormSpec((64,), "f32", op="rms_norm", eps=1e-5, residual_dtype="f32"), "gfx942"),
    (NormSpec((100_000,), "f32", op="layer_norm", eps=1e-5), "sm_90"),
)


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "target"), CASES, ids=lambda case: str(case)[:40])
def test_a_sample(spec: NormSpec, target: str) -> None:
    found, product = find_target(target), standing_for(target)
    chosen = schedules.choose(spec, found)
    sample = candidates.sample(spec, found, product, chosen, 24, seed=7)
    assert sample[0] == chosen
    assert len(set(sample)) == len(sample) <= 24
    for one in sample:
        assert isinstance(one, OnePass | TwoPass | Forward)
        assert one.illegal(spec, found) is None
        if isinstance(chosen, OnePass):
            assert isinstance(one, OnePass)
            assert one.few_rows == chosen.few_rows
        if isinstance(chosen, Forward):
            assert isinstance(one, Forward)
            assert candidates.shares_out_alike(one, chosen)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    ("op", "columns", "dtype"),
    [("layer_norm", 768, "bf16"), ("rms_norm", 1000, "f32"), ("layer_norm", 40000, "f32")],
)
def test_forwards_of_other_orders_of_sums(op: str, columns: int, dtype: str, target: str) -> None:
    """What rules are found by: rows that are shared out in other ways, where rows are kept."""
    spec, found = NormSpec((columns,), dtype, op=op, eps=1e-5), find_target(target)
    chosen = schedules.choose(spec, found)
    assert isinstance(chosen, Forward)
    some = list(candidates.forwards(spec, found, standing_for(target)))
    assert all(one.illegal(spec, found) is None for one in some)
    where = (chosen.in_registers, chosen.in_shared_memory, chosen.cluster)
    assert {(one.in_registers, one.in_shared_memory, one.cluster) for one in some} == {where}
    assert (chosen.threads, chosen.vector, chosen.chunks) in {
        (one.threads, one.vector, one.chunks) for one in some
    }
    assert len({one.threads for one in some}) > 2
    assert len({one.vector for one in some}) > 1


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_few_rows_have_a_kernel_of_their_own_or_none(dtype: str, target: str) -> None:
    """IREE keeps one of two kernels whose code is the same, and a call would miss the other."""
    spec, found = NormSpec((289,), dtype, op="layer_norm", eps=1e-5), find_target(target)
    for one in candidates.forwards(spec, found, standing_for(target)):
        forms = one.forms(spec)
        assert len({replace(each, lasts=False) for each in forms}) == len(forms) or (
            found.has_cache_policies and dtype == "f32"
        )


def test_single_elements_of_16_bits_do_not_last() -> None:
    spec = NormSpec((289,), "bf16", op="layer_norm", eps=1e-5)
    one = Forward(rows=12, threads=64, vector=1, chunks=6, in_registers=True, most_few_rows=768)
    early = replace(one, early=True, lasts=True)
    assert one.illegal(spec, SM_90) is None
    assert early.illegal(spec, SM_90) == "few rows would have the kernel that many have"
    assert early.illegal(replace(spec, rows=800), SM_90) is None


def test_the_seed_decides() -> None:
    """About the sample, and not about the choice and what was measured nearby."""
    spec = NormSpec((768,), "f32", op="rms_norm_backward")
    chosen = schedules.choose(spec, SM_90)
    one, again, other = (
        candidates.sample(spec, SM_90, H200, chosen, 48, seed) for seed in (0, 0, 1)
    )
    assert one == again
    assert len(one) == len(other) == 48
    assert set(one) != set(other)
    assert one[:2] == other[:2]
    assert candidates.sample(spec, SM_90, H200, chosen, 1, 0) == (chosen,)


@pytest.mark.drawn
def test_clusters_may_await_sums_later() -> None:
    """With as many clusters as run at once, or less, whose rows begin at one place each."""
    spec = NormSpec((37_001,), "bf16")
    found = list(candidates.one_pass(spec, SM_90, H200))
    later = [one for one in found if one.defers]
    assert later
    assert all(one.cluster > 1 and one.rereads and one.ahead > 1 for one in later)
    of_eight = {
        (one.resident, one.workgroups)
        for one in later
        if (one.cluster, one.vector, one.bulk) == (8, 4, False)
    }
    assert of_eight == {(1, 12), (2, 28)}
    assert not any(one.defers for one in candidates.one_pass(spec, find_target("sm_80"), H200))


@pytest.mark.drawn
def test_subgroups_may_have_several_narrow_rows() -> None:
    """As many as leave few lanes idle: 12, 6 or 4 of a row's lanes have 8, 16 or 24 columns."""
    spec = NormSpec((96,), "bf16", op="rms_norm_backward", weight_sets=True)
    found = list(candidates.one_pass(spec, SM_90, H200))
    assert {(one.subgroup_rows, one.padded_columns(spec, SM_90)) for one in found} >= {
        (2, 128),
        (4, 128),
        (8, 96),
    }


@pytest.mark.drawn
def test_rows_may_be_copied_in_bulk_where_there_are_such_copies() -> None:
    """In place, by any access: single elements too, since a copy may begin anywhere."""
    spec = NormSpec((95_535,), "bf16")
    found = [one for one in candidates.one_pass(spec, SM_90, H200) if one.bulk]
    assert {one.vector for one in found} == {1, 2, 4, 8}
    assert all(one.in_place and one.rereads for one in found)
    assert not any(one.bulk for one in candidates.one_pass(spec, find_target("sm_80"), H200))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "fetches"),
    [
        (131_041, {(1, False), (2, True)}),
        (32_769, {(2, False), (3, False)}),
    ],
)
def test_x_is_copied_later_than_dy_where_there_is_no_room_for_another_row_of_both(
    columns: int, fetches: set[tuple[int, bool]]
) -> None:
    """And a single slot is tried only there."""
    found = candidates.one_pass(NormSpec((columns,), "f32"), SM_90, H200)
    of_eight = [one for one in found if one.bulk and (one.cluster, one.resident) == (8, 1)]
    assert {(one.slots, one.x_later) for one in of_eight} == fetches


def test_forwards_share_out_alike_in_every_number_that_a_sum_depends_on() -> None:
    """Those of a new field too, unless it is named here."""
    free = {"rows", "most_few_rows", "early", "lasts", "resident", "ahead"}
    one = Forward(rows=4, threads=32, vector=4, chunks=2, in_registers=True)
    for field in fields(Forward):
        value = getattr(one, field.name)
        other = replace(one, **{field.name: not value if value in (True, False) else value + 3})
        assert candidates.shares_out_alike(one, other) == (field.name in free), field.name


@pytest.mark.parametrize(
    ("spec", "target", "said"),
    [
        (NormSpec((768,), "bf16"), "sm_90", "measured on h200"),
        (NormSpec((6656,), "bf16"), "sm_90", "fitted from a width measured on h200"),
        (
            NormSpec((6656,), "bf16"),
            "sm_80",
            "fitted from a width measured on h200_as_sm_80 or h200",
        ),
        (NormSpec((768,), "bf16"), "sm_75", "rules"),
        (NormSpec((768,), "bf16", op="rms_norm", eps=1e-5), "sm_90", "rules"),
        (NormSpec((768,)), "host", "rules"),
    ],
)
def test_a_source_in_words(spec: NormSpec, target: str, said: str) -> None:
    found = find_target(target)
    chosen = schedules.choose(spec, found)
    assert source_of(chosen, spec, found) == said
    assert source_of(WholeTensors(), spec, found) == "given"
