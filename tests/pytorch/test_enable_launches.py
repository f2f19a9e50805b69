"""What C++ launches in place of PyTorch's kernels: the GPU is the emulator, and a launch a call.

The tensors are on the CPU, where nothing but the driver and the stream differs for C++. Their
memory is copied to the emulated GPU before each kernel, and back. For ``--cpp-operators``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from native_driver import NativeDriver
from support import assert_right, built, random_generator, without_few_rows
from torch_support import TORCH_DTYPES, to_array, to_tensor

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import BoundCall, Options, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    LAYER_NORM_BACKWARD,
    OPS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Operand,
    When,
    names,
)
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.runtime.stream_module import LaunchSequence
from iree_lnbwd.torch import native, overrides, overrides_in_python
from iree_lnbwd.torch.operator_table import GRADIENTS, NORMS, Gradients, Norm
from iree_lnbwd.torch.override_places import PLACES
from iree_lnbwd.verification.matrix import random_call

COLUMNS, ROWS, EPS = 96, 5, 1e-3


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All operators are ours there."""
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    on_cpu = (("cpu", op) for op in OPS.values())
    places = dict.fromkeys((*PLACES, *on_cpu))
    monkeypatch.setattr(overrides, "PLACES", tuple(places))
    yield
    lnbwd.disable()
    torch.ops.iree_lnbwd.forget()
    native._remembered.clear()
    native._modules.clear()


@pytest.fixture
def registered(on_the_cpu: None) -> Iterator[None]:
    """Kernels for the CPU where PyTorch has none."""
    library = torch.library.Library("aten", "IMPL")
    for op in (RMS_NORM, RMS_NORM_BACKWARD):
        library.impl(overrides_in_python.ATENS[op], _unexpected, "CPU")
    yield
    lnbwd.disable()
    library._destroy()


def _unexpected(*_: Any) -> Any:
    raise AssertionError("a call that was not launched")


CASES = [
    NormSpec(
        (COLUMNS,),
        op=op.name,
        eps=None if op.is_backward else EPS,
        has_weight=has_weight,
        output_mask=(True, has_weight, has_weight)[: len(op.masked)],
    )
    for op in OPS.values()
    for has_weight in (True, False)
] + [
    NormSpec((COLUMNS,), "bf16", op=LAYER_NORM_BACKWARD.name, output_mask=(False, True, True)),
    NormSpec((COLUMNS,), "bf16", op=RMS_NORM_BACKWARD.name, output_mask=(True, False)),
]

# What only operators of ours compute.
_RESIDUAL: dict[str, Any] = {"residual_dtype": "f32"}
_MIXED: dict[str, Any] = {"dtype": "bf16", "residual_dtype": "f32", "weight_dtype": "f32"}
_FORWARDS: list[dict[str, Any]] = [
    *(_RESIDUAL, _RESIDUAL | {"weight_offset": 1.0}, _MIXED),
    _RESIDUAL | {"output_dtype": "bf16"},
]
_BACKWARDS: list[dict[str, Any]] = [
    _RESIDUAL,
    _RESIDUAL | {"weight_offset": 1.0},
    {"eps": EPS},  # the statistics are recomputed
    {"from_output": True},
    {"from_output": True, **_RESIDUAL},
]


def own_cases() -> Iterator[NormSpec]:
    for op in OPS.values():
        for more in _BACKWARDS if op.is_backward else _FORWARDS:
            options = {"eps": None if op.is_backward else EPS, **more}
            has_bias = op.centres if "from_output" in more else None
            yield NormSpec((COLUMNS,), op=op.name, has_bias=has_bias, **options)
            if not op.atens_bias:
                yield NormSpec((COLUMNS,), op=op.name, has_bias=True, **options)


OWN_CASES = [*CASES, *own_cases()]


