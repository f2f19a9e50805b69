"""The modules, and `warmup`."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

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
    specs,
    warmup,
)

MODULES = (LayerNorm, AddLayerNorm, RMSNorm, AddRMSNorm)
OF_LAYERS: list[dict[str, Any]] = [
    {"normalized_shape": (24,), "bias": False},
    {"normalized_shape": 24, "eps": 1e-3, "bias": True},
]
ARGUMENTS: list[dict[str, Any]] = [
    {"normalized_shape": 24},
    {"normalized_shape": [4, 6], "eps": 1e-3},
    {"normalized_shape": 24, "elementwise_affine": False},
    {"normalized_shape": 24, "dtype": torch.bfloat16},
]
every_module = pytest.mark.parametrize("module", MODULES)


def pytorchs(module: type[nn.Module]) -> type[nn.Module]:
    """The class of PyTorch's that has the same parameters."""
    found: type[nn.Module] = nn.LayerNorm if issubclass(module, nn.LayerNorm) else nn.RMSNorm
    return found


def applied(norm: nn.Module, x: Tensor) -> Tensor:
    """The output; the sum of norms that take one is that of halves."""
    found = norm(x / 2, x / 2) if isinstance(norm, AddLayerNorm | AddRMSNorm) else norm(x)
    output: Tensor = found[0] if isinstance(found, tuple) else found
    return output


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(applied(model, x).sin().mean(), [*model.parameters()]))


@every_module
def test_same_constructor_as_pytorchs(module: type[nn.Module]) -> None:
    """And our options, which are given by name."""

    def arguments(module: type[nn.Module]) -> dict[str, object]:
        parameters = inspect.signature(module).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is not p.KEYWORD_ONLY}

    assert arguments(module) == arguments(pytorchs(module))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(m, a) for m in MODULES for a in ARGUMENTS]
    + [(m, a) for m in (LayerNorm, AddLayerNorm) for a in OF_LAYERS],
    ids=str,
)
def test_is_a_drop_in(module: type[nn.Module], arguments: dict[str, Any]) -> None:
    ours, theirs = module(**arguments), pytorchs(module)(**arguments)
    assert repr(ours) == repr(theirs).replace(type(theirs).__name__, module.__name__)
    assert isinstance(ours, type(theirs))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        nn.init.normal_(other)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 6).reshape(3, *ours.normalized_shape).to(arguments.get("dtype"))
    if module is LayerNorm:
        assert torch.equal(ours(x), theirs(x))
    torch.testing.assert_close(applied(ours, x), theirs(x))
    again = pytorchs(module)(**arguments)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), theirs(x))


@every_module
def test_a_weight_around_zero(module: type[nn.Module]) -> None:
    """It begins at zero where its offset is one, and computes what a weight of one does."""
    norm = module(24, weight_offset=1.0)
    assert not norm.weight.any()
    x = torch.randn(3, 24)
    torch.testing.assert_close(applied(norm, x), pytorchs(module)(24)(x))
    with pytest.raises(ValueError, match=r"^weight_offset: expected 0.0 without a weight, got 1.0"):
        applied(module(24, elementwise_affine=False, weight_offset=1.0), x)


@every_module
def test_errors_about_arguments_name_the_class(module: type[nn.Module]) -> None:
    with pytest.raises(
        TypeError, match=rf"^{module.__name__}\.__init__\(\) got an unexpected .*'x'"
    ):
        module(24, x=1)


def test_options_are_shown() -> None:
    """Those that are not the default, after what PyTorch shows."""
    shown = repr(nn.LayerNorm(24)).removesuffix(")")
    norm = LayerNorm(24, weight_offset=1.0, own_forward=True)
    assert repr(norm) == f"{shown}, weight_offset=1.0, own_forward=True)"
    shown = repr(nn.RMSNorm(24)).removesuffix(")")
    assert repr(AddRMSNorm(24, weight_offset=0.5)) == f"Add{shown}, weight_offset=0.5)"


OF_HEADS: list[dict[str, Any]] = [
    {"normalized_shape": 24},
    {"normalized_shape": (4, 6), "weight_offset": 1.0},
    {"normalized_shape": 24, "bias": True, "eps": 1e-3},
    {"normalized_shape": 24, "memory_efficient": True},
]


