"""A module's kernels on the threads of its caller, on the CPU: everything but the threads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.launches import LaunchPlans, count_of
from iree_lnbwd.runtime.host_library import HostLibraries
from iree_lnbwd.spec import NormSpec

_SCRATCH_BYTES = 64  # each piece of scratch is rounded up to a multiple: a line of the cache


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
        launches: In order; each may start when the one before is done.
        scratch: Where each piece begins in the call's scratch memory.
        scratch_bytes: Bytes of all pieces.
        scratch_names: The names of the pieces in launches.
    """

    libraries: HostLibraries
    launches: tuple[HostLaunch, ...]
    scratch: tuple[int, ...]
    scratch_bytes: int
    scratch_names: tuple[str, ...]


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

    def sequence(self, rows: int) -> HostSequence:
        """The launches for M rows, M >= 1."""
        plan = self._launches.of(rows)
        sizes = {
            argument.name: math.prod(argument.dims(rows)) * DTYPES[argument.dtype].numpy.itemsize
            for argument in self.spec.arguments
        }
        starts, end = [], 0
        for piece in plan.scratch:
            starts.append(end)
            sizes[piece.name] = piece.bytes * count_of(piece.count, rows)
            end += -(-sizes[piece.name] // _SCRATCH_BYTES) * _SCRATCH_BYTES
        launches = []
        for planned in plan.kernels:
            x, y, z = (count_of(count, rows) for count in planned.workgroups)
            launches.append(
                HostLaunch(
                    self._libraries.kernels[planned.kernel].function,
                    (x, y, z),
                    tuple(count_of(count, rows) for count in planned.constants),
                    planned.bindings,
                    tuple(sizes[name] for name in planned.bindings),
                )
            )
        return HostSequence(
            self._libraries,
            tuple(launches),
            tuple(starts),
            end,
            tuple(piece.name for piece in plan.scratch),
        )
