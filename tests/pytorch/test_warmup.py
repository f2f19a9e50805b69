"""`warmup`: nothing is left to compile, wherever a model's parameters are."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support import random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import CompileError, NormSpec
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.torch import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
    layer_norm,
    replace_norms,
    tensor_calls,
    warmup,
)
from iree_lnbwd.tuning import tuner

pytestmark = pytest.mark.usefixtures("empty_cache")  # what is compiled is counted

MODULES = (LayerNorm, AddLayerNorm, RMSNorm, AddRMSNorm)


class Norms(nn.Module):
    """Each of ours once, in a row."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([module(columns) for module in MODULES])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third, fourth = self.norms
        x, residual = second(first(x), x)
        return fourth(third(x), residual)  # type: ignore[no-any-return]


@pytest.mark.drawn
def test_warmup_leaves_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    """Whether or not the last sum is used; and nothing is compiled twice."""
    columns = int(random_generator().integers(6000, 7000))  # which no other test has loaded
    model = Norms(columns)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model)
        said = [record.getMessage() for record in caplog.records]
        assert all(f"_n{columns}_" in message for message in said)
        # Four forwards but PyTorch's, each one's backward, and two that take a gradient past it.
        assert len(said) == len(set(said)) == 3 + 2 + 2
        assert all(parameter.grad is None for parameter in model.parameters())
        caplog.clear()
        x = torch.randn(3, columns, requires_grad=True)
        output, residual = model(x)
        torch.autograd.backward(output.sum(), retain_graph=True)
        torch.autograd.backward(output.sum() + residual.sum())
        assert not caplog.records


