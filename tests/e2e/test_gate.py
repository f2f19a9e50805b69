"""Gates, after a norm and before it: of every op, against the reference, the oracle and others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import (
    assert_all_forms_right,
    assert_right,
    assert_right_in_emulation,
    built,
    central_differences,
    random_generator,
    without_few_rows,
)

import iree_lnbwd
from iree_lnbwd import NormSpec, reference, runtime, schedules
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import GatedNormGrads, bind
from iree_lnbwd.ops.operands import (
    GATED,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    OPS,
    RMS_NORM_BACKWARD,
    Gate,
)
from iree_lnbwd.schedules import TwoPass
from iree_lnbwd.verification import matrix

HOST = find_target("host")
# Of the input, of the gate, of the weight, and of the output's gradient.
TYPES: tuple[tuple[str | None, ...], ...] = (
    *(("f32", None, None, None), ("bf16", None, None, None), ("f16", None, None, None)),
    *(("f64", None, None, None), ("f32", "bf16", "bf16", None), ("bf16", "f32", "f32", None)),
    *(("bf16", "bf16", "f32", "f32"), ("f16", "bf16", None, "bf16")),
)
GATES = [gate.value for gate in Gate]
every_op = pytest.mark.parametrize("op", OPS)
both_orders = pytest.mark.parametrize("gate_first", [False, True])


def _loaded(spec: NormSpec) -> Any:
    return runtime.load_built(built(spec, HOST)[0])


def _specs() -> Iterator[NormSpec]:
    for gate, op in itertools.product(GATES, OPS):
        of: Any = {"op": op, "gate": gate}
        if not OPS[op].is_backward:
            of["eps"] = 1e-5
        for dtype, z, weight, dy in TYPES:
            types: Any = {"dtype": dtype, "gate_dtype": z, "weight_dtype": weight}
            if OPS[op].is_backward:
                types["grad_output_dtype"] = dy
            yield NormSpec((40,), **types, **of)
        yield NormSpec((7,), "f32", **of, has_weight=False)
        yield NormSpec((1,), "f32", **of, weight_offset=1.0)
        variant = GATED[Gate(gate)][op]
        if variant.takes_bias:
            yield NormSpec((33,), "bf16", **of, has_bias=not variant.usual_bias)
            yield NormSpec((33,), "f32", **of, has_bias=True, bias_dtype="bf16")
        if OPS[op].is_backward:
            of["eps"] = 1e-3
            yield NormSpec((40,), "bf16", **of)
            yield NormSpec((300,), "f32", **of)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", list(_specs()), ids=lambda spec: spec.name)
def test_product_whole_tensors_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    assert_all_forms_right(spec)


@pytest.mark.drawn
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].is_backward])
def test_every_mask(op: str, gate: str) -> None:
    rng = random_generator()
    for has_bias in (False, True) if GATED[Gate(gate)][op].takes_bias else (None,):
        full = NormSpec((40,), "f32", op=op, gate=gate, has_bias=has_bias)
        for mask in itertools.product((False, True), repeat=len(full.masked)):
            if any(mask):
                spec = NormSpec((40,), "f32", op=op, gate=gate, has_bias=has_bias, output_mask=mask)
                module = _loaded(spec)
                call = matrix.random_call(spec, 9, rng)
                assert call.spec == spec
                results = module.run(call)
                assert_right(results, call)
                there = [name for name, value in results._asdict().items() if value is not None]
                assert there == [result.name for result in spec.results]


@pytest.mark.drawn
@pytest.mark.parametrize("rows", [0, 1, 3, 700])
@both_orders
@every_op
def test_functions_and_modules_are_right(op: str, gate_first: bool, rows: int) -> None:
    """With any number of rows, and several dimensions, which the results have, too."""
    rng = random_generator()
    gate = (Gate.BEFORE if gate_first else Gate.AFTER).value
    eps = {} if OPS[op].is_backward else {"eps": 1e-5}
    spec = NormSpec((4, 16), "bf16", op=op, gate=gate, gate_dtype="f32", **eps)  # type: ignore[arg-type]
    call = matrix.random_call(spec, rows, rng)
    shaped = {
        name: array.reshape((rows, 4, 16) if array.ndim == 2 else (4, 16))
        for name, array in call.arrays.items()
        if name not in ("mean", "rstd")
    }
    statistics = {n: call.arrays[n] for n in ("mean", "rstd") if n in call.arrays}
    given: dict[str, Any] = {**shaped, **statistics}
    results = getattr(iree_lnbwd, op)(
        **given, normalized_shape=(4, 16), gate_first=gate_first, **eps
    )
    assert_right(results, call)
    if OPS[op].is_backward:
        assert isinstance(results, GatedNormGrads)
        assert results.grad_gate.shape == (rows, 4, 16)
        assert results.grad_gate.dtype == np.float32
    module = _loaded(spec)
    again = module(**given)
    storage = type(results)(
        *(None if result is None else np.empty_like(result) for result in results)
    )
    module(**given, out=storage)
    for ours, other, stored in zip(results, again, storage, strict=True):
        np.testing.assert_array_equal(ours, other)
        np.testing.assert_array_equal(ours, stored)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_80", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    "spec", [spec for spec in matrix.gated() if spec.columns <= 769], ids=lambda spec: spec.name
)
def test_modules_for_gpus_are_right(spec: NormSpec, target: str) -> None:
    """Few rows, and the kernel for many on rows as few."""
    gpu = find_target(target)
    for how in dict.fromkeys((schedules.choose(spec, gpu), without_few_rows(spec, gpu))):
        assert_right_in_emulation(built(spec, gpu, how)[0], spec, 1, 37, adversarial=12)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec", [spec for spec in matrix.gated() if spec.columns > 10000], ids=lambda spec: spec.name
)
def test_wide_rows_are_right(spec: NormSpec) -> None:
    """Of one workgroup, of clusters, and across the borders of rows."""
    gpu = find_target("sm_90")
    how = without_few_rows(spec, gpu)
    assert_right_in_emulation(built(spec, gpu, how)[0], spec, 3, adversarial=10)


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_two_passes_are_right_in_both_orders(target: str) -> None:
    gpu = find_target(target)
    how = TwoPass(workgroups=66, warps=256 // gpu.subgroup_size, vector=8, chunks=8, rows=4)
    for gate in GATES:
        spec = NormSpec((16384,), "bf16", op=LAYER_NORM_BACKWARD.name, gate=gate)
        assert_right_in_emulation(built(spec, gpu, how)[0], spec, 5, adversarial=12)


@pytest.mark.drawn
@both_orders
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sigmoid_of_any_size(dtype: Any, gate_first: bool) -> None:
    """As PyTorch's silu: no NaN but where z is infinite, and the sign of a zero."""
    z = np.array([[-1e30, -750, -104, -100, -88.8, -1e-30, -0.0, 0.0, 1e-38, 20, 1e30]], dtype)
    x = np.ones_like(z)
    output = iree_lnbwd.rms_norm(x, 11, eps=0.0, gate=z).output
    with np.errstate(over="ignore"):
        exact = (z / (1 + np.exp(-z.astype(np.longdouble)))).astype(np.float64)
    tiny = 200 * float(np.finfo(dtype).smallest_subnormal)
    rounding = 20 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(output.astype(np.float64), exact, rounding, tiny)
    np.testing.assert_array_equal(np.signbit(output), np.signbit(exact))
    grads: Any = iree_lnbwd.rms_norm_backward(x, x, 11, gate=z, gate_first=gate_first, eps=1e-6)
    assert all(np.isfinite(g).all() for g in (grads.grad_input, grads.grad_gate))
    infinite = np.array([[np.inf, -np.inf, np.nan, 1]], dtype)
    output = iree_lnbwd.rms_norm(np.ones_like(infinite), 4, eps=0.0, gate=infinite).output
    assert output[0, 0] == np.inf
    assert np.isnan(output[0, 1:3]).all()
    assert np.isfinite(output[0, 3])


