"""A module cache for the tests alone, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iree_lnbwd import DeviceError, runtime
from iree_lnbwd.devices import DeviceUri


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


@pytest.fixture(scope="session", autouse=True)
def cpp_operators(
    request: pytest.FixtureRequest, module_cache: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if request.config.getoption("--cpp-operators"):
        from iree_lnbwd import torch_native

        with one_worker(tmp_path_factory, "cpp_operators"):  # one builds them for all
            assert torch_native.load()


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

    So do the processes that pytest-xdist runs tests in, each below a folder of all. What the user
    tuned counts for no test.
    """
    folder = of_all_workers(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IREE_LNBWD_CACHE", str(folder / "module_cache"))
        patch.setenv("IREE_LNBWD_TUNING", str(folder / "nothing_tuned"))
        yield


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
