"""What the op means at every edge of its contract, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import (
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    present,
    random_arguments,
    random_generator,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime import Norm

N = 48
MASKS = tuple(itertools.product((True, False), repeat=3))

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
given_or_recomputed = pytest.mark.parametrize("eps", [None, 1e-5], ids=["given", "recomputed"])


@pytest.fixture(scope="module")
def op(tmp_path_factory: pytest.TempPathFactory) -> Norm:
    """A module of f32 data, as it ships: dynamic rows, statistics given."""
    folder: Path = tmp_path_factory.mktemp("op")
    return lnbwd.load(lnbwd.compile(NormSpec((N,)), output_dir=folder).path)


def f64(array: Array | None) -> Array:
    return present(array).astype(np.float64)


# Sizes and shapes


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 16, 63, 64, 65, 127, 769, 1000, 4099])
def test_any_number_of_columns_and_rows(columns: int) -> None:
    rng = random_generator()
    for rows in (0, 1, 2, 3, 5, 16, 37, 64, 129, 1023):
        arguments = random_arguments(rng, NormSpec((columns,)), (rows,))
        assert_matches_reference(arguments.backward(), arguments)


def test_many_rows_of_few_columns() -> None:
    arguments = random_arguments(random_generator(), NormSpec((3,)), (500_001,))
    assert_matches_reference(arguments.backward(), arguments)


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 6), (3, 1, 2), (1, 3, 2, 1)])
def test_leading_dimensions_are_rows(op: Norm, leading: tuple[int, ...]) -> None:
    arguments = random_arguments(random_generator(), op.spec, leading)
    gradients = arguments.backward_by(op)
    assert_matches_reference(gradients, arguments)
    assert present(gradients.grad_input).shape == (*leading, N)

    flat = arguments.call().arrays
    as_matrix = op(flat["grad_output"], flat["input"], flat["mean"], flat["rstd"], flat["weight"])
    reshaped = present(as_matrix.grad_input).reshape(*leading, N)
    assert_same_bits(gradients, as_matrix._replace(grad_input=reshaped))


@pytest.mark.drawn
@pytest.mark.parametrize("dims", [(48,), (6, 8), (2, 4, 6), (1, 48, 1), (2, 2, 2, 6)])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_several_normalized_dimensions(leading: tuple[int, ...], dims: tuple[int, ...]) -> None:
    arguments = random_arguments(random_generator(), NormSpec(dims), leading)
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert present(gradients.grad_weight).shape == dims
    assert present(gradients.grad_bias).shape == dims


def test_an_int_is_a_normalized_shape_of_one_dimension() -> None:
    arguments = random_arguments(random_generator(), NormSpec((N,)), (5,))
    by_int = lnbwd.layer_norm_backward(
        arguments.grad_output,
        arguments.input,
        N,
        arguments.mean,
        arguments.rstd,
        arguments.weight,
    )
    assert_same_bits(by_int, arguments.backward())


@pytest.mark.drawn
@pytest.mark.parametrize("leading", [(0,), (3, 0), (0, 2)])
@given_or_recomputed
@every_dtype
def test_no_rows_give_zero_parameter_gradients(
    leading: tuple[int, ...], eps: float | None, dtype: str
) -> None:
    spec = NormSpec((N,), dtype, eps=eps)
    arguments = random_arguments(random_generator(), spec, leading)
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert present(gradients.grad_input).shape == (*leading, N)
    assert not f64(gradients.grad_weight).any()
    assert not f64(gradients.grad_bias).any()


@pytest.mark.drawn
@given_or_recomputed
@every_dtype
def test_one_row(eps: float | None, dtype: str) -> None:
    spec = NormSpec((N,), dtype, eps=eps)
    arguments = random_arguments(random_generator(), spec, (1,))
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    np.testing.assert_array_equal(f64(gradients.grad_bias), f64(arguments.grad_output)[0])


@pytest.mark.drawn
@given_or_recomputed
@every_dtype
def test_one_column_has_nothing_to_normalize(eps: float | None, dtype: str) -> None:
    """xhat is 0 and h its own mean: grad_weight and grad_input are 0 exactly, not nearly."""
    spec = NormSpec((1,), dtype, eps=eps)
    arguments = random_arguments(random_generator(), spec, (37,))
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert not f64(gradients.grad_weight).any()
    assert not f64(gradients.grad_input).any()
    assert f64(gradients.grad_bias).any()


# Hard rows


@given_or_recomputed
@every_dtype
def test_hard_rows(eps: float | None, dtype: str) -> None:
    """Large means, constants, the largest and smallest magnitudes, one far outlier."""
    rng = random_generator()
    x = rng.standard_normal((11, N))
    largest = 1e4 if dtype == "f16" else 1e15  # of which N squares can be summed
    smallest = 1e-4 if dtype == "f16" else 1e-15
    x[1] += 1000
    x[2] -= 1000
    x[3] = 3.0
    x[4] = 0.0
    x[5] = 1e3
    x[6] *= largest
    x[7] *= smallest
    x[8, 5] = largest
    x[9] = 1000 + 1e-3 * x[9]
    spec = NormSpec((N,), dtype, eps=eps)
    arguments = random_arguments(rng, spec, (len(x),), x=x)
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert np.isfinite(f64(gradients.grad_input)).all()


def test_a_large_mean_costs_no_accuracy() -> None:
    """mean / std = 1000 in f32: the centred form is off by 1e-6 at most, the expanded by more."""
    rng = random_generator()
    x = 1000 + rng.standard_normal((64, 1024))
    arguments = random_arguments(rng, NormSpec((1024,)), (64,), x=x)
    gradients = arguments.backward()
    expected = assert_matches_reference(gradients, arguments).expected
    for name, right in expected.items():
        off = f64(getattr(gradients, name)) - right
        assert np.linalg.norm(off) < 1e-6 * np.linalg.norm(right)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["input", "grad_output"])
@given_or_recomputed
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_inf_and_nan_stay_in_their_row(
    poison: float, where: str, eps: float | None, dtype: str
) -> None:
    """grad_input is intact in the other rows, the parameter gradients in the other columns."""
    row, column = 4, 7
    spec = NormSpec((N,), dtype, eps=eps)
    clean = random_arguments(random_generator(), spec, (9,))
    poisoned_array = getattr(clean, where).copy()
    poisoned_array[row, column] = poison
    poisoned = replace(clean, **{where: poisoned_array})
    if eps is None:
        poisoned = poisoned.with_true_statistics()
    gradients = poisoned.backward()
    assert_matches_reference(gradients, poisoned)

    dx, clean_dx = f64(gradients.grad_input), f64(clean.backward().grad_input)
    others = np.arange(9) != row
    assert not np.isfinite(dx[row]).all()
    np.testing.assert_array_equal(dx[others], clean_dx[others])

    dgamma, dbeta = f64(gradients.grad_weight), f64(gradients.grad_bias)
    if where == "input":  # through the statistics of its row it is in every xhat
        assert not np.isfinite(dgamma).any()
        assert np.isfinite(dbeta).all()
    else:
        assert np.flatnonzero(~np.isfinite(dgamma)).tolist() == [column]
        assert np.flatnonzero(~np.isfinite(dbeta)).tolist() == [column]


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_inf_and_nan_in_the_weight_reach_grad_input_alone(poison: float) -> None:
    arguments = random_arguments(random_generator(), NormSpec((N,)), (9,))
    weight = present(arguments.weight).copy()
    weight[3] = poison
    poisoned = replace(arguments, weight=weight)
    gradients = poisoned.backward()
    assert_matches_reference(gradients, poisoned)
    assert not np.isfinite(f64(gradients.grad_input)).any()
    clean = arguments.backward()
    assert_same_bits(gradients._replace(grad_input=clean.grad_input), clean)


def test_overflow_of_a_half_gradient_is_inf() -> None:
    """Sums are f32, and rounded once: beyond 65504 is Inf, but sums that come back are not."""
    ones = np.ones((9, 2), np.float16)
    arguments = Arguments(
        grad_output=ones * np.float16(60000),
        input=ones,
        normalized_shape=(2,),
        mean=np.zeros(9, np.float32),
        rstd=np.ones(9, np.float32),
        weight=ones[0],
    )
    arguments.grad_output[5:, 1] *= -1
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert f64(gradients.grad_bias).tolist() == [np.inf, 60000]
    assert f64(gradients.grad_weight).tolist() == [np.inf, 60000]


# Statistics


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_statistics_are_taken_as_they_are(dtype: str) -> None:
    """False ones too: any mean, an rstd that is negative, zero, or no inverse of a deviation."""
    rng = random_generator()
    arguments = random_arguments(rng, NormSpec((N,), dtype), (37,))
    mean, rstd = (rng.normal(0, 3, 37).astype(present(arguments.mean).dtype) for _ in range(2))
    rstd[5] = 0
    assert (rstd < 0).any()
    false = replace(arguments, mean=mean, rstd=rstd)
    gradients = false.backward()
    assert_matches_reference(gradients, false)
    assert not f64(gradients.grad_input)[5].any()


@pytest.mark.parametrize("leading", [(), (6,), (2, 3)])
@pytest.mark.parametrize("dims", [(N,), (6, 8)])
def test_trailing_ones_of_statistics_do_not_matter(
    leading: tuple[int, ...], dims: tuple[int, ...]
) -> None:
    bare = random_arguments(random_generator(), NormSpec(dims), leading)
    with_ones = (*leading, *(1,) * len(dims))
    mean, rstd = (present(a).reshape(with_ones) for a in (bare.mean, bare.rstd))
    assert_same_bits(replace(bare, mean=mean, rstd=rstd).backward(), bare.backward())
    assert_same_bits(replace(bare, rstd=rstd).backward(), bare.backward())


@pytest.mark.drawn
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.5, 100.0])
def test_eps_of_recomputed_statistics(eps: float) -> None:
    spec = NormSpec((N,), "f64", eps=eps)
    recomputed = random_arguments(random_generator(), spec, (37,))
    gradients = recomputed.backward()
    assert_matches_reference(gradients, recomputed)
    given = recomputed.with_true_statistics()
    for a, b in zip(gradients, given.backward(), strict=True):
        np.testing.assert_allclose(present(a), present(b), rtol=1e-10, atol=1e-12)


# Which gradients, of which types


@pytest.mark.drawn
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: "".join(str(int(m)) for m in mask))
@pytest.mark.parametrize("has_weight", [True, False], ids=["weight", "no weight"])
def test_output_mask_decides_what_is_computed(
    has_weight: bool, mask: tuple[bool, bool, bool]
) -> None:
    everything = random_arguments(random_generator(), NormSpec((N,), has_weight=has_weight), (37,))
    masked = replace(everything, output_mask=mask)
    gradients = masked.backward()
    assert_matches_reference(gradients, masked)
    there = (mask[0], mask[1] and has_weight, mask[2])
    assert tuple(gradient is not None for gradient in gradients) == there


@pytest.mark.drawn
@every_dtype
def test_no_weight_is_a_weight_of_ones(dtype: str) -> None:
    arguments = random_arguments(random_generator(), NormSpec((N,), dtype), (37,))
    arguments = replace(arguments, weight=np.ones(N, arguments.input.dtype))
    without = replace(arguments, weight=None)
    gradients = without.backward()
    assert_matches_reference(gradients, without)
    assert gradients.grad_weight is None
    assert_same_bits(gradients, arguments.backward()._replace(grad_weight=None))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "weight", "bias", "grad_bias"),
    [
        ("f32", "f32", "bf16", "bf16"),
        ("bf16", "f32", "f16", "f16"),
        ("bf16", "bf16", "f32", "f32"),
        ("f16", "f32", None, "f32"),  # the weight's, where there is no bias
        ("bf16", None, "f32", "f32"),
        ("f16", None, None, "f16"),  # the input's, where there is neither
    ],
)
def test_grad_bias_has_the_type_of_the_bias(
    dtype: str, weight: str | None, bias: str | None, grad_bias: str
) -> None:
    spec = NormSpec(
        (N,), dtype, weight_dtype=weight, bias_dtype=bias, has_weight=weight is not None
    )
    arguments = random_arguments(random_generator(), spec, (37,))
    if bias is None:
        arguments = replace(arguments, bias=None)
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert present(gradients.grad_bias).dtype == DTYPES[grad_bias].numpy


def test_only_the_type_of_the_bias_matters() -> None:
    arguments = random_arguments(random_generator(), NormSpec((N,)), (37,))
    nan = np.full(N, np.nan, np.float32)
    assert_same_bits(replace(arguments, bias=nan).backward(), arguments.backward())


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "grad_output", "weight"),
    [
        ("f32", "f16", "f16"),
        ("f32", "bf16", "bf16"),
        ("f16", "f16", "f32"),
        ("bf16", "bf16", "f32"),
        ("bf16", "f32", "f32"),
        ("f32", "bf16", "f32"),
        ("f32", "f32", "f16"),
        ("f16", "bf16", "f32"),
    ],
)
@given_or_recomputed
def test_mixed_types(dtype: str, grad_output: str, weight: str, eps: float | None) -> None:
    spec = NormSpec((N,), dtype, grad_output_dtype=grad_output, weight_dtype=weight, eps=eps)
    arguments = random_arguments(random_generator(), spec, (37,))
    gradients = arguments.backward()
    assert_matches_reference(gradients, arguments)
    assert present(gradients.grad_input).dtype == arguments.input.dtype
    assert present(gradients.grad_weight).dtype == present(arguments.weight).dtype


def test_bf16_sums_are_not_rounded_on_the_way() -> None:
    """4096 rows of 1: bf16 sums would stop at 256."""
    ones = np.ones((4096, 2), ml_dtypes.bfloat16)
    zeros = np.zeros(4096, np.float32)
    gradients = lnbwd.layer_norm_backward(ones, ones, 2, zeros, zeros + 1, ones[0])
    assert f64(gradients.grad_bias).tolist() == [4096, 4096]
    assert f64(gradients.grad_weight).tolist() == [4096, 4096]


# Memory


def laid_out(arguments: Arguments, layout: Callable[[Array], Array]) -> dict[str, Any]:
    """All the arrays among the arguments, each with that layout."""
    values = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    return {k: layout(v) for k, v in values.items() if isinstance(v, np.ndarray)}


def misaligned(array: Array) -> Array:
    """By one byte: not even aligned to its own elements."""
    storage = np.zeros(array.nbytes + 1, np.uint8)
    moved = storage[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert array.dtype.itemsize == 1 or not moved.flags.aligned
    return moved


def off_by_one_element(array: Array) -> Array:
    storage = np.zeros(array.size + 1, array.dtype)
    moved = storage[1:].reshape(array.shape)
    moved[...] = array
    return moved


def read_only(array: Array) -> Array:
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen


def every_second_element(array: Array) -> Array:
    storage = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    storage[..., ::2] = array
    return storage[..., ::2]


def reversed_storage(array: Array) -> Array:
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1]


LAYOUTS: tuple[Callable[[Array], Array], ...] = (
    misaligned,
    off_by_one_element,
    read_only,
    every_second_element,
    reversed_storage,
    np.asfortranarray,
)


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_any_layout_gives_the_same_bits(layout: Callable[[Array], Array], dtype: str) -> None:
    plain = random_arguments(random_generator(), NormSpec((4, 12), dtype), (3, 5))
    arrays = laid_out(plain, layout)
    assert len(arrays) == 6
    assert_same_bits(replace(plain, **arrays).backward(), plain.backward())


def test_a_broadcast_grad_output_gives_the_same_bits(op: Norm) -> None:
    """What the gradient of a sum looks like: one element, all strides zero."""
    plain = random_arguments(random_generator(), op.spec, (5,))
    broadcast = replace(plain, grad_output=np.broadcast_to(np.float32(0.5), (5, N)))
    copied = replace(plain, grad_output=np.full((5, N), 0.5, np.float32))
    assert_same_bits(broadcast.backward_by(op), copied.backward_by(op))


@pytest.mark.parametrize("layout", [np.array, *LAYOUTS], ids=lambda layout: layout.__name__)
@given_or_recomputed
def test_arguments_are_not_written_to(layout: Callable[[Array], Array], eps: float | None) -> None:
    spec = NormSpec((N,), eps=eps)
    arguments = random_arguments(random_generator(), spec, (37,))
    arrays = laid_out(arguments, layout)
    before = {name: array.tobytes() for name, array in arrays.items()}
    replace(arguments, **arrays).backward()
    assert {name: array.tobytes() for name, array in arrays.items()} == before


def test_results_are_the_callers_own(op: Norm) -> None:
    """New, writable, in C order; sharing nothing with arguments, each other, or later results."""
    arguments = random_arguments(random_generator(), op.spec, (37,))
    first = arguments.backward_by(op)
    kept = [present(gradient).copy() for gradient in first]
    second = replace(arguments, grad_output=-arguments.grad_output).backward_by(op)
    results = [present(gradient) for gradient in (*first, *second)]
    for result in results:
        assert result.flags.writeable
        assert result.flags.c_contiguous
        assert result.flags.aligned
        assert not any(
            np.shares_memory(result, array) for array in arguments.call().arrays.values()
        )
    for a, b in itertools.combinations(results, 2):
        assert not np.shares_memory(a, b)
    for gradient, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(present(gradient), copy)


def test_results_outlive_the_module(tmp_path: Path) -> None:
    artifact = lnbwd.compile(NormSpec((N,)), output_dir=tmp_path)
    arguments = random_arguments(random_generator(), artifact.manifest.spec, (37,))
    gradients = arguments.backward_by(lnbwd.load(artifact.path))
    assert_matches_reference(gradients, arguments)


# The same again


@pytest.mark.parametrize("shape", [(37, 48), (1023, 769), (4000, 16)])
def test_ten_runs_give_the_same_bits(shape: tuple[int, int]) -> None:
    arguments = random_arguments(random_generator(), NormSpec(shape[1:]), shape[:1])
    first = arguments.backward()
    for _ in range(9):
        assert_same_bits(arguments.backward(), first)


def test_a_loaded_module_and_the_function_give_the_same_bits(op: Norm) -> None:
    arguments = random_arguments(random_generator(), op.spec, (37,))
    assert_same_bits(arguments.backward_by(op), arguments.backward())


def test_threads_can_share_a_module(op: Norm) -> None:
    """Eight threads, each with rows of its own, all of them at once and many times."""
    rng = random_generator()
    cases = [random_arguments(rng, op.spec, (rows,)) for rows in range(100, 900, 100)]
    alone = [case.backward_by(op) for case in cases]
    with ThreadPoolExecutor(len(cases)) as threads:
        for _ in range(20):
            together = list(threads.map(lambda case: case.backward_by(op), cases))
            for got, expected in zip(together, alone, strict=True):
                assert_same_bits(got, expected)


def test_threads_can_call_the_function_first_thing() -> None:
    """The module is not compiled yet when all of them ask for it."""
    rng = random_generator()
    cases = [random_arguments(rng, NormSpec((53,)), (rows,)) for rows in (5, 37, 64, 100)]
    with ThreadPoolExecutor(len(cases)) as threads:
        together = list(threads.map(Arguments.backward, cases))
    for got, case in zip(together, cases, strict=True):
        assert_matches_reference(got, case)
        assert_same_bits(got, case.backward())
