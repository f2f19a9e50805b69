"""Times of whole calls on the CPU: contenders take turns of a few calls, with a pause before each.

In a pause, threads of the contender before stop spinning. The first calls of a turn wake threads up
and fill caches; they are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

PAUSE_S = 0.005
_CALLS, _UNTIMED = 7, 2  # of a turn

Call = Callable[[], Any]


def call_times(
    them: Mapping[str, Call],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    turns: int | None = None,
) -> dict[str, list[float]]:
    """Microseconds of each call, by contender.

    Args:
        them: The contenders; each is called once before it is timed.
        seconds: For all of them together, after which the last turn ends.
        clock: In seconds.
        turns: The most turns of each; None means as many as fit.
    """
    times: dict[str, list[float]] = {name: [] for name in them}
    for call in them.values():
        call()  # what compiles at first use, compiles now
    until, turn = time.perf_counter() + seconds, 0
    while not turn or (time.perf_counter() < until and turn != turns):
        turn += 1
        for name, call in them.items():
            time.sleep(PAUSE_S)
            for number in range(_CALLS):
                start = clock()
                call()
                if number >= _UNTIMED:
                    times[name].append((clock() - start) * 1e6)
    return times
