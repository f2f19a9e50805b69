"""What XLA's custom call launches: the GPU is the emulator, and arrays are in the host's memory.

For a GPU, nothing but the driver, the stream and the memory for scratch differs.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from native_driver import NativeDriver
from support import assert_right, built, random_generator, without_few_rows

from iree_lnbwd import DeviceError, NormSpec, functional, jax_native, runtime
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.arguments import BoundCall, results_of
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.jax import calls
from iree_lnbwd.operands import OPS, names
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.targets import find_target
from iree_lnbwd.verification.matrix import random_call

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)

COLUMNS, ROWS, EPS = 96, 5, 1e-3
EMULATED = "iree_lnbwd_emulated"  # beside the custom call of the CPU
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


class Gpu:
    """An emulated GPU that XLA takes the CPU for.

    Attributes:
        driver: Its driver.
        loaded: The specs whose modules were loaded.
    """

    def __init__(self) -> None:
        self.driver = NativeDriver()
        self.loaded: list[NormSpec] = []

    def load(self, spec: NormSpec, uri: Any, compiling: Any) -> Any:
        """As `functional.loaded`."""
        assert str(uri) == "cuda://0"
        self.loaded.append(spec)
        target = find_target("sm_90")
        vmfb, _ = built(spec, target, without_few_rows(spec, target))
        norm = runtime.load_built(vmfb, "cuda")
        launches = norm.launches

        def known(rows: int) -> Any:
            sequence = launches(rows)
            sizes = {
                each.name: math.prod(each.dims(rows)) * DTYPES[each.dtype].numpy.itemsize
                for each in spec.arguments
            }
            self.driver.knows(sequence, sizes)
            return sequence

        norm.launches = known  # type: ignore[method-assign]
        return norm


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()
    library = jax_native.load()
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: found.driver)
    monkeypatch.setattr(functional, "loaded", found.load)
    monkeypatch.setattr(jax_native, "TARGET", EMULATED)
    monkeypatch.setattr(jax_native, "platforms", lambda _, rows: ("cpu",) if rows else ())
    _register(library)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):  # there may be a GPU
        yield found
    library.iree_lnbwd_jax_forget()
    jax_native._modules.clear()
    jax.clear_caches()
    assert not found.driver.errors


def _register(library: Any, done: list[bool] = []) -> None:  # noqa: B006 - once in a process
    if not done:
        jax_native.register("cpu", library.iree_lnbwd_jax_on_host)
        done.append(True)


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_call_is_launched(spec: NormSpec, gpu: Gpu) -> None:
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


def test_a_step_of_training(gpu: Gpu) -> None:
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


def test_a_batch_counts_as_rows(gpu: Gpu) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 3, COLUMNS))
    norm = functools.partial(lnbwd.rms_norm, normalized_shape=COLUMNS)
    together = jax.block_until_ready(jax.vmap(norm, in_axes=1, out_axes=1)(x))
    launched = len(gpu.driver.launches)
    np.testing.assert_array_equal(together, norm(x))
    assert len(gpu.driver.launches) == 2 * launched
    assert len(gpu.loaded) == 1


def test_no_rows(gpu: Gpu) -> None:
    grads = jax.grad(lambda w: lnbwd.rms_norm(jnp.ones((0, COLUMNS)), COLUMNS, w).sum())
    np.testing.assert_array_equal(grads(jnp.ones(COLUMNS)), np.zeros(COLUMNS))
    assert not gpu.loaded


def test_an_error_of_the_loader_is_raised(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise DeviceError("device: cuda://0 is too old")

    monkeypatch.setattr(functional, "loaded", load)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="DeviceError: device: cuda://0 is too old"
    ):
        jax.block_until_ready(lnbwd.rms_norm(jnp.ones((2, COLUMNS)), COLUMNS))
