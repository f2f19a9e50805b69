"""The errors other than bad arguments (which are ValueError and TypeError)."""

# The errors that IREE's runtime raises (status_utils.cc); NotImplementedError is a RuntimeError.
IREE_ERRORS = (IndexError, RuntimeError, ValueError)

_LONGEST = 300  # characters of a message that others wrote


class CompileError(RuntimeError):
    """The compiler is not there, refused the IR, or could not write its output."""


class ArtifactError(ValueError):
    """A .vmfb or its manifest is missing, truncated, altered, or of another schema."""


class DeviceError(RuntimeError):
    """A device is unknown, absent, or not the one that a module was compiled for."""


# Errors of a GPU, whose vendor's driver says only "not initialized".
NOT_IN_A_CHILD = (
    "was in use when this process was forked, and its driver does not work in such a child: start "
    "processes by 'spawn'"
)


_LONGEST_SHOWN = 200  # characters


def shown(value: object) -> str:
    """A bad value for a message: on one line, and cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def counted(number: int, thing: str) -> str:
    """A number of things: "1 row", "3 arrays"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def reason(error: Exception) -> str:
    """IREE's status message without its file names: "CODE; what happened"."""
    return _first_line(error).rsplit(".c:", 1)[-1].split(";", 1)[-1].strip()[:_LONGEST]


def one_line(error: Exception) -> str:
    """The message of an error of the system or of a library, without the system's file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return (said or _first_line(error))[:_LONGEST]


def printable(text: str) -> str:
    """The text on one line, with all characters escaped that a terminal could interpret."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
