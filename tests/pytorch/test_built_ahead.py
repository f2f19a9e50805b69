"""The wheel of a release has the C++ operators; nothing is compiled, and no compiler is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

import iree_lnbwd as lnbwd

REPOSITORY = Path(lnbwd.__file__).parent.parent

pytestmark = pytest.mark.slow

USE = """
import logging, sys
logging.basicConfig(format="%(message)s")
import torch, iree_lnbwd
from iree_lnbwd.torch import enable, native, status
print(iree_lnbwd.__file__)
print(native.can_be_had(), native.load(), "in place" in str(status()))
norm, x = torch.nn.LayerNorm(16), torch.arange(32.0).reshape(2, 16).requires_grad_()
def gradient():
    return torch.autograd.grad(norm(x).sin().sum(), x)[0]
expected = gradient()
enable()
print((gradient() - expected).abs().max().item() < 1e-5)
print(sys.exc_info()[0])
"""


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the library for the PyTorch that is installed."""
    if not all(map(shutil.which, (os.environ.get("CXX", "c++").split()[0], "nm", "objdump"))):
        pytest.skip("no C++ compiler or no binutils on PATH")
    folder = tmp_path_factory.mktemp("ahead")
    ahead = folder / "libraries"
    words = [sys.executable, REPOSITORY / "scripts" / "build_ahead", ahead]
    subprocess.run([*map(str, words), str(Path(torch.__file__).parent)], check=True)
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    build = ["pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", folder, REPOSITORY]
    environment = {**os.environ, "IREE_LNBWD_PREBUILT": str(ahead)}
    subprocess.run([sys.executable, "-m", *map(str, build)], env=environment, check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture
def unpacked(wheel: Path, tmp_path: Path) -> Path:
    return unpack(wheel, tmp_path / "unpacked")


def used(unpacked: Path) -> tuple[list[str], str]:
    """What the script prints, and what is logged, where there is no compiler."""
    environment = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    environment |= {
        "PATH": str(unpacked / "no-tools"),
        "PYTHONPATH": str(unpacked),
        "IREE_LNBWD_CACHE": str(unpacked.parent / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=unpacked.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    package, *said = ended.stdout.splitlines()
    assert package == str(unpacked / "iree_lnbwd" / "__init__.py")
    return said, ended.stderr


IN_CPP = ["True True True", "True", "None"]
IN_PYTHON = ["False False False", "True", "None"]


def test_the_wheel_names_its_platform(wheel: Path) -> None:
    assert wheel.name.endswith(f"_{os.uname().machine}.whl")
    assert "-py3-none-manylinux_2_" in wheel.name


def test_they_are_there_without_a_compiler(unpacked: Path) -> None:
    for _ in range(2):  # the first process keeps what it found
        said, logged = used(unpacked)
        assert said == IN_CPP, logged
        assert "compiling torch_native" not in logged
    (library,) = (unpacked.parent / "cache" / "torch").rglob("*.so")
    (ahead,) = (unpacked / "iree_lnbwd" / "native" / "built_ahead").glob("*.so")
    assert library.read_bytes() == ahead.read_bytes()


@pytest.mark.parametrize("name", ["headers_digest", "sources", "machine", "library", "symbols"])
def test_what_does_not_fit_is_not_loaded(name: str, unpacked: Path) -> None:
    (described,) = (unpacked / "iree_lnbwd" / "native" / "built_ahead").glob("*.json")
    said = json.loads(described.read_text())
    said[name] = [*said[name], "no_such@GLIBC_9.99"] if name == "symbols" else "another"
    described.write_text(json.dumps(said))
    said, logged = used(unpacked)
    assert said == IN_PYTHON
    assert "the C++ operators could not be built; using the slower Python ones: " in logged


def test_what_was_compiled_from_other_sources_is_not_loaded(unpacked: Path) -> None:
    source = unpacked / "iree_lnbwd" / "native" / "torch_calls.h"
    source.write_text(source.read_text() + "// changed\n")
    assert used(unpacked)[0] == IN_PYTHON
