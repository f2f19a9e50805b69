"""An output of another element type than the input: forwards, on every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import (
    assert_all_forms_right,
    assert_right_in_emulation,
    assert_same_bits,
    checked,
    normal,
    random_generator,
)

import iree_lnbwd
from iree_lnbwd import NormSpec, reference, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM, RMS_NORM
from iree_lnbwd.verification import matrix

FORWARDS = (LAYER_NORM.name, RMS_NORM.name)
# Of the input, and of the output.
MIXTURES = (
    *(("f32", "bf16"), ("f32", "f16"), ("bf16", "f32"), ("f16", "f32")),
    *(("bf16", "f16"), ("f16", "bf16")),
)
MODULES = list(matrix.typed_outputs())


def _specs() -> Iterator[NormSpec]:
    for op in FORWARDS:
        of: dict[str, Any] = {"op": op, "eps": 1e-5}
        for dtype, output in MIXTURES:
            yield NormSpec((40,), dtype, output_dtype=output, **of)
        for residual in ("f32", "bf16", "f16"):
            yield NormSpec((7,), "f32", output_dtype="bf16", residual_dtype=residual, **of)
            yield NormSpec((300,), "bf16", output_dtype="f32", residual_dtype=residual, **of)
        yield NormSpec((1,), "f32", output_dtype="bf16", weight_dtype="f16", **of)
        yield NormSpec((33,), "f32", output_dtype="f16", has_weight=False, **of)
        yield NormSpec((8, 5), "f32", output_dtype="bf16", weight_offset=1.0, **of)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", list(_specs()), ids=lambda spec: spec.name)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    "spec", [spec for spec in MODULES if spec.columns <= 4096], ids=lambda spec: spec.name
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 7, adversarial=9)


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [1, 7, 64, 769, 4096])
@pytest.mark.parametrize(("dtype", "output"), MIXTURES)
@pytest.mark.parametrize("op", FORWARDS)
def test_any_number_of_rows_and_every_width(op: str, dtype: str, output: str, columns: int) -> None:
    rng = random_generator()
    weight = normal(rng, dtype, (columns,), scale=0.5, offset=1)
    for rows in (0, 1, 3, 300 if columns < 769 else 40):
        x = normal(rng, dtype, (rows, columns), scale=2, offset=0.5)
        found = checked(op, columns, {"input": x, "weight": weight}, eps=1e-5, output_dtype=output)
        assert found.output.dtype == DTYPES[output].numpy


@pytest.mark.drawn
@pytest.mark.parametrize("residual", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("op", FORWARDS)
def test_the_output_is_that_of_f32_rounded_once_and_all_else_stays(op: str, residual: str) -> None:
    rng = random_generator()
    x = normal(rng, "f32", (64, 96), scale=2, offset=0.5)
    given: dict[str, Any] = {
        "residual": normal(rng, residual, (64, 96)),
        "weight": normal(rng, "f32", (96,)),
        "bias": normal(rng, "f32", (96,)),
    }
    plain = getattr(iree_lnbwd, op)(x, 96, **given)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        rounded = getattr(iree_lnbwd, op)(x, 96, **given, output_dtype=dtype)
        assert_same_bits(rounded, plain._replace(output=plain.output.astype(dtype)))
        assert rounded.residual_output.dtype == given["residual"].dtype


def test_a_wide_output_is_not_rounded_to_the_type_of_the_input() -> None:
    rng = random_generator()
    x = normal(rng, "bf16", (20, 64))
    narrow = iree_lnbwd.rms_norm(x, 64)
    wide = iree_lnbwd.rms_norm(x, 64, output_dtype="f32")
    assert_same_bits(narrow, wide._replace(output=wide.output.astype(ml_dtypes.bfloat16)))
    exact = reference.rms_norm(x, 64).output
    np.testing.assert_allclose(wide.output, exact, 1e-6)


@pytest.mark.parametrize(
    "said", ["bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], ids=repr
)
def test_a_type_is_said_by_its_name_or_as_numpys(said: Any) -> None:
    x = np.ones((2, 8), np.float32)
    assert iree_lnbwd.layer_norm(x, 8, output_dtype=said).output.dtype == ml_dtypes.bfloat16
    assert iree_lnbwd.layer_norm(x, 8, output_dtype=np.float32).output.dtype == np.float32


def test_numbers_beyond_the_range_of_the_output_become_infinite_and_nan_stays() -> None:
    x = np.array([[1.0, -1.0, 1.0, -1.0], [np.nan, 1.0, 1.0, 1.0]], np.float32)
    weight = np.array([1e5, 1e5, 6e4, 1e-8], np.float32)
    y = iree_lnbwd.rms_norm(x, 4, weight, 0.0, output_dtype="f16").output
    np.testing.assert_array_equal(y[0], np.array([np.inf, -np.inf, 6e4, -0.0], np.float16))
    assert np.isnan(y[1]).all()


ONES = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("dtype", "x", "said"),
    [
        ("bfloat16", ONES, "expected one of .*, got 'bfloat16'. Did you mean bf16"),
        (np.int8, ONES, "expected one of bf16, f16, f32, f64, got "),
        (float, ONES, "expected one of bf16, f16, f32, f64, got "),
        (16, ONES, "expected one of bf16, f16, f32, f64, got 16"),
        ("f64", ONES, "expected bf16 or f16 or f32 beside an input or output of f32, got f64"),
        ("f32", ONES.astype("f8"), "expected f64 beside an input or output of f64, got f32"),
    ],
)
@pytest.mark.parametrize("op", FORWARDS)
def test_what_does_not_fit_is_refused(op: str, dtype: Any, x: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^output_dtype: {said}"):
        getattr(iree_lnbwd, op)(x, 8, output_dtype=dtype)


def test_a_backward_has_no_output() -> None:
    for op in ("layer_norm_backward", "rms_norm_backward"):
        with pytest.raises(ValueError, match=f"^output_dtype: expected None for {op}, got 'bf16'"):
            NormSpec((8,), op=op, output_dtype="bf16")
        assert NormSpec((8,), op=op, output_dtype="f32").output_dtype is None


def test_a_module_has_the_output_that_it_was_compiled_for_and_takes_storage_of_its_type() -> None:
    spec = NormSpec((8,), op=RMS_NORM.name, eps=1e-6, output_dtype="bf16")
    module: Any = runtime.load_built(compiler.build(spec, find_target("host"))[0])
    expected = module(ONES, ONES[0])
    assert expected.output.dtype == ml_dtypes.bfloat16
    out = (np.zeros((2, 8), ml_dtypes.bfloat16), None, np.zeros((2, 1), np.float32), None)
    assert_same_bits(module(ONES, ONES[0], out=out), expected)
    with pytest.raises(TypeError, match=r"output: expected element type bf16, got float32"):
        module(ONES, ONES[0], out=(np.zeros_like(ONES), *out[1:]))


def test_specs_without_it_are_as_they_were() -> None:
    """Their fields and names are those of modules that were kept before."""
    spec = NormSpec((8,), op=RMS_NORM.name, eps=1e-6)
    typed = NormSpec((8,), op=RMS_NORM.name, eps=1e-6, output_dtype="bf16")
    assert spec.output_dtype is None
    assert "output_dtype" not in spec.to_dict()
    assert NormSpec((8,), op=RMS_NORM.name, eps=1e-6, output_dtype="f32") == spec
    assert typed.to_dict() == spec.to_dict() | {"output_dtype": "bf16"}
    for each in (spec, typed):
        assert NormSpec.from_dict(each.to_dict()) == each
    assert "_f32_ybf16_" in typed.name
    assert typed.name.replace("_ybf16", "") == spec.name
