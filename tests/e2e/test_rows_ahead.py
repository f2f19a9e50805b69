"""Forwards that fetch rows ahead into the L2 cache (``ir/parts/forward/ahead.mlir``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import assert_right_in_emulation, assert_same_bits, built, random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.schedules import Forward
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb import inspection
from iree_lnbwd.vmfb.executables import exports

SM_90 = find_target("sm_90")
ONE = Forward(1, 64, vector=8, chunks=2, in_registers=True, ahead=2)
PREFETCH = "cp.async.bulk.prefetch.L2.global.L2::cache_hint"


def _spec(columns: int, dtype: str = "bf16", op: str = LAYER_NORM.name, **more: Any) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, eps=1e-5, **more)


def _ptx(spec: NormSpec, how: Forward) -> str:
    (code,) = {export.code for export in exports(built(spec, SM_90, how)[0])}
    return inspection.ptx(code)


CASES = {
    "one workgroup": (_spec(1000), ONE),
    "rows anywhere in an access": (_spec(1001), ONE),
    "several rows of a workgroup": (_spec(203), replace(ONE, rows=4, threads=32, chunks=1)),
    "a cluster": (_spec(5001), replace(ONE, threads=96, cluster=4)),
    "a cluster of f32": (_spec(2044, "f32"), replace(ONE, vector=4, chunks=4, cluster=2)),
    "a residual": (_spec(1001, residual_dtype="bf16"), ONE),
    "a residual of another type": (
        _spec(1001, residual_dtype="f32"),
        replace(ONE, vector=4, chunks=4),
    ),
    "a gate": (_spec(1001, op=RMS_NORM.name, gate="after"), ONE),
    "a gate before": (_spec(1000, op=RMS_NORM.name, gate="before"), ONE),
    "a gate of another type": (_spec(1000, op=RMS_NORM.name, gate="after", gate_dtype="f32"), ONE),
    "sets": (_spec(1000, weight_sets=True), ONE),
    "few rows": (_spec(1000), replace(ONE, most_few_rows=4)),
    "rows apart by one": (_spec(1000), replace(ONE, ahead=1)),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: Forward) -> None:
    """The emulator checks that what is fetched is there, to the last row."""
    assert how.illegal(spec, SM_90) is None
    assert PREFETCH in _ptx(spec, how)
    assert_right_in_emulation(
        built(spec, SM_90, how)[0], spec, 1, 5, 19, adversarial=matrix.ADVERSARIAL_ROWS
    )


def test_bits_do_not_depend_on_it() -> None:
    spec = _spec(1001)
    call = matrix.random_call(spec, 7, random_generator())
    ahead, alone = (
        EmulatedNorm(built(spec, SM_90, how)[0]).run(call) for how in (ONE, replace(ONE, ahead=0))
    )
    assert_same_bits(ahead, alone)


def test_few_rows_have_none_ahead() -> None:
    """They are all under way: half of the code that has it is for many rows."""
    both = _ptx(_spec(1000), replace(ONE, most_few_rows=4))
    assert both.count(PREFETCH) == _ptx(_spec(1000), ONE).count(PREFETCH) == 1


@pytest.mark.parametrize(
    ("spec", "target", "why"),
    [
        (_spec(1000), "sm_80", "rows are fetched ahead by cp.async.bulk.prefetch"),
        (_spec(1000), "gfx942", "rows are fetched ahead by cp.async.bulk.prefetch"),
        (_spec(1000, strided_rows=True), "sm_90", "rows that are apart are not fetched ahead"),
        (_spec(1000), "sm_120", None),
    ],
)
def test_which_are_legal(spec: NormSpec, target: str, why: str | None) -> None:
    assert ONE.illegal(spec, find_target(target)) == why
