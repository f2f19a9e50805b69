"""Bundles from the compiler to the results: made, interrupted, shipped, called, added to."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_arrays import Namespace
from emulated_driver import EmulatedDriver
from support import assert_right, random_generator

import iree_lnbwd as lnbwd
from iree_lnbwd import ArtifactError, NormSpec, cli
from iree_lnbwd.bundles import choosing, container, serving
from iree_lnbwd.hardware import devices
from iree_lnbwd.ops.arguments import bind, rms_eps
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.runtime import gpu_module

N, EPS = 20, rms_eps("f32")
SPECS = (
    NormSpec((N,), eps=1e-5),
    NormSpec((N,), op="rms_norm", eps=EPS),
)
TARGETS = ("generic", "host", "sm_90")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that every test may read and none may change."""
    path = tmp_path_factory.mktemp("bundles") / "norms.lnb"
    assert lnbwd.bundle(SPECS, TARGETS, path).path == path
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The same bundle, to be changed."""
    return Path(shutil.copy(made, tmp_path))


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: whatever is compiled shows there."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def arguments() -> dict[str, Any]:
    rng = random_generator()
    x, dy = rng.standard_normal((2, 5, N), dtype=np.float32)
    return {
        "grad_output": dy,
        "input": x,
        "normalized_shape": N,
        "weight": rng.standard_normal(N, dtype=np.float32),
    }


def assert_backward_right(results: Any, given: dict[str, Any]) -> None:
    op = OPS["layer_norm_backward"]
    arrays = {operand.name: given.get(operand.name) for operand in op.arguments}
    assert_right(results, bind(op.name, arrays, (N,), eps=1e-5))


def main(*words: str | Path) -> int:
    return cli.main(list(map(str, words)))


# --- calls -----------------------------------------------------------------------------------


@pytest.mark.drawn
def test_calls_are_answered_by_the_members(made: Path, no_cache: Path) -> None:
    norms, given = lnbwd.Bundle(made), arguments()
    assert_backward_right(norms.layer_norm_backward(**given), given)
    x = given["input"]
    ours = norms.rms_norm(x, N, given["weight"])
    called = {"input": x, "residual": None, "weight": given["weight"]}
    assert_right(ours, bind("rms_norm", called, (N,), eps=EPS))
    assert not no_cache.exists()


def test_this_cpus_module_is_taken_before_that_for_any(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lnbwd.Bundle(made).module(SPECS[0]).target == "host"
    monkeypatch.setattr(choosing, "host_cpu", lambda: "x86_64-0123456789ab")
    assert lnbwd.Bundle(made, "local-sync").module(SPECS[0]).target == "generic"


def test_a_gpu_takes_a_module_for_an_older_one_and_the_user_is_told(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is the emulator."""
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: EmulatedDriver("cuda"))
    monkeypatch.setattr(devices, "_cuda_capability", lambda uri: (9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lnbwd.Bundle(made, "cuda").module(SPECS[0]).target == "sm_90"
    monkeypatch.setattr(devices, "_cuda_capability", lambda uri: (10, 0))
    told = r"best served by modules for sm_100, got one for sm_90"
    with pytest.warns(RuntimeWarning, match=told):
        assert lnbwd.Bundle(made, "cuda").module(SPECS[0]).target == "sm_90"


def test_calls_on_a_gpus_arrays(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind that is new, and of one that is known; the GPU is the emulator."""
    driver = EmulatedDriver("cuda")
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    monkeypatch.setattr(devices, "_cuda_capability", lambda uri: (9, 0))
    norms, asarray = lnbwd.Bundle(made, "cuda"), Namespace(driver).asarray
    for _ in range(2):
        given = arguments()
        put: dict[str, Any] = {
            k: asarray(v) if isinstance(v, np.ndarray) else v for k, v in given.items()
        }
        results = norms.layer_norm_backward(**put)
        on_host = (None if grad is None else grad.numpy() for grad in results)
        assert_backward_right(type(results)(*on_host), given)
    with pytest.raises(ValueError, match=r"^device: expected cuda://0, where input is, or None"):
        lnbwd.Bundle(made).layer_norm_backward(**put)


def test_a_gpu_does_not_take_a_module_that_needs_more_memory_than_it_has(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_cuda_capability", lambda uri: (12, 0))
    norms = lnbwd.Bundle(made, "cuda")
    sm_90 = next(m for m in norms.members if (m.spec, m.made_for) == (SPECS[0], "sm_90"))
    needed = r"it needs \d+ bytes of shared memory for a workgroup, this GPU has 101376"
    assert re.fullmatch(needed, str(serving.why_not(norms.file, sm_90, norms.device)))
    said = (
        r"no module of \S+ that cuda://0 runs \(there is one for generic, host, sm_90; that for "
        rf"sm_90 does not run: {needed}\); this adds it: iree-lnbwd bundle \S+ --target=sm_120 "
    )
    with pytest.raises(ArtifactError, match=said):
        norms.module(SPECS[0])


def test_only_what_is_used_is_read(copy: Path) -> None:
    norms, content = lnbwd.Bundle(copy), bytearray(copy.read_bytes())
    for member in norms.members:  # all but those that the call needs are destroyed
        if (member.spec, member.made_for) != (SPECS[0], "host"):
            for name, _ in member.files:
                place = content.index(name.encode()) + len(name)
                content[place + 100 : place + 200] = bytes(100)
    copy.write_bytes(content)
    given = arguments()
    assert_backward_right(norms.layer_norm_backward(**given), given)
    with pytest.raises(ArtifactError, match=r"host/rms_norm_n20_\S+_host\.json: altered"):
        norms.rms_norm(given["input"], N, given["weight"])


def test_threads_share_a_bundle(made: Path) -> None:
    norms, given = lnbwd.Bundle(made), arguments()
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(norms.layer_norm_backward, **given) for _ in range(16)]
        for job in jobs:
            assert_backward_right(job.result(), given)
    assert norms.module(SPECS[0]) is norms.module(SPECS[0])


def test_bad_arguments_are_refused_by_name(made: Path) -> None:
    norms = lnbwd.Bundle(made)
    with pytest.raises(TypeError, match=r"^spec: expected a NormSpec"):
        norms.module("layer_norm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight: expected shape"):
        norms.rms_norm(np.ones((2, N), np.float32), N, np.ones(7, np.float32))
    with pytest.raises(ValueError, match=r"^device: expected one of"):
        lnbwd.Bundle(made, "tpu")
    with pytest.raises(lnbwd.DeviceError, match=r"absent"):
        lnbwd.Bundle(made, "hip://63")
    with pytest.raises(ArtifactError, match=r"expected a single module, got a bundle"):
        lnbwd.load(made)


def test_what_is_missing_is_added_by_the_command_that_the_error_has(copy: Path) -> None:
    x = np.ones((2, 3, 4), np.float32)
    with pytest.raises(ArtifactError) as raised:
        lnbwd.Bundle(copy).layer_norm(x, (3, 4), weight_offset=0.0)
    said, _, command = str(raised.value).partition("; this adds it: ")
    assert said.endswith("that local-task runs (there is none for any target)")
    before = {member.name for member in lnbwd.Bundle(copy).members}
    program, *words = shlex.split(command)
    assert (program, main(*words)) == ("iree-lnbwd", 0)
    norms = lnbwd.Bundle(copy)
    assert np.all(norms.layer_norm(x, (3, 4)).output == 0)
    assert before < {member.name for member in norms.members}


# --- making ----------------------------------------------------------------------------------


@pytest.mark.drawn
def test_an_interruption_loses_nothing_that_was_compiled(
    made: Path, no_cache: Path, tmp_path: Path
) -> None:
    """And what comes in the end has the bytes of a bundle that was made at once."""
    path, targets = tmp_path / "new" / "norms.lnb", ("generic", "sm_90")
    told: list[str] = []

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lnbwd.bundle(SPECS, targets, path, jobs=1, progress=interrupt)
    assert not path.parent.exists()
    kept = len(list(no_cache.rglob("*.vmfb")))
    assert 1 <= kept < 4
    lnbwd.bundle(SPECS[::-1], targets[::-1], path, progress=told.append)
    assert sum(line.endswith(", compiled before") for line in told) == kept
    assert told[-1].startswith("4 of 4 modules: ")
    assert list(path.parent.iterdir()) == [path]
    file = lnbwd.BundleFile(made)
    same = [(m.made_for, *file.read(m)) for m in file.members if m.made_for in targets]
    assert path.read_bytes() == container.packed(same)


def test_words_after_two_dashes_are_in_the_manifests(tmp_path: Path) -> None:
    path, flag = tmp_path / "norms.lnb", "--iree-opt-level=O2"
    assert main("bundle", "--normalized-shape=20", "-o", path, "--", flag) == 0
    file = lnbwd.BundleFile(path)
    (member,) = file.members
    assert member.made_for == "generic"
    assert flag in file.read(member)[1].flags


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"specs": ()}, "specs: expected one or more, got none"),
        ({"specs": (NormSpec((8,), rows=3),)}, "specs: expected rows of None, got 3"),
        ({"specs": "x"}, "specs: expected NormSpecs, got 'x'"),
        ({"targets": ()}, "targets: expected one or more, got none"),
        ({"targets": ["sm_9"]}, "target: expected one of "),
        ({"targets": 7}, "targets: expected names, got 7"),
        ({"path": "norms.zip"}, "path: expected the name of a file *.lnb, got 'norms.zip'"),
        ({"path": "."}, "path: expected the name of a file *.lnb, got '.'"),
        ({"path": 7}, "path: expected a path, got 7"),
        ({"jobs": 0}, "jobs: expected None or an int of at least 1, got 0"),
        ({"include": 7}, "include: expected a path or None, got int"),
        ({"include": "none.lnb"}, "include: none.lnb: cannot be read: No such file"),
        ({"progress": 7}, "progress: expected a function or None, got 7"),
        ({"extra_flags": ("--iree-hal-target-device=hip",)}, "extra_flags"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_compiled(
    changed: dict[str, Any], expected: str, no_cache: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"specs": SPECS, "targets": "generic", "path": tmp_path / "x.lnb"}
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        lnbwd.bundle(**given | changed)
    assert not no_cache.exists()
    assert not (tmp_path / "x.lnb").exists()


# --- the command -----------------------------------------------------------------------------


def test_the_commands_read_a_bundle(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("inspect", made) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{made}: 6 modules, ")
    for member in lnbwd.BundleFile(made).members:
        assert re.search(rf"^{re.escape(member.name)} .*{member.vmfb.sha256}", said, re.MULTILINE)

    assert main("targets", made, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["modules"] for each in listed} == dict.fromkeys(TARGETS, 2)
    assert main("targets", "--json") == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)} > set(TARGETS)


def test_verify_runs_what_runs_here_and_says_what_does_not(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("verify", made, "--rows=3", "--device=local-sync") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"4 of 6 members of {made} run here, random rows of seed ")
    not_run = re.findall(
        r"^not run: (\S+): it is for sm_90, this device is host$", said, re.MULTILINE
    )
    assert not_run == [m.name for m in lnbwd.BundleFile(made).members if m.made_for == "sm_90"]
    assert "passed: 10 of 10 results within tolerance, 4 cases" in said
    one = ("--normalized-shape=20", "--op=rms_norm", "--rows=3")
    assert main("verify", f"--modules={made}", "--target=generic", *one) == 0
    assert "passed: 2 of 2 results" in capsys.readouterr().out
    assert main("verify", f"--modules={made}", "--normalized-shape=25") == 2
    assert "this adds it: iree-lnbwd bundle --with=" in capsys.readouterr().err
    assert main("verify", f"--modules={made}", "--target=sm_90", "--emulate", *one) == 0
    assert main("verify", made, "--device=hip") == 2
    assert main("verify", made, "--dtype=f32") == 2
    assert "dtype: expected none beside a bundle, got f32" in capsys.readouterr().err


# --- without the compiler --------------------------------------------------------------------


def test_a_machine_without_the_compiler_computes_from_a_bundle(made: Path, no_cache: Path) -> None:
    """By `Bundle`, and by the functions where $IREE_LNBWD_BUNDLE names it."""
    script = f"""
import sys
sys.modules["iree.compiler"] = None
import importlib.metadata as metadata
import numpy as np
import iree_lnbwd as lnbwd
from iree_lnbwd.compiling import compiler

def absent():
    raise lnbwd.CompileError("no compiler here")

compiler.compiler_version = absent
x = np.arange(3 * {N}, dtype=np.float32).reshape(3, {N}) % 7
ours = lnbwd.layer_norm_backward(x, x[::-1], {N}, weight=x[0])
theirs = lnbwd.Bundle(sys.argv[1]).layer_norm_backward(x, x[::-1], {N}, weight=x[0])
assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs))
try:
    lnbwd.rms_norm(x, {N}, eps=0.5)
except lnbwd.CompileError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, made],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "IREE_LNBWD_BUNDLE": str(made)},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(
        r"no compiler here; IREE_LNBWD_BUNDLE: \S+norms.lnb: no module of rms_norm_n20_f32_\S+ "
        r"that local-task runs \(there is none for any target\); this adds it: iree-lnbwd .*\n",
        ended.stdout,
    )
    assert not no_cache.exists()


def test_the_functions_look_into_the_users_bundle_first(
    no_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not in it is compiled, and what is no bundle is refused by the variable's name."""
    spec = NormSpec((N,), op="rms_norm", eps=0.03125)  # which no other test has loaded
    path = tmp_path / "norms.lnb"
    lnbwd.bundle(spec, "generic", path)
    shutil.rmtree(no_cache)
    monkeypatch.setenv("IREE_LNBWD_BUNDLE", str(path))
    x = np.ones((2, N), np.float32)
    lnbwd.rms_norm(x, N, x[0], 0.03125)
    assert not no_cache.exists()
    lnbwd.rms_norm(x, N, x[0], 0.0625)
    assert len(list(no_cache.rglob("*.vmfb"))) == 1
    monkeypatch.setenv("IREE_LNBWD_BUNDLE", str(tmp_path / "none.lnb"))
    with pytest.raises(ArtifactError, match=r"^IREE_LNBWD_BUNDLE: \S+none.lnb: cannot be read"):
        lnbwd.rms_norm(x, N, x[0], 0.09375)
