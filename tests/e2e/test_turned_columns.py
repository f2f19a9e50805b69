"""Rows of a group that begin at several places of an access: threads turn to other columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import assert_right_in_emulation, built, without_few_rows

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.launches import count_of, launches
from iree_lnbwd.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.products import find_product
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.targets import find_target

LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
COPIED = OnePass(3, groups=1, warps=2, vector=4, ahead=2, slots=3)
IN_PLACE = replace(COPIED, ahead=1, slots=1, rereads=True)
CLUSTER = replace(COPIED, cluster=2, rereads=True)
CASES = {
    "a cluster": (
        "sm_90",
        NormSpec((1031,), "bf16", op=LAYER),
        replace(CLUSTER, stages_weight=True),
    ),
    "a cluster, refilled in place": (
        "sm_90",
        NormSpec((1031,), "f32", op=LAYER),
        replace(IN_PLACE, cluster=2),
    ),
    "in place, several steps ahead, two phases": (
        "sm_90",
        NormSpec((1028,), "bf16", op=RMS),
        replace(CLUSTER, workgroups=5, vector=8, ahead=2, slots=2),
    ),
    "a cluster that awaits sums later": (
        "sm_90",
        NormSpec((1031,), "bf16", op=LAYER),
        replace(CLUSTER, defers=True),
    ),
    "sums awaited later, from the output, refilled in place": (
        "sm_90",
        NormSpec((1031,), "bf16", op=RMS, from_output=True),
        replace(CLUSTER, workgroups=5, slots=2, stages_weight=True, defers=True),
    ),
    "one workgroup": ("sm_80", NormSpec((517,), "f16", op=LAYER), replace(COPIED, workgroups=1)),
    "as many steps ahead as rows of a phase": (
        "sm_80",
        NormSpec((517,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(COPIED, workgroups=7, ahead=3, slots=4, stages_weight=True, widens_weight=True),
    ),
    "from the output": (
        "sm_90",
        NormSpec((517,), "bf16", op=LAYER, from_output=True),
        replace(COPIED, workgroups=5, stages_weight=True),
    ),
    "from the output, no room for 1 / g": (
        "sm_90",
        NormSpec((1031,), "f32", op=RMS, from_output=True),
        replace(IN_PLACE, cluster=2),
    ),
    "dx alone": (
        "sm_90",
        NormSpec((517,), "f32", output_mask=(True, False, False), op=LAYER),
        IN_PLACE,
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(target: str, spec: NormSpec, how: OnePass) -> None:
    """With fewer rows than phases, with one row more than a workgroup takes, and with several."""
    assert how.turns(spec) == how.phases(spec) - 1 > 0
    vmfb, _ = built(spec, find_target(target), how)
    assert_right_in_emulation(vmfb, spec, 1, 3, 8, 13, adversarial=11)


@pytest.mark.drawn
def test_a_phase_that_ends_with_a_workgroup() -> None:
    """Of 8 rows, four phases have two each: the second workgroup begins with a phase."""
    spec, how = NormSpec((517,), "bf16", op=LAYER), replace(COPIED, workgroups=2)
    vmfb, _ = built(spec, find_target("sm_90"), how)
    assert_right_in_emulation(vmfb, spec, 4, 8, 9, adversarial=8)


def test_each_phase_but_the_first_has_a_partial_row_of_its_own() -> None:
    spec, target = NormSpec((1031,), "bf16", op=LAYER), find_target("sm_90")
    plans = launches(spec, target, CLUSTER)
    assert plans is not None
    *_, finalize = plans.of(100).kernels
    (partial_rows,) = finalize.constants
    assert [count_of(partial_rows, rows) for rows in (1, 2, 100)] == [4, 5, 6]


def test_what_is_chosen_for_wide_odd_rows() -> None:
    """As many clusters as run at once, or a few less, and copies in bulk: no thread turns."""
    spec, target = NormSpec((70001,), "bf16", op=LAYER), find_target("sm_90")
    how = schedules.choose(spec, target)
    assert isinstance(how, OnePass)
    walkers = find_product("h200").walkers(how.resident, how.cluster)
    assert how.bulk
    assert 0.9 * walkers <= how.workgroups <= walkers
    assert how.turns(spec) == 0
    turning = NormSpec((1031,), "bf16", op=LAYER)
    assert "which begin at 4 places of one" in CLUSTER.path(turning)
    vmfb, _ = built(spec, target, without_few_rows(spec, target))
    assert_right_in_emulation(vmfb, spec, 2, adversarial=7)


def test_several_groups_cannot_turn() -> None:
    spec = NormSpec((517,), "bf16", op=LAYER)
    assert replace(COPIED, groups=3).illegal(spec, find_target("sm_90")) == (
        "rows of 3 groups begin at different places of 4 elements"
    )
