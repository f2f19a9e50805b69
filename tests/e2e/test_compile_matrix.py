"""An artifact for every target: it compiles, describes itself, and has the same bytes each time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import built

import iree_lnbwd as lnbwd
from iree_lnbwd import Artifact, NormSpec, cli
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.products import products_of
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.schedules.measured_files import fastest
from iree_lnbwd.vmfb import artifact, inspection
from iree_lnbwd.vmfb.description import describe

EVERYWHERE = (NormSpec((4096,), "f32"), NormSpec((4096,), "bf16"))

# What else there is, on one GPU target of each kind; test_row_blocks.py has the CPU's.
OPTIONS = (
    NormSpec((4096,), "f16"),
    NormSpec((768,), "f64"),
    NormSpec((769,), "f32"),
    NormSpec((769,), "bf16"),
    NormSpec((1,), "f32"),
    NormSpec((1,), "f16"),
    NormSpec((16, 64), "f32"),
    NormSpec((65536,), "bf16"),
    NormSpec((1024,), "bf16", output_mask=(True, False, False)),
    NormSpec((1024,), "bf16", output_mask=(False, True, True)),
    NormSpec((1024,), "bf16", output_mask=(False, False, True)),
    NormSpec((1024,), "bf16", has_weight=False),
    NormSpec((1024,), "f32", eps=1e-5),
    NormSpec((1024,), "f32", grad_output_dtype="bf16", weight_dtype="bf16"),
    NormSpec((1024,), "bf16", weight_dtype="f32"),
    NormSpec((1024,), "f16", weight_dtype="f32", bias_dtype="bf16"),
    NormSpec((1024,), "f32", rows=64),
)
KINDS = ("sm_90", "gfx942")

MATRIX = [
    *((target, spec) for target in lnbwd.targets() for spec in EVERYWHERE),
    *((find_target(name), spec) for name in KINDS for spec in OPTIONS),
]


def case_id(value: Target | NormSpec) -> str:
    return value.name.removeprefix("layer_norm_backward_")


@pytest.mark.drawn
@pytest.mark.parametrize(("target", "spec"), MATRIX, ids=case_id)
def test_every_module(
    target: Target, spec: NormSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = lnbwd.compile(spec, target.name, tmp_path)

    assert made.path == tmp_path / f"{spec.name}_{target.name}.vmfb"
    assert sorted(tmp_path.iterdir()) == sorted((made.path, made.manifest_path))
    assert made.manifest.spec == spec
    assert made.manifest.target == target.name

    vmfb, manifest = artifact.read(made.path)
    assert manifest == made.manifest
    described = describe(vmfb, source=str(made.path))
    assert described[0] == spec

    check_kernels(vmfb, target, measured=is_measured(spec, target))
    check_inspect(made, capsys)


def is_measured(spec: NormSpec, target: Target) -> bool:
    """Its schedule was the fastest on hardware, also where a few registers spill."""
    about = (DTYPES[spec.dtype].numpy.itemsize, spec.columns)
    chosen_for = [p for p in products_of(target.name) if p.stands_for_target]
    return any(
        about == (key.element_bytes, key.columns) for p in chosen_for for key in fastest(p.name)
    )


def check_kernels(vmfb: bytes, target: Target, *, measured: bool) -> None:
    """They are all seen, and none has memory behind its registers."""
    kernels = inspection.kernels(vmfb, target)
    assert kernels
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    if target.backend == "cpu":
        return
    for kernel in kernels:
        assert kernel.threads is not None, kernel
        assert 1 <= kernel.threads <= 1024, kernel
    if target.backend == "cuda":
        ptx = inspection.ptx(vmfb)
        assert f".target {target.name}" in ptx
        assert ".local" not in ptx
        assert ".approx" not in ptx  # its last bits are left to the GPU
        assert ".func" not in ptx  # what ir/math/ defines is inlined
        assert ("fma.rn.f32x2" in ptx) == target.has_f32_pairs
        if shutil.which("ptxas") is None:
            return  # then what follows is not known; test_ptx_assembles says so
    for kernel in kernels:
        assert kernel.stack_bytes == 0 or measured, kernel
        assert kernel.registers is not None, kernel


def check_inspect(made: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    """The command shows the module, and each of its kernels."""
    assert cli.main(["inspect", str(made.path)]) == 0
    said = capsys.readouterr().out
    facts = dict(re.findall(r"^(\S+) +(\S.*)$", said, re.MULTILINE))
    assert facts["op"] == made.manifest.spec.name
    assert facts["target"].startswith(f"{made.manifest.target} (")
    assert made.manifest.vmfb_sha256 in facts["module"]
    assert "grad_output " in facts["takes"]
    assert [
        name for name in ("grad_input", "grad_weight", "grad_bias") if name in facts["fills"]
    ] == [result.name for result in made.manifest.spec.results]
    kernels = inspection.kernels(made.path.read_bytes(), find_target(made.manifest.target))
    assert re.findall(r"^  (\w+)$", said, re.MULTILINE) == [kernel.name for kernel in kernels]


# One chunk a thread: a pair of copies for the first row, another for the later ones, and one of the
# weight.
FETCHES = {
    "at once": (OnePass(1, 1, 1, 8), 0),
    "registers": (OnePass(1, 1, 1, 8, ahead=1), 0),
    "ring": (OnePass(1, 1, 1, 8, ahead=1, slots=2), 4),
    "weight": (OnePass(1, 1, 1, 8, ahead=1, slots=2, stages_weight=True), 5),
    "wide weight": (OnePass(1, 1, 1, 8, 1, 2, stages_weight=True, widens_weight=True), 4),
    "in place": (OnePass(1, 1, 1, 8, ahead=1, slots=1, rereads=True, stages_weight=True), 5),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("how", "copies"), FETCHES.values(), ids=FETCHES)
def test_what_a_schedule_does_without_is_not_in_the_code(how: OnePass, copies: int) -> None:
    vmfb, _ = compiler.build(NormSpec((256,), "bf16"), find_target("sm_90"), schedule=how)
    rows = inspection.ptx(vmfb).split(".entry finalize")[0]
    assert rows.count("cp.async.cg.shared.global") == copies
    assert ("cp.async" in rows) == (copies > 0)
    assert ("bar.warp.sync" in rows) == how.rereads
    assert "bar.sync" not in rows  # a lone warp waits for nobody


def test_without_grad_input_there_are_no_row_sums() -> None:
    spec = NormSpec((4096,), "bf16", output_mask=(False, True, True))
    vmfb, manifest = compiler.build(spec, find_target("sm_90"))
    assert isinstance(manifest.schedule, OnePass)
    rows = inspection.ptx(vmfb).split(".entry finalize")[0]
    assert "shfl.sync.bfly" not in rows


@pytest.mark.drawn
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
@pytest.mark.parametrize("name", [t.name for t in lnbwd.targets() if t.backend == "cuda"])
def test_ptx_assembles(name: str, tmp_path: Path) -> None:
    vmfb, _ = built(NormSpec((4096,), "bf16"), find_target(name))
    ptx = tmp_path / "kernels.ptx"
    ptx.write_text(inspection.ptx(vmfb))
    command = ["ptxas", f"-arch={name}", "-v", "-o", str(tmp_path / "cubin"), str(ptx)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "cubin").stat().st_size > 0
    assert "0 bytes spill stores" in run.stderr
    assert not re.search(r"[1-9]\d* bytes spill", run.stderr), run.stderr


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["generic", "host", "sm_90", "gfx942"])
def test_same_bytes_from_anywhere(target: str, tmp_path: Path) -> None:
    """Two processes with different working folders, output folders and hash seeds."""
    made = []
    for place, seed in (("one", "1"), ("another/place", "2")):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        script = (
            "import iree_lnbwd as l, sys\n"
            f"l.compile(l.NormSpec((1000,), 'bf16', weight_dtype='f32'), {target!r}, 'out')"
        )
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        made.append({path.name: path.read_bytes() for path in (folder / "out").iterdir()})
    assert len(made[0]) == 2
    assert made[0] == made[1]


def test_every_file_name_is_different() -> None:
    names = {artifact.stem(spec, target.name) for target, spec in MATRIX}
    assert len(names) == len(MATRIX)
