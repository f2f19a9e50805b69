"""``iree-lnbwd report``: each step is a process, and what becomes of it is in the file."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from iree_lnbwd import cli
from iree_lnbwd.cli import report
from iree_lnbwd.cli.command import _parser
from iree_lnbwd.hardware.devices import DeviceUri

HOST = DeviceUri.parse("local-task")
# Python runs it when it starts: what a step's process does, by its first word.
SITE = """
import os, signal, sys, time
if "run" in sys.orig_argv:
    print("before the end", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if "tuned" in sys.orig_argv:
    time.sleep(60)
"""


def steps(monkeypatch: pytest.MonkeyPatch, folder: Path, *each: tuple[str, ...]) -> None:
    """These steps, in processes of which some crash or hang."""
    (folder / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(report, "_steps", lambda uri, temporary: iter(each))
    monkeypatch.setattr(report, "_SECONDS", 5.0)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("words", "status", "how"),
    [
        (("targets",), 0, "status 0"),
        (("inspect", "nothing.vmfb"), 2, "status 2"),
        (("run", "a", "b"), 2, signal.SIGSEGV.name),
        (("tuned", "list"), 2, "ended after it took too long"),
    ],
)
def test_a_step(
    words: tuple[str, ...],
    status: int,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A crash and a hang end a step, and the next one runs."""
    steps(monkeypatch, tmp_path, words, ("targets",))
    file = tmp_path / "report.md"
    assert cli.main(["report", "--device=local-task", "-o", str(file)]) == status
    text = file.read_text()
    assert text.startswith("# iree-lnbwd on local-task\n\n- device: ")
    found = re.findall(r"^## iree-lnbwd (.*)\n\n(.*?), \d+ s$", text, re.MULTILINE)
    assert found == [(" ".join(words), how), ("targets", "status 0")]
    assert "generic-aarch64" in text
    if how == "SIGSEGV":
        assert "before the end" in text
    assert capsys.readouterr().out.endswith(f"2 steps, {int(status != 0)} failed\n")


def test_a_wrong_result_decides_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, tmp_path, ("a",), ("b",), ("c",))
    ended = iter([(0, "status 0", ""), (1, "status 1", "MISS"), (2, "status 2", "")])
    monkeypatch.setattr(report, "_ended", lambda step: next(ended))
    assert cli.main(["report", "--device=local-task", "-o", str(tmp_path / "r.md")]) == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps(monkeypatch, tmp_path, ("targets",))
    assert cli.main(["report", "-o", str(tmp_path / "no" / "r.md")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(tmp_path / "no") in printed.err


@pytest.mark.parametrize("device", ["local-task", "cuda", "hip"])
def test_the_steps_are_commands(device: str, tmp_path: Path) -> None:
    """On a device that is absent, too, they can be parsed."""
    found = list(report._steps(DeviceUri.parse(device), str(tmp_path)))
    assert len(found) >= 10
    for words in found:
        assert callable(_parser().parse_args(list(words)).command)


def test_what_is_compiled_is_inspected(tmp_path: Path) -> None:
    compiling, inspecting = list(report._steps(HOST, str(tmp_path)))[-2:]
    assert cli.main(compiling) == 0
    assert cli.main(inspecting) == 0
