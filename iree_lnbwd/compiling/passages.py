"""Passages of ``ir/`` that only modules with a gate have.

A passage stands between ``// With a gate:`` and ``// End of the gate.``, each on a line of its own.
Without a gate it is left out. With one its two marks go, and what it defines as ``%x_gated`` takes
the place of ``%x`` below it, to the end of the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PASSAGE = re.compile(
    r"^( *)// With a gate:\n(.*?)^ *// End of the gate\.\n", re.MULTILINE | re.DOTALL
)


def chosen(text: str, *, has_gate: bool) -> str:
    """A file with its passages, or without them."""
    if not has_gate:
        return _PASSAGE.sub("", text)
    while passage := _PASSAGE.search(text):
        before, inside, below = text[: passage.start()], passage[2], text[passage.end() :]
        replaced = set(_defined(inside, passage[1]))
        text = before + inside + (_renamed(below, passage[1], replaced) if replaced else below)
    return text


def _defined(passage: str, indent: str) -> Iterator[str]:
    """What a passage defines in place of something, outside of its own blocks."""
    for line in passage.splitlines():
        if line.startswith(indent + "%"):
            yield from re.findall(r"%(\w+)_gated\b", line.partition(" = ")[0])


def _renamed(text: str, indent: str, names: set[str]) -> str:
    """The rest of the block with other names."""
    lines = text.splitlines(keepends=True)
    end = next(
        (n for n, line in enumerate(lines) if line.strip() and not line.startswith(indent)),
        len(lines),
    )
    used = re.compile(rf"%({'|'.join(map(re.escape, sorted(names)))})\b")
    return used.sub(r"%\1_gated", "".join(lines[:end])) + "".join(lines[end:])
