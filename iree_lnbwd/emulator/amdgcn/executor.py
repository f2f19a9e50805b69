"""Runs kernels: sets up registers as the hardware does, and runs the waves.

All waves of a batch of workgroups run together. Waves that are at the same instruction run it
together. When they separate at a branch, those that are furthest behind run until they reach the
others. At a barrier a wave waits for its workgroup.

Source: LLVM's AMDGPU guide, "Initial Kernel Execution State".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from iree_lnbwd.emulator import limits
from iree_lnbwd.emulator.amdgcn.accesses import ACCESSES, SCRATCH_WORDS
from iree_lnbwd.emulator.amdgcn.arguments import KERNARG_ADDRESS, Arguments, arguments
from iree_lnbwd.emulator.amdgcn.assembly import Instruction, Kernel, kernels
from iree_lnbwd.emulator.amdgcn.control import decode_control
from iree_lnbwd.emulator.amdgcn.lanes import LANES
from iree_lnbwd.emulator.amdgcn.scalar import decode_scalar
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, Then
from iree_lnbwd.emulator.amdgcn.vector import base_name, decode_vector
from iree_lnbwd.emulator.amdgcn.waves import EXEC, MOST_VECTORS, TTMP, VCC, Group, Waves
from iree_lnbwd.emulator.launch import (
    CONFUSION,
    Fault,
    Lanes,
    Launch,
    Unknown,
    Work,
    not_understood,
)
from iree_lnbwd.emulator.memory import (
    GlobalMemory,
    LocalMemory,
    SharedMemory,
    workgroups_at_once,
)

_REGISTER_BYTES = 64 << 20  # of the vector registers of a batch
_TARGET = re.compile(r'\.amdgcn_target ".*(gfx\d+[0-9a-f]{2})"')
_NUMBERS = re.compile(r"\b([avs])(?:(\d+)(?!\w)|\[(\d+):(\d+)\])")  # registers
_FOREVER = np.iinfo(np.int64).max

# What user registers hold, in their order: directive, and how many.
_USER_REGISTERS = (
    ("user_sgpr_private_segment_buffer", 4),
    ("user_sgpr_dispatch_ptr", 2),
    ("user_sgpr_queue_ptr", 2),
    ("user_sgpr_kernarg_segment_ptr", 2),
    ("user_sgpr_dispatch_id", 2),
    ("user_sgpr_flat_scratch_init", 2),
    ("user_sgpr_private_segment_size", 1),
)
_MOST_USER_REGISTERS = 16
_MOST_ARGUMENTS = 1 << 16  # bytes
_KERNARG = "user_sgpr_kernarg_segment_ptr"
_SCRATCH = "user_sgpr_private_segment_buffer"
# What must be as it is here: to nearest even, subnormals kept, IEEE's NaN.
_MODES = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
}


class AmdgcnExecutor:
    """The kernels of one code object, from their assembly."""

    def __init__(self, assembly: str) -> None:
        """Reads the assembly: `disassembly.disassemble`'s, or LLVM's.

        Raises:
            Fault: A line is not understood.
        """
        try:
            self._kernels = kernels(assembly)
        except CONFUSION as error:
            raise not_understood(error) from error
        found = _TARGET.search(assembly)
        if found is None:
            raise Fault("the assembly does not say what it is for (.amdgcn_target)")
        self._processor = found[1]
        self._generation = limits.generation(found[1])
        self._steps: dict[str, tuple[Step, ...]] = {}

    def subgroup_size(self, kernel: str) -> int:
        """Threads of a wave of a kernel.

        Raises:
            Fault: There is no such kernel.
        """
        return _lanes(self._kernel(kernel))

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            raise Fault(f"no such kernel: {name}")
        return self._kernels[name]

    def run(self, launch: Launch, memory: GlobalMemory) -> None:
        """Runs a kernel to its end on global memory.

        Raises:
            Fault: With the instruction and the launch filled in.
        """
        try:
            kernel = self._kernel(launch.kernel)
            self._check(kernel, launch)
            with np.errstate(all="ignore"):
                self._run(kernel, launch, memory)
        except Fault as fault:
            raise fault.of(launch)  # noqa: B904 - it is the same one

    def unknown(self, launch: Launch) -> list[Unknown]:
        """The parts of a kernel that are not implemented (`executor.Executor`)."""
        try:
            kernel = self._kernel(launch.kernel)
        except Fault as fault:
            return [Unknown(launch.kernel, 0, "", fault.what)]
        found = []
        try:
            self._check(kernel, launch)
        except Fault as fault:
            found.append(Unknown(kernel.name, 0, "", fault.what))
        allocated = _allocated(kernel)
        for instruction in kernel.instructions:
            try:
                self._decode(kernel, instruction, allocated)
            except Fault as fault:
                found.append(Unknown(kernel.name, instruction.line, instruction.text, fault.what))
        return found

    def decode(self, name: str) -> tuple[Step, ...]:
        """The instructions of a kernel, ready to run.

        Raises:
            Fault: An instruction is not known.
        """
        if name not in self._steps:
            kernel = self._kernel(name)
            allocated = _allocated(kernel)
            self._steps[name] = tuple(
                self._decode(kernel, instruction, allocated) for instruction in kernel.instructions
            )
        return self._steps[name]

    def _decode(
        self, kernel: Kernel, instruction: Instruction, allocated: Mapping[str, int]
    ) -> Step:
        _check_registers(instruction, allocated)
        try:
            return decode(instruction, kernel.labels, _lanes(kernel), self._generation)
        except CONFUSION as error:
            raise instruction.fault(str(not_understood(error))) from error

    def _check(self, kernel: Kernel, launch: Launch) -> None:
        """The kernel can be launched so.

        Raises:
            Fault: It cannot.
        """
        lanes = _lanes(kernel)
        if self._generation == 9 and lanes != 64:
            raise Fault(f"waves of {lanes} lanes, which {self._processor} does not have")
        if launch.subgroup_size != lanes:
            raise Fault(f"waves of {lanes} lanes, launched with {launch.subgroup_size}")
        limits.check(
            launch,
            limits.of_rocm(self._processor, lanes),
            static_bytes=kernel.number("group_segment_fixed_size"),
            local_bytes=kernel.number("private_segment_fixed_size"),
        )
        _check_size(kernel, launch)
        _check_modes(kernel)

    def _run(self, kernel: Kernel, launch: Launch, memory: GlobalMemory) -> None:
        steps = self.decode(kernel.name)
        given = arguments(launch, kernel.number("kernarg_size"))
        lanes = _lanes(kernel)
        vectors = max(kernel.number("next_free_vgpr"), 1 + _last_vector(steps))
        waves = -(-launch.threads // lanes)
        room = workgroups_at_once(
            kernel.number("group_segment_fixed_size") + launch.shared_bytes,
            2 * kernel.number("private_segment_fixed_size"),
            launch.threads,
        )
        batch = max(1, min(room, _REGISTER_BYTES // (4 * waves * lanes * vectors)))
        work = Work()
        for first in range(0, launch.workgroups, batch):
            count = min(batch, launch.workgroups - first)
            shared = SharedMemory(
                kernel.number("group_segment_fixed_size") + launch.shared_bytes,
                workgroups=count,
                threads=launch.threads,
                subgroup_size=lanes,
                first_lane=first * launch.threads,
            )
            local = LocalMemory(
                kernel.number("private_segment_fixed_size"),
                lanes=count * launch.threads,
                first_lane=first * launch.threads,
            )
            machine = Machine(launch, memory, shared, local, given, first)
            workgroups = np.arange(first, first + count)
            state = _initial(kernel, launch, workgroups, lanes, vectors, given, self._generation)
            _Scheduler(steps, state, machine, waves, work).run(kernel.entry)


def decode(
    instruction: Instruction, labels: Mapping[str, int], lanes: int, generation: int
) -> Step:
    """An instruction, ready to run.

    Args:
        instruction: From `assembly`.
        labels: Where branches may go.
        lanes: Of a wave.
        generation: 9, 10, 11 or 12.

    Raises:
        Fault: It is not known.
    """
    name = base_name(instruction)
    step = decode_control(instruction, labels, lanes)
    step = step or decode_scalar(instruction, lanes) or decode_vector(instruction, lanes)
    if step is not None:
        return step
    if name in LANES:
        return LANES[name](instruction, lanes)
    if name in ACCESSES:
        return ACCESSES[name](instruction, generation >= 10)
    raise instruction.fault(f"instruction not known: {instruction.mnemonic}")


def _lanes(kernel: Kernel) -> int:
    return 32 if kernel.number("wavefront_size32") else 64


def _allocated(kernel: Kernel) -> dict[str, int]:
    """How many registers of each kind a wave has. Unified ones begin with the vector registers."""
    vectors = kernel.number("next_free_vgpr")
    apart = kernel.number("accum_offset", vectors)
    return {
        "v": min(vectors, apart, MOST_VECTORS),
        "a": min(max(0, vectors - apart), MOST_VECTORS),
        "s": min(kernel.number("next_free_sgpr", VCC), VCC),
    }


def _last_vector(steps: Sequence[Step]) -> int:
    """The highest number of a vector register that some steps touch, or 0."""
    touched = (register for step in steps for register in (*step.reads, *step.writes))
    return max((number for is_vector, number in touched if is_vector), default=0)


def _check_registers(instruction: Instruction, allocated: Mapping[str, int]) -> None:
    for half in (instruction, instruction.second):
        for kind, one, first, last in _NUMBERS.findall(" ".join(half.operands) if half else ""):
            number = int(last or one)
            if number >= allocated[kind] or int(first or one) > number:
                raise instruction.fault(
                    f"{kind}{number} is used, and the kernel has {allocated[kind]} such registers"
                )


def _check_size(kernel: Kernel, launch: Launch) -> None:
    most = kernel.number("max_flat_workgroup_size")
    if most and launch.threads > most:
        raise Fault(f"workgroups of {launch.threads} threads: max_flat_workgroup_size is {most}")
    x, y, z = (kernel.number(f"reqd_workgroup_size_{axis}") for axis in "xyz")
    if any((x, y, z)) and launch.workgroup_size != (x, y, z):
        raise Fault(
            f"workgroups of {launch.workgroup_size} threads: reqd_workgroup_size is {(x, y, z)}"
        )
    if (size := kernel.number("kernarg_size")) > _MOST_ARGUMENTS:
        raise Fault(f"{size} bytes of arguments, expected at most {_MOST_ARGUMENTS}")


def _check_modes(kernel: Kernel) -> None:
    for directive, expected in _MODES.items():
        if (got := kernel.number(directive, expected)) != expected:
            raise Fault(f".amdhsa_{directive} {got}: only {expected} is known")
    if kernel.number("uses_dynamic_stack"):
        raise Fault("a stack of dynamic size is not known")
    if kernel.number("private_segment_fixed_size") and not kernel.number(
        "enable_private_segment", 1
    ):
        raise Fault("a kernel with a private segment, which it does not enable")
    needed = sum(count for name, count in _USER_REGISTERS if kernel.number(name))
    needed += kernel.number("user_sgpr_kernarg_preload_length")
    given = kernel.number("user_sgpr_count")
    if not needed <= given <= _MOST_USER_REGISTERS:
        raise Fault(
            f"{given} user registers, expected {needed} or more, and at most {_MOST_USER_REGISTERS}"
        )


def _initial(
    kernel: Kernel,
    launch: Launch,
    workgroups: Lanes,
    lanes: int,
    vectors: int,
    given: Arguments,
    generation: int,
) -> Waves:
    """The waves of some workgroups before their first instruction."""
    waves = -(-launch.threads // lanes)
    thread = np.tile(np.arange(waves * lanes).reshape(waves, lanes), (len(workgroups), 1))
    exists = thread < launch.threads
    workgroup = np.repeat(workgroups, waves)
    scratch_bytes = kernel.number("private_segment_fixed_size")
    state = Waves(workgroup[:, None] * launch.threads + thread, exists, vectors, scratch_bytes)
    group = Group(state, np.arange(state.count))
    for n, word in enumerate(_words(exists)):
        group.set_scalar(EXEC + n, word)
    _set_user_registers(kernel, group, given)
    _set_workgroup_ids(kernel, group, launch, workgroup, generation)
    x, y, _ = launch.workgroup_size
    # Packed: x, y and z of a thread, 10 bits each (gfx90a, gfx11 and later).
    packed = thread % x | thread // x % y << 10 | thread // (x * y) << 20
    group.set_vector(0, packed.astype(np.uint32))
    return state


def _words(exists: np.typing.NDArray[np.bool_]) -> np.typing.NDArray[np.uint32]:
    return np.packbits(exists, axis=1, bitorder="little").view(np.uint32).T


def _set_user_registers(kernel: Kernel, group: Group, given: Arguments) -> None:
    at = 0
    for directive, count in _USER_REGISTERS:
        if not kernel.number(directive):
            continue
        if directive == _SCRATCH:
            for n, word in enumerate(SCRATCH_WORDS):
                group.set_scalar(at + n, np.array(word, np.uint32))
        if directive == _KERNARG:
            group.set_scalar(at, np.array(KERNARG_ADDRESS))
            group.set_scalar(at + 1, np.array(0))
        at += count  # the others stay unknown: to read them is a fault
    length = kernel.number("user_sgpr_kernarg_preload_length")
    start = kernel.number("user_sgpr_kernarg_preload_offset")
    words = given.content.view(np.uint32)[start : start + length]
    for n, word in enumerate(words):
        if given.known[4 * (start + n) : 4 * (start + n + 1)].all():
            group.set_scalar(at + n, word)


def _set_workgroup_ids(
    kernel: Kernel, group: Group, launch: Launch, workgroup: Lanes, generation: int
) -> None:
    x, y, _ = launch.workgroup_count
    ids = [workgroup % x, workgroup // x % y, workgroup // (x * y)]
    if generation >= 12:  # in trap temporaries: x, and y and z in halves of one
        group.set_scalar(TTMP + 9, ids[0].astype(np.uint32))
        group.set_scalar(TTMP + 7, (ids[1] | ids[2] << 16).astype(np.uint32))
        return
    at = kernel.number("user_sgpr_count")
    for axis, number in zip("xyz", ids, strict=True):
        if kernel.number(f"system_sgpr_workgroup_id_{axis}", int(axis == "x")):
            group.set_scalar(at, number.astype(np.uint32))
            at += 1
    at += kernel.number("system_sgpr_workgroup_info")
    if kernel.number(_SCRATCH) and kernel.number("enable_private_segment"):
        group.set_scalar(at, group.waves.scratch_at.astype(np.uint32))


class _Scheduler:
    """Decides which waves run next."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        waves: Waves,
        machine: Machine,
        of_workgroup: int,
        work: Work,
    ) -> None:
        self._steps = steps
        self._waves = waves
        self._machine = machine
        self._of_workgroup = of_workgroup  # waves
        self._work = work

    def run(self, entry: int) -> None:
        """Until every wave has ended."""
        waves = self._waves
        waves.pc[:] = entry
        group: Group | None = None
        while True:
            running = ~(waves.ended | waves.waiting)
            if not running.any():
                if not waves.waiting.any():
                    return
                self._release()
                continue
            behind = waves.pc[running].min()
            members = np.flatnonzero(running & (waves.pc == behind))
            ahead = waves.pc[running & (waves.pc != behind)]
            if group is None or not np.array_equal(group.members, members):
                group = Group(waves, members)
            self._go(group, int(behind), int(ahead.min()) if ahead.size else _FOREVER)

    def _go(self, group: Group, pc: int, meet: int) -> None:
        """Runs waves until they part, wait or end, or come to where others are."""
        waves, steps = self._waves, self._steps
        while True:
            if pc >= len(steps):
                raise Fault("a wave runs past the end of its kernel", group.lane_ids[:, 0])
            step = steps[pc]
            try:
                self._work.add(1, group.size * waves.lanes)
                waves.waits.check(group.index, step.reads)
                waves.waits.check(group.index, step.writes, loads=step.loads)
                step.run(group, self._machine)
                pc += 1
                if step.then is Then.BRANCH:
                    chosen = None if step.taken is None else step.taken(group)
                    if chosen is None or chosen.all():
                        pc = step.target
                    elif chosen.any():
                        waves.pc[group.index] = np.where(chosen, step.target, pc)
                        return
            except Fault as fault:
                if not fault.instruction:
                    fault.instruction = step.instruction.where
                raise
            except CONFUSION as error:
                raise step.instruction.fault(str(not_understood(error))) from error
            if step.then is Then.END:
                waves.ended[group.index] = True
                return
            if step.then is Then.BARRIER:
                waves.waiting[group.index] = True
                waves.pc[group.index] = pc
                return
            if pc >= meet:
                waves.pc[group.index] = pc
                return

    def _release(self) -> None:
        """Every wave that has not ended waits: workgroups whose waves all wait go on."""
        waves = self._waves
        by_workgroup = (-1, self._of_workgroup)
        waiting, pc = waves.waiting.reshape(by_workgroup), waves.pc.reshape(by_workgroup)
        missing = waiting.any(axis=1) & ~waiting.all(axis=1)
        apart = waiting.all(axis=1) & (pc != pc[:, :1]).any(axis=1)
        for wrong, what in (
            (missing, "a barrier that waves of the workgroup never reach: they have ended"),
            (apart, "waves of a workgroup wait at different barriers"),
        ):
            if wrong.any():
                first = int(np.flatnonzero(waiting.reshape(-1))[0])
                lanes = waves.lane_ids.reshape(*by_workgroup, waves.lanes)[wrong][:, :, 0]
                fault = Fault(what, lanes.reshape(-1))
                fault.instruction = self._steps[waves.pc[first] - 1].instruction.where
                raise fault
        met = np.flatnonzero(waiting.all(axis=1))
        self._machine.shared.barrier(met)
        # A barrier does not order accesses that are still on their way to global memory.
        done = met[waves.done_in_memory.reshape(by_workgroup)[met].all(axis=1)]
        self._machine.memory.workgroup_barrier(done + self._machine.first_workgroup)
        waves.waiting[:] = False
