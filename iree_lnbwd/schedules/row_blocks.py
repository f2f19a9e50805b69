"""The schedule of a CPU: its numbers, and when they are legal."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.errors import counted
from iree_lnbwd.schedules.rules import BELOW_ONE, first_broken
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target


@dataclass(frozen=True)
class RowBlocks:
    """Workgroups take blocks of rows, which stay in the cache (``ir/row_blocks.mlir``): for a CPU.

    When equal numbers are added one after the other, their rounding errors have the same sign, and
    the error grows with their count. So the length of a sum is limited.

    Attributes:
        workgroups: How many share the rows; also the number of partial rows that are added up at
            the end.
        block: Rows that a worker keeps in its cache between their sums and dx.
        vector: Neighbouring elements that a worker handles together.
        share: The most rows of a workgroup. If M has more for each, there are more workgroups.
        most_workgroups: The most workgroups. If M has more rows than they can share so, their
            shares are longer.
        span_chunks: Vectors of a row that are summed at a time.
        fetches_ahead: Whether the next block, or row of a forward, is fetched into the cache while
            one is worked on.
    """

    workgroups: int
    block: int
    vector: int
    share: int = 512
    most_workgroups: int = 4096
    span_chunks: int = 128
    fetches_ahead: bool = True

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        return (
            f"row blocks: rows come from memory once, {counted(self.block, 'row')} at a time; "
            f"{counted(self.workgroups, 'workgroup')}, more of them beyond "
            f"{counted(self.workgroups * self.share, 'row')}, {counted(self.vector, 'element')} at "
            "a time"
        )

    @property
    def span(self) -> int:
        """Columns of a row that are summed at a time."""
        return self.span_chunks * self.vector

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        least = min(
            self.workgroups,
            self.block,
            self.vector,
            self.share,
            self.most_workgroups,
            self.span_chunks,
        )
        if least < 1:
            return BELOW_ONE
        rules = (
            (target.backend != "cpu", "it is for a CPU's threads and caches"),
            (self.vector > spec.columns, f"{self.vector} elements, a row has {spec.columns}"),
        )
        return first_broken(rules)
