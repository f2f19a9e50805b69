"""The errors other than bad arguments (which are ValueError and TypeError), and texts in messages.

What is in a message may come from a file that somebody made to deceive: `plain` is for all such.
"""

# The errors that IREE's runtime raises (status_utils.cc); NotImplementedError is a RuntimeError.
IREE_ERRORS = (IndexError, RuntimeError, ValueError)

# Characters at most: of a value or a name in a message, of what others say, and of a message.
_LONGEST_SHOWN = 200
_LONGEST_SAID = 300
LONGEST_MESSAGE = 4000


def plain(text: object, most: int = LONGEST_MESSAGE) -> str:
    """A text as a message can have it: on one line, without what a terminal interprets, and short.

    Args:
        text: A string, or a path.
        most: How many characters of it are left, if it is long: more of its beginning than of its
            end, which often says what is wrong.
    """
    escaped = _escaped(_cut(str(text), most))
    return _cut(escaped, most)


def _cut(text: str, most: int) -> str:
    end = most // 4
    return text if len(text) <= most else f"{text[: most - end]}...{text[len(text) - end :]}"


def _escaped(text: str) -> str:
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shown(value: object) -> str:
    """A bad value for a message: on one line, and cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, or somebody's class
        text = f"a value of {type(value).__name__} that cannot be shown"
    return plain(" ".join(text.split()), _LONGEST_SHOWN)


class _PlainError(Exception):
    """An error whose message is plain, whatever names of files and in files it has."""

    def __init__(self, message: object = "") -> None:
        super().__init__(plain(message))


class CompileError(RuntimeError):
    """The compiler is not there, refused the IR, or could not write its output."""


class ArtifactError(_PlainError, ValueError):
    """A .vmfb or its manifest is missing, truncated, altered, or of another schema."""


class DeviceError(_PlainError, RuntimeError):
    """A device is unknown, absent, or not the one that a module was compiled for."""


# Errors of a GPU, whose vendor's driver says only "not initialized".
NOT_IN_A_CHILD = (
    "was in use when this process was forked, and its driver does not work in such a child: start "
    "processes by 'spawn'"
)


def counted(number: int, thing: str) -> str:
    """A number of things: "1 row", "3 arrays"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def reason(error: Exception) -> str:
    """IREE's status message without its file names: "CODE; what happened"."""
    said = _first_line(error).rsplit(".c:", 1)[-1].split(";", 1)[-1].strip()
    return plain(said, _LONGEST_SAID)


def one_line(error: Exception) -> str:
    """The message of an error of the system or of a library, without the system's file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return plain(said or _first_line(error), _LONGEST_SAID)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
