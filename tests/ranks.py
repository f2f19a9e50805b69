"""Processes that begin at once, as the ranks of a training run do; and file systems for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

# What each of them begins with: it imports, says that it is ready, and waits for the others.
BEGIN = """
import json, os, sys, time, warnings
import numpy as np
import iree_lnbwd as lnbwd
from iree_lnbwd.compiling import iree_compile
{imports}
compiled, run = [], iree_compile.run

def counted(text, *words):
    compiled.append(words[-1])
    return run(text, *words)

iree_compile.run = counted
print("ready", flush=True)
sys.stdin.readline()
"""


class Rank(NamedTuple):
    """What came of a process.

    Attributes:
        said: The value that its last line is, in JSON; None if it did not end well.
        stderr: What it complained of.
    """

    said: Any
    stderr: str


def start(
    script: str, count: int, *, imports: str = "", **variables: str
) -> list[subprocess.Popen[str]]:
    """So many processes that have imported what they need; they wait to go.

    Args:
        script: Ends with a line of JSON on standard output.
        count: How many.
        imports: Further imports, and what else is to happen before the start.
        variables: Of the environment.
    """
    words = [sys.executable, "-c", BEGIN.format(imports=imports) + script]
    started = [
        subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise AssertionError(process.communicate()[1])
    return started


def go(processes: list[subprocess.Popen[str]]) -> None:
    """Now all of them begin."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def ended(processes: list[subprocess.Popen[str]], seconds: float = 300) -> list[Rank]:
    """What came of all; what takes longer is killed."""
    ranks = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            said = json.loads(out.splitlines()[-1]) if process.returncode == 0 else None
            ranks.append(Rank(said, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return ranks


def run(script: str, count: int, *, imports: str = "", **variables: str) -> list[Rank]:
    """As `start`, `go` and `ended`."""
    processes = start(script, count, imports=imports, **variables)
    go(processes)
    return ended(processes)


def mounted(places: dict[str, str]) -> str:
    """A line of shell that runs a command where these places are file systems of their own."""
    lines = [f"mount -t tmpfs -o {options} none {place}" for place, options in places.items()]
    return f'exec unshare --mount sh -c \'{" && ".join(lines)} && exec "$@"\' sh "$@"'


def can_mount(place: str | None = None) -> bool:
    """Whether this user can have a file system of its own there, and Python still runs.

    None is a new folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        shell = mounted({place or folder: "size=64k"})
        command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", ""]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
