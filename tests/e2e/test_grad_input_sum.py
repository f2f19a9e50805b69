"""The sum of the input's gradient over rows: of every backward, on every target."""

from __future__ import annotations

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
from iree_lnbwd import NormGradsWithSum, NormSpec, reference, runtime, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix

HOST = find_target("host")
NAME = "grad_input_sum_dtype"


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec",
    [s for s in matrix.summed_gradients() if s.columns == 769 and not s.strided_rows],
    ids=lambda spec: spec.name,
)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize(
    "spec",
    [spec for spec in matrix.summed_gradients() if spec.columns in (5, 769, 1024)],
    ids=lambda spec: spec.name,
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 37, adversarial=7)


OF_LAYER = NormSpec(
    (1000,), "bf16", residual_dtype="bf16", grad_outputs=2, grad_input_sum_dtype="f32"
)
OF_RMS = NormSpec((1000,), "f32", op="rms_norm_backward", grad_input_sum_dtype="f32")
COPIED = OnePass(2, 2, 2, 4, ahead=1, slots=2)
WAYS: dict[str, tuple[NormSpec, schedules.Schedule, str]] = {
    "several groups": (OF_LAYER, OnePass(2, 2, 2, 8), "sm_90"),
    "several groups, without a bias": (OF_RMS, OnePass(2, 2, 2, 4), "sm_90"),
    "one group, copied ahead": (OF_LAYER, OnePass(2, 1, 4, 8, ahead=1, slots=2), "sm_90"),
    "read again": (OF_LAYER, OnePass(2, 1, 4, 4, ahead=1, slots=2, rereads=True), "sm_90"),
    "two passes": (OF_LAYER, schedules.TwoPass(3, 2, 4, 1, 2), "sm_80"),
    "two passes, without a bias": (OF_RMS, schedules.TwoPass(3, 2, 4, 1, 2), "gfx942"),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", WAYS)
def test_by_every_way_through_the_rows(name: str) -> None:
    spec, how, target = WAYS[name]
    vmfb, _ = compiler.build(spec, find_target(target), schedule=how)
    assert_right_in_emulation(vmfb, spec, 1, 5, 37, adversarial=7)


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [33, 200])
@pytest.mark.parametrize("target", ["sm_90", "gfx1100"])
def test_of_rows_that_share_a_subgroup(columns: int, target: str) -> None:
    """A part without a row takes another's once more, and adds nothing."""
    spec = NormSpec((columns,), "bf16", residual_dtype="f32", grad_input_sum_dtype="bf16")
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 37, adversarial=7)


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [9216, 16385, 20001])  # the second receives sums later
def test_clusters_sum_it(columns: int) -> None:
    spec = NormSpec((columns,), "bf16", residual_dtype="bf16", grad_input_sum_dtype="bf16")
    schedule = schedules.choose(spec, find_target("sm_90"))
    assert isinstance(schedule, OnePass)
    assert schedule.cluster > 1
    vmfb, _ = compiler.build(spec, find_target("sm_90"))
    assert_right_in_emulation(vmfb, spec, 3, adversarial=7)


def test_no_kernel_of_few_rows_has_all_rows_of_dx() -> None:
    target = find_target("sm_90")
    with_few, without = (
        schedules.choose(NormSpec((1024,), "bf16", grad_input_sum_dtype=dtype), target)
        for dtype in (None, "bf16")
    )
    assert isinstance(with_few, OnePass)
    assert isinstance(without, OnePass)
    assert with_few.few_rows is not None
    assert without.few_rows is None
    spec = NormSpec((1024,), "bf16", grad_input_sum_dtype="bf16")
    assert "dx is summed over rows" in str(with_few.illegal(spec, target))


def _given(rows: int, columns: int) -> dict[str, Any]:
    rng = random_generator()
    names = ("grad_output", "input", "grad_residual")
    given = {name: rng.standard_normal((rows, columns)).astype(np.float32) for name in names}
    return given | {"weight": rng.standard_normal(columns).astype(np.float32)}


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("columns", [5, 300])
def test_it_is_the_sum_and_changes_nothing_else(rows: int, columns: int) -> None:
    """In turn on the same arrays, so that no call answers for one of another type."""
    given = _given(rows, columns)
    plain = iree_lnbwd.rms_norm_backward(normalized_shape=columns, **given)
    right = plain.grad_input.astype(np.float64).sum(0)
    scale = np.abs(plain.grad_input).sum(0)
    for dtype, u in (("f32", 1e-6), ("bf16", 2**-8), ("f32", 1e-6)):
        found: Any = iree_lnbwd.rms_norm_backward(
            normalized_shape=columns, **given, grad_input_sum_dtype=dtype
        )
        assert isinstance(found, NormGradsWithSum)
        np.testing.assert_array_equal(found.grad_input, plain.grad_input)
        np.testing.assert_array_equal(found.grad_weight, plain.grad_weight)
        assert found.grad_bias is None
        assert found.grad_input_sum.shape == (columns,)
        off = np.abs(found.grad_input_sum.astype(np.float64) - right)
        assert np.all(off <= u * np.abs(right) + 1e-6 * scale)
    again = iree_lnbwd.rms_norm_backward(normalized_shape=columns, **given)
    assert not isinstance(again, NormGradsWithSum)


