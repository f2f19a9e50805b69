"""NormSpec: one spelling for what means the same, one name for each meaning."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, OPS, RMS_NORM, RMS_NORM_BACKWARD, Op
from iree_lnbwd.ops.spec import TensorType

MASKS = tuple(mask for mask in itertools.product((True, False), repeat=3) if any(mask))
TYPES = (None, *DTYPES)
LAYER_NORM_FIELDS: dict[str, Any] = {"op": LAYER_NORM.name, "eps": 1e-5}
RMS_NORM_FIELDS: dict[str, Any] = {"op": RMS_NORM.name, "eps": 1e-6}
RMS_BACKWARD_FIELDS: dict[str, Any] = {"op": RMS_NORM_BACKWARD.name}


def valid_spec(**fields: Any) -> NormSpec | None:
    """The spec of these fields, or None where they contradict each other."""
    try:
        return NormSpec(**fields)
    except ValueError:
        return None


def fields_of(op: Op, dtype: str) -> st.SearchStrategy[dict[str, Any]]:
    """Few values, chosen to collide in a careless name: 1x12 and 11x2, 1 row and 11, ..."""
    types = [None, *(t for t in DTYPES if DTYPES[t].accumulator == DTYPES[dtype].accumulator)]
    eps = (0.0, 1.0, 1e-5, 1e-12, 11.0)
    shapes = st.lists(st.sampled_from((1, 2, 11, 12, 112)), min_size=1, max_size=3)
    masks = st.tuples(*(st.booleans() for _ in op.gradients))
    biases = (None, False, True) if op.takes_bias else (None, False)

    def with_its_mask(fields: dict[str, Any]) -> dict[str, Any]:
        return (
            fields
            if fields["has_bias"]
            else fields | {"output_mask": fields["output_mask"][: len(op.masked)]}
        )

    return st.fixed_dictionaries(
        {
            "normalized_shape": shapes,
            "dtype": st.just(dtype),
            "grad_output_dtype": st.sampled_from(types if op.is_backward else [None]),
            "output_dtype": st.sampled_from([None] if op.is_backward else types),
            "weight_dtype": st.sampled_from(types),
            "bias_dtype": st.sampled_from(types),
            "has_weight": st.booleans(),
            "output_mask": masks,
            "rows": st.sampled_from((None, 1, 2, 11)),
            "eps": st.sampled_from((None, *eps) if op.is_backward else eps),
            "op": st.just(op.name),
            "has_bias": st.sampled_from(biases),
            "residual_dtype": st.sampled_from(types),
            "weight_offset": st.sampled_from((0.0, 1.0, -1.0, 1e-5)),
        }
    ).map(with_its_mask)


specs = (
    st.tuples(st.sampled_from(tuple(OPS.values())), st.sampled_from(tuple(DTYPES)))
    .flatmap(lambda drawn: fields_of(*drawn))
    .map(lambda fields: valid_spec(**fields))
    .filter(lambda spec: spec is not None)
)


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ({"normalized_shape": 8}, {"normalized_shape": (8,)}),
        ({"normalized_shape": [2, 4]}, {"normalized_shape": (2, 4)}),
        ({"normalized_shape": (np.int64(8),)}, {"normalized_shape": (8,)}),
        ({"dtype": "f32", "grad_output_dtype": "f32"}, {"dtype": "f32"}),
        ({"dtype": "f16", "weight_dtype": "f16"}, {"dtype": "f16"}),
        ({"dtype": "bf16", "bias_dtype": "bf16"}, {"dtype": "bf16"}),
        ({"weight_dtype": "bf16", "bias_dtype": "bf16"}, {"weight_dtype": "bf16"}),
        ({"has_weight": False}, {"has_weight": False, "output_mask": (True, False, True)}),
        ({"output_mask": [True, False, True]}, {"output_mask": (True, False, True)}),
        (
            {"output_mask": (True, True, False), "bias_dtype": "bf16"},
            {"output_mask": (True, True, False)},
        ),
        ({"rows": np.int64(3)}, {"rows": 3}),
        ({"eps": 1}, {"eps": 1.0}),
        ({"eps": -0.0}, {"eps": 0.0}),
        ({"op": "layer_norm_backward", "has_bias": False}, {}),
        ({"weight_offset": 1}, {"weight_offset": 1.0}),
        ({"weight_offset": -0.0}, {}),
        ({"weight_offset": np.float32(-0.5)}, {"weight_offset": -0.5}),
        (LAYER_NORM_FIELDS, LAYER_NORM_FIELDS | {"has_bias": True, "output_mask": ()}),
        (
            LAYER_NORM_FIELDS | {"has_bias": False, "bias_dtype": "bf16"},
            LAYER_NORM_FIELDS | {"has_bias": False},
        ),
        (LAYER_NORM_FIELDS | {"bias_dtype": "f32"}, LAYER_NORM_FIELDS),
        (RMS_NORM_FIELDS | {"bias_dtype": "bf16", "has_bias": False}, RMS_NORM_FIELDS),
        (RMS_BACKWARD_FIELDS, RMS_BACKWARD_FIELDS | {"output_mask": (True, True)}),
        (
            RMS_BACKWARD_FIELDS | {"has_weight": False},
            RMS_BACKWARD_FIELDS | {"has_weight": False, "output_mask": (True, False)},
        ),
        (
            RMS_BACKWARD_FIELDS
            | {"has_bias": True, "output_mask": (False, True, False), "bias_dtype": "f16"},
            RMS_BACKWARD_FIELDS | {"output_mask": (False, True)},
        ),
        (
            RMS_BACKWARD_FIELDS | {"has_bias": True},
            RMS_BACKWARD_FIELDS | {"has_bias": True, "output_mask": (True, True, True)},
        ),
    ],
)
def test_same_meaning_is_equal(spelling: dict[str, Any], canonical: dict[str, Any]) -> None:
    one = NormSpec(**{"normalized_shape": 8, **spelling})
    other = NormSpec(**{"normalized_shape": 8, **canonical})
    assert one == other
    assert hash(one) == hash(other)
    assert one.name == other.name
    assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())


@given(specs, specs)
def test_names_are_as_different_as_specs(one: NormSpec, other: NormSpec) -> None:
    assert (one == other) == (one.name == other.name)


def test_names_of_all_options_are_different() -> None:
    distinct = {
        spec
        for dtype, dy, weight, bias in itertools.product(DTYPES, TYPES, TYPES, TYPES)
        for has_weight, mask in itertools.product((True, False), MASKS)
        for rows, eps in itertools.product((None, 1), (None, 1e-5))
        if (
            spec := valid_spec(
                normalized_shape=8,
                dtype=dtype,
                grad_output_dtype=dy,
                weight_dtype=weight,
                bias_dtype=bias,
                has_weight=has_weight,
                output_mask=mask,
                rows=rows,
                eps=eps,
            )
        )
    }
    # 27 combinations of three half and single types for dy, x and weight, and bias where asked.
    assert len(distinct) > 1000
    assert len({spec.name for spec in distinct}) == len(distinct)


def test_names_of_the_familys_options_are_different() -> None:
    """Among them a residual of the input's type and of its own, and a bias that is not there."""
    distinct = {
        spec
        for op, dtype, residual, offset in itertools.product(OPS, DTYPES, TYPES, (0.0, 1.0, -0.5))
        for has_weight, has_bias in itertools.product((True, False), (True, False))
        for eps, bias_dtype in itertools.product((None, 1e-5), (None, "f32"))
        if (
            spec := valid_spec(
                normalized_shape=8,
                dtype=dtype,
                op=op,
                has_weight=has_weight,
                has_bias=has_bias,
                bias_dtype=bias_dtype,
                residual_dtype=residual,
                weight_offset=offset,
                eps=eps,
            )
        )
    }
    assert {spec.op for spec in distinct} == set(OPS)
    assert len(distinct) > 400
    assert len({spec.name for spec in distinct}) == len(distinct)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "layer_norm_backward_n8_f32"),
        ({"residual_dtype": "f32"}, "layer_norm_backward_n8_f32_residual"),
        ({"residual_dtype": "bf16"}, "layer_norm_backward_n8_f32_residualbf16"),
        ({"weight_offset": 1.0}, "layer_norm_backward_n8_f32_offset1.0"),
        (LAYER_NORM_FIELDS, "layer_norm_n8_f32_eps1e-05"),
        (LAYER_NORM_FIELDS | {"has_bias": False}, "layer_norm_n8_f32_nobias_eps1e-05"),
        (RMS_NORM_FIELDS | {"has_weight": False}, "rms_norm_n8_f32_noweight_eps1e-06"),
        (RMS_BACKWARD_FIELDS | {"output_mask": (True, False)}, "rms_norm_backward_n8_f32_mask10"),
        (RMS_NORM_FIELDS | {"has_bias": True}, "rms_norm_n8_f32_bias_eps1e-06"),
        (RMS_BACKWARD_FIELDS | {"has_bias": True}, "rms_norm_backward_n8_f32_bias"),
        (
            RMS_BACKWARD_FIELDS
            | {"has_bias": True, "bias_dtype": "f16", "output_mask": (True, False, True)},
            "rms_norm_backward_n8_f32_bf16_bias_mask101",
        ),
    ],
)
def test_names_say_what_is_not_usual(fields: dict[str, Any], name: str) -> None:
    assert NormSpec((8,), **fields).name == name


