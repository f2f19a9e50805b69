"""A norm as the first thing that a function of JAX does on a GPU, which is emulated here.

XLA may record what runs, so nothing is compiled, loaded or allocated then. All of it is done when
JAX traces the function, or in a stage of the custom call before it runs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax_emulated import EmulatedGpu, emulated_gpu

from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import native as jax_native

needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
pytestmark = needs_cpp

COLUMNS, ROWS = 64, 3


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


def loss(x: Any, weight: Any, bias: Any) -> Any:
    out, total = lnbwd.add_layer_norm(x, jnp.sin(x), COLUMNS, weight, bias)
    return (lnbwd.rms_norm(out, COLUMNS, weight) ** 3 + total).sum()


gradients = jax.grad(loss, (0, 1, 2))


def given(rows: int = ROWS) -> tuple[jax.Array, ...]:
    x = jax.random.normal(jax.random.key(rows), (rows, COLUMNS))
    return (x, *jax.random.normal(jax.random.key(1), (2, COLUMNS)))


def by_xla(function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function comes to without this package's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_native, "platforms", lambda *_: ())
        jax.clear_caches()
        found = jax.device_get(jax.jit(function)(*arrays))
    jax.clear_caches()
    return found


def assert_close(found: Any, expected: Any) -> None:
    for mine, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(np.asarray(mine) / scale, other / scale, atol=1e-5)


def eager(*arrays: Any) -> Any:
    return gradients(*arrays)


def jitted(*arrays: Any) -> Any:
    return jax.jit(gradients)(*arrays)


def ahead_of_time(*arrays: Any) -> Any:
    return jax.jit(gradients).lower(*arrays).compile()(*arrays)


def in_a_thread(*arrays: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(jax.device_get(jitted(*arrays))))
    thread.start()
    thread.join()
    return found[0]


def donated(*arrays: Any) -> Any:
    """XLA may give the memory of an argument to a result."""
    x, *others = arrays
    return jax.jit(gradients, donate_argnums=0)(x + 0, *others)


def exported(*arrays: Any) -> Any:
    """By a process that knows of the custom call, but has not loaded the modules."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(jax_native.TARGET)]
    written = jax.export.export(jax.jit(gradients), disabled_checks=allowed)(*arrays)
    jax_native._module.cache_clear()
    jax_native.load().iree_lnbwd_jax_forget()
    return written.call(*arrays)


@pytest.mark.parametrize(
    "way", [eager, jitted, ahead_of_time, in_a_thread, donated, exported], ids=lambda w: w.__name__
)
def test_ways_of_the_first_call(way: Callable[..., Any], gpu: EmulatedGpu) -> None:
    arrays = given()
    expected = by_xla(gradients, *arrays)
    found = way(*arrays)
    assert gpu.driver.launches
    assert_close(found, expected)
    assert_close(way(*arrays), expected)  # as the second


def scanned(x: Any, weight: Any, bias: Any) -> Any:
    def layer(x: Any, weight: Any) -> Any:
        return lnbwd.layer_norm(x, COLUMNS, weight, bias), None

    weights = jnp.stack([weight, 2 * weight, weight + 1])
    return jax.lax.scan(layer, x, weights)[0].sum()


def repeated(x: Any, weight: Any, bias: Any) -> Any:
    def layer(_: Any, x: Any) -> Any:
        return x + lnbwd.layer_norm(x, COLUMNS, weight, bias)

    return jax.lax.fori_loop(0, 3, layer, x)


def until(x: Any, weight: Any, bias: Any) -> Any:
    def layer(x: Any) -> Any:
        return x + lnbwd.layer_norm(x, COLUMNS, weight, bias)

    return jax.lax.while_loop(lambda x: jnp.abs(x).max() < 20, layer, x)


def chosen(x: Any, weight: Any, bias: Any) -> Any:
    return jax.lax.cond(
        x.sum() > 1e9,
        lambda x: x,
        lambda x: lnbwd.layer_norm(x, COLUMNS, weight, bias),
        x,
    )


def recomputed(x: Any, weight: Any, bias: Any) -> Any:
    return jax.grad(jax.checkpoint(loss))(x, weight, bias)


@pytest.mark.parametrize(
    "function",
    [jax.grad(scanned), repeated, until, chosen, recomputed],
    ids=["scan", "fori_loop", "while_loop", "cond", "checkpoint"],
)
def test_within_control_flow(function: Callable[..., Any], gpu: EmulatedGpu) -> None:
    arrays = given()
    expected = by_xla(function, *arrays)
    compiled = jax.jit(function).lower(*arrays).compile()
    loaded = list(gpu.loaded)
    with without_python():
        found = jax.device_get(compiled(*arrays))
    assert gpu.loaded == loaded
    assert_close(found, expected)


@contextmanager
def without_python() -> Iterator[None]:
    """A block in which the custom call cannot ask Python for anything."""
    set_python = jax_native.load().iree_lnbwd_jax_set_python
    set_python(jax_native._Prepare(), jax_native._Compute())
    try:
        yield
    finally:
        set_python(jax_native._on_new_call, jax_native._on_host_call)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_what_runs_only_launches(has_graphs: bool) -> None:
    """So that XLA may record it: no graph is launched into a stream that is captured."""
    arrays = given()
    with emulated_gpu(has_graphs=has_graphs) as gpu:
        compiled = jax.jit(gradients).lower(*arrays).compile()
        loaded = list(gpu.loaded)
        driver = gpu.driver
        found = []
        with without_python():
            for driver.capturing in (True, False, True):
                before = driver.graphs, len(driver.launches)
                found.append(jax.device_get(compiled(*arrays)))
                graphs, launches = driver.graphs - before[0], len(driver.launches) - before[1]
                assert launches == 6  # two forwards; two backwards, of two kernels each
                assert graphs == (2 if has_graphs and not driver.capturing else 0)
        assert gpu.loaded == loaded
    for each in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, each, found[0])


