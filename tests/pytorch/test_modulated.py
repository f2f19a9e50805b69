"""Sets of weights in PyTorch: for each head, and the scale and shift of each sample."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor
from torch.nn import functional

from iree_lnbwd import torch as ours
from iree_lnbwd.torch import aten
from iree_lnbwd.torch.operator_table import OF_SETS, in_order

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SEED = 5


def reference(
    x: Tensor, dims: int, weight: Tensor, bias: Tensor | None, offset: float, rows: int, rms: bool
) -> Tensor:
    """By PyTorch in f64."""
    formula = functional.rms_norm if rms else functional.layer_norm
    xhat = formula(x.double(), (dims,), eps=1e-5)
    which = torch.arange(x.numel() // dims) // rows % len(weight)
    y = xhat.reshape(-1, dims) * (weight.double() + offset)[which]
    y = y if bias is None else y + bias.double()[which]
    return y.reshape(x.shape)


def norm(
    x: Tensor, dims: int, weight: Tensor, bias: Tensor | None, *, rms: bool, **options: Any
) -> Tensor:
    if rms:
        return ours.rms_norm(x, dims, weight, 1e-5, bias=bias, **options)
    return ours.layer_norm(x, dims, weight, bias, **options)


def leaves(dtype: torch.dtype, shape: tuple[int, ...], sets: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(SEED)
    x = torch.randn(shape, dtype=dtype)
    weight, bias = 0.2 * torch.randn(2, sets, shape[-1], dtype=dtype)
    return x.requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the type, of the largest number."""
    assert actual.dtype == dtype
    off = (actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1)
    assert off < 8 * torch.finfo(dtype).eps, off


@pytest.mark.drawn
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_heads(rms: bool, memory_efficient: bool, dtype: torch.dtype) -> None:
    x, weight, bias = leaves(dtype, (2, 3, 4, 24), 4)
    found = norm(x, 24, weight, bias, rms=rms, memory_efficient=memory_efficient, weight_offset=2.0)
    expected = reference(x, 24, weight, bias, 2.0, 1, rms)
    assert_close(found, expected, dtype)
    dy = torch.randn_like(x)
    gradients = torch.autograd.grad(found, (x, weight, bias), dy)
    right = torch.autograd.grad(expected, (x, weight, bias), dy.double())
    if not memory_efficient or dtype != torch.bfloat16:  # else y is what was rounded
        for gradient, of_reference in zip(gradients, right, strict=True):
            assert_close(gradient, of_reference.double(), dtype)


@pytest.mark.parametrize("rms", [False, True])
def test_sums_with_a_residual(rms: bool) -> None:
    x, weight, bias = leaves(torch.float32, (6, 20), 3)
    residual = torch.randn_like(x).requires_grad_()
    add = ours.add_rms_norm if rms else ours.add_layer_norm
    found, total = add(x, residual, 20, weight, bias=bias, eps=1e-5, rows_per_set=2)
    expected = reference(x + residual, 20, weight, bias, 0.0, 2, rms)
    assert_close(found, expected, torch.float32)
    gradients = torch.autograd.grad((found.sin() + total).sum(), (x, residual, weight, bias))
    loss = (expected.sin() + (x + residual)).sum()
    right = torch.autograd.grad(loss, (x, residual, weight, bias))
    for gradient, of_reference in zip(gradients, right, strict=True):
        assert_close(gradient, of_reference.double(), torch.float32)


@pytest.mark.drawn
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("has_shift", [False, True])
@pytest.mark.parametrize("keeps_dimensions", [False, True])
def test_modulated(rms: bool, has_shift: bool, keeps_dimensions: bool) -> None:
    x, scale, shift = leaves(torch.float32, (3, 5, 16), 3)
    given = (scale, shift if has_shift else None)
    if keeps_dimensions:
        given = tuple(None if t is None else t[:, None] for t in given)  # type: ignore[assignment]
    function = ours.modulated_rms_norm if rms else ours.modulated_layer_norm
    found = function(x, 16, *given, 1e-5)
    expected = reference(x, 16, scale, shift if has_shift else None, 1.0, 5, rms)
    assert_close(found, expected, torch.float32)
    wanted = (x, scale, shift)[: 2 + has_shift]
    gradients = torch.autograd.grad(found.sin().sum(), wanted)
    right = torch.autograd.grad(expected.sin().sum(), wanted)
    for gradient, of_reference in zip(gradients, right, strict=True):
        assert_close(gradient, of_reference.double(), torch.float32)


@pytest.mark.drawn
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """As the first use of a process, and with other numbers of rows."""

    def plain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return ours.modulated_layer_norm(x, x.shape[-1], scale, shift) * 2

    block = torch.compile(plain, fullgraph=True, dynamic=dynamic)
    for shape in ((2, 5, 32), (3, 7, 32)):
        x, scale, shift = leaves(torch.float32, shape, shape[0])
        found = block(x, scale, shift)
        expected = 2 * reference(x, 32, scale, shift, 1.0, shape[1], False)
        assert_close(found, expected, torch.float32)
        gradients = torch.autograd.grad(found.sin().sum(), (x, scale, shift))
        right = torch.autograd.grad(expected.sin().sum(), (x, scale, shift))
        for gradient, of_reference in zip(gradients, right, strict=True):
            assert_close(gradient, of_reference.double(), torch.float32)


