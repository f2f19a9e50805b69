"""The backwards from the output: as functions, modules, commands, files, and in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_right, assert_same_bits, built, central_differences, random_generator

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, cli, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import FROM_OUTPUT
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.reference import F64
from iree_lnbwd.schedules import OnePass
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

every_op = pytest.mark.parametrize("op", FROM_OUTPUT)


def spec_of(op: str, columns: int, dtype: str = "f32", **options: Any) -> NormSpec:
    return NormSpec((columns,), dtype, op=op, from_output=True, **options)


def arguments(op: str, columns: int = 8) -> dict[str, Any]:
    """Good keyword arguments of the op's function."""
    call = matrix.random_call(spec_of(op, columns), 3, random_generator())
    return {**call.arrays, "input": None, "normalized_shape": columns}


# --- right results ---------------------------------------------------------------------------


@pytest.mark.drawn
@every_op
def test_it_is_the_derivative_of_its_forward(op: str) -> None:
    """By finite differences of the forward, with a weight offset of 1."""
    rng = random_generator()
    forward = getattr(lnbwd, op.removesuffix("_backward"))
    x, dy = rng.standard_normal((2, 4, 6))
    weight, bias = rng.standard_normal((2, 6)) / 4
    more = {"bias": bias} if FROM_OUTPUT[op].reads_bias else {}

    def loss(x: F64, weight: F64) -> float:
        return float((forward(x, 6, weight, weight_offset=1.0, **more).output * dy).sum())

    saved = forward(x, 6, weight, weight_offset=1.0, **more)
    grads = getattr(lnbwd, op)(
        dy, None, 6, rstd=saved.rstd, weight=weight, output=saved.output, weight_offset=1.0, **more
    )
    for got, want in (
        (grads.grad_input, central_differences(lambda at: loss(at, weight), x)),
        (grads.grad_weight, central_differences(lambda at: loss(x, at), weight)),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.drawn
@every_op
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_zero_weights_leave_all_gradients_finite(op: str, dtype: str) -> None:
    """And what they lose is theirs alone: the other columns have the bits of a call without."""
    rng = random_generator()
    call = matrix.random_call(spec_of(op, 300, dtype, output_mask=MASKS[op]), 17, rng)
    weight = call.arrays["weight"].copy()
    small = rng.random(300) < 0.2
    weight[small] = (LEAST_WEIGHT * rng.uniform(-1, 1, small.sum())).astype(weight.dtype)
    weight[np.flatnonzero(small)[::2]] = 0.0
    changed = call._replace(arrays={**call.arrays, "weight": weight})
    op_ = runtime.load_built(built(spec_of(op, 300, dtype, output_mask=MASKS[op]), HOST)[0])
    one, other = op_.run(call), op_.run(changed)
    assert_right(other, changed)
    got, without = (results._asdict()["grad_weight"] for results in (other, one))
    assert np.isfinite(got.astype(np.float64)).all()
    assert got[~small].tobytes() == without[~small].tobytes()


HOST = find_target("host")
MASKS = {name: (True,) * len(op.masked) for name, op in FROM_OUTPUT.items()}


@every_op
def test_a_module_takes_the_functions_arguments(op: str, tmp_path: Path) -> None:
    """Also into storage of the caller's, and from the command line."""
    spec = spec_of(op, 24, residual_dtype="f32")
    made = lnbwd.compile(spec, "host", tmp_path)
    assert "fromoutput" in made.path.name
    module = lnbwd.load(made.path)
    assert module.spec == spec
    call = matrix.random_call(spec, 5, random_generator())
    results = module(**call.arrays)
    assert_right(results, call)
    own = type(results)(*(None if r is None else np.full_like(r, 7) for r in results))
    assert module(**call.arrays, out=own) is own
    assert_same_bits(own, results)
    given, stored = tmp_path / "given.npz", tmp_path / "o.npz"
    npz.write(given, dict(call.arrays))
    assert cli.main(["run", str(made.path), f"--input={given}", f"--output={stored}"]) == 0
    for name, array in npz.read(stored).items():
        assert array.tobytes() == getattr(results, name).tobytes()


@pytest.mark.drawn
@every_op
def test_files_and_random_rows_are_verified(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = matrix.random_call(spec_of(op, 40, "bf16"), 3, random_generator())
    data = tmp_path / "cases.npz"
    npz.write(data, {f"case/{k}": v for k, v in call.arrays.items()} | {"case/op": np.array(op)})
    assert cli.main(["verify", f"--data={data}"]) == 0
    words = ["verify", f"--op={op}", "--from-output", "--normalized-shape=40", "--rows=3"]
    assert cli.main([*words, "--dtype=bf16"]) == 0
    assert capsys.readouterr().out.count("passed: ") == 2


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "columns", "rows"),
    [("sm_90", 769, 9), ("sm_75", 64, 37), ("gfx942", 769, 9), ("gfx1100", 64, 37)],
)
@every_op
def test_modules_for_gpus_are_right(op: str, target: str, columns: int, rows: int) -> None:
    """Among them weights near zero, and rows with Inf and NaN, which stay in their row."""
    rng = random_generator()
    dtype = str(rng.choice(["f32", "bf16", "f16"]))
    spec = spec_of(op, columns, dtype, weight_offset=float(rng.choice([0.0, 1.0])))
    emulated = EmulatedNorm(built(spec, find_target(target))[0])
    for call in (matrix.random_call(spec, rows, rng), matrix.adversarial_call(spec, rng, 5)):
        assert_right(emulated.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("value", [LEAST_WEIGHT / 3, np.inf])
@every_op
def test_a_row_that_is_read_twice_is_divided_once(op: str, value: float) -> None:
    """Its sum takes h * xhat without a division; what a weight does to a row is the same."""
    spec = spec_of(op, 520, "bf16")
    how = OnePass(2, 1, 4, vector=4, ahead=1, slots=2, rereads=True)
    vmfb, _ = compiler.build(spec, find_target("sm_90"), schedule=how)
    call = matrix.random_call(spec, 5, random_generator())
    weight = call.arrays["weight"].copy()
    weight[7] = value
    changed = call._replace(arrays={**call.arrays, "weight": weight})
    assert_right(EmulatedNorm(vmfb).run(changed), changed)


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_single_f64_elements(target: str) -> None:
    """No two of a row of 5 are loaded together; LLVM crashes on the sign of one f64 for AMD."""
    spec = spec_of("rms_norm_backward", 5, "f64")
    emulated = EmulatedNorm(built(spec, find_target(target))[0])
    rng = random_generator()
    for call in (matrix.random_call(spec, 3, rng), matrix.adversarial_call(spec, rng, 5)):
        assert_right(emulated.run(call), call)


def test_rows_that_no_workgroup_holds() -> None:
    spec = spec_of("layer_norm_backward", 65536, "bf16", output_mask=(True, True, False))
    emulated = EmulatedNorm(built(spec, find_target("sm_90"))[0])
    call = matrix.random_call(spec, 2, random_generator())
    assert_right(emulated.run(call), call)


# --- errors ----------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "input",
        {"input": np.zeros((3, 8), np.float32)},
        ValueError,
        "output: expected None beside input, got both",
    ),
    ("output", {"output": None}, TypeError, "input: expected an array, or output in its place"),
    ("rstd", {"rstd": None}, ValueError, "rstd: expected an array beside output, from which it "),
    (
        "shape",
        {"output": np.zeros((3, 7), np.float32)},
        ValueError,
        "output: expected a shape that ends in normalized_shape",
    ),
    (
        "type",
        {"output": np.zeros((3, 8), np.int32)},
        TypeError,
        "output: expected an element type of .*, got int32",
    ),
    ("no array", {"output": [1.0]}, TypeError, "output: expected a NumPy array"),
    (
        "grad_output",
        {"grad_output": np.zeros((4, 8), np.float32)},
        ValueError,
        "grad_output: expected shape",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "error", "said"), [bad[1:] for bad in BAD], ids=[b[0] for b in BAD]
)
@every_op
def test_bad_arguments_are_named(
    op: str, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=rf"^{said}"):
        getattr(lnbwd, op)(**(arguments(op) | wrong))


