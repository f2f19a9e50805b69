"""Each page of the manual, followed in a fresh clone by someone who has just what the page says.

The environment has the package, and of its extras those that the page says to install. A block that
needs more fails. Where there is no clone and no index of packages, nothing can be followed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import documented_pages
import pytest
from documented_pages import ROOT, blocks, pages

FOLLOWED = [page for page in pages() if any(block.is_followed for block in blocks(page))]
# How this machine reaches its index of packages, and nothing of the environment of the tests.
_KEPT = re.compile("HOME|PATH|TMPDIR|SSL_CERT_FILE|PYENV_VERSION|PIP_.*")
_INSTALLED = re.compile(r"`pip install (?:-e '\.\[(\w+)\]'|([^-`][^`]*))`")  # not in a block


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


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_can_be_followed(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--fresh"):
        pytest.skip("for --fresh")
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    run("git", "clone", "--quiet", ROOT, clone, folder=tmp_path)
    run(sys.executable, "-m", "venv", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet")
    for named in (["-e", "."], *(["-e", each] for each in said_to_install(page) if each[0] == ".")):
        run(*install, *named, folder=clone)
    if others := [each for each in said_to_install(page) if each[0] != "."]:
        run(*install, *" ".join(others).split(), folder=clone)
    run(
        python,
        documented_pages.__file__,
        page,
        "--all",
        folder=clone,
        IREE_LNBWD_CACHE=str(tmp_path / "cache"),
    )
