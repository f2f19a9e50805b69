"""Small norms for JAX on the CPU, which XLA computes: values, gradients, transformations."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax_support import CASES, COLUMNS, EPS, FUNCTIONS, MEMORY_EFFICIENT, assert_a_step_is_right
from support import random_generator

import iree_lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import names
from iree_lnbwd.verification import matrix

ROWS = 7


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_values_and_gradients_are_right(spec: NormSpec) -> None:
    assert_a_step_is_right(spec, ROWS, random_generator())


@pytest.mark.parametrize("spec", MEMORY_EFFICIENT, ids=lambda spec: spec.name)
def test_memory_efficient_gradients_are_right(spec: NormSpec) -> None:
    assert_a_step_is_right(spec, ROWS, random_generator(), memory_efficient=True)


@pytest.mark.parametrize("memory_efficient", [True, False])
@pytest.mark.parametrize("spec", MEMORY_EFFICIENT, ids=lambda spec: spec.name)
def test_forks_add_the_gradient_that_went_past(spec: NormSpec, memory_efficient: bool) -> None:
    alone = replace(spec, residual_dtype=None)
    option = {"memory_efficient": memory_efficient}
    assert_a_step_is_right(alone, ROWS, random_generator(), forks=True, **option)


def test_a_fork_of_which_one_side_is_used() -> None:
    """The other side's gradient is zero, and nothing is added or normalized for it."""
    x, weight, bias = _given(random_generator(), ROWS)

    def used(side: int) -> Any:
        return lambda *given: (
            lnbwd.fork_layer_norm(given[0], COLUMNS, *given[1:])[side] ** 3
        ).sum()

    alone = jax.grad(
        lambda *given: (lnbwd.layer_norm(given[0], COLUMNS, *given[1:]) ** 3).sum(), (0, 1, 2)
    )
    every = jax.grad(used(0), (0, 1, 2))(x, weight, bias)
    jax.tree.map(np.testing.assert_array_equal, every, alone(x, weight, bias))
    past, *others = jax.grad(used(1), (0, 1, 2))(x, weight, bias)
    np.testing.assert_allclose(past, 3 * x**2, rtol=1e-6)
    assert not any(map(np.any, others))


@pytest.mark.parametrize("spec", MEMORY_EFFICIENT, ids=lambda spec: spec.name)
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_what_is_saved(spec: NormSpec, memory_efficient: bool) -> None:
    """The output and `rstd`, or the input, or the sum in its place, and the statistics."""
    rng = random_generator()
    has_residual = spec.residual_dtype is not None
    with jax.enable_x64(spec.dtype == "f64"):
        given = {
            each.name: jnp.asarray(rng.standard_normal(each.dims(ROWS)), DTYPES[each.dtype].numpy)
            for each in spec.inputs
        }
        options = {"eps": EPS, "weight_offset": spec.weight_offset}
        norm = functools.partial(
            FUNCTIONS[spec.op, has_residual],
            normalized_shape=COLUMNS,
            memory_efficient=memory_efficient,
            **options,
        )
        results, pull = jax.vjp(lambda given: norm(**given), given)
        output, total = results if has_residual else (results, given["input"])
        saved = jax.tree.leaves(pull)
    expected = [output if memory_efficient else total]
    expected += [given["weight"]] if spec.has_weight else []
    expected += [given["bias"]] if spec.has_bias and memory_efficient else []
    statistics = 1 if memory_efficient else len(spec.family.statistics)
    rows = [array for array in saved if array.shape == (ROWS,)]
    others = [array for array in saved if array.shape != (ROWS,)]
    assert len(rows) == statistics
    assert sorted(map(_bits, others)) == sorted(map(_bits, expected))


