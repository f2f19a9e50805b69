"""The reproducers of ``docs/upstream/``: each fault of IREE is still there.

A test that fails says what can go, because IREE mended the fault. Whatever ends its process has one
of its own. The emulator stands in for GPUs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from iree.compiler.tools import CompilerToolError, binaries, compile_str
from support import random_generator

from iree_lnbwd.emulator import Fault, Module
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "upstream"
ROW = re.compile(r"^\| \[`(\w+)`\]\((\w+)\.md\) \| (.+) \| `(test_\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
HEADINGS = [
    "What happened?",
    "Steps to reproduce your issue",
    "What component(s) does this issue relate to?",
    "Version information",
    "Additional context",
]
LLVM_CPU = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=generic",
)
GPUS = {
    "sm_80": ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_80"),
    "sm_90": find_target("sm_90").flags,
    "gfx942": find_target("gfx942").flags,
    "gfx1100": find_target("gfx1100").flags,
}
KEEPS_F64 = "--iree-input-demote-f64-to-f32=false"
SEGMENTATION_FAULT = -11

Reference = Callable[[Array], Array]


def mended(name: str) -> str:
    """What a failing test says."""
    (instead,) = (instead for report, _, instead, _ in ROWS if report == name)
    return f"IREE mended {name} (docs/upstream/{name}.md). This can go: {instead}"


def text(name: str) -> str:
    return (FOLDER / f"{name}.mlir").read_text(encoding="utf-8")


def compiled(source: str, *flags: str) -> bytes:
    vmfb: bytes = compile_str(source, input_type="none", extra_args=list(flags))
    return vmfb


def refusal(source: str, *flags: str) -> str:
    """What iree-compile says if it fails, else nothing."""
    try:
        compiled(source, *flags)
    except CompilerToolError as error:
        return str(error)
    return ""


def fault(module: Module, function: str, x: Array) -> str:
    """What the emulator says if it refuses to go on, else nothing."""
    try:
        module.call(function, module.input("x", x))
    except Fault as error:
        return str(error)
    return ""


def run_script(name: str, argument: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), argument]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- the folder ------------------------------------------------------------------------------


def test_the_index_is_whole() -> None:
    reports = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert [name for name, link, *_ in ROWS if name != link] == []
    assert {name for name, *_ in ROWS} == reports
    assert len(ROWS) == len(reports)
    assert {path.stem for path in FOLDER.iterdir() if path.suffix != ".md"} == reports
    for name, _, instead, test in ROWS:
        files = re.findall(r"`([\w/]+\.\w+)`", instead)
        assert files, name
        assert [file for file in files if not (ROOT / file).is_file()] == []
        assert test in globals()


@pytest.mark.parametrize("name", [name for name, *_ in ROWS])
def test_a_report_has_the_templates_shape(name: str) -> None:
    report = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", report, re.MULTILINE) == HEADINGS
    (reproducer,) = (path.name for path in FOLDER.glob(f"{name}.*") if path.suffix != ".md")
    assert f"[`{reproducer}`]({reproducer})" in report


# --- the compiler for GPUs -------------------------------------------------------------------


def column_sums(x: Array) -> Array:
    return np.asarray(x.sum(axis=0, dtype=np.float64))


def rows_and_their_sums(x: Array) -> Array:
    return np.asarray(x + x.sum(axis=1, dtype=np.float64, keepdims=True) + 1)


# What a file computes, and the shapes of the argument in its wrong and its right form.
WRONG: dict[str, tuple[Reference, tuple[int, int], tuple[int, int]]] = {
    "subgroups_beyond_lanes": (column_sums, (32, 1024), (32, 1024)),
    "rank_change": (rows_and_their_sums, (4, 512), (4, 512)),
    "unpadded_tile": (column_sums, (8, 17), (8, 32)),
}


def largest_error(module: Module, form: str, reference: Reference, x: Array) -> float:
    """Relative to the largest magnitude."""
    expected = reference(x)
    (view,) = module.call(form, module.input("x", x))
    error = np.abs(module.read(view, np.dtype(np.float32)) - expected).max()
    return float(error / np.abs(expected).max())


@pytest.mark.drawn
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_code(name: str, target: str) -> None:
    """Without a word; beside it in each file is a form that is right."""
    reference, wrong, right = WRONG[name]
    rng = random_generator()
    module = Module(compiled(text(name), *GPUS[target]), find_target(target).backend)
    # A few roundings of sums of at most 512 terms.
    x = rng.standard_normal(right, dtype=np.float32)
    assert largest_error(module, "right", reference, x) < 1e-5
    x = rng.standard_normal(wrong, dtype=np.float32)
    if said := fault(module, "wrong", x):
        assert re.search(r"a read of local memory at byte \d+, which nobody wrote", said)
    else:
        assert largest_error(module, "wrong", reference, x) > 0.1, mended(name)


def test_default_lowering_race() -> None:
    module = Module(compiled(text("default_lowering_race"), *GPUS["sm_80"]), "cuda")
    x = random_generator().standard_normal((5, 33), dtype=np.float32)
    said = fault(module, "sums", x)
    assert said, mended("default_lowering_race")
    assert re.search("race in .*: the first thread reads what was written by", said)


def test_sm_90() -> None:
    known = []
    for name in ("sm_89", "sm_90", "sm_100", "sm_103"):
        target = ("--iree-hal-target-device=cuda", f"--iree-cuda-target={name}")
        if said := refusal(text("sm_90"), *target):
            assert "missing GPU target in #hal.executable.target" in said
        else:
            known.append(name)
    assert known == ["sm_89"], mended("sm_90")


@pytest.mark.parametrize(
    ("dtype", "cluster", "lowers"),
    [
        ("f32", "", False),
        ("f32", "cluster(size = 32)", True),
        ("f64", "", False),
        ("f64", "cluster(size = 32)", False),
    ],
)
def test_subgroup_reductions(dtype: str, cluster: str, lowers: bool) -> None:
    source = text("subgroup_reductions").replace("TYPE", dtype).replace("CLUSTER", cluster)
    compiled(source, KEEPS_F64, *GPUS["gfx942"])
    said = refusal(source, KEEPS_F64, *GPUS["sm_80"])
    assert (not said) == lowers, mended("subgroup_reductions")
    assert lowers or "failed to legalize operation 'gpu.subgroup_reduce'" in said


# --- the compiler for CPUs -------------------------------------------------------------------


def test_missing_symbol(tmp_path: Path) -> None:
    """Not by the script that IREE puts on the path: it hides the signal."""
    tool = str(Path(binaries.find_tool("iree-compile")).resolve())
    words = ("--iree-input-type=none", *LLVM_CPU, "-o", str(tmp_path / "module.vmfb"))
    command = (tool, str(FOLDER / "missing_symbol.mlir"), *words)
    ended = subprocess.run(command, capture_output=True, check=False)
    assert ended.returncode == SEGMENTATION_FAULT, mended("missing_symbol")


def test_f16_subnormals(tmp_path: Path) -> None:
    """They have no bits but zeros, where F16C keeps them."""
    triple = "--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu"

    def rounded(*flags: str) -> str:
        path = tmp_path / "module.vmfb"
        path.write_bytes(compiled(text("f16_subnormals"), *LLVM_CPU, triple, *flags))
        tool = str(Path(sys.executable).parent / "iree-run-module")
        words = ("--device=local-sync", f"--module={path}", "--function=rounded")
        command = (tool, *words, "--input=4xf32=6e-8 1e-6 3e-5 1")
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        return ended.stdout.rstrip().splitlines()[-1]

    kept = "4xf16=5.96046E-08 1.01328E-06 2.99811E-05 1"
    assert rounded("--iree-llvmcpu-target-cpu-features=+f16c") == kept
    assert rounded() == "4xf16=0 0 0 1", mended("f16_subnormals")


def test_aarch64_fenv(tmp_path: Path) -> None:
    triple = "--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu"
    dump = f"--iree-hal-dump-executable-files-to={tmp_path}"
    compiled(text("aarch64_fenv"), *LLVM_CPU, triple, dump)
    (path,) = tmp_path.glob("*.s")
    functions = dict(
        re.findall(r"^(\w+):\n(.*?)^\.Lfunc_end\d+:", path.read_text(), re.MULTILINE | re.DOTALL)
    )
    calls = re.findall(r"^\tbl\t(\w+)$", functions["doubled"], re.MULTILINE)
    assert calls == ["fegetenv", "fesetenv", "fesetenv"], mended("aarch64_fenv")
    for name in set(calls):
        code = re.findall(r"^\t([a-z].*)$", functions[name], re.MULTILINE)
        assert code == ["mov\tw0, wzr", "ret"], mended("aarch64_fenv")


# --- the runtime -----------------------------------------------------------------------------


def test_misaligned_import() -> None:
    aligned = run_script("misaligned_import", "0")
    assert (aligned.returncode, aligned.stdout) == (0, "imported\n2.0\n")
    shifted = run_script("misaligned_import", "4")
    there = (shifted.returncode, shifted.stdout) == (SEGMENTATION_FAULT, "imported\n")
    assert there, mended("misaligned_import")


def timepoints_are_missing(device: str) -> bool:
    said = run_script("timepoints", device)
    assert said.returncode == 0, said.stderr
    return said.stdout.count("is not yet implemented") == 2


def test_the_script_of_timepoints() -> None:
    """Of a driver that needs no GPU, and has none either."""
    assert timepoints_are_missing("local-sync")


@pytest.mark.gpu
def test_timepoints(gpu: DeviceUri) -> None:
    if gpu.driver != "cuda":
        pytest.skip("it is a fault of CUDA's driver")
    assert timepoints_are_missing(gpu.driver), mended("timepoints")


def test_the_script_of_to_host() -> None:
    """On a CPU each thread can copy."""
    said = run_script("to_host", "local-sync")
    assert said.stdout == "the thread that opened the device: 999.0\nanother thread: 999.0\n"


@pytest.mark.gpu
def test_to_host(gpu: DeviceUri) -> None:
    if gpu.driver != "cuda":
        pytest.skip("it is a fault of CUDA's driver")
    said = run_script("to_host", gpu.driver)
    assert said.stdout.startswith("the thread that opened the device: 999.0\nanother thread: ")
    assert "CUDA_ERROR_INVALID_CONTEXT" in said.stdout, mended("to_host")