def test_a_mean_or_another_bias_is_named() -> None:
    good = arguments("layer_norm_backward")
    with pytest.raises(ValueError, match=r"^mean: expected None beside output, .*, got one$"):
        lnbwd.layer_norm_backward(**good, mean=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"^bias: expected shape \(8,\), got \(7,\)$"):
        lnbwd.layer_norm_backward(**(good | {"bias": np.zeros(7, np.float32)}))


@pytest.mark.drawn
@every_op
def test_modules_name_what_they_do_not_take(op: str, tmp_path: Path) -> None:
    columns = 24
    from_output = lnbwd.load(lnbwd.compile(spec_of(op, columns), "host", tmp_path).path)
    other = lnbwd.load(lnbwd.compile(NormSpec((columns,), op=op), "host", tmp_path).path)
    call = matrix.random_call(spec_of(op, columns), 3, random_generator())
    x = call.arrays["output"]
    given = {k: v for k, v in call.arrays.items() if k != "output"}
    with pytest.raises(ValueError, match=r"^input: this module takes output in its place$"):
        from_output(**given, input=x)
    with pytest.raises(ValueError, match=r"^output: this module takes input in its place$"):
        other(**given, output=x)
    with pytest.raises(ValueError, match=r"^rstd: expected an array beside output"):
        from_output(**(given | {"rstd": None}), output=x)
    if "bias" in given:
        with pytest.raises(ValueError, match=r"^bias: this module takes a bias, got None$"):
            from_output(**(given | {"bias": None}), output=x)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": "rms_norm", "eps": 1e-5}, "from_output: expected False for rms_norm, got True"),
        ({"eps": 1e-5}, "eps: expected None with from_output, .*, got 1e-05"),
    ],
)
def test_specs_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        NormSpec((8,), from_output=True, **options)
    with pytest.raises(TypeError, match=r"^from_output: expected a bool, got 1$"):
        NormSpec((8,), from_output=1)  # type: ignore[arg-type]


