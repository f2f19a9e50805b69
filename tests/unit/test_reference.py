"""The judge judged: its gradients by finite differences, its tolerance by what it lets through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from support import Arguments, central_differences, present, random_arguments, random_generator

from iree_lnbwd import LayerNormGrads, NormSpec, reference
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.reference import F64, compare
from iree_lnbwd.verification import row_block as blocks_of_rows
from iree_lnbwd.verification.judge import Comparison
from iree_lnbwd.verification.sums import ColumnSums

EPS = 1e-3
GRADIENTS = LayerNormGrads._fields


# --- the gradients ---------------------------------------------------------------------------


def forward(x: F64, gamma: F64, beta: F64, normalized_rank: int, eps: float) -> F64:
    """Layer normalization, in f64."""
    axes = tuple(range(x.ndim - normalized_rank, x.ndim))
    variance = x.var(axis=axes, keepdims=True)
    y: F64 = (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(variance + eps) * gamma + beta
    return y


@pytest.mark.parametrize("statistics", ["given", "recomputed"])
@pytest.mark.parametrize("weight", ["weight", "no weight"])
@pytest.mark.parametrize(
    ("leading", "dims"), [((5,), (3,)), ((2, 3), (2, 4)), ((), (6,)), ((1,), (7,)), ((4,), (1,))]
)
def test_gradients_are_those_of_the_forward_function(
    leading: tuple[int, ...], dims: tuple[int, ...], weight: str, statistics: str
) -> None:
    rng = random_generator()
    spec = NormSpec(dims, "f64", has_weight=weight == "weight", eps=EPS)
    arguments = random_arguments(rng, spec, leading)
    x, dy = arguments.input, arguments.grad_output
    gamma = np.ones(dims) if arguments.weight is None else arguments.weight
    beta = rng.standard_normal(dims)
    if statistics == "given":
        arguments = arguments.with_true_statistics()
    gradients = reference.judge(arguments.call()).expected

    def loss(x: F64 = x, gamma: F64 = gamma, beta: F64 = beta) -> float:
        return float((dy * forward(x, gamma, beta, len(dims), EPS)).sum())

    expected = (
        central_differences(lambda moved: loss(x=moved), x),
        central_differences(lambda moved: loss(gamma=moved), gamma),
        central_differences(lambda moved: loss(beta=moved), beta),
    )
    for name, want in zip(GRADIENTS, expected, strict=True):
        if name == "grad_weight" and weight == "no weight":
            assert name not in gradients
            continue
        np.testing.assert_allclose(gradients[name], want, rtol=1e-6, atol=1e-7, err_msg=name)


def test_given_statistics_are_taken_as_they_are() -> None:
    """Element by element from the formula, with statistics that are not those of the input."""
    rng = random_generator()
    m, n = 4, 6
    dy, x, gamma = rng.standard_normal((m, n)), rng.standard_normal((m, n)), rng.standard_normal(n)
    mean, rstd = rng.standard_normal(m), rng.standard_normal(m)  # rstd of either sign
    got = reference.layer_norm_backward(dy, x, (n,), mean, rstd, gamma)
    for i in range(m):
        xhat = [(x[i, j] - mean[i]) * rstd[i] for j in range(n)]
        h = [dy[i, j] * gamma[j] for j in range(n)]
        a, b = sum(h) / n, sum(h[j] * xhat[j] for j in range(n)) / n
        want = [rstd[i] * (h[j] - a - xhat[j] * b) for j in range(n)]
        np.testing.assert_allclose(present(got.grad_input)[i], want, rtol=1e-12, atol=1e-14)
    for j in range(n):
        dgamma = sum(dy[i, j] * (x[i, j] - mean[i]) * rstd[i] for i in range(m))
        np.testing.assert_allclose(present(got.grad_weight)[j], dgamma, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(present(got.grad_bias)[j], sum(dy[:, j]), rtol=1e-12, atol=1e-14)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = random_arguments(random_generator(), NormSpec((5,), "f64"), (23,))
    whole = reference.judge(arguments.call())
    monkeypatch.setattr(blocks_of_rows, "_BLOCK_ELEMENTS", 7 * 5)  # 3 blocks of 7 rows, one of 2
    blocked = reference.judge(arguments.call())
    for one, other in ((whole.expected, blocked.expected), (whole.tolerance, blocked.tolerance)):
        assert tuple(one) == tuple(other) == GRADIENTS
        for name in GRADIENTS:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("rows", "columns", "lengths"),
    [(3, 1 << 21, [1, 1, 1]), (3, 1 << 20, [1, 1, 1]), (5, 1 << 19, [2, 2, 1]), (0, 7, [])],
)
def test_blocks_have_a_million_elements_or_a_row(
    rows: int, columns: int, lengths: list[int]
) -> None:
    found = list(blocks_of_rows.blocks(rows, columns))
    places = [list(range(rows))[block] for block in found]
    assert [len(each) for each in places] == lengths
    assert [row for each in places for row in each] == list(range(rows))


def test_narrow_arguments_are_widened_first() -> None:
    spec = NormSpec((16,), "bf16")
    narrow = random_arguments(random_generator(), spec, (8,))
    assert narrow.mean is not None
    assert narrow.rstd is not None
    assert narrow.weight is not None
    wide = reference.layer_norm_backward(
        narrow.grad_output.astype(np.float64),
        narrow.input.astype(np.float64),
        (16,),
        narrow.mean.astype(np.float64),
        narrow.rstd.astype(np.float64),
        narrow.weight.astype(np.float64),
    )
    got = reference.judge(narrow.call()).expected
    for name, b in wide._asdict().items():
        assert got[name].dtype == np.float64
        np.testing.assert_array_equal(got[name], present(b))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (False, False, False)])
def test_only_what_is_asked_for(mask: tuple[bool, bool, bool]) -> None:
    full = random_arguments(random_generator(), NormSpec((4,)), (3,))
    judgement = reference.judge(replace(full, output_mask=mask).call())
    asked = tuple(name for name, wanted in zip(GRADIENTS, mask, strict=True) if wanted)
    assert tuple(judgement.expected) == tuple(judgement.tolerance) == asked


def test_no_rows_sum_to_zero() -> None:
    spec = NormSpec((4,), eps=EPS)
    expected = reference.judge(random_arguments(random_generator(), spec, (0,)).call()).expected
    assert expected["grad_input"].shape == (0, 4)
    assert not expected["grad_weight"].any()
    assert not expected["grad_bias"].any()


# --- the tolerance: right answers pass -------------------------------------------------------

DTYPE_NAMES = tuple(DTYPES)


def in_accumulator_type(arguments: Arguments, *, rstd_first: bool = False) -> LayerNormGrads:
    """A plain computation in f32 (f64 for f64): every sum one term after the other.

    Args:
        arguments: Of the call.
        rstd_first: dx's products are in the order of the GPUs' kernels.
    """
    call = arguments.call()
    assert call.spec is not None
    acc = DTYPES[call.spec.acc_dtype].numpy
    dy, x, mean, rstd, gamma = (
        call.arrays[name].astype(acc) for name in ("grad_output", "input", "mean", "rstd", "weight")
    )
    n = acc.type(call.spec.columns)

    def running_sum(terms: Array, axis: int) -> Array:
        partial: Array = np.cumsum(terms, axis=axis, dtype=acc)
        return partial[-1] if axis == 0 else partial[:, -1]

    xhat = (x - mean[:, None]) * rstd[:, None]
    h = dy * gamma
    sum_h, sum_hx = running_sum(h, 1)[:, None], running_sum(h * xhat, 1)[:, None]
    if rstd_first:
        scale = rstd[:, None] * (1 / n)
        dx = (h * rstd[:, None] - sum_h * scale) - xhat * (sum_hx * scale)
    else:
        dx = rstd[:, None] * (h - sum_h / n - xhat * (sum_hx / n))
    out = {r.name: DTYPES[r.dtype].numpy for r in call.spec.results}
    return LayerNormGrads(
        dx.astype(out["grad_input"]),
        running_sum(dy * xhat, 0).astype(out["grad_weight"]),
        running_sum(dy, 0).astype(out["grad_bias"]),
    )


def ratios(actual: LayerNormGrads, arguments: Arguments) -> dict[str, float]:
    """Error / tolerance of each gradient."""
    judgement = reference.judge(arguments.call())
    return {
        name: compare(
            present(getattr(actual, name)), judgement.expected[name], judgement.tolerance[name]
        ).ratio
        for name in GRADIENTS
    }


def rounded(expected: Mapping[str, F64], dtype: str) -> LayerNormGrads:
    return LayerNormGrads(*(expected[name].astype(DTYPES[dtype].numpy) for name in GRADIENTS))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_right_answer_rounded_once_passes(dtype: str) -> None:
    arguments = random_arguments(random_generator(), NormSpec((64,), dtype), (128,))
    exact = rounded(reference.judge(arguments.call()).expected, dtype)
    assert max(ratios(exact, arguments).values()) <= 1


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 16), (8, 8192), (300, 300), (1, 1), (1, 5)])
def test_a_plain_computation_passes(dtype: str, rows: int, columns: int) -> None:
    arguments = random_arguments(random_generator(), NormSpec((columns,), dtype), (rows,))
    assert max(ratios(in_accumulator_type(arguments), arguments).values()) <= 1


def test_a_plain_computation_passes_far_from_zero() -> None:
    """Means of 1000 standard deviations, where a careless error estimate is too small."""
    spec = NormSpec((256,), "f32")
    rng = random_generator()
    x = rng.standard_normal((64, 256)) + 1000
    arguments = random_arguments(rng, spec, (64,), x=x)
    assert max(ratios(in_accumulator_type(arguments), arguments).values()) <= 1


@pytest.mark.parametrize("rstd_first", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_a_plain_computation_passes_among_subnormal_numbers(columns: int, rstd_first: bool) -> None:
    rng = random_generator()
    arguments = random_arguments(rng, NormSpec((columns,), "f32"), (200,))
    rstd = 10.0 ** rng.uniform(-44, 2, 200)
    dx = 10.0 ** rng.uniform(-45, -37, 200)
    arguments = replace(
        arguments,
        grad_output=(arguments.grad_output * (dx / rstd)[:, None]).astype(np.float32),
        rstd=rstd.astype(np.float32),
    )
    got = in_accumulator_type(arguments, rstd_first=rstd_first)
    assert max(ratios(got, arguments).values()) <= 1


@pytest.mark.parametrize("rows", [3, 1000, 4001, 100_003])
def test_long_sums_of_equal_numbers_are_exact(rows: int) -> None:
    """Added one after the other in f64, they are not."""
    rng = random_generator()
    spec = NormSpec((12,), "f64", has_weight=False)
    row, x = rng.standard_normal((2, 12))
    dy, x = np.tile(row, (rows, 1)), np.tile(x, (rows, 1))
    mean, rstd = np.zeros(rows), np.ones(rows)
    gradients = reference.layer_norm_backward(
        dy, x, spec.normalized_shape, mean, rstd, np.ones(12), np.ones(12)
    )
    exact = [math.fsum(column) for column in dy.T]
    np.testing.assert_allclose(present(gradients.grad_bias), exact, rtol=2e-15)
    exact = [math.fsum(column) for column in (dy * x).T]
    np.testing.assert_allclose(present(gradients.grad_weight), exact, rtol=2e-15)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1, 2, 7), (2,), (5, 0, 4), ()])
def test_sums_keep_what_additions_lose(lengths: tuple[int, ...]) -> None:
    """Block after block: large numbers come and go, and what was added to them is still there."""
    rng = random_generator()
    blocks = [rng.standard_normal((rows, 4)) * 10.0 ** rng.integers(-8, 8) for rows in lengths]
    blocks = [each for block in blocks for each in (block, np.full((1, 4), 1e18), block * 3)]
    blocks += [np.full((1, 4), -1e18)] * len(lengths)
    sums = ColumnSums(4)
    for block in blocks:
        sums.add(block)
    rows = np.concatenate([np.zeros((0, 4)), *blocks])
    exact = [math.fsum(column) for column in rows.T]
    scale = max((np.abs(block).max(initial=0) for block in blocks[::3]), default=0)
    np.testing.assert_allclose(sums.total, exact, rtol=0, atol=1e-13 * float(scale))


@pytest.mark.parametrize("infinite", [np.inf, -np.inf, np.nan])
def test_a_sum_of_what_is_not_finite(infinite: float) -> None:
    sums = ColumnSums(2)
    with np.errstate(all="ignore"):
        for row in ([1.0, 1.0], [infinite, 1e18], [2.0, 2.0], [3.0, -1e18]):
            sums.add(np.array([row]))
    np.testing.assert_array_equal(sums.total, [infinite, 3.0])


# --- the tolerance: wrong answers do not -----------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_two_units_in_the_last_place_miss(dtype: str, gradient: str) -> None:
    """In any single element of at least average size."""
    arguments = random_arguments(random_generator(), NormSpec((64,), dtype), (128,))
    judgement = reference.judge(arguments.call())
    want, tolerance = judgement.expected[gradient], judgement.tolerance[gradient]
    right = want.astype(DTYPES[dtype].numpy)
    wrong = (right.view(np.uint16) + 2).view(right.dtype)  # two steps away from zero
    large = np.abs(want) >= np.abs(want).mean()
    assert large.any()
    off = np.abs(wrong.astype(np.float64) - want)
    assert (off[large] > tolerance[large]).all()


@pytest.mark.parametrize(("dtype", "resolved"), [("f32", 5e-5), ("f64", 1e-13)])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_small_part_of_the_gradient_misses(dtype: str, resolved: float, gradient: str) -> None:
    """Where the output is as wide as the accumulator, the sums' roundings decide."""
    arguments = random_arguments(random_generator(), NormSpec((64,), dtype), (128,))
    judgement = reference.judge(arguments.call())
    want, tolerance = judgement.expected[gradient], judgement.tolerance[gradient]
    assert (tolerance < resolved * np.abs(want).max()).all()
    wrong = want.astype(DTYPES[dtype].numpy)
    assert compare(wrong, want, tolerance).passed
    wrong.flat[np.argmax(np.abs(want))] *= 1 + resolved
    assert not compare(wrong, want, tolerance).passed


