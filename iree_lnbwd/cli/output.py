"""What a command says: to whom, as plain text, and its exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

from iree_lnbwd.errors import (
    one_line,
    plain,
)
from iree_lnbwd.notices import only_counts

EXIT_OK, EXIT_MISS, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_CLEAR = "\x1b[2K"  # a terminal's current line
_LONGEST_LINE = 1 << 14  # characters of what is asked for, such as the flags of a module


def expect_streams() -> None:
    """Makes sure that no other file can get the number of a standard stream.

    Raises:
        OSError: Standard output is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")  # argparse would take standard output in its place
    if sys.stdout is None:
        raise OSError("standard output: expected it open, got it closed")


def say(line: str, stream: TextIO | None = None) -> None:
    """Writes a line to a stream, standard output by default, as plain text for a terminal.

    It takes the place of what `show_progress` left there.
    """
    if sys.stderr.isatty():
        print(_CLEAR, end="", file=sys.stderr, flush=True)
    put(f"{plain(line, _LONGEST_LINE)}\n", sys.stdout if stream is None else stream)


def tell(line: str) -> None:
    """Writes a line to standard error, if that can be written."""
    with contextlib.suppress(OSError):
        say(f"iree-lnbwd: {plain(line)}", sys.stderr)


def put(text: str, stream: TextIO) -> None:
    """Writes text to a stream at once.

    A reader that stops reading, such as `head`, is no error: the command goes on to the end.

    Raises:
        OSError: It cannot be written.
    """
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Python tries to write it again when it exits, and must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            name = stream.name.strip("<>")
            raise OSError(f"{name}: cannot be written: {one_line(error)}") from error


def show_progress(line: str) -> None:
    """Shows what is being done: on a terminal's line that the next one overwrites, else in lines.

    Lines that only count are left out then.
    """
    if sys.stderr.isatty():
        print(f"{_CLEAR}{plain(line)}\r", end="", file=sys.stderr, flush=True)
    elif not only_counts(line):
        tell(line)


@contextlib.contextmanager
def interrupted_by(number: signal.Signals) -> Iterator[None]:
    """A signal ends what goes on as Ctrl-C does: files are whole and temporary ones removed."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
