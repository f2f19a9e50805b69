"""The command ``iree-lnbwd``: as a shell runs it, and its many words by `cli.main`, in no time."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import signal
import stat
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import (
    Arguments,
    assert_matches_reference,
    present,
    random_arguments,
    random_generator,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import LayerNormGrads, NormSpec, cli, reference, runtime
from iree_lnbwd.compiling import compiler, iree_compile
from iree_lnbwd.errors import DeviceError
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.verification import fingerprint, verify
from iree_lnbwd.vmfb import artifact

BINARIES = Path(sys.executable).parent
COMMAND = BINARIES / "iree-lnbwd"


def run(
    *words: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The installed command, with nothing but its words."""
    return subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=120,
        env={**os.environ, **environment},
    )


def succeeded(*words: str | Path, cwd: Path | None = None) -> str:
    """What it printed; it must succeed, and complain of nothing."""
    ended = run(*words, cwd=cwd)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def refused(*words: str | Path, cwd: Path | None = None) -> str:
    """The one line that says what could not be done."""
    ended = run(*words, cwd=cwd)
    assert ended.returncode == 2, ended.stdout
    assert re.fullmatch(r"iree-lnbwd: error: [^\n]+\n", ended.stderr), ended.stderr
    return ended.stderr.removeprefix("iree-lnbwd: error: ").rstrip()


def main(*words: str | Path) -> tuple[int, str, str]:
    """The command in this process: its exit status, and what it printed to either stream."""
    out, complaint = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(complaint):
        status = cli.main(list(map(str, words)))
    return status, out.getvalue(), complaint.getvalue()


def printed_by_main(*words: str | Path) -> str:
    """As `succeeded`, in this process and folder."""
    status, printed, complaint = main(*words)
    assert (status, complaint) == (0, ""), complaint
    return printed


def refused_by_main(*words: str | Path) -> str:
    """As `refused`, in this process and folder."""
    status, printed, complaint = main(*words)
    assert status == 2, printed
    assert re.fullmatch(r"iree-lnbwd: error: [^\n]+\n", complaint), complaint
    return complaint.removeprefix("iree-lnbwd: error: ").rstrip()


def stored(arguments: Arguments) -> dict[str, Array]:
    """The arrays of a call under ATen's names, as an .npz has them."""
    names = ("grad_output", "input", "mean", "rstd", "weight", "bias")
    arrays = {name: getattr(arguments, name) for name in names}
    return {name: array for name, array in arrays.items() if array is not None}


def has(device: str) -> bool:
    try:
        runtime.probe(DeviceUri.parse(device))
    except DeviceError:
        return False
    return True


# --- targets ---------------------------------------------------------------------------------


def test_targets_prints_the_table() -> None:
    header, *rows = succeeded("targets").splitlines()
    assert header.split() == ["name", "backend", "aliases", "verified"]
    assert [row.split()[:2] for row in rows] == [[t.name, t.backend] for t in lnbwd.targets()]
    for row, target in zip(rows, lnbwd.targets(), strict=True):
        assert " ".join(target.aliases) in row
        assert re.search(
            r"(compiled only, never run|verified on .+|emulated|run by the tests .+"
            r"|disassembled by the tests; run in qemu .+, not on hardware)$",
            row,
        )


def test_a_reader_that_has_enough_is_no_error() -> None:
    pipe = f"{shlex.quote(str(COMMAND))} targets | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_version_and_help() -> None:
    assert succeeded("--version") == f"iree-lnbwd {lnbwd.__version__}\n"
    said = succeeded("--help")
    for command in ("targets", "compile", "verify", "run", "inspect", "tune", "tuned"):
        assert re.search(rf"^    {command} ", said, re.MULTILINE)


# --- compile ---------------------------------------------------------------------------------


def test_compile_writes_both_files_and_names_them(tmp_path: Path) -> None:
    said = printed_by_main(
        "compile",
        "--target=h200",
        "--normalized-shape=16x64",
        "--dtype=bf16",
        "-o",
        tmp_path / "dist",
    )
    stem = tmp_path / "dist" / "layer_norm_backward_n16x64_bf16_sm_90"
    first, second = said.splitlines()
    size = stem.with_suffix(".vmfb").stat().st_size
    assert first.startswith(f"{stem}.vmfb  {size} bytes, ")
    assert second == f"{stem}.json"


def test_compile_defaults_to_this_cpu_this_folder_and_f32(tmp_path: Path) -> None:
    succeeded("compile", "--normalized-shape=8", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "layer_norm_backward_n8_f32_host.json",
        "layer_norm_backward_n8_f32_host.vmfb",
    ]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("options", "spec"),
    [
        (["--dtype=f64"], NormSpec((8,), "f64")),
        (
            ["--dtype=f32", "--grad-output-dtype=f16", "--weight-dtype=bf16", "--bias-dtype=f32"],
            NormSpec((8,), "f32", "f16", "bf16", "f32"),
        ),
        (["--no-weight"], NormSpec((8,), has_weight=False)),
        (["--output-mask=101"], NormSpec((8,), output_mask=(True, False, True))),
        (["--rows=3"], NormSpec((8,), rows=3)),
        (
            ["--op=rms_norm_backward", "--bias", "--bias-dtype=f16", "--output-mask=101"],
            NormSpec(
                *((8,), "f32", None, None, "f16"),
                op="rms_norm_backward",
                has_bias=True,
                output_mask=(True, False, True),
            ),
        ),
        (["--recompute-statistics=1e-6"], NormSpec((8,), eps=1e-6)),
    ],
)
def test_compile_options_make_the_spec(options: list[str], spec: NormSpec, tmp_path: Path) -> None:
    words = ("compile", "--target=generic", "--normalized-shape=8")
    status, _, complaint = main(*words, *options, "-o", tmp_path)
    assert (status, complaint) == (0, "")
    manifest = artifact.read(tmp_path / f"{spec.name}_generic.vmfb")[1]
    assert manifest is not None
    assert manifest.spec == spec


