"""``iree-lnbwd report``: what a device computes and how fast, in a file to send to somebody."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from iree_lnbwd.benchmark import machine
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import EXIT_ERROR, EXIT_MISS, EXIT_OK, say, show_progress
from iree_lnbwd.disk import files
from iree_lnbwd.errors import DeviceError, counted
from iree_lnbwd.hardware.devices import DeviceUri, fastest_device, target_of
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.vmfb import artifact

_SECONDS = 300.0  # of a step, which may hang the GPU
_SECONDS_TO_END = 10.0
_INSPECTED = NormSpec((4096,), "bf16")


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "report",
        help="verify, time and inspect norms on a device, and write all of it to a file",
        epilog="Each step runs in a process of its own, so a crash is a part of the report.",
    )
    sub.add_argument("--device", help="IREE device URI (default: a GPU if there is one)")
    sub.add_argument(
        "-o",
        "--output",
        type=words.path,
        default=Path("iree-lnbwd-report.md"),
        help="the file (default: iree-lnbwd-report.md)",
    )
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    uri = fastest_device() if options.device is None else DeviceUri.parse(options.device)
    text, statuses = _head(uri), []
    files.write({options.output: text.encode()})  # if that cannot be written, nothing is run
    with tempfile.TemporaryDirectory() as folder:
        steps = list(_steps(uri, folder))
        for number, step in enumerate(steps, 1):
            said = f"iree-lnbwd {' '.join(step)}"
            show_progress(f"{number} of {len(steps)}: {said}")
            status, ended, printed = _ended(step)
            text += f"\n## {said}\n\n{ended}\n\n```text\n{printed.rstrip()}\n```\n"
            files.write({options.output: text.encode(errors="backslashreplace")})
            say(f"{ended:<24}{said}")
            statuses.append(status)
    failed = len(statuses) - statuses.count(EXIT_OK)
    say(f"{options.output}: {counted(len(steps), 'step')}, {failed} failed")
    if failed == 0:
        return EXIT_OK
    return EXIT_MISS if EXIT_MISS in statuses else EXIT_ERROR


def _head(uri: DeviceUri) -> str:
    try:
        facts = machine.device_facts(uri)
    except DeviceError as error:
        facts = {"device": str(error)}
    lines = (f"- {name}: {value}" for name, value in (facts | machine.version_facts()).items())
    return "\n".join((f"# iree-lnbwd on {uri}", "", *lines, ""))


def _steps(uri: DeviceUri, folder: str) -> Iterator[Sequence[str]]:
    """The words of each command."""
    device, wide = f"--device={uri}", "--normalized-shape=4096"
    yield "verify", device
    for op in OPS:
        yield "verify", device, f"--op={op}", wide, "--dtype=bf16"
        yield "verify", device, f"--op={op}", "--normalized-shape=1000", "--rows=1,37,300"
    rows = 512 if uri.backend == "cpu" else 16384
    yield "benchmark", device, wide, f"--rows={rows}", "--dtype=bf16", "--beside=eager"
    try:
        target = target_of(uri).name
    except DeviceError:  # the steps before have said it
        return
    spec = _INSPECTED
    words_of_spec = (f"--op={spec.op}", wide, f"--dtype={spec.dtype}")
    yield "compile", f"--target={target}", *words_of_spec, f"--output-dir={folder}"
    yield "inspect", f"{folder}/{artifact.stem(spec, target)}.vmfb"


def _ended(step: Sequence[str]) -> tuple[int, str, str]:
    """A command's exit status, how it ended, and what it printed to both streams."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "iree_lnbwd.cli", *step],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            status, how = EXIT_ERROR, "ended after it took too long"
        except BaseException:
            _kill(process)
            raise
        else:
            how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        printed.seek(0)
        text = printed.read().decode(errors="backslashreplace")
    return status, f"{how}, {time.perf_counter() - start:.0f} s", text


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children. One that a GPU's driver holds may stay."""
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
