"""Rows that a cluster of workgroups shares: right in the emulator, refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import assert_right_in_emulation

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import Fault
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import Forward, OnePass

SM_90 = find_target("sm_90")
ONE = OnePass(3, 1, 2, vector=4, ahead=1, slots=2, cluster=2)
LATER = replace(ONE, ahead=2, slots=3, rereads=True, defers=True)
LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
ROW = Forward(1, 64, vector=4, chunks=2, in_registers=True, cluster=2)
CASES: dict[str, tuple[NormSpec, OnePass | Forward]] = {
    "two": (NormSpec((1024,), "bf16", op=LAYER), ONE),
    "four of one subgroup": (
        NormSpec((1024,), "f32", op=RMS),
        replace(ONE, warps=1, ahead=2, slots=3, cluster=4),
    ),
    "eight, without copies": (
        NormSpec((4096,), "f32", op=LAYER),
        replace(ONE, ahead=0, slots=0, cluster=8),
    ),
    "columns that do not fill": (
        NormSpec((2080,), "bf16", op=LAYER),
        replace(ONE, warps=3, rereads=True, stages_weight=True),
    ),
    "a last part of fewer columns": (
        NormSpec((2060,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(ONE, warps=3, rereads=True, stages_weight=True, cluster=8),
    ),
    "a last part of fewer columns, in registers": (
        NormSpec((2044,), "f32", op=RMS),
        replace(ONE, ahead=1, slots=0, cluster=4),
    ),
    "from the output, in place": (
        NormSpec((4096,), "bf16", op=RMS, from_output=True),
        replace(ONE, warps=4, slots=1, rereads=True, stages_weight=True, widens_weight=True),
    ),
    "residual": (
        NormSpec((4096,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(ONE, warps=4, slots=0, cluster=4),
    ),
    "sums received later": (NormSpec((1024,), "bf16", op=LAYER), LATER),
    "sums received later, in place": (
        NormSpec((4096,), "f32", op=RMS),
        replace(LATER, slots=2, cluster=4),
    ),
    "sums received later, rows three steps ahead, residual": (
        NormSpec((2080,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(LATER, warps=3, ahead=3, slots=4, stages_weight=True),
    ),
    "sums received later, rows that begin anywhere": (
        NormSpec((2061,), "bf16", op=LAYER),
        replace(LATER, workgroups=4, warps=3, cluster=8, stages_weight=True),
    ),
    "sums received later, columns alone": (
        NormSpec((1024,), "bf16", op=LAYER, output_mask=(False, True, True)),
        LATER,
    ),
    "forward": (NormSpec((1024,), "bf16", op=LAYER_NORM.name, eps=1e-5), ROW),
    "forward, four of one subgroup": (
        NormSpec((1024,), "f32", op=RMS_NORM.name, eps=1e-5),
        replace(ROW, threads=32, early=True, cluster=4),
    ),
    "forward, columns that do not fill, a residual, few rows by themselves": (
        NormSpec((2080,), "bf16", op=LAYER_NORM.name, eps=1e-5, residual_dtype="bf16"),
        replace(ROW, threads=96, chunks=3, most_few_rows=2),
    ),
    "forward, a last part of fewer columns": (
        NormSpec((2044,), "f32", op=LAYER_NORM.name, eps=1e-5, residual_dtype="f32"),
        replace(ROW, chunks=1, cluster=8),
    ),
    "forward, a last part that its subgroups share unevenly": (
        NormSpec((1540,), "bf16", op=LAYER_NORM.name, eps=1e-5),
        replace(ROW, threads=96, chunks=2, cluster=4),
    ),
    "forward, in shared memory": (
        NormSpec((8192,), "f32", op=LAYER_NORM.name, eps=1e-5),
        replace(ROW, in_registers=False, in_shared_memory=True, cluster=8),
    ),
    "forward, read again": (
        NormSpec((8192,), "bf16", op=RMS_NORM.name, eps=1e-5, residual_dtype="f32"),
        replace(ROW, in_registers=False, cluster=4),
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: OnePass | Forward) -> None:
    """For fewer rows than clusters, and for rows that a cluster walks over."""
    vmfb, _ = compiler.build(spec, SM_90, schedule=how)
    assert_right_in_emulation(vmfb, spec, 2, 7, adversarial=5)


@pytest.mark.parametrize("buffers", [2, 3])
def test_sums_that_are_awaited_later_need_their_buffers(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator finds what fewer buffers would overwrite, whatever the order of threads."""
    monkeypatch.setattr(OnePass, "buffers", buffers)
    spec = NormSpec((1024,), "bf16", op=LAYER)
    vmfb, _ = compiler.build(spec, SM_90, schedule=LATER)
    with pytest.raises(Fault, match=r"st\.async|phase"):
        assert_right_in_emulation(vmfb, spec, 40, adversarial=5)


@pytest.mark.parametrize(
    ("changes", "columns", "dtype", "target", "why"),
    [
        ({}, 1024, "bf16", "sm_80", "clusters"),
        ({}, 1024, "f32", "gfx942", "clusters"),
        ({"cluster": 16}, 1024, "bf16", "sm_90", "clusters of at most 8 workgroups"),
        ({"cluster": 0}, 1024, "bf16", "sm_90", "a number below 1"),
        ({"cluster": 8}, 36, "bf16", "sm_90", "a row is too narrow for 8 workgroups"),
        (
            {"groups": 2},
            1024,
            "bf16",
            "sm_90",
            "a cluster shares one row at a time, and sums of f32",
        ),
        ({"cluster": 1, "defers": True}, 1024, "bf16", "sm_90", "only clusters receive sums later"),
        (
            {"defers": True},
            1024,
            "bf16",
            "sm_90",
            "a row whose sums are received later is read again, and fetched 2 rows ahead",
        ),
    ],
)
def test_an_illegal_cluster_says_why(
    changes: dict[str, Any], columns: int, dtype: str, target: str, why: str
) -> None:
    how = replace(ONE, ahead=0, slots=0, **changes)
    assert how.illegal(NormSpec((columns,), dtype), find_target(target)) == why


def test_a_cluster_has_one_row_of_a_forward() -> None:
    how = replace(ROW, rows=2)
    why = "a cluster shares one row at a time, and sums of f32"
    assert how.illegal(NormSpec((1024,), "f32", op=LAYER_NORM.name, eps=1e-5), SM_90) == why


def test_rows_of_131072_columns_are_one_pass() -> None:
    """No single workgroup could hold them."""
    spec = NormSpec((131072,), "bf16")
    how = OnePass(16, 1, 32, vector=4, ahead=1, slots=2, rereads=True, cluster=8)
    assert how.illegal(spec, SM_90) is None
    assert replace(how, cluster=1).illegal(spec, SM_90) is not None
    assert "clusters of 8 workgroups" in how.path(spec)
    assert "sums received a row later" not in how.path(spec)
    later = replace(how, ahead=2, defers=True)
    assert later.illegal(spec, SM_90) is None
    assert later.path(spec).endswith(", sums received a row later")
