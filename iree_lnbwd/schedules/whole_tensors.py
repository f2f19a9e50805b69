"""The schedule that is none: IREE takes the algorithm as it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WholeTensors:
    """The algorithm as it is: IREE tiles and fuses it by itself. Right for every spec.

    Attributes:
        reason: Why nothing better was chosen; empty where this is the best there is.
    """

    reason: str = ""

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        why = f" ({self.reason})" if self.reason else ""
        return f"whole tensors: x and dy are read for the row sums, for dx and for the columns{why}"
