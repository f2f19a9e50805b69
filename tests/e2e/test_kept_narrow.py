"""Forwards whose rows stay as narrow in registers as they came: the same bits, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import (
    assert_right_in_emulation,
    assert_same_bits,
    built,
    random_generator,
    without_few_rows,
)

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.schedules import Forward
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

EPS = 1e-5
WHOLE = Forward(rows=1, threads=64, vector=8, chunks=2, in_registers=True, packs=True)
NOT_FILLED = replace(WHOLE, rows=2, vector=4, chunks=3, early=True)
CASES = {
    "whole": ("sm_90", NormSpec((1024,), "bf16", op=LAYER_NORM.name, eps=EPS), WHOLE),
    "not filled": ("sm_80", NormSpec((740,), "f16", op=LAYER_NORM.name, eps=EPS), NOT_FILLED),
    "one sum": ("sm_75", NormSpec((1024,), "bf16", op=RMS_NORM.name, eps=EPS), WHOLE),
    "two of a cluster": (
        "sm_90",
        NormSpec((1024,), "bf16", op=LAYER_NORM.name, eps=EPS),
        replace(WHOLE, vector=4, cluster=2),
    ),
    "eight of a cluster, one sum, a last part of fewer columns": (
        "sm_90",
        NormSpec((1037,), "f16", op=RMS_NORM.name, eps=EPS),
        replace(WHOLE, vector=1, chunks=5, threads=32, cluster=8),
    ),
    "of a wave of 64": ("gfx942", NormSpec((1024,), "f16", op=LAYER_NORM.name, eps=EPS), WHOLE),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(target: str, spec: NormSpec, how: Forward) -> None:
    """And have the bits of rows that are kept wide."""
    vmfb, _ = built(spec, find_target(target), how)
    assert_right_in_emulation(vmfb, spec, 1, 5, adversarial=7)
    wide, _ = built(spec, find_target(target), replace(how, packs=False))
    call = matrix.random_call(spec, 3, random_generator())
    assert_same_bits(EmulatedNorm(vmfb).run(call), EmulatedNorm(wide).run(call))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("op", "columns"),
    [(LAYER_NORM.name, 9000), (LAYER_NORM.name, 13320), (RMS_NORM.name, 66928)],
)
def test_what_is_chosen_for_wide_rows(op: str, columns: int) -> None:
    spec, target = NormSpec((columns,), "bf16", op=op, eps=EPS), find_target("sm_90")
    how = schedules.choose(spec, target)
    assert isinstance(how, Forward)
    assert how.packs
    assert "kept in registers as narrow as they came" in how.path(spec)
    few, many = how.forms(spec)
    assert (few.packs, many.packs) == (False, True)
    vmfb, _ = built(spec, target, without_few_rows(spec, target))
    assert_right_in_emulation(vmfb, spec, 2, adversarial=7)


@pytest.mark.parametrize(
    ("change", "dtype", "residual"),
    [
        ({}, "f32", None),
        ({}, "bf16", "bf16"),
        ({"in_registers": False, "in_shared_memory": True}, "bf16", None),
    ],
    ids=["f32", "a sum", "in shared memory"],
)
def test_what_cannot_stay_narrow(
    change: dict[str, object], dtype: str, residual: str | None
) -> None:
    op = LAYER_NORM.name
    spec = NormSpec((1024,), dtype, op=op, eps=EPS, residual_dtype=residual)
    how = replace(replace(WHOLE, vector=4, chunks=4), **change)  # type: ignore[arg-type]
    assert how.illegal(spec, find_target("sm_90")) == (
        "only a narrow row of one tensor, in registers, is kept narrow"
    )
