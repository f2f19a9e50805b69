"""Messages on the side, which must not fail: standard error may be closed, as in daemons."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings

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


def show(text: str) -> None:
    """Text on standard error, as it is."""
    if sys.stderr is not None:
        with _BORNE:
            sys.stderr.write(text)
