"""Which of several schedules wins, from times of their calls. Nothing is timed here.

The choice without tuning keeps its place unless another schedule is faster by more than noise at
many rows, and not slower by more than noise at any fewer, or with any other sets of weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The standard error of a median, by the standard deviation of a mean, for normal noise: the root
# of pi / 2. The distance of the quartiles of such noise is 1.349 standard deviations.
_OF_MEDIAN = math.sqrt(math.pi / 2)
_OF_QUARTILES = 1.349
_ERRORS = 3.0  # standard errors that do not count as a difference
_SHARE = 0.01  # of a time, likewise: kernels differ by so much from one process to another


@dataclass(frozen=True)
class Times:
    """Times of a schedule's calls in microseconds, one for each turn; two turns or more."""

    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        """A call's time."""
        return statistics.median(self.turns)

    @property
    def error(self) -> float:
        """The standard error of the median, from the quartiles, which outliers do not move."""
        low, _, high = statistics.quantiles(self.turns, n=4)
        return _OF_MEDIAN * (high - low) / _OF_QUARTILES / math.sqrt(len(self.turns))


def noise(one: Times, other: Times) -> float:
    """The difference of two medians that means nothing."""
    errors = math.hypot(one.error, other.error)
    return max(_ERRORS * errors, _SHARE * max(one.median, other.median))


def is_faster(one: Times, other: Times) -> bool:
    """Whether the first is faster by more than noise."""
    return one.median < other.median - noise(one, other)


def finalists(times: Mapping[int, Times], count: int) -> tuple[int, ...]:
    """The fastest schedules, by their numbers, fastest first, but for number 0: the choice."""
    others = sorted((n for n in times if n != 0), key=lambda n: times[n].median)
    return tuple(others[:count])


def winner(final: Sequence[Mapping[int, Times]]) -> int:
    """The number of the schedule that wins; 0 is the choice without tuning.

    Args:
        final: The times at many rows, and then those of each other call: of fewer rows, or with
            other sets of weights. All have the same numbers, 0 among them.
    """
    many, *others = final
    for number in sorted(many, key=lambda n: many[n].median):
        if not is_faster(many[number], many[0]):
            return 0
        if not any(is_faster(times[0], times[number]) for times in others):
            return number
    return 0
