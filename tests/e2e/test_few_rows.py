"""The form for few rows, in the emulator: its values, beside those of the form for more rows."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from support import (
    assert_matches_reference,
    assert_same_bits,
    built,
    random_arguments,
    random_generator,
)

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import Target, find_target, targets
from iree_lnbwd.schedules import FewRows, OnePass
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.launches import launches

TARGETS = ("sm_90", "gfx942", "gfx1100")
AMD = TARGETS[1:]  # waves of 64 lanes, and of 32
MOST = 9  # rows, where the test says so: the next is then as quick to emulate


@functools.cache
def module(spec: NormSpec, target: str, most: int | None = None) -> tuple[EmulatedNorm, OnePass]:
    """By the chosen schedule, which may count other rows as few."""
    how = schedules.choose(spec, find_target(target))
    assert isinstance(how, OnePass)
    assert how.few_rows is not None
    if most is not None:
        how = replace(how, few_rows=replace(how.few_rows, rows=most))
    return EmulatedNorm(built(spec, find_target(target), how)[0]), how


def check(spec: NormSpec, target: str, rows: int, most: int | None = None) -> None:
    """The gradients are right, and the kernels are those of the form that M calls for."""
    op, how = module(spec, target, most)
    arguments = random_arguments(random_generator(), spec, (rows,))
    assert_matches_reference(op.run(arguments.call()), arguments)
    assert how.few_rows is not None
    assert (op.launches[0].kernel == "few_rows") == (rows <= how.few_rows.rows)
    planned = launches(spec, find_target(target), how)
    assert planned is not None
    for launch, plan in zip(op.launches, planned.of(rows).kernels, strict=True):
        assert launch.kernel == plan.kernel
        assert launch.workgroup_count == tuple(count_of(n, rows) for n in plan.workgroups)


def in_turn(cases: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each case for NVIDIA's GPUs, and for one of AMD's."""
    return [
        (case, target)
        for case, amd in zip(cases, itertools.cycle(AMD), strict=False)
        for target in (TARGETS[0], amd)
    ]


