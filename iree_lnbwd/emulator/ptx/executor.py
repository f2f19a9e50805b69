"""Runs the kernels of a PTX module, on arrays over all threads of many workgroups at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from iree_lnbwd.emulator import clusters, limits, mbarriers
from iree_lnbwd.emulator.launch import Fault, Launch, Unknown, Work
from iree_lnbwd.emulator.memory import GlobalMemory, workgroups_at_once
from iree_lnbwd.emulator.ptx.decoder import Decoder, Program
from iree_lnbwd.emulator.ptx.parser import Kernel, parse
from iree_lnbwd.emulator.ptx.threads import WARP, Threads

# So many threads that their registers still fit a processor's cache.
_LANES_AT_ONCE = 1 << 16


class PtxExecutor:
    """The kernels of a PTX module."""

    def __init__(self, text: str) -> None:
        """Parses a module.

        Raises:
            PtxError: It is not PTX.
        """
        self._kernels = parse(text)
        self._programs: dict[str, Program] = {}

    def subgroup_size(self, kernel: str) -> int:
        """Threads of a warp."""
        return WARP

    def unknown(self, launch: Launch) -> list[Unknown]:
        """The parts of a kernel that are not implemented (`executor.Executor`)."""
        if launch.kernel not in self._kernels:
            return [Unknown(launch.kernel, 0, "", "no such kernel")]
        kernel, found = self._kernels[launch.kernel], []
        try:
            _check(kernel, launch)
        except Fault as fault:
            found.append(Unknown(kernel.name, 0, "", fault.what))
        decoder = Decoder(kernel)
        for instruction in kernel.code:
            try:
                decoder.check(instruction)
            except Fault as fault:
                found.append(Unknown(kernel.name, instruction.line, instruction.text, fault.what))
        return found

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        """Runs a kernel to its end (`executor.Executor`).

        Raises:
            Fault: With the instruction and the launch filled in.
        """
        try:
            program = self._program(launch)
            kernel = program.kernel
            launch = replace(launch, cluster=kernel.cluster)
            of_cluster = math.prod(kernel.cluster)
            shared = kernel.nbytes["shared"] + launch.shared_bytes
            notes = 0
            if program.has_mbarriers:
                notes = mbarriers.notes_on(shared, -(-launch.threads // WARP), of_cluster)
            is_followed = of_cluster > 1 or program.has_mbarriers
            room = workgroups_at_once(
                2 * shared if is_followed else shared,  # with the notes on who touches it
                2 * kernel.nbytes["local"] + program.register_bytes + -(-notes // launch.threads),
                launch.threads,
            )
            if room < of_cluster:
                raise Fault(f"a cluster of {of_cluster} workgroups: the emulator runs {room}")
            at_once = max(1, min(room, _LANES_AT_ONCE // launch.threads))
            at_once = max(1, at_once // of_cluster) * of_cluster
            work = Work()
            for first in range(0, launch.workgroups, at_once):
                count = min(at_once, launch.workgroups - first)
                with np.errstate(all="ignore"):
                    Threads(
                        kernel,
                        program.blocks,
                        launch,
                        memory,
                        first,
                        count,
                        has_mbarriers=program.has_mbarriers,
                        has_bulk_copies=program.has_bulk_copies,
                    ).run(work)
        except Fault as fault:
            raise fault.of(launch) from None

    def _program(self, launch: Launch) -> Program:
        if launch.kernel not in self._kernels:
            raise Fault(f"no such kernel; the module has {', '.join(self._kernels)}")
        kernel = self._kernels[launch.kernel]
        _check(kernel, launch)
        if launch.kernel not in self._programs:
            self._programs[launch.kernel] = Program(kernel)
        return self._programs[launch.kernel]


def _check(kernel: Kernel, launch: Launch) -> None:
    """Expects a launch that the kernel allows.

    Raises:
        Fault: It does not.
    """
    limits.check(
        launch,
        limits.of_cuda(kernel.target),
        static_bytes=kernel.nbytes["shared"],
        local_bytes=kernel.nbytes["local"],
    )
    if kernel.unknown_directives:
        raise Fault(f"unknown directives {', '.join(kernel.unknown_directives)}")
    if kernel.max_threads is not None and launch.threads > kernel.max_threads:
        raise Fault(f"workgroups of {launch.threads} threads: .maxntid allows {kernel.max_threads}")
    if kernel.required_size not in (None, launch.workgroup_size):
        raise Fault(
            f"workgroups of {launch.workgroup_size} threads: .reqntid asks for "
            f"{kernel.required_size}"
        )
    _check_clusters(kernel, launch)
    given = [64] * len(launch.bindings) + [32] * len(launch.constants)
    widths = [int(type_[1:]) for type_ in kernel.parameters.values()]
    if given != widths:
        raise Fault(
            f"{len(launch.bindings)} bindings and {len(launch.constants)} constants for "
            f"parameters of {widths} bits"
        )


def _check_clusters(kernel: Kernel, launch: Launch) -> None:
    if not 1 <= math.prod(kernel.cluster) <= clusters.MOST_WORKGROUPS:
        raise Fault(
            f"clusters of {kernel.cluster} workgroups: expected up to {clusters.MOST_WORKGROUPS}"
        )
    for axis, count, size in zip("xyz", launch.workgroup_count, kernel.cluster, strict=True):
        if count % size:
            raise Fault(f"{count} workgroups along {axis}, in clusters of {size}")
