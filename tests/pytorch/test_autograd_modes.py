"""Autograd beside plain backwards: forward mode, batches, jagged tensors, its own compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import EPS, FORMS, Form, gradients_of, random_like, random_tensors
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from iree_lnbwd.torch import AddRMSNorm, LayerNorm

# Raised inside PyTorch 2.13, by imports of its compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]

# With the layer norm whose forward is PyTorch's: its operator is another.
ALL = {"pytorchs_layer_norm": replace(FORMS["layer_norm"], options={}), **FORMS}
every_form = pytest.mark.parametrize("form", ALL.values(), ids=ALL)
COLUMNS = 24


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by_pytorch(form: Form, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What a form computes, by functions of PyTorch alone."""
    total = tensors["input"] + tensors["residual"] if form.takes_residual else tensors["input"]
    function = getattr(torch.nn.functional, form.op.name)
    parameters = {n: tensors[n] for n in ("weight", "bias") if n in form.arguments}
    added = None if form.op.atens_bias else parameters.pop("bias", None)  # PyTorch's has none
    output: Tensor = function(total, (COLUMNS,), eps=EPS, **parameters)
    output = output if added is None else output + added
    return (output, total) if form.takes_residual else (output,)


@pytest.mark.drawn
@every_form
def test_forward_mode(form: Form) -> None:
    tensors = random_tensors(form, (5,), (COLUMNS,))
    tangents = {name: random_like(tensor) for name, tensor in tensors.items()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(t, tangents[n]) for n, t in tensors.items()}
        for ours, theirs in zip(form(duals, (COLUMNS,)), by_pytorch(form, duals), strict=True):
            found, expected = (forward_ad.unpack_dual(t).tangent for t in (ours, theirs))
            assert found is not None
            torch.testing.assert_close(found, expected)
    form(tensors, (COLUMNS,))  # afterwards, all is as it was


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("strategy", ["forward-mode", "reverse-mode"])
def test_vectorized_jacobians(form: Form, strategy: str) -> None:
    tensors = random_tensors(form, (3,), (COLUMNS,))
    values = tuple(tensor.detach() for tensor in tensors.values())

    def function(compute: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> Tensor:
        outputs = compute(dict(zip(tensors, given, strict=True)))
        return torch.stack(outputs).sum(0)

    ours = functools.partial(function, lambda given: form(given, (COLUMNS,)))
    theirs = functools.partial(function, lambda given: by_pytorch(form, given))
    found = jacobian(ours, values, vectorize=True, strategy=strategy)
    torch.testing.assert_close(found, jacobian(theirs, values))


@every_form
def test_batched_gradients(form: Form) -> None:
    tensors = random_tensors(form, (5,), (COLUMNS,))
    outputs = form(tensors, (COLUMNS,))
    batch = tuple(torch.randn(3, *output.shape) for output in outputs)
    found = torch.autograd.grad(
        outputs, list(tensors.values()), batch, is_grads_batched=True, retain_graph=True
    )
    for i in range(3):
        one = torch.autograd.grad(
            outputs, list(tensors.values()), [g[i] for g in batch], retain_graph=True
        )
        for ours, expected in zip(found, one, strict=True):
            torch.testing.assert_close(ours[i], expected)


@every_form
def test_jagged_tensors(form: Form) -> None:
    """As the rows that they hold; gradients too."""
    tensors = random_tensors(form, (9,), (COLUMNS,))
    offsets = torch.tensor([0, 2, 2, 9])
    nested = {
        name: torch.nested.nested_tensor_from_jagged(tensor, offsets) if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }
    outputs, expected = form(nested, (COLUMNS,)), form(tensors, (COLUMNS,))
    reached = tuple(map(random_like, expected))
    for output, dense in zip(outputs, expected, strict=True):
        assert output.shape == nested["input"].shape
        assert torch.equal(output.values(), dense)
    flat = tuple(output.values() for output in outputs)
    theirs = gradients_of(expected, tensors, reached)
    for name, ours in gradients_of(flat, tensors, reached).items():
        assert torch.equal(ours, theirs[name]), name


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore")  # raised inside PyTorch, which cannot hash such tensors
@every_form
def test_jagged_tensors_compiled(form: Form) -> None:
    """With what is around the norm, whose jagged dimension stays the same."""
    tensors = random_tensors(form, (9,), (COLUMNS,))
    offsets = torch.tensor([0, 2, 2, 9])
    nested = {
        name: torch.nested.nested_tensor_from_jagged(tensor, offsets) if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }

    def function(given: dict[str, Tensor]) -> Tensor:
        total = given["input"] * 2
        for output in form(given, (COLUMNS,)):
            total = total + output
        return total

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(nested)
    plain = function(tensors)
    torch.testing.assert_close(compiled.values(), plain)
    reached = random_like(plain)
    theirs = gradients_of((plain,), tensors, (reached,))
    for name, ours in gradients_of((compiled.values(),), tensors, (reached,)).items():
        torch.testing.assert_close(ours, theirs[name])


def test_jagged_tensors_that_do_not_fit() -> None:
    x, other = (
        torch.nested.nested_tensor_from_jagged(torch.randn(4, COLUMNS), torch.tensor(offsets))
        for offsets in ([0, 1, 4], [0, 2, 4])
    )
    form, weight = FORMS["add_rms_norm"], torch.ones(COLUMNS)
    with pytest.raises(ValueError, match=r"^residual: expected a jagged tensor with the offsets"):
        form({"input": x, "residual": other, "weight": weight}, (COLUMNS,))
    with pytest.raises(ValueError, match=r"^residual: expected a jagged tensor with the offsets"):
        form({"input": x, "residual": torch.randn(2, 2, COLUMNS), "weight": weight}, (COLUMNS,))
    turned = torch.nested.nested_tensor_from_jagged(
        torch.randn(3, COLUMNS), torch.tensor([0, 4, COLUMNS]), jagged_dim=2
    )
    with pytest.raises(ValueError, match=r"^input: expected normalized dimensions of one length"):
        FORMS["rms_norm"]({"input": turned}, (COLUMNS,))


# Of PyTorch's own look at the tensors of a graph.
@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("fresh_dynamo")
@every_form
def test_compiled_autograd_of_an_eager_forward(form: Form) -> None:
    tensors = random_tensors(form, (5,), (COLUMNS,))
    loss = torch.stack([output.square().sum() for output in form(tensors, (COLUMNS,))]).sum()
    expected = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.autograd.backward(loss)
    for (name, tensor), gradient in zip(tensors.items(), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("norm", [LayerNorm(COLUMNS), AddRMSNorm(COLUMNS)], ids=["layer", "add"])
def test_torchscript_says_what_to_take_in_its_place(norm: torch.nn.Module) -> None:
    said = rf"^torch.jit.script: expected .* got {type(norm).__name__} .*; torch.export and .* take"
    with pytest.raises(RuntimeError, match=said):
        torch.jit.script(torch.nn.Sequential(norm))
