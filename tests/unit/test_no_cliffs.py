"""No choice falls off a cliff: two passes, or one element an access, where better is known.

Known is what was measured on an H200: the committed sweeps (`scripts/swept.py`) and the fastest
schedules. Nothing is timed here.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from iree_lnbwd import schedules
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.schedules import OnePass, TwoPass, candidates, measured_files, vector_of
from iree_lnbwd.schedules.choosing import alternatives
from iree_lnbwd.schedules.elements import WHOLE_LINES

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import swept
from swept import Cell, Form, Swept, best_of_each_form, form_of

SM_90, H200 = find_target("sm_90"), find_product("h200")
OPS = (LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name)
BYTES = {"bf16": 2, "f32": 4}
OCTAVE = 1.0  # so far away, what is known of a width says nothing
TWO_PASSES_AT_BEST = 3 / 5  # of the ceiling: five streams in place of three
BETTER = 1.05  # times as fast, beyond noise

DRAWN = random.Random(20261122)
SPREAD = {
    "narrow": [*range(8, 256, 16)],
    "odd": sorted(DRAWN.sample(range(101, 16384, 2), 16)),
    "multiples of 8": sorted(DRAWN.sample(range(136, 18433, 8), 48)),
    "wide": sorted(DRAWN.sample(range(18440, 131073, 8), 24)),
    "wide, of any kind": sorted(DRAWN.sample(range(18433, 131073), 24)),
}


def cases(*kinds: str) -> list[Any]:
    """Every op, type and kind of widths."""
    return list(itertools.product(OPS, BYTES, kinds))


@functools.cache
def known() -> dict[Cell, tuple[Swept, ...]]:
    """What is known of each cell, of schedules that are legal."""
    names = {size: dtype for dtype, size in BYTES.items()}
    tuned = (
        Swept(Cell(key.op, names[key.element_bytes], key.columns), m.share, m.schedule)
        for run in measured_files.read(measured_files.DATA, "h200")
        for m in run.measurements
        if (key := m.key).is_plain
    )
    by_cell: dict[Cell, list[Swept]] = {}
    for one in (*swept.read(swept.path_of("h200")), *tuned):
        if one.schedule.illegal(one.cell.spec, SM_90) is None:
            by_cell.setdefault(one.cell, []).append(one)
    return {cell: tuple(found) for cell, found in by_cell.items()}


def chosen_form(cell: Cell) -> Form:
    """The form of the choice."""
    chosen = schedules.choose(cell.spec, SM_90, H200)
    assert isinstance(chosen, OnePass | TwoPass)
    return form_of(chosen)


def height(form: Form) -> int:
    """Two passes, and then accesses of one element, are cliffs where a higher form is faster."""
    if form.passes > 1:
        return 0
    return 1 if form.one_element else 2


def better(form: Form, found: tuple[Swept, ...]) -> dict[Form, float]:
    """Higher forms that are known to be faster, and their shares.

    A form that is not known is taken to reach what two passes can at best.
    """
    alike = (one.share for one in found if height(one.form) == height(form))
    least = BETTER * max(alike, default=TWO_PASSES_AT_BEST)
    return {
        one.form: one.share
        for one in found
        if one.share > least and height(one.form) > height(form)
    }


def test_there_are_sweeps() -> None:
    for op, dtype in itertools.product(OPS, BYTES):
        cells = [cell for cell in known() if (cell.op, cell.dtype) == (op, dtype)]
        assert sum(len({one.form for one in known()[cell]}) > 2 for cell in cells) >= 10
        assert max(cell.columns for cell in cells) >= 131072
        assert min(cell.columns for cell in cells) <= 64


@pytest.mark.drawn
@pytest.mark.parametrize(("op", "dtype", "kind"), cases("measured"))
def test_no_cliff_where_it_was_measured(op: str, dtype: str, kind: str) -> None:
    for cell, found in known().items():
        if (cell.op, cell.dtype) == (op, dtype):
            form = chosen_form(cell)
            assert not better(form, found), (cell, form)


@pytest.mark.drawn
@pytest.mark.parametrize(("op", "dtype", "kind"), cases(*SPREAD))
def test_no_cliff_between(op: str, dtype: str, kind: str) -> None:
    """Forms that are faster at a width near by are not passed over where they are legal."""
    for columns in SPREAD[kind]:
        cell = Cell(op, dtype, columns)
        form = chosen_form(cell)
        missed = better(form, nearest(cell))
        assert not legal_forms(cell, missed), (cell, form, missed)


def nearest(cell: Cell) -> tuple[Swept, ...]:
    """What is known of the nearest width whose accesses are as wide."""

    def octaves(other: Cell) -> float:
        return abs(math.log2(other.columns / cell.columns))

    alike = (
        other
        for other in known()
        if (other.op, other.dtype) == (cell.op, cell.dtype)
        and min(vector_of(other.spec), WHOLE_LINES) == min(vector_of(cell.spec), WHOLE_LINES)
        and octaves(other) < OCTAVE
    )
    found = min(alike, key=octaves, default=None)
    return known()[found] if found else ()


def legal_forms(cell: Cell, wanted: Collection[Form]) -> set[Form]:
    """Those that a legal schedule has whose registers suffice."""
    spec = cell.spec
    may_be = {
        form for form in wanted if spec.columns % (form.cluster * (2 - form.one_element)) == 0
    }
    if not may_be:
        return set()
    return may_be & {
        form_of(one)
        for one in itertools.chain(
            alternatives(spec, SM_90, H200), candidates.one_pass(spec, SM_90, H200)
        )
        if one.registers(spec, SM_90) <= one.registers_available(SM_90)
        and one.illegal(spec, SM_90) is None
    }


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    before = best_of_each_form(swept.read(swept.path_of("h200")))
    swept.write(tmp_path / "x.csv", before)
    after = swept.read(tmp_path / "x.csv")
    assert after == before == swept.read(swept.path_of("h200"))


def test_the_best_two_of_a_form_stay() -> None:
    cell, one = Cell(OPS[0], "bf16", 4096), OnePass(132, 1, 16, 8)
    copies = OnePass(132, 1, 16, 8, ahead=1, slots=2)
    wide = OnePass(132, 1, 8, 8)
    found = [
        Swept(cell, 0.5, one),
        Swept(cell, 0.7, wide),
        Swept(cell, 0.6, one),
        Swept(cell, 0.4, OnePass(66, 1, 16, 8)),
        Swept(cell, 0.2, copies),
    ]
    assert [s.share for s in best_of_each_form(found)] == [0.7, 0.6, 0.2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("layer_norm_backward,bf16,4096,0.9,ThreePass warps=1", "ThreePass"),
        ("layer_norm_backward,bf16,4096,high,TwoPass", "high"),
        ("layer_norm_backward,bf16", "line 2"),
        ("layer_norm_backward,bf16,4096,0.9,OnePass lanes=3", "lanes"),
    ],
)
def test_damage_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"op,dtype,columns,share,schedule\n{line}\n")
    with pytest.raises(ValueError, match=said) as error:
        swept.read(path)
    assert "line 2" in str(error.value)
