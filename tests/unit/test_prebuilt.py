"""A library that was built ahead is taken where it fits, and nowhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from iree_lnbwd.native import prebuilt
from iree_lnbwd.native.prebuilt import Prebuilt, fitting, headers_digest, sources_digest
from iree_lnbwd.vmfb.artifact import digest

SOURCES = sources_digest(["int f();", "-O2"])
HEADERS = ("a/b.h", "c.h")
CONTENT = b"a library"


@pytest.fixture
def include(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    (folder / "a").mkdir(parents=True)
    for name in (*HEADERS, "another.h"):
        (folder / name).write_text(f"// {name}")
    return folder


@pytest.fixture
def made(tmp_path: Path, include: Path, monkeypatch: pytest.MonkeyPatch) -> Prebuilt:
    """What fits this process; it is where the wheel has it."""
    (tmp_path / "ahead").mkdir()
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "ahead")
    found = headers_digest(include, HEADERS)
    assert found is not None
    one = Prebuilt(
        built_for="torch-2.13.0",
        machine=os.uname().machine,
        sources=SOURCES,
        headers=HEADERS,
        headers_digest=found,
        libraries=("libc.so.6",),
        symbols=("malloc", "dlopen"),
        library=digest(CONTENT),
    )
    one.write(prebuilt.FOLDER, CONTENT)
    return one


def test_what_fits_is_taken(made: Prebuilt, include: Path) -> None:
    assert fitting("torch-2.13", SOURCES, include) == prebuilt.FOLDER / "torch-2.13.0.so"
    assert Prebuilt.read(prebuilt.FOLDER / "torch-2.13.0.json") == made


def test_a_header_that_it_does_not_read_may_be_another(made: Prebuilt, include: Path) -> None:
    (include / "another.h").write_text("// as in a build for CUDA")
    assert fitting("torch-2.13", SOURCES, include) is not None


@pytest.mark.parametrize("release", ["torch-2.1", "torch-2.12", "torch-2.130", "jax-2.13"])
def test_another_release_is_not_looked_at(release: str, made: Prebuilt, include: Path) -> None:
    assert fitting(release, SOURCES, include) is None


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "another"},
        {"sources": sources_digest(["int f();", "-O3"])},
        {"headers": (*HEADERS, "missing.h")},
        {"headers": HEADERS[::-1]},
        {"libraries": ("libno-such-library.so.1",)},
        {"symbols": ("no_such_symbol",)},
        {"symbols": ("malloc@GLIBC_9.99",)},
        {"symbols": ("malloc@OPENSSL_3.0",)},
        {"library": digest(b"another")},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    change: dict[str, object], made: Prebuilt, include: Path
) -> None:
    replace(made, **change).write(prebuilt.FOLDER, CONTENT)  # type: ignore[arg-type]
    assert fitting("torch-2.13", SOURCES, include) is None


@pytest.mark.parametrize("name", HEADERS)
def test_another_header_is_refused(name: str, made: Prebuilt, include: Path) -> None:
    (include / name).write_text("// another")
    assert fitting("torch-2.13", SOURCES, include) is None
    (include / name).unlink()
    assert fitting("torch-2.13", SOURCES, include) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda library, described: library.write_bytes(CONTENT[:-1]),
        lambda library, described: library.unlink(),
        lambda library, described: described.write_text("{"),
        lambda library, described: described.write_text("[]"),
        lambda library, described: described.write_text("{}"),
        lambda library, described: described.write_bytes(b"\xff"),
    ],
)
def test_what_is_damaged_is_refused(
    damage: Callable[[Path, Path], object], made: Prebuilt, include: Path
) -> None:
    damage(prebuilt.FOLDER / "torch-2.13.0.so", prebuilt.FOLDER / "torch-2.13.0.json")
    assert fitting("torch-2.13", SOURCES, include) is None


def test_of_several_patches_the_one_that_fits_is_taken(made: Prebuilt, include: Path) -> None:
    other = replace(made, built_for="torch-2.13.1", headers_digest=digest(b"others"))
    other.write(prebuilt.FOLDER, CONTENT)
    replace(made, built_for="torch-2.13.2").write(prebuilt.FOLDER, CONTENT)
    (prebuilt.FOLDER / "torch-2.13.0.json").unlink()
    assert fitting("torch-2.13", SOURCES, include) == prebuilt.FOLDER / "torch-2.13.2.so"


def test_a_version_that_this_machine_has_is_taken(made: Prebuilt, include: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm on PATH")
    libc = Path("/proc/self/maps").read_text().split("libc.so.6", 1)[0].rsplit(maxsplit=1)[-1]
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", "--with-symbol-versions", f"{libc}libc.so.6"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (name,) = {w for w in listed.split() if w.startswith("getenv@")}
    replace(made, symbols=(name.replace("@@", "@"),)).write(prebuilt.FOLDER, CONTENT)
    assert fitting("torch-2.13", SOURCES, include) is not None
