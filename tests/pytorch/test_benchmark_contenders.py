"""The contenders of ``iree-lnbwd benchmark`` compute the same thing."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

from iree_lnbwd.benchmark import pytorch
from iree_lnbwd.benchmark.cells import Cell
from iree_lnbwd.ops.operands import OPS


@pytest.mark.drawn
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_ours_and_eager_compute_the_same(op: str, has_residual: bool) -> None:
    cell = Cell(op, has_residual, 7, (4, 10), "f32")
    operands = pytorch.Operands.of(cell, "cpu")
    ours = pytorch.ours(cell, operands)()
    eager = pytorch.eager(cell, operands)()
    assert (
        len(ours)
        == len(eager)
        == (len(operands.leaves(cell)) if OPS[op].is_backward else 1 + has_residual)
    )
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.builds
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm_backward"])
def test_compiled_computes_the_same(op: str) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, which torch.compile needs")
    cell = Cell(op, True, 7, (40,), "f32")
    operands = pytorch.Operands.of(cell, "cpu")
    compiled = pytorch.compiled(cell, operands)
    for _ in range(2):
        for one, other in zip(compiled(), pytorch.eager(cell, operands)(), strict=True):
            torch.testing.assert_close(one, other)


def test_too_many_rows_are_out_of_memory() -> None:
    cell = Cell("layer_norm", False, 1 << 44, (1024,), "f32")
    with pytest.raises(MemoryError, match="layer_norm 17592186044416 x 1024 f32: "):
        pytorch.Operands.of(cell, "cpu")
