"""Several gradients of the output, which a backward adds up: the bits of additions before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
from iree_lnbwd import NormSpec, runtime, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix

HOST = find_target("host")
BACKWARDS = [op.name for op in OPS.values() if op.is_backward]
# Of the input, of the gradients, and of their sums.
TYPES = (
    *(("f32", "f32", "f32"), ("bf16", "bf16", "bf16"), ("f16", "f16", "f16")),
    *(("f32", "bf16", "f32"), ("bf16", "f32", "f32"), ("bf16", "f16", "f32")),
    ("f64", "f64", "f64"),
)


def rows(rng: np.random.Generator, dtype: str, columns: int) -> Array:
    return rng.standard_normal((11, columns)).astype(DTYPES[dtype].numpy)


def added(gradients: list[Array], dtype: str) -> Array:
    """As NumPy adds them, one after the other, in this type."""
    stored = DTYPES[dtype].numpy
    wide = np.float64 if dtype == "f64" else np.float32
    total = gradients[0].astype(wide)
    for gradient in gradients[1:]:
        total = (total + gradient.astype(wide)).astype(stored).astype(wide)
    return total.astype(stored)


@pytest.mark.drawn
@pytest.mark.parametrize("op", BACKWARDS)
@pytest.mark.parametrize(("dtype", "of_dy", "of_sum"), TYPES)
def test_the_bits_are_those_of_additions(op: str, dtype: str, of_dy: str, of_sum: str) -> None:
    rng, backward = random_generator(), getattr(iree_lnbwd, op)
    for columns, count in ((7, 4), (200, 2)):
        x, residual = rows(rng, dtype, columns), rows(rng, dtype, columns)
        dys = [rows(rng, of_dy, columns) for _ in range(count)]
        options: Any = {"weight": x[0], "grad_residual": residual, "eps": 1e-3}
        fused = backward(dys, x, columns, **options)
        apart = backward(added(dys, of_sum), x, columns, **options)
        for mine, expected in zip(fused, apart, strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_a_list_of_one_is_one() -> None:
    x = rows(np.random.default_rng(3), "f32", 8)
    for mine, expected in zip(
        iree_lnbwd.layer_norm_backward([x], x, 8),
        iree_lnbwd.layer_norm_backward(x, x, 8),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, expected)


def _specs() -> Iterator[NormSpec]:
    for op, (dtype, of_dy, _) in itertools.product(BACKWARDS, TYPES[:5]):
        yield NormSpec((40,), dtype, op=op, grad_output_dtype=of_dy, grad_outputs=3)
        yield NormSpec(
            (40,),
            dtype,
            op=op,
            grad_output_dtype=of_dy,
            grad_outputs=2,
            residual_dtype=dtype,
            from_output=True,
        )


@pytest.mark.drawn
@pytest.mark.parametrize("spec", list(_specs()), ids=lambda spec: spec.name)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942"])
@pytest.mark.parametrize(
    "spec",
    [spec for spec in matrix.several_gradients() if spec.columns <= 4096],
    ids=lambda spec: spec.name,
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    vmfb, _ = compiler.build(spec, find_target(target))
    assert_right_in_emulation(vmfb, spec, 1, 37, adversarial=7)


ONES = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("gradients", "error", "said"),
    [
        ([], ValueError, "grad_output: expected an array, or from 1 to 4 of them, got 0"),
        ([ONES] * 5, ValueError, "grad_output: expected an array, or from 1 to 4 of them, got 5"),
        (
            [ONES, None, ONES],
            ValueError,
            "grad_output_2: expected an array, because grad_output_3 is one, got None",
        ),
        (
            [ONES, ONES.astype(ml_dtypes.bfloat16)],
            TypeError,
            "grad_output_2: expected the element type of grad_output, f32, got bf16",
        ),
        (
            [ONES, ONES[:1]],
            ValueError,
            r"grad_output_2: expected shape \(2, 8\), got \(1, 8\)",
        ),
        ([None, ONES], TypeError, "grad_output: expected a NumPy array, got NoneType"),
    ],
)
def test_what_does_not_add_up_is_refused(gradients: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        iree_lnbwd.layer_norm_backward(gradients, ONES, 8)


def test_a_module_takes_as_many_as_it_was_compiled_for() -> None:
    module: Any = runtime.load_built(
        compiler.build(NormSpec((8,), has_weight=False, grad_outputs=2, eps=1e-5), HOST)[0]
    )
    assert module([ONES, ONES], ONES).grad_input.shape == (2, 8)
    for gradients in (ONES, [ONES] * 3):
        with pytest.raises(ValueError, match="grad_output: this module takes 2 gradients of the "):
            module(gradients, ONES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grad_outputs": 5}, "grad_outputs: expected an int from 1 to 4, got 5"),
        ({"grad_outputs": True}, "grad_outputs: expected an int from 1 to 4, got True"),
        (
            {"grad_outputs": 2, "op": "layer_norm", "eps": 0.1},
            "grad_outputs: expected 1 for layer_norm, got 2",
        ),
    ],
)
def test_specs_say_what_they_expect(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NormSpec((8,), **given)


def test_sums_that_come_a_row_later_leave_no_gradient_in_registers() -> None:
    target, found = find_target("sm_90"), []
    for columns in (25001, 32768, 65536):
        one: Any = schedules.choose(NormSpec((columns,), "bf16"), target)
        several = NormSpec((columns,), "bf16", grad_outputs=2)
        chosen = schedules.choose(several, target)
        found.append(isinstance(one, OnePass) and one.defers)
        assert not isinstance(chosen, OnePass) or chosen.loads_late or not chosen.defers
        if found[-1]:
            assert "only the next row is there" in str(one.illegal(several, target))
    assert any(found)
