"""Norms with sets of weights and with a gate where autograd does more than a plain backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from iree_lnbwd import torch as ours

# Raised inside PyTorch 2.13, by imports of its compiler.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
COLUMNS, SAMPLES, ROWS = 24, 3, 5
Norm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def modulated_layer_norm(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ours.modulated_layer_norm(x, COLUMNS, scale, shift) * z


def modulated_rms_norm(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ours.modulated_rms_norm(x, COLUMNS, scale, shift) * z


def gated_rms_norm(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ours.gated_rms_norm(x, z, COLUMNS, scale[0], bias=shift[0])


def layer_norm_of_gated(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ours.gated_layer_norm(x, z, COLUMNS, scale[0], shift[0], gate_first=True)


def gated_sets(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return ours.gated_layer_norm(x, z, COLUMNS, scale, shift, rows_per_set=ROWS)


def sums_of_sets(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    both = ours.add_rms_norm(x, z, COLUMNS, scale, bias=shift, rows_per_set=ROWS)
    return both[0] * both[1]


def from_the_output(x: Tensor, z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    norm = functools.partial(ours.layer_norm, memory_efficient=True, rows_per_set=ROWS)
    return norm(x, COLUMNS, scale, shift) * z


NORMS: tuple[Norm, ...] = (
    *(modulated_layer_norm, modulated_rms_norm, gated_rms_norm, layer_norm_of_gated),
    *(gated_sets, sums_of_sets, from_the_output),
)
every_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)


def leaves(*needed: bool) -> list[Tensor]:
    torch.manual_seed(3)
    x, z = torch.randn(2, SAMPLES, ROWS, COLUMNS)
    scale, shift = 1 + torch.randn(2, SAMPLES, COLUMNS)
    asked = needed or (True,) * 4
    every = (x, z, scale, shift)
    return [each.clone().requires_grad_(asks) for each, asks in zip(every, asked, strict=True)]


def gradients(output: Tensor, of: Sequence[Tensor]) -> tuple[Tensor, ...]:
    reached = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    asked = [each for each in of if each.requires_grad]
    found: tuple[Tensor, ...] = torch.autograd.grad(output, asked, reached)
    return found


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    for ours_of, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_of, theirs)


@every_norm
def test_around_a_backward(norm: Norm) -> None:
    """Recomputed, checked for NaN, with saved tensors elsewhere, and under autocast."""
    given = leaves()
    expected = gradients(norm(*given), given)
    assert_same(gradients(checkpoint(norm, *given, use_reentrant=False), given), expected)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(gradients(norm(*given), given), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(norm(*given), given), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(gradients(norm(*given), given), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = norm(*given)
        assert not output.requires_grad


@pytest.mark.drawn
@every_norm
def test_every_subset_of_the_gradients(norm: Norm) -> None:
    given = leaves()
    every = gradients(norm(*given), given)
    for needed in filter(any, itertools.product((True, False), repeat=4)):
        some = leaves(*needed)
        expected = [gradient for gradient, asks in zip(every, needed, strict=True) if asks]
        assert_same(gradients(norm(*some), some), expected)


@every_norm
def test_what_is_saved_must_not_change(norm: Norm) -> None:
    given = leaves()
    output = norm(*given)
    with torch.no_grad():
        given[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(output, given)


@every_norm
def test_batched_gradients(norm: Norm) -> None:
    given = leaves()
    output = norm(*given)
    batch = torch.randn(2, *output.shape)
    options = {"retain_graph": True, "is_grads_batched": True}
    found = torch.autograd.grad(output, given, batch, **options)
    for number, reached in enumerate(batch):
        one = torch.autograd.grad(output, given, reached, retain_graph=True)
        assert_same([gradient[number] for gradient in found], one)


# Of PyTorch's own look at the tensors of a graph.
@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@every_norm
def test_compiled_autograd(norm: Norm) -> None:
    """Twice, of an eager forward."""
    torch._dynamo.reset()
    given = leaves()
    output = norm(*given)
    expected = gradients(output, given)
    for _ in range(2):
        given = leaves()
        output = norm(*given)
        loss = (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum()
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            torch.autograd.backward(loss)
        assert_same([each.grad for each in given], expected)
    torch._dynamo.reset()


@pytest.mark.drawn
@every_norm
def test_compiled_for_any_shape(norm: Norm) -> None:
    torch._dynamo.reset()
    given = leaves()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=True)
    assert_same(gradients(compiled(*given), given), gradients(norm(*given), given))
    torch._dynamo.reset()
