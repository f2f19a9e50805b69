"""The program in the emulator's README runs as it stands there, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from iree_lnbwd import emulator


def test_the_example() -> None:
    text = (Path(emulator.__file__).parent / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    known, error, *launches = run.stdout.splitlines()
    assert known == "[]"
    found = re.fullmatch(r"off by (\S+) of a value", error)
    assert found is not None
    assert 0 < float(found[1]) < 1e-5
    assert launches
    assert all(re.fullmatch(r"softmax\w+ \(7, 1, 1\) \(64, 1, 1\)", line) for line in launches)
