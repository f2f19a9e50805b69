"""`LayerNorm`, `replace_layer_norm` and `warmup`."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import warnings
from typing import Any

import pytest
from support import random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iree_lnbwd.torch import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
    layer_norm,
    replace_layer_norm,
    warmup,
)

ARGUMENTS: list[dict[str, Any]] = [
    {"normalized_shape": 24},
    {"normalized_shape": [4, 6], "eps": 1e-3},
    {"normalized_shape": (24,), "bias": False},
    {"normalized_shape": 24, "elementwise_affine": False},
    {"normalized_shape": 24, "dtype": torch.bfloat16},
]


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its fast path is for inference alone
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), [*model.parameters()]))


@pytest.mark.parametrize("ours", [LayerNorm, AddLayerNorm, RMSNorm, AddRMSNorm])
def test_same_constructor_as_pytorchs(ours: type[nn.Module]) -> None:
    """And our options, which are given by name."""
    theirs = nn.LayerNorm if issubclass(ours, nn.LayerNorm) else nn.RMSNorm

    def arguments(module: type[nn.Module]) -> dict[str, object]:
        parameters = inspect.signature(module).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}

    assert arguments(ours) == arguments(theirs)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_is_a_drop_in(arguments: dict[str, object]) -> None:
    ours, theirs = LayerNorm(**arguments), nn.LayerNorm(**arguments)
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 6).reshape(3, *ours.normalized_shape).to(arguments.get("dtype"))
    assert torch.equal(ours(x), theirs(x))
    again = nn.LayerNorm(**arguments)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), theirs(x))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(clone: object) -> None:
    norm = LayerNorm(24)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 24)
    copied = clone(norm)  # type: ignore[operator]
    assert type(copied) is LayerNorm
    assert copied.weight is not norm.weight
    for ours, theirs in zip(gradients(copied, x), gradients(norm, x), strict=True):
        assert torch.equal(ours, theirs)


def test_replaces_those_of_a_model() -> None:
    model = transformer()
    x = torch.randn(5, 7, 32)
    expected_output, expected = model(x), gradients(model, x)
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    text = repr(model)

    assert replace_layer_norm(model) is model
    assert dict(model.named_modules()) == before
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert repr(model) == text
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert [type(norm) for norm in norms] == [LayerNorm] * 5

    assert torch.equal(model(x), expected_output)
    for ours, theirs in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    replace_layer_norm(model)
    assert [m for m in model.modules() if isinstance(m, nn.LayerNorm)] == norms


def test_replacing_keeps_hooks_and_the_mode() -> None:
    norm = nn.LayerNorm(24).eval()
    seen: list[str] = []
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.weight.requires_grad_(False)
    assert replace_layer_norm(norm) is norm
    x = torch.randn(3, 24, requires_grad=True)
    torch.autograd.backward(norm(x).sum())
    assert seen == ["forward", "backward"]
    assert not norm.training
    assert norm.weight.grad is None
    assert norm.bias.grad is not None


def test_replacing_leaves_subclasses_alone() -> None:
    class Other(nn.LayerNorm):
        """As vision models have it, for channels that come first."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    model = nn.Sequential(Other(8), nn.LayerNorm(24), nn.Linear(24, 24))
    parametrize.register_parametrization(model[1], "weight", nn.Softplus())
    kept = [type(module) for module in model]
    replace_layer_norm(model)
    assert [type(module) for module in model] == kept


def test_warmup_leaves_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    columns = int(random_generator().integers(6000, 7000))  # which no other test has compiled
    model = nn.Sequential(LayerNorm(columns), nn.Linear(columns, 8), LayerNorm(8, bias=False))
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        warmup(model)
        assert any(f"_n{columns}_" in record.getMessage() for record in caplog.records)
        assert all(parameter.grad is None for parameter in model.parameters())
        caplog.clear()
        x = torch.randn(3, columns, requires_grad=True)
        torch.autograd.backward(model(x).sum())
        assert not caplog.records


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
