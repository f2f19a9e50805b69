"""Calls on the CPU follow ``torch.set_num_threads``, whenever it is called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
from threads_support import SCRIPT

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def run(body: str, openmp: str) -> None:
    """In a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT + body],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": openmp},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_before_and_after_the_first_call() -> None:
    run(
        """
import torch
torch.set_num_threads(1)
first = call()
expect_workers(1)
for count in (2, 1, 2, 1000):
    torch.set_num_threads(count)
    assert call() == first
    assert threads_of_a_call() == min(count, len(CPUS))
torch.set_num_threads(2)
found = []
thread = threading.Thread(target=lambda: found.append((threads_of_a_call(), call())))
thread.start()
thread.join()
assert found == [(2, first)]
""",
        "2",
    )


def test_an_import_after_the_first_call() -> None:
    """From then on PyTorch's number counts, in a child of fork, too."""
    run(
        """
first = call()
expect_workers(2)
import torch
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "2"  # PyTorch has read it
assert threads_of_a_call() == 1
data = torch.from_numpy(x)
assert lnbwd.layer_norm_backward(data, data, 96).grad_input.numpy().tobytes() == first[: x.nbytes]
assert threads_of_a_call() == 1
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert call() == first
    expect_workers(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        "2",
    )


def test_a_callers_own_thread_keeps_its_rules_of_numbers() -> None:
    """One that flushes subnormal numbers to zero gets them right from us, and goes on flushing."""
    run(
        """
import torch
small = (np.random.default_rng(0).integers(-99, 99, (37, 96)) * np.float32(1e-45)).astype("f4")
mean, rstd, weight = np.zeros(37, "f4"), np.ones(37, "f4"), np.full(96, 1e38, "f4")

def bits():
    return lnbwd.layer_norm_backward(small, small, 96, mean, rstd, weight).grad_input.tobytes()

first = bits()
assert any(np.frombuffer(first, "f4"))
for count in (1, 2):
    torch.set_num_threads(count)
    for flushes in (False, True):
        assert torch.set_flush_denormal(flushes)
        assert bits() == first
        assert (torch.tensor(1e-40) * 0.5 == 0).item() is flushes
""",
        "2",
    )
