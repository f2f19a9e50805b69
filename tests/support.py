"""What the tests share: fresh random arguments, and the judge."""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import iree_lnbwd as lnbwd
from iree_lnbwd import LayerNormGrads, Manifest, NormSpec, reference, runtime, schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import Fault
from iree_lnbwd.emulator.module import Edit
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.arguments import DEFAULT_EPS, Array, BoundCall, NormOutput, Results, bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, OPS, names
from iree_lnbwd.reference import F64
from iree_lnbwd.runtime import Norm
from iree_lnbwd.schedules import Forward, OnePass, Schedule, WholeTensors
from iree_lnbwd.stores import cache
from iree_lnbwd.verification import matrix, verify
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.verification.judge import Judgement

SEED_VARIABLE = "LNBWD_TEST_SEED"
# Those that this CPU runs.
CPU_TARGETS = (
    "host",
    *(target.name for target in cache.standing_in(find_target("host"))),
)


def random_generator() -> np.random.Generator:
    """A generator with a seed of its own every time, unless $LNBWD_TEST_SEED gives it.

    The seed is printed: pytest shows it where a test fails.
    """
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(64))
    print(f"{SEED_VARIABLE}={seed} repeats this data")
    return np.random.default_rng(seed)


def without_few_rows(spec: NormSpec, target: Target) -> Schedule:
    """What is chosen, but for any number of rows: so that a few of them test what many take."""
    chosen = schedules.choose(spec, target)
    if isinstance(chosen, Forward):
        return chosen.forms(spec)[-1]
    return replace(chosen, few_rows=None) if isinstance(chosen, OnePass) else chosen


@functools.cache
def built(spec: NormSpec, target: Target, how: Schedule | None = None) -> tuple[bytes, Manifest]:
    """As `compiler.build`, once for all tests of this process.

    By the chosen schedule, it is once for all processes of the tests: from their cache on disk.
    """
    if how in (None, schedules.choose(spec, target)):
        return cache.build(spec, target)
    return compiler.build(spec, target, schedule=how)


ARGUMENTS = ("grad_output", "input", "mean", "rstd", "weight", "bias")  # of a layer-norm backward


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of one layer-norm backward, under ATen's names."""

    grad_output: Array
    input: Array
    normalized_shape: tuple[int, ...]
    mean: Array | None = None
    rstd: Array | None = None
    weight: Array | None = None
    bias: Array | None = None
    output_mask: tuple[bool, ...] = (True, True, True)
    eps: float = DEFAULT_EPS

    def call(self) -> BoundCall:
        """Checked and flattened, as the package sees them."""
        given = {name: getattr(self, name) for name in ARGUMENTS}
        return bind(
            LAYER_NORM_BACKWARD.name, given, self.normalized_shape, self.output_mask, eps=self.eps
        )

    def backward(self, device: str | None = None) -> LayerNormGrads:
        """Through the package's function, on the CPU unless another device is named."""
        return lnbwd.layer_norm_backward(
            self.grad_output,
            self.input,
            self.normalized_shape,
            self.mean,
            self.rstd,
            self.weight,
            self.bias,
            self.output_mask,
            eps=self.eps,
            device=device,
        )

    def backward_by(self, op: Norm) -> LayerNormGrads:
        """Through a loaded module."""
        gradients: LayerNormGrads = op(*(getattr(self, name) for name in ARGUMENTS))
        return gradients

    def with_true_statistics(self) -> Arguments:
        """With mean and rstd of ``input``: f64 inside, rounded once to what the op takes."""
        leading = self.input.shape[: self.input.ndim - len(self.normalized_shape)]
        x = self.input.astype(np.float64).reshape(*leading, math.prod(self.normalized_shape))
        statistic = np.float64 if self.input.dtype == np.float64 else np.float32
        with np.errstate(all="ignore"):  # rows with Inf or NaN, and eps below -var
            mean = np.asarray(x.mean(axis=-1), statistic)
            rstd = np.asarray(1 / np.sqrt(x.var(axis=-1) + self.eps), statistic)
        return replace(self, mean=mean, rstd=rstd)


