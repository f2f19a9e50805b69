"""The scripts that people run: each of them, for a short while."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*words: object, launcher: tuple[str, ...] = ()) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        # One thread each, so that processes do not wait for each other's.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_distributed_gradients_equal_those_of_one_process(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    said = run(
        SCRIPTS / "verify_distributed",
        f"--device={device}",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    )
    for way in ("by_ddp", "by_fsdp", "by_checkpointed_fsdp"):
        assert said.count(f": {way}: 29 gradients equal to one process's, to the bit") == 2


def test_training(tmp_path: Path, device: str) -> None:
    path = tmp_path / "out.csv"
    run(SCRIPTS / "train", "run", f"--csv={path}", "--steps=3", f"--device={device}")
    with path.open(newline="") as file:
        assert file.readline().startswith("# 4 layers of 192, 16 x 96 tokens, f32, seed 0; ")
        rows = list(csv.DictReader(file))
    losses = {
        name: [float(row["loss"]) for row in rows if row["contender"] == name]
        for name in ("PyTorch", "iree-lnbwd")
    }
    theirs, ours = losses.values()
    assert len(ours) == len(theirs) == 3
    assert ours[0] == theirs[0]  # the forward is PyTorch's
    assert ours[2] < ours[0]


def test_soak(device: str) -> None:
    said = run(SCRIPTS / "soak", f"--device={device}", "--calls=2000", "--rounds=4")
    assert said.splitlines()[-1] == "passed"


def test_benchmark_of_autograd(tmp_path: Path, device: str) -> None:
    path = tmp_path / "out.csv"
    few = ("--shapes", "8x32", "--calls=2", "--rounds=1")
    run(SCRIPTS / "benchmark_autograd", f"--csv={path}", f"--device={device}", *few)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], row["dtype"]) for row in rows] == [
        ("PyTorch", "bf16"),
        ("iree-lnbwd", "bf16"),
        ("PyTorch", "f32"),
        ("iree-lnbwd", "f32"),
    ]
    assert all(0 < float(row["host_us"]) <= float(row["total_us"]) for row in rows)


@pytest.mark.parametrize("clock", ["perf_counter", "thread_time"])
def test_benchmark_of_the_cpu(tmp_path: Path, clock: str) -> None:
    path = tmp_path / "out.csv"
    few = ("--shapes", "8x32", "--dtypes", "bf16", "--seconds=0.001")
    words = ("--processor-time",) if clock == "thread_time" else ()
    run(SCRIPTS / "benchmark_cpu", f"--csv={path}", *few, *words)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 4  # op, mode, residual, provider
    assert len({tuple(row.values())[:8] for row in rows}) == 2 * 2 * 2 * 4
    assert {row["clock"] for row in rows} == {clock}
    assert all(0 < float(row["least_us"]) <= float(row["y_value_50"]) for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tuning_without_a_gpu_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "tune"), "run", str(tmp_path), "--driver=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "tune: error: device: expected an NVIDIA GPU, got none that PyTorch finds\n"
    )
