"""Every op of the family: on this CPU, in the emulator, as functions, modules and commands.

What is special to one op is tested elsewhere; here are the promises that all of them share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import CPU_TARGETS, assert_right, assert_same_bits, random_generator

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec, cli, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import DEFAULT_EPS, BoundCall, bind, results_type, rms_eps
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, Kind, Op, names
from iree_lnbwd.schedules import RowBlocks, WholeTensors, most_few_rows
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.emulated_norm import EmulatedNorm

FORWARDS = [op.name for op in OPS.values() if not op.is_backward]
BACKWARDS = [op.name for op in OPS.values() if op.is_backward]
HOST = find_target("host")


def spec_of(op: str, columns: int, dtype: str, **options: Any) -> NormSpec:
    """With the eps that the op's function has."""
    if not OPS[op].is_backward:
        options.setdefault("eps", DEFAULT_EPS if OPS[op].centres else rms_eps(dtype))
    return NormSpec((columns,), dtype, op=op, **options)


def variants(op: str) -> Iterator[NormSpec]:
    """Each type, each option and some of them together, on different widths."""
    yield spec_of(op, 1, "f32")
    yield spec_of(op, 5, "bf16", residual_dtype="bf16")
    yield spec_of(op, 64, "f16", weight_offset=1.0)
    yield spec_of(op, 769, "bf16", weight_dtype="f32", residual_dtype="f32", weight_offset=1.0)
    yield spec_of(op, 300, "f64", residual_dtype="f64")
    yield spec_of(op, 1000, "f32", has_weight=False, residual_dtype="f32")
    if op in BACKWARDS:
        yield spec_of(op, 300, "f16", eps=1e-3, residual_dtype="f16")
        yield spec_of(op, 300, "f32", eps=1e-3, grad_output_dtype="bf16", residual_dtype="f32")
        yield spec_of(op, 300, "f16", from_output=True, weight_dtype="f32", residual_dtype="f32")
        yield spec_of(op, 33, "bf16", from_output=True, has_weight=False)
    if op == "layer_norm":
        yield spec_of(op, 65, "bf16", has_bias=False)
        yield spec_of(op, 65, "f16", bias_dtype="f32")
    if not OPS[op].atens_bias:
        yield spec_of(op, 65, "f16", bias_dtype="f32", has_bias=True)


VARIANTS = [spec for op in OPS for spec in variants(op)]
by_name = pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)


def arguments_of(call: BoundCall) -> dict[str, Any]:
    """The keyword arguments of the op's function, in the caller's shapes."""
    assert call.spec is not None
    spec, dims = call.spec, call.spec.normalized_shape
    shapes: dict[Kind, tuple[int, ...]] = {
        Kind.CELLS: (-1, *dims),
        Kind.COLUMNS: dims,
        Kind.ROWS: (-1,),
    }
    arrays: dict[str, Any] = {
        name: array.reshape(shapes[spec.family.named(name).kind])
        for name, array in call.arrays.items()
    }
    if call.has_bias and "bias" not in arrays:  # a backward reads its type alone
        arrays["bias"] = np.ones(dims, DTYPES[spec.beta_dtype].numpy)
    options: dict[str, Any] = {"normalized_shape": dims, "weight_offset": spec.weight_offset}
    if spec.eps is not None:
        options["eps"] = spec.eps
    if spec.family.is_backward:
        options["output_mask"] = spec.output_mask
    if spec.from_output:
        options["input"] = None
    return arrays | options


def called(call: BoundCall) -> Any:
    """The results of the op's function."""
    assert call.spec is not None
    return getattr(lnbwd, call.spec.op)(**arguments_of(call))


