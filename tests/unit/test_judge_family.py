"""The judge on every op of the family: what it expects, what it lets through, and what it does not.

What it expects is held against finite differences, and against the formulas in 50 digits. What it
lets through is tried with plain computations in f32 (``norms.py``), and with their mistakes.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from norms import Way, computed
from support import central_differences, random_generator

from iree_lnbwd import NormSpec, reference
from iree_lnbwd.ops.arguments import Array, BoundCall, NormOutput, bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import FROM_OUTPUT, LAYER_NORM, OPS, Gate, Op, When
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.reference import F64, compare, judge
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification import row_block as blocks_of_rows

EPS = 1e-3
FORWARDS = ("layer_norm", "rms_norm")
BACKWARDS = ("layer_norm_backward", "rms_norm_backward")


def rebound(call: BoundCall, **arrays: Array) -> BoundCall:
    """The call on other values in some of its arrays."""
    spec = call.spec
    assert spec is not None
    given = {**call.arrays, **arrays}
    return bind(
        spec.op,
        {argument.name: given.get(argument.name) for argument in spec.family.arguments},
        (spec.columns,),
        output_mask=spec.output_mask,
        eps=EPS if spec.eps is None else spec.eps,
        weight_offset=spec.weight_offset,
        output_dtype=spec.output_dtype,
        rows_per_set=None if call.sets is None else call.sets.rows_per_set,
        gate_first=spec.gate_first,
    )


def ratios(actual: Mapping[str, Array], call: BoundCall) -> dict[str, float]:
    """Error / tolerance of each result."""
    judgement = judge(call)
    assert set(actual) == set(judgement.expected)
    return {
        name: compare(
            actual[name].reshape(expected.shape), expected, judgement.tolerance[name]
        ).ratio
        for name, expected in judgement.expected.items()
    }


def missed(actual: Mapping[str, Array], call: BoundCall) -> set[str]:
    """The results that are not within their tolerance."""
    return {name for name, ratio in ratios(actual, call).items() if not ratio <= 1}


# --- what is expected: each backward is the derivative of its forward ------------------------


@pytest.mark.parametrize("statistics", ["given", "recomputed", "given, from the output"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("offset", [0.0, 1.0, -0.3])
@pytest.mark.parametrize(
    ("leading", "dims"), [((5,), (3,)), ((2, 3), (2, 4)), ((), (6,)), ((4,), (1,))]
)
@pytest.mark.parametrize("op", FORWARDS)
def test_each_backward_is_the_derivative_of_its_forward(
    op: str,
    leading: tuple[int, ...],
    dims: tuple[int, ...],
    offset: float,
    has_residual: bool,
    statistics: str,
) -> None:
    """With a residual, the loss depends on the sum, too; x and the residual share a gradient."""
    rng = random_generator()
    shape = (*leading, *dims)
    dy, x, added, of_sum = rng.standard_normal((4, *shape))
    gamma, beta = rng.standard_normal((2, *dims))
    centres = op == "layer_norm"

    def forward(x: F64 = x, added: F64 = added, gamma: F64 = gamma, beta: F64 = beta) -> NormOutput:
        residual = added if has_residual else None
        if centres:
            return reference.layer_norm(
                x, dims, gamma, beta, EPS, residual=residual, weight_offset=offset
            )
        return reference.rms_norm(
            x, dims, gamma, EPS, bias=beta, residual=residual, weight_offset=offset
        )

    def loss(**moved: F64) -> float:
        result = forward(**moved)
        past = (of_sum * result.residual_output).sum() if has_residual else 0.0
        return float((dy * result.output).sum() + past)

    saved = forward()
    normalized: F64 | None
    normalized, grad_residual = (saved.residual_output, of_sum) if has_residual else (x, None)
    mean, rstd = (None, None) if statistics == "recomputed" else (saved.mean, saved.rstd)
    output = None
    if statistics == "given, from the output":
        normalized, mean, output = None, None, saved.output
    gradients = (
        reference.layer_norm_backward(
            dy, normalized, dims, mean, rstd, gamma, beta,
            eps=EPS, grad_residual=grad_residual, output=output, weight_offset=offset,
        )
        if centres
        else reference.rms_norm_backward(
            dy, normalized, dims, rstd, gamma, bias=beta,
            eps=EPS, grad_residual=grad_residual, output=output, weight_offset=offset,
        )
    )._asdict()  # fmt: skip
    expected = {
        "grad_input": central_differences(lambda at: loss(x=at), x),
        "grad_weight": central_differences(lambda at: loss(gamma=at), gamma),
        "grad_bias": central_differences(lambda at: loss(beta=at), beta),
    }
    assert gradients.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(gradients[name], want, rtol=1e-6, atol=1e-7, err_msg=name)
    if has_residual:
        of_added = central_differences(lambda at: loss(added=at), added)
        np.testing.assert_allclose(gradients["grad_input"], of_added, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("op", FORWARDS)
def test_gates_and_sets_have_the_derivatives_of_their_forwards(op: str, gate_first: bool) -> None:
    rng = random_generator()
    dy, x, z = rng.standard_normal((3, 5, 4))
    gamma, beta = rng.standard_normal((2, 2, 4))
    forward, backward = getattr(reference, op), getattr(reference, f"{op}_backward")
    options = {"eps": EPS, "gate_first": gate_first, "rows_per_set": 2}
    at = {"input": x, "weight": gamma, "bias": beta, "gate": z}

    def loss(**moved: F64) -> float:
        arrays = at | moved
        result = forward(arrays.pop("input"), (4,), **arrays, **options)
        return float((dy * result.output).sum())

    gradients = backward(dy, x, (4,), weight=gamma, bias=beta, gate=z, **options)._asdict()
    assert gradients.keys() == {f"grad_{name}" for name in at}
    for name, value in at.items():

        def moved_by(array: F64, name: str = name) -> float:
            return loss(**{name: array})

        want = central_differences(moved_by, value)
        got = gradients[f"grad_{name}"]
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=name)


# --- what is expected: the formulas in 50 digits ---------------------------------------------


def digits(array: Array) -> list[list[Decimal]]:
    """The very numbers, as rows."""
    return [[Decimal(float(number)) for number in row] for row in np.atleast_2d(array)]


def in_decimals(call: BoundCall) -> dict[str, list[list[Decimal]]]:
    """The results by the formulas, element by element. A sum with a residual is as given."""
    spec = call.spec
    assert spec is not None
    n, centres = spec.columns, spec.family.centres
    have = {name: digits(array) for name, array in call.arrays.items()}
    ones, zeros = [Decimal(1)] * n, [Decimal(0)] * n
    sets, rows_per_set = call.sets or (1, 1)
    results: dict[str, list[list[Decimal]]] = {
        "grad_weight": [list(zeros) for _ in range(sets)],
        "grad_bias": [list(zeros) for _ in range(sets)],
        "grad_input_sum": [list(zeros)],
        "mean": [[]], "rstd": [[]], "output": [], "grad_input": [], "grad_gate": [],
    }  # fmt: skip
    for i, x in enumerate(have[spec.family.data.name]):
        of = i // rows_per_set % sets
        offset = Decimal(spec.weight_offset)
        g = [w + offset for w in have["weight"][of]] if "weight" in have else ones
        beta = have["bias"][of] if "bias" in have else zeros
        z = have["gate"][i] if "gate" in have else zeros
        sigmoid = [1 / (1 + (-each).exp()) for each in z]
        silu = [z[j] * sigmoid[j] for j in range(n)] if "gate" in have else ones
        slope = [sigmoid[j] * (1 + z[j] * (1 - sigmoid[j])) for j in range(n)]
        before, after = (silu, ones) if spec.gate_first else (ones, silu)
        data, x = x, [x[j] * before[j] for j in range(n)]
        if "rstd" in have:
            rstd = have["rstd"][0][i]
            mean = have["mean"][0][i] if "mean" in have else Decimal(0)
        else:
            assert spec.eps is not None
            mean = sum(x, Decimal(0)) / n if centres else Decimal(0)
            square = sum(((value - mean) ** 2 for value in x), Decimal(0)) / n
            rstd = 1 / (square + Decimal(spec.eps)).sqrt()
        if spec.from_output:
            least = Decimal(LEAST_WEIGHT)
            by = [w if abs(w) >= least else least.copy_sign(w) for w in g]
            xhat = [(x[j] - beta[j]) / by[j] for j in range(n)]
        else:
            xhat = [(value - mean) * rstd for value in x]
        results["mean"][0].append(mean)
        results["rstd"][0].append(rstd)
        y = [xhat[j] * g[j] + beta[j] for j in range(n)]
        results["output"].append([y[j] * after[j] for j in range(n)])
        if not spec.family.is_backward:
            continue
        of_output = have["grad_output"][i]
        dy = [of_output[j] * after[j] for j in range(n)]
        h = [dy[j] * g[j] for j in range(n)]
        mean_h = sum(h, Decimal(0)) / n if centres else Decimal(0)
        mean_hx = sum((h[j] * xhat[j] for j in range(n)), Decimal(0)) / n
        more = have["grad_residual"][i] if "grad_residual" in have else zeros
        dx = [rstd * (h[j] - mean_h - xhat[j] * mean_hx) for j in range(n)]
        results["grad_input"].append([dx[j] * before[j] + more[j] for j in range(n)])
        gated = (
            [data[j] * dx[j] for j in range(n)]
            if spec.gate_first
            else [of_output[j] * y[j] for j in range(n)]
        )
        results["grad_gate"].append([gated[j] * slope[j] for j in range(n)])
        for j in range(n):
            results["grad_weight"][of][j] += dy[j] * xhat[j]
            results["grad_bias"][of][j] += dy[j]
            results["grad_input_sum"][0][j] += results["grad_input"][-1][j]
    return results


def small_specs() -> Iterator[NormSpec]:
    """Every op, with each of its options."""
    for op in OPS.values():
        plain = NormSpec((7,), "f32", op=op.name, eps=None if op.is_backward else EPS)
        yield plain
        yield replace(plain, has_weight=False)
        yield replace(plain, dtype="bf16", weight_dtype="f32")
        yield replace(plain, dtype="f64", weight_offset=1.0)
        yield replace(plain, weight_offset=0.1)
        biased = replace(plain, has_bias=op.takes_bias, output_mask=())
        yield replace(biased, weight_sets=True, weight_offset=1.0)
        for gate in Gate:
            gated = replace(plain, gate=gate.value, output_mask=())
            yield replace(gated, dtype="bf16", gate_dtype="f32")
            yield replace(gated, dtype="f64", has_weight=False)
            yield replace(gated, weight_sets=True)
            if op.is_backward:
                yield replace(gated, eps=EPS)
        if op == LAYER_NORM:
            yield replace(plain, has_bias=False)
        elif not op.atens_bias:
            yield replace(plain, has_bias=True, output_mask=())
        if op.is_backward:
            yield replace(plain, eps=EPS)
            yield replace(plain, dtype="bf16", residual_dtype="f32", weight_offset=1.0)
            yield replace(plain, eps=EPS, residual_dtype="f32")
            yield replace(plain, eps=EPS, residual_dtype="f32", grad_input_sum_dtype="bf16")
            output = replace(plain, from_output=True, has_bias=None)
            yield output
            yield replace(output, has_weight=False)
            yield replace(output, dtype="bf16", weight_dtype="f32", weight_offset=1.0)
            yield replace(output, dtype="f64", residual_dtype="f64")
            yield replace(output, weight_sets=True)
            yield replace(output, has_bias=not FROM_OUTPUT[op.name].usual_bias, output_mask=())


def small_weights(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    """Zeros among the weights, and numbers on both sides of the least divisor."""
    spec = call.spec
    assert spec is not None
    if "weight" not in call.arrays:
        return call
    kept = call.arrays["weight"]
    weight = LEAST_WEIGHT * rng.uniform(-2, 2, kept.shape)
    weight[..., ::4], weight[..., 1::8] = 0.0, rng.standard_normal(weight[..., 1::8].shape)
    return rebound(call, weight=(weight - spec.weight_offset).astype(kept.dtype))


@pytest.mark.parametrize("spec", list(small_specs()), ids=lambda spec: spec.name)
def test_the_expected_values_are_those_of_the_formulas(spec: NormSpec) -> None:
    rng = random_generator()
    call = matrix.random_call(spec, 5, rng)
    if spec.from_output:  # small weights, and only finite rows
        call = small_weights(call, rng)
    with decimal.localcontext() as context:
        context.prec = 50
        want = in_decimals(call)
    expected = judge(call).expected
    assert tuple(expected) == tuple(result.name for result in spec.results)
    for name, got in expected.items():
        exact = np.array(want[name], np.float64).reshape(got.shape)
        scale = np.abs(exact).max()
        np.testing.assert_allclose(got, exact, rtol=1e-13, atol=1e-14 * scale, err_msg=name)


# --- the sum with a residual -----------------------------------------------------------------

# Types of the input and the residual.
SUMS = [
    *(("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16")),
    *(("f16", "bf16"), ("bf16", "f16"), ("f64", "f64")),
]


def residual_spec(op: str, dtype: str, residual_dtype: str, columns: int = 64) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, eps=EPS, residual_dtype=residual_dtype)


@pytest.mark.parametrize(("dtype", "residual_dtype"), SUMS)
@pytest.mark.parametrize("op", FORWARDS)
def test_the_stored_sum_is_what_is_normalized(op: str, dtype: str, residual_dtype: str) -> None:
    call = matrix.random_call(residual_spec(op, dtype, residual_dtype), 16, random_generator())
    expected = judge(call).expected
    stored = expected["residual_output"].astype(DTYPES[residual_dtype].numpy)
    np.testing.assert_array_equal(stored.astype(np.float64), expected["residual_output"])
    given = {"input": stored} | {n: call.arrays.get(n) for n in ("weight", "bias")}
    arguments = {operand.name: given.get(operand.name) for operand in OPS[op].arguments}
    alone = judge(bind(op, arguments, (64,), output_mask=(), eps=EPS)).expected
    for name, want in alone.items():
        np.testing.assert_array_equal(expected[name], want, err_msg=name)


@pytest.mark.parametrize(("dtype", "residual_dtype"), SUMS)
@pytest.mark.parametrize("op", FORWARDS)
def test_the_sum_has_to_match_to_the_bit(op: str, dtype: str, residual_dtype: str) -> None:
    call = matrix.random_call(residual_spec(op, dtype, residual_dtype), 16, random_generator())
    right = computed(call)
    assert missed(right, call) == set()
    wrong = right["residual_output"].copy()
    smallest = np.argmin(np.abs(wrong.astype(np.float64)))
    bits = wrong.reshape(-1).view(f"u{wrong.itemsize}")
    bits[smallest] += 1
    assert missed(right | {"residual_output": wrong}, call) == {"residual_output"}


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("op", FORWARDS)
def test_the_sum_is_rounded_to_the_type_of_sums_first(op: str, dtype: str) -> None:
    """Half a step above 1 and a little more is a tie in f32, and goes to the even 1."""
    half_step = DTYPES[dtype].unit_roundoff
    spec = residual_spec(op, "f32", dtype, columns=2)
    call = rebound(
        matrix.random_call(spec, 1, random_generator()),
        input=np.array([[half_step + 2**-30, 3]], np.float32),
        residual=np.ones((1, 2), DTYPES[dtype].numpy),
    )
    right = computed(call)
    assert right["residual_output"].astype(np.float64).tolist() == [[1, 4]]
    assert missed(right, call) == set()
    once = right["residual_output"].copy()
    once[0, 0] = 1 + 2 * half_step
    assert missed(right | {"residual_output": once}, call) == {"residual_output"}


@pytest.mark.parametrize("op", FORWARDS)
def test_a_sum_beyond_the_types_range_makes_its_row_infinite(op: str) -> None:
    spec = residual_spec(op, "f16", "f16")
    call = matrix.random_call(spec, 3, random_generator())
    x, added = (call.arrays[name].copy() for name in ("input", "residual"))
    x[1, 5], added[1, 5] = 6e4, 6e4
    call = rebound(call, input=x, residual=added)
    judgement = judge(call)
    assert judgement.expected["residual_output"][1, 5] == np.inf
    assert np.isfinite(judgement.expected["output"][[0, 2]]).all()
    assert missed(computed(call), call) == set()


# --- right answers pass ----------------------------------------------------------------------

RIGHT = {
    "pairwise": Way(),
    "spans": Way(spans=True),
    "multiply-adds": Way(fused=True),
    "rstd first": Way(rstd_first=True),
    "as on GPUs": Way(fused=True, rstd_first=True, by_reciprocal=True),
}
NARROW = [spec for spec in (*matrix.specs(), *matrix.operand_specs()) if spec.columns <= 4096]
WIDE = [
    NormSpec((16384,), dtype, op=op.name, eps=EPS)
    for op in OPS.values()
    for dtype in ("f32", "bf16")
]


@pytest.mark.drawn
@pytest.mark.parametrize("spec", [*NARROW, *WIDE], ids=lambda spec: spec.name)
def test_plain_computations_of_the_matrix_pass(spec: NormSpec) -> None:
    rng = random_generator()
    for call in (matrix.random_call(spec, 5, rng), matrix.adversarial_call(spec, rng, 13)):
        assert call.spec == spec
        for name, way in RIGHT.items():
            assert missed(computed(call, way), call) == set(), name


@pytest.mark.parametrize("way", RIGHT)
@pytest.mark.parametrize("op", OPS)
def test_plain_computations_of_random_shapes_pass(op: str, way: str) -> None:
    rng = random_generator()
    for _ in range(20):
        rows, columns = (int(2 ** rng.uniform(0, 10)) for _ in range(2))
        dtype = str(rng.choice(list(DTYPES)))
        spec = NormSpec(
            (columns,),
            dtype,
            op=op,
            eps=float(10 ** rng.uniform(-8, 0)),
            residual_dtype=dtype if rng.random() < 0.5 else None,
            weight_offset=float(rng.choice([0.0, 1.0, 0.1])),
        )
        call = matrix.random_call(spec, rows, rng)
        x = call.arrays["input"].astype(np.float64)
        x = x * 10 ** rng.uniform(-3, 2, (rows, 1)) + 10 ** rng.uniform(-2, 3, (rows, 1))
        call = rebound(call, input=x.astype(DTYPES[dtype].numpy))
        assert missed(computed(call, RIGHT[way]), call) == set(), call.spec


@pytest.mark.parametrize("op", OPS)
def test_a_negative_eps_that_almost_cancels_the_variance_passes(op: str) -> None:
    """Down to a thousandth of it, where the root's error is a thousand times the variance's."""
    rng = random_generator()
    spec = NormSpec((64,), "f32", op=op, eps=-1.0, weight_offset=1.0)
    x = rng.standard_normal((200, 64))
    if spec.family.centres:
        x -= x.mean(axis=1, keepdims=True)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True))
    x *= np.sqrt(1 + 10 ** rng.uniform(-3, 0, (200, 1)))
    call = rebound(matrix.random_call(spec, 200, rng), input=x.astype(np.float32))
    for name, way in RIGHT.items():
        assert missed(computed(call, way), call) == set(), name
    shrunk = rebound(call, input=(x / 2).astype(np.float32))
    kept = "grad_bias" if op == "layer_norm_backward" else "mean"
    for name, expected in judge(shrunk).expected.items():
        assert np.isnan(expected).all() == (name != kept), name
    assert missed(computed(shrunk), shrunk) == set()


@pytest.mark.parametrize("op", OPS)
def test_an_offset_that_the_weight_cancels_passes(op: str) -> None:
    """f32 has no 0.1; beside what is left of it, its error is large."""
    rng = random_generator()
    spec = NormSpec((64,), "f32", op=op, eps=EPS, weight_offset=0.1)
    weight = np.float32(-0.1) + 1e-7 * rng.standard_normal(64, np.float32)
    call = rebound(matrix.random_call(spec, 100, rng), weight=weight)
    if "bias" in call.arrays:
        call = rebound(call, bias=np.zeros(64, np.float32))
    for name, way in RIGHT.items():
        assert missed(computed(call, way), call) == set(), name


@pytest.mark.parametrize("eps", [1e-38, 1.0, 1e20])
@pytest.mark.parametrize("op", FORWARDS)
def test_subnormal_numbers_pass(op: str, eps: float) -> None:
    """In some places the rows are, or the weight, xhat, rstd * gamma, or the output."""
    rng = random_generator()
    call = matrix.random_call(NormSpec((64,), "f32", op=op, eps=eps), 300, rng)
    x = call.arrays["input"] * 10 ** rng.uniform(-44, 10, (300, 1))
    weight = call.arrays["weight"] * 10 ** rng.uniform(-44, 6, 64)
    call = rebound(call, input=x.astype(np.float32), weight=weight.astype(np.float32))
    if "bias" in call.arrays:
        call = rebound(call, bias=np.zeros(64, np.float32))
    for name, way in RIGHT.items():
        assert missed(computed(call, way), call) == set(), name


# --- wrong answers do not --------------------------------------------------------------------


def far_from_zero(call: BoundCall) -> BoundCall:
    """A mean of 1000 standard deviations."""
    return rebound(call, input=call.arrays["input"] + call.arrays["input"].dtype.type(2000))


def near_zero(call: BoundCall) -> BoundCall:
    """Squares like eps."""
    x = call.arrays["input"].astype(np.float64) * EPS**0.5
    return rebound(call, input=x.astype(call.arrays["input"].dtype))


def near_zero_weights(call: BoundCall) -> BoundCall:
    """An output of any numbers, by weights of which many are small."""
    rng = random_generator()
    y = call.arrays["output"]
    call = small_weights(call, rng)
    return rebound(call, output=rng.standard_normal(y.shape).astype(y.dtype))


def as_it_is(call: BoundCall) -> BoundCall:
    return call


def opposite_gradients(call: BoundCall) -> BoundCall:
    """What reached the sum past the norm cancels what comes through the norm."""
    through = computed(call, Way(no_grad_residual=True))["grad_input"]
    return rebound(call, grad_residual=-through)


SAVED = {"layer_norm": {"output", "mean", "rstd"}, "rms_norm": {"output", "rstd"}}
SCALED = {"output", "rstd"}
ROWS_AND_WEIGHT = {"grad_input", "grad_weight"}
Data = Callable[[BoundCall], BoundCall]

# Op, options, mistake, data where it matters, and the results that miss.
MISTAKES: list[tuple[str, Mapping[str, object], Way, Data, set[str]]] = []
for op in FORWARDS:
    MISTAKES += [
        (op, {}, Way(unbiased=True), as_it_is, SCALED),
        (op, {"dtype": "bf16"}, Way(unbiased=True), as_it_is, SCALED),
        (op, {}, Way(centring=True), as_it_is, SAVED[op]),
        (op, {}, Way(eps="outside the root"), near_zero, SCALED),
        (op, {}, Way(eps="in the sum"), near_zero, SCALED),
        (op, {}, Way(eps="nowhere"), near_zero, SCALED),
        (op, {"dtype": "bf16"}, Way(eps="nowhere"), near_zero, SCALED),
        (op, {}, Way(half_sums=True), as_it_is, SAVED[op]),
        (op, {"dtype": "f16"}, Way(half_sums=True), as_it_is, SAVED[op]),
        (op, {"weight_offset": 1.0}, Way(no_offset=True), as_it_is, {"output"}),
        (op, {"weight_offset": 1.0}, Way(offset_added=True), as_it_is, {"output"}),
        (op, {"dtype": "bf16"}, Way(half_xhat=True), as_it_is, {"output"}),
        (op, {"dtype": "f16"}, Way(half_xhat=True), as_it_is, {"output"}),
        (op, {"residual_dtype": "f32"}, Way(no_residual=True), as_it_is, SAVED[op]),
        (op, {"dtype": "bf16", "residual_dtype": "bf16"}, Way(exact_sum=True), as_it_is, SAVED[op]),
        (op, {"dtype": "f16", "residual_dtype": "f16"}, Way(exact_sum=True), as_it_is, SAVED[op]),
        (op, {"residual_dtype": "bf16"}, Way(exact_sum=True), as_it_is, SAVED[op]),
    ]
for op in BACKWARDS:
    MISTAKES += [
        (op, {}, Way(no_mean_h=True), as_it_is, {"grad_input"}),
        (op, {"dtype": "bf16"}, Way(no_mean_h=True), as_it_is, {"grad_input"}),
        (op, {}, Way(no_mean_hx=True), as_it_is, {"grad_input"}),
        (op, {"dtype": "bf16"}, Way(no_mean_hx=True), as_it_is, {"grad_input"}),
        (op, {"eps": EPS}, Way(unbiased=True), as_it_is, ROWS_AND_WEIGHT),
        (op, {"eps": EPS}, Way(eps="outside the root"), near_zero, ROWS_AND_WEIGHT),
        (op, {"eps": EPS}, Way(eps="in the sum"), near_zero, ROWS_AND_WEIGHT),
        (op, {"eps": EPS}, Way(eps="nowhere"), near_zero, ROWS_AND_WEIGHT),
        (op, {"weight_offset": 1.0}, Way(no_offset=True), as_it_is, {"grad_input"}),
        (op, {"residual_dtype": "f32"}, Way(no_grad_residual=True), as_it_is, {"grad_input"}),
        (op, {"residual_dtype": "f32"}, Way(scaled_grad_residual=True), as_it_is, {"grad_input"}),
    ]
    output: dict[str, object] = {"from_output": True}
    MISTAKES += [
        (op, output, Way(no_mean_h=True), as_it_is, {"grad_input"}),
        (op, output, Way(no_mean_hx=True), as_it_is, {"grad_input"}),
        (op, output, Way(undivided=True), as_it_is, ROWS_AND_WEIGHT),
        (op, output | {"dtype": "bf16"}, Way(undivided=True), as_it_is, ROWS_AND_WEIGHT),
        (op, output | {"weight_offset": 1.0}, Way(no_offset=True), as_it_is, ROWS_AND_WEIGHT),
        (op, output, Way(unclamped=True), near_zero_weights, ROWS_AND_WEIGHT),
        (op, output, Way(unsigned_least=True), near_zero_weights, ROWS_AND_WEIGHT),
        (op, output, Way(clamped_h=True), near_zero_weights, {"grad_input"}),
        (op, output | {"dtype": "bf16"}, Way(unclamped=True), near_zero_weights, ROWS_AND_WEIGHT),
    ]
    for dtype in ("bf16", "f16"):
        both: dict[str, object] = {"dtype": dtype, "residual_dtype": dtype}
        late = Way(late_grad_residual=True)
        MISTAKES.append((op, both, late, opposite_gradients, {"grad_input"}))
    for dtype in ("f32", "f16"):
        all_of_them = {row.name for row in OPS[op].masked}
        MISTAKES.append((op, {"dtype": dtype}, Way(half_sums=True), as_it_is, all_of_them))
MISTAKES += [
    *(
        (op, {"has_bias": True}, Way(no_bias=True), as_it_is, {"output"})
        for op in ("layer_norm", "rms_norm")
    ),
    *(
        (op, {"from_output": True, "has_bias": True}, way, as_it_is, ROWS_AND_WEIGHT)
        for op in BACKWARDS
        for way in (Way(no_bias=True), Way(late_bias=True))
    ),
    (
        "rms_norm_backward",
        {"has_bias": True},
        Way(half_sums=True),
        as_it_is,
        {*ROWS_AND_WEIGHT, "grad_bias"},
    ),
    ("layer_norm", {}, Way(expanded=True), far_from_zero, SCALED),
    ("layer_norm_backward", {"eps": EPS}, Way(expanded=True), far_from_zero, ROWS_AND_WEIGHT),
    ("rms_norm_backward", {"eps": EPS}, Way(centring=True), as_it_is, ROWS_AND_WEIGHT),
]


def described(value: object) -> str:
    """A mistake's name; the other parts of an id are plain."""
    if isinstance(value, Way):
        return " ".join(
            name if chosen is True else str(chosen)
            for name, chosen in vars(value).items()
            if chosen != getattr(Way(), name)
        )
    if isinstance(value, dict):
        return "-".join(map(str, value.values()))
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.mark.parametrize(("op", "options", "mistake", "data", "misses"), MISTAKES, ids=described)
def test_mistakes_miss_exactly_where_they_matter(
    op: str, options: dict[str, object], mistake: Way, data: Data, misses: set[str]
) -> None:
    """The same data computed rightly passes, so the mistake alone is what misses."""
    eps = {} if OPS[op].is_backward else {"eps": EPS}
    spec = NormSpec((64,), op=op, **(eps | options))  # type: ignore[arg-type]
    call = data(matrix.random_call(spec, 200, random_generator()))
    assert missed(computed(call), call) == set()
    assert missed(computed(call, mistake), call) == misses


