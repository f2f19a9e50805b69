"""GPU kernels at their edges, in the emulator: recomputed statistics, two passes, long sums."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support import assert_matches_reference, random_arguments, random_generator

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.schedules import Schedule, TwoPass
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

TARGETS = ("sm_90", "gfx90a", "gfx942", "gfx1100")
every_target = pytest.mark.parametrize("target", TARGETS)


def op_for(spec: NormSpec, target: str, how: Schedule | None = None) -> EmulatedNorm:
    vmfb, _ = compiler.build(spec, find_target(target), schedule=how)
    return EmulatedNorm(vmfb)


def kernels(op: EmulatedNorm) -> list[str]:
    return [launch.kernel for launch in op.launches]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "target"),
    [
        (columns, target)
        for columns, wave64 in zip(
            (1, 5, 35, 65, 1000, 20000), itertools.cycle(("gfx942", "gfx90a")), strict=False
        )
        for target in ("sm_90", wave64, "gfx1100")
    ],
)
def test_statistics_are_recomputed_by_a_kernel_of_ours(columns: int, target: str) -> None:
    """Of IREE's own, LLVM could not compile those of some widths for AMD's GPUs."""
    rng = random_generator()
    spec = NormSpec((columns,), str(rng.choice(["f32", "f16", "bf16"])), eps=1e-5)
    op = op_for(spec, target)
    most = schedules.choose_statistics(spec, find_target(target)).rows
    for rows in {1, most, most + 1} if columns < 20000 else {2}:
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(op.run(arguments.call()), arguments)
        assert kernels(op)[0] == "normalize"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_recomputed_statistics_of_rows_far_from_zero_and_of_constant_rows(target: str) -> None:
    rng = random_generator()
    spec = NormSpec((300,), eps=1e-5)
    x = rng.standard_normal((9, 300)) + 1000
    x[3], x[4] = 0.1, 0.0
    x[5, 7], x[6, 9] = np.inf, np.nan
    arguments = random_arguments(rng, spec, (9,), x=x)
    assert_matches_reference(op_for(spec, target).run(arguments.call()), arguments)


MASKS = [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "dtype"), [("sm_75", "f64"), ("gfx942", "bf16")])
@pytest.mark.parametrize("mask", MASKS)
def test_two_passes_for_any_mask(mask: tuple[bool, bool, bool], target: str, dtype: str) -> None:
    """Row sums are for dx alone."""
    rng = random_generator()
    spec = NormSpec((50000,), dtype, output_mask=mask)
    assert isinstance(schedules.choose(spec, find_target(target)), TwoPass)
    op = op_for(spec, target)
    arguments = random_arguments(rng, spec, (5,))
    assert_matches_reference(op.run(arguments.call()), arguments)
    assert ("row_sums" in kernels(op)) == mask[0]
    assert "columns" in kernels(op)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_spans_that_rows_do_not_fill(target: str) -> None:
    spec = NormSpec((96,))
    op = op_for(spec, target, TwoPass(2, 4, 4, 1, rows=2, span_steps=2))
    rng = random_generator()
    for rows in (1, 7, 8, 9, 31, 32, 33, 100):
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(op.run(arguments.call()), arguments)


@pytest.mark.drawn
def test_two_passes_over_many_equal_rows() -> None:
    """One walker adds them all: from the first to the last it would be off by their number."""
    rng, rows = random_generator(), 2000
    spec = NormSpec((64,))
    x = np.repeat(rng.standard_normal((1, 64)), rows, axis=0)
    dy = np.repeat(rng.uniform(0.1, 1, (1, 64)), rows, axis=0).astype(np.float32)
    arguments = replace(random_arguments(rng, spec, (rows,), x=x), grad_output=dy)
    op = op_for(spec, "sm_90", TwoPass(1, 8, 4, 8, 4))
    assert_matches_reference(op.run(arguments.call()), arguments)


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_subnormal_numbers_count(dtype: str, target: str) -> None:
    """No instruction of ours is marked to flush them, and the emulator does as it is told."""
    rng = random_generator()
    spec, of = NormSpec((24,), dtype), DTYPES[dtype]
    arguments = random_arguments(rng, spec, (5,))
    tiny = rng.integers(-200, 200, arguments.grad_output.shape) * of.smallest_subnormal
    small = replace(arguments, grad_output=tiny.astype(of.numpy))
    large = replace(small, weight=np.full(24, np.sqrt(of.largest), of.numpy))
    op = op_for(spec, target)
    for case in (small, large):
        assert_matches_reference(op.run(case.call()), case)
