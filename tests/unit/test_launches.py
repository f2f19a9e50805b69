"""The launches of a module: what follows from the rows, and that they survive JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import OnePass, WholeTensors
from iree_lnbwd.vmfb.counts import RowCount, count_of
from iree_lnbwd.vmfb.launches import LaunchPlans, launches

SM_90 = find_target("sm_90")
SPECS = [
    NormSpec((4096,), "bf16"),
    NormSpec((769,), "f32"),
    NormSpec((65536,), "bf16"),
    NormSpec((1024,), "f32", has_weight=False),
    NormSpec((1024,), "f32", output_mask=(True, False, True)),
    NormSpec((1024,), "f32", output_mask=(True, False, False)),
    NormSpec((1024,), "f32", output_mask=(False, True, True)),
    NormSpec((65536,), "f32", output_mask=(False, True, True)),
    NormSpec((1024,), "f32", eps=1e-5),
    NormSpec((4096,), "bf16", from_output=True),
    NormSpec((65536,), "f32", op="rms_norm_backward", from_output=True, has_weight=False),
]


@pytest.mark.parametrize(
    ("count", "numbers"),
    [
        (RowCount(), [1, 2, 37, 1000]),
        (RowCount(2), [1, 1, 19, 500]),
        (RowCount(1, 132), [1, 2, 37, 132]),
        (RowCount(4, 10), [1, 1, 10, 10]),
        (5, [5, 5, 5, 5]),
    ],
)
def test_counts_follow_the_rows(count: RowCount | int, numbers: list[int]) -> None:
    assert [count_of(count, rows) for rows in (1, 2, 37, 1000)] == numbers


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942", "gfx1100", "generic"])
def test_every_pointer_has_a_source_and_json_keeps_all(spec: NormSpec, target: str) -> None:
    found = find_target(target)
    planned = launches(spec, found, schedules.choose(spec, found))
    assert planned is not None
    given = {argument.name for argument in spec.arguments} | {"weight"}
    for plan in planned.plans:
        scratch = [piece.name for piece in plan.scratch]
        assert len(set(scratch)) == len(scratch)
        assert not given & set(scratch)
        for launch in plan.kernels:
            assert set(launch.bindings) <= given | set(scratch)
        written = {name for launch in plan.kernels for name in launch.bindings}
        assert {result.name for result in spec.results} <= written
    assert LaunchPlans.from_dict(json.loads(json.dumps(planned.to_dict())), spec) == planned


def test_only_iree_knows_the_kernels_that_it_made() -> None:
    assert launches(NormSpec((64,), "f64"), SM_90, WholeTensors("f64")) is None


@pytest.mark.parametrize("columns", [64, 4096, 65536])
def test_statistics_are_recomputed_ahead_of_every_plan(columns: int) -> None:
    spec = NormSpec((columns,), "bf16", eps=1e-5)
    how = schedules.choose(spec, SM_90)
    planned = launches(spec, SM_90, how)
    given = launches(NormSpec((columns,), "bf16"), SM_90, how)
    assert planned is not None
    assert given is not None
    for plan, without in zip(planned.plans, given.plans, strict=True):
        first, *others = plan.kernels
        assert (first.kernel, first.bindings) == ("normalize", ("input", "mean", "rstd"))
        assert tuple(others) == without.kernels
        rows = 1000
        groups = schedules.choose_statistics(spec, SM_90).rows
        assert count_of(first.workgroups[0], rows) * groups >= rows
        sizes = {piece.name: piece.bytes * count_of(piece.count, rows) for piece in plan.scratch}
        assert sizes["mean"] == sizes["rstd"] == 4 * rows


def test_row_sums_are_for_grad_input_alone() -> None:
    spec = NormSpec((65536,), "f64", output_mask=(False, True, True))
    target = find_target("sm_80")  # of two passes
    planned = launches(spec, target, schedules.choose(spec, target))
    assert planned is not None
    assert [kernel.kernel for kernel in planned.of(5).kernels] == ["columns", "finalize"]


def test_without_gradients_of_the_parameters_nothing_is_added_up() -> None:
    spec = NormSpec((4096,), "bf16", output_mask=(True, False, False))
    planned = launches(spec, SM_90, schedules.choose(spec, SM_90))
    assert planned is not None
    assert [launch.kernel for launch in planned.of(2000).kernels] == ["rows"]
    (few,) = planned.of(1).kernels
    assert count_of(few.workgroups[0], 1) == 1


def test_few_rows_take_one_kernel_and_no_partial_rows() -> None:
    spec = NormSpec((4096,), "bf16")
    how = schedules.choose(spec, SM_90)
    assert isinstance(how, OnePass)
    assert how.few_rows is not None
    planned = launches(spec, SM_90, how)
    assert planned is not None
    for rows in (1, how.few_rows.rows):
        plan = planned.of(rows)
        (few,) = plan.kernels
        assert few.kernel == "few_rows"
        assert count_of(few.workgroups[0], rows) == rows + 4096 // how.few_rows.tile
        assert plan.scratch == ()
    assert len(planned.of(how.few_rows.rows + 1).kernels) == 2


@pytest.mark.parametrize(("rows", "kernels"), [(1024, 1), (1025, 2)])
def test_fixed_rows_have_one_plan(rows: int, kernels: int) -> None:
    spec = NormSpec((4096,), "bf16", rows=rows)
    planned = launches(spec, SM_90, schedules.choose(spec, SM_90))
    assert planned is not None
    (plan,) = planned.plans
    assert len(plan.kernels) == kernels
    assert plan.most_rows is None


@pytest.mark.parametrize("most", [[], [None, None], [64], [64, 32, None]])
def test_plans_that_leave_a_number_of_rows_without_one(most: list[object]) -> None:
    planned = launches(SPECS[0], SM_90, schedules.choose(SPECS[0], SM_90))
    assert planned is not None
    (plan, *_) = json.loads(json.dumps(planned.to_dict()))["plans"]
    values = {"plans": [plan | {"most_rows": rows} for rows in most]}
    with pytest.raises(ValueError, match=r"^plans: expected one or more, .* got \["):
        LaunchPlans.from_dict(values, SPECS[0])


HOSTILE: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "no list": ((), 7, "plans: expected a list, got 7"),
    "no plan": ((0,), None, "plans[0]: expected an object, got None"),
    "another field": ((0, "x"), 1, "plans[0]: unknown field 'x'"),
    "a bool": ((0, "most_rows"), True, "plans[0].most_rows: expected an int from 1 to"),
    "a word": ((0, "most_rows"), "x", "plans[0].most_rows: expected an int from 1 to"),
    "all memory": ((1, "scratch", 0, "bytes"), 10**18, "scratch[0].bytes: expected an int from 0"),
    "less than none": ((1, "scratch", 0, "bytes"), -1, "scratch[0].bytes: expected an int from 0"),
    "a fraction": ((1, "scratch", 0, "bytes"), 0.5, "scratch[0].bytes: expected an int from 0"),
    "a name": ((1, "scratch", 0, "name"), 1, "scratch[0].name: expected a string, got 1"),
    "by none": ((1, "kernels", 0, "workgroups", 0, "per"), 0, "workgroups.per: expected an int"),
    "2**63": ((1, "kernels", 0, "workgroups", 0, "most"), 2**63, "workgroups.most: expected an"),
    "none": ((1, "kernels", 0, "workgroups", 1), 0, "workgroups: expected an int from 1"),
    "a partial row that costs nothing": (
        (1, "kernels", 0, "workgroups", 0),
        {"per": 1, "most": 1, "more": 0, "lost": 0},
        "workgroups.lost: expected an int from 1",
    ),
    "two axes": ((1, "kernels", 0, "workgroups"), [1, 1], "workgroups: expected 3 counts"),
    "constants": ((1, "kernels", 0, "constants"), [None], "constants: expected an int from 1"),
    "unknown memory": ((1, "kernels", 0, "reads", 0), "x", "reads: expected some of"),
    "another share": (
        (0, "kernels", 0, "constants"),
        [{"block": 0, "workgroups": 1, "least": 1, "most": 1, "most_workgroups": 1}],
        "constants.block: expected an int from 1 to",
    ),
    "half a share": (
        (0, "kernels", 0, "workgroups", 0),
        {"share": {"block": 1}},
        "workgroups.share.workgroups: missing",
    ),
    "no name": ((1, "kernels", 0, "writes", 0), [], "writes: expected some of"),
    "letters": ((1, "kernels", 0, "ahead"), "input", "ahead: expected a list"),
    "no kernel": ((1, "kernels", 0, "kernel"), 3, "kernels[0].kernel: expected a string, got 3"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_numbers_of_a_file_are_bounded_before_anything_is_computed(name: str) -> None:
    path, bad, said = HOSTILE[name]
    planned = launches(SPECS[0], SM_90, schedules.choose(SPECS[0], SM_90))
    assert planned is not None
    values = json.loads(json.dumps(planned.to_dict()))
    place: Any = values
    step: str | int = "plans"
    for following in path:
        place, step = place[step], following
    place[step] = bad
    with pytest.raises(ValueError, match=r"^plans") as refused:
        LaunchPlans.from_dict(values, SPECS[0])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
