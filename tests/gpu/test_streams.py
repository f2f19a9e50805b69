"""Other libraries' arrays on the GPU: no copy, no host wait, in the order of their stream."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    Arguments,
    assert_matches_reference,
    assert_same_bits,
    random_arguments,
    random_generator,
)

from iree_lnbwd import LayerNormGrads, NormSpec, layer_norm_backward, runtime
from iree_lnbwd.calls.modules import loaded
from iree_lnbwd.hardware.devices import DeviceUri, target_of
from iree_lnbwd.runtime import Norm
from iree_lnbwd.stores import shipping

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.gpu

ARRAYS = ("grad_output", "input", "mean", "rstd", "weight", "bias")
SPECS = (
    NormSpec((1024,), "f32"),
    NormSpec((4096,), "bf16"),
    NormSpec((769,), "f16"),
    NormSpec((4, 256), "bf16", weight_dtype="f32", bias_dtype="f32"),
    NormSpec((65536,), "bf16"),
    NormSpec((1024,), "f32", has_weight=False),
    NormSpec((1024,), "bf16", output_mask=(True, False, True)),
    NormSpec((1024,), "bf16", output_mask=(True, False, False)),
    NormSpec((1024,), "f32", output_mask=(False, True, True)),
    NormSpec((1024,), "f32", eps=1e-5),
    NormSpec((1024,), "f64"),
)
SLEEP_CYCLES = 200_000_000  # a tenth of a second or more


def tensors(arguments: Arguments) -> dict[str, Any]:
    """The arguments as tensors on the GPU, by name."""
    made: dict[str, Any] = {}
    for name in ARRAYS:
        array = getattr(arguments, name)
        if array is None:
            made[name] = None
        elif array.dtype.name == "bfloat16":
            made[name] = torch.from_numpy(array.view(np.uint16)).cuda().view(torch.bfloat16)
        else:
            made[name] = torch.from_numpy(array).cuda()
    return made


def on_host(gradients: LayerNormGrads) -> LayerNormGrads:
    """Tensors as NumPy arrays."""

    def numpy(tensor: Any) -> Any:
        if tensor is None or tensor.dtype != torch.bfloat16:
            return None if tensor is None else tensor.cpu().numpy()
        import ml_dtypes

        return tensor.cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)

    return LayerNormGrads(*map(numpy, gradients))


def op_and_tensors(
    gpu: DeviceUri, spec: NormSpec, rows: int
) -> tuple[Norm, dict[str, Any], Arguments]:
    arguments = random_arguments(random_generator(), spec, (rows,))
    return loaded(spec, gpu), tensors(arguments), arguments


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_tensors_give_what_arrays_give(gpu: DeviceUri, spec: NormSpec) -> None:
    for rows in (0, 1, 37, 300):
        op, given, arguments = op_and_tensors(gpu, spec, rows)
        gradients = on_host(op(**given))
        assert_matches_reference(gradients, arguments)
        assert_same_bits(gradients, arguments.backward_by(op))
    function = layer_norm_backward(
        given["grad_output"],
        given["input"],
        spec.normalized_shape,
        given["mean"],
        given["rstd"],
        given["weight"],
        given["bias"],
        spec.output_mask,
    )
    assert_same_bits(on_host(function), gradients)


def test_nothing_is_copied(gpu: DeviceUri) -> None:
    op, given, arguments = op_and_tensors(gpu, NormSpec((4096,), "bf16"), 4096)
    op(**given)
    row = 4096 * 4
    scratch = 2 * 132 * 4 * row  # far more than the partial sums, far less than x
    x_bytes = given["input"].nbytes
    assert scratch < x_bytes
    out = LayerNormGrads(*(torch.full_like(given[n], 7) for n in ("input", "weight", "bias")))
    places = [gradient.data_ptr() for gradient in out]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, taken = torch.cuda.memory_allocated(), []
    for _ in range(5):  # other processes take memory of the same GPU: not in each of these calls
        free = torch.cuda.mem_get_info()[0]
        returned = op(**given, out=out)
        taken.append(free - torch.cuda.mem_get_info()[0])
    assert torch.cuda.max_memory_allocated() - before < scratch
    assert min(taken) < x_bytes
    assert [gradient.data_ptr() for gradient in returned] == places
    assert_matches_reference(on_host(out), arguments)


def test_a_call_does_not_wait_and_keeps_the_order_of_its_stream(gpu: DeviceUri) -> None:
    op, given, arguments = op_and_tensors(gpu, NormSpec((1024,), "f32"), 300)
    op(**given)
    filled = {name: torch.empty_like(tensor) for name, tensor in given.items()}
    stream, before = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        op(**given)  # PyTorch asks the driver for memory now, which may wait
        stream.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        before.record()
        for name, tensor in given.items():
            filled[name].copy_(tensor)
        gradients = op(**filled)
        assert not before.query(), "the call waited for what was on the stream before it"
        doubled = [gradient * 2 for gradient in gradients]
    stream.synchronize()
    assert_matches_reference(on_host(LayerNormGrads(*(g / 2 for g in doubled))), arguments)


def test_threads_on_two_streams_give_the_same_bits(gpu: DeviceUri) -> None:
    op, given, _ = op_and_tensors(gpu, NormSpec((4096,), "bf16"), 1023)
    expected = on_host(op(**given))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(streams[number % 2]):
                results = [op(**given) for _ in range(100)]
                streams[number % 2].synchronize()
                for result in results:
                    assert_same_bits(on_host(result), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_a_call_can_be_captured_into_a_graph(gpu: DeviceUri) -> None:
    op, given, _ = op_and_tensors(gpu, NormSpec((1024,), "bf16"), 128)
    op(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = op(**given)
    arguments = random_arguments(random_generator(), op.spec, (128,))
    for name, tensor in tensors(arguments).items():
        given[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_matches_reference(on_host(gradients), arguments)


@pytest.mark.parametrize("has_weight", [True, False])  # one of ones is the module's own
def test_a_graph_outlives_the_module(gpu: DeviceUri, has_weight: bool, tmp_path: Path) -> None:
    spec = NormSpec((1024,), "f32", has_weight=has_weight)
    op = runtime.load(shipping.compile(spec, target_of(gpu).name, tmp_path).path, str(gpu))
    arguments = random_arguments(random_generator(), spec, (128,))
    given = tensors(arguments)
    op(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = op(**given)
    del op
    gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert_matches_reference(on_host(gradients), arguments)


@pytest.mark.parametrize("library", ["cupy", "jax.numpy"])
def test_other_libraries(gpu: DeviceUri, library: str) -> None:
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    spec = NormSpec((1024,), "f32")
    arguments = random_arguments(random_generator(), spec, (37,))
    given = {name: xp.asarray(getattr(arguments, name)) for name in ARRAYS}
    gradients = loaded(spec, gpu)(**given)
    assert {type(gradient).__module__ for gradient in gradients} == {
        type(given["input"]).__module__
    }
    moved = LayerNormGrads(*(g.get() if hasattr(g, "get") else np.asarray(g) for g in gradients))
    assert_matches_reference(moved, arguments)


def off_by_an_element(tensor: Any) -> Any:
    """The same values, where no vector instruction can load them."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    return room[1:].view(tensor.shape).copy_(tensor)


