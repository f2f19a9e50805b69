"""Golden values of hipDNN's CPU reference (ROCm/rocm-libraries, projects/hipdnn), on these ops.

From test_sdk/tests/utilities/TestCpuFpReferenceRMSNorm.cpp, where they are written as the sums that
make them, and TestCpuFpReferenceLayernormBackward.cpp, which has them with 16 digits. All are of
f64. hipDNN allows 1e-6 or 1e-10; here they have the tolerance that our own reference has, so that
two references, of two projects, agree in all that f64 can say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support import checked

from iree_lnbwd import reference
from iree_lnbwd.arguments import Array, bind

EPS = 1e-5


def assert_golden(
    op: str,
    normalized_shape: int | tuple[int, ...],
    arrays: Mapping[str, Any],
    golden: Mapping[str, Any],
    **options: Any,
) -> None:
    """The results are right by our reference, and by the golden values within its tolerance."""
    given: dict[str, Array | None] = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    results = checked(op, normalized_shape, given, **options)
    tolerance = reference.judge(bind(op, given, normalized_shape, **options)).tolerance
    for name, value in golden.items():
        got = getattr(results, name)
        expected = np.asarray(value, np.float64).reshape(got.shape)
        comparison = reference.compare(got, expected, tolerance[name])
        assert comparison.passed, f"{name}: {comparison}"


def rstd(mean_of_squares: float, eps: float = EPS) -> float:
    return 1 / math.sqrt(mean_of_squares + eps)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_rms_norm_of_a_row(weight: float) -> None:
    """RMSNormFwdSanityValidationNchw and RMSNormFwdWithInvRms."""
    x = np.arange(1.0, 5.0)
    golden = {"output": weight * x * rstd(7.5), "rstd": rstd(7.5)}
    assert_golden("rms_norm", 4, {"input": x[None], "weight": [weight] * 4}, golden, eps=EPS)


def test_rms_norm_of_each_channel() -> None:
    """RMSNormFwdPartialSuffixScale, whose shape is [1, 2, 1, 2]."""
    x = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 1, 2)
    golden = {
        "output": [1 * rstd(2.5), 4 * rstd(2.5), 3 * rstd(12.5), 8 * rstd(12.5)],
        "rstd": [rstd(2.5), rstd(12.5)],
    }
    assert_golden("rms_norm", 2, {"input": x, "weight": [1.0, 2.0]}, golden, eps=EPS)


def test_rms_norm_over_two_dimensions() -> None:
    """RMSNormFwdScaleNormAxis2 and RMSNormFwdConstantInput, in one call."""
    x = np.array([[1.0, 2, 1, 2], [3, 4, 3, 4], [3, 3, 3, 3]]).reshape(3, 2, 2)
    weight = np.array([[2.0, 2.5], [3.0, 3.5]])
    norms = np.array([rstd(2.5), rstd(12.5), rstd(9.0)])
    golden = {"output": x * norms[:, None, None] * weight, "rstd": norms}
    assert_golden("rms_norm", (2, 2), {"input": x, "weight": weight}, golden, eps=EPS)


def test_rms_norm_backward_of_a_row() -> None:
    """RMSNormBwdSanityValidation: what is left of a gradient along x is only what eps leaves."""
    x = np.arange(1.0, 5.0)
    norm = rstd(7.5)
    arrays = {"grad_output": [0.1 * x], "input": [x], "rstd": [norm], "weight": [1.0] * 4}
    golden = {
        "grad_input": 0.1 * x * norm - 0.75 * x * norm**3,
        "grad_weight": 0.1 * x * x * norm,
    }
    assert_golden("rms_norm_backward", 4, arrays, golden)


def test_rms_norm_backward_of_each_channel() -> None:
    """RMSNormBwdPartialSuffixScale."""
    first, second = rstd(2.5, eps=0), rstd(12.5, eps=0)
    arrays = {
        "grad_output": [[0.1, 0.1], [0.2, 0.2]],
        "input": [[1.0, 2.0], [3.0, 4.0]],
        "rstd": [first, second],
        "weight": [1.0, 0.5],
    }
    golden = {
        "grad_input": [
            [0.1 * first - 0.1 * first**3, 0.05 * first - 0.1 * 2 * first**3],
            [0.2 * second - 0.5 * 3 * second**3, 0.1 * second - 0.5 * 4 * second**3],
        ],
        "grad_weight": [0.1 * first + 0.6 * second, 0.2 * first + 0.8 * second],
    }
    assert_golden("rms_norm_backward", 2, arrays, golden)


TWO_ROWS = {
    "grad_output": [[-1.0, 2.0, -3.0, 4.0], [2.0, -4.0, 6.0, -8.0]],
    "input": [[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]],
    "weight": [2.0] * 4,
}
GRADIENTS_OF_TWO_ROWS = {
    "grad_input": [
        [-2.1465994991753945e-05, 3.577687297918808, -7.15538175116928, 3.5777159192454633],
        [5.366547046303793e-06, -3.5777033974472507, 7.155408583743517, -3.577710552843312],
    ],
    "grad_weight": [
        -1.3416434697532726,
        0.8944289798355152,
        1.3416434697532726,
        -5.366573879013091,
    ],
    "grad_bias": [1.0, -2.0, 3.0, -4.0],
}


def test_layer_norm_backward_of_two_rows() -> None:
    """BpropSanityValidation2D: the statistics are recomputed."""
    assert_golden("layer_norm_backward", 4, TWO_ROWS, GRADIENTS_OF_TWO_ROWS, eps=EPS)


def test_layer_norm_backward_of_two_rows_with_statistics() -> None:
    """BpropSanityValidationWithOptional2D: they are given."""
    statistics = {"mean": [2.5, 5.0], "rstd": [rstd(1.25), rstd(5.0)]}
    arrays = {**TWO_ROWS, **statistics}
    assert_golden("layer_norm_backward", 4, arrays, GRADIENTS_OF_TWO_ROWS)


def test_layer_norm_backward_over_two_dimensions() -> None:
    """BpropSanityValidation3D."""
    arrays = {
        "grad_output": [[[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]]],
        "input": [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]],
        "weight": np.ones((2, 3)),
    }
    golden = {
        "grad_input": [
            [-3.0113333097103734e-06, 1.4052918891730595, -1.8737255302307223],
            [1.8737255302307223, -3.7474480491281357, 2.342159171288385],
        ],
        "grad_weight": [
            [1.4638475999719223, -1.7566171199663065, 0.8783085599831533],
            [1.1710780799775378, -4.391542799915767, 8.783085599831534],
        ],
        "grad_bias": [[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]],
    }
    assert_golden("layer_norm_backward", (2, 3), arrays, golden, eps=EPS)
