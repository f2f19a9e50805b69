"""Gradients from the output against those from the input: a derived bound, and how tight it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import Array, BoundCall, bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import FROM_OUTPUT
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.reference import F64, judge
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.output_error import (
    gradients_difference,
    rounding_of,
    xhat_difference,
)

OF_F64 = 1e-14  # rounding errors of the reference itself, relative to the terms of a sum

every_op = pytest.mark.parametrize("op", FROM_OUTPUT)


def normalized(call: BoundCall) -> tuple[F64, F64]:
    """xhat from the input, by the call's statistics, and the weight with its offset; exactly."""
    assert call.spec is not None
    have = {name: array.astype(np.float64) for name, array in call.arrays.items()}
    mean = have["mean"][:, None] if call.spec.family.centres else 0.0
    return (have["input"] - mean) * have["rstd"][:, None], have["weight"] + call.spec.weight_offset


def on_values(call: BoundCall, **arrays: Array) -> BoundCall:
    return call._replace(arrays={**call.arrays, **arrays})


def from_output(call: BoundCall, bias: Array | None) -> tuple[BoundCall, F64]:
    """The call from the output of the same numbers, stored in the input's type; and its error."""
    spec = call.spec
    assert spec is not None
    xhat, g = normalized(call)
    exact = xhat * g + (0.0 if bias is None else bias.astype(np.float64))
    dtype = DTYPES[spec.dtype]
    stored = exact.astype(dtype.numpy)
    given = {k: v for k, v in call.arrays.items() if k not in ("input", "mean")}
    other = bind(
        spec.op,
        {**given, "bias": bias, "output": stored},
        (spec.columns,),
        weight_offset=spec.weight_offset,
    )
    off = np.abs(stored.astype(np.float64) - exact)
    # NumPy rounds f64 to bf16 by way of f32.
    assert (off <= (1 + 2**-12) * rounding_of(stored.astype(np.float64), dtype)).all()
    return other, off


def hard(rng: np.random.Generator, op: str, dtype: str) -> tuple[BoundCall, Array | None]:
    """A call from the input, and a bias: weights of any size, zeros too, and large biases."""
    rows, columns = (int(2 ** rng.uniform(0, 7)) for _ in range(2))
    wide = "f64" if dtype == "f64" else "f32"
    offset = float(rng.choice([0.0, 1.0]))
    spec = NormSpec((columns,), dtype, op=op, weight_dtype=wide, weight_offset=offset)
    weight = rng.standard_normal(columns) * 10 ** rng.uniform(-7, 1, columns)
    weight[rng.random(columns) < 0.1] = 0.0
    call = matrix.random_call(spec, rows, rng)
    call = on_values(call, weight=(weight - offset).astype(DTYPES[wide].numpy))
    if not (FROM_OUTPUT[op].usual_bias or rng.integers(2)):
        return call, None
    bias = rng.standard_normal(columns) * 10 ** rng.uniform(-3, 3, columns)
    return call, bias.astype(DTYPES[wide].numpy)


def terms(call: BoundCall) -> dict[str, F64]:
    """The magnitudes that are added up for each gradient from the input."""
    xhat, g = normalized(call)
    dy = np.abs(call.arrays["grad_output"].astype(np.float64))
    rstd = np.abs(call.arrays["rstd"].astype(np.float64))[:, None]
    h, xhat = dy * np.abs(g), np.abs(xhat)
    means = h.mean(axis=1, keepdims=True), (h * xhat).mean(axis=1, keepdims=True)
    return {
        "grad_input": rstd * (h + means[0] + xhat * means[1]),
        "grad_weight": (dy * xhat).sum(axis=0),
        "grad_bias": dy.sum(axis=0),
    }


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_from_the_output_are_within_the_bound(op: str, dtype: str) -> None:
    """Also where the weight is zero, and there nothing is infinite or NaN."""
    rng = random_generator()
    for _ in range(40):
        call, bias = hard(rng, op, dtype)
        other, off = from_output(call, bias)
        size = np.abs(other.arrays["output"].astype(np.float64))
        size += 0.0 if bias is None else np.abs(bias.astype(np.float64))
        bounds = gradients_difference(call, off + OF_F64 * size)
        one, two = judge(call).expected, judge(other).expected
        for name, expected in one.items():
            assert np.isfinite(two[name]).all(), name
            slack = OF_F64 * terms(call)[name]
            assert (np.abs(two[name] - expected) <= bounds[name] + slack).all(), (name, call.spec)


@every_op
def test_the_bound_is_reached(op: str) -> None:
    """Of a single row, some gradient of a weight is off by almost as much as the bound says."""
    rng = random_generator()
    spec = NormSpec((512,), "bf16", op=op, weight_dtype="f32")
    call = matrix.random_call(spec, 1, rng)
    bias = rng.standard_normal(512).astype(np.float32) if FROM_OUTPUT[op].usual_bias else None
    other, _ = from_output(call, bias)
    stored = other.arrays["output"].astype(np.float64)
    bound = gradients_difference(call, rounding_of(stored, DTYPES["bf16"]))
    off = np.abs(judge(other).expected["grad_weight"] - judge(call).expected["grad_weight"])
    assert 0.5 < (off / bound["grad_weight"]).max() <= 1 + 2**-10


