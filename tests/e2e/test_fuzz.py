"""``scripts/fuzz``: a short run; and that it would find something, and forgets nothing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

import iree_lnbwd as lnbwd
from iree_lnbwd import reference
from iree_lnbwd.calls import calling, modules
from iree_lnbwd.ops.arguments import Results
from iree_lnbwd.ops.operands import OPS, RMS_NORM

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import fuzz_cases  # noqa: E402
import fuzz_draw  # noqa: E402
import fuzz_turns  # noqa: E402

SEED = 11
NEEDS_TORCH = pytest.mark.skipif(fuzz_draw.torch is None, reason="PyTorch is not installed")
# Public names that take no arguments of a user's: errors, and what the package makes itself.
NOT_CALLED = {
    *("ArtifactError", "CompileError", "DeviceError", "Artifact", "Manifest", "Target"),
    *("GatedNormGrads", "LayerNormGrads", "NormGradsWithCopy", "NormGradsWithSum"),
    *("NormOutput", "RMSNormGrads"),
    *("Norm", "Bundle", "BundleFile", "targets", "reference", "__version__"),
}


def fuzz(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "fuzz"), f"--seed={SEED}", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.drawn
@pytest.mark.parametrize(("where", "cases"), [("cpu", 18), ("emulator", 6)])
def test_a_short_run_finds_nothing(where: str, cases: int) -> None:
    run = fuzz(f"--where={where}", f"--cases={cases}", "--jobs=2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(rf"^\d+ cases of {where} in \d+ s \(.*: 0 failed$", run.stdout, re.MULTILINE)


# How often a kind of case is run, so that it meets each argument, good and bad.
OFTEN = {
    **{
        "values": 5,
        "storage": 10,
        "junk": 1000,
        "specs": 100,
        "compile": 40,
        "tune": 50,
        "bundle": 120,
    },
    "torch_junk": 1000,
}


@pytest.mark.drawn
def test_every_public_argument_is_tried_good_and_bad() -> None:
    """A new argument that no case draws fails here."""
    kinds = fuzz_cases.KINDS["cpu"]
    tried = set()
    for kind, cases in OFTEN.items():
        for number in range(cases if kind in kinds else 0):
            tried |= fuzz_cases.run("cpu", SEED, number, kind).tried
    missing = [
        (name, parameter, sort)
        for name, function in fuzz_draw.PUBLIC.items()
        for parameter in inspect.signature(function).parameters
        for sort in ("good", "bad")
        if (name, parameter, sort) not in tried and (parameter, sort) != ("self", "bad")
    ]
    assert not missing


def test_every_public_function_is_tried() -> None:
    assert {name for name in lnbwd.__all__ if name not in NOT_CALLED} <= set(fuzz_draw.PUBLIC)
    if fuzz_draw.torch is not None:
        ours = fuzz_draw.lnbwd_torch()
        functions = {name for name in ours.__all__ if not isinstance(getattr(ours, name), type)}
        tried = {f"torch.{name}" for name in functions - fuzz_draw.CHANGE_THE_PROCESS}
        assert tried <= set(fuzz_draw.PUBLIC)


def test_kinds_that_take_seconds_are_drawn_and_rare() -> None:
    for where, kinds in fuzz_cases.KINDS.items():
        rng = np.random.default_rng(SEED)
        case = fuzz_draw.Case(where, rng, rng)
        drawn = Counter(fuzz_cases.draw_kind(case) for _ in range(2000))
        assert set(drawn) == set(kinds)
        assert sum(drawn[kind] for kind in fuzz_cases.RARE) < 200


def outcome_of(number: int, kind: str, where: str = "cpu") -> str:
    """What is wrong with a case; nothing where it is right."""
    try:
        fuzz_cases.run(where, SEED, number, kind)
    except fuzz_draw.Failure as failure:
        return str(failure)
    return ""


def first_failure(kind: str, where: str = "cpu", most: int = 24) -> str:
    """Of some cases, of which most would show it."""
    said = (outcome_of(number, kind, where) for number in range(most))
    return next(filter(None, said), "")


@pytest.mark.drawn
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
        monkeypatch.setitem(fuzz_draw.PUBLIC, op, wrong(getattr(lnbwd, op)))
    said = [outcome_of(number, "values") for number in range(40)]
    assert sum("is wrong" in words for words in said) > 8
    assert all("is wrong" in words for words in said if words)


@pytest.mark.drawn
def test_a_failure_without_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(**_: object) -> None:
        raise ValueError("something is wrong")

    for op in OPS:
        monkeypatch.setitem(fuzz_draw.PUBLIC, f"reference.{op}", nameless)
    said = {outcome_of(number, "junk") for number in range(30)}
    assert "refused without a name: ValueError: something is wrong" in said


class Forgetful(WeakValueDictionary[Any, Any]):
    """Kinds of call, of which one fact is left out."""

    def __init__(self, left_out: str) -> None:
        super().__init__()
        self._left_out = left_out

    def _without(self, key: Any) -> Any:
        kind, options, uri = key
        return kind, options._replace(**{self._left_out: None}), uri

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._without(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._without(key), value)


@pytest.mark.drawn
@pytest.mark.parametrize("left_out", ["eps", "weight_offset", "output_mask"])
def test_an_option_that_is_left_out_of_a_kind_of_call_is_found(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By calls in turn on an emulated GPU; each kind of sabotage by itself."""
    others = fuzz_turns._others

    def these(*arguments: Any) -> dict[str, Any]:
        found = others(*arguments)
        return {name: found[name] for name in (left_out, "eps") if name in found}

    monkeypatch.setattr(fuzz_turns, "_others", these)
    assert first_failure("emulated_turns", "emulator", 4) == ""
    forgetful = modules.Modules(modules.loaded, Forgetful(left_out))
    monkeypatch.setattr(calling, "MODULES", forgetful)
    assert first_failure("emulated_turns", "emulator")


