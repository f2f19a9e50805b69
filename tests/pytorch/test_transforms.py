"""What PyTorch does with operators: autograd's checks, compile, export, AMP, checkpoints, func."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from support import assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_support import Operands, assert_right, random_operands, to_array

from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.torch import LayerNorm, layer_norm

# Raised inside PyTorch 2.13, by imports of inductor and of export.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
]

MASKS = [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def bits(gradients: LayerNormGrads) -> LayerNormGrads:
    return LayerNormGrads(*map(to_array, gradients))


# --- autograd --------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("has_weight", "bias"), [(True, True), (False, False)])
def test_opcheck_of_the_forward(has_weight: bool, bias: bool, dtype: str, device: str) -> None:
    spec = NormSpec((8,), dtype, has_weight=has_weight)
    operands = random_operands(spec, (4,), device=device, bias=bias)
    torch.library.opcheck(
        torch.ops.iree_lnbwd.layer_norm.default,
        (operands.input, operands.weight, operands.bias, [8], 1e-5),
    )


@pytest.mark.drawn
@pytest.mark.parametrize("given", [True, False], ids=["statistics", "recomputed"])
@pytest.mark.parametrize("mask", MASKS)
def test_opcheck_of_the_backward(mask: tuple[bool, bool, bool], given: bool, device: str) -> None:
    operands = random_operands(NormSpec((8,)), (4,), device=device)
    x, weight, bias = (tensor.detach() for tensor in operands.differentiated)
    _, mean, rstd = torch.native_layer_norm(x, [8], None, None, 1e-5)
    statistics = (mean, rstd) if given else (None, None)
    torch.library.opcheck(
        torch.ops.iree_lnbwd.layer_norm_backward.default,
        (operands.grad_output, x, *statistics, weight, bias, *(None,) * 4, [8], mask, 1e-5, 0.0),
    )


@pytest.mark.drawn
@pytest.mark.parametrize(("has_weight", "bias"), [(True, True), (True, False), (False, False)])
def test_gradcheck(has_weight: bool, bias: bool) -> None:
    spec = NormSpec((2, 3), "f64", has_weight=has_weight)
    operands = random_operands(spec, (4,), bias=bias)

    def function(x: Tensor, *given: Tensor) -> Tensor:
        parameters = iter(given)
        weight = next(parameters) if has_weight else None
        return layer_norm(x, (2, 3), weight, next(parameters, None))

    assert torch.autograd.gradcheck(function, operands.differentiated)
    assert torch.autograd.gradgradcheck(function, operands.differentiated)


def test_gradients_of_gradients_are_pytorchs() -> None:
    operands = random_operands(NormSpec((24,)), (5,))
    penalties = []
    for output in (operands.forward(), operands.forward_by_pytorch()):
        (slope,) = torch.autograd.grad(output.square().sum(), operands.input, create_graph=True)
        penalties.append(torch.autograd.grad(slope.square().sum(), operands.differentiated[:2]))
    for ours, theirs in zip(*penalties, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_func_transforms() -> None:
    """Gradients of each sample, with respect to the weight."""
    operands = random_operands(NormSpec((24,), "f64"), (5, 3))
    x, weight, bias = (tensor.detach() for tensor in operands.differentiated)

    def loss_by(function: object) -> object:
        return lambda weight, sample: function(sample, (24,), weight, bias).square().sum()  # type: ignore[operator]

    ours, theirs = (
        torch.vmap(torch.func.grad(loss_by(function)), (None, 0))(weight, x)
        for function in (layer_norm, torch.nn.functional.layer_norm)
    )
    torch.testing.assert_close(ours, theirs)
    batched = torch.vmap(lambda sample: layer_norm(sample, 24, weight, bias))(x)
    assert torch.equal(batched, layer_norm(x, 24, weight, bias))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, dtype: str, device: str) -> None:
    operands = random_operands(NormSpec((24,), dtype), (9,), device=device)
    stored = operands.gradients(operands.forward())
    for tensor in operands.differentiated:
        tensor.grad = None
    # The reentrant form allows torch.autograd.backward only.
    output = checkpoint(
        lambda x, weight, bias: layer_norm(x, 24, weight, bias),
        *operands.differentiated,
        use_reentrant=reentrant,
    )
    torch.autograd.backward(output, operands.grad_output)
    recomputed = LayerNormGrads(*(tensor.grad for tensor in operands.differentiated))
    assert_same_bits(bits(recomputed), bits(stored))


@pytest.mark.parametrize("dtypes", [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")])
def test_autocast_is_as_with_pytorch(dtypes: tuple[str, str], device: str) -> None:
    spec = NormSpec((24,), dtypes[0], weight_dtype=dtypes[1], bias_dtype=dtypes[1])
    operands = random_operands(spec, (9,), device=device)
    with torch.autocast(device, torch.bfloat16):
        ours, theirs = operands.forward(), operands.forward_by_pytorch()
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    found = torch.autograd.grad(ours.sum(), operands.differentiated)
    expected = torch.autograd.grad(theirs.sum(), operands.differentiated)
    assert [g.dtype for g in found] == [g.dtype for g in expected]


def test_a_block_under_autocast_trains_as_with_pytorch(device: str) -> None:
    """A linear layer before the layer norm, so that its input is bf16."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 48, device=device)
    norms = (nn.LayerNorm(48, device=device), LayerNorm(48, device=device))
    x = torch.randn(9, 24, device=device)
    gradients = []
    for norm in norms:
        with torch.autocast(device, torch.bfloat16):
            loss = norm(linear(x)).square().sum()
        gradients.append(torch.autograd.grad(loss, [*norm.parameters()]))
    for theirs, ours in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        # The layer norm's input and gradient are bf16.
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=2**-8 * float(theirs.abs().max()))


