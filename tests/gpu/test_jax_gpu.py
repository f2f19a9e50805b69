"""The norms for JAX on a GPU: by this package's kernels, on XLA's stream."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests need memory, too
pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax_support import CASES, MEMORY_EFFICIENT, assert_a_step_is_right
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import calls, formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.ops.dtypes import DTYPES

pytestmark = pytest.mark.gpu

WIDTHS = (48, 769, 4096)


@pytest.fixture(autouse=True)
def on_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX has no GPU: its backend is {jax.default_backend()}")
    assert jax_native.platforms(NormSpec((48,)), 1) == ("cuda",)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_values_and_gradients_are_right(spec: NormSpec, rows: int, columns: int) -> None:
    of_width = replace(spec, normalized_shape=(columns,))
    with jax.enable_x64(spec.dtype == "f64"):
        inputs = [
            jax.ShapeDtypeStruct(each.dims(rows), DTYPES[each.dtype].numpy)
            for each in of_width.inputs
        ]
        text = jax.jit(calls.function(of_width)).lower(*inputs).as_text()
    assert jax_native.TARGET in text  # the kernels are this package's
    assert_a_step_is_right(of_width, rows, random_generator())


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("spec", MEMORY_EFFICIENT, ids=lambda spec: spec.name)
def test_memory_efficient_gradients_are_right(spec: NormSpec, columns: int) -> None:
    of_width = replace(spec, normalized_shape=(columns,))
    assert_a_step_is_right(of_width, 1000, random_generator(), memory_efficient=True)


@pytest.mark.parametrize("spec", CASES[::2], ids=lambda spec: spec.name)
def test_forks_add_the_gradient_that_went_past(spec: NormSpec) -> None:
    of_width = replace(spec, normalized_shape=(769,), residual_dtype=None)
    assert_a_step_is_right(of_width, 1000, random_generator(), forks=True)


def _layer(x: Any, weight: Any, matrix: Any) -> Any:
    norm = functools.partial(lnbwd.layer_norm, normalized_shape=x.shape[-1], weight=weight)
    return x + norm(x @ matrix)


def _deep(x: Any, weight: Any, matrix: Any, layers: int) -> Any:
    for _ in range(layers):
        x = _layer(x, weight, matrix)
    return (x**2).mean()


def test_in_order_with_the_work_around() -> None:
    """Between XLA's own kernels, run often, so that XLA may put what it can into graphs."""
    x = jax.random.normal(jax.random.key(0), (4096, 1024))
    weight = jnp.ones(1024)
    matrix = jax.random.normal(jax.random.key(1), (1024, 1024)) / 32
    step = jax.jit(jax.value_and_grad(_deep, (0, 1)), static_argnums=3)
    first = jax.device_get(step(x, weight, matrix, 4))
    again = [step(x, weight, matrix, 4) for _ in range(20)]
    for each in jax.device_get(again):
        for mine, other in zip(*map(jax.tree.leaves, (each, first)), strict=True):
            np.testing.assert_array_equal(mine, other)
    by_xla = pytest.MonkeyPatch()
    with by_xla.context() as patch:
        patch.setattr(jax_native, "platforms", lambda *_: ())
        jax.clear_caches()
        expected = jax.device_get(step(x, weight, matrix, 4))
    jax.clear_caches()
    for mine, other in zip(*map(jax.tree.leaves, (first, expected)), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(mine / scale, other / scale, atol=1e-2)  # matrices in TF32


# Nothing of XLA's here is tuned when it runs, so the bits may not differ. C++'s launches
# are counted in ten calls on the same arrays, after some that XLA may record.
_RECORDED = """
import ctypes, hashlib, jax, jax.numpy as jnp
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.runtime import gpu_driver

entry_point, launches, kept = gpu_driver.Driver.entry_point, [], []
KINDS = {"launch": ("p", *"uuuuuuu", *"ppp"), "run": ("p", "p")}

def counting(driver, name):
    address = entry_point(driver, name)
    if name not in KINDS:
        return address
    letters = {"p": ctypes.c_void_p, "u": ctypes.c_uint}
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(letters[each] for each in KINDS[name]))
    call = kind(address)
    kept.append(kind(lambda *given: launches.append(name) or call(*given)))
    return ctypes.cast(kept[-1], ctypes.c_void_p).value

gpu_driver.Driver.entry_point = counting

def loss(x, weight):
    for _ in range(4):
        h, x = lnbwd.fork_layer_norm(jnp.cos(x), 1024, weight)
        x = jnp.sin(h) + x
    return (x**2).sum()

step = jax.jit(jax.grad(loss, (0, 1)))
x, weight = jax.random.normal(jax.random.key(0), (512, 1024)), jnp.ones(1024)
found = hashlib.sha256()
alive = []
for scale in range(8):  # other arrays, in other memory
    alive.append(step(x + scale, weight))
    for each in jax.device_get(alive[-1]):
        found.update(each.tobytes())
for _ in range(4):
    jax.block_until_ready(step(x, weight))
launches.clear()
for _ in range(10):
    jax.block_until_ready(step(x, weight))
print(found.hexdigest(), len(launches))
"""


def test_xla_records_our_calls() -> None:
    """Into its command buffers: later calls launch nothing of ours, and have the same bits."""

    def run(kinds: str) -> tuple[str, int]:
        flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
        done = subprocess.run(
            [sys.executable, "-c", _RECORDED],
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        digest, launches = done.stdout.split()
        return digest, int(launches)

    recorded, launched = run("FUSION,CUBLAS,CUSTOM_CALL"), run("")
    assert recorded[0] == launched[0]
    assert recorded[1] == 0 < launched[1]


def test_a_batch_counts_as_rows() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 3, 768), jnp.bfloat16)
    norm = functools.partial(lnbwd.rms_norm, normalized_shape=768)
    together = jax.jit(jax.vmap(norm, in_axes=1, out_axes=1))
    assert jax_native.TARGET in together.lower(x).as_text()
    np.testing.assert_array_equal(
        together(x).astype(jnp.float32), norm(x).astype(jnp.float32)
    )  # the bits of a row do not depend on M


def test_rows_sharded_over_gpus() -> None:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((len(devices),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = NormSpec((1024,), "f32", op="layer_norm_backward")
    rows = 64 * len(devices)
    keys = jax.random.split(jax.random.key(0), len(spec.inputs))
    arrays = [
        jax.random.normal(key, each.dims(rows)) for key, each in zip(keys, spec.inputs, strict=True)
    ]
    expected = formulas.compute(spec, *arrays)
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(
                array,
                NamedSharding(mesh, PartitionSpec("rows" if array.shape[0] == rows else None)),
            )
            for array in arrays
        ]
        compiled = jax.jit(calls.function(spec)).lower(*sharded).compile()
        found = compiled(*sharded)
    assert "all-gather" not in compiled.as_text()
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
