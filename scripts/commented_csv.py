"""CSV files that say in comments, above their fields' names, what was run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_COMMENT = "# "


def begin(file: IO[str], comments: Sequence[str], fields: Sequence[str]) -> Any:
    """A writer of rows (`csv.writer`), behind the comments and the fields' names."""
    for comment in comments:
        print(f"{_COMMENT}{comment}", file=file)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(fields)
    return writer


def read(path: Path) -> tuple[str, csv.DictReader[str]]:
    """The first comment, and the rows by the fields' names."""
    with path.open(newline="") as file:
        lines = file.read().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith(_COMMENT))
    return lines[0].removeprefix(_COMMENT), rows