def test_flags_after_two_dashes_are_compiled_with_and_recorded(tmp_path: Path) -> None:
    words = ("compile", "--target=generic", "--normalized-shape=64", "-o", tmp_path)
    flags = (f"--iree-hal-dump-executable-intermediates-to={tmp_path}", "--iree-opt-level=O1")
    succeeded(*words, "--", *flags)
    assert list(tmp_path.glob("*.s"))  # iree-compile did as it was told
    manifest = json.loads((tmp_path / "layer_norm_backward_n64_f32_generic.json").read_text())
    assert tuple(manifest["flags"][-2:]) == flags
    assert manifest["flags"][0].startswith("--iree-hal-target-device=")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "extra"),
    [("generic", ("--", "--iree-opt-level=O1")), ("generic", ()), ("sm_90", ()), ("gfx942", ())],
)
def test_printed_command_and_ir_make_the_same_module(
    target: str, extra: tuple[str, ...], tmp_path: Path
) -> None:
    """The .vmfb of `compile` is what iree-compile makes of what is printed."""
    words = ("compile", f"--target={target}", "--normalized-shape=1000", "--dtype=bf16")
    command = shlex.split(printed_by_main(*words, "--print-command", *extra))
    assert command[:2] == ["iree-compile", "-"]
    text = printed_by_main(*words, "--print-ir")
    assert not list(tmp_path.iterdir())
    subprocess.run(
        [BINARIES / command[0], *command[1:]], input=text.encode(), cwd=tmp_path, check=True
    )
    printed_by_main(*words, "-o", tmp_path / "ours", *extra)
    name = f"layer_norm_backward_n1000_bf16_{target}.vmfb"
    assert (tmp_path / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "most_lines"), [("sm_90", 900), ("gfx942", 600), ("generic", 300)]
)
def test_folded_ir_is_what_the_kernels_run(target: str, most_lines: int) -> None:
    """Nothing is called, no branch is on a constant, and it compiles to the very same kernels."""
    words = ("compile", f"--target={target}", "--normalized-shape=4096", "--dtype=bf16")
    folded = printed_by_main(*words, "--print-ir", "--folded")
    assert len(folded.splitlines()) < most_lines
    assert "func.call" not in folded
    assert "scf.if %true" not in folded
    assert "scf.if %false" not in folded
    if target != "generic":
        made = [
            iree_compile.run(text, "none", compiler.flags(find_target(target)), target)
            for text in (folded, printed_by_main(*words, "--print-ir"))
        ]
        assert len({fingerprint.of(vmfb, source=target) for vmfb in made}) == 1


