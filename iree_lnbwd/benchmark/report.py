"""What is said of times: a table in Markdown, and what they are times of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from iree_lnbwd.benchmark.cells import Cell


def header(columns: Sequence[str]) -> list[str]:
    """The first lines of the table; the first column is ours."""
    ours, *others = columns
    titles = ("µs", "M x N", "dtype", ours, "GB/s", *others)
    return [_row(titles), "|---" * len(titles) + "|"]


def line(cell: Cell, columns: Sequence[str], times: Mapping[str, float]) -> str:
    """A line of the table; the fastest is bold, and a contender that failed has no time."""
    least = min(times.values())

    def shown(column: str) -> str:
        if column not in times:
            return ""
        text = f"{times[column]:.1f}"
        return f"**{text}**" if len(columns) > 1 and times[column] == least else text

    ours, *others = columns
    rate = f"{cell.bytes / times[ours] / 1e3:.0f}"
    return _row((f"`{cell.called}`", cell.size, cell.dtype, shown(ours), rate, *map(shown, others)))


def footer(facts: Mapping[str, str]) -> Iterator[str]:
    """What the times are times of."""
    for name, value in facts.items():
        yield f"- {name}: {value}"


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
