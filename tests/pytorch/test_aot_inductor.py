"""AOTInductor: a compiled model that holds the operators, loaded in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import nn

from iree_lnbwd.torch import replace_norms

COLUMNS = 24
LOADS = """
import sys, torch, iree_lnbwd.torch
x, expected = torch.load(sys.argv[2])
found = torch._inductor.aoti_load_package(sys.argv[1])(x)
torch.testing.assert_close(found, expected)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # raised inside PyTorch, by the imports of its compiler
def test_a_package_loads_where_this_package_is(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(COLUMNS, COLUMNS), nn.LayerNorm(COLUMNS), nn.RMSNorm(COLUMNS, eps=1e-6)
    )
    replace_norms(model)
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(model, (torch.randn(3, COLUMNS),), dynamic_shapes=({0: rows},))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called[1:3] == ["iree_lnbwd.layer_norm.default", "iree_lnbwd.rms_norm.default"]
    package = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))
    x = torch.randn(7, COLUMNS)
    torch.save((x, model(x).detach()), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(package), str(tmp_path / "data.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
