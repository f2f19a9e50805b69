"""What a call may look like, and the one form that it is brought into. Errors: e2e/test_errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import (
    Array,
    BoundCall,
    GatedNormGrads,
    GpuArray,
    LayerNormGrads,
    NormOutput,
    Options,
    RMSNormGrads,
    asked_of,
    bind,
    bind_arrays,
    check_options,
    gradients_of,
    named_gradients,
    results_of,
    results_type,
    variant_of,
)
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    GRAD_OUTPUT,
    LAYER_NORM_BACKWARD,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    OPS,
    WITH_COPY,
    WITH_SUM,
    Gate,
    Op,
    names,
)
from iree_lnbwd.ops.spec import MOST_ROWS


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
    call = bound(arrays, (4,), output_mask=mask)
    assert call.spec is None
    assert call.rows == 3


def test_rows_follow_each_other_unless_a_call_says_where_they_are() -> None:
    call = bound(arrays_of((3,), (4,)), (4,))
    assert call.strides is None
    assert BoundCall(call.spec, call.shape, call.arrays, has_bias=True).strides is None
    assert GpuArray((3, 4), np.dtype("f4"), "gpu", contiguous=True).strides is None


def test_rows_are_dynamic() -> None:
    few, many = bound(arrays_of((1,), (4,)), (4,)), bound(arrays_of((2, 500), (4,)), (4,))
    assert spec_of(few).rows is None
    assert few.spec == many.spec


# --- every op -----------------------------------------------------------------------------------

EVERY: list[Op] = [*OPS.values(), *FROM_OUTPUT.values()]
every_op = pytest.mark.parametrize(
    "op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output
)
CELLS = ("input", "residual", "output", "grad_residual", *names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS)))


def given_to(op: Op, *without: str, **dtypes: Any) -> dict[str, Array]:
    """All arguments of an op, but for some: [2, 3] rows of [4]; f32 where nothing else is said."""
    arrays = {}
    for operand in op.arguments:
        name = operand.name
        if name not in without:
            shape = (2, 3, 4) if name in CELLS else (4,) if name in ("weight", "bias") else (2, 3)
            arrays[name] = np.ones(shape, dtypes.get(name, np.float32))
    return arrays


def bound_to(op: Op, *without: str, **options: Any) -> BoundCall:
    return bind(op.name, given_to(op, *without), 4, **options)


@every_op
def test_all_that_is_given_is_in_the_spec(op: Op) -> None:
    """And all that is read is in the call, by name."""
    call = bound_to(op, weight_offset=0.5, eps=0.25)
    assert spec_of(call) == NormSpec(
        (4,),
        op=op.name,
        from_output=op.from_output,
        residual_dtype="f32",
        has_bias=op.takes_bias,
        grad_outputs=MOST_GRAD_OUTPUTS if op.is_backward else 1,
        weight_offset=0.5,
        eps=None if op.is_backward else 0.25,
    )
    assert (call.rows, call.shape) == (6, (2, 3, 4))
    assert call.has_bias is ("bias" in given_to(op))
    read = {given.name for given in spec_of(call).inputs}
    assert call.arrays.keys() == read
    assert read == given_to(op).keys() - ({"bias"} if op.is_backward and not op.reads_bias else {})


@every_op
def test_each_part_may_be_missing(op: Op) -> None:
    plain = spec_of(bound_to(op))
    for name in ("weight", "bias", "residual", "grad_residual"):
        if name not in given_to(op):
            continue
        call = bound_to(op, name)
        spec = spec_of(call)
        assert name not in call.arrays
        assert call.has_bias is (name != "bias" and "bias" in given_to(op))
        if name == "weight":
            changed: dict[str, Any] = {"has_weight": False}
        elif name == "bias":
            changed = {"has_bias": False} if spec.family.takes_bias else {}
            if op.masked != op.gradients:
                changed["output_mask"] = ()
        else:
            changed = {"residual_dtype": None}
        assert spec == replace(plain, **changed), name


@every_op
def test_each_part_has_its_own_type(op: Op) -> None:
    for name, field in (
        ("weight", "weight_dtype"),
        ("bias", "bias_dtype"),
        ("residual", "residual_dtype"),
        ("grad_residual", "residual_dtype"),
        ("grad_output", "grad_output_dtype"),
    ):
        if name in given_to(op):
            alike = names(MORE_GRAD_OUTPUTS) if name == GRAD_OUTPUT.name else ()
            dtypes = dict.fromkeys((name, *alike), np.float16)
            spec = spec_of(bind(op.name, given_to(op, **dtypes), 4))
            assert getattr(spec, field) == "f16", name
            assert spec.dtype == "f32"


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_eps_that_is_not_given(op: Op) -> None:
    """1e-5 for `bind`; None is RMS norm's own: the epsilon of the type of sums."""
    statistics = ("mean", "rstd")
    assert spec_of(bound_to(op, *statistics)).eps == 1e-5
    for dtype, epsilon in ((np.float64, 2.0**-52), (np.float32, 2.0**-23), (np.float16, 2.0**-23)):
        arrays = given_to(op, *statistics, **dict.fromkeys(given_to(op), dtype))
        if op.centres:
            with pytest.raises(TypeError, match=r"^eps: expected a float, got NoneType$"):
                bind(op.name, arrays, 4, eps=None)
        else:
            assert spec_of(bind(op.name, arrays, 4, eps=None)).eps == epsilon
            assert spec_of(bind(op.name, arrays, 4, eps=0.5)).eps == 0.5


