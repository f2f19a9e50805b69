"""The code blocks of a page of the manual, run in order in one folder, as a reader would.

    python documented_pages.py PAGE
    python documented_pages.py PAGE --all    # what takes minutes, too; nothing may be missing

- ``python`` blocks share their names. ``pycon`` blocks are sessions (doctest), with the same names.
- ``sh`` blocks end with status 0.
- ``console`` blocks are transcripts: each line after a dollar runs; what it prints is compared.
- ``text`` blocks are not run. After ``<!-- prints -->`` they are what the Python above printed.
- ``<!-- needs: torch -->`` above a block says what it is skipped without (`NEEDS`).

In what is printed, ``...`` stands for anything, on a line of its own for any lines. Numbers with a
decimal point are measured, so any other such number is as good. The width of columns and rules does
not count, nor does what a command says meanwhile where it takes seconds.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# What a block may need, and the reason to skip it, if there is one.
NEEDS = {
    "torch": None if importlib.util.find_spec("torch") else "PyTorch is not installed",
    "jax": None if importlib.util.find_spec("jax") else "JAX is not installed",
    "flax": None if importlib.util.find_spec("flax") else "Flax is not installed",
    "equinox": None if importlib.util.find_spec("equinox") else "Equinox is not installed",
    "minutes": "it takes minutes",
    "gpu": "no page is run on a GPU",
    "aarch64": "it needs programs for AArch64, and qemu",
    "tests": ".ci/run begins with it",
}
_NEVER = ("gpu", "aarch64", "tests")
_RUN = ("python", "pycon", "sh", "console")
_SHOWN = ("text",)
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>.*?) -->\n)?"
    r"^(?P<fence>```+)(?P<language>.*)\n(?P<text>(?:.*\n)*?)^(?P=fence)$",
    re.MULTILINE,
)
_NUMBER = r"\d+\.\d+(?:e[-+]\d+)?"
_VARIES = re.compile(rf"(\.\.\.|{_NUMBER})")
_MEANWHILE = re.compile(r"^iree-lnbwd: emulating .*\n", re.MULTILINE)


class PageError(Exception):
    """A block did not do what the page says."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The file.
        line: Of the fence.
        language: After the fence.
        text: Between the fences.
        needs: What it needs; what is printed needs what the block above it needs.
        is_printed: Whether it is what the Python above printed.
    """

    page: Path
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    is_printed: bool = False

    @property
    def is_checked(self) -> bool:
        """Whether anything is run or compared."""
        return self.language in _RUN or self.is_printed

    @property
    def lacks(self) -> str | None:
        """Why it cannot be run here."""
        return next((NEEDS[need] for need in self.needs if NEEDS[need]), None)

    @property
    def is_followed(self) -> bool:
        """Whether someone who follows the page on a machine without a GPU runs it."""
        return self.is_checked and not {*self.needs} & {*_NEVER}

    def __str__(self) -> str:
        """Where it is."""
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """The pages of the manual; those of Sphinx's reference alone have no code to run.

    The commands of reports on IREE are run by ``e2e/test_upstream.py``.
    """
    others = ("README.md", "ir/README.md", "scripts/results/README.md", "CHANGELOG.md")
    emulator = (ROOT / "iree_lnbwd" / "emulator").rglob("README.md")
    own = (page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "upstream")
    return sorted([*own, *emulator, *(ROOT / name for name in others)])


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, but for Sphinx's directives.

    Raises:
        PageError: A block has no language, or a note that means nothing.
    """
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("fence")) + 1
        language, note = match["language"], match["note"]
        if language.startswith("{"):
            continue
        needs = note[len("needs: ") :].split(", ") if note and note.startswith("needs: ") else []
        unknown = [need for need in needs if need not in NEEDS]
        if language not in (*_RUN, *_SHOWN) or unknown or (note and not needs and note != "prints"):
            raise PageError(f"{page.name}:{line}: expected a known language and note")
        is_printed = note == "prints"
        needed = found[-1].needs if is_printed and found else tuple(needs)
        found.append(Block(page, line, language, match["text"], needed, is_printed))
    return found


def expect_printed(expected: str, printed: str) -> None:
    """Compares what was printed with what a page says.

    Raises:
        PageError: They differ.
    """
    pattern = "".join(_pattern(line) for line in _plain(expected).splitlines())
    if not re.fullmatch(pattern, _plain(_MEANWHILE.sub("", printed))):
        raise PageError(f"expected\n{expected}\ngot\n{printed}")


def _plain(text: str) -> str:
    text = re.sub(r"-{3,}", "---", re.sub(r"[ \t]+", " ", text))
    return "".join(f"{line.strip()}\n" for line in text.strip().splitlines())


def _pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*?"
    words = _VARIES.split(line)  # in turn what is fixed and what varies
    fixed = map(re.escape, words[::2])
    varying = (".*" if word == "..." else _NUMBER for word in words[1::2])
    pairs = itertools.zip_longest(fixed, varying, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs)) + r"\n"


class _Reader:
    """Runs blocks one after the other, in the current folder."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""

    def run(self, block: Block) -> None:
        """Runs or compares one.

        Raises:
            PageError: It did not do what the page says.
        """
        if block.is_printed:
            expect_printed(block.text, self.printed)
        elif block.language == "python":
            self._python(block)
        elif block.language == "pycon":
            self._session(block)
        elif block.language == "sh":
            _shell(block.text)
        else:
            for command, output in _transcript(block.text):
                expect_printed(output, _shell(command))

    def _python(self, block: Block) -> None:
        # Lines before it, so that an error names the page's own line.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.names)
        self.printed = printed.getvalue()

    def _session(self, block: Block) -> None:
        examples = doctest.DocTestParser().get_doctest(
            block.text, self.names, str(block), str(block.page), block.line
        )
        said = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        if runner.run(examples, out=said.write, clear_globs=False).failed:
            raise PageError(said.getvalue())
        self.names.update(examples.globs)


def _transcript(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a transcript, and what it prints."""
    if not text.startswith("$ "):
        raise PageError("expected a line that begins with a dollar")
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def _shell(script: str) -> str:
    # Bash, for a reader's own shell; a terminal shows both streams.
    words = ["bash", "-euo", "pipefail", "-c", script]
    run = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if run.returncode != 0:
        raise PageError(f"{script}\nended with status {run.returncode}:\n{run.stdout}")
    return run.stdout


def main(page: Path, all_of_it: bool) -> None:
    """Runs the blocks of a page: all that can be, or all that are followed."""
    reader = _Reader()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(page):
        if block.is_followed if all_of_it else block.is_checked and not block.lacks:
            print(f"{block}: {block.language}", flush=True)
            reader.run(block)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--all" in sys.argv)