@pytest.mark.drawn
@by_name
def test_functions_are_right(spec: NormSpec) -> None:
    """With many rows, few, one and none; and with rows of Inf and NaN among others."""
    rng = random_generator()
    for rows in (300, 3, 1, 0):
        call = matrix.random_call(spec, rows, rng)
        assert_right(called(call), call)
    call = matrix.adversarial_call(spec, rng)
    assert_right(called(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "spec",
    [spec for spec in VARIANTS if spec.op != "layer_norm_backward" or spec.from_output],
    ids=lambda spec: spec.name,
)
def test_the_algorithm_and_its_oracle_agree(spec: NormSpec) -> None:
    """linalg on whole tensors, and StableHLO, which shares no line with it.

    That of the plain layer-norm backward is in test_stablehlo_oracle.py.
    """
    rng = random_generator()
    call = matrix.random_call(spec, 7, rng)
    whole, _ = compiler.build(spec, HOST, schedule=WholeTensors("asked for"))
    assert_right(runtime.load_built(whole).run(call), call)
    fixed = NormSpec(**{**spec.to_dict(), "rows": 7, "output_mask": spec.output_mask})
    oracle = compiler.build_oracle(fixed, HOST)
    assert_right(runtime.load_built(oracle).run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_fetching_rows_ahead_changes_no_bit(op: str, target: str) -> None:
    """At the edges of blocks, chunks and shares, with elements of several sizes."""
    rng = random_generator()
    spec = spec_of(op, 129, "bf16", residual_dtype="f32")
    ahead, alone = (
        runtime.load_built(compiler.build(spec, find_target(target), schedule=how)[0])
        for how in (RowBlocks(3, 2, 16), RowBlocks(3, 2, 16, fetches_ahead=False))
    )
    for rows in (13, 2, 1):
        call = matrix.random_call(spec, rows, rng)
        results = ahead.run(call)
        assert_right(results, call)
        assert_same_bits(results, alone.run(call))


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "sm_75", "gfx942", "gfx1100"])
@pytest.mark.parametrize("op", OPS)
def test_modules_for_gpus_are_right(op: str, target: str) -> None:
    """Rows that stay in registers, odd rows, and rows that no workgroup holds."""
    rng = random_generator()
    for columns, rows in ((64, 37), (769, 9), (65536, 2)):
        dtype = str(rng.choice(["f32", "bf16", "f16"]))
        residual = rng.choice([None, dtype, "f32"])  # type: ignore[arg-type]
        spec = spec_of(op, columns, dtype, residual_dtype=residual, weight_offset=1.0)
        vmfb, _ = compiler.build(spec, find_target(target))
        emulated = EmulatedNorm(vmfb)
        for call in (matrix.random_call(spec, rows, rng), matrix.random_call(spec, 1, rng)):
            assert_right(emulated.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtypes", "target"),
    [
        (("bf16", "bf16"), None),
        (("bf16", "f32"), None),
        (("f16", "f16"), None),
        (("f32", "f32"), None),
        (("bf16", "bf16"), "sm_90"),
        (("f32", "f32"), "sm_90"),
        (("bf16", "f32"), "gfx942"),
        (("f16", "f16"), "gfx942"),
    ],
)
@pytest.mark.parametrize("op", FORWARDS)
def test_a_fused_forward_has_the_bits_of_an_addition_and_a_norm(
    op: str, dtypes: tuple[str, str], target: str | None
) -> None:
    dtype, residual = dtypes
    rng = random_generator()
    shapes = [(35, 3), (1024, 3)]
    if target is not None:
        shapes.append((512, 257))  # 256 rows count as few
    for columns, rows in shapes:
        fused = spec_of(op, columns, dtype, residual_dtype=residual)
        plain = spec_of(op, columns, residual, eps=fused.eps, weight_dtype=dtype, bias_dtype=None)
        call = matrix.random_call(fused, rows, rng)
        got = ran(fused, target, call.arrays)
        sums = call.arrays["input"].astype(np.float32) + call.arrays["residual"].astype(np.float32)
        expected_sum = sums.astype(call.arrays["residual"].dtype)
        assert got.residual_output.tobytes() == expected_sum.tobytes()
        others = {k: v for k, v in call.arrays.items() if k not in ("input", "residual")}
        alone = ran(plain, target, {**others, "input": expected_sum})
        assert got.rstd.tobytes() == alone.rstd.tobytes()
        if dtype == residual:  # otherwise the two outputs are of different types
            assert_same_bits(got._replace(residual_output=None), alone)


def ran(spec: NormSpec, target: str | None, arrays: Mapping[str, Any]) -> Any:
    """A module's results, on this CPU or in the emulator."""
    options = {"eps": spec.eps, "weight_offset": spec.weight_offset}
    call = bind(spec.op, arrays, spec.normalized_shape, **options)  # type: ignore[arg-type]
    assert call.spec == spec
    vmfb, _ = compiler.build(spec, HOST if target is None else find_target(target))
    op = runtime.load_built(vmfb) if target is None else EmulatedNorm(vmfb)
    return op.run(call)


