"""The tests of apex's layer norms, on these ops.

Of FastLayerNorm (apex/contrib/test/layer_norm): the types and lengths are apex's, and so are the
512 rows, up to 2304 columns; longer rows are 64 here, and each length comes with f32 and one of the
other pairs of types, in turn, so that the test does not take minutes. apex holds all gradients to a
relative error summed over all elements; here each element is held to its own derived tolerance as
well.

Of the fused norms that keep the output in place of the input (tests/L0/run_fused_layer_norm): the
shapes are apex's, a batch of 16, and the mixtures of types. The large batch of 65536 is 4096 here.
apex compares the two modes by fixed tolerances; here their difference is held to the bound that
follows from the output's rounding.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import (
    assert_matches_reference,
    assert_right,
    present,
    random_arguments,
    random_generator,
)

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import bind
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.verification.output_error import gradients_difference, rounding_of

ROWS, LONG, ROWS_OF_LONG = 512, 2304, 64
LENGTHS = (768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 12288, 16384, 65536)
F32 = ("f32", "f32")
OTHERS = (("f16", "f16"), ("f32", "f16"), ("bf16", "bf16"), ("f32", "bf16"))
CASES = [
    (length, *types)
    for length, other in zip(LENGTHS, itertools.cycle(OTHERS), strict=False)
    for types in (F32, other)
]


@pytest.mark.drawn
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


# Leading dimensions, normalized shape, the input's type, and the weight's; None is no weight.
FUSED = (
    ((16, 32), (16,), "f32", "f32"),
    ((16,), (32, 16), "f32", None),
    ((16,), (32, 16), "f16", "f32"),
    ((16,), (32, 16), "bf16", "f32"),
    ((4096,), (16,), "bf16", "bf16"),
)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("op", "leading", "dims", "dtype", "weight_dtype"),
    [
        *(("layer_norm_backward", *case) for case in FUSED),
        *(("rms_norm_backward", *case) for case in FUSED[:1] + FUSED[3:4]),
    ],
)
def test_both_modes_of_the_fused_norms_agree(
    op: str, leading: tuple[int, ...], dims: tuple[int, ...], dtype: str, weight_dtype: str | None
) -> None:
    """Gradients from the input and from the output are each right, and differ as they may."""
    rng = random_generator()
    kind = DTYPES[dtype].numpy
    x, dy = (rng.standard_normal((*leading, *dims)).astype(kind) for _ in range(2))
    affine = {}
    if weight_dtype is not None:
        affine["weight"] = rng.standard_normal(dims).astype(DTYPES[weight_dtype].numpy)
        if op == "layer_norm_backward":
            affine["bias"] = rng.standard_normal(dims).astype(DTYPES[weight_dtype].numpy)
    forward = getattr(lnbwd, op.removesuffix("_backward"))(x, dims, **affine)
    given = {"grad_output": dy, "rstd": forward.rstd, **affine}
    statistics = {"mean": forward.mean} if OPS[op].centres else {}
    whole = bind(op, {**given, **statistics, "input": x}, dims)
    saving = bind(op, {**given, "output": forward.output}, dims)
    backward = getattr(lnbwd, op)
    judged = [
        (results := backward(**arguments, normalized_shape=dims), assert_right(results, call))
        for arguments, call in (
            ({**given, **statistics, "input": x}, whole),
            ({**given, "input": None, "output": forward.output}, saving),
        )
    ]
    # How far the stored output is from the one of the saved statistics: its rounding, and a few
    # roundings before it.
    arrays = {name: array.astype(np.float64) for name, array in whole.arrays.items()}
    mean = arrays["mean"][:, None] if OPS[op].centres else 0.0
    scaled = (arrays["input"] - mean) * arrays["rstd"][:, None] * arrays.get("weight", 1.0)
    bias = affine["bias"].astype(np.float64).reshape(-1) if "bias" in affine else 0.0
    output = saving.arrays["output"].astype(np.float64)
    off = np.abs(output - (scaled + bias))
    few = 8 * DTYPES["f32"].unit_roundoff * (np.abs(scaled) + np.abs(bias))
    assert (off <= (1 + 2**-8) * (rounding_of(output, DTYPES[dtype]) + few)).all()
    bounds = gradients_difference(whole, off)
    (one, one_judged), (other, other_judged) = judged
    for name, expected in one_judged.expected.items():
        allowed = one_judged.tolerance[name] + other_judged.tolerance[name]
        difference = np.abs(
            present(getattr(one, name)).astype(np.float64)
            - present(getattr(other, name)).astype(np.float64)
        )
        assert (difference <= bounds[name].reshape(expected.shape) + allowed).all(), name
        assert np.isfinite(present(getattr(other, name)).astype(np.float64)).all(), name
