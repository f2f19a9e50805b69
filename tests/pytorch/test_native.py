"""The C++ operators: built or done without, and told of calls.

That they compute the same is what the other tests of this folder say with ``--cpp-operators``, and
wherever there is a GPU.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

from iree_lnbwd.torch import native
from iree_lnbwd.torch.operator_table import ALL_GRADIENTS, ALL_NORMS, NAMESPACE
from iree_lnbwd.vmfb import artifact

pytestmark = pytest.mark.builds

WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="%(message)s")
from iree_lnbwd.torch import native
from iree_lnbwd.torch import layer_norm
print(native.load())
x = torch.ones(2, 8, requires_grad=True)
layer_norm(x, 8).backward(torch.ones(2, 8))
print(x.grad.abs().max().item())
"""

LOAD = """
import logging
logging.basicConfig(format="%(message)s")
from iree_lnbwd.torch import native
print(native.load())
"""

PLANTED = '__attribute__((constructor)) void f() { fclose(fopen(getenv("PLANTED"), "w")); }'

# A layer norm of one row of one column.
CALL: dict[str, Any] = {
    "op": 0,
    "tensors": [torch.ones(1, 1), None, None, None],
    "normalized_shape": [1],
    "mask": [],
    "eps": 1.0,
    "weight_offset": 0.0,
    "result_dtype": None,
    "rows_per_set": None,
    "driver": [0] * 5,
    "ones": 0,
    "scratch_bytes": 0,
    "scratch": [],
    "launches": [],
    "graph": [],
}


def test_without_a_compiler_they_stay_in_python(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environment = {
        **os.environ,
        "CXX": "no-such-compiler",
        "IREE_LNBWD_CACHE": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "temporary"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["False", "0.0"], ended.stderr
    assert "the C++ operators could not be built; using the slower Python ones: " in ended.stderr
    assert not (tmp_path / "cache" / "torch").exists()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_build_says_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it begins, about, and when it is done."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_build_and_load", lambda: b"a library")
    monkeypatch.setattr(native, "_put_in_place", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert native._loaded.__wrapped__() == (True, None)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.endswith(
        f"for PyTorch {torch.__version__}: once, and usually for ten to forty seconds"
    )
    names = re.escape("torch_native.cpp, torch_overrides.cpp, torch_python.cpp")
    assert re.fullmatch(rf"compiling {names} .* took \d+ s", last)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Path:
    """A cache that holds the operators; with ``--cpp-operators`` all of the tests run on them."""
    if shutil.which(os.environ.get("CXX", "c++")) is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler or no ninja on PATH")
    cache: Path = request.getfixturevalue("built_operators")
    return cache


def loaded_without_a_compiler(cache: Path, **variables: str) -> bool:
    """Whether they were there. The process must not end of it."""
    variables |= {"CXX": "no-such-compiler", "IREE_LNBWD_CACHE": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout == "True\n"


def test_they_are_built_once(built: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    assert loaded_without_a_compiler(built)
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


@pytest.mark.drawn
@pytest.mark.parametrize("size", [0, 1000, -1])
def test_a_damaged_library_is_not_loaded(size: int, built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "cache")
    (library,) = tmp_path.rglob("*.so")
    os.truncate(library, size if size >= 0 else library.stat().st_size - 1)
    assert not loaded_without_a_compiler(tmp_path / "cache")


@pytest.mark.drawn
@pytest.mark.parametrize("which", ["nobody", "cache", "torch", "entry", "library", "digest"])
def test_a_library_that_others_can_have_planted_is_not_loaded(
    which: str, built: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(built, cache)
    (library,) = cache.rglob("*.so")
    (digest,) = cache.rglob("*.sha256")
    source = tmp_path / "planted.c"
    source.write_text(f"#include <stdio.h>\n#include <stdlib.h>\n{PLANTED}\n")
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler on PATH")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    digest.write_text(artifact.digest(library.read_bytes()))
    what = {"cache": cache, "torch": cache / "torch", "entry": library.parent}
    what |= {"library": library, "digest": digest}
    if which in what:
        what[which].chmod(0o777)
    loaded = loaded_without_a_compiler(cache, PLANTED=str(tmp_path / "it ran"))
    assert (tmp_path / "it ran").exists() == (which == "nobody")
    assert not loaded  # it has no operators


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": 99}, "op: expected the number of an op that was described, got 99"),
        ({"tensors": [torch.ones(1, 1)]}, "tensors: expected 4 of layer_norm, got 1"),
        ({"tensors": [None] * 4}, "tensors: expected input among them, got none"),
        ({"mask": [True] * 4}, "output_mask: expected 0 bools, got 4"),
        ({"driver": [0] * 4}, "driver: expected 5 addresses, got 4"),
        ({"graph": [1, 2]}, "driver: expected 8 addresses, got 5"),
        ({"launches": [0] * 9}, "launches: expected more than 9 numbers"),
        ({"driver": [], "launches": [0] * 4}, "launches: expected more than 4 numbers"),
        ({"driver": [], "launches": [0] * 9}, "launches: expected 1 to 16 pointers, got 0"),
        (
            {"driver": [], "launches": [0, 1, 1, 1, 17]},
            "launches: expected 1 to 16 pointers, got 17",
        ),
        (
            {"driver": [], "launches": [0, 1, 1, 1, 1, 0, 4, 0]},
            "launches: expected a kernel of a loaded library",
        ),
    ],
)
def test_calls_are_checked(
    change: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.iree_lnbwd.remember(**{**CALL, **change})


def test_no_operator_is_left_in_python(request: pytest.FixtureRequest) -> None:
    """Each has kernels of C++ for the CPU and for GPUs, and each norm a node of autograd's."""
    if not request.config.getoption("--cpp-operators"):
        pytest.skip("for --cpp-operators")
    norms, gradients = ({each.name for each in table} for table in (ALL_NORMS, ALL_GRADIENTS))
    there = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in (*norms, *gradients):
        keys = ["CPU", "CUDA", *(["AutogradCPU", "AutogradCUDA"] if name in norms else [])]
        assert all(there(f"{NAMESPACE}::{name}", key) for key in keys), name
    public = {
        name
        for name, *suffix in (s.name.partition("::")[2].partition("_checked") for s in schemas())
        if any(suffix)
    }
    assert public == norms | gradients


def schemas() -> list[torch.FunctionSchema]:
    """Of our namespace."""
    every = torch._C._jit_get_all_schemas()
    return [schema for schema in every if schema.name.startswith(f"{NAMESPACE}::")]


ERROR = """
import logging
logging.basicConfig(format="%(message)s")
import torch
from iree_lnbwd.torch import native
assert native.load()
try:
    torch.ops.iree_lnbwd.register_gradients("nothing", 99, False)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.slow
def test_a_static_cpp_library_stays_apart(tmp_path: Path) -> None:
    """As where a compiler has no other: an error is an error, and its message has its number."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("ninja") is None:
        pytest.skip("no C++ compiler or no ninja on PATH")
    static = tmp_path / "c++"
    static.write_text(f'#!/bin/sh\nexec {compiler} -static-libstdc++ "$@"\n')
    static.chmod(0o755)
    cache = tmp_path / "cache"
    ended = subprocess.run(
        [sys.executable, "-c", ERROR],
        env={**os.environ, "CXX": str(static), "IREE_LNBWD_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "op: expected the number of an op that was described, got 99\n"
    assert ended.stdout == expected, ended.stderr
