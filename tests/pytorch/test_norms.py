"""Every norm against the f64 reference, against its unfused form, and as its arguments vary."""

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
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_support import TORCH_DTYPES

import iree_lnbwd as lnbwd
from iree_lnbwd.torch import add_layer_norm, add_rms_norm, layer_norm, rms_norm

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
fused_forms = pytest.mark.parametrize("form", [FORMS["add_layer_norm"], FORMS["add_rms_norm"]])


class Recorder(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def check(
    form: Form, tensors: dict[str, Tensor], dims: tuple[int, ...], weight_offset: float = 0.0
) -> None:
    """Forward to the bit of this package's function, and gradients within their tolerance."""
    outputs = form(tensors, dims, weight_offset=weight_offset)
    found = getattr(lnbwd, form.op.name)(
        normalized_shape=dims,
        eps=EPS,
        weight_offset=weight_offset,
        **{name: tensor.detach() for name, tensor in tensors.items()},
    )
    for output, expected in zip(outputs, (found.output, found.residual_output), strict=False):
        assert output.dtype == expected.dtype
        assert bits(output) == bits(expected)
    reached = tuple(map(random_like, outputs))
    gradients = gradients_of(outputs, tensors, reached)
    assert_gradients_right(form, tensors, dims, reached, gradients, weight_offset=weight_offset)


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_gradients(form: Form, dtype: str, device: str) -> None:
    check(form, random_tensors(form, (3, 5), (24,), dtype, device=device), (24,))


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("without", [("weight", "bias"), ("weight",)], ids="-".join)
def test_without_parameters(form: Form, without: tuple[str, ...], device: str) -> None:
    tensors = random_tensors(form, (7,), (4, 6), without=without, device=device)
    check(form, tensors, (4, 6))


@pytest.mark.drawn
@every_form
def test_a_weight_around_zero(form: Form, device: str) -> None:
    check(form, random_tensors(form, (9,), (24,), device=device), (24,), weight_offset=1.0)


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize(
    ("dtype", "residual", "parameters"),
    [("bf16", "f32", "f32"), ("f32", "bf16", "f32")],
)
def test_mixed_types(form: Form, dtype: str, residual: str, parameters: str, device: str) -> None:
    tensors = random_tensors(
        form, (6,), (24,), dtype, residual=residual, parameters=parameters, device=device
    )
    check(form, tensors, (24,))


@every_form
@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24)])
def test_no_rows(form: Form, shape: tuple[int, ...], device: str) -> None:
    """Nothing is computed; the order in memory is said as ever."""
    tensors = random_tensors(form, shape[:-1], (24,), device=device)
    check(form, tensors, (24,))
    for output in form(tensors, (24,)):
        assert output.stride() == torch.empty(shape).stride()


@every_form
def test_rows_of_no_columns(form: Form) -> None:
    """PyTorch takes them, so they are taken here."""
    tensors = random_tensors(form, (3,), (0,))
    outputs = form(tensors, 0)
    gradients = gradients_of(outputs, tensors, tuple(map(torch.zeros_like, outputs)))
    assert {n: g.shape for n, g in gradients.items()} == {n: t.shape for n, t in tensors.items()}


@every_form
def test_tensors_that_are_not_contiguous(form: Form, device: str) -> None:
    def spread(tensor: Tensor) -> Tensor:
        strided = torch.stack((tensor.detach(), tensor.detach()), -1)[..., 0]
        assert not strided.is_contiguous()
        return strided.requires_grad_()

    tensors = random_tensors(form, (6, 4), (24,), device=device)
    strided = {name: spread(tensor) for name, tensor in tensors.items()}
    outputs = form(strided, (24,))
    assert [bits(output) for output in outputs] == [bits(o) for o in form(tensors, (24,))]
    reached = tuple(spread(random_like(output)).detach() for output in outputs)
    gradients = gradients_of(outputs, strided, reached)
    assert_gradients_right(form, tensors, (24,), reached, gradients)


@pytest.mark.drawn
@every_form
def test_only_what_requires_a_gradient(form: Form) -> None:
    for asked in form.arguments:
        tensors = random_tensors(form, (9,), (24,))
        for name, tensor in tensors.items():
            tensor.requires_grad_(name == asked)
        outputs = form(tensors, (24,))
        reached = tuple(map(random_like, outputs))
        gradients = gradients_of(outputs, tensors, reached)
        if form.takes_residual and asked == "input":
            gradients["residual"] = gradients["input"]
        assert_gradients_right(form, tensors, (24,), reached, gradients)


