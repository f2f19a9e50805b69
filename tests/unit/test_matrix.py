"""The matrix that is verified: which specs, and which data for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
from support import random_generator

from iree_lnbwd import NormSpec, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    MORE_GRAD_OUTPUTS,
    OPS,
    Gate,
    Op,
    names,
)
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.schedules import FewRows, OnePass
from iree_lnbwd.verification import evidence, matrix

EVERY: list[Op] = [*OPS.values(), *FROM_OUTPUT.values()]
every_op = pytest.mark.parametrize(
    "op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output
)
EPS = {True: 1e-5, False: 1e-6}  # of layer norms and of RMS norms


def spec_of(op: Op, columns: int = 6, dtype: str = "f32", **options: Any) -> NormSpec:
    eps = None if op.is_backward else EPS[op.centres]
    return NormSpec((columns,), dtype, op=op.name, from_output=op.from_output, eps=eps, **options)


# --- specs --------------------------------------------------------------------------------------


def test_every_record_is_of_the_matrix() -> None:
    """So whoever changes the matrix has runs to make; on hardware, as soon as there is one."""
    names = [spec.name for spec in matrix.specs()]
    operands = [spec.name for spec in matrix.operand_specs()]
    assert len({*names, *operands}) == len(names) + len(operands)
    for file in (resources.files("iree_lnbwd") / "data/evidence").iterdir():
        facts, modules = evidence.from_text(file.read_text(encoding="utf-8"), file.name)
        ran = {module.name.removesuffix(f"_{facts['target']}") for module in modules}
        assert ran <= {*names, *operands}, file.name
        assert ran >= set(names) or not facts["emulated"], file.name


def test_specs_are_of_any_rows_and_of_each_op_in_turn() -> None:
    specs = list(matrix.specs())
    assert {spec.rows for spec in specs} == {None}
    wide = [spec for spec in specs if spec.columns in (25001, 54321, 131041)]
    assert specs[-len(wide) :] == wide
    families = [spec.family for spec in specs[: -len(wide)]]
    in_turn = [families[0]]
    for family in families:
        if family != in_turn[-1]:
            in_turn.append(family)
    assert in_turn[0] == OPS["layer_norm_backward"]
    assert sorted(op.name for op in in_turn[-2:]) == sorted(FROM_OUTPUT)
    assert {op.name for op in in_turn} == set(OPS)


# --- random rows --------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_data_are_drawn_in_one_order(op: Op, dtype: str) -> None:
    """Results are kept by their seed alone: rows, weight, gradient, bias, and what is added."""
    spec = spec_of(op, dtype=dtype, residual_dtype=dtype, weight_offset=0.75)
    call = matrix.random_call(spec, 5, np.random.default_rng(7))
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((5, 6)) * 2 + 0.5).astype(DTYPES[dtype].numpy).astype(np.float64)
    drawn = {"weight": rng.standard_normal(6) + 0.25}
    if op.is_backward:
        drawn["grad_output"] = rng.standard_normal((5, 6))
    assert call.spec is not None
    if call.spec.has_bias:
        drawn["bias"] = rng.standard_normal(6)
    drawn["grad_residual" if op.is_backward else "residual"] = rng.standard_normal((5, 6))
    mean = x.mean(axis=1) if op.centres else np.zeros(5)
    rstd = (((x - mean[:, None]) ** 2).mean(axis=1) + EPS[op.centres]) ** -0.5
    if op.is_backward:
        drawn |= {"rstd": rstd} | ({"mean": mean} if op.centres and not op.from_output else {})
    drawn["input"] = x
    if op.from_output:
        del drawn["input"]
        xhat = (x - mean[:, None]) * rstd[:, None]
        drawn["output"] = xhat * (drawn["weight"] + 0.75) + drawn.get("bias", 0.0)
    assert call.arrays.keys() == drawn.keys()
    for name, want in drawn.items():
        got = call.arrays[name]
        wide = DTYPES[dtype].accumulator if name in ("mean", "rstd") else dtype
        assert got.dtype == DTYPES[wide].numpy, name
        np.testing.assert_allclose(
            got.astype(np.float64),
            want,
            rtol=2 * DTYPES[wide].unit_roundoff,
            atol=1e-13,
            err_msg=name,
        )


@every_op
def test_a_random_call_is_of_its_spec(op: Op) -> None:
    """With several dimensions, types, masks and without weights, too."""
    plain = spec_of(op)
    specs = [
        plain,
        replace(plain, normalized_shape=(2, 3)),
        replace(plain, has_weight=False),
        replace(plain, dtype="bf16", weight_dtype="f32", residual_dtype="f32"),
    ]
    if op.is_backward:
        specs.append(replace(plain, grad_output_dtype="bf16"))
        alone = tuple(gradient.name == "grad_weight" for gradient in op.masked)
        specs.append(replace(plain, output_mask=alone))
        if not op.from_output:
            specs.append(replace(plain, eps=0.25))
    else:
        specs.append(replace(plain, output_dtype="f16"))
    if op.from_output:
        specs.append(replace(plain, has_bias=False, output_mask=()))
        specs.append(replace(plain, has_weight=False, has_bias=True, output_mask=()))
    for spec in specs:
        call = matrix.random_call(spec, 4, random_generator())
        assert call.spec == spec, spec.name
        assert (call.rows, call.shape) == (4, (4, *spec.normalized_shape))


@pytest.mark.parametrize("op", FROM_OUTPUT)
def test_the_output_of_a_norm_without_a_weight_is_xhat(op: str) -> None:
    spec = NormSpec((64,), "f64", op=op, from_output=True, has_weight=False, has_bias=False)
    output = matrix.random_call(spec, 3, random_generator()).arrays["output"]
    np.testing.assert_allclose((output**2).mean(axis=1), 1, rtol=1e-4)


def test_random_sets_are_three_of_two_rows() -> None:
    """Unless others are given; an output is made by the set of its row."""
    options: dict[str, Any] = {"weight_sets": True, "weight_offset": 0.75}
    for op in EVERY:
        has_bias = op.takes_bias or op.usual_bias
        spec = spec_of(op, dtype="f64", has_bias=has_bias, output_mask=(), **options)
        spec = replace(spec, normalized_shape=(2, 3))
        call = matrix.random_call(spec, 7, np.random.default_rng(7))
        assert (call.spec, call.sets) == (spec, (3, 2)), spec.name
        assert matrix.random_call(spec, 7, random_generator(), Sets(2, 1)).sets == (2, 1)
        rng = np.random.default_rng(7)
        x, weight = rng.standard_normal((7, 6)) * 2 + 0.5, rng.standard_normal((3, 6))
        np.testing.assert_allclose(call.arrays["weight"], weight + 0.25)
        if op.is_backward:
            rng.standard_normal((7, 6))
        bias = rng.standard_normal((3, 6)) if spec.has_bias else np.zeros((3, 6))
        if op.from_output:
            mean = x.mean(axis=1, keepdims=True) if op.centres else 0.0
            xhat = (x - mean) * call.arrays["rstd"][:, None]
            of_rows = [0, 0, 1, 1, 2, 2, 0]
            output = xhat * (weight[of_rows] + 1) + bias[of_rows]
            np.testing.assert_allclose(call.arrays["output"], output)
            hard = matrix.adversarial_call(spec, rng).arrays["weight"].reshape(-1) + 0.75
            assert (np.abs(hard[::3]) <= 3 * LEAST_WEIGHT).all()


def test_a_bias_that_counts_by_its_type_alone_is_there() -> None:
    spec = NormSpec((6,), op="rms_norm_backward", has_bias=True, bias_dtype="bf16")
    assert matrix.random_call(spec, 3, random_generator()).spec == spec


@pytest.mark.parametrize("count", [2, 3, 4])
def test_more_gradients_come_after_the_first(count: int) -> None:
    for op in (op for op in EVERY if op.is_backward):
        spec = spec_of(op, grad_outputs=count)
        call = matrix.random_call(spec, 5, np.random.default_rng(7))
        assert call.spec == spec
        rng = np.random.default_rng(7)
        rng.standard_normal((5, 6)), rng.standard_normal(6)
        for name in ("grad_output", *names(MORE_GRAD_OUTPUTS)[: count - 1]):
            np.testing.assert_allclose(call.arrays[name], rng.standard_normal((5, 6)), rtol=1e-6)


every_gated_op = pytest.mark.parametrize(
    "op",
    [*GATED[Gate.AFTER].values(), *GATED[Gate.BEFORE].values()],
    ids=lambda op: f"{op.name}_{op.gate.value}",
)


@every_gated_op
def test_random_gates_come_after_the_rows(op: Op) -> None:
    assert op.gate is not None
    spec = spec_of(op, dtype="bf16", gate=op.gate.value, gate_dtype="f32", output_mask=())
    call = matrix.random_call(spec, 5, np.random.default_rng(7))
    assert call.spec == spec
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((5, 6)) * 2 + 0.5).astype(DTYPES["bf16"].numpy).astype(np.float64)
    z = (2 * rng.standard_normal((5, 6))).astype(np.float32)
    np.testing.assert_array_equal(call.arrays["gate"], z)
    if op.is_backward:
        wide = z.astype(np.float64)
        data = x * wide / (1 + np.exp(-wide)) if op.gate is Gate.BEFORE else x
        mean = data.mean(axis=1, keepdims=True) if op.centres else 0.0
        rstd = (((data - mean) ** 2).mean(axis=1) + EPS[op.centres]) ** -0.5
        np.testing.assert_allclose(call.arrays["rstd"], rstd, rtol=1e-6)


@every_gated_op
def test_hard_gates_are_extreme(op: Op) -> None:
    """Each in rows of its own, so that the others are judged; the first are as what is added."""
    assert op.gate is not None
    spec = spec_of(op, columns=5, gate=op.gate.value, output_mask=())
    z = matrix.adversarial_call(spec, np.random.default_rng(7)).arrays["gate"]
    rng = np.random.default_rng(7)
    drawn = (rng.standard_normal((37, 5)), 2 * rng.standard_normal((37, 5)))[1]
    assert (z[0] == -0.5).all()
    assert not z[2].any()
    assert (z[5] == -100).all()
    assert (z[6] == -6e4).all()
    assert (z[7] == 6e4).all()
    assert (z[8, ::2] == -85).all()
    np.testing.assert_allclose(z[8, 1::2], drawn[8, 1::2], rtol=1e-6)
    places = [[9, 0], [35, 4], [36, 0]]
    assert np.argwhere(~np.isfinite(z)).tolist() == places
    assert (z[9, 0], z[36, 0]) == (np.inf, -np.inf)
    rest = [1, 3, 4, *range(10, 35)]
    np.testing.assert_allclose(z[rest], drawn[rest], rtol=1e-6)


# --- hard rows ----------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("rows", [None, 40])
def test_the_rows_of_an_adversarial_call(op: Op, rows: int | None) -> None:
    """Constant, far from zero, zero, with an Inf, with a NaN; the rest of 37 are random."""
    spec = spec_of(op, columns=5, residual_dtype="f32")
    rng = np.random.default_rng(7)
    call = (
        matrix.adversarial_call(spec, rng)
        if rows is None
        else matrix.adversarial_call(spec, rng, rows)
    )
    count = 37 if rows is None else rows
    assert (call.rows, call.spec) == (count, spec)
    plain = matrix.random_call(spec, 1, rng)
    types = {name: array.dtype for name, array in call.arrays.items()}
    assert types == {name: array.dtype for name, array in plain.arrays.items()}
    x = call.arrays[op.data.name]
    drawn = np.random.default_rng(7).standard_normal((count, 5))
    assert (x[0] == 3).all()
    np.testing.assert_allclose(x[1], drawn[1] + 100, rtol=1e-6)
    np.testing.assert_allclose(x[5:], drawn[5:], rtol=1e-6)
    assert not x[2].any()
    assert np.argwhere(~np.isfinite(x)).tolist() == [[3, 0], [4, 4]]
    assert x[3, 0] == np.inf
    assert np.isnan(x[4, 4])
    added = call.arrays["grad_residual" if op.is_backward else "residual"]
    assert (added[0] == -0.5).all()
    assert not added[2].any()
    places = [[count - 2, 4], [count - 1, 0]]
    assert np.argwhere(~np.isfinite(added)).tolist() == places
    assert added[-1, 0] == -np.inf
    assert np.isnan(added[-2, 4])


@every_op
@pytest.mark.parametrize("has_residual", [False, True])
def test_random_rows_are_all_finite(op: Op, has_residual: bool) -> None:
    spec = spec_of(op, columns=5, residual_dtype="f32" if has_residual else None)
    call = matrix.random_call(spec, 37, random_generator())
    for array in call.arrays.values():
        assert np.isfinite(array).all()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("op", FROM_OUTPUT)
def test_weights_of_a_hard_output_are_about_the_least(op: str, offset: float) -> None:
    """Every third; with zeros of both signs, and numbers on both sides of either border."""
    spec = NormSpec((60,), "f64", op=op, from_output=True, weight_offset=offset)
    call = matrix.adversarial_call(spec, np.random.default_rng(1))
    plain = matrix.random_call(spec, 37, np.random.default_rng(1))
    weight, kept = call.arrays["weight"] + offset, plain.arrays["weight"] + offset
    assert call.arrays["weight"] is not plain.arrays["weight"]
    small = weight[::3] / LEAST_WEIGHT
    times = [0, 0, 0.25, -0.25, 1, -1, 2, -2]
    np.testing.assert_allclose(small, [times[i * 3 % 8] for i in range(20)], rtol=1e-9, atol=1e-10)
    if offset == 0:
        zeros = call.arrays["weight"][::3][small == 0]
        assert set(np.signbit(zeros).tolist()) == {True, False}
    others = np.arange(60) % 3 != 0
    np.testing.assert_array_equal(weight[others], kept[others])
    without = replace(spec, has_weight=False, weight_offset=0.0)
    assert "weight" not in matrix.adversarial_call(without, random_generator()).arrays


# --- which calls --------------------------------------------------------------------------------

SPEC = NormSpec((64,), "f32")
HOW = OnePass(8, 1, 4, 2, few_rows=FewRows(rows=100, warps=4, tile=32, tile_vector=2))


def named(calls: Iterator[tuple[str, BoundCall]]) -> list[str]:
    found = list(calls)
    for name, call in found:
        kind, rows = name.split()
        assert call.rows == int(rows)
        finite = all(np.isfinite(array).all() for array in call.arrays.values())
        assert finite == (kind == "random"), name
    return [name for name, _ in found]


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (
            (1, 37),
            1 << 20,
            [
                "random 1",
                "random 37",
                "random 100",
                "random 101",
                "adversarial 37",
                "adversarial 101",
            ],
        ),
        (
            (300, 5, 101, 100),
            1 << 20,
            [
                "random 5",
                "random 100",
                "random 101",
                "random 300",
                "adversarial 37",
                "adversarial 101",
            ],
        ),
        # However large, a form that would not be run at all is.
        ((1, 37), 64 * 37, ["random 1", "random 37", "random 101", "adversarial 37"]),
        ((1, 37), 64 * 37 - 1, ["random 1", "random 101"]),
        ((1, 37), 0, ["random 1", "random 101"]),
    ],
)
def test_each_form_is_run(rows: tuple[int, ...], most: int, expected: list[str]) -> None:
    rng = random_generator()
    assert named(matrix.calls(SPEC, HOW, rows, most, rng)) == expected


def test_a_module_of_one_form_is_run_as_asked() -> None:
    rng = random_generator()
    how = replace(HOW, few_rows=None)
    assert named(matrix.calls(SPEC, how, (7, 1), 1 << 20, rng)) == [
        "random 1",
        "random 7",
        "adversarial 37",
    ]


def test_both_sides_of_few_rows() -> None:
    assert matrix.both_sides(SPEC, HOW) == (100, 101)
    assert matrix.both_sides(SPEC, replace(HOW, few_rows=None)) == ()
    assert matrix.both_sides(replace(SPEC, rows=5), HOW) == ()
    of_cpu = schedules.choose(SPEC, find_target("host"))
    assert matrix.both_sides(SPEC, of_cpu) == ()
