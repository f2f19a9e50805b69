"""``iree-lnbwd benchmark``: what it prints, with PyTorch and without. No time is judged."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from emulated_driver import EmulatedDriver

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, cli
from iree_lnbwd.benchmark import alone, machine, runs
from iree_lnbwd.benchmark.cells import Cell
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri, Gpu
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.runtime import gpu_driver
from iree_lnbwd.stores import tuned_choice
from iree_lnbwd.tuning.ranking import Times

COMMAND = Path(sys.executable).parent / "iree-lnbwd"
TIME = r"\*{0,2}\d+\.\d\*{0,2}"
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, where no C++ can be compiled."""
    return subprocess.run(
        [COMMAND, "benchmark", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"CXX": "no-compiler"} | environment,
    )


def without_torch(folder: Path) -> dict[str, str]:
    """An environment in which PyTorch cannot be imported."""
    (folder / "torch.py").write_text('raise ImportError("not in this test")\n')
    return {"PYTHONPATH": str(folder)}


def table(said: str) -> list[list[str]]:
    """The cells of its lines, the titles first."""
    lines = [line for line in said.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def facts(said: str) -> dict[str, str]:
    """What it says below the table."""
    lines = [line[2:] for line in said.splitlines() if line.startswith("- ")]
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


@pytest.mark.drawn
def test_ours_alone_where_pytorch_cannot_be_imported(tmp_path: Path) -> None:
    words = ("--normalized-shape=40,4x10", "--rows=3", "--dtype=bf16", "--residual")
    ended = run(*words, **without_torch(tmp_path))
    assert ended.returncode == 0, ended.stderr
    titles, *rows = table(ended.stdout)
    assert titles == ["µs", "M x N", "dtype", "iree-lnbwd", "GB/s"]
    assert [row[:3] for row in rows] == [
        [f"`{op} + residual`", f"3 x {shape}", "bf16"] for shape in ("40", "4x10") for op in OPS
    ]
    assert all(re.fullmatch(TIME, row[3]) for row in rows)
    said = facts(ended.stdout)
    assert said["PyTorch"] == ("it cannot be imported (not in this test): ours alone was timed")
    assert said["device"].startswith(machine.cpu_name())
    assert lnbwd.__version__ in said["versions"]
    schedules = [name for name in said if name.startswith("schedule of ")]
    assert len(schedules) == len(OPS) * 2
    assert {said[name] for name in schedules} == {"rules"}
    assert "8 of 8: " in ended.stderr
    assert "ours alone is timed" in ended.stderr


@NEEDS_TORCH
def test_what_fails_is_left_out_and_the_report_says_so() -> None:
    """torch.compile needs a compiler on the CPU."""
    ended = run("--normalized-shape=24", "--rows=2", "--op=rms_norm,layer_norm_backward")
    assert ended.returncode == 0, ended.stderr
    titles, *rows = table(ended.stdout)
    assert titles[3:] == ["iree-lnbwd", "GB/s", "PyTorch eager", "torch.compile"]
    assert len(rows) == 2
    for row in rows:
        assert re.fullmatch(TIME, row[3])
        assert re.fullmatch(TIME, row[5])
        assert row[6] == ""
        assert sum(cell.startswith("**") for cell in row) == 1
    said = facts(ended.stdout)
    assert said["torch.compile was left out"]
    assert "our operators in C++: " in said["PyTorch"]
    assert "torch.compile is left out: " in ended.stderr


def test_a_module_of_a_bundle_is_said_to_be_one(tmp_path: Path) -> None:
    spec = NormSpec((24,), op="layer_norm", eps=1e-5)
    lnbwd.bundle([spec], ["host"], tmp_path / "own.lnb")
    bundle = {"IREE_LNBWD_BUNDLE": str(tmp_path / "own.lnb")}
    ended = run(
        "--normalized-shape=24", "--rows=2", "--op=layer_norm", **bundle, **without_torch(tmp_path)
    )
    assert ended.returncode == 0, ended.stderr
    assert facts(ended.stdout)[f"schedule of {spec.name}, host"] == (
        f"that of the bundle {tmp_path / 'own.lnb'}"
    )


class Clock:
    """As `Stopwatch`, which reads far more memory than an emulator should; it calls and counts."""

    closed = 0

    def __init__(self, driver: EmulatedDriver, target: Target, gpu: Gpu) -> None:
        assert target.name == "sm_90"

    def times(
        self, calls: Iterable[tuple[int, Callable[[], None]]], rounds: int
    ) -> Mapping[int, Times]:
        """As `Stopwatch.times`."""
        for _, call in calls:
            call()
        return {0: Times((20.0,) * rounds)}

    def close(self) -> None:
        """As `Stopwatch.close`."""
        Clock.closed += 1


def test_a_gpu_that_pytorch_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of ours run on it, here in the emulator, and its memory is given back."""
    driver, gpu = EmulatedDriver("cuda"), Gpu("NVIDIA H200", 132, 50 << 20)
    monkeypatch.setattr(gpu_driver, "Driver", lambda uri: driver)
    monkeypatch.setattr(alone, "Stopwatch", Clock)
    for room in (alone, modules):
        monkeypatch.setattr(room, "target_of", lambda uri: find_target("sm_90"))
    for room in (alone, machine, tuned_choice):
        monkeypatch.setattr(room, "gpu_of", lambda uri: gpu)
    cell = Cell("rms_norm_backward", False, 5, (64,), "bf16")
    told: list[str] = []
    said = "\n".join(runs.lines([cell], DeviceUri.parse("cuda"), runs.OTHERS, told.append))
    (_, row) = table(said)
    assert row == ["`rms_norm_backward`", "5 x 64", "bf16", "20.0", "0"]
    assert driver.launches
    assert all(memory.buffer.released for memory in driver.reserved)
    assert Clock.closed == 1
    assert facts(said)["device"] == "NVIDIA H200, 132 multiprocessors, 50 MiB of L2 cache"
    assert facts(said)["PyTorch"].endswith(": ours alone was timed")
    assert facts(said)[f"schedule of {cell.spec.name}, sm_90"].startswith("measured on h200")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar", "NVIDIA 550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
            "NVIDIA 580.159.04",
        ),
        (None, "NVIDIA of unknown version"),
    ],
)
def test_the_driver_is_named(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVIDIA's two kernel modules write it, and where a container hides it."""
    place = tmp_path / "version"
    if text is not None:
        place.write_text(f"{text}\nGCC version:  gcc version 12.3.0\n")
    name, _, pattern = machine._DRIVERS["cuda"]
    monkeypatch.setattr(machine, "_DRIVERS", {"cuda": (name, place, pattern)})
    monkeypatch.setattr(machine, "gpu_of", lambda uri: Gpu("NVIDIA H200", 132, 50 << 20))
    assert machine.device_facts(DeviceUri.parse("cuda"))["driver"] == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--normalized-shape=8", "--rows=0"), "rows: expected ints from 1 to "),
        (("--normalized-shape=8", "--rows=4,-1"), "rows: expected ints from 1 to "),
        (("--normalized-shape=0",), "normalized_shape: "),
        (("--normalized-shape=8", "--device=cuda://97"), "device: cuda://97 is absent"),
        (("--normalized-shape=8", "--device=tpu"), "device: expected one of "),
    ],
)
def test_bad_input_is_refused_before_anything_is_timed(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"iree-lnbwd: error: {said}")
