"""The norms for JAX on the CPU by this package's modules, in XLA's own memory."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax_support import CASES, COLUMNS, MEMORY_EFFICIENT, assert_a_step_is_right
from support import random_generator

from iree_lnbwd import CompileError, NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.calls import modules
from iree_lnbwd.jax import calls, formulas
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime import Norm

needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
THREADS = (1, 2, 3)
# Which of them it is depends on how JAX came to call the function.
RAISED = (jax.errors.JaxRuntimeError, ValueError)


def forget() -> None:
    """The next call of each kind on the CPU comes to Python."""
    jax_native.load().iree_lnbwd_jax_forget()


@pytest.fixture
def by_modules() -> Iterator[None]:
    """No call was traced or made before."""
    jax.clear_caches()
    forget()
    yield
    jax.clear_caches()


@pytest.fixture
def filled(by_modules: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Norm, list[int]]]:
    """The calls of modules: the module, and the addresses of its inputs and results."""
    seen = []
    fill = Norm.fill

    def watched(norm: Norm, inputs: Sequence[Array], results: Sequence[Array], sets: Any) -> None:
        seen.append((norm, [array.ctypes.data for array in (*inputs, *results)]))
        fill(norm, inputs, results, sets)

    monkeypatch.setattr(Norm, "fill", watched)
    return seen


@needs_cpp
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_values_and_gradients_are_right(
    spec: NormSpec, rows: int, filled: list[tuple[Norm, list[int]]]
) -> None:
    assert_a_step_is_right(spec, rows, random_generator())
    assert {norm.spec.op for norm, _ in filled} == {spec.op, f"{spec.op}_backward"}


@needs_cpp
@pytest.mark.parametrize("spec", MEMORY_EFFICIENT[::3], ids=lambda spec: spec.name)
def test_memory_efficient_gradients_are_right(
    spec: NormSpec, filled: list[tuple[Norm, list[int]]]
) -> None:
    assert_a_step_is_right(spec, 7, random_generator(), memory_efficient=True)
    assert {norm.spec.from_output for norm, _ in filled} == {False, True}


@needs_cpp
def test_nothing_is_copied(filled: list[tuple[Norm, list[int]]]) -> None:
    spec = NormSpec((COLUMNS,), "bf16", op="layer_norm_backward")
    rng = random_generator()
    arrays = [
        jnp.asarray(rng.standard_normal(each.dims(64)), DTYPES[each.dtype].numpy)
        for each in spec.inputs
    ]
    results = jax.block_until_ready(jax.jit(calls.function(spec))(*arrays))
    ((_, addresses),) = filled
    assert addresses == [array.unsafe_buffer_pointer() for array in (*arrays, *results)]


@needs_cpp
def test_donated_arrays(filled: list[tuple[Norm, list[int]]]) -> None:
    """XLA may give a donated array's memory to a result, but not to this one."""
    rng = random_generator()
    x = rng.standard_normal((64, COLUMNS)).astype(np.float32)
    step = jax.jit(lambda x: lnbwd.rms_norm(x, COLUMNS) + 1, donate_argnums=0)
    found = step(jnp.asarray(x) + 0)
    rstd = 1 / np.sqrt((x.astype(float) ** 2).mean(1, keepdims=True) + np.finfo(np.float32).eps)
    np.testing.assert_allclose(found, x * rstd + 1, atol=1e-5)
    ((_, (input, *_, output, _)),) = filled
    assert input != output


@needs_cpp
def test_many_threads(by_modules: None) -> None:
    """They call functions of their own, each with several norms that XLA may run side by side."""
    x = jax.random.normal(jax.random.key(0), (2, 64, COLUMNS))

    def loss(x: Any, scale: Any) -> Any:
        return sum((lnbwd.layer_norm(each * scale, COLUMNS) ** 3).sum() for each in x)

    def of(scale: int) -> Any:
        return jax.jit(jax.grad(lambda x: loss(x, scale)))

    expected = [np.asarray(of(k)(x)) for k in THREADS]
    found: dict[int, list[Array]] = {}

    def work(k: int) -> None:
        step = of(k)
        found[k] = [np.asarray(step(x)) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(k,)) for k in THREADS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == len(threads)
    for k, each in found.items():
        for array in each:
            np.testing.assert_array_equal(array, expected[k - 1])


