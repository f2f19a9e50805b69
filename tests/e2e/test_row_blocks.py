"""The CPU's kernels at the edges of their blocks, chunks and shares, on both CPU targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import (
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, LayerNormSpec, compiler, runtime, schedule
from iree_lnbwd.arguments import Array
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.runtime import LayerNormBackward
from iree_lnbwd.schedule import RowBlocks, Schedule, WholeTensors
from iree_lnbwd.targets import find_target

every_target = pytest.mark.parametrize("target", ["host", "generic"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

VARIANTS = (
    LayerNormSpec((200,), "f32"),
    LayerNormSpec((77,), "f64", recompute_eps=1e-5),
    LayerNormSpec((100,), "bf16", recompute_eps=1e-5, has_weight=False),
    LayerNormSpec((100,), "f16", weight_dtype="f32", grad_output_dtype="bf16", bias_dtype="bf16"),
    LayerNormSpec((65,), "f32", grad_output_dtype="f16", weight_dtype="bf16"),
    LayerNormSpec((64,), "bf16", output_mask=(True, False, True)),
    LayerNormSpec((64,), "bf16", output_mask=(True, False, False), recompute_eps=0.125),
)


def op_for(
    spec: LayerNormSpec, target: str, how: Schedule | None = None, device: str = "local-task"
) -> LayerNormBackward:
    vmfb, manifest = compiler.build(spec, find_target(target), how=how)
    assert isinstance(manifest.schedule, RowBlocks) or how is not None
    return runtime.load_built(vmfb, device)


@every_target
@every_dtype
@pytest.mark.parametrize("columns", [2, 17, 64, 129])
def test_chunks_that_overlap(columns: int, dtype: str, target: str) -> None:
    """Whatever the vector, and whether it divides N: one that does not is counted once."""
    rng = random_generator()
    spec = LayerNormSpec((columns,), dtype)
    for vector in {2, min(16, columns)}:
        op = op_for(spec, target, RowBlocks(3, 2, vector))
        arguments = random_arguments(rng, spec, (13,))
        assert_matches_reference(arguments.backward_by(op), arguments)


@every_target
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("workgroups", [1, 4])
def test_shares_and_blocks_that_rows_do_not_fill(workgroups: int, block: int, target: str) -> None:
    rng = random_generator()
    spec = LayerNormSpec((48,))
    op = op_for(spec, target, RowBlocks(workgroups, block, 16))
    edge = workgroups * block
    for rows in {1, block, block + 1, max(1, edge - 1), edge, edge + 1, 2 * edge + 1}:
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(arguments.backward_by(op), arguments)


@every_target
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_every_kind_of_spec(spec: LayerNormSpec, target: str) -> None:
    rng = random_generator()
    op = op_for(spec, target)
    for rows in (1, 5, 63, 64, 65, 300):
        arguments = random_arguments(rng, spec, (rows,))
        assert_matches_reference(arguments.backward_by(op), arguments)


@every_target
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [4096, 65536])
def test_rows_that_leave_the_cache(columns: int, dtype: str, target: str) -> None:
    spec = LayerNormSpec((columns,), dtype)
    arguments = random_arguments(random_generator(), spec, (67,))
    assert_matches_reference(arguments.backward_by(op_for(spec, target)), arguments)


@every_target
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_same_bits_on_any_number_of_threads(dtype: str, target: str) -> None:
    spec = LayerNormSpec((769,), dtype, recompute_eps=1e-5)
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


@every_target
@every_dtype
@pytest.mark.parametrize("elements", [1, 2, 3, 7])
def test_arrays_at_any_address(elements: int, dtype: str, target: str) -> None:
    """An aligned load from a misaligned address would end the process."""
    spec = LayerNormSpec((200,), dtype, recompute_eps=1e-5)
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
    spec = LayerNormSpec((64,))
    arguments = moved(random_arguments(random_generator(), spec, (9,)), 1)
    op = op_for(spec, "host", how)
    assert_matches_reference(arguments.backward_by(op), arguments)
    assert schedule.host_alignment(how or schedule.choose(spec, find_target("host"))) == (
        64 if how else 1
    )
