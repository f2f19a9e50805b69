"""``scripts/emulate``: evidence, and the comparison with what another machine computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from iree_lnbwd import NormSpec, compile
from iree_lnbwd.ops import npz
from iree_lnbwd.verification import fingerprint, recorded_bits
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.verification.evidence import Module, from_text, to_text
from iree_lnbwd.vmfb import artifact

_SCRIPT = Path(__file__).parents[2] / "scripts" / "emulate"


def _run(*arguments: object, package_in: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), *map(str, arguments)]
    other = {} if package_in is None else {"PYTHONPATH": str(package_in)}
    environment = {**os.environ, **other}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.drawn
def test_evidence(tmp_path: Path) -> None:
    output = tmp_path / "evidence.csv"
    run = _run(
        "evidence",
        "--target=a100",
        f"--output={output}",
        "--only=^layer_norm_backward_n64_f32$",
        "--jobs=1",
    )
    assert run.returncode == 0, run.stderr
    assert "ok   1/1 layer_norm_backward_n64_f32_sm_80: grad_input 0." in run.stdout
    facts, (module,) = from_text(output.read_text(encoding="utf-8"), str(output))
    assert facts["target"] == "sm_80"
    assert facts["emulated"] is True
    assert module.passed
    assert all(
        f"{result} 0." in run.stdout for result in ("grad_input", "grad_weight", "grad_bias")
    )
    made = compile(NormSpec((64,), "f32"), "sm_80", tmp_path)
    vmfb, _ = artifact.read(made.path)
    assert module.fingerprint == fingerprint.of(vmfb, source="it")


@pytest.mark.drawn
def test_comparison(tmp_path: Path) -> None:
    made = compile(NormSpec((64,), "bf16"), "sm_90", tmp_path / "modules")
    vmfb, _ = artifact.read(made.path)
    op = EmulatedNorm(vmfb)
    kept = tmp_path / "bits"
    recorded_bits.save(
        kept,
        made.path.stem,
        op.spec,
        made.manifest.schedule,
        fingerprint.of(vmfb, source="it"),
        op.run,
    )
    run = _run("compare", tmp_path / "modules", kept)
    assert run.returncode == 0, run.stderr
    assert "1 of 1 modules equal to the last bit" in run.stdout

    (path,) = kept.glob("*.npz")
    arrays = npz.read(path)
    arrays["5/grad_weight"].view(np.uint16)[7] ^= 1
    npz.write(path, arrays)
    run = _run("compare", tmp_path / "modules", kept)
    assert run.returncode == 1
    assert "grad_weight of 5 rows: 1 of 64 elements differ, by 1 steps at most" in run.stdout


@pytest.mark.drawn
def test_stale_evidence(tmp_path: Path) -> None:
    """Of the checkout none is; other code is named, with the place where it was to run."""
    package = tmp_path / "iree_lnbwd"
    shutil.copytree(_SCRIPT.parents[1] / "iree_lnbwd", package)
    shutil.copytree(_SCRIPT.parents[1] / "ir", tmp_path / "ir")
    arguments = ("stale", "--target=sm_80", "--only=^rms_norm_backward_n64_f32$", "--jobs=1")
    run = _run(*arguments, package_in=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("0 of 1 module stale\n")

    records = package / "data" / "evidence"
    path = records / "sm_80_emulated.csv"
    facts, modules = from_text(path.read_text(encoding="utf-8"), str(path))
    name = "rms_norm_backward_n64_f32_sm_80"
    before = Module(name, passed=True, fingerprint="0" * 64)
    on_a_gpu = {**facts, "emulated": False, "device": "a GPU"}
    (records / "sm_80_gpu.csv").write_text(to_text(on_a_gpu, [before]), encoding="utf-8")
    run = _run(*arguments, package_in=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "MISS 1/1 rms_norm_backward_n64_f32: not what ran on a GPU\n" in run.stdout

    other = [before if m.name == name else m for m in modules]
    path.write_text(to_text(facts, other), encoding="utf-8")
    run = _run(*arguments, package_in=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "not what ran on a GPU and in the emulator\n" in run.stdout


@pytest.mark.drawn
def test_errors(tmp_path: Path) -> None:
    for arguments, message in (
        (("compare", tmp_path, tmp_path), "emulate: error: BITS: expected .npz files in"),
        (
            ("evidence", "--target=sm_1", f"--output={tmp_path}/x"),
            "emulate: error: target: expected",
        ),
    ):
        run = _run(*arguments)
        assert run.returncode == 2
        assert message in run.stderr
