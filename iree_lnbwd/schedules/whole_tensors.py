"""The absence of a schedule: IREE compiles the algorithm unchanged."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.ops.spec import NormSpec


@dataclass(frozen=True)
class WholeTensors:
    """IREE tiles and fuses the unchanged algorithm by itself. Legal for every spec.

    Attributes:
        reason: Why nothing better was chosen; empty if there is nothing better.
    """

    reason: str = ""

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        why = f" ({self.reason})" if self.reason else ""
        return f"whole tensors: x and dy are read for the row sums, for dx and for the columns{why}"
