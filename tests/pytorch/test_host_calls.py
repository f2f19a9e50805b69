"""Known calls on the CPU, which C++ runs on PyTorch's threads. For ``--cpp-operators``."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from support import built, random_generator
from torch_support import TORCH_DTYPES, operator_of, taken, tensors_of, to_array

from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.calls import calling, modules
from iree_lnbwd.calls.calling import HostCall
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Options
from iree_lnbwd.ops.operands import FROM_OUTPUT, GATED, OPS, Op
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.torch import modulated_layer_norm, native
from iree_lnbwd.verification import matrix

HOST = DeviceUri.parse(DEFAULT_DEVICE)
COLUMNS = 200
THREADS = (1, 2, 8)


@pytest.fixture(autouse=True)
def in_cpp(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def cases() -> Iterator[NormSpec]:
    """Every op, type and mask, and every option that changes a launch."""
    for op in OPS.values():
        eps: dict[str, Any] = {} if op.is_backward else {"eps": 1e-3}
        of = {"op": op.name, **eps}
        for dtype in TORCH_DTYPES:
            yield NormSpec((COLUMNS,), dtype, **of)
        yield NormSpec((COLUMNS,), has_weight=False, **of)
        yield NormSpec((COLUMNS,), "bf16", weight_dtype="f32", residual_dtype="f32", **of)
        yield NormSpec((COLUMNS,), residual_dtype="f32", weight_offset=1.0, **of)
        if not op.atens_bias:
            yield NormSpec((COLUMNS,), "bf16", has_bias=True, bias_dtype="f32", **of)
        if not op.is_backward:
            yield NormSpec((COLUMNS,), output_dtype="bf16", residual_dtype="f16", **of)
            yield NormSpec((COLUMNS,), "bf16", output_dtype="f32", **of)
        if op.is_backward:
            for mask in itertools.product((True, False), repeat=len(op.masked)):
                if any(mask):
                    yield NormSpec((COLUMNS,), output_mask=mask, **of)
            yield NormSpec((COLUMNS,), eps=1e-3, **of)
            yield NormSpec((COLUMNS,), "bf16", from_output=True, **of)
            yield NormSpec((COLUMNS,), residual_dtype="f16", from_output=True, **of)
            for count in (2, 3, 4):
                yield NormSpec((COLUMNS,), "bf16", grad_outputs=count, **of)
            if not op.atens_bias:
                mask = (True, False, True)
                yield NormSpec((COLUMNS,), has_bias=True, output_mask=mask, **of)
                yield NormSpec((COLUMNS,), has_bias=True, from_output=True, **of)
    for op in (*OPS.values(), *FROM_OUTPUT.values()):
        yield from cases_of_sets(op)
    for op in (op for of_gate in GATED.values() for op in of_gate.values()):
        yield from cases_of_a_gate(op)


def cases_of_sets(op: Op) -> Iterator[NormSpec]:
    of: dict[str, Any] = {"op": op.name, "weight_sets": True, "from_output": op.from_output}
    of |= {} if op.is_backward else {"eps": 1e-3}
    for dtype in TORCH_DTYPES:
        yield NormSpec((COLUMNS,), dtype, **of)
    yield NormSpec((COLUMNS,), "bf16", weight_dtype="f32", residual_dtype="f32", **of)
    yield NormSpec((COLUMNS,), weight_offset=1.0, has_bias=op.takes_bias, **of)
    if not op.is_backward:
        yield NormSpec((COLUMNS,), output_dtype="bf16", residual_dtype="f16", **of)
    elif not op.from_output:
        for mask in itertools.product((True, False), repeat=len(op.gradients)):
            if any(mask):
                yield NormSpec((COLUMNS,), has_bias=op.takes_bias, output_mask=mask, **of)


def cases_of_a_gate(op: Op) -> Iterator[NormSpec]:
    assert op.gate is not None
    of: dict[str, Any] = {"op": op.name, "gate": op.gate.value}
    of |= {} if op.is_backward else {"eps": 1e-3}
    for dtype in TORCH_DTYPES:
        yield NormSpec((COLUMNS,), dtype, **of)
    yield NormSpec((COLUMNS,), has_weight=False, **of)
    yield NormSpec((COLUMNS,), "bf16", gate_dtype="f32", weight_offset=1.0, **of)
    yield NormSpec((COLUMNS,), gate_dtype="f16", weight_sets=True, has_bias=op.takes_bias, **of)
    if op.is_backward:
        yield NormSpec((COLUMNS,), "bf16", **of | {"eps": 1e-3})
        for has_bias in {False, op.takes_bias}:
            masks = itertools.product(
                (True, False), repeat=len(op.gradients_with(has_bias=has_bias))
            )
            for mask in filter(any, masks):
                yield NormSpec((COLUMNS,), has_bias=has_bias, output_mask=mask, **of)


def results(spec: NormSpec, given: list[Any], sets: Sets | None) -> dict[str, bytes]:
    """By the operator that computes a spec."""
    operator, options = operator_of(spec, sets, 1e-3)
    return bits(operator.results, operator.operator(*taken(operator, given), *options))


def bits(of: Sequence[str], tensors: Sequence[Any]) -> dict[str, bytes]:
    """By name, of what was computed."""
    found = zip(of, tensors, strict=True)
    return {name: to_array(tensor).tobytes() for name, tensor in found if tensor is not None}


def reaches_python(*_: Any, **__: Any) -> Any:
    raise AssertionError("a known call came to Python")


@pytest.mark.drawn
@pytest.mark.parametrize("spec", list(cases()), ids=lambda spec: spec.name)
def test_the_bits_of_irees_runtime_on_any_number_of_threads(
    spec: NormSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second call on, without Python. Large enough for several threads."""
    for rows in (1, 5, 2050):
        call = matrix.random_call(spec, rows, random_generator())
        given = tensors_of(spec, call)
        norm = modules.loaded(spec, HOST)
        arrays = [array for array in norm.run(call) if array is not None]
        flat = [
            array.reshape(r.dims(rows, call.sets))
            for array, r in zip(arrays, spec.results, strict=True)
        ]
        numbers = [call.sets.rows_per_set] if call.sets else []
        norm._iree().run([call.arrays[name] for name in norm._read], flat, numbers)
        expected = {r.name: array.tobytes() for r, array in zip(spec.results, flat, strict=True)}
        assert results(spec, given, call.sets) == expected  # Python's, if no test had such a call
        with monkeypatch.context() as patch:
            patch.setattr(calling, "call", reaches_python)
            for threads in THREADS:
                torch.set_num_threads(threads)
                assert results(spec, given, call.sets) == expected, (rows, threads)


