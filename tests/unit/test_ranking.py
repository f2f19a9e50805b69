"""Which schedule wins: only one that is faster by more than noise, and nowhere slower."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from iree_lnbwd.tuning.ranking import Times, finalists, is_faster, winner


def steady(microseconds: float) -> Times:
    """Turns within a thousandth of each other."""
    return Times(tuple(microseconds * (1 + 0.0001 * (i % 11 - 5)) for i in range(41)))


def wild(microseconds: float) -> Times:
    """Turns up to half apart."""
    return Times(tuple(microseconds * (1 + 0.05 * (i % 11 - 5)) for i in range(41)))


@pytest.mark.parametrize(
    ("one", "other", "faster"),
    [
        (steady(98), steady(100), True),
        (steady(99.5), steady(100), False),  # kernels differ by so much anyway
        (steady(100), steady(98), False),
        (steady(100), steady(100), False),
        (wild(98), wild(100), False),
        (wild(50), wild(100), True),
        (Times((1.0, 1.0, 500.0)), Times((2.0, 2.0, 2.0)), False),  # too few turns to tell
    ],
)
def test_faster_by_more_than_noise(one: Times, other: Times, faster: bool) -> None:
    assert is_faster(one, other) == faster


def test_finalists_are_the_fastest_beside_the_choice() -> None:
    times = {0: steady(10), 1: steady(30), 2: steady(20), 3: steady(25)}
    assert finalists(times, 2) == (2, 3)
    assert finalists({0: steady(10)}, 2) == ()


FINALS: dict[str, tuple[list[Mapping[int, float]], int]] = {
    "the fastest": ([{0: 100, 1: 90, 2: 80}], 2),
    "nobody beats the choice": ([{0: 100, 1: 101, 2: 99.5}], 0),
    "alone": ([{0: 100}], 0),
    "the fastest is slower at few rows": ([{0: 100, 1: 90, 2: 80}, {0: 5, 1: 5, 2: 6}], 1),
    "all others are": ([{0: 100, 1: 90, 2: 80}, {0: 5, 1: 6, 2: 6}], 0),
    "slower by noise": ([{0: 100, 1: 80}, {0: 5, 1: 5.01}], 1),
    "at any fewer": ([{0: 100, 1: 80}, {0: 5, 1: 4}, {0: 7, 1: 8}], 0),
    "faster at few rows alone": ([{0: 100, 1: 100}, {0: 5, 1: 2}], 0),
}


@pytest.mark.parametrize("name", FINALS)
def test_the_winner(name: str) -> None:
    given, number = FINALS[name]
    assert winner([{n: steady(t) for n, t in times.items()} for times in given]) == number
