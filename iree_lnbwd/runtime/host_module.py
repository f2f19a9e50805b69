"""A module's kernels on the threads of its caller, on the CPU, for one kind of call."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.errors import ArtifactError, DeviceError
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import Strides
from iree_lnbwd.runtime.host_library import (
    ENVIRONMENT,
    PLAIN,
    Dispatch,
    Function,
    HostLibraries,
    Workgroup,
)
from iree_lnbwd.vmfb.counts import count_of
from iree_lnbwd.vmfb.launches import LaunchPlans

_SCRATCH_BYTES = 64  # each piece of scratch is rounded up to a multiple: a line of the cache
_SEQUENCES_KEPT = 64  # of a module: numbers of rows


def address_of(array: Array) -> int:
    """Of a contiguous array's first element; as ``array.ctypes.data``, in a fifth of the time."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):  # it is read-only, or of no type of C's
        return int(array.ctypes.data)


@dataclass(frozen=True)
class HostLaunch:
    """One kernel of a call with M rows.

    Attributes:
        function: Its address.
        workgroups: Along x, y and z.
        constants: 32-bit numbers.
        bindings: The operands that its pointers point to.
        lengths: Bytes of each of them.
    """

    function: int
    workgroups: tuple[int, int, int]
    constants: tuple[int, ...]
    bindings: tuple[str, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HostSequence:
    """All launches of a call with M rows. Any number of threads may run it.

    Attributes:
        libraries: What the kernels are in.
        arguments: The names of the spec's arguments.
        launches: In order; each may start when the one before is done.
        scratch: Where each piece begins in the call's scratch memory.
        scratch_bytes: Bytes of all pieces.
        scratch_names: The names of the pieces in launches.
    """

    libraries: HostLibraries
    arguments: tuple[str, ...]
    launches: tuple[HostLaunch, ...]
    scratch: tuple[int, ...]
    scratch_bytes: int
    scratch_names: tuple[str, ...]

    def run(self, addresses: Sequence[int]) -> None:
        """Runs them on the calling thread.

        Args:
            addresses: Of the spec's arguments, in its order.

        Raises:
            DeviceError: A kernel fails, which ours do not.
        """
        pointers = list(addresses)
        if self.scratch_bytes:
            scratch = np.empty(self.scratch_bytes, np.uint8)
            start = address_of(scratch)
            pointers += [start + piece for piece in self.scratch]
        for launch in self._prepared:
            launch.run(pointers)

    @functools.cached_property
    def _prepared(self) -> tuple[_Prepared, ...]:
        places = {name: at for at, name in enumerate((*self.arguments, *self.scratch_names))}
        return tuple(_Prepared(launch, places) for launch in self.launches)


class _Prepared:
    """A launch whose workgroups Python calls one by one."""

    def __init__(self, launch: HostLaunch, places: dict[str, int]) -> None:
        x, y, z = launch.workgroups
        count, pointers = x * y * z, len(launch.bindings)
        self._function = Function(launch.function)
        self._places = tuple(places[name] for name in launch.bindings)
        self._pointers = ctypes.c_void_p * pointers
        self._constants = (ctypes.c_uint32 * len(launch.constants))(*launch.constants)
        self._lengths = (ctypes.c_size_t * pointers)(*launch.lengths)
        sizes = (*PLAIN, len(launch.constants), x, y, z, 1, pointers)
        self._first = (*sizes, ctypes.addressof(self._constants))
        self._last = ctypes.addressof(self._lengths)
        self._workgroups = (Workgroup * count)(
            *(Workgroup(at % x, at // x % y, at // x // y) for at in range(count))
        )
        self._each = tuple(map(ctypes.addressof, self._workgroups))

    def run(self, pointers: Sequence[int]) -> None:
        """As `HostSequence.run`, of all pointers."""
        own = self._pointers(*[pointers[place] for place in self._places])
        dispatch = Dispatch(*self._first, ctypes.addressof(own), self._last)
        at, function = ctypes.addressof(dispatch), self._function
        for workgroup in self._each:
            if function(ENVIRONMENT, at, workgroup):
                raise DeviceError("device: a kernel failed on the CPU")


class HostModule:
    """A module's kernels, loaded in this process. Any number of threads may call."""

    def __init__(self, spec: NormSpec, launches: LaunchPlans, vmfb: bytes) -> None:
        """Loads the code.

        Args:
            spec: What the module computes.
            launches: Its plans.
            vmfb: The module, which IREE has loaded on this CPU.

        Raises:
            ArtifactError: The module lacks a kernel that its launches name, or has another one.
            UnservedError: As `HostLibraries`.
        """
        self.spec = spec
        self._launches = launches
        self._libraries = HostLibraries(vmfb)
        for planned in (launch for plan in launches.plans for launch in plan.kernels):
            kernel = self._libraries.kernels.get(planned.kernel)
            if kernel is None:
                raise ArtifactError(f"{spec.name}: no kernel {planned.kernel} in the module")
            takes = (kernel.constants, kernel.bindings)
            if takes != (given := (len(planned.constants), len(planned.bindings))):
                raise ArtifactError(
                    f"{spec.name}: the kernel {planned.kernel} takes {takes} constants and "
                    f"pointers, its launch has {given}"
                )

        self._kept = functools.lru_cache(_SEQUENCES_KEPT)(self._made)

    def sequence(
        self, rows: int, sets: Sets | None = None, strides: Strides | None = None
    ) -> HostSequence:
        """The launches for M rows, M >= 1, and for a call's sets of weights and strides."""
        return self._kept(rows, sets, strides)

    def _made(self, rows: int, sets: Sets | None, strides: Strides | None) -> HostSequence:
        count = functools.partial(count_of, rows=rows, sets=sets, strides=strides)
        plan = self._launches.of(rows)
        sizes = {
            argument.name: math.prod(argument.dims(rows, sets, strides))
            * DTYPES[argument.dtype].numpy.itemsize
            for argument in self.spec.arguments
        }
        starts, end = [], 0
        for piece in plan.scratch:
            starts.append(end)
            sizes[piece.name] = piece.bytes * count(piece.count)
            end += -(-sizes[piece.name] // _SCRATCH_BYTES) * _SCRATCH_BYTES
        launches = []
        for planned in plan.kernels:
            x, y, z = map(count, planned.workgroups)
            launches.append(
                HostLaunch(
                    self._libraries.kernels[planned.kernel].function,
                    (x, y, z),
                    tuple(map(count, planned.constants)),
                    planned.bindings,
                    tuple(sizes[name] for name in planned.bindings),
                )
            )
        return HostSequence(
            self._libraries,
            tuple(argument.name for argument in self.spec.arguments),
            tuple(launches),
            tuple(starts),
            end,
            tuple(piece.name for piece in plan.scratch),
        )
