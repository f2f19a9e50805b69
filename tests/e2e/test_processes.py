"""Forks, threads and many modules: a child works or ends, and what modules share, they share."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import assert_same_bits, random_arguments, random_generator

from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri

HOST = DeviceUri.parse("local-task")

# What a child of fork does; it must end with status 0 by itself, and say nothing.
CHILDREN = {
    "ends": "",
    "ends at once": "os._exit(0)",
    "uses the op": "assert bits(op(x, x, mean, rstd, x[0])) == before",
    "uses the function": "assert bits(lnbwd.layer_norm_backward(x, x, 8)) == recomputed",
    "loads another": "lnbwd.layer_norm_backward(x[:, :5], x[:, :5], 5)",
    "uses it in threads": (
        "threads = [threading.Thread(target=op, args=(x, x, mean, rstd, x[0])) for _ in range(4)]\n"
        "    [thread.start() for thread in threads]\n"
        "    [thread.join() for thread in threads]"
    ),
    "lets go of it": "del op; gc.collect(); lnbwd.layer_norm_backward(x, x, 8)",
    "forks": (
        "op(x, x, mean, rstd, x[0])\n"
        "    grandchild = os.fork()\n"
        "    if grandchild:\n"
        "        assert os.waitpid(grandchild, 0)[1] == 0\n"
        "    assert bits(op(x, x, mean, rstd, x[0])) == before"
    ),
}
SCRIPT = """
import gc, os, signal, sys, threading
import numpy as np
import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.calls.modules import loaded

def bits(gradients):
    return b"".join(gradient.tobytes() for gradient in gradients if gradient is not None)

x = np.arange(24, dtype=np.float32).reshape(3, 8)
mean, rstd = np.full(3, 11.5, np.float32), np.full(3, 0.2, np.float32)
op = loaded(NormSpec((8,)), DeviceUri.parse(sys.argv[1]))
before = bits(op(x, x, mean, rstd, x[0]))
recomputed = bits(lnbwd.layer_norm_backward(x, x, 8))
{ahead}
child = os.fork()
if child == 0:
    signal.alarm(60)  # what hangs is killed
    {body}
    sys.exit(0)
status = os.waitpid(child, 0)[1]
assert bits(op(x, x, mean, rstd, x[0])) == before
assert status == 0, status
"""


FORKS_WITH_THREADS = ("-W", "ignore:This process:DeprecationWarning")  # Python 3.12's


def run(script: str, *words: str) -> None:
    """In a process of its own, which must end with status 0 and say nothing."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", *FORKS_WITH_THREADS, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.drawn
@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN)
def test_a_child_of_fork(body: str) -> None:
    run(SCRIPT.format(body=body or "pass", ahead=""), "local-task")


@pytest.mark.parametrize("how", ["uses the op", "ends"])
def test_a_child_of_fork_on_a_device_without_threads(how: str) -> None:
    run(SCRIPT.format(body=CHILDREN[how] or "pass", ahead=""), "local-sync")


BUSY = """
stop = False
def work():
    while not stop:
        op(x, x, mean, rstd, x[0])
workers = [threading.Thread(target=work) for _ in range(3)]
[worker.start() for worker in workers]
"""


@pytest.mark.drawn
@pytest.mark.parametrize("how", ["uses the op", "loads another", "ends"])
def test_a_child_of_fork_while_other_threads_are_in_calls(how: str) -> None:
    """They hold locks that nobody gives back in the child."""
    script = SCRIPT.format(body=CHILDREN[how] or "pass", ahead=BUSY)
    run(script + "stop = True\n[worker.join() for worker in workers]\n", "local-task")


def test_a_pool_of_forked_processes() -> None:
    run(
        """
import multiprocessing
import numpy as np
import iree_lnbwd as lnbwd

def task(number):
    x = np.full((3, 8), number, np.float32) + np.arange(8, dtype=np.float32)
    return lnbwd.layer_norm_backward(x, x, 8).grad_bias.tobytes()

here = [task(number) for number in range(8)]
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(task, range(8)) == here
"""
    )


def held() -> tuple[int, ...]:
    """Descriptors and threads of this process."""
    return tuple(len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))


def test_modules_share_their_device() -> None:
    """Each had three descriptors and a thread of its own; at 1024 of them there was an end."""
    spec = NormSpec((8,))
    ops = [loaded(spec, HOST)]
    before = held()
    vmfb = ops[0]._module.vmfb
    ops += [runtime.load_built(vmfb) for _ in range(50)]
    assert held() == before
    arguments = random_arguments(random_generator(), spec, (3,))
    expected = arguments.backward_by(ops[0])
    for op in ops[1:]:
        assert_same_bits(arguments.backward_by(op), expected)


def test_many_modules_under_a_low_limit_of_descriptors() -> None:
    run(
        """
import resource
import numpy as np
from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.calls.modules import loaded

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
first = loaded(NormSpec((8,)), DeviceUri.parse("local-task"))
ops = [runtime.load_built(first._module.vmfb) for _ in range(100)]
x = np.ones((3, 8), np.float32)
assert all(op(x, x, x[:, 0], x[:, 0], x[0]).grad_bias.tolist() == [3.0] * 8 for op in ops)
"""
    )


def test_a_device_that_cannot_be_opened_says_why() -> None:
    run(
        """
import os, resource
import iree_lnbwd as lnbwd
from iree_lnbwd import runtime
from iree_lnbwd.hardware.devices import DeviceUri

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    os.close(taken.pop())
try:
    runtime.probe(DeviceUri.parse("local-task"))
except lnbwd.DeviceError as error:
    said = str(error)
assert said.startswith("device: local-task "), said
assert "Too many open files" in said or "24" in said, said
"""
    )


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_share_a_module(threads: int) -> None:
    rng = random_generator()
    spec = NormSpec((96,), "bf16", eps=1e-5)
    op = loaded(spec, HOST)
    several = [random_arguments(rng, spec, (rows + 1,)) for rows in range(threads)]
    serial = [arguments.backward_by(op) for arguments in several]
    wrong: list[str] = []

    def work(number: int) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(20):
                try:
                    assert_same_bits(several[number].backward_by(op), serial[number])
                except BaseException as error:
                    wrong.append(f"{number}: {error}")
                    raise

        return calls

    workers = [threading.Thread(target=work(number)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["op(x, x, mean, rstd, x[0])", "op64(y, y, mean64, rstd64, y[0])"])
def test_a_gpu_in_a_child_of_fork_is_a_clear_error(what: str, gpu: DeviceUri) -> None:
    """No vendor's driver works there; and the child ends."""
    ahead = (
        "y, mean64, rstd64 = x.astype(float), mean.astype(float), rstd.astype(float)\n"
        "op64 = loaded(NormSpec((8,), 'f64'), DeviceUri.parse(sys.argv[1]))\n"
        "op64(y, y, mean64, rstd64, y[0])\n"
    )
    body = (
        "try:\n"
        f"        {what}\n"
        "    except lnbwd.DeviceError as error:\n"
        "        assert 'was in use when this process was forked' in str(error), error\n"
        "    else:\n"
        "        os._exit(3)"
    )
    run(SCRIPT.format(body=body, ahead=ahead), str(gpu))
