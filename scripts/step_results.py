"""What `scripts/steps` measured: its CSV, and the tables and plots that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import commented_csv
from kernel_classes import ATTENTION, CLASSES, MATMUL, OPTIMIZER

LOSS_FIELDS = ("model", "precision", "contender", "step", "loss")


@dataclass(frozen=True)
class Row:
    """What a contender's steps came to; what only a GPU has is None on a CPU.

    Attributes:
        model: Its name.
        precision: Its name.
        contender: Its name.
        mode: Of torch.compile; empty for its default.
        step_ms: Of a step, the median.
        least_ms: Of a step.
        host_ms: Until a step's calls have returned, the median.
        matmul_ms: Of the GPU, in kernels of matrix products and convolutions.
        attention_ms: In those of attention.
        norm_ms: In those of norms, and what inductor fused with norms.
        optimizer_ms: In those of the optimizer.
        other_ms: In all other kernels.
        kernels: Of a step.
        ours: How many of them are this package's.
        peak_mib: The most memory that PyTorch has allocated for the contender.
        loss: Of the last timed step.
    """

    model: str
    precision: str
    contender: str
    mode: str
    step_ms: float
    least_ms: float
    host_ms: float | None
    matmul_ms: float | None
    attention_ms: float | None
    norm_ms: float | None
    optimizer_ms: float | None
    other_ms: float | None
    kernels: float | None
    ours: float | None
    peak_mib: float | None
    loss: float

    @property
    def gpu_ms(self) -> float | None:
        """Of all kernels."""
        return self._of(CLASSES)

    @property
    def rest_ms(self) -> float | None:
        """Of the kernels outside of matrix products, attention and the optimizer."""
        return self._of([c for c in CLASSES if c not in (MATMUL, ATTENTION, OPTIMIZER)])

    def _of(self, classes: Sequence[str]) -> float | None:
        found: list[float | None] = [getattr(self, f"{name}_ms") for name in classes]
        return None if None in found else sum(each for each in found if each is not None)


FIELDS = tuple(field.name for field in fields(Row))
_TEXTS = FIELDS[:4]


def cells(row: Row) -> list[str]:
    """The row in the CSV."""
    return [_cell(getattr(row, name)) for name in FIELDS]


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def read(path: Path) -> tuple[str, list[Row]]:
    """What was run, and the rows of a CSV of steps.

    Raises:
        ValueError: It is not one.
    """
    what, found = commented_csv.read(path)
    if tuple(found.fieldnames or ()) != FIELDS:
        raise ValueError(f"{path}: expected the fields {', '.join(FIELDS)}")

    def values(row: Mapping[str, str]) -> Iterator[Any]:
        for name in FIELDS:
            yield row[name] if name in _TEXTS else float(row[name]) if row[name] else None

    return what, [Row(*values(row)) for row in found]


Losses = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]  # by cell and contender


def read_losses(path: Path) -> tuple[str, Losses]:
    """What was run, and the curves of a CSV of losses.

    Raises:
        ValueError: It is not one.
    """
    what, found = commented_csv.read(path)
    if tuple(found.fieldnames or ()) != LOSS_FIELDS:
        raise ValueError(f"{path}: expected the fields {', '.join(LOSS_FIELDS)}")
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in found:
        of_cell = curves.setdefault((row["model"], row["precision"]), {})
        of_cell.setdefault(row["contender"], []).append(float(row["loss"]))
    return what, curves


# --- tables ----------------------------------------------------------------------------------

Figure = Callable[[Row], "float | None"]
FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "step, ms": lambda row: row.step_ms,
        "rest, ms": lambda row: row.rest_ms,
        "host, ms": lambda row: row.host_ms,
        "peak, MiB": lambda row: row.peak_mib,
    }
)
HEADING = (
    f"{'':34} {'step ms':>8} {'least':>8} {'host':>8} {'GPU':>8} {'matmul':>8} {'attn':>8} "
    f"{'norm':>8} {'other':>8} {'rest':>8} {'kernels':>8} {'ours':>5} {'peak MiB':>9} {'loss':>9}"
)


def line(row: Row) -> str:
    """The row in a table for people."""
    times = (row.step_ms, row.least_ms, row.host_ms, row.gpu_ms, row.matmul_ms, row.attention_ms)
    rest = (row.norm_ms, row.other_ms, row.rest_ms)
    return (
        f"{f'{row.model} {row.precision} {row.contender}':34} "
        + " ".join("-".rjust(8) if t is None else f"{t:8.2f}" for t in (*times, *rest))
        + (
            f" {'-':>8} {'-':>5} {'-':>9}"
            if row.kernels is None or row.ours is None or row.peak_mib is None
            else f" {row.kernels:8.0f} {row.ours:5.0f} {row.peak_mib:9.0f}"
        )
        + f" {row.loss:9.4f}"
    )


def markdown(rows: Sequence[Row], figure: str, names_of: Mapping[str, str]) -> str:
    """A table of one of `FIGURES`, the least of each model in bold.

    Args:
        rows: What it is of.
        figure: Which one.
        names_of: What models are called there.
    """
    of_row = FIGURES[figure]
    names = list(dict.fromkeys(row.contender for row in rows))
    text = [f"| {figure} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    by_cell: dict[tuple[str, str], dict[str, float | None]] = {}
    for row in rows:
        by_cell.setdefault((row.model, row.precision), {})[row.contender] = of_row(row)
    for (model, precision), found in by_cell.items():
        said = {name: _rounded(value) for name, value in found.items() if value is not None}
        least = min(said.values(), key=float, default="")
        marked = (f"**{s}**" if (s := said.get(name, "")) and s == least else s for name in names)
        text.append(f"| {names_of.get(model, model)} {precision} | {' | '.join(marked)} |")
    return "\n".join(text)


def _rounded(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


# --- plots -----------------------------------------------------------------------------------


def plot(path: Path, image: Path) -> None:
    """Bars of a CSV of steps: the steps, and the rest where there is one."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    what, rows = read(path)
    precisions = list(dict.fromkeys(row.precision for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    figures = [
        name
        for name in ("step, ms", "rest, ms")
        if any(FIGURES[name](row) is not None for row in rows)
    ]
    figure, axes = plt.subplots(
        *(len(figures), len(precisions)),
        figsize=(8 * len(precisions), 4 * len(figures)),
        layout="constrained",
        squeeze=False,
    )
    width = 0.85 / len(names)
    for across, precision in enumerate(precisions):
        models = list(dict.fromkeys(row.model for row in rows if row.precision == precision))
        for down, what_of in enumerate(figures):
            axis = axes[down][across]
            for number, name in enumerate(names):
                bars = [
                    (models.index(row.model) + (number + 0.5) * width - 0.425, value)
                    for row in rows
                    if (row.precision, row.contender) == (precision, name)
                    and (value := FIGURES[what_of](row)) is not None
                ]
                if bars:
                    drawn = axis.bar(*zip(*bars, strict=True), width=width, label=name)
                    axis.bar_label(drawn, fmt="%.1f", fontsize=6, rotation=90, padding=2)
            axis.set(title=f"{precision}: {what_of}", xticks=range(len(models)))
            axis.set_xticklabels(models)
            axis.margins(y=0.12)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(what, fontsize=9, wrap=True)
    figure.savefig(image, dpi=110)
    print(image)


def plot_losses(path: Path, image: Path) -> None:
    """The curves of a CSV of losses, a panel for each model and precision."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    what, losses = read_losses(path)
    models = list(dict.fromkeys(model for model, _ in losses))
    precisions = list(dict.fromkeys(precision for _, precision in losses))
    figure, axes = plt.subplots(
        *(len(precisions), len(models)),
        figsize=(4 * len(models), 3.5 * len(precisions)),
        layout="constrained",
        squeeze=False,
    )
    for (model, precision), curves in losses.items():
        axis = axes[precisions.index(precision)][models.index(model)]
        for number, (name, curve) in enumerate(curves.items()):
            width = 1 + 0.8 * (len(curves) - 1 - number)  # what lies on top is thinner
            axis.plot(range(1, len(curve) + 1), curve, label=name, linewidth=width)
        axis.set(title=f"{model}, {precision}", xlabel="step")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("cross entropy, nats")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(what, fontsize=9, wrap=True)
    figure.savefig(image, dpi=110)
    print(image)
