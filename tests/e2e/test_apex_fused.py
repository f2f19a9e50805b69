"""apex's tests of its fused layer norm and RMS norm (NVIDIA/apex), on these ops.

Restated from tests/L0/run_fused_layer_norm/test_fused_layer_norm.py: rows of [32, 16], dense and as
a view of every third, fifth and third element, with parameters and without, and the mixed modules,
whose parameters are of f32 beside data of f16 or bf16. 65536 rows are 512 here, so that the tests
do not take minutes. Modules that save memory are not here: they run the same forward.

apex's tolerances are PyTorch's for f32, up to 2e-3 and 2e-4 for gradients of a weight; here each
element has its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import normal, random_generator, trained

from iree_lnbwd.ops.dtypes import DTYPES

NORMALIZED_SHAPE = (32, 16)
BATCHES = (16, 512)
EPS = 1e-5  # of apex's modules


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("op", "dtype", "weight_dtype"),
    [
        ("rms_norm", "f32", None),
        ("rms_norm", "f32", "f32"),
        ("rms_norm", "f16", "f16"),
        ("rms_norm", "bf16", "f32"),
        ("layer_norm", "bf16", "f32"),
    ],
)
def test_fused_norm(op: str, dtype: str, weight_dtype: str | None) -> None:
    rng = random_generator()
    parameters = ("weight", "bias") if op == "layer_norm" else ("weight",)
    for batch in BATCHES:
        dense = normal(rng, dtype, (batch, *NORMALIZED_SHAPE))
        strided = normal(rng, dtype, (48, 160, 48))[::3, ::5, ::3]
        for x in (dense, strided):
            given = {"input": x}
            if weight_dtype is not None:
                given |= {name: normal(rng, weight_dtype, NORMALIZED_SHAPE) for name in parameters}
            dy = rng.random(x.shape, np.float32).astype(DTYPES[dtype].numpy)
            trained(op, NORMALIZED_SHAPE, given, {"grad_output": dy}, eps=EPS)