def every_result(op: Op) -> list[str]:
    spec = NormSpec((64,), op=op.name, eps=EPS)
    return [result.name for result in spec.results]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("op", FORWARDS)
def test_two_units_in_the_outputs_last_place_miss(op: str, dtype: str) -> None:
    """In any single element of at least average size."""
    call = matrix.random_call(NormSpec((64,), dtype, op=op, eps=EPS), 128, random_generator())
    judgement = judge(call)
    want, tolerance = judgement.expected["output"], judgement.tolerance["output"]
    right = want.astype(DTYPES[dtype].numpy)
    assert compare(right, want, tolerance).passed
    wrong = (right.view(np.uint16) + 2).view(right.dtype)  # two steps away from zero
    large = np.abs(want) >= np.abs(want).mean()
    assert large.any()
    off = np.abs(wrong.astype(np.float64) - want)
    assert (off[large] > tolerance[large]).all()


@pytest.mark.parametrize(("dtype", "resolved"), [("f32", 5e-5), ("f64", 1e-13)])
@pytest.mark.parametrize(
    ("op", "result"), [(op.name, result) for op in OPS.values() for result in every_result(op)]
)
def test_a_small_part_of_any_result_misses(
    op: str, result: str, dtype: str, resolved: float
) -> None:
    """Where the result is as wide as the accumulator, the sums' roundings decide."""
    call = matrix.random_call(NormSpec((64,), dtype, op=op, eps=EPS), 128, random_generator())
    judgement = judge(call)
    want, tolerance = judgement.expected[result], judgement.tolerance[result]
    wrong = want.astype(DTYPES[dtype].numpy)
    assert compare(wrong, want, tolerance).passed
    wrong.flat[np.argmax(np.abs(want))] *= 1 + resolved
    assert not compare(wrong, want, tolerance).passed