def normal(
    rng: np.random.Generator,
    dtype: str,
    shape: tuple[int, ...],
    *,
    scale: float = 1,
    offset: float = 0,
) -> Array:
    """Numbers from a normal distribution, of an element type by our name."""
    wide = np.float64 if dtype == "f64" else np.float32
    values = rng.standard_normal(shape, dtype=wide)
    values *= scale
    values += offset
    return values.astype(DTYPES[dtype].numpy, copy=False)


def random_arguments(
    rng: np.random.Generator,
    spec: NormSpec,
    leading: tuple[int, ...],
    *,
    x: Array | None = None,
    eps: float = DEFAULT_EPS,
) -> Arguments:
    """Random arguments whose call comes to ``spec``, with true statistics where it takes them.

    Args:
        rng: Where they are from.
        spec: Decides the shapes, the element types and which arguments there are.
        leading: The dimensions before ``normalized_shape``.
        x: Values for ``input``, in place of random ones.
        eps: Of the statistics, where the spec does not say.
    """

    dims = spec.normalized_shape
    arguments = Arguments(
        grad_output=normal(rng, spec.dy_dtype, (*leading, *dims)),
        input=(
            normal(rng, spec.dtype, (*leading, *dims), scale=2, offset=0.5)
            if x is None
            else x.astype(DTYPES[spec.dtype].numpy).reshape(*leading, *dims)
        ),
        normalized_shape=dims,
        weight=(
            normal(rng, spec.gamma_dtype, dims, scale=0.5, offset=1) if spec.has_weight else None
        ),
        bias=normal(rng, spec.beta_dtype, dims),
        output_mask=spec.output_mask,
        eps=eps if spec.eps is None else spec.eps,
    )
    return arguments.with_true_statistics() if spec.eps is None else arguments


def assert_matches_reference(actual: Results, arguments: Arguments) -> Judgement:
    """Each gradient is there if asked for, of the right shape and type, and within its tolerance.

    Returns:
        What the gradients were held against.
    """
    return assert_right(actual, arguments.call())


def assert_right(actual: Results, call: BoundCall) -> Judgement:
    """Each result is there if asked for, of the right shape and type, and within its tolerance.

    Returns:
        What the results were held against.
    """
    judgement = reference.judge(call)
    results = {} if call.spec is None else {r.name: r.dtype for r in call.spec.results}
    for name, got in actual._asdict().items():
        if name not in results:
            assert got is None, f"{name} was not asked for"
            continue
        expected = judgement.expected[name]
        assert got is not None, f"{name} is missing"
        assert got.shape == expected.shape, name
        assert got.dtype == DTYPES[results[name]].numpy, name
        comparison = reference.compare(got, expected, judgement.tolerance[name])
        assert comparison.passed, f"{name} of {call.spec}, input {call.shape}: {comparison}"
    return judgement


def assert_all_forms_right(spec: NormSpec) -> None:
    """On this CPU: the module that is chosen, the one of whole tensors, and the oracle."""
    host = find_target("host")
    compiled = {
        "product": compiler.build(spec, host)[0],
        "whole tensors": compiler.build(spec, host, schedule=WholeTensors("asked for"))[0],
        "oracle": compiler.build_oracle(replace(spec, rows=37), host),
    }
    rng = random_generator()
    calls = [matrix.random_call(spec, 37, rng), matrix.adversarial_call(spec, rng)]
    for name, vmfb in compiled.items():
        module = runtime.load_built(vmfb)
        for call in calls[: 2 if name == "product" else 1]:
            assert_right(module.run(call), call)


def checked(
    op: str,
    normalized_shape: int | tuple[int, ...],
    arrays: Mapping[str, Array | None],
    **options: Any,
) -> Any:
    """The results of an op's function; they are right.

    Args:
        op: The name of the op.
        normalized_shape: The trailing dimensions.
        arrays: By ATen's names.
        options: Those of the function.
    """
    results = getattr(lnbwd, op)(normalized_shape=normalized_shape, **arrays, **options)
    assert_right(results, bind(op, arrays, normalized_shape, **{"rows_per_set": 1, **options}))
    return results


