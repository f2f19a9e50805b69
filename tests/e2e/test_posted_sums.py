"""Rows whose workgroups post sums in memory: right in the emulator, however few run at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import (
    assert_right,
    assert_right_in_emulation,
    assert_rows_not_finite_apart,
    assert_same_bits,
    assert_schedule_right_in_emulation,
    emulated_verdict,
    random_generator,
)

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import launch
from iree_lnbwd.emulator.ptx import executor
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.launches import launches

SM_80 = find_target("sm_80")
LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
TWICE = OnePass(3, 1, 2, vector=4, rereads=True, cluster=3, posts=True)
COPIED = replace(TWICE, ahead=1, slots=2)
LATER = replace(TWICE, ahead=2, slots=2, defers=True)
SPEC = NormSpec((1024,), "bf16", op=LAYER)
CASES: dict[str, tuple[NormSpec, OnePass, str]] = {
    "loaded twice": (NormSpec((1000,), "f32", op=LAYER), TWICE, "sm_75"),
    "loaded twice, single elements, residual": (
        NormSpec((1001,), "f16", op=RMS, residual_dtype="f32"),
        replace(TWICE, vector=1, warps=4),
        "sm_75",
    ),
    "copied ahead": (SPEC, COPIED, "sm_80"),
    "copied in place, a gate": (
        NormSpec((1024,), "bf16", op=RMS, gate="after"),
        replace(COPIED, slots=1, cluster=2),
        "sm_86",
    ),
    "several gradients, and a copy of dx": (
        NormSpec((512,), "f32", op=LAYER, grad_outputs=2, grad_input_copy_dtype="bf16"),
        COPIED,
        "sm_89",
    ),
    "copied ahead, and the sum of dx": (
        NormSpec((1023,), "bf16", op=LAYER, residual_dtype="bf16", grad_input_sum_dtype="f32"),
        replace(COPIED, workgroups=4),
        "sm_80",
    ),
    "received later, and the sum of dx": (
        NormSpec((1024,), "f32", op=RMS, grad_input_sum_dtype="bf16"),
        LATER,
        "sm_80",
    ),
    "received later": (SPEC, LATER, "sm_80"),
    "received later, of one subgroup each, by 32": (
        NormSpec((4096,), "f32", op=RMS),
        replace(LATER, warps=1, cluster=32),
        "sm_120",
    ),
    "received later, rows that begin anywhere": (
        NormSpec((1023,), "bf16", op=LAYER, eps=1e-5),
        replace(LATER, workgroups=4),
        "sm_80",
    ),
    "received later, a last part of fewer columns, from the output": (
        NormSpec((2044,), "f32", op=LAYER, from_output=True),
        replace(LATER, cluster=5),
        "sm_90",
    ),
    "dx alone, strided rows": (
        NormSpec((1024,), "bf16", op=LAYER, output_mask=(True, False, False), strided_rows=True),
        LATER,
        "sm_80",
    ),
    "columns alone": (
        NormSpec((1024,), "bf16", op=LAYER, output_mask=(False, True, True)),
        COPIED,
        "sm_80",
    ),
    "M fixed": (NormSpec((1024,), "bf16", op=LAYER, rows=7), LATER, "sm_80"),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how", "target"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: OnePass, target: str) -> None:
    assert_schedule_right_in_emulation(spec, how, find_target(target))


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [24576, 33333])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("target", ["sm_75", "sm_86"])
def test_wide_rows_are_chosen_so(columns: int, dtype: str, target: str) -> None:
    spec, gpu = NormSpec((columns,), dtype), find_target(target)
    chosen = schedules.choose(spec, gpu)
    assert isinstance(chosen, OnePass)
    assert chosen.posts
    vmfb, _ = compiler.build(spec, gpu)
    assert_right_in_emulation(vmfb, spec, 2, adversarial=5)


@pytest.mark.drawn
@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("how", [TWICE, COPIED, LATER], ids=["twice", "copied", "later"])
@pytest.mark.parametrize("summed", [None, "f32"])  # dx over rows
def test_clusters_that_never_run_together(
    how: OnePass, at_once: int, summed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workgroups begin only when these have ended: one of a cluster does the work of all."""
    spec = replace(SPEC, grad_input_sum_dtype=summed)
    vmfb, _ = compiler.build(spec, SM_80, schedule=how)
    emulated = EmulatedNorm(vmfb)
    call = matrix.random_call(spec, 7, random_generator())
    together = emulated.run(call)
    monkeypatch.setattr(executor, "_LANES_AT_ONCE", at_once * how.threads(SM_80))
    alone = emulated.run(call)
    assert_right(alone, call)
    assert_same_bits(alone, together)


def test_rows_that_are_not_finite() -> None:
    """Their posts are NaN, and are not taken for posts that are missing."""
    vmfb, _ = compiler.build(SPEC, SM_80, schedule=LATER)
    assert_rows_not_finite_apart(vmfb, SPEC)


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        ("st.relaxed.gpu.global.b64", "st.global.b64", "race"),
        ("ld.relaxed.gpu.global.b64", "ld.global.b64", "race"),
        ("ld.relaxed.gpu.global.b32", "ld.global.b32", "race"),
    ],
)
def test_plain_accesses_are_races(line: str, instead: str, said: str) -> None:
    vmfb, _ = compiler.build(SPEC, SM_80, schedule=LATER)
    assert said in emulated_verdict(vmfb, SPEC, lambda text: text.replace(line, instead), 7)


def test_a_post_that_never_comes_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, but not for ever."""
    monkeypatch.setattr(launch, "_MOST_WORK", 1 << 31)
    vmfb, _ = compiler.build(SPEC, SM_80, schedule=LATER)
    verdict = emulated_verdict(
        vmfb, SPEC, lambda text: text.replace("st.relaxed.gpu.global.b64", "@!%p1 st.b64"), 7
    )
    assert "kernel rows" in verdict


def test_what_is_launched() -> None:
    """Posts begin as none in each call, and are there for dx alone."""
    for mask, kernels in (
        ((True, True, True), ["unsent", "rows", "finalize"]),
        ((True, False, False), ["unsent", "rows"]),
        ((False, True, True), ["rows", "finalize"]),
    ):
        spec = replace(SPEC, output_mask=mask)
        planned = launches(spec, SM_80, LATER)
        assert planned is not None
        plan = planned.of(5)
        assert [kernel.kernel for kernel in plan.kernels] == kernels
        pieces = {piece.name: piece.bytes for piece in plan.scratch}
        assert pieces.get("posted_sums") == (32 if mask[0] else None)


@pytest.mark.parametrize(
    ("changes", "more", "target", "why"),
    [
        ({"posts": False}, {}, "sm_80", "clusters"),
        ({}, {}, "gfx942", "sums that are posted in memory"),
        ({"cluster": 33}, {}, "sm_80", "clusters of at most 32 workgroups"),
        ({"cluster": 1}, {}, "sm_80", "a row of one workgroup has nobody to post sums to"),
        ({}, {"weight_sets": True}, "sm_80", "clusters that post sums have one weight"),
        (
            {"ahead": 1, "slots": 1, "bulk": True},
            {},
            "sm_90",
            "only shared memory tells of sums and of copies in bulk",
        ),
    ],
)
def test_what_is_illegal_says_why(
    changes: dict[str, Any], more: dict[str, Any], target: str, why: str
) -> None:
    spec, how = NormSpec((4096,), "f32", **more), replace(TWICE, **changes)
    assert how.illegal(spec, find_target(target)) == why


def test_its_path_says_so() -> None:
    assert "3 clusters of 3 workgroups that post their sums in memory" in TWICE.path(SPEC)