def every_second_element(tensor: Any) -> Any:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_tensors_at_any_address_in_any_order(gpu: DeviceUri, eps: float | None, dtype: str) -> None:
    """They are copied; what is next on the GPU finds it as it was."""
    spec = NormSpec((1024,), dtype, eps=eps)
    op, given, arguments = op_and_tensors(gpu, spec, 37)
    expected = on_host(op(**given))
    there = {name: tensor for name, tensor in given.items() if tensor is not None}
    for change in (off_by_an_element, every_second_element):
        changed = {name: change(tensor) for name, tensor in there.items()}
        for name, tensor in changed.items():
            assert_same_bits(on_host(op(**(given | {name: tensor}))), expected)
        assert_same_bits(on_host(op(**(given | changed))), expected)
    assert_matches_reference(expected, arguments)


def test_bad_tensors_are_named(gpu: DeviceUri) -> None:
    op, given, arguments = op_and_tensors(gpu, NormSpec((1024,), "f32"), 37)
    x, w = given["input"], given["weight"]
    turned, shifted = x.t().contiguous().t(), off_by_an_element(x)
    out = LayerNormGrads(torch.empty_like(x), torch.empty_like(w), torch.empty_like(w))
    for wrong, error, said in (
        ({"grad_output": x.cpu()}, ValueError, "grad_output: expected a tensor on a GPU.* cpu"),
        ({"weight": arguments.weight}, TypeError, "weight: expected a PyTorch tensor"),
        ({"input": x.int()}, TypeError, "input: expected an element type.*int32"),
        ({"weight": w.half()}, TypeError, "weight: this module was compiled for f32, got f16"),
        ({"out": out._replace(grad_bias=None)}, ValueError, "out.grad_bias: expected an array"),
        ({"out": out._replace(grad_input=x[:5])}, ValueError, "out.grad_input: expected shape"),
        ({"out": out._replace(grad_weight=w.cpu())}, ValueError, "out.grad_weight: .* on a GPU"),
        ({"out": out._replace(grad_weight=w.half())}, TypeError, "out.grad_weight: .* f32"),
        ({"out": out._replace(grad_input=turned)}, ValueError, "out.grad_input: .* a contiguous"),
        ({"out": out._replace(grad_input=shifted)}, ValueError, "out.grad_input: .* begins at"),
        ({"out": out._replace(grad_input=x)}, ValueError, "out.grad_input: .* memory of its own"),
    ):
        with pytest.raises(error, match=said):
            op(**(given | wrong))
    with pytest.raises(ValueError, match="input: this module is on local-task"):
        loaded(replace(op.spec), DeviceUri.parse("local-task"))(**given)


def test_code_stays_until_the_queue_is_done_with_it(gpu: DeviceUri) -> None:
    spec = NormSpec((1024,), "f32")
    arguments = random_arguments(random_generator(), spec, (300,))
    given = tensors(arguments)
    op = _of_its_own(spec, gpu)
    torch.cuda._sleep(SLEEP_CYCLES)
    gradients = op(**given)
    del op
    assert_matches_reference(on_host(gradients), arguments)


def _of_its_own(spec: NormSpec, gpu: DeviceUri) -> Norm:
    """A module that nobody else keeps."""
    from iree_lnbwd.hardware.devices import target_of
    from iree_lnbwd.stores import cache

    vmfb, _ = cache.build(spec, target_of(gpu))
    return runtime.load_built(vmfb, str(gpu))
