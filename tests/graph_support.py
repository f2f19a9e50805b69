"""What the tests of graphs share: a graph of one node, run and judged, and hipDNN's formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from iree_lnbwd import reference
from iree_lnbwd.graph import (
    Graph,
    LayernormAttributes,
    LayernormBackwardAttributes,
    NormFwdPhase,
    RMSNormAttributes,
    RMSNormBackwardAttributes,
    Tensor,
)
from iree_lnbwd.graph.calls import calls_of
from iree_lnbwd.graph.tensors import memory_order
from iree_lnbwd.ops.arguments import Array, bind

EPS = 1e-5
TRAINING, INFERENCE = NormFwdPhase.TRAINING, NormFwdPhase.INFERENCE
OUTPUTS = {
    "layernorm": ("Y", "MEAN", "INV_VARIANCE"),
    "layernorm_backward": ("DX", "DSCALE", "DBIAS"),
    "rmsnorm": ("Y", "INV_RMS"),
    "rmsnorm_backward": ("DX", "DSCALE", "DBIAS"),
}
OPS = {
    method: method.replace("layernorm", "layer_norm").replace("rms", "rms_") for method in OUTPUTS
}
ATEN = {
    **{"X": "input", "DY": "grad_output", "SCALE": "weight", "BIAS": "bias", "MEAN": "mean"},
    **{"INV_VARIANCE": "rstd", "INV_RMS": "rstd", "Y": "output", "DX": "grad_input"},
    **{"DSCALE": "grad_weight", "DBIAS": "grad_bias"},
}


def rstd(variance: float, eps: float = EPS) -> float:
    return 1 / math.sqrt(variance + eps)


def empty_for(tensor: Tensor) -> Array:
    """An array with a tensor's dimensions, strides and type, filled with what is no result."""
    data_type, dim = tensor.get_data_type(), tensor.get_dim()
    assert data_type is not None
    order = memory_order(tensor.get_stride(), range(len(dim)))
    array = np.full([dim[axis] for axis in order], np.nan, data_type.numpy)
    return array.transpose(np.argsort(order))


def put(graph: Graph, name: str, array: Array) -> Tensor:
    strides = [max(1, step // array.itemsize) for step in array.strides]
    return graph.tensor(array.shape, strides, array.dtype, name=name)


def node(
    method: str, given: Mapping[str, Array], phase: NormFwdPhase = TRAINING, **attributes: Any
) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """A graph of one node, its inputs and its outputs, all of which are asked for."""
    graph = Graph()
    t = {port: put(graph, port, array) for port, array in given.items()}
    made: tuple[Tensor | None, ...]
    if method == "layernorm":
        attributes = {"epsilon": EPS, **attributes}
        made = graph.layernorm(
            t["X"], t["SCALE"], t["BIAS"], LayernormAttributes(forward_phase=phase, **attributes)
        )
    elif method == "layernorm_backward":
        also = LayernormBackwardAttributes(t.get("MEAN"), t.get("INV_VARIANCE"), **attributes)
        made = graph.layernorm_backward(t["DY"], t["X"], t["SCALE"], also)
    elif method == "rmsnorm":
        attributes = {"epsilon": EPS, **attributes}
        made = graph.rmsnorm(
            *(t["X"], t["SCALE"]),
            RMSNormAttributes(forward_phase=phase, bias=t.get("BIAS"), **attributes),
        )
    else:
        made = graph.rmsnorm_backward(
            *(t["DY"], t["X"], t["SCALE"], t["INV_RMS"]),
            RMSNormBackwardAttributes(**attributes),
        )
    named = zip(OUTPUTS[method], made, strict=True)
    return graph, t, {port: tensor.set_output(True) for port, tensor in named if tensor}


def run(
    method: str, given: Mapping[str, Any], phase: NormFwdPhase = TRAINING, **attributes: Any
) -> dict[str, Array]:
    """The outputs of one node, which are right by our reference."""
    arrays = {p: a if isinstance(a, np.ndarray) else np.array(a, float) for p, a in given.items()}
    graph, inputs, outputs = node(method, arrays, phase, **attributes)
    graph.build()
    results = {port: empty_for(tensor) for port, tensor in outputs.items()}
    pack = {inputs[port]: array for port, array in arrays.items()}
    graph.execute(pack | {outputs[port]: array for port, array in results.items()})
    check(graph, method, arrays, results, attributes.get("epsilon"))
    return results


def check(
    graph: Graph,
    method: str,
    arrays: Mapping[str, Array],
    results: Mapping[str, Array],
    eps: float | None = None,
    *,
    golden: Mapping[str, Any] | None = None,
) -> None:
    """The results are within the tolerance of the reference, or of golden values."""
    (call, *_) = calls_of(graph._validated())
    columns = call.spec.columns
    given: dict[str, Any] = {}
    for port, array in arrays.items():
        shape = (-1,) if port in ("SCALE", "BIAS") else (-1, 1)
        flat = (-1, columns) if port in ("X", "DY") else shape
        given[ATEN[port]] = np.ascontiguousarray(array).reshape(flat)
    if call.spec.has_bias and "bias" not in given:  # a backward: it counts by its type
        given["bias"] = np.ones(columns, results["DBIAS"].dtype)
    mask = [True, True, True][: len(call.spec.output_mask)] or None
    number = EPS if eps is None else eps
    judgement = reference.judge(bind(OPS[method], given, columns, mask, eps=number))
    for port, array in (results if golden is None else golden).items():
        got = np.ascontiguousarray(results[port]).reshape(-1)
        expected = judgement.expected[ATEN[port]].reshape(-1)
        tolerance = judgement.tolerance[ATEN[port]].reshape(-1)
        if golden is not None:
            expected = np.broadcast_to(np.asarray(array, float), results[port].shape).reshape(-1)
        comparison = reference.compare(got, expected, tolerance)
        assert comparison.passed, f"{port}: {comparison}"


def assert_golden(
    method: str,
    given: Mapping[str, Any],
    golden: Mapping[str, Any],
    phase: NormFwdPhase = TRAINING,
    **attributes: Any,
) -> None:
    arrays = {port: np.array(value, float) for port, value in given.items()}
    results = run(method, arrays, phase, **attributes)
    graph, _, _ = node(method, arrays, phase, **attributes)
    check(graph, method, arrays, results, attributes.get("epsilon"), golden=golden)


def affine(x: Any, mean: Any, norm: Any, scale: Any = 1.0, bias: Any = 0.0) -> dict[str, Any]:
    """Golden values of a forward, by hipDNN's formula."""
    x, mean, norm = (np.array(value, float) for value in (x, mean, norm))
    return {"Y": scale * (x - mean) * norm + bias, "MEAN": mean, "INV_VARIANCE": norm}


def gradients(
    dy: Any, x: Any, mean: Any, norm: Any, scale: Any = 1.0, rank: int = 1
) -> dict[str, Any]:
    """Golden values of a backward, by hipDNN's formula: a and b, of each row."""
    dy, x, mean, norm = (np.array(value, float) for value in (dy, x, mean, norm))
    axes = tuple(range(-rank, 0))
    h, columns = dy * scale, math.prod(x.shape[-rank:])
    centred = (h * (x - mean)).sum(axis=axes, keepdims=True)
    a = norm**3 * centred / columns
    b = norm * h.sum(axis=axes, keepdims=True) / columns
    rows = tuple(range(x.ndim - rank))
    return {
        "DX": norm * h - a * (x - mean) - b,
        "DSCALE": (dy * (x - mean) * norm).sum(axis=rows),
        "DBIAS": dy.sum(axis=rows),
    }
