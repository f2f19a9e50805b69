"""A kernel's launch, and the faults while it runs.

A *lane* is one thread of a launch, numbered over all workgroups: workgroup times threads of a
workgroup, plus the thread's number in its workgroup (x fastest in both; the workgroups of a cluster
follow each other). Everything that threads do is an array over lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Dim3 = tuple[int, int, int]
Numbers = TypeVar("Numbers", int, Lanes)

_THREADS_NAMED = 4  # in a message

# The most work of a launch before it counts as endless: instructions times the lanes that run them.
# Few lanes count as a larger number, because Python is no quicker with them. About ten minutes.
_MOST_WORK = 1 << 39
_FEW_LANES = 1 << 16


class Fault(Exception):  # noqa: N818 - a kernel's fault, not an error of the emulator
    """A kernel did what no kernel may do.

    Each part fills in the attributes that it knows: memory the description and the lanes, an
    executor the instruction. The launch gives the lanes their names.

    Attributes:
        what: A description, with the buffer and the offset if the fault is about memory.
        lanes: The threads that did it.
        instruction: The text and line of the instruction.
        launch: The launch of the kernel.
    """

    def __init__(self, what: str, lanes: Sequence[int] | Lanes = ()) -> None:
        super().__init__(what)
        self.what = what
        self.lanes = tuple(int(lane) for lane in lanes)
        self.instruction = ""
        self.launch: Launch | None = None

    def of(self, launch: Launch) -> Fault:
        """The same fault, with the launch filled in."""
        self.launch = launch
        return self

    def __str__(self) -> str:
        parts = [self.what]
        if self.launch is not None:
            parts.insert(0, f"kernel {self.launch.kernel}")
            if self.lanes:
                named = ", ".join(self.launch.name(lane) for lane in self.lanes[:_THREADS_NAMED])
                more = len(self.lanes) - _THREADS_NAMED
                parts.append(f"by {named}" + (f" and {more} more" if more > 0 else ""))
        if self.instruction:
            parts.append(f"at {self.instruction}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Binding:
    """A piece of global memory that a kernel is given.

    Attributes:
        address: Of its first byte.
        nbytes: How long it is; everything beyond it is out of bounds.
        writable: False if the kernel promised only to read.
    """

    address: int
    nbytes: int
    writable: bool = True


@dataclass(frozen=True)
class Launch:
    """One dispatch of a kernel.

    Attributes:
        kernel: Its name.
        workgroup_count: Workgroups along x, y, z.
        workgroup_size: Threads of a workgroup along x, y, z.
        subgroup_size: Threads of a warp or wave.
        shared_bytes: Dynamic shared memory (LDS) of a workgroup.
        constants: 32-bit push constants.
        bindings: Global memory, in the order of the kernel's pipeline layout.
        cluster: Workgroups of a cluster along x, y, z.
    """

    kernel: str
    workgroup_count: Dim3
    workgroup_size: Dim3
    subgroup_size: int
    shared_bytes: int
    constants: tuple[int, ...]
    bindings: tuple[Binding, ...]
    cluster: Dim3 = (1, 1, 1)

    @property
    def workgroups(self) -> int:
        """How many there are."""
        return math.prod(self.workgroup_count)

    @property
    def threads(self) -> int:
        """Threads of one workgroup."""
        return math.prod(self.workgroup_size)

    @property
    def lanes(self) -> int:
        """Threads of all workgroups."""
        return self.workgroups * self.threads

    def name(self, lane: int) -> str:
        """A readable name of a thread."""
        workgroup, thread = divmod(lane, self.threads)
        at = coordinates(workgroup, self.workgroup_count, self.cluster)
        return (
            f"workgroup {_shown(at, self.workgroup_count)} "
            f"thread {_shown(coordinates(thread, self.workgroup_size), self.workgroup_size)}"
        )


@dataclass(frozen=True)
class Unknown:
    """A part of a kernel that is not implemented.

    Attributes:
        kernel: Its name; empty for the host program.
        line: The line in the kernels' text, from 1; 0 if the whole kernel is meant.
        text: The text of the line.
        why: What is not known about it.
    """

    kernel: str
    line: int
    text: str
    why: str

    def __str__(self) -> str:
        where = f"kernel {self.kernel}" if self.kernel else "the host program"
        where += f", line {self.line}" if self.line else ""
        return ": ".join(part for part in (where, self.text, self.why) if part)


# The errors that Python and NumPy raise if code uses a value as another kind than it is.
CONFUSION = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def not_understood(error: Exception) -> Fault:
    """The fault of an instruction whose operands are of the wrong kind."""
    return Fault(f"not understood: {type(error).__name__}: {error}")


class Work:
    """The work of a launch so far, over all its workgroups; too much is a fault.

    There is no other way to tell an endless kernel from a long one.
    """

    def __init__(self) -> None:
        self._instructions = 0
        self._left = _MOST_WORK

    def add(self, instructions: int, lanes: int) -> None:
        """Adds that a number of lanes run a number of instructions.

        Raises:
            Fault: That is more than a kernel that ends would run.
        """
        self._instructions += instructions
        self._left -= instructions * max(lanes, _FEW_LANES)
        if self._left < 0:
            raise Fault(f"the kernel does not end: {self._instructions} instructions were run")


def coordinates(numbers: Numbers, counts: Dim3, cluster: Dim3 = (1, 1, 1)) -> list[Numbers]:
    """Where things are along x, y and z that are numbered cluster by cluster, along x first.

    Args:
        numbers: One of them, or several.
        counts: How many there are along x, y and z.
        cluster: How many of them are a cluster.
    """
    which, rank = numbers // math.prod(cluster), numbers % math.prod(cluster)
    found = []
    for count, size in zip(counts, cluster, strict=True):
        found.append(which % (count // size) * size + rank % size)
        which, rank = which // (count // size), rank // size
    return found


def _shown(place: list[int], counts: Dim3) -> str:
    """x, or (x, y, z) where there is more than x."""
    return str(place[0] if counts[1:] == (1, 1) else tuple(place))
