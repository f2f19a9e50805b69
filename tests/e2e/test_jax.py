"""The norms for JAX on the CPU, where XLA computes them: values, gradients, transformations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
import jax.test_util
from support import random_generator

import iree_lnbwd
from iree_lnbwd import NormSpec, reference
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.arguments import Array, bind
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.jax import calls
from iree_lnbwd.operands import LAYER_NORM, RMS_NORM, names
from iree_lnbwd.spec import check_number
from iree_lnbwd.verification.matrix import random_call

COLUMNS, ROWS, EPS = 48, 7, 1e-3
CASES = [
    NormSpec((COLUMNS,), dtype, op=op.name, eps=EPS, **options)
    for op, dtype, options in (
        (LAYER_NORM, "f32", {}),
        (LAYER_NORM, "f16", {"has_weight": False, "has_bias": False}),
        (LAYER_NORM, "bf16", {"weight_dtype": "f32", "residual_dtype": "f32"}),
        (LAYER_NORM, "f64", {"residual_dtype": "f64", "weight_offset": 1.0}),
        (RMS_NORM, "bf16", {"residual_dtype": "bf16", "weight_offset": 1.0}),
        (RMS_NORM, "f32", {"has_weight": False}),
    )
]
FUNCTIONS = {
    (LAYER_NORM.name, False): lnbwd.layer_norm,
    (RMS_NORM.name, False): lnbwd.rms_norm,
    (LAYER_NORM.name, True): lnbwd.add_layer_norm,
    (RMS_NORM.name, True): lnbwd.add_rms_norm,
}


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_values_and_gradients_are_right(spec: NormSpec) -> None:
    rng = random_generator()
    call = random_call(spec, ROWS, rng)
    with jax.enable_x64(spec.dtype == "f64"):
        given = {name: jnp.asarray(call.arrays[name]) for name in names(spec.inputs)}
        reached = {
            name: jnp.asarray(rng.standard_normal((ROWS, COLUMNS)), DTYPES[dtype].numpy)
            for name, dtype in (
                ("grad_output", spec.dtype),
                ("grad_residual", spec.residual_dtype),
            )
            if dtype is not None
        }
        has_residual = spec.residual_dtype is not None
        norm: Any = FUNCTIONS[spec.op, has_residual]

        def normalized(given: dict[str, jax.Array]) -> Any:
            out = norm(
                **given,
                normalized_shape=COLUMNS,
                eps=check_number(spec.eps),
                weight_offset=spec.weight_offset,
            )
            return out if has_residual else (out,)

        def step(given: Any, reached: Any) -> Any:
            outputs, pull = jax.vjp(normalized, given)
            return outputs, pull(tuple(reached.values()))[0]

        outputs, gradients = jax.jit(step)(given, reached)
        saved = calls.function(spec)(*given.values())
    computed = dict(zip(names(spec.results), map(np.asarray, saved), strict=True))
    found = dict(zip(("output", "residual_output"), outputs, strict=False))
    _assert_right(found, reference.judge(call))
    arrays = {name: np.asarray(array) for name, array in (given | reached).items()}
    arrays |= {name: computed[name] for name in names(spec.family.statistics)}
    arrays["input"] = computed.get("residual_output", arrays["input"])
    arrays.pop("residual", None)
    judged = reference.judge(
        bind(f"{spec.op}_backward", arrays, COLUMNS, weight_offset=spec.weight_offset)
    )
    assert all(gradients[name].dtype == array.dtype for name, array in given.items())
    if has_residual:  # they share one; input's is cast
        shared = gradients.pop("residual")
        cast = np.asarray(shared).astype(given["input"].dtype)
        np.testing.assert_array_equal(gradients["input"], cast)
        gradients["input"] = shared
    _assert_right({f"grad_{name}": array for name, array in gradients.items()}, judged)


def _assert_right(found: dict[str, Any], judged: reference.Judgement) -> None:
    for name, array in found.items():
        expected, tolerance = judged.expected[name], judged.tolerance[name]
        comparison = reference.compare(np.asarray(array), expected, tolerance)
        assert comparison.passed, f"{name}: {comparison}"


def _given(rng: np.random.Generator, *leading: int) -> tuple[Array, Array, Array]:
    x = rng.standard_normal((*leading, COLUMNS)).astype(np.float32)
    weight, bias = rng.standard_normal((2, COLUMNS)).astype(np.float32)
    return x, weight, bias


def _loss(x: Any, weight: Any, bias: Any) -> Any:
    out, total = lnbwd.add_layer_norm(x, jnp.sin(x), COLUMNS, weight, bias)
    return (lnbwd.rms_norm(out, COLUMNS, weight) ** 3 + total).sum()


def test_gradients_can_be_differentiated() -> None:
    with jax.enable_x64(True):
        x, *others = (jnp.asarray(array, float) for array in _given(random_generator(), 2))
        loss = jax.jit(_loss)
        jax.test_util.check_grads(loss, (x, *others), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)

        def gradient(x: Any) -> Any:
            return jax.grad(_loss)(x, *others)

        # A Hessian is symmetric, so both ways to multiply it by ones are the same.
        reverse = jax.jit(jax.grad(lambda x: gradient(x).sum()))(x)
        _, forward = jax.jit(lambda x: jax.jvp(gradient, (x,), (jnp.ones_like(x),)))(x)
        np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-9)


def test_forward_mode_of_the_norm_itself_is_refused() -> None:
    x = jnp.ones((2, COLUMNS))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda x: lnbwd.rms_norm(x, COLUMNS), (x,), (x,))


@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, None), (None, 0, 0)], ids=str)
def test_batches(axes: tuple[int | None, ...]) -> None:
    """Of rows, of parameters, and of gradients of parameters that each of a batch has."""
    rng = random_generator()
    size = 3
    given = [
        array if axis is None else np.stack([array * (k + 1) for k in range(size)], axis)
        for array, axis in zip(_given(rng, 4), axes, strict=True)
    ]
    gradients = jax.value_and_grad(_loss, (0, 1, 2))
    together = jax.jit(jax.vmap(gradients, axes))(*given)
    for k in range(size):
        one = gradients(
            *(
                array if axis is None else array.take(k, axis)
                for array, axis in zip(given, axes, strict=True)
            )
        )
        for mine, alone in zip(*map(jax.tree.leaves, (together, one)), strict=True):
            scale = np.abs(alone).max()
            np.testing.assert_allclose(mine[k] / scale, alone / scale, atol=1e-5)


def test_within_scan_and_checkpoint() -> None:
    x, weight, bias = _given(random_generator(), 4)

    def layer(x: Any, weight: Any) -> Any:
        return x + lnbwd.layer_norm(x, COLUMNS, weight, bias), None

    def deep(x: Any, weights: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    weights = jnp.stack([weight, weight + 1])
    found = jax.jit(jax.grad(deep, (0, 1)))(x, weights)
    unrolled = jax.grad(lambda x, w: (layer(layer(x, w[0])[0], w[1])[0] ** 2).sum(), (0, 1))
    for mine, expected in zip(found, unrolled(x, weights), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    x, weight, bias = _given(random_generator(), 0)
    gradients = jax.jit(jax.grad(_loss, (0, 1, 2)))(x, weight, bias)
    assert gradients[0].shape == (0, COLUMNS)
    assert not np.any(gradients[1])
    assert not np.any(gradients[2])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"input": None}, "input: expected a JAX or NumPy array, got NoneType"),
        ({"input": [1.0]}, "input: expected a JAX or NumPy array, got list"),
        ({"normalized_shape": 5}, r"input: expected a shape that ends in .* \(5,\), got \(2, 4\)"),
        ({"weight": jnp.ones(3)}, r"weight: expected shape \(4,\), got \(3,\)"),
        ({"bias": jnp.ones(4, int)}, "bias: expected an element type of .*, got int32"),
        ({"eps": "1"}, "eps: expected a float, got str"),
        ({"weight_offset": float("inf")}, "weight_offset: expected a finite number, got inf"),
    ],
)
def test_an_error_names_the_argument(changed: dict[str, Any], error: str) -> None:
    given = {"input": jnp.ones((2, 4)), "normalized_shape": 4, "weight": jnp.ones(4), **changed}
    with pytest.raises((TypeError, ValueError), match=f"^{error}$"):
        lnbwd.layer_norm(**given)
    if isinstance(given["input"], jax.Array):  # the same under jit
        arrays = {name: a for name, a in given.items() if isinstance(a, jax.Array)}
        others = {name: a for name, a in given.items() if name not in arrays}
        with pytest.raises((TypeError, ValueError), match=f"^{error}"):
            jax.jit(lambda arrays: lnbwd.layer_norm(**arrays, **others))(arrays)


def test_a_traced_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^eps: expected a number that is not traced"):
        jax.jit(lambda eps: lnbwd.layer_norm(jnp.ones((2, 4)), 4, eps=eps))(1e-3)


def test_numpys_functions_say_where_tracers_belong() -> None:
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"^input: expected .* got a JAX tracer; iree_lnbwd\.jax"):
        jax.jit(lambda x: iree_lnbwd.layer_norm(x, 4).output)(x)
    with pytest.raises(TypeError, match=r"^weight: expected .* JAX tracer; iree_lnbwd\.jax has"):
        jax.grad(lambda w: iree_lnbwd.rms_norm(x, 4, w).output.sum())(jnp.ones(4))


def test_sharded_rows() -> None:
    """On four devices of the CPU, which only a new process has."""
    flags = "--xla_force_host_platform_device_count=4"
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(here / "jax_sharding.py")],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
