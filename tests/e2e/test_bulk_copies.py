"""Rows that each subgroup copies in bulk: right in the emulator, refused where they cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import (
    assert_right_in_emulation,
    assert_rows_not_finite_apart,
    built,
    emulated_verdict,
    without_few_rows,
)

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler, ir
from iree_lnbwd.emulator import Fault
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import FewRows, OnePass

SM_90 = find_target("sm_90")
LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
BULK = OnePass(4, groups=1, warps=2, vector=4, ahead=2, slots=2, rereads=True, bulk=True)
ONE = replace(BULK, ahead=1, slots=1)
THREE = replace(BULK, ahead=3, slots=3)
CLUSTER = replace(BULK, cluster=2)
LATER = replace(BULK, workgroups=2, x_later=True)
CASES = {
    "whole lines": (NormSpec((1024,), "bf16", op=LAYER), replace(BULK, workgroups=1, vector=8)),
    "columns that do not fill": (NormSpec((1000,), "bf16", op=RMS), THREE),
    "single elements, from the output": (
        NormSpec((517,), "bf16", op=LAYER, from_output=True),
        replace(ONE, vector=1, stages_weight=True, widens_weight=True),
    ),
    "single elements, kept in registers": (
        NormSpec((139,), "f16", op=LAYER),
        replace(BULK, vector=1, rereads=False),
    ),
    "two elements": (NormSpec((517,), "bf16", op=RMS), replace(BULK, vector=2)),
    "four elements": (NormSpec((517,), "f16", op=LAYER), BULK),
    "four elements, one step ahead, the weight staged": (
        NormSpec((253,), "f32", op=LAYER),
        replace(ONE, stages_weight=True),
    ),
    "rows that begin anywhere, groups, a residual": (
        NormSpec((333,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(THREE, workgroups=2, groups=2),
    ),
    "groups of one subgroup": (
        NormSpec((392,), "bf16", op=RMS),
        replace(BULK, workgroups=2, groups=3, warps=1, vector=8),
    ),
    "dy wider than x": (NormSpec((301,), "bf16", "f32", op=LAYER), BULK),
    "x wider than dy": (NormSpec((301,), "f32", "bf16", op=RMS), replace(THREE, vector=2)),
    "statistics recomputed": (NormSpec((261,), "bf16", op=LAYER, eps=1e-5), BULK),
    "subgroups without columns": (
        NormSpec((133,), "bf16", op=LAYER),
        replace(ONE, warps=4, vector=1),
    ),
    "subgroups without columns, of whole 16 bytes": (
        NormSpec((424,), "bf16", op=RMS),
        replace(BULK, warps=4, vector=2, cluster=4),
    ),
    "rows of 16 bytes, rows that end between": (
        NormSpec((8,), "bf16", op=LAYER),
        replace(BULK, vector=1),
    ),
    "rows that copies have the ends of": (NormSpec((9,), "f16", op=RMS), replace(BULK, warps=1)),
    "dx alone": (NormSpec((517,), "f32", output_mask=(True, False, False), op=LAYER), ONE),
    "columns alone": (NormSpec((517,), "bf16", output_mask=(False, True, True), op=LAYER), BULK),
    "without a weight": (NormSpec((203,), "bf16", has_weight=False, op=RMS), BULK),
    "few rows by themselves": (
        NormSpec((203,), "bf16", op=LAYER),
        replace(BULK, few_rows=FewRows(rows=2, warps=4, tile=32, tile_vector=1)),
    ),
    "a cluster": (NormSpec((1031,), "bf16", op=LAYER), CLUSTER),
    "three of a cluster, a residual": (
        NormSpec((1000,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(CLUSTER, vector=8, cluster=3, ahead=1, slots=1),
    ),
    "eight of a cluster, a last part of fewer columns": (
        NormSpec((1030,), "bf16", op=RMS),
        replace(CLUSTER, workgroups=2, warps=3, vector=2, cluster=8, stages_weight=True),
    ),
    "sums received later": (NormSpec((1031,), "bf16", op=LAYER), replace(CLUSTER, defers=True)),
    "sums received later, three steps ahead, from the output": (
        NormSpec((1032,), "bf16", op=RMS, from_output=True),
        replace(THREE, vector=8, cluster=2, defers=True, stages_weight=True),
    ),
    "sums received later, eight of a cluster": (
        NormSpec((2061,), "f32", op=LAYER),
        replace(CLUSTER, cluster=8, defers=True),
    ),
    "x later, single elements, dy wider than x, the weight staged": (
        NormSpec((301,), "bf16", "f32", op=LAYER),
        replace(LATER, vector=1, stages_weight=True, widens_weight=True),
    ),
    "x later, groups, a residual": (
        NormSpec((1001,), "bf16", op=LAYER, residual_dtype="bf16"),
        replace(LATER, groups=2),
    ),
    "x later, kept in registers, from the output": (
        NormSpec((301,), "f32", op=RMS, from_output=True),
        replace(LATER, vector=2, rereads=False),
    ),
    "x later, eight of a cluster": (
        NormSpec((4099,), "f32", op=LAYER),
        replace(LATER, vector=1, cluster=8),
    ),
    "x later, columns alone": (
        NormSpec((516,), "f32", output_mask=(False, True, True), op=LAYER),
        LATER,
    ),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: OnePass) -> None:
    """For one row, and for more rows than slots, of every place in an access."""
    vmfb, _ = built(spec, SM_90, how)
    assert_right_in_emulation(vmfb, spec, 1, 13, adversarial=5)


@pytest.mark.drawn
def test_what_is_chosen_for_wide_odd_rows() -> None:
    """As many clusters as run at once, or a few less: each one's rows begin at the same place."""
    spec = NormSpec((70001,), "bf16", op=LAYER)
    how = schedules.choose(spec, SM_90)
    assert isinstance(how, OnePass)
    walkers = find_product("h200").walkers(how.resident, how.cluster)
    assert how.bulk
    assert 0.9 * walkers <= how.workgroups <= walkers
    vmfb, _ = built(spec, SM_90, without_few_rows(spec, SM_90))
    assert_right_in_emulation(vmfb, spec, 2, adversarial=7)


