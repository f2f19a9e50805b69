"""Tensors whose memory is not their value, is elsewhere, or is gone: right, or refused by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import Arguments, assert_matches_reference, random_arguments, random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor
from torch_support import assert_right, to_array, to_tensor

import iree_lnbwd as lnbwd
from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.torch import layer_norm

SPEC = NormSpec((24,))
NAMES = ("grad_output", "input", "mean", "rstd", "weight", "bias")
Change = Callable[[Tensor], Any]


def uri(device: str) -> DeviceUri:
    """IREE's name of PyTorch's device."""
    if device == "cpu":
        return DeviceUri.parse("local-task")
    return DeviceUri.parse("hip" if torch.version.hip else "cuda")


def arguments_for(spec: NormSpec, leading: tuple[int, ...]) -> Arguments:
    """Of a backward, with the statistics too."""
    return random_arguments(random_generator(), spec, leading)


def given(arguments: Arguments, device: str) -> dict[str, Any]:
    """They as tensors, in memory that PyTorch owns."""
    return {name: to_tensor(getattr(arguments, name), device).clone() for name in NAMES}


def on_host(gradients: Any) -> LayerNormGrads:
    return LayerNormGrads(*map(to_array, gradients))


def negated_lazily(tensor: Tensor) -> Any:
    return torch._neg_view(-tensor)


def imaginary_part_of_a_conjugate(tensor: Tensor) -> Any:
    return torch.complex(tensor, -tensor).conj().imag


def transposed(tensor: Tensor) -> Any:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else spread(tensor)


def spread(tensor: Tensor) -> Any:
    return torch.stack((tensor, tensor), -1)[..., 0]


def off_by_an_element(tensor: Tensor) -> Any:
    """`buffer[1:].view(...)`: contiguous, and 16 bytes do not divide its address."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def expanded(tensor: Tensor) -> Any:
    """Its first element everywhere, all strides 0."""
    return tensor.flatten()[0].expand(tensor.shape)


def subclassed(tensor: Tensor) -> Any:
    return tensor.as_subclass(type("Mine", (Tensor,), {}))


def under_inference_mode(tensor: Tensor) -> Any:
    with torch.inference_mode():
        return tensor.clone()


def differentiated(tensor: Tensor) -> Any:
    return tensor.detach().requires_grad_()


LAYOUTS: tuple[Change, ...] = (
    negated_lazily,
    imaginary_part_of_a_conjugate,
    transposed,
    spread,
    off_by_an_element,
    expanded,
    subclassed,
    under_inference_mode,
)


def name_of(change: Change) -> str:
    return change.__name__


