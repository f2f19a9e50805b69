"""The scripts that people run: each of them, for a short while."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from script_support import SCRIPTS, run


@pytest.fixture
def can_enable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether to run what is under `enable`, too, for which the C++ operators have to be there."""
    is_asked_for: bool = request.config.getoption("--cpp-operators")
    if not is_asked_for:
        monkeypatch.setenv("CXX", "no-such-compiler")
    return is_asked_for


distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without distributed"
)


def in_two_processes(script: str, device: str) -> str:
    """On the CPU, too, so that a run of the tests is short."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run(SCRIPTS / script, "run", f"--device={device}", "--processes=2")


@pytest.mark.drawn
@distributed
def test_distributed_gradients_equal_those_of_one_process(device: str, can_enable: bool) -> None:
    said = in_two_processes("verify_distributed", device)
    models = {"gpt": 29, "gpt_of_ours": 27, "llama": 17} | ({"plain_gpt": 29} if can_enable else {})
    for model, count in models.items():
        for way in ("by_ddp", "by_fsdp", "by_checkpointed_fsdp"):
            verdict = f"{count} gradients equal to one process's, to the bit\n"
            assert said.count(f": {model} {way}: {verdict}") == 2


@pytest.mark.drawn
@distributed
def test_tensor_parallel_gradients_equal_those_of_one_process(
    device: str, can_enable: bool
) -> None:
    said = in_two_processes("verify_tensor_parallel", device)
    ways = [
        *("tensor_parallel", "sequence_parallel", "replaced_and_sharded", "sharded_and_replaced"),
        *("enabled_tensor_parallel", "enabled_sequence_parallel", "enabled_and_sharded"),
    ]
    for way in ways if can_enable else ways[:4]:
        assert said.count(f": {way}: 31 tensors equal to one process's\n") == 2


@pytest.mark.drawn
@distributed
def test_norms_of_dtensors_equal_those_of_one_process(device: str, can_enable: bool) -> None:
    """PyTorch's own cases of them."""
    said = in_two_processes("verify_dtensor", device)
    # PyTorch refuses 12 of its RMS norms on the CPU.
    numbers = {"replaced": (48, 22)} | (
        {"kept": (36 if device == "cpu" else 48, 22)} if can_enable else {}
    )
    for prepared, (of_one, frozen) in numbers.items():
        for cases, number in (("one_norm", of_one), ("frozen_parts", frozen)):
            line = f": {cases}, {prepared}: {number} cases equal to one process's\n"
            assert said.count(line) == 2
    assert said.count(": weights_of_sets: 20 cases equal to one process's\n") == 2


def losses_of(path: Path) -> dict[str, list[float]]:
    """Those of a training run, by contender."""
    losses: dict[str, list[float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            losses.setdefault(row["contender"], []).append(float(row["loss"]))
    return losses


@pytest.mark.drawn
def test_training(tmp_path: Path, device: str, can_enable: bool) -> None:
    path = tmp_path / "out.csv"
    names = ("PyTorch", "iree-lnbwd", "iree-lnbwd enable()")[: 3 if can_enable else 2]
    who = f"--contenders={','.join(names)}"
    run(SCRIPTS / "train", "run", f"--csv={path}", "--steps=3", f"--device={device}", who)
    with path.open(newline="") as file:
        assert file.readline().startswith("# GPT: 4 layers of 192, 16 x 96 tokens, f32, seed 0; ")
    losses = losses_of(path)
    assert tuple(losses) == names
    for of_one in losses.values():
        assert len(of_one) == 3
        assert of_one[0] == losses["PyTorch"][0]  # the forward is PyTorch's
        assert of_one[2] < of_one[0]


@pytest.mark.drawn
def test_training_of_a_llama_with_modules_compiled_before(tmp_path: Path) -> None:
    names = ("PyTorch", "iree-lnbwd", "iree-lnbwd fused", "iree-lnbwd memory-efficient")
    what = ("--preset=small-llama", f"--contenders={','.join(names)}")
    run(SCRIPTS / "train", "modules", *what, tmp_path / "modules")
    compiler = tmp_path / "tools" / "iree-compile"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    path = tmp_path / "out.csv"
    said = run(
        SCRIPTS / "train",
        *("run", *what, f"--csv={path}", "--steps=3"),
        IREE_LNBWD_CACHE=tmp_path / "modules",
        IREE_TOOL_PATH=compiler.parent,  # a compiler that fails: nothing more is compiled
    )
    losses = losses_of(path)
    assert tuple(losses) == names
    for name, of_one in losses.items():
        # f32 differs by some units in the last place, of numbers from 4 to 8.
        assert of_one == pytest.approx(losses["PyTorch"], abs=16 * 2**-21, rel=0)
        assert of_one[2] < of_one[0] - 0.01
        assert f"\n{name} " in said.split("largest loss difference")[1]


@pytest.mark.parametrize("has_peaks", [False, True])
def test_plot_of_training(has_peaks: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, image = tmp_path / "out.csv", tmp_path / "out.png"
    lines = ["# what was run", "# what peak_mib is", "contender,step,loss,milliseconds,peak_mib"]
    for step, loss in enumerate((5.5, 5.25), start=1):
        lines.append(f"PyTorch,{step},{loss},10.0,{2000.0 if has_peaks else ''}")
        lines.append(f"iree-lnbwd,{step},{loss - 0.125},{8 + step},{1500.0 if has_peaks else ''}")
    path.write_text("\n".join(lines) + "\n")
    said = run(SCRIPTS / "train", "plot", f"--csv={path}", f"--plot={image}").splitlines()
    assert image.read_bytes().startswith(b"\x89PNG")
    peaks = ("2000", "1500") if has_peaks else ("-", "-")
    assert [line.split() for line in said[-2:]] == [
        ["PyTorch", "10.00", "1.000", peaks[0], "5.2500", "0.0e+00"],
        ["iree-lnbwd", "9.50", "0.950", peaks[1], "5.1250", "1.2e-01"],
    ]


def test_training_without_its_baseline_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "train"), "modules", "--contenders=Liger", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: contenders: expected PyTorch and others of PyTorch, torch.compile, iree-lnbwd, "
        "iree-lnbwd compiled, iree-lnbwd enable(), got Liger\n"
    )


@pytest.mark.drawn
def test_soak(device: str) -> None:
    said = run(SCRIPTS / "soak", f"--device={device}", "--calls=150", "--rounds=4")
    assert said.splitlines()[-1] == "passed"


def test_soak_of_enable(device: str, can_enable: bool) -> None:
    if not can_enable and device == "cpu":
        pytest.skip("for --cpp-operators")
    said = run(SCRIPTS / "soak", "--enable", f"--device={device}", "--calls=2000", "--rounds=20")
    assert said.splitlines()[-1] == "passed"


@pytest.mark.drawn
def test_benchmark_of_autograd(tmp_path: Path, device: str) -> None:
    path = tmp_path / "out.csv"
    few = ("--shapes", "8x32", "--calls=2", "--rounds=1")
    run(SCRIPTS / "benchmark_autograd", f"--csv={path}", f"--device={device}", *few)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], row["dtype"]) for row in rows] == [
        (contender, dtype)
        for dtype in ("bf16", "f32")
        for contender in ("PyTorch", "iree-lnbwd", "enable()")
    ]
    assert all(0 < float(row["host_us"]) <= float(row["total_us"]) for row in rows)


@pytest.mark.drawn
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
