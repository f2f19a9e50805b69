"""Which schedules forwards of narrow rows take on GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward

TARGETS = ("sm_80", "sm_90", "gfx942", "gfx1100")
DRAWN = random.Random(20261126).sample(range(1, 4097), 60)


def choice(spec: NormSpec, target: str = "sm_90", product: str | None = None) -> Forward:
    gpu = find_product(product) if product else None
    one = schedules.choose(spec, find_target(target), gpu)
    assert isinstance(one, Forward)
    return one


def norm(columns: int, dtype: str, op: str = LAYER_NORM.name) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, eps=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_shared_out_by_what_is_normalized(target: str) -> None:
    """A fused residual, a gate behind the norm, and a fixed M leave a row's bits alone."""
    for op, dtype, columns in itertools.product((LAYER_NORM, RMS_NORM), ("bf16", "f32"), DRAWN):
        plain = norm(columns, dtype, op.name)
        others = (
            dataclasses.replace(plain, residual_dtype=dtype),
            dataclasses.replace(plain, gate="after"),
            dataclasses.replace(plain, rows=5),
            dataclasses.replace(plain, has_weight=False, has_bias=False),
        )
        ways = {
            (one.threads, one.vector, one.chunks, one.cluster)
            for one in (choice(spec, target) for spec in (plain, *others))
        }
        assert len(ways) == 1, plain


def test_another_product_shares_rows_out_alike() -> None:
    for dtype, columns in itertools.product(("bf16", "f32"), DRAWN):
        h100, h200 = (choice(norm(columns, dtype), product=name) for name in ("h100", "h200"))
        assert (h100.threads, h100.vector, h100.chunks) == (h200.threads, h200.vector, h200.chunks)


@pytest.mark.parametrize("columns", [408, 664, 864, 1000])
def test_a_subgroup_keeps_a_narrow_row_with_a_mean(columns: int) -> None:
    """Then no sum goes through shared memory."""
    one = choice(norm(columns, "bf16"))
    assert one.threads <= 32
    assert one.chunks * one.vector >= 20


@pytest.mark.parametrize(("columns", "vector"), [(395, 1), (558, 2), (697, 1)])
def test_weights_come_with_rows_of_narrow_accesses(columns: int, vector: int) -> None:
    one = choice(norm(columns, "bf16"))
    assert one.vector == vector
    assert one.early
    assert one.resident > 1


def test_accesses_are_halved_where_that_leaves_fewer_columns_idle() -> None:
    assert choice(norm(1032, "bf16")).vector == 4
    assert choice(norm(1024, "bf16")).vector == 8


@pytest.mark.parametrize("op", [LAYER_NORM.name, RMS_NORM.name])
def test_some_hundred_narrow_rows_are_few(op: str) -> None:
    assert choice(norm(768, "bf16", op)).most_few_rows >= 512
    assert choice(norm(768, "f32", op)).most_few_rows < 512


@pytest.mark.parametrize("columns", [264, 340, 580, 768])
def test_weights_come_with_narrow_rows_of_16_bits_without_a_mean(columns: int) -> None:
    """Not beside a residual or a gate, whose registers nobody measured; nor with a mean."""
    plain = norm(columns, "bf16", RMS_NORM.name)
    assert choice(plain).early
    assert not choice(dataclasses.replace(plain, residual_dtype="bf16")).early
    assert not choice(dataclasses.replace(plain, gate="after")).early
    assert not choice(norm(columns, "bf16")).early
    assert not choice(plain, "gfx942").early


@pytest.mark.parametrize(
    ("columns", "dtype", "at_once"),
    [(693, "f32", 896), (1331, "f32", 896), (933, "f32", 1024), (1163, "bf16", 1280)],
)
def test_threads_that_hold_much_of_an_odd_row_get_more_registers(
    columns: int, dtype: str, at_once: int
) -> None:
    """24 elements of f32 spilled, with as many threads at once as 16 allow."""
    one = choice(norm(columns, dtype, RMS_NORM.name))
    assert one.shifted(norm(columns, dtype, RMS_NORM.name))
    assert one.rows * one.threads * one.resident == at_once


@pytest.mark.parametrize("gate", ["after", "before"])
def test_gated_rows_of_16_bits_are_as_many_as_keep_memory_busy(gate: str) -> None:
    for columns, at_once in ((2048, 1280), (4096, 1280), (8192, 768)):
        spec = dataclasses.replace(norm(columns, "bf16", RMS_NORM.name), gate=gate)
        one = choice(spec)
        assert one.rows * one.threads * one.resident == at_once, columns


@pytest.mark.parametrize(
    ("columns", "rows", "at_once", "slots"),
    [(713, 8, 512, 4), (901, 8, 512, 3), (1163, 2, 640, 4), (1411, 2, 512, 4)],
)
def test_walks_of_narrow_rows_copy_as_many_as_the_cache_has_room_for(
    columns: int, rows: int, at_once: int, slots: int
) -> None:
    """Eight rows where each has a subgroup; and more workgroups at once, if their slots fit."""
    one = choice(norm(columns, "bf16"))
    assert one.walks * columns % one.vector == 0  # rows begin at the same place of an access
    assert (one.rows, one.rows * one.threads * one.resident, one.slots) == (rows, at_once, slots)
