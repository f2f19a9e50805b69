"""Tuning from the candidates to the next process: the emulator is the GPU, and a table the clock.

All but the driver and the times is what runs on a GPU. No time decides a test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_driver import EmulatedDriver

import iree_lnbwd as lnbwd
from iree_lnbwd import CompileError, Manifest, NormSpec, cli, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import Gpu
from iree_lnbwd.hardware.products import find_product
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.schedules import Forward, OnePass, Schedule, schedule_to_dict
from iree_lnbwd.schedules.candidates import sample
from iree_lnbwd.stores import tuned_choice, tuned_folder
from iree_lnbwd.tuning import checks, stopwatch, tuner
from iree_lnbwd.tuning.on_gpu import CallMemory, Contender
from iree_lnbwd.tuning.ranking import Times
from iree_lnbwd.tuning.stopwatch import Stopwatch

SM_90, GPU = find_target("sm_90"), Gpu("NVIDIA H200", 132, 50 << 20)
FORWARD = NormSpec((64,), "bf16", op="rms_norm", eps=1e-5)
BACKWARD = NormSpec((96,), "bf16")
TESTS = Path(__file__).parents[1]


class Clock:
    """Has a time for each candidate, by its number; runs nothing."""

    microseconds: Mapping[int, float] = {}

    def __init__(self, driver: EmulatedDriver, target: Target, gpu: Gpu) -> None:
        assert (target, gpu) == (SM_90, GPU)

    def times(
        self, calls: Iterable[tuple[int, Callable[[], None]]], rounds: int
    ) -> dict[int, Times]:
        """As `Stopwatch.times`."""
        return {number: Times((self.microseconds[number],) * rounds) for number, _ in calls}

    def close(self) -> None:
        """As `Stopwatch.close`."""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """An emulated GPU, for calls of so few rows that it is done with them soon."""
    driver = EmulatedDriver("cuda")
    monkeypatch.setattr(tuner, "Driver", lambda uri: driver)
    monkeypatch.setattr(tuner, "target_of", lambda uri: SM_90)
    monkeypatch.setattr(tuner, "gpu_of", lambda uri: GPU)
    monkeypatch.setattr(tuner, "Stopwatch", Clock)
    monkeypatch.setattr(tuner, "_ELEMENTS", 1 << 10)
    monkeypatch.setattr(checks, "_MOST_ELEMENTS", 1 << 10)
    monkeypatch.setenv("IREE_LNBWD_TUNING", str(tmp_path / "tuning"))
    return driver


def candidates(spec: NormSpec, count: int) -> tuple[Schedule, ...]:
    """Those that compete, in their order."""
    chosen = schedules.choose(spec, SM_90)
    return sample(spec, SM_90, find_product("h200"), chosen, count, 0)


def assert_all_given_back(driver: EmulatedDriver) -> None:
    assert driver.reserved
    assert all(memory.buffer.released for memory in driver.reserved)


NEXT_PROCESS = """
import json, sys
from pathlib import Path
from emulated_driver import EmulatedDriver
from iree_lnbwd import NormSpec, cli, compile
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri, Gpu
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.schedules import schedule_to_dict
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.stores import tuned_choice

driver = EmulatedDriver("cuda")
gpu_module.Driver = lambda uri: driver
modules.target_of = lambda uri: find_target("sm_90")
tuned_choice.gpu_of = lambda uri: Gpu(sys.argv[2], 132, 0)
spec = NormSpec.from_dict(json.loads(sys.argv[1]))
norm = modules.loaded(spec, DeviceUri.parse("cuda"))
made = [norm._module.description.schedule]
for target in ("h200", "h100"):
    made.append(compile(spec, target, target).manifest.schedule)
    assert cli.main(["inspect", f"{target}/{spec.name}_sm_90.vmfb"]) == 0
