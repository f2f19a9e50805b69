"""Waves of workgroups, where the weight has sets: how many run at once, and what each costs."""

from __future__ import annotations

from dataclasses import replace

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import row_bytes
from iree_lnbwd.schedules.one_pass import OnePass

# Of a column of a partial row: two sums in f32, which take the time of 2.75 times their bytes. By
# 44 cells of modulated layer norms on an H200 (`waves.csv` in ``scripts/results/h200``).
_PARTIAL_BYTES = 22
_THOUSAND = 1000


def with_all_at_once(one: OnePass, spec: NormSpec, target: Target, product: Product) -> OnePass:
    """The same, with as many workgroups as surely run at once, if it says fewer.

    Clusters need places beside each other, and AMD's registers are other ones.
    """
    if not spec.weight_sets or target.backend != "cuda" or one.cluster > 1:
        return one
    resident = one.surely_resident(spec, target)
    if resident == one.resident:
        return one
    return replace(one, resident=resident).all_at_once(spec.columns, product)


def cost_of_partial_row(one: OnePass, spec: NormSpec, target: Target) -> int | None:
    """Thousandths of the time of a row, for `CountInWaves`; None where waves do not follow from it.

    Nothing of AMD's was measured. Neither were clusters, whose workgroups begin together.
    """
    if not spec.weight_sets or target.backend != "cuda" or one.cluster > 1:
        return None
    return round(_PARTIAL_BYTES * _THOUSAND / sum(row_bytes(spec)))
