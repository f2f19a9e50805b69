"""Schedules for widths that nobody measured: fitted from widths near them, without cliffs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.schedules.fitted import fitted
from iree_lnbwd.schedules.measured import Key
from iree_lnbwd.schedules.measured_files import serving

SM_90, H200 = find_target("sm_90"), find_product("h200")
MEASURED = OnePass(256, 4, 2, 4, ahead=1, slots=2, stages_weight=True, resident=2)
AT_1024 = Key(LAYER_NORM_BACKWARD.name, 2, 1024)


def ways(
    columns: int, known: Mapping[Key, OnePass] | None = None, dtype: str = "bf16"
) -> list[OnePass]:
    spec = NormSpec((columns,), dtype)
    kind = AT_1024._replace(columns=columns, element_bytes=2 if dtype == "bf16" else 4)
    known = known or {AT_1024: MEASURED}
    return list(fitted(spec, SM_90, known, dict.fromkeys(known, 0.9), kind))


def test_a_width_close_by_takes_it_as_it_is() -> None:
    assert ways(1000)[0] == MEASURED


@pytest.mark.parametrize("columns", [516, 700, 1400, 1984, 2044])
def test_what_it_takes_to_fit_is_all_that_changes(columns: int) -> None:
    found = ways(columns)
    assert found
    for one in found:
        assert one.illegal(NormSpec((columns,), "bf16"), SM_90) is None
        for field in ("workgroups", "vector", "ahead", "slots", "stages_weight", "resident"):
            assert getattr(one, field) == getattr(MEASURED, field)
        assert 6 <= one.groups * one.warps <= 10  # 8 were measured


@pytest.mark.parametrize(("columns", "takes"), [(1016, True), (1020, False)])
def test_narrower_accesses_are_for_rows_that_have_as_wide_ones(columns: int, takes: bool) -> None:
    """Accesses of two elements were the fastest of 1024 columns, which sixteen bytes divide."""
    narrow = dataclasses.replace(MEASURED, vector=2)
    assert bool(ways(columns, {AT_1024: narrow})) == takes
    assert all(one.vector == 2 for one in ways(columns, {AT_1024: narrow}))


def test_threads_take_more_before_groups_change() -> None:
    """Of 1152 columns, a fifth vector for each thread leaves a tenth of the threads idle.

    Three full subgroups would leave none, but the workgroup would have 9, which quarters of a
    multiprocessor cannot share.
    """
    spec = NormSpec((1152,), "bf16")
    first, *others = ways(1152)
    assert (first.groups, first.warps, first.chunks(spec, SM_90)) == (4, 2, 5)
    assert any(one.padded_columns(spec, SM_90) == 1152 for one in others)


def test_shared_memory_that_the_l1_cache_needs_costs() -> None:
    """At 8204 columns of f32, three slots would take more than 196 KiB, which 8192 leave free.

    At 8200, rows begin with a sector of memory, and copies need no L1 cache.
    """
    spec, key = NormSpec((8204,), "f32"), AT_1024._replace(element_bytes=4)
    near = OnePass(132, 1, 8, 4, ahead=2, slots=3, rereads=True)
    roomy = dataclasses.replace(near, ahead=1, slots=2)
    known = {key._replace(columns=8192): near, key._replace(columns=8100): roomy}
    assert near.shared_bytes(dataclasses.replace(spec, normalized_shape=(8192,)), SM_90) < 196 << 10
    assert near.shared_bytes(spec, SM_90) > 196 << 10
    assert near.crowds(spec, SM_90)
    assert ways(8204, known, "f32")[0].slots == roomy.slots
    assert not near.crowds(dataclasses.replace(spec, normalized_shape=(8200,)), SM_90)


def test_checks_that_were_not_measured_cost() -> None:
    """Threads cover 1024 columns exactly. Those of 984 and of 1016 are as many, and check."""
    other = dataclasses.replace(MEASURED, ahead=2, slots=3)
    known = {AT_1024: MEASURED, AT_1024._replace(columns=984): other}
    assert ways(1016, known)[0] == other
    assert ways(1016, {**known, AT_1024._replace(columns=1016): MEASURED})[0] == MEASURED


def test_checks_beside_a_gate_take_registers() -> None:
    """Threads cover 12288 columns exactly. Those of 12064 check, and would spill."""
    spec = NormSpec((12064,), "f32", op=RMS_NORM_BACKWARD.name, gate="after")
    kind = Key(spec.op, 4, 12064, has_gate=True)
    one = OnePass(66, 1, 12, 4, ahead=1, slots=2, stages_weight=True, cluster=2)
    known = {kind._replace(columns=12288): one}
    shares = dict.fromkeys(known, 0.9)
    assert not [*fitted(spec, SM_90, known, shares, kind)]
    again = {key: dataclasses.replace(one, rereads=True) for key in known}
    assert next(fitted(spec, SM_90, again, shares, kind)).warps == one.warps


@pytest.mark.parametrize(
    ("columns", "lacking"), [(7680, 0), (7552, 1), (7440, 2), (7416, 3), (7296, 3), (7200, 4)]
)
def test_the_last_subgroup_lacks_what_the_row_has_not(columns: int, lacking: int) -> None:
    """Of 7680 columns, each of 12 subgroups has five accesses of 128 columns."""
    spec = NormSpec((columns,), "f32", op=RMS_NORM_BACKWARD.name, gate="after")
    one = OnePass(132, 1, 12, 4, ahead=1, slots=1, rereads=True, bulk=True)
    assert one.chunks(spec, SM_90) == 5
    assert one.vectors_lacking(spec, SM_90) == lacking


@pytest.mark.parametrize(("columns", "in_bulk"), [(5160, False), (5336, False), (5440, True)])
def test_vectors_that_a_subgroup_lacks_beside_a_gate_cost(columns: int, in_bulk: bool) -> None:
    """Of 11 subgroups of 512 columns, the last lacks four, three and two of its four vectors."""
    spec = NormSpec((columns,), "f32", op=RMS_NORM_BACKWARD.name, gate="after")
    kind = Key(spec.op, 4, columns, has_gate=True)
    bulk = OnePass(132, 1, 11, 4, ahead=2, slots=2, rereads=True, bulk=True)
    copied = dataclasses.replace(bulk, ahead=1, bulk=False)
    known = {kind._replace(columns=5552): bulk, kind._replace(columns=5600): copied}
    shares = dict(zip(known, (0.92, 0.88), strict=True))
    first = next(fitted(spec, SM_90, known, shares, kind))
    assert (first.bulk, first.warps) == (in_bulk, bulk.warps)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(512, "bf16"), (2048, "bf16"), (1000, "f32")],
)
def test_far_widths_and_other_types_say_nothing(columns: int, dtype: str) -> None:
    assert ways(columns, dtype=dtype) == []


def test_vectors_of_a_thread_count_as_they_are() -> None:
    """Half a row takes half the subgroups: 3 vectors a thread would take two, which have 2 each."""
    spec = NormSpec((504,), "bf16")
    first, *others = ways(504, {AT_1024._replace(columns=1000): MEASURED})
    assert (first.groups, first.warps, first.chunks(spec, SM_90)) == (8, 1, 4)
    assert any((one.groups, one.warps, one.chunks(spec, SM_90)) == (4, 2, 2) for one in others)


@pytest.mark.parametrize("columns", [1001, 1002])
def test_accesses_go_across_the_borders_of_rows(columns: int) -> None:
    """A group's rows are so many elements apart that all begin at one place of an access."""
    spec = NormSpec((columns,), "bf16")
    found = ways(columns)
    assert found
    for one in found:
        assert one.vector == MEASURED.vector
        assert one.shifted(spec)
        assert one.workgroups * one.groups * columns % one.vector == 0
        assert one.workgroups <= MEASURED.workgroups


