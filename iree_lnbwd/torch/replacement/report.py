"""What a replacement did, as plain data and as a table."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from iree_lnbwd.errors import counted
from iree_lnbwd.torch.replacement import classes


@dataclass(frozen=True)
class Entry:
    """A norm of the model, or a wrapper of one.

    Attributes:
        names: Of the module in the model; several if it is shared, "" for the model itself.
        class_name: Its class, as it was.
        norm: What it computes, by our functions from now on; None if it was not replaced.
        reason: Why it was not replaced; None if it was.
        by_enable: Whether it calls PyTorch's own norms, whose backwards ``enable`` takes on GPUs.
        is_wrapper: Whether it scales what a norm in it returns, by one kernel from now on. That
            norm has an entry of its own.
    """

    names: tuple[str, ...]
    class_name: str
    norm: str | None
    reason: str | None
    by_enable: bool = False
    is_wrapper: bool = False


@dataclass(frozen=True)
class Report:
    """What `replace_norms` did; its text is a table.

    Attributes:
        entries: In the order of the model's modules.
    """

    entries: tuple[Entry, ...]
    _modules: tuple[weakref.ref[nn.Module], ...] = field(repr=False, compare=False)

    @property
    def replaced(self) -> tuple[Entry, ...]:
        """What was replaced."""
        return tuple(entry for entry in self.entries if entry.norm is not None)

    @property
    def kept(self) -> tuple[Entry, ...]:
        """What was not replaced."""
        return tuple(entry for entry in self.entries if entry.norm is None)

    def undo(self) -> None:
        """Gives the modules that were replaced their own classes back.

        Raises:
            RuntimeError: As ``classes.restore``; all modules before that one are restored.
        """
        for reference in self._modules:
            if (module := reference()) is not None:
                classes.restore(module)

    def __str__(self) -> str:
        """How many; one line for all modules of a class that fared alike; how to undo."""
        groups: dict[tuple[str, str | None, str | None], list[str]] = {}
        for entry in self.entries:
            key = (entry.class_name, entry.norm, entry.reason)
            groups.setdefault(key, []).append(" = ".join(name or "(model)" for name in entry.names))
        rows = [
            (str(len(names)), class_name, norm or f"kept: {reason}", _listed(names))
            for (class_name, norm, reason), names in groups.items()
        ]
        norms = [entry for entry in self.entries if not entry.is_wrapper]
        replaced = sum(entry.norm is not None for entry in norms)
        by_enable = sum(entry.by_enable for entry in norms)
        return "\n".join(
            (
                f"{replaced} of {counted(len(norms), 'norm')} replaced; "
                f"without that, enable() reaches {by_enable} on a GPU",
                *(_table(("norms", "class", "by iree-lnbwd", "modules"), rows) if rows else ()),
                "undo() of this report gives the modules their own classes back",
            )
        )


_SHOWN = 2  # names, of many


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN + 1:
        return ", ".join(names)
    return ", ".join((*names[:_SHOWN], "...", names[-1]))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
