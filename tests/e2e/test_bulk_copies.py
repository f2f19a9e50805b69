"""Subgroups that copy their columns of a row together (cp.async.bulk), in the emulator."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support import assert_right_in_emulation, built, random_generator

from iree_lnbwd import NormSpec, compiler
from iree_lnbwd.emulated import EmulatedNorm
from iree_lnbwd.emulator import Fault
from iree_lnbwd.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.targets import find_target
from iree_lnbwd.verification import matrix

SM_90 = find_target("sm_90")
LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
ALONE = OnePass(3, groups=1, warps=2, vector=1, ahead=2, slots=2, rereads=True, bulk=True)
CLUSTER = replace(ALONE, cluster=2)
CASES = {
    "single elements": (NormSpec((517,), "bf16", op=LAYER), ALONE),
    "whole 16 bytes": (NormSpec((520,), "bf16", op=LAYER), replace(ALONE, vector=8)),
    "one slot": (NormSpec((516,), "f32", op=LAYER), replace(ALONE, vector=4, ahead=1, slots=1)),
    "rows that begin at one of two places": (
        NormSpec((517,), "bf16", op=LAYER),
        replace(ALONE, workgroups=4, vector=2, ahead=3, slots=3),
    ),
    "turned columns": (NormSpec((517,), "bf16", op=RMS), replace(ALONE, vector=4)),
    "turned columns of a cluster, sums awaited later": (
        NormSpec((1031,), "bf16", op=LAYER),
        replace(CLUSTER, vector=4, ahead=3, slots=3, defers=True),
    ),
    "a cluster": (NormSpec((1031,), "f16", op=LAYER), CLUSTER),
    "three in a cluster": (NormSpec((1300,), "f32", op=RMS), replace(CLUSTER, cluster=3)),
    "a cluster of eight, sums awaited later": (
        NormSpec((2501,), "bf16", op=LAYER),
        replace(CLUSTER, cluster=8, workgroups=2, vector=2, warps=1, defers=True),
    ),
    "groups, kept in registers": (
        NormSpec((523,), "bf16", op=LAYER),
        replace(ALONE, groups=2, rereads=False, stages_weight=True),
    ),
    "a narrow weight that is staged": (
        NormSpec((528,), "bf16", op=LAYER),
        replace(ALONE, vector=8, stages_weight=True),
    ),
    "a weight that is widened": (
        NormSpec((519,), "bf16", op=LAYER),
        replace(ALONE, workgroups=4, vector=2, stages_weight=True, widens_weight=True),
    ),
    "dy wider than x": (NormSpec((517,), "bf16", op=LAYER, grad_output_dtype="f32"), ALONE),
    "x wider than dy": (
        NormSpec((518,), "f32", op=RMS, grad_output_dtype="bf16"),
        replace(ALONE, vector=2),
    ),
    "f64": (NormSpec((261,), "f64", op=LAYER), ALONE),
    "a residual": (
        NormSpec((517,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(ALONE, workgroups=4, vector=2),
    ),
    "from the output": (NormSpec((1031,), "bf16", op=LAYER, from_output=True), CLUSTER),
    "statistics are recomputed": (NormSpec((517,), "bf16", op=LAYER, eps=1e-5), ALONE),
    "dx alone": (NormSpec((517,), "f32", op=LAYER, output_mask=(True, False, False)), ALONE),
    "columns alone": (NormSpec((517,), "bf16", op=LAYER, output_mask=(False, True, True)), ALONE),
    "a subgroup without columns": (
        NormSpec((257,), "bf16", op=LAYER),
        replace(ALONE, warps=4, vector=4, workgroups=4),
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: OnePass) -> None:
    """With one row, with fewer rows than slots have, and with several of a workgroup."""
    vmfb, _ = built(spec, SM_90, how)
    assert_right_in_emulation(vmfb, spec, 1, 4, 13, adversarial=11)


def test_rows_need_not_be_aligned() -> None:
    """By single elements, which each thread cannot copy by itself: less than a word."""
    spec = NormSpec((517,), "bf16", op=LAYER)
    assert ALONE.illegal(spec, SM_90) is None
    assert not ALONE.shifted(spec)
    apart = replace(ALONE, bulk=False).illegal(spec, SM_90)
    assert apart is not None
    assert "bytes" in apart


@pytest.mark.parametrize(
    ("how", "target", "said"),
    [
        (ALONE, "sm_80", "cp.async.bulk"),
        (ALONE, "gfx942", "cp.async"),
        (replace(ALONE, ahead=1), "sm_90", "in place"),
        (replace(ALONE, warps=1, groups=2, subgroup_rows=2), "sm_90", "whole subgroups"),
        (replace(ALONE, warps=24, ahead=3, slots=3), "sm_90", "72 mbarriers, at most 64"),
    ],
)
def test_what_is_illegal(how: OnePass, target: str, said: str) -> None:
    why = how.illegal(NormSpec((1031,), "bf16", op=LAYER), find_target(target))
    assert why is not None
    assert said in why


def test_inspection_says_so() -> None:
    spec = NormSpec((517,), "bf16", op=LAYER)
    assert "rows copied in bulk by each subgroup 2 steps ahead" in ALONE.path(spec)


SPOILED = {
    "rows are not awaited": (
        re.compile(r"( *)func\.call @await\(%mbarrier, %parity\) : \(i32, i32\) -> \(\)\n"),
        r"",
    ),
    "zeros are stored without a fence": (
        re.compile(r" *llvm\.inline_asm has_side_effects \"fence\.proxy\.async[^\n]*\n"),
        r"",
    ),
    "lanes do not meet before a slot is filled again": (
        re.compile(
            r"( *func\.call @stored_before_copies\([^\n]*\n)"
            r" *nvvm\.bar\.warp\.sync %all_lanes : i32\n"
        ),
        r"\1",
    ),
}


@pytest.mark.parametrize(("pattern", "text"), SPOILED.values(), ids=SPOILED)
def test_the_emulator_finds_what_is_left_out(pattern: re.Pattern[str], text: str) -> None:
    spec, how = NormSpec((517,), "bf16", op=LAYER), replace(ALONE, workgroups=1)
    source, manifest = compiler.plan(spec, SM_90, how=how)
    spoiled, count = pattern.subn(text, source)
    assert count
    vmfb, _ = compiler.build_planned(spoiled, manifest)
    with pytest.raises(Fault, match=r"race|has arrived|fence\.proxy\.async"):
        EmulatedNorm(vmfb).run(matrix.random_call(spec, 9, random_generator()))


def test_the_emulator_or_the_judge_finds_rows_at_another_place() -> None:
    spec = NormSpec((517,), "bf16", op=LAYER)
    source, manifest = compiler.plan(spec, SM_90, how=replace(ALONE, workgroups=1))
    right = "%before_i32 = arith.remui %all_before, %of_line_i32 : i32"
    assert source.count(right) == 1
    wrong = right.replace("%all_before", "%rows_before")
    wrong = source.replace(right, wrong.replace("%rows_before", "%of_line_i32"))
    vmfb, _ = compiler.build_planned(wrong, manifest)
    with pytest.raises((Fault, AssertionError)):
        assert_right_in_emulation(vmfb, spec, 9, adversarial=3)
