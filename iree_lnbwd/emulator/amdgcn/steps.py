"""An instruction that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from iree_lnbwd.emulator.amdgcn.arguments import Arguments
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.waves import NULL, Group, Mask, Register
from iree_lnbwd.emulator.launch import Launch
from iree_lnbwd.emulator.memory import GlobalMemory, LocalMemory, SharedMemory

Registers = tuple[tuple[bool, int], ...]


class Then(Enum):
    """What comes after an instruction."""

    NEXT = auto()
    BRANCH = auto()
    BARRIER = auto()
    END = auto()


@dataclass(frozen=True)
class Machine:
    """What instructions need beside registers.

    Attributes:
        launch: The dispatch.
        memory: Global memory.
        shared: LDS of the workgroups that run.
        local: Scratch of their threads.
        arguments: The kernel's arguments in memory.
        first_workgroup: Of those that run.
    """

    launch: Launch
    memory: GlobalMemory
    shared: SharedMemory
    local: LocalMemory
    arguments: Arguments
    first_workgroup: int


@dataclass(frozen=True)
class Step:
    """A decoded instruction.

    Attributes:
        instruction: Its text.
        run: Does it.
        reads, writes: The registers that it touches.
        loads: The counter of `waits`, where it is a load.
        then: What comes after it.
        target: Where a branch goes.
        taken: Which waves branch; None for all.
    """

    instruction: Instruction
    run: Callable[[Group, Machine], None]
    reads: Registers = ()
    writes: Registers = ()
    loads: str = ""
    then: Then = Then.NEXT
    target: int = 0
    taken: Callable[[Group], Mask] | None = None


def numbers(registers: Iterable[Register | None]) -> Registers:
    """The registers of some operands, one by one."""
    return tuple(
        (run.vector, run.index + n)
        for run in registers
        if run is not None
        for n in range(run.count)
        if run.vector or run.index + n != NULL
    )


def nothing(group: Group, machine: Machine) -> None:
    """What an instruction does that says something to the hardware alone."""
