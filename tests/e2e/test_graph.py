"""Graphs of norms, executed: hipDNN's published cases, layouts, several nodes, the caller's arrays.

The cases are those of ROCm/rocm-libraries, projects/hipdnn/test_sdk/tests/utilities:
TestCpuFpReferenceLayernorm.cpp, TestCpuFpReferenceLayernormBackward.cpp and
TestCpuFpReferenceRMSNorm.cpp, whose names they bear, and the plans of cpu_graph_executor/. The
golden values are written as the sums that make them. hipDNN allows 1e-6 or 1e-10; here they have
the tolerance of our own reference, and the results are held against that as well.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated_arrays import Namespace
from emulated_driver import EmulatedDriver
from support import normal, random_generator

from iree_lnbwd import functional, reference
from iree_lnbwd.arguments import Array, bind
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.graph import (
    DataType,
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
from iree_lnbwd.runtime import gpu_module
from iree_lnbwd.targets import find_target
from iree_lnbwd.tuning import found

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
            t["X"], t["SCALE"], RMSNormAttributes(forward_phase=phase, **attributes)
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
    mask = [True, True, True][: len(call.spec.output_mask)] or None
    number = EPS if eps is None else eps
    judgement = reference.judge(bind(OPS[method], given, columns, mask, eps=number))
    for port, array in (results if golden is None else golden).items():
        got = np.ascontiguousarray(results[port]).reshape(-1)
        if method == "rmsnorm_backward" and port == "DBIAS":
            expected = given["grad_output"].astype(np.float64).sum(axis=0)
            tolerance = (
                len(given["grad_output"]) * 2.0**-53 * np.abs(given["grad_output"]).sum(axis=0)
            )
        else:
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


# --- layer normalization ----------------------------------------------------------------------

ROW = np.arange(1.0, 5.0)
TWO_ROWS = np.stack([ROW, 2 * ROW])
SIX = np.arange(1.0, 7.0).reshape(2, 3)
COUNTING = np.arange(1.0, 49.0).reshape(2, 3, 2, 4)


def affine(x: Any, mean: Any, norm: Any, scale: Any = 1.0, bias: Any = 0.0) -> dict[str, Any]:
    """Golden values of a forward, by hipDNN's formula."""
    x, mean, norm = (np.array(value, float) for value in (x, mean, norm))
    return {"Y": scale * (x - mean) * norm + bias, "MEAN": mean, "INV_VARIANCE": norm}


def ones(*shape: int) -> Array:
    return np.ones(shape)


FORWARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FpropSanityValidation2D": (
        {"X": TWO_ROWS, "SCALE": 2 * ones(4), "BIAS": 0.5 * ones(4)},
        affine(TWO_ROWS, [[2.5], [5.0]], [[rstd(1.25)], [rstd(5.0)]], 2.0, 0.5),
    ),
    "FpropSanityValidation3D": (
        {"X": SIX[None], "SCALE": ones(2, 3), "BIAS": 0 * ones(2, 3)},
        affine(SIX[None], 3.5, rstd(17.5 / 6)),
    ),
    "FpropAllZeros": (
        {"X": 0 * ones(2, 4), "SCALE": 2 * ones(4), "BIAS": 3 * ones(4)},
        affine(0 * ones(2, 4), 0.0, rstd(0.0), bias=3.0),
    ),
    "FpropAllOnes": (
        {"X": ones(3, 5), "SCALE": 1.5 * ones(5), "BIAS": 0.25 * ones(5)},
        affine(ones(3, 5), 1.0, rstd(0.0), bias=0.25),
    ),
    "FpropIdentityTransform": (
        {"X": 10 * SIX.reshape(1, 6), "SCALE": ones(6), "BIAS": 0 * ones(6)},
        affine(10 * SIX.reshape(1, 6), 35.0, rstd(1750 / 6)),
    ),
    "FpropNegativeAndMixedValues": (
        {"X": [[-3.0, -1.0, 1.0, 3.0]], "SCALE": ones(4), "BIAS": 0 * ones(4)},
        affine([[-3.0, -1.0, 1.0, 3.0]], 0.0, rstd(5.0)),
    ),
    "FpropLargeValueNumericalStability": (
        {"X": 1e15 + ROW[None], "SCALE": ones(4), "BIAS": 0 * ones(4)},
        affine(1e15 + ROW[None], 1e15 + 2.5, rstd(1.25)),
    ),
    "FpropPerFeatureScaleBias": (
        {"X": ROW[None], "SCALE": ROW, "BIAS": 10 * (ROW - 1)},
        affine(ROW[None], 2.5, rstd(1.25), ROW, 10 * (ROW - 1)),
    ),
    "Fprop1D": (
        {"X": 2 * np.arange(1.0, 6.0), "SCALE": ones(5), "BIAS": 0 * ones(5)},
        affine(2 * np.arange(1.0, 6.0), 6.0, rstd(8.0)),
    ),
    "Fprop4DNormalizeLast1": (
        {"X": COUNTING, "SCALE": ones(4), "BIAS": 0 * ones(4)},
        affine(COUNTING, COUNTING[..., :1] + 1.5, rstd(1.25) * ones(2, 3, 2, 1)),
    ),
    "FpropFullTensorNormalization": (
        {"X": SIX, "SCALE": ones(2, 3), "BIAS": 0 * ones(2, 3)},
        affine(SIX, 3.5, rstd(17.5 / 6)),
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_layernorm(name: str) -> None:
    given, golden = FORWARDS[name]
    assert_golden("layernorm", given, golden)


def test_layernorm_for_inference() -> None:
    """FpropWithoutMeanRstdOutputs."""
    given, golden = FORWARDS["FpropSanityValidation2D"]
    assert_golden("layernorm", given, {"Y": golden["Y"]}, INFERENCE)


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


DY_OF_TWO = np.array([[-1.0, 2.0, -3.0, 4.0], [2.0, -4.0, 6.0, -8.0]])
OF_TWO = {
    "DX": [
        [-2.1465994991753945e-05, 3.577687297918808, -7.15538175116928, 3.5777159192454633],
        [5.366547046303793e-06, -3.5777033974472507, 7.155408583743517, -3.577710552843312],
    ],
    "DSCALE": [-1.3416434697532726, 0.8944289798355152, 1.3416434697532726, -5.366573879013091],
    "DBIAS": [1.0, -2.0, 3.0, -4.0],
}
DY_OF_SIX = np.array([[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]])
OF_SIX = {
    "DX": [
        [-3.0113333097103734e-06, 1.4052918891730595, -1.8737255302307223],
        [1.8737255302307223, -3.7474480491281357, 2.342159171288385],
    ],
    "DSCALE": [
        [1.4638475999719223, -1.7566171199663065, 0.8783085599831533],
        [1.1710780799775378, -4.391542799915767, 8.783085599831534],
    ],
    "DBIAS": [[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]],
}
MIXED = {"DY": [[-1.0, -3.0, 3.0, 1.0]], "X": [[-3.0, 1.0, -1.0, 3.0]]}
STATISTICS_OF_SIX = {"MEAN": [[[3.5]]], "INV_VARIANCE": [[[rstd(17.5 / 6)]]]}

BACKWARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BpropSanityValidation2D": (
        {"DY": DY_OF_TWO, "X": TWO_ROWS, "SCALE": 2 * ones(4)},
        OF_TWO,
    ),
    "BpropSanityValidationWithOptional2D": (
        {
            **{"DY": DY_OF_TWO, "X": TWO_ROWS, "SCALE": 2 * ones(4)},
            **{"MEAN": [2.5, 5.0], "INV_VARIANCE": [rstd(1.25), rstd(5.0)]},
        },
        OF_TWO,
    ),
    "BpropSanityValidation3D": (
        {"DY": DY_OF_SIX[None], "X": SIX[None], "SCALE": ones(2, 3)},
        OF_SIX,
    ),
    "BpropSanityValidationWithOptional3D": (
        {"DY": DY_OF_SIX[None], "X": SIX[None], "SCALE": ones(1, 2, 3), **STATISTICS_OF_SIX},
        OF_SIX,
    ),
    "BpropSanityValidationEntire3D": (
        {"DY": DY_OF_SIX[None], "X": SIX[None], "SCALE": ones(1, 2, 3)},
        OF_SIX,
    ),
    "BpropAllZeros": (
        {
            **{"DY": 0 * ones(2, 4), "X": 0 * ones(2, 4), "SCALE": 2 * ones(4)},
            **{"MEAN": 0 * ones(2), "INV_VARIANCE": rstd(0.0) * ones(2)},
        },
        {"DX": 0.0, "DSCALE": 0.0, "DBIAS": 0.0},
    ),
    "BpropNegativeAndMixedValues": (
        {**MIXED, "SCALE": ones(4), "MEAN": [0.0], "INV_VARIANCE": [rstd(5.0)]},
        gradients(MIXED["DY"], MIXED["X"], [[0.0]], [[rstd(5.0)]]),
    ),
    "BpropPerFeatureScale": (
        {
            **{"DY": 0.1 * ROW[None], "X": ROW[None], "SCALE": ROW},
            **{"MEAN": [2.5], "INV_VARIANCE": [rstd(1.25)]},
        },
        gradients(0.1 * ROW[None], ROW[None], [[2.5]], [[rstd(1.25)]], ROW),
    ),
    "Bprop4DNormalizeLast1": (  # whose statistics are not those of X
        {
            **{"DY": -COUNTING / 10, "X": COUNTING, "SCALE": ones(4)},
            **{"MEAN": 2.5 * ones(2, 3, 2), "INV_VARIANCE": rstd(1.25) * ones(2, 3, 2)},
        },
        gradients(-COUNTING / 10, COUNTING, 2.5, rstd(1.25)),
    ),
    "BpropFullTensorNormalization": (
        {
            **{"DY": DY_OF_SIX, "X": SIX, "SCALE": ones(2, 3)},
            **{"MEAN": [3.5], "INV_VARIANCE": [rstd(17.5 / 6)]},
        },
        gradients(DY_OF_SIX, SIX, 3.5, rstd(17.5 / 6), rank=2),
    ),
    "BpropWholeTensorNormalizationRecomputesStats": (
        {
            "DY": [0.5, -1.5, 2.0, 0.25],
            "X": [1.0, 2.0, 4.0, 8.0],
            "SCALE": [[1.5, -0.5, 2.0, 0.75]],
        },
        gradients(
            *([0.5, -1.5, 2.0, 0.25], [1.0, 2.0, 4.0, 8.0], 3.75, rstd(7.1875)),
            [1.5, -0.5, 2.0, 0.75],
        ),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_layernorm_backward(name: str) -> None:
    given, golden = BACKWARDS[name]
    assert_golden("layernorm_backward", given, golden)


def test_sums_of_large_numbers() -> None:
    """BpropLargeValueNumericalStability, but for DX.

    hipDNN expects 1.375, 0.5, -0.375 and -1.375, which is what rounding leaves there: DY is -X, so
    that DX is about 1e-5.
    """
    x = 1e15 + ROW[None]
    given = {"DY": -x, "X": x, "SCALE": ones(4), "MEAN": [1e15 + 2.5], "INV_VARIANCE": [rstd(1.25)]}
    golden = {"DSCALE": (-x * (x - 1e15 - 2.5) * rstd(1.25))[0], "DBIAS": -x[0]}
    assert_golden("layernorm_backward", given, golden)


# --- RMS normalization ------------------------------------------------------------------------

PAIRS = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 1, 2)
OF_PAIRS = np.array([rstd(2.5), rstd(12.5)]).reshape(1, 2, 1, 1)
SQUARES = np.broadcast_to(PAIRS, (2, 2, 2, 2)).copy()
CHANNELS = ROW.reshape(1, 4, 1, 1)
WEIGHTS = np.array([[2.0, 2.5], [3.0, 3.5]]).reshape(1, 1, 2, 2)

