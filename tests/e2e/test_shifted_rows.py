"""Rows that begin anywhere in an access: right in the emulator, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import assert_right_in_emulation, assert_rows_not_finite_apart

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import FewRows, OnePass

LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
COPIED = OnePass(8, 1, 1, vector=8, ahead=2, slots=3)
IN_PLACE = replace(COPIED, ahead=1, slots=1, rereads=True)
CASES = {
    "one chunk of a thread": ("sm_90", NormSpec((203,), "bf16", op=LAYER), COPIED),
    "several groups, the weight copied": (
        "sm_90",
        NormSpec((333,), "bf16", op=LAYER),
        replace(COPIED, workgroups=4, groups=2, stages_weight=True),
    ),
    "refilled in place": ("sm_80", NormSpec((1111,), "f16", op=RMS), replace(IN_PLACE, warps=2)),
    "f32, four elements": (
        "sm_90",
        NormSpec((333,), "f32", op=LAYER),
        replace(COPIED, workgroups=3, groups=4, vector=4),
    ),
    "two elements": ("sm_86", NormSpec((77,), "bf16", op=RMS), replace(COPIED, vector=2)),
    "a multiple of 2": ("sm_90", NormSpec((506,), "bf16", op=LAYER), replace(COPIED, workgroups=4)),
    "two sizes": (
        "sm_90",
        NormSpec((301,), "bf16", "f32", op=LAYER),
        replace(COPIED, workgroups=4, vector=4),
    ),
    "f64": ("sm_90", NormSpec((75,), "f64", op=LAYER), replace(COPIED, vector=2)),
    "from the output, with a residual": (
        "sm_90",
        NormSpec((203,), "bf16", op=LAYER, from_output=True, residual_dtype="bf16"),
        replace(COPIED, stages_weight=True, widens_weight=True),
    ),
    "with a residual, read again": (
        "sm_90",
        NormSpec((203,), "f16", op=RMS, residual_dtype="f16"),
        IN_PLACE,
    ),
    "parts of a subgroup": (
        "sm_90",
        NormSpec((41,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(COPIED, workgroups=2, groups=8, subgroup_rows=4),
    ),
    "a cluster": (
        "sm_90",
        NormSpec((1003,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(COPIED, cluster=2, warps=2),
    ),
    "a cluster with a short part": (
        "sm_90",
        NormSpec((1003,), "f32", op=RMS),
        replace(IN_PLACE, workgroups=4, vector=4, cluster=4, warps=1),
    ),
    "less than an access": ("sm_90", NormSpec((3,), "bf16", op=LAYER), COPIED),
    "without a weight, dx alone": (
        "sm_90",
        NormSpec((203,), "bf16", output_mask=(True, False, False), has_weight=False, op=LAYER),
        COPIED,
    ),
    "few rows": (
        "sm_90",
        NormSpec((203,), "bf16", op=LAYER),
        replace(COPIED, few_rows=FewRows(rows=16, warps=4, tile=32, tile_vector=1)),
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(target: str, spec: NormSpec, how: OnePass) -> None:
    """For rows of every place in an access, for the last row of memory, and for one alone."""
    assert how.shifted(spec)
    vmfb, _ = compiler.build(spec, find_target(target), schedule=how)
    assert_right_in_emulation(vmfb, spec, 1, 27, adversarial=9)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A row's first access has the end of the row before in it."""
    spec = NormSpec((203,), "bf16", op=LAYER)
    assert_rows_not_finite_apart(
        compiler.build(spec, find_target("sm_90"), schedule=COPIED)[0], spec
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"workgroups": 132, "groups": 3},
            "rows of a group have different alignment phases in 8 elements",
        ),
        ({"slots": 0, "ahead": 0}, "N is no multiple of 8, and rows are not copied"),
    ],
)
def test_an_illegal_shift_says_why(changes: dict[str, Any], why: str) -> None:
    how = replace(COPIED, **changes)
    assert how.illegal(NormSpec((203,), "bf16"), find_target("sm_90")) == why