# --- compilers -------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.norms = nn.ModuleList([norm(32), norm(32, bias=False)])
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


def parameter_gradients(block: nn.Module, output: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*block.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(output.square().mean(), parameters), strict=True))


@pytest.mark.drawn
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's, where a GPU has them
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_block(backend: str, device: str) -> None:
    """The whole block is one graph, and its gradients are those of the block as it is."""
    torch.manual_seed(0)
    block = Block(LayerNorm).to(device)
    x = torch.randn(3, 7, 32, device=device)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    parameter_gradients(block, compiled(x))  # compiles, which calls the operators on fake tensors
    output = compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        gradients = parameter_gradients(block, output)
    names = [event.name for event in profiled.events()]
    # Inductor has backwards of such narrow rows itself.
    assert names.count("iree_lnbwd::layer_norm_backward") == (0 if backend == "inductor" else 2)
    expected = parameter_gradients(block, block(x))
    for name, gradient in gradients.items():
        # Fused kernels round elsewhere; PyTorch's own tolerance of f32.
        torch.testing.assert_close(gradient, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_for_any_number_of_rows() -> None:
    compiled = torch.compile(layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 8):
        operands = random_operands(NormSpec((24,)), (rows,))
        x, weight, bias = operands.differentiated
        gradients = operands.gradients(compiled(x, (24,), weight, bias))
        assert_right(gradients, operands.arguments)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.drawn
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", ["bf16", "f64"])
def test_compiled_in_other_types(dtype: str) -> None:
    """bf16 on the CPU recomputes its statistics."""
    operands = random_operands(NormSpec((24,), dtype), (5,))
    x, weight, bias = operands.differentiated
    compiled = torch.compile(layer_norm, fullgraph=True)
    assert_right(operands.gradients(compiled(x, (24,), weight, bias)), operands.arguments)


def test_export() -> None:
    """An exported program keeps the operator, trains, and survives a file's round trip."""
    torch.manual_seed(0)
    block = Block(LayerNorm)
    x = torch.randn(3, 7, 32)
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(block, (x,), dynamic_shapes=({0: rows},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.iree_lnbwd.layer_norm.default) == 2
    module = program.module()
    x = torch.randn(5, 7, 32)
    output, expected = module(x), block(x)
    assert torch.equal(output, expected)
    ours, theirs = parameter_gradients(module, output), parameter_gradients(block, expected)
    for name, gradient in theirs.items():
        assert torch.equal(ours[name], gradient), name


def test_operands_are_not_kept_for_nothing() -> None:
    """A backward that is done leaves no reference to its tensors."""
    import gc
    import weakref

    operands: Operands | None = random_operands(NormSpec((24,)), (5,))
    assert operands is not None
    output = operands.forward()
    gradients = operands.gradients(output)
    watched = [weakref.ref(t) for t in (*operands.differentiated, *gradients, output)]
    del operands, output, gradients
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
