"""Where rows are: strides that arrays have in common, and the numbers that kernels get of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from support import random_generator

from iree_lnbwd.ops import layouts, strides
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.strides import MOST_STRIDE, RowStrides, Strides, arranged
from iree_lnbwd.vmfb.counts import DIVISOR_NUMBERS, StridesNumber, count_from_json, count_of

COLUMNS = 4


def packed(*shape: int) -> Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


QKV = packed(2, 6, 3, 7, COLUMNS)
FEATURES = packed(5, 2, 3 * COLUMNS)
# Views whose rows have two strides or fewer.
TWO = {
    "q": QKV[:, :, 0],
    "k": QKV[:, :, 1],
    "every second": QKV[:, ::2, 1],
    "a slice of features": FEATURES[..., COLUMNS : 2 * COLUMNS],
    "batch and sequence": FEATURES.transpose(1, 0, 2)[..., :COLUMNS],
    "the same row": np.broadcast_to(QKV[0, 0, 0, 0], (6, COLUMNS)),
    "rows again and again": np.broadcast_to(QKV[0, 0, 0], (6, 7, COLUMNS)),
    "of one": QKV[:1, :1, 1, :1],
    "dimensions of one": QKV[:, None, :, 1, :, None],
}
MORE = {
    "heads before the sequence": QKV[:, :, 1].transpose(0, 2, 1, 3),
    "backwards": QKV[::-1, :, 1],
    "columns apart": packed(3, 2 * COLUMNS)[:, ::2],
    "at no multiple": np.zeros(3 * 18 + 2, np.uint8)[2:]
    .view("V18")
    .view(np.dtype([("a", "f4", (COLUMNS,)), ("b", "u2")]))["a"],
}


def of(array: Array) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    return array.shape[:-1], layouts.leading_strides(array, 1)


def places(array: Array) -> list[int]:
    """Of each row's first element, counted from the first row's, in elements."""
    begin = array.__array_interface__["data"][0]
    rows = itertools.product(*map(range, array.shape[:-1]))
    return [(array[row].__array_interface__["data"][0] - begin) // 4 for row in rows]


@pytest.mark.parametrize("name", TWO)
def test_rows_with_two_strides_are_found(name: str) -> None:
    array = TWO[name]
    leading, own = of(array)
    found = arranged(leading, COLUMNS, (("input", own),))
    if array.flags.c_contiguous:
        assert found is None
        return
    assert found is not None
    where = found.of("input")
    count = math.prod(leading)
    assert [where.first(row, found.inner_count) for row in range(count)] == places(array)
    assert where.extent(count, COLUMNS, found.inner_count) == max(places(array)) + COLUMNS


@pytest.mark.parametrize("name", MORE)
def test_other_rows_are_not(name: str) -> None:
    leading, own = of(MORE[name])
    assert arranged(leading, COLUMNS, (("input", own),)) is None


def test_random_views_of_several_arrays() -> None:
    """Those that are used lie where the strides say; a pair with one split is found."""
    rng = random_generator()
    for _ in range(300):
        leading = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        arrays = {}
        for name in ("a", "b", "c"):
            order = rng.permutation(len(leading)) if rng.integers(2) else range(len(leading))
            room = packed(*(leading[d] + int(rng.integers(0, 2)) for d in order), 2 * COLUMNS)
            there = room[(*(slice(leading[d]) for d in order), slice(COLUMNS))]
            arrays[name] = there.transpose(*np.argsort(order), len(leading))
        own = tuple((name, of(array)[1]) for name, array in arrays.items())
        found = arranged(leading, COLUMNS, own)
        alone = [arranged(leading, COLUMNS, (each,)) for each in own]
        assert (found is None) == all(each is None for each in alone)
        if found is None:
            continue
        rows = range(math.prod(leading))
        for name, where in found.given:
            got = [where.first(row, found.inner_count) for row in rows]
            assert got == places(arrays[name])


def test_the_split_that_most_arrays_have() -> None:
    turned = packed(6, 2, 7, COLUMNS).transpose(1, 0, 2, 3)  # from sequence to batch
    leading = (2, 6, 7)
    own = {"input": of(QKV[:, :, 0])[1], "output": of(QKV[:, :, 1])[1], "other": of(turned)[1]}
    found = arranged(leading, COLUMNS, tuple(own.items()))
    assert found is not None
    assert {name for name, _ in found.given} == {"input", "output"}
    assert found.inner_count == 7
    fixed = arranged((2, 5), COLUMNS, (("other", (4, 8)), ("input", (20, 4))), ("other",))
    assert fixed is not None
    assert [name for name, _ in fixed.given] == ["other"]


def test_strides_that_kernels_cannot_count_with() -> None:
    most = MOST_STRIDE
    assert arranged((3,), 4, (("input", (most,)),)) is not None
    assert arranged((3,), 4, (("input", (most + 1,)),)) is None
    assert arranged((3, 2), 4, (("input", (most + 1, 8)),)) is None
    # Dense results would be further apart than a kernel can count.
    assert arranged((2, 3, 1 << 20), 1 << 12, (("input", (1 << 30, 0, 1 << 10)),)) is None
    assert arranged((3,), 4, (("input", (6,)),), multiples=(("input", 4),)) is None
    assert arranged((3,), 4, (("input", (8,)),), multiples=(("input", 4),)) is not None


@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 641, 1 << 16, (1 << 30) + 1, (1 << 31) - 1])
def test_rows_are_divided_by_multiplying(divisor: int) -> None:
    """As ``ir/math/rows.mlir`` does it, in 64 bits."""
    call = Strides(divisor, 1)
    count, high, low = (count_of(number, 1, None, call) for number in DIVISOR_NUMBERS)
    assert count == divisor
    assert all(0 <= half < 1 << 32 for half in (high, low))
    random = random_generator().integers(0, 1 << 31, 1000)
    near = [n * divisor + more for n in (0, 1, 2, (1 << 31) // divisor) for more in (-1, 0, 1)]
    for row in (*map(int, random), *near, (1 << 31) - 1):
        if not 0 <= row < 1 << 31:
            continue
        below, above = row * low, row * high
        assert below < 1 << 64
        assert above + (below >> 32) < 1 << 64
        assert (above + (below >> 32)) >> 32 == row // divisor


def test_extents_and_overlaps_of_any_strides() -> None:
    rng = random_generator()
    for _ in range(2000):
        rows, columns = int(rng.integers(1, 12)), int(rng.integers(1, 5))
        inner_count = int(rng.integers(2, 7))
        where = RowStrides(*map(int, rng.integers(0, 40, 2)))
        firsts = [where.first(row, inner_count) for row in range(rows)]
        assert where.extent(rows, columns, inner_count) == max(firsts) + columns
        cells = [first + column for first in firsts for column in range(columns)]
        if where.are_apart(rows, columns, inner_count):
            assert len(set(cells)) == len(cells)


@pytest.mark.parametrize("name", TWO)
def test_rows_of_views_are_apart_unless_they_are_the_same(name: str) -> None:
    leading, own = of(TWO[name])
    found = arranged(leading, COLUMNS, (("input", own),))
    if found is not None:
        are_same = name in ("the same row", "rows again and again")
        apart = found.of("input").are_apart(math.prod(leading), COLUMNS, found.inner_count)
        assert apart is not are_same


def test_what_is_not_said_is_dense() -> None:
    call = Strides(3, COLUMNS, (("input", RowStrides(100, 8)),))
    assert call.of("input") == (100, 8)
    assert call.of("output") == (3 * COLUMNS, COLUMNS)
    assert strides.alone(7, COLUMNS).extent("output", 7) == 7 * COLUMNS
    assert count_of(StridesNumber("output.inner"), 7, None, call) == COLUMNS
    assert count_of(StridesNumber("input.outer"), 7, None, call) == 100


@pytest.mark.parametrize(
    "name", ["inner_count", "inverse_low", "grad_output_2.inner", "gate.outer"]
)
def test_numbers_of_files(name: str) -> None:
    assert count_from_json({"of_strides": name}, "count") == StridesNumber(name)


@pytest.mark.parametrize(
    "name", ["", "rows", "weight.inner", "input", "input.", "input.of", 3, None]
)
def test_other_numbers_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"^count\.of_strides: expected"):
        count_from_json({"of_strides": name}, "count")
