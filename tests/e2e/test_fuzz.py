"""``scripts/fuzz``: a short run; and that it would find something, and forgets nothing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import iree_lnbwd as lnbwd
from iree_lnbwd.arguments import Results
from iree_lnbwd.operands import OPS

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import fuzz_cases  # noqa: E402

SEED = 11
# Public names that take no arguments of a user's: errors, and what the package makes itself.
NOT_CALLED = {
    *("ArtifactError", "CompileError", "DeviceError", "Artifact", "Manifest", "Target"),
    *("LayerNormGrads", "NormOutput", "RmsNormGrads"),
    *("Norm", "Bundle", "BundleFile", "targets", "reference", "__version__"),
}


def fuzz(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "fuzz"), f"--seed={SEED}", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("where", "cases"), [("cpu", 40), ("emulator", 6)])
def test_a_short_run_finds_nothing(where: str, cases: int) -> None:
    run = fuzz(f"--where={where}", f"--cases={cases}", "--jobs=2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(rf"^\d+ cases of {where} in \d+ s \(.*: 0 failed$", run.stdout, re.MULTILINE)


# How often a kind of case is run, so that it meets each argument, good and bad.
OFTEN = {
    **{
        "values": 5,
        "storage": 10,
        "junk": 800,
        "specs": 100,
        "compile": 40,
        "tune": 50,
        "bundle": 120,
    },
    "torch_junk": 400,
}


def test_every_public_argument_is_tried_good_and_bad() -> None:
    """A new argument that no case draws fails here."""
    kinds = fuzz_cases.KINDS["cpu"]
    tried = set()
    for kind, cases in OFTEN.items():
        for number in range(cases if kind in kinds else 0):
            tried |= fuzz_cases.run("cpu", SEED, number, kind).tried
    missing = [
        (name, parameter, sort)
        for name, function in fuzz_cases.PUBLIC.items()
        for parameter in inspect.signature(function).parameters
        for sort in ("good", "bad")
        if (name, parameter, sort) not in tried and (parameter, sort) != ("self", "bad")
    ]
    assert not missing


def test_every_public_function_is_tried() -> None:
    assert {name for name in lnbwd.__all__ if name not in NOT_CALLED} <= set(fuzz_cases.PUBLIC)
    if fuzz_cases.torch is not None:
        ours = fuzz_cases.lnbwd_torch()
        functions = {name for name in ours.__all__ if not isinstance(getattr(ours, name), type)}
        tried = {f"torch.{name}" for name in functions - fuzz_cases.CHANGE_THE_PROCESS}
        assert tried <= set(fuzz_cases.PUBLIC)


def outcome_of(number: int, kind: str) -> str:
    """What is wrong with a case; nothing where it is right."""
    try:
        fuzz_cases.run("cpu", SEED, number, kind)
    except fuzz_cases.Failure as failure:
        return str(failure)
    return ""


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By five percent, in one element of the last one."""

    def wrong(function: Callable[..., Results]) -> Callable[..., Results]:
        def call(**arguments: object) -> Results:
            results = function(**arguments)
            *_, last = (result for result in results if result is not None)
            if last.size:
                last.flat[0] *= 1.05
            return results

        return call

    monkeypatch.setattr(fuzz_cases, "libraries", lambda where: ("numpy",))
    for op in OPS:
        monkeypatch.setitem(fuzz_cases.PUBLIC, op, wrong(getattr(lnbwd, op)))
    said = [outcome_of(number, "values") for number in range(40)]
    assert sum("is wrong" in words for words in said) > 8
    assert all("is wrong" in words for words in said if words)


def test_a_failure_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(**_: object) -> None:
        raise ValueError("something is wrong")

    for op in OPS:
        monkeypatch.setitem(fuzz_cases.PUBLIC, f"reference.{op}", nameless)
    said = {outcome_of(number, "junk") for number in range(30)}
    assert "refused without a name: ValueError: something is wrong" in said


def test_a_run_goes_on_where_its_log_ends(tmp_path: Path) -> None:
    log = tmp_path / "fuzz.log"
    for cases in (6, 5):
        run = fuzz("--cases", cases, "--jobs=1", f"--log={log}", "--kind=specs")
        assert run.returncode == 0, run.stdout + run.stderr
    header, *results = map(json.loads, log.read_text().splitlines())
    assert header == {"seed": SEED, "where": "cpu"}
    assert [result["case"] for result in results] == list(range(11))


def test_a_process_that_ends_is_a_failure_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    script = (SCRIPTS / "fuzz").read_text(encoding="utf-8")
    (tmp_path / "fuzz").write_text(script, encoding="utf-8")
    (tmp_path / "fuzz_cases.py").write_text(
        "import os\n"
        "def run(where, seed, number, kind=None):\n"
        "    if number == 2: os.abort()\n"
        "    from types import SimpleNamespace\n"
        "    return SimpleNamespace(said=['kind'], refused='', tried=[])\n"
    )
    command = [sys.executable, str(tmp_path / "fuzz"), "--seed=5", "--cases=6", "--jobs=1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "FAILED scripts/fuzz --where=cpu --seed=5 --case=2\n" in run.stdout
    assert "the process ended with -6" in run.stdout
    assert re.search(
        r"6 cases of cpu in \d+ s \(1 failed, 5 kind; 0 refused .*: 1 failed", run.stdout
    )
