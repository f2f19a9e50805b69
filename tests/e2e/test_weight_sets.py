"""Sets of weights: row r takes the set (r // rows_per_set) % G of [G, N]."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import (
    assert_all_forms_right,
    assert_right,
    assert_same_bits,
    built,
    normal,
    random_generator,
)
from test_family import spec_of

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, reference, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array, BoundCall, bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, Kind
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.runtime import Norm
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.verification import host_calls, matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.description import describe

ROWS = (0, 1, 3, 41, 700)
SETS = (1, 2, 3, 7)


def specs() -> Iterator[NormSpec]:
    """Each op, with its options and types, on widths that vectors divide and others."""
    of = functools.partial(spec_of, weight_sets=True)
    for op in OPS:
        yield of(op, 1, "f32")
        yield of(op, 64, "f32", weight_offset=1.0)
        yield of(op, 257, "bf16", weight_dtype="f32", residual_dtype="bf16")
        yield of(op, 768, "f16", residual_dtype="f32")
        yield of(op, 33, "f64")
    yield of("layer_norm", 65, "bf16", has_bias=False)
    yield of("layer_norm", 65, "f32", output_dtype="bf16")
    yield of("rms_norm", 65, "bf16", has_bias=True, bias_dtype="f32")
    for op in ("layer_norm_backward", "rms_norm_backward"):
        yield of(op, 300, "bf16", eps=1e-3)
        yield of(op, 300, "bf16", grad_outputs=3)
        yield of(op, 129, "f32", from_output=True, residual_dtype="f32", weight_offset=1.0)
        yield of(op, 64, "f16", from_output=True, has_bias=True)
        yield of(op, 20000, "bf16", grad_output_dtype="f32")
    yield of("rms_norm_backward", 65, "f16", has_bias=True)


SPECS = list(specs())
OF_ALL_FORMS = [
    *(spec for spec in SPECS if spec.columns < 300),
    *(
        spec_of(op, 40, dtype, weight_sets=True, gate=gate)
        for op in OPS
        for gate, dtype in (("after", "bf16"), ("before", "f32"))
    ),
]
by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def module_of(spec: NormSpec) -> Norm:
    """On this CPU."""
    return runtime.load_built(built(spec, find_target("host"))[0])


def given_of(call: BoundCall) -> dict[str, Any]:
    """The keyword arguments of the op's function, or of a module's call."""
    assert call.spec is not None
    spec = call.spec
    given: dict[str, Any] = dict(call.arrays)
    more = [given.pop(n) for n in ("grad_output_2", "grad_output_3") if n in given]
    if more:
        given["grad_output"] = [given["grad_output"], *more]
    if call.has_bias and "bias" not in given:  # its type counts
        given["bias"] = np.ones(given["weight"].shape, DTYPES[spec.beta_dtype].numpy)
    if spec.from_output:
        given["input"] = None
    return given


def function_of(call: BoundCall) -> Any:
    """The results of the op's function."""
    assert call.spec is not None
    spec = call.spec
    options: dict[str, Any] = {"output_mask": spec.output_mask} if spec.family.is_backward else {}
    if spec.eps is not None:
        options["eps"] = spec.eps
    if spec.output_dtype is not None:
        options["output_dtype"] = spec.output_dtype
    return getattr(lnbwd, spec.op)(
        normalized_shape=spec.normalized_shape,
        weight_offset=spec.weight_offset,
        rows_per_set=1 if call.sets is None else call.sets.rows_per_set,
        **given_of(call),
        **options,
    )


@pytest.mark.drawn
@pytest.mark.parametrize("spec", OF_ALL_FORMS, ids=lambda spec: spec.name)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("op", OPS)
def test_whole_tensors_of_any_number_of_sets(op: str) -> None:
    """More sets than rows, too, and no rows."""
    spec, host = spec_of(op, 24, "f32", weight_sets=True), find_target("host")
    rng = random_generator()
    oracle = compiler.build_oracle(replace(spec, rows=7), host)
    whole = compiler.build(spec, host, schedule=WholeTensors("asked for"))[0]
    for module, counts in ((whole, (0, 7)), (oracle, (7,))):
        norm = runtime.load_built(module)
        for rows, sets in itertools.product(counts, (Sets(1, 9), Sets(3, 2), Sets(40, 3))):
            call = matrix.random_call(norm.spec, rows, rng, sets)
            assert_right(norm.run(call), call)