def test_a_case_has_an_input_or_an_output() -> None:
    arrays: dict[str, Array] = {k: v for k, v in bound().arrays.items() if v is not None}
    with pytest.raises(ValueError, match=r"^it: output: expected None beside input, got both$"):
        verify.bind_case({**arrays, "input": arrays["output"]}, source="it")
    without = {k: v for k, v in arrays.items() if k != "rstd"}
    with pytest.raises(ValueError, match=r"^it: rstd: expected an array beside output"):
        verify.bind_case(without, source="it")


def bound() -> BoundCall:
    return matrix.random_call(spec_of("layer_norm_backward", 8), 3, random_generator())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op=rms_norm"], "from-output: expected it beside a backward alone, got rms_norm"),
        (["--recompute-statistics=1e-5"], "recompute-statistics: expected none beside "),
        (["--op=rms_norm_backward", "--no-bias"], "no-bias: expected it beside "),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", "--print-ir", "--normalized-shape=8", "--from-output", *words]
    assert cli.main(command) == 2
    assert f"error: {said}" in capsys.readouterr().err


# --- what a spec says ------------------------------------------------------------------------


def test_the_type_of_a_bias_counts_where_it_is_read_or_its_gradient_is_asked_for() -> None:
    no_gradient: dict[str, Any] = {"output_mask": (True, True, False), "bias_dtype": "bf16"}
    op = "layer_norm_backward"
    assert spec_of(op, 8, **no_gradient).bias_dtype == "bf16"
    assert spec_of(op, 8, has_bias=False, **no_gradient).bias_dtype is None
    assert spec_of(op, 8, has_bias=False, bias_dtype="bf16").bias_dtype == "bf16"
    assert spec_of(op, 8).has_bias is True
    op = "rms_norm_backward"
    assert spec_of(op, 8).has_bias is False
    assert spec_of(op, 8, has_bias=True, **no_gradient).bias_dtype == "bf16"
    assert spec_of(op, 8, bias_dtype="bf16").bias_dtype is None
    assert DTYPES[spec_of(op, 8, "f64").acc_dtype].numpy == np.float64


def test_the_operands_of_both_ops() -> None:
    layer = [given.name for given in spec_of("layer_norm_backward", 8).inputs]
    assert layer == ["grad_output", "output", "rstd", "weight", "bias"]
    rms = [given.name for given in spec_of("rms_norm_backward", 8, residual_dtype="f32").inputs]
    assert rms == ["grad_output", "output", "rstd", "weight", "grad_residual"]
