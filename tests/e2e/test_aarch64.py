"""Modules for AArch64: their code, and what becomes of them on a CPU of another architecture.

The code is what iree-compile says that it wrote. On an AArch64 machine, the tests of all CPU
targets run it (`support.CPU_TARGETS`).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import iree_lnbwd as lnbwd
from iree_lnbwd import ArtifactError, DeviceError, NormSpec, cli, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS, Op

AARCH64 = find_target("generic-aarch64")
HERE = find_target("host").architecture
OURS, OTHERS = sorted(
    ("generic", "generic-aarch64"), key=lambda name: find_target(name).architecture != HERE
)
SPEC = NormSpec((24,), op="rms_norm", eps=1e-6)

FUNCTION = re.compile(r"^(\w+):.*?^\.Lfunc_end\d+:", re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^\t(\w[\w.]*)(?:\t(.*))?$", re.MULTILINE)
# What converts a vector of an element type to f32 and back. A bf16 is the upper half of an f32.
CONVERSIONS = {"f16": ("fcvtl", "fcvtn"), "bf16": (r"u?shll|shl", r"u?shrn|uzp2|usra|addhn|tbl")}
CASES = [
    *((op, dtype) for op in OPS.values() for dtype in ("f32", "f16", "bf16", "f64")),
    *((op, "f16") for op in FROM_OUTPUT.values()),
]


def kernels(spec: NormSpec, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The instructions of the kernels of a module: the name and the operands of each."""
    compiler.build(spec, AARCH64, extra_flags=[f"--iree-hal-dump-executable-files-to={folder}"])
    (assembly,) = folder.glob("*.s")
    functions = {found[1]: found[0] for found in FUNCTION.finditer(assembly.read_text())}
    names = ("rows", "finalize") if spec.family.is_backward else ("normalize",)
    return {name: INSTRUCTION.findall(functions[name]) for name in names}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("op", "dtype"),
    CASES,
    ids=lambda each: (
        each.name + "_from_output" * each.from_output if isinstance(each, Op) else each
    ),
)
def test_its_code(op: Op, dtype: str, tmp_path: Path) -> None:
    eps = None if op.is_backward else 1e-5
    spec = NormSpec((100,), dtype, op=op.name, eps=eps, from_output=op.from_output)
    for name, code in kernels(spec, tmp_path).items():
        said = [" ".join(instruction).lower() for instruction in code]
        # A call would be of a function that does nothing, or of none.
        assert not [line for line in said if line.startswith("bl")]
        # The rules for subnormal numbers are IEEE's from the beginning, and IREE's at each end.
        kept, ieee, *restored = (line for line in said if "fpcr" in line)
        assert re.fullmatch(r"mrs x\d+, fpcr", kept)
        assert ieee == "msr fpcr, xzr"
        assert all(re.fullmatch(r"msr fpcr, x\d+", line) for line in restored)
        assert len(restored) == len([line for line in said if line.strip() == "ret"])
        before = said[: said.index(ieee)]
        assert not [line for line in before if line.startswith(("fadd", "fmul", "fcvt"))]
        # It computes on vectors, and converts them as such.
        lanes = r"v\d+\.2d" if dtype == "f64" else r"v\d+\.4s"
        assert any(re.match(f"fadd {lanes}", line) for line in said)
        for conversion in CONVERSIONS.get(dtype, ())[name == "finalize" :]:
            assert any(re.match(f"(?:{conversion})2? v", line) for line in said), conversion


def test_on_a_cpu_of_another_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = lnbwd.compile(SPEC, OTHERS, tmp_path)
    theirs = find_target(OTHERS).architecture
    said = f"was compiled for {OTHERS}, which is for {theirs} CPUs; this CPU is {HERE}"
    for manifest in (True, False):
        if not manifest:
            made.manifest_path.unlink()
        for device in ("local-task", "local-sync"):
            with pytest.raises(DeviceError, match=rf"^device: {SPEC.name}_{OTHERS}.vmfb {said}$"):
                lnbwd.load(made.path, device)
    with pytest.raises(DeviceError, match=rf"^device: {SPEC.name} {said}$"):
        runtime.load_built(made.path.read_bytes())
    tool = Path(sys.executable).parent / "iree-run-module"
    command = [str(tool), f"--module={made.path}", "--device=local-task", f"--function={SPEC.op}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "INCOMPATIBLE" in run.stderr
    words = ["--op=rms_norm", "--normalized-shape=24", "--rows=1"]
    assert cli.main(["verify", f"--target={OTHERS}", *words]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"{said}")
    assert cli.main(["inspect", str(made.path)]) == 0


def test_a_bundle_for_both(tmp_path: Path) -> None:
    path = lnbwd.bundle(SPEC, [OURS, OTHERS], tmp_path / "norms.lnb").path
    assert lnbwd.Bundle(path, "local-sync").module(SPEC).target == OURS
    path = lnbwd.bundle(SPEC, OTHERS, tmp_path / "theirs.lnb").path
    theirs = find_target(OTHERS).architecture
    said = f"that for {OTHERS} does not run: it is for {theirs} CPUs, this one is {HERE}"
    with pytest.raises(ArtifactError, match=rf"{said}\); this adds it: .* --target={OURS} "):
        lnbwd.Bundle(path, "local-sync").module(SPEC)


def test_a_bundle_is_for_any_cpu_of_this_architecture_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    path = tmp_path / "norms.lnb"
    assert (
        cli.main(["bundle", "--op=rms_norm", "--eps=1e-6", "--normalized-shape=24", f"-o{path}"])
        == 0
    )
    assert [member.made_for for member in lnbwd.BundleFile(path).members] == [OURS]
