"""The schedule of a CPU: its numbers, and when they are legal."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import (
    UNROLLED,
    bindings,
    chunk_types,
    flag,
    gates,
    itemsize,
    output_types,
)
from iree_lnbwd.schedules.rules import first_broken, out_of_bounds, terms_rule

# More than was ever the fastest: of elements at a time, which the compiler writes out, of rows that
# a cache can keep, and of workgroups, each of which leaves a partial row.
_MOST_VECTOR = 256
_MOST_BLOCK = 256
_MOST_WORKGROUPS = 1 << 16
_LINE_BYTES = 64  # of a CPU's caches
_FINALIZE_CHUNKS = 4  # vectors of a workgroup: to begin one takes as long as some partial rows


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
        least: The fewest rows of a workgroup, if there are so many: few rows in many workgroups
            leave partial rows that take more time than the rows.
        fetches_ahead: Whether the next block, or row of a forward, is fetched into the cache while
            one is worked on.
    """

    workgroups: int
    block: int
    vector: int
    share: int = 512
    most_workgroups: int = 4096
    span_chunks: int = 128
    least: int = 1
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

    @property
    def finalize_columns(self) -> int:
        """Columns of a workgroup of the last kernel."""
        return _FINALIZE_CHUNKS * self.vector

    def aliases(self, spec: NormSpec) -> dict[str, str]:
        """What it is in the text of a module."""
        cols, vector, block = spec.columns, self.vector, self.block
        return {
            "#columns": f"{cols} : index",
            "#vector": f"{vector} : index",
            "#fetches_ahead": flag(self.fetches_ahead),
            **{
                f"#{element.value}_line": f"{_LINE_BYTES // itemsize(spec, element)} : index"
                for element in (Element.DY, Element.X, Element.RESIDUAL, *gates(spec))
            },
            "#unrolled": UNROLLED,
            "#span": f"{self.span} : index",
            "#block": f"{block} : index",
            "#scales": flag(spec.has_weight),
            "#tile": f"{self.finalize_columns} : index",
            "#wants_dx": flag(spec.wants_dx),
            "#single_column": flag(cols == 1),
            "!acc_pn": f"tensor<?x{cols}x!acc>",
            **bindings(spec),
            "!means": f"memref<{block}x2x!acc>",
            **chunk_types(spec, vector),
            **output_types(
                spec,
                {
                    "!y_chunk": f"vector<{vector}x!y>",
                    "#y_line": f"{_LINE_BYTES // itemsize(spec, Element.Y)} : index",
                },
            ),
            "!lanes": f"vector<{vector}xi1>",
        }

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if why := out_of_bounds(self):
            return why
        workgroups = max(self.workgroups, self.most_workgroups)
        rules = (
            (target.backend != "cpu", "it is for a CPU's threads and caches"),
            (self.vector > spec.columns, f"{self.vector} elements, a row has {spec.columns}"),
            (self.vector > _MOST_VECTOR, f"{self.vector} elements, at most {_MOST_VECTOR}"),
            (self.block > _MOST_BLOCK, f"blocks of {self.block} rows, at most {_MOST_BLOCK}"),
            (workgroups > _MOST_WORKGROUPS, f"{workgroups} workgroups, at most {_MOST_WORKGROUPS}"),
            (self.least > self.share, f"at least {self.least} rows, at most {self.share}"),
            terms_rule(max(self.share, self.span_chunks)),
        )
        return first_broken(rules)
