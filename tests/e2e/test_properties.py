"""What holds for all shapes, element types, masks and data; hypothesis looks for an exception.

Data comes from a seed that hypothesis draws, so that its falsifying example says all there is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    present,
    random_arguments,
)

from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES, name_of

# A compile takes a third of a second and each new spec needs one: that bounds the examples.
fresh = settings(derandomize=False, print_blob=True, deadline=None)

normalized_shapes = st.sampled_from(
    [(1,), (2,), (7,), (16,), (33,), (64,), (100,), (129,), (257,), (3, 5), (2, 3, 4), (1, 8, 1)]
)
seeds = st.integers(0, 2**64 - 1)
leading_shapes = st.one_of(
    st.integers(0, 130).map(lambda rows: (rows,)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
types = st.sampled_from(
    [
        {"dtype": "f32"},
        {"dtype": "f16"},
        {"dtype": "bf16"},
        {"dtype": "f64"},
        {"dtype": "f32", "grad_output_dtype": "bf16", "weight_dtype": "bf16"},
        {"dtype": "f32", "grad_output_dtype": "f16", "weight_dtype": "f16"},
        {"dtype": "bf16", "weight_dtype": "f32"},
        {"dtype": "f16", "weight_dtype": "f32"},
        {"dtype": "bf16", "bias_dtype": "f32"},
    ]
)


@st.composite
def specs(draw: st.DrawFn) -> NormSpec:
    fields: dict[str, Any] = dict(draw(types))
    has_weight = draw(st.booleans())
    if not has_weight:
        fields.pop("weight_dtype", None)
    masks = st.tuples(st.booleans(), st.booleans(), st.booleans())
    return NormSpec(
        draw(normalized_shapes),
        **fields,
        has_weight=has_weight,
        output_mask=draw(masks.filter(lambda mask: mask[0] or mask[2] or (mask[1] and has_weight))),
        eps=draw(st.sampled_from([None, 1e-5])),
    )


@st.composite
def arguments_of(draw: st.DrawFn, any_spec: st.SearchStrategy[NormSpec]) -> Arguments:
    """With rows of any mean and deviation that its type does justice to."""
    spec, leading = draw(any_spec), draw(leading_shapes)
    rng = np.random.default_rng(draw(seeds))
    scale, offset = 2.0 ** draw(st.integers(-6, 6)), draw(st.integers(-100, 100))
    x = scale * rng.standard_normal((math.prod(leading), spec.columns)) + offset
    return random_arguments(rng, spec, leading, x=x)


# For laws of arithmetic a few modules do; f32 and f64 are odd and even, halves are rounded.
some_specs = st.sampled_from(
    [
        NormSpec((7,)),
        NormSpec((64,)),
        NormSpec((33,), "f64"),
        NormSpec((100,), "bf16"),
        NormSpec((16,), "f16", weight_dtype="f32"),
    ]
)


@pytest.mark.drawn
@settings(fresh, max_examples=50)
@given(arguments_of(specs()))
def test_every_gradient_is_within_its_tolerance(arguments: Arguments) -> None:
    assert_matches_reference(arguments.backward(), arguments)


def eighths(arguments: Arguments, seed: int) -> Array:
    """Another grad_output: multiples of 1/8 below 4, which add and double exactly in every type."""
    numerators = np.random.default_rng(seed).integers(-31, 32, arguments.input.shape)
    return (numerators / 8).astype(arguments.grad_output.dtype)


@pytest.mark.drawn
@settings(fresh, max_examples=200)
@given(arguments_of(some_specs), seeds, st.integers(-3, 3))
def test_scaling_grad_output_by_a_power_of_two_scales_the_gradients_exactly(
    arguments: Arguments, seed: int, exponent: int
) -> None:
    factor = 2.0**exponent
    arguments = replace(arguments, grad_output=eighths(arguments, seed))
    by_factor = np.asarray(factor, arguments.grad_output.dtype)
    scaled = replace(arguments, grad_output=arguments.grad_output * by_factor)
    for gradient, of_scaled in zip(arguments.backward(), scaled.backward(), strict=True):
        name = name_of(present(gradient).dtype)
        assert name is not None
        # Where a result is so close to zero that its type cuts bits off, they can be others.
        cut_off = max(1.0, factor) * DTYPES[name].smallest_subnormal
        expected = factor * present(gradient).astype(np.float64)
        assert (np.abs(present(of_scaled).astype(np.float64) - expected) <= cut_off).all()


@settings(fresh, max_examples=200)
@given(arguments_of(some_specs), seeds, seeds)
def test_gradients_are_additive_in_grad_output(
    arguments: Arguments, seed: int, other_seed: int
) -> None:
    """backward(a + b) = backward(a) + backward(b), each with its tolerance."""
    a, b = eighths(arguments, seed), eighths(arguments, other_seed)
    cases = [replace(arguments, grad_output=grad_output) for grad_output in (a, b, a + b)]
    results = [case.backward() for case in cases]
    tolerances = [
        assert_matches_reference(result, case).tolerance
        for result, case in zip(results, cases, strict=True)
    ]
    for name in tolerances[0]:
        of_a, of_b, of_sum = (
            present(getattr(result, name)).astype(np.float64) for result in results
        )
        off = np.abs(of_sum - (of_a + of_b))
        assert (off <= sum(allowed[name] for allowed in tolerances)).all()


@settings(fresh, max_examples=200)
@given(arguments_of(some_specs))
def test_grad_bias_is_the_column_sum_of_grad_output(arguments: Arguments) -> None:
    """By `math.fsum`, which rounds once, and the textbook bound for a sum in any order."""
    dy = arguments.call().arrays["grad_output"].astype(np.float64)
    sums = np.array([math.fsum(column) for column in dy.T])
    grad_bias = present(arguments.backward().grad_bias)
    u = DTYPES["f64" if grad_bias.dtype == np.float64 else "f32"].unit_roundoff
    name = name_of(grad_bias.dtype)
    assert name is not None
    output_u = DTYPES[name].unit_roundoff
    bound = len(dy) * u * np.abs(dy).sum(axis=0)
    off = np.abs(grad_bias.astype(np.float64) - sums)
    assert (off <= bound + output_u * (np.abs(sums) + bound)).all()


eps_free_specs = st.sampled_from(
    [
        NormSpec((7,), eps=0.0),
        NormSpec((64,), eps=0.0),
        NormSpec((33,), "f64", eps=0.0),
    ]
)


@pytest.mark.drawn
@settings(fresh, max_examples=200)
@given(arguments_of(eps_free_specs))
def test_grad_input_is_orthogonal_to_ones_and_to_xhat(arguments: Arguments) -> None:
    """Where eps is 0, neither shifting nor scaling a row changes its xhat, nor then the loss."""
    gradients = arguments.backward()
    tolerance = assert_matches_reference(gradients, arguments).tolerance["grad_input"]
    x = arguments.input.astype(np.float64)
    xhat = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
    for direction in (np.ones_like(xhat), xhat):
        component = (direction * present(gradients.grad_input)).sum(axis=-1)
        assert (np.abs(component) <= (np.abs(direction) * tolerance).sum(axis=-1)).all()


@settings(fresh, max_examples=200)
@given(arguments_of(some_specs), seeds)
def test_permuting_rows_permutes_grad_input(arguments: Arguments, seed: int) -> None:
    """To the bit: a row's gradient does not depend on where the row is. The sums may round anew."""
    flat = arguments.call().arrays
    rows = len(flat["input"])
    order = np.random.default_rng(seed).permutation(rows)
    in_order, permuted = (
        replace(
            arguments,
            grad_output=flat["grad_output"][rearranged],
            input=flat["input"][rearranged],
            mean=flat["mean"][rearranged],
            rstd=flat["rstd"][rearranged],
        )
        for rearranged in (np.arange(rows), order)
    )
    before, after = in_order.backward(), permuted.backward()
    assert_matches_reference(after, permuted)
    moved = present(before.grad_input)[order]
    assert_same_bits(
        after._replace(grad_weight=None, grad_bias=None), LayerNormGrads(moved, None, None)
    )


@settings(fresh, max_examples=200)
@given(arguments_of(some_specs), st.data())
def test_a_rows_grad_input_does_not_depend_on_other_rows(
    arguments: Arguments, data: st.DataObject
) -> None:
    """To the bit: two parts of the rows, each alone, give what they give together."""
    flat = arguments.call().arrays
    rows = len(flat["input"])
    cut = data.draw(st.integers(0, rows), label="cut")

    def part(which: slice) -> Arguments:
        names = ("grad_output", "input", "mean", "rstd")
        arrays: dict[str, Any] = {name: flat[name][which] for name in names}
        return replace(arguments, **arrays)

    whole = present(part(slice(None)).backward().grad_input)
    for which in (slice(cut), slice(cut, None)):
        gradients = part(which).backward()
        assert_matches_reference(gradients, part(which))
        assert present(gradients.grad_input).tobytes() == whole[which].tobytes()
