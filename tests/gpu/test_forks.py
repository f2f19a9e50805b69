"""A child of fork ends by itself; CUDA and HIP do not work in it, which one error says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from iree_lnbwd.hardware.devices import DeviceUri

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.gpu

SCRIPT = """
import os, signal, sys
import numpy as np
import torch
import iree_lnbwd as lnbwd

x = np.arange(24, dtype=np.float32).reshape(3, 8)

def on_arrays():
    return lnbwd.layer_norm_backward(x, x, 8, device=sys.argv[1]).grad_bias.tolist()

def on_tensors():
    tensor = torch.tensor(x, device="cuda")
    return lambda: lnbwd.layer_norm_backward(tensor, tensor, 8).grad_bias.tolist()

call = {call}
expected = call()
child = os.fork()
if child == 0:
    signal.alarm(60)  # what hangs is killed
    {body}
    sys.exit(0)
status = os.waitpid(child, 0)[1]
assert call() == expected
assert status == 0, status
"""
CHILDREN = {
    "ends": "pass",
    "ends at once": "os._exit(0)",
    "calls": """try:
        call()
    except lnbwd.DeviceError as error:
        assert "was in use when this process was forked" in str(error), error
    else:
        raise AssertionError("no error")""",
    "calls on the CPU": """x = x[:, :5].copy()
    assert lnbwd.layer_norm_backward(x, x, 5).grad_bias.shape == (5,)""",
}


@pytest.mark.parametrize("call", ["on_arrays", "on_tensors()"])
@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN)
def test_a_child_of_fork(body: str, call: str, gpu: DeviceUri) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore:This process:DeprecationWarning",
            "-c",
            SCRIPT.format(call=call, body=body),
            str(gpu),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
