"""Modules of one norm on a GPU, and memory for their calls, without any library of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import numpy as np

from iree_lnbwd.errors import CompileError
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec, TensorType
from iree_lnbwd.runtime.gpu_driver import DeviceMemory, Driver
from iree_lnbwd.runtime.stream_module import LaunchSequence, StreamModule
from iree_lnbwd.schedules import Schedule
from iree_lnbwd.verification.matrix import random_call
from iree_lnbwd.vmfb.description import describe

STREAM = 0  # the GPU's default stream
_DRAWN = 1 << 22  # elements that are drawn at random for large calls, which repeat them
_ROWS_OF_SAMPLE, _HEADS = 1024, 32  # of calls whose weight has sets: usual numbers
_UNWRITTEN = 0xFF  # bytes of results before a call: NaN, in every type


class Contender:
    """A schedule's module, loaded on a GPU.

    Attributes:
        schedule: The schedule.
    """

    def __init__(self, spec: NormSpec, schedule: Schedule, driver: Driver, vmfb: bytes) -> None:
        """Loads the module's kernels.

        Raises:
            DeviceError: The GPU does not take the code.
        """
        self.schedule = schedule
        plans = describe(vmfb, source=spec.name).launches
        if plans is None:
            raise CompileError(f"{spec.name}: expected kernels that a stream can run")
        self._module = StreamModule(spec, plans, driver, vmfb)
        self._sequences: dict[tuple[int, Sets | None], LaunchSequence] = {}

    def sequence(self, rows: int, sets: Sets | None) -> LaunchSequence:
        """The launches of a call with so many rows, at least 1, and a weight of such sets."""
        if (rows, sets) not in self._sequences:
            self._sequences[rows, sets] = self._module.sequence(rows, sets)
        return self._sequences[rows, sets]


def sets_of_calls(spec: NormSpec, rows: int) -> tuple[Sets | None, ...]:
    """The sets of weights that calls are timed and checked with: of samples, and of heads."""
    if not spec.weight_sets:
        return (None,)
    of_samples = Sets(max(1, rows // _ROWS_OF_SAMPLE), _ROWS_OF_SAMPLE)
    return of_samples.for_rows(rows), Sets(_HEADS, 1)


class CallMemory:
    """Memory on a GPU for calls of a spec: its inputs, filled, its results, and scratch."""

    def __init__(
        self,
        driver: Driver,
        spec: NormSpec,
        rows: int,
        given: Mapping[str, Array] | None = None,
        sets: int = 1,
    ) -> None:
        """Reserves and fills it.

        Args:
            driver: The GPU.
            spec: What is computed.
            rows: M, the most rows of its calls.
            given: The inputs, by name; None draws them at random.
            sets: The most that the weight has in them, where the spec has sets.

        Raises:
            DeviceError: The GPU has too little memory.
        """
        self._driver, self._spec, self._rows = driver, spec, rows
        self._most = Sets(sets, 1)
        self._scratch: DeviceMemory | None = None
        self._reserved = contextlib.ExitStack()
        try:
            self._places = {a.name: self._reserve(self._nbytes(a)) for a in spec.arguments}
            self._fill(_drawn(spec, rows) if given is None else given)
        except BaseException:
            self.close()
            raise

    def call(self, contender: Contender, rows: int, sets: Sets | None = None) -> Callable[[], None]:
        """What puts a call by a contender on `STREAM`.

        Args:
            contender: The contender.
            rows: Of the call: the first ones of this memory.
            sets: Of its weight, where the spec has some.
        """
        sequence = contender.sequence(rows, sets)
        addresses = [self._places[argument.name] for argument in self._spec.arguments]

        def run() -> None:
            sequence.run(addresses, self._scratch_of(sequence), STREAM, captured=False)

        self._scratch_of(sequence)  # reserved now: not in a turn
        return run

    def results(self, contender: Contender, sets: Sets | None = None) -> dict[str, Array]:
        """The results of a call with all rows, by name; none can be another call's."""
        for result in self._spec.results:
            self._driver.fill(self._places[result.name], _UNWRITTEN, self._nbytes(result))
        with self._driver.current():
            self.call(contender, self._rows, sets)()
        found = {}
        for result in self._spec.results:
            array = np.empty(result.dims(self._rows, sets), DTYPES[result.dtype].numpy)
            self._driver.read(self._places[result.name], array)
            found[result.name] = array
        return found

    def close(self) -> None:
        """Gives the memory back."""
        self._reserved.close()
        self._scratch = None

    def _reserve(self, size: int) -> int:
        memory = self._driver.reserve(max(size, 1))
        self._reserved.callback(memory.free)
        return memory.pointer

    def _scratch_of(self, sequence: LaunchSequence) -> int:
        """Scratch that is large enough for a sequence, of all calls in this memory."""
        if self._scratch is None or self._scratch.size < sequence.scratch_bytes:
            memory = self._driver.reserve(max(sequence.scratch_bytes, 1))
            self._reserved.callback(memory.free)
            if self._scratch is not None:
                self._scratch.free()
            self._scratch = memory
        return self._scratch.pointer

    def _fill(self, given: Mapping[str, Array]) -> None:
        """Writes the inputs, again and again where they are shorter than the memory."""
        for argument in self._spec.inputs:
            array = np.ascontiguousarray(given[argument.name])
            at, size = self._places[argument.name], self._nbytes(argument)
            flat = array.reshape(-1)
            for start in range(0, size, array.nbytes):
                rest = min(array.nbytes, size - start)
                self._driver.write(at + start, flat[: rest // array.itemsize])

    def _nbytes(self, argument: TensorType) -> int:
        """Of an argument, at most."""
        shape = argument.dims(self._rows, self._most)
        return int(np.prod(shape)) * DTYPES[argument.dtype].numpy.itemsize


def _drawn(spec: NormSpec, rows: int) -> Mapping[str, Array]:
    """Random inputs of as many rows, or of fewer that stand for them."""
    few = min(rows, max(1, _DRAWN // spec.columns))
    return random_call(spec, few, np.random.default_rng(0)).arrays
