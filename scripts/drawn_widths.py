"""Widths that are drawn at random, for `scripts/tune` and `scripts/benchmark`."""

from __future__ import annotations

import argparse
import random
import re

_WHOLE = 8  # elements of 16 bits that the widest access has


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options ``--random``, ``--multiples-of-8`` and ``--seed``."""
    parser.add_argument("--random", type=_range, metavar="COUNT:LOW:HIGH", help="widths to draw")
    parser.add_argument("--multiples-of-8", action="store_true", help="draw these; else none is")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")


def drawn(options: argparse.Namespace) -> list[int]:
    """Widths in order, one in each of as many equal parts of the octaves; none if none is asked."""
    if options.random is None:
        return []
    count, low, high = options.random
    rng, found = random.Random(options.seed), set()
    for part in range(count):
        width = round(low * (high / low) ** ((part + rng.random()) / count))
        if options.multiples_of_8:
            width = max(_WHOLE, width - width % _WHOLE)
        elif width % _WHOLE == 0:
            width += 1
        found.add(width)
    return sorted(found)


def _range(text: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){2}", text):
        raise argparse.ArgumentTypeError(f"expected COUNT:LOW:HIGH, got {text!r}")
    count, low, high = map(int, text.split(":"))
    if low > high:
        raise argparse.ArgumentTypeError(f"expected LOW up to HIGH, got {text!r}")
    return count, low, high