@pytest.mark.drawn
@both_orders
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_gradients_are_finite_differences(norm: str, gate_first: bool) -> None:
    rng = random_generator()
    columns = 12
    x, z, dy = rng.standard_normal((3, 4, columns))
    weight, bias = rng.standard_normal((2, columns))
    options: Any = {"gate_first": gate_first, "eps": 1e-3}

    def loss(**changed: Any) -> float:
        arrays = {"input": x, "weight": weight, "bias": bias, "gate": z} | changed
        output = getattr(reference, norm)(normalized_shape=columns, **arrays, **options).output
        return float((output * dy).sum())

    grads = getattr(iree_lnbwd, f"{norm}_backward")(
        dy, x, columns, weight=weight, bias=bias, gate=z, **options
    )
    for name, at in (("input", x), ("weight", weight), ("bias", bias), ("gate", z)):
        expected = central_differences(lambda value, name=name: loss(**{name: value}), at)  # type: ignore[misc]
        np.testing.assert_allclose(getattr(grads, f"grad_{name}"), expected, 1e-5, 1e-7)


@pytest.mark.drawn
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gate_first_is_the_norm_of_a_product(norm: str) -> None:
    """In f64, as the product is rounded; and after, the product of the norm."""
    rng = random_generator()
    x, z = rng.standard_normal((2, 6, 20))
    weight = rng.standard_normal(20)
    silu = z / (1 + np.exp(-z))
    ours = getattr(iree_lnbwd, norm)(x, 20, weight, eps=1e-5, gate=z, gate_first=True)
    plain = getattr(iree_lnbwd, norm)(x * silu, 20, weight, eps=1e-5)
    np.testing.assert_allclose(ours.output, plain.output, 1e-12, 1e-12)
    np.testing.assert_allclose(ours.rstd, plain.rstd, 1e-12)
    ours = getattr(iree_lnbwd, norm)(x, 20, weight, eps=1e-5, gate=z)
    plain = getattr(iree_lnbwd, norm)(x, 20, weight, eps=1e-5)
    np.testing.assert_allclose(ours.output, plain.output * silu, 1e-12, 1e-12)
    np.testing.assert_array_equal(ours.rstd, plain.rstd)
    assert ours.residual_output is None