@given(specs)
def test_name_is_a_file_name(spec: NormSpec) -> None:
    assert re.fullmatch(rf"{spec.op}_n[a-z0-9_.+-]+", spec.name)


@given(specs)
def test_json_round_trip(spec: NormSpec) -> None:
    assert NormSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"normalized_shape": [8], "colour": "red"}, r"unknown fields \['colour'\]"),
        ({"dtype": "f32"}, "normalized_shape is missing"),
        ({"normalized_shape": [8], "dtype": "f8"}, "dtype: expected one of .*, got 'f8'"),
        ({"normalized_shape": [8], "op": "batch_norm"}, "op: expected one of .*'batch_norm'"),
    ],
)
def test_from_dict_rejects(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NormSpec.from_dict(values)


def test_arguments_then_storage_for_the_results() -> None:
    spec = NormSpec((16, 64), "bf16", weight_dtype="f32")
    assert [(a.name, str(a)) for a in spec.arguments] == [
        ("grad_output", "?x1024xbf16"),
        ("input", "?x1024xbf16"),
        ("mean", "?xf32"),
        ("rstd", "?xf32"),
        ("weight", "1024xf32"),
        ("grad_input", "?x1024xbf16"),
        ("grad_weight", "1024xf32"),
        ("grad_bias", "1024xf32"),
    ]
    assert spec.arguments[-3:] == spec.results


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"eps": 1e-5}, "grad_output input weight grad_input grad_weight grad_bias"),
        ({"has_weight": False}, "grad_output input mean rstd grad_input grad_bias"),
        (
            {"output_mask": (False, True, False)},
            "grad_output input mean rstd weight grad_weight",
        ),
        (
            {"residual_dtype": "f32", "eps": 1e-5},
            "grad_output input weight grad_residual grad_input grad_weight grad_bias",
        ),
        (RMS_BACKWARD_FIELDS, "grad_output input rstd weight grad_input grad_weight"),
        (
            LAYER_NORM_FIELDS | {"residual_dtype": "f32"},
            "input residual weight bias output mean rstd residual_output",
        ),
        (LAYER_NORM_FIELDS | {"has_bias": False}, "input weight output mean rstd"),
        (LAYER_NORM_FIELDS | {"has_weight": False}, "input bias output mean rstd"),
        (RMS_NORM_FIELDS, "input weight output rstd"),
    ],
)
def test_arguments_are_what_the_options_leave(fields: dict[str, Any], names: str) -> None:
    assert [a.name for a in NormSpec((8,), **fields).arguments] == names.split()