def test_memory_that_begins_anywhere_is_used_where_it_lies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elements are aligned, rows need not be; columns that are apart are copied."""
    operator = torch.ops.iree_lnbwd.rms_norm.default
    x = torch.randn(7, 33)
    expected, _ = operator(x.clone(), None, None, [33], 1e-6, 0.0, False, None)
    room = torch.zeros(8 * 33)
    apart = torch.zeros(7, 40)[:, 3:36]
    operator(apart.copy_(x), None, None, [33], 1e-6, 0.0, False, None)  # another kind of call
    monkeypatch.setattr(calling, "call", reaches_python)
    for offset in (1, 2, 3, 5):
        there = room[offset : offset + x.numel()].view(7, 33).copy_(x)
        assert torch.equal(operator(there, None, None, [33], 1e-6, 0.0, False, None)[0], expected)
    for wide in (torch.zeros(7, 66)[:, ::2], torch.zeros(33, 7).T, apart):
        assert torch.equal(
            operator(wide.copy_(x), None, None, [33], 1e-6, 0.0, False, None)[0], expected
        )
    wide.untyped_storage().resize_(4)
    with pytest.raises(AssertionError, match="came to Python"):
        operator(wide, None, None, [33], 1e-6, 0.0, False, None)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="input: expected a tensor with 1104 bytes of storage"):
        operator(wide, None, None, [33], 1e-6, 0.0, False, None)


def test_a_modulation_is_used_as_a_linear_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale and shift as parts of one tensor, and a gradient that is one number for all."""
    torch.manual_seed(0)
    x, both = torch.randn(3, 5, 24), torch.randn(3, 3 * 24)

    def step(copies: bool) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, both)]
        scale, shift, _ = leaves[1].chunk(3, dim=1)
        if copies:
            scale, shift = scale.contiguous(), shift.contiguous()
        output = modulated_layer_norm(leaves[0], 24, scale, shift)
        return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]

    expected = step(copies=True)
    monkeypatch.setattr(calling, "call", reaches_python)
    for found, same in zip(step(copies=False), expected, strict=True):
        assert torch.equal(found, same)