@pytest.mark.parametrize(("dtype", "resolved"), [("f32", 2e-6), ("f64", 4e-15)])
@pytest.mark.parametrize("op", FORWARDS)
def test_a_row_whose_rstd_is_a_few_roundings_off_misses(
    op: str, dtype: str, resolved: float
) -> None:
    """The root halves the error of its sum."""
    call = matrix.random_call(NormSpec((64,), dtype, op=op, eps=EPS), 128, random_generator())
    judgement = judge(call)
    want, tolerance = judgement.expected["rstd"], judgement.tolerance["rstd"]
    assert (tolerance < resolved * want).all()
    assert (tolerance > resolved / 4 * want).all()


# --- rows and shapes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"residual_dtype": "f64"}, {"gate": "after"}, {"gate": "before"}], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_blocks_of_rows_change_nothing(
    op: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = NormSpec((5,), "f64", op=op, eps=EPS, weight_sets=True, **options)
    call = matrix.random_call(spec, 23, random_generator())
    whole = judge(call)
    monkeypatch.setattr(blocks_of_rows, "_BLOCK_ELEMENTS", 7 * 5)  # 3 blocks of 7 rows, one of 2
    blocked = judge(call)
    for one, other in ((whole.expected, blocked.expected), (whole.tolerance, blocked.tolerance)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("residual_dtype", [None, "f32"])
@pytest.mark.parametrize("op", FORWARDS)
def test_inf_and_nan_stay_in_their_rows(op: str, residual_dtype: str | None) -> None:
    spec = NormSpec((64,), "f32", op=op, eps=EPS, residual_dtype=residual_dtype)
    call = matrix.adversarial_call(spec, random_generator())
    judgement = judge(call)
    whole = np.isfinite(call.arrays["input"]).all(axis=1)
    if residual_dtype is not None:
        whole &= np.isfinite(call.arrays["residual"]).all(axis=1)
    assert (~whole).sum() == (2 if residual_dtype is None else 4)
    for part in (judgement.expected, judgement.tolerance):
        for name, values in part.items():
            assert np.isfinite(values[whole]).all(), name
    broken = judgement.expected["output"][~whole].reshape(-1, 64)
    assert (~np.isfinite(broken)).any(axis=1).all()


def test_the_rms_of_an_infinite_row_is_infinite_and_its_other_elements_are_zero() -> None:
    call = matrix.adversarial_call(NormSpec((8,), op="rms_norm", eps=EPS), random_generator())
    judgement = judge(call)
    assert judgement.expected["rstd"][3] == 0
    assert np.isnan(judgement.expected["output"][3, 0])
    assert not judgement.expected["output"][3, 1:].any()
    assert (judgement.tolerance["output"][3, 1:] < 1e-30).all()


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    spec = NormSpec((4,), "bf16", op=op, eps=EPS, residual_dtype="f32", weight_offset=1.0)
    call = matrix.random_call(spec, 0, random_generator())
    expected = judge(call).expected
    assert tuple(expected) == tuple(result.name for result in spec.results)
    for name, values in expected.items():
        assert values.shape == call.shape_of(spec.family.named(name)), name
        assert not values.any()


def test_what_nobody_asks_for_is_not_judged() -> None:
    spec = NormSpec((4,), op="rms_norm_backward", output_mask=(False, True))
    judgement = judge(matrix.random_call(spec, 3, random_generator()))
    assert tuple(judgement.expected) == tuple(judgement.tolerance) == ("grad_weight",)


# --- the matrix ------------------------------------------------------------------------------


def test_the_matrix_begins_with_the_specs_of_old() -> None:
    """Records of runs are in its order."""
    specs = list(matrix.specs())
    assert len(set(specs)) == len(specs)
    old = {
        "op": "layer_norm_backward",
        "bias_dtype": None,
        "residual_dtype": None,
        "weight_offset": 0.0,
        "from_output": False,
    }
    is_old = [old.items() <= spec.to_dict().items() for spec in specs]
    wide = [True] * 6 + [False] * 10  # came last: layer norm's plain ones, and all others
    assert is_old == [True] * 85 + [False] * (len(specs) - 85 - len(wide)) + wide


@pytest.mark.parametrize(
    "op",
    [*OPS.values(), *FROM_OUTPUT.values()],
    ids=lambda op: op.name + "_from_output" * op.from_output,
)
def test_the_matrix_has_every_option_of_every_op(op: Op) -> None:
    all_of_them = (*matrix.specs(), *matrix.biased_rms_norms())
    specs = [spec for spec in all_of_them if spec.family == op]
    assert {spec.dtype for spec in specs} == set(DTYPES)
    for operand in op.rows:
        if operand.when not in (When.NEVER, When.SO_MANY_GIVEN):
            expected = {True} if operand.when is When.ALWAYS else {True, False}
            assert {spec.has(operand) for spec in specs} == expected, operand.name
    assert {spec.weight_offset for spec in specs} == {0.0, 1.0}
    assert {("bf16", "bf16"), ("bf16", "f32")} <= {(s.dtype, s.residual_dtype) for s in specs}
    assert {spec.has_weight for spec in specs} == {True, False}
    assert any(spec.columns == 65536 for spec in specs)


# --- several gradients of the output ---------------------------------------------------------


def total_of(gradients: list[list[float]], dtype: type, of_input: type) -> Array:
    """What the judge adds gradients of one row up to: the bias's gradient."""
    x: Array = np.arange(len(gradients[0]), dtype=of_input)[None]
    given: list[Array] = [np.array([gradient], dtype) for gradient in gradients]
    found = reference.layer_norm_backward(given, x, x.shape[1], bias=np.ones(x.shape[1], dtype))
    return np.asarray(found.grad_bias)


@pytest.mark.parametrize(
    ("large", "dtype", "of_input", "first", "last"),
    [
        # Each sum is rounded to the type of dy, if x has it: large + 1 lies in the middle.
        (2048.0, np.float16, np.float16, 0, 2),
        (256.0, bfloat16, bfloat16, 0, 2),
        # ... and else to that of sums.
        (256.0, bfloat16, np.float32, 2, 2),
        (2.0**24, bfloat16, np.float32, 0, 2),
        (2.0**24, np.float32, np.float32, 0, 2),
        (2.0**24, np.float64, np.float64, 2, 2),
        (2.0**53, np.float64, np.float64, 0, 2),
    ],
)
def test_each_partial_sum_is_rounded(
    large: float, dtype: type, of_input: type, first: int, last: int
) -> None:
    """Of a large number and two ones in turn, and of the ones before it."""
    gradients = [[large, 1.0], [1.0, 1.0], [1.0, large]]
    expected = [large + first, large + last]
    np.testing.assert_array_equal(total_of(gradients, dtype, of_input), expected)


def test_sums_that_are_not_finite_are_those_of_additions() -> None:
    """Without a warning; the tests take those for errors."""
    infinite, most = float("inf"), float(np.finfo(np.float16).max)
    gradients = [[infinite, most, 1.0], [-infinite, most, 2.0]]
    found = total_of(gradients, np.float16, np.float16)
    np.testing.assert_array_equal(found, [np.nan, infinite, 3.0])