MUTATIONS: dict[str, Callable[[Arguments], Arguments]] = {
    "the last row is dropped": lambda a: replace(a, grad_output=without_last_row(a.grad_output)),
    "rstd is off by 1e-4": lambda a: replace(a, rstd=scaled(a.rstd, 1 + 1e-4)),
    "the weight is forgotten": lambda a: replace(a, weight=scaled(a.weight, 0) + 1),
    "the mean is forgotten": lambda a: replace(a, mean=scaled(a.mean, 0)),
}


def without_last_row(dy: Array) -> Array:
    dy = dy.copy()
    dy[-1] = 0
    return dy


def scaled(array: Array | None, factor: float) -> Array:
    return (present(array).astype(np.float64) * factor).astype(present(array).dtype)


@pytest.mark.parametrize(
    ("mutation", "missed"),
    [
        ("the last row is dropped", {"grad_input", "grad_weight", "grad_bias"}),
        ("rstd is off by 1e-4", {"grad_input", "grad_weight"}),
        ("the weight is forgotten", {"grad_input"}),
        ("the mean is forgotten", {"grad_input", "grad_weight"}),
    ],
)
def test_mistakes_miss_exactly_where_they_matter(mutation: str, missed: set[str]) -> None:
    """f32, and 1000 rows: one of them is a thousandth of a column sum."""
    arguments = random_arguments(random_generator(), NormSpec((64,), "f32"), (1000,))
    wrong = in_accumulator_type(MUTATIONS[mutation](arguments))
    assert {name for name, ratio in ratios(wrong, arguments).items() if ratio > 1} == missed


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_dropped_row_misses_in_half_types(dtype: str) -> None:
    arguments = random_arguments(random_generator(), NormSpec((64,), dtype), (128,))
    wrong = in_accumulator_type(MUTATIONS["the last row is dropped"](arguments))
    assert min(ratios(wrong, arguments).values()) > 1


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_accumulating_in_the_half_type_misses(dtype: str) -> None:
    arguments = random_arguments(random_generator(), NormSpec((64,), dtype), (128,))
    dy = arguments.grad_output
    running = np.zeros(64, dy.dtype)
    for row in dy:
        running = running + row
    assert running.dtype == dy.dtype
    judgement = reference.judge(arguments.call())
    want, tolerance = judgement.expected["grad_bias"], judgement.tolerance["grad_bias"]
    assert not compare(running, want, tolerance).passed