def test_element_types() -> None:
    spec = NormSpec((8,), "f32", grad_output_dtype="f16", weight_dtype="bf16", bias_dtype="f32")
    assert (spec.dy_dtype, spec.dtype, spec.gamma_dtype, spec.beta_dtype, spec.acc_dtype) == (
        "f16",
        "f32",
        "bf16",
        "f32",
        "f32",
    )
    assert NormSpec((8,), "f64").acc_dtype == "f64"
    assert NormSpec((8,), "f16").acc_dtype == "f32"
    forward = NormSpec((8,), "bf16", residual_dtype="f32", bias_dtype="f16", **LAYER_NORM_FIELDS)
    assert [(t.name, t.dtype) for t in forward.arguments] == [
        ("input", "bf16"),
        ("residual", "f32"),
        ("weight", "bf16"),
        ("bias", "f16"),
        ("output", "bf16"),
        ("mean", "f32"),
        ("rstd", "f32"),
        ("residual_output", "f32"),
    ]


def test_fixed_rows_show_in_the_types() -> None:
    spec = NormSpec((8,), rows=3)
    assert spec.arguments[0] == TensorType("grad_output", "f32", (3, 8))
    assert spec.arguments[2] == TensorType("mean", "f32", (3,))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"normalized_shape": ()}, ValueError, r"normalized_shape: .* got \(\)"),
        ({"normalized_shape": 0}, ValueError, "normalized_shape: .*>= 1, got 0"),
        ({"normalized_shape": (4, -1)}, ValueError, r"normalized_shape: .*>= 1, got \(4, -1\)"),
        ({"normalized_shape": (4.0,)}, ValueError, r"normalized_shape: .* got \(4.0,\)"),
        ({"normalized_shape": True}, TypeError, "normalized_shape: .* got bool"),
        ({"normalized_shape": "8"}, TypeError, "normalized_shape: .* got str"),
        ({"normalized_shape": None}, TypeError, "normalized_shape: .* got NoneType"),
        ({"normalized_shape": np.array([8])}, (TypeError, ValueError), "normalized_shape: "),
        ({"dtype": "float32"}, ValueError, "dtype: expected one of bf16, f16, f32, f64, got 'fl"),
        ({"dtype": None}, ValueError, "dtype: .* got None"),
        ({"dtype": np.float32}, ValueError, "dtype: .* got <class"),
        ({"grad_output_dtype": "i8"}, ValueError, "grad_output_dtype: .* got 'i8'"),
        ({"weight_dtype": "i8"}, ValueError, "weight_dtype: .* got 'i8'"),
        ({"bias_dtype": "i8"}, ValueError, "bias_dtype: .* got 'i8'"),
        (
            {"dtype": "f64", "weight_dtype": "f32"},
            ValueError,
            "weight_dtype: expected f64 .* got f32",
        ),
        ({"has_weight": False, "weight_dtype": "f16"}, ValueError, "weight_dtype: .* got 'f16'"),
        ({"has_weight": "no"}, TypeError, "has_weight: expected a bool, got 'no'"),
        ({"output_mask": (False,) * 3}, ValueError, "output_mask: expected at least one"),
        ({"output_mask": (True, True)}, ValueError, "output_mask: expected 3 bools"),
        ({"output_mask": (1, 1, 1)}, ValueError, "output_mask: expected 3 bools"),
        ({"output_mask": "111"}, ValueError, "output_mask: expected 3 bools"),
        (
            {"has_weight": False, "output_mask": (False, True, False)},
            ValueError,
            r"output_mask: .* \(without a weight there is no grad_weight\)",
        ),
        ({"rows": -1}, ValueError, "rows: expected None or an int from 1 to .*, got -1"),
        ({"rows": 0}, ValueError, "rows: expected None or an int from 1 to .*, got 0"),
        ({"rows": 2**31}, ValueError, "rows: expected None or an int from 1 to .*, got 2147483648"),
        ({"normalized_shape": (2**16, 2**15)}, ValueError, "normalized_shape: expected at most"),
        ({"rows": True}, ValueError, "rows: .* got True"),
        ({"rows": 2.5}, ValueError, "rows: .* got 2.5"),
        ({"eps": float("nan")}, ValueError, "eps: expected a finite number, got nan"),
        ({"eps": float("inf")}, ValueError, "eps: expected a finite number, got inf"),
        ({"eps": 10**400}, ValueError, "eps: expected a finite number, got inf"),
        (
            {"eps": 1e39},
            ValueError,
            r"eps: expected 0, or a number from 1.4e-45 to .*, got 1e\+39",
        ),
        ({"eps": 7e-46}, ValueError, "eps: expected 0, or .* for sums of f32, got 7e-46"),
        ({"eps": -1e-46, "dtype": "bf16"}, ValueError, "eps: expected 0, or .*, got -1e-46"),
        ({"normalized_shape": (1,) * 65}, ValueError, "normalized_shape: expected at most 64 ints"),
        ({"dtype": "fp16"}, ValueError, r"dtype: .*, got 'fp16'. Did you mean f16\?$"),
        ({"dtype": np.float32}, ValueError, r"dtype: .*float32.*. Did you mean f32\?$"),
        ({"weight_dtype": "half"}, ValueError, r"weight_dtype: .* Did you mean f16\?$"),
        ({"eps": "1e-5"}, TypeError, "eps: expected a float, got str"),
        ({"eps": True}, TypeError, "eps: expected a float, got bool"),
        ({"op": "batch_norm"}, ValueError, "op: expected one of layer_norm, .*got 'batch_norm'"),
        ({"op": None}, ValueError, "op: expected one of layer_norm, rms_norm, .*got None"),
        ({"op": LAYER_NORM}, ValueError, "op: expected one of layer_norm, .*got Op"),
        ({"op": "layer_norm"}, ValueError, "eps: expected a number for layer_norm, got None"),
        ({"op": "rms_norm"}, ValueError, "eps: expected a number for rms_norm, got None"),
        (
            LAYER_NORM_FIELDS | {"output_mask": (True, True, True)},
            ValueError,
            r"output_mask: expected 0 bools, got \(True, True, True\)",
        ),
        (
            RMS_BACKWARD_FIELDS | {"output_mask": (True, True, True)},
            ValueError,
            r"output_mask: expected 2 bools, got \(True, True, True\)",
        ),
        (
            RMS_BACKWARD_FIELDS | {"output_mask": (False, False)},
            ValueError,
            "output_mask: expected at least one",
        ),
        ({"output_mask": np.ones(3)}, ValueError, "output_mask: expected 3 bools, got array"),
        (
            RMS_NORM_FIELDS | {"grad_output_dtype": "f16"},
            ValueError,
            "grad_output_dtype: expected None for rms_norm, got 'f16'",
        ),
        (
            LAYER_NORM_FIELDS | {"has_bias": 1},
            TypeError,
            "has_bias: expected a bool or None, got 1",
        ),
        ({"has_bias": True}, ValueError, "has_bias: expected .* for layer_norm_backward, got True"),
        (
            RMS_BACKWARD_FIELDS | {"has_bias": True, "output_mask": (True, True)},
            ValueError,
            r"output_mask: expected 3 bools, got \(True, True\); grad_bias is one .* with a bias",
        ),
        ({"residual_dtype": "i8"}, ValueError, "residual_dtype: expected one of .*got 'i8'"),
        ({"residual_dtype": True}, ValueError, "residual_dtype: expected one of .*got True"),
        ({"residual_dtype": "f64"}, ValueError, "residual_dtype: expected .* of f32, got f64"),
        (
            LAYER_NORM_FIELDS | {"dtype": "f64", "residual_dtype": "f32"},
            ValueError,
            "residual_dtype: expected f64 beside an input or output of f64, got f32",
        ),
        ({"weight_offset": "1"}, TypeError, "weight_offset: expected a float, got str"),
        ({"weight_offset": None}, TypeError, "weight_offset: expected a float, got NoneType"),
        ({"weight_offset": True}, TypeError, "weight_offset: expected a float, got bool"),
        (
            {"weight_offset": float("nan")},
            ValueError,
            "weight_offset: expected a finite number, got nan",
        ),
        (
            {"weight_offset": 1.0, "has_weight": False},
            ValueError,
            "weight_offset: expected 0.0 without a weight, got 1.0",
        ),
    ],
)
def test_rejects(
    fields: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        NormSpec(**{"normalized_shape": 8, **fields})
    assert "\n" not in str(caught.value)