Path("made.json").write_text(json.dumps(list(map(schedule_to_dict, made))))
"""


@pytest.mark.drawn
def test_the_next_process_takes_the_winner(
    gpu: EmulatedDriver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At first use, and in `compile` for this GPU's product alone; `inspect` says so."""
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 99.9, 2: 80.0})
    said: list[str] = []
    (outcome,) = lnbwd.tune(FORWARD, candidates=3, progress=said.append)
    assert_all_given_back(gpu)
    chosen, _, fastest = map(schedule_to_dict, candidates(FORWARD, 3))
    tuned = outcome.tuned
    assert tuned is not None
    assert (schedule_to_dict(tuned.schedule), schedule_to_dict(tuned.chosen)) == (fastest, chosen)
    assert (tuned.microseconds, tuned.chosen_microseconds) == (80.0, 100.0)
    assert "20.0% less" in tuned.gain
    assert outcome.is_new
    assert outcome.wrong == ()
    assert said[0].endswith(": compiling 3 schedules")
    assert any("checking 3 schedules" in line for line in said)
    assert lnbwd.tune(FORWARD, candidates=3) == (outcome._replace(is_new=False),)
    text = {
        target: compiler.source_text(FORWARD, SM_90, schedule=how)
        for target, how in (("h200", tuned.schedule), ("h100", tuned.chosen))
    }
    words = ["compile", "--print-ir", "--op=rms_norm", "--normalized-shape=64", "--dtype=bf16"]
    for target, expected in text.items():
        capsys.readouterr()
        assert cli.main([*words, "--eps=1e-5", f"--target={target}"]) == 0
        assert capsys.readouterr().out == expected
    for name, first_use in (("NVIDIA H200", fastest), ("NVIDIA GH200 480GB", chosen)):
        here = tmp_path / name.replace(" ", "")
        here.mkdir()
        ended = subprocess.run(
            [sys.executable, "-c", NEXT_PROCESS, json.dumps(FORWARD.to_dict()), name],
            capture_output=True,
            text=True,
            check=False,
            cwd=here,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert json.loads((here / "made.json").read_text()) == [first_use, fastest, chosen]
        sources = [line for line in ended.stdout.splitlines() if line.startswith("schedule")]
        assert sources == [f"schedule  {tuned.source}", "schedule  rules"]


def test_the_choice_keeps_its_place_unless_it_is_beaten(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it is the fastest is kept, too, and is timed again only if it is asked for."""
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 99.5})
    (outcome,) = lnbwd.tune(FORWARD, candidates=2)
    tuned = outcome.tuned
    assert tuned is not None
    assert tuned.schedule == tuned.chosen == schedules.choose(FORWARD, SM_90)
    assert "the choice without tuning is the fastest" in tuned.gain
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 50.0})
    assert lnbwd.tune(FORWARD, candidates=2)[0].tuned == tuned
    (again,) = lnbwd.tune(FORWARD, candidates=2, again=True)
    assert again.tuned is not None
    assert again.tuned.schedule == candidates(FORWARD, 2)[1]


@pytest.mark.drawn
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.op)
def test_weights_with_sets(
    spec: NormSpec, gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tuned by themselves. What is wrong with the sets of heads alone is wrong."""
    of_sets = replace(spec, weight_sets=True)
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 10.0, 2: 50.0})
    said: list[str] = []
    first, second, third = candidates(of_sets, 3)
    results = CallMemory.results

    def wrong(memory: CallMemory, contender: Contender, sets: Sets | None) -> dict[str, Array]:
        found = results(memory, contender, sets)
        if contender.schedule == second and sets == Sets(32, 1):
            found[next(iter(found))][-1] = 99
        return found

    monkeypatch.setattr(CallMemory, "results", wrong)
    with pytest.warns(RuntimeWarning, match=r"^tune: please report: .* of 32 sets: "):
        (outcome,) = lnbwd.tune(of_sets, candidates=3, progress=said.append)
    assert_all_given_back(gpu)
    (wrong_one,) = outcome.wrong
    assert str(second) in wrong_one
    tuned = outcome.tuned
    assert tuned is not None
    assert (tuned.spec, tuned.chosen, tuned.schedule) == (of_sets, first, third)
    assert tuned_folder.find(spec, SM_90, GPU) is None
    assert tuned_choice.for_product(of_sets, SM_90, find_product("h200")) == tuned


def sabotage(victim: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the IR of one schedule's module: its 1 / N is that of another N."""

    def build(spec: NormSpec, target: Target, *, schedule: Schedule) -> tuple[bytes, Manifest]:
        text, planned = compiler.plan(spec, target, schedule=schedule)
        if schedule == victim:
            text, changes = re.subn(r"(?m)^#inv_n = \S+", "#inv_n = 1.0e-3", text)
            assert changes == 1
        return compiler.build_planned(text, planned)

    monkeypatch.setattr(compiler, "build", build)


@pytest.mark.drawn
def test_a_wrong_candidate_is_reported_and_not_kept(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is the fastest by far."""
    _, victim, other = candidates(BACKWARD, 3)
    assert isinstance(victim, OnePass)
    sabotage(victim, monkeypatch)
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 10.0, 2: 90.0})
    with pytest.warns(RuntimeWarning, match="^tune: please report: layer_norm_backward_n96_bf16: "):
        (outcome,) = lnbwd.tune(BACKWARD, candidates=3)
    (wrong,) = outcome.wrong
    assert str(victim) in wrong
    assert "of what is allowed" in wrong
    assert outcome.tuned is not None
    assert outcome.tuned.schedule == other
    assert tuned_folder.kept(_raise) == (outcome.tuned,)


def test_a_forward_that_adds_up_in_another_order_is_not_kept(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right, but its bits would no longer be those of an unfused call."""
    chosen = schedules.choose(FORWARD, SM_90)
    assert isinstance(chosen, Forward)
    other = replace(chosen, threads=2 * chosen.threads, chunks=1)
    monkeypatch.setattr(tuner, "sample", lambda *_: (chosen, other))
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 10.0})
    with pytest.warns(RuntimeWarning, match=r"its bits are not those of the choice$"):
        (outcome,) = lnbwd.tune(FORWARD)
    assert outcome.tuned is not None
    assert outcome.tuned.schedule == chosen


