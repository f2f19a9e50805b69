"""What partial rows cost a call whose weight has sets, where workgroups come in waves."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import row_bytes
from iree_lnbwd.schedules.one_pass import OnePass

# Of a column of a partial row: two sums in f32, which take the time of 2.75 times their bytes. By
# 44 cells of modulated layer norms on an H200 (`waves.csv` in ``scripts/results/h200``).
_PARTIAL_BYTES = 22
_THOUSAND = 1000


def cost_of_partial_row(one: OnePass, spec: NormSpec, target: Target) -> int | None:
    """Thousandths of the time of a row, for `CountInWaves`; None where waves do not follow from it.

    Nothing of AMD's was measured. Neither were clusters, whose workgroups begin together.
    """
    if not spec.weight_sets or target.backend != "cuda" or one.cluster > 1:
        return None
    return round(_PARTIAL_BYTES * _THOUSAND / sum(row_bytes(spec)))
