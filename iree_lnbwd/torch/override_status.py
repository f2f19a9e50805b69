"""What became of the calls of PyTorch's operators, as plain data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from iree_lnbwd.torch.inductor.switch import InductorStatus

_TITLES = ("operator", "device", "kernel", "calls", "why")
_UNREACHED = (
    "not reached: norms that models compute themselves, as Llama's and T5's do; "
    "replace_norms(model) takes them"
)
_EVERY_SIZE = "takes calls of every size"
_OURS, _PYTORCHS = "iree-lnbwd", "PyTorch"


class Operator(NamedTuple):
    """An operator of PyTorch's on one type of device.

    Attributes:
        name: PyTorch's.
        device: PyTorch's name of the type of device.
        kept: Why PyTorch's kernel is kept; None if ours is registered in its place.
    """

    name: str
    device: str
    kept: str | None


class Calls(NamedTuple):
    """Calls with the same outcome.

    Attributes:
        name: The operator.
        device: PyTorch's name of the type of device.
        reason: Why they went to PyTorch's kernel; None of those that ours computed.
        number: How many there were.
    """

    name: str
    device: str
    reason: str | None
    number: int


@dataclass(frozen=True)
class Status:
    """Which operators are ours, and what ran. As text, it is a table.

    Attributes:
        enabled: Whether `enable` is in force.
        operators: All that `enable` knows.
        calls: Since `enable`, those that there were.
        cpp: What became of the operators in C++, which `enable` needs; of a build, for how long.
        inductor: What becomes of norms under ``torch.compile``.
    """

    enabled: bool
    operators: tuple[Operator, ...]
    calls: tuple[Calls, ...]
    cpp: str
    inductor: InductorStatus

    @property
    def ours(self) -> int:
        """The number of calls that our kernels computed."""
        return sum(each.number for each in self.calls if each.reason is None)

    @property
    def pytorchs(self) -> int:
        """The number of calls that went to PyTorch's kernels."""
        return sum(each.number for each in self.calls if each.reason is not None)

    def __str__(self) -> str:
        """A line for each operator, and for each outcome of its calls."""
        rows: list[tuple[str, ...]] = [_TITLES]
        for operator in self.operators:
            kernel = _OURS if operator.kept is None else _PYTORCHS
            found = [each for each in self.calls if each[:2] == operator[:2]]
            if operator.kept is not None or not found:
                rows.append((*operator[:2], kernel, "", operator.kept or _EVERY_SIZE))
            rows += (
                (
                    *each[:2],
                    _OURS if each.reason is None else _PYTORCHS,
                    str(each.number),
                    each.reason or "",
                )
                for each in found
            )
        inductor = f"torch.compile's inductor: {self.inductor}"
        lines = (f"enabled: {self._enabled}", *_aligned(rows), f"C++: {self.cpp}", inductor)
        return "\n".join((*lines, _UNREACHED))

    @property
    def _enabled(self) -> str:
        if not self.enabled:
            return "no"
        has_ours = any(operator.kept is None for operator in self.operators)
        return "yes" if has_ours else "yes, but no kernel is iree-lnbwd's"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