@every_form
def test_nothing_requires_a_gradient(form: Form) -> None:
    tensors = random_tensors(form, (9,), (24,))
    expected = form(tensors, (24,))
    with torch.no_grad():
        assert all(output.grad_fn is None for output in form(tensors, (24,)))
    with torch.inference_mode():
        assert all(map(torch.equal, form(tensors, (24,)), expected))
    constants = {name: tensor.detach() for name, tensor in tensors.items()}
    assert not any(output.requires_grad for output in form(constants, (24,)))


def test_eps_of_rms_norm_is_pytorchs() -> None:
    x = torch.full((3, 8), 1e-4, requires_grad=True)  # its squares are about the epsilon of f32
    torch.testing.assert_close(rms_norm(x, 8), torch.nn.functional.rms_norm(x, [8]))
    torch.testing.assert_close(rms_norm(x.double(), 8), torch.rms_norm(x.double(), [8]))


def test_agrees_with_pytorch(device: str) -> None:
    tensors = random_tensors(FORMS["rms_norm"], (16,), (96,), device=device)
    x, weight = tensors.values()
    ours, theirs = rms_norm(x, 96, weight), torch.nn.functional.rms_norm(x, (96,), weight)
    torch.testing.assert_close(ours, theirs)
    reached = random_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, (x, weight), reached),
        torch.autograd.grad(theirs, (x, weight), reached),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)  # PyTorch's own tolerance of that type


# --- eager calls of one dimension: the output alone ------------------------------------------

