"""Finds the fastest schedules on a GPU of this machine, and keeps them."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import NamedTuple

from iree_lnbwd import notices, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.errors import CompileError, DeviceError, counted, shown
from iree_lnbwd.hardware.devices import DeviceUri, Gpu, gpu_of, target_of
from iree_lnbwd.hardware.products import standing_for
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime.gpu_driver import Driver
from iree_lnbwd.schedules import Forward, Schedule
from iree_lnbwd.schedules.candidates import sample
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.stores.tuned import GpuSchedule, Tuned, code_sha256, subject, why_stale
from iree_lnbwd.tuning.checks import Check, checks
from iree_lnbwd.tuning.on_gpu import STREAM, CallMemory, Contender, sets_of_calls
from iree_lnbwd.tuning.ranking import Times, finalists, winner
from iree_lnbwd.tuning.stopwatch import Stopwatch

CANDIDATES = 48  # they take about half a minute of one core to compile

_ELEMENTS = 1 << 26  # of the calls that decide: far more than any cache holds
_FEWER_ROWS = (1, 64, 1024, 4096)  # at which the winner must not be slower than the choice
_FIRST_TURNS, _LAST_TURNS = 11, 41  # of each candidate, and of each finalist
_FINALISTS = 6

Progress = Callable[[str], None]


class Outcome(NamedTuple):
    """What came of tuning one norm.

    Attributes:
        spec: The norm, as ``tuned.subject`` has it.
        tuned: What is kept about it now; None if nothing is, because the choice without tuning
            computed something wrong.
        wrong: What was wrong about candidates: each is an error of this package, or of the GPU.
        is_new: Whether it was timed; if not, what had been kept still holds.
    """

    spec: NormSpec
    tuned: Tuned | None
    wrong: tuple[str, ...]
    is_new: bool


def tune(
    specs: NormSpec | Sequence[NormSpec],
    device: str = "cuda",
    *,
    candidates: int = CANDIDATES,
    seed: int = 0,
    again: bool = False,
    progress: Progress | None = None,
) -> tuple[Outcome, ...]:
    """Times schedules for norms on a GPU of this machine, and keeps the fastest of each.

    From then on, processes of this user that compile for such a GPU take these schedules: the
    functions, PyTorch's operators, and `compile` for the GPU's product. They are in
    ``$IREE_LNBWD_TUNING`` (``~/.local/share/iree-lnbwd``), a file for each norm and kind of GPU.
    What was tuned no longer counts after an upgrade that changes the code or the choice.

    Each candidate is checked against the f64 reference. One that is wrong is reported by a warning
    and never kept. The choice without tuning competes and keeps its place unless another schedule
    is faster by more than noise. Schedules of a forward do not change its bits.

    What is found about a norm is kept before the next one begins, so an interruption loses only
    the norm that it interrupts.

    Args:
        specs: The norms, of any number of rows.
        device: A GPU, as an IREE device URI: "cuda", "hip", "cuda://1".
        candidates: How many schedules compete for each norm, at least 1.
        seed: Decides which schedules do, at least 0.
        again: Times norms anew of which what was found before still holds.
        progress: Is told what is being done, a line at a time.

    Returns:
        What came of each norm, in order; norms that share what is tuned come once.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
        DeviceError: The device is no GPU, is absent, fits no target, or its driver refuses.
        CompileError: The compiler is missing.
        OSError: The folder cannot be used; nothing is timed then.
    """
    came = tuple(
        outcomes(specs, device, candidates=candidates, seed=seed, again=again, progress=progress)
    )
    for outcome in came:
        for wrong in outcome.wrong:
            notices.warn(f"tune: please report: {wrong}")
    return came


def outcomes(
    specs: NormSpec | Sequence[NormSpec],
    device: str,
    *,
    candidates: int,
    seed: int,
    again: bool,
    progress: Progress | None,
) -> Iterator[Outcome]:
    """What comes of each norm, when it is kept; otherwise as `tune`, without its warnings."""
    norms = _checked(specs)
    for name, value, least in (("candidates", candidates, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, got {shown(value)}")
    if not isinstance(again, bool):
        raise TypeError(f"again: expected a bool, got {shown(again)}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function or None, got {shown(progress)}")
    uri = DeviceUri.parse(device)
    if uri.backend == "cpu":
        raise DeviceError(f"device: expected a GPU to tune on, such as cuda or hip, got {uri}")
    compiler.compiler_version()
    target, gpu = target_of(uri), gpu_of(uri)
    tell = progress or (lambda line: None)
    try:
        tuned_folder.make()
        with contextlib.ExitStack() as closing:
            tuner: _Tuner | None = None
            for norm in norms:
                if not again and (before := _kept(norm, target, gpu)) is not None:
                    yield Outcome(norm, before, (), False)
                    continue
                if tuner is None:
                    tuner = _Tuner(uri, target, gpu)
                    closing.callback(tuner.close)
                tuned, wrong = tuner.tuned(norm, candidates, seed, tell)
                if tuned is not None:
                    tuned_folder.keep(tuned)
                yield Outcome(norm, tuned, wrong, True)
    except UnusableError as error:
        raise OSError(str(error)) from error


def _checked(specs: object) -> tuple[NormSpec, ...]:
    given = (specs,) if isinstance(specs, NormSpec) else specs
    if not isinstance(given, Sequence) or not all(isinstance(spec, NormSpec) for spec in given):
        raise TypeError(f"specs: expected NormSpecs, got {shown(specs)}")
    for spec in given:
        if spec.rows is not None:
            raise ValueError(f"specs: expected rows of None, got {spec.rows} of {spec.name}")
        if spec.strided_rows:
            raise ValueError(f"specs: expected rows that follow each other, got {spec.name}")
    return tuple(dict.fromkeys(map(subject, given)))


def _kept(norm: NormSpec, target: Target, gpu: Gpu) -> Tuned | None:
    """What was found before and still holds; what is damaged is found anew."""
    try:
        before = tuned_folder.find(norm, target, gpu)
    except ValueError:
        return None
    return before if before is not None and why_stale(before) is None else None


class _Tuner:
    """Tunes on one GPU."""

    def __init__(self, uri: DeviceUri, target: Target, gpu: Gpu) -> None:
        self._target, self._gpu = target, gpu
        self._driver = Driver(uri)
        self._stopwatch = Stopwatch(self._driver, target, gpu)

    def close(self) -> None:
        """Gives the GPU's memory back."""
        self._stopwatch.close()

    def tuned(
        self, norm: NormSpec, count: int, seed: int, tell: Progress
    ) -> tuple[Tuned | None, tuple[str, ...]]:
        """The fastest of so many candidates, and what was wrong about others."""
        target = self._target
        chosen = schedules.choose(norm, target)
        assert isinstance(chosen, GpuSchedule)
        product = replace(standing_for(target.name), processors=self._gpu.processors)
        found = sample(norm, target, product, chosen, count, seed)
        right, wrong = self._judged(norm, found, tell)
        if 0 not in right:
            return None, wrong
        rows = max(1, _ELEMENTS // norm.columns)
        tell(f"{norm.name}: timing {counted(len(right), 'schedule')} at {counted(rows, 'row')}")
        several = [(m, s) for m in (rows, *(m for m in _FEWER_ROWS if m < rows))
                   for s in sets_of_calls(norm, m)]  # fmt: skip
        most = max(1 if sets is None else sets.number for _, sets in several)
        with contextlib.closing(CallMemory(self._driver, norm, rows, sets=most)) as memory:
            first = self._times(memory, right, *several[0], _FIRST_TURNS)
            last = [0, *finalists(first, _FINALISTS)]
            tell(f"{norm.name}: timing the fastest {len(last) - 1} beside the choice")
            final = [
                self._times(memory, {n: right[n] for n in last}, *of_call, _LAST_TURNS)
                for of_call in several
            ]
        best = winner(final)
        schedule = right[best].schedule
        assert isinstance(schedule, GpuSchedule)
        return Tuned(
            spec=norm,
            target=target.name,
            gpu=self._gpu.name,
            processors=self._gpu.processors,
            compiler=compiler.compiler_version(),
            code_sha256=code_sha256(norm, target, schedule),
            date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
            rows=rows,
            candidates=len(found),
            microseconds=round(final[0][best].median, 3),
            chosen_microseconds=round(final[0][0].median, 3),
            chosen=chosen,
            schedule=schedule,
        ), wrong

    def _times(
        self,
        memory: CallMemory,
        contenders: dict[int, Contender],
        rows: int,
        sets: Sets | None,
        turns: int,
    ) -> dict[int, Times]:
        calls = ((number, memory.call(one, rows, sets)) for number, one in contenders.items())
        return self._stopwatch.times(calls, turns)

    def _judged(
        self, norm: NormSpec, found: Sequence[Schedule], tell: Progress
    ) -> tuple[dict[int, Contender], tuple[str, ...]]:
        """The candidates that compute what they should, and what is wrong about the others.

        They are numbered; number 0 is the choice without tuning.
        """
        right: dict[int, Contender] = {}
        wrong: dict[int, str] = {}
        tell(f"{norm.name}: compiling {counted(len(found), 'schedule')}")
        for number, made in self._made(norm, found):
            tell(f"{norm.name}: compiled {len(right) + len(wrong) + 1} of {len(found)} schedules")
            if isinstance(made, Contender):
                right[number] = made
            else:
                wrong[number] = str(made)
        for check in checks(norm, found):
            tell(f"{norm.name}: checking {len(right)} schedules, {check.name}")
            for number, why in self._wrong(norm, check, right).items():
                wrong[number] = why
                del right[number]
        self._driver.synchronize(STREAM)  # a GPU that no longer works says so
        said = (f"{norm.name}: {found[n]}: {wrong[n]}" for n in sorted(wrong))
        return right, tuple(said)

    def _wrong(
        self, norm: NormSpec, check: Check, contenders: dict[int, Contender]
    ) -> dict[int, str]:
        """What is wrong about the results of some contenders."""
        wrong: dict[int, str] = {}
        of_choice: dict[str, bytes] = {}
        call = check.call
        sets = 1 if call.sets is None else call.sets.number
        with contextlib.closing(
            CallMemory(self._driver, norm, call.rows, call.arrays, sets)
        ) as memory:
            for number in sorted(contenders):  # the choice comes first
                one = contenders[number]
                try:
                    results = memory.results(one, call.sets)
                except DeviceError as error:
                    wrong[number] = f"{check.name}: {error}"
                    continue
                why = check.wrong(results)
                if why is None and isinstance(one.schedule, Forward):
                    bits = {name: array.tobytes() for name, array in results.items()}
                    of_choice = of_choice or bits
                    if bits != of_choice:
                        why = f"{check.name}: its bits are not those of the choice"
                if why is not None:
                    wrong[number] = why
        return wrong

    def _made(
        self, norm: NormSpec, found: Sequence[Schedule]
    ) -> Iterator[tuple[int, Contender | CompileError | DeviceError]]:
        """The modules, in any order, compiled and loaded side by side.

        Raises:
            CompileError, DeviceError: The choice without tuning cannot be compiled or loaded.
        """

        def make(number: int) -> Contender | CompileError | DeviceError:
            try:
                vmfb, _ = compiler.build(norm, self._target, schedule=found[number])
                return Contender(norm, found[number], self._driver, vmfb)
            except (CompileError, DeviceError) as error:
                if number == 0:
                    raise
                return error

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            numbers = {pool.submit(make, number): number for number in range(len(found))}
            try:
                for done in as_completed(numbers):
                    yield numbers[done], done.result()
            except BaseException:  # interrupted, or nothing can be compiled
                pool.shutdown(cancel_futures=True)
                raise