@NEEDS_TORCH
@pytest.mark.parametrize("kind", ["torch_turns", "compiled"])
def test_an_eps_that_is_remembered_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function itself, or by what is compiled of it."""
    import fuzz_torch

    def forgetful(function: Callable[..., Any]) -> Callable[..., Any]:
        first: dict[Any, float] = {}

        def call(**arguments: Any) -> Any:
            eps = first.setdefault(arguments["input"].data_ptr(), arguments["eps"])
            return function(**{**arguments, "eps": eps})

        return call

    others, right = fuzz_torch.other_calls, fuzz_draw.torch.compile
    monkeypatch.setattr(fuzz_torch, "_BACKENDS", ("aot_eager",))
    monkeypatch.setattr(fuzz_torch, "other_calls", lambda *given: {"eps": others(*given)["eps"]})
    assert first_failure(kind, most=2) == ""
    if kind == "compiled":
        compile_it = lambda *given, **how: forgetful(right(*given, **how))  # noqa: E731
        monkeypatch.setattr(fuzz_draw.torch, "compile", compile_it)
    else:
        for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
            public = f"torch.{name}"
            monkeypatch.setitem(fuzz_draw.PUBLIC, public, forgetful(fuzz_draw.PUBLIC[public]))
    assert "is wrong" in first_failure(kind)


@NEEDS_TORCH
@pytest.mark.parametrize("has_sum", [False, True])
def test_a_compilers_rstd_may_be_off_as_a_forward_may_and_no_further(has_sum: bool) -> None:
    """From the output, the gradient of the input is off as rstd is, where rows were added up."""
    import fuzz_torch
    import torch

    rng = np.random.default_rng(SEED)
    case, columns = fuzz_draw.Case("cpu", rng, rng), 1024
    x, dy, grad_residual = torch.from_numpy(rng.standard_normal((3, 5, columns)))
    tensors = {
        "input": x.requires_grad_(),
        "weight": torch.from_numpy(rng.standard_normal(columns)),
    }
    reached = (dy, grad_residual) if has_sum else (dy,)
    if has_sum:
        tensors["residual"] = dy.clone().requires_grad_()
    options = {
        "normalized_shape": (columns,),
        "eps": 1e-12,
        "weight_offset": 0.0,
        "rows_per_set": 1,
    }
    options |= {"memory_efficient": True, "own_forward": False, "gate_first": False}
    call = fuzz_torch.Call(RMS_NORM, tensors, reached, options)
    outputs, gradients = fuzz_torch.computed(call, fuzz_draw.PUBLIC[call.function])

    def judge(roundings: float, *, is_fused: bool = True) -> None:
        part = roundings * np.finfo(np.float64).eps / 2
        added = grad_residual if has_sum else 0.0
        other = {name: g + part * (g - added) for name, g in gradients.items()}
        fuzz_torch.judge(case, call, (outputs, other), is_fused=is_fused)

    of_rstd = reference.LAMBDA * columns**0.5 / 2  # the root of the sum of squares
    judge(of_rstd)
    judge(0, is_fused=False)
    with pytest.raises(fuzz_draw.Failure, match="grad_input is wrong"):
        judge(of_rstd, is_fused=False)
    with pytest.raises(fuzz_draw.Failure, match="grad_input is wrong"):
        judge(3 * of_rstd)


@NEEDS_TORCH
@pytest.mark.parametrize("wrong", ["output", "eps"])
def test_a_wrong_replaced_norm_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off by one percent, or keeps the eps that it had first."""
    from iree_lnbwd.torch.replacement.form import Form

    right = Form.__call__
    first: dict[int, float] = {}

    def call(self: Form, module: Any, input: Any) -> Any:
        if wrong == "output":
            output: Any = right(self, module, input)
            return output * 1.01
        now, module.eps = module.eps, first.setdefault(id(module), module.eps)
        try:
            return right(self, module, input)
        finally:
            module.eps = now

    monkeypatch.setattr(Form, "__call__", call)
    assert "is not what it was" in first_failure("replaced", most=6)


@pytest.mark.drawn
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
