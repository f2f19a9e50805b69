"""Where the weight has sets, schedules say how many workgroups a GPU runs at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.schedules.set_waves import with_all_at_once

SETS = NormSpec((1400,), "bf16", weight_sets=True)
# Of 64 threads: a multiprocessor's registers and shared memory have room for four.
FEW = OnePass(264, groups=2, warps=1, vector=4, ahead=1, slots=2, stages_weight=True, resident=2)


def test_as_many_as_surely_run_at_once() -> None:
    """Threads have at most 255 registers, so that four workgroups of 64 need 65536 at most."""
    found = with_all_at_once(FEW, SETS, find_target("sm_90"), find_product("h200"))
    assert found == replace(FEW, resident=4, workgroups=528)


@pytest.mark.parametrize(
    ("one", "spec", "target", "product"),
    [
        (FEW, replace(SETS, weight_sets=False), "sm_90", "h200"),
        (replace(FEW, resident=4, workgroups=528), SETS, "sm_90", "h200"),
        (replace(FEW, cluster=2), SETS, "sm_90", "h200"),
        (replace(FEW, ahead=0, slots=0, stages_weight=False), SETS, "gfx942", "mi300x"),
    ],
    ids=["one weight", "said already", "clusters", "AMD"],
)
def test_others_stay_as_they_are(one: OnePass, spec: NormSpec, target: str, product: str) -> None:
    assert with_all_at_once(one, spec, find_target(target), find_product(product)) == one


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_chosen_schedules_say_so(target: str, op: str, dtype: str) -> None:
    """RMS norms of 704 columns in f32 on an A100 fit schedules of others, which said one."""
    found = 0
    for columns in (72, 128, 464, 704, 1120, 1392, 1456, 2048, 3696):
        spec = NormSpec((columns,), dtype, op=op, weight_sets=True)
        chosen = schedules.choose(spec, find_target(target))
        if isinstance(chosen, OnePass) and chosen.cluster == 1:
            found += 1
            assert chosen.resident == chosen.surely_resident(spec, find_target(target)), columns
    assert found