def test_xhat_is_as_exact_as_the_output_where_the_bias_is_small() -> None:
    """Of some weights: where none is kept away from zero, u * |xhat + beta / g|."""
    rng = random_generator()
    xhat, beta = rng.standard_normal((2, 5, 7))
    g = np.array([1.0, -2.0, 0.5, LEAST_WEIGHT, -LEAST_WEIGHT, 3.0, -1e-3])
    u = DTYPES["bf16"].unit_roundoff
    bound = xhat_difference(xhat, g, u * np.abs(xhat * g + beta))
    np.testing.assert_allclose(bound, u * np.abs(xhat + beta / g), rtol=1e-12)


def test_of_a_zero_weight_all_of_xhat_is_lost() -> None:
    xhat = np.array([[1.5, -2.5]])
    bound = xhat_difference(xhat, np.array([0.0, -0.0]), np.full((1, 2), 1e-6))
    np.testing.assert_allclose(bound, np.abs(xhat) + 1e-6 / LEAST_WEIGHT, rtol=1e-12)


@every_op
def test_zero_weights_give_zero_gradients_of_them_where_the_bias_is_exact(op: str) -> None:
    """The output is the bias then, and xhat is lost: it counts as zero."""
    rng = random_generator()
    call = matrix.random_call(NormSpec((32,), "bf16", op=op), 9, rng)
    call = on_values(call, weight=np.zeros_like(call.arrays["weight"]))
    reads_bias = FROM_OUTPUT[op].usual_bias
    bias = rng.standard_normal(32).astype(call.arrays["weight"].dtype) if reads_bias else None
    other, off = from_output(call, bias)
    assert not off.any()
    expected = judge(other).expected
    assert not expected["grad_weight"].any()
    assert not expected["grad_input"].any()


@every_op
def test_a_wrong_formula_is_beyond_the_bound(op: str) -> None:
    """An output that is not divided by its weight."""
    rng = random_generator()
    call = matrix.random_call(NormSpec((64,), "bf16", op=op), 16, rng)
    other, off = from_output(call, None)
    undivided = on_values(other, weight=np.ones_like(other.arrays["weight"]))
    bound = gradients_difference(call, off)["grad_weight"]
    wrong = np.abs(judge(undivided).expected["grad_weight"] - judge(call).expected["grad_weight"])
    assert (wrong > bound).mean() > 0.9


@every_op
@pytest.mark.parametrize(
    ("has_weight", "sets"), [(True, 1), (False, 1), (True, 3)], ids=["weight", "none", "sets"]
)
def test_the_bounds_element_by_element(op: str, has_weight: bool, sets: int) -> None:
    """Each from the formulas at the head of the module; with weights of either sign, and small."""
    rng = random_generator()
    spec = NormSpec(
        *((7,), "f64"),
        op=op,
        has_weight=has_weight,
        weight_offset=0.5 * has_weight,
        weight_sets=sets > 1,
    )
    call = matrix.random_call(spec, 5, rng)  # of two rows a set
    have = {name: array.tolist() for name, array in call.arrays.items()}
    of_sets = [[1.0] * 7] * sets
    if has_weight:
        first = np.array([-0.5, -0.5 + 3e-6, -0.5 - 3e-6, 1.0, -2.0, 0.25, -0.75])
        weight = np.array([first + number for number in range(sets)])
        call = on_values(call, weight=weight if sets > 1 else first)
        of_sets = (weight + 0.5).tolist()
    off = np.abs(rng.standard_normal((5, 7))) * 1e-3
    bounds = gradients_difference(call, off)
    assert bounds.keys() == {"grad_input", "grad_weight", "grad_bias"}
    of_weight = [[0.0] * 7 for _ in range(sets)]
    for i in range(5):
        number = i // 2 % sets
        g = of_sets[number]
        rstd = have["rstd"][i]
        mean = have["mean"][i] if "mean" in have else 0.0
        dy, xhat = have["grad_output"][i], [(x - mean) * rstd for x in have["input"][i]]
        xhat_off = []
        for j in range(7):
            by = g[j] if abs(g[j]) >= LEAST_WEIGHT else math.copysign(LEAST_WEIGHT, g[j])
            lost = abs(xhat[j] * (1 - g[j] / by))
            xhat_off.append(off[i, j] / abs(by) + lost)
            of_weight[number][j] += abs(dy[j]) * xhat_off[j]
        mean_hx = abs(sum(dy[j] * g[j] * xhat[j] for j in range(7)) / 7)
        mean_off = sum(abs(dy[j] * g[j]) * xhat_off[j] for j in range(7)) / 7
        dx = [mean_hx * xhat_off[j] + (abs(xhat[j]) + xhat_off[j]) * mean_off for j in range(7)]
        np.testing.assert_allclose(bounds["grad_input"][i], rstd * np.array(dx), rtol=1e-9)
    np.testing.assert_allclose(bounds["grad_weight"], of_weight, rtol=1e-9)
    np.testing.assert_array_equal(bounds["grad_bias"], np.zeros((sets, 7)), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_was_rounded_once(dtype: str) -> None:
    """By half a unit in its last place; among subnormal numbers, by half a step."""
    of = DTYPES[dtype]
    values = np.array([0.0, 1.0, -3.0, of.smallest_subnormal, of.largest])
    step = of.smallest_subnormal / 2
    u = of.unit_roundoff
    np.testing.assert_allclose(
        rounding_of(values, of), [step, u, 3 * u, step, of.largest * u], rtol=1e-12
    )
