"""The errors that are not the caller's arguments (those are ValueError and TypeError)."""

import zipfile
import zlib

# What Python's zipfile raises on damaged files, which it does not sum up as BadZipFile.
# (NotImplementedError, of unknown compression methods, is a RuntimeError, and so is "encrypted".)
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OverflowError,
    RuntimeError,
    ValueError,
)

# What IREE's runtime raises (status_utils.cc): NotImplementedError is a RuntimeError, too.
IREE_ERRORS = (IndexError, RuntimeError, ValueError)


class CompileError(RuntimeError):
    """The compiler is not there, refused the IR, or could not write its output."""


class ArtifactError(ValueError):
    """A .vmfb or its manifest is missing, truncated, altered, or of another schema."""


class DeviceError(RuntimeError):
    """A device is unknown, absent, or not the one that a module was compiled for."""


# Of a GPU; its vendor's driver says no more than "not initialized".
NOT_IN_A_CHILD = (
    "was in use when this process was forked, and its driver does not work in such a child: start "
    "processes by 'spawn'"
)


_LONGEST_SHOWN = 200  # characters


def shown(value: object) -> str:
    """A bad value in a message: on one line, and not the whole of a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def reason(error: Exception) -> str:
    """IREE's status message without its file names: "CODE; what happened"."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first_line.rsplit(".c:", 1)[-1].split(";", 1)[-1].strip()[:300]