CALLS = {
    "layer_norm": lambda x, w, b: layer_norm(x, (24,), w, b),
    "own_layer_norm": lambda x, w, b: layer_norm(x, (24,), w, b, own_forward=True),
    "rms_norm": lambda x, w, b: rms_norm(x, (24,), w, bias=b, eps=1e-5),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_an_eager_call_makes_no_statistics_into_objects(name: str, device: str) -> None:
    tensors = [torch.randn(*shape, device=device) for shape in ((3, 24), (24,), (24,))]
    with torch.profiler.profile() as profile:
        CALLS[name](*tensors)
    names = [event.name for event in profile.events() or ()]
    assert names.count(f"iree_lnbwd::{name}_output") == 1
    assert f"iree_lnbwd::{name}" in names  # profilers see the norm, too


@every_call
@pytest.mark.parametrize("requires_grad", [False, True])
def test_who_looks_on_sees_the_norm(name: str, requires_grad: bool, device: str) -> None:
    tensors = [torch.randn(*shape, device=device) for shape in ((3, 24), (24,), (24,))]
    alone = CALLS[name](*tensors)
    for tensor in tensors:
        tensor.requires_grad_(requires_grad)
    with Recorder() as ran:
        output = CALLS[name](*tensors)
    assert torch.equal(output, alone)
    expected = "aten.native_layer_norm" if name == "layer_norm" else f"iree_lnbwd.{name}"
    assert ran.names[0] == f"{expected}.default"


@every_call
def test_inference_tensors(name: str, device: str) -> None:
    tensors = [torch.randn(*shape, device=device) for shape in ((3, 24), (24,), (24,))]
    expected = CALLS[name](*tensors)
    with torch.inference_mode():
        copies = [tensor.clone() for tensor in tensors]
        found = CALLS[name](*copies)
    assert found.is_inference()
    assert torch.equal(found, expected)


@every_call
def test_vmap_batches_the_norm(name: str, device: str) -> None:
    batch = torch.randn(4, 3, 24, device=device)
    weight, bias = torch.randn(2, 24, device=device)
    expected = torch.stack([CALLS[name](x, weight, bias) for x in batch])
    torch._C._functorch._set_vmap_fallback_enabled(False)  # which takes one after another
    try:
        found = torch.func.vmap(lambda x: CALLS[name](x, weight, bias))(batch)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    torch.testing.assert_close(found, expected)


@every_call
def test_fake_tensors_go_through_the_norm(name: str) -> None:
    with FakeTensorMode():
        tensors = [torch.randn(*shape) for shape in ((3, 24), (24,), (24,))]
        alone = getattr(torch.ops.iree_lnbwd, f"{name}_output")
        options = () if name == "layer_norm" else (0.0, False, None)
        output = alone(*tensors, 24, 1e-5, *options)
    assert isinstance(output, FakeTensor)
    assert output.shape == (3, 24)


# --- layer norms: whose forward ---------------------------------------------------------------


def test_pytorchs_forward_is_the_default(device: str) -> None:
    tensors = random_tensors(FORMS["layer_norm"], (9,), (24,), device=device)
    with Recorder() as ran:
        output = layer_norm(**tensors, normalized_shape=24)
    assert "aten.native_layer_norm.default" in ran.names
    assert torch.equal(
        output, torch.nn.functional.layer_norm(tensors["input"], (24,), *list(tensors.values())[1:])
    )


@pytest.mark.parametrize("options", [{"own_forward": True}, {"weight_offset": 1.0}], ids=str)
def test_options_take_our_forward(options: dict[str, Any], device: str) -> None:
    tensors = random_tensors(FORMS["layer_norm"], (9,), (24,), device=device)
    with Recorder() as ran:
        layer_norm(**tensors, normalized_shape=24, **options)
    assert "iree_lnbwd.own_layer_norm.default" in ran.names
    assert not any("native_layer_norm" in name for name in ran.names)


def test_a_half_backward_does_not_recompute_our_statistics(device: str) -> None:
    tensors = random_tensors(FORMS["layer_norm"], (9,), (24,), "bf16", device=device)
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.extend([tensor.dtype] if tensor.shape == (9, 1) else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer_norm(**tensors, normalized_shape=24, own_forward=True)
    assert kept == [torch.float32, torch.float32]


# --- norms of sums --------------------------------------------------------------------------


@pytest.mark.drawn
@fused_forms
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
def test_a_fused_forward_has_the_bits_of_an_addition_and_a_norm(
    form: Form, types: tuple[str, str], device: str
) -> None:
    dtype, residual = types
    tensors = random_tensors(form, (9,), (24,), dtype, residual=residual, device=device)
    output, total = form(tensors, (24,))
    expected = (tensors["input"] + tensors["residual"]).to(tensors["residual"].dtype)
    assert torch.equal(total, expected)
    plain = FORMS["layer_norm" if form.op.centres else "biased_rms_norm"]
    (normed,) = plain(tensors | {"input": expected.detach()}, (24,))
    assert torch.equal(output, normed.to(output.dtype))


@fused_forms
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_no_addition_runs_in_the_backward(form: Form, dtype: str, device: str) -> None:
    """The gradient that passes the norm by is added by the norm's kernel: two norms in a row."""
    tensors = random_tensors(form, (9,), (24,), dtype, device=device)
    first, total = form(tensors, (24,))
    outputs = form(tensors | {"input": first, "residual": total}, (24,))
    with Recorder() as ran:
        torch.autograd.grad(
            outputs, (tensors["input"], tensors["residual"]), tuple(map(random_like, outputs))
        )
    calls = [name for name in ran.names if name.startswith("iree_lnbwd.")]
    assert len(calls) == 2
    assert all("norm_backward" in name for name in calls)
    # The residual of the second norm is the sum of the first: its gradient and that of the
    # output arrive there without an addition, too.
    assert not [name for name in ran.names if name.startswith("aten.add")]


@fused_forms
def test_input_and_residual_share_a_gradient(form: Form, device: str) -> None:
    tensors = random_tensors(form, (9,), (24,), device=device)
    outputs = form(tensors, (24,))
    gradients = gradients_of(outputs, tensors, tuple(map(random_like, outputs)))
    assert gradients["input"].data_ptr() == gradients["residual"].data_ptr()
    # What is accumulated is nobody else's.
    torch.autograd.backward(form(tensors, (24,)), tuple(map(random_like, outputs)))
    of_input, of_residual = tensors["input"].grad, tensors["residual"].grad
    assert of_input is not None
    assert of_residual is not None
    assert of_input.data_ptr() != of_residual.data_ptr()


@fused_forms
def test_the_output_alone_is_used(form: Form, device: str) -> None:
    tensors = random_tensors(form, (9,), (24,), device=device)
    output, _ = form(tensors, (24,))
    reached = random_like(output)
    gradients = gradients_of((output,), tensors, (reached,))
    assert_gradients_right(form, tensors, (24,), (reached,), gradients)


@fused_forms
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "f32")])
def test_the_sum_alone_is_used(form: Form, types: tuple[str, str], device: str) -> None:
    """Its gradient passes through, and no kernel of ours runs."""
    dtype, residual = types
    tensors = random_tensors(form, (9,), (24,), dtype, residual=residual, device=device)
    _, total = form(tensors, (24,))
    reached = random_like(total)
    asked = list(tensors.values())
    with Recorder() as ran:
        found = torch.autograd.grad(total, asked, reached, allow_unused=True)
    gradients = dict(zip(tensors, found, strict=True))
    assert not [name for name in ran.names if name.startswith("iree_lnbwd.")]
    assert torch.equal(gradients.pop("residual"), reached)
    assert torch.equal(gradients.pop("input"), reached.to(TORCH_DTYPES[dtype]))
    assert all(gradient is None for gradient in gradients.values())


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
def test_a_sum_takes_two_tensors(function: Any) -> None:
    x = torch.ones(3, 8)
    with pytest.raises(TypeError, match=r"^residual: expected a tensor, got None"):
        function(x, None, 8)
    with pytest.raises(TypeError, match=r"^input: expected a tensor, got None"):
        function(None, x, 8)
    with pytest.raises(ValueError, match=r"^residual: expected shape \(3, 8\), got \(8,\)"):
        function(x, torch.ones(8), 8)