RMS_FORWARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RMSNormFwdSanityValidationNchw": (
        {"X": CHANNELS, "SCALE": ones(1, 4, 1, 1)},
        {"Y": CHANNELS * rstd(7.5)},
    ),
    "RMSNormFwdWithInvRms": (
        {"X": CHANNELS, "SCALE": 2 * ones(1, 4, 1, 1)},
        {"Y": 2 * CHANNELS * rstd(7.5), "INV_RMS": rstd(7.5)},
    ),
    "RMSNormFwdPartialSuffixScale": (
        {"X": PAIRS, "SCALE": np.array([1.0, 2.0]).reshape(1, 1, 1, 2)},
        {"Y": PAIRS * OF_PAIRS * [1.0, 2.0], "INV_RMS": OF_PAIRS},
    ),
    "RMSNormFwdConstantInput": (
        {"X": 3 * ones(1, 1, 2, 2), "SCALE": 2 * ones(1, 1, 2, 2)},
        {"Y": 6 * rstd(9.0)},
    ),
    "RMSNormFwdScaleNormAxis2": (
        {"X": SQUARES, "SCALE": WEIGHTS},
        {"Y": SQUARES * OF_PAIRS * WEIGHTS},
    ),
    "RMSNormFwdScaleNormAxis3": (
        {"X": SQUARES, "SCALE": np.array([2.0, 2.5]).reshape(1, 1, 1, 2)},
        {"Y": SQUARES * OF_PAIRS * [2.0, 2.5]},
    ),
}