def test_it_is_summed_before_it_is_rounded() -> None:
    """A thousand rows of which each alone rounds to nothing beside the residual."""
    ones = np.ones((1024, 8), ml_dtypes.bfloat16)
    dy, x = ones.copy(), ones.copy()
    dy[:, ::2], x[:, ::3] = 2**-9, -1
    options: dict[str, Any] = {"normalized_shape": 8, "output_mask": (True, False, False)}
    results: Any = iree_lnbwd.layer_norm_backward(
        dy, x, grad_residual=ones, grad_input_sum_dtype="f32", **options
    )
    wide = [array.astype(np.float64) for array in (dy, x, ones)]
    exact: Any = reference.layer_norm_backward(
        wide[0], wide[1], grad_residual=wide[2], grad_input_sum_dtype="f64", **options
    )
    np.testing.assert_allclose(results.grad_input_sum, exact.grad_input_sum, 1e-5)
    assert np.any(results.grad_input.astype(np.float64).sum(0) != exact.grad_input_sum)


def test_of_no_rows_it_is_zero() -> None:
    given = _given(0, 16)
    found: Any = iree_lnbwd.layer_norm_backward(
        normalized_shape=16, **given, grad_input_sum_dtype=np.float16
    )
    assert found.grad_input_sum.dtype == np.float16
    np.testing.assert_array_equal(found.grad_input_sum, np.zeros(16, np.float16))


def test_a_module_stores_it_where_a_caller_says() -> None:
    given = _given(7, 24)
    spec = NormSpec((24,), op="rms_norm_backward", eps=1e-6, grad_input_sum_dtype="bf16")
    module: Any = runtime.load_built(compiler.build(spec, HOST)[0])
    arrays = (given["grad_output"], given["input"], None, given["weight"])
    out = NormGradsWithSum(
        np.empty((7, 24), np.float32),
        np.empty(24, np.float32),
        None,
        np.empty(24, ml_dtypes.bfloat16),
    )
    assert module(*arrays, out=out) is out
    np.testing.assert_array_equal(out.grad_input_sum, module(*arrays).grad_input_sum)
    with pytest.raises(ValueError, match=r"^out\.grad_input_sum: expected "):
        module(*arrays, out=out._replace(grad_input_sum=np.empty(23, ml_dtypes.bfloat16)))


ONES = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({NAME: "f64"}, rf"{NAME}: expected bf16 or f16 or f32 beside an input or output of f32"),
        ({NAME: "x"}, rf"{NAME}: expected one of .*, got 'x'"),
        ({"output_mask": (False, True)}, rf"{NAME}: expected None where output_mask does not ask"),
        ({"gate": ONES, "output_mask": None}, rf"{NAME}: expected None with a gate, got bf16"),
        ({"weight": ONES}, rf"{NAME}: expected None with sets of weights, got 'bf16'"),
        (
            {"grad_input_copy_dtype": "bf16"},
            rf"{NAME}: expected None beside grad_input_copy_dtype, got bf16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"grad_output": ONES, "input": ONES, "weight": ONES[0]}
    given |= {NAME: "bf16", **changed}
    with pytest.raises(ValueError, match=f"^{said}"):
        iree_lnbwd.rms_norm_backward(normalized_shape=8, **given)


def test_what_a_spec_refuses() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: expected None for rms_norm, got 'bf16'"):
        NormSpec((8,), op="rms_norm", eps=1e-6, grad_input_sum_dtype="bf16")
    with pytest.raises(ValueError, match=rf"^{NAME}: expected None beside grad_input_copy_dtype"):
        NormSpec((8,), grad_input_copy_dtype="bf16", grad_input_sum_dtype="bf16")


@pytest.mark.parametrize(
    ("columns", "residual", "reads_again"),
    [(768, "bf16", True), (1600, "bf16", True), (1600, None, True), (8192, "bf16", False)],
)
def test_rows_leave_their_registers_to_it(
    columns: int, residual: str | None, reads_again: bool
) -> None:
    """Where it would not fit beside them, they are kept in shared memory alone."""
    plain = NormSpec((columns,), "bf16", residual_dtype=residual)
    summed = replace(plain, grad_input_sum_dtype="bf16")
    target = find_target("sm_90")
    one, without = (schedules.choose(spec, target) for spec in (summed, plain))
    assert isinstance(one, OnePass)
    assert isinstance(without, OnePass)
    assert without.registers(summed, target) > without.registers(plain, target)
    assert not without.rereads
    assert one.rereads == reads_again
    assert one.registers(summed, target) <= one.registers_available(target)