@pytest.mark.drawn
def test_no_access_ends_behind_a_residual() -> None:
    """A row's last chunk has 3 of 4 columns, always in the last lane: LLVM would read all 4."""
    spec = NormSpec((255,), "f32", op=LAYER, residual_dtype="f32")
    how = replace(BULK, workgroups=4, warps=1)
    assert_right_in_emulation(built(spec, SM_90, how)[0], spec, 1, 5, 9, adversarial=5)


@pytest.mark.drawn
def test_fixed_rows() -> None:
    spec = NormSpec((517,), "bf16", rows=5, op=LAYER)
    assert_right_in_emulation(built(spec, SM_90, BULK)[0], spec, 5, adversarial=5)


SPEC = NormSpec((517,), "bf16", op=LAYER)  # with zeros before and behind its columns
NO_FENCE = r"to which a thread has stored: no fence\.proxy\.async"
NOT_KNOWN = "does not know that what was sent to it has arrived"
COPY = r"^(\tcp\.async\.bulk\..*?\[%r\d+)(\], \[%rd\d+)(\], .*)$"
SABOTAGE: dict[str, tuple[str, Callable[[re.Match[str]], str], str]] = {
    "no fences": (r"^\tfence\.proxy\.async.*$", lambda _: "", NO_FENCE),
    "mbarriers without a fence": (
        r"^\tfence\.mbarrier_init.*$",
        lambda _: "",
        "a bulk copy tells the mbarrier at byte .*: no fence",
    ),
    "no waits": (r"^\tmbarrier\.try_wait.*$", lambda _: "", NOT_KNOWN),
    "waits for the other slot": (
        r"^(\tmbarrier\.try_wait\..*?)\[(%r\d+)\]",
        lambda m: f"\txor.b32 \t{m[2]}, {m[2]}, 8;\n{m[1]}[{m[2]}]",
        f"{NOT_KNOWN}|no mbarrier|divergent mbarrier",
    ),
    "no barriers of subgroups": (
        r"^\tbar\.warp\.sync.*$",
        lambda _: "",
        "may not be initialised yet|race in shared memory",
    ),
    "more bytes expected": (
        r"^(\tmbarrier\.arrive.*\], )(%r\d+);$",
        lambda m: f"\tadd.s32 \t{m[2]}, {m[2]}, 16;\n{m[0]}",
        "divergent mbarrier.try_wait",
    ),
    "nothing expected": (
        r"^\tmbarrier\.arrive.*$",
        lambda _: "",
        "divergent mbarrier.try_wait",
    ),
    "no copies": (COPY, lambda _: "", "divergent mbarrier.try_wait"),
    "copies to 16 bytes further on": (
        COPY,
        lambda m: f"{m[1]}+16{m[2]}{m[3]}",
        "missed|nobody wrote",
    ),
    "copies to 2 bytes further on": (COPY, lambda m: f"{m[1]}+2{m[2]}{m[3]}", "misaligned"),
    "copies of what is 16 bytes further on": (
        COPY,
        lambda m: f"{m[1]}{m[2]}+16{m[3]}",
        "missed|out of bounds",
    ),
    "no zeros": (r"^\tst\.shared\.b16 .*, 0x0000;$", lambda _: "", "missed|nobody wrote"),
}