def case_id(case: object) -> str | None:
    if isinstance(case, FewRows):
        return f"tile of {case.tile}"
    return case.name if isinstance(case, NormSpec) else None


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "target"),
    in_turn(
        [
            *(NormSpec((columns,), "bf16") for columns in (1, 769, 1000, 1024, 4096, 12288)),
            *(NormSpec((columns,), "f32") for columns in (769, 1000, 4096)),
        ]
    ),
    ids=case_id,
)
def test_both_sides_of_the_limit(spec: NormSpec, target: str) -> None:
    for rows in (1, 2, MOST, MOST + 1):
        check(spec, target, rows, MOST)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "target"),
    in_turn([NormSpec((769,), "bf16"), NormSpec((1024,), "bf16")]),
    ids=case_id,
)
def test_as_many_rows_as_count_as_few(spec: NormSpec, target: str) -> None:
    """Each thread of a tile has several rows."""
    _, how = module(spec, target)
    for rows in matrix.both_sides(spec, how):
        check(spec, target, rows)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "target"),
    in_turn(
        [
            NormSpec((769,), "f32", output_mask=(True, False, False)),
            NormSpec((769,), "f32", output_mask=(False, True, True)),
            NormSpec((1024,), "f32", output_mask=(False, True, True)),
            NormSpec((1024,), "f32", output_mask=(True, False, True)),
            NormSpec((192,), "f16"),
            NormSpec((769,), "bf16", weight_dtype="f32"),
            NormSpec((1024,), "f32", grad_output_dtype="bf16", weight_dtype="f16"),
            NormSpec((1024,), "f16", weight_dtype="f32", bias_dtype="bf16"),
            NormSpec((1000,), "bf16", has_weight=False),
            NormSpec((12, 64), "f32"),
        ]
    ),
    ids=case_id,
)
def test_options(spec: NormSpec, target: str) -> None:
    for rows in (5, MOST + 1):
        check(spec, target, rows, MOST)


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [5, MOST + 1])
def test_fixed_rows_take_one_form(rows: int, target: str) -> None:
    check(NormSpec((192,), "bf16", rows=rows), target, rows, MOST)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("few", "target"),
    in_turn(
        [
            FewRows(rows=500, warps=4, tile=16, tile_vector=1),
            FewRows(rows=500, warps=8, tile=64, tile_vector=8),
            FewRows(rows=500, warps=16, tile=128, tile_vector=4),
        ]
    ),
    ids=case_id,
)
def test_other_tiles(few: FewRows, target: str) -> None:
    spec, found = NormSpec((1000,), "bf16"), find_target(target)
    how = OnePass(4, groups=1, warps=4, vector=8, few_rows=few)
    op = EmulatedNorm(built(spec, found, how)[0])
    for rows in (1, 37, 300):
        arguments = random_arguments(random_generator(), spec, (rows,))
        assert_matches_reference(op.run(arguments.call()), arguments)
        assert [launch.kernel for launch in op.launches] == ["few_rows"]


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["bf16", "f64"])
@pytest.mark.parametrize("target", ["gfx90a", "gfx942"])
def test_parts_as_many_as_a_row_of_the_text_has_threads(target: str, dtype: str) -> None:
    """32 threads share a sum over the slices, and 64 one over a row: each number stays its own."""
    spec, found = NormSpec((100,), dtype), find_target(target)
    few = FewRows(rows=500, warps=4, tile=4, tile_vector=1)
    assert (few.parts(found), found.subgroup_size) == (32, 64)
    how = OnePass(4, groups=1, warps=2, vector=1, few_rows=few)
    op = EmulatedNorm(built(spec, found, how)[0])
    for rows in (1, 37):
        arguments = random_arguments(random_generator(), spec, (rows,))
        assert_matches_reference(op.run(arguments.call()), arguments)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "target", [t for t in targets() if t.backend != "cpu"], ids=lambda target: target.name
)
def test_threads_that_share_a_sum(target: Target) -> None:
    """The text of every legal form has the parts of a tile once, and a row's threads twice."""
    spec, tried = NormSpec((256,), "f32"), 0
    for warps, tile in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64)):
        few = FewRows(rows=8, warps=warps, tile=tile, tile_vector=1)
        how = OnePass(4, groups=1, warps=1, vector=4, few_rows=few)
        if how.illegal(replace(spec, rows=8), target) is not None:
            continue
        text = compiler.source_text(replace(spec, rows=8), target, schedule=how)
        expected = [few.parts(target), target.subgroup_size, target.subgroup_size]
        assert sorted(map(int, re.findall(r"cluster\(size = (\d+)\)", text))) == sorted(expected)
        tried += 1
    assert tried > 5


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_inf_and_nan_stay_in_their_rows_and_columns(dtype: str, target: str) -> None:
    spec = NormSpec((1000,), dtype)
    op, _ = module(spec, target)
    calls = {str(rows): matrix.adversarial_call(spec, random_generator(), rows) for rows in (5, 37)}
    assert all(row.comparison.ratio <= 1 for row in verify.verify(calls, lambda _: op))
    assert [launch.kernel for launch in op.launches] == ["few_rows"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_rows(target: str) -> None:
    """Nothing is launched; sums over no rows are zeros."""
    spec = NormSpec((64,), "f32")
    op, _ = module(spec, target)
    arguments = random_arguments(random_generator(), spec, (0,))
    assert_matches_reference(op.run(arguments.call()), arguments)
    assert not op.launches


@pytest.mark.parametrize("target", TARGETS)
def test_calls_repeat_to_the_bit(target: str) -> None:
    spec = NormSpec((769,), "bf16")
    call = random_arguments(random_generator(), spec, (40,)).call()
    op, _ = module(spec, target)
    assert_same_bits(op.run(call), op.run(call))
