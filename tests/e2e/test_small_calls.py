"""Small calls with NumPy's arrays: on the calling thread, with the bits of IREE's runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from support import Arguments, assert_same_bits, random_arguments, random_generator

from iree_lnbwd import DeviceError, NormSpec, runtime
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime import Norm, host_library, op
from iree_lnbwd.verification import matrix

HOST = DeviceUri.parse("local-task")


def by_iree(norm: Norm, arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> object:
    with monkeypatch.context() as patch:
        patch.setattr(op, "_MOST_SMALL", 0)
        return arguments.backward_by(norm)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def elsewhere(array: Array) -> Array:
    """At an address that is a multiple of the element's size, and of nothing more."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + array.itemsize
    there = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


def misaligned(array: Array) -> Array:
    """Which IREE's runtime copies."""
    room = np.empty(array.nbytes + 1, np.uint8)
    there = np.ndarray(array.shape, array.dtype, room.data, 1)
    there[...] = array
    return there


@pytest.mark.drawn
@pytest.mark.parametrize("change", [np.asarray, read_only, elsewhere, misaligned])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_irees_runtime(
    dtype: str, change: Callable[[Array], Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = NormSpec((40,), dtype)
    norm = loaded(spec, HOST)
    arguments = random_arguments(random_generator(), spec, (37,))
    expected = by_iree(norm, arguments, monkeypatch)
    names = ("grad_output", "input", "mean", "rstd", "weight")
    changed = {name: change(getattr(arguments, name).copy()) for name in names}
    assert_same_bits(norm(*changed.values()), expected)  # type: ignore[arg-type]


def test_no_worker_is_started() -> None:
    """Nor in a child of fork, in which the parent's code runs."""
    script = """
import os, signal
import numpy as np
from pathlib import Path
import iree_lnbwd as lnbwd

def call(rows):
    x = np.ones((rows, 96), np.float32)
    return lnbwd.layer_norm(x, 96).output.tobytes()

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

first = call(8)
before = threads()
assert call(8) == first and threads() == before
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert call(8) == first
    assert threads() == 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_file_is_not_run_by_who_only_looks_at_it() -> None:
    """The system's loader gets a module's code after IREE's has taken it, and not before a call."""
    spec = NormSpec((40,))
    norm = runtime.load_built(loaded(spec, HOST)._module.vmfb)
    assert "_host" not in vars(norm)
    arguments = random_arguments(random_generator(), spec, (3,))
    arguments.backward_by(norm)
    assert vars(norm)["_host"] is not None


@pytest.mark.parametrize("is_for_this_cpu", [True, False])
def test_what_iree_refuses_is_never_loaded(
    is_for_this_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code runs as the system's loader loads it: a module that asks for another CPU is not."""
    spec = NormSpec((40,))
    with monkeypatch.context() as patch:
        if not is_for_this_cpu:
            patch.setattr(compiler, "cpu_features", lambda: ("avx512-of-the-future",))
        vmfb, _ = compiler.build(spec, find_target("host"))
    loads, load = [], host_library._loaded

    def watched(elf: bytes) -> object:
        loads.append(elf)
        return load(elf)

    monkeypatch.setattr(host_library, "_loaded", watched)
    call = matrix.random_call(spec, 5, random_generator())
    if is_for_this_cpu:
        runtime.load_built(vmfb).run(call)
    else:
        with pytest.raises(DeviceError, match="expected a CPU with avx512-of-the-future"):
            runtime.load_built(vmfb).run(call)
    assert len(loads) == is_for_this_cpu
