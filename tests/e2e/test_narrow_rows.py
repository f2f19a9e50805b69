"""Rows that have a part of a subgroup: right in the emulator, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import assert_right, assert_right_in_emulation, random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
COPIED = OnePass(2, 8, 1, vector=8, ahead=2, slots=3, subgroup_rows=4)
LOADED = replace(COPIED, ahead=0, slots=0)
CASES = {
    "four, copied": ("sm_90", NormSpec((64,), "bf16", op=LAYER), COPIED),
    "two, refilled in place, columns that do not fill": (
        "sm_80",
        NormSpec((120,), "f32", op=RMS),
        replace(COPIED, vector=4, ahead=1, slots=1, rereads=True, subgroup_rows=2),
    ),
    "sixteen, loaded ahead": (
        "sm_75",
        NormSpec((10,), "f16", op=LAYER),
        replace(LOADED, groups=32, vector=2, ahead=1, subgroup_rows=16),
    ),
    "from the output, with a residual": (
        "sm_90",
        NormSpec((96,), "bf16", op=LAYER, from_output=True, residual_dtype="bf16"),
        replace(COPIED, stages_weight=True, widens_weight=True),
    ),
    "sums of f64": (
        "sm_90",
        NormSpec((32,), "f64", op=LAYER),
        replace(COPIED, vector=2, subgroup_rows=2),
    ),
    "eight of a wave of 64": (
        "gfx942",
        NormSpec((64,), "bf16", op=RMS),
        replace(LOADED, subgroup_rows=8),
    ),
    "two of a wave of 64": (
        "gfx942",
        NormSpec((128,), "f32", op=LAYER),
        replace(LOADED, vector=4, subgroup_rows=2),
    ),
    "of a wave of 32": ("gfx1100", NormSpec((64,), "f16", op=LAYER), LOADED),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(target: str, spec: NormSpec, how: OnePass) -> None:
    """For rows that leave lanes without one, and for rows that subgroups walk over."""
    vmfb, _ = compiler.build(spec, find_target(target), schedule=how)
    assert_right_in_emulation(vmfb, spec, 1, 5, 53, adversarial=7)


def test_a_last_row_that_is_not_finite_counts_once() -> None:
    """Lanes without a row of their own have the last one's statistics."""
    spec = NormSpec((64,), "f32", op=LAYER)
    how = replace(COPIED, vector=4, subgroup_rows=2)
    call = matrix.random_call(spec, 3, random_generator())
    rstd = call.arrays["rstd"].copy()
    rstd[-1] = np.inf
    call = call._replace(arrays={**call.arrays, "rstd": rstd})
    assert_right(
        EmulatedNorm(compiler.build(spec, find_target("sm_90"), schedule=how)[0]).run(call), call
    )


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"warps": 2}, 64),
        ({"subgroup_rows": 3}, 64),
        ({"subgroup_rows": 32, "groups": 32}, 64),
        ({"groups": 6}, 64),
    ],
)
def test_an_illegal_part_says_why(changes: dict[str, Any], columns: int) -> None:
    how = replace(COPIED, **changes)
    why = f"{how.groups} groups, {how.subgroup_rows} to a subgroup of 32"
    assert how.illegal(NormSpec((columns,), "bf16"), find_target("sm_90")) == why