@pytest.mark.drawn
@by_name
def test_one_module_serves_all_sets(spec: NormSpec) -> None:
    """Whatever the numbers of rows, of sets and of a set's rows; some sets have none."""
    module, rng = module_of(spec), random_generator()
    for rows, count in itertools.product(ROWS, SETS):
        if rows * spec.columns > 1 << 20:
            continue
        for rows_per_set in {1, 2, 5, max(rows, 1), rows + 3}:
            call = matrix.random_call(spec, rows, rng, Sets(count, rows_per_set))
            assert_right(module.run(call), call)
    call = matrix.adversarial_call(spec, rng)
    assert_right(module.run(call), call)


@pytest.mark.drawn
@by_name
def test_functions_and_calls_of_modules(spec: NormSpec) -> None:
    rng = random_generator()
    for rows, sets in ((12, Sets(3, 1)), (12, Sets(3, 4)), (70, Sets(2, 5)), (0, Sets(3, 2))):
        call = matrix.random_call(spec, rows, rng, sets)
        assert_right(function_of(call), call)
        module = module_of(spec)
        assert_right(module(**given_of(call), rows_per_set=sets.rows_per_set), call)


@pytest.mark.drawn
@pytest.mark.parametrize("from_output", [False, True])
@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_every_mask(op: str, from_output: bool) -> None:
    rng = random_generator()
    has_bias = from_output or op == "rms_norm_backward" or None  # None: it counts by its type
    whole = spec_of(op, 40, "f32", has_bias=has_bias, from_output=from_output, weight_sets=True)
    for mask in itertools.product((True, False), repeat=3):
        if any(mask):
            call = matrix.random_call(replace(whole, output_mask=mask), 37, rng)
            assert_right(function_of(call), call)


def test_many_sets_of_one_row() -> None:
    """A scale for each row: as many sets as rows."""
    spec = spec_of("layer_norm_backward", 96, "bf16", weight_sets=True)
    call = matrix.random_call(spec, 3000, random_generator(), Sets(3000, 1))
    assert_right(module_of(spec).run(call), call)


def test_sets_without_rows_have_gradients_of_zero() -> None:
    rng = random_generator()
    x, dy = normal(rng, "f32", (3, 16)), normal(rng, "f32", (3, 16))
    weight = np.ones((5, 16), np.float32)
    gradients = lnbwd.layer_norm_backward(dy, x, 16, weight=weight, bias=weight, rows_per_set=2)
    for sums in (gradients.grad_weight, gradients.grad_bias):
        assert not sums[2:].any()
        assert sums[:2].any(axis=1).all()


@pytest.mark.drawn
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [8, 257, 1000])
def test_bits_of_a_row_do_not_depend_on_its_set(op: str, columns: int) -> None:
    """A row has the bits that it has alone, with the weight of its set."""
    rng = random_generator()
    x = normal(rng, "bf16", (24, columns))
    weight, bias = normal(rng, "bf16", (6, columns)), normal(rng, "bf16", (6, columns))
    function = getattr(lnbwd, op)
    together = function(x, columns, weight, bias=bias, rows_per_set=2)
    for row, which in enumerate(Sets(6, 2).of_rows(24)):
        alone = function(x[row : row + 1], columns, weight[which], bias=bias[which])
        assert together.output[row].tobytes() == alone.output.tobytes(), row


def test_one_set_is_a_weight() -> None:
    """[1, N] has the bits of [N]; its gradients are [1, N]."""
    rng = random_generator()
    spec = spec_of("layer_norm_backward", 300, "bf16", weight_sets=True)
    call = matrix.random_call(spec, 200, rng, Sets(1, 1))
    given = given_of(call)
    plain = {**given, "weight": given["weight"][0]}
    ours = lnbwd.layer_norm_backward(normalized_shape=300, **given)
    theirs = lnbwd.layer_norm_backward(normalized_shape=300, **plain)
    assert ours.grad_weight.shape == ours.grad_bias.shape == (1, 300)
    flat = (gradient.reshape(other.shape) for gradient, other in zip(ours, theirs, strict=True))
    assert_same_bits(type(theirs)(*flat), theirs)