def test_a_few_clusters_less_have_rows_at_one_place_each() -> None:
    """Of 30 clusters, 28 have; of 15, no more than 12 would, which are too few."""
    two = OnePass(30, 1, 8, 4, ahead=2, slots=3, rereads=True, resident=2, cluster=8, defers=True)
    key = AT_1024._replace(columns=36864)
    first, *_ = ways(37001, {key: two})
    assert (first.workgroups, first.defers) == (28, True)
    assert ways(36868, {key: two})[0].workgroups == 30
    one = dataclasses.replace(two, workgroups=15, resident=1)
    assert not ways(37001, {key: one})


def takes_as_many(chosen: OnePass, spec: NormSpec, key: Key, one: OnePass) -> bool:
    """Whether a schedule that was measured as the fastest takes as many registers, or more."""
    source = dataclasses.replace(spec, normalized_shape=(key.columns,))
    return (
        key.element_bytes == DTYPES[spec.dtype].numpy.itemsize
        and one.registers_available(SM_90) <= chosen.registers_available(SM_90)
        and one.registers(source, SM_90) >= chosen.registers(spec, SM_90)
    )


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("op", [LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name])
def test_no_width_falls_off(op: str, dtype: str) -> None:
    """One pass, few threads idle, and enough of them, where accesses of 4 elements divide N."""
    known = serving(H200).items()
    for columns in range(132, 16385, 52):
        spec = NormSpec((columns,), dtype, op=op)
        chosen = schedules.choose(spec, SM_90, H200)
        assert isinstance(chosen, OnePass), spec.name
        # Shared memory that is filled in bulk may be read by narrower ones.
        assert chosen.vector >= (2 if chosen.bulk else 4), spec.name
        assert chosen.padded_columns(spec, SM_90) <= 1.5 * columns, spec.name
        assert chosen.groups * chosen.warps * chosen.resident >= 6, spec.name
        if chosen.registers(spec, SM_90) > chosen.registers_available(SM_90):
            assert any(takes_as_many(chosen, spec, key, one) for key, one in known), spec.name
