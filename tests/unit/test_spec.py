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
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.spec import TensorType

MASKS = tuple(mask for mask in itertools.product((True, False), repeat=3) if any(mask))


def valid_spec(**fields: Any) -> NormSpec | None:
    """The spec of these fields, or None where they contradict each other."""
    try:
        return NormSpec(**fields)
    except ValueError:
        return None


# Few values, chosen to collide in a careless name: 1x12 and 11x2, 1 row and 11, ...
_fields = st.fixed_dictionaries(
    {
        "normalized_shape": st.lists(st.sampled_from((1, 2, 11, 12, 112)), min_size=1, max_size=3),
        "dtype": st.sampled_from(tuple(DTYPES)),
        "grad_output_dtype": st.sampled_from((None, *DTYPES)),
        "weight_dtype": st.sampled_from((None, *DTYPES)),
        "bias_dtype": st.sampled_from((None, *DTYPES)),
        "has_weight": st.booleans(),
        "output_mask": st.sampled_from(MASKS),
        "rows": st.sampled_from((None, 1, 2, 11)),
        "eps": st.sampled_from((None, 0.0, 1.0, 1e-5, 1e-12, 11.0)),
    }
)
specs = _fields.map(lambda fields: valid_spec(**fields)).filter(lambda spec: spec is not None)


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
    types = (None, *DTYPES)
    distinct = {
        spec
        for dtype, dy, weight, bias in itertools.product(DTYPES, types, types, types)
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


@given(specs)
def test_name_is_a_file_name(spec: NormSpec) -> None:
    assert re.fullmatch(r"layer_norm_backward_[a-z0-9_.+-]+", spec.name)


@given(specs)
def test_json_round_trip(spec: NormSpec) -> None:
    assert NormSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"normalized_shape": [8], "colour": "red"}, r"unknown fields \['colour'\]"),
        ({"dtype": "f32"}, "normalized_shape is missing"),
        ({"normalized_shape": [8], "dtype": "f8"}, "dtype: expected one of .*, got 'f8'"),
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
        ({"output_mask": (True, True)}, ValueError, "output_mask: expected three bools"),
        ({"output_mask": (1, 1, 1)}, ValueError, "output_mask: expected three bools"),
        ({"output_mask": "111"}, ValueError, "output_mask: expected three bools"),
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
        ({"eps": "1e-5"}, TypeError, "eps: expected a float, got str"),
        ({"eps": True}, TypeError, "eps: expected a float, got bool"),
    ],
)
def test_rejects(
    fields: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        NormSpec(**{"normalized_shape": 8, **fields})
    assert "\n" not in str(caught.value)
