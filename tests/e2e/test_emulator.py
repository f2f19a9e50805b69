"""GPU modules run in software: every form of the fast path, and the command line."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import (
    assert_matches_reference,
    assert_same_bits,
    built,
    gradients_of,
    random_arguments,
    random_generator,
    without_few_rows,
)

from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import Fault, Launch, Module
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.schedules import OnePass, TwoPass, WholeTensors
from iree_lnbwd.verification import matrix, recorded_bits
from iree_lnbwd.verification.emulated_norm import EmulatedNorm


@functools.cache
def _op(spec: NormSpec, target: str) -> EmulatedNorm:
    """Loaded once; its rows are dynamic, so it serves every M. (test_few_rows.py has the few.)"""
    found = find_target(target)
    vmfb, _ = built(spec, found, without_few_rows(spec, found))
    return EmulatedNorm(vmfb)


def _check(spec: NormSpec, target: str, rows: int) -> None:
    arguments = random_arguments(random_generator(), spec, (rows,))
    assert_matches_reference(_op(spec, target).run(arguments.call()), arguments)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [64, 769, 1024, 4096])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_usual_widths(target: str, columns: int, dtype: str) -> None:
    for rows in (1, 7, 64):
        _check(NormSpec((columns,), dtype), target, rows)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [1, 7, 1000, 5000, 16384, 65536])
def test_small_odd_and_wide(columns: int, dtype: str) -> None:
    _check(NormSpec((columns,), dtype), "sm_90", 3)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
@pytest.mark.parametrize(
    "how",
    [
        OnePass(4, groups=2, warps=2, vector=4),
        TwoPass(4, warps=4, vector=4, chunks=1, rows=2),
    ],
    ids=["OnePass", "TwoPass"],
)
def test_more_rows_than_workgroups(how: OnePass | TwoPass, target: str) -> None:
    """Each workgroup walks over several rows, and the last ones over fewer."""
    spec = NormSpec((1000,), "f32")
    vmfb, _ = compiler.build(spec, find_target(target), schedule=how)
    arguments = random_arguments(random_generator(), spec, (37,))
    op = EmulatedNorm(vmfb)
    assert_matches_reference(op.run(arguments.call()), arguments)
    walks = op.launches[-2].workgroup_count  # the last kernel adds up what these leave
    assert 4 in walks


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "mask", [(True, True, True), (True, False, False), (False, True, True), (True, False, True)]
)
def test_masks(mask: tuple[bool, bool, bool], dtype: str) -> None:
    _check(NormSpec((769,), dtype, output_mask=mask), "sm_90", 5)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec",
    [
        NormSpec((768,), "f64"),
        NormSpec((768,), "f16"),
        NormSpec((769,), "bf16", weight_dtype="f32"),
        NormSpec((1024,), "f32", grad_output_dtype="bf16", weight_dtype="f16"),
        NormSpec((1000,), "bf16", has_weight=False),
        NormSpec((1000,), "f32", eps=1e-5),
        NormSpec((12, 64), "f32"),
        NormSpec((64,), "f32", rows=5),
    ],
    ids=lambda spec: spec.name,
)
def test_options(spec: NormSpec) -> None:
    _check(spec, "sm_90", 5)


def test_no_rows() -> None:
    spec = NormSpec((64,), "f32")
    _check(spec, "sm_90", 0)


@pytest.mark.drawn
def test_adversarial_rows() -> None:
    """Constant rows, large means, Inf and NaN."""
    spec = NormSpec((1000,), "bf16")
    rng = random_generator()
    x = rng.standard_normal((7, 1000)).astype(np.float32)
    x[0] = 3.0
    x[1] += 100
    x[2] = 0
    x[3, 5], x[4, 7] = np.inf, np.nan
    arguments = random_arguments(rng, spec, (7,), x=x)
    assert_matches_reference(_op(spec, "sm_90").run(arguments.call()), arguments)


def test_calls_repeat_to_the_bit() -> None:
    spec = NormSpec((769,), "bf16")
    call = random_arguments(random_generator(), spec, (40,)).call()
    op = _op(spec, "sm_90")
    assert_same_bits(op.run(call), op.run(call))


@pytest.mark.drawn
def test_whole_tensors_are_held_to_less() -> None:
    """Their kernels count on warps that run in step: without that, they race."""
    spec = NormSpec((769,), "f64")
    vmfb, _ = compiler.build(spec, find_target("sm_90"), schedule=WholeTensors())
    call = random_arguments(random_generator(), spec, (5,)).call()
    EmulatedNorm(vmfb).run(call)
    module = Module(vmfb, "cuda")
    views = [module.input(given.name, call.arrays[given.name]) for given in spec.inputs]
    results = [
        module.output(
            result.name, (5, 769)[-len(result.shape) :], np.dtype(np.float64), write_once=False
        )
        for result in spec.results
    ]
    with pytest.raises(Fault, match=r"race in grad_weight .*reads what was written by the second"):
        module.call("layer_norm_backward", *views, *results)


def test_progress() -> None:
    """Every dispatch is told before it runs."""
    spec = NormSpec((64,), "f32")
    seen: list[Launch] = []
    vmfb, _ = built(spec, find_target("sm_90"))
    op = EmulatedNorm(vmfb, progress=seen.append)
    op.run(random_arguments(random_generator(), spec, (3,)).call())
    assert seen == op.launches
    assert [launch.kernel for launch in seen] == ["few_rows"]


def test_modules_that_are_not_for_a_gpu() -> None:
    vmfb, _ = built(NormSpec((64,)), find_target("host"))
    with pytest.raises(ValueError, match="target: there is no emulator for host"):
        EmulatedNorm(vmfb)
    with pytest.raises(ArtifactError, match=r"something: truncated, altered or not a .vmfb"):
        EmulatedNorm(b"nothing", source="something")


def test_kept_bits(tmp_path: Path) -> None:
    """What was kept compares equal with itself, and a changed bit is found."""
    spec = NormSpec((64,), "bf16")
    vmfb, manifest = built(spec, find_target("sm_90"))
    op, how = EmulatedNorm(vmfb), manifest.schedule
    recorded_bits.save(tmp_path, "module", spec, how, "abc", op.run)
    found = list(recorded_bits.compare(tmp_path / "module.npz", spec, how, "abc", op.run))
    assert {difference.result for difference in found} == {
        "grad_input",
        "grad_weight",
        "grad_bias",
    }
    assert {difference.rows for difference in found} == {
        1,
        5,
        37,
        *matrix.both_sides(spec, how)[1:],
    }
    assert all(difference.different == difference.largest == 0 for difference in found)
    with pytest.raises(ValueError, match=r"module.npz: of a module with code abc, expected xyz"):
        list(recorded_bits.compare(tmp_path / "module.npz", spec, how, "xyz", op.run))

    def off_by_one(call: BoundCall) -> LayerNormGrads:
        gradients = gradients_of(op.run(call))
        assert gradients.grad_bias is not None
        gradients.grad_bias.view(np.uint16)[3] += 1
        return gradients

    found = list(recorded_bits.compare(tmp_path / "module.npz", spec, how, "abc", off_by_one))
    for difference in found:
        expected = (1, 1) if difference.result == "grad_bias" else (0, 0)
        assert (difference.different, difference.largest) == expected


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "iree_lnbwd.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )


@pytest.mark.drawn
def test_command() -> None:
    run = _command("verify", "--target=h200", "--emulate")
    assert run.returncode == 0, run.stderr
    ops = "layer_norm_backward, layer_norm, rms_norm, rms_norm_backward"
    assert f"{ops} for sm_90 in the emulator, tensors captured" in run.stdout
    assert "passed: 51 of 51 results within tolerance, 18 cases" in run.stdout
    # What takes long says what it does.
    assert all(line.startswith("iree-lnbwd: emulating ") for line in run.stderr.splitlines())


def test_command_on_random_rows() -> None:
    run = _command(
        "verify",
        "--target=sm_80",
        "--emulate",
        "--normalized-shape=96",
        "--dtype=bf16",
        "--rows=1,3",
    )
    assert run.returncode == 0, run.stderr
    assert "random rows of seed" in run.stdout
    assert "random 3  3x96" in run.stdout
    assert "passed: 6 of 6 results within tolerance, 2 cases" in run.stdout


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--emulate",), "target: expected the name of a GPU target beside --emulate, got none"),
        (("--emulate", "--target=host"), "target: there is no emulator for host"),
        (
            ("--emulate", "--target=sm_90", "--device=cuda"),
            "device: expected none beside --emulate",
        ),
        (
            ("--normalized-shape=8", "--data=x.npz"),
            "normalized-shape: expected no --data beside it",
        ),
    ],
)
def test_command_errors(arguments: tuple[str, ...], message: str) -> None:
    run = _command("verify", *arguments)
    assert run.returncode == 2
    assert run.stderr.startswith(f"iree-lnbwd: error: {message}")
    assert run.stdout == ""


def test_command_on_broken_modules(tmp_path: Path) -> None:
    """A module that reads beyond its bounds: one line says so, and the exit status."""
    target = find_target("sm_90")
    text = compiler.source_text(NormSpec((256,)), target)
    wide, narrow = (rf"\"normalized_shape\": [{n}]" for n in (256, 192))
    assert text.count(wide) == 1
    lying = compile_str(text.replace(wide, narrow), input_type="none", extra_args=target.flags)
    (tmp_path / "layer_norm_backward_n192_f32_sm_90.vmfb").write_bytes(lying)
    run = _command(
        "verify",
        "--emulate",
        "--target=sm_90",
        f"--modules={tmp_path}",
        "--normalized-shape=192",
        "--rows=2",
    )
    assert run.returncode == 1
    assert "FAULT: " in run.stdout
    assert "FAILED: a fault before the first result, 1 case, " in run.stdout
