"""PyTorch's norms with an output of another type than the input."""

from __future__ import annotations

import io
from collections.abc import Iterator
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
from support import assert_right
from torch import Tensor, nn
from torch_support import TORCH_DTYPES, to_array

from iree_lnbwd.ops.arguments import NormOutput, bind
from iree_lnbwd.torch import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
    layer_norm,
    replace_norms,
    specs,
)
from iree_lnbwd.torch.operator_table import NORMS

# Raised inside PyTorch 2.13, by imports of inductor and of export.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
MODULES = (LayerNorm, RMSNorm, AddLayerNorm, AddRMSNorm)
BF16 = torch.bfloat16


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rows_of(module: nn.Module, *leading: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The inputs of a module over 24 columns."""
    count = 2 if isinstance(module, AddLayerNorm | AddRMSNorm) else 1
    return [torch.randn(*leading, 24, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("residual", ["f32", "bf16"])
@pytest.mark.parametrize("types", [("f32", "bf16"), ("f32", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("leading", [(0,), (1,), (2, 3), (200,)])
def test_both_directions_are_right(
    form: Form, types: tuple[str, str], residual: str, leading: tuple[int, ...], device: str
) -> None:
    """Against the reference; twice, for the first call of a kind and a known one."""
    dtype, output = types
    tensors = random_tensors(form, leading, (24,), dtype, residual=residual, device=device)
    for _ in range(2):
        outputs = form(tensors, (24,), output_dtype=TORCH_DTYPES[output])
        assert outputs[0].dtype == TORCH_DTYPES[output]
        given = {name: to_array(tensor) for name, tensor in tensors.items()}
        call = bind(form.op.name, given, 24, eps=EPS, output_dtype=output)
        assert call.spec is not None
        with torch.no_grad():
            _assert_output_right(form, tensors, outputs, call)
        reached = tuple(map(random_like, outputs))
        gradients = gradients_of(outputs, tensors, reached)
        assert_gradients_right(form, tensors, (24,), reached, gradients)
        for name, tensor in tensors.items():
            assert gradients[name].dtype == tensor.dtype


def _assert_output_right(form: Form, tensors: Any, outputs: tuple[Tensor, ...], call: Any) -> None:
    """With the statistics, which the operator returns, too."""
    norm = next(
        n
        for n in NORMS
        if (n.op, n.takes_residual, n.own_forward) == (form.op, form.takes_residual, True)
    )
    given = [tensors.get(argument.name) for argument in norm.arguments]
    results = norm.operator(*given, [24], EPS, 0.0, False, outputs[0].dtype)
    found = dict(zip(norm.results, results, strict=True))
    assert bits(found["output"]) == bits(outputs[0])
    assert_right(NormOutput(*(to_array(found.get(name)) for name in NormOutput._fields)), call)


@pytest.mark.drawn
@every_form
def test_it_is_the_f32_output_rounded_once(form: Form) -> None:
    tensors = random_tensors(form, (30,), (24,))
    wide = form(tensors, (24,))
    narrow = form(tensors, (24,), output_dtype=BF16)
    assert bits(narrow[0]) == bits(wide[0].bfloat16())
    reached = tuple(map(random_like, narrow))
    ours = gradients_of(narrow, tensors, reached)
    cast = (wide[0].bfloat16(), *wide[1:])
    for name, gradient in gradients_of(cast, tensors, reached).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.drawn
@every_form
def test_gradients_of_gradients(form: Form) -> None:
    tensors = random_tensors(form, (3,), (4,))
    slopes = []
    for output in (form(tensors, 4, output_dtype=BF16)[0], form(tensors, 4)[0].bfloat16()):
        (slope,) = torch.autograd.grad(output.float().sum(), tensors["input"], create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), tensors["input"])[0])
    torch.testing.assert_close(*slopes)


@pytest.mark.drawn
@every_form
def test_the_transforms_of_torch_func(form: Form) -> None:
    tensors = random_tensors(form, (3, 2), (24,))
    given = {name: tensor.detach() for name, tensor in tensors.items()}

    def one(rows: Tensor) -> Tensor:
        alike = {name: rows if name in ("input", "residual") else t for name, t in given.items()}
        return form(alike, (24,), output_dtype=BF16)[0]

    batched = torch.func.vmap(one)(given["input"])
    assert batched.dtype == BF16
    apart = torch.stack([*map(one, given["input"])])
    torch.testing.assert_close(batched, apart, rtol=0.02, atol=0.01)
    slope = torch.func.grad(lambda rows: one(rows).float().sum())(given["input"][0])
    assert slope.dtype == torch.float32


# --- modules, and autocast -----------------------------------------------------------------------


@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize("output", [BF16, "autocast"])
def test_a_module_has_the_option(cls: Any, output: Any) -> None:
    module = cls(24, output_dtype=output)
    assert f"output_dtype={output}" in repr(module)
    assert cls(24).output_dtype is None
    assert "output_dtype" not in repr(cls(24))
    rows = rows_of(module, 5)
    found = module(*rows)
    first = found[0] if isinstance(found, tuple) else found
    assert first.dtype == (BF16 if output is BF16 else torch.float32)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).output_dtype == output


@pytest.mark.drawn
@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
def test_autocasts_type_is_that_of_autocast_where_it_is_on(cls: Any, dtype: torch.dtype) -> None:
    module = cls(24, output_dtype="autocast", dtype=dtype)
    rows = rows_of(module, 5, dtype=dtype)

    def output() -> Tensor:
        found = module(*rows)
        first: Tensor = found[0] if isinstance(found, tuple) else found
        first.sum().backward()
        return first

    assert output().dtype == dtype
    for cast in (BF16, torch.float16):
        with torch.autocast("cpu", cast):
            found = output()
        assert found.dtype == (dtype if dtype == torch.float64 else cast)
        with torch.autocast("cpu", cast, enabled=False):
            assert output().dtype == dtype


@pytest.mark.parametrize("cls", MODULES)
def test_the_default_under_autocast_is_what_it_was(cls: Any) -> None:
    module = cls(24)
    for dtype in (torch.float32, BF16):
        rows = rows_of(module, 5, dtype=dtype)
        with torch.autocast("cpu", BF16):
            found = module(*rows)
        first = found[0] if isinstance(found, tuple) else found
        assert first.dtype == dtype


@pytest.mark.parametrize("cls", MODULES)
def test_specs_are_those_of_the_output(cls: Any) -> None:
    found = specs(cls(24, output_dtype=BF16))
    forwards = [spec for spec in found if not spec.family.is_backward]
    backwards = [spec for spec in found if spec.family.is_backward]
    assert {spec.output_dtype for spec in forwards} == {"bf16"}
    assert {(spec.dtype, spec.grad_output_dtype) for spec in backwards} == {("f32", "bf16")}


# --- compilers -----------------------------------------------------------------------------------


class Block(nn.Module):  # type: ignore[misc]
    """A stream in f32 whose norm goes to a linear in bf16."""

    def __init__(self, output_dtype: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(32, output_dtype=output_dtype)
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).float()


@pytest.mark.drawn
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("output_dtype", [BF16, "autocast"])
def test_compile(backend: str, output_dtype: Any) -> None:
    block = Block(output_dtype)
    x = torch.randn(9, 32, requires_grad=True)

    def step(module: Any) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", BF16):
            y = module(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])

    compiled = step(torch.compile(block, fullgraph=True, backend=backend))
    for ours, expected in zip(compiled, step(block), strict=True):
        assert ours.dtype == expected.dtype
        largest = float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02 * largest)


def test_export() -> None:
    module = RMSNorm(24, output_dtype=BF16)
    (x,) = rows_of(module, 5)
    exported = torch.export.export(module, (x,))
    found = exported.module()(x)
    assert bits(found) == bits(module(x))


# --- errors --------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize(
    ("output_dtype", "error", "said"),
    [
        ("bf16", ValueError, "expected a torch.dtype, 'autocast' or None, got 'bf16'"),
        (16, TypeError, "expected a torch.dtype, 'autocast' or None, got 16"),
        (torch.float64, TypeError, "expected one of .* for an input of torch.float32, got .*64"),
        (torch.int8, TypeError, "expected one of torch.float32, .*, got torch.int8"),
    ],
)
def test_what_does_not_fit_is_refused(
    form: Form, output_dtype: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^output_dtype: {said}"):
        form(random_tensors(form, (3,), (8,)), 8, output_dtype=output_dtype)


def test_modules_refuse_it_when_they_are_made() -> None:
    for cls in MODULES:
        with pytest.raises(ValueError, match=r"^output_dtype: expected .* or None, got 'bf16'"):
            cls(8, output_dtype="bf16")


@pytest.mark.drawn
@every_form
def test_a_memory_efficient_norm_has_an_output_of_the_inputs_type(form: Form) -> None:
    tensors = random_tensors(form, (3,), (8,))
    same = form(tensors, 8, memory_efficient=True, output_dtype=torch.float32)
    assert bits(same[0]) == bits(form(tensors, 8, memory_efficient=True)[0])
    with pytest.raises(TypeError, match=r"^output_dtype: expected torch.float32 like input with"):
        form(tensors, 8, memory_efficient=True, output_dtype=BF16)


def test_layer_norms_forward_is_pytorchs_unless_a_type_is_said() -> None:
    x = torch.randn(50, 24)
    plain = torch.nn.functional.layer_norm(x, (24,))
    for output_dtype in (None, "autocast"):
        assert bits(layer_norm(x, 24, output_dtype=output_dtype)) == bits(plain)
    ours = layer_norm(x, 24, own_forward=True)
    assert bits(layer_norm(x, 24, output_dtype=torch.float32)) == bits(ours)


# --- replace_norms -------------------------------------------------------------------------------


class OwnRMSNorm(nn.Module):  # type: ignore[misc]
    """As models write it: the weight's type is the output's, if it is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(24) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


@pytest.mark.drawn
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(24), lambda: nn.RMSNorm(24), OwnRMSNorm])
@pytest.mark.parametrize("output_dtype", [BF16, "autocast"])
def test_replaced_norms_have_it(make: Any, output_dtype: Any) -> None:
    model = nn.Sequential(make())
    x = torch.randn(7, 24, requires_grad=True)
    expected = model(x)
    report = replace_norms(model, output_dtype=output_dtype)
    assert f"output_dtype={output_dtype}" in str(report)
    with torch.autocast("cpu", BF16):
        found = model(x)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0.01, atol=0.01)
    found.float().sum().backward()
    assert x.grad is not None
    assert model(x).dtype == (BF16 if output_dtype is BF16 else torch.float32)
    traced = torch.jit.trace(model, x.detach(), check_trace=False)  # by the own forward
    assert traced(x).dtype == model(x).dtype
    if output_dtype is BF16:
        assert model.double()(x.detach().double()).dtype == BF16  # likewise
    report.undo()
    assert model.float()(x).dtype == torch.float32


def test_replace_norms_refuses_what_is_no_type() -> None:
    with pytest.raises(ValueError, match=r"^output_dtype: expected .*, got 'bf16'"):
        replace_norms(nn.LayerNorm(8), output_dtype="bf16")
