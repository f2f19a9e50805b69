"""`iree_lnbwd.torch.layer_norm` against the f64 reference and against PyTorch's own."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from support import assert_same_bits, random_generator

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch_support import TORCH_DTYPES, Operands, assert_right, random_operands, to_array

from iree_lnbwd import LayerNormGrads, NormSpec
from iree_lnbwd.torch import LayerNorm, layer_norm

F32 = NormSpec((24,))

every_dtype = pytest.mark.parametrize("dtype", TORCH_DTYPES)
SHAPES = (((3, 5), (24,)), ((7,), (4, 6)), ((), (33,)), ((64,), (1,)))
PARAMETERS = ((True, True), (True, False), (False, True), (False, False))


# Each two of shape, element type and parameters meet.
@pytest.mark.drawn
@pytest.mark.parametrize(
    ("leading", "dims", "dtype", "has_weight", "bias"),
    [
        (*shape, dtype, *PARAMETERS[(i + j) % len(PARAMETERS)])
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(TORCH_DTYPES)
    ],
)
def test_gradients(
    leading: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: str,
    has_weight: bool,
    bias: bool,
    device: str,
) -> None:
    spec = NormSpec(dims, dtype, has_weight=has_weight)
    operands = random_operands(spec, leading, device=device, bias=bias)
    output = operands.forward()
    assert torch.equal(output, operands.forward_by_pytorch())
    assert_right(operands.gradients(output), operands.arguments)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "bias_dtype"),
    [
        ("bf16", "f32", "f32"),
        ("f16", "f32", "f32"),
        ("f32", "bf16", "bf16"),
        ("f32", "f16", "bf16"),
        ("bf16", "f16", "f32"),
    ],
)
def test_mixed_types(dtype: str, weight_dtype: str, bias_dtype: str, device: str) -> None:
    """PyTorch takes the first two on the CPU and none on GPUs; its output is compared there."""
    spec = NormSpec((48,), dtype, weight_dtype=weight_dtype, bias_dtype=bias_dtype)
    operands = random_operands(spec, (6,), device=device)
    output = operands.forward()
    assert output.dtype == TORCH_DTYPES[dtype]
    if device == "cpu" and weight_dtype == bias_dtype == "f32":
        assert torch.equal(output, operands.forward_by_pytorch())
    else:
        wide = (t.detach().double() for t in operands.differentiated)
        x, weight, bias = wide
        expected = torch.nn.functional.layer_norm(x, (48,), weight, bias)
        # PyTorch's own tolerance of that type.
        torch.testing.assert_close(output, expected.to(output.dtype))
    assert_right(operands.gradients(output), operands.arguments)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_agrees_with_pytorch(dtype: str, device: str) -> None:
    operands = random_operands(NormSpec((96,), dtype), (4, 16), device=device)
    ours = operands.gradients(operands.forward())
    theirs = operands.gradients(operands.forward_by_pytorch())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)  # PyTorch's own tolerance of that type


@pytest.mark.drawn
@pytest.mark.parametrize(
    "asked",
    [
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
        (True, False, True),
        (False, True, True),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_only_what_requires_a_gradient(asked: tuple[bool, bool, bool], dtype: str) -> None:
    operands = random_operands(NormSpec((24,), dtype), (9,))
    for tensor, wanted in zip(operands.differentiated, asked, strict=True):
        tensor.requires_grad_(wanted)
    gradients = operands.gradients(operands.forward())
    assert tuple(gradient is not None for gradient in gradients) == asked
    assert_right(gradients, replace(operands.arguments, output_mask=asked))


def test_nothing_requires_a_gradient() -> None:
    operands = random_operands(F32, (9,))
    expected = operands.forward()
    with torch.no_grad():
        assert operands.forward().grad_fn is None
    with torch.inference_mode():
        assert torch.equal(operands.forward(), expected)
    for tensor in operands.differentiated:
        tensor.requires_grad_(False)
    assert not operands.forward().requires_grad


def test_the_backward_is_ours(device: str) -> None:
    operands = random_operands(F32, (9,), device=device)
    output = operands.forward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        operands.gradients(output)
    names = [event.name for event in profiled.events()]
    assert names.count("iree_lnbwd::layer_norm_backward") == 1
    assert "aten::native_layer_norm_backward" not in names


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_tensors_that_are_not_contiguous(dtype: str, device: str) -> None:
    """Every second row of a transposed input, every second weight, one number as the gradient."""
    operands = random_operands(NormSpec((24,), dtype), (6, 4), device=device)

    def spread(tensor: Tensor) -> Tensor:
        storage = tensor.new_full((*tensor.shape, 2), torch.nan)
        storage[..., 0] = tensor.detach()
        strided = storage[..., 0]
        assert not strided.is_contiguous()
        return strided

    x, weight, bias = (spread(tensor) for tensor in operands.differentiated)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not x.is_contiguous()
    grad_output = torch.full((1, 1, 1), 0.75, dtype=x.dtype, device=device).expand(6, 4, 24)
    strided = Operands(
        replace(operands.arguments, grad_output=np.ascontiguousarray(to_array(grad_output))),
        grad_output,
        *(tensor.requires_grad_() for tensor in (x, weight, bias)),
    )
    output = strided.forward()
    assert torch.equal(output, operands.forward())
    gradients = strided.gradients(output)
    assert_right(gradients, strided.arguments)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_that_begin_at_any_address(dtype: str, device: str) -> None:
    """All but the first of rows whose bytes are no multiple of what kernels read at a time."""
    whole = random_operands(NormSpec((769,), dtype), (6,), device=device)
    x, weight, bias = (tensor.detach() for tensor in whole.differentiated)
    later = Operands(
        replace(
            whole.arguments,
            input=whole.arguments.input[1:],
            grad_output=whole.arguments.grad_output[1:],
        ),
        whole.grad_output[1:],
        *(tensor.requires_grad_() for tensor in (x[1:], weight, bias)),
    )
    assert_right(later.gradients(later.forward()), later.arguments)


@pytest.mark.gpu
def test_captured_into_a_graph() -> None:
    operands = random_operands(F32, (9,), device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled and loaded, is so before
        operands.gradients(operands.forward())
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        gradients = operands.gradients(operands.forward())
    other = random_operands(F32, (9,), device="cuda")
    with torch.no_grad():
        for mine, theirs in zip(operands.differentiated, other.differentiated, strict=True):
            mine.copy_(theirs)
        operands.grad_output.copy_(other.grad_output)
    graph.replay()
    assert_right(gradients, other.arguments)


@every_dtype
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape: tuple[int, ...], dtype: str, device: str) -> None:
    operands = random_operands(NormSpec((8,), dtype), shape[:-1], device=device)
    gradients = operands.gradients(operands.forward())
    assert_right(gradients, operands.arguments)
    assert gradients.grad_weight is not None
    assert not gradients.grad_weight.any()


def test_rows_of_no_columns() -> None:
    """PyTorch takes them, so they are taken here."""
    x, weight = torch.zeros(3, 0, requires_grad=True), torch.zeros(0, requires_grad=True)
    output = layer_norm(x, 0, weight)
    gradients = torch.autograd.grad(output, (x, weight), torch.zeros(3, 0))
    assert [gradient.shape for gradient in gradients] == [(3, 0), (0,)]


def test_spellings_of_the_shape() -> None:
    operands = random_operands(F32, (9,))
    x, weight, bias = operands.differentiated
    for shape in (24, [24], (24,), weight.shape):
        assert torch.equal(layer_norm(x, shape, weight, bias), operands.forward())


def test_many_rows_in_a_thread_each() -> None:
    """Threads that all meet a module for the first time, and then share it."""
    several = [random_operands(NormSpec((57,)), (100 + i,)) for i in range(8)]
    found: dict[int, LayerNormGrads] = {}

    def work(i: int) -> None:
        for _ in range(20):
            found[i] = several[i].gradients(several[i].forward())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(several))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, operands in enumerate(several):
        serial = operands.gradients(operands.forward())
        assert_same_bits(
            LayerNormGrads(*map(to_array, found[i])), LayerNormGrads(*map(to_array, serial))
        )
        assert_right(found[i], operands.arguments)


def test_storages_can_still_be_freed(device: str) -> None:
    """As FSDP2 does with gathered parameters; ``Tensor.numpy()``, for one, would forbid it."""
    x, weight, bias, grad_output = (
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((9, 24), 24, 24, (9, 24))
    )
    torch.autograd.backward(layer_norm(x, 24, weight, bias), grad_output.detach())
    assert all(t.untyped_storage().resizable() for t in (x, weight, bias, grad_output))


@pytest.mark.usefixtures("empty_cache")
def test_compiling_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    columns = int(random_generator().integers(5000, 6000))  # which no other test has loaded
    operands = random_operands(NormSpec((columns,)), (2,))
    with caplog.at_level(logging.WARNING, logger="iree_lnbwd.torch"):
        for _ in range(3):
            operands.gradients(operands.forward())
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"compiling layer_norm_backward_n{columns}_f32 for host"]


# --- what is refused, before anything is compiled --------------------------------------------


def test_refuses_tensors_of_two_devices() -> None:
    x, weight = torch.zeros(3, 8), torch.ones(8, device="meta")
    with pytest.raises(ValueError, match="weight: expected a tensor on cpu like input, got meta"):
        layer_norm(x, 8, weight)
    with pytest.raises(ValueError, match="bias: expected a tensor on cpu like input, got meta"):
        layer_norm(x, 8, torch.ones(8), weight)


@pytest.mark.gpu
def test_refuses_parameters_on_the_cpu_beside_an_input_on_a_gpu() -> None:
    x, weight = torch.zeros(3, 8, device="cuda"), torch.ones(8)
    with pytest.raises(ValueError, match="weight: expected a tensor on cuda:0 like input, got cpu"):
        layer_norm(x, 8, weight)
    with pytest.raises(ValueError, match="mean: expected a tensor on cuda:0 like input, got cpu"):
        torch.ops.iree_lnbwd.layer_norm_backward(
            *(x, x, torch.zeros(3), torch.zeros(3), None, None, *(None,) * 4),
            *([8], [True] * 3, 1e-5, 0.0),
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_refuses_other_element_types(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    expected = "expected an element type of torch.float32, .*, got " + str(dtype)
    with pytest.raises(TypeError, match=f"input: {expected}"):
        layer_norm(x.to(dtype), 8)
    with pytest.raises(TypeError, match=f"weight: {expected}"):
        layer_norm(x, 8, torch.ones(8).to(dtype))


def test_refuses_f64_beside_others() -> None:
    with pytest.raises(TypeError, match=r"^weight: expected torch.float64 like"):
        layer_norm(torch.zeros(3, 8).double(), 8, torch.ones(8))
    with pytest.raises(TypeError, match=r"^bias: expected torch.float32 like"):
        layer_norm(torch.zeros(3, 8), 8, torch.ones(8), torch.ones(8).double())


def test_refuses_shapes_as_pytorch_does() -> None:
    x = torch.zeros(3, 8)
    for shape, weight in ((9, None), (8, torch.ones(7)), ((3, 8, 1), None)):
        dims = [shape] if isinstance(shape, int) else list(shape)
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.functional.layer_norm(x, dims, weight)
        with pytest.raises(RuntimeError) as ours:
            layer_norm(x, shape, weight)
        assert str(ours.value) == str(theirs.value)


def test_refuses_what_is_no_tensor() -> None:
    with pytest.raises(
        RuntimeError, match=r"Expected a value of type 'Tensor' for argument 'input'"
    ):
        layer_norm(np.zeros((3, 8)), 8)
    for parameters in ((), (torch.ones(8), torch.ones(8, requires_grad=True))):
        with pytest.raises(TypeError, match=r"^input: expected a tensor, got None"):
            layer_norm(None, 8, *parameters)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("own_forward", [False, True])
def test_a_trace_of_dimensions_from_a_shape(own_forward: bool) -> None:
    """PyTorch's tracer makes tensors of them."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    for dims in (lambda x: x.shape[-1:], lambda x: (x.shape[-1],)):
        traced = torch.jit.trace(
            lambda x, dims=dims: layer_norm(x, dims(x), weight, own_forward=own_forward), (x,)
        )
        for given in (x, torch.randn(2, 3, 8)):
            assert torch.equal(traced(given), layer_norm(given, 8, weight, own_forward=own_forward))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_what_a_graph_keeps_of_a_call_takes_other_element_types(weight_dtype: torch.dtype) -> None:
    """A graph has what one call came to, and nothing that decides again."""
    x, norm = torch.randn(4, 8), LayerNorm(8)
    norm.weight = torch.nn.Parameter(torch.randn(8).to(weight_dtype))
    with torch.no_grad():
        traced = torch.jit.trace(norm, (x,))
        captured = make_fx(lambda x: norm(x), pre_dispatch=True)(x)
        for given in (x, x.bfloat16(), x.expand(2, 4, 8)):
            expected = norm(given)
            assert torch.equal(traced(given), expected)
            assert torch.equal(captured(given), expected)
