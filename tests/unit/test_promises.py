"""`docs/promises.md`: each promise has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "promise |" not in line]


def test_there_are_promises() -> None:
    assert len(ROWS) > 50


@pytest.mark.parametrize("row", ROWS)
def test_a_promise_names_a_test_that_is_there(row: str) -> None:
    named = re.fullmatch(r"\| .+ \| `([\w/.]+)::(test_\w+)` \|", row)
    assert named is not None, row
    file, test = named.groups()
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
