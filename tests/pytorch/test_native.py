"""The C++ operators: built or done without, and told of calls.

That they compute the same is what the other tests of this folder say with ``--cpp-operators``, and
wherever there is a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch_support import random_operands

from iree_lnbwd import LayerNormSpec

WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="%(message)s")
from iree_lnbwd import torch_native
from iree_lnbwd.torch import layer_norm
print(torch_native.load())
x = torch.ones(2, 8, requires_grad=True)
layer_norm(x, 8).backward(torch.ones(2, 8))
print(x.grad.abs().max().item())
"""

CALL: dict[str, Any] = {
    "device": torch.device("cpu"),
    "rows": 1,
    "columns": 1,
    "grad_output": torch.float32,
    "input": torch.float32,
    "weight": None,
    "bias": None,
    "output_mask": [True, True, True],
    "driver": [0] * 5,
    "ones": 0,
    "scratch_bytes": 0,
    "scratch": [],
    "launches": [],
    "graph": [],
}


def test_without_a_compiler_they_stay_in_python(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler", "IREE_LNBWD_CACHE": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["False", "0.0"], ended.stderr
    assert "the operators run in Python, for those in C++ cannot be had: " in ended.stderr
    assert not list((tmp_path / "torch").rglob("*.so"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver": [0] * 4}, "driver: expected 5 addresses, got 4"),
        ({"graph": [1, 2]}, "driver: expected 8 addresses, got 5"),
        ({"launches": [0] * 9}, "launches: expected more than 9 numbers"),
    ],
)
def test_calls_are_checked(
    change: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.iree_lnbwd.remember(**{**CALL, **change})


@pytest.mark.gpu
def test_a_known_call_does_not_come_to_python() -> None:
    def operators() -> list[str]:
        operands = random_operands(LayerNormSpec((96,), "bf16"), (11,), device="cuda")
        output = operands.forward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            operands.gradients(output)
        return sorted(e.name for e in profiled.events() if e.name.startswith("iree_lnbwd::layer"))

    ours, checked = "iree_lnbwd::layer_norm_backward", "iree_lnbwd::layer_norm_backward_checked"
    assert operators() == [ours, checked]
    assert operators() == [ours]
