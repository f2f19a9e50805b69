"""Messages on the side, which must not fail: standard error may be closed, as in daemons."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from iree_lnbwd.errors import plain

# Python's own functions tolerate a standard error that is None or full, but not a closed one.
_BORNE = contextlib.suppress(OSError, ValueError)


def warn(message: str) -> None:
    """A RuntimeWarning."""
    with _BORNE:
        warnings.warn(plain(message), RuntimeWarning, stacklevel=3)


def log(logger: logging.Logger, message: str, *values: object) -> None:
    """A warning in a log."""
    with _BORNE:
        logger.warning(message, *values)


@contextlib.contextmanager
def repeated(
    logger: logging.Logger, message: str, *values: object, every: float = 10.0
) -> Iterator[None]:
    """While a block takes long, a warning in a log, again and again, says for how long it has."""
    start, ended = time.perf_counter(), threading.Event()

    def repeat() -> None:
        while not ended.wait(every):
            log(logger, f"{message}: %.0f s so far", *values, time.perf_counter() - start)

    thread = threading.Thread(target=repeat, name="iree-lnbwd-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def log_progress(logger: logging.Logger) -> Callable[[str], None]:
    """What logs lines of progress, but for those that only count."""

    def tell(line: str) -> None:
        if not only_counts(line):
            log(logger, "%s", line)

    return tell


def only_counts(line: str) -> bool:
    """Whether a line of progress is for a terminal alone, where the next one overwrites it."""
    return ": compiled " in line


def show(text: str) -> None:
    """Text on standard error, as it is."""
    if sys.stderr is not None:
        with _BORNE:
            sys.stderr.write(text)