def test_what_is_not_broken() -> None:
    vmfb, _ = built(SPEC, SM_90, BULK)
    assert emulated_verdict(vmfb, SPEC, lambda text: text, 13) == "passed"


@pytest.mark.parametrize(("pattern", "change", "found"), SABOTAGE.values(), ids=SABOTAGE)
def test_what_is_broken_is_found(
    pattern: str, change: Callable[[re.Match[str]], str], found: str
) -> None:
    vmfb, _ = built(SPEC, SM_90, BULK)

    def edit(text: str) -> str:
        changed = re.sub(pattern, change, text, flags=re.MULTILINE)
        assert changed != text
        return changed

    said = emulated_verdict(vmfb, SPEC, edit, 13)
    assert re.search(found, said), said


def _change_kernel(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """From now on, one place of the kernel reads otherwise."""
    read = compiler.read_ir
    assert sum(read(name).count(old) for name in ir.sources(SPEC, SM_90, BULK)) == 1
    monkeypatch.setattr(compiler, "read_ir", lambda name: read(name).replace(old, new))


def test_a_row_awaits_its_x_that_is_copied_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arrivals of copies of both, dy's would do for the row."""
    how = replace(LATER, vector=1)
    vmfb, _ = built(SPEC, SM_90, how)
    assert emulated_verdict(vmfb, SPEC, lambda text: text, 13) == "passed"
    _change_kernel(monkeypatch, "func.call @arrivals_i32() : () -> i32", "arith.constant 1 : i32")
    vmfb, _ = compiler.build(SPEC, SM_90, schedule=how)
    said = emulated_verdict(vmfb, SPEC, lambda text: text, 13)
    assert "nothing tells it that the phase before is over" in said, said


def test_what_is_not_finite_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have what is next to a row, where zeros take its place."""
    assert_rows_not_finite_apart(built(SPEC, SM_90, BULK)[0], SPEC)
    monkeypatch.setattr(OnePass, "lines_behind", lambda *_: 0)
    vmfb, _ = compiler.build(SPEC, SM_90, schedule=BULK)
    with pytest.raises((AssertionError, Fault), match=r"grad_input|sent to it has arrived"):
        assert_rows_not_finite_apart(vmfb, SPEC)


def test_of_narrow_rows_more_than_the_last_would_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnePass, "illegal", lambda *_: None)
    spec, how = NormSpec((3,), "bf16", op=LAYER), replace(BULK, vector=1)
    vmfb, _ = compiler.build(spec, SM_90, schedule=how)
    assert re.search("missed|race in", emulated_verdict(vmfb, spec, lambda text: text, 13))


@pytest.mark.parametrize(
    ("changes", "columns", "target", "why"),
    [
        ({}, 1024, "sm_80", "cp.async.bulk"),
        ({"ahead": 1}, 1024, "sm_90", "whole subgroups copy in bulk, in place"),
        (
            {"slots": 3, "ahead": 3, "warps": 8, "groups": 3},
            1024,
            "sm_90",
            "72 mbarriers, at most 64",
        ),
        (
            {"slots": 3, "ahead": 3, "warps": 21, "cluster": 2},
            1024,
            "sm_90",
            "65 mbarriers, at most 64",
        ),
        ({}, 7, "sm_90", "a row is less than 16 bytes, which bulk copies have"),
        (
            {"x_later": True, "slots": 3, "ahead": 3},
            1024,
            "sm_90",
            "x is copied later than dy only in bulk, and into 2 slots of dy",
        ),
        (
            {"x_later": True, "bulk": False},
            1024,
            "sm_90",
            "x is copied later than dy only in bulk, and into 2 slots of dy",
        ),
        (
            {"x_later": True, "cluster": 2, "defers": True},
            1024,
            "sm_90",
            "the next row's x is not there yet, for sums that are sent ahead",
        ),
    ],
)
def test_an_illegal_copy_says_why(
    changes: dict[str, Any], columns: int, target: str, why: str
) -> None:
    how = replace(BULK, **changes)
    assert how.illegal(NormSpec((columns,), "bf16"), find_target(target)) == why


def test_inspection_says_so() -> None:
    assert "rows copied in bulk by each subgroup 2 steps ahead" in BULK.path(SPEC)
    later = replace(BULK, x_later=True).path(SPEC)
    assert "rows copied in bulk by each subgroup, x a step later than dy, 2 steps ahead" in later
