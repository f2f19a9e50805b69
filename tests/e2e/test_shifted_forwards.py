"""Forwards whose rows begin anywhere in an access (``ir/parts/forward/chunks/shifted.mlir``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import (
    assert_right_in_emulation,
    assert_same_bits,
    built,
    random_generator,
)

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.schedules import Forward
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

ONE = Forward(rows=1, threads=64, vector=8, chunks=2, in_registers=True)


def _spec(columns: int, dtype: str, op: str = LAYER_NORM.name, **options: Any) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, eps=1e-5, **options)


CASES = {
    "one element to the next access": ("sm_90", _spec(1001, "bf16"), ONE),
    "seven elements to the next": ("sm_80", _spec(1007, "f16"), ONE),
    "in words": ("sm_90", _spec(770, "bf16"), replace(ONE, rows=2)),
    "in two words": (
        "sm_90",
        _spec(516, "bf16", RMS_NORM.name),
        replace(ONE, chunks=1, threads=96),
    ),
    "f32": ("sm_90", _spec(769, "f32"), replace(ONE, vector=4, chunks=4)),
    "several rows of a subgroup": (
        "sm_90",
        _spec(67, "bf16"),
        replace(ONE, rows=32, threads=4, chunks=3),
    ),
    "last access in the chunk before": (
        "sm_75",
        _spec(519, "f16"),
        replace(ONE, chunks=1, threads=96),
    ),
    "lanes without a chunk": ("sm_90", _spec(131, "bf16"), replace(ONE, rows=4, threads=32)),
    "residual": ("sm_90", _spec(1001, "bf16", residual_dtype="bf16"), ONE),
    "residual of another type": (
        "sm_90",
        _spec(1001, "bf16", residual_dtype="f32"),
        replace(ONE, vector=4, chunks=4),
    ),
    "output of another type": ("sm_90", _spec(1001, "bf16", output_dtype="f32"), ONE),
    "gate after": ("sm_90", _spec(1001, "bf16", gate="after"), ONE),
    "kept narrow": ("sm_90", _spec(1003, "bf16"), replace(ONE, packs=True, early=True, resident=2)),
    "a cluster": ("sm_90", _spec(5001, "bf16"), replace(ONE, threads=96, cluster=4)),
    "a cluster, a last part of three chunks": (
        "sm_90",
        _spec(1045, "bf16", RMS_NORM.name),
        replace(ONE, threads=32, cluster=4),
    ),
    "a cluster, some without a chunk": (
        "sm_90",
        _spec(1029, "bf16"),
        replace(ONE, threads=32, chunks=3, cluster=2, early=True),
    ),
    "more threads than chunks": (
        "sm_100",
        _spec(1023, "bf16", residual_dtype="f32"),
        replace(ONE, threads=128, vector=4, chunks=8, cluster=2, early=True),
    ),
    "more chunks than a row has": ("sm_80", _spec(203, "f16"), replace(ONE, chunks=3, early=True)),
    "read once more": ("sm_90", _spec(1001, "bf16"), replace(ONE, rereads=True, packs=True)),
    "few rows": ("sm_120", _spec(1001, "f16"), replace(ONE, most_few_rows=10)),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec", "how"), CASES.values(), ids=CASES)
def test_results_are_right(target: str, spec: NormSpec, how: Forward) -> None:
    assert how.illegal(spec, find_target(target)) is None
    vmfb, _ = built(spec, find_target(target), how)
    assert_right_in_emulation(vmfb, spec, 1, 5, 19, adversarial=matrix.ADVERSARIAL_ROWS)


@pytest.mark.parametrize("columns", [203, 206])
def test_a_rows_bits_do_not_depend_on_where_it_begins(columns: int) -> None:
    """Nine equal rows begin in each place of an access, and once more in the first."""
    spec, target = _spec(columns, "bf16"), find_target("sm_90")
    how = replace(ONE, rows=4, threads=32, chunks=1)
    op = EmulatedNorm(built(spec, target, how)[0])
    one = matrix.random_call(spec, 1, random_generator())
    nine = one._replace(
        shape=(9, columns), arrays={**one.arrays, "input": one.arrays["input"].repeat(9, axis=0)}
    )
    of_one, of_nine = op.run(one), op.run(nine)
    repeated = [None if a is None else np.repeat(a, 9, axis=0) for a in of_one]
    assert_same_bits(of_nine, type(of_one)(*repeated))


@pytest.mark.parametrize(
    ("change", "target", "why"),
    [
        ({}, "gfx942", "the GPU is none of NVIDIA's"),
        ({"in_registers": False}, "sm_90", "the row is not in registers"),
        ({"vector": 1, "chunks": 16}, "sm_90", None),
        ({"vector": 3}, "sm_90", "that is no power of 2"),
        ({"vector": 2}, "sm_90", "accesses have other sizes"),
        ({"vector": 16, "threads": 32}, "sm_90", None),
    ],
)
def test_which_are_legal(change: dict[str, Any], target: str, why: str | None) -> None:
    said = replace(ONE, **change).illegal(_spec(1001, "bf16"), find_target(target))
    assert said == (
        why if why is None else f"N is no multiple of {change.get('vector', 8)}, and {why}"
    )


@pytest.mark.parametrize(
    ("spec", "how", "why"),
    [
        (_spec(1001, "bf16", RMS_NORM.name, gate="before"), ONE, "the gate is before the norm"),
        (_spec(1001, "bf16", weight_sets=True), ONE, "the weight has sets"),
        (_spec(1001, "bf16", strided_rows=True), ONE, "rows are apart"),
        (
            _spec(1001, "bf16", residual_dtype="f32"),
            replace(ONE, vector=16),
            "accesses have other sizes",
        ),
        (
            _spec(97, "bf16"),
            replace(ONE, cluster=4, threads=32),
            "a part of a row has less than two accesses",
        ),
    ],
)
def test_which_specs_are_legal(spec: NormSpec, how: Forward, why: str) -> None:
    assert how.illegal(spec, find_target("sm_90")) == f"N is no multiple of {how.vector}, and {why}"
