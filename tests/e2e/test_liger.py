"""Liger's tests of RMS norm (linkedin/Liger-Kernel), on these ops.

Restated from test/transformers/test_rms_norm.py and test_fused_add_rms_norm.py: the shapes and
element types, the weight's offsets of Llama (0) and Gemma (1), no weight, and a residual whose sum
gets a gradient too. Not each of their products, but each value with several others.

Liger has casting modes. This package has one computation, that of "gemma": sums and products in
f32, and one rounding at the end. "llama" rounds before the weight as well, which differs in bf16,
and "none" computes in bf16 throughout. Liger's tolerance for bf16, 0.2 and 2 %, tells none of them
apart; that of this package does.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import checked, normal, random_generator, trained

from iree_lnbwd import reference
from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.dtypes import DTYPES

EPS = 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [
        ((2, 128, 512), "f32", 1.0),
        ((5, 123, 123), "bf16", 0.0),
        ((9, 7, 41), "bf16", 1.0),
        ((2, 2, 8), "f32", None),
    ],
)
def test_rms_norm(shape: tuple[int, int, int], dtype: str, offset: float | None) -> None:
    """An offset of None means that there is no weight. Weights of ones are Liger's new modules'."""
    rng = random_generator()
    x, dy = (normal(rng, dtype, shape) for _ in range(2))
    columns = shape[-1]
    weights = [np.ones(columns, x.dtype), normal(rng, dtype, (columns,))]
    for weight in weights if offset is not None else [None]:
        given = {"input": x, "weight": weight}
        reached = {"grad_output": dy}
        trained("rms_norm", columns, given, reached, eps=EPS, weight_offset=offset or 0.0)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset"),
    [
        ((2, 128, 512), "bf16", 1.0),
        ((5, 123, 123), "f32", 0.0),
    ],
)
def test_fused_add_rms_norm(shape: tuple[int, int, int], dtype: str, offset: float) -> None:
    """Gradients reach the output and the sum."""
    rng = random_generator()
    x, residual, dy, dsum = (normal(rng, dtype, shape) for _ in range(4))
    given = {"input": x, "residual": residual, "weight": normal(rng, dtype, shape[-1:])}
    reached = {"grad_output": dy, "grad_residual": dsum}
    trained("rms_norm", shape[-1], given, reached, eps=EPS, weight_offset=offset)


def test_what_llama_rounds_twice_is_told_apart() -> None:
    """It passes for right by Liger's tolerance, and not by ours."""
    rng = random_generator()
    x = normal(rng, "bf16", (5, 123, 123))
    weight = normal(rng, "bf16", (123,))
    arrays = {"input": x, "weight": weight}
    ours = checked("rms_norm", 123, arrays, eps=EPS)
    judgement = reference.judge(bind("rms_norm", arrays, 123, eps=EPS))
    expected, tolerance = (of["output"] for of in (judgement.expected, judgement.tolerance))

    bf16 = DTYPES["bf16"].numpy
    normalized = (x.astype(np.float64) * ours.rstd).astype(bf16)
    llama = (weight.astype(np.float32) * normalized.astype(np.float32)).astype(bf16)
    np.testing.assert_allclose(llama.astype(np.float64), expected, rtol=2e-2, atol=0.2)
    assert not reference.compare(llama, expected, tolerance).passed