def libraries() -> int:
    """Mapped pieces of kernels' libraries."""
    return Path("/proc/self/maps").read_text().count("/kernels.so")


def descriptors() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.drawn
def test_500_modules_leave_nothing_behind() -> None:
    """C++ keeps the code of the calls that it knows, and no other."""
    spec = NormSpec((24,), op="rms_norm", eps=1e-6)
    vmfb, _ = built(spec, find_target("generic"))
    given = [torch.ones(3, 24), None, torch.ones(24), None]
    options = Options(spec.family, (24,), (), 0.0, 1e-6)
    native.forget()
    gc.collect()
    before, open_before = libraries(), descriptors()
    for rows in range(500):
        given[0] = torch.ones(rows + 1, 24)
        native.remember(given, options, HostCall(runtime.load_built(vmfb), rows + 1))
    native._remembered.clear()  # Python's own
    gc.collect()
    assert libraries() > before + 500
    operator = torch.ops.iree_lnbwd.rms_norm.default
    ones = operator(torch.ones(500, 24), torch.ones(24), None, [24], 1e-6, 0.0, False, None)[0]
    torch.testing.assert_close(ones, torch.ones(500, 24))
    torch.ops.iree_lnbwd.forget()
    gc.collect()
    assert libraries() <= before
    assert descriptors() <= open_before


def run(script: str) -> None:
    """In a process of its own."""
    words = [sys.executable, "-c", SETUP + script]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr  # which says what it compiled


SETUP = """
import os, signal, threading
import torch
from iree_lnbwd.calls import calling, modules
from iree_lnbwd.torch import native
assert native.load()
torch.set_num_threads(2)
torch.manual_seed(0)
x, dy, weight = torch.randn(2000, 512), torch.randn(2000, 512), torch.randn(512)

def call():
    ours = torch.ops.iree_lnbwd
    y, rstd = ours.rms_norm.default(x, weight, None, [512], 1e-6, 0.0, False, None)
    dx, dw, _ = ours.rms_norm_backward.default(
        dy, x, rstd, weight, *[None] * 5, [512], [True, True, False], 1e-6, 0.0
    )
    return b"".join(t.numpy().tobytes() for t in (y, rstd, dx, dw))

first = call()

def reaches_python(*_, **__):
    raise AssertionError("a known call came to Python")

in_python, calling.call = calling.call, reaches_python
assert call() == first
"""


@pytest.mark.drawn
def test_a_child_of_fork_whose_parent_used_threads() -> None:
    """ATen's own layer norm hangs there."""
    run(
        """
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # what hangs is killed
        grandchild = os.fork()
        assert call() == first
        if grandchild == 0:
            os._exit(0)
        assert os.waitpid(grandchild, 0)[1] == 0
        os._exit(0)
    children.append(child)
assert call() == first
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
assert call() == first
"""
    )


