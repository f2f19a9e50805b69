"""Composable Kernel's driver line, run as a person runs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "layernorm2d_bwd"


def layernorm2d_bwd(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )


def lines_by_length(output: str) -> dict[str, list[str]]:
    """The columns of each line that starts with a length."""
    words = [line.split() for line in output.splitlines()]
    return {w[0]: w[1:] for w in words if w and re.fullmatch(r"\d+x\d+", w[0])}


@pytest.mark.drawn
def test_driver_line_verifies_and_times_every_length_of_composable_kernel() -> None:
    done = layernorm2d_bwd("1", "2", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "whole call from Python" in done.stdout
    lines = lines_by_length(done.stdout)
    assert list(lines) == ["4x256", "8x511", "9x1032", "4x2048", "1x8192", "4000x2000"]
    for length, (ms, gbs, error, of_criterion, of_tolerance, verdict) in lines.items():
        rows, columns = map(int, length.split("x"))
        counted = 4 * (3 * rows * columns + columns + 2 * rows)  # dy, x, dx; gamma; mean, inv_std
        assert float(ms) > 0
        # Both are printed rounded, to a hundredth and to a thousandth.
        speed = counted / float(ms) / 1e6
        rounded = 0.0051 + speed * 0.00051 / float(ms)
        assert float(gbs) == pytest.approx(speed, rel=0, abs=rounded)
        assert 0 < float(error) < 0.1
        assert float(of_criterion) <= 1
        assert 0 < float(of_tolerance) <= 1
        assert verdict == "ok"


def test_runs_by_path_in_an_activated_environment() -> None:
    activated = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [str(SCRIPT), "1", "0", "0", "--length=2x3"],
        env={**os.environ, "PATH": activated},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("init", "dtype"),
    [("0", "f32"), ("1", "f32"), ("2", "f32"), ("0", "f64"), ("1", "bf16"), ("2", "f16")],
)
def test_every_init_method_and_element_type(init: str, dtype: str) -> None:
    done = layernorm2d_bwd("1", init, "0", "--length=7x33", "--length=64x33", f"--dtype={dtype}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_by_length(done.stdout)
    assert list(lines) == ["7x33", "64x33"]
    assert [words[-1] for words in lines.values()] == ["ok", "ok"]
    assert [words[:2] for words in lines.values()] == [["-", "-"]] * 2  # not timed


def test_a_seed_repeats_a_run() -> None:
    words = ("1", "2", "0", "--length=16x100")
    first = layernorm2d_bwd(*words)
    seed = re.search(r"--seed=(\d+)", first.stdout)
    assert seed is not None
    assert layernorm2d_bwd(*words, seed[0]).stdout == first.stdout
    assert layernorm2d_bwd(*words).stdout != first.stdout


def test_without_verification_says_so() -> None:
    done = layernorm2d_bwd("0", "2", "0", "--length=2x3")
    assert done.returncode == 0
    assert "not verified" in done.stdout
    assert "ok" not in done.stdout


def test_a_wrong_answer_fails(tmp_path: Path) -> None:
    """The same script on an IR that scales dgamma by 1 + 2**-10."""
    ir = shutil.copytree(SCRIPT.parents[1] / "ir", tmp_path / "ir")
    text = (ir / "row_blocks.mlir").read_text()
    right = "%dg = arith.mulf %dy_new, %xhat : !chunk"
    assert text.count(right) == 1
    wrong = (
        "%factor = arith.constant dense<1.0009765625> : !chunk\n"
        "            %dg0 = arith.mulf %dy_new, %xhat : !chunk\n"
        "            %dg = arith.mulf %dg0, %factor : !chunk"
    )
    (ir / "row_blocks.mlir").write_text(text.replace(right, wrong))
    program = (
        "import runpy, sys; from iree_lnbwd.compiling import compiler;"
        f"compiler.__file__ = {str(tmp_path / 'iree_lnbwd' / 'compiling' / 'compiler.py')!r};"
        "sys.argv[1:] = ['1', '2', '0', '--length=64x33'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_by_length(done.stdout)["64x33"][-1] == "FAILED"


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1", "3", "0"), "INIT: invalid choice: 3"),
        (("2", "2", "0"), "VERIFY: invalid choice: 2"),
        (("1", "2", "yes"), "TIME: invalid int value: 'yes'"),
        (("1", "2"), "required: TIME"),
        (("1", "2", "0", "--length=4"), "--length: expected MxN such as 4000x2000, got '4'"),
        (("1", "2", "0", "--length=4x0"), "--length: expected MxN such as 4000x2000, got '4x0'"),
        (("1", "2", "0", "--dtype=f8"), "--dtype: invalid choice: 'f8'"),
        (("1", "2", "0", "--device=tpu"), "device: expected one of"),
        (("1", "2", "0", "--device=cuda://99"), "cuda://99 is absent"),
        (("1", "2", "0", "--seed=-1"), "--seed: expected an int >= 0, got '-1'"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_status_2(words: tuple[str, ...], said: str) -> None:
    done = layernorm2d_bwd(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("layernorm2d_bwd: error: ")
    assert done.stderr.count("\n") == 1
