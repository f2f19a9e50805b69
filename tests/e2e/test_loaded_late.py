"""A gate, and other gradients of the output, that are loaded when they are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import (
    assert_right_in_emulation,
    assert_same_bits,
    assert_schedule_right_in_emulation,
    built,
    random_generator,
    without_few_rows,
)

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
TWICE = OnePass(3, 1, 4, vector=4, rereads=True, loads_late=True)
COPIED = replace(TWICE, ahead=1, slots=2)
POSTED = replace(COPIED, warps=2, cluster=3, posts=True)
LATER = replace(POSTED, ahead=2, defers=True)
GATED = NormSpec((1024,), "bf16", op=RMS, gate="after")
OF_LAYER = NormSpec((1024,), "bf16", op=LAYER, gate="before")
CASES: dict[str, tuple[NormSpec, OnePass, str]] = {
    "loaded twice, a gate": (GATED, TWICE, "sm_75"),
    "loaded twice, a gate first, AMD": (replace(GATED, gate="before"), TWICE, "gfx942"),
    "loaded twice, four gradients, AMD": (
        NormSpec((1000,), "f32", op=LAYER, grad_outputs=4),
        replace(TWICE, warps=8),
        "gfx1100",
    ),
    "copied, layer norm's gate": (replace(OF_LAYER, gate="after"), COPIED, "sm_80"),
    "copied in place, three gradients and a residual": (
        NormSpec((512,), "f16", op=LAYER, grad_outputs=3, residual_dtype="f32"),
        replace(COPIED, slots=1),
        "sm_86",
    ),
    "two groups, rows that begin anywhere": (
        NormSpec((1023,), "bf16", op=RMS, gate="before"),
        replace(COPIED, groups=2, workgroups=2),
        "sm_89",
    ),
    "rows that share a subgroup": (
        NormSpec((64,), "f32", op=RMS, grad_outputs=2),
        replace(TWICE, groups=4, warps=1, subgroup_rows=4),
        "sm_80",
    ),
    "posted": (OF_LAYER, POSTED, "sm_86"),
    "posted, received later, a gate": (GATED, LATER, "sm_80"),
    "posted, received later, four gradients": (
        NormSpec((1023,), "bf16", op=LAYER, grad_outputs=4),
        replace(LATER, workgroups=4),
        "sm_120",
    ),
    "sets of weights": (replace(GATED, weight_sets=True), COPIED, "sm_80"),
    "strided rows": (replace(GATED, strided_rows=True), LATER, "sm_80"),
    "dz alone": (replace(GATED, output_mask=(False, False, True)), COPIED, "sm_80"),
    "the weight's gradient alone": (
        replace(GATED, output_mask=(False, True, False)),
        COPIED,
        "sm_80",
    ),
    "statistics recomputed, M fixed": (replace(GATED, eps=1e-5, rows=12), COPIED, "sm_90"),
    "a copy of dx": (
        NormSpec((512,), "f32", op=RMS, grad_outputs=2, grad_input_copy_dtype="bf16"),
        COPIED,
        "sm_80",
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how", "target"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: OnePass, target: str) -> None:
    assert_schedule_right_in_emulation(spec, how, find_target(target))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec", [GATED, NormSpec((1024,), "bf16", op=LAYER, grad_outputs=4)], ids=lambda s: s.name
)
@pytest.mark.parametrize("how", [COPIED, POSTED], ids=["copied", "posted"])
def test_the_bits_are_those_of_what_is_in_registers(spec: NormSpec, how: OnePass) -> None:
    sm_80, call = find_target("sm_80"), matrix.random_call(spec, 7, random_generator())
    ahead, late = (
        EmulatedNorm(compiler.build(spec, sm_80, schedule=one)[0]).run(call)
        for one in (replace(how, loads_late=False), how)
    )
    assert_same_bits(late, ahead)


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [8192, 16385])
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_86", "gfx90a"])
@pytest.mark.parametrize("spec", [GATED, NormSpec((8,), "f32", op=LAYER, grad_outputs=4)])
def test_wide_rows_are_chosen_so(columns: int, target: str, spec: NormSpec) -> None:
    wide, gpu = replace(spec, normalized_shape=(columns,)), find_target(target)
    how = without_few_rows(wide, gpu)
    assert isinstance(how, OnePass)
    # Measured schedules of one gradient, which fit sm_86 as well, lack registers for four.
    lacks = spec.grad_outputs > 1 and target in ("sm_80", "sm_86")
    assert how.loads_late == (columns > 16384 or target == "sm_75" or lacks)
    assert_right_in_emulation(built(wide, gpu, how)[0], wide, 2, adversarial=10)
