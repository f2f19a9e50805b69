"""What PyTorch does with the norms: autograd's checks, compile, export, AMP, checkpoints, func."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
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

from iree_lnbwd.ops.operands import names
from iree_lnbwd.torch import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, rms_norm
from iree_lnbwd.torch.operator_table import GRADIENTS, NORMS, Gradients

# Raised inside PyTorch 2.13, by imports of inductor and of export.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


# --- autograd --------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("norm", [n for n in NORMS if n.own_forward], ids=lambda norm: norm.name)
def test_opcheck(norm: Any, device: str) -> None:
    name = norm.name.removeprefix("own_")
    form = FORMS[f"biased_{name}" if name == "rms_norm" else name]
    for without in ((), ("weight", "bias")):
        tensors = random_tensors(form, (4,), (24,), without=without, device=device)
        given = [tensors.get(name) for name in form.arguments]
        options = (0.0, False, torch.bfloat16) if without else (1.0, True, None)
        torch.library.opcheck(norm.operator, (*given, [24], EPS, *options))


@pytest.mark.drawn
@pytest.mark.parametrize("gradients", GRADIENTS, ids=lambda one: one.name)
@pytest.mark.parametrize("options", [True, False], ids=["options", "plain"])
def test_opcheck_of_a_backward(gradients: Gradients, options: bool, device: str) -> None:
    data, grad_output, grad_residual = torch.randn(3, 4, 24, device=device)
    weight, bias = torch.randn(2, 24, device=device)
    given = {
        "grad_output": grad_output,
        gradients.op.data.name: data,
        "mean": torch.zeros(4, device=device),
        "rstd": torch.ones(4, device=device),
        "weight": weight,
        "bias": bias,
        "grad_residual": grad_residual if options else None,
    }
    tensors = [given.get(name) for name in names(gradients.op.arguments)]
    mask = [True, not options, True]
    torch.library.opcheck(gradients.operator, (*tensors, [24], mask, EPS, 1.0 if options else 0.0))


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("without", [(), ("weight", "bias")], ids=["parameters", "none"])
def test_gradcheck(form: Form, without: tuple[str, ...]) -> None:
    tensors = random_tensors(form, (3,), (2, 3), "f64", without=without)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        options = {} if without else {"weight_offset": 0.5}
        return form(dict(zip(tensors, given, strict=True)), (2, 3), **options)

    assert torch.autograd.gradcheck(function, list(tensors.values()))
    assert torch.autograd.gradgradcheck(function, list(tensors.values()))


def test_gradients_of_gradients_are_pytorchs() -> None:
    x, weight = random_tensors(FORMS["rms_norm"], (5,), (24,), "f64").values()
    penalties = []
    for output in (rms_norm(x, 24, weight), torch.nn.functional.rms_norm(x, (24,), weight)):
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), (x, weight)))
    for ours, theirs in zip(*penalties, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.drawn
@every_form
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_input_that_depends_on_the_weight(form: Form, create_graph: bool) -> None:
    """The weight's gradient goes through the norm once, and once through the input."""
    tensors = random_tensors(form, (5,), (24,), "f64")
    asked = list(tensors.values())
    gradients = []
    for function in (form, by_formula(form)):
        given = {**tensors, "input": tensors["input"] * tensors["weight"].sin()}
        loss = torch.stack([o.square().sum() for o in function(given, (24,))]).sum()
        gradients.append(torch.autograd.grad(loss, asked, create_graph=create_graph))
        if create_graph:
            slope = torch.stack([g.square().sum() for g in gradients[-1]]).sum()
            gradients[-1] += torch.autograd.grad(slope, asked)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def by_formula(form: Form) -> Callable[..., tuple[Tensor, ...]]:
    """The same by PyTorch's functions alone."""

    def function(given: dict[str, Tensor], dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        total, weight = given["input"], given["weight"]
        if form.takes_residual:
            total = total + given["residual"]
        if form.op.centres:
            y = torch.nn.functional.layer_norm(total, dims, weight, given["bias"], EPS)
        else:
            y = torch.nn.functional.rms_norm(total, dims, weight, EPS) + given.get("bias", 0)
        return (y, total) if form.takes_residual else (y,)

    return function


@every_form
def test_func_transforms(form: Form) -> None:
    """Gradients of each sample, and a batch, as one by one."""
    tensors = random_tensors(form, (5, 3), (24,), "f64")
    cells = {n: t.detach() for n, t in tensors.items() if n in ("input", "residual")}
    parameters = {n: t.detach() for n, t in tensors.items() if n not in cells}

    def loss(parameters: dict[str, Tensor], cells: dict[str, Tensor]) -> Tensor:
        outputs = form(cells | parameters, (24,))
        return torch.stack([output.square().sum() for output in outputs]).sum()

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, cells)
    for i in range(5):
        sample = {name: tensor[i] for name, tensor in cells.items()}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
        found = torch.autograd.grad(loss(leaves, sample), list(leaves.values()))
        for name, expected in zip(leaves, found, strict=True):
            torch.testing.assert_close(by_sample[name][i], expected)
    batched = torch.vmap(lambda cells: form(cells | parameters, (24,)))(cells)
    for ours, expected in zip(batched, form(cells | parameters, (24,)), strict=True):
        torch.testing.assert_close(ours, expected)


