"""The schedule of two passes over memory: its numbers, and when they are legal."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import MORE_GRAD_OUTPUTS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import flag, gates, kernel, private, shared
from iree_lnbwd.schedules.partial_rows import partial_rows
from iree_lnbwd.schedules.rules import (
    elements_rule,
    first_broken,
    gpu_rules,
    grid_rule,
    out_of_bounds,
    terms_rule,
)


@dataclass(frozen=True)
class TwoPass:
    """Row sums first, then dx by tiles of columns (``ir/two_pass.mlir``): for any N.

    Attributes:
        workgroups: The number that walk over the rows of a tile; also the number of partial rows.
        warps: Subgroups in a workgroup.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread of the first pass reads at once.
        rows: Rows that a thread of the second pass reads at once.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
        finalize_slices: Slices of the partial rows that threads of the last kernel add up.
        finalize_rows: Partial rows that such a thread reads at once.
        finalize_columns: Columns of a workgroup of that kernel.
        span_steps: Steps of a walker that make one sum, because a long sum of equal numbers has a
            large error; its partial row adds up these sums.
    """

    workgroups: int
    warps: int
    vector: int
    chunks: int
    rows: int
    resident: int = 1
    finalize_slices: int = 4
    finalize_rows: int = 4
    finalize_columns: int = 32
    span_steps: int = 32

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        return (
            "two passes: x and dy are read for the row sums, and again for dx and the columns; "
            f"{counted(self.workgroups, 'workgroup')} of {counted(self.warps, 'subgroup')} to a "
            f"tile of columns, {counted(self.vector, 'element')} an access"
        )

    def threads(self, target: Target) -> int:
        """Of a workgroup."""
        return self.warps * target.subgroup_size

    def teams(self, spec: NormSpec, target: Target) -> int:
        """Partial rows of a workgroup: it stays in one set of weights."""
        return 1

    def tile(self, target: Target) -> int:
        """Columns of a workgroup in the second pass."""
        return self.threads(target) * self.vector

    def aliases(self, spec: NormSpec, target: Target) -> dict[str, str]:
        """What it is in the text of a module."""
        at_once = self.tile(target) * self.chunks
        return {
            **partial_rows(self, spec, target),
            "#chunks_at_once": f"{self.chunks} : index",
            "#whole": flag(spec.columns % at_once == 0),
            "#rows_at_once": f"{self.rows} : index",
            "#span_steps": f"{self.span_steps} : index",
            "#workgroups_index": f"{self.workgroups} : index",
            "#tile": f"{self.tile(target)} : index",
            "#two_pass_kernel": kernel(self.threads(target), target),
            "!exchange": shared(f"1x1x{self.warps}x2x!acc"),
            "!dy_read": private(f"{self.chunks}x!dy_chunk"),
            "!more_dy_read": private(f"{len(MORE_GRAD_OUTPUTS)}x{self.chunks}x!dy_chunk"),
            "!x_read": private(f"{self.chunks}x!x_chunk"),
            "!gamma_read": private(f"{self.chunks}x!gamma_chunk"),
            "!beta_read": private(f"{self.chunks}x!beta_chunk"),
            **{f"!{gate.value}_read": private(f"{self.chunks}x!z_chunk") for gate in gates(spec)},
        }

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if why := out_of_bounds(self):
            return why
        rules = (
            *gpu_rules(spec, target, self, self.threads(target)),
            (spec.columns % self.vector != 0, f"N is no multiple of {self.vector}"),
            elements_rule(spec, max(self.chunks, self.rows) * self.vector),
            grid_rule(self.workgroups),
            terms_rule(self.rows * self.span_steps),
        )
        return first_broken(rules)