@pytest.mark.drawn
@pytest.mark.parametrize("arguments", OF_HEADS, ids=str)
@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_heads(module: type[nn.Module], arguments: dict[str, Any]) -> None:
    """Each is a norm of its own; new ones begin as one without heads does."""
    norm, one = module(**arguments, heads=3), module(**arguments)
    for name, parameter in norm.named_parameters():
        assert torch.equal(parameter, one.get_parameter(name).expand_as(parameter))
        nn.init.normal_(parameter, 1.0, 0.5)
    x = torch.randn(2, 5, 3, *norm.normalized_shape, requires_grad=True)
    output = norm(x)
    grad_output = torch.randn_like(output)
    names = [name for name, _ in norm.named_parameters()]
    found = torch.autograd.grad(output, [x, *norm.parameters()], grad_output)
    for head in range(3):
        one.load_state_dict({name: t[head] for name, t in norm.state_dict().items()})
        alone = one(x[:, :, head])
        torch.testing.assert_close(output[:, :, head], alone)
        of_one = torch.autograd.grad(
            alone, [x, *(one.get_parameter(name) for name in names)], grad_output[:, :, head]
        )
        torch.testing.assert_close(found[0][:, :, head], of_one[0][:, :, head])
        for ours, theirs in zip(found[1:], of_one[1:], strict=True):
            torch.testing.assert_close(ours[head], theirs)


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_what_has_heads_is_shown_copied_compiled_and_compiled_ahead(
    module: type[nn.Module],
) -> None:
    norm = module(24, heads=3)
    assert repr(norm).endswith("heads=3)")
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 3, 24)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(copied(x), norm(x))
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), norm(x))
    torch._dynamo.reset()
    found = specs(norm)
    assert all(spec.weight_sets and spec.normalized_shape == (24,) for spec in found)
    assert {spec.op.endswith("_backward") for spec in found} == {False, True}
    warmup(norm)


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_inputs_of_other_heads(module: type[nn.Module]) -> None:
    """Heads before the sequence would take each other's weights."""
    norm = module(24, heads=3)
    for shape in ((2, 3, 5, 24), (24,), (2, 6, 24), (2, 3, 23)):
        said = re.escape(f"input: expected shape (..., 3, 24), of 3 heads, got {shape}")
        with pytest.raises(ValueError, match=f"^{said}$"):
            norm(torch.randn(shape))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"heads": 0}, ValueError, "heads: expected an int >= 1, got 0"),
        ({"heads": True}, TypeError, "heads: expected an int or None, got True"),
        ({"heads": 2.0}, TypeError, r"heads: expected an int or None, got 2\.0"),
        (
            {"heads": 2, "elementwise_affine": False},
            ValueError,
            "heads: expected None without elementwise_affine, got 2",
        ),
    ],
)
@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_wrong_heads(
    module: type[nn.Module], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^{said}$"):
        module(24, **options)


@pytest.mark.drawn
@every_module
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(clone: Callable[[nn.Module], nn.Module], module: type[nn.Module]) -> None:
    norm = module(24, weight_offset=1.0)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 24)
    copied = clone(norm)
    assert type(copied) is module
    assert repr(copied) == repr(norm)
    assert copied.weight is not norm.weight
    for ours, theirs in zip(gradients(copied, x), gradients(norm, x), strict=True):
        assert torch.equal(ours, theirs)


# --- LayerNorm reads its attributes itself, in its forward ----------------------------------------


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("own_forward", True),
        ("memory_efficient", True),
        ("weight_offset", 1.0),
        ("output_dtype", torch.bfloat16),
        ("eps", 0.5),
        ("normalized_shape", (4, 24)),
    ],
)
def test_options_that_are_set_later(name: str, value: object) -> None:
    norm, x = LayerNorm(24), torch.randn(4, 24)
    nn.init.normal_(norm.weight)
    setattr(norm, name, value)
    if name == "normalized_shape":
        norm.weight, norm.bias = (nn.Parameter(p.expand(4, 24)) for p in (norm.weight, norm.bias))
    options = ("own_forward", "memory_efficient", "weight_offset", "output_dtype")
    expected = layer_norm(
        x,
        norm.normalized_shape,
        norm.weight,
        norm.bias,
        norm.eps,
        **{option: getattr(norm, option) for option in options},
    )
    output = norm(x)
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)
    assert type(output.grad_fn) is type(expected.grad_fn)


def test_a_wrong_flag_is_refused() -> None:
    norm = LayerNorm(24)
    norm.own_forward = 1  # type: ignore[assignment]
    with pytest.raises(TypeError, match="own_forward: expected True or False, got int"):
        norm(torch.randn(4, 24))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrized_parameter(name: str) -> None:
    norm, plain, x = LayerNorm(24), nn.LayerNorm(24), torch.randn(4, 24)
    for each in (norm, plain):
        nn.init.ones_(each.bias)
        parametrize.register_parametrization(each, name, Doubled())
    assert torch.equal(norm(x), plain(x))


def test_parameters_of_a_functional_call() -> None:
    norm, plain, x = LayerNorm(24), nn.LayerNorm(24), torch.randn(4, 24)
    given = {"weight": torch.randn(24), "bias": torch.randn(24)}
    found, expected = (torch.func.functional_call(each, given, (x,)) for each in (norm, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_became_a_tensor(name: str) -> None:
    """As FSDP of PyTorch's first kind and pruning have it."""
    norm, plain, x = LayerNorm(24), nn.LayerNorm(24), torch.randn(4, 24)
    tensor = torch.randn(24)
    for each in (norm, plain):
        delattr(each, name)
        setattr(each, name, tensor)
    assert torch.equal(norm(x), plain(x))