def test_the_unbiased_variance_misses() -> None:
    spec = NormSpec((64,), "f32", eps=1e-5)
    arguments = random_arguments(random_generator(), spec, (128,))
    x = arguments.input.astype(np.float64)
    unbiased = replace(
        arguments,
        mean=x.mean(axis=1).astype(np.float32),
        rstd=(1 / np.sqrt(x.var(axis=1, ddof=1) + 1e-5)).astype(np.float32),
    )
    wrong = ratios(in_accumulator_type(unbiased), arguments)
    assert {name for name, ratio in wrong.items() if ratio > 1} == {"grad_input", "grad_weight"}


# --- comparing ------------------------------------------------------------------------------


def ratio_of(actual: float, expected: float, dtype: str = "f32", tolerance: float = 1.0) -> float:
    return compare(
        np.array([actual], DTYPES[dtype].numpy), np.array([expected]), np.array([tolerance])
    ).ratio


def test_error_is_measured_in_tolerances() -> None:
    comparison = compare(
        np.array([1.0, 5.0, 2.0], np.float32), np.array([1.0, 3.0, 2.5]), np.array([1.0, 8.0, 1.0])
    )
    assert (comparison.error, comparison.tolerance, comparison.ratio) == (2.0, 1.0, 0.5)
    assert comparison.passed


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_wrongly_not_finite_misses(wrong: float) -> None:
    assert ratio_of(wrong, 1.0) == np.inf