def learned(
    spec: NormSpec, given: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[NativeDriver, LaunchSequence]:
    """C++ is told of the calls of a spec, one of which has these tensors; what they launch."""
    sizes = {
        row.name: math.prod(filter(None, row.kind.shape(ROWS, COLUMNS)))
        * DTYPES[spec.element_type(row.element)].numpy.itemsize
        for row in (*spec.family.inputs, *spec.family.results)
    }
    driver = NativeDriver()
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    target = find_target("sm_90")
    vmfb, _ = built(spec, target, without_few_rows(spec, target))
    module = runtime.load_built(vmfb, "cuda")._gpu
    sequence = module.sequence(ROWS)
    assert sequence is not None
    driver.knows(sequence, sizes)
    known = KnownCall(module, ROWS, 0, tuple, (), (), (), sequence)
    op = spec.family if spec.output_dtype is None else OPS[spec.op]
    options = Options(
        *(op, (COLUMNS,), spec.output_mask, spec.weight_offset, spec.eps, spec.output_dtype)
    )
    native.remember(given, options, known)
    return driver, sequence


def tensors_of(spec: NormSpec, call: BoundCall) -> list[Any]:
    """In the order of the op's table; the statistics with the dimension that PyTorch's have."""
    tensors = {name: to_tensor(array, "cpu") for name, array in call.arrays.items()}
    for name in names(spec.family.statistics):
        if name in tensors:
            tensors[name] = tensors[name].view(ROWS, 1)
    if spec.output_mask[2:] == (True,):
        tensors.setdefault("bias", torch.ones(COLUMNS, dtype=TORCH_DTYPES[spec.beta_dtype]))
    return [tensors.get(argument.name) for argument in spec.family.arguments]


@pytest.mark.drawn
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_known_call_of_atens_is_launched(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(spec, ROWS, random_generator())
    tensors = tensors_of(spec, call)
    driver, sequence = learned(spec, tensors, monkeypatch)
    lnbwd.enable(forwards=True)
    operator = getattr(torch.ops.aten, overrides_in_python.ATENS[spec.family]).default
    data = 2 if spec.family.is_backward else 1  # ATen has the dimensions behind it
    others = [
        t
        for t, o in zip(tensors, spec.family.arguments, strict=True)
        if o.when not in (When.RESIDUAL_GIVEN, When.SO_MANY_GIVEN)
        and (o.name != "bias" or spec.family.atens_bias)
    ]
    last = spec.output_mask if spec.family.is_backward else spec.eps
    ours = operator(*others[:data], [COLUMNS], *others[data:], last)
    assert not driver.errors
    assert len(driver.launches) == len(sequence.launches)
    found = dict(zip(overrides_in_python._results(spec.family), map(to_array, ours), strict=True))
    assert_right(results_of(spec.family, found), call)
    counts = [each[2:] for each in lnbwd.status().calls]
    assert counts == [(None, 1)]


def operator_of(spec: NormSpec) -> tuple[Norm | Gradients, tuple[Any, ...]]:
    """The operator that computes a spec, and its options."""
    op = spec.family if spec.output_dtype is None else OPS[spec.op]
    if op.is_backward:
        found = next(each for each in GRADIENTS if each.op is op)
        eps = EPS if spec.eps is None else spec.eps  # which it has no use for
        return found, ([COLUMNS], spec.output_mask, eps, spec.weight_offset)
    has_residual = spec.has(op.named("residual"))
    norm = next(
        each
        for each in NORMS
        if (each.op, each.takes_residual, each.own_forward) == (op, has_residual, True)
    )
    output_dtype = None if spec.output_dtype is None else TORCH_DTYPES[spec.output_dtype]
    return norm, ([COLUMNS], spec.eps, spec.weight_offset, False, output_dtype)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", OWN_CASES, ids=lambda spec: spec.name)
def test_a_known_call_of_ours_is_launched(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(spec, ROWS, random_generator())
    given = tensors_of(spec, call)
    driver, sequence = learned(spec, given, monkeypatch)
    operator, options = operator_of(spec)
    taken = [t for t, o in zip(given, spec.family.arguments, strict=True) if takes(operator, o)]
    for count in (1, 2):
        ours = operator.operator(*taken, *options)
        assert not driver.errors
        assert len(driver.launches) == count * len(sequence.launches)
        found = dict(zip(operator.results, map(to_array, ours), strict=True))
        assert_right(results_of(spec.family, found), call)


def takes(operator: Norm | Gradients, argument: Operand) -> bool:
    return argument.name in names(operator.op.arguments) and (
        isinstance(operator, Gradients) or argument in operator.arguments
    )


def other(spec: NormSpec) -> NormSpec:
    """With another value of each option."""
    changed = replace(spec, weight_offset=0.5 if spec.has_weight else 0.0)
    return changed if spec.eps is None else replace(changed, eps=2 * spec.eps)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", OWN_CASES, ids=lambda spec: spec.name)
def test_a_call_with_other_options_is_of_another_kind(
    spec: NormSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to Python, on the same tensors, and its results are those of its own options."""
    if other(spec) == spec:
        pytest.skip("it has none")
    call = random_call(spec, ROWS, random_generator())
    given = tensors_of(spec, call)
    driver, _ = learned(spec, given, monkeypatch)
    operator, options = operator_of(other(spec))
    taken = [t for t, o in zip(given, spec.family.arguments, strict=True) if takes(operator, o)]
    monkeypatch.undo()  # the CPU's modules compute it
    ours = operator.operator(*taken, *options)
    assert not driver.launches
    found = dict(zip(operator.results, map(to_array, ours), strict=True))
    assert_right(results_of(spec.family, found), call._replace(spec=other(spec)))
