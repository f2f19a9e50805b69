"""Folders in which this package keeps files for a user: where they are, reading and writing them.

What is in them decides which code a process runs. So only files count that nobody else can have
written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from iree_lnbwd.disk import files, folders

_NAME = "iree-lnbwd"
_MODE = 0o644  # all may read, only we may write, for any umask


class UnusableError(Exception):
    """There is no folder, it cannot be used, or others write to it. The message says what to do."""


@dataclass(frozen=True)
class UserFolder:
    """One of the user's folders.

    Attributes:
        variable: The environment variable that names it.
        xdg: Where that names none, XDG's variable of the folder above it ("XDG Base Directory
            Specification").
        below_home: What stands for that folder where XDG's variable names none.
    """

    variable: str
    xdg: str
    below_home: str

    def path(self) -> Path:
        """Where it is; it need not be there.

        Raises:
            UnusableError: It is relative, or the user has no folder.
        """
        if named := os.environ.get(self.variable):
            return self._absolute(self.variable, named)
        users = Path(os.environ.get(self.xdg, ""))
        if not users.is_absolute():  # then it does not count, by XDG's rules
            try:
                home = os.environ["HOME"] if "HOME" in os.environ else str(Path.home())
            except RuntimeError as error:
                raise self._unusable("HOME: expected an absolute path, got none") from error
            users = self._absolute("HOME", home) / self.below_home
        return users / _NAME

    def make(self) -> None:
        """Makes it, if it is not there, for us alone.

        Raises:
            UnusableError: Others can write to it, or we cannot make it.
        """
        root = self.path()
        try:
            with folders.opened(root, PurePath(), make=True):
                pass
        except OSError as error:
            raise self._unusable(folders.why(error, root)) from error

    def names(self) -> tuple[str, ...]:
        """The names of what is in it, in order; none if it is not there.

        Raises:
            UnusableError: Others can write to it, or it cannot be read.
        """
        root = self.path()
        try:
            with folders.opened(root, PurePath()) as folder, os.scandir(folder) as found:
                return tuple(sorted(entry.name for entry in found))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._unusable(folders.why(error, root)) from error

    def read(self, entry: PurePath, *names: str) -> tuple[bytes, ...] | None:
        """The files of an entry, which only we can have written; None if one is missing.

        Raises:
            UnusableError: Others can write to them, or they cannot be read.
        """
        root = self.path()
        try:
            with folders.opened(root, entry) as folder:
                return tuple(folders.read(folder, name, root / entry / name) for name in names)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(folders.why(error, root)) from error

    def write(self, entry: PurePath, contents: Mapping[str, bytes]) -> None:
        """Writes the files of an entry, by name; each appears whole or not at all.

        Raises:
            UnusableError: Others can write to the folder, or we cannot.
        """
        root = self.path()
        try:
            with folders.opened(root, entry, make=True):
                files.write(
                    {root / entry / name: data for name, data in contents.items()},
                    mode=_MODE,
                )
        except OSError as error:
            raise self._unusable(folders.why(error, root)) from error

    @contextlib.contextmanager
    def locked(
        self, entry: PurePath, *, seconds: float, waiting: Callable[[], None] | None = None
    ) -> Iterator[bool]:
        """Lets one process at a time, and one thread, make an entry.

        It saves work, and nothing depends on it: where there can be no lock, or it is not given
        back in time, this process goes on without it. One that ends gives its lock back.

        Args:
            entry: Its folder has the lock. It is made, and goes again if nothing is in it then.
            seconds: The longest wait.
            waiting: Is called if there is a wait.

        Yields:
            Whether there was a wait. Who waited, and finds no entry, is to make it outside of the
            lock: it could not be kept, and the others must not wait for each other once more.
        """
        waited = False

        def wait() -> None:
            nonlocal waited
            waited = True
            if waiting is not None:
                waiting()

        with contextlib.ExitStack() as closing:
            with contextlib.suppress(OSError, UnusableError):
                root = self.path()
                folder = closing.enter_context(folders.opened(root, entry, make=True))
                folders.lock(folder, seconds, wait)
                closing.callback(folders.unlock, folder)
                closing.callback(folders.remove_empty, root, entry)
            yield waited

    def _absolute(self, variable: str, path: str) -> Path:
        if not Path(path).is_absolute():
            raise self._unusable(f"{variable}: expected an absolute path, got {path!r}")
        return Path(path)

    def _unusable(self, why: str) -> UnusableError:
        return UnusableError(f"{why}; {self.variable} can name a folder of your own")