def test_warmup_tunes_on_a_gpu_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise it says so before it compiles anything."""
    columns = int(random_generator().integers(9000, 10000))
    with (
        caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"),
        pytest.raises(ValueError, match=r"^tune: expected False for norms on no GPU, .* on cpu$"),
    ):
        warmup(RMSNorm(columns), tune=True)
    assert not caplog.records


def test_warmup_of_a_wide_stream(caplog: pytest.LogCaptureFixture) -> None:
    columns = int(random_generator().integers(8000, 9000))
    norm = AddRMSNorm(columns, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(norm, residual_dtype=torch.float32)
        assert len(caplog.records) == 3
        x = torch.randn(3, columns, dtype=torch.bfloat16, requires_grad=True)
        output, residual = norm(x, x.float())
        torch.autograd.backward(output.sum() + residual.sum())
        assert len(caplog.records) == 3


def test_warmup_of_other_types(caplog: pytest.LogCaptureFixture) -> None:
    columns = int(random_generator().integers(7000, 8000))
    norm = LayerNorm(columns, elementwise_affine=False)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(norm, dtype=torch.bfloat16, device="cpu")
        (record,) = caplog.records
        assert f"_n{columns}_bf16_noweight" in record.getMessage()
        x = torch.randn(3, columns, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.backward(layer_norm(x, columns), torch.ones_like(x))
        assert len(caplog.records) == 1


def test_warmup_of_a_norm_without_a_weight(caplog: pytest.LogCaptureFixture, device: str) -> None:
    """It is where the model is, and of its type."""
    columns = int(random_generator().integers(4000, 5000))
    norm = LayerNorm(columns, elementwise_affine=False)
    model = nn.Sequential(norm, nn.Linear(columns, 1)).to(device, torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model)
        assert f"_n{columns}_bf16_noweight" in caplog.text
        caplog.clear()
        x = torch.randn(3, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.backward(model(x).sum())
    assert not caplog.records
    with pytest.raises(ValueError, match=r"^device: expected the one that the model will be on"):
        warmup(model.to("meta"))


def test_warmup_of_a_model_on_the_meta_device(caplog: pytest.LogCaptureFixture) -> None:
    """For the device where it will be, in the types that it will have."""
    columns = int(random_generator().integers(10000, 11000))
    model = nn.LayerNorm(columns, device="meta")
    replace_norms(model)
    with pytest.raises(ValueError, match=r"^device: expected the one that the model will be on, "):
        warmup(model)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model, device="cpu", dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
        assert len(caplog.records) == 1
        model.to_empty(device="cpu").to(torch.bfloat16)
        x = torch.randn(3, columns, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.backward(model(x), torch.ones_like(x))
        assert len(caplog.records) == 1


def trained(model: nn.Module, columns: int) -> None:
    """One step."""
    x = torch.randn(3, columns, requires_grad=True)
    torch.autograd.backward(model(x).square().sum())


@pytest.mark.drawn
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_warmup_where_autograd_is_off(
    mode: Callable[[], AbstractContextManager[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """It is of what a training step needs, also if the model was made there."""
    columns = int(random_generator().integers(17000, 18000))
    outside = nn.Sequential(LayerNorm(columns), nn.RMSNorm(columns))
    with mode(), caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        inside = nn.Sequential(LayerNorm(columns), nn.RMSNorm(columns))
        for model in (inside, outside):
            replace_norms(model)
            warmup(model)
            assert len(caplog.records) == 3  # nothing is compiled twice
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        trained(outside, columns)
    assert len(caplog.records) == 3


def pruned(norm: nn.Module) -> nn.Module:
    prune.l1_unstructured(norm, "weight", 3)
    return norm


def pruned_while_autograd_is_off(norm: nn.Module) -> nn.Module:
    """Then the weight, which a hook computes anew in each call, needs no gradient for now."""
    with torch.no_grad():
        pruned(norm)
        norm(torch.zeros(1, *norm.weight.shape))
    return norm


def normed(norm: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what is old
        found: nn.Module = torch.nn.utils.weight_norm(norm)
    return found


def parametrized(norm: nn.Module) -> nn.Module:
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    return norm


def weight_normed(norm: nn.Module) -> nn.Module:
    found: nn.Module = torch.nn.utils.parametrizations.weight_norm(norm)
    return found


COMPUTED: list[Callable[[nn.Module], nn.Module]] = [
    *(pruned, pruned_while_autograd_is_off, normed, parametrized, weight_normed)
]


@pytest.mark.drawn
@pytest.mark.parametrize("changed", COMPUTED)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_warmup_of_weights_that_are_computed(
    changed: Callable[[nn.Module], nn.Module], is_replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """By hooks and parametrizations, on ours and on what was replaced."""
    columns = 18001 + 2 * COMPUTED.index(changed) + is_replaced  # of no other case
    norm = changed(nn.RMSNorm(columns) if is_replaced else RMSNorm(columns))
    assert len(replace_norms(norm).replaced) == int(is_replaced)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                warmup(norm)
        assert len(caplog.records) == 2
        assert all(parameter.grad is None for parameter in norm.parameters())
        trained(norm, columns)
    assert len(caplog.records) == 2


def test_warmup_of_frozen_weights(caplog: pytest.LogCaptureFixture) -> None:
    """Without a gradient that nobody asks for, whatever computes them."""
    columns = int(random_generator().integers(19000, 20000))
    norms = [changed(RMSNorm(columns)).requires_grad_(False) for changed in (pruned, parametrized)]
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(nn.Sequential(*norms))
        said = list(caplog.messages)
        for norm in norms:
            trained(norm, columns)
    assert caplog.messages == said
    assert sum("backward" in message for message in said) == 1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_warmup_of_a_sharded_model(caplog: pytest.LogCaptureFixture) -> None:
    """Before and after, FSDP2 changes neither the norms nor what they need."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    columns = int(random_generator().integers(11000, 12000))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.LayerNorm(columns), nn.LayerNorm(columns))
        fully_shard(model[0], mesh=mesh)
        report = replace_norms(model)
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert [type(norm).__name__ for norm in model] == ["FSDPIreeLayerNorm"] * 2
        with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
            warmup(model)
            assert len(caplog.records) == 1
            x = torch.randn(3, columns, requires_grad=True)
            torch.autograd.backward(model(x).sum())
            assert len(caplog.records) == 1
        report.undo()
        assert [type(norm).__name__ for norm in model] == ["FSDPLayerNorm"] * 2
        torch.autograd.backward(model(x).sum())
    finally:
        torch.distributed.destroy_process_group()


