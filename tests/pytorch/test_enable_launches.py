"""What C++ launches in place of PyTorch's kernels: the GPU is the emulator, and a launch a call.

The tensors are on the CPU, where nothing but the driver and the stream differs for C++. Their
memory is copied to the emulated GPU before each kernel, and back. For ``--cpp-operators``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from native_driver import NativeDriver
from support import assert_right, built, random_generator, without_few_rows
from torch_support import TORCH_DTYPES, to_array, to_tensor

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import NormSpec, runtime, torch_native
from iree_lnbwd.arguments import BoundCall, results_of
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import LAYER_NORM_BACKWARD, OPS, RMS_NORM, RMS_NORM_BACKWARD, names
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.runtime.stream_module import LaunchSequence
from iree_lnbwd.targets import find_target
from iree_lnbwd.torch import attempts, overrides
from iree_lnbwd.verification.matrix import random_call

COLUMNS, ROWS, EPS = 96, 5, 1e-3


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All operators and sizes are ours there."""
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    for op in OPS.values():
        monkeypatch.setitem(overrides._RULES, ("cpu", op), overrides._ALL)
    yield
    lnbwd.disable()
    torch.ops.iree_lnbwd.forget()
    torch_native._remembered.clear()
    torch_native._modules.clear()


@pytest.fixture
def registered(on_the_cpu: None) -> Iterator[None]:
    """Kernels for the CPU where PyTorch has none."""
    library = torch.library.Library("aten", "IMPL")
    for op in (RMS_NORM, RMS_NORM_BACKWARD):
        library.impl(attempts.ATENS[op], _unexpected, "CPU")
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


def learned(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[NativeDriver, LaunchSequence]:
    """C++ is told of the calls of a spec; what they launch."""
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
    of_weight = TORCH_DTYPES[spec.gamma_dtype] if spec.has_weight else None
    has_bias = spec.has_bias or spec.output_mask[2:] == (True,)
    kind = torch_native.CallKind(
        spec.family,
        torch.device("cpu"),
        ROWS,
        COLUMNS,
        TORCH_DTYPES[spec.dy_dtype] if spec.family.is_backward else None,
        TORCH_DTYPES[spec.dtype],
        of_weight,
        TORCH_DTYPES[spec.beta_dtype] if has_bias else None,
        (*spec.output_mask, False, False, False)[:3],  # type: ignore[arg-type]
        spec.eps,
    )
    torch_native.remember(kind, known)
    return driver, sequence


def given(spec: NormSpec, call: BoundCall) -> list[Any]:
    """The arguments of ATen's operator."""
    tensors = {name: to_tensor(array, "cpu") for name, array in call.arrays.items()}
    x, weight, dims = tensors["input"], tensors.get("weight"), [COLUMNS]
    bias = torch.ones(COLUMNS, dtype=TORCH_DTYPES[spec.beta_dtype])
    if not spec.family.is_backward:
        biases = [tensors.get("bias")] if spec.family.centres else []
        return [x, dims, weight, *biases, spec.eps]
    statistics = [tensors[name].view(ROWS, 1) for name in names(spec.family.statistics)]
    biases = [bias if spec.output_mask[2] else None] if spec.family.centres else []
    return [tensors["grad_output"], x, dims, *statistics, weight, *biases, spec.output_mask]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_a_known_call_is_launched(spec: NormSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(spec, ROWS, random_generator())
    driver, sequence = learned(spec, monkeypatch)
    lnbwd.enable(forwards=True)
    operator = getattr(torch.ops.aten, attempts.ATENS[spec.family]).default
    ours = operator(*given(spec, call))
    assert not driver.errors
    assert len(driver.launches) == len(sequence.launches)
    found = dict(zip(attempts._results(spec.family), map(to_array, ours), strict=True))
    assert_right(results_of(spec.family, found), call)
    counts = [each[2:] for each in lnbwd.status().calls]
    assert counts == [(None, 1)]