@pytest.mark.parametrize("name", RMS_FORWARDS)
def test_rmsnorm(name: str) -> None:
    given, golden = RMS_FORWARDS[name]
    assert_golden("rmsnorm", given, golden)


def rms_gradients(dy: Any, x: Any, norm: Any, scale: Any, rank: int) -> dict[str, Any]:
    """Golden values of a backward, by hipDNN's formula: m, of each row."""
    axes, rows = tuple(range(-rank, 0)), tuple(range(x.ndim - rank))
    m = (dy * scale * x).mean(axis=axes, keepdims=True)
    return {
        "DX": dy * scale * norm - m * x * norm**3,
        "DSCALE": (dy * x * norm).sum(axis=rows),
    }


DY_OF_PAIRS = np.array([0.1, 0.1, 0.2, 0.2]).reshape(1, 2, 1, 2)
EXACT_PAIRS = np.array([rstd(2.5, 0), rstd(12.5, 0)]).reshape(1, 2, 1, 1)
OF_CHANNELS = np.full((1, 1, 1, 1), rstd(7.5))
AXIS_2 = np.broadcast_to(np.array([1.0, 2.0]).reshape(1, 2, 1, 1), (2, 2, 2, 2)).copy()
NORMS_2 = np.broadcast_to(np.array([1.0, 0.5]).reshape(1, 2, 1, 1), (2, 2, 1, 1)).copy()

RMS_BACKWARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RMSNormBwdSanityValidation": (
        {"DY": 0.1 * CHANNELS, "X": CHANNELS, "SCALE": ones(1, 4, 1, 1), "INV_RMS": OF_CHANNELS},
        {
            "DX": 0.1 * CHANNELS * rstd(7.5) - 0.75 * CHANNELS * rstd(7.5) ** 3,
            "DSCALE": 0.1 * CHANNELS**2 * rstd(7.5),
        },
    ),
    "RMSNormBwdDbiasValidation": (
        {
            **{"DY": 0.5 * ones(1, 2, 1, 1), "X": ROW[:2].reshape(1, 2, 1, 1)},
            **{"SCALE": ones(1, 2, 1, 1), "INV_RMS": rstd(2.5, 0) * ones(1, 1, 1, 1)},
        },
        {"DBIAS": 0.5},
    ),
    "RMSNormBwdPartialSuffixScale": (
        {
            **{"DY": DY_OF_PAIRS, "X": PAIRS, "INV_RMS": EXACT_PAIRS},
            "SCALE": np.array([1.0, 0.5]).reshape(1, 1, 1, 2),
        },
        rms_gradients(DY_OF_PAIRS, PAIRS, EXACT_PAIRS, np.array([1.0, 0.5]), 1),
    ),
    "RMSNormBwdConstantInput": (
        {
            **{"DY": 0.5 * ones(1, 1, 2, 2), "X": 3 * ones(1, 1, 2, 2)},
            **{"SCALE": 2 * ones(1, 1, 2, 2), "INV_RMS": rstd(9.0) * ones(1, 1, 1, 1)},
        },
        {"DX": rstd(9.0) - 9 * rstd(9.0) ** 3, "DSCALE": 1.5 * rstd(9.0), "DBIAS": 0.5},
    ),
    "RMSNormBwdScaleNormAxis2": (
        {
            **{"DY": 0.1 * ones(2, 2, 2, 2), "X": AXIS_2},
            **{"SCALE": ones(1, 1, 2, 2), "INV_RMS": NORMS_2},
        },
        {"DX": 0.0, "DSCALE": 0.4},
    ),
}


