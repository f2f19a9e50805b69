"""Transformer Engine's tests of its norms (NVIDIA/TransformerEngine), on these ops.

Restated from tests/cpp/operator/test_normalization.cu and .h: both norms, numbers from a uniform
distribution on [-2, 1), `1 + weight`, and a gradient that is added to the
input's. The shapes are theirs, with all rows of the first two and few of the wide ones, so that the
tests do not take minutes. Each shape, element type and option comes up, not each product of them.
Outputs of another element type than the input, FP8 among them, are not in this package.

Theirs holds the gradients to 5e-4, relative and absolute; here each has its derived tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import checked, random_generator, trained

from iree_lnbwd import reference
from iree_lnbwd.ops.arguments import Array, bind
from iree_lnbwd.ops.dtypes import DTYPES

EPS = 1e-5


def uniform(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    return rng.uniform(-2, 1, shape).astype(DTYPES[dtype].numpy)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("op", "shape", "dtype", "zero_centered", "adds"),
    [
        ("layer_norm", (71, 229), "f32", True, False),
        ("layer_norm", (29, 541), "bf16", False, False),
        ("layer_norm", (16, 6144), "f16", True, True),
        ("rms_norm", (29, 541), "bf16", False, True),
        ("rms_norm", (8, 12288), "f32", True, True),
    ],
)
def test_norm(op: str, shape: tuple[int, int], dtype: str, zero_centered: bool, adds: bool) -> None:
    """``adds``: a gradient is added to the input's; of layer norm, theirs cannot do that."""
    rng = random_generator()
    x, dy, other = (uniform(rng, dtype, shape) for _ in range(3))
    weight, bias = (uniform(rng, dtype, shape[1:]) for _ in range(2))
    given = {"input": x, "weight": weight}
    if op == "layer_norm":
        given["bias"] = bias
    reached = {"grad_output": dy, "grad_residual": other if adds else None}
    trained(op, shape[1], given, reached, eps=EPS, weight_offset=float(zero_centered))


def test_the_offset_is_added_in_the_type_of_sums() -> None:
    """1 + weight, rounded to the weight's bf16, is another weight: an option of theirs with cuDNN.

    ``zero_centered_gamma_in_weight_dtype`` is its name there.
    """
    rng = random_generator()
    x = uniform(rng, "f32", (29, 541))
    weight = np.full(541, 2.0**-9, DTYPES["bf16"].numpy)
    options = {"eps": EPS, "weight_offset": 1.0}
    arrays = {"input": x, "weight": weight}
    ours = checked("rms_norm", 541, arrays, **options)
    judgement = reference.judge(bind("rms_norm", arrays, 541, **options))  # type: ignore[arg-type]

    rounded = (1 + weight.astype(np.float32)).astype(weight.dtype)
    theirs = (x.astype(np.float64) * ours.rstd * rounded.astype(np.float64)).astype(np.float32)
    expected, tolerance = (of["output"] for of in (judgement.expected, judgement.tolerance))
    assert reference.compare(theirs, expected, tolerance).ratio > 100