def test_printed_ir_is_what_the_manifest_vouches_for(tmp_path: Path) -> None:
    words = ("compile", "--target=generic", "--normalized-shape=8")
    text = printed_by_main(*words, "--print-ir")
    printed_by_main(*words, "-o", tmp_path)
    manifest = json.loads((tmp_path / "layer_norm_backward_n8_f32_generic.json").read_text())
    assert manifest["ir_sha256"] == artifact.digest(text.encode())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--normalized-shape=8", "--target=sm90"],
            r"target: .*got 'sm90'\. Did you mean 'sm_90'\?",
        ),
        (["--normalized-shape=0"], "normalized_shape: expected .* got "),
        (["--normalized-shape=8", "--output-mask=000"], "output_mask: expected at least one"),
        (["--normalized-shape=8", "--rows=-1"], "rows: expected None or an int from 1 .* got -1"),
        (
            ["--normalized-shape=8", "--no-weight", "--output-mask=111"],
            "output_mask: expected 0 for grad_weight beside --no-weight, got 1",
        ),
        (
            ["--normalized-shape=8", "--bias-dtype=f16", "--output-mask=110"],
            "bias_dtype: expected none where there is no grad_bias, got 'f16'",
        ),
        *(
            (["--normalized-shape=8", *words], said)
            for words, said in (
                (["--bias"], "bias: expected it beside an RMS norm alone, .* layer_norm_backward"),
                (
                    ["--op=rms_norm_backward", "--bias", "--output-mask=11"],
                    r"output_mask: expected 3 bools, got \(True, True\)",
                ),
                (
                    ["--op=rms_norm_backward", "--bias-dtype=f16"],
                    "bias_dtype: expected none for rms_norm_backward without --bias, got 'f16'",
                ),
                (
                    ["--op=rms_norm", "--bias", "--no-bias"],
                    "bias: expected it beside an RMS norm alone, got it beside --no-bias",
                ),
            )
        ),
        (["--normalized-shape=8", "--folded"], "folded: expected only with --print-ir"),
        (
            ["--normalized-shape=8", "--print-command", "--folded"],
            "folded: expected only with --print-ir",
        ),
        (
            ["--normalized-shape=8", "--print-ir", "-o", "out"],
            "output_dir: expected none where nothing is compiled, got out",
        ),
        (
            ["--normalized-shape=8", "--print-command", "-o", "out"],
            "output_dir: expected none where nothing is compiled, got out",
        ),
        (
            ["--normalized-shape=8", "--print-ir", "--", "--iree-opt-level=O1"],
            r"flags: expected none after --, nothing is compiled here, got .*--iree-opt-level=O1",
        ),
        (
            ["--normalized-shape=8", "--print-command", "--", "--x=\x1b[31m"],
            r"flags: expected printable ones, got .*\\x1b\[31m",
        ),
        (
            ["--normalized-shape=8", "--recompute-statistics=nan"],
            "eps: .* finite .* got nan",
        ),
        (
            ["--normalized-shape=8", "--dtype=f64", "--weight-dtype=f32"],
            "weight_dtype: expected f64 ",
        ),
        (
            ["--normalized-shape=8", "-o", f"{__file__}/x"],
            "output_dir: cannot write to .*test_cli.py/x: ",
        ),
    ],
)
def test_compile_refuses_in_one_line(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.match(said, refused_by_main("compile", *options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--normalized-shape"),
        (["--normalized-shape=8,8"], "expected a shape such as 4096 or 16x64, got '8,8'"),
        (["--normalized-shape=8", "--dtype=f8"], "expected one of bf16, f16, f32, f64, got 'f8'"),
        (["--normalized-shape=8", "--dtype=fp16"], "got 'fp16'. Did you mean f16?"),
        (["--normalized-shape=8", "--weight-dtype=bfloat16"], "Did you mean bf16?"),
        (["--normalized-shape=8", "--output-mask=11000"], "expected a 0 or 1 for each gradient"),
        (["--normalized-shape=8", "--print-ir", "--print-command"], "not allowed with"),
        (["--normalized-shape=8", "-o", ""], "expected a path, got ''"),
        (["--normalized-shape=8", "--dtype=f32", "--dtype=f16"], "expected once, got it again"),
        (["--normalized-shape=8", "--target=host", "--target=host"], "--target: expected once"),
        (["--normalized-shape=8", "-o", "a", "--output-dir=b"], "expected once, got it again"),
        (["--normalized-shape=8", "--\x1b[31m"], r"unrecognized arguments: --\x1b[31m"),
        (["--normalized-shape=8", "a\nb"], r"unrecognized arguments: a\nb"),
    ],
)
def test_compile_explains_its_options(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, complaint = main("compile", *options)
    assert status == 2
    assert complaint.startswith("usage: iree-lnbwd ")
    assert said in complaint.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_flag_that_iree_compile_does_not_know(tmp_path: Path) -> None:
    words = ("compile", "--normalized-shape=8", "-o", tmp_path / "out")
    said = refused(*words, "--", "--no-such-flag")
    assert "Unknown command line argument '--no-such-flag'" in said
    assert not (tmp_path / "out").exists()


def test_a_compiler_that_ends_before_it_has_read_everything(tmp_path: Path) -> None:
    """More text than a pipe holds, and a flag that ends iree-compile at once."""
    assert len(compiler.source_text(NormSpec((4096,)), find_target("sm_90"))) > 1 << 16
    words = ("compile", "--target=sm_90", "--normalized-shape=4096", "-o", tmp_path / "out")
    said = refused(*words, "--", "--no-such-flag")
    assert "--no-such-flag" in said
    assert not (tmp_path / "out").exists()


def test_a_flag_that_iree_compile_cannot_follow(tmp_path: Path) -> None:
    words = ("compile", "--target=gfx942", "--normalized-shape=8", "-o", tmp_path / "out")
    said = refused_by_main(*words, "--", "--iree-opt-level=O9")
    assert said.startswith("compiling layer_norm_backward_n8_f32 for gfx942 failed: ")
    assert not (tmp_path / "out").exists()


# --- verify ----------------------------------------------------------------------------------


def rows_of(said: str) -> list[list[str]]:
    """The cells of the table: between the line below its header and the empty line after it."""
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line and set(line) == {"-"})
    return [line.split() for line in lines[start + 1 : lines.index("", start)]]


def test_verify_passes_on_the_captured_tensors() -> None:
    said = succeeded("verify")
    with resources.as_file(resources.files("iree_lnbwd") / "data" / "training_step.npz") as path:
        cases = npz.read_cases(path)
    rows = rows_of(said)
    bound = {name: verify.bind_case(arrays, source=name) for name, arrays in cases.items()}
    specs = {name: call.spec for name, call in bound.items() if call.spec is not None}
    assert {spec.op for spec in specs.values()} == set(OPS)
    assert len(specs) == len(cases)
    assert [(row[0], row[3]) for row in rows] == [
        (case, result.name) for case, spec in specs.items() for result in spec.results
    ]
    for row in rows:
        error, tolerance, ratio = map(float, row[-4:-1])
        assert error >= 0
        assert tolerance > 0
        assert 0 <= ratio <= 1
        assert row[-1] == "ok"
    assert re.search(rf"^passed: {len(rows)} of {len(rows)} results within tolerance", said, re.M)
    assert "Higham and Mary" in said  # where the tolerance comes from


def write_cases(path: Path, cases: dict[str, Arguments]) -> None:
    npz.write(
        path,
        {f"{case}/{name}": a for case, args in cases.items() for name, a in stored(args).items()},
    )


@pytest.mark.drawn
def test_verify_on_tensors_of_ones_own(tmp_path: Path) -> None:
    rng = random_generator()
    specs = {
        "narrow": NormSpec((64,), "bf16"),
        "mixed": NormSpec((64,), "f32", grad_output_dtype="bf16", weight_dtype="bf16"),
        "several dims": NormSpec((4, 16), "f64"),
        "bare": NormSpec((64,), "f16", has_weight=False, eps=1e-5),
    }
    cases = {name: random_arguments(rng, spec, (3, 5)) for name, spec in specs.items()}
    # The number of normalized dimensions is the weight's.
    cases["bare"] = replace(cases["bare"], bias=None)
    write_cases(tmp_path / "mine.npz", {k.replace(" ", "_"): v for k, v in cases.items()})
    rows = rows_of(printed_by_main("verify", "--data", tmp_path / "mine.npz"))
    assert [(row[0], row[2]) for row in rows] == [
        *[("narrow", "bf16")] * 3,
        *[("mixed", "f32/bf16/bf16")] * 3,
        *[("several_dims", "f64")] * 3,
        *[("bare", "f16")] * 2,
    ]


# Of each: what a module is compiled for, and what a file has of its call.
OF_GATES_AND_SETS: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {
    "sets": ({"weight_sets": True}, {"rows_per_set": np.array(2)}),
    "a gate": ({"gate": "after"}, {}),
    "a gate first": ({"gate": "before"}, {"gate_first": np.array(True)}),
    "both": ({"gate": "after", "weight_sets": True},
             {"gate_first": np.array(False), "rows_per_set": np.array(1)}),
}  # fmt: skip


def gates_and_sets(name: str) -> tuple[NormSpec, dict[str, Array]]:
    """A spec, and the arrays of a call in a file."""
    kind, options = OF_GATES_AND_SETS[name]
    spec = NormSpec((8,), op="rms_norm", eps=float(np.finfo(np.float32).eps), **kind)
    rng = random_generator()
    shapes = {"input": (3, 4, 8), "weight": (3, 8) if spec.weight_sets else (8,)}
    shapes |= {"gate": (3, 4, 8)} if spec.gate else {}
    arrays: dict[str, Array] = {
        key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()
    }
    return spec, arrays | options


def test_verify_on_gates_and_sets_of_ones_own(tmp_path: Path) -> None:
    cases = {name.replace(" ", "_"): gates_and_sets(name)[1] for name in OF_GATES_AND_SETS}
    npz.write(tmp_path / "x.npz", {
        f"{case}/{key}": array for case, arrays in cases.items()
        for key, array in {**arrays, "op": np.array("rms_norm")}.items()})  # fmt: skip
    rows = rows_of(printed_by_main("verify", "--data", tmp_path / "x.npz"))
    assert [(row[0], row[3], row[-1]) for row in rows] == [
        (case, result, "ok") for case in cases for result in ("output", "rstd")
    ]


# A mistake in the formula each, and the gradients that it spoils.
WRONG = {
    "the projection is added": (
        "%t2 = arith.subf %t0, %t1",
        "%t2 = arith.addf %t0, %t1",
        {"grad_input"},
    ),
    "the row's mean is left in": (
        "%t0 = arith.subf %h, %mean_h",
        "%t0 = arith.subf %h, %zero",
        {"grad_input"},
    ),
    "x is not centred for the columns": (
        "%dg = arith.mulf %dy_, %xhat",
        "%dg = arith.mulf %dy_, %x_",
        {"grad_weight"},
    ),
    "dbeta is a sum of squares": (
        "%db1 = arith.addf %db_, %dy_",
        "%db1 = arith.addf %db_, %dg",
        {"grad_bias"},
    ),
}


def verify_wrong(mistake: str, folder: Path) -> tuple[str | Path, ...]:
    """The words that verify a module that was really compiled, from IR with a mistake in it."""
    spec, target = NormSpec((64,), "bf16"), find_target("generic")
    right, wrong, _ = WRONG[mistake]
    how = WholeTensors()
    text = compiler.source_text(spec, target, schedule=how)
    assert text.count(right) == 1
    text = text.replace(right, wrong)
    manifest = compiler.build(spec, target, schedule=how)[1]
    vmfb = compile_str(text, input_type="none", extra_args=list(manifest.flags))
    manifest = replace(
        manifest,
        ir_sha256=artifact.digest(text.encode()),
        vmfb_sha256=artifact.digest(vmfb),
    )
    artifact.write(folder / "modules", vmfb, manifest)
    write_cases(folder / "x.npz", {"case": random_arguments(random_generator(), spec, (16,))})
    words = ("verify", "--target=generic", "--data", folder / "x.npz")
    return (*words, "--modules", folder / "modules")


@pytest.fixture
def wrong(tmp_path: Path) -> tuple[str | Path, ...]:
    return verify_wrong(next(iter(WRONG)), tmp_path)


@pytest.mark.drawn
@pytest.mark.parametrize("mistake", WRONG)
def test_verify_exits_1_on_a_miss(mistake: str, tmp_path: Path) -> None:
    words = verify_wrong(mistake, tmp_path)
    status, printed, complaint = main(*words)
    assert status == 1, complaint
    rows = rows_of(printed)
    spoiled = WRONG[mistake][2]
    assert {row[3] for row in rows if row[-1] == "MISS"} == spoiled
    assert {row[3] for row in rows if row[-1] == "ok"} == {*LayerNormGrads._fields} - spoiled
    assert re.search(r"^FAILED: 2 of 3 results within tolerance", printed, re.MULTILINE)
    # The same data, and the module of the package.
    assert "passed: 3 of 3" in main(*words[:-2])[1]


def test_verify_of_nothing_is_no_pass(tmp_path: Path) -> None:
    """And no miss."""
    npz.write(tmp_path / "empty.npz", {})
    said = refused("verify", "--data", "empty.npz", cwd=tmp_path)
    assert said == "empty.npz: expected one case or more, got none"


def test_verify_exits_1_on_a_miss_that_nobody_reads(wrong: tuple[str | Path, ...]) -> None:
    """Unlike a command that has said all that was asked for."""
    words = shlex.join(map(str, (COMMAND, *wrong)))
    ended = subprocess.run(
        ["bash", "-c", f'{words} | head -1; exit "${{PIPESTATUS[0]}}"'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    assert ended.stdout.startswith("layer_norm_backward for generic on local-task, ")


def test_verify_takes_no_module_for_another(tmp_path: Path) -> None:
    """A file's name is what was asked for; the module in it need not be."""
    for spec in (NormSpec((9,)), NormSpec((8,), eps=1.0)):
        other = lnbwd.compile(spec, "host", tmp_path / "made").path
        (tmp_path / "layer_norm_backward_n8_f32_host.vmfb").write_bytes(other.read_bytes())
        said = refused_by_main("verify", "--normalized-shape=8", "--modules", tmp_path)
        assert said == (
            f"{tmp_path}/layer_norm_backward_n8_f32_host.vmfb: expected the module that it is "
            f"named after, got {spec.name}_host"
        )


def test_the_emulator_takes_no_module_for_another(tmp_path: Path) -> None:
    other = lnbwd.compile(NormSpec((9,)), "gfx942", tmp_path / "made").path
    (tmp_path / "layer_norm_backward_n8_f32_gfx942.vmfb").write_bytes(other.read_bytes())
    words = ("verify", "--target=gfx942", "--emulate", "--normalized-shape=8")
    said = refused_by_main(*words, "--modules", tmp_path)
    assert said.endswith("named after, got layer_norm_backward_n9_f32_gfx942")


def test_long_emulation_says_what_it_does_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("verify", "--target=sm_90", "--emulate", "--normalized-shape=8", "--rows=3,4")
    assert printed_by_main(*words)  # within seconds, nothing
    monkeypatch.setattr(cli.verify, "_SILENT_S", -1.0)
    status, _, complaint = main(*words)
    assert status == 0
    assert len(re.findall(r"^iree-lnbwd: emulating \w+: \d+ workgroups of ", complaint, re.M)) >= 2


@pytest.mark.parametrize(
    ("target", "device"), [("sm_90", "cuda"), ("rtx5090", "cuda"), ("gfx942", "hip")]
)
def test_verify_without_the_device(target: str, device: str) -> None:
    if has(device):
        pytest.skip(f"this machine has {device}")
    said = refused_by_main("verify", f"--target={target}")
    assert said.startswith(f"{find_target(target).name}: nothing was run here: device: {device}")
    assert " is absent: " in said
    assert said.endswith("; --emulate runs its code in software")


@pytest.mark.parametrize("eps", ["1e39", "7e-46", "-1e-46"])
def test_an_eps_that_sums_cannot_hold(eps: str) -> None:
    said = refused_by_main(
        "compile", "--op=rms_norm", "--normalized-shape=8", f"--eps={eps}", "--print-ir"
    )
    assert said.startswith("eps: expected 0, or a number from 1.4e-45 to 3.4e+38 in magnitude")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target=sm90"], r"target: .* Did you mean 'sm_90'\?"),
        (["--device=gpu"], "device: expected one of local-task, .* got 'gpu'"),
        (["--device=cuda://97"], "device: cuda://97 is absent: "),
        (
            ["--target=sm_90", "--device=local-task"],
            r"device: sm_90 \(cuda\) does not run on local",
        ),
        (["--data=none.npz"], r"none\.npz: expected a readable \.npz file: .*No such file"),
        (["--modules=none"], r"none/.*\.vmfb: cannot be read: No such file"),
        (["--device="], "device: expected one of local-task, .* got ''"),
        (["--rows=5"], r"rows: expected none without --normalized-shape, got \(5,\)"),
        (["--dtype=bf16"], "dtype: expected none without --normalized-shape, got bf16"),
        (["--data=x.npz", "--dtype=f32"], "dtype: expected none without --normalized-shape"),
        (["--data=x.npz", "--normalized-shape=8"], "normalized-shape: expected no --data"),
        (
            ["--normalized-shape=8", "--rows=-1"],
            r"rows: expected different ints .*got \(-1,\)",
        ),
        (
            ["--normalized-shape=8", "--rows=7,7"],
            r"rows: expected different ints .*got \(7, 7\)",
        ),
        (
            ["--normalized-shape=8", "--rows=99999999999999"],
            "rows: expected .* from 0 to 2146",
        ),
        (
            ["--normalized-shape=99999999", "--rows=99999999"],
            "out of memory: Unable to allocate",
        ),
        (["--normalized-shape=0"], "normalized_shape: expected one or more ints >= 1"),
        (
            ["--modules=none", "--", "--iree-opt-level=O1"],
            r"flags: expected none after --, nothing is compiled here, got \('--iree-opt",
        ),
    ],
)
def test_verify_refuses_in_one_line(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.match(said, refused_by_main("verify", *options))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"case/colour": np.ones(3, np.float32)}, r"case: unknown arrays \['colour'\]"),
        ({"other/input": np.ones((3, 4), np.float32)}, "other: grad_output is missing"),
        ({"case/weight": np.ones(5, np.float32)}, "case: input: expected a shape that ends in"),
        ({"case/input": np.ones((3, 4), np.int32)}, "case: input: expected an element type"),
        ({"case/mean": np.ones(3, np.float32)}, "case: rstd: expected both mean and rstd"),
        ({"case/weight": np.float32(1)}, "case: weight: expected one dimension or more, got none"),
        ({"case/weight:bf16": np.ones(4, np.uint16)}, r".*x\.npz: case/weight: expected one array"),
        ({"/input": np.ones(4, np.float32)}, r".*x\.npz: grad_output is missing; got \['input'\]"),
        ({"input": np.ones(4, np.float32), "/input": np.ones(4)}, r".*x\.npz: /input: expected on"),
        ({"\x1b[2J/input": np.ones(4, np.float32)}, r"\\x1b\[2J: grad_output is missing"),
    ],
)
def test_verify_names_the_case_and_the_argument(
    change: dict[str, Array], said: str, tmp_path: Path
) -> None:
    spec = NormSpec((4,), eps=1e-5)
    arrays = stored(random_arguments(random_generator(), spec, (3,)))
    del arrays["bias"]
    npz.write(tmp_path / "x.npz", {f"case/{k}": v for k, v in arrays.items()} | change)
    assert re.match(said, refused_by_main("verify", "--data", tmp_path / "x.npz"))


