"""The threads that compute a call on the CPU: as many as its caller allows, where it may run."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_OMP = "OMP_NUM_THREADS"
_MOST = 256  # workers that IREE 3.13 makes; it says nothing of more
# Whether IREE, which reads this variable when it is imported, was told by its own flags.
_IREE_DECIDES = "--task_topology_" in os.environ.get("IREE_PY_RUNTIME_FLAGS", "")
# OpenMP's form: a number for each level of nested loops, of which the first counts.
_LEVELS = re.compile(r"\s*\+?(\d{1,18})\s*(?:,\s*\+?\d{1,18}\s*)*", re.ASCII)
# A line of the list of cgroups: a number, controllers (none in version 2), and the path.
_GROUP = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TASKS = Path("/proc/self/task")
_WORKER = "iree-worker-"
_LONGEST_START = 1.0  # seconds that workers are waited for


class HostThreads(NamedTuple):
    """The threads of a call on the CPU.

    Attributes:
        number: How many. One is the caller's own; several are workers of IREE's.
        cpus: The CPUs that workers may run on; empty for the caller's own thread.
    """

    number: int
    cpus: frozenset[int]


def of_caller() -> HostThreads | None:
    """What the calling thread's settings come to; None if IREE was told by flags of its own.

    If PyTorch is imported, the number is ``torch.get_num_threads()``, else the first one of
    ``OMP_NUM_THREADS``, else that of the cores. It is never more than the CPUs that the calling
    thread may run on, or than the quota of its cgroup.
    """
    if _IREE_DECIDES:
        return None
    cpus = frozenset(os.sched_getaffinity(0))
    asked = _of_torch() or of_openmp(os.environ.get(_OMP, "")) or _cores(cpus)
    number = min(asked, len(cpus), quota() or asked, _MOST)
    return HostThreads(number, cpus if number > 1 else frozenset())


def of_openmp(text: str) -> int | None:
    """The number in a value of ``OMP_NUM_THREADS``; None if it counts for nothing, as in OpenMP."""
    match = _LEVELS.fullmatch(text)
    return int(match[1]) or None if match else None


@functools.cache
def quota() -> int | None:
    """How many CPUs the time that this process's cgroups grant is worth, rounded up, if bounded.

    Both versions of cgroups are read. In a container the folders may be those of its own cgroup,
    at the top, whatever its path.
    """
    try:
        listed = _OWN_CGROUPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    granted = [
        cpus
        for controllers, own in _GROUP.findall(listed)
        if not controllers or "cpu" in controllers.split(",")
        for path in (PurePosixPath(own), *PurePosixPath(own).parents)
        for cpus in _granted(_CGROUPS / controllers / path.relative_to("/"))
    ]
    return min(granted, default=None)


@contextlib.contextmanager
def confined(threads: HostThreads) -> Iterator[None]:
    """Keeps the workers that IREE starts within on their CPUs.

    A worker of IREE 3.13 lets itself run on all CPUs when it starts, whatever its creator may.
    """
    before = set(_tasks())
    yield
    if len(threads.cpus) == os.cpu_count():
        return
    for task in _started(before, threads.number):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(task.name), threads.cpus)


def _started(before: set[Path], count: int) -> list[Path]:
    """So many new workers, when each has begun to wait for work: it has set its CPUs by then."""
    end = time.monotonic() + _LONGEST_START
    while True:
        found = [task for task in _tasks() if task not in before and _is_waiting_worker(task)]
        if len(found) >= count or time.monotonic() > end:
            return found
        time.sleep(1e-4)


def _tasks() -> tuple[Path, ...]:
    """The threads of this process; none where the system does not list them."""
    try:
        return tuple(_TASKS.iterdir())
    except OSError:
        return ()


def _is_waiting_worker(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text(encoding="utf-8").rpartition(")")
    except OSError:
        return False
    return f"({_WORKER}" in name and rest.startswith(" S ")


def _of_torch() -> int | None:
    torch = sys.modules.get("torch")
    number = getattr(torch, "get_num_threads", None)  # absent while it is being imported
    return None if number is None else int(number())


@functools.lru_cache(maxsize=64)
def _cores(cpus: frozenset[int]) -> int:
    """The cores that these CPUs belong to; the CPUs themselves, where the system does not tell."""
    try:
        return len(
            {
                (_CPUS / f"cpu{cpu}" / "topology/thread_siblings_list").read_text(encoding="utf-8")
                for cpu in cpus
            }
        )
    except OSError:
        return len(cpus)


def _granted(folder: Path) -> Iterator[int]:
    """The CPUs that the files of one cgroup grant, in the form of either version."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max": unbounded
            text = " ".join((folder / name).read_text(encoding="utf-8") for name in names)
            time_granted, period = map(int, text.split())
            if time_granted > 0 and period > 0:
                yield -(-time_granted // period)
