"""The words of a command line: each option once, each value checked as it is read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from iree_lnbwd.cli.output import (
    put,
)
from iree_lnbwd.errors import (
    plain,
)
from iree_lnbwd.ops.dtypes import DTYPES, unknown
from iree_lnbwd.ops.operands import VARIANTS

_MASK_LENGTHS = {len(each) for op in VARIANTS for each in (op.masked, op.gradients) if each}
DTYPES_IN_HELP = f"{{{','.join(DTYPES)}}}"  # in the help


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # each adds itself


class _Once(argparse.Action):
    """Stores a value. A second value is refused, so that none is silently dropped."""

    given = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse for each value."""
        if self.given:
            raise argparse.ArgumentError(self, "expected once, got it again")
        self.given = True
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse's parser; each option is given once, and error messages are safe to print."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the words, and exits."""
        super().error(plain(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints the help or a message; argparse's own loses errors, or not, by its version."""
        put(message, sys.stderr if file is None else file)


def path(text: str) -> Path:
    """A path."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def listed(text: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(text.split(","))


def dtype(text: str) -> str:
    """An element type."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(unknown(text))
    return text


def dtypes(text: str) -> tuple[str, ...]:
    """Element types with commas between them."""
    return tuple(map(dtype, listed(text)))


def known(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of words with commas between them, each of which is known."""

    def parse(text: str) -> tuple[str, ...]:
        for word in (found := listed(text)):
            if word not in names:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(names)}, got {word!r}"
                )
        return found

    return parse


def shape(text: str) -> tuple[int, ...]:
    """Dimensions with an x between them."""
    try:
        return tuple(int(dim) for dim in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a shape such as 4096 or 16x64, got {text!r}"
        ) from None


def shapes(text: str) -> tuple[tuple[int, ...], ...]:
    """Shapes with commas between them."""
    return tuple(map(shape, listed(text)))


def ints(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,7,64, got {text!r}") from None


def mask(text: str) -> tuple[bool, ...]:
    """A digit for each gradient: whether it is asked for."""
    if len(text) not in _MASK_LENGTHS or set(text) - {"0", "1"}:
        raise argparse.ArgumentTypeError(f"expected a 0 or 1 for each gradient, got {text!r}")
    return tuple(digit == "1" for digit in text)