# --- run -------------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec",
    [
        NormSpec((64,), "f32"),
        NormSpec((64,), "bf16", weight_dtype="f32"),
        NormSpec((4, 16), "f16", eps=1e-5),
        NormSpec((64,), "f64", has_weight=False, output_mask=(True, False, False)),
    ],
    ids=lambda spec: spec.name,
)
def test_run_computes_what_the_reference_does(spec: NormSpec, tmp_path: Path) -> None:
    made = lnbwd.compile(spec, "host", tmp_path)
    arguments = random_arguments(random_generator(), spec, (2, 5))
    npz.write(tmp_path / "in.npz", stored(arguments))
    out = tmp_path / "out.npz"
    said = printed_by_main("run", made.path, "--input", tmp_path / "in.npz", "--output", out)
    gradients = npz.read(out)
    assert list(gradients) == [result.name for result in spec.results]
    for name, array in gradients.items():
        assert f"{name}: {'x'.join(map(str, array.shape))} {array.dtype}\n" in said
    grads = LayerNormGrads(*(gradients.get(name) for name in LayerNormGrads._fields))
    assert_matches_reference(grads, arguments)


@pytest.mark.parametrize("name", OF_GATES_AND_SETS)
def test_run_with_gates_and_sets(name: str, tmp_path: Path) -> None:
    spec, arrays = gates_and_sets(name)
    made = lnbwd.compile(spec, "host", tmp_path)
    npz.write(tmp_path / "in.npz", arrays)
    words = ("run", made.path, "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    printed_by_main(*words)
    options: dict[str, Any] = {
        "rows_per_set": int(arrays.get("rows_per_set", 1)),
        "gate": arrays.get("gate"),
        "gate_first": spec.gate == "before",
    }
    given = (arrays["input"], 8, arrays["weight"])
    exact = reference.rms_norm(*given, eps=spec.eps, **options).output
    np.testing.assert_allclose(npz.read(tmp_path / "out.npz")["output"], exact, rtol=1e-5)
    npz.write(tmp_path / "in.npz", arrays | {"gate_first": np.array(spec.gate != "before")})
    said = rf".*in\.npz: gate_first: expected {spec.gate == 'before'}, as this module has it, got "
    assert re.match(said, refused_by_main(*words))


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An f32 module of 8 columns for this CPU."""
    folder = tmp_path_factory.mktemp("module")
    return lnbwd.compile(NormSpec((8,)), "host", folder).path


def test_run_on_the_other_cpu_device(module: Path, tmp_path: Path) -> None:
    arguments = random_arguments(random_generator(), NormSpec((8,)), (3,))
    npz.write(tmp_path / "in.npz", stored(arguments))
    words = ("run", module, "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    printed_by_main(*words, "--device=local-sync")
    assert present(npz.read(tmp_path / "out.npz")["grad_input"]).shape == (3, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["none.vmfb", "--input=in.npz", "--output=out.npz"], r"none\.vmfb: cannot be read: "),
        (["M", "--input=none.npz", "--output=out.npz"], r"none\.npz: expected a readable \.npz"),
        (["M", "--input=wrong.npz", "--output=out.npz"], r"wrong\.npz: grad_output is missing"),
        (["M", "--input=bad.npz", "--output=out.npz"], "input: expected a shape that ends in"),
        (["M", "--input=in.npz", "--output=none/out.npz"], r"none/out\.npz: cannot be written: "),
        (["M", "--input=in.npz", "--output=."], "cannot be written: |.*cannot be written: "),
        (
            ["M", "--input=in.npz", "--output=out.npz", "--device=cuda"],
            "device: .* compiled for host",
        ),
        (["M", "--input=in.npz", "--output=out.npz", "--device=tpu"], "device: .* got 'tpu'"),
    ],
)
def test_run_refuses_in_one_line(
    options: list[str],
    said: str,
    module: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = stored(random_arguments(random_generator(), NormSpec((8,)), (3,)))
    npz.write(tmp_path / "in.npz", arrays)
    npz.write(tmp_path / "wrong.npz", {"input": arrays["input"]})
    npz.write(tmp_path / "bad.npz", arrays | {"input": arrays["input"][:, :4]})
    before = sorted(tmp_path.iterdir())
    words = [str(module) if word == "M" else word for word in options]
    assert re.match(said, refused_by_main("run", *words))
    assert sorted(tmp_path.iterdir()) == before


def arguments_file(folder: Path) -> Path:
    """Good input for ``module``."""
    npz.write(
        folder / "in.npz",
        stored(random_arguments(random_generator(), NormSpec((8,)), (3,))),
    )
    return folder / "in.npz"


SUMMARY = "grad_input: 3x8 float32\ngrad_weight: 8 float32\ngrad_bias: 8 float32\n"


@pytest.mark.drawn
@pytest.mark.parametrize("output", ["-", "/dev/fd/3", "link"])
@pytest.mark.parametrize("to", ["pipe", "file", "end of a file"])
def test_run_streams_to_standard_output(output: str, to: str, module: Path, tmp_path: Path) -> None:
    """And says on standard error what it says, also where another number is the same file."""
    (tmp_path / "link").symlink_to("/proc/self/fd/1")  # as /dev/stdout is one
    words = shlex.join(
        ["run", str(module), f"--input={arguments_file(tmp_path)}", f"--output={output}"]
    )
    written = tmp_path / "out.npz"
    written.write_bytes(b"before")
    how = {
        "pipe": f"3>&1 | cat > {written}",
        "file": f"> {written} 3>&1",
        "end of a file": f">> {written} 3>&1",
    }
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{COMMAND} {words} {how[to]}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == f"{SUMMARY}{output}\n"
    begin = b"before" if to == "end of a file" else b""
    content = written.read_bytes()
    assert content.startswith(begin + b"PK")
    written.write_bytes(content.removeprefix(begin))
    assert list(npz.read(written)) == ["grad_input", "grad_weight", "grad_bias"]


def test_run_writes_to_what_the_shell_opened(module: Path, tmp_path: Path) -> None:
    words = shlex.join(["run", str(module), f"--input={arguments_file(tmp_path)}"])
    out = tmp_path / "out.npz"
    ended = subprocess.run(
        ["bash", "-c", f"{COMMAND} {words} --output=/dev/fd/7 7> {out}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{SUMMARY}/dev/fd/7\n"
    assert list(npz.read(out)) == ["grad_input", "grad_weight", "grad_bias"]


def test_run_writes_into_a_pipe_through_a_link_too(module: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    words = ("run", module, "--input", arguments_file(tmp_path))
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("pipe", "link"):
        said = succeeded(*words, "--output", name, cwd=tmp_path)
        assert said == f"{SUMMARY}{name}\n"
        assert (tmp_path / "pipe").is_fifo()
        assert (tmp_path / "link").is_symlink()
        (tmp_path / "got.npz").write_bytes(os.read(reader, 1 << 16))
        assert len(npz.read(tmp_path / "got.npz")) == 3
    os.close(reader)


def test_run_follows_a_link_and_leaves_modes_as_they_are(module: Path, tmp_path: Path) -> None:
    (tmp_path / "real.npz").write_bytes(b"before")
    (tmp_path / "real.npz").chmod(0o640)
    (tmp_path / "link.npz").symlink_to("real.npz")
    words = ("run", module, "--input", arguments_file(tmp_path))
    printed_by_main(*words, "--output", tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert stat.S_IMODE((tmp_path / "real.npz").stat().st_mode) == 0o640
    assert len(npz.read(tmp_path / "real.npz")) == 3
    before = os.umask(0o077)
    try:
        printed_by_main(*words, "--output", tmp_path / "new.npz")
        printed_by_main("compile", "--normalized-shape=8", "-o", tmp_path / "made")
    finally:
        os.umask(before)
    for path in (tmp_path / "new.npz", *(tmp_path / "made").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def run_into(output: int, module: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Gradients to an open file, as standard output."""
    return subprocess.run(
        [COMMAND, "run", module, "--input", arguments_file(folder), "--output=-"],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=folder,
        timeout=120,
    )


def test_run_writes_no_binary_data_to_a_terminal(module: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    ended = run_into(theirs, module, tmp_path)
    os.close(theirs)
    os.close(ours)
    assert ended.returncode == 2
    assert ended.stderr == (
        "iree-lnbwd: error: /dev/fd/1: cannot be written: expected a file or a pipe, got a "
        "terminal\n"
    )


def test_run_into_a_pipe_whose_reader_has_gone(module: Path, tmp_path: Path) -> None:
    """Gradients that nobody got are no success."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_into(writer, module, tmp_path)
    os.close(writer)
    assert ended.returncode == 2
    assert ended.stderr == ("iree-lnbwd: error: /dev/fd/1: cannot be written: Broken pipe\n")


def test_run_interrupted_while_a_pipe_is_full(module: Path, tmp_path: Path) -> None:
    """It does not wait for the reader to take the rest."""
    os.mkfifo(tmp_path / "pipe")
    many = random_arguments(random_generator(), NormSpec((8,)), (50_000,))
    npz.write(tmp_path / "in.npz", stored(many))
    words: list[str | Path] = [COMMAND, "run", module, "--input", tmp_path / "in.npz"]
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen(
        [*words, "--output", tmp_path / "pipe"], stderr=subprocess.PIPE, text=True
    ) as command:
        assert select.select([reader], [], [], 60)[0]
        command.send_signal(signal.SIGINT)
        complaint = command.communicate(timeout=60)[1]
    os.close(reader)
    assert (command.returncode, complaint) == (130, "iree-lnbwd: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", "pipe"]


# --- inspect ---------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("manifest", ["manifest", "no manifest"])
def test_inspect(manifest: str, tmp_path: Path) -> None:
    spec = NormSpec((1000,), "bf16", weight_dtype="f32")
    made = lnbwd.compile(spec, "gfx942", tmp_path)
    if manifest == "no manifest":
        made.manifest_path.unlink()
    said = printed_by_main("inspect", made.path)
    facts = dict(re.findall(r"^(\S+) +(\S.*)$", said, re.MULTILINE))
    assert facts["op"] == spec.name
    assert facts["target"].startswith("gfx942 (rocm): ")
    assert facts["takes"] == (
        "grad_output ?x1000xbf16, input ?x1000xbf16, mean ?xf32, rstd ?xf32, weight 1000xf32"
    )
    assert facts["fills"] == "grad_input ?x1000xbf16, grad_weight 1000xf32, grad_bias 1000xf32"
    assert facts["path"]
    assert facts["paper"].startswith("not measured: mi300x, 67108 rows: ")
    assert ("flags" in facts) == (manifest == "manifest")
    assert re.search(
        r"^    \d+ threads, \d+ registers, \d+ bytes shared, 0 bytes stack$", said, re.M
    )


def test_inspect_takes_the_manifest_too(module: Path) -> None:
    assert printed_by_main("inspect", module.with_suffix(".json")) == printed_by_main(
        "inspect", module
    )


def test_inspect_refuses_what_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "x.vmfb").write_text("not a module")
    assert "truncated, altered or not a .vmfb" in refused_by_main("inspect", tmp_path / "x.vmfb")


def test_inspect_refuses_what_is_packed_in_another_way(tmp_path: Path) -> None:
    """Each of ZIP's methods has errors of its own."""
    with zipfile.ZipFile(tmp_path / "x.vmfb", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("module.fb", bytes(10_000))
    whole = (tmp_path / "x.vmfb").read_bytes()
    for position in range(39, 60):
        (tmp_path / "x.vmfb").write_bytes(whole[:position] + b"\xff" * 8 + whole[position + 8 :])
        with pytest.raises(lnbwd.ArtifactError, match=r"x\.vmfb: [^\n]*altered[^\n]+$"):
            runtime.load(tmp_path / "x.vmfb")
    assert "altered" in refused_by_main("inspect", tmp_path / "x.vmfb")


# --- any command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["targets"], ["inspect", "x"], ["run", "x", "--input=x", "--output=x"]]
)
def test_words_after_two_dashes_where_nothing_is_compiled(words: list[str]) -> None:
    said = refused_by_main(*words, "--", "--iree-opt-level=O1")
    assert said == (
        "flags: expected none after --, nothing is compiled here, got ('--iree-opt-level=O1',)"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "pipe"],
        ["run", "pipe", "--input=in.npz", "--output=out.npz"],
        ["run", "M", "--input=pipe", "--output=out.npz"],
        ["verify", "--data=pipe"],
        ["verify", "--modules=.", "--normalized-shape=8"],
    ],
)
def test_a_pipe_is_not_waited_for(words: list[str], module: Path, tmp_path: Path) -> None:
    arguments_file(tmp_path)
    for name in ("pipe", "layer_norm_backward_n8_f32_host.vmfb"):
        os.mkfifo(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    said = refused(*(str(module) if word == "M" else word for word in words), cwd=tmp_path)
    expected = "expected a regular file, got a pipe, a socket or a device"
    assert re.fullmatch(rf"(pipe|layer_norm\S+): .*: {expected}", said)
    assert sorted(tmp_path.iterdir()) == before


# Those that write in different ways.
COMMANDS = [
    ["--help"],
    ["compile", "--normalized-shape=8", "--target=generic"],
    ["run", "M", "--input=in.npz", "--output=out.npz"],
    ["run", "M", "--input=in.npz", "--output=-"],
]
EVERY_COMMAND = [
    *COMMANDS,
    ["targets"],
    ["--version"],
    ["compile", "--normalized-shape=8", "--print-ir"],
    ["compile", "--normalized-shape=8", "--print-command"],
    ["verify", "--normalized-shape=8", "--rows=1"],
    ["inspect", "M"],
]


def words_of(words: list[str], module: Path) -> list[str | Path]:
    return [COMMAND, *(module if word == "M" else word for word in words)]


@pytest.mark.drawn
@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_a_full_standard_output(words: list[str], module: Path, tmp_path: Path) -> None:
    arguments_file(tmp_path)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            words_of(words, module),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=120,
        )
    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(
        r"iree-lnbwd: error: (stdout|/dev/fd/1): cannot be written: No space left on device\n",
        ended.stderr,
    )