@every_op
def test_masks(op: Op) -> None:
    """Each gradient alone; a weight that is not there has none, nor has an RMS norm's bias."""
    if not op.masked:
        return
    for gradients, absent in ((op.gradients, ()), (op.masked, ("bias",))):
        for place, gradient in enumerate(gradients):
            mask = tuple(number == place for number in range(len(gradients)))
            spec = spec_of(bound_to(op, *absent, output_mask=mask))
            assert spec.output_mask in (mask, mask[: len(op.masked)])
            assert [result.name for result in spec.results] == [gradient.name]
        without = bound_to(op, "weight", *absent)
        assert [result.name for result in spec_of(without).results] == [
            gradient.name for gradient in gradients if gradient.name != "grad_weight"
        ]
        for wrong in (len(gradients) - 1, len(gradients) + 1):
            with pytest.raises(ValueError, match=rf"^output_mask: expected {len(gradients)} bools"):
                bound_to(op, *absent, output_mask=(True,) * wrong)


@pytest.mark.parametrize("gradient", [True, False])
def test_a_bias_of_another_kind_matters_to_its_gradient(gradient: bool) -> None:
    """f64 does not mix with f32; but where nobody asks for the gradient, it does not matter."""
    op = OPS["layer_norm_backward"]
    arrays = given_to(op, bias=np.float64)
    mask = (True, True, gradient)
    if gradient:
        with pytest.raises(ValueError, match=r"^bias: expected .* beside an input .*, got f64$"):
            bind(op.name, arrays, 4, output_mask=mask)
    else:
        assert spec_of(bind(op.name, arrays, 4, output_mask=mask)).output_mask == mask


@every_op
def test_results_have_the_callers_shapes(op: Op) -> None:
    call = bind(op.name, given_to(op), (4,))
    for result in spec_of(call).results:
        shape = call.shape_of(op.named(result.name))
        if result.name in ("grad_weight", "grad_bias"):
            assert shape == (4,)
        elif result.name in ("mean", "rstd"):
            assert shape == (2, 3, 1)
        else:
            assert shape == (2, 3, 4)
    shapes = {3: (2, 3, 1, 4), 2: (2, 3), 1: (1, 4)}  # by the dimensions that they had
    arrays = {name: array.reshape(shapes[array.ndim]) for name, array in given_to(op).items()}
    call = bind(op.name, arrays, (1, 4))
    for result in spec_of(call).results:
        if result.name in ("mean", "rstd"):
            assert call.shape_of(op.named(result.name)) == (2, 3, 1, 1)


