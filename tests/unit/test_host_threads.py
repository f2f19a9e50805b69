"""How many threads a call on the CPU gets, from what its caller set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iree_lnbwd.runtime import host_threads
from iree_lnbwd.runtime.host_threads import HostThreads, of_caller, of_openmp, quota

OPENMP = {
    "1": 1,
    "4": 4,
    " 4 ": 4,
    "+4": 4,
    "4,2": 4,
    " 4 , 2,1 ": 4,
    "1000000000": 10**9,
    "9" * 5000: None,
    "": None,
    "0": None,
    "0,2": None,
    "-1": None,
    "abc": None,
    "4abc": None,
    "4,": None,
    ",4": None,
    "4,abc": None,
    "0x4": None,
    "4.0": None,
    "10**9": None,
    "٤": None,
}


@pytest.mark.parametrize("text", OPENMP, ids=lambda text: text[:20])
def test_the_first_number_of_openmps_variable_counts(text: str) -> None:
    assert of_openmp(text) == OPENMP[text]


def caller_of(
    monkeypatch: pytest.MonkeyPatch, *, cpus: int, cores: int = 0, quota: int = 0, openmp: str = ""
) -> HostThreads | None:
    """What counts where there is no PyTorch, and the system is of these sizes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(host_threads, "_cores", lambda _: cores or cpus)
    monkeypatch.setattr(host_threads, "quota", lambda: quota or None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    return of_caller()


@pytest.mark.parametrize(
    ("system", "count"),
    [
        ({"cpus": 8}, 8),
        ({"cpus": 8, "cores": 4}, 4),
        ({"cpus": 8, "cores": 4, "openmp": "6"}, 6),
        ({"cpus": 8, "openmp": "1000000000"}, 8),
        ({"cpus": 8, "openmp": "0"}, 8),
        ({"cpus": 8, "quota": 3}, 3),
        ({"cpus": 8, "quota": 3, "openmp": "2"}, 2),
        ({"cpus": 8, "quota": 64}, 8),
        ({"cpus": 1, "openmp": "8"}, 1),
        ({"cpus": 8, "quota": 1}, 1),
        ({"cpus": 1024}, 256),
    ],
)
def test_the_least_of_all_bounds(
    system: dict[str, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = frozenset(range(system["cpus"]) if count > 1 else ())
    assert caller_of(monkeypatch, **system) == HostThreads(count, cpus)  # type: ignore[arg-type]


def test_irees_own_flags_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_threads, "_IREE_DECIDES", True)
    assert caller_of(monkeypatch, cpus=8, openmp="1") is None


def test_two_cpus_of_a_core_count_once() -> None:
    """By what this system says of its CPUs."""
    said = subprocess.run(["lscpu", "-p=cpu,core"], capture_output=True, text=True, check=False)
    if said.returncode:
        pytest.skip("no lscpu here")
    pairs = [line.split(",") for line in said.stdout.splitlines() if not line.startswith("#")]
    cores = {core for _, core in pairs}
    assert host_threads._cores(frozenset(int(cpu) for cpu, _ in pairs)) == len(cores)
    assert host_threads._cores(frozenset({10**6, 10**6 + 1})) == 2  # the system says nothing


# A cgroup's path in the list of a process, the files below the mount, and the CPUs they grant.
GROUPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "no quota": ("0::/a", {"a/cpu.max": "max 100000"}, None),
    "a quota": ("0::/a", {"a/cpu.max": "200000 100000"}, 2),
    "rounded up": ("0::/a", {"a/cpu.max": "150000 100000"}, 2),
    "less than one": ("0::/a", {"a/cpu.max": "1000 100000"}, 1),
    "the least of those above": (
        "0::/a/b/c",
        {
            "cpu.max": "800000 100000",
            "a/cpu.max": "300000 100000",
            "a/b/c/cpu.max": "400000 100000",
        },
        3,
    ),
    "a container's own, by another path": ("0::/docker/1", {"cpu.max": "200000 100000"}, 2),
    "version 1": (
        "4:memory:/m\n1:cpu:/a",
        {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
        4,
    ),
    "version 1, with accounts": (
        "1:cpu,cpuacct:/a",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
        1,
    ),
    "version 1 without a quota": (
        "1:cpu:/a\n0::/",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
        None,
    ),
    "not readable as that": ("nonsense", {}, None),
    "empty files": ("0::/a", {"a/cpu.max": "", "cpu.max": "x y"}, None),
    "zeros": ("0::/a", {"a/cpu.max": "0 0"}, None),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_quota_of_time_counts_as_cpus(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, files, expected = GROUPS[case]
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{listed}\n")
    monkeypatch.setattr(host_threads, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(host_threads, "_OWN_CGROUPS", tmp_path / "own")
    assert quota.__wrapped__() == expected


def test_without_cgroups_there_is_no_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_threads, "_OWN_CGROUPS", tmp_path / "absent")
    assert quota.__wrapped__() is None