@every_form
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(form: Form, reentrant: bool, device: str) -> None:
    tensors = random_tensors(form, (9,), (24,), "bf16", device=device)
    outputs = form(tensors, (24,))
    reached = tuple(map(random_like, outputs))
    stored = gradients_of(outputs, tensors, reached)
    # The reentrant form allows torch.autograd.backward only.
    again = checkpoint(
        lambda *given: form(dict(zip(tensors, given, strict=True)), (24,)),
        *tensors.values(),
        use_reentrant=reentrant,
    )
    torch.autograd.backward(again, reached)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        assert bits(tensor.grad) == bits(stored[name]), name


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_autocast_is_as_with_pytorch(name: str, types: tuple[str, str], device: str) -> None:
    form, (dtype, parameters) = FORMS[name], types
    tensors = random_tensors(form, (9,), (24,), dtype, parameters=parameters, device=device)
    theirs = getattr(torch.nn.functional, name)
    with torch.autocast(device, torch.bfloat16):
        (ours,) = form(tensors, (24,))
        expected = theirs(normalized_shape=(24,), eps=EPS, **tensors)
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected)
    reached = random_like(ours)
    found = gradients_of((ours,), tensors, (reached,))
    assert {n: g.dtype for n, g in found.items()} == {n: t.dtype for n, t in tensors.items()}


@pytest.mark.parametrize("form", [FORMS["add_layer_norm"], FORMS["add_rms_norm"]])
def test_norms_of_sums_keep_their_types_under_autocast(form: Form, device: str) -> None:
    tensors = random_tensors(
        form, (9,), (24,), "bf16", residual="f32", parameters="f32", device=device
    )
    expected = form(tensors, (24,))
    with torch.autocast(device, torch.bfloat16):
        outputs = form(tensors, (24,))
    assert [output.dtype for output in outputs] == [torch.bfloat16, torch.float32]
    assert all(map(torch.equal, outputs, expected))


# --- compilers -------------------------------------------------------------------------------


