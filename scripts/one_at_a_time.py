"""A lock of processes, for `scripts/steps`: only one of them is to have the GPU at a time."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from pathlib import Path


class OneAtATime:
    """A lock on a file. A process that has it may take it again, and loses it when it ends.

    Of a process's threads, only one may take it while no other waits for that one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._depth = path, 0
        self._held = ExitStack()

    def __enter__(self) -> None:
        if not self._depth:
            file = self._held.enter_context(self._path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._held.close()