@pytest.mark.drawn
def test_a_child_of_fork_copies_what_is_strided_on_its_own_thread() -> None:
    """PyTorch's copy hangs there."""
    run(
        """
ours, wide = torch.ops.iree_lnbwd.rms_norm.default, x.repeat_interleave(2, 1)[:, ::2]

def of(x):
    return ours(x, weight, None, [512], 1e-6, 0.0, False, None)[0].numpy().tobytes()

expected = of(x)
assert of(wide) == expected
child = os.fork()
if child == 0:
    signal.alarm(60)
    calling.call = in_python
    assert of(wide) == expected
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


@pytest.mark.drawn
def test_a_child_of_fork_takes_pytorchs_forward_on_its_own_thread() -> None:
    """Called by itself, it hangs there."""
    run(
        """
def of(x):
    ours = torch.ops.iree_lnbwd.layer_norm.default
    return b"".join(t.numpy().tobytes() for t in ours(x, weight, None, [512], 1e-6))

expected = of(x)
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert of(x) == expected
    assert torch.get_num_threads() == 2
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )


@pytest.mark.drawn
def test_a_child_of_fork_where_the_operators_are_loaded_first() -> None:
    """The parent used ATen's threads, and has imported us."""
    script = """
import os, signal
import torch
import iree_lnbwd.torch
from iree_lnbwd.torch import native

torch.set_num_threads(2)
x = torch.randn(2000, 512)
expected = torch.nn.functional.rms_norm(x, (512,), eps=1e-6).numpy()
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert native.load()
    for _ in range(2):
        y, _ = torch.ops.iree_lnbwd.rms_norm.default(x, None, None, [512], 1e-6, 0.0, False, None)
        assert abs(y.numpy() - expected).max() < 1e-5
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    words = [sys.executable, "-c", script]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


@pytest.mark.drawn
def test_threads_keep_their_rules_of_numbers() -> None:
    """Those of PyTorch's pool, too: what flushes subnormal numbers goes on, and what does not."""
    run(
        """
small = torch.full((2000, 512), 1e-40)

def flushes():
    'Whether each half, which a thread of its own computes, becomes zero.'
    halves = (small * 0.5).view(2, -1)
    return [bool((half == 0).all()) for half in halves]

for flush in (False, True):
    torch.set_flush_denormal(flush)
    before = flushes()
    assert call() == first
    assert flushes() == before, (flush, before, flushes())
"""
    )


@pytest.mark.drawn
def test_threads_call_at_once() -> None:
    """While the calls are forgotten, which then come to Python again."""
    run(
        """
calling.call = in_python
wrong = []

def calls():
    for _ in range(20):
        if call() != first:
            wrong.append(1)

threads = [threading.Thread(target=calls) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(20):
    native.forget()
for thread in threads:
    thread.join()
assert not wrong
"""
    )


def test_modules_of_another_kind_stay_with_irees_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that state no launches, as older versions made them: every call comes to Python."""
    spec = NormSpec((56,), op="rms_norm", eps=1e-6, has_weight=False)
    vmfb, _ = built(spec, find_target("generic"))
    old = runtime.load_built(vmfb)
    described = old._module.description._replace(launches=None)
    old._module = old._module._replace(description=described)
    x = torch.randn(3, 56)
    monkeypatch.setattr(modules, "_alive", {(spec, HOST): old})
    modules.loaded.cache_clear()
    operator = torch.ops.iree_lnbwd.rms_norm.default
    first = operator(x, None, None, [56], 1e-6, 0.0, False, None)[0]
    assert torch.equal(operator(x, None, None, [56], 1e-6, 0.0, False, None)[0], first)
    monkeypatch.setattr(calling, "call", reaches_python)
    with pytest.raises(AssertionError, match="came to Python"):
        operator(x, None, None, [56], 1e-6, 0.0, False, None)
    modules.loaded.cache_clear()
