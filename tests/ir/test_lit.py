"""Runs the FileCheck tests beside it, one pytest test each; ``lit -v tests/ir`` is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.drawn
@pytest.mark.parametrize("path", sorted(HERE.glob("*.mlir")), ids=lambda path: path.stem)
def test_filecheck(path: Path) -> None:
    binaries = Path(sys.executable).parent
    run = subprocess.run(
        [sys.executable, binaries / "lit", "-v", "--no-progress-bar", path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": os.pathsep.join((str(binaries), os.environ["PATH"]))},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Passed: 1" in run.stdout  # and was not skipped