@pytest.mark.parametrize("name", RMS_BACKWARDS)
def test_rmsnorm_backward(name: str) -> None:
    given, golden = RMS_BACKWARDS[name]
    assert_golden("rmsnorm_backward", given, golden, compute_dbias="DBIAS" in golden)


# --- types ------------------------------------------------------------------------------------

FWD_TYPES = (("f4", "f4"), ("f2", "f4"), ("bf16", "f4"), ("f8", "f8"), ("f2", "bf16"))
BWD_TYPES = (
    *(("f4", "f4", "f4"), ("f2", "f2", "f4"), ("bf16", "bf16", "f4")),
    *(("f4", "f2", "f4"), ("f2", "f4", "f4"), ("f8", "f8", "f8")),
)


def numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else name)


@pytest.mark.parametrize("method", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("x", "scale"), FWD_TYPES)
def test_types_of_forwards_have_modules(method: str, x: str, scale: str) -> None:
    """LayernormFpropTypes, TypesRMSNormFwdNchw and TypesRMSNormFwdNhwc, as far as to the module."""
    given = {
        "X": np.ones((2, 8, 32), numpy_type(x)),
        "SCALE": np.ones((1, 8, 32), numpy_type(scale)),
    }
    if method == "layernorm":
        given["BIAS"] = given["SCALE"]
    (spec,) = node(method, given)[0].specs
    types = {name: DataType(n) for name, n in zip(["f2", "f4", "f8", "bf16"], NAMES, strict=True)}
    assert (spec.dtype, spec.gamma_dtype) == (types[x].dtype, types[scale].dtype)


NAMES = ("half", "float", "double", "bfloat16")


@pytest.mark.parametrize("method", ["layernorm_backward", "rmsnorm_backward"])
@pytest.mark.parametrize(("dy", "x", "scale"), BWD_TYPES)
def test_types_of_backwards_have_modules(method: str, dy: str, x: str, scale: str) -> None:
    """LayernormBpropTypes and RMSNormBwdTypes, whose statistics are FLOAT or DOUBLE here."""
    given = {
        "X": np.ones((2, 8, 32), numpy_type(x)),
        "SCALE": np.ones((1, 8, 32), numpy_type(scale)),
    }
    given["DY"] = np.ones((2, 8, 32), numpy_type(dy))
    if method == "rmsnorm_backward":
        given["INV_RMS"] = np.ones((2, 1, 1), np.float64 if x == "f8" else np.float32)
    (spec,) = node(method, given)[0].specs
    types = {name: DataType(n) for name, n in zip(["f2", "f4", "f8", "bf16"], NAMES, strict=True)}
    found = (spec.dy_dtype, spec.dtype, spec.gamma_dtype)
    assert found == tuple(types[name].dtype for name in (dy, x, scale))


def test_half_beside_float() -> None:
    """BpropTypicalTransformerShape, of mixed types."""
    rng = random_generator()
    x, dy = (normal(rng, "f16", (2, 8, 64)) for _ in "xy")
    run("layernorm_backward", {"DY": dy, "X": x, "SCALE": normal(rng, "f32", (64,))})


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
    assert (np.delete(room, range(1, 5), axis=1) == 7).all()
    assert (np.delete(mean, range(0, 15, 3)) == 7).all()


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
    """RMSNorm, then LayerNorm of another layout, as two graphs of one node compute it."""
    rng = random_generator()
    x = in_order(normal(rng, "f64", (3, 2, 2, 2)), ORDERS["NHWC"])
    scale = normal(rng, "f64", (1, 1, 2, 2))
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
    assert (backward.op, backward.output_mask) == ("layer_norm_backward", (False, False, True))
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


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Arrays on a GPU that is emulated, as "cuda"."""
    driver = EmulatedDriver("cuda")
    monkeypatch.setattr(gpu_module, "Driver", lambda uri: driver)
    monkeypatch.setattr(functional, "target_of", lambda uri: find_target("sm_90"))
    monkeypatch.setattr(found, "for_device", lambda spec, target, uri: None)
    functional.loaded.cache_clear()
    yield Namespace(driver)
    functional.loaded.cache_clear()


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