@every_op
def test_results_are_in_atens_order(op: Op) -> None:
    made = results_of(op, {"output": 1, "grad_weight": 2, "rstd": 3})
    assert made._asdict() == {
        name: {"output": 1, "grad_weight": 2, "rstd": 3}.get(name) for name in made._fields
    }
    assert type(made) is results_type(op)
    for result in op.results:
        assert result.name in made._fields


# --- arrays of a GPU ----------------------------------------------------------------------------


def on_gpu(op: Op, *, device: str = "cuda://0") -> dict[str, GpuArray]:
    return {
        name: GpuArray(array.shape, array.dtype, device, contiguous=False)
        for name, array in given_to(op).items()
    }


@every_op
def test_facts_about_arrays_of_a_gpu_are_bound_as_they_are(op: Op) -> None:
    """Their shapes as [M, N]; nothing is copied, and nothing else changes."""
    given: dict[str, Any] = dict(on_gpu(op))
    call = bind(op.name, given, 4)
    for name, array in call.arrays.items():
        kind = (6, 4) if name in CELLS else (4,) if name in ("weight", "bias") else (6,)
        assert array == replace(given[name], shape=kind)
        assert array.ndim == len(kind)


@every_op
def test_all_arrays_are_on_one_device(op: Op) -> None:
    for name in given_to(op):
        if name == op.data.name:
            continue
        given: dict[str, Any] = dict(on_gpu(op))
        given[name] = replace(given[name], device="cuda://1")
        said = ", ".join(f"{key} on {array.device}" for key, array in given.items())
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared below
            bind(op.name, given, 4)
        expected = f"{op.data.name}: expected all arrays on one device, got {said}"
        assert str(refused.value) == expected


