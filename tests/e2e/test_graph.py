"""Graphs of norms, executed: layouts, several nodes in one graph, and the caller's arrays."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_arrays import EmulatedArray, Namespace
from emulated_driver import EmulatedDriver
from graph_support import (
    EPS,
    INFERENCE,
    TRAINING,
    affine,
    check,
    empty_for,
    gradients,
    node,
    put,
    run,
)
from support import normal, random_generator

from iree_lnbwd.calls import modules
from iree_lnbwd.graph import (
    DataType,
    Graph,
    LayernormAttributes,
    LayernormBackwardAttributes,
    RMSNormAttributes,
    RMSNormBackwardAttributes,
    Tensor,
)
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.stores import tuned_choice

# --- layouts ----------------------------------------------------------------------------------


def in_order(array: Array, order: tuple[int, ...]) -> Array:
    """The same values, with the dimensions in this order in memory."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


ORDERS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}


@pytest.mark.parametrize("x_order", ORDERS)
@pytest.mark.parametrize("other_order", ORDERS)
@pytest.mark.parametrize("count", [2, 3])
def test_any_order_in_memory(x_order: str, other_order: str, count: int) -> None:
    """ExecutePlan and ExecutePlanNormalizedDimCount2 of NHWC tensors, and mixtures.

    Where rows are not in one piece, the result goes through a copy; the values are the same.
    """
    rng = random_generator()
    dim = (3, 2, 2, 2) if count == 2 else (3, 2, 1, 2)
    shape = (*(1,) * (4 - count), *dim[4 - count :])
    x, dy = (in_order(normal(rng, "f64", dim), ORDERS[o]) for o in (x_order, other_order))
    scale, bias = (in_order(normal(rng, "f64", shape), ORDERS[other_order]) for _ in "sb")
    run("layernorm", {"X": x, "SCALE": scale, "BIAS": bias}, normalized_dim_count=count)
    run("layernorm_backward", {"DY": dy, "X": x, "SCALE": scale}, normalized_dim_count=count)


def test_gaps_between_rows() -> None:
    """Inputs and outputs are parts of wider arrays, whose other elements stay as they are."""
    rng = random_generator()
    wide = normal(rng, "f64", (5, 9))
    room = np.full((5, 11), 7.0)
    given = {"X": wide[:, 2:6], "SCALE": normal(rng, "f64", (4,)), "BIAS": normal(rng, "f64", (4,))}
    graph, inputs, outputs = node("layernorm", given)
    outputs["Y"].set_stride((11, 1))
    outputs["MEAN"].set_dim((5,)).set_stride((3,))
    graph.build()
    mean = np.full(15, 7.0)
    results = {"Y": room[:, 1:5], "MEAN": mean[::3], "INV_VARIANCE": np.empty((5, 1))}
    pack = {inputs[port]: array for port, array in given.items()}
    graph.execute(pack | {outputs[port]: array for port, array in results.items()})
    check(graph, "layernorm", given, results)
    assert [spec.strided_rows for spec in graph.specs] == [True]
    assert (np.delete(room, range(1, 5), axis=1) == 7).all()
    assert (np.delete(mean, range(0, 15, 3)) == 7).all()


