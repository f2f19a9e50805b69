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
