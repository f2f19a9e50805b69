"""The scripts that time norms in JAX, on a model that is small enough for a test."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_jax"
SMALL = ("--layers=2", "--width=64", "--batch=2", "--length=32", "--steps=2")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_steps_of_all_contenders(tmp_path: Path) -> None:
    """They have the same losses after five steps, and each has a line."""
    path = tmp_path / "out.csv"
    done = run(*SMALL, "--norm=rms", "--update", f"--csv={path}")
    assert done.returncode == 0, done.stderr
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["XLA", "iree-lnbwd", "iree-lnbwd fork", "iree-lnbwd add"]
    assert [row["who"] for row in rows] == names
    sizes = ("norm", "layers", "width", "batch", "length")
    assert {tuple(row[name] for name in sizes) for row in rows} == {("rms", "2", "64", "2", "32")}
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 4, abs=2**-7)  # of sums in bf16
    assert all(0 < float(row["least_ms"]) <= float(row["median_ms"]) for row in rows)
    said = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()[2:]]
    assert [line[0].split(maxsplit=1)[1] for line in said] == names


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--width=65", "--width: expected a multiple of 64, got 65"),
        ("--norm=layer,batch", "--norm: expected some of layer, rms, got batch"),
        ("--contenders=Flax", "--contenders: expected some of XLA, iree-lnbwd, .*, got Flax"),
    ],
)
def test_bad_options_are_refused(option: str, error: str) -> None:
    done = run(option)
    assert done.returncode == 2
    assert re.search(f"error: {error}\n$", done.stderr)
