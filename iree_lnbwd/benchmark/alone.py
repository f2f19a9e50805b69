"""Ours without PyTorch: whole calls with NumPy's arrays on the CPU, kernels on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np

from iree_lnbwd import functional
from iree_lnbwd.benchmark.cells import EPS, Cell
from iree_lnbwd.benchmark.host_times import Call, call_times
from iree_lnbwd.calls import modules
from iree_lnbwd.hardware.devices import DeviceUri, gpu_of, target_of
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import gpu_driver, host_threads
from iree_lnbwd.tuning.on_gpu import CallMemory, Contender
from iree_lnbwd.tuning.stopwatch import Stopwatch
from iree_lnbwd.verification.matrix import random_call

OURS = "iree-lnbwd"
LEAST = "least times of whole"  # other work on the machine only adds to a call's time
SECONDS, TURNS = 5.0, 40  # of a cell on the CPU, at most
_GPU_TURNS = 41


class OnHost:
    """Times calls of the functions with NumPy's arrays."""

    columns = (OURS,)
    how = f"{LEAST} calls with NumPy's arrays"

    def times(self, cell: Cell) -> Mapping[str, float]:
        """Microseconds of a call, by column."""
        them = {OURS: _function_call(cell)}
        return {name: min(each) for name, each in call_times(them, SECONDS, turns=TURNS).items()}

    def facts(self) -> dict[str, str]:
        """What the times depend on, besides the device."""
        threads = host_threads.of_caller()
        return {} if threads is None else {"threads": f"{threads.number} at most"}

    def specs(self, cells: Iterable[Cell]) -> list[NormSpec]:
        """What there were modules for."""
        return list(dict.fromkeys(cell.spec for cell in cells))

    def close(self) -> None:
        """Nothing is kept."""


class OnGpu(OnHost):
    """Times kernels by events on a stream."""

    how = "medians of a call's kernels by events on a stream, with other data in the L2 cache"

    def __init__(self, uri: DeviceUri) -> None:
        """Opens the GPU.

        Raises:
            CompileError, DeviceError: As `Stopwatch`.
        """
        self._uri = uri
        self._driver = gpu_driver.Driver(uri)
        self._stopwatch = Stopwatch(self._driver, target_of(uri), gpu_of(uri))

    def times(self, cell: Cell) -> Mapping[str, float]:
        """Microseconds of a call, by column."""
        vmfb, planned = modules.entry(cell.spec, self._uri).build()
        contender = Contender(cell.spec, planned.schedule, self._driver, vmfb)
        with contextlib.closing(CallMemory(self._driver, cell.spec, cell.rows)) as memory:
            calls = [(0, memory.call(contender, cell.rows))]
            return {OURS: self._stopwatch.times(calls, _GPU_TURNS)[0].median}

    def facts(self) -> dict[str, str]:
        """Nothing but the device."""
        return {}

    def close(self) -> None:
        """Gives the GPU's memory back."""
        self._stopwatch.close()


def _function_call(cell: Cell) -> Call:
    call = random_call(cell.spec, cell.rows, np.random.default_rng(0))
    shapes = {Kind.CELLS: (cell.rows, *cell.normalized_shape), Kind.COLUMNS: cell.normalized_shape}
    given = {
        name: array.reshape(shapes.get(cell.family.named(name).kind, array.shape))
        for name, array in call.arrays.items()
    }
    function = getattr(functional, cell.op)
    options = {} if cell.family.is_backward else {"eps": EPS}
    return lambda: function(**given, normalized_shape=cell.normalized_shape, **options)
