"""The test of apex's FastLayerNorm (apex/contrib/test/layer_norm), on this op.

The types and lengths are apex's, and so are the 512 rows, up to 2304 columns; longer rows are 64
here, and each length comes with f32 and one of the other pairs of types, in turn, so that the test
does not take minutes. apex holds all gradients to a relative error summed
over all elements; here each element is held to its own derived tolerance as well.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import assert_matches_reference, present, random_arguments, random_generator

from iree_lnbwd import NormSpec

ROWS, LONG, ROWS_OF_LONG = 512, 2304, 64
LENGTHS = (768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 12288, 16384, 65536)
F32 = ("f32", "f32")
OTHERS = (("f16", "f16"), ("f32", "f16"), ("bf16", "bf16"), ("f32", "bf16"))
CASES = [
    (length, *types)
    for length, other in zip(LENGTHS, itertools.cycle(OTHERS), strict=False)
    for types in (F32, other)
]


@pytest.mark.parametrize(("length", "input_type", "weight_type"), CASES)
def test_fast_layer_norm(length: int, input_type: str, weight_type: str) -> None:
    """grad_output has the weight's type, as the forward's output has in apex."""
    spec = NormSpec((length,), input_type, grad_output_dtype=weight_type, weight_dtype=weight_type)
    rows = ROWS if length <= LONG else ROWS_OF_LONG
    arguments = random_arguments(random_generator(), spec, (rows,))
    gradients = arguments.backward()
    expected = assert_matches_reference(gradients, arguments).expected
    for name, want in expected.items():
        got = present(getattr(gradients, name))
        relative_error = np.abs(got.astype(np.float64) - want).sum() / np.abs(want).sum()
        assert relative_error < (1e-5 if got.dtype == np.float32 else 2e-2)
