"""Tables of CSV in parts: a line of JSON, behind a "# ", says what the rows below it share.

The names of the columns are the first line that is no such comment. Cells are plain: they have no
commas and no quotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from iree_lnbwd.disk.json_values import parsed
from iree_lnbwd.errors import one_line, shown

_FACTS = "# "
_BOOLS = {"0": False, "1": True}


class Row(NamedTuple):
    """A row, and where it is from, for messages: the file and the line."""

    place: str
    cells: Mapping[str, str]


class Part(NamedTuple):
    """Rows that share facts, which are JSON; the place is that of the facts."""

    place: str
    facts: Any
    rows: list[Row]


def to_text(
    columns: Sequence[str], parts: Iterable[tuple[Mapping[str, Any], Iterable[Mapping[str, Any]]]]
) -> str:
    """A table of parts: the facts of each, and its rows. Bools are written as 0 and 1."""
    head = ",".join(columns)
    lines = []
    for facts, rows in parts:
        lines.append(_FACTS + json.dumps(facts))
        if len(lines) == 1:
            lines.append(head)
        lines += (",".join(_text_of(row[name]) for name in columns) for row in rows)
    return "\n".join(lines or [head]) + "\n"


def from_text(text: str, source: str, columns: Sequence[str]) -> list[Part]:
    """The parts of a table.

    Args:
        text: The file's content.
        source: The file's name, for messages.
        columns: The names of the columns that it must have, in order.

    Raises:
        ValueError: It is no such table; the message names the file and the line.
    """
    head, found = ",".join(columns), list[Part]()
    has_head = False
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{source}: line {number}"
        if line.startswith(_FACTS):
            found.append(Part(place, _facts_of(line, place), []))
        elif not has_head:
            if line != head:
                raise ValueError(f"{place}: expected {head}, got {shown(line)}")
            has_head = True
        else:
            cells = line.split(",")
            if len(cells) != len(columns):
                raise ValueError(f"{place}: expected {len(columns)} cells, got {len(cells)}")
            if not found:
                raise ValueError(f"{place}: expected facts above the rows, got {shown(line)}")
            found[-1].rows.append(Row(place, dict(zip(columns, cells, strict=True))))
    if not has_head:
        raise ValueError(f"{source}: expected {head}, got no such line")
    return found


def value_of(kind: type, cell: str) -> Any:
    """What a cell says as a value of a kind; the cell itself where it says no such value."""
    if kind is bool:
        return _BOOLS.get(cell, cell)
    try:
        return kind(cell)
    except ValueError:
        return cell


def _facts_of(line: str, place: str) -> Any:
    try:
        return parsed(line.removeprefix(_FACTS))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: expected JSON: {one_line(error)}") from error


def _text_of(value: Any) -> str:
    return str(int(value) if isinstance(value, bool) else value)
