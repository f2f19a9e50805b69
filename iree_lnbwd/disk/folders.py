"""Folders that only we can write to: folders that are kept, and temporary ones.

The kept folders hold code that this process will run. The names in temporary folders reach a shell.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

_OURS_ALONE = 0o700
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # if TMPDIR names no place
_SECONDS_BETWEEN_TRIES = 0.02  # to get a lock: the system's own wait knows no end
_ROOM = 1 << 18  # bytes: more than a module and its inputs take


def why(error: OSError, path: Path) -> str:
    """What went wrong and where (at ``path``, if the error names no place), without its number."""
    if error.strerror is None:
        return str(error)
    return f"{error.filename or path}: {error.strerror}"


@contextlib.contextmanager
def opened(root: Path, below: PurePath, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``root / below``, in which nobody else can put a file.

    Args:
        root: Absolute. It and all that is below it belong to us or to root, and nobody else can
            write to them. Not everybody can move the folders above it.
        below: The rest of the path.
        make: Make what is missing, for us alone.

    Raises:
        OSError: It is not there, cannot be opened, or others can write to it; then nothing was
            made in a folder of others.
    """
    _check_above(root)
    if make:
        _make(root.parent)
    with contextlib.ExitStack() as closing:
        folder, path = None, Path()
        for name in (str(root), *below.parts):
            path /= name
            if make:
                _make_in(folder, name, path)
            folder = _open(name, path, folder, os.O_DIRECTORY)
            closing.callback(os.close, folder)
        assert folder is not None
        yield folder


def read(folder: int, name: str, path: Path) -> bytes:
    """Reads a file of a folder that was `opened`; nobody else can have written it.

    Args:
        folder: Its descriptor.
        name: Of the file.
        path: Of the file, for messages.

    Raises:
        OSError: It is not there, no file, cannot be read, or somebody else can write to it.
    """
    # A pipe of that name must not make us wait for its writer.
    descriptor = _open(name, path, folder, os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path}: not a file")
        return file.read()


def lock(folder: int, seconds: float, waiting: Callable[[], None]) -> None:
    """Locks a folder that was `opened`, against all that opened it by themselves.

    Args:
        folder: Its descriptor. What else holds it, such as a child of ``fork``, holds the lock.
        seconds: The longest wait.
        waiting: Is called once, if there is a wait.

    Raises:
        OSError: Its file system has no locks of folders, or others kept theirs for so long.
    """
    end, is_waiting = time.monotonic() + seconds, False
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        if not is_waiting:
            waiting()
        is_waiting = True
        time.sleep(_SECONDS_BETWEEN_TRIES)


def unlock(folder: int) -> None:
    """Gives a lock back, whoever else holds the descriptor."""
    fcntl.flock(folder, fcntl.LOCK_UN)


def remove_empty(root: Path, below: PurePath) -> None:
    """Removes ``root / below``, and the folders between, as far as nothing is in them."""
    with contextlib.suppress(OSError):
        for path in (below, *below.parents[:-1]):
            (root / path).rmdir()


def temporary() -> tempfile.TemporaryDirectory[str]:
    """A new folder for us alone, in the first suitable place; its path needs no quotes.

    A place is suitable if it has room, if a shell would not split its path, and if not everybody
    can move the files in it.

    Raises:
        OSError: No place is suitable; the message says why.
    """
    tried = []
    for place in dict.fromkeys((os.environ.get("TMPDIR") or _TEMPORARY[0], *_TEMPORARY)):
        try:
            return _temporary_in(Path(place))
        except OSError as error:
            tried.append(f"{place}: {error.strerror or error}")
    raise OSError(f"TMPDIR: expected a folder to write to, got {'; '.join(tried)}")


def _temporary_in(place: Path) -> tempfile.TemporaryDirectory[str]:
    if not place.is_absolute() or shlex.quote(str(place)) != str(place):
        raise OSError("not an absolute path without spaces and quotes")
    _check_above(place / "of ours")
    # A process that was interrupted may still be writing while the folder is removed.
    made = tempfile.TemporaryDirectory(prefix="iree-lnbwd-", dir=place, ignore_cleanup_errors=True)
    try:
        room = Path(made.name) / "room"
        room.write_bytes(bytes(_ROOM))
        room.unlink()
    except BaseException:
        made.cleanup()
        raise
    return made


def _make_in(folder: int | None, name: str, path: Path) -> None:
    """A folder in one that is open, if it is not there."""
    try:
        os.mkdir(name, _OURS_ALONE, dir_fd=folder)
    except FileExistsError:
        pass
    except OSError as error:
        error.filename = str(path)
        raise


def _make(folder: Path) -> None:
    """Makes a folder and those above it; ``Path.mkdir`` would let others into those above."""
    try:
        folder.mkdir(_OURS_ALONE, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make(folder.parent)
        folder.mkdir(_OURS_ALONE, exist_ok=True)


def _check_above(path: Path) -> None:
    """Checks the folders above a path, with links followed and not.

    Raises:
        OSError: Everybody can move the files in one of them, or one cannot be looked at.
    """
    for folder in (*path.parents, *Path(os.path.realpath(path)).parents):
        with contextlib.suppress(FileNotFoundError):
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise _of_others(folder, mode)


def _open(name: str, path: Path, folder: int | None, flags: int) -> int:
    """A descriptor to read a file from that belongs to us or root and nobody else can write to."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise
    status = os.fstat(descriptor)  # of the opened file; the name may lead to another by now
    try:
        if status.st_uid not in (os.geteuid(), 0):
            raise OSError(
                f"{path}: it belongs to user {status.st_uid}, expected {os.geteuid()} or root "
                f"(chown {os.geteuid()} {shlex.quote(str(path))})"
            )
        if status.st_mode & _WRITTEN_BY_OTHERS:
            raise _of_others(path, status.st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _of_others(path: Path, mode: int) -> OSError:
    return OSError(
        f"{path}: others can write to it, its mode is {stat.S_IMODE(mode):04o} "
        f"(chmod go-w {shlex.quote(str(path))})"
    )
