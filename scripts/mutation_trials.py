"""Mutants and the tests that have to notice them, in processes of their own."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - imported once, for all that are forked
import numpy as np  # noqa: F401
import pytest
from mutation import ROOT, SUBJECTS, Mutant, function_at, functions_of

_DATA_SEED = "20261125"  # of the tests' random data: a mutant is killed or not, whoever asks
# Beyond what the tests take without a change; then a mutant counts as noticed.
_SECONDS_OF_A_TEST = 30
_SECONDS_AFRESH = 180
_BROKEN = 70  # the exit status of a process of these that failed itself


class _Changed(importlib.machinery.SourceFileLoader):
    """A module whose code is another than its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        """The changed code."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed module."""

    def __init__(self, mutant: Mutant) -> None:
        self._subject, self._source = mutant.subject, mutant.source()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As every finder."""
        if fullname != self._subject.module:
            return None
        file = str(ROOT / self._subject.path)
        loader = _Changed(fullname, file, self._source)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def _written_in(module: ModuleType) -> dict[str, FunctionType]:
    """The functions and methods in the code of a module, by their qualified names."""
    found = {}
    spaces = [vars(module)]
    while spaces:
        for value in spaces.pop().values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                spaces.append({k: v for k, v in vars(value).items() if not isinstance(v, type)})
                continue
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, functools.cached_property):
                value = value.func
            elif isinstance(value, classmethod | staticmethod):
                value = value.__func__
            if callable(value) and not isinstance(value, type):
                value = inspect.unwrap(value)
            if isinstance(value, FunctionType) and value.__code__.co_filename == module.__file__:
                found[value.__qualname__] = value
    return found


def _changed(mutant: Mutant) -> ModuleType:
    """The changed module, beside the imported one.

    Raises:
        Exception: It cannot be imported.
    """
    module = sys.modules[mutant.subject.module]
    changed = ModuleType(module.__name__)
    changed.__file__ = module.__file__
    sys.modules[module.__name__] = changed  # dataclasses look there
    try:
        code = compile(mutant.source(), str(module.__file__), "exec", dont_inherit=True)
        exec(code, vars(changed))
    finally:
        sys.modules[module.__name__] = module
    return changed


def _change_in_place(function: str, module: ModuleType, changed: ModuleType) -> bool:
    """Gives a function of an imported module its changed code, and returns whether it could."""
    before, after = (_written_in(one).get(function) for one in (module, changed))
    if before is None or after is None:
        return False
    if before.__code__.co_freevars != after.__code__.co_freevars:
        return False
    before.__code__ = after.__code__
    before.__defaults__, before.__kwdefaults__ = after.__defaults__, after.__kwdefaults__
    return True


class Outcome(enum.IntEnum):
    """What came of a mutant; the exit status of its process, unless a signal ended that."""

    SURVIVED = 0
    NOTICED = 1
    AFRESH = 2  # it cannot be tried in place

    @classmethod
    def of(cls, wait_status: int) -> Outcome:
        """Of a process that ended; by a signal if it took too long, or crashed."""
        code = os.waitstatus_to_exitcode(wait_status)
        return cls.NOTICED if code < 0 else cls(code)


class _Observer:
    """Notes for each test how long it takes, and where the functions begin that it calls."""

    def __init__(self) -> None:
        self.tests: dict[str, Observed] = {}
        self._functions = {s.path: functions_of((ROOT / s.path).read_text()) for s in SUBJECTS}
        self._files = {str(ROOT / path): path for path in self._functions}
        self._called: set[tuple[str, str]] = set()
        self._known: dict[CodeType, tuple[str, str] | None] = {}

    def notice(self) -> None:
        """Notices calls from now on."""
        sys.settrace(self._call)
        threading.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code not in self._known:
            path = self._files.get(code.co_filename)
            self._known[code] = (
                None
                if path is None
                else (path, function_at(self._functions[path], code.co_firstlineno))
            )
        if (place := self._known[code]) is not None:
            self._called.add(place)

    @contextlib.contextmanager
    def of(self, test: str) -> Iterator[None]:
        """Notes what a test does."""
        self._called.clear()
        self.notice()  # the test before may have ended it
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        sys.settrace(None)
        self.tests[test] = Observed(seconds, frozenset(self._called))


class Observed(NamedTuple):
    """What a test does without a change.

    Attributes:
        seconds: How long it takes.
        called: The functions of the subjects that it calls: file and name.
    """

    seconds: float
    called: frozenset[tuple[str, str]]


class _Group:
    """The tests of some subjects: a plugin of pytest that collects them, and runs them often.

    Attributes:
        failed: The test that failed in this process.
    """

    def __init__(
        self, mutants: Sequence[Mutant], jobs: int, tell: Callable[[int, Outcome], None]
    ) -> None:
        self._mutants, self._jobs, self._tell = mutants, jobs, tell
        self._noticed: collections.Counter[str] = collections.Counter()
        self._items: dict[str, pytest.Item] = {}
        self._failure: str | None = None
        self._does: dict[str, Observed] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what failed first."""
        if report.failed and self._failure is None:
            self._failure = f"{report.nodeid}\n{report.longreprtext}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs all tests without a change, and then those that each mutant needs."""
        if session.testsfailed:
            raise SystemExit("the tests cannot be collected")
        self._items = {item.nodeid: item for item in session.items}
        with tempfile.TemporaryDirectory() as work:
            # As workers of pytest-xdist have it: what one process compiles, the others find.
            os.environ["PYTEST_XDIST_WORKER"] = "gw"
            self._observe(Path(work))
            self._try(Path(work))
        return True

    def _observe(self, work: Path) -> None:
        report = work / "observed"

        def run() -> int:
            observer = _Observer()
            for name in self._items:
                with observer.of(name):
                    self._run([name])
                if self._failure is not None:
                    report.write_bytes(pickle.dumps(self._failure))
                    return 1
            report.write_bytes(pickle.dumps(observer.tests))
            return 0

        _, status = os.waitpid(_forked(run, work, 600), 0)
        found: Any = pickle.loads(report.read_bytes()) if report.exists() else "killed"
        if status != 0:
            raise SystemExit(f"a test fails without a change: {found}")
        self._does = found

    def _run(self, tests: Sequence[str]) -> bool:
        """Runs tests until one fails, and returns whether none does."""
        for name, following in zip(tests, [*tests[1:], None], strict=True):
            item = self._items[name]
            next_item = None if following is None else self._items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if self._failure is not None:
                return False
        return True

    def _try(self, work: Path) -> None:
        waiting = collections.deque(enumerate(self._mutants))
        running: dict[int, tuple[int, Path]] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs:
                number, mutant = waiting.popleft()
                report = work / f"noticed{number}"
                tests, seconds = self._tests_of(mutant)
                run = functools.partial(self._outcome, mutant, tests, report)
                pid = _forked(run, work, _SECONDS_OF_A_TEST + int(3 * seconds))
                running[pid] = number, report
            pid, status = os.wait()
            number, report = running.pop(pid)
            if report.exists():
                self._noticed[report.read_text()] += 1
                report.unlink()
            self._tell(number, Outcome.of(status))

    def _outcome(self, mutant: Mutant, tests: Sequence[str], report: Path) -> Outcome:
        try:
            changed = _changed(mutant)
        except Exception:
            return Outcome.NOTICED  # what cannot be imported is
        if not _change_in_place(mutant.function, sys.modules[changed.__name__], changed):
            return Outcome.AFRESH
        with contextlib.suppress(BaseException):  # it may break pytest itself
            if self._run(tests):
                return Outcome.SURVIVED
        if self._failure is not None:
            report.write_text(self._failure.partition("\n")[0])
        return Outcome.NOTICED

    def _tests_of(self, mutant: Mutant) -> tuple[list[str], float]:
        """The tests that call the changed function, and how long they take without a change.

        Those that noticed other mutants come first, and then the quick ones.
        """
        place = mutant.subject.path, mutant.function
        tests = {name: one.seconds for name, one in self._does.items() if place in one.called}
        ordered = sorted(tests, key=lambda name: (-self._noticed[name], tests[name]))
        return ordered, sum(tests.values())


