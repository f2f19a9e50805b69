"""Scripts that people run, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*words: object, status: int = 0, **environment: object) -> str:
    """What a script prints; after a failure that is expected, what it prints as errors, too."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        # One thread each, so that processes do not wait for each other's.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in environment.items()},
        },
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")
