"""A bias of RMS norms: of every op, on every target, against the reference and the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import (
    assert_all_forms_right,
    assert_right_in_emulation,
    random_generator,
)

import iree_lnbwd
from iree_lnbwd import NormSpec, reference, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS, RMS_NORM, RMS_NORM_BACKWARD
from iree_lnbwd.verification import matrix

HOST = find_target("host")
FORWARD: dict[str, Any] = {"op": RMS_NORM.name, "eps": 1e-6, "has_bias": True}
BACKWARD: dict[str, Any] = {"op": RMS_NORM_BACKWARD.name, "has_bias": True}
# Of the input, of the weight, and of the bias.
TYPES = (
    *(("f32", None, None), ("bf16", None, None), ("f16", None, None), ("f64", None, None)),
    *(("f32", "bf16", "f16"), ("f32", "f32", "bf16"), ("bf16", "f32", "f32"), ("f16", None, "f32")),
)


def _specs() -> Iterator[NormSpec]:
    for dtype, weight, bias in TYPES:
        types: Any = {"dtype": dtype, "weight_dtype": weight, "bias_dtype": bias}
        yield NormSpec((40,), **types, **FORWARD, residual_dtype=dtype)
        yield NormSpec((40,), **types, **BACKWARD, residual_dtype=dtype)
        yield NormSpec((40,), **types, **BACKWARD, from_output=True)
    for mask in itertools.product((False, True), repeat=3):
        if mask[2]:
            yield NormSpec((40,), "bf16", **BACKWARD, output_mask=mask)
            yield NormSpec((40,), "bf16", **BACKWARD, output_mask=mask, from_output=True)
    yield NormSpec((40,), "bf16", **BACKWARD, output_mask=(True, True, False), from_output=True)
    yield NormSpec((7,), "f32", **FORWARD, has_weight=False)
    yield NormSpec((7,), "f32", **BACKWARD, has_weight=False, eps=1e-6, grad_outputs=2)
    yield NormSpec((1,), "f32", **BACKWARD, weight_offset=1.0)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", list(_specs()), ids=lambda spec: spec.name)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    "spec",
    [spec for spec in matrix.biased_rms_norms() if spec.columns <= 769],
    ids=lambda spec: spec.name,
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 37, adversarial=7)


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [7, 300])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_adding_a_bias_adds_it_and_changes_no_other_gradient(columns: int, dtype: Any) -> None:
    """To the bit, but for the output, which is rounded once."""
    rng = random_generator()
    x, dy = rng.standard_normal((2, 5, columns)).astype(dtype)
    weight, bias = rng.standard_normal((2, columns)).astype(dtype)
    plain = iree_lnbwd.rms_norm(x, columns, weight)
    biased = iree_lnbwd.rms_norm(x, columns, weight, bias=bias)
    np.testing.assert_array_equal(biased.rstd, plain.rstd)
    exact = reference.rms_norm(x, columns, weight).output + bias.astype(np.float64)
    rounding = 2 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(biased.output.astype(np.float64), exact, rounding, 4 * rounding)
    without = iree_lnbwd.rms_norm_backward(dy, x, columns, plain.rstd, weight)
    grads = iree_lnbwd.rms_norm_backward(dy, x, columns, plain.rstd, weight, bias=bias)
    assert without.grad_bias is None
    np.testing.assert_array_equal(grads.grad_input, without.grad_input)
    np.testing.assert_array_equal(grads.grad_weight, without.grad_weight)
    summed = dy.astype(np.float64).sum(0)
    np.testing.assert_allclose(grads.grad_bias.astype(np.float64), summed, rounding, 4 * rounding)


@pytest.mark.drawn
def test_what_is_not_finite_and_what_is_zero_stays_in_its_column() -> None:
    bias = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e38, 1.0], np.float32)
    x = np.zeros((2, 8), np.float32)
    weight = np.ones(8, np.float32)
    for eps in (1e-6, 1e38):
        y = iree_lnbwd.rms_norm(x, 8, weight, eps, bias=bias).output
        np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 8)))
        dy = np.broadcast_to(bias, (2, 8))
        grads = iree_lnbwd.rms_norm_backward(dy, x, 8, None, weight, bias=bias, eps=eps)
        np.testing.assert_array_equal(grads.grad_bias, (dy[0].astype(np.float64) * 2).astype("f4"))


@pytest.mark.drawn
def test_strides_and_no_rows() -> None:
    rng = random_generator()
    x = rng.standard_normal((5, 3, 16)).astype(np.float32).transpose(1, 0, 2)[::-1, ::2]
    bias = rng.standard_normal(32).astype(np.float32)[::-2]
    weight = rng.standard_normal((16, 2)).astype(np.float32)[:, 1]
    ours = iree_lnbwd.rms_norm(x, 16, weight, bias=bias)
    expected = reference.rms_norm(x, 16, weight, bias=bias)
    np.testing.assert_allclose(ours.output, expected.output, 1e-5, 1e-5)
    grads = iree_lnbwd.rms_norm_backward(x, x, 16, ours.rstd, weight, bias=bias)
    np.testing.assert_allclose(grads.grad_bias, x.sum((0, 1)), 1e-5, 1e-5)
    empty = np.zeros((0, 16), np.float32)
    grads = iree_lnbwd.rms_norm_backward(empty, empty, 16, None, weight, bias=bias)
    np.testing.assert_array_equal(grads.grad_bias, np.zeros(16))


ONES = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"bias": ONES}, ValueError, r"bias: expected shape \(8,\), that of weight, got \(2, 8\)"),
        ({"bias": ONES[0].astype("f8")}, ValueError, "bias: expected .*f32 beside .*, got f64"),
        ({"bias": 1}, TypeError, "bias: expected a NumPy array, .*got int"),
        ({"output_mask": (True, True)}, ValueError, r"output_mask: expected 3 bools, got \(True"),
        (
            {"output_mask": (True, True, True), "bias": None},
            ValueError,
            r"output_mask: expected 2 bools, got .*; grad_bias is one of them with a bias alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: Any, error: type[Exception], said: str) -> None:
    given = {"weight": ONES[0], "bias": ONES[0]} | changed
    with pytest.raises(error, match=f"^{said}"):
        iree_lnbwd.rms_norm_backward(ONES, ONES, 8, **given)


@pytest.mark.drawn
def test_a_module_takes_a_bias_if_it_was_compiled_for_one() -> None:
    for op in (RMS_NORM.name, RMS_NORM_BACKWARD.name):
        for has_bias in (False, True):
            spec = NormSpec((8,), op=op, has_bias=has_bias, eps=1e-6, has_weight=False)
            module: Any = runtime.load_built(compiler.build(spec, HOST)[0])
            given = (ONES, ONES) if op != RMS_NORM.name else (ONES,)
            right, wrong = (ONES[0], None) if has_bias else (None, ONES[0])
            module(*given, bias=right)
            said = "takes a bias, got None" if has_bias else "has no bias, got one"
            with pytest.raises(ValueError, match=f"^bias: this module {said}"):
                module(*given, bias=wrong)


def test_a_module_that_computes_only_a_bias_gradient_says_what_it_takes() -> None:
    spec = NormSpec((8,), **BACKWARD, output_mask=(False, False, True), eps=1e-6)
    module: Any = runtime.load_built(compiler.build(spec, HOST)[0])
    grads = module(ONES, ONES, weight=ONES[0], bias=ONES[0])
    assert grads[:2] == (None, None)
    np.testing.assert_array_equal(grads.grad_bias, 2 * ONES[0])
    with pytest.raises(ValueError, match=r"^bias: this module takes a bias, got None"):
        module(ONES, ONES, weight=ONES[0])


def test_specs_without_a_bias_are_as_they_were() -> None:
    """Their names and fields are those of modules that were kept before there was a bias."""
    for op in (OPS[RMS_NORM_BACKWARD.name], FROM_OUTPUT[RMS_NORM_BACKWARD.name]):
        spec = NormSpec((8,), op=op.name, from_output=op.from_output)
        assert spec.output_mask == (True, True)
        assert "bias" not in spec.name
        assert NormSpec.from_dict(spec.to_dict()) == spec
        asked = replace(spec, has_bias=True, output_mask=(True, False, False))
        if not op.from_output:  # then the bias makes no difference
            assert asked == replace(spec, output_mask=(True, False))
        assert "bias" in replace(spec, has_bias=True, output_mask=()).name


@pytest.mark.drawn
def test_storage_has_a_place_for_the_gradient_of_a_bias() -> None:
    """Where there is none, ATen's two results do."""
    for has_bias, count in ((True, 3), (False, 3), (False, 2)):
        spec = NormSpec((8,), op=RMS_NORM_BACKWARD.name, has_bias=has_bias, eps=1e-6)
        module: Any = runtime.load_built(compiler.build(spec, HOST)[0])
        bias = ONES[0] if has_bias else None
        expected = module(ONES, ONES, weight=ONES[0], bias=bias)
        out = [None if result is None else np.full_like(result, 7) for result in expected][:count]
        found = module(ONES, ONES, weight=ONES[0], bias=bias, out=out)
        assert found[0] is out[0]
        for mine, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.drawn
def test_gradients_from_the_output_are_those_from_the_input() -> None:
    rng = random_generator()
    x, dy = rng.standard_normal((2, 3, 16))
    weight, bias = rng.standard_normal((2, 16))
    out = iree_lnbwd.rms_norm(x, 16, weight, bias=bias, weight_offset=1.0)
    options: Any = {"weight": weight, "bias": bias, "weight_offset": 1.0, "rstd": out.rstd}
    from_input = iree_lnbwd.rms_norm_backward(dy, x, 16, **options)
    from_output = iree_lnbwd.rms_norm_backward(dy, None, 16, output=out.output, **options)
    for mine, expected in zip(from_output, from_input, strict=True):
        np.testing.assert_allclose(mine, expected, 1e-8, 1e-8)
