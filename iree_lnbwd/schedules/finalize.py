"""The last kernel, which adds up partial rows: how they are divided among its threads."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TypeVar

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.rules import finalize_cells
from iree_lnbwd.schedules.two_pass import TwoPass

_MOST_SLICES = 32  # of the partial rows, one for each thread of a column: a rule of thumb
_MOST_ROWS = 16  # partial rows in a thread's registers at once: a rule of thumb
# So few that a thread takes all of them. On an H200, 17 slices of 95535 columns took 12 us, one 4.
_FEW = 24
# Slices, and rows of a thread, if the number of partial rows, P, has no divisors that make one
# step: a rule of thumb.
_USUAL = 8
_THREADS = 384  # of a workgroup, at most, unless columns need more: a rule of thumb
_MOST_COLUMNS = 128  # of a workgroup: a rule of thumb
# Slices, rows of a thread, and threads of a partial row where the weight has sets: each set has a
# few partial rows, of which a call decides the number. From 4 to 128 sets it took at most 1.2 us
# more than the fastest of nine ways, with one set 3, and with 512, where two slices are faster, 6
# (modulated layer norms of 640 to 4096 columns, H200).
_OF_SETS = 4, 4, 32
_SECTOR_COLUMNS = 16  # 64 bytes of f32, two of the sectors that NVIDIA's memory is read in

_Gpu = TypeVar("_Gpu", OnePass, TwoPass)


def with_finalize(schedule: _Gpu, spec: NormSpec, target: Target, product: Product) -> _Gpu:
    """A schedule whose last kernel reads all partial rows at once, if their number is a product.

    Then its threads wait for one step of loads only. If P has no such divisors, there are several
    steps. With sets of weights, nobody knows that number before a call.
    """
    if spec.weight_sets:
        slices, rows, lanes = _OF_SETS
        return replace(
            schedule,
            finalize_slices=slices,
            finalize_rows=rows,
            finalize_columns=lanes * finalize_cells(spec),
        )
    count, lanes = schedule.workgroups, target.subgroup_size
    # Columns, a power of 2, that make whole sectors of memory and whole subgroups.
    least = {s: max(_SECTOR_COLUMNS, lanes // gcd(s, lanes)) for s in range(1, _MOST_SLICES + 1)}
    divisors = (
        (slices, rows)
        for slices in least
        for rows in range(1, _MOST_ROWS + 1)
        if count % (slices * rows) == 0 and slices * least[slices] <= target.max_threads
    )
    # In a single step, a thread takes as many rows as possible; in several, as many as slices.
    slices, rows = max(
        divisors, key=lambda o: (o[0] * o[1], o[1] if o[0] * o[1] == count else min(o))
    )
    if isinstance(schedule, OnePass) and _MOST_ROWS < count <= _FEW:
        slices, rows = 1, count
    if slices * rows < min(count, _USUAL * _USUAL):
        slices = rows = _USUAL
    # Enough workgroups for every processor.
    most = min(_THREADS // slices, spec.columns // product.processors, _MOST_COLUMNS)
    columns = max(least[slices], 1 << max(most, 1).bit_length() - 1)
    return replace(schedule, finalize_slices=slices, finalize_rows=rows, finalize_columns=columns)
