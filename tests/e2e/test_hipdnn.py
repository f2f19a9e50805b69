"""hipDNN's published cases, as graphs of one node.

They are those of ROCm/rocm-libraries, projects/hipdnn/test_sdk/tests/utilities:
TestCpuFpReferenceLayernorm.cpp, TestCpuFpReferenceLayernormBackward.cpp and
TestCpuFpReferenceRMSNorm.cpp, whose names they bear. Golden values are written as the sums that
make them, or with 16 digits. hipDNN allows 1e-6 or 1e-10; here they have the tolerance that our
own reference has, so that two references, of two projects, agree in all that f64 can say. The cases
that must throw are in tests/unit/test_graph_validation.py, and plans in test_graph.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graph_support import (
    INFERENCE,
    affine,
    assert_golden,
    gradients,
    node,
    rstd,
    run,
)
from support import normal, random_generator

from iree_lnbwd.graph import DataType
from iree_lnbwd.ops.arguments import Array

# --- layer normalization ----------------------------------------------------------------------

ROW = np.arange(1.0, 5.0)
TWO_ROWS = np.stack([ROW, 2 * ROW])
SIX = np.arange(1.0, 7.0).reshape(2, 3)
COUNTING = np.arange(1.0, 49.0).reshape(2, 3, 2, 4)


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


@pytest.mark.drawn
def test_rmsnorm_with_a_bias() -> None:
    """Its optional input: added after the scale, of any type and any order in memory."""
    scale, bias = 2 * ones(1, 4, 1, 1), np.arange(4.0).reshape(1, 4, 1, 1)
    given, golden = {"X": CHANNELS, "SCALE": scale, "BIAS": bias}, 2 * CHANNELS * rstd(7.5) + bias
    assert_golden("rmsnorm", given, {"Y": golden, "INV_RMS": rstd(7.5)})
    assert_golden("rmsnorm", given, {"Y": golden}, INFERENCE)
    rng = random_generator()
    x, scale = normal(rng, "bf16", (3, 8, 4)), normal(rng, "f32", (1, 8, 4))
    for of_bias in ("f32", "bf16", "f16"):
        turned = normal(rng, of_bias, (1, 4, 8)).transpose(0, 2, 1)
        results = run("rmsnorm", {"X": x, "SCALE": scale, "BIAS": turned})
        given = {"DY": x, "X": x, "SCALE": scale, "INV_RMS": results["INV_RMS"]}
        run("rmsnorm_backward", given, compute_dbias=True)


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


@pytest.mark.drawn
@pytest.mark.parametrize("name", RMS_BACKWARDS)
def test_rmsnorm_backward(name: str) -> None:
    given, golden = RMS_BACKWARDS[name]
    assert_golden("rmsnorm_backward", given, golden, compute_dbias="DBIAS" in golden)


# --- types ------------------------------------------------------------------------------------

TYPES = {
    **{"f2": DataType.HALF, "bf16": DataType.BFLOAT16},
    **{"f4": DataType.FLOAT, "f8": DataType.DOUBLE},
}
FWD_TYPES = (("f4", "f4"), ("f2", "f4"), ("bf16", "f4"), ("f8", "f8"), ("f2", "bf16"))
BWD_TYPES = (
    *(("f4", "f4", "f4"), ("f2", "f2", "f4"), ("bf16", "bf16", "f4")),
    *(("f4", "f2", "f4"), ("f2", "f4", "f4"), ("f8", "f8", "f8")),
)


@pytest.mark.parametrize("method", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize(("x", "scale"), FWD_TYPES)
def test_types_of_forwards_have_modules(method: str, x: str, scale: str) -> None:
    """LayernormFpropTypes, TypesRMSNormFwdNchw and TypesRMSNormFwdNhwc, as far as to the module."""
    given = {
        "X": np.ones((2, 8, 32), TYPES[x].numpy),
        "SCALE": np.ones((1, 8, 32), TYPES[scale].numpy),
    }
    if method == "layernorm":
        given["BIAS"] = given["SCALE"]
    (spec,) = node(method, given)[0].specs
    assert (spec.dtype, spec.gamma_dtype) == (TYPES[x].dtype, TYPES[scale].dtype)


@pytest.mark.parametrize("method", ["layernorm_backward", "rmsnorm_backward"])
@pytest.mark.parametrize(("dy", "x", "scale"), BWD_TYPES)
def test_types_of_backwards_have_modules(method: str, dy: str, x: str, scale: str) -> None:
    """LayernormBpropTypes and RMSNormBwdTypes, whose statistics are FLOAT or DOUBLE here."""
    given = {
        "X": np.ones((2, 8, 32), TYPES[x].numpy),
        "SCALE": np.ones((1, 8, 32), TYPES[scale].numpy),
    }
    given["DY"] = np.ones((2, 8, 32), TYPES[dy].numpy)
    if method == "rmsnorm_backward":
        given["INV_RMS"] = np.ones((2, 1, 1), np.float64 if x == "f8" else np.float32)
    (spec,) = node(method, given)[0].specs
    found = (spec.dy_dtype, spec.dtype, spec.gamma_dtype)
    assert found == tuple(TYPES[name].dtype for name in (dy, x, scale))


def test_half_beside_float() -> None:
    """BpropTypicalTransformerShape, of mixed types."""
    rng = random_generator()
    x, dy = (normal(rng, "f16", (2, 8, 64)) for _ in "xy")
    run("layernorm_backward", {"DY": dy, "X": x, "SCALE": normal(rng, "f32", (64,))})
