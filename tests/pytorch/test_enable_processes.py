"""Kernels of ours in programs that one cannot edit, in children of fork, and without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import iree_lnbwd

ROOT = Path(iree_lnbwd.__file__).parent.parent

# A program that knows nothing of this package; what it says at its end is the test's.
PROGRAM = """
import torch
x = torch.ones(4, 10, requires_grad=True)
torch.nn.LayerNorm(10)(x).square().sum().backward()
print(x.grad.shape == x.shape)
"""
SAYS = """
import sys
lnbwd = sys.modules.get("iree_lnbwd.torch")
print(None if lnbwd is None else lnbwd.overrides.status().enabled)
"""


def run(program: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which must end well."""
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, ROOT)))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that says what an installed package would: its entry point."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (group,) = project["entry-points"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    folder = tmp_path / "site" / "iree_lnbwd-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: iree-lnbwd\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join((f"[{group}]", *lines)))
    return folder.parent


@pytest.mark.parametrize("value", ["0", "yes"])
def test_without_the_variable_nothing_is_imported(value: str, installed: Path) -> None:
    ended = run(PROGRAM + SAYS, installed, IREE_LNBWD_ENABLE=value)
    assert ended.stdout.split() == ["True", "None"]
    said = "IREE_LNBWD_ENABLE: expected 1, forwards, 0 or nothing, got 'yes'"
    assert (said in ended.stderr) == (value == "yes")
    assert value == "yes" or not ended.stderr


@pytest.mark.parametrize("first", ["", "import iree_lnbwd.torch"])
def test_a_program_that_one_cannot_edit(
    first: str, installed: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    ended = run(first + PROGRAM + SAYS, installed, IREE_LNBWD_ENABLE="1")
    assert ended.stdout.split() == ["True", "True"]
    assert ended.stderr in ("", "compiling layer_norm_backward_n10_f32 for host\n")


WITHOUT_COMPILER = """
import logging
logging.basicConfig(format="%(message)s")
import iree_lnbwd.torch
iree_lnbwd.torch.enable()
"""


def test_without_a_cpp_compiler(tmp_path: Path) -> None:
    """Training goes on with PyTorch's kernels, and the reason is told once."""
    (tmp_path / "tmp").mkdir()
    says = "print(iree_lnbwd.torch.status())"
    ended = run(
        WITHOUT_COMPILER + PROGRAM + PROGRAM + says,
        CXX="no-such-compiler",
        IREE_LNBWD_CACHE=str(tmp_path / "cache"),
        TMPDIR=str(tmp_path / "tmp"),
    )
    assert ended.stdout.startswith("True\nTrue\nenabled: yes, but no kernel is iree-lnbwd's\n")
    (line,) = re.findall("^aten::native_layer_norm_backward +cpu .*$", ended.stdout, re.MULTILINE)
    assert line.endswith("the C++ kernels could not be built; the log says why")
    assert ended.stderr.count("PyTorch's own kernels of norms stay: ours in C++ could not") == 1


# One thread, because PyTorch's own kernels hang in such a child if they had several before.
FORK = """
import os, signal, sys
import torch
import iree_lnbwd.torch as lnbwd
torch.set_num_threads(1)
lnbwd.enable()

def step():
    x = torch.arange(40.0).view(4, 10).requires_grad_()
    torch.nn.functional.layer_norm(x, (10,)).square().sum().backward()
    return x.grad

expected = step()
child = os.fork()
if child == 0:
    signal.alarm(60)  # what hangs is killed
    lnbwd.disable()
    lnbwd.enable()
    os._exit(0 if torch.equal(step(), expected) and lnbwd.status().ours == 1 else 1)
print(os.waitpid(child, 0)[1], torch.equal(step(), expected), lnbwd.status().ours)
"""


def test_a_child_of_fork(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    assert run(FORK).stdout.split() == ["0", "True", "2"]


# What a program registers before it imports PyTorch comes last of all at exit.
AT_EXIT = """
import atexit
def step():
    x = torch.arange(40.0).view(4, 10).requires_grad_()
    torch.nn.functional.layer_norm(x, (10,)).square().sum().backward()
    y = torch.arange(40.0).view(4, 10).requires_grad_()
    lnbwd.layer_norm(y, (10,)).square().sum().backward()
    lnbwd.rms_norm(y, (10,)).sum().backward()
    print(torch.isfinite(x.grad + y.grad).all().item(), lnbwd.status().ours)
atexit.register(step)
import torch
import iree_lnbwd.torch as lnbwd
lnbwd.enable()
"""


@pytest.mark.parametrize("before", ["", "step()"])
def test_norms_when_a_process_ends(before: str, request: pytest.FixtureRequest) -> None:
    is_ours = request.config.getoption("--cpp-operators")
    steps = 2 if before else 1
    expected = [f"True {step if is_ours else 0}" for step in range(1, steps + 1)]
    assert run(AT_EXIT + before).stdout.splitlines() == expected
