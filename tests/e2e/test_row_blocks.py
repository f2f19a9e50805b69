"""The CPU's kernels at the edges of their blocks, chunks and shares, on both CPU targets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import (
    CPU_TARGETS,
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    built,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, NormSpec, runtime, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime import Norm
from iree_lnbwd.schedules import RowBlocks, Schedule, WholeTensors

every_target = pytest.mark.parametrize("target", CPU_TARGETS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

VARIANTS = (
    NormSpec((200,), "f32"),
    NormSpec((77,), "f64", eps=1e-5),
    NormSpec((100,), "bf16", eps=1e-5, has_weight=False),
    NormSpec((100,), "f16", weight_dtype="f32", grad_output_dtype="bf16", bias_dtype="bf16"),
    NormSpec((65,), "f32", grad_output_dtype="f16", weight_dtype="bf16"),
    NormSpec((64,), "bf16", output_mask=(True, False, True)),
    NormSpec((64,), "bf16", output_mask=(True, False, False), eps=0.125),
    NormSpec((77,), "f16", output_mask=(False, True, True)),
    NormSpec((100,), "f64", output_mask=(False, False, True), has_weight=False),
    NormSpec((65,), "bf16", output_mask=(False, True, False), eps=1e-5),
    NormSpec((1,), "f32"),
    NormSpec((1,), "bf16", eps=1e-5),
)
MASKS = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]


def op_for(
    spec: NormSpec, target: str, how: Schedule | None = None, device: str = "local-task"
) -> Norm:
    vmfb, manifest = built(spec, find_target(target), how)
    assert isinstance(manifest.schedule, RowBlocks) or how is not None
    return runtime.load_built(vmfb, device)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("columns", "dtype", "target"),
    [
        (2, "f32", "host"),
        (2, "bf16", "generic"),
        (17, "f32", "generic"),
        (17, "bf16", "host"),
        (17, "f64", "generic"),
        (64, "f32", "host"),
        (64, "bf16", "generic"),
        (129, "f32", "generic"),
        (129, "bf16", "host"),
        (129, "f16", "host"),
    ],
)
def test_chunks_that_overlap(columns: int, dtype: str, target: str) -> None:
    """Whatever the vector, and whether it divides N: one that does not is counted once."""
    rng = random_generator()
    spec = NormSpec((columns,), dtype)
    for vector in {2, min(16, columns)}:
        op = op_for(spec, target, RowBlocks(3, 2, vector))
        arguments = random_arguments(rng, spec, (13,))
        assert_matches_reference(arguments.backward_by(op), arguments)


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("workgroups", [1, 4])
def test_shares_and_blocks_that_rows_do_not_fill(workgroups: int, block: int, target: str) -> None:
    rng = random_generator()
    spec = NormSpec((48,))
    op = op_for(spec, target, RowBlocks(workgroups, block, 16))
    edge = workgroups * block
    for rows in {1, block, block + 1, max(1, edge - 1), edge, edge + 1, 2 * edge + 1}:
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(arguments.backward_by(op), arguments)


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_every_kind_of_spec(spec: NormSpec, target: str) -> None:
    rng = random_generator()
    op = op_for(spec, target)
    for rows in (1, 5, 63, 64, 65, 300):
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(arguments.backward_by(op), arguments)


# Equal numbers: each addition rounds in the same direction as the one before, and a long sum is off
# by as many roundings as it has terms.


@pytest.mark.drawn
@pytest.mark.parametrize("mask", MASKS)
def test_many_equal_rows(mask: tuple[bool, bool, bool]) -> None:
    rng, rows, columns = random_generator(), 300_000, 8
    spec = NormSpec((columns,), output_mask=mask)
    dy = np.repeat(rng.standard_normal((1, columns), dtype=np.float32), rows, axis=0)
    x = np.repeat(rng.standard_normal((1, columns), dtype=np.float32), rows, axis=0)
    arguments = replace(random_arguments(rng, spec, (rows,), x=x), grad_output=dy)
    assert_matches_reference(arguments.backward_by(op_for(spec, "generic")), arguments)


@pytest.mark.drawn
@every_target
def test_millions_of_equal_rows_of_one_column(target: str) -> None:
    spec = NormSpec((1,), output_mask=(False, True, True))
    dy = np.full((3_000_000, 1), random_generator().uniform(0.1, 1), np.float32)
    ones = np.ones(len(dy), np.float32)
    arguments = Arguments(dy, dy, (1,), -ones, ones, dy[0], output_mask=spec.output_mask)
    assert_matches_reference(arguments.backward_by(op_for(spec, target)), arguments)


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize(
    ("columns", "mask", "eps"),
    [
        (65536, (True, True, True), None),
        (65536, (False, True, True), 1e-5),
        (1_000_000, (True, True, True), 1e-5),
        (1_000_000, (False, True, True), None),
    ],
)
def test_wide_rows_of_equal_numbers(
    columns: int, mask: tuple[bool, bool, bool], eps: float | None, target: str
) -> None:
    """Recomputed, their mean is the number itself, xhat is 0, and rstd is as large as can be."""
    rng = random_generator()
    spec = NormSpec((columns,), output_mask=mask, eps=eps)
    x, dy = (np.repeat(rng.uniform(0.1, 9, (3, 1)), columns, 1).astype(np.float32) for _ in "xy")
    arguments = random_arguments(rng, spec, (3,), x=x)
    arguments = replace(arguments, grad_output=dy, weight=np.ones(columns, np.float32))
    assert_matches_reference(arguments.backward_by(op_for(spec, target)), arguments)


@pytest.mark.drawn
@every_target
@every_dtype
@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_subnormal_numbers_count(device: str, dtype: str, target: str) -> None:
    """As data, as products, and as results; IREE's threads flush them where nobody objects."""
    rng = random_generator()
    spec = NormSpec((17,), dtype)
    of = DTYPES[dtype]
    arguments = random_arguments(rng, spec, (5,))
    tiny = rng.integers(-200, 200, arguments.grad_output.shape) * of.smallest_subnormal
    small = replace(arguments, grad_output=tiny.astype(of.numpy))
    large = replace(small, weight=np.full(17, np.sqrt(of.largest), of.numpy))
    op = op_for(spec, target, device=device)
    for case in (small, large):
        judgement = assert_matches_reference(case.backward_by(op), case)
        # What flushes would pass for right if the tolerance were as large as the gradients are.
        expected, tolerance = (of["grad_bias"] for of in (judgement.expected, judgement.tolerance))
        assert np.abs(expected).max() > 4 * tolerance.max()


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [4096, 65536])
def test_rows_that_leave_the_cache(columns: int, dtype: str, target: str) -> None:
    spec = NormSpec((columns,), dtype)
    arguments = random_arguments(random_generator(), spec, (67,))
    assert_matches_reference(arguments.backward_by(op_for(spec, target)), arguments)


