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
from torch_support import operator_of, taken, tensors_of, to_array

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import BoundCall, Options, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    FROM_OUTPUT,
    GATED,
    LAYER_NORM_BACKWARD,
    OPS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Kind,
    When,
)
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.runtime.stream_module import LaunchSequence
from iree_lnbwd.torch import native, overrides, overrides_in_python
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
    {"grad_outputs": 3, **_RESIDUAL},
]


def own_cases() -> Iterator[NormSpec]:
    for op in OPS.values():
        for more in _BACKWARDS if op.is_backward else _FORWARDS:
            options = {"eps": None if op.is_backward else EPS, **more}
            has_bias = op.centres if "from_output" in more else None
            yield NormSpec((COLUMNS,), op=op.name, has_bias=has_bias, **options)
            if not op.atens_bias:
                yield NormSpec((COLUMNS,), op=op.name, has_bias=True, **options)


def cases_of_sets_and_gates() -> Iterator[NormSpec]:
    gated = (op for of_gate in GATED.values() for op in of_gate.values())
    for op in (*OPS.values(), *FROM_OUTPUT.values(), *gated):
        options: dict[str, Any] = {"op": op.name, "from_output": op.from_output}
        options |= {} if op.is_backward else {"eps": EPS}
        if op.gate is not None:
            options["gate"] = op.gate.value
            yield NormSpec((COLUMNS,), gate_dtype="bf16", **options)
            yield NormSpec((COLUMNS,), has_weight=False, **options)
        yield NormSpec((COLUMNS,), weight_sets=True, weight_offset=1.0, **options)
        yield NormSpec((COLUMNS,), "bf16", weight_sets=True, has_bias=op.takes_bias, **options)


OWN_CASES = [*CASES, *own_cases(), *cases_of_sets_and_gates()]
CASES_OF_SETS = [spec for spec in OWN_CASES if spec.weight_sets]


def learned(
    spec: NormSpec, call: BoundCall, given: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[NativeDriver, LaunchSequence]:
    """C++ is told of the calls of a spec, one of which has these tensors; what they launch."""
    sets = call.sets
    sizes = {
        row.name: math.prod(filter(None, row.kind.shape(ROWS, COLUMNS)))
        * (sets.number if sets and row.kind is Kind.COLUMNS else 1)
        * DTYPES[spec.element_type(row.element)].numpy.itemsize
        for row in (*spec.family.inputs, *spec.family.results)
    }
    driver = NativeDriver()
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    target = find_target("sm_90")
    vmfb, _ = built(spec, target, without_few_rows(spec, target))
    module = runtime.load_built(vmfb, "cuda")._gpu
    sequence = module.sequence(ROWS, sets)
    assert sequence is not None
    driver.knows(sequence, sizes)
    known = KnownCall(module, ROWS, 0, tuple, (), (), (), sequence, sets)
    operator, _ = operator_of(spec, sets, EPS)
    options = Options(
        *(operator.op, (COLUMNS,), spec.output_mask, spec.weight_offset, spec.eps),
        output_dtype=spec.output_dtype,
        rows_per_set=sets.rows_per_set if sets else None,
    )
    native.remember(given, options, known)
    return driver, sequence


@pytest.mark.drawn
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_known_call_of_atens_is_launched(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(spec, ROWS, random_generator())
    tensors = tensors_of(spec, call)
    driver, sequence = learned(spec, call, tensors, monkeypatch)
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


@pytest.mark.drawn
@pytest.mark.parametrize("spec", OWN_CASES, ids=lambda spec: spec.name)
def test_a_known_call_of_ours_is_launched(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(spec, ROWS, random_generator())
    given = tensors_of(spec, call)
    driver, sequence = learned(spec, call, given, monkeypatch)
    operator, options = operator_of(spec, call.sets, EPS)
    for count in (1, 2):
        ours = operator.operator(*taken(operator, given), *options)
        assert not driver.errors
        assert len(driver.launches) == count * len(sequence.launches)
        found = dict(zip(operator.results, map(to_array, ours), strict=True))
        assert_right(results_of(spec.family, found), call)


def other(spec: NormSpec) -> NormSpec:
    """With another value of each option."""
    changed = replace(spec, weight_offset=0.5 if spec.has_weight else 0.0)
    return changed if spec.eps is None else replace(changed, eps=2 * spec.eps)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", CASES_OF_SETS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("sets", [Sets(1, 1), Sets(2, 1), Sets(3, 1), Sets(2, 2), Sets(7, 1)])
def test_other_sets_are_launched_with_other_numbers(
    spec: NormSpec, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with all of them are known at once; some sets have no row."""
    known = [random_call(spec, ROWS, random_generator(), each) for each in (sets, Sets(3, 2))]
    of = [(call, tensors_of(spec, call)) for call in known]
    launched = [learned(spec, *each, monkeypatch) for each in of]
    for (call, given), (driver, sequence) in zip(of, launched, strict=True):
        operator, options = operator_of(spec, call.sets, EPS)
        ours = operator.operator(*taken(operator, given), *options)
        assert not driver.errors
        assert len(driver.launches) == len(sequence.launches)
        found = dict(zip(operator.results, map(to_array, ours), strict=True))
        assert_right(results_of(spec.family, found), call)


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
    driver, _ = learned(spec, call, given, monkeypatch)
    sets = call.sets and Sets(call.sets.number, 1)
    operator, options = operator_of(other(spec), sets, EPS)
    monkeypatch.undo()  # the CPU's modules compute it
    ours = operator.operator(*taken(operator, given), *options)
    assert not driver.launches
    found = dict(zip(operator.results, map(to_array, ours), strict=True))
    assert_right(results_of(spec.family, found), call._replace(spec=other(spec), sets=sets))
