"""Without IREE's compiler, and without a module, PyTorch's operators compute all norms."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import (
    EPS,
    FORMS,
    Form,
    assert_gradients_right,
    gradients_of,
    random_like,
    random_tensors,
)
from torch import Tensor, nn
from torch_support import to_array

from iree_lnbwd import CompileError, reference
from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.torch import LayerNorm, layer_norm, replace_norms, rms_norm, warmup
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.replacement.classes import ReplacedNorm

SAID = "PyTorch's operators compute norms without a module: "


@pytest.fixture
def columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A width that no other test has compiled, and a compiler that fails."""
    compiler = tmp_path / "iree-compile"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path))
    REFUSALS.forget()
    yield int(random_generator().integers(100, 4000))
    REFUSALS.forget()


def check(form: Form, tensors: Mapping[str, Tensor], columns: int, *, memory_efficient: bool,
          weight_offset: float) -> None:  # fmt: skip
    """Outputs and gradients are within the derived tolerances, as those of modules are."""
    options = {"weight_offset": weight_offset, "memory_efficient": memory_efficient}
    outputs = form(tensors, columns, **options)
    given = {name: to_array(tensor) for name, tensor in tensors.items()}
    call = bind(form.op.name, given, columns, eps=EPS, weight_offset=weight_offset)
    judged = reference.judge(call)
    for name, output in zip(("output", "residual_output"), outputs, strict=False):
        compared = reference.compare(
            to_array(output), judged.expected[name], judged.tolerance[name]
        )
        assert compared.passed, (name, compared.ratio)
    reached = tuple(map(random_like, outputs))
    gradients = gradients_of(outputs, tensors, reached)
    kept = None
    if memory_efficient:
        rstd = torch.from_numpy(judged.expected["rstd"])
        wide = torch.float64 if outputs[0].dtype == torch.float64 else torch.float32
        kept = (outputs[0], rstd.reshape(outputs[0].shape[:-1]).to(wide))
    assert_gradients_right(
        form, tensors, (columns,), reached, gradients, weight_offset=weight_offset, kept=kept
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_values_and_gradients_are_right(name: str, dtype: str, columns: int) -> None:
    form = FORMS[name]
    for leading, memory_efficient, offset in itertools.product(
        ((), (2, 3)), (False, True), (0.0, 1.0)
    ):
        tensors = random_tensors(form, leading, (columns,), dtype)
        check(form, tensors, columns, memory_efficient=memory_efficient, weight_offset=offset)
    assert REFUSALS.number


@pytest.mark.parametrize("name", FORMS)
def test_mixed_types_and_missing_parameters(name: str, columns: int) -> None:
    form = FORMS[name]
    plain: dict[str, Any] = {"memory_efficient": False, "weight_offset": 0.0}
    check(form, random_tensors(form, (5,), (columns,), "bf16", residual="f32", parameters="f32"),
          columns, **plain)  # fmt: skip
    check(form, random_tensors(form, (5,), (columns,), without=("weight", "bias")),
          columns, **plain)  # fmt: skip


def test_bad_arguments_are_refused_as_ever(columns: int) -> None:
    """Also in the second call, which knows that there is no module."""
    x = torch.randn(3, columns)
    for _ in range(2):
        rms_norm(x, columns, torch.ones(columns))
        with pytest.raises(ValueError, match="weight"):
            rms_norm(x, columns, torch.ones(1))


def test_it_is_logged_once(columns: int, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, columns, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        for _ in range(3):
            torch.autograd.grad(layer_norm(x, columns).sum(), x)
            torch.autograd.grad(rms_norm(x, columns).sum(), x)
    said = [message for message in caplog.messages if message.startswith(SAID)]
    assert said == list(dict.fromkeys(said))
    assert caplog.messages.count(said[0]) == 1


def test_compiled_models(columns: int) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(LayerNorm(columns), nn.RMSNorm(columns))
    replace_norms(model)
    x = torch.randn(3, columns, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    theirs = nn.functional.rms_norm(nn.functional.layer_norm(x, (columns,)), (columns,))
    torch.testing.assert_close(compiled(x), theirs, rtol=1e-5, atol=1e-5)
    (found,), (expected,) = (
        torch.autograd.grad(y.square().sum(), x) for y in (compiled(x)[:, :9], theirs[:, :9])
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


class Norm(nn.Module):
    """Llama's."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(columns) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm, Norm])
def test_replaced_norms_compute_what_they_did(cls: type[nn.Module], columns: int) -> None:
    """To the bit, from the first call on; the backward of layer norm is the formula."""
    norm = nn.Sequential(cls(columns))[0]
    replace_norms(norm)
    for _ in range(2):
        x = torch.randn(3, columns, requires_grad=True)
        asked = (x, *norm.parameters())
        ours, theirs = norm(x), super(ReplacedNorm, norm).forward(x)
        assert torch.equal(ours, theirs)
        found, expected = (
            torch.autograd.grad((y * y.detach().sign()).sum(), asked) for y in (ours, theirs)
        )
        if cls is nn.LayerNorm:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        else:
            assert all(map(torch.equal, found, expected))


def test_warmup_says_it_and_asks_again(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.RMSNorm(columns), LayerNorm(columns))
    replace_norms(model)
    x = torch.randn(3, columns, requires_grad=True)
    model(x)
    for _ in range(2):
        with pytest.raises(CompileError):
            warmup(model)
    monkeypatch.delenv("IREE_TOOL_PATH")
    warmup(model)
    before = REFUSALS.number
    torch.autograd.backward(model(x).sum())
    assert REFUSALS.number == before


PROGRAM = """
import logging, sys
from importlib import metadata
sys.modules["iree.compiler"] = None  # as where only the runtime is
version = metadata.version
def without(name):
    if name == "iree-base-compiler":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without
import torch
from torch import nn
from iree_lnbwd.torch import LayerNorm, replace_norms
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("iree_lnbwd.torch").addHandler(handler)
model = nn.Sequential(nn.LayerNorm(40), nn.RMSNorm(40), LayerNorm(40))
replace_norms(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(3, 40, requires_grad=True)).square().mean().backward()
    optimizer.step()
print(len(said), said[0])
"""


def test_a_first_process_without_the_compiler(tmp_path: Path) -> None:
    """It trains, and says once why it is not faster."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "IREE_LNBWD_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"1 {SAID}compiling needs iree-base-compiler, which is not ")