ONES = np.ones((2, 8), np.float32)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"gate": ONES[0]}, ValueError, r"gate: expected shape \(2, 8\), got \(8,\)"),
        ({"gate": ONES.astype("f8")}, ValueError, "gate_?d?t?y?p?e?: expected .*f32 .*, got f64"),
        ({"gate": 1}, TypeError, "gate: expected a NumPy array, .*got int"),
        ({"gate": None, "gate_first": True}, ValueError, "gate_first: expected False without a ga"),
        ({"gate_first": 1}, TypeError, "gate_first: expected a bool, got 1"),
        ({"grad_residual": ONES}, ValueError, "grad_residual: expected None beside gate, got one"),
        ({"output": ONES, "input": None}, ValueError, "output: expected None beside gate, got one"),
        (
            {"grad_output": [ONES, ONES]},
            ValueError,
            "grad_output: expected one array beside gate, got more",
        ),
        ({"output_mask": (True, True)}, ValueError, r"output_mask: expected 4 bools, got \(True"),
        (
            {"output_mask": (True, True), "bias": None},
            ValueError,
            r"output_mask: expected 3 bools, got \(True",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: Any, error: type[Exception], said: str) -> None:
    given = {
        **{"grad_output": ONES, "input": ONES, "normalized_shape": 8},
        **{"weight": ONES[0], "bias": ONES[0], "gate": ONES},
    } | changed
    with pytest.raises(error, match=f"^{said}"):
        iree_lnbwd.rms_norm_backward(**given)