@pytest.mark.parametrize("expected", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("actual", [np.inf, -np.inf, np.nan])
def test_any_non_finite_value_will_do_for_another(actual: float, expected: float) -> None:
    assert ratio_of(actual, expected) == 0


@pytest.mark.parametrize("expected", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_wrongly_finite_misses(expected: float) -> None:
    assert ratio_of(1.0, expected) == np.inf


@pytest.mark.parametrize(
    ("actual", "passes"), [(np.inf, True), (65504.0, True), (-np.inf, False), (1.0, False)]
)
def test_beyond_the_types_range_infinity_is_right(actual: float, passes: bool) -> None:
    assert (ratio_of(actual, 1e6, "f16") <= 1) is passes


@pytest.mark.parametrize(
    ("expected", "tolerance", "passes"),
    [
        (65500.0, 10.0, True),
        (65500.0, 4.0, False),
        (-65500.0, 10.0, True),
        (65600.0, 1.0, True),
        (-65600.0, 1.0, True),
    ],
)
def test_within_the_tolerance_of_the_types_range_infinity_is_right(
    expected: float, tolerance: float, passes: bool
) -> None:
    """65504 is f16's largest number: it is the border, and no more than it is beyond."""
    infinity = np.copysign(np.inf, expected)
    assert (ratio_of(infinity, expected, "f16", tolerance) <= 1) is passes


def test_exactly_the_tolerance_passes() -> None:
    found = compare(np.array([1.25]), np.array([1.0]), np.array([0.25]))
    assert found == Comparison(error=0.25, tolerance=0.25, ratio=1.0)
    assert found.passed


def test_nothing_to_compare_passes() -> None:
    empty = np.zeros((0, 4))
    found = compare(empty.astype(np.float32), empty, empty)
    assert found == Comparison(error=0.0, tolerance=0.0, ratio=0.0)
    assert found.passed


def test_a_judgement_has_the_callers_shapes() -> None:
    arguments = random_arguments(random_generator(), NormSpec((4, 5)), (2, 3))
    judgement = reference.judge(arguments.call())
    for part in (judgement.expected, judgement.tolerance):
        shapes = {name: array.shape for name, array in part.items()}
        assert shapes == {
            "grad_input": (2, 3, 4, 5),
            "grad_weight": (4, 5),
            "grad_bias": (4, 5),
        }
