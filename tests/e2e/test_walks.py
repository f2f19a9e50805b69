"""Forwards whose workgroups walk over rows, which may be copied to shared memory before."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import assert_right_in_emulation, assert_same_bits, built, random_generator

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.emulator import Fault
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.schedules import Forward
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

SM_90 = find_target("sm_90")
ONE = Forward(
    rows=1, threads=64, vector=8, chunks=2, in_registers=True, early=True, walks=8, slots=2
)
OF_F32 = replace(ONE, vector=4, chunks=4)
CLUSTER = replace(ONE, threads=96, cluster=4)
STAGED = replace(CLUSTER, slots=1, stages_weights=True)  # rows are loaded


def _spec(columns: int, dtype: str = "bf16", op: str = LAYER_NORM.name, **options: Any) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, eps=1e-5, **options)


CASES = {
    "rows anywhere in an access": (_spec(1001), ONE),
    "in words": (_spec(770), replace(ONE, walks=4)),
    "whole accesses": (_spec(1000), replace(ONE, walks=3)),
    "f16, three slots": (_spec(1007, "f16"), replace(ONE, slots=3)),
    "f32": (_spec(1001, "f32"), OF_F32),
    "f32, in two words": (_spec(1002, "f32"), replace(OF_F32, walks=2, slots=4)),
    "several rows of a workgroup": (
        _spec(203),
        replace(ONE, rows=3, threads=32, chunks=1, walks=24),
    ),
    "rows of a subgroup": (_spec(205), replace(ONE, threads=32, chunks=1)),
    "kept narrow": (_spec(1003), replace(ONE, packs=True, slots=3)),
    "read once more": (_spec(1001), replace(ONE, rereads=True, packs=True)),
    "read once more in f32": (_spec(999, "f32"), replace(OF_F32, rereads=True)),
    "few rows by themselves": (_spec(1001), replace(ONE, most_few_rows=4)),
    "copies that do not last": (_spec(1001), replace(ONE, lasts=False)),
    "more threads than chunks": (_spec(203), replace(ONE, chunks=3)),
    "an output of another type": (_spec(1001, output_dtype="f32"), ONE),
    "a wider weight": (_spec(1001, weight_dtype="f32"), ONE),
    "without a bias": (_spec(1001, has_bias=False), ONE),
    "without weights": (_spec(1001, has_weight=False, has_bias=False), ONE),
    "no mean": (_spec(1001, op=RMS_NORM.name), ONE),
    "a cluster": (_spec(5001), CLUSTER),
    "a cluster, whole accesses": (_spec(5000), replace(CLUSTER, walks=3, slots=3)),
    "a cluster, some without a chunk": (
        _spec(1029),
        replace(ONE, threads=32, chunks=3, cluster=2),
    ),
    "a cluster without a mean": (_spec(5001, op=RMS_NORM.name), CLUSTER),
    "weights in shared memory": (_spec(5001), STAGED),
    "... and rows that are copied": (_spec(5001), replace(STAGED, slots=2, packs=True)),
    "... of accesses that divide a row": (
        _spec(5002),
        replace(STAGED, vector=2, chunks=8, walks=3, ahead=3),
    ),
    "... and read once more": (_spec(5001), replace(STAGED, rereads=True, ahead=8)),
    "... with a residual": (_spec(5001, residual_dtype="bf16"), STAGED),
    "... wider ones": (_spec(5001, weight_dtype="f32", has_bias=False), STAGED),
    "... of one workgroup": (_spec(1001), replace(ONE, slots=1, stages_weights=True)),
    "... of one without a mean": (
        _spec(1001, op=RMS_NORM.name),
        replace(ONE, slots=1, stages_weights=True),
    ),
    "... of several rows": (
        _spec(203),
        replace(ONE, rows=3, threads=32, chunks=1, walks=24, slots=1, stages_weights=True),
    ),
    "... of f32, without a mean": (
        _spec(2045, "f32", op=RMS_NORM.name),
        replace(OF_F32, cluster=2, threads=96, walks=4, slots=3, stages_weights=True),
    ),
    "a cluster of f32": (_spec(2045, "f32"), replace(OF_F32, cluster=2, threads=96, walks=4)),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(spec: NormSpec, how: Forward) -> None:
    """For fewer rows than are at work at once, and for several rounds of them."""
    assert how.illegal(spec, SM_90) is None
    vmfb, _ = built(spec, SM_90, how)
    assert_right_in_emulation(vmfb, spec, 1, 5, 53, adversarial=matrix.ADVERSARIAL_ROWS)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "how"),
    [(_spec(1001), ONE), (_spec(5001), CLUSTER), (_spec(5001), STAGED)],
    ids=["alone", "cluster", "weights in shared memory"],
)
def test_bits_are_those_without_a_walk(spec: NormSpec, how: Forward) -> None:
    call = matrix.random_call(spec, 29, random_generator())
    walking, alone = (
        EmulatedNorm(built(spec, SM_90, one)[0]).run(call)
        for one in (how, replace(how, walks=0, slots=1, stages_weights=False))
    )
    assert_same_bits(walking, alone)


def test_a_rows_bits_do_not_depend_on_where_it_begins() -> None:
    spec = _spec(1001)
    op = EmulatedNorm(built(spec, SM_90, ONE)[0])
    one = matrix.random_call(spec, 1, random_generator())
    equal = one._replace(
        shape=(25, 1001), arrays={**one.arrays, "input": one.arrays["input"].repeat(25, axis=0)}
    )
    of_one = op.run(one)
    repeated = [None if a is None else np.repeat(a, 25, axis=0) for a in of_one]
    assert_same_bits(op.run(equal), type(of_one)(*repeated))


@pytest.mark.parametrize(
    ("spec", "how"),
    [(_spec(1001, op=RMS_NORM.name), ONE), (_spec(2002), replace(CLUSTER, cluster=2, walks=4))],
    ids=["no mean", "cluster"],
)
def test_a_barrier_that_is_missing_is_found(spec: NormSpec, how: Forward) -> None:
    """The next copy would overwrite a row that others still read."""
    vmfb, _ = built(spec, SM_90, how)

    def without(text: str) -> str:
        """Without the last barrier, before the copy in the loop."""
        *_, last = re.finditer(r"^\tbar\.sync.*\n", text, re.MULTILINE)
        return text[: last.start()] + text[last.end() :]

    call = matrix.random_call(spec, 29, random_generator())
    with pytest.raises(Fault, match="race in shared memory"):
        EmulatedNorm(vmfb, edit=without).run(call)


@pytest.mark.parametrize(
    ("spec", "how", "target", "why"),
    [
        (_spec(1001), ONE, "sm_80", "cp.async.bulk"),
        (_spec(1001), ONE, "sm_120", None),
        (_spec(1001), replace(ONE, slots=1), "sm_80", None),
        (_spec(1001, residual_dtype="bf16"), replace(ONE, slots=1), "sm_90", None),
        (
            _spec(1001, residual_dtype="bf16"),
            ONE,
            "sm_90",
            "workgroups walk over rows of one tensor",
        ),
        (_spec(1001, gate="after"), ONE, "sm_90", "workgroups walk over rows of one tensor"),
        (
            _spec(1000, weight_sets=True),
            ONE,
            "sm_90",
            "workgroups walk over rows that have one weight",
        ),
        (
            _spec(1000, strided_rows=True),
            ONE,
            "sm_90",
            "workgroups walk over rows that follow each other",
        ),
        (
            _spec(1001),
            replace(ONE, early=False),
            "sm_90",
            "workgroups walk over rows in registers, with early weights",
        ),
        (
            _spec(1001),
            replace(ONE, walks=0, slots=1, stages_weights=True),
            "sm_90",
            "weights stay in shared memory where workgroups walk over rows",
        ),
        (
            _spec(1000),
            replace(ONE, vector=4, chunks=4),
            "sm_90",
            "workgroups walk over rows in accesses of 16 bytes",
        ),
        (_spec(1001), replace(ONE, walks=4), "sm_90", "4 rows at once, in 8 phases and sets of 1"),
        (
            _spec(1000),
            replace(ONE, rows=2, walks=3),
            "sm_90",
            "3 rows at once, in 1 phases and sets of 2",
        ),
    ],
)
def test_which_are_legal(spec: NormSpec, how: Forward, target: str, why: str | None) -> None:
    assert how.illegal(spec, find_target(target)) == why


def _chosen(spec: NormSpec, target: str = "sm_90") -> Forward:
    one = schedules.choose(spec, find_target(target))
    assert isinstance(one, Forward)
    return one


@pytest.mark.parametrize(
    ("spec", "target", "walks"),
    [
        (_spec(1625), "sm_90", True),
        (_spec(9001, "f16"), "sm_100", True),
        (_spec(17001), "sm_90", True),
        (_spec(9001, "f32"), "sm_90", True),
        (_spec(1625), "sm_80", False),
        (_spec(4096), "sm_90", False),
        (_spec(395), "sm_90", False),
        (_spec(5607, "f32"), "sm_90", False),
        (_spec(9001, op=RMS_NORM.name), "sm_90", False),
        (_spec(9001, residual_dtype="bf16"), "sm_90", False),
        (_spec(9001, has_weight=False, has_bias=False), "sm_90", False),
        (_spec(9001, weight_dtype="f32"), "sm_90", False),
    ],
)
def test_odd_rows_with_a_mean_are_walked_over(spec: NormSpec, target: str, walks: bool) -> None:
    assert (_chosen(spec, target).walks > 0) == walks


@pytest.mark.parametrize("columns", [769, 1625, 9001, 17001])
def test_a_residual_shares_rows_out_alike(columns: int) -> None:
    """So an addition and a norm have the bits of the fused call."""
    alone, added = (_chosen(_spec(columns, residual_dtype=r)) for r in (None, "bf16"))
    assert alone.walks > 0
    assert added.walks == 0
    assert (alone.threads, alone.vector, alone.chunks, alone.cluster) == (
        added.threads,
        added.vector,
        added.chunks,
        added.cluster,
    )
