"""The threads of some workgroups while they run: their registers, and which block each is at.

In each step, the earliest block that any thread can run is run by all threads that are at it.
Barriers and shuffles wait for their threads. Hardware may choose any such order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator import clusters, mbarriers
from iree_lnbwd.emulator.launch import (
    CONFUSION,
    Array,
    Fault,
    Lanes,
    Launch,
    Work,
    coordinates,
    not_understood,
)
from iree_lnbwd.emulator.memory import POISON, GlobalMemory, LocalMemory, SharedMemory
from iree_lnbwd.emulator.order import Order
from iree_lnbwd.emulator.ptx.parser import Instruction, Kernel
from iree_lnbwd.emulator.ptx.types import DTYPES

WARP = 32

# The threads that an instruction is for: a range, or their numbers.
Selection = slice | Lanes
Step = Callable[["Threads", Selection], None]
Sync = Callable[["Threads", Lanes, "npt.NDArray[np.bool_]"], "npt.NDArray[np.bool_]"]
Reader = Callable[["Threads", Selection], Array]
Writer = Callable[["Threads", Selection, Array], None]
Choice = Callable[["Threads", Selection], Lanes]  # a block for each thread


@dataclass
class Block:
    """Instructions in sequence, and then a jump, an end, a wait, or the next block.

    Attributes:
        steps: The instructions with effects on registers and memory.
        instruction: The jump, end or wait.
        target: Number of the block that a jump goes to.
        choose: Of a jump whose threads go to several blocks: the number for each.
        ends: Threads end here.
        sync: The threads to wait for, and the operation that they do together.
    """

    steps: list[tuple[Instruction, Step]]
    instruction: Instruction | None = None
    target: int | None = None
    choose: Choice | None = None
    ends: bool = False
    sync: Sync | None = None


class Threads:
    """Some workgroups of a launch while they run."""

    def __init__(
        self,
        kernel: Kernel,
        blocks: Sequence[Block],
        launch: Launch,
        memory: GlobalMemory,
        first: int,
        count: int,
        *,
        has_mbarriers: bool,
        has_bulk_copies: bool,
    ) -> None:
        self._blocks = blocks
        self.lanes = count * launch.threads
        self.threads = launch.threads
        self._whole_warps = launch.threads % WARP == 0
        self.first_lane = first * launch.threads
        self.memory = memory
        self.shared = SharedMemory(
            kernel.nbytes["shared"] + launch.shared_bytes,
            workgroups=count,
            threads=launch.threads,
            subgroup_size=WARP,
            first_lane=self.first_lane,
            has_bulk_copies=has_bulk_copies,
        )
        size = math.prod(kernel.cluster)
        self.cluster = self.order = self.mbarriers = None
        if size > 1 or has_mbarriers:
            if has_mbarriers:
                self.order = Order(
                    size=size,
                    workgroups=count,
                    threads=launch.threads,
                    subgroup_size=WARP,
                    facts=size * mbarriers.MOST,
                )
            self.cluster = clusters.Cluster(
                self.shared.nbytes,
                size=size,
                workgroups=count,
                threads=launch.threads,
                first_lane=self.first_lane,
                order=self.order,
            )
        if self.cluster is not None and self.order is not None:
            self.mbarriers = mbarriers.Mbarriers(
                self.shared,
                self.cluster,
                self.order,
                size=size,
                workgroups=count,
                threads=launch.threads,
                first_lane=self.first_lane,
            )
        self.local = LocalMemory(
            kernel.nbytes["local"], lanes=self.lanes, first_lane=self.first_lane
        )
        self.registers: dict[str, Array] = {}
        self.symbols = {
            name: memory.constant(name, variable.content).address
            for name, variable in kernel.variables.items()
            if variable.content
        }
        self.arguments = dict(
            zip(
                kernel.parameters,
                (*(b.address for b in launch.bindings), *launch.constants),
                strict=True,
            )
        )
        self.numbers = np.arange(self.lanes)
        self.special = _special_registers(launch, first, self.numbers)
        ranks = self.numbers // launch.threads % size  # a batch begins with a cluster
        self.special["cluster_ctarank"] = ranks.astype(np.uint32)
        self.special["cluster_nctarank"] = np.full(self.lanes, size, np.uint32)
        self._ended = len(blocks)
        self._at = np.zeros(self.lanes, np.int32)
        self._waits = np.zeros(self.lanes, np.bool_)
        self._rests = np.zeros(self.lanes, np.bool_)

    def rest(self, lanes: Lanes) -> None:
        """Threads wait until no other can do anything."""
        self._rests[lanes] = True

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Which threads have not ended."""
        alive: npt.NDArray[np.bool_] = self._at < self._ended
        return alive

    def in_warp(self, lanes: Lanes) -> Lanes:
        """The number of each thread in its warp."""
        return (lanes if self._whole_warps else lanes % self.threads) % WARP

    def of_warp(self, lanes: Lanes, numbers: Lanes) -> Lanes:
        """The threads of these numbers in the warps of others; -1 where a warp is not full."""
        found: Lanes = lanes - self.in_warp(lanes) + numbers
        if self._whole_warps:
            return found
        return np.where(found // self.threads == lanes // self.threads, found, -1)

    def warp_bits(self, flags: npt.NDArray[np.bool_], lanes: Lanes) -> npt.NDArray[np.uint32]:
        """One bit for each thread of the warps that some threads are in."""
        if self._whole_warps:
            return np.packbits(flags, bitorder="little").view(np.uint32)[lanes // WARP]
        warps = -(-self.threads // WARP)
        padded = np.zeros((len(flags) // self.threads, warps * WARP), np.bool_)
        padded[:, : self.threads] = flags.reshape(-1, self.threads)
        bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
        return bits[lanes // self.threads, lanes % self.threads // WARP]

    def run(self, work: Work) -> None:
        """Until every thread has ended."""
        if not self._blocks:
            return
        selection: Selection = slice(0, self.lanes)
        number, alone = 0, True
        while True:
            block = self._blocks[number]
            self._count(work, block, selection)
            for instruction, step in block.steps:
                try:
                    self._perform(instruction, step, selection)
                except Fault as fault:
                    raise at_instruction(instruction, fault) from None
                except CONFUSION as error:
                    raise at_instruction(instruction, not_understood(error)) from error
            following = self._leave(block, number, selection)
            if following is not None and following < self._ended and alone:
                number = following
                continue
            if following is not None:
                self._at[selection] = following
            chosen = self._choose()
            if chosen is None:
                return
            number, selection = chosen
            alone = size_of(selection) == np.count_nonzero(self._at < self._ended)

    def _count(self, work: Work, block: Block, selection: Selection) -> None:
        try:
            work.add(len(block.steps) + 1, size_of(selection))
        except Fault as fault:
            raise (
                fault if block.instruction is None else at_instruction(block.instruction, fault)
            ) from None

    def _perform(self, instruction: Instruction, step: Step, selection: Selection) -> None:
        if instruction.predicate:
            chosen = self._predicated(instruction, selection)
            if chosen is not None:
                step(self, chosen)
        else:
            step(self, selection)

    def _predicated(self, instruction: Instruction, selection: Selection) -> Selection | None:
        """The threads whose predicate holds; None where there are none."""
        holds = self.register(instruction.predicate, DTYPES["pred"])[selection]
        if instruction.negated:
            holds = ~holds
        if holds.all():
            return selection
        return self.numbers[selection][holds] if holds.any() else None

    def _leave(self, block: Block, number: int, selection: Selection) -> int | None:
        """The block that all of the threads go to; None where they part, and are noted."""
        instruction = block.instruction
        if instruction is None:
            return number + 1
        try:
            chosen = (
                self._predicated(instruction, selection) if instruction.predicate else selection
            )
            if chosen is None:
                return number + 1
            if block.sync is not None:
                return self._meet(block.sync, number, selection, chosen)
            if block.choose is not None:
                targets = block.choose(self, chosen)
                self._at[selection] = number + 1
                self._at[chosen] = targets
                return None
            if block.ends and self.cluster is not None:
                self.cluster.end(self.numbers[chosen])
                if self.mbarriers is not None:
                    self.mbarriers.end(self.numbers[chosen], self.alive)
        except Fault as fault:
            raise at_instruction(instruction, fault) from None
        except CONFUSION as error:
            raise at_instruction(instruction, not_understood(error)) from error
        target = self._ended if block.ends else block.target
        assert target is not None
        if chosen is selection:
            return target
        self._at[selection] = number + 1
        self._at[chosen] = target
        return None

    def _meet(self, sync: Sync, number: int, selection: Selection, chosen: Selection) -> int | None:
        """Threads come to a barrier or a shuffle; complete sets of them pass, the others wait."""
        lanes = self.numbers[chosen]
        alive = self.alive
        passes = sync(self, lanes, alive)
        if passes.all() and chosen is selection:
            self._waits[selection] = False
            return number + 1
        self._at[selection] = number + 1
        self._at[lanes[~passes]] = number
        self._waits[selection] = False
        self._waits[lanes[~passes]] = True
        return None

    def _choose(self) -> tuple[int, Selection] | None:
        """The next block and its threads; None where all threads have ended."""
        ready = np.where(self._waits, self._ended, self._at)
        number = int(ready.min())
        if number < self._ended:
            # Threads that wait there are checked again, together with those that arrive now.
            here = self._at == number
            return number, compact(np.flatnonzero(here))
        for waiting in np.unique(self._at[self._waits]):
            block = self._blocks[waiting]
            lanes = np.flatnonzero(self._waits & (self._at == waiting))
            if block.sync is not None and self._would_pass(block, lanes):
                return int(waiting), compact(lanes)
        if self._rests.any():
            self._waits[self._rests] = False
            self._at[self._rests] += 1
            self._rests[:] = False
            return self._choose()
        if self._waits.any():
            raise self._stuck()
        return None

    def _would_pass(self, block: Block, lanes: Lanes) -> bool:
        """The threads that a barrier waited for have ended instead.

        That completes a barrier of the workgroup. An operation of a warp needs every thread that
        was there when the first one arrived.
        """
        assert block.instruction is not None
        if block.instruction.opcode == "mbarrier" and self.mbarriers is not None:
            return bool(self.mbarriers.may_pass(lanes).any())
        if "cluster" in block.instruction.modifiers and self.cluster is not None:
            return bool(self.cluster.may_pass(lanes, self.alive).any())
        if block.instruction.opcode == "shfl" or "warp" in block.instruction.modifiers:
            return False
        if block.instruction.opcode == "nanosleep":
            return False
        if len(block.instruction.operands) == 2:  # so many threads, whoever has ended
            return False
        return bool(with_all_others(lanes, self._at < self._ended, self.threads).any())

    def _stuck(self) -> Fault:
        """Threads wait for others that never come."""
        waiting = np.flatnonzero(self._waits)
        at_mbarriers = [
            lane
            for lane in waiting
            if (at := self._blocks[self._at[lane]].instruction) and at.opcode == "mbarrier"
        ]  # the others may wait for these
        lane = int((at_mbarriers or waiting)[0])
        block = self._blocks[self._at[lane]]
        assert block.instruction is not None
        first = lane // self.threads * self.threads
        group = np.arange(first, first + self.threads)
        here = group[self._waits[group] & (self._at[group] == self._at[lane])]
        elsewhere = group[self._waits[group] & (self._at[group] != self._at[lane])]
        ended = int((self._at[group] == self._ended).sum())
        places = [self._blocks[self._at[other]].instruction for other in elsewhere[:1]]
        where = f", {elsewhere.size} wait at {places[0]}" if elsewhere.size else ""
        what, lacks = block.instruction.opcode, ""
        if at_mbarriers and self.mbarriers is not None:
            what = "mbarrier.try_wait"
            lacks = f"; {self.mbarriers.lacks(lane)}"
        fault = Fault(
            f"divergent {what}: {here.size} of {self.threads} threads of a "
            f"workgroup wait for others{where}, {ended} have ended{lacks}",
            here + self.first_lane,
        )
        return at_instruction(block.instruction, fault)

    def register(self, name: str, dtype: np.dtype[np.generic]) -> Array:
        """A register's values of all threads.

        Registers that were never written hold NaN. Compilers read them where the value makes no
        difference; if it makes one, the results are full of NaN.
        """
        register = self.registers.get(name)
        if register is None:
            poison = np.full(self.lanes * dtype.itemsize, POISON, np.uint8).view(dtype)
            register = self.registers[name] = poison != 0 if dtype == np.bool_ else poison
        return register

    def write(self, name: str, dtype: np.dtype[np.generic], to: Selection, values: Array) -> None:
        """Some threads' values of a register."""
        register = self.register(name, dtype)
        if values.dtype.itemsize != dtype.itemsize:
            values = values.astype(dtype)  # extends: what is narrower than a register goes into it
        register[to] = values.view(dtype)


def _special_registers(launch: Launch, first: int, lanes: Lanes) -> dict[str, Array]:
    threads = lanes % launch.threads
    values: dict[str, Array] = {"laneid": threads % WARP, "warpid": threads // WARP}
    for name, places, counts in (
        ("tid", coordinates(threads, launch.workgroup_size), launch.workgroup_size),
        (
            "ctaid",
            coordinates(lanes // launch.threads + first, launch.workgroup_count, launch.cluster),
            launch.workgroup_count,
        ),
    ):
        for axis, place, count in zip("xyz", places, counts, strict=True):
            values[f"{name}.{axis}"] = place
            values[f"n{name}.{axis}"] = np.full(len(lanes), count)
    return {name: value.astype(np.uint32) for name, value in values.items()}


def with_all_others(lanes: Lanes, alive: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.bool_]:
    """Which threads are here with all others of their group of ``size`` that have not ended."""
    if len(lanes) == len(alive):
        return np.ones(len(lanes), np.bool_)
    groups = len(alive) // size
    here = np.bincount(lanes // size, minlength=groups)
    expected = alive.reshape(groups, size).sum(axis=1)
    complete: npt.NDArray[np.bool_] = (here == expected)[lanes // size]
    return complete


def compact(lanes: Lanes) -> Selection:
    """A slice where the threads are a range: those are quicker to read and write."""
    if len(lanes) and lanes[-1] - lanes[0] + 1 == len(lanes):
        return slice(int(lanes[0]), int(lanes[-1]) + 1)
    return lanes


def size_of(selection: Selection) -> int:
    """How many threads are selected."""
    if isinstance(selection, slice):
        return int(selection.stop - selection.start)
    return len(selection)


def at_instruction(instruction: Instruction, fault: Fault) -> Fault:
    """A fault that happened at an instruction."""
    fault.instruction = str(instruction)
    return fault
