"""The manual: every code block of its pages runs, and prints what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import documented_pages
import pytest
from documented_pages import ROOT, Block, PageError, blocks, expect_printed, pages

CHECKED = [block for page in pages() for block in blocks(page) if block.is_checked]
NOT_HERE = [block for block in CHECKED if block.lacks]
RUN = sorted({block.page for block in CHECKED if not block.lacks})
README = ROOT / "README.md"


def _run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return subprocess.run(
        [sys.executable, documented_pages.__file__, str(page)],
        cwd=folder,
        # PyTorch's operators in C++ are taken if the cache has them. Others test their build.
        env=os.environ | {"CXX": "no-compiler"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.drawn] if page != README else []) for page in RUN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run = _run(page, tmp_path)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("block", NOT_HERE, ids=str)
def test_what_is_not_run(block: Block) -> None:
    assert block.lacks is not None
    pytest.skip(block.lacks)


def test_there_are_pages() -> None:
    assert len(pages()) > 15
    assert len(CHECKED) - len(NOT_HERE) > 20


@pytest.mark.parametrize(
    "page",
    [
        "```python\n1 / 0\n```\n",
        "```pycon\n>>> 1 + 1\n3\n```\n",
        "```sh\nfalse\n```\n",
        "```console\n$ echo a\nb\n```\n",
        "```console\n$ echo a\n$ false\n```\n",
        "```console\nno command\n```\n",
        "```python\nprint(1)\n```\n\n<!-- prints -->\n```text\n2\n```\n",
        "```\nwithout a language\n```\n",
        "<!-- needs: luck -->\n```python\npass\n```\n",
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(page, encoding="utf-8")
    assert _run(file, tmp_path).returncode == 1


def test_blocks_run_in_order_with_the_same_names(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "```python\nx = 1\nprint(x)\n```\n\n<!-- prints -->\n```text\n1\n```\n\n"
        "```pycon\n>>> y = x + 1\n```\n\n```sh\necho 7 > seven\n```\n\n"
        '```python\nassert y == 2\nassert open("seven").read() == "7\\n"\n```\n'
        "<!-- needs: minutes -->\n```sh\nfalse\n```\n",
        encoding="utf-8",
    )
    run = _run(file, tmp_path)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("a  b\n-----", "a b\n---------"),
        ("took 5.4 s", "took 12.25 s"),
        ("1.2e-07 ok", "3.45e-10 ok"),
        ("a\n...\nd", "a\nb\nc\nd\n"),
        ("x ... z", "x y z"),
        ("a\nb", "a\niree-lnbwd: emulating rows: 5 workgroups of 64 threads\nb"),
    ],
)
def test_what_varies_is_not_compared(expected: str, printed: str) -> None:
    expect_printed(expected, printed)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("343 of 343", "342 of 343"),
        ("took 5.4 s", "took 5.4 s\nand more"),
        ("1.2 ok", "1.2 no"),
        ("x ... z", "x y\nz"),
        ("version 3.13.0", "version 3.13.1"),
    ],
)
def test_what_differs_is_found(expected: str, printed: str) -> None:
    with pytest.raises(PageError):
        expect_printed(expected, printed)
