"""Calls on the CPU take as many threads as their caller allows, where it may run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import Arguments, assert_same_bits, random_arguments, random_generator
from threads_support import SCRIPT, cpus_of_workers

from iree_lnbwd import NormSpec
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.runtime import Norm, host_threads, iree_module
from iree_lnbwd.runtime.host_threads import HostThreads

HOST = DeviceUri.parse("local-task")
ALL = frozenset(os.sched_getaffinity(0))
TWO = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


def run(body: str, *, openmp: str = "", flags: str = "") -> None:
    """In a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": openmp, "IREE_PY_RUNTIME_FLAGS": flags}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + body],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.drawn
@TWO
@pytest.mark.parametrize(
    ("openmp", "count"),
    [("1", 1), ("2", 2), ("1,2", 1), ("1000000000", len(ALL)), ("0", 0), ("abc", 0)],
)
def test_openmps_variable_at_the_first_call(openmp: str, count: int) -> None:
    expected = f"{count or 'cores'}"
    run(f"call()\nexpect_workers({expected})\nassert 'torch' not in sys.modules", openmp=openmp)


@TWO
def test_affinity_at_the_first_call() -> None:
    run("os.sched_setaffinity(0, {max(CPUS)})\ncall()\nexpect_workers(1)")


@TWO
def test_settings_that_change_between_calls() -> None:
    """Each call follows them, with the same bits."""
    run(
        """
first = call()
for openmp, cpus, count in (
    ("1", CPUS, 1), ("2", CPUS, 2), ("4,2", CPUS, min(4, len(CPUS))), ("abc", CPUS, cores),
    ("2", {max(CPUS)}, 1), ("", {min(CPUS)}, 1), ("", CPUS, cores), ("1", CPUS, 1),
):
    os.environ["OMP_NUM_THREADS"] = openmp
    os.sched_setaffinity(0, cpus)
    assert call() == first
    assert threads_of_a_call() == count, (openmp, cpus, threads_of_a_call())
""",
        openmp="2",
    )


@TWO
def test_a_thread_with_cpus_of_its_own() -> None:
    """It computes there, whatever others use; a child of fork follows its own settings, too."""
    run(
        """
first = call()
expect_workers(2)
def pinned(cpu):
    os.sched_setaffinity(0, {cpu})
    found.append((threads_of_a_call(), call()))
found = []
threads = [threading.Thread(target=pinned, args=(cpu,)) for cpu in sorted(CPUS)[:2] * 2]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == [(1, first)] * 4
assert threads_of_a_call() == 2
expect_workers(2)
for openmp in ("1", "2"):
    child = os.fork()
    if child == 0:
        os.environ["OMP_NUM_THREADS"] = openmp
        signal.alarm(60)
        assert call() == first
        expect_workers(int(openmp))
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
assert call() == first
""",
        openmp="2",
    )


def test_irees_own_flags_come_first() -> None:
    run("call()\nexpect_workers(3)", openmp="1", flags="--task_topology_group_count=3")


@pytest.fixture
def computed() -> tuple[Norm, Arguments]:
    """A module, and a call of it."""
    spec = NormSpec((96,), eps=0.125)
    return loaded(spec, HOST), random_arguments(random_generator(), spec, (1400,))


@pytest.mark.drawn
def test_any_number_of_threads_gives_the_same_bits_and_few_are_kept(
    computed: tuple[Norm, Arguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, arguments = computed
    expected = arguments.backward_by(op)
    for count in (*range(1, 40), 3):
        asked = HostThreads(count, ALL if count > 1 else frozenset())
        monkeypatch.setattr(host_threads, "of_caller", lambda asked=asked: asked)
        assert_same_bits(arguments.backward_by(op), expected)
    kept = [key.threads for key in iree_module._DEVICES._of_this_process if key.threads]
    assert len(kept) == iree_module._MOST_FOR_THREADS
    assert len(cpus_of_workers()) <= sum(threads.number for threads in kept)
    monkeypatch.undo()
    assert_same_bits(arguments.backward_by(op), expected)


@TWO
def test_workers_stay_on_their_callers_cpus(
    computed: tuple[Norm, Arguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IREE's would go everywhere."""
    op, arguments = computed
    expected = arguments.backward_by(op)
    before = cpus_of_workers()
    cpus = frozenset({max(ALL)})
    monkeypatch.setattr(host_threads, "of_caller", lambda: HostThreads(2, cpus))
    assert_same_bits(arguments.backward_by(op), expected)
    new = {task: where for task, where in cpus_of_workers().items() if task not in before}
    assert list(new.values()) == [cpus] * 2


def test_other_devices_of_iree_are_as_they_were() -> None:
    """Its flags are those of a process."""
    run(
        """
import iree.runtime as rt

def workers_of_another():
    driver = rt._binding.create_hal_driver("local-task")
    device = driver.create_device_by_uri("local-task")
    time.sleep(0.2)  # they have started
    return len(cpus_of_workers()) - of_ours

of_ours = 0
before = workers_of_another()
of_ours = before + 2
many = host_threads.HostThreads(of_ours, frozenset(CPUS))
host_threads.of_caller = lambda: many
call()
expect_workers(of_ours)
assert workers_of_another() == before
"""
    )


@contextlib.contextmanager
def cgroup() -> Iterator[Path]:
    """A cgroup with the time of one CPU, made and taken away again."""
    roots = {
        Path("/sys/fs/cgroup/cpu"): {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "90000"},
        Path("/sys/fs/cgroup"): {"cpu.max": "90000 100000"},
    }
    for root, limits in roots.items():
        folder = root / f"iree-lnbwd-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for name, text in limits.items():
                (folder / name).write_text(text)
            yield folder
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error}")
        finally:
            folder.rmdir()
        return
    pytest.skip("no cgroup can be made here")


@TWO
def test_a_cgroups_quota() -> None:
    with cgroup() as folder:
        run(
            f"Path({str(folder / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
            "call()\nexpect_workers(1)",
            openmp="2",
        )
