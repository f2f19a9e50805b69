"""How mean and rstd are recomputed on a GPU, before the kernels of any schedule."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.schedules.elements import widest_vector
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

_THREADS = 256  # of a workgroup: a rule of thumb
_MOST_CHUNKS = 4  # that a thread reads at once: a rule of thumb
_MOST_WARPS = 16  # in a group: a rule of thumb


@dataclass(frozen=True)
class RowStatistics:
    """The kernel before the others, which recomputes mean and rstd (``ir/row_statistics.mlir``).

    Attributes:
        rows: Rows of a workgroup; each has a group of threads.
        warps: Subgroups in a group.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread reads at once.
    """

    rows: int
    warps: int
    vector: int
    chunks: int

    def threads(self, target: Target) -> int:
        """Of a group."""
        return self.warps * target.subgroup_size


def row_statistics(spec: NormSpec, target: Target) -> RowStatistics:
    """Groups so large that each thread has a few chunks, and enough groups to fill a workgroup."""
    vector = widest_vector(spec.columns, (spec.dtype,))
    of_a_chunk = vector * target.subgroup_size
    chunks = -(-spec.columns // of_a_chunk)
    warps = min(_MOST_WARPS, 1 << (-(-chunks // _MOST_CHUNKS) - 1).bit_length())
    return RowStatistics(
        rows=max(1, _THREADS // (warps * target.subgroup_size)),
        warps=warps,
        vector=vector,
        chunks=min(_MOST_CHUNKS, -(-chunks // warps)),
    )
