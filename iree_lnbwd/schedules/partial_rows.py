"""What the forms that leave partial rows to a last kernel have in common in a module's text."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import chunk_types, flag, kernel, shared, totals
from iree_lnbwd.schedules.rules import WritesPartialRows


def partial_rows(schedule: WritesPartialRows, spec: NormSpec, target: Target) -> dict[str, str]:
    """The aliases that the kernels of one pass and of two passes share."""
    cols, vector = spec.columns, schedule.vector
    count = "?" if spec.weight_sets else schedule.workgroups  # a call's sets have as many each
    teams = schedule.teams(spec, target)
    return {
        "#vector": f"{vector} : index",
        "#threads": f"{schedule.threads(target)} : index",
        "#resident": f"{schedule.resident} : i32",
        "#wants_dx": flag(spec.wants_dx),
        "#partials_at_once": f"{schedule.finalize_rows} : index",
        "#width": f"{schedule.finalize_columns} : index",
        "#slices": f"{schedule.finalize_slices} : index",
        "#finalize_kernel": kernel(schedule.finalize_columns * schedule.finalize_slices, target),
        "!slices": shared(f"{schedule.finalize_slices}x{schedule.finalize_columns}x!acc"),
        "!shares": f"vector<{schedule.finalize_slices}x1x!acc>",
        "#teams": f"{teams} : index",
        "!acc_pn": f"tensor<{count}x{teams * cols}x!acc>",
        "!warp_sums": f"vector<{schedule.warps}x2x!acc>",
        **chunk_types(spec, vector),
        "!gamma_cell": "vector<1x!gamma>",
        "!beta_cell": "vector<1x!beta>",
        **{f"!{own.value}_cell": f"vector<1x!{own.value}>" for own in totals(spec)},
        "!cell": "vector<1x!acc>",
    }