class ChannelsFirst(nn.LayerNorm):
    """As vision models have it: its input has another shape."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


@pytest.fixture
def enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    with lnbwd.enabled(forwards=True):
        yield


def step(model: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """A forward and a backward of enough rows for ours."""
    x = torch.randn(tuple(shape), dtype=dtype, requires_grad=True)
    output = model(x)
    torch.autograd.backward(output, torch.ones_like(output))


@pytest.mark.usefixtures("enabled")
def test_warmup_of_plain_norms(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd asks for in a step is compiled before, also of sizes that PyTorch computes."""
    columns = int(random_generator().integers(12000, 13000))
    frozen = nn.LayerNorm(columns)
    frozen.bias.requires_grad_(False)
    model = nn.Sequential(nn.LayerNorm(columns), frozen, nn.RMSNorm(columns))
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model)
        # PyTorch has no kernel of RMS norms on the CPU.
        assert len(caplog.records) == 2
        assert all(parameter.grad is None for parameter in model.parameters())
        assert lnbwd.status().calls == ()
        lnbwd.enable()
        step(model, (3, columns))
        assert (lnbwd.status().ours, lnbwd.status().pytorchs) == (2, 0)
        assert len(caplog.records) == 2


@pytest.mark.usefixtures("enabled")
def test_warmup_of_plain_norms_in_other_types(caplog: pytest.LogCaptureFixture) -> None:
    columns = int(random_generator().integers(13000, 14000))
    model = ChannelsFirst(columns, device="meta")
    with pytest.raises(ValueError, match=r"^device: expected the one that the model will be on, "):
        warmup(model)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model, device="cpu", dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
        (record,) = caplog.records
        assert f"_n{columns}_bf16" in record.getMessage()
        model.to_empty(device="cpu").to(torch.bfloat16)
        step(model, (1, columns, 512), torch.bfloat16)  # of a size that is ours
        assert (lnbwd.status().ours, lnbwd.status().pytorchs) == (1, 0)
        assert len(caplog.records) == 1


@pytest.mark.usefixtures("enabled")
def test_warmup_says_what_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would go to PyTorch's kernel instead, and say so."""
    compiler = tmp_path / "iree-compile"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("IREE_TOOL_PATH", str(tmp_path))
    with pytest.raises(CompileError):
        warmup(nn.LayerNorm(int(random_generator().integers(14000, 15000))))


def test_warmup_leaves_plain_norms_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Where PyTorch's kernels run."""
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(nn.LayerNorm(int(random_generator().integers(15000, 16000))))
    assert not caplog.records


@pytest.mark.usefixtures("enabled")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_warmup_of_a_sharded_plain_model(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    lnbwd.enable()
    columns = int(random_generator().integers(16000, 17000))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.LayerNorm(columns), nn.LayerNorm(columns))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
            warmup(model)
            assert len(caplog.records) == 1
            step(model, (3, columns))
            assert len(caplog.records) == 1
        assert (lnbwd.status().ours, lnbwd.status().pytorchs) == (2, 0)
    finally:
        torch.distributed.destroy_process_group()


def test_what_tuning_does_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes up to a minute for each module."""

    def tune(
        specs: Sequence[NormSpec], device: str, *, progress: Callable[[str], None]
    ) -> tuple[()]:
        for line in ("n64: compiling 48 schedules", "n64: compiled 1 of 48 schedules"):
            progress(line)
        return ()

    used = (NormSpec((64,)), DeviceUri.parse("cuda"))
    monkeypatch.setattr(modules, "in_use", lambda: (used,))
    monkeypatch.setattr(tuner, "tune", tune)
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        tensor_calls.tune({(64,)})
    assert caplog.messages == ["n64: compiling 48 schedules"]