def test_a_residual_does_not_go_with_a_gate() -> None:
    with pytest.raises(ValueError, match=r"^residual: expected None beside gate, got one"):
        iree_lnbwd.layer_norm(ONES, 8, residual=ONES, gate=ONES)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gate": "first"}, "gate: expected None or one of after, before, got 'first'"),
        ({"gate_dtype": "f32"}, "gate_dtype: expected None without a gate, got 'f32'"),
        ({"gate": "after", "residual_dtype": "f32"}, "residual_dtype: expected None with a gate"),
        ({"gate": "after", "grad_outputs": 2}, "grad_outputs: expected 1 with a gate, got 2"),
        ({"gate": "after", "from_output": True}, "from_output: expected False with a gate"),
        ({"gate": "after", "gate_dtype": "f64"}, "gate_dtype: expected .*, got f64"),
    ],
)
def test_specs_refuse_what_does_not_go_together(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        NormSpec((8,), op=RMS_NORM_BACKWARD.name, **fields)


def test_a_module_takes_a_gate_or_none() -> None:
    plain = _loaded(NormSpec((8,), op=LAYER_NORM.name, eps=1e-5))
    with pytest.raises(ValueError, match=r"^gate: this module has no gate, got one"):
        plain(ONES, ONES[0], ONES[0], gate=ONES)
    spec = NormSpec((8,), op=LAYER_NORM.name, eps=1e-5, gate="after")
    gated = _loaded(spec)
    with pytest.raises(ValueError, match=r"^gate: this module takes a gate, got None"):
        gated(ONES, ONES[0], ONES[0])
    with pytest.raises(TypeError, match=r"^gate: this module was compiled for f32, got bf16"):
        gated(ONES, ONES[0], ONES[0], gate=ONES.astype(ml_dtypes.bfloat16))


def test_a_spec_says_its_gate_by_one_field() -> None:
    """A spec without one has no word of it, in its name and in its JSON values."""
    plain = NormSpec((8,), op=RMS_NORM_BACKWARD.name)
    assert "gate" not in plain.name
    assert "gate" not in str(plain.to_dict())
    for gate, dtype in itertools.product(GATES, (None, "bf16")):
        spec = NormSpec((8,), op=RMS_NORM_BACKWARD.name, gate=gate, gate_dtype=dtype)
        assert f"_gate{gate}{dtype or ''}" in spec.name
        assert NormSpec.from_dict(spec.to_dict()) == spec
        call = bind(
            spec.op,
            {"grad_output": ONES, "input": ONES, "rstd": ONES[:, 0], "weight": ONES[0]}
            | {"gate": ONES.astype(ml_dtypes.bfloat16) if dtype else ONES},
            8,
            gate_first=gate == "before",
        )
        assert call.spec == spec


@pytest.mark.drawn
@both_orders
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_gate_goes_with_sets_of_weights_and_another_type_of_output(
    norm: str, gate_first: bool
) -> None:
    rng = random_generator()
    x, z, dy = rng.standard_normal((3, 4, 6, 20)).astype(np.float32)
    weight, bias = rng.standard_normal((2, 3, 20)).astype(np.float32)
    options: Any = {"weight": weight, "bias": bias, "rows_per_set": 2, "eps": 1e-5}
    options |= {"gate": z, "gate_first": gate_first}
    ours = getattr(iree_lnbwd, norm)(x, 20, output_dtype="bf16", **options).output
    exact = getattr(reference, norm)(x, 20, **options).output
    assert ours.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(ours.astype(np.float64), exact, 0.005, 1e-3)
    grads = getattr(iree_lnbwd, f"{norm}_backward")(dy, x, 20, **options)
    expected = getattr(reference, f"{norm}_backward")(dy, x, 20, **options)
    for name, got in grads._asdict().items():
        np.testing.assert_allclose(got, getattr(expected, name), 1e-3, 1e-4)
    assert grads.grad_weight.shape == (3, 20)