@pytest.mark.parametrize(("form", "additions"), [("after", 6), ("fork", 3), ("add", 0)])
def test_additions_that_kernels_do_not_do(form: str, additions: int, gpu: EmulatedGpu) -> None:
    """Of a stream with three branches: with forks the forward's, and with `add_*` none."""

    def stream(x: Any, weight: Any, bias: Any) -> Any:
        h, x = lnbwd.fork_layer_norm(x, COLUMNS, weight, bias)
        for _ in range(3):
            branch = h * h
            if form == "after":
                x = x + branch
                h = lnbwd.layer_norm(x, COLUMNS, weight, bias)
            elif form == "fork":
                h, x = lnbwd.fork_layer_norm(x + branch, COLUMNS, weight, bias)
            else:
                h, x = lnbwd.add_layer_norm(branch, x, COLUMNS, weight, bias)
        return h.sum() + x.sum()

    text = jax.jit(jax.grad(stream)).lower(*given()).as_text()
    of_stream = f"tensor<{ROWS}x{COLUMNS}xf32>"
    found = [line for line in text.splitlines() if "stablehlo.add" in line and of_stream in line]
    # The square of h has two gradients, which are added, too.
    assert len(found) == additions + 3


def test_functions_share_modules(gpu: EmulatedGpu) -> None:
    """Those for other rows too; each call has scratch of its own size."""
    few, many = given(), given(ROWS + 300)
    expected = [by_xla(gradients, *arrays) for arrays in (few, many)]
    first = jax.jit(gradients)
    second = jax.jit(lambda *arrays: jax.tree.map(jnp.negative, gradients(*arrays)))
    assert_close(first(*few), expected[0])
    loaded = list(gpu.loaded)
    assert len(loaded) == len(set(loaded)) == 4
    assert_close(jax.tree.map(jnp.negative, second(*many)), expected[1])
    assert_close(first(*many), expected[1])
    assert_close(first(*few), expected[0])
    assert gpu.loaded == loaded


def test_too_little_scratch_is_refused(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a function was exported on a machine with another GPU."""
    arrays = given(300)
    needed = jax_native.scratch_bytes

    def elsewhere(spec: Any, rows: int, sets: Any) -> int | None:
        found = needed(spec, rows, sets)
        return 256 if spec.family.is_backward else found

    monkeypatch.setattr(jax_native, "scratch_bytes", elsewhere)
    message = r"scratch: expected \d+ bytes for the kernels of this device, got \d+: the function"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(gradients)(*arrays))


def test_a_call_whose_first_stage_did_not_run_is_refused(gpu: EmulatedGpu) -> None:
    compiled = jax.jit(gradients).lower(*given()).compile()
    jax_native.load().iree_lnbwd_jax_forget()
    with pytest.raises(jax.errors.JaxRuntimeError, match="whose kernels are not loaded"):
        jax.block_until_ready(compiled(*given()))
    assert not gpu.driver.launches


# What XLA asks a handler when it is registered.
_METADATA = """
#include "xla/ffi/api/c_api.h"
extern "C" int traits_of(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  return handler(&frame) ? -1 : metadata.traits;
}
"""


def test_xla_is_told_what_it_may_record(tmp_path: Path) -> None:
    """The handlers say it themselves; a plugin of XLA may know no traits."""
    source, library = tmp_path / "metadata.cpp", tmp_path / "metadata.so"
    source.write_text(_METADATA, encoding="utf-8")
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    command = [compiler, "-shared", "-fPIC", "-I", jax.ffi.include_dir(), str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    traits_of, ours = ctypes.CDLL(str(library)).traits_of, jax_native.load()
    assert traits_of(ours.iree_lnbwd_jax_on_gpu) == 1  # COMMAND_BUFFER_COMPATIBLE
    assert traits_of(ours.iree_lnbwd_jax_on_cpu) == 0  # it calls Python


# On the second device, XLA has no stage on the CPU that comes before the call.
_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_emulated import emulated_gpu
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.hardware.devices import DeviceUri

def loss(x, weight):
    return (lnbwd.layer_norm(x, 64, weight) ** 3).sum()

step = jax.grad(loss, (0, 1))
x, weight = jax.random.normal(jax.random.key(0), (6, 64)), jnp.arange(64.0)
expected = jax.device_get(jax.jit(step)(x, weight))
mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
with emulated_gpu() as gpu, jax.set_mesh(mesh):
    arrays = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec(*where)))
        for array, where in ((x, ("rows",)), (weight, ()))
    ]
    compiled = jax.jit(step).lower(*arrays).compile()
    for spec in list(gpu.loaded):
        text = jax_native.text_of(spec, None).encode()
        jax_native.prepare(DeviceUri("cuda", 1), 3, text)
    found = jax.device_get(compiled(*arrays))
    assert len(gpu.driver.launches) == 6
    where = PartitionSpec("rows"), PartitionSpec()
    mapped = jax.shard_map(step, in_specs=where, out_specs=where)  # it checks what varies
    mapped_too = jax.device_get(jax.jit(mapped)(*arrays))
    assert len(gpu.driver.launches) == 12
for each in (found, mapped_too):
    for mine, other in zip(each, expected):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-3)
print("right")
"""


def test_two_devices_of_a_new_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TWO_DEVICES],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