@pytest.mark.drawn
@pytest.mark.parametrize("op", OPS)
def test_rows_have_the_same_bits_whatever_else_is_in_the_call(op: str) -> None:
    """Results of a row depend on that row alone."""
    rng = random_generator()
    spec = spec_of(op, 300, "bf16", residual_dtype="bf16")
    call = matrix.random_call(spec, 300, rng)
    many = called(call)
    for row in (0, 17, 299):
        arrays = {
            name: array if spec.family.named(name).kind is Kind.COLUMNS else array[row : row + 1]
            for name, array in call.arrays.items()
        }
        one = called(call._replace(arrays=arrays, shape=(1, 300)))
        for name in ("output", "rstd", "residual_output", "grad_input"):
            if hasattr(one, name):
                assert getattr(one, name).tobytes() == getattr(many, name)[row].tobytes()


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("op", FORWARDS)
def test_few_rows_have_the_bits_of_many_on_gpus(op: str, target: str) -> None:
    """Each has a kernel of its own."""
    spec = spec_of(op, 520, "bf16")
    vmfb, manifest = compiler.build(spec, find_target(target))
    most = most_few_rows(manifest.schedule, spec)
    assert most is not None
    call = matrix.random_call(spec, most + 1, random_generator())
    emulated = EmulatedNorm(vmfb)
    many = emulated.run(call)
    few = {**call.arrays, "input": call.arrays["input"][:3]}
    for name, result in emulated.run(call._replace(arrays=few, shape=(3, 520)))._asdict().items():
        if result is not None:
            assert result.tobytes() == getattr(many, name)[:3].tobytes()


@pytest.mark.drawn
@pytest.mark.parametrize("op", OPS)
def test_a_module_takes_the_functions_arguments(op: str, tmp_path: Path) -> None:
    """Also into storage of the caller's, and from the command line."""
    rng = random_generator()
    spec = spec_of(op, 24, "f32", residual_dtype="f32")
    made = lnbwd.compile(spec, "host", tmp_path)
    module = lnbwd.load(made.path)
    call = matrix.random_call(spec, 5, rng)
    arrays = {k: v for k, v in arguments_of(call).items() if isinstance(v, np.ndarray)}
    results = module(**arrays)
    assert type(results) is results_type(OPS[op])
    assert_right(results, call)
    own = type(results)(*(None if r is None else np.full_like(r, 7) for r in results))
    assert module(**arrays, out=own) is own
    assert_same_bits(own, results)
    residual = "grad_residual" if OPS[op].is_backward else "residual"
    with pytest.raises(ValueError, match=f"^{residual}: this module takes a {residual}, got None$"):
        module(**(arrays | {residual: None}))
    npz.write(tmp_path / "given.npz", arrays)
    words = [
        "run",
        str(made.path),
        f"--input={tmp_path / 'given.npz'}",
        f"--output={tmp_path / 'o.npz'}",
    ]
    assert cli.main(words) == 0
    stored = npz.read(tmp_path / "o.npz")
    assert {name: array.tobytes() for name, array in stored.items()} == {
        name: array.tobytes() for name, array in results._asdict().items() if array is not None
    }


