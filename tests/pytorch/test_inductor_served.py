"""Graphs that are compiled without IREE's compiler: backwards without a module are inductor's."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support import random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from inductor_support import compiled
from torch import Tensor, nn

import iree_lnbwd
import iree_lnbwd.torch as ours
from iree_lnbwd import NormSpec
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.inductor.state import STATE, Folded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


SAID = "PyTorch's operators compute norms without a module: compiling needs iree-base-compiler"


class Model(nn.Module):  # type: ignore[misc]
    """Two branches around a stream, and a norm behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        for norm, linear in zip(self.norms, self.linears, strict=False):
            x = x + torch.tanh(linear(norm(x)))
        last: Tensor = self.norms[-1](x)
        return last


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of modules, in a process as where only the runtime is installed."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir(mode=0o700)
    torch._dynamo.reset()
    REFUSALS.forget()
    yield tmp_path / "modules"
    ours.disable()
    REFUSALS.forget()


@pytest.fixture
def width() -> int:
    """One that no other test has compiled, and that is not left to inductor anyway."""
    return 8 * int(random_generator().integers(40, 120)) + 3


def leave_compiler_out(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def of_others(name: str) -> str:
        if name == "iree-base-compiler":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", of_others)
    monkeypatch.setitem(sys.modules, "iree.compiler", None)


def backward_of(width: int) -> NormSpec:
    return NormSpec((width,), op="rms_norm_backward")


def gradients(
    model: nn.Module, width: int, run: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    model.zero_grad(set_to_none=True)
    (model if run is None else run)(x).sin().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def step(model: nn.Module, width: int) -> tuple[Folded, int]:
    """What the pass does to a compiled step, whose gradients are right, and the calls by ATen."""
    exact = gradients(copy.deepcopy(model).double(), width)
    before, refused = STATE.folded(), REFUSALS.number
    run, _ = compiled(model)
    found = gradients(model, width, run)
    for one, right in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-6)
    after = STATE.folded()
    counts = Folded(*(a - b for a, b in zip(after, before, strict=True)))
    return counts, REFUSALS.number - refused


def test_without_modules_all_is_inductors(
    modules: Path,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which is logged once."""
    model = Model(width)
    ours.replace_norms(model)
    leave_compiler_out(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        assert step(model, width) == (Folded(forwards=3, backwards=3), 0)
    (said,) = (each.getMessage() for each in caplog.records if each.name == "iree_lnbwd.torch")
    assert said.startswith(SAID)


class Modulated(nn.Module):  # type: ignore[misc]
    """A norm with a scale and a shift for each of five samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.linear = width, nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[5, width] to [5, 3, width]."""
        scale, shift = (each.contiguous() for each in self.linear(x).chunk(2, -1))
        rows = torch.tanh(x).unsqueeze(1) * torch.arange(1, 4).reshape(3, 1)
        return ours.modulated_layer_norm(rows, (self.width,), scale, shift)


class Gated(nn.Module):  # type: ignore[misc]
    """A norm whose gate comes first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = ours.GatedRMSNorm(width, gate_first=True, eps=1e-5)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape."""
        output: Tensor = self.norm(self.linear(x), x)
        return output


def from_output(width: int) -> nn.Module:
    norm = ours.LayerNorm(width, memory_efficient=True)
    return nn.Sequential(nn.Linear(width, width), norm, nn.Linear(width, width))


@pytest.mark.drawn
@pytest.mark.parametrize("make", [Gated, Modulated, from_output])
def test_other_backwards_are_inductors_too(
    make: Callable[[int], nn.Module], modules: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(width)
    leave_compiler_out(monkeypatch)
    assert step(model, width) == (Folded(forwards=1, backwards=1), 0)


@pytest.mark.parametrize("there", ["plain", "with an addition"])
def test_what_there_is_a_module_for_stays_whole(
    there: str, modules: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes into it that would take another module."""
    model = Model(width)
    ours.replace_norms(model)
    spec = backward_of(width)
    adds = there != "plain"
    for each in (spec, replace(spec, residual_dtype="f32"))[: 1 + adds]:
        iree_lnbwd.compile(each, "host", modules)
    leave_compiler_out(monkeypatch)
    assert step(model, width) == (Folded(forwards=3, additions=2 * adds), 0)


def test_inductors_caches_know_what_there_was(
    modules: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was compiled without a module is not taken once there is one."""
    placing = importlib.import_module("torch._inductor.compile_fx") and importlib.import_module(
        "iree_lnbwd.torch.inductor.placing"
    )
    with_compiler = placing.PASS.uuid()
    with monkeypatch.context() as without:
        leave_compiler_out(without)
        before = placing.PASS.uuid()
    iree_lnbwd.compile(backward_of(width), "host", modules)
    assert placing.PASS.uuid() == with_compiler
    leave_compiler_out(monkeypatch)
    assert len({with_compiler, before, placing.PASS.uuid()}) == 3


def test_pytorchs_own_backwards_stay_pytorchs(
    modules: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
    ours.enable()
    if ours.status().operators[-2].kept is not None:
        pytest.skip("the C++ kernels could not be built")
    leave_compiler_out(monkeypatch)
    assert step(model, width) == (Folded(), 0)
    assert [call.number for call in ours.status().calls] == [1]  # of the eager model