@pytest.mark.drawn
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("statistics", ["given", "recomputed"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_any_tensor_that_pytorch_computes_with(
    dtype: str, statistics: str, layout: Change, name: str, device: str
) -> None:
    """In a plain call, again when its kind is known, and by the operator."""
    if layout is imaginary_part_of_a_conjugate and dtype == "bf16":
        pytest.skip("there are no complex numbers of bf16")
    arguments = arguments_for(replace(SPEC, dtype=dtype), (3, 5))
    tensors = given(arguments, device)
    if statistics == "recomputed":
        if name in ("mean", "rstd"):
            pytest.skip("there are none")
        tensors |= {"mean": None, "rstd": None}
        arguments = replace(arguments, mean=None, rstd=None)
    tensors[name] = layout(tensors[name])
    values: dict[str, Any] = {name: to_array(tensors[name].resolve_neg())}
    arguments = replace(arguments, **values)
    for _ in range(2):
        gradients = lnbwd.layer_norm_backward(**tensors, normalized_shape=24)
        assert_matches_reference(on_host(gradients), arguments)
        assert all(gradient.is_contiguous() for gradient in gradients)
    by_operator = torch.ops.iree_lnbwd.layer_norm_backward(
        *(tensors[n] for n in NAMES), *(None,) * 4, [24], [True] * 3, arguments.eps, 0.0
    )
    assert_matches_reference(on_host(by_operator), arguments)


@pytest.mark.parametrize("name", ["grad_output", "input", "weight", "bias"])
@pytest.mark.parametrize(
    "layout",
    [negated_lazily, imaginary_part_of_a_conjugate, off_by_an_element, transposed],
    ids=name_of,
)
def test_through_autograd(layout: Change, name: str, device: str) -> None:
    arguments = replace(arguments_for(SPEC, (3, 5)), mean=None, rstd=None)
    tensors = {n: to_tensor(getattr(arguments, n), device) for n in NAMES}
    tensors[name] = layout(tensors[name])
    leaves = [tensors[n].requires_grad_() for n in ("input", "weight", "bias")]
    for _ in range(3):  # C++ takes a kind of call over after its first
        output = layer_norm(leaves[0], 24, leaves[1], leaves[2])
        gradients = torch.autograd.grad(output, leaves, tensors["grad_output"])
        assert_right(LayerNormGrads(*gradients), arguments)


@pytest.mark.parametrize("name", ["grad_output", "input", "weight", "bias"])
def test_zeros_without_memory(name: str, device: str) -> None:
    """`torch._efficientzerotensor`, which forward-mode AD makes, has an address of nothing."""
    arguments = arguments_for(SPEC, (5,))
    for known in (False, True):
        tensors = given(arguments, device)
        if known:
            lnbwd.layer_norm_backward(**tensors, normalized_shape=24)
        zeros = torch._efficientzerotensor(tensors[name].shape, device=device)
        values: dict[str, Any] = {name: to_array(zeros.clone())}
        gradients = lnbwd.layer_norm_backward(**(tensors | {name: zeros}), normalized_shape=24)
        assert_matches_reference(on_host(gradients), replace(arguments, **values))


def functional(tensor: Tensor) -> Any:
    return torch._to_functional_tensor(tensor)


def fake(tensor: Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def of_two(tensor: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(tensor, tensor)


def masked(tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(tensor, tensor > 0)


def nested(tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)


def sparse(tensor: Tensor) -> Any:
    return tensor.to_sparse()


@pytest.mark.parametrize("name", ["grad_output", "input", "weight", "bias"])
@pytest.mark.parametrize("wrap", [functional, fake, of_two, masked, nested, sparse], ids=name_of)
def test_what_has_no_memory_of_its_own_is_refused_by_name(
    wrap: Change, name: str, device: str
) -> None:
    arguments = arguments_for(SPEC, (5,))
    for known in (False, True):
        tensors = given(arguments, device)
        if known:
            lnbwd.layer_norm_backward(**tensors, normalized_shape=24)
        tensors[name] = wrap(tensors[name])
        said = f"^{name}: expected a tensor whose memory holds its values, got a "
        with pytest.raises(TypeError, match=said):
            lnbwd.layer_norm_backward(**tensors, normalized_shape=24)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own
def test_the_tensors_of_a_transform_are_refused_by_name(device: str) -> None:
    x = torch.randn(4, 5, 24, device=device)

    def of(tensor: Tensor) -> Any:
        return lnbwd.layer_norm_backward(tensor, tensor, 24).grad_input

    transforms: tuple[Callable[[], object], ...] = (
        lambda: torch.func.vmap(of)(x),
        lambda: torch.func.grad(lambda tensor: of(tensor).sum())(x),
        lambda: torch.func.jvp(of, (x,), (x,)),
    )
    for transform in transforms:
        said = "^grad_output: expected a tensor whose memory holds its values, got a Tensor"
        with pytest.raises(TypeError, match=said):
            transform()


@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("name", NAMES)
def test_freed_storage_is_refused_by_name(name: str, left: int, device: str) -> None:
    """As FSDP frees its parameters: the shape stays, and an access ends the process."""
    if (name, device) == ("bias", "cuda"):
        pytest.skip("a GPU's kernels have no pointer to it")
    tensors = given(arguments_for(SPEC, (5,)), device)
    tensors[name].untyped_storage().resize_(left)
    said = f"^{name}: expected a tensor with .* bytes of storage, got one with {left}"
    with pytest.raises(ValueError, match=said):
        lnbwd.layer_norm_backward(**tensors, normalized_shape=24)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("name", ["grad_output", "input", "mean", "rstd", "weight"])
def test_freed_storage_is_refused_where_such_a_call_is_known(name: str, left: int) -> None:
    arguments = arguments_for(SPEC, (5,))
    lnbwd.layer_norm_backward(**given(arguments, "cuda"), normalized_shape=24)
    tensors = given(arguments, "cuda")
    tensors[name].untyped_storage().resize_(left)
    said = f"^{name}: expected a tensor with .* bytes of storage, got one with {left}"
    with pytest.raises(ValueError, match=said):
        lnbwd.layer_norm_backward(**tensors, normalized_shape=24)


# --- storage of the caller's --------------------------------------------------------------------


def storage_for(tensors: dict[str, Any]) -> dict[str, Any]:
    """With a number in it that no gradient is."""
    of = {"grad_input": "input", "grad_weight": "weight", "grad_bias": "bias"}
    return {name: torch.full_like(tensors[like], -77) for name, like in of.items()}


@pytest.mark.parametrize("gradient", ["grad_input", "grad_weight", "grad_bias"])
@pytest.mark.parametrize("layout", [*LAYOUTS, functional, fake], ids=name_of)
def test_storage_of_every_layout_is_filled_or_refused(
    layout: Change, gradient: str, device: str
) -> None:
    arguments = arguments_for(SPEC, (5,))
    tensors = given(arguments, device)
    expected, stored = storage_for(tensors), storage_for(tensors)
    op = loaded(SPEC, uri(device))
    op(**tensors, out=LayerNormGrads(**expected))
    assert_matches_reference(on_host(expected.values()), arguments)
    stored[gradient] = layout(stored[gradient])
    filled = (subclassed, under_inference_mode, *([off_by_an_element] if device == "cpu" else ()))
    if layout in filled:
        op(**tensors, out=LayerNormGrads(**stored))
        assert all(torch.equal(stored[name], expected[name]) for name in stored)
        return
    with pytest.raises((TypeError, ValueError), match=rf"^out\.{gradient}: expected "):
        op(**tensors, out=LayerNormGrads(**stored))
    if layout not in (functional, fake):
        assert all((tensor == -77).all() for tensor in stored.values())


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("protected", [under_inference_mode, differentiated], ids=name_of)
def test_storage_that_pytorch_protects_is_filled(protected: Change, rows: int, device: str) -> None:
    """It is the caller's to say where gradients go."""
    arguments = arguments_for(SPEC, (rows,))
    tensors = given(arguments, device)
    stored = {name: protected(tensor) for name, tensor in storage_for(tensors).items()}
    loaded(SPEC, uri(device))(**tensors, out=LayerNormGrads(**stored))
    assert_matches_reference(on_host(stored.values()), arguments)


def test_without_rows_too_overlapping_storage_is_refused(device: str) -> None:
    tensors = given(arguments_for(SPEC, (0,)), device)
    stored = storage_for(tensors) | {"grad_weight": tensors["weight"]}
    before = tensors["weight"].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out\.grad_weight: expected memory of its own"):
            loaded(SPEC, uri(device))(**tensors, out=LayerNormGrads(**stored))
    assert torch.equal(tensors["weight"], before)


OVERLAPS = [
    ("grad_input", "grad_output", 0),
    ("grad_input", "input", 0),
    ("grad_input", "input", 4),
    ("grad_weight", "weight", 0),
    ("grad_bias", "rstd", 0),
    ("grad_bias", "grad_weight", 0),
]


@pytest.mark.parametrize("columns", [7, 8, 1000])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize(("result", "other", "shift"), OVERLAPS)
def test_overlapping_storage_is_refused(
    result: str, other: str, shift: int, dtype: str, columns: int, device: str
) -> None:
    spec, rows = NormSpec((columns,), dtype), columns + 8
    tensors = given(arguments_for(spec, (rows,)), device)
    like = tensors["weight"]
    shapes = {"grad_input": (rows, columns), "grad_weight": (columns,), "grad_bias": (columns,)}
    stored = {name: torch.full_like(like[0], -77).expand(s).clone() for name, s in shapes.items()}
    size = math.prod(shapes[result])
    source = stored[other] if other in stored else tensors[other]
    room = torch.zeros(size + source.numel() + 64, dtype=like.dtype, device=device)
    moved = room[: source.numel()].view(source.shape).copy_(source)
    (stored if other in stored else tensors)[other] = moved
    stored[result] = room[shift * 4 : shift * 4 + size].view(shapes[result])
    before = room.clone()
    op = loaded(spec, uri(device))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^out\.{result}: expected memory of its own"):
            op(**tensors, out=LayerNormGrads(**stored))
    assert torch.equal(room, before)
