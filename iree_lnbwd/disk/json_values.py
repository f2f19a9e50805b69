"""Values of JSON from files that may be damaged or hostile: each is what it should be, or named."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any, TypeVar

from iree_lnbwd.errors import plain, shown

_T = TypeVar("_T")
_LONGEST_NUMBER = 80  # characters of it in a message
_WORDS = {str: "a string", bool: "a bool", list: "a list", dict: "an object"}


def parsed(text: str) -> Any:
    """JSON that every reader understands in the same way: unique names, and valid numbers.

    Raises:
        ValueError, RecursionError: It is no such JSON.
    """

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ValueError("a name comes twice in an object")
        return values

    def finite(literal: str) -> float:
        if not math.isfinite(number := float(literal)):
            raise ValueError(f"expected finite numbers, got {plain(literal, _LONGEST_NUMBER)}")
        return number

    return json.loads(text, object_pairs_hook=members, parse_float=finite, parse_constant=finite)


def object_of(values: Any, place: str, names: tuple[str, ...]) -> dict[str, Any]:
    """An object that has these fields and no others.

    Args:
        values: What was parsed.
        place: Where it is from, for messages; so in the functions below.
        names: The fields.

    Raises:
        ValueError: Naming the place, what came and what was expected; so do the functions below.
    """
    given: dict[str, Any] = of_type(dict, values, place)
    for name in names:
        if name not in given:
            raise ValueError(f"{place}.{name}: missing")
    for name in given:
        if name not in names:
            raise ValueError(f"{place}: unknown field {shown(name)}, expected {', '.join(names)}")
    return given


def of_type(kind: type[_T], value: Any, place: str) -> _T:
    """A string, a bool, a list or an object."""
    if not isinstance(value, kind):
        raise wrong(place, _WORDS[kind], value)
    return value


def int_of(value: Any, place: str, *, least: int, most: int | None = None) -> int:
    """An int."""
    is_int = type(value) is int  # a bool is an int, too
    if not is_int or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise wrong(place, f"an int {bounds}", value)
    return int(value)


def positive_of(value: Any, place: str) -> float:
    """A finite number above 0."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not (number > 0 and math.isfinite(number)):
        raise wrong(place, "a number above 0", value)
    return number


def date_of(value: Any, place: str, *, expected: str = "a date of ISO 8601") -> str:
    """A date, as text."""
    text = of_type(str, value, place)
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise wrong(place, expected, value) from None
    return text


def wrong(place: str, expected: str, value: Any) -> ValueError:
    """The error of a value that is not what it should be."""
    return ValueError(f"{place}: expected {expected}, got {shown(value)}")
