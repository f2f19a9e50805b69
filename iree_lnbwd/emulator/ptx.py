"""Runs PTX kernels on arrays over all threads of many workgroups at once.

A kernel is divided into blocks of instructions, and each thread is at one block. In each step, the
earliest block that any thread can run is run by all threads that are at it. Barriers and shuffles
wait for their threads. Hardware may choose any such order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator import clusters, limits, mbarriers, ptx_parser, ptx_semantics
from iree_lnbwd.emulator.launch import (
    CONFUSION,
    Array,
    Bytes,
    Fault,
    Lanes,
    Launch,
    Unknown,
    Work,
    coordinates,
    not_understood,
)
from iree_lnbwd.emulator.memory import (
    POISON,
    GlobalMemory,
    LocalMemory,
    SharedMemory,
    workgroups_at_once,
)
from iree_lnbwd.emulator.order import Order
from iree_lnbwd.emulator.ptx_parser import Instruction, Kernel, PtxError
from iree_lnbwd.emulator.ptx_semantics import DTYPES, UnknownInstructionError

WARP = 32

# So many threads that their registers still fit a processor's cache.
_LANES_AT_ONCE = 1 << 16

# Generic addresses of other memory than global: far above every global address.
_SHARED_WINDOW = 1 << 60
_LOCAL_WINDOW = 1 << 61

# The threads that an instruction is for: a range, or their numbers.
Selection = slice | Lanes
Step = Callable[["_Threads", Selection], None]
_Sync = Callable[["_Threads", Lanes, "npt.NDArray[np.bool_]"], "npt.NDArray[np.bool_]"]

_IMMEDIATE = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|%(laneid|warpid|cluster_ctarank|cluster_nctarank)$"
)
_BARRIERS = 16  # of a workgroup
_BULK_BYTES = 16  # that bulk copies are multiples of
_NO_EFFECT = ("membar", "fence", "griddepcontrol", "discard", "applypriority", "prefetch")
_CACHE_HINT = "L2::cache_hint"
_POLICY = ("fractional", "L2::evict_last", "b64")
_POLICY_BITS = 0x10C1E  # what a created policy is here; no other number is one
_CACHE_HINTS = re.compile(r"(nc|volatile|relaxed|weak|gpu|cta|sys|c[agvsow]|wb|wt|lu|L[12]::\w+)$")


class PtxExecutor:
    """The kernels of a PTX module."""

    def __init__(self, text: str) -> None:
        """Parses a module.

        Raises:
            PtxError: It is not PTX.
        """
        self._kernels = ptx_parser.parse(text)
        self._programs: dict[str, _Program] = {}

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
        decoder = _Decoder(kernel)
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
                    _Threads(program, launch, memory, first, count).run(work)
        except Fault as fault:
            raise fault.of(launch) from None

    def _program(self, launch: Launch) -> _Program:
        if launch.kernel not in self._kernels:
            raise Fault(f"no such kernel; the module has {', '.join(self._kernels)}")
        kernel = self._kernels[launch.kernel]
        _check(kernel, launch)
        if launch.kernel not in self._programs:
            self._programs[launch.kernel] = _Program(kernel)
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


@dataclass
class _Block:
    """Instructions in sequence, and then a jump, an end, a wait, or the next block.

    Attributes:
        steps: The instructions with effects on registers and memory.
        instruction: The jump, end or wait.
        target: Number of the block that a jump goes to.
        ends: Threads end here.
        sync: The threads to wait for, and the operation that they do together.
    """

    steps: list[tuple[Instruction, Step]]
    instruction: Instruction | None = None
    target: int | None = None
    ends: bool = False
    sync: _Sync | None = None


class _Program:
    """A kernel, decoded."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.has_mbarriers = any(i.opcode == "mbarrier" for i in kernel.code)
        self.has_bulk_copies = any(_is_bulk_copy(i) for i in kernel.code)
        decoder = _Decoder(kernel)
        starts = {0, len(kernel.code), *kernel.labels.values()}
        for index, instruction in enumerate(kernel.code):
            if instruction.opcode in _JUMPS:
                starts.add(index + 1)
            elif decoder.is_sync(instruction):
                starts |= {index, index + 1}
        ordered = sorted(starts)
        number = {start: n for n, start in enumerate(ordered)}
        self.blocks = []
        for start, end in itertools.pairwise(ordered):
            block = _Block([])
            for instruction in kernel.code[start:end]:
                decoder.check_predicate(instruction)
                if instruction.opcode == "bra":
                    block.instruction = instruction
                    block.target = number[decoder.target(instruction)]
                elif instruction.opcode in _JUMPS:
                    block.instruction, block.ends = instruction, True
                elif decoder.is_sync(instruction):
                    block.instruction = instruction
                    block.sync = decoder.sync(instruction)
                elif not decoder.is_void(instruction):
                    block.steps.append((instruction, decoder.step(instruction)))
            self.blocks.append(block)
        self.register_bytes = decoder.register_bytes


