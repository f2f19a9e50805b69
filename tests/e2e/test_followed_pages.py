"""Each page of the manual, followed in a fresh clone by someone who has just what the page says.

The environment has the package, and of its extras those that the page says to install. A block that
needs more fails. Where there is no clone and no index of packages, nothing can be followed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import documented_pages
import pytest
from documented_pages import ROOT, blocks, pages

FOLLOWED = [page for page in pages() if any(block.is_followed for block in blocks(page))]
# How this machine reaches its index of packages, and nothing of the environment of the tests.
_KEPT = re.compile("HOME|PATH|TMPDIR|SSL_CERT_FILE|PYENV_VERSION|PIP_.*")
_INSTALLED = re.compile(r"`pip install (?:-e '\.\[(\w+)\]'|([^-`][^`]*))`")  # not in a block


class Place(NamedTuple):
    clone: Path
    python: Path


def said_to_install(page: Path) -> list[str]:
    """What a page says to install, beside the package."""
    text = page.read_text(encoding="utf-8")
    return [f".[{extra}]" if extra else name for extra, name in _INSTALLED.findall(text)]


def run(*words: object, folder: Path, **variables: str) -> None:
    ended = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={name: os.environ[name] for name in os.environ if _KEPT.fullmatch(name)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]


def test_what_a_page_says_to_install_is_found() -> None:
    assert said_to_install(ROOT / "docs" / "pytorch.md")[0] == ".[torch]"
    assert said_to_install(ROOT / "docs" / "jax.md")[0] == ".[jax]"
    assert said_to_install(ROOT / "docs" / "functions.md") == []


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Place]:
    """A clone and an environment for a page; those that say to install the same take turns."""
    made: dict[tuple[str, ...], Place] = {}

    def place(page: Path) -> Place:
        installed = said_to_install(page)
        changes = any("pip install" in block.text for block in blocks(page) if block.is_followed)
        key = (*installed, str(page) if changes else "")
        if key not in made:
            made[key] = new_place(tmp_path_factory.mktemp("reader"), installed)
        return made[key]

    return place


def new_place(folder: Path, installed: list[str]) -> Place:
    place = Place(folder / "clone", folder / "environment" / "bin" / "python")
    run("git", "clone", "--quiet", ROOT, place.clone, folder=folder)
    run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    extras = [word for each in (".", *installed) if each[0] == "." for word in ("-e", each)]
    others = [word for each in installed if each[0] != "." for word in each.split()]
    install = (place.python, "-m", "pip", "install", "--quiet", "--no-compile")
    run(*install, *extras, folder=place.clone)
    if others:
        run(*install, *others, folder=place.clone)
    return place


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_followed(
    page: Path,
    places: Callable[[Path], Place],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--fresh"):
        pytest.skip("for --fresh")
    clone, python = places(page)
    run("git", "clean", "-fdxq", folder=clone)  # what other pages left
    run(
        python,
        documented_pages.__file__,
        page,
        "--all",
        folder=clone,
        IREE_LNBWD_CACHE=str(tmp_path / "cache"),
    )
