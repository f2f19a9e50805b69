"""Processes that start at once on one empty cache, with PyTorch: one compiles the C++ for all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
from ranks import run

RANKS = 8
IMPORTS = """
import logging
logging.basicConfig(format="%(message)s")
import torch
import iree_lnbwd.torch as norms
from iree_lnbwd.torch import native
builds, build = [], native._build_and_load

def counted():
    builds.append(1)
    return build()

native._build_and_load = counted
"""
pytestmark = pytest.mark.builds

# A step of a norm; whether C++ was there, how often it was built here, and the gradient's error.
WORK = """
has_cpp = native.load()
x = torch.randn(33, 48, requires_grad=True, generator=torch.Generator().manual_seed(0))
y = x.detach().double().requires_grad_()
norms.layer_norm(x, 48).sin().sum().backward()
torch.nn.functional.layer_norm(y, [48]).sin().sum().backward()
error = (x.grad - y.grad).abs().max().item()
print(json.dumps([has_cpp, len(builds), error < 1e-5]))
"""


@pytest.mark.slow
def test_the_operators_are_compiled_once(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler or no ninja on PATH")
    cache = tmp_path / "cache"
    ranks = run(WORK, RANKS, imports=IMPORTS, IREE_LNBWD_CACHE=str(cache))
    assert sorted(rank.said for rank in ranks) == [
        *[[True, 0, True]] * (RANKS - 1),
        [True, 1, True],
    ]
    said = [line for rank in ranks for line in rank.stderr.splitlines()]
    assert sum(line.startswith("compiling torch_native.cpp") for line in said) == 1
    waited = sum(line.startswith("another process compiles torch_native.cpp") for line in said)
    assert waited == RANKS - 1
    assert sorted(path.suffix for path in (cache / "torch").rglob("*.*")) == [".sha256", ".so"]


@pytest.mark.slow
def test_without_a_cpp_compiler(tmp_path: Path) -> None:
    """The operators stay in Python, and each process says so once."""
    cache = tmp_path / "cache"
    ranks = run(WORK, RANKS, imports=IMPORTS, IREE_LNBWD_CACHE=str(cache), CXX="no-such-compiler")
    assert [rank.said for rank in ranks] == [[False, 1, True]] * RANKS
    for rank in ranks:
        assert (
            rank.stderr.count("the C++ operators could not be built; using the slower Python ones")
            == 1
        )
    assert not (cache / "torch").exists()