class _Threads:
    """Some workgroups of a launch while they run."""

    def __init__(
        self, program: _Program, launch: Launch, memory: GlobalMemory, first: int, count: int
    ) -> None:
        kernel = program.kernel
        self._blocks = program.blocks
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
            has_bulk_copies=program.has_bulk_copies,
        )
        size = math.prod(kernel.cluster)
        self.cluster = self.order = self.mbarriers = None
        if size > 1 or program.has_mbarriers:
            if program.has_mbarriers:
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
        self._ended = len(program.blocks)
        self._at = np.zeros(self.lanes, np.int32)
        self._waits = np.zeros(self.lanes, np.bool_)

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
                    raise _at(instruction, fault) from None
                except CONFUSION as error:
                    raise _at(instruction, not_understood(error)) from error
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
            alone = _size(selection) == np.count_nonzero(self._at < self._ended)

    def _count(self, work: Work, block: _Block, selection: Selection) -> None:
        try:
            work.add(len(block.steps) + 1, _size(selection))
        except Fault as fault:
            raise fault if block.instruction is None else _at(block.instruction, fault) from None

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

    def _leave(self, block: _Block, number: int, selection: Selection) -> int | None:
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
            if block.ends and self.cluster is not None:
                self.cluster.end(self.numbers[chosen])
                if self.mbarriers is not None:
                    self.mbarriers.end(self.numbers[chosen], self.alive)
        except Fault as fault:
            raise _at(instruction, fault) from None
        except CONFUSION as error:
            raise _at(instruction, not_understood(error)) from error
        target = self._ended if block.ends else block.target
        assert target is not None
        if chosen is selection:
            return target
        self._at[selection] = number + 1
        self._at[chosen] = target
        return None

    def _meet(
        self, sync: _Sync, number: int, selection: Selection, chosen: Selection
    ) -> int | None:
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
            return number, _compact(np.flatnonzero(here))
        for waiting in np.unique(self._at[self._waits]):
            block = self._blocks[waiting]
            lanes = np.flatnonzero(self._waits & (self._at == waiting))
            if block.sync is not None and self._would_pass(block, lanes):
                return int(waiting), _compact(lanes)
        if self._waits.any():
            raise self._stuck()
        return None

    def _would_pass(self, block: _Block, lanes: Lanes) -> bool:
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
        if len(block.instruction.operands) == 2:  # so many threads, whoever has ended
            return False
        return bool(_complete(lanes, self._at < self._ended, self.threads).any())

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
        return _at(block.instruction, fault)

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


Reader = Callable[[_Threads, Selection], Array]
Writer = Callable[[_Threads, Selection, Array], None]


