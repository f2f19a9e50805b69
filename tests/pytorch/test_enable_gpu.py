"""Our kernels in place of PyTorch's on a GPU: all operators, captures, streams, memory.

In C++, so these tests are for ``--cpp-operators``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import FORMS, assert_gradients_right, gradients_of, random_like, random_tensors
from torch import Tensor, nn

import iree_lnbwd.torch as lnbwd

pytestmark = pytest.mark.gpu
NAMES = {
    "layer_norm": ("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    "rms_norm": ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"),
}


@pytest.fixture(autouse=True)
def enabled(enable_ends: None) -> None:
    lnbwd.enable(forwards=True)


def outcomes() -> dict[str, set[str | None]]:
    """Why calls went to PyTorch's kernel, or None, by operator."""
    found: dict[str, set[str | None]] = {}
    for each in lnbwd.status().calls:
        found.setdefault(each.name, set()).add(each.reason)
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", NAMES)
def test_both_directions_are_ours(name: str, dtype: str) -> None:
    form, dims = FORMS[name], (96,)
    for rows in (5, 5, 300):  # the second time, such a call is known
        tensors = random_tensors(form, (rows,), dims, dtype, device="cuda")
        function = getattr(nn.functional, name)
        output = function(normalized_shape=dims, eps=1e-3, **tensors)
        reached = (random_like(output),)
        gradients = gradients_of((output,), tensors, reached)
        assert_gradients_right(form, tensors, dims, reached, gradients)
        with lnbwd.enabled():  # without the forwards
            theirs = function(normalized_shape=dims, eps=1e-3, **tensors)
        torch.testing.assert_close(output, theirs)
    assert outcomes() == {each: {None} for each in NAMES[name]}


def _step(x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    weight = torch.ones(x.shape[-1], device="cuda", dtype=x.dtype, requires_grad=True)
    output = nn.functional.layer_norm(leaf, x.shape[-1:], weight)
    return torch.autograd.grad(output, (leaf, weight), x.cos())  # type: ignore[no-any-return]


def test_a_first_call_inside_a_capture_is_pytorchs() -> None:
    x = torch.randn(7, 104, device="cuda")
    _step(x[:, :8].contiguous())  # what PyTorch sets up itself
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(x)
    graph.replay()
    torch.testing.assert_close(captured, _step(x))
    reasons = outcomes()["aten::native_layer_norm_backward"]
    assert reasons == {None, "the first call of its kind was inside a capture of a CUDA graph"}


def test_a_known_call_is_captured() -> None:
    x = torch.randn(7, 112, device="cuda", dtype=torch.bfloat16)
    expected = _step(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(x)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    for mine, theirs in zip(captured, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert outcomes()["aten::native_layer_norm_backward"] == {None}


def test_a_known_call_does_not_come_to_python() -> None:
    x = torch.randn(9, 120, device="cuda", dtype=torch.bfloat16)

    def tried() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            _step(x)
        return sum(e.name.startswith("iree_lnbwd::try_") for e in profiled.events())

    assert [tried(), tried()] == [2, 0]


def test_streams_and_memory() -> None:
    """Calls on streams of their own are right, and nothing stays of thousands."""
    x = torch.randn(64, 768, device="cuda", dtype=torch.bfloat16)
    expected = _step(x)
    before = torch.cuda.memory_allocated()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for i in range(3000):
        with torch.cuda.stream(streams[i % 3]):
            found = _step(x)
        if i % 500 == 0:
            streams[i % 3].synchronize()
            assert torch.equal(found[0], expected[0])
    del found
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
