"""Looks at the threads of IREE's that a process has."""

from __future__ import annotations

import os
from pathlib import Path

_TASKS = Path("/proc/self/task")


def cpus_of_workers() -> dict[str, frozenset[int]]:
    """The CPUs that each worker of IREE's in this process may run on, by its number."""
    found = {}
    for task in _TASKS.iterdir():
        if (task / "comm").read_text().startswith("iree-worker"):
            found[task.name] = frozenset(os.sched_getaffinity(int(task.name)))
    return found


# The beginning of scripts that run in processes of their own.
SCRIPT = f"""
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import iree_lnbwd as lnbwd
from iree_lnbwd.runtime import host_threads, iree_module

sys.path.insert(0, {str(Path(__file__).parent)!r})
from threads_support import cpus_of_workers

CPUS = os.sched_getaffinity(0)
cores = min(host_threads._cores(frozenset(CPUS)), len(CPUS))
x = np.random.default_rng(0).standard_normal((2000, 96), dtype=np.float32)

def call():
    results = lnbwd.layer_norm_backward(x, x, 96)
    return b"".join(result.tobytes() for result in results if result is not None)

def expect_workers(threads):
    'Those of this many threads of a call, once they have started; one is the calls own.'
    wanted = threads if threads > 1 else 0
    end = time.monotonic() + 10
    while len(cpus_of_workers()) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    assert len(cpus_of_workers()) == wanted, (cpus_of_workers(), threads)

def threads_of_a_call():
    'By the device that the last call was on.'
    call()
    (key,) = [
        key
        for key, device in iree_module._DEVICES._of_this_process.items()
        if device is iree_module._DEVICES.open(lnbwd.calls.calling._HOST)
    ]
    return key.threads.number
"""
