"""How many rows workgroups walk over before others take their place, where the weight has sets."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import row_bytes
from iree_lnbwd.schedules.one_pass import OnePass

# What workgroups that run at once read and write, at least. The fewer sets they walk over together,
# the faster is memory: one set is as fast as one weight, and many are up to a tenth slower. But
# each wave begins anew and leaves partial rows. By 110 cells of 11 modulated layer norms (640 to
# 4096 columns, 16 to 256 sets, three numbers of rows, bf16 and f32) in 1 to 16 waves on an H200.
_WAVE_BYTES = 150_000_000
# Times as many bytes as their partial rows have: a rule of thumb, by the same cells.
_TIMES_PARTIAL = 100
_ACC_BYTES = 8  # of a column of a partial row: two sums in f32
_ALONE = 1.5  # where a multiprocessor has one workgroup, nothing runs while the next one begins


def rows_of_wave(one: OnePass, spec: NormSpec, target: Target) -> int | None:
    """Rows that a wave of workgroups walks over, about; None if one wave walks over all.

    Nothing of AMD's was measured.
    """
    if not spec.weight_sets or target.backend != "cuda":
        return None
    column_bytes = sum(row_bytes(spec))
    by_bytes = _WAVE_BYTES / (column_bytes * spec.columns)
    by_partial_rows = one.workgroups * _TIMES_PARTIAL * _ACC_BYTES / column_bytes
    rows = max(by_bytes, by_partial_rows) * (_ALONE if one.resident == 1 else 1)
    return round(rows)
