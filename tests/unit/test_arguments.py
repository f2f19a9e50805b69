"""What a call may look like, and the one form that it is brought into. Errors: e2e/test_errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.arguments import Array, BoundCall, bind
from iree_lnbwd.operands import LAYER_NORM_BACKWARD


def arrays_of(leading: tuple[int, ...], dims: tuple[int, ...]) -> dict[str, Array]:
    rng = random_generator()
    shapes = {"grad_output": (*leading, *dims), "input": (*leading, *dims), "weight": dims}
    shapes |= {"bias": dims, "mean": leading, "rstd": leading}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def bound(arrays: dict[str, Array], dims: tuple[int, ...], **others: Any) -> BoundCall:
    return bind(LAYER_NORM_BACKWARD.name, arrays, dims, **others)


def spec_of(call: BoundCall) -> NormSpec:
    assert call.spec is not None
    return call.spec


@pytest.mark.parametrize("dims", [(4,), (2, 4), (1, 1, 3)])
@pytest.mark.parametrize("leading", [(), (5,), (1,), (2, 3), (2, 1, 3, 1), (0,), (3, 0)])
def test_leading_dimensions_are_rows(leading: tuple[int, ...], dims: tuple[int, ...]) -> None:
    arrays = arrays_of(leading, dims)
    call = bound(arrays, dims)
    rows, columns = int(np.prod(leading, dtype=int)), int(np.prod(dims))
    assert call.rows == rows
    assert call.shape == (*leading, *dims)
    assert {name: array.shape for name, array in call.arrays.items()} == {
        "grad_output": (rows, columns),
        "input": (rows, columns),
        "mean": (rows,),
        "rstd": (rows,),
        "weight": (columns,),
    }
    for name, array in call.arrays.items():
        np.testing.assert_array_equal(array.ravel(), arrays[name].ravel())
    assert spec_of(call) == NormSpec(dims)


@pytest.mark.parametrize("shape", [4, (4,), [4], np.int64(4), (np.int32(4),)])
def test_spellings_of_normalized_shape(shape: Any) -> None:
    assert spec_of(bound(arrays_of((3,), (4,)), shape)) == NormSpec((4,))


def test_statistics_may_have_trailing_ones() -> None:
    arrays = arrays_of((2, 3), (4, 5))
    with_ones = arrays | {n: arrays[n].reshape(2, 3, 1, 1) for n in ("mean", "rstd")}
    plain, ones = bound(arrays, (4, 5)), bound(with_ones, (4, 5))
    assert plain.spec == ones.spec
    for name in ("mean", "rstd"):
        np.testing.assert_array_equal(plain.arrays[name], ones.arrays[name])


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "column-major": np.asfortranarray,
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "every second column": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: a[::-1].copy()[::-1],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "misaligned": lambda a: np.frombuffer(b"-" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str) -> None:
    arrays = arrays_of((6,), (4,))
    laid_out = {name: LAYOUTS[layout](array) for name, array in arrays.items()}
    assert all(np.array_equal(laid_out[name], array) for name, array in arrays.items())
    call = bound(laid_out, (4,))
    for name, array in call.arrays.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, arrays[name])


def test_a_broadcast_row() -> None:
    """As autograd hands over the gradient of a sum: no strides at all."""
    arrays = arrays_of((6,), (4,))
    arrays["grad_output"] = np.broadcast_to(np.float32(1), (6, 4))
    call = bound(arrays, (4,))
    np.testing.assert_array_equal(call.arrays["grad_output"], np.ones((6, 4)))


def test_contiguous_arrays_are_not_copied() -> None:
    arrays = arrays_of((2, 3), (4,))
    for name, array in bound(arrays, (4,)).arrays.items():
        assert np.shares_memory(array, arrays[name]), name


def test_the_callers_arrays_stay_as_they_are() -> None:
    arrays = arrays_of((2, 3), (4,))
    before = {name: (array.shape, array.tobytes()) for name, array in arrays.items()}
    bound(arrays, (4,))
    assert {name: (array.shape, array.tobytes()) for name, array in arrays.items()} == before


@pytest.mark.parametrize(
    ("dtypes", "spec"),
    [
        ({}, NormSpec((4,))),
        (
            {"grad_output": np.float16, "weight": ml_dtypes.bfloat16, "bias": ml_dtypes.bfloat16},
            NormSpec((4,), "f32", grad_output_dtype="f16", weight_dtype="bf16"),
        ),
        (
            {"input": ml_dtypes.bfloat16, "grad_output": ml_dtypes.bfloat16},
            NormSpec((4,), "bf16", weight_dtype="f32"),
        ),
        ({"bias": np.float16}, NormSpec((4,), bias_dtype="f16")),
        (
            dict.fromkeys(("input", "grad_output", "mean", "rstd", "weight", "bias"), np.float64),
            NormSpec((4,), "f64"),
        ),
    ],
)
def test_element_types_make_the_spec(dtypes: dict[str, Any], spec: NormSpec) -> None:
    arrays = arrays_of((3,), (4,))
    cast = {name: array.astype(dtypes.get(name, np.float32)) for name, array in arrays.items()}
    assert spec_of(bound(cast, (4,))) == spec


def test_the_bias_gives_only_its_type() -> None:
    assert "bias" not in bound(arrays_of((3,), (4,)), (4,)).arrays


def test_without_a_bias_its_gradient_has_the_weights_type() -> None:
    arrays = arrays_of((3,), (4,))
    del arrays["bias"]
    arrays["weight"] = arrays["weight"].astype(np.float16)
    assert spec_of(bound(arrays, (4,))).beta_dtype == "f16"


def test_without_a_weight() -> None:
    arrays = arrays_of((3,), (4,))
    del arrays["weight"]
    call = bound(arrays, (4,))
    assert spec_of(call) == NormSpec((4,), has_weight=False)
    assert "weight" not in call.arrays


def test_without_statistics() -> None:
    arrays = arrays_of((3,), (4,))
    del arrays["mean"], arrays["rstd"]
    call = bound(arrays, (4,), eps=1e-3)
    assert spec_of(call) == NormSpec((4,), eps=1e-3)
    assert set(call.arrays) == {"grad_output", "input", "weight"}


def test_eps_is_nothing_to_a_call_with_statistics() -> None:
    arrays = arrays_of((3,), (4,))
    assert bound(arrays, (4,), eps=1e-3).spec == bound(arrays, (4,), eps=1e-5).spec


@pytest.mark.parametrize("weight", ["weight", "no weight"])
def test_a_mask_that_leaves_nothing(weight: str) -> None:
    arrays = arrays_of((3,), (4,))
    mask = (False, False, False)
    if weight == "no weight":
        del arrays["weight"]
        mask = (False, True, False)
    assert bound(arrays, (4,), output_mask=mask).spec is None


def test_rows_are_dynamic() -> None:
    few, many = bound(arrays_of((1,), (4,)), (4,)), bound(arrays_of((2, 500), (4,)), (4,))
    assert spec_of(few).rows is None
    assert few.spec == many.spec
