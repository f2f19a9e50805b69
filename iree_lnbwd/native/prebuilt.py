"""Libraries that were built ahead and came in the wheel: which of them this process can load.

``scripts/build_ahead`` makes them. A library that does not fit would end the process, or compute
something else. So one is taken only if all of this holds, which is looked at before it is loaded:

- It was compiled from the sources that are here, for this machine's architecture.
- Each header that it was compiled from is the same, byte for byte, in what is installed here. So
  classes and inline functions are the same: PyTorch's builds for the CPU and for CUDA share them.
- Each symbol that it needs is there, in the version that it needs (of the C library, of C++'s, of
  PyTorch, of Python), in libraries that this process has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from iree_lnbwd.vmfb.artifact import digest

FOLDER = Path(__file__).parent / "built_ahead"  # in wheels of a release
_DESCRIBED, _LIBRARY = ".json", ".so"


@dataclass(frozen=True)
class Prebuilt:
    """What a library is, and what it needs.

    Attributes:
        built_for: What it is said to be for; it decides nothing.
        machine: The architecture.
        sources: The digest of what it was compiled from, but for the headers of others.
        headers: These, below one folder.
        headers_digest: Of their names and contents.
        libraries: Those that it names.
        symbols: Those that they must have; after an @, in which version.
        library: The digest of its file.
    """

    built_for: str
    machine: str
    sources: str
    headers: tuple[str, ...]
    headers_digest: str
    libraries: tuple[str, ...]
    symbols: tuple[str, ...]
    library: str

    def write(self, folder: Path, content: bytes) -> None:
        """Writes the library, and its description beside it."""
        (folder / f"{self.built_for}{_LIBRARY}").write_bytes(content)
        text = json.dumps(asdict(self), indent=0)
        (folder / f"{self.built_for}{_DESCRIBED}").write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Prebuilt:
        """A description that `write` wrote.

        Raises:
            OSError, ValueError, TypeError: It is none.
        """
        said = json.loads(path.read_text(encoding="utf-8"))
        for name in ("headers", "libraries", "symbols"):
            said[name] = tuple(said[name])
        return cls(**said)

    def fits(self, sources: str, include: Path) -> bool:
        """Whether this process can load it.

        Args:
            sources: The digest of the sources that are here.
            include: The folder of the headers that are installed.
        """
        return (
            (self.machine, self.sources) == (platform.machine(), sources)
            and headers_digest(include, self.headers) == self.headers_digest
            and _are_there(self.symbols, self.libraries)
        )


def sources_digest(texts: Iterable[str]) -> str:
    """Of the sources and flags of a library."""
    return digest("\0".join(texts).encode())


def headers_digest(include: Path, names: Sequence[str]) -> str | None:
    """Of headers, by their names below a folder; None if one is missing."""
    all_of_them = hashlib.sha256()
    try:
        for name in names:
            content = (include / name).read_bytes()
            all_of_them.update(f"{name}\0{len(content)}\0".encode())
            all_of_them.update(content)
    except OSError:
        return None
    return all_of_them.hexdigest()


def fitting(prefix: str, sources: str, include: Path) -> Path | None:
    """A library of those that were built ahead which this process can load, if there is one.

    Args:
        prefix: What the names of those that may fit begin with, before a dot.
        sources: The digest of the sources that are here.
        include: The folder of the headers that are installed.
    """
    for path in sorted(FOLDER.glob(f"{prefix}.*{_DESCRIBED}")):
        library = path.with_suffix(_LIBRARY)
        try:
            prebuilt = Prebuilt.read(path)
            content = library.read_bytes()
        except (OSError, ValueError, TypeError, KeyError):
            continue  # damaged: as if it were not there
        if digest(content) == prebuilt.library and prebuilt.fits(sources, include):
            return library
    return None


def _are_there(symbols: Sequence[str], libraries: Sequence[str]) -> bool:
    """Whether libraries, which are loaded already, have symbols."""
    try:
        process = ctypes.CDLL(None)
        plain, versioned = process.dlsym, process.dlvsym
        loaded = (process, *map(ctypes.CDLL, libraries))  # Python's own are the process's
        handles = [ctypes.c_void_p(library._handle) for library in loaded]
    except (OSError, AttributeError):  # another C library has no versions
        return False
    for function in (plain, versioned):
        function.restype = ctypes.c_void_p
    for symbol in symbols:
        name, _, version = symbol.encode().partition(b"@")
        found = (
            versioned(handle, name, version) if version else plain(handle, name)
            for handle in handles
        )
        if not any(found):
            return False
    return True
