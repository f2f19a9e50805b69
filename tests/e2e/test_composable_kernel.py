"""Composable Kernel's test of layer-norm backward (test/normalization_bwd_data), on this op.

And the trap in its example 53: the README there prints another formula for dX than its code has.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    Arguments,
    assert_matches_reference,
    present,
    random_arguments,
    random_generator,
)

from iree_lnbwd import NormSpec, reference
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.reference import F64

# The driver line owns the lengths and init methods of Composable Kernel.
DRIVER = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "layernorm2d_bwd"))
LENGTHS: tuple[tuple[int, int], ...] = DRIVER["LENGTHS"]
initialize: Callable[..., Any] = DRIVER["initialize"]


def arguments_by_init_method(
    method: int, length: tuple[int, int], rng: np.random.Generator
) -> Arguments:
    columns = length[1]
    operands = initialize(method, length, NormSpec((columns,)), rng)
    return Arguments(
        grad_output=operands.dy,
        input=operands.x,
        normalized_shape=(columns,),
        mean=operands.mean,
        rstd=operands.inv_std,
        weight=operands.gamma,
    )


def assert_check_err(out: Array, ref: F64) -> None:
    """Composable Kernel's `check_err` as its layer-norm tests call it."""
    error = np.abs(out.astype(np.float64) - ref)
    assert np.all(error <= 1e-3 + 1e-3 * np.abs(ref)), error.max()


@pytest.mark.drawn
@pytest.mark.parametrize("method", [0, 1, 2])
@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: "x".join(map(str, length)))
def test_composable_kernels_lengths(length: tuple[int, int], method: int) -> None:
    arguments = arguments_by_init_method(method, length, random_generator())
    gradients = arguments.backward()
    expected = assert_matches_reference(gradients, arguments).expected
    for name, ref in expected.items():
        assert_check_err(present(getattr(gradients, name)), ref)


@pytest.mark.parametrize("name", ["grad_output", "input", "weight", "mean", "rstd"])
def test_init_methods_are_composable_kernels(name: str) -> None:
    """GeneratorTensor_1, GeneratorTensor_2{-5, 5}, GeneratorTensor_3{0, 1} or {-0.5, 0.5}."""
    rng = random_generator()
    ones, integers, uniform = (
        getattr(arguments_by_init_method(method, (500, 400), rng), name) for method in range(3)
    )
    assert np.all(ones == 1)
    assert set(np.unique(integers)) == set(range(-5, 5))
    low = 0.0 if name in ("grad_output", "input") else -0.5
    assert low <= uniform.min() < low + 0.05
    assert low + 0.95 < uniform.max() <= low + 1


def readme_grad_input(arguments: Arguments) -> F64:
    """dX as the README of Composable Kernel's example 53 has it: with dL/dbeta and dL/dgamma.

    gamma_j rstd_i (dY_ij - (dL/dbeta_j + xhat_ij dL/dgamma_j) / N): sums over the wrong dimension.
    """
    dy, x, gamma = (
        a.astype(np.float64)
        for a in (arguments.grad_output, arguments.input, present(arguments.weight))
    )
    mean, rstd = (present(a).astype(np.float64)[:, None] for a in (arguments.mean, arguments.rstd))
    xhat = (x - mean) * rstd
    dbeta, dgamma = dy.sum(axis=0), (dy * xhat).sum(axis=0)
    wrong: F64 = gamma * rstd * (dy - (dbeta + xhat * dgamma) / x.shape[1])
    return wrong


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("length", [(64, 64), (256, 64), (1000, 48)])
def test_the_readmes_formula_is_told_apart_from_ours(length: tuple[int, int], dtype: str) -> None:
    """As many rows as columns, or more: it misses by far, not by a rounding."""
    rows, columns = length
    spec = NormSpec((columns,), dtype)
    arguments = random_arguments(random_generator(), spec, (rows,))
    ours = arguments.backward()
    judgement = assert_matches_reference(ours, arguments)
    dx, tolerance = (of["grad_input"] for of in (judgement.expected, judgement.tolerance))

    wrong = readme_grad_input(arguments)
    assert np.linalg.norm(wrong - dx) > 0.1 * np.linalg.norm(dx)
    rounded = wrong.astype(present(ours.grad_input).dtype)
    assert reference.compare(rounded, dx, tolerance).ratio > (1000 if dtype == "f32" else 10)


def test_a_few_wide_rows_tell_it_apart_too() -> None:
    """Where it is closest to right, 2 rows of 8192, and passes for right under a loose check."""
    spec = NormSpec((8192,))
    arguments = random_arguments(random_generator(), spec, (2,))
    judgement = assert_matches_reference(arguments.backward(), arguments)
    dx, tolerance = (of["grad_input"] for of in (judgement.expected, judgement.tolerance))
    wrong = readme_grad_input(arguments)
    assert np.linalg.norm(wrong - dx) < 0.1 * np.linalg.norm(dx)
    assert reference.compare(wrong.astype(np.float32), dx, tolerance).ratio > 10


def test_finite_differences_say_that_ours_is_the_gradient() -> None:
    """Of L = sum(dy * (gamma * xhat(x) + beta)), the statistics being functions of x."""
    rows, columns, eps, step = 9, 5, 1e-5, 1e-5
    rng = random_generator()
    spec = NormSpec((columns,), "f64")
    arguments = random_arguments(rng, spec, (rows,), eps=eps)
    dy, x, gamma = arguments.grad_output, arguments.input, present(arguments.weight)

    def loss(x: F64, gamma: F64, beta: F64) -> float:
        centred = x - x.mean(axis=1, keepdims=True)
        xhat = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
        return float((dy * (gamma * xhat + beta)).sum())

    def gradient(f: Callable[[F64], float], at: F64) -> F64:
        slopes = np.empty(at.shape)
        for index in np.ndindex(at.shape):
            nudge = np.zeros(at.shape)
            nudge[index] = step
            slopes[index] = (f(at + nudge) - f(at - nudge)) / (2 * step)
        return slopes

    beta = np.zeros(columns)
    true_dx = gradient(lambda at: loss(at, gamma, beta), x)
    true_dgamma = gradient(lambda at: loss(x, at, beta), gamma)
    true_dbeta = gradient(lambda at: loss(x, gamma, at), beta)

    ours = arguments.backward()
    recomputed = replace(arguments, mean=None, rstd=None).backward()
    for gradients in (ours, recomputed, reference.judge(arguments.call()).expected.values()):
        for got, true in zip(gradients, (true_dx, true_dgamma, true_dbeta), strict=True):
            np.testing.assert_allclose(present(got), true, rtol=1e-6, atol=1e-6)
    assert np.abs(readme_grad_input(arguments) - true_dx).max() > 0.05 * np.abs(true_dx).max()
