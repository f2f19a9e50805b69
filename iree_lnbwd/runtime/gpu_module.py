"""A module on a GPU, which uses arrays in its memory in place, in the order of a stream.

Everything about a call but its addresses is found out once for each kind of call.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import (
    BoundCall,
    GpuArray,
    Results,
    results_of,
    results_type,
)
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Operand, names
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime.frameworks.dlpack import view_of
from iree_lnbwd.runtime.frameworks.framework import Framework
from iree_lnbwd.runtime.gpu_driver import Driver
from iree_lnbwd.runtime.iree_module import IreeModule
from iree_lnbwd.runtime.storage import Extent, check_apart, extent
from iree_lnbwd.runtime.stream_module import LaunchSequence, StreamModule, are_aligned, picking
from iree_lnbwd.vmfb.description import OpenedModule
from iree_lnbwd.vmfb.raw_interface import storage_name

_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class KnownCall:
    """A kind of call that was checked: everything about it but the addresses.

    Attributes:
        module: The module that computes it.
        rows: M.
        input: The place of ``input`` among the arguments of a call.
        inputs: Picks the arrays that the module reads from the arguments of a call.
        copied: Which of these must be copied, because they cannot be used in place.
        views: The facts known about the arrays that it reads, and about the caller's storage, if
            any.
        results: Makes an array for each computed result, from the arguments of a call.
        sequence: The launches that it puts on a stream; None if IREE runs it.
        sets: Those of the weight, where it has some.
        strides: Those of the rows, where they do not follow each other.
        moved: The results that are computed elsewhere, because their storage is none for the
            module.
    """

    module: GpuModule
    rows: int
    input: int
    inputs: Callable[[Sequence[Any]], Sequence[Any]]
    copied: tuple[int, ...]
    views: tuple[GpuArray | None, ...]
    results: tuple[Callable[[Sequence[Any]], Any], ...]
    sequence: LaunchSequence | None
    sets: Sets | None = None
    strides: Strides | None = None
    moved: tuple[int, ...] = ()

    def run(
        self, framework: Framework, given: Sequence[Any], out: Results | None = None
    ) -> Results:
        """Computes a call of this kind.

        Args:
            framework: That of the arrays.
            given: The arguments, in the order of the op's table.
            out: The caller's storage for the results; None makes new arrays.

        Returns:
            The results; None where the module computes none.

        Raises:
            ValueError: Naming an array whose memory cannot be used.
            DeviceError: The GPU's driver refuses.
        """
        return self.module.run(self, framework, given, out)

    def named(self, computed: Sequence[Any]) -> Results:
        """The computed results in their places."""
        spec = self.module.spec
        of = results_type(spec.family)
        if len(computed) == len(of._fields):
            return of(*computed)
        by_name = zip((result.name for result in spec.results), computed, strict=True)
        return results_of(spec.family, dict(by_name))


class GpuModule:
    """A module on a GPU. Any number of threads may call.

    Attributes:
        spec: What it computes.
    """

    def __init__(
        self,
        module: OpenedModule,
        device: DeviceUri,
        *,
        alignment: int,
        iree: Callable[[], IreeModule],
    ) -> None:
        """Loads the code, if calls go onto the caller's stream.

        Args:
            module: The module to load.
            device: The GPU.
            alignment: Bytes; an array's address must be a multiple of them.
            iree: The module on IREE's device, for calls that go there.

        Raises:
            ArtifactError: The module lacks a kernel that its plans name.
            DeviceError: The GPU is absent or does not take the code.
        """
        self.spec = module.description.spec
        self._device = device
        self._alignment = alignment
        self._iree = iree
        self._driver = Driver(device)
        plans = module.description.launches
        self._streams = (
            None if plans is None else StreamModule(self.spec, plans, self._driver, module.vmfb)
        )
        self._launching = threading.Lock()

    def sequence(
        self, rows: int, sets: Sets | None = None, strides: Strides | None = None
    ) -> LaunchSequence | None:
        """The launches of a call with M >= 1 rows; None if IREE's device runs it."""
        return None if self._streams is None else self._streams.sequence(rows, sets, strides)

    def known(
        self,
        framework: Framework,
        views: Mapping[str, GpuArray | None],
        call: BoundCall,
        out: Mapping[str, GpuArray] | None = None,
        moved: Collection[str] = (),
    ) -> KnownCall:
        """The kind of a bound call for this module's spec.

        Args:
            framework: That of the arrays.
            views: The facts known about the arguments, by name.
            call: The call that they were bound to.
            out: Those about the caller's storage, by the results' names.
            moved: The results that are computed elsewhere, and then copied there.
        """
        spec, rows, sets, strides = self.spec, call.rows, call.sets, call.strides
        arguments = names(spec.family.arguments)
        places = [arguments.index(given.name) for given in spec.inputs]
        all_views = {**views, **(out or {})}
        return KnownCall(
            module=self,
            rows=rows,
            input=arguments.index(spec.family.data.name),
            inputs=picking(places),
            copied=tuple(
                place
                for place, given in enumerate(spec.inputs)
                if not call.arrays[given.name].contiguous
            ),
            views=tuple(all_views[argument.name] for argument in spec.arguments) if out else (),
            results=tuple(
                _maker(framework, spec, views, call.shape_of(result), _numpy_type(spec, result))
                for result in spec.family.results
                if spec.has(result)
            ),
            sequence=self.sequence(rows, sets, strides) if rows else None,
            sets=sets,
            strides=strides,
            moved=tuple(place for place, result in enumerate(spec.results) if result.name in moved),
        )

    def run(
        self,
        known: KnownCall,
        framework: Framework,
        given: Sequence[Any],
        out: Results | None,
    ) -> Results:
        """As `KnownCall.run`."""
        self._driver.check_process()  # before the library raises an error of its own
        results = (
            [make(given) for make in known.results]
            if out is None
            else [getattr(out, result.name) for result in self.spec.results]
        )
        storage = results
        given_addresses: list[int] = []
        if out is not None:
            given_addresses, _ = framework.addresses([*known.inputs(given), *storage])
            results = [
                known.results[place](given) if place in known.moved else result
                for place, result in enumerate(storage)
            ]
        used = [*known.inputs(given), *results]
        if known.rows == 0:
            self._check_apart(given_addresses, known)
            for result in storage:
                framework.clear(result)
            return known.named(storage)
        for place in known.copied:
            used[place] = framework.copy(self.spec.inputs[place].name, used[place])
        addresses, keeper = framework.addresses(used)
        if not are_aligned(addresses, self._alignment) or 0 in addresses:
            self._move(framework, used, addresses)
            addresses, keeper = framework.addresses(used)
        self._check_apart(given_addresses, known)
        queue = framework.stream(self._device)
        if known.sequence is None:
            self._driver.synchronize(queue)
            self._iree().run_in_place(
                [
                    (argument, framework.capsule(array), argument.dims(known.rows, known.sets))
                    for argument, array in zip(self.spec.arguments, used, strict=True)
                ],
                len(results),
                [known.sets.rows_per_set] if known.sets else [],
            )
            return self._finished(known, framework, storage, results)
        scratch, scratch_keeper = 0, None
        if size := known.sequence.scratch_bytes:
            # Of this call alone: a later one may be on another stream, or in another memory pool.
            piece = framework.empty(given[known.input], (size,), _BYTE)
            (scratch,), scratch_keeper = framework.addresses((piece,))
        captured = framework.is_captured()
        with self._launching:
            known.sequence.run(addresses, scratch, queue, captured=captured)
        if framework.waits:
            self._driver.synchronize(queue)
        del keeper, scratch_keeper  # the kernels are queued, or done
        return self._finished(known, framework, storage, results)

    @staticmethod
    def _finished(
        known: KnownCall, framework: Framework, storage: Sequence[Any], results: Sequence[Any]
    ) -> Results:
        """The results of a call, in the caller's storage."""
        for place in known.moved:
            framework.assign(storage[place], results[place])
        return known.named(storage)

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """The names of the module's arguments, as a caller knows them."""
        results = (storage_name(result.name) for result in self.spec.results)
        return (*(given.name for given in self.spec.inputs), *results)

    def _check_apart(self, addresses: Sequence[int], known: KnownCall) -> None:
        """Expects storage that shares memory with no other argument; without storage, nothing."""
        extents = [
            _extent(name, address, view)
            for name, address, view in zip(self._names, addresses, known.views, strict=False)
        ]
        inputs = len(self.spec.inputs)
        check_apart([e for e in extents[:inputs] if e], [e for e in extents[inputs:] if e])

    def _move(self, framework: Framework, used: list[Any], addresses: Sequence[int]) -> None:
        """Replaces arrays that the module cannot use in place by copies.

        Raises:
            ValueError: Such an array is storage for a result, or has no memory.
        """
        for place, (name, address) in enumerate(zip(self._names, addresses, strict=True)):
            if address and address % self._alignment == 0:
                continue
            if place >= len(self.spec.inputs):
                came = f"{address:#x}" if address else "none of its size"
                raise ValueError(
                    f"{name}: expected memory that begins at a multiple of {self._alignment} "
                    f"bytes, got {came}"
                )
            used[place] = framework.copy(name, used[place])


def _extent(name: str, address: int, view: GpuArray | None) -> Extent | None:
    """The memory of an array; None if that is not known, so that it is copied first."""
    if view is None or not (view.contiguous or view.strides):
        return None
    if view.contiguous:
        return Extent(name, address, math.prod(view.shape) * np.dtype(view.dtype).itemsize)
    return extent(name, view_of(address, view.shape, view.strides, view.dtype, keeper=None))


def _numpy_type(spec: NormSpec, operand: Operand) -> np.dtype[Any]:
    return DTYPES[spec.element_type(operand.element)].numpy


def _maker(
    framework: Framework,
    spec: NormSpec,
    views: Mapping[str, GpuArray | None],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> Callable[[Sequence[Any]], Any]:
    """Makes storage for a result: like that of an argument with its shape and type, if any."""
    arguments = names(spec.family.arguments)
    for place, name in enumerate(arguments):
        view = views[name]
        if view is not None and view.contiguous and (view.shape, view.dtype) == (shape, dtype):
            return lambda given: framework.empty_like(given[place])
    data = arguments.index(spec.family.data.name)
    return lambda given: framework.empty(given[data], shape, dtype)
