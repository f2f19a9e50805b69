"""A copy of the input's gradient in 16 bits: of every backward, on every target."""

from __future__ import annotations

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
from iree_lnbwd import NormGradsWithCopy, NormSpec, reference, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.verification import matrix

HOST = find_target("host")
NARROW = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec",
    [s for s in matrix.copied_gradients() if s.columns == 769 and not s.strided_rows],
    ids=lambda spec: spec.name,
)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize(
    "spec",
    [spec for spec in matrix.copied_gradients() if spec.columns in (5, 769, 1024)],
    ids=lambda spec: spec.name,
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 37, adversarial=7)


def _given(rows: int, columns: int) -> dict[str, Any]:
    rng = random_generator()
    names = ("grad_output", "input", "grad_residual")
    given = {name: rng.standard_normal((rows, columns)).astype(np.float32) for name in names}
    return given | {"weight": rng.standard_normal(columns).astype(np.float32)}


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("columns", [5, 300])
def test_it_has_the_bits_of_a_cast_and_changes_nothing_else(rows: int, columns: int) -> None:
    """In turn on the same arrays, so that no call answers for one of another type."""
    given = _given(rows, columns)
    plain = iree_lnbwd.rms_norm_backward(normalized_shape=columns, **given)
    for dtype in (*NARROW, *NARROW):
        found: Any = iree_lnbwd.rms_norm_backward(
            normalized_shape=columns, **given, grad_input_copy_dtype=dtype
        )
        assert isinstance(found, NormGradsWithCopy)
        np.testing.assert_array_equal(found.grad_input, plain.grad_input)
        np.testing.assert_array_equal(found.grad_weight, plain.grad_weight)
        assert found.grad_bias is None
        np.testing.assert_array_equal(found.grad_input_copy, found.grad_input.astype(NARROW[dtype]))
    again = iree_lnbwd.rms_norm_backward(normalized_shape=columns, **given)
    assert not isinstance(again, NormGradsWithCopy)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_and_none(rows: int) -> None:
    given = _given(rows, 16)
    del given["grad_residual"]
    found: Any = iree_lnbwd.layer_norm_backward(
        normalized_shape=16, **given, grad_input_copy_dtype=np.float16
    )
    assert found.grad_input_copy.shape == (rows, 16)
    assert found.grad_input_copy.dtype == np.float16
    expected: Any = reference.layer_norm_backward(
        normalized_shape=16, **given, grad_input_copy_dtype="f16"
    )
    np.testing.assert_allclose(found.grad_input_copy, expected.grad_input_copy, 1e-3, 1e-3)


@pytest.mark.drawn
def test_a_module_stores_it_where_a_caller_says() -> None:
    given = _given(7, 24)
    spec = NormSpec((24,), op="rms_norm_backward", eps=1e-6, grad_input_copy_dtype="bf16")
    module: Any = runtime.load_built(compiler.build(spec, HOST)[0])
    arrays = (given["grad_output"], given["input"], None, given["weight"])
    out = NormGradsWithCopy(
        np.empty((7, 24), np.float32),
        np.empty(24, np.float32),
        None,
        np.empty((7, 48), ml_dtypes.bfloat16)[:, ::2],
    )
    with pytest.raises(ValueError, match=r"^out\.grad_input_copy: expected "):
        module(*arrays, out=out)
    strided = out._replace(grad_input_copy=np.empty((7, 48), ml_dtypes.bfloat16)[:, :24])
    assert module(*arrays, out=strided) is strided
    new = module(*arrays)
    np.testing.assert_array_equal(strided.grad_input_copy, new.grad_input_copy)
    np.testing.assert_array_equal(new.grad_input_copy, new.grad_input.astype(ml_dtypes.bfloat16))


ONES = np.ones((2, 8), np.float32)
NAME = "grad_input_copy_dtype"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({NAME: "f32"}, rf"{NAME}: expected None, f16 or bf16, got 'f32'"),
        ({NAME: "x"}, rf"{NAME}: expected one of .*, got 'x'"),
        ({"output_mask": (False, True)}, rf"{NAME}: expected None where output_mask does not ask"),
        ({"output_mask": (False, False)}, "output_mask: expected at least one gradient"),
        ({"gate": ONES, "output_mask": None}, rf"{NAME}: expected None with a gate, got bf16"),
        ({"input": ONES.astype("f2")}, rf"{NAME}: expected None beside an input of 'f16', got"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"grad_output": ONES, "input": ONES, "weight": ONES[0]}
    given |= {NAME: "bf16", **changed}
    with pytest.raises(ValueError, match=f"^{said}"):
        iree_lnbwd.rms_norm_backward(normalized_shape=8, **given)


def test_a_forward_has_none() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: expected None for rms_norm, got 'bf16'"):
        NormSpec((8,), op="rms_norm", eps=1e-6, grad_input_copy_dtype="bf16")


@pytest.mark.parametrize("field", [NAME, "dtype"])
def test_junk_in_a_spec_is_named(field: str) -> None:
    fields: dict[str, Any] = {NAME: "bf16", field: np.ones(3)}
    with pytest.raises(ValueError, match=rf"^{field}: expected one of "):
        NormSpec((8,), **fields)
