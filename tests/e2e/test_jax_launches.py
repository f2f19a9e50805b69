"""What XLA's custom call launches: the GPU is the emulator, and arrays are in the host's memory.

For a GPU, nothing but the driver, the stream and the memory for scratch differs.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax_emulated import EmulatedGpu, emulated_gpu
from support import assert_right, random_generator

from iree_lnbwd import DeviceError, NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import Gpu
from iree_lnbwd.jax import calls, formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.ops.arguments import BoundCall, results_of, rms_eps
from iree_lnbwd.ops.operands import OPS, names
from iree_lnbwd.verification.matrix import random_call

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)

COLUMNS, ROWS, EPS = 96, 5, 1e-3
CASES = [
    NormSpec(
        (COLUMNS,),
        dtype,
        op=op.name,
        eps=None if op.is_backward else EPS,
        has_weight=has_weight,
        residual_dtype=residual,
        output_mask=(True, has_weight, has_weight)[: len(op.masked)],
    )
    for op in OPS.values()
    for dtype, has_weight, residual in (("f32", True, None), ("bf16", False, "bf16"))
] + [NormSpec((COLUMNS,), "bf16", weight_dtype="f32", output_mask=(False, True, True))]


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_call_is_launched(spec: NormSpec, gpu: EmulatedGpu) -> None:
    call = random_call(spec, ROWS, random_generator())
    arrays = [jnp.asarray(call.arrays[name]) for name in names(spec.inputs)]
    found = jax.jit(calls.function(spec))(*arrays)
    assert gpu.loaded == [spec]
    assert gpu.driver.launches
    _assert_right(spec, found, call)


def _assert_right(spec: NormSpec, found: Any, call: BoundCall) -> None:
    results = {}
    for result, array in zip(spec.results, found, strict=True):
        shape = call.shape_of(spec.family.named(result.name))
        results[result.name] = np.asarray(array).reshape(shape)
    assert_right(results_of(spec.family, results), call)


def test_a_step_of_training(gpu: EmulatedGpu) -> None:
    """Modules are loaded once for all calls of a kind, and only what is asked for is computed."""
    x = jax.random.normal(jax.random.key(0), (2, 3, COLUMNS))
    w, b = jnp.full(COLUMNS, 0.5), jnp.ones(COLUMNS)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (lnbwd.layer_norm(lnbwd.layer_norm(x, COLUMNS, w, b), COLUMNS, w, b) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    ours = jax.block_until_ready(step(x, w))
    launched = len(gpu.driver.launches)
    again = jax.block_until_ready(step(x, w))
    assert len(gpu.driver.launches) == 2 * launched
    assert [spec.op for spec in gpu.loaded] == ["layer_norm", "layer_norm_backward"]
    assert gpu.loaded[1].output_mask == (True, True, False)
    gpu_free = pytest.MonkeyPatch()
    with gpu_free.context() as patch:
        patch.setattr(jax_native, "platforms", lambda *_: ())
        jax.clear_caches()
        theirs = step(x, w)
    for mine, repeated, xlas in zip(*map(jax.tree.leaves, (ours, again, theirs)), strict=True):
        np.testing.assert_array_equal(mine, repeated)
        np.testing.assert_allclose(mine, xlas, rtol=2e-5, atol=2e-5)


def test_a_batch_counts_as_rows(gpu: EmulatedGpu) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 3, COLUMNS))
    norm = functools.partial(lnbwd.rms_norm, normalized_shape=COLUMNS)
    together = jax.block_until_ready(jax.vmap(norm, in_axes=1, out_axes=1)(x))
    launched = len(gpu.driver.launches)
    np.testing.assert_array_equal(together, norm(x))
    assert len(gpu.driver.launches) == 2 * launched
    assert len(gpu.loaded) == 1


def test_no_rows(gpu: EmulatedGpu) -> None:
    grads = jax.grad(lambda w: lnbwd.rms_norm(jnp.ones((0, COLUMNS)), COLUMNS, w).sum())
    np.testing.assert_array_equal(grads(jnp.ones(COLUMNS)), np.zeros(COLUMNS))
    assert not gpu.loaded


def test_what_cannot_be_loaded_is_computed_by_xla(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "loaded", _no_module)
    monkeypatch.setattr(jax_native, "platforms", gpu.platforms)
    x = jax.random.normal(jax.random.key(0), (2, COLUMNS))
    with pytest.warns(RuntimeWarning, match="XLA computes rms_norm_.* cuda://0 is too old$"):
        found = lnbwd.rms_norm(x, COLUMNS)
    spec = NormSpec((COLUMNS,), op="rms_norm", has_weight=False, eps=rms_eps("f32"))
    np.testing.assert_array_equal(found, jax.jit(formulas.compute, static_argnums=0)(spec, x)[0])
    assert not gpu.driver.launches


def test_an_error_of_the_first_stage_is_raised(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the function was lowered in another process, nothing is loaded before."""
    lowered = jax.jit(lambda x: lnbwd.rms_norm(x, COLUMNS)).lower(jnp.ones((2, COLUMNS)))
    jax_native._module.cache_clear()
    monkeypatch.setattr(modules, "loaded", _no_module)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="DeviceError: device: cuda://0 is too old"
    ):
        lowered.compile()


def _no_module(*_: Any) -> Any:
    raise DeviceError("device: cuda://0 is too old")


def test_one_for_each_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call gets the scratch that the GPU with most processors needs."""
    kinds = [Gpu("A", 8, 1 << 20), Gpu("A", 8, 1 << 20), Gpu("A", 9, 1 << 20)]
    local = [SimpleNamespace(local_hardware_id=i) for i in range(3)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: local)
    monkeypatch.setattr(jax_native, "gpu_of", lambda uri: kinds[uri.index])
    gpus = jax_native._gpus.__wrapped__()
    assert [str(uri) for uri in gpus] == ["cuda://1", "cuda://2"]
    monkeypatch.setattr(jax_native, "_gpus", lambda: gpus)
    monkeypatch.setattr(jax_native, "_module", lambda spec, uri: uri)
    monkeypatch.setattr(
        jax_native, "_launches", lambda uri, m, _: SimpleNamespace(scratch_bytes=m * uri.index)
    )
    assert jax_native.scratch_bytes(CASES[0], 1024) == 2048 + 256
