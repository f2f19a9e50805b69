"""The product beside an oracle: the same op in StableHLO, compiled by IREE's other front end.

Both are held against the f64 reference on the same data; a mistake in the product's IR, in the
oracle's, or in NumPy's formula shows as a disagreement of one with the two others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import assert_matches_reference, built, random_arguments, random_generator

from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target

ROWS = 37

SPECS = (
    *(NormSpec((200,), dtype) for dtype in ("f32", "f16", "bf16", "f64")),
    NormSpec((3, 33), "f32"),
    NormSpec((1,), "f32"),
    NormSpec((768,), "f32", grad_output_dtype="bf16", weight_dtype="bf16"),
    NormSpec((768,), "f32", grad_output_dtype="f16", weight_dtype="f16", bias_dtype="f32"),
    NormSpec((768,), "bf16", weight_dtype="f32"),
    NormSpec((96,), "f16", has_weight=False),
    NormSpec((96,), "f32", eps=1e-5),
    NormSpec((96,), "bf16", eps=0.25),
    NormSpec((96,), "f64", eps=1e-12, has_weight=False),
    NormSpec((96,), "f32", output_mask=(True, False, False)),
    NormSpec((96,), "bf16", output_mask=(False, True, False), eps=1e-5),
    NormSpec((96,), "f32", output_mask=(False, False, True)),
)


@pytest.mark.drawn
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_product_and_oracle_agree_with_the_reference(spec: NormSpec) -> None:
    """The product with dynamic rows, as it ships, and with fixed ones, which the oracle has."""
    arguments = random_arguments(random_generator(), spec, (ROWS,))
    fixed, host = replace(spec, rows=ROWS), find_target("host")
    for vmfb in (
        built(spec, host)[0],
        compiler.build(fixed, host)[0],
        compiler.build_oracle(fixed, host),
    ):
        op = runtime.load_built(vmfb)
        assert_matches_reference(arguments.backward_by(op), arguments)


def test_the_oracle_needs_fixed_rows() -> None:
    with pytest.raises(ValueError, match="rows: expected a fixed number"):
        compiler.build_oracle(NormSpec((96,)), find_target("host"))