def test_shapes_and_strides() -> None:
    """Heads of [B, S, H, D], and weights and inputs that are views."""
    rng = random_generator()
    x = normal(rng, "f32", (2, 5, 4, 2, 12))[..., ::2]
    weight = normal(rng, "f32", (6, 2, 4)).transpose(2, 1, 0)
    got = lnbwd.layer_norm(x, (2, 6), weight)
    call = bind("layer_norm", {"input": x, "weight": weight}, (2, 6), rows_per_set=1)
    assert_right(got, call)
    assert got.output.shape == x.shape
    dy = normal(rng, "f32", (2, 5, 4, 12, 2)).swapaxes(-1, -2)[..., ::2]
    gradients = lnbwd.layer_norm_backward(dy, x, (2, 6), weight=weight)
    given = {"grad_output": dy, "input": x, "weight": weight}
    assert_right(gradients, bind("layer_norm_backward", given, (2, 6), rows_per_set=1))
    assert gradients.grad_weight.shape == (4, 2, 6)


def test_gradients_are_those_of_finite_differences() -> None:
    """Of the f64 forward, by the weight, the bias and the input."""
    rng = random_generator()
    sets, rows, columns, step = Sets(3, 2), 11, 7, 1e-6
    x, dy = normal(rng, "f64", (rows, columns)), normal(rng, "f64", (rows, columns))
    weight, bias = normal(rng, "f64", (3, columns)), normal(rng, "f64", (3, columns))

    def loss(x: Array, weight: Array, bias: Array) -> float:
        forward = lnbwd.layer_norm(
            x, columns, weight, bias, weight_offset=1.0, rows_per_set=sets.rows_per_set
        )
        return float((forward.output * dy).sum())

    gradients = lnbwd.layer_norm_backward(
        *(dy, x, columns), weight=weight, bias=bias, weight_offset=1.0, rows_per_set=2
    )
    variables = [x, weight, bias]
    for place, gradient in enumerate(gradients):
        for at in itertools.product(*map(range, gradient.shape)):
            sides = []
            for sign in (1, -1):
                moved = [array.copy() for array in variables]
                moved[place][at] += sign * step
                sides.append(loss(*moved))
            assert abs((sides[0] - sides[1]) / (2 * step) - gradient[at]) < 1e-6


EMULATED = [
    spec_of("layer_norm", 64, "f32", weight_sets=True),
    spec_of("rms_norm", 300, "bf16", weight_offset=1.0, has_bias=True, weight_sets=True),
    spec_of("layer_norm", 33, "f16", weight_dtype="f32", weight_sets=True),
    spec_of("rms_norm", 4100, "f32", residual_dtype="bf16", weight_sets=True),
    spec_of("layer_norm", 20001, "bf16", weight_sets=True),
    spec_of("layer_norm_backward", 64, "f32", weight_sets=True),
    spec_of("layer_norm_backward", 300, "bf16", residual_dtype="f32", weight_sets=True),
    spec_of("layer_norm_backward", 1, "f64", weight_sets=True),
    spec_of("layer_norm_backward", 72, "f32", output_mask=(False, True, True), weight_sets=True),
    spec_of("rms_norm_backward", 96, "f32", eps=1e-5, weight_sets=True),
    spec_of("rms_norm_backward", 65, "f16", weight_dtype="f32", has_bias=True, weight_sets=True),
    spec_of("rms_norm_backward", 4100, "bf16", grad_outputs=2, weight_sets=True),
    spec_of("rms_norm_backward", 64, "bf16", from_output=True, has_bias=True, weight_sets=True),
    spec_of("rms_norm_backward", 80, "bf16", gate="after", weight_sets=True),
]  # fmt: skip


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("spec", EMULATED, ids=lambda spec: spec.name)
def test_kernels_in_the_emulator(spec: NormSpec, target: str) -> None:
    """Few columns and wide ones; each set's rows in one workgroup, or in several."""
    module, rng = EmulatedNorm(built(spec, find_target(target))[0]), random_generator()
    given = ((13, 3, 2), (1, 4, 1), (40, 2, 1), (30, 1, 7), (9, 9, 1), (11, 2, 11), (0, 2, 2))
    for rows, number, rows_per_set in given if spec.columns < 1000 else given[:3]:
        call = matrix.random_call(spec, rows, rng, Sets(number, rows_per_set))
        assert_right(module.run(call), call)


def test_the_reference_takes_sets() -> None:
    rng = random_generator()
    x, weight = normal(rng, "f64", (6, 5)), normal(rng, "f64", (2, 5))
    expected = reference.rms_norm(x, 5, weight, rows_per_set=3).output
    rstd = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.finfo(np.float64).eps)
    np.testing.assert_allclose(expected, x * rstd * weight[[0, 0, 0, 1, 1, 1]], rtol=1e-12)