@pytest.mark.parametrize("y_place", ["packed", "of qkv", "heads first", "interleaved"])
@pytest.mark.parametrize("x_place", ["packed", "of qkv", "heads first"])
def test_rows_where_they_lie(x_place: str, y_place: str) -> None:
    """X is q of a packed qkv or dense; DX is, too, or has three strides in X's order: a copy."""
    dim = batch, length, heads, columns = 2, 3, 4, 5
    rooms = {
        "packed": np.full(dim, 7.0),
        "of qkv": np.full((batch, length, 3, heads, columns), 7.0)[:, :, 1],
        "heads first": np.full((batch, heads, length, columns), 7.0).transpose(0, 2, 1, 3),
        "interleaved": np.full((length, batch, 2, heads, columns), 7.0)[:, :, 1].swapaxes(0, 1),
    }
    rng = random_generator()
    x = rooms[x_place].copy(order="K") if x_place == "packed" else rooms[x_place]
    x[:] = normal(rng, "f64", dim)
    given = {"X": x, "SCALE": normal(rng, "f64", (columns,)), "DY": normal(rng, "f64", dim)}
    graph, inputs, outputs = node("layernorm_backward", given)
    y = rooms[y_place].copy() if y_place == x_place else rooms[y_place]
    outputs["DX"].set_stride([step // 8 for step in y.strides])
    graph.build()
    in_place = x_place == "of qkv" or (x_place, y_place) == ("packed", "of qkv")
    assert [spec.strided_rows for spec in graph.specs] == [in_place]
    results = {"DX": y, **{port: empty_for(outputs[port]) for port in ("DSCALE", "DBIAS")}}
    pack = {inputs[port]: array for port, array in given.items()}
    graph.execute(pack | {outputs[port]: array for port, array in results.items()})
    check(graph, "layernorm_backward", given, results)
    for place, room in rooms.items():
        whole = room if room.base is None else room.base
        count = whole.size - (room.size if room is x or room is y else 0)
        assert (whole == 7).sum() == count, place


# --- several nodes ----------------------------------------------------------------------------


class Training:
    """A forward and its backward in one graph; the statistics are virtual."""

    def __init__(self) -> None:
        self.graph = Graph("training", io_data_type=DataType.DOUBLE)
        self.x = self.graph.tensor((6, 4), name="X")
        self.scale, self.bias = (self.graph.tensor((4,), name=n) for n in ("SCALE", "BIAS"))
        self.dy = self.graph.tensor((6, 4), name="DY")
        self.y, mean, inv = self.graph.layernorm(
            self.x, self.scale, self.bias, LayernormAttributes(EPS, TRAINING)
        )
        self.gradients = self.graph.layernorm_backward(
            self.dy, self.x, self.scale, LayernormBackwardAttributes(mean, inv)
        )
        self.inputs = (self.x, self.scale, self.bias, self.dy)
        self.outputs = (self.y, *self.gradients)
        for tensor in self.outputs:
            tensor.set_output(True)

    def pack(self, rng: np.random.Generator) -> dict[Tensor | int, Array]:
        self.graph.validate()
        pack: dict[Tensor | int, Array] = {t: empty_for(t) for t in self.outputs}
        return pack | {t: normal(rng, "f64", t.get_dim()) for t in self.inputs}

    def check(self, pack: Mapping[Any, Array]) -> None:
        x, scale, dy = pack[self.x], pack[self.scale], pack[self.dy]
        mean, norm = x.mean(axis=1, keepdims=True), 1 / np.sqrt(x.var(axis=1, keepdims=True) + EPS)
        golden = affine(x, mean, norm, scale, pack[self.bias]) | gradients(dy, x, mean, norm, scale)
        for tensor, port in zip(self.outputs, ("Y", "DX", "DSCALE", "DBIAS"), strict=True):
            np.testing.assert_allclose(pack[tensor], golden[port], rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def training() -> Training:
    made = Training()
    made.graph.build()
    return made


def test_a_forward_and_its_backward(training: Training) -> None:
    pack = training.pack(random_generator())
    training.graph.execute(pack)
    training.check(pack)


def test_by_uid_from_json(training: Training) -> None:
    """Read again, it computes the same bits; arrays are given by uid."""
    pack = training.pack(random_generator())
    training.graph.execute(pack)
    again = Graph.from_json(training.graph.to_json())
    again.build()
    by_uid = {t.get_uid(): array for t, array in pack.items() if isinstance(t, Tensor)}
    for tensor in training.outputs:
        by_uid[tensor.get_uid()] = empty_for(tensor)
    again.execute(by_uid)  # type: ignore[arg-type]
    for tensor in training.outputs:
        assert by_uid[tensor.get_uid()].tobytes() == pack[tensor].tobytes()


def test_threads_do_not_mix(training: Training) -> None:
    packs = [training.pack(random_generator()) for _ in range(4)]
    threads = [threading.Thread(target=training.graph.execute, args=(pack,)) for pack in packs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pack in packs:
        training.check(pack)


def test_a_chain_through_virtual_tensors() -> None:
    """RMSNorm, then LayerNorm: the bits of two graphs of one node each."""
    rng = random_generator()
    x = in_order(normal(rng, "f64", (3, 2, 1, 2)), ORDERS["NHWC"])
    scale = normal(rng, "f64", (1, 2, 1, 2))
    graph = Graph()
    tensors = [put(graph, name, array) for name, array in (("X", x), ("SCALE", scale))]
    middle, _ = graph.rmsnorm(tensors[0], tensors[1], RMSNormAttributes(EPS, INFERENCE))
    made = LayernormAttributes(EPS, INFERENCE)
    y, _, _ = graph.layernorm(middle, tensors[1], tensors[1], made)
    y.set_output(True)
    graph.build()
    room = empty_for(y)
    graph.execute({tensors[0]: x, tensors[1]: scale, y: room})
    between = run("rmsnorm", {"X": x, "SCALE": scale}, INFERENCE)["Y"]
    after = run("layernorm", {"X": between, "SCALE": scale, "BIAS": scale}, INFERENCE)["Y"]
    assert room.tobytes() == after.tobytes()


def test_what_nobody_reads_is_not_computed() -> None:
    graph = Graph(io_data_type=DataType.FLOAT)
    x, scale = graph.tensor((3, 7)), graph.tensor((1, 7))
    y, inv = graph.rmsnorm(x, scale, RMSNormAttributes(EPS, TRAINING))
    assert inv is not None
    also = RMSNormBackwardAttributes(compute_dbias=True)
    dx, dscale, dbias = graph.rmsnorm_backward(y, x, scale, inv, also)
    assert dbias is not None
    with pytest.raises(
        ValueError, match=r"^graph: expected an output that is not virtual, got none"
    ):
        graph.build()
    dscale.set_output(True)
    forward, backward = graph.specs
    assert (forward.op, backward.output_mask) == ("rms_norm", (False, True))
    dscale.set_output(False)
    dbias.set_output(True)
    forward, backward = graph.specs
    assert backward.op == "rms_norm_backward"
    assert list(backward.output_mask) == [False, False, True]
    dx.set_output(True)  # in the same kernel
    assert list(graph.specs[1].output_mask) == [True, False, True]
    dx.set_output(False)
    dbias.set_output(False)
    y.set_output(True)
    assert [spec.op for spec in graph.specs] == ["rms_norm"]
    dx.set_output(True)
    assert graph.specs[1].output_mask == (True, False)


# --- the caller's arrays ----------------------------------------------------------------------


def other(change: str, training: Training, pack: dict[Tensor | int, Any]) -> str:
    """Changes something about a good pack, and returns the message."""
    x, y, dx = training.x, training.y, training.gradients[0]
    y_name, dx_name = y.get_name(), dx.get_name()
    match change:
        case "missing":
            del pack[training.scale]
            return f"SCALE: expected an array, got none for uid {training.scale.get_uid()}"
        case "none":
            pack[y] = None
            return f"{y_name}: expected an array, got none for uid {y.get_uid()}"
        case "unknown":
            pack[99] = pack[x]
            return "variant_pack: expected the uids 1, 2, 3, 4, 6, 9, 10, 11, got 99, too"
        case "virtual":
            pack[training.graph.find(7)] = pack[x]
            return "layernorm_0::MEAN: expected no array, for it is virtual, got one"
        case "value":
            pack[training.graph.find(5)] = pack[x]
            return "layernorm_0::EPSILON: expected no array, for it has its value in the graph, got"
        case "twice":
            pack[1] = pack[x]
            return "variant_pack: expected each tensor once, got uid 1 twice"
        case "shape":
            pack[x] = pack[x].reshape(4, 6)
            return "X: expected shape (6, 4), got (4, 6)"
        case "type":
            pack[y] = pack[y].astype(np.float32)
            return f"{y_name}: expected element type float64, for double, got float32"
        case "strides":
            pack[x] = np.asfortranarray(pack[x])
            return "X: expected strides of (4, 1) elements, got (1, 6)"
        case "read-only":
            pack[y].flags.writeable = False
            return f"{y_name}: expected an array that can be written, got another"
        case "overlap":
            pack[dx] = pack[x]
            return (
                f"{dx_name}: expected memory of its own, got memory of which X has 192 bytes, too"
            )
        case "two outputs":
            pack[dx] = pack[y]
            return f"{dx_name}: expected memory of its own, got memory of which {y_name} has 192"
        case "no array":
            pack[x] = [[0.0] * 4] * 6
            return (
                "X: expected a NumPy array, a PyTorch tensor or another array with DLPack, got li"
            )
    raise AssertionError(change)


@pytest.mark.parametrize(
    "change",
    [
        *("missing", "none", "unknown", "virtual", "value", "twice", "shape", "type", "strides"),
        *("read-only", "overlap", "two outputs", "no array"),
    ],
)
def test_a_bad_array_is_named_and_nothing_is_written(change: str, training: Training) -> None:
    pack: dict[Tensor | int, Any] = training.pack(random_generator())
    rooms = [pack[tensor] for tensor in training.outputs]
    message = other(change, training, pack)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}") as caught:
        training.graph.execute(pack)
    assert "\n" not in str(caught.value)
    assert all(np.isnan(room).all() for room in rooms)


def test_a_changed_graph_is_built_again() -> None:
    made = Training()
    made.graph.build()
    made.x.set_name("other")
    with pytest.raises(RuntimeError, match=r"^graph: expected a graph that was built"):
        made.graph.execute({})
    made.graph.build()
    with pytest.raises(TypeError, match=r"^variant_pack: expected a mapping of arrays, got list"):
        made.graph.execute([])  # type: ignore[arg-type]


def test_the_page_runs() -> None:
    """The code in docs/graph.md; its gradients are right."""
    page = Path(__file__).parents[2] / "docs" / "graph.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    arrays = {tensor.get_name(): array for tensor, array in names["pack"].items()}
    given = {port: arrays.pop(port) for port in ("DY", "X", "SCALE")}
    results = {name.removeprefix("layernorm_backward_0::"): a for name, a in arrays.items()}
    check(names["graph"], "layernorm_backward", given, results)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Arrays on a GPU that is emulated, as "cuda"."""
    driver = EmulatedDriver("cuda")
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    monkeypatch.setattr(modules, "target_of", lambda uri: find_target("sm_90"))
    monkeypatch.setattr(tuned_choice, "for_device", lambda spec, target, uri: None)
    modules.loaded.cache_clear()
    yield Namespace(driver)
    modules.loaded.cache_clear()


def test_arrays_on_a_gpu(emulated: Namespace) -> None:
    """Two nodes: the array between them and what nobody reads are made in the GPU's memory."""
    rng = random_generator()
    graph = Graph(io_data_type=DataType.FLOAT)
    x, scale = graph.tensor((5, 96), name="X"), graph.tensor((96,), name="SCALE")
    made = LayernormAttributes(EPS, INFERENCE)
    middle, _, _ = graph.layernorm(x, scale, scale, made)
    y, _, _ = graph.layernorm(middle, scale, scale, made)
    y.set_output(True)
    graph.build("cuda")
    given = {x: normal(rng, "f32", (5, 96)), scale: normal(rng, "f32", (96,))}
    on_gpu = {t: emulated.asarray(array) for t, array in given.items()}
    room, between = (emulated.asarray(np.zeros((5, 96), np.float32)) for _ in "yx")
    graph.execute({**on_gpu, y: room})
    virtual = room.numpy()
    middle.set_output(True)
    graph.build("cuda")
    graph.execute({**on_gpu, y: room, middle: between})
    assert room.numpy().tobytes() == virtual.tobytes()
    for source, result in ((given[x], between), (between.numpy(), room)):
        arrays = {"X": source, "SCALE": given[scale], "BIAS": given[scale]}
        check(graph, "layernorm", arrays, {"Y": result.numpy()})
    middle.set_output(False)
    graph.build("cuda")
    with pytest.raises(
        ValueError, match=r"^SCALE: expected strides of \(1,\) elements, got \(2,\)$"
    ):
        graph.execute({**on_gpu, scale: emulated.spread(given[scale]), y: room})
    with pytest.raises(
        TypeError, match=r"^SCALE: expected an array with DLPack, as input or output"
    ):
        graph.execute({**on_gpu, scale: object(), y: room})
    with pytest.raises(
        ValueError, match=r"^layernorm_1::Y: expected memory of its own, got memory"
    ):
        graph.execute({**on_gpu, y: on_gpu[x]})
    assert DeviceUri.parse("cuda") == graph._plan.device  # type: ignore[union-attr]


@pytest.mark.parametrize("y_order", ["NHWC", "NCHW"])
@pytest.mark.parametrize("scale_order", ["NHWC", "NCHW"])
def test_orders_in_memory_on_a_gpu(emulated: Namespace, scale_order: str, y_order: str) -> None:
    """X has its channels last; the others have, too, or are copied."""
    rng = random_generator()

    def on_gpu(array: Array, order: str) -> EmulatedArray:
        packed = emulated.asarray(np.ascontiguousarray(array.transpose(ORDERS[order])))
        return packed.transpose(*np.argsort(ORDERS[order]))

    dim = (3, 4, 2, 12)
    x = in_order(normal(rng, "f32", dim), ORDERS["NHWC"])
    scale = in_order(normal(rng, "f32", (1, *dim[1:])), ORDERS[scale_order])
    given = {"X": x, "SCALE": scale, "BIAS": scale}
    graph, inputs, outputs = node("layernorm", given)
    y_like = in_order(np.zeros(dim, np.float32), ORDERS[y_order])
    outputs["Y"].set_stride([step // 4 for step in y_like.strides])
    graph.build("cuda")
    rooms = {"Y": on_gpu(y_like, y_order)} | {
        port: emulated.asarray(np.zeros((3, 1, 1, 1), np.float32))
        for port in ("MEAN", "INV_VARIANCE")
    }
    kept = on_gpu(scale, scale_order)
    pack = {inputs["X"]: on_gpu(x, "NHWC"), inputs["SCALE"]: kept, inputs["BIAS"]: kept}
    graph.execute(pack | {outputs[port]: room for port, room in rooms.items()})
    check(graph, "layernorm", given, {port: room.numpy() for port, room in rooms.items()})


@pytest.mark.parametrize("shift", [0, 4])
def test_rows_beside_others_on_a_gpu(emulated: Namespace, shift: int) -> None:
    """They are used where they lie; those that do not begin where an access does are copied."""
    rng = random_generator()
    given = {"X": normal(rng, "f32", (2, 3, 8)), "SCALE": normal(rng, "f32", (1, 1, 8))}
    graph, inputs, outputs = node("rmsnorm", given)
    for tensor in (inputs["X"], outputs["Y"]):
        tensor.set_stride((72, 24, 1))
    graph.build("cuda")
    assert [spec.strided_rows for spec in graph.specs] == [True]
    rooms = {
        "Y": emulated.beside_others(np.zeros((2, 3, 8), np.float32), shift=shift),
        "INV_RMS": emulated.asarray(np.zeros((2, 3, 1), np.float32)),
    }
    pack = {inputs["X"]: emulated.beside_others(given["X"])}
    pack[inputs["SCALE"]] = emulated.asarray(given["SCALE"])
    graph.execute(pack | {outputs[port]: room for port, room in rooms.items()})
    check(graph, "rmsnorm", given, {port: room.numpy() for port, room in rooms.items()})
    room = rooms["Y"].room
    assert room is not None
    assert (room.numpy()[:, :, 1:] == -77).all()
