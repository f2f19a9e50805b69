"""Passages and lines of ``ir/`` that only some modules have.

A passage stands between ``// With a gate:`` and ``// End of the gate.``, each on a line of its own.
Without a gate it is left out. With one its two marks go, and what it defines as ``%x_gated`` takes
the place of ``%x`` below it, to the end of the block.

A line that begins with ``// with sets:`` loses these words where a weight has sets, and one that
ends in ``// without sets`` is left out; elsewhere it is the other way round. So it is with
``copies`` (of dx), with ``totals`` (its sums over rows), with ``policies`` (rows are copied so that
they leave the L2 cache late), and with ``strides``, where what a line
defines as ``%x_strided`` takes the place of ``%x`` below it, to the end of the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PASSAGE = re.compile(
    r"^( *)// With a gate:\n(.*?)^ *// End of the gate\.\n", re.MULTILINE | re.DOTALL
)
_WITH, _WITHOUT = (
    {
        what: re.compile(form.format(what), re.MULTILINE)
        for what in ("sets", "copies", "totals", "policies", "strides")
    }
    for form in (r"^( *)// with {}: (.*\n)", r"^(.*?) *// without {}\n")
)


def with_lines(what: str, text: str, *, are_there: bool) -> str:
    """A file without the lines that are for modules of the other kind; of all but strides."""
    if not are_there:
        return _without(what, text)
    return _WITHOUT[what].sub("", _WITH[what].sub(r"\1\2", text))


def with_strides(text: str, *, has_strides: bool) -> str:
    """Likewise, of strides."""
    if not has_strides:
        return _without("strides", text)
    text = _WITHOUT["strides"].sub("", text)
    while line := _WITH["strides"].search(text):
        before, own, below = text[: line.start()], "".join(line.groups()), text[line.end() :]
        replaced = set(_defined(own, line[1], "strided"))
        text = before + own + _renamed(below, line[1], replaced, "strided")
    return text


def _without(what: str, text: str) -> str:
    return _WITHOUT[what].sub(r"\1\n", _WITH[what].sub("", text))


def chosen(text: str, *, has_gate: bool) -> str:
    """A file with its passages, or without them."""
    if not has_gate:
        return _PASSAGE.sub("", text)
    while passage := _PASSAGE.search(text):
        before, inside, below = text[: passage.start()], passage[2], text[passage.end() :]
        replaced = set(_defined(inside, passage[1], "gated"))
        text = before + inside + _renamed(below, passage[1], replaced, "gated")
    return text


def _defined(passage: str, indent: str, ending: str) -> Iterator[str]:
    """What a passage defines in place of something, outside of its own blocks."""
    for line in passage.splitlines():
        if line.startswith(indent + "%"):
            yield from re.findall(rf"%(\w+)_{ending}\b", line.partition(" = ")[0])


def _renamed(text: str, indent: str, names: set[str], ending: str) -> str:
    """The rest of the block with other names."""
    if not names:
        return text
    lines = text.splitlines(keepends=True)
    end = next(
        (n for n, line in enumerate(lines) if line.strip() and not line.startswith(indent)),
        len(lines),
    )
    used = re.compile(rf"%({'|'.join(map(re.escape, sorted(names)))})\b")
    return used.sub(rf"%\1_{ending}", "".join(lines[:end])) + "".join(lines[end:])
