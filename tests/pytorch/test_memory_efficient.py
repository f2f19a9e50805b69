"""Norms that keep their output for the backward, and not their input."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import (
    EPS,
    FORMS,
    Form,
    assert_gradients_right,
    bits,
    gradients_of,
    random_like,
    random_tensors,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import iree_lnbwd as lnbwd
from iree_lnbwd.torch import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, layer_norm

# Raised inside PyTorch 2.13, by imports of inductor and of export.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """The memory of what autograd saves: bytes, by their address."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors[tensor.data_ptr()] = tensor
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("without", [(), ("weight", "bias")], ids=["parameters", "none"])
def test_gradients(form: Form, dtype: str, without: tuple[str, ...], device: str) -> None:
    """Those of the outputs that it gave, which have the bits that they have otherwise."""
    offset = 0.0 if without else 0.5
    tensors = random_tensors(form, (3, 5), (24,), dtype, without=without, device=device)
    outputs = form(tensors, (24,), memory_efficient=True, weight_offset=offset)
    expected = form(tensors, (24,), weight_offset=offset)
    assert [bits(output) for output in outputs] == [bits(output) for output in expected]
    reached = tuple(map(random_like, outputs))
    gradients = gradients_of(outputs, tensors, reached)
    rstd = getattr(lnbwd, form.op.name)(
        normalized_shape=24,
        eps=EPS,
        weight_offset=offset,
        **{name: tensor.detach() for name, tensor in tensors.items()},
    ).rstd
    assert_gradients_right(
        form, tensors, (24,), reached, gradients, weight_offset=offset, kept=(outputs[0], rstd)
    )


@pytest.mark.drawn
@every_form
def test_gradcheck(form: Form) -> None:
    tensors = random_tensors(form, (3,), (2, 3), "f64")

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(tensors, given, strict=True))
        return form(arguments, (2, 3), memory_efficient=True)

    assert torch.autograd.gradcheck(function, list(tensors.values()))


@every_form
def test_what_is_saved(form: Form, device: str) -> None:
    """The output, the parameters and rstd; neither the input, nor the sum, nor the mean."""
    tensors = random_tensors(form, (5,), (24,), device=device)
    saved = Saved()
    with saved:
        output, *sums = form(tensors, (24,), memory_efficient=True)
    kept = dict(saved.tensors)
    assert kept.pop(output.data_ptr()).nbytes == output.nbytes
    for name in ("weight", "bias"):
        if name in tensors:
            kept.pop(tensors[name].data_ptr())
    assert [(tensor.shape, tensor.dtype) for tensor in kept.values()] == [((5, 1), torch.float32)]
    assert not {t.data_ptr() for t in (tensors["input"], *sums)} & set(saved.tensors)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_bytes_that_a_model_saves(kind: Any, device: str) -> None:
    """A layer after the norm saves its input, which is the norm's output: it is kept once."""
    x = torch.randn(64, 32, device=device, requires_grad=True)
    layers = [nn.Linear(32, 32, device=device) for _ in range(2)]
    found = []
    for options in ({}, {"memory_efficient": True}):
        norm = kind(32, device=device, **options)
        saved = Saved()
        with saved:
            layers[1](norm(layers[0](x)))
        found.append(saved.nbytes)
    of_input, of_mean = x.nbytes, 64 * 4 if kind is LayerNorm else 0
    assert found[0] - found[1] == of_input + of_mean


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(form: Form, reentrant: bool, device: str) -> None:
    tensors = random_tensors(form, (9,), (24,), device=device)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(tensors, given, strict=True))
        return form(arguments, (24,), memory_efficient=True)

    outputs = function(*tensors.values())
    reached = tuple(map(random_like, outputs))
    stored = gradients_of(outputs, tensors, reached)
    again = checkpoint(function, *tensors.values(), use_reentrant=reentrant)
    torch.autograd.backward(again, reached)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        assert bits(tensor.grad) == bits(stored[name]), name


def test_it_takes_our_forward() -> None:
    tensors = random_tensors(FORMS["layer_norm"], (9,), (24,), "bf16")
    ours = layer_norm(**tensors, normalized_shape=24, own_forward=True)
    assert torch.equal(layer_norm(**tensors, normalized_shape=24, memory_efficient=True), ours)


@every_form
def test_the_output_must_not_change(form: Form) -> None:
    tensors = random_tensors(form, (9,), (24,))
    output, *_ = form(tensors, (24,), memory_efficient=True)
    reached = random_like(output)
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output, tensors["input"], reached)


@every_form
def test_gradients_are_not_differentiated_again(form: Form) -> None:
    tensors = random_tensors(form, (9,), (24,))
    output, *_ = form(tensors, (24,), memory_efficient=True)
    with pytest.raises(RuntimeError, match=r"^memory_efficient: expected a backward that is not"):
        torch.autograd.grad(output.sum(), tensors["input"], create_graph=True)


@pytest.mark.parametrize("form", [FORMS["add_layer_norm"], FORMS["add_rms_norm"]])
def test_a_residual_of_another_type_is_refused(form: Form) -> None:
    tensors = random_tensors(form, (9,), (24,), "bf16", residual="f32")
    with pytest.raises(TypeError, match=r"^residual: expected torch.bfloat16 like input"):
        form(tensors, (24,), memory_efficient=True)


@every_form
@pytest.mark.parametrize("flag", [1, None, "yes"])
def test_it_is_a_bool(form: Form, flag: object) -> None:
    tensors = random_tensors(form, (3,), (8,))
    with pytest.raises(TypeError, match=r"^memory_efficient: expected True or False, got "):
        form(tensors, (8,), memory_efficient=flag)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, device: str) -> None:
    """One graph, whose backward has the operator that takes the output."""
    torch._dynamo.reset()
    norm = AddRMSNorm(264, memory_efficient=True, device=device)
    tensors = {name: torch.randn(5, 264, device=device, requires_grad=True) for name in "xr"}

    def gradients(function: Any) -> tuple[Tensor, ...]:
        output, total = function(*tensors.values())
        found: tuple[Tensor, ...] = torch.autograd.grad(
            output.sin().sum() + total.sum(), [*tensors.values(), norm.weight]
        )
        return found

    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    gradients(compiled)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        found = gradients(compiled)
    assert "iree_lnbwd::rms_norm_backward_from_output" in [e.name for e in profiled.events()]
    for ours, expected in zip(found, gradients(norm), strict=True):
        torch.testing.assert_close(ours, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, AddLayerNorm, AddRMSNorm])
def test_a_module_names_a_bad_offset(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"^weight_offset: expected a float, got str$"):
        kind(8, weight_offset="1")
