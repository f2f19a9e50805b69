"""Kernel and whole-call times on a GPU that PyTorch has.

A kernel's time is the one that CUPTI reports through torch.profiler. Contenders take turns on one
stream, call by call, in one profile; buffers rotate so that a call finds none of its data in the L2
cache. Before each call, other memory is read. Otherwise a call would pay for writing back the data
that the call before it left in the cache, up to a tenth of a short call.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

OTHER_BYTES = 800_000_000  # many times the L2 cache of any GPU; the host is ahead meanwhile
_WARMING = 50  # readings of that memory before the first round: 10 ms

Contender = Callable[[int], object]  # calls itself on the i-th set of buffers


@dataclass(frozen=True)
class Times:
    """Microseconds of one contender, all kernels of a call added up; and of its kernels."""

    p20: float
    p50: float
    p80: float
    kernels: tuple[float, ...]


def kernel_times(contenders: Mapping[str, Contender], rounds: int = 15) -> dict[str, Times]:
    """Times of every contender's kernels, all contenders taking turns in each round.

    The first calls after a pause take longer: on an H200, up to 2 us of 64. So there is no pause
    between rounds, the GPU is busy before the first, and each round has another order, which is
    the same in every run.
    """
    kernels = {name: _count_kernels(contender) for name, contender in contenders.items()}
    other = torch.ones(OTHER_BYTES // 4, device="cuda")

    def clean_cache(_: int) -> object:
        return other.sum()

    cleaning = _count_kernels(clean_cache)
    shuffle = random.Random(0).sample
    orders = [shuffle(list(contenders), len(contenders)) for _ in range(rounds)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for i in range(_WARMING):
            clean_cache(i)
        for i, order in enumerate(orders):
            for name in order:
                clean_cache(i)
                contenders[name](i)
        torch.cuda.synchronize()
    events = iter(kernel_events(profiled)[_WARMING * cleaning :])
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for order in orders:
        for name in order:
            for _ in range(cleaning):
                next(events)
            samples[name].append([next(events).device_time for _ in range(kernels[name])])
    return {name: _times(calls) for name, calls in samples.items()}


def _count_kernels(contender: Contender) -> int:
    for i in range(3):
        contender(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        contender(0)
        torch.cuda.synchronize()
    return len(kernel_events(profiled))


def kernel_events(profiled: Any) -> list[Any]:
    """In the order of their start; memory copies and fills count, they are part of a call."""
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
    return sorted(events, key=lambda e: e.time_range.start)


def _times(calls: Sequence[Sequence[float]]) -> Times:
    totals = [sum(call) for call in calls]
    deciles = statistics.quantiles(totals, n=10)
    return Times(
        p20=deciles[1],
        p50=statistics.median(totals),
        p80=deciles[7],
        kernels=tuple(statistics.median(kernel) for kernel in zip(*calls, strict=True)),
    )


def whole_call_times(contender: Contender, calls: int = 200) -> tuple[float, float]:
    """Microseconds a call, of many in a row: of the host alone, and until all is done."""
    for i in range(5):
        contender(i)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(calls):
        contender(i)
    issued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return (issued - start) / calls * 1e6, (done - start) / calls * 1e6