@pytest.mark.drawn
@pytest.mark.parametrize("op", OPS)
def test_verify_takes_the_op(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", f"--op={op}", "--normalized-shape=40", "--rows=3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{op} for host on local-task, random rows of seed ")
    for result in names(OPS[op].masked or OPS[op].results[:2]):
        assert result in said


@pytest.mark.parametrize("op", OPS)
def test_a_case_of_a_file_names_its_op(op: str, tmp_path: Path) -> None:
    call = matrix.random_call(spec_of(op, 40, "bf16", residual_dtype="bf16"), 3, random_generator())
    npz.write(tmp_path / "cases.npz", {f"case/{k}": v for k, v in call.arrays.items()})
    cases = npz.read_cases(tmp_path / "cases.npz")
    bound = verify.bind_case({**cases["case"], "op": np.array(op)}, source="case")
    assert bound.spec is not None
    assert bound.spec.op == op
    with pytest.raises(ValueError, match=r"^case: op: expected one of layer_norm, .*, got 'norm'$"):
        verify.bind_case({**cases["case"], "op": np.array("norm")}, source="case")


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("layer_norm", {"input": None}, TypeError, "input: expected "),
    (
        "layer_norm",
        {"residual": np.zeros((3, 7), np.float32)},
        ValueError,
        "residual: expected shape",
    ),
    ("layer_norm", {"bias": np.zeros(8, np.float64)}, ValueError, "bias: expected "),
    ("layer_norm", {"eps": None}, TypeError, "eps: expected a float, got NoneType"),
    (
        "rms_norm",
        {"residual": np.zeros((3, 8))},
        ValueError,
        "residual_dtype: expected |residual: ",
    ),
    ("rms_norm", {"eps": np.inf}, ValueError, "eps: expected a finite number"),
    ("rms_norm", {"weight": None, "weight_offset": 1.0}, ValueError, "weight_offset: expected 0.0"),
    (
        "rms_norm",
        {"weight_offset": -1e39},
        ValueError,
        "weight_offset: expected at most 3.4.*e.38 of f32, got -1e.39",
    ),
    ("rms_norm", {"weight_offset": "1"}, TypeError, "weight_offset: expected a float, got str"),
    (
        "rms_norm_backward",
        {"output_mask": (True,) * 3},
        ValueError,
        "output_mask: expected 2 bools",
    ),
    ("rms_norm_backward", {"rstd": np.zeros(2, np.float32)}, ValueError, "rstd: expected shape"),
    ("rms_norm_backward", {"grad_residual": 1}, TypeError, "grad_residual: expected a NumPy array"),
    (
        "layer_norm_backward",
        {"grad_residual": np.zeros((8, 3))},
        ValueError,
        "grad_residual: expected",
    ),
]


@pytest.mark.parametrize(("op", "wrong", "error", "said"), BAD)
def test_bad_arguments_are_named(
    op: str, wrong: dict[str, Any], error: type[Exception], said: str
) -> None:
    call = matrix.random_call(spec_of(op, 8, "f32"), 3, random_generator())
    with pytest.raises(error, match=rf"^(?:{said})"):
        getattr(lnbwd, op)(**(arguments_of(call) | wrong))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.is_backward], ids=lambda op: op.name
)
def test_a_backward_of_a_forward_is_its_derivative(op: Op) -> None:
    """By finite differences in f64, through the residual's sum as well."""
    rng = random_generator()
    forward = getattr(lnbwd, op.name.removesuffix("_backward"))
    x, residual, dy, dpast = rng.standard_normal((4, 3, 16))
    weight, bias = rng.standard_normal((2, 16))
    out = forward(x, 16, weight, bias=bias, residual=residual, weight_offset=1.0)
    statistics = {name: getattr(out, name) for name in names(op.statistics)}
    backward = getattr(lnbwd, op.name)
    grads = backward(
        dy, out.residual_output, 16, weight=weight, bias=bias, grad_residual=dpast,
        weight_offset=1.0, **statistics,
    )  # fmt: skip

    def loss(x: Any, weight: Any, bias: Any = bias) -> float:
        out = forward(x, 16, weight, bias=bias, residual=residual, weight_offset=1.0)
        return float((out.output * dy).sum() + (out.residual_output * dpast).sum())

    step = 1e-6
    for at in ((0, 0), (1, 7), (2, 15)):
        there = np.zeros_like(x)
        there[at] = step
        slope = (loss(x + there, weight) - loss(x - there, weight)) / (2 * step)
        assert abs(slope - grads.grad_input[at]) < 1e-7 * (1 + abs(slope))
        column = np.zeros_like(weight)
        column[at[1]] = step
        slope = (loss(x, weight + column) - loss(x, weight - column)) / (2 * step)
        assert abs(slope - grads.grad_weight[at[1]]) < 1e-7 * (1 + abs(slope))
        slope = (loss(x, weight, bias + column) - loss(x, weight, bias - column)) / (2 * step)
        assert abs(slope - grads.grad_bias[at[1]]) < 1e-7 * (1 + abs(slope))