def _quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _forked(run: Callable[[], int], work: Path, seconds: int) -> int:
    """A process that runs this, and no longer than so many seconds; says nothing."""
    if pid := os.fork():
        return pid
    status = _BROKEN
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        _quiet()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(work)
        status = run()
    finally:
        os._exit(status)


def _pytest(tests: Iterable[str], *plugins: object) -> int:
    """Runs pytest in this process, on files of tests."""
    os.environ["LNBWD_TEST_SEED"] = _DATA_SEED
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--case-seed=0"]
    return int(pytest.main([*map(_found, tests), *words], plugins=[*plugins]))


def _found(test: str) -> str:
    """The path of a file of tests, which is in any of the folders, and the test's name."""
    name, *single = test.split("::")
    (found,) = ROOT.glob(f"tests/*/{name}.py")
    return "::".join([str(found.relative_to(ROOT)), *single])


def tried_in_place(
    tests: Sequence[str], mutants: Sequence[Mutant], jobs: int
) -> Iterator[tuple[Mutant, Outcome]]:
    """Tries mutants of functions: each, and what came of it.

    A process imports the package and collects the tests, once. For each mutant it forks, and the
    function gets its changed code there: what was called before, does not count.
    """
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            with os.fdopen(writes, "w", buffering=1) as pipe:

                def tell(number: int, outcome: Outcome) -> None:
                    pipe.write(f"{number} {outcome:d}\n")

                log = os.open(os.devnull, os.O_WRONLY)
                os.dup2(log, 1)
                status = _pytest(tests, _Group(mutants, jobs, tell))
        finally:
            os._exit(status)
    os.close(writes)
    count = 0
    with os.fdopen(reads) as lines:
        for line in lines:
            number, outcome = map(int, line.split())
            yield mutants[number], Outcome(outcome)
            count += 1
    os.waitpid(pid, 0)
    if count != len(mutants):
        raise SystemExit(f"{', '.join(tests)}: ended after {count} of {len(mutants)} mutants")


def tried_afresh(mutants: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, Outcome]]:
    """Tries mutants of any place: each is imported in a process of its own."""

    def run(mutant: Mutant) -> Outcome:
        sys.meta_path.insert(0, _Finder(mutant))
        return Outcome.NOTICED if _pytest(mutant.subject.tests) else Outcome.SURVIVED

    waiting = collections.deque(mutants)
    running: dict[int, Mutant] = {}
    with tempfile.TemporaryDirectory() as work:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.popleft()
                pid = _forked(functools.partial(run, mutant), Path(work), _SECONDS_AFRESH)
                running[pid] = mutant
            pid, status = os.wait()
            yield running.pop(pid), Outcome.of(status)


def tried(mutants: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, Outcome]]:
    """Tries mutants: each, and whether it survives or is noticed."""
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    afresh = []
    for mutant in mutants:
        if mutant.function:
            groups.setdefault(mutant.subject.tests, []).append(mutant)
        else:
            afresh.append(mutant)
    for tests, group in groups.items():
        for mutant, outcome in tried_in_place(tests, group, jobs):
            if outcome is Outcome.AFRESH:
                afresh.append(mutant)
            else:
                yield mutant, outcome
    yield from tried_afresh(afresh, jobs)