class _Decoder:
    """From instructions to what they do."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._used: dict[str, np.dtype[np.generic]] = {}
        self._special: dict[str, Callable[[Instruction], Step]] = {
            "ld": self._load,
            "ldu": self._load,
            "st": self._store,
            "mov": self._move,
            "cvta": self._convert_address,
            "cp": self._copy_async,
            "trap": self._trap,
            "mapa": self._map_address,
            "createpolicy": self._create_policy,
            "barrier": self._arrive,
            "mbarrier": self._mbarrier,
            "fence": self._fence,
        }

    @property
    def register_bytes(self) -> int:
        """Of all registers that the decoded instructions name, in a thread."""
        return sum(dtype.itemsize for dtype in self._used.values())

    @staticmethod
    def is_sync(instruction: Instruction) -> bool:
        """It waits for other threads."""
        if instruction.opcode == "mbarrier":
            return instruction.modifiers[:1] == ("try_wait",)
        return instruction.opcode in ("bar", "barrier", "shfl") and (
            instruction.modifiers[:2] != ("cluster", "arrive")
        )

    @staticmethod
    def is_void(instruction: Instruction) -> bool:
        """It has no effect that is followed here."""
        words = instruction.modifiers
        of_copies = words[:2] == ("proxy", "async") and words[2:] != ("global",)
        is_followed = of_copies or words[:1] == ("mbarrier_init",)
        return instruction.opcode in _NO_EFFECT and not is_followed

    def check_predicate(self, instruction: Instruction) -> None:
        """The register that decides who takes part is one that can."""
        try:
            if instruction.predicate and self._dtype_of(instruction.predicate) != np.bool_:
                raise PtxError(f"{instruction.predicate} is no predicate")
        except PtxError as error:
            raise _at(instruction, Fault(str(error))) from error

    def target(self, instruction: Instruction) -> int:
        """The index of the instruction that a branch goes to."""
        label = ", ".join(instruction.operands)
        if label not in self._kernel.labels:
            raise _at(instruction, Fault(f"no label {label}"))
        return self._kernel.labels[label]

    def check(self, instruction: Instruction) -> None:
        """An instruction of any kind is known.

        Raises:
            Fault: It is not.
        """
        self.check_predicate(instruction)
        if instruction.opcode == "bra":
            self.target(instruction)
        elif self.is_sync(instruction):
            self.sync(instruction)
        elif instruction.opcode not in _JUMPS and not self.is_void(instruction):
            self.step(instruction)

    def step(self, instruction: Instruction) -> Step:
        """What an instruction does."""
        try:
            special = self._special.get(instruction.opcode)
            return special(instruction) if special else self._pure(instruction)
        except CONFUSION as error:
            raise _at(instruction, _unknown(instruction, error)) from error

    def sync(self, instruction: Instruction) -> _Sync:
        """The threads that an instruction waits for, and the operation that follows."""
        try:
            match instruction.opcode:
                case "shfl":
                    return self._shuffle(instruction)
                case "mbarrier":
                    return self._wait_for_phase(instruction)
            return self._barrier(instruction)
        except CONFUSION as error:
            raise _at(instruction, _unknown(instruction, error)) from error

    def _pure(self, instruction: Instruction) -> Step:
        semantics = ptx_semantics.find(instruction.opcode, instruction.modifiers)
        destination, *sources = instruction.operands
        readers = [
            self._reader(operand, type_)
            for operand, type_ in zip(sources, semantics.sources, strict=True)
        ]
        writer = self._writer(destination)
        function = semantics.function

        def step(threads: _Threads, to: Selection) -> None:
            writer(threads, to, function(*[reader(threads, to) for reader in readers]))

        return step

    def _move(self, instruction: Instruction) -> Step:
        destination, source = instruction.operands
        (type_,) = instruction.modifiers
        to_parts, from_parts = ptx_parser.vector(destination), ptx_parser.vector(source)
        if len(to_parts) == len(from_parts) == 1:
            return self._pure(instruction)
        bits = DTYPES[type_].itemsize * 8
        if len(from_parts) > 1:
            part = f"b{bits // len(from_parts)}"
            readers = [self._reader(operand, part) for operand in from_parts]
            writer = self._writer(destination)

            def pack(threads: _Threads, to: Selection) -> None:
                parts = np.broadcast_arrays(*(reader(threads, to) for reader in readers))
                writer(threads, to, np.stack(parts, axis=-1).view(f"u{bits // 8}")[..., 0])

            return pack
        part = f"b{bits // len(to_parts)}"
        reader = self._reader(source, type_)
        writers = [None if name == "_" else self._writer(name) for name in to_parts]

        def unpack(threads: _Threads, to: Selection) -> None:
            whole = np.ascontiguousarray(reader(threads, to))
            parts = whole.view(DTYPES[part]).reshape(-1, len(writers))
            for number, write in enumerate(writers):
                if write is not None:
                    write(threads, to, parts[:, number])

        return unpack

    def _load(self, instruction: Instruction) -> Step:
        hinted = _CACHE_HINT in instruction.modifiers
        destination, source, *policies = instruction.operands
        if len(policies) != hinted:
            raise UnknownInstructionError(instruction.text)
        policy = self._reader(policies[0], "b64") if hinted else None
        space, type_, count = _access(instruction)
        names = ptx_parser.vector(destination)
        if len(names) != count:
            raise PtxError(f"{count} elements for {destination}")
        writers = [None if name == "_" else self._writer(name) for name in names]
        dtype = DTYPES[type_]
        if space == "param":
            name, offset = ptx_parser.address(source)
            if offset or count > 1:
                raise UnknownInstructionError(instruction.text)
            writer = self._writer(destination)
            mask = (1 << dtype.itemsize * 8) - 1

            def load_parameter(threads: _Threads, to: Selection) -> None:
                if name not in threads.arguments:
                    raise Fault(f"no parameter {name}")
                bits = np.array([threads.arguments[name] & mask], f"u{dtype.itemsize}")
                writer(threads, to, bits.view(dtype))

            return load_parameter
        addresses = self._address(source)
        nbytes = dtype.itemsize * count

        def load(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            if policy is not None:
                _check_policies(policy(threads, to), lanes + threads.first_lane)
            at = np.broadcast_to(addresses(threads, to), lanes.shape)
            values = _load_bytes(threads, space, lanes, at, nbytes).view(dtype)
            for number, write in enumerate(writers):
                if write is not None:
                    write(threads, to, values[:, number])

        return load

    def _store(self, instruction: Instruction) -> Step:
        if instruction.modifiers[:1] == ("async",):
            return self._send(instruction)
        destination, source = instruction.operands
        space, type_, count = _access(instruction)
        readers = [self._reader(operand, type_) for operand in ptx_parser.vector(source)]
        if len(readers) != count:
            raise PtxError(f"{count} elements for {source}")
        addresses = self._address(destination)
        dtype = DTYPES[type_]

        def store(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            at = np.broadcast_to(addresses(threads, to), lanes.shape)
            _store_bytes(threads, space, lanes, at, _bytes_of(readers, dtype, threads, to))

        return store

    def _send(self, instruction: Instruction) -> Step:
        """A store to a workgroup of the cluster, of which an mbarrier there is told."""
        *words, type_ = (word for word in instruction.modifiers if word != "weak")
        if words[1:3] != ["shared::cluster", "mbarrier::complete_tx::bytes"]:
            raise UnknownInstructionError(instruction.text)
        count = {(): 1, ("v2",): 2, ("v4",): 4}.get(tuple(words[3:]))
        if count is None or type_ not in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
            raise UnknownInstructionError(instruction.text)
        dtype = DTYPES[type_]
        destination, source, mbarrier = instruction.operands
        readers = [self._reader(operand, type_) for operand in ptx_parser.vector(source)]
        nbytes = dtype.itemsize * count
        if len(readers) != count or nbytes > 16:
            raise PtxError(f"{count} elements of {type_} for {source}")
        to_address, told = self._address(destination), self._address(mbarrier)

        def send(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            cluster, phases = _of_cluster(threads), _mbarriers(threads)
            data = np.broadcast_to(to_address(threads, to), lanes.shape)
            workgroups, at = cluster.locate(lanes, data)
            tells = cluster.locate(lanes, np.broadcast_to(told(threads, to), lanes.shape))
            cluster.check_lives(lanes, workgroups, threads.alive)
            values = _bytes_of(readers, dtype, threads, to)
            threads.shared.store_of(workgroups, lanes, at, values)
            cluster.check_send(lanes, workgroups, at, nbytes)
            phases.send(lanes, workgroups, at, nbytes, *tells)

        return send

    def _copy_async(self, instruction: Instruction) -> Step:
        match instruction.modifiers:
            case ("async", "commit_group"):
                return lambda threads, to: threads.shared.commit(threads.numbers[to])
            case ("async", "wait_group"):
                (operand,) = instruction.operands
                if not operand.isdecimal():
                    raise PtxError(f"expected a number of groups, got {operand}")
                pending = int(operand)
                return lambda threads, to: threads.shared.wait(threads.numbers[to], pending)
            case ("async", "wait_all"):
                return lambda threads, to: threads.shared.wait_all(threads.numbers[to])
            case ("async", "ca" | "cg", "shared", "global", *hints) if all(
                map(_CACHE_HINTS.match, hints)
            ):
                return self._start_copy(instruction)
            case (
                "async",
                "bulk",
                "shared::cluster",
                "global",
                "mbarrier::complete_tx::bytes",
            ):
                return self._copy_in_bulk(instruction)
        raise UnknownInstructionError(instruction.text)

    def _copy_in_bulk(self, instruction: Instruction) -> Step:
        """Any number of bytes to the own workgroup's memory, of which an mbarrier there is told."""
        destination, source, size, mbarrier = instruction.operands
        to_address, from_address, told = map(self._address, (destination, source, mbarrier))
        read_size = self._reader(size, "u32")

        def copy(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            phases, cluster = _mbarriers(threads), _of_cluster(threads)
            sources, places, tells, sizes = (
                np.broadcast_to(read(threads, to), lanes.shape).astype(np.int64)
                for read in (from_address, to_address, told, read_size)
            )
            _check_bulk_sizes(threads, lanes, sizes)
            own = lanes // threads.threads
            of_places, places = cluster.locate(lanes, places)
            of_tells, tells = cluster.locate(lanes, tells)
            if (others := (of_places != own) | (of_tells != own)).any():
                raise Fault(
                    "a bulk copy to another workgroup: what orders it is not followed",
                    lanes[others] + threads.first_lane,
                )
            which, offsets = _pieces(sizes)
            by, at = lanes[which], places[which] + offsets
            values = threads.memory.load(
                by + threads.first_lane, sources[which] + offsets, _BULK_BYTES
            )
            threads.shared.copy_in_bulk(by, at, values)
            cluster.check_send(by, own[which], at, _BULK_BYTES)
            phases.copy(by, at, _BULK_BYTES, tells[which])

        return copy

    def _start_copy(self, instruction: Instruction) -> Step:
        destination, source, size, *limit = instruction.operands
        nbytes = int(size)
        if nbytes not in (4, 8, 16) or (nbytes != 16 and "cg" in instruction.modifiers):
            raise UnknownInstructionError(instruction.text)
        to_address, from_address = self._address(destination), self._address(source)
        read_size = self._reader(limit[0], "u32") if limit else None

        def copy(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            sources = np.broadcast_to(from_address(threads, to), lanes.shape)
            values = np.zeros((len(lanes), nbytes), np.uint8)
            # Bytes beyond the given size are not read; they are zero.
            sizes = np.full(1, nbytes, np.uint32) if read_size is None else read_size(threads, to)
            sizes = np.broadcast_to(sizes, lanes.shape)
            for taken in np.unique(sizes):
                if taken > nbytes:
                    raise Fault(f"a copy of {taken} of {nbytes} bytes", lanes + threads.first_lane)
                part = np.flatnonzero(sizes == taken)
                if taken:
                    values[part, :taken] = threads.memory.load(
                        lanes[part] + threads.first_lane,
                        sources[part],
                        int(taken),
                        alignment=nbytes,
                    )
            at = np.broadcast_to(to_address(threads, to), lanes.shape)
            _note_own(threads, lanes, at, nbytes, writes=True)
            threads.shared.copy_async(lanes, at, values)

        return copy

    def _convert_address(self, instruction: Instruction) -> Step:
        destination, source = instruction.operands
        windows = {"global": 0, "const": 0, "shared": _SHARED_WINDOW, "local": _LOCAL_WINDOW}
        *way, space, type_ = instruction.modifiers
        if type_ != "u64" or way not in ([], ["to"]):
            raise UnknownInstructionError(instruction.text)
        offset = np.uint64(windows[space])
        reader, writer = self._reader(source, "u64"), self._writer(destination)

        def convert(threads: _Threads, to: Selection) -> None:
            value = reader(threads, to)
            writer(threads, to, value - offset if way else value + offset)

        return convert

    def _create_policy(self, instruction: Instruction) -> Step:
        """Which data leaves the cache late. That changes no result; who has a policy is checked."""
        destination, share = instruction.operands
        if instruction.modifiers != _POLICY or share != "1.0":
            raise UnknownInstructionError(instruction.text)
        writer = self._writer(destination)

        def create(threads: _Threads, to: Selection) -> None:
            writer(threads, to, np.array([_POLICY_BITS], np.uint64))

        return create

    def _map_address(self, instruction: Instruction) -> Step:
        if instruction.modifiers != ("shared::cluster", "u32"):
            raise UnknownInstructionError(instruction.text)
        destination, source, rank = instruction.operands
        address, ranks = self._reader(source, "u32"), self._reader(rank, "u32")
        writer = self._writer(destination)

        def map_address(threads: _Threads, to: Selection) -> None:
            both = address(threads, to).astype(np.int64), ranks(threads, to).astype(np.int64)
            writer(threads, to, clusters.address_of(*both).astype(np.uint32))

        return map_address

    def _arrive(self, instruction: Instruction) -> Step:
        """At the barrier of a cluster, without waiting."""
        how = [word for word in instruction.modifiers[2:] if word != "aligned"]
        if how not in ([], ["release"], ["relaxed"]) or instruction.operands:
            raise UnknownInstructionError(instruction.text)
        ordered = how != ["relaxed"]

        def arrive(threads: _Threads, to: Selection) -> None:
            _of_cluster(threads).arrive(threads.numbers[to], ordered=ordered)

        return arrive

    def _mbarrier(self, instruction: Instruction) -> Step:
        operation: Callable[[mbarriers.Mbarriers, Lanes, Lanes, Lanes], None]
        match instruction.modifiers, instruction.operands:
            case ("init", "shared" | "shared::cta", "b64"), (place, number):
                operation = mbarriers.Mbarriers.initialise
            case ("arrive", "expect_tx", "shared" | "shared::cta", "b64"), ("_", place, number):
                operation = mbarriers.Mbarriers.arrive
            case _:
                raise UnknownInstructionError(instruction.text)
        address, count = self._address(place), self._reader(number, "u32")

        def operate(threads: _Threads, to: Selection) -> None:
            lanes = threads.numbers[to]
            at = np.broadcast_to(address(threads, to), lanes.shape)
            counts = np.broadcast_to(count(threads, to), lanes.shape).astype(np.int64)
            operation(_mbarriers(threads), lanes, at, counts)

        return operate

    def _fence(self, instruction: Instruction) -> Step:
        operation: Callable[[mbarriers.Mbarriers, Lanes], None]
        match instruction.modifiers:
            case ("mbarrier_init", "release", "cluster"):
                operation = mbarriers.Mbarriers.make_known
            case ("proxy", "async") | ("proxy", "async", "shared::cta" | "shared::cluster"):
                operation = mbarriers.Mbarriers.fence
            case _:
                raise UnknownInstructionError(instruction.text)

        def fence(threads: _Threads, to: Selection) -> None:
            if threads.mbarriers is not None:
                operation(threads.mbarriers, threads.numbers[to])

        return fence

    def _wait_for_phase(self, instruction: Instruction) -> _Sync:
        _, what, *acquires, space, type_ = instruction.modifiers
        if (
            (what, type_) != ("parity", "b64")
            or space not in ("shared", "shared::cta")
            or acquires not in ([], ["acquire", "cta"], ["acquire", "cluster"])
        ):
            raise UnknownInstructionError(instruction.text)
        destination, place, parity = instruction.operands
        writer = self._writer(destination)
        if self._dtype_of(destination) != np.bool_:
            raise PtxError(f"{destination} is no predicate")
        address, read_parity = self._address(place), self._reader(parity, "u32")

        def wait(
            threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
        ) -> npt.NDArray[np.bool_]:
            at = np.broadcast_to(address(threads, lanes), lanes.shape)
            parities = np.broadcast_to(read_parity(threads, lanes), lanes.shape)
            passes = _mbarriers(threads).wait(lanes, at, parities.astype(np.int64))
            here = lanes[passes]
            writer(threads, _compact(here), np.ones(here.size, np.bool_))
            return passes

        return wait

    def _trap(self, instruction: Instruction) -> Step:
        def trap(threads: _Threads, to: Selection) -> None:
            raise Fault("trap", threads.numbers[to] + threads.first_lane)

        return trap

    def _barrier(self, instruction: Instruction) -> _Sync:
        match instruction.modifiers:
            case ("warp", "sync"):
                mask = self._reader(instruction.operands[0], "u32")

                def meet_warp(
                    threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
                ) -> npt.NDArray[np.bool_]:
                    passes = _named_are_here(threads, lanes, alive, mask(threads, lanes))
                    threads.shared.subgroup_barrier(lanes[passes])
                    return passes

                return meet_warp
            case (
                ("cluster", "wait")
                | ("cluster", "wait", "aligned")
                | ("cluster", "wait", "acquire")
                | ("cluster", "wait", "acquire", "aligned")
            ):

                def meet_cluster(
                    threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
                ) -> npt.NDArray[np.bool_]:
                    passes, ordered = _of_cluster(threads).passes(lanes, alive)
                    threads.shared.cluster_barrier(ordered)
                    return passes

                return meet_cluster
            case ("sync",) | ("cta", "sync") | ("sync", "aligned") | ("cta", "sync", "aligned"):
                if len(instruction.operands) == 2:
                    return self._group_barrier(*instruction.operands)
                if instruction.operands != ("0",):
                    raise UnknownInstructionError(instruction.text)

                def meet(
                    threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
                ) -> npt.NDArray[np.bool_]:
                    passes = _complete(lanes, alive, threads.threads)
                    workgroups = np.unique(lanes[passes] // threads.threads)
                    if threads.order is not None:
                        threads.order.meet(lanes[passes], lanes[passes] // threads.threads)
                    threads.shared.barrier(workgroups)
                    threads.memory.workgroup_barrier(
                        workgroups + threads.first_lane // threads.threads
                    )
                    return passes

                return meet
        raise UnknownInstructionError(instruction.text)

    def _group_barrier(self, number: str, count: str) -> _Sync:
        """So many threads of a workgroup meet at one of its barriers."""
        read_number, read_count = self._reader(number, "u32"), self._reader(count, "u32")

        def meet_group(
            threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
        ) -> npt.NDArray[np.bool_]:
            groups = np.broadcast_to(read_number(threads, lanes), lanes.shape).astype(np.int64)
            wanted = np.broadcast_to(read_count(threads, lanes), lanes.shape)
            if (bad := (groups >= _BARRIERS) | (wanted % WARP != 0)).any():
                raise Fault(
                    f"barrier {groups[bad][0]} of {wanted[bad][0]} threads: there are {_BARRIERS}, "
                    f"of whole warps of {WARP}",
                    lanes[bad] + threads.first_lane,
                )
            places = lanes // threads.threads * _BARRIERS + groups
            here = np.bincount(places)[places]
            if (crowded := here > wanted).any():
                raise Fault(
                    f"{here[crowded][0]} threads at barrier {groups[crowded][0]}, which is of "
                    f"{wanted[crowded][0]}",
                    lanes[crowded] + threads.first_lane,
                )
            passes: npt.NDArray[np.bool_] = here == wanted
            if threads.order is not None:
                threads.order.meet(lanes[passes], places[passes])
            threads.shared.group_barrier(lanes[passes], groups[passes])
            return passes

        return meet_group

    def _shuffle(self, instruction: Instruction) -> _Sync:
        word, mode, type_ = instruction.modifiers
        if word != "sync" or type_ != "b32" or mode not in ("up", "down", "bfly", "idx"):
            raise UnknownInstructionError(instruction.text)
        destination, source, distance, bounds, mask = instruction.operands
        name, _, valid = destination.partition("|")
        writer = self._writer(name)
        write_valid = self._writer(valid) if valid else None
        read = self._reader(source, "b32")
        read_distance, read_bounds, read_mask = (
            self._reader(operand, "u32") for operand in (distance, bounds, mask)
        )

        def shuffle(
            threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
        ) -> npt.NDArray[np.bool_]:
            named = read_mask(threads, lanes)
            passes = _named_are_here(threads, lanes, alive, named)
            if not passes.any():
                return passes
            whole = bool(passes.all())
            here = lanes if whole else lanes[passes]
            inside = threads.in_warp(here)
            partner, in_range = shuffle_source(
                mode, inside, read_distance(threads, here), read_bounds(threads, here)
            )
            takes_part = np.zeros(threads.lanes + 1, np.bool_)  # the last one is nobody
            takes_part[here] = True
            origin = threads.of_warp(here, partner)
            if not takes_part[origin].all():
                lost = ~takes_part[origin]
                raise Fault(
                    f"a shuffle from thread {partner[lost][0]} of the warp, which does not take "
                    "part",
                    here[lost] + threads.first_lane,
                )
            values = np.zeros(threads.lanes, np.uint32)
            values[here] = read(threads, here)
            to = _compact(here)
            writer(threads, to, values[origin])
            if write_valid is not None:
                write_valid(threads, to, in_range)
            return passes

        return shuffle

    def _reader(self, operand: str, type_: str) -> Reader:
        """The values of a source operand, of a type."""
        dtype = DTYPES[type_]
        if _SPECIAL.match(operand):
            name = operand[1:]
            return lambda threads, to: threads.special[name][to].astype(dtype)
        if operand.startswith("%") or operand in self._kernel.registers:
            declared = self._dtype_of(operand)
            if declared == dtype:
                return lambda threads, to: threads.register(operand, declared)[to]
            if np.bool_ in (declared, dtype) or declared.itemsize < dtype.itemsize:
                raise PtxError(f"{operand} is narrower than {type_}")
            if declared.itemsize == dtype.itemsize:
                return lambda threads, to: threads.register(operand, declared)[to].view(dtype)
            narrow = f"u{dtype.itemsize}"  # the lower bits of a wider register

            def read_lower(threads: _Threads, to: Selection) -> Array:
                return threads.register(operand, declared)[to].astype(narrow).view(dtype)

            return read_lower
        if operand.startswith("!"):
            inner = self._reader(operand[1:], type_)
            return lambda threads, to: ~inner(threads, to)
        if (variable := self._kernel.variables.get(operand)) is not None and variable.content:
            return lambda threads, to: np.array([threads.symbols[operand]], np.uint64).view(dtype)
        constant = self._constant(operand, dtype)
        return lambda threads, to: constant

    def _constant(self, operand: str, dtype: np.dtype[np.generic]) -> Array:
        if operand in self._kernel.variables:
            return np.array([self._symbol(operand)], np.int64).astype(dtype)
        if _FLOAT.match(operand):
            bits = np.array([int(operand[2:], 16)], f"u{(len(operand) - 2) // 2}")
            if bits.itemsize != dtype.itemsize:
                raise PtxError(f"expected a constant of {dtype.itemsize} bytes, got {operand}")
            return bits.view(dtype)
        if not _IMMEDIATE.match(operand):
            raise PtxError(f"expected an operand, got {operand}")
        number = int(operand.rstrip("U"), 0)
        if not -(1 << 63) <= number < 1 << 64:
            raise PtxError(f"expected a number of 64 bits, got {operand}")
        if dtype == np.bool_:
            return np.array([number != 0])
        mask = (1 << dtype.itemsize * 8) - 1
        return np.array([number & mask], f"u{dtype.itemsize}").view(dtype)

    def _symbol(self, name: str) -> int:
        """Address of a variable in its state space; extern shared memory begins after the rest."""
        variable = self._kernel.variables[name]
        if variable.space == "shared" and not variable.nbytes:
            return self._kernel.nbytes["shared"]
        return variable.offset

    def _writer(self, operand: str) -> Writer:
        if operand == "_":
            return lambda threads, to, values: None
        dtype = self._dtype_of(operand)
        return lambda threads, to, values: threads.write(operand, dtype, to, values)

    def _dtype_of(self, register: str) -> np.dtype[np.generic]:
        """Of the unsigned type that a register is kept as."""
        if register not in self._used:
            declared = self._kernel.type_of(register)
            if declared not in DTYPES:
                raise PtxError(f"{register} is of the type {declared}, which is not known")
            dtype = DTYPES[declared]
            self._used[register] = dtype if dtype == np.bool_ else np.dtype(f"u{dtype.itemsize}")
        return self._used[register]

    def _address(self, operand: str) -> Reader:
        """Addresses as int64."""
        base, offset = ptx_parser.address(operand)
        if base.startswith("%"):
            dtype = self._dtype_of(base)
            if dtype.itemsize == 8:
                return lambda threads, to: threads.register(base, dtype)[to].view(np.int64) + offset
            # 32-bit addresses of shared memory: the sum wraps around.
            low = np.uint32(offset & 0xFFFFFFFF)
            return lambda threads, to: (threads.register(base, dtype)[to] + low).astype(np.int64)
        start = self._reader(base, "s64")
        return lambda threads, to: start(threads, to) + offset


_JUMPS = ("bra", "ret", "exit")


def _is_bulk_copy(instruction: Instruction) -> bool:
    return instruction.opcode == "cp" and instruction.modifiers[:2] == ("async", "bulk")


def _check_bulk_sizes(threads: _Threads, lanes: Lanes, sizes: Lanes) -> None:
    """Expects numbers of bytes that bulk copies can have.

    Raises:
        Fault: One is not.
    """
    most = threads.shared.nbytes
    if (wrong := (sizes < 1) | (sizes % _BULK_BYTES != 0) | (sizes > most)).any():
        raise Fault(
            f"a bulk copy of {sizes[wrong][0]} bytes to shared memory, which has {most}: expected "
            f"a multiple of {_BULK_BYTES}",
            lanes[wrong] + threads.first_lane,
        )


def _pieces(sizes: Lanes) -> tuple[Lanes, Lanes]:
    """Of each 16 bytes of some copies: the number of the copy, and the offset in it."""
    counts = sizes // _BULK_BYTES
    which = np.repeat(np.arange(sizes.size), counts)
    before = np.cumsum(counts) - counts
    return which, (np.arange(which.size) - before[which]) * _BULK_BYTES


def shuffle_source(
    mode: str, lane: Array, distance: Array, bounds: Array
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The thread whose value each thread of a warp gets, and whether it is in range (shfl.sync).

    Args:
        mode: "up", "down", "bfly" or "idx".
        lane: The thread's number in its warp.
        distance: Operand b: a distance, a mask, or a number.
        bounds: Operand c: the clamp, and from bit 8 on the mask of segments.
    """
    lane = lane.astype(np.int64)
    b, clamp = (distance & 31).astype(np.int64), (bounds & 31).astype(np.int64)
    segments = (bounds >> 8 & 31).astype(np.int64)
    lowest = lane & segments
    limit = lowest | clamp & ~segments
    match mode:
        case "up":
            source = lane - b
            in_range = source >= limit
        case "down":
            source = lane + b
            in_range = source <= limit
        case "bfly":
            source = lane ^ b
            in_range = source <= limit
        case _:
            source = lowest | b & ~segments
            in_range = source <= limit
    return np.where(in_range, source, lane), in_range


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


def _check_policies(policies: Array, lanes: Lanes) -> None:
    """Expects policies that were created: hardware traps at other numbers.

    Raises:
        Fault: One is not.
    """
    if (wrong := np.broadcast_to(policies, lanes.shape) != _POLICY_BITS).any():
        raise Fault("a cache hint that createpolicy has not made", lanes[wrong])


def _access(instruction: Instruction) -> tuple[str, str, int]:
    """State space, element type and number of elements of a load or a store."""
    *words, type_ = instruction.modifiers
    space, count = "generic", 1
    for word in words:
        # PTX 8.3 and later may say whose parameter, or shared memory, it is.
        word = word.removesuffix("::entry").removesuffix("::cta")
        if word in ("global", "shared", "shared::cluster", "local", "param"):
            space = word
        elif word == "const":  # its addresses here are those of global memory
            space = "global"
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif not _CACHE_HINTS.match(word):
            raise UnknownInstructionError(instruction.text)
    if type_ not in DTYPES or type_ == "pred":
        raise UnknownInstructionError(instruction.text)
    return space, type_, count


def _load_bytes(
    threads: _Threads, space: str, lanes: Lanes, addresses: Lanes, nbytes: int
) -> Bytes:
    match space:
        case "global":
            return threads.memory.load(lanes + threads.first_lane, addresses, nbytes)
        case "shared":
            _note_own(threads, lanes, addresses, nbytes, writes=False)
            return threads.shared.load(lanes, addresses, nbytes)
        case "shared::cluster":
            values = np.empty((len(lanes), nbytes), np.uint8)
            own, others, workgroups, at = _in_cluster(
                threads, lanes, addresses, nbytes, writes=False
            )
            values[own] = threads.shared.load(lanes[own], at[own], nbytes)
            values[others] = threads.shared.load_of(
                workgroups[others], lanes[others], at[others], nbytes
            )
            return values
        case "local":
            return threads.local.load(lanes, addresses, nbytes)
    values = np.empty((len(lanes), nbytes), np.uint8)
    for where, part, window in _windows(addresses):
        values[part] = _load_bytes(threads, where, lanes[part], addresses[part] - window, nbytes)
    return values


def _store_bytes(
    threads: _Threads, space: str, lanes: Lanes, addresses: Lanes, values: Bytes
) -> None:
    match space:
        case "global":
            threads.memory.store(lanes + threads.first_lane, addresses, values)
        case "shared":
            _note_own(threads, lanes, addresses, values.shape[1], writes=True)
            threads.shared.store(lanes, addresses, values)
        case "shared::cluster":
            own, others, workgroups, at = _in_cluster(
                threads, lanes, addresses, values.shape[1], writes=True
            )
            threads.shared.store(lanes[own], at[own], values[own])
            threads.shared.store_of(workgroups[others], lanes[others], at[others], values[others])
        case "local":
            threads.local.store(lanes, addresses, values)
        case _:
            for where, part, window in _windows(addresses):
                _store_bytes(threads, where, lanes[part], addresses[part] - window, values[part])


def _bytes_of(
    readers: list[Reader], dtype: np.dtype[np.generic], threads: _Threads, to: Selection
) -> Bytes:
    """The elements that each thread stores: [T, bytes]."""
    values = np.empty((_size(to), len(readers)), dtype)
    for number, reader in enumerate(readers):
        values[:, number] = reader(threads, to)
    return values.view(np.uint8)


def _of_cluster(threads: _Threads) -> clusters.Cluster:
    """Of these threads: of one workgroup, where the kernel has mbarriers and no clusters."""
    if threads.cluster is None:
        raise Fault("an instruction of clusters in a kernel without .reqnctapercluster")
    return threads.cluster


def _mbarriers(threads: _Threads) -> mbarriers.Mbarriers:
    if threads.mbarriers is None:
        raise Fault("an mbarrier in a kernel that initialises none")
    return threads.mbarriers


def _note_own(
    threads: _Threads, lanes: Lanes, addresses: Lanes, nbytes: int, *, writes: bool
) -> None:
    """Threads touch their workgroup's memory, which others of the cluster may touch as well."""
    if threads.cluster is not None:
        _note(threads, lanes, lanes // threads.threads, addresses, nbytes, writes=writes)


def _note(
    threads: _Threads,
    lanes: Lanes,
    workgroups: Lanes,
    addresses: Lanes,
    nbytes: int,
    *,
    writes: bool,
) -> None:
    """Threads touch the memory of workgroups of their cluster."""
    _of_cluster(threads).note(lanes, workgroups, addresses, nbytes, writes=writes)
    if threads.mbarriers is not None:
        threads.mbarriers.note(lanes, workgroups, addresses, nbytes)


def _in_cluster(
    threads: _Threads, lanes: Lanes, addresses: Lanes, nbytes: int, *, writes: bool
) -> tuple[Lanes, Lanes, Lanes, Lanes]:
    """Accesses to a workgroup's own memory, the others; whose memory each is to, and where."""
    cluster = _of_cluster(threads)
    workgroups, at = cluster.locate(lanes, addresses)
    is_own = workgroups == lanes // threads.threads
    cluster.check_there(lanes[~is_own], workgroups[~is_own], threads.alive)
    _note(threads, lanes, workgroups, at, nbytes, writes=writes)
    return np.flatnonzero(is_own), np.flatnonzero(~is_own), workgroups, at


def _windows(addresses: Lanes) -> list[tuple[str, Lanes, int]]:
    """The state spaces that generic addresses are in, with the accesses to each."""
    is_local = addresses >= _LOCAL_WINDOW
    is_shared = (addresses >= _SHARED_WINDOW) & ~is_local
    parts = (
        ("global", ~is_local & ~is_shared, 0),
        ("shared", is_shared, _SHARED_WINDOW),
        ("local", is_local, _LOCAL_WINDOW),
    )
    return [(space, np.flatnonzero(mask), window) for space, mask, window in parts if mask.any()]


def _complete(lanes: Lanes, alive: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.bool_]:
    """Which threads are here with all others of their group of ``size`` that have not ended."""
    if len(lanes) == len(alive):
        return np.ones(len(lanes), np.bool_)
    groups = len(alive) // size
    here = np.bincount(lanes // size, minlength=groups)
    expected = alive.reshape(groups, size).sum(axis=1)
    complete: npt.NDArray[np.bool_] = (here == expected)[lanes // size]
    return complete


def _named_are_here(
    threads: _Threads, lanes: Lanes, alive: npt.NDArray[np.bool_], mask: Array
) -> npt.NDArray[np.bool_]:
    """Which threads are here with all that their member mask names, but for those that ended.

    Raises:
        Fault: A thread's mask does not name itself.
    """
    inside = threads.in_warp(lanes).astype(np.uint32)
    mask = np.broadcast_to(mask, lanes.shape)
    outside = (mask >> inside & np.uint32(1)) == 0
    if outside.any():
        raise Fault(
            f"the member mask {int(mask[outside][0]):#010x} does not name the thread itself",
            lanes[outside] + threads.first_lane,
        )
    present = np.zeros(len(alive), np.bool_)
    present[lanes] = True
    missing = threads.warp_bits(alive & ~present, lanes)
    passes: npt.NDArray[np.bool_] = (mask & missing) == 0
    return passes


def _compact(lanes: Lanes) -> Selection:
    """A slice where the threads are a range: those are quicker to read and write."""
    if len(lanes) and lanes[-1] - lanes[0] + 1 == len(lanes):
        return slice(int(lanes[0]), int(lanes[-1]) + 1)
    return lanes


def _size(selection: Selection) -> int:
    if isinstance(selection, slice):
        return int(selection.stop - selection.start)
    return len(selection)


def _unknown(instruction: Instruction, error: Exception) -> Fault:
    why = f": {error}" if isinstance(error, PtxError) else ""
    name = ".".join((instruction.opcode, *instruction.modifiers))
    return Fault(f"unknown instruction {name}{why}")


def _at(instruction: Instruction, fault: Fault) -> Fault:
    fault.instruction = str(instruction)
    return fault
