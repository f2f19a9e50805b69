"""What the forms that leave partial rows to a last kernel have in common in a module's text."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.sets import LEAST_RUN
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import chunk_types, flag, kernel, shared, totals
from iree_lnbwd.schedules.rules import WritesPartialRows, finalize_cells, finalize_threads


def partial_rows(schedule: WritesPartialRows, spec: NormSpec, target: Target) -> dict[str, str]:
    """The aliases that the kernels of one pass and of two passes share."""
    cols, vector = spec.columns, schedule.vector
    count = "?" if spec.weight_sets else schedule.workgroups  # a call's sets have as many each
    teams = schedule.teams(spec, target)
    cells = finalize_cells(spec)
    return {
        "#vector": f"{vector} : index",
        "#threads": f"{schedule.threads(target)} : index",
        "#resident": f"{schedule.resident} : i32",
        "#wants_dx": flag(spec.wants_dx),
        "#partials_at_once": f"{schedule.finalize_rows} : index",
        "#width": f"{schedule.finalize_columns} : index",
        "#slices": f"{schedule.finalize_slices} : index",
        "#cells": f"{cells} : index",
        "#finalize_kernel": kernel(finalize_threads(schedule, spec), target),
        "!slices": shared(f"{schedule.finalize_slices}x{schedule.finalize_columns}x!acc"),
        "!shares": f"vector<{schedule.finalize_slices}x{cells}x!acc>",
        "#teams": f"{teams} : index",
        "#least_run": f"{LEAST_RUN} : i32",
        "!acc_pn": f"tensor<{count}x{teams * cols}x!acc>",
        "!warp_sums": f"vector<{schedule.warps}x2x!acc>",
        **chunk_types(spec, vector),
        "!gamma_cell": f"vector<{cells}x!gamma>",
        "!beta_cell": f"vector<{cells}x!beta>",
        **{f"!{own.value}_cell": f"vector<{cells}x!{own.value}>" for own in totals(spec)},
        "!cell": f"vector<{cells}x!acc>",
        "!sum": "!cell" if spec.weight_sets else "!acc",
    }
