"""Sets of weights, gates and several uses in JAX: by modules, by XLA, and under transformations."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")
import jax
import jax.numpy as jnp
from jax_emulated import emulated_gpu
from jax_support import assert_a_step_is_right
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd import jax as lnbwd
from iree_lnbwd.jax import native as jax_native
from iree_lnbwd.jax.partitions import Places
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.sets import Sets

needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler"
)
COLUMNS = 16
_OF: Any = {"normalized_shape": (COLUMNS,), "eps": 1e-3}
SETS = [
    NormSpec(**_OF, op="layer_norm", weight_sets=True, weight_offset=1.0),
    NormSpec(**_OF, op="rms_norm", dtype="bf16", weight_sets=True, weight_dtype="f32"),
    NormSpec(**_OF, op="layer_norm", dtype="f16", weight_sets=True, residual_dtype="f32"),
    NormSpec(**_OF, op="rms_norm", weight_sets=True, has_bias=True, output_dtype="bf16"),
]
GATED = [
    NormSpec(**_OF, op="layer_norm", gate="after"),
    NormSpec(**_OF, op="layer_norm", gate="before", dtype="bf16", weight_sets=True),
    NormSpec(**_OF, op="rms_norm", gate="after", dtype="bf16", gate_dtype="f32", has_bias=True),
    NormSpec(**_OF, op="rms_norm", gate="before", dtype="f16", has_weight=False),
    NormSpec(**_OF, op="rms_norm", gate="after", weight_sets=True, has_bias=True),
]
USED = [
    (NormSpec(**_OF, op="layer_norm", dtype="bf16"), 3),
    (NormSpec(**_OF, op="rms_norm", output_dtype="bf16", residual_dtype="f32"), 2),
    (NormSpec(**_OF, op="rms_norm", dtype="f16", weight_sets=True), 4),
]


@pytest.fixture(params=[pytest.param("modules", marks=needs_cpp), "XLA"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the norms."""
    if request.param == "XLA":
        monkeypatch.setattr(jax_native, "platforms", lambda *_: ())
    jax.clear_caches()
    return str(request.param)