X = np.ones((6, 8), np.float32)
W = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("weight", "bias", "rows_per_set", "error", "said"),
    [
        (W, None, 0, ValueError, "rows_per_set: expected an int >= 1, got 0"),
        (W, None, -3, ValueError, "rows_per_set: expected an int >= 1, got -3"),
        (W, None, 1.0, TypeError, "rows_per_set: expected an int, got float"),
        (W, None, True, TypeError, "rows_per_set: expected an int, got bool"),
        (W[0], None, 2, ValueError, r"rows_per_set: expected 1 .*, got 2 and weight \(8,\)"),
        (None, None, 2, ValueError, "rows_per_set: expected 1 .* got 2 and weight None"),
        (W, W[0], 1, ValueError, r"bias: expected shape \(2, 8\), that of weight, got \(8,\)"),
        (W[0], W, 1, ValueError, r"bias: expected shape \(8,\), that of weight, got \(2, 8\)"),
        (W, W[:1], 1, ValueError, r"bias: expected shape \(2, 8\), that of weight, got \(1, 8\)"),
        (None, W, 1, ValueError, r"bias: expected shape \(8,\) without a weight, got \(2, 8\)"),
        (W[:0], None, 1, ValueError, r"weight: expected from 1 to \d+ sets, got shape \(0, 8\)"),
        (W[:, :4], None, 1, ValueError, r"weight: expected shape \(8,\), got \(2, 4\)"),
    ],
)  # fmt: skip
def test_errors(weight: Any, bias: Any, rows_per_set: Any, error: Any, said: str) -> None:
    for call in (
        lambda: lnbwd.layer_norm(X, 8, weight, bias, rows_per_set=rows_per_set),
        lambda: lnbwd.rms_norm(X, 8, weight, bias=bias, rows_per_set=rows_per_set),
        lambda: lnbwd.layer_norm_backward(
            X, X, 8, weight=weight, bias=bias, rows_per_set=rows_per_set
        ),
    ):
        with pytest.raises(error, match=said):
            call()


def test_modules_say_what_they_take() -> None:
    with_sets = module_of(spec_of("rms_norm", 8, "f32", weight_sets=True))
    without = module_of(spec_of("rms_norm", 8, "f32"))
    with pytest.raises(ValueError, match=r"weight: this module takes sets, \(G, 8\), got \(8,\)"):
        with_sets(X, W[0])
    with pytest.raises(ValueError, match=r"weight: expected shape \(8,\), got \(2, 8\)"):
        without(X, W)
    with pytest.raises(ValueError, match=r"rows_per_set: expected 1, because .* no sets, got 2"):
        without(X, W[0], rows_per_set=2)
    with pytest.raises(ValueError, match="weight: this module takes a weight, got None"):
        with_sets(X)


@pytest.mark.drawn
def test_host_programs_launch_what_streams_launch() -> None:
    """The plan's numbers, as Python computes them for a stream, are those of the host program."""
    for spec in EMULATED:
        vmfb, _ = built(spec, find_target("sm_90"))
        described = describe(vmfb, source="a module")
        planned = described.launches
        assert planned is not None
        for rows, launched in host_calls.asked(vmfb, described).items():
            sets = matrix.SOME_SETS.for_rows(int(rows))
            kernels = [each for each in launched if each[0] not in ("fill", "write", "read")]
            expected = [
                [
                    kernel.kernel,
                    [count_of(n, int(rows), sets) for n in kernel.workgroups],
                    [count_of(n, int(rows), sets) for n in kernel.constants],
                ]
                for kernel in planned.of(int(rows)).kernels
            ]
            assert [kernel[:3] for kernel in kernels] == expected, (spec.name, rows)


def test_specs() -> None:
    spec = NormSpec((8,), weight_sets=True)
    assert NormSpec.from_dict(spec.to_dict()) == spec
    assert "weight_sets" not in NormSpec((8,)).to_dict()
    assert {spec.kind_of(operand) for operand in spec.family.results} == {Kind.CELLS, Kind.SETS}
    with pytest.raises(ValueError, match="weight_sets: expected False without a weight, got True"):
        NormSpec((8,), has_weight=False, weight_sets=True)
    with pytest.raises(TypeError, match="weight_sets: expected a bool, got 1"):
        NormSpec((8,), weight_sets=1)  # type: ignore[arg-type]
