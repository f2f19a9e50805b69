"""Times of calls on a GPU that PyTorch has, each by two events around it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from iree_lnbwd.benchmark.gpu_times import Contender


def medians(contenders: Mapping[str, Contender], other: Tensor, rounds: int) -> dict[str, float]:
    """Microseconds of a call on the default stream, by contender; they take turns.

    Args:
        contenders: What is called.
        other: Memory that is read before each call.
        rounds: Calls of each that count, after two that do not.
    """
    import torch

    for call in contenders.values():
        call(0)
        call(1)
    events: dict[str, list[Any]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, call in contenders.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.sum()
            before.record()
            call(number)
            after.record()
            events[name].append((before, after))
    torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs)
        for name, pairs in events.items()
    }