# --- errors -------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """What is wrong about a call.

    Attributes:
        op: The op.
        without: Arguments that are missing.
        arrays: Arguments in place of good ones.
        options: Options.
        error: What is raised.
        said: The whole message.
    """

    op: str
    without: tuple[str, ...]
    arrays: dict[str, Any]
    options: dict[str, Any]
    error: type[Exception]
    said: str


LN, RN, LNB, RNB = "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"
X = np.ones((2, 3, 4), np.float32)
MOST = GpuArray((MOST_ROWS, 1), np.dtype(np.float32), "cuda://0", contiguous=True)
BAD: dict[str, Bad] = {
    "neither input nor output": Bad(
        RNB,
        ("input", "output"),
        {},
        {},
        TypeError,
        "input: expected an array, or output in its place, got None",
    ),
    "input and output": Bad(
        RNB, (), {"output": X}, {}, ValueError, "output: expected None beside input, got both"
    ),
    "a mean beside an output": Bad(
        LNB,
        ("input",),
        {"output": X},
        {},
        ValueError,
        "mean: expected None beside output, which has no use for it, got one",
    ),
    "no rstd beside an output": Bad(
        RNB,
        ("input", "rstd"),
        {"output": X},
        {},
        ValueError,
        "rstd: expected an array beside output, from which it cannot be recomputed, got None",
    ),
    "no mean": Bad(
        LNB,
        ("mean",),
        {},
        {},
        ValueError,
        "mean: expected both mean and rstd or neither, got only rstd",
    ),
    "no rstd": Bad(
        LNB,
        ("rstd",),
        {},
        {},
        ValueError,
        "rstd: expected both mean and rstd or neither, got only mean",
    ),
    "no input": Bad(
        LN, ("input",), {}, {}, TypeError, "input: expected a NumPy array, got NoneType"
    ),
    "a list": Bad(
        LN, (), {"weight": [1.0]}, {}, TypeError, "weight: expected a NumPy array, got list"
    ),
    "a needed array": Bad(
        RNB,
        ("grad_output",),
        {},
        {},
        TypeError,
        "grad_output: expected a NumPy array, got NoneType",
    ),
    "another width": Bad(
        LN,
        (),
        {"input": X[..., :3]},
        {},
        ValueError,
        "input: expected a shape that ends in normalized_shape (4,), got (2, 3, 3)",
    ),
    "more dimensions": Bad(
        LN,
        (),
        {},
        {"normalized_shape": (9, 2, 3, 4)},
        ValueError,
        "input: expected a shape that ends in normalized_shape (9, 2, 3, 4), got (2, 3, 4)",
    ),
    "another shape": Bad(
        RNB,
        (),
        {"rstd": X[..., 0, 0]},
        {},
        ValueError,
        "rstd: expected shape (2, 3) or (2, 3, 1), got (2,)",
    ),
    "a weight's shape": Bad(
        RN, (), {"weight": X}, {}, ValueError, "weight: expected shape (4,), got (2, 3, 4)"
    ),
    "too many rows": Bad(
        RN,
        ("residual", "weight"),
        {"input": replace(MOST, shape=(MOST_ROWS + 1, 1))},
        {"normalized_shape": 1},
        ValueError,
        f"input: expected at most {MOST_ROWS} rows, got {MOST_ROWS + 1}",
    ),
    "an integer": Bad(
        RN,
        (),
        {"input": X.astype(np.int8)},
        {},
        TypeError,
        "input: expected an element type of bf16, f16, f32, f64, got int8",
    ),
    "a statistic's type": Bad(
        RNB,
        (),
        {"rstd": X[..., 0].astype(np.float64)},
        {},
        TypeError,
        "rstd: expected element type f32, got float64",
    ),
    "a type that does not mix": Bad(
        RN,
        (),
        {"residual": X.astype(np.float64)},
        {},
        ValueError,
        "residual: expected bf16 or f16 or f32 beside an input or output of f32, got f64",
    ),
    "an offset of nothing": Bad(
        RN,
        ("weight",),
        {},
        {"weight_offset": 0.5},
        ValueError,
        "weight_offset: expected 0.0 without a weight, got 0.5",
    ),
    "an offset that is none": Bad(
        RN, (), {}, {"weight_offset": "1"}, TypeError, "weight_offset: expected a float, got str"
    ),
    "an eps that is none": Bad(
        RN, (), {}, {"eps": "1"}, TypeError, "eps: expected a float, got str"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_error(name: str) -> None:
    bad = BAD[name]
    arrays = given_to(OPS[bad.op], *bad.without) | bad.arrays
    options = {"normalized_shape": 4, **bad.options}
    with pytest.raises(bad.error) as raised:
        bind(bad.op, arrays, **options)
    assert str(raised.value) == bad.said


def test_the_most_rows_are_fine() -> None:
    assert bind("rms_norm", {"input": MOST}, 1).rows == MOST_ROWS


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_options_that_are_not_given(op: Op) -> None:
    mask = (True,) * len(op.masked)
    eps = 1e-5 if op.centres else None
    assert check_options(op, 4, mask, eps) == Options(op, (4,), mask, 0.0, eps)
    assert check_options(op, [4, 5], mask, 1, 2) == Options(op, (4, 5), mask, 2.0, 1.0)
    if not op.masked:
        assert check_options(op, 4, eps=1e-5).output_mask == ()


def test_a_mask_that_was_not_checked_is_no_mask() -> None:
    op = OPS["rms_norm_backward"]
    options = check_options(op, 4, (True, True))._replace(output_mask=(True,))
    with pytest.raises(ValueError, match="zip"):
        bind_arrays(given_to(op), options)


def test_arrays_may_be_written_to_unless_their_library_says_so() -> None:
    assert MOST.writable is True


def test_gradients_of_an_output_come_alone_or_in_a_list() -> None:
    """Each in its place, and None for those that are not there."""
    four = [object() for _ in range(4)]
    assert gradients_of(four[0]) == (four[0], None, None, None)
    assert gradients_of(None) == (None, None, None, None)
    for count in range(1, 5):
        expected = (*four[:count], *[None] * (4 - count))
        assert gradients_of(four[:count]) == expected
        assert gradients_of(tuple(four[:count])) == expected
        assert tuple(named_gradients(four[:count]).values()) == expected
    assert list(named_gradients(None)) == [
        "grad_output",
        "grad_output_2",
        "grad_output_3",
        "grad_output_4",
    ]


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_or_too_many_gradients_of_an_output(count: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^grad_output: expected .* from 1 to 4 .*, got {count}$"
    ):
        gradients_of([None] * count)


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (
            ["f4", None, "f4"],
            "grad_output_2: expected an array, because grad_output_3 is one, got None",
        ),
        (
            ["f4", None, None, "f4"],
            "grad_output_3: expected an array, because grad_output_4 is one, got None",
        ),
        (
            ["f4", "f4", "f2"],
            "grad_output_3: expected the element type of grad_output, f32, got f16",
        ),
    ],
)
def test_gradients_of_an_output_have_no_gap_and_one_type(
    types: list[str | None], said: str
) -> None:
    arrays: dict[str, Any] = arrays_of((3,), (4,))
    dy = arrays.pop("grad_output")
    given = named_gradients([None if name is None else dy.astype(name) for name in types])
    with pytest.raises((TypeError, ValueError)) as raised:
        bound(arrays | given, (4,))
    assert str(raised.value) == said


# --- sets of weights, gates, types of outputs -----------------------------------------------

SETS = {"input": np.ones((6, 2, 4), np.float32), "weight": np.ones((3, 2, 4), np.float32)}


def test_sets_of_weights_are_bound() -> None:
    call = bind("rms_norm", SETS, (2, 4), eps=1e-5, rows_per_set=2)
    assert call.sets == (3, 2)
    assert call.arrays["weight"].shape == (3, 8)
    assert spec_of(call).weight_sets
    assert bind("rms_norm", SETS, (2, 4), eps=1e-5, rows_per_set=9).sets == (3, 6)  # M rows
    grad = {**SETS, "grad_output": SETS["input"]}
    backward = bind("rms_norm_backward", grad, (2, 4), rows_per_set=2)
    family = spec_of(backward).family
    shapes = {r.name: backward.shape_of(family.named(r.name)) for r in spec_of(backward).results}
    assert shapes == {"grad_input": (6, 2, 4), "grad_weight": (3, 2, 4)}


@pytest.mark.parametrize("number", [1, MOST_ROWS])
def test_the_fewest_and_the_most_sets(number: int) -> None:
    x, weight = (GpuArray((n, 4), np.dtype("f4"), "cuda://0", True) for n in (6, number))
    call = bind("rms_norm", {"input": x, "weight": weight}, 4, eps=1e-5, rows_per_set=1)
    assert call.sets == (number, 1)


def test_one_set_is_no_dimension_of_the_weight() -> None:
    plain = {"input": SETS["input"], "weight": np.ones((2, 4), np.float32)}
    for rows_per_set in (None, 1):
        call = bind("rms_norm", plain, (2, 4), eps=1e-5, rows_per_set=rows_per_set)
        assert call.sets is None
        assert not spec_of(call).weight_sets


@pytest.mark.parametrize(
    ("arrays", "rows_per_set", "said"),
    [
        ({}, 0, "rows_per_set: expected an int >= 1, got 0"),
        ({}, "2", "rows_per_set: expected an int, got str"),
        ({}, None, "weight: expected shape (2, 4), got (3, 2, 4)"),
        (
            {"weight": np.ones((2, 4), np.float32)},
            2,
            "rows_per_set: expected 1 where weight has no sets, and is not (G, 2, 4), got 2 and "
            "weight (2, 4)",
        ),
        (
            {"weight": None},
            2,
            "rows_per_set: expected 1 where weight has no sets, and is not (G, 2, 4), got 2 and "
            "weight None",
        ),
        (
            {"weight": np.ones((0, 2, 4), np.float32)},
            1,
            f"weight: expected from 1 to {MOST_ROWS} sets, got shape (0, 2, 4)",
        ),
        (
            {"weight": GpuArray((MOST_ROWS + 1, 2, 4), np.dtype("f4"), "cuda://0", True)},
            1,
            f"weight: expected from 1 to {MOST_ROWS} sets, got shape ({MOST_ROWS + 1}, 2, 4)",
        ),
        (
            {"bias": np.ones((2, 4), np.float32)},
            1,
            "bias: expected shape (3, 2, 4), that of weight, got (2, 4)",
        ),
        (
            {"weight": None, "bias": np.ones((3, 2, 4), np.float32)},
            1,
            "bias: expected shape (2, 4) without a weight, got (3, 2, 4)",
        ),
        (
            {"weight": np.ones((2, 4), np.float32), "bias": np.ones((3, 2, 4), np.float32)},
            1,
            "bias: expected shape (2, 4), that of weight, got (3, 2, 4)",
        ),
        (
            {"weight": np.ones((2, 4), np.float32), "bias": np.ones(4, np.float32)},
            1,
            "bias: expected shape (2, 4), got (4,)",
        ),
        (
            {"weight": np.ones((3, 4, 2), np.float32)},
            1,
            "weight: expected shape (2, 4), got (3, 4, 2)",
        ),
    ],
)
def test_sets_that_do_not_fit(arrays: dict[str, Any], rows_per_set: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        bind("layer_norm", SETS | arrays, (2, 4), eps=1e-5, rows_per_set=rows_per_set)
    assert str(raised.value) == said


GATED_CALL = {name: np.ones((3, 4), np.float32) for name in ("grad_output", "input", "gate")}


@pytest.mark.parametrize(("gate_first", "gate"), [(False, "after"), (True, "before")])
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_gate_is_in_the_spec(op: Op, gate_first: bool, gate: str) -> None:
    call = bind(op.name, GATED_CALL, 4, gate_first=gate_first)
    spec = spec_of(call)
    assert (spec.gate, spec.gate_dtype, spec.family.name) == (gate, None, op.name)
    assert call.arrays["gate"].shape == (3, 4)
    usual = LayerNormGrads if op.centres else RMSNormGrads
    assert results_type(spec.family) is (GatedNormGrads if op.is_backward else NormOutput)
    assert results_type(op) is (usual if op.is_backward else NormOutput)
    half = GATED_CALL | {"gate": GATED_CALL["gate"].astype(np.float16)}
    assert spec_of(bind(op.name, half, 4)).gate_dtype == "f16"


@pytest.mark.parametrize(
    ("arrays", "gate_first", "said"),
    [
        ({}, 1, "gate_first: expected a bool, got 1"),
        ({}, None, "gate_first: expected a bool, got None"),
        ({"gate": None}, None, "gate_first: expected a bool, got None"),
        ({"gate": None}, True, "gate_first: expected False without a gate, got True"),
        ({"residual": 1}, False, "residual: expected None beside gate, got one"),
        ({"grad_residual": 1}, True, "grad_residual: expected None beside gate, got one"),
        ({"output": 1}, False, "output: expected None beside gate, got one"),
        (
            {MORE_GRAD_OUTPUTS[0].name: 1},
            False,
            "grad_output: expected one array beside gate, got more",
        ),
        ({"gate": np.ones((3, 5), np.float32)}, False, "gate: expected shape (3, 4), got (3, 5)"),
    ],
)
def test_what_does_not_go_with_a_gate(arrays: dict[str, Any], gate_first: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        bind("layer_norm_backward", GATED_CALL | arrays, 4, gate_first=gate_first)
    assert str(raised.value) == said


def test_without_a_gate_there_is_none_to_come_first() -> None:
    op = OPS["layer_norm"]
    assert variant_of(op, GATED_CALL | {"gate": None}) is op
    assert variant_of(op, {}, False) is op
    assert variant_of(op, GATED_CALL) is GATED[Gate.AFTER][op.name]


def test_what_nobody_mentions_is_not_there() -> None:
    assert RMSNormGrads(1, 2).grad_bias is None
    assert BoundCall(None, (), {}, has_bias=False).sets is None
    op = OPS["rms_norm_backward"]
    asked = asked_of(op, (True, True), has_weight=True, has_bias=True)
    assert asked == (True, True, False)
    assert all(isinstance(each, bool) for each in asked)


def test_the_type_of_an_output() -> None:
    x = {"input": np.ones((3, 4), np.float32)}
    assert spec_of(bind("rms_norm", x, 4, output_dtype="bf16")).output_dtype == "bf16"
    assert spec_of(bind("rms_norm", x, 4)).output_dtype is None
    options = check_options(OPS["rms_norm"], 4, eps=1e-5, output_dtype=ml_dtypes.bfloat16)
    assert options.output_dtype == "bf16"
    with pytest.raises((TypeError, ValueError), match=r"^output_dtype: expected .* got "):
        check_options(OPS["rms_norm"], 4, eps=1e-5, output_dtype="i8")
    with pytest.raises(ValueError, match=r"^output_dtype: "):
        bind("rms_norm", x, 4, output_dtype="f64")


@pytest.mark.parametrize("op", WITH_COPY, ids=lambda op: op.name)
def test_a_second_result_is_the_ops(op: Op) -> None:
    """A copy of the gradient of the input, or its sum over rows, and not both."""
    copied = check_options(op, 4, None, 1e-5, grad_input_copy_dtype="bf16")
    assert (copied.op, copied.result_dtype) == (WITH_COPY[op], "bf16")
    summed = check_options(op, 4, None, 1e-5, grad_input_sum_dtype="f32")
    assert (summed.op, summed.result_dtype) == (WITH_SUM[op], "f32")
    assert check_options(op, 4, None, 1e-5).op == op


SECONDS = ("grad_input_copy_dtype", "grad_input_sum_dtype")


def test_one_second_result_at_most() -> None:
    both: dict[str, Any] = dict.fromkeys(SECONDS, "f32")
    with pytest.raises(ValueError, match=r"^grad_input_sum_dtype: expected None beside"):
        check_options(LAYER_NORM_BACKWARD, 4, None, 1e-5, **both)


@pytest.mark.parametrize("name", SECONDS)
def test_a_second_result_of_an_op_that_has_none(name: str) -> None:
    of_two_bytes: dict[str, Any] = {name: "bf16"}
    of_nothing: dict[str, Any] = {name: "i8"}
    for op, said in (
        (OPS["layer_norm"], "expected None for layer_norm, got bf16"),
        (GATED[Gate.AFTER]["rms_norm_backward"], "expected None with a gate, got bf16"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: {said}$"):
            check_options(op, 4, None, 1e-5, **of_two_bytes)
    with pytest.raises(ValueError, match=f"^{name}: expected one of .*, got 'i8'$"):
        check_options(LAYER_NORM_BACKWARD, 4, None, 1e-5, **of_nothing)


@pytest.mark.parametrize("name", SECONDS)
def test_a_second_result_is_in_the_spec(name: str) -> None:
    arrays = arrays_of((3,), (4,))
    call = bound(arrays, (4,), **{name: "bf16"})
    assert getattr(spec_of(call), name) == "bf16"
    with pytest.raises(ValueError, match=r"^output_mask: expected at least one gradient"):
        bound(arrays, (4,), output_mask=(False, False, False), **{name: "bf16"})