def test_where_the_choice_is_wrong_nothing_is_kept(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sabotage(candidates(FORWARD, 2)[0], monkeypatch)
    words = ["tune", "--op=rms_norm", "--normalized-shape=64", "--dtype=bf16", "--eps=1e-5"]
    assert cli.main([*words, "--candidates=2"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("WRONG, and not kept: rms_norm_n64_bf16_eps1e-05: Forward(")
    assert out.endswith("nothing is kept: the choice without tuning is wrong\n")
    assert tuned_folder.kept(_raise) == ()
    assert_all_given_back(gpu)


def test_a_compiler_that_fails_is_an_error(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise CompileError("no room")

    monkeypatch.setattr(compiler, "build", build)
    with pytest.raises(CompileError, match=r"^no room$"):
        lnbwd.tune(FORWARD, candidates=2)
    assert tuned_folder.kept(_raise) == ()


@pytest.mark.drawn
def test_an_interruption_keeps_what_is_done(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGTERM, in the middle of the second norm; the next run goes on from there."""
    monkeypatch.setattr(Clock, "microseconds", {0: 100.0, 1: 50.0})
    before = signal.getsignal(signal.SIGTERM)

    def kill(line: str) -> None:
        if line.startswith("layer_norm_n64_") and "adversarial" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("iree_lnbwd.cli.tune.show_progress", kill)
    words = ["tune", "--normalized-shape", "64", "--dtype", "bf16", "--candidates=2"]
    words += ["--op", "rms_norm,layer_norm"]
    assert cli.main(words) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err == "iree-lnbwd: interrupted\n"
    (kept,) = tuned_folder.kept(_raise)
    assert kept.spec.op == "rms_norm"
    assert [path.suffix for path in tuned_folder.directory().iterdir()] == [".json"]
    assert_all_given_back(gpu)
    monkeypatch.setattr("iree_lnbwd.cli.tune.show_progress", lambda line: None)
    assert cli.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert "kept before" in out[1]
    assert {tuned.spec.op for tuned in tuned_folder.kept(_raise)} == {"rms_norm", "layer_norm"}


def test_a_folder_that_cannot_be_used_is_found_out_first(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("IREE_LNBWD_TUNING", str(tmp_path / "file" / "tuning"))
    with pytest.raises(OSError, match=r"IREE_LNBWD_TUNING can name a folder of your own$"):
        lnbwd.tune(FORWARD)
    assert gpu.reserved == []


@pytest.mark.parametrize(
    ("specs", "error", "said"),
    [
        ("rms_norm", TypeError, "^specs: expected NormSpecs, got 'rms_norm'$"),
        ([FORWARD, None], TypeError, "^specs: expected NormSpecs, got "),
    ],
)
def test_arguments(specs: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        lnbwd.tune(specs)  # type: ignore[arg-type]


def test_the_stopwatch_times_a_call_and_not_what_cleans_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel of the emulator takes a microsecond: so the times tell what is between events."""
    driver = EmulatedDriver("cuda")
    monkeypatch.setattr(stopwatch, "_LEAST_BYTES", 1 << 15)
    monkeypatch.setattr(stopwatch, "_WARMING", 1)
    watch = Stopwatch(driver, SM_90, Gpu("small", 1, 1))  # type: ignore[arg-type]
    cleaning = len(driver.launches)
    watch._clean()
    cleaning = len(driver.launches) - cleaning
    assert cleaning > 0
    turns: list[tuple[int, int]] = []

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            turns.append((number, len(driver.launches)))
            for _ in range(number):  # as many kernels
                watch._clean()

        return run

    times = watch.times([(n, call(n)) for n in (1, 2, 3)], rounds=5)
    assert {n: set(of.turns) for n, of in times.items()} == {n: {n * cleaning} for n in (1, 2, 3)}
    rounds = np.array(turns[3:]).reshape(5, 3, 2)
    assert all(set(each[:, 0]) == {1, 2, 3} for each in rounds)
    assert len({tuple(each[:, 0]) for each in rounds}) > 1
    ended = 0
    for number, began in turns[3:]:
        assert began - ended >= cleaning  # other memory was read before it
        ended = began + number * cleaning
    watch.close()
    assert_all_given_back(driver)


def _raise(error: ValueError) -> None:
    raise error
