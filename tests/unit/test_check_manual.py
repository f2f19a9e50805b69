"""``scripts/check_manual``: what is wrong in a built manual is found, and named by its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_manual"
INDEX = '<title>I</title><a href="docs/a.html">first</a>'
PAGE = '<title>A</title><h1 id="top">A</h1>{}'
RIGHT = '<a href="#top">up</a> <a href="../index.html">out</a> <a href="https://iree.dev">far</a>'


def check(folder: Path, **pages: str) -> tuple[int, list[str]]:
    """Its status, and what it says of a manual of these pages."""
    (folder / "docs").mkdir()
    for name, text in pages.items():
        place = folder if name == "index" else folder / "docs"
        (place / f"{name}.html").write_text(text)
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False
    )
    assert ended.stderr == ""
    *found, _ = ended.stdout.splitlines()
    return ended.returncode, found


def test_a_right_manual(tmp_path: Path) -> None:
    assert check(tmp_path, index=INDEX, a=PAGE.format(RIGHT)) == (0, [])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (PAGE.format('<a href="#down">'), "docs/a.html: #down: no such anchor"),
        (PAGE.format('<a href="a.html#d%C3%A4">'), "docs/a.html: a.html#d%C3%A4: no such anchor"),
        (PAGE.format('<a href="b.html">'), "docs/a.html: b.html: no such file"),
        (PAGE.format('<img src="b.png">'), "docs/a.html: b.png: no such file"),
        (PAGE.format("<h1>B</h1>"), "docs/a.html: expected one heading of the first rank, got 2"),
        ("<title>A</title>", "docs/a.html: expected one heading of the first rank, got 0"),
        ("<h1>A</h1>", "docs/a.html: no title"),
        (PAGE.replace("<title>A", "<title>I"), "index.html: its title is that of docs/a.html: I"),
    ],
)
def test_a_fault(text: str, fault: str, tmp_path: Path) -> None:
    assert check(tmp_path, index=INDEX, a=text.replace("{}", "")) == (1, [fault])


def test_a_manual_without_its_first_page(tmp_path: Path) -> None:
    assert check(tmp_path, a=PAGE.format("")) == (1, ["index.html: missing"])
