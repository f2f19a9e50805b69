"""Widths on a command line, given or drawn at random: of `scripts/tune` and `scripts/benchmark`."""

from __future__ import annotations

import argparse
import random
import re

_WHOLE = 8  # elements of 16 bits that the widest access has


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options ``--columns``, ``--random``, ``--multiples-of-8`` and ``--seed``."""
    parser.add_argument("--columns", type=numbers, default=[], help="widths, apart by commas")
    parser.add_argument("--random", type=_range, metavar="COUNT:LOW:HIGH", help="widths to draw")
    parser.add_argument("--multiples-of-8", action="store_true", help="draw these; else none is")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")


def widths_of(options: argparse.Namespace) -> list[int]:
    """The given ones and the drawn ones, in order; the latter in equal parts of the octaves."""
    found = set(options.columns)
    if options.random is None:
        return sorted(found)
    count, low, high = options.random
    rng = random.Random(options.seed)
    for part in range(count):
        width = round(low * (high / low) ** ((part + rng.random()) / count))
        if options.multiples_of_8:
            width = max(_WHOLE, width - width % _WHOLE)
        elif width % _WHOLE == 0:
            width += 1
        found.add(width)
    return sorted(found)


def numbers(text: str) -> list[int]:
    """What an option says: numbers from 1 on, apart by commas."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected numbers like 768,1024, got {text!r}")
    return [int(one) for one in text.split(",")]


def _range(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", text):
        raise argparse.ArgumentTypeError(f"expected COUNT:LOW:HIGH, got {text!r}")
    count, low, high = map(int, text.split(":"))
    if low > high:
        raise argparse.ArgumentTypeError(f"expected LOW up to HIGH, got {text!r}")
    return count, low, high
