"""The norms with a gate in PyTorch: values, gradients, compilers, and the models' own classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

import iree_lnbwd.torch as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.operator_table import GATED_NORMS, Norm

EPS = 1e-5
both_norms = pytest.mark.parametrize(
    "norm", [lnbwd.gated_layer_norm, lnbwd.gated_rms_norm], ids=["layer_norm", "rms_norm"]
)
both_orders = pytest.mark.parametrize("gate_first", [False, True], ids=["after", "before"])
every_norm = pytest.mark.parametrize("norm", GATED_NORMS, ids=lambda norm: norm.name)


def made(*types: torch.dtype, rows: tuple[int, ...] = (3, 5), width: int = 40) -> list[Tensor]:
    """An input, a gate, a weight and a bias of these types, that require gradients."""
    shapes = ((*rows, width), (*rows, width), (width,), (width,))
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        for shape, dtype in zip(shapes, types, strict=True)
    ]


def called(norm: Callable[..., Tensor], tensors: list[Tensor], gate_first: bool) -> Tensor:
    x, z, weight, bias = tensors
    return norm(x, z, x.shape[-1:], weight, bias=bias, eps=EPS, gate_first=gate_first)


def formula(norm: Any, tensors: list[Tensor], gate_first: bool) -> Tensor:
    """By PyTorch, in f64."""
    x, z, weight, bias = (tensor.double() for tensor in tensors)
    factor = nn.functional.silu(z)
    v = x * factor if gate_first else x
    if norm is lnbwd.gated_layer_norm:
        y = nn.functional.layer_norm(v, x.shape[-1:], weight, bias, EPS)
    else:
        y = nn.functional.rms_norm(v, x.shape[-1:], weight, EPS) + bias
    return y if gate_first else y * factor


TYPES = {
    "f32": (torch.float32,) * 4,
    "f64": (torch.float64,) * 4,
    "bf16": (torch.bfloat16,) * 4,
    "mixed": (torch.bfloat16, torch.float32, torch.float32, torch.float16),
    "f32 of bf16": (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.drawn
@both_norms
@both_orders
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_values_and_gradients(norm: Any, gate_first: bool, types: Any) -> None:
    torch.manual_seed(7)
    tensors = made(*types)
    output = called(norm, tensors, gate_first)
    assert output.dtype == tensors[0].dtype
    dy = torch.randn_like(output)
    ours = torch.autograd.grad(output, tensors, dy)
    exact = formula(norm, tensors, gate_first)
    theirs = torch.autograd.grad(exact, tensors, dy.double())
    close = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    for got, expected in zip((output, *ours), (exact, *theirs), strict=True):
        tolerance = close[got.dtype]
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=tolerance, atol=3 * tolerance
        )
    for tensor, gradient in zip(tensors, ours, strict=True):
        assert (gradient.dtype, gradient.shape) == (tensor.dtype, tensor.shape)


@pytest.mark.drawn
@both_norms
@both_orders
def test_each_gradient_alone(norm: Any, gate_first: bool) -> None:
    torch.manual_seed(8)
    tensors = made(*TYPES["f32"])
    dy = torch.randn(3, 5, 40)
    every = torch.autograd.grad(called(norm, tensors, gate_first), tensors, dy)
    for place, expected in enumerate(every):
        fixed = [t.detach().requires_grad_(i == place) for i, t in enumerate(tensors)]
        called(norm, fixed, gate_first).backward(dy)
        assert [t.grad is not None for t in fixed] == [i == place for i in range(4)]
        torch.testing.assert_close(fixed[place].grad, expected)


@pytest.mark.drawn
@both_norms
@both_orders
def test_gradients_of_gradients(norm: Any, gate_first: bool) -> None:
    torch.manual_seed(9)
    tensors = made(*TYPES["f64"], rows=(2,), width=5)
    assert torch.autograd.gradcheck(lambda *t: called(norm, list(t), gate_first), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: called(norm, list(t), gate_first), tensors)


@both_norms
@both_orders
def test_transforms(norm: Any, gate_first: bool) -> None:
    torch.manual_seed(10)
    x, z, weight, bias = (tensor.detach() for tensor in made(*TYPES["f32"]))

    def loss(x: Tensor, z: Tensor) -> Tensor:
        return called(norm, [x, z, weight, bias], gate_first).square().sum()

    batched = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, z)
    for i in range(len(x)):
        alone = torch.func.grad(loss, argnums=(0, 1))(x[i], z[i])
        for got, expected in zip(batched, alone, strict=True):
            torch.testing.assert_close(got[i], expected)


@pytest.mark.drawn
@both_orders
@both_norms
def test_compiled_as_the_first_call(norm: Any, gate_first: bool) -> None:
    """In one graph; the width is one that no other test has."""
    torch.manual_seed(11)
    tensors = made(*TYPES["f32"], width=52 + gate_first)
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    output = compiled(norm, tensors, gate_first)
    dy = torch.randn_like(output)
    ours = torch.autograd.grad(output, tensors, dy)
    expected = called(norm, tensors, gate_first)
    torch.testing.assert_close(output, expected)
    for got, other in zip(ours, torch.autograd.grad(expected, tensors, dy), strict=True):
        torch.testing.assert_close(got, other)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore")  # raised inside PyTorch, by the imports of its compiler
@pytest.mark.parametrize("cls", [lnbwd.GatedLayerNorm, lnbwd.GatedRMSNorm])
def test_compiled_by_inductor_and_exported(cls: Any) -> None:
    torch.manual_seed(12)
    module = cls(24, gate_first=True)
    x, z = torch.randn(2, 6, 24)
    expected = module(x, z)
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x, z), expected)
    compiled(x, z).sum().backward()
    exported = torch.export.export(module, (x, z)).module()
    torch.testing.assert_close(exported(x, z), expected)


@pytest.mark.drawn
@every_norm
def test_operators_keep_pytorchs_rules(norm: Norm) -> None:
    x, z, weight, bias = made(*TYPES["f32"], rows=(4,), width=16)
    options = ([16], EPS, 0.0, False, None)
    torch.library.opcheck(norm.operator, (x, weight, bias, z, *options))
    detached = [tensor.detach() for tensor in (x, x, weight, bias, z)]
    dy, x, weight, bias, z = detached
    statistics = (None, None) if norm.op.centres else (None,)
    mask = [True] * len(norm.gradients.results)
    arguments = (dy, x, *statistics, weight, bias, z, [16], mask, EPS, 0.0)
    torch.library.opcheck(norm.gradients.operator, arguments)


@pytest.mark.drawn
@both_norms
@both_orders
def test_pytorchs_formulas_are_the_same(norm: Any, gate_first: bool) -> None:
    """They compute where no module can be had."""
    torch.manual_seed(13)
    tensors = [tensor.detach() for tensor in made(*TYPES["f32"])]
    x, z, weight, bias = tensors
    number = 2 * gate_first + (norm is lnbwd.gated_rms_norm)
    table = GATED_NORMS[number]
    output = aten.norm(table.op, (x, weight, bias, z), (40,), EPS, 0.0).output
    torch.testing.assert_close(output, called(norm, tensors, gate_first))
    dy = torch.randn_like(x)
    given = {"grad_output": dy, "input": x, "weight": weight, "bias": bias, "gate": z}
    arguments = tuple(map(given.get, table.gradients.arguments))
    found = aten.gradients(table.gradients.op, arguments, (40,), (True,) * 4, EPS, 0.0)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    ours = torch.autograd.grad(called(norm, leaves, gate_first), (x, weight, bias, z), dy)
    for got, expected in zip(found, ours, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_first_call_in_a_thread() -> None:
    x, z = torch.randn(2, 3, 61, requires_grad=True).unbind()
    found: list[Tensor] = []

    def run() -> None:
        found.append(lnbwd.gated_rms_norm(x, z, 61))
        found[0].sum().backward()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], lnbwd.gated_rms_norm(x, z, 61))


def test_jagged_tensors() -> None:
    rows = [torch.randn(n, 16) for n in (2, 5)]
    gates = [torch.randn(n, 16) for n in (2, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    z = torch.nested.nested_tensor_from_jagged(torch.cat(gates), x.offsets())
    ours = lnbwd.gated_rms_norm(x, z, 16)
    for got, row, gate in zip(ours.unbind(), rows, gates, strict=True):
        torch.testing.assert_close(got, lnbwd.gated_rms_norm(row, gate, 16))
    with pytest.raises(ValueError, match=r"^gate: expected a jagged tensor"):
        lnbwd.gated_rms_norm(x, torch.cat(gates), 16)


@both_orders
def test_modules(gate_first: bool) -> None:
    for cls, plain in ((lnbwd.GatedRMSNorm, nn.RMSNorm), (lnbwd.GatedLayerNorm, nn.LayerNorm)):
        module = cls(16, gate_first=gate_first)
        assert module.state_dict().keys() == plain(16).state_dict().keys()
        assert ("gate_first=True" in repr(module)) == gate_first
        x, z = torch.randn(2, 4, 16)
        factor = nn.functional.silu(z)
        expected = plain(16, eps=module.eps)(x * factor if gate_first else x)
        expected = expected if gate_first else expected * factor
        torch.testing.assert_close(module(x, z), expected)
        gates = {spec.gate for spec in lnbwd.specs(module)}
        assert gates == {"before" if gate_first else "after"}
    with pytest.raises(TypeError, match=r"^gate_first: expected True or False, got int"):
        lnbwd.gated_rms_norm(x, z, 16, gate_first=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^gate: expected a tensor, got NoneType"):
        lnbwd.gated_rms_norm(x, None, 16)
    with pytest.raises(ValueError, match=r"^gate: expected shape .*\(4, 16\).*, got \(16,\)"):
        lnbwd.gated_rms_norm(x, z[0], 16)


@every_norm
def test_operators_do_not_keep_the_output_alone(norm: Norm) -> None:
    """It does not tell the input of a norm with a gate."""
    x, z = torch.randn(2, 3, 16, requires_grad=True).unbind()
    with pytest.raises(ValueError, match=r"^memory_efficient: expected False of a norm with a"):
        norm.operator(x, None, None, z, [16], EPS, 0.0, True, None)


def test_warming_up_leaves_nothing_to_compile() -> None:
    module = lnbwd.GatedRMSNorm(67)
    lnbwd.warmup(module)
    specs = lnbwd.specs(module)
    assert all(isinstance(spec, NormSpec) and spec.gate == "after" for spec in specs)
    assert {spec.op for spec in specs} == {"rms_norm", "rms_norm_backward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_classes(dtype: torch.dtype) -> None:
    """Qwen3-Next's norm and Mamba2's, but for their roundings between."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(14)
    x, z = torch.randn(2, 6, 64).to(dtype)
    weight = torch.rand(64) + 0.5
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for model, gate_first in (
        (qwen.Qwen3NextRMSNormGated(64), False),
        (mamba.MambaRMSNormGated(64, 64), True),
    ):
        model.weight.data.copy_(weight)
        model.to(dtype)
        ours = lnbwd.GatedRMSNorm(64, model.variance_epsilon, gate_first=gate_first, dtype=dtype)
        ours.load_state_dict(model.state_dict())
        results = []
        for module in (model, ours):
            leaves = [x.clone().requires_grad_(), z.clone().requires_grad_()]
            output = module(leaves[0], leaves[1])
            output.float().square().sum().backward()
            results.append((output, *(leaf.grad for leaf in leaves), module.weight.grad))
        for theirs, got in zip(*results, strict=True):
            scale = theirs.detach().abs().max()
            torch.testing.assert_close(got / scale, theirs / scale, rtol=tolerance, atol=tolerance)


@pytest.mark.drawn
@both_norms
@both_orders
def test_sets(norm: Any, gate_first: bool) -> None:
    """A weight for each group of a row, as some of Mamba2's kin have it."""
    torch.manual_seed(14)
    x, z = torch.randn(2, 3, 4, 24, dtype=torch.float64).unbind()
    tensors = [each.clone().requires_grad_() for each in (x, z, *torch.randn(2, 4, 24).double())]
    assert torch.autograd.gradcheck(lambda *t: called(norm, list(t), gate_first), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: called(norm, list(t), gate_first), tensors)
    exact = formula(norm, [each[:, 2:3] for each in tensors[:2]] + [w[2] for w in tensors[2:]],
                    gate_first)  # fmt: skip
    torch.testing.assert_close(called(norm, tensors, gate_first)[:, 2:3], exact)
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    found = compiled(norm, tensors, gate_first)
    torch.testing.assert_close(found, called(norm, tensors, gate_first))
