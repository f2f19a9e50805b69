"""Libraries that were compiled from our C++ on this machine, in the cache on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import NamedTuple

from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.stores import cache
from iree_lnbwd.vmfb.artifact import digest

# For the linker. A compiler that has only a static C++ library links a copy of it into ours. With
# its symbols visible the loader would mix that copy with the one of the process, and the first
# number in a message of an error would end the process.
OWN_COPIES = ("-Wl,--exclude-libs,libstdc++.a",)
# For the linker, too: before glibc 2.34, what watches forks is in a library of its own.
THREADS = ("-pthread",)


_LONGEST_BUILD = 600.0  # seconds that another process is waited for


class NativeLibrary(NamedTuple):
    """A library's place in the cache.

    Attributes:
        entry: Its folder, which is another one for other sources.
        name: Its file.
    """

    entry: PurePath
    name: str

    @classmethod
    def of(cls, folder: str, name: str, key: Iterable[str]) -> NativeLibrary:
        """The place of a library, by all that decides what is in it.

        Args:
            folder: What it is for.
            name: Its file.
            key: Its sources, flags and the version of what it is compiled for.
        """
        return cls(PurePath(folder, digest("\n".join(key).encode())[:16]), name)

    def kept(self) -> Path | None:
        """What was built before, unchanged; a damaged one would crash the process."""
        try:
            files = cache.read(self.entry, self.name, self._digest)
        except UnusableError:
            return None
        if files is None or digest(files[0]).encode() != files[1]:
            return None
        return cache.directory() / self.entry / self.name

    def locked(self, waiting: Callable[[], None]) -> contextlib.AbstractContextManager[bool]:
        """Lets one process at a time build it; see `UserFolder.locked`.

        Args:
            waiting: Is called if another process is at it.
        """
        return cache.locked(self.entry, seconds=_LONGEST_BUILD, waiting=waiting)

    def keep(self, content: bytes) -> None:
        """Writes it into the cache.

        Raises:
            UnusableError: The cache cannot be used.
        """
        cache.write(self.entry, {self.name: content, self._digest: digest(content).encode()})

    @property
    def _digest(self) -> str:
        return f"{self.name}.sha256"
