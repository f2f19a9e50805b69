"""The norms as the very first use of a process, in which no test has warmed anything up.

Whatever PyTorch keeps of an operator when a compiler looks at it first must not be relied on later.
Every way to compile a model on a GPU is in `tests/gpu/test_compiled_ways.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

# The norms of this package, frozen, in every form.
MODEL = """
import torch, torch.nn as nn, iree_lnbwd.torch as lnbwd
from iree_lnbwd.torch import native

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([
            lnbwd.LayerNorm(24), lnbwd.LayerNorm(24, own_forward=True), lnbwd.RMSNorm(24),
            lnbwd.RMSNorm(24, memory_efficient=True),
        ])
        self.replaced = nn.Sequential(nn.LayerNorm(24), nn.RMSNorm(24))
        lnbwd.replace_norms(self.replaced)
        self.adds = nn.ModuleList([lnbwd.AddLayerNorm(24), lnbwd.AddRMSNorm(24)])

    def forward(self, x):
        for norm in self.norms:
            x = x + norm(x)
        total = x = self.replaced(x)
        for add in self.adds:
            x, total = add(x, total)
        return x, total
"""

EXPORTED = """
from torch._subclasses import FakeTensorMode
model = Model()
with torch.no_grad(), FakeTensorMode():
    for module in model.modules():  # .cuda() would ask for the GPU
        for name, parameter in module.named_parameters(recurse=False):
            there = nn.Parameter(torch.empty(parameter.shape, device="cuda"), False)
            module._parameters[name] = there
    x = torch.empty(5, 24, device="cuda")
    for outputs in (model(x), torch.export.export(model, (x,)).module()(x)):
        assert [(o.shape, o.dtype, o.device.type) for o in outputs] == [
            ((5, 24), torch.float32, "cuda")
        ] * 2
"""

COMPILED = """
torch.manual_seed(0)
model = Model()
x = torch.randn(5, 24, requires_grad=True)

def gradients(run):
    output, total = run(x)
    return torch.autograd.grad((output * total.sin()).sum(), (x, *model.parameters()))

def assert_right(run):
    for ours, expected in zip(gradients(run), gradients(model), strict=True):
        torch.testing.assert_close(ours, expected)

compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
first = gradients(compiled)
if {with_cpp}:
    assert native.load()
    assert_right(compiled)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
assert_right(compiled)
for ours, expected in zip(first, gradients(model), strict=True):
    torch.testing.assert_close(ours, expected)
"""


def assert_passes(script: str) -> None:
    words = [sys.executable, "-W", "ignore", "-c", MODEL + script]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_traced_on_a_gpu_that_is_not_there() -> None:
    assert_passes(EXPORTED)


def test_compiled_and_then_in_cpp(request: pytest.FixtureRequest) -> None:
    """C++ registers kernels that a compiler's dispatcher has looked up before."""
    with_cpp = request.config.getoption("--cpp-operators")
    assert_passes(COMPILED.replace("{with_cpp}", str(with_cpp)))
