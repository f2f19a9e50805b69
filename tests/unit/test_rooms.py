"""The package's rooms: imports go one way, wherever in a file they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import iree_lnbwd

PACKAGE = Path(iree_lnbwd.__file__).parent
NAME = "iree_lnbwd"
FILES = {
    ".".join((NAME, *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


def rows() -> dict[str, int]:
    """Each room's row in the table of the page on kernels."""
    page = (PACKAGE.parent / "docs" / "kernels.md").read_text()
    table = page[page.index("| room |") : page.index("## One call")]
    return {
        room: number
        for number, line in enumerate(table.splitlines())
        for room in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }


def imported(name: str) -> Iterator[str]:
    """The package's files that a file names, in functions too, but not for types alone."""
    nodes: list[ast.AST] = [ast.parse(FILES[name].read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [each if each in FILES else str(node.module) for each in found]
        else:
            continue
        yield from (each for each in found if each in FILES and each != name)


def room(name: str) -> str:
    return name.split(".")[1]


def test_no_room_imports_one_below_it() -> None:
    table = rows()
    parts = [name for name in FILES if name != NAME]
    assert table.keys() == {room(name) for name in parts}
    up = [
        (name, other)
        for name in parts
        for other in imported(name)
        if other != NAME and table[room(other)] > table[room(name)]
    ]
    assert not up


def test_no_file_imports_itself_through_others() -> None:
    """A folder's own file names what it has, and is not read by those beside it."""
    left = {name: {*imported(name)} for name in FILES if FILES[name].name != "__init__.py"}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left