@pytest.mark.drawn
@every_target
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_same_bits_on_any_number_of_threads(dtype: str, target: str) -> None:
    spec = NormSpec((769,), dtype, eps=1e-5)
    arguments = random_arguments(random_generator(), spec, (1023,))
    alone = arguments.backward_by(op_for(spec, target, device="local-sync"))
    together = op_for(spec, target)
    for _ in range(5):
        assert_same_bits(arguments.backward_by(together), alone)


def at_offset(array: Array, elements: int) -> Array:
    """A copy whose address is so many elements past a multiple of 64 bytes."""
    size = array.itemsize
    storage = np.empty(array.nbytes + 64 + elements * size, np.uint8)
    start = -storage.ctypes.data % 64 + elements * size
    moved = storage[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def moved(arguments: Arguments, elements: int) -> Arguments:
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    given = {name: getattr(arguments, name) for name in names}
    arrays: dict[str, Any] = {
        name: at_offset(array, elements) for name, array in given.items() if array is not None
    }
    return replace(arguments, **arrays)


@pytest.mark.drawn
@every_target
@every_dtype
@pytest.mark.parametrize("elements", [1, 2, 3, 7])
def test_arrays_at_any_address(elements: int, dtype: str, target: str) -> None:
    """An aligned load from a misaligned address would end the process."""
    spec = NormSpec((200,), dtype, eps=1e-5)
    arguments = random_arguments(random_generator(), spec, (9,))
    op = op_for(spec, target)
    aligned = arguments.backward_by(op)
    away = moved(arguments, elements)
    assert_same_bits(away.backward_by(op), aligned)

    out = LayerNormGrads(*(at_offset(np.zeros_like(array), elements) for array in aligned))
    op(away.grad_output, away.input, weight=away.weight, bias=away.bias, out=out)
    assert_same_bits(out, aligned)


@pytest.mark.parametrize("how", [None, WholeTensors()], ids=["row blocks", "whole tensors"])
def test_what_a_module_assumes_of_memory_is_what_it_gets(how: Schedule | None) -> None:
    """Modules of whole tensors get copies of misaligned arrays; row blocks work on them."""
    spec = NormSpec((64,))
    arguments = moved(random_arguments(random_generator(), spec, (9,)), 1)
    op = op_for(spec, "host", how)
    assert_matches_reference(arguments.backward_by(op), arguments)
    assert schedules.host_alignment(how or schedules.choose(spec, find_target("host"))) == (
        64 if how else 1
    )