@pytest.mark.drawn
def test_gradients_are_differentiable() -> None:
    """By PyTorch's formula, as those of one weight."""
    x, weight, bias = leaves(torch.float64, (4, 6), 2)
    assert torch.autograd.gradgradcheck(
        lambda *given: ours.layer_norm(given[0], 6, *given[1:], rows_per_set=2), (x, weight, bias)
    )
    assert torch.autograd.gradgradcheck(
        lambda *given: ours.rms_norm(given[0], 6, given[1], bias=given[2]), (x, weight, bias)
    )


def test_a_backward_needs_only_what_is_asked() -> None:
    x, weight, bias = leaves(torch.float32, (4, 6), 2)
    found = ours.layer_norm(x.detach(), 6, weight, bias.detach())
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (2, 6)
    assert bias.grad is None


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (0, 0, 8)])
def test_nothing(shape: tuple[int, ...]) -> None:
    x, scale, shift = leaves(torch.float32, shape, shape[0])
    found = ours.modulated_layer_norm(x, 8, scale, shift)
    assert found.shape == shape
    found.sum().backward()
    for leaf in (x, scale, shift):
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_without_a_module() -> None:
    """PyTorch's operators compute the same, forwards and backwards."""
    x, weight, bias = (leaf.detach() for leaf in leaves(torch.float32, (6, 16), 2))
    for of_sets in (OF_SETS["own_layer_norm"], OF_SETS["rms_norm"]):
        given = in_order(of_sets.op, input=x, weight=weight, bias=bias)
        theirs = aten.norm(of_sets.op, given, (16,), 1e-5, 1.0, rows_per_set=2)
        found = of_sets.operator(x, weight, bias, (16,), 1e-5, 1.0, False, None, 2)
        torch.testing.assert_close(found[0], theirs.output)
        dy = torch.randn_like(x)
        for op in (of_sets.gradients, of_sets.from_output):
            named = {"grad_output": dy, "weight": weight, "bias": bias, "rstd": theirs.rstd}
            data = theirs.output if op.op.from_output else x
            arguments = in_order(op.op, mean=theirs.mean, **{op.op.data.name: data}, **named)
            options = ((16,), (True,) * 3, 1e-5, 1.0, 2)
            right = aten.gradients(op.op, arguments, *options)
            for gradient, expected in zip(op.operator(*arguments, *options), right, strict=True):
                torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)


def test_errors() -> None:
    x, weight, bias = (leaf.detach() for leaf in leaves(torch.float32, (4, 6), 2))
    for given, options, said in (
        ((weight, bias), {"rows_per_set": 0}, "rows_per_set: expected an int >= 1, got 0"),
        ((weight, bias), {"rows_per_set": True}, "rows_per_set: expected an int, got bool"),
        ((weight[0], None), {"rows_per_set": 2}, "rows_per_set: expected 1 where weight"),
        ((weight, bias[0]), {}, r"bias: expected shape \(2, 6\), that of weight, got \(6,\)"),
        ((weight[0], bias), {}, "bias|weight"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=said):
            ours.layer_norm(x, 6, *given, **options)
    with pytest.raises(ValueError, match=r"scale: expected shape \(4, 6\), got \(2, 6\)"):
        ours.modulated_layer_norm(x, 6, weight, bias)
    with pytest.raises(ValueError, match=r"input: expected shape \(B, ..., 6\), got \(6,\)"):
        ours.modulated_rms_norm(x[0], 6, weight)
    samples = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
    with pytest.raises(ValueError, match="input: expected samples of one number of rows"):
        ours.modulated_layer_norm(samples, 6, weight)
    with pytest.raises(TypeError, match="shift: expected a tensor, got float"):
        ours.modulated_rms_norm(x[:2], 6, weight, 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("norm", [ours.modulated_layer_norm, ours.modulated_rms_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_takes_samples_of_another_length(norm: Any, dtype: torch.dtype) -> None:
    def tensors(samples: int, length: int) -> list[Tensor]:
        scale, shift = torch.randn(2, samples, 24, dtype=dtype)
        return [torch.randn(samples, length, 24, dtype=dtype), scale, shift]

    def run(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return norm(x, 24, scale, shift)

    traced = torch.jit.trace(run, tensors(2, 5))
    tolerance = 4 * torch.finfo(dtype).eps
    for samples, length in ((2, 5), (2, 7), (3, 5)):
        given = tensors(samples, length)
        torch.testing.assert_close(traced(*given), run(*given), rtol=tolerance, atol=tolerance)
