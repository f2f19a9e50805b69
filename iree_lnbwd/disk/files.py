"""Files that are read and written whole: no name ever leads to half of a file."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

_STDOUT = 1

# The name of a file that the caller has open: writes go to its position; it is not opened again.
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file for reading; links are followed.

    Raises:
        OSError: It cannot be opened, is no regular file, or changed while it was read.
        ValueError: ``path`` cannot be a file's name.
    """
    _expect_regular(path.stat())  # opening a pipe would wait for its writer, and disturb it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        before = os.fstat(descriptor)
        _expect_regular(before)
        yield file
        after = os.fstat(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise OSError(errno.EBUSY, "it changed while it was read")


def read(path: Path, *, most: int) -> bytes:
    """The content of a regular file.

    Args:
        path: The file.
        most: The most bytes that such a file can have.

    Raises:
        OSError: As `opened`, or it has more bytes.
        ValueError: As `opened`.
    """
    with opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"expected at most {most} bytes, got {size}")
        return file.read(size)  # not `most`: Python takes as much memory first


def write(contents: Mapping[Path, bytes | memoryview], *, mode: int | None = None) -> None:
    """Writes all files, or leaves all as they were.

    A link is followed. A file that is not regular, such as a pipe, is written to and not replaced;
    so is a file that the caller has open as ``/dev/stdout`` or ``/dev/fd/N``. A new file has the
    mode that the umask leaves it; an existing file keeps its mode.

    Args:
        contents: By path.
        mode: The mode of all files, new or not, instead of these.

    Raises:
        OSError: A file cannot be written; then none has been replaced.
        ValueError: A path cannot be a file's name.
    """
    moves: list[tuple[Path, Path]] = []
    try:
        for path, data in contents.items():
            status = _status(path)  # refuses links that go round
            if _descriptor(path) is not None or not (status is None or _is_regular(status)):
                _write_to(path, data)
                continue
            target = Path(os.path.realpath(path))
            temporary = target.with_name(f".iree-lnbwd.{secrets.token_hex(8)}")
            moves.append((temporary, target))  # noted before it exists: an interrupt leaves none
            kept = None if status is None else status.st_mode & 0o777
            _create(temporary, data, kept if mode is None else mode)
        for temporary, target in moves:
            temporary.replace(target)
    except BaseException:
        for temporary, _ in moves:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def is_stdout(path: Path) -> bool:
    """Whether a path leads to the file that standard output goes to."""
    try:
        return os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:
        return False


def _create(path: Path, data: bytes | memoryview, mode: int | None) -> None:
    """A new file; without a ``mode``, the umask decides who may read it."""
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    with os.fdopen(made, "wb", buffering=0) as file:
        if mode is not None:
            os.fchmod(made, mode)
        _write_all(file, data)


def _write_to(path: Path, data: bytes | memoryview) -> None:
    """Writes the data to an existing file, from its current position."""
    number = _descriptor(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY) if number is None else os.dup(number)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        if file.isatty():
            raise OSError(errno.EINVAL, "expected a file or a pipe, got a terminal")
        _write_all(file, data)


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    """Writes all of it without a buffer; a buffer would be flushed even after an interrupt."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file.fileno(), rest) :]


def _descriptor(path: Path) -> int | None:
    """The number of the open file that a path such as /dev/stdout names."""
    while (match := _DESCRIPTOR.fullmatch(str(path))) is None and path.is_symlink():
        path = path.parent / path.readlink()
    return None if match is None else int(match[1])


def _status(path: Path) -> os.stat_result | None:
    """The status of the file that a path leads to; None if there is no file yet."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def _expect_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not _is_regular(status):
        raise OSError(errno.EINVAL, "expected a regular file, got a pipe, a socket or a device")