@every_form
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bad_arguments(form: Form, device: str) -> None:
    good = {
        name: torch.ones(*(() if name in ("weight", "bias") else (3,)), 8, device=device)
        for name in form.arguments
    }
    for name in form.arguments:
        said = f"^{name}: expected "
        for bad in (torch.ones(7, device=device), torch.ones(8, 2, device=device)):
            with pytest.raises(ValueError, match=said):
                form(good | {name: bad}, 8)
        with pytest.raises(TypeError, match=said):
            form(good | {name: good[name].int()}, 8)
        if name != "input":
            with pytest.raises(TypeError, match=said):
                form(good | {name: good[name].double()}, 8)
            elsewhere = torch.ones(good[name].shape, device="cpu" if device == "meta" else "meta")
            with pytest.raises(ValueError, match=said):
                form(good | {name: elsewhere}, 8)


@every_form
def test_bad_options(form: Form) -> None:
    good = {
        name: torch.ones(8) if name in ("weight", "bias") else torch.ones(3, 8)
        for name in form.arguments
    }
    with pytest.raises(RuntimeError, match="eps"):
        form(good, 8, eps="1")
    with pytest.raises(ValueError, match=r"^eps: expected a finite number, got nan"):
        form(good, 8, eps=float("nan"))
    with pytest.raises((TypeError, RuntimeError), match="weight_offset"):
        form(good, 8, weight_offset="1")
    with pytest.raises(ValueError, match=r"^weight_offset: expected a finite number, got inf"):
        form(good, 8, weight_offset=float("inf"))
    with pytest.raises(ValueError, match=r"^weight_offset: expected 0.0 without a weight, got 1.0"):
        form({n: t for n, t in good.items() if n not in ("weight", "bias")}, 8, weight_offset=1.0)
    for dims in ((), (9,), (3, 8, 1)):
        with pytest.raises(ValueError, match="normalized_shape"):
            form(good, dims)


def test_own_forward_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^own_forward: expected True or False, got int"):
        layer_norm(torch.ones(3, 8), 8, own_forward=1)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"memory_efficient": True}, {"weight_offset": 1.0}])
@every_form
def test_a_known_call_does_not_come_to_python(form: Form, options: dict[str, Any]) -> None:
    """Its first forward and backward do, where C++ is told of them."""

    def checked() -> list[str]:
        tensors = random_tensors(form, (11,), (96,), "bf16", device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            outputs = form(tensors, (96,), **options)
            gradients_of(outputs, tensors, tuple(map(random_like, outputs)))
        return sorted(e.name for e in profiled.events() if e.name.endswith("_checked"))

    checked()
    assert checked() == []
