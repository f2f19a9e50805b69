"""The interface that an instruction set implements."""

from __future__ import annotations

from typing import Protocol

from iree_lnbwd.emulator.launch import Launch, Unknown
from iree_lnbwd.emulator.memory import GlobalMemory


class Executor(Protocol):
    """The kernels of one executable, of one instruction set."""

    def subgroup_size(self, kernel: str) -> int:
        """Threads of a warp or wave of a kernel."""

    def unknown(self, launch: Launch) -> list[Unknown]:
        """The parts of a kernel that are not implemented, or that forbid such a launch.

        Nothing is run. Instructions that no thread would reach count as well.

        Args:
            launch: Of the kernel; how many workgroups it has does not matter.
        """

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        """Runs a kernel to its end on global memory.

        The caller has announced the launch to the memory (`GlobalMemory.begin`).

        Raises:
            Fault: With the instruction and the launch filled in.
        """