@pytest.fixture
def by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for tests that any module would pass."""
    monkeypatch.setattr(jax_native, "platforms", lambda *_: ())
    jax.clear_caches()


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [7, 12])
@pytest.mark.parametrize("spec", [*SETS, *GATED], ids=lambda spec: spec.name)
def test_values_and_gradients_are_right(spec: NormSpec, rows: int, by: str) -> None:
    assert_a_step_is_right(spec, rows, random_generator())


@pytest.mark.drawn
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize(("spec", "uses"), USED, ids=str)
def test_gradients_of_several_uses(
    spec: NormSpec, uses: int, memory_efficient: bool, by: str
) -> None:
    if memory_efficient:
        spec = replace(spec, output_dtype=None)
    options: Any = {"memory_efficient": memory_efficient, "uses": uses}
    assert_a_step_is_right(spec, 7, random_generator(), **options)


@needs_cpp
@pytest.mark.drawn
@pytest.mark.parametrize("spec", [SETS[0], GATED[1], GATED[2], USED[2][0]], ids=lambda s: s.name)
def test_kernels_of_an_emulated_gpu(spec: NormSpec) -> None:
    with emulated_gpu() as gpu:
        assert_a_step_is_right(spec, 7, random_generator(), uses=2 if spec.gate is None else 1)
        assert gpu.driver.launches


def given(rows: tuple[int, ...], *parameters: int) -> tuple[Array, ...]:
    rng = random_generator()
    shapes = (rows, parameters, parameters)
    return tuple(rng.standard_normal((*of, COLUMNS)).astype(np.float32) for of in shapes)


def formula(x: Any, weight: Any, bias: Any, rows_per_set: int, gate: Any, first: bool) -> Any:
    """In NumPy or JAX, of rows of two dimensions."""
    if gate is not None and first:
        x = x * gate / (1 + np.exp(-gate))
    sets = np.arange(len(x)) // rows_per_set % len(weight)
    centred = x - x.mean(1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    y = y * weight[sets] + bias[sets]
    return y if gate is None or first else y * gate / (1 + np.exp(-gate))


def test_other_options_of_the_same_arrays(by: str) -> None:
    """Each is a call of its own: nothing is left out where calls are known by what they are."""
    x, weight, bias = given((12,), 3)
    norm = jax.jit(
        lnbwd.layer_norm, static_argnums=1, static_argnames=("rows_per_set", "gate_first")
    )
    z = x[::-1]
    for sets, rows, gate, first in (
        (3, 1, None, False),
        (3, 2, None, False),
        (2, 2, None, False),
        (2, 2, z, False),
        (2, 2, z, True),
    ):
        options: Any = {"rows_per_set": rows, "gate": gate, "gate_first": first}
        found = norm(x, COLUMNS, weight[:sets], bias[:sets], **options)
        expected = formula(x, weight[:sets], bias[:sets], rows, gate, first)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def addends(x: Any, weight: Any, bias: Any, **options: Any) -> list[Any]:
    out = lnbwd.layer_norm(x, COLUMNS, weight, bias, gate=jnp.cos(x), **options)
    used = lnbwd.rms_norm(out, COLUMNS, weight, uses=3, rows_per_set=options["rows_per_set"])
    return [each**power for power, each in zip((1, 2, 3), used, strict=True)]


def loss(*arrays: Any, **options: Any) -> Any:
    return sum(each.sum() for each in addends(*arrays, **options))


@pytest.mark.parametrize(("rows_per_set", "gate_first"), [(1, False), (2, True)])
def test_gradients_of_gradients(rows_per_set: int, gate_first: bool, by_xla: None) -> None:
    """Against differences, in f64."""
    options: Any = {"rows_per_set": rows_per_set, "gate_first": gate_first}
    rng = random_generator()
    with jax.enable_x64(True):
        at = [jnp.asarray(array, float) for array in given((5,), 3)]
        along = [jnp.asarray(rng.standard_normal(array.shape)) for array in at]

        def of(x: Any, weight: Any, bias: Any) -> Any:
            norm = lnbwd.rms_norm(x, COLUMNS, weight, bias=bias, gate=2 * x, **options)
            return (norm**3).sum()

        gradient = jax.grad(of, (0, 1, 2))

        def projected(*arrays: Any) -> Any:
            return sum(jnp.vdot(g, v) for g, v in zip(gradient(*arrays), along, strict=True))

        def moved(function: Callable[..., Any], by: float) -> Any:
            return function(*(a + by * v for a, v in zip(at, along, strict=True)))

        for function in (jax.jit(of), jax.jit(projected)):
            slope = (moved(function, 1e-5) - moved(function, -1e-5)) / 2e-5
            gradients = jax.jit(jax.grad(function, (0, 1, 2)))(*at)
            total = sum(map(jnp.vdot, gradients, along))
            np.testing.assert_allclose(total, slope, rtol=1e-6)


def test_a_use_that_nothing_reads(by_xla: None) -> None:
    x, weight, bias = given((6,))

    def of(uses: int) -> Any:
        def total(*arrays: Any) -> Any:
            used = lnbwd.layer_norm(arrays[0], COLUMNS, *arrays[1:], uses=uses)
            return (used[0] ** 3 + used[-1]).sum() if uses > 1 else (used**3 + used).sum()

        return jax.jit(jax.grad(total, (0, 1, 2)))(x, weight, bias)

    for mine, other in zip(of(4), of(1), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, None), (None, 0, 0)], ids=str)
def test_batches(axes: tuple[int | None, ...], rows: int, by: str) -> None:
    """Whether a batch's rows end with a set's or not."""
    one = given((rows,), 3)
    batches = [
        each if axis is None else np.stack([each, 2 * each[::-1]], axis)
        for each, axis in zip(one, axes, strict=True)
    ]
    step = jax.jit(jax.value_and_grad(functools.partial(loss, rows_per_set=2), (0, 1, 2)))
    found = jax.jit(jax.vmap(step, axes))(*batches)
    for at in range(2):
        arrays = [
            each if axis is None else np.take(each, at, axis)
            for each, axis in zip(batches, axes, strict=True)
        ]
        alone, *gradients = jax.tree.leaves(step(*arrays))
        # A loss may be near zero, and errors are parts of what is added.
        added = sum(np.abs(each).sum() for each in addends(*arrays, rows_per_set=2))
        scales = (added, *(np.abs(each).max() for each in gradients))
        others = (alone, *gradients)
        for mine, other, scale in zip(jax.tree.leaves(found), others, scales, strict=True):
            np.testing.assert_allclose(mine[at] / scale, other / scale, atol=2e-5)


def test_exported_with_any_number_of_rows() -> None:
    (rows,) = jax.export.symbolic_shape("m")
    x, weight, bias = given((7,), 3)
    like = [jax.ShapeDtypeStruct((rows, COLUMNS), x.dtype)]
    like += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (weight, bias)]

    def of(x: Any, weight: Any, bias: Any) -> Any:
        return (lnbwd.layer_norm(x, COLUMNS, weight, bias, rows_per_set=2) ** 3).sum()

    step = jax.jit(jax.grad(of, (0, 1, 2)))
    exported = jax.export.export(step)(*like)
    for mine, other in zip(exported.call(x, weight, bias), step(x, weight, bias), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def test_strict_promotion(by_xla: None) -> None:
    x, weight, bias = (jnp.asarray(each, jnp.bfloat16) for each in given((7,), 3))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        step = jax.jit(jax.grad(lambda *a: loss(*a, rows_per_set=2).astype(np.float32)))
        assert step(x, weight, bias).dtype == jnp.bfloat16


def test_modulated_and_gated_are_the_norms(by_xla: None) -> None:
    x, scale, shift = given((2, 5), 2)

    def both(x: Any, scale: Any, shift: Any) -> Any:
        """Of each pair, which are to be equal."""
        factor = 1 + scale[:, None]
        pairs = []
        found = lnbwd.modulated_layer_norm(x, COLUMNS, scale, shift[:, None])
        pairs.append((found, lnbwd.layer_norm(x, COLUMNS) * factor + shift[:, None]))
        found = lnbwd.modulated_rms_norm(x, COLUMNS, scale, eps=0.1)
        pairs.append((found, lnbwd.rms_norm(x, COLUMNS, eps=0.1) * factor))
        for mine, other in (
            (lnbwd.gated_layer_norm, lnbwd.layer_norm),
            (lnbwd.gated_rms_norm, lnbwd.rms_norm),
        ):
            options: Any = {"gate_first": mine is lnbwd.gated_rms_norm, "weight_offset": 1.0}
            found = mine(x, 2 * x, COLUMNS, scale[0], **options)
            pairs.append((found, other(x, COLUMNS, scale[0], gate=2 * x, **options)))
        return pairs

    for found, expected in jax.jit(both)(x, scale, shift):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_gated_norms_have_a_gate() -> None:
    with pytest.raises(TypeError, match="gate: expected a JAX or NumPy array, got NoneType"):
        lnbwd.gated_rms_norm(np.ones((2, 4), np.float32), None, 4)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_samples_and_no_rows(shape: tuple[int, int]) -> None:
    x, scale, shift = given(shape, shape[0])

    def total(*arrays: Any) -> Any:
        return lnbwd.modulated_layer_norm(arrays[0], COLUMNS, *arrays[1:]).sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(x, scale, shift)
    for array, gradient in zip((x, scale, shift), gradients, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(array))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rows_per_set": 2}, "rows_per_set: expected 1 where weight has no sets"),
        ({"rows_per_set": 0}, "rows_per_set: expected an int >= 1, got 0"),
        ({"weight": np.ones((0, COLUMNS), np.float32)}, "weight: expected from 1 to"),
        ({"gate_first": True}, "gate_first: expected False without a gate, got True"),
        ({"gate_first": 1}, "gate_first: expected a bool, got 1"),
        ({"gate": np.ones((2, COLUMNS), np.float32)}, "gate: expected shape"),
        ({"gate": 1.0}, "gate: expected a JAX or NumPy array, got float"),
        ({"uses": 5}, "uses: expected an int from 1 to 4, got 5"),
        ({"uses": True}, "uses: expected an int from 1 to 4, got True"),
        ({"uses": 2, "gate": np.ones((3, COLUMNS), np.float32)}, "uses: expected 1 beside gate"),
        (
            {"memory_efficient": True, "gate": np.ones((3, COLUMNS), np.float32)},
            "memory_efficient: expected False beside gate, got True",
        ),
    ],
    ids=str,
)
def test_an_error_names_the_argument(options: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        lnbwd.rms_norm(np.ones((3, COLUMNS), np.float32), COLUMNS, **options)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("leading", "sets", "rows_per_set", "places"),
    [
        ((4, 6), None, None, Places(2, False)),
        ((4, 6), 1, 24, Places(2, False)),
        ((4, 6), 4, 6, Places(2, True)),  # a sample's
        ((4, 6, 3), 3, 1, Places(2, False)),  # a head's
        ((4, 6, 3), 3, 2, Places(1, False)),
        ((4, 6), 4, 3, Places(0, False)),
        ((4, 6), 5, 1, Places(0, False)),
        ((4, 6), 2, 12, Places(0, False)),
        ((4, 12), 3, 2, Places(1, False)),
        ((), 1, 1, Places(0, False)),
    ],
    ids=str,
)
def test_which_rows_stay_on_their_devices(
    leading: tuple[int, ...], sets: int | None, rows_per_set: int | None, places: Places
) -> None:
    found = Places.of(leading, sets, rows_per_set)
    assert found == places
    if sets is not None and found.dims and not found.of_sets and leading[0] > 1 and sets > 1:
        rows = int(np.prod(leading))
        of_rows = Sets(sets, rows_per_set or 1).of_rows(rows).reshape(leading)
        assert all((of_rows[at] == of_rows[0]).all() for at in range(leading[0]))
