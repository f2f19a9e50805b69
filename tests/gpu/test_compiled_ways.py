"""Ways to compile or capture a model, each as the first use of a process: `compiled_ways`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

SCRIPT = Path(__file__).parents[2] / "scripts" / "compiled_ways"


MODELS = [
    *("LayerNorm", "RMSNorm memory_efficient", "AddRMSNorm", "replace_norms", "enable forwards"),
    *("GatedRMSNorm", "RMSNorm heads", "modulated_layer_norm"),
]
WAYS = ["compile", "dynamic", "export", "fsdp2", "capture", "reduce-overhead", "threads"]


@pytest.mark.gpu
@pytest.mark.drawn
@pytest.mark.parametrize("rows", [32, 4096])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_first_use_is_right(model: str, way: str, rows: int) -> None:
    words = [sys.executable, str(SCRIPT), "--one", "--models", model, "--ways", way]
    ended = subprocess.run([*words, "--rows", str(rows)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