def test_a_full_standard_output_is_not_to_blame_for_what_is_not_written_to_it() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [COMMAND, "compile"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert "--normalized-shape" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_closed_standard_output(words: list[str], module: Path, tmp_path: Path) -> None:
    """What was asked for can reach nobody; and no file of ours gets the number.

    That is found out before any command is read.
    """
    before = sorted([arguments_file(tmp_path)])
    ended = subprocess.run(
        ["bash", "-c", f"{shlex.join(map(str, words_of(words, module)))} >&-"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    said = "iree-lnbwd: error: standard output: expected it open, got it closed\n"
    assert (ended.returncode, ended.stderr) == (2, said)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.drawn
@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_standard_error_that_takes_nothing(to: str, module: Path, tmp_path: Path) -> None:
    """The exit status is the same, and nothing that was for it goes elsewhere."""
    arguments_file(tmp_path)
    for words, status, said in (
        (["inspect", "none"], 2, b""),
        (["compile"], 2, b""),
        (["run", "M", "--input=in.npz", "--output=out.npz"], 0, SUMMARY.encode() + b"out.npz\n"),
        (["run", "M", "--input=in.npz", "--output=-"], 2 if "full" in to else 0, None),
    ):
        ended = subprocess.run(
            ["bash", "-c", f"{shlex.join(map(str, words_of(words, module)))} {to}"],
            stdout=subprocess.PIPE,
            check=False,
            cwd=tmp_path,
            timeout=120,
        )
        assert ended.returncode == status, words
        if said is None:
            (tmp_path / "got.npz").write_bytes(ended.stdout)
            assert len(npz.read(tmp_path / "got.npz")) == 3
            assert SUMMARY.encode() not in ended.stdout
        else:
            assert ended.stdout == said


# A name with a letter that is not ASCII, escape sequences, a line's end, and a mark that has the
# rest of the line read from right to left; and how it is shown.
ODD_NAME = "é\x1b[31m\x07\n\r\x9b2J\u202e"
ODD_SHOWN = r"é\x1b[31m\x07\n\r\x9b2J\u202e"
ENCODINGS: list[dict[str, str]] = [
    {},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0"},
]


def shown_as_file(environment: dict[str, str]) -> str:
    """How the odd name of a file is shown: one that is no text to Python by its bytes."""
    if "LC_ALL" in environment:
        return r"\udcc3\udca9\x1b[31m\x07\n\r\udcc2\udc9b2J\udce2\udc80\udcae"
    return shown_as_text(environment)


def shown_as_text(environment: dict[str, str]) -> str:
    """How the odd name of a case is shown, also where the encoding has not all of its letters."""
    ascii_only = "LC_ALL" in environment or "ascii" in str(environment)
    return ODD_SHOWN.replace("é", r"\xe9") if ascii_only else ODD_SHOWN


@pytest.mark.drawn
@pytest.mark.parametrize("environment", ENCODINGS, ids=str)
def test_names_reach_a_terminal_as_text(environment: dict[str, str], tmp_path: Path) -> None:
    """Of files in errors and in what is printed, and of cases."""

    def said(*words: str | Path) -> tuple[int, str, str]:
        ended = subprocess.run(
            [COMMAND, *words],
            capture_output=True,
            check=False,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
        encoding = "latin-1" if "latin" in str(environment) else "utf-8"
        return ended.returncode, ended.stdout.decode(encoding), ended.stderr.decode(encoding)

    name = shown_as_file(environment)
    status, _, complaint = said("inspect", ODD_NAME)
    assert status == 2
    said_of_it = "cannot be read: No such file or directory"
    assert complaint == f"iree-lnbwd: error: {name}: {said_of_it}\n"

    status, printed, _ = said("compile", "--target=generic", "--normalized-shape=8", "-o", ODD_NAME)
    assert status == 0
    first, second = printed.splitlines()
    assert first.startswith(f"{name}/layer_norm_backward_n8_f32_generic.vmfb  ")
    assert second == f"{name}/layer_norm_backward_n8_f32_generic.json"

    cases = {ODD_NAME: random_arguments(random_generator(), NormSpec((8,)), (3,))}
    write_cases(tmp_path / "x.npz", cases)
    status, printed, complaint = said("verify", "--data=x.npz")
    assert (status, complaint) == (0, "")
    case = shown_as_text(environment)
    assert [line.startswith(f"{case}  3x8 ") for line in printed.splitlines()].count(True) == 3


def test_flags_reach_a_terminal_as_text(tmp_path: Path) -> None:
    words = ("compile", "--normalized-shape=8", "-o", tmp_path / "out", "--", f"--{ODD_NAME}")
    assert "\x1b" not in refused_by_main(*words)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{}"],
        ["run", "{}", "--input=in.npz", "--output=out.npz"],
        ["run", "M", "--input={}", "--output=out.npz"],
        ["run", "M", "--input=in.npz", "--output={}"],
        ["verify", "--data={}"],
        ["verify", "--modules={}"],
        ["compile", "--normalized-shape=8", "--target=generic", "--output-dir={}"],
    ],
    ids=" ".join,
)
def test_names_that_are_too_long(words: list[str], module: Path, tmp_path: Path) -> None:
    arguments_file(tmp_path)
    filled = [str(module) if word == "M" else word.format("x/" * 4000) for word in words]
    assert "File name too long" in refused(*filled, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_a_folder_that_is_gone(module: Path, tmp_path: Path) -> None:
    """The command runs in it."""
    gone = tmp_path / "gone"
    for words in (
        ["compile", "--normalized-shape=8"],
        ["inspect", "x.vmfb"],
        ["verify", "--data=x"],
    ):
        gone.mkdir()
        ended = subprocess.run(
            ["bash", "-c", f"rmdir {gone}; {shlex.join([str(COMMAND), *words])}"],
            capture_output=True,
            text=True,
            check=False,
            cwd=gone,
            timeout=120,
        )
        assert ended.returncode == 2
        # The shell of iree-compile's linker has a word to say first.
        assert re.fullmatch(r"(sh: .*\n)?iree-lnbwd: error: [^\n]+\n", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("division by zero"), "unexpected, please report: ZeroDivisionError: "),
        (
            RecursionError("too deep"),
            "unexpected, please report: RecursionError: too deep, at test_",
        ),
        (KeyError("a\nb"), "unexpected, please report: KeyError: 'a\\nb', at test_cli.py:"),
        (AssertionError(), "unexpected, please report: AssertionError: , at test_cli.py:"),
        (MemoryError(), "out of memory\n"),
        (OSError(5, "Input/output error", "x"), "[Errno 5] Input/output error: 'x'\n"),
        (ValueError(), "ValueError\n"),
        (BrokenPipeError(32, "Broken pipe"), "[Errno 32] Broken pipe\n"),
        (Warning("a\nb\x1b"), r"unexpected, please report: Warning: a\nb\x1b, at test_cli.py:"),
    ],
)
def test_an_error_of_ours_is_no_miss(
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr("iree_lnbwd.cli.targets.targets", fails)
    assert cli.main(["targets"]) == 2
    out, complaint = capsys.readouterr()
    assert out == ""
    assert complaint.startswith(f"iree-lnbwd: error: {said}")
    assert complaint.count("\n") == 1


def test_the_environment_of_the_tests_is_their_own() -> None:
    """No test above read or wrote the user's cache."""
    assert "cache" in os.environ["IREE_LNBWD_CACHE"]