def _bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def test_the_documented_code() -> None:
    """The code in docs/jax.md that needs JAX alone; XLA computes the same without this package."""
    page = Path(__file__).parents[2] / "docs" / "jax.md"
    text = page.read_text(encoding="utf-8")
    codes = re.findall(r"(?<!flax -->\n)(?<!equinox -->\n)```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for code in codes:
        exec(code, names)
    dx, *others = names["gradients"]
    assert dx.shape == names["x"].shape
    assert np.isfinite(names["value"])
    # Rows of equal numbers: the norm of the first is the bias, so its weight counts for nothing.
    np.testing.assert_array_equal(others[0][1:], others[0][:-1])


def _given(rng: np.random.Generator, *leading: int) -> tuple[Array, Array, Array]:
    x = rng.standard_normal((*leading, COLUMNS)).astype(np.float32)
    weight, bias = rng.standard_normal((2, COLUMNS)).astype(np.float32)
    return x, weight, bias


def _terms(x: Any, weight: Any, bias: Any, memory_efficient: bool = False) -> Any:
    option = {"memory_efficient": memory_efficient}
    out, total = lnbwd.add_layer_norm(x, jnp.sin(x), COLUMNS, weight, bias, **option)
    return lnbwd.rms_norm(out, COLUMNS, weight, **option) ** 3 + total


def _loss(x: Any, weight: Any, bias: Any, memory_efficient: bool = False) -> Any:
    return _terms(x, weight, bias, memory_efficient).sum()


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_gradients_can_be_differentiated(memory_efficient: bool) -> None:
    """In reverse mode and in forward mode, against differences of the gradients."""
    rng = random_generator()
    with jax.enable_x64(True):
        at, along = ([jnp.asarray(array, float) for array in _given(rng, 2)] for _ in range(2))
        loss = functools.partial(_loss, memory_efficient=memory_efficient)
        gradient = jax.grad(loss, (0, 1, 2))

        def projected(*given: Any) -> Any:
            return sum(jnp.vdot(g, v) for g, v in zip(gradient(*given), along, strict=True))

        reverse = jax.jit(jax.grad(projected, (0, 1, 2)))(*at)
        _, forward = jax.jit(lambda at, along: jax.jvp(gradient, at, along))(
            tuple(at), tuple(along)
        )
        step, compiled = 1e-5, jax.jit(gradient)
        ahead, behind = (
            compiled(*(x + sign * step * v for x, v in zip(at, along, strict=True)))
            for sign in (1, -1)
        )
    for mine, other, high, low in zip(reverse, forward, ahead, behind, strict=True):
        expected = (np.asarray(high) - np.asarray(low)) / (2 * step)
        scale = np.abs(expected).max()
        for product in map(np.asarray, (mine, other)):
            np.testing.assert_allclose(product / scale, expected / scale, atol=1e-6)


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
    alone = jax.jit(gradients)
    together = jax.jit(jax.vmap(gradients, axes))(*given)
    for k in range(size):
        x, weight, bias = arguments = [
            array if axis is None else array.take(k, axis)
            for array, axis in zip(given, axes, strict=True)
        ]
        one = alone(*arguments)
        for mine, other in zip(*map(jax.tree.leaves, (together, one)), strict=True):
            scale = np.abs(other).max()
            if other.ndim == 0:  # the loss, whose terms may cancel
                scale = np.abs(_terms(x, weight, bias)).sum()
            np.testing.assert_allclose(mine[k] / scale, other / scale, atol=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("spec", MEMORY_EFFICIENT[:5], ids=lambda spec: spec.name)
def test_strict_promotion(spec: NormSpec, memory_efficient: bool) -> None:
    """JAX adds no dimension and widens no type by itself, which users may forbid."""
    dims = (4, COLUMNS // 4)
    call = matrix.random_call(replace(spec, normalized_shape=dims), 6, random_generator())
    has_residual = spec.residual_dtype is not None
    with jax.enable_x64(spec.dtype == "f64"):
        given = {
            name: jnp.asarray(call.arrays[name]).reshape(
                (2, 3, *dims) if name in ("input", "residual") else dims
            )
            for name in names(spec.inputs)
        }

        def norm(given: Any) -> Any:
            return FUNCTIONS[spec.op, has_residual](
                **given,
                normalized_shape=dims,
                memory_efficient=memory_efficient,
                weight_offset=spec.weight_offset,
            )

        def loss(given: Any) -> Any:
            return sum((out.astype(jnp.float32) ** 2).sum() for out in jax.tree.leaves(norm(given)))

        def pushed(given: Any) -> Any:
            return jax.jvp(jax.grad(loss), (given,), (given,))

        axes = ({name: None if array.shape == dims else 0 for name, array in given.items()},)
        gradient = jax.grad(loss)
        for way in (norm, jax.jit(norm), jax.vmap(norm, axes), jax.vmap(gradient, axes), pushed):
            expected = way(given)
            with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
                found = way(given)
            jax.tree.map(np.testing.assert_array_equal, found, expected)


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


def test_exported_with_any_number_of_rows() -> None:
    """A symbol in place of the rows."""
    x, weight, bias = _given(random_generator(), ROWS)
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct((rows, COLUMNS), x.dtype)]
    shapes += [jax.ShapeDtypeStruct((COLUMNS,), x.dtype)] * 2
    step = jax.jit(jax.grad(_loss, (0, 1, 2)))
    found = jax.export.export(step)(*shapes).call(x, weight, bias)
    for mine, expected in zip(found, step(x, weight, bias), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4)
    other = jax.ShapeDtypeStruct((rows + 1, COLUMNS), x.dtype)
    with pytest.raises(ValueError, match=r"residual: expected shape \(rows, .*\(rows \+ 1, "):
        jax.export.export(jax.jit(lnbwd.add_rms_norm, static_argnums=2))(shapes[0], other, COLUMNS)


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
        ({"eps": 1e-40}, "eps: expected 0, or a number from .*, got 1e-40"),
        ({"eps": 1e39}, r"eps: expected 0, or a number from .*, got 1e\+39"),
        ({"memory_efficient": 1}, "memory_efficient: expected a bool, got 1"),
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


def test_memory_efficient_gradients_are_in_one_type() -> None:
    x, residual = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"^residual: expected bf16 like input .* got f32$"):
        lnbwd.add_layer_norm(x, residual, 4, memory_efficient=True)


def test_a_traced_option_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^eps: expected a number that is not traced"):
        jax.jit(lambda eps: lnbwd.layer_norm(jnp.ones((2, 4)), 4, eps=eps))(1e-3)


def test_numpys_functions_say_where_tracers_belong() -> None:
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"^input: expected .* got a JAX tracer; iree_lnbwd\.jax"):
        jax.jit(lambda x: iree_lnbwd.layer_norm(x, 4).output)(x)
    with pytest.raises(TypeError, match=r"^weight: expected .* JAX tracer; iree_lnbwd\.jax has"):
        jax.grad(lambda w: iree_lnbwd.rms_norm(x, 4, w).output.sum())(jnp.ones(4))