class Stream(nn.Module):
    """A residual stream through all of the norms, with a layer between each two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = AddRMSNorm(32, weight_offset=1.0)
        self.second = AddLayerNorm(32)
        self.third = RMSNorm(32)
        self.last = LayerNorm(32, own_forward=True)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h, residual = self.first(self.layers[0](x), x)
        h, residual = self.second(self.layers[1](h), residual)
        h = residual + self.layers[2](self.third(h))
        normed: Tensor = self.last(h)
        return normed


def stream(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = Stream().to(device)
    for norm in (model.first, model.second, model.third, model.last):
        nn.init.normal_(norm.weight, std=0.5)
    return model


def parameter_gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(output.square().mean(), parameters), strict=True))


@pytest.mark.drawn
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's, where a GPU has them
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_model(backend: str, device: str) -> None:
    """The whole model is one graph, and its backward calls our operators."""
    model = stream(device)
    x = torch.randn(3, 7, 32, device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    parameter_gradients(model, compiled(x))  # compiles, which calls the operators on fake tensors
    output = compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        gradients = parameter_gradients(model, output)
    called = [event.name for event in profiled.events() if event.name.startswith("iree_lnbwd::")]
    ran = [name for name in called if not name.endswith("_checked")]  # what C++ calls for them
    ours = ("iree_lnbwd::layer_norm_backward", "iree_lnbwd::rms_norm_backward")
    # Inductor has backwards of such narrow rows itself.
    assert sorted(ran) == ([] if backend == "inductor" else sorted(2 * ours))
    expected = parameter_gradients(model, model(x))
    for name, gradient in gradients.items():
        # Fused kernels round elsewhere; PyTorch's own tolerance of f32.
        torch.testing.assert_close(gradient, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("memory_efficient", [False, True])
@every_form
def test_captured_into_a_graph(form: Form, memory_efficient: bool) -> None:
    """Forward and backward; a replay computes from what the tensors hold then."""
    tensors = random_tensors(form, (9,), (24,), device="cuda")
    reached = tuple(
        random_like(output) for output in form(tensors, (24,), memory_efficient=memory_efficient)
    )

    def both() -> tuple[tuple[Tensor, ...], Any]:
        outputs = form(tensors, (24,), memory_efficient=memory_efficient)
        return outputs, gradients_of(outputs, tensors, reached)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled and loaded, is so before
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, gradients = both()
    others = random_tensors(form, (9,), (24,), device="cuda")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(others[name])
    graph.replay()
    expected = form(others, (24,), memory_efficient=memory_efficient)
    assert list(map(bits, outputs)) == list(map(bits, expected))
    alike = gradients_of(expected, others, reached)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, alike[name]), name


@pytest.mark.usefixtures("fresh_dynamo")
@every_form
def test_compiled_for_any_number_of_rows(form: Form) -> None:
    compiled = torch.compile(form.function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 8):
        tensors = random_tensors(form, (rows,), (24,))
        found = compiled(normalized_shape=(24,), eps=EPS, **tensors, **form.options)
        outputs = found if isinstance(found, tuple) else (found,)
        reached = tuple(map(random_like, outputs))
        gradients = gradients_of(outputs, tensors, reached)
        assert_gradients_right(form, tensors, (24,), reached, gradients)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# PyTorch 2.11 warns of a buffer of its own.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_export() -> None:
    """An exported program keeps the operators, trains, and survives a file's round trip."""
    model = stream()
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(model, (torch.randn(3, 7, 32),), dynamic_shapes=({0: rows},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [target for target in targets if target.startswith("iree_lnbwd.")]
    assert ours == [f"iree_lnbwd.{n}.default" for n in (
        "add_rms_norm", "add_layer_norm", "rms_norm", "own_layer_norm"
    )]  # fmt: skip
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    x = torch.randn(5, 7, 32)
    output, expected = module(x), model(x)
    assert torch.equal(output, expected)
    found, theirs = parameter_gradients(module, output), parameter_gradients(model, expected)
    for name, gradient in theirs.items():
        assert torch.equal(found[name], gradient), name


@every_form
def test_meta_tensors(form: Form) -> None:
    tensors = {n: t.detach().to("meta") for n, t in random_tensors(form, (3, 5), (24,)).items()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    outputs = form(tensors, (24,))
    assert [(o.shape, o.device.type) for o in outputs] == [((3, 5, 24), "meta")] * len(outputs)
    found = gradients_of(outputs, tensors, tuple(map(torch.empty_like, outputs)))
    assert {n: g.shape for n, g in found.items()} == {n: t.shape for n, t in tensors.items()}


@every_form
def test_operands_are_not_kept_for_nothing(form: Form) -> None:
    """A backward that is done leaves no reference to its tensors."""
    import gc
    import weakref

    tensors = random_tensors(form, (5,), (24,))
    outputs = form(tensors, (24,))
    gradients = gradients_of(outputs, tensors, tuple(map(torch.ones_like, outputs)))
    watched = [weakref.ref(t) for t in (*tensors.values(), *gradients.values(), *outputs)]
    tensors.clear()
    gradients.clear()
    del outputs
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
