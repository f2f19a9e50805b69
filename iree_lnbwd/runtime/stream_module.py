"""A module's kernels on the caller's stream, for one kind of call, without copies or host waits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import WEIGHT
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime.gpu_driver import DeviceMemory, Driver, DriverLaunch, Graph
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.executables import exports
from iree_lnbwd.vmfb.launches import LaunchPlans, Plan

_SCRATCH_BYTES = 256  # each piece of scratch is rounded up to a multiple


@dataclass(frozen=True)
class LaunchSequence:
    """All launches of a call with M rows. Not for two threads at a time.

    Attributes:
        driver: The GPU.
        launches: In order.
        picks: For each launch, a function that picks its pointers among those of `run`.
        graph: The graph of these launches, if there are several and the GPU has graphs.
        fixed: Memory that is the module's own.
        scratch: Where each piece begins in the call's scratch memory.
        scratch_bytes: Bytes of all pieces.
        scratch_names: The names of the pieces in launches.
        bindings: The operands that the pointers of each launch point to.
    """

    driver: Driver
    launches: tuple[DriverLaunch, ...]
    picks: tuple[Callable[[Sequence[int]], Sequence[int]], ...]
    graph: Graph | None
    fixed: tuple[DeviceMemory, ...]
    scratch: tuple[int, ...]
    scratch_bytes: int
    scratch_names: tuple[str, ...]
    bindings: tuple[tuple[str, ...], ...]

    def run(self, addresses: Sequence[int], scratch: int, stream: int, *, captured: bool) -> None:
        """Puts the kernels on a stream.

        Args:
            addresses: Of the spec's arguments, in its order.
            scratch: Address of `scratch_bytes` bytes.
            stream: The driver's handle of it.
            captured: Whether the caller is capturing the stream into a graph.

        Raises:
            DeviceError: The driver refuses.
        """
        if not self.driver.is_current():
            with self.driver.current():
                return self.run(addresses, scratch, stream, captured=captured)
        fixed = [memory.pointer for memory in self.fixed]
        pointers = [*addresses, *fixed, *[scratch + start for start in self.scratch]]
        for launch, pick in zip(self.launches, self.picks, strict=True):
            launch.fill(pick(pointers))
        if captured:
            self._stay()
        if self.graph is not None and not captured:
            return self.graph.run(self.launches, stream)
        for launch in self.launches:
            launch.run(stream)
        return None

    def _stay(self) -> None:
        """Leaves code and memory for the caller's graph: nothing says when that is gone."""
        for launch in self.launches:
            launch.stay()
        for memory in self.fixed:
            memory.stay()


def are_aligned(addresses: Sequence[int], alignment: int) -> bool:
    """Whether all addresses are multiples of the alignment."""
    return functools.reduce(operator.or_, addresses, 0) % alignment == 0


def picking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the items at these places; `operator.itemgetter` of one would give no tuple."""
    if len(places) == 1:
        return lambda given: (given[places[0]],)
    return operator.itemgetter(*places)


class StreamModule:
    """A module's kernels, loaded on a GPU."""

    def __init__(self, spec: NormSpec, launches: LaunchPlans, driver: Driver, vmfb: bytes) -> None:
        """Loads the code.

        Raises:
            ArtifactError: The module lacks a kernel that its launches name.
            DeviceError: The GPU does not take the code.
        """
        self._spec = spec
        self._launches = launches
        self._driver = driver
        self._kernels = driver.kernels(exports(vmfb))
        named = {launch.kernel for plan in launches.plans for launch in plan.kernels}
        missing = named - set(self._kernels)
        if missing:
            raise ArtifactError(
                f"{spec.name}: no kernel {', '.join(sorted(missing))} in the module"
            )
        self._graphs: dict[Plan, Graph] = {}  # one for all M of a plan: only numbers change
        # Kernels of a backward multiply by gamma even if the op has none.
        bound = {name for p in launches.plans for k in p.kernels for name in k.bindings}
        needs_ones = WEIGHT.name in bound and not spec.has_weight
        self._ones = driver.upload(_ones(spec)) if needs_ones else None

    def sequence(
        self, rows: int, sets: Sets | None = None, strides: Strides | None = None
    ) -> LaunchSequence:
        """The launches for M rows, M >= 1, and for a call's sets of weights and strides."""
        plan = self._launches.of(rows)
        count = functools.partial(count_of, rows=rows, sets=sets, strides=strides)
        names = [argument.name for argument in self._spec.arguments]
        names += [WEIGHT.name] if self._ones else []
        starts, end = [], 0
        for piece in plan.scratch:
            names.append(piece.name)
            starts.append(end)
            size = piece.bytes * count(piece.count)
            end += -(-size // _SCRATCH_BYTES) * _SCRATCH_BYTES
        places = {name: place for place, name in enumerate(names)}
        launches, picks = [], []
        for planned in plan.kernels:
            x, y, z = map(count, planned.workgroups)
            constants = [*map(count, planned.constants)]
            launches.append(self._kernels[planned.kernel].launch((x, y, z), constants))
            picks.append(picking([places[name] for name in planned.bindings]))
        if len(launches) > 1 and self._driver.has_graphs and plan not in self._graphs:
            self._graphs[plan] = self._driver.graph(launches)
        return LaunchSequence(
            driver=self._driver,
            launches=tuple(launches),
            picks=tuple(picks),
            graph=self._graphs.get(plan),
            fixed=(self._ones,) if self._ones else (),
            scratch=tuple(starts),
            scratch_bytes=end,
            scratch_names=tuple(piece.name for piece in plan.scratch),
            bindings=tuple(planned.bindings for planned in plan.kernels),
        )


def _ones(spec: NormSpec) -> bytes:
    return np.ones(spec.columns, DTYPES[spec.gamma_dtype].numpy).tobytes()