@needs_cpp
def test_an_error_is_raised_as_xlas(by_modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any) -> None:
        raise RuntimeError("the module said no")

    norm = jax.jit(lambda x: lnbwd.rms_norm(x, COLUMNS))
    x = jnp.ones((3, COLUMNS))
    expected = norm(x)
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(Norm, "fill", fill)
        with pytest.raises(RAISED, match="RuntimeError: the module said no"):
            jax.block_until_ready(norm(x))
    np.testing.assert_array_equal(norm(x), expected)


@needs_cpp
@pytest.mark.parametrize("rows", [7, 2050])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_known_calls_have_the_same_bits_without_python(
    dtype: str, rows: int, by_modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On XLA's threads; also many at once, which may be more than there are threads."""
    columns = 512
    x, reached = (
        jnp.asarray(random_generator().standard_normal((rows, columns)), DTYPES[dtype].numpy)
        for _ in range(2)
    )
    weight = jnp.ones(columns, x.dtype)

    def step(x: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: lnbwd.rms_norm(x, columns, w), x, weight)
        return y, *pull(reached)

    once = jax.jit(step)
    several = jax.jit(lambda x: [step(x) for _ in range(8)])
    first = [np.asarray(each).tobytes() for each in once(x)]
    lowered = several.lower(x).compile()

    def fill(*_: Any) -> None:
        raise RuntimeError("a known call came to Python")

    monkeypatch.setattr(Norm, "fill", fill)
    for found in (once(x), once(x), *lowered(x)):
        assert [np.asarray(each).tobytes() for each in found] == first
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for found in pool.map(once, [x] * 32):
            assert [np.asarray(each).tobytes() for each in found] == first


@needs_cpp
def test_xla_computes_what_has_no_module(by_modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any) -> Any:
        raise CompileError("the compiler is missing")

    jax_native._are_on.cache_clear()
    monkeypatch.setattr(modules, "loaded", loaded)
    x = jax.random.normal(jax.random.key(0), (3, COLUMNS))
    spec = NormSpec((COLUMNS,), op="rms_norm", has_weight=False, eps=0.25)
    with pytest.warns(RuntimeWarning, match="XLA computes rms_norm_.* the compiler is missing$"):
        found = jax.jit(calls.function(spec))(x)
    jax_native._are_on.cache_clear()
    for mine, xlas in zip(found, jax.jit(formulas.compute, static_argnums=0)(spec, x), strict=True):
        np.testing.assert_array_equal(mine, xlas)


@needs_cpp
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "rms_norm_backward"])
@pytest.mark.parametrize("rows", [1, 1 << 20])
def test_norms_of_any_size_are_ours(op: str, dtype: str, rows: int) -> None:
    spec = NormSpec((64,), dtype, op=op, eps=None if op.endswith("backward") else 1e-5)
    shapes = jax.eval_shape(
        lambda: [jnp.zeros(each.dims(rows), DTYPES[each.dtype].numpy) for each in spec.inputs]
    )
    text = jax.jit(calls.function(spec)).lower(*shapes).as_text()
    assert jax_native.TARGET in text


@needs_cpp
def test_sharded_rows() -> None:
    script = Path(__file__).parents[1] / "jax_sharding.py"
    flags = "--xla_force_host_platform_device_count=4"
    done = _python(script.read_text(encoding="utf-8"), XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr


# Nobody waits for the step; what it prints needs the norms. One device alone would run it at once.
_PENDING = """
import jax, jax.numpy as jnp
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import native as jax_native
def step(x):
    for _ in range(20):
        x = jnp.sin(lnbwd.layer_norm(x, 1024))
    jax.debug.print("sum {}", jnp.isfinite(x).sum())
    return x
step = jax.pmap(step)
x = jnp.ones((2, 512, 1024))
assert jax_native.TARGET in step.lower(x).as_text()
step(x)
step(x)
"""


@needs_cpp
def test_a_process_that_ends_before_its_work() -> None:
    done = _python(_PENDING, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiling ")]
    assert (done.returncode, said) == (0, [])
    assert done.stdout == f"sum {512 * 1024}\n" * 4


_WITHOUT_CPP = """
import jax, jax.numpy as jnp
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import native as jax_native
print(lnbwd.rms_norm(jnp.full((2, 8), 3.0), 8)[1, 7])
"""


def test_without_a_cpp_compiler(tmp_path: Path) -> None:
    done = _python(_WITHOUT_CPP, PATH=str(tmp_path), CXX="", IREE_LNBWD_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1.0\n")
    assert "XLA computes the norms, for the custom call failed: no C++ compiler" in done.stderr


def _python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
