"""A module cache for the tests alone, GPU tests skipped without a GPU, costly cases drawn."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import os
import random
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import built_operators as operators
import pytest

from iree_lnbwd import DeviceError, runtime
from iree_lnbwd.hardware.devices import DeviceUri

CACHE_VARIABLE = "LNBWD_TEST_CACHE"
_ONE_IN = 32  # costly cases of a file that a run takes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in the background; what the tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpp-operators",
        action="store_true",
        help="run PyTorch's tests on the C++ operators on the CPU too, where they are not needed",
    )

    parser.addoption(
        "--slow",
        action="store_true",
        help="run the tests with the marker slow, too, which compile C++ for more than ten seconds",
    )

    parser.addoption(
        "--fresh",
        action="store_true",
        help="follow each page of the manual in a clone and an environment of its own",
    )

    parser.addoption(
        "--every-case",
        action="store_true",
        help="run every case of the tests with the marker drawn, of which a run takes a few",
    )
    parser.addoption(
        "--case-seed", type=int, help="the seed by which those cases are drawn (default: a new one)"
    )


def pytest_configure(config: pytest.Config) -> None:
    of_all = getattr(config, "workerinput", {}).get("case_seed")
    if config.option.case_seed is None:
        config.option.case_seed = secrets.randbits(32) if of_all is None else of_all


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process of pytest-xdist which cases all of them run."""
    node.workerinput["case_seed"] = node.config.option.case_seed


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = f"--case-seed={config.option.case_seed}"
    return None if config.option.every_case else f"one in {_ONE_IN} costly cases, by {seed}"


@pytest.hookimpl(trylast=True)  # of what -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draws cases with the marker drawn: one in `_ONE_IN` of each file, and at least one."""
    again = getattr(config.option, "lf", False)  # absent without pytest's cache
    if config.option.every_case or again:
        return
    rng = random.Random(config.option.case_seed)
    files: dict[tuple[Path, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn"):
            for_gpus = item.get_closest_marker("gpu") is not None  # they may all be skipped
            files.setdefault((item.path, for_gpus), []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in files.values():
        taken = max(1, len(cases) // _ONE_IN)
        left_out.update(rng.sample(cases, len(cases) - taken))
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def built_operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the C++ operators: one process builds them for all tests of a run."""
    with one_worker(tmp_path_factory, "built_operators"):
        return operators.build(of_all_workers(tmp_path_factory) / "built_operators")


@pytest.fixture(scope="session", autouse=True)
def cpp_operators(
    request: pytest.FixtureRequest, module_cache: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if request.config.getoption("--cpp-operators"):
        from iree_lnbwd.torch import native

        built: Path = request.getfixturevalue("built_operators")
        with one_worker(tmp_path_factory, "cpp_operators"):
            if native._library().kept() is None:
                shutil.copytree(built, os.environ["IREE_LNBWD_CACHE"], dirs_exist_ok=True)
        assert native.load()


@pytest.fixture(autouse=True)
def python_operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's tests build no C++ without ``--cpp-operators``, nor do processes that they start.

    So the operators in Python are tested, too; not where the build itself is.
    """
    in_cpp = request.config.getoption("--cpp-operators") or request.node.get_closest_marker(
        "builds"
    )
    # Of its own: the tests' monkeypatch would be undone last, after what it was used in.
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name == "pytorch" and not in_cpp:
            importlib.import_module("torch._inductor.config")  # it reads the compiler's name once
            patch.setenv("CXX", "no-such-compiler")
        yield


def of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a test run, whether or not pytest-xdist runs it in several processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextlib.contextmanager
def one_worker(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[None]:
    """One process of a test run at a time does what has this name."""
    with (of_all_workers(tmp_path_factory) / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", autouse=True)
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's own cache is neither read nor written; subprocesses inherit this one.

    So do the processes that pytest-xdist runs tests in, each below a folder of all, and other runs
    of one checkout that are given the same $LNBWD_TEST_CACHE. What the user tuned counts for no
    test.
    """
    folder = of_all_workers(tmp_path_factory)
    cache = os.environ.get(CACHE_VARIABLE) or str(folder / "module_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IREE_LNBWD_CACHE", cache)
        patch.setenv("IREE_LNBWD_TUNING", str(folder / "nothing_tuned"))
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module cache for this test alone, in which nothing is yet."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "empty_cache"))


@pytest.fixture(scope="session")
def gpu() -> DeviceUri:
    """The first GPU of this machine, for tests with the marker ``gpu``."""
    device, reason = _find_gpu()
    assert device is not None, reason
    return device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device of PyTorch's, for the tests that run on every one that this machine has."""
    return str(request.param)


@pytest.fixture
def enable_ends(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of `enable()`, which need the C++ operators."""
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    import iree_lnbwd.torch as lnbwd

    yield
    lnbwd.disable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    device, reason = _find_gpu() if item.get_closest_marker("gpu") else (None, "")
    if device is None and reason:
        pytest.skip(reason)
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: runs with --slow")


@functools.cache
def _find_gpu() -> tuple[DeviceUri | None, str]:
    """A GPU, or why there is none."""
    reasons = []
    for driver in ("cuda", "hip"):
        uri = DeviceUri.parse(driver)
        try:
            runtime.probe(uri)
        except DeviceError as error:
            reasons.append(str(error))
        else:
            return uri, ""
    return None, f"no GPU: {'; '.join(reasons)}"
