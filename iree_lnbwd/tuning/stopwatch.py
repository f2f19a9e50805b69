"""Times of calls on a GPU, by events on a stream, with nothing of a call in the cache before it.

Calls take turns on one stream, in another order in each round. Before each, other memory is read,
several times as much as the L2 cache holds. It is read and not written: otherwise the call would
pay for writing it back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.devices import Gpu
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RMS_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime.gpu_driver import Driver
from iree_lnbwd.tuning.on_gpu import STREAM, CallMemory, Contender
from iree_lnbwd.tuning.ranking import Times

# Reads two tensors and writes next to nothing: an RMS norm's gradient of its weight, alone.
_READER = NormSpec((1024,), op=RMS_NORM_BACKWARD.name, output_mask=(False, True))
# Bytes that are read: so many times the L2 cache, and at least so many, which takes long enough for
# the host to put the next call on the stream. MI300's last cache, which is no L2, holds half.
_CACHES = 8
_LEAST_BYTES = 1 << 29
_WARMING = 50  # readings before the first turn: the first calls after a pause take longer


class Stopwatch:
    """Times calls on one GPU. For one thread at a time."""

    def __init__(self, driver: Driver, target: Target, gpu: Gpu) -> None:
        """Compiles what reads the memory, and reserves that.

        Raises:
            CompileError: The compiler is missing or failed.
            DeviceError: The GPU has too little memory.
        """
        self._driver = driver
        vmfb, planned = compiler.build(_READER, target)
        # A tensor of so many rows for each of the two inputs.
        nbytes = max(_LEAST_BYTES, _CACHES * gpu.l2_bytes)
        self._rows = nbytes // (2 * 4 * _READER.columns)
        self._reader = Contender(_READER, planned.schedule, driver, vmfb)
        self._memory = CallMemory(driver, _READER, self._rows)
        self._clean = self._memory.call(self._reader, self._rows)

    def times(
        self, calls: Iterable[tuple[int, Callable[[], None]]], rounds: int
    ) -> dict[int, Times]:
        """Times of each call, by its number.

        Args:
            calls: Put their kernels on `on_gpu.STREAM`. Each is called once before it is timed.
            rounds: Turns of each.

        Raises:
            DeviceError: The GPU's driver refuses.
        """
        named = dict(calls)
        shuffle = random.Random(0).sample
        orders = [shuffle(list(named), len(named)) for _ in range(rounds)]
        events = {
            (turn, number): (self._driver.event(), self._driver.event())
            for turn, order in enumerate(orders)
            for number in order
        }
        with self._driver.current():
            for call in named.values():
                call()
            for _ in range(_WARMING):
                self._clean()
            for turn, order in enumerate(orders):
                for number in order:
                    before, after = events[turn, number]
                    self._clean()
                    before.record(STREAM)
                    named[number]()
                    after.record(STREAM)
            return {
                number: Times(
                    tuple(
                        events[turn, number][1].microseconds_since(events[turn, number][0])
                        for turn in range(rounds)
                    )
                )
                for number in named
            }

    def close(self) -> None:
        """Gives the memory back."""
        self._memory.close()