def trained(
    forward: str,
    normalized_shape: int | tuple[int, ...],
    given: Mapping[str, Array | None],
    reached: Mapping[str, Array | None],
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[NormOutput, Any]:
    """A forward, and the backward from what it stored; the results of both are right.

    Args:
        forward: The name of its op.
        normalized_shape: The trailing dimensions.
        given: The arrays of the forward, by ATen's names.
        reached: ``grad_output``, and ``grad_residual`` where a gradient went past the norm.
        eps: Of the forward.
        weight_offset: Of both.
    """
    out = checked(forward, normalized_shape, given, eps=eps, weight_offset=weight_offset)
    op = OPS[f"{forward}_backward"]
    stored = {name: getattr(out, name) for name in names(op.statistics)}
    stored["input"] = given["input"] if out.residual_output is None else out.residual_output
    parameters = {name: given[name] for name in ("weight", "bias") if name in given}
    arrays = {**reached, **stored, **parameters}
    return out, checked(op.name, normalized_shape, arrays, weight_offset=weight_offset)


def assert_same_bits(actual: Results, expected: Results) -> None:
    """Equal to the last bit; NaN and the sign of zero count."""
    assert type(actual) is type(expected)
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            assert a.tobytes() == b.tobytes(), name


def gradients_of(results: Results) -> LayerNormGrads:
    """The results of a layer-norm backward."""
    assert isinstance(results, LayerNormGrads)
    return results


def present(gradient: Array | None) -> Array:
    """A gradient that was asked for."""
    assert gradient is not None
    return gradient


def central_differences(loss: Callable[[F64], float], at: F64) -> F64:
    """The gradient of a function, by going a step either way along each coordinate."""
    step = 1e-5
    gradient = np.empty_like(at)
    for i in np.ndindex(at.shape):
        ahead, behind = at.copy(), at.copy()
        ahead[i] += step
        behind[i] -= step
        gradient[i] = (loss(ahead) - loss(behind)) / (2 * step)
    return gradient


def assert_right_in_emulation(vmfb: bytes, spec: NormSpec, *rows: int, adversarial: int) -> None:
    """A module for a GPU is right for random calls, to the same bits again, and for hard ones.

    Args:
        vmfb: The module.
        spec: What it computes.
        rows: M of each random call.
        adversarial: M of `matrix.adversarial_call`.
    """
    emulated = EmulatedNorm(vmfb)
    rng = random_generator()
    for each in rows:
        call = matrix.random_call(spec, each, rng)
        results = emulated.run(call)
        assert_right(results, call)
        assert_same_bits(emulated.run(call), results)
    call = matrix.adversarial_call(spec, rng, adversarial)
    assert_right(emulated.run(call), call)


def assert_schedule_right_in_emulation(spec: NormSpec, how: Schedule, target: Target) -> None:
    """A schedule of few workgroups is right for fewer rows than these, and for more."""
    vmfb, _ = compiler.build(spec, target, schedule=how)
    if spec.rows is not None:
        assert_right_in_emulation(vmfb, spec, spec.rows, adversarial=spec.rows)
    else:
        assert_right_in_emulation(vmfb, spec, 1, 2, 7, adversarial=10)


def assert_rows_not_finite_apart(vmfb: bytes, spec: NormSpec) -> None:
    """Elements at the ends of some rows that are not finite change the dx of these rows alone."""
    call = matrix.random_call(spec, 24, random_generator())
    dy, x = call.arrays["grad_output"].copy(), call.arrays["input"].copy()
    dy[3, -1], x[12, -1], x[17, 0] = np.nan, np.inf, np.nan
    call = call._replace(arrays={**call.arrays, "grad_output": dy, "input": x})
    results = gradients_of(EmulatedNorm(vmfb).run(call))
    assert_right(results, call)
    finite = np.isfinite(np.asarray(results.grad_input, np.float32)).all(axis=-1)
    assert set(np.flatnonzero(~finite)) == {3, 12, 17}


def emulated_verdict(vmfb: bytes, spec: NormSpec, edit: Edit, rows: int) -> str:
    """Of a module whose text is edited: "passed", "missed" if a result is wrong, or its fault."""
    call = matrix.random_call(spec, rows, random_generator())
    # What a wrong bound adds once more is the first column. A small weight there would hide it.
    call.arrays["weight"][..., 0] = call.arrays["grad_output"][:, 0] = 4
    op = EmulatedNorm(vmfb, edit=edit)
    try:
        found = list(verify.verify({"": call}, lambda _: op))
    except Fault as fault:
        return str(fault)
    return "passed" if all(row.comparison.passed for row in found) else "missed"
