"""The wheel holds all that an installation needs, and works from where it is unpacked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec

REPOSITORY = Path(lnbwd.__file__).parent.parent
PACKAGE = REPOSITORY / "iree_lnbwd"
URL = "https://example.org/iree-lnbwd"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    words = ["pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", folder]
    words += [REPOSITORY, REPOSITORY / "packaging" / "runtime"]
    command = [sys.executable, "-m", *map(str, words)]
    build = subprocess.run(
        command,
        env={**os.environ, "IREE_LNBWD_URL": URL},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(wheels: Path) -> Path:
    (made,) = wheels.glob("iree_lnbwd-*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python_there(unpacked: Path, script: str, **env: str) -> str:
    """What a script prints where the package is the unpacked one."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=unpacked.parent,
        env={**os.environ, "PYTHONPATH": str(unpacked), **env},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_name(wheel: Path) -> None:
    assert wheel.name == f"iree_lnbwd-{lnbwd.__version__}-py3-none-any.whl"


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "ir").glob("*.mlir")))
def test_ir_is_inside(name: str, unpacked: Path) -> None:
    assert (unpacked / "iree_lnbwd" / "_ir" / name).read_bytes() == (
        REPOSITORY / "ir" / name
    ).read_bytes()


def test_everything_of_the_package_is_inside(unpacked: Path) -> None:
    ours = {
        path.relative_to(REPOSITORY)
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {
        Path("iree_lnbwd/py.typed"),
        Path("iree_lnbwd/data/training_step.npz"),
        Path("iree_lnbwd/schedules/data/h200.csv"),
    } <= ours
    for path in ours:
        assert (unpacked / path).read_bytes() == (REPOSITORY / path).read_bytes(), path


def test_nothing_else_is_inside(unpacked: Path) -> None:
    assert {path.name for path in unpacked.iterdir()} == {
        "iree_lnbwd",
        "iree_lnbwd_autoload.py",
        f"iree_lnbwd-{lnbwd.__version__}.dist-info",
    }


def test_the_distribution_without_the_compiler_is_the_same_package(
    wheel: Path, wheels: Path
) -> None:
    (runtime,) = wheels.glob("iree_lnbwd_runtime-*.whl")
    contents, described = [], []
    for path in (wheel, runtime):
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
        described.append(Parser().parsestr(files[f"{info}/METADATA"].decode()))
        contents.append({n: data for n, data in files.items() if not n.startswith(info)})
    assert contents[1].pop("iree_lnbwd/LICENSE") == (REPOSITORY / "LICENSE").read_bytes()
    assert contents[0] == contents[1]
    needed = [set(one.get_all("Requires-Dist", [])) for one in described]
    unconditional = {name for name in needed[0] if "extra ==" not in name}
    (compiler,) = unconditional - needed[1]
    assert compiler.startswith("iree-base-compiler==")
    assert needed[1] < unconditional
    for field in ("Version", "Requires-Python", "License-Expression"):
        assert described[0][field] == described[1][field]


def test_metadata(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert metadata["Version"] == lnbwd.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").is_file()
    assert (info / "entry_points.txt").read_text().split() == [
        "[console_scripts]",
        "iree-lnbwd",
        "=",
        "iree_lnbwd.cli:main",
        "[torch.backends]",
        "iree_lnbwd",
        "=",
        "iree_lnbwd_autoload:load",
    ]


def test_links_lead_somewhere_outside_of_the_repository(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert f"Repository, {URL}" in metadata.get_all("Project-URL", [])
    shown = str(metadata.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", shown)
    tag = f"v{lnbwd.__version__}"
    image = f"{URL}/raw/{tag}/scripts/results/h200/backward.png"
    assert ("!", image) in links
    assert ("", f"{URL}/blob/{tag}/docs/pytorch.md") in links
    for _, link in links:
        assert link.startswith(("https://", "#")), link
        path = link.partition(f"/{tag}/")[2].partition("#")[0]
        assert not path or (REPOSITORY / path).exists(), link


@pytest.mark.drawn
def test_compiles_what_the_checkout_does(unpacked: Path, tmp_path: Path) -> None:
    here = lnbwd.compile(NormSpec((8,)), "generic", tmp_path / "here")
    script = (
        "import iree_lnbwd as l\n"
        f"l.compile(l.NormSpec((8,)), 'generic', {str(tmp_path / 'there')!r})\n"
        "print(l.__file__)"
    )
    assert python_there(unpacked, script) == str(unpacked / "iree_lnbwd" / "__init__.py")
    for path in (here.path, here.manifest_path):
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()


def test_verifies_on_the_tensors_it_carries(unpacked: Path) -> None:
    script = "from iree_lnbwd.cli import main; print(main(['verify']))"
    said = python_there(unpacked, script).splitlines()
    assert said[-1] == "0"
    assert said[-2].startswith("passed: ")
