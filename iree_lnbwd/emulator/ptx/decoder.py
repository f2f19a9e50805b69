"""From PTX instructions to what they do, and from a kernel to its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from iree_lnbwd.emulator.launch import CONFUSION, Fault, Lanes
from iree_lnbwd.emulator.ptx.accesses import (
    change,
    convert_address,
    copy_async,
    create_policy,
    load,
    map_address,
    store,
)
from iree_lnbwd.emulator.ptx.operands import Operands
from iree_lnbwd.emulator.ptx.parser import Instruction, Kernel, PtxError, vector
from iree_lnbwd.emulator.ptx.semantics import find
from iree_lnbwd.emulator.ptx.synchronisation import (
    arrive,
    barrier,
    fence,
    mbarrier,
    rest,
    shuffle,
    wait_for_phase,
)
from iree_lnbwd.emulator.ptx.threads import (
    Block,
    Choice,
    Reader,
    Selection,
    Step,
    Sync,
    Threads,
    at_instruction,
    size_of,
)
from iree_lnbwd.emulator.ptx.types import DTYPES, UnknownInstructionError

_NO_EFFECT = ("membar", "fence", "griddepcontrol", "discard", "applypriority", "prefetch")
JUMPS = ("bra", "brx", "ret", "exit")
_TO_SHARED = ("bulk", "shared::cluster")


class Decoder:
    """From the instructions of a kernel to what they do."""

    def __init__(self, kernel: Kernel) -> None:
        self.operands = Operands(kernel)

    @staticmethod
    def is_sync(instruction: Instruction) -> bool:
        """It waits for other threads."""
        if instruction.opcode == "mbarrier":
            return instruction.modifiers[:1] == ("try_wait",)
        return instruction.opcode in ("bar", "barrier", "shfl", "nanosleep") and (
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
            if instruction.predicate and self.operands.dtype_of(instruction.predicate) != np.bool_:
                raise PtxError(f"{instruction.predicate} is no predicate")
        except PtxError as error:
            raise at_instruction(instruction, Fault(str(error))) from error

    def target(self, instruction: Instruction) -> int:
        """The index of the instruction that a branch goes to."""
        return self._at_label(instruction, ", ".join(instruction.operands))

    def _at_label(self, instruction: Instruction, label: str) -> int:
        if label not in self.operands.kernel.labels:
            raise at_instruction(instruction, Fault(f"no label {label}"))
        return self.operands.kernel.labels[label]

    def choice(self, instruction: Instruction) -> tuple[Reader, tuple[int, ...]]:
        """What a branch that chooses reads, and the indices of the instructions to choose from."""
        try:
            number, name = instruction.operands
            if instruction.modifiers not in (("idx",), ("idx", "uni")):
                raise UnknownInstructionError(instruction.text)
            labels, reader = self.operands.kernel.lists[name], self.operands.reader(number, "u32")
        except CONFUSION as error:
            raise at_instruction(instruction, unknown_instruction(instruction, error)) from error
        return reader, tuple(self._at_label(instruction, label) for label in labels)

    def check(self, instruction: Instruction) -> None:
        """An instruction of any kind is known.

        Raises:
            Fault: It is not.
        """
        self.check_predicate(instruction)
        if instruction.opcode == "bra":
            self.target(instruction)
        elif instruction.opcode == "brx":
            self.choice(instruction)
        elif self.is_sync(instruction):
            self.sync(instruction)
        elif instruction.opcode not in JUMPS and not self.is_void(instruction):
            self.step(instruction)

    def step(self, instruction: Instruction) -> Step:
        """What an instruction does."""
        try:
            special = _SPECIAL.get(instruction.opcode)
            return (
                special(self.operands, instruction) if special else pure(self.operands, instruction)
            )
        except CONFUSION as error:
            raise at_instruction(instruction, unknown_instruction(instruction, error)) from error

    def sync(self, instruction: Instruction) -> Sync:
        """The threads that an instruction waits for, and the operation that follows."""
        try:
            match instruction.opcode:
                case "shfl":
                    return shuffle(self.operands, instruction)
                case "mbarrier":
                    return wait_for_phase(self.operands, instruction)
                case "nanosleep":
                    return rest(self.operands, instruction)
            return barrier(self.operands, instruction)
        except CONFUSION as error:
            raise at_instruction(instruction, unknown_instruction(instruction, error)) from error


class Program:
    """A kernel, decoded."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.has_mbarriers = any(i.opcode == "mbarrier" for i in kernel.code)
        self.has_bulk_copies = any(is_bulk_copy(i) for i in kernel.code)
        decoder = Decoder(kernel)
        starts = {0, len(kernel.code), *kernel.labels.values()}
        for index, instruction in enumerate(kernel.code):
            if instruction.opcode in JUMPS:
                starts.add(index + 1)
            elif decoder.is_sync(instruction):
                starts |= {index, index + 1}
        ordered = sorted(starts)
        number = {start: n for n, start in enumerate(ordered)}
        self.blocks = []
        for start, end in itertools.pairwise(ordered):
            block = Block([])
            for instruction in kernel.code[start:end]:
                decoder.check_predicate(instruction)
                if instruction.opcode == "bra":
                    block.instruction = instruction
                    block.target = number[decoder.target(instruction)]
                elif instruction.opcode == "brx":
                    reader, targets = decoder.choice(instruction)
                    block.instruction = instruction
                    block.choose = _chosen(reader, np.array([number[at] for at in targets]))
                elif instruction.opcode in JUMPS:
                    block.instruction, block.ends = instruction, True
                elif decoder.is_sync(instruction):
                    block.instruction = instruction
                    block.sync = decoder.sync(instruction)
                elif not decoder.is_void(instruction):
                    block.steps.append((instruction, decoder.step(instruction)))
            self.blocks.append(block)
        self.register_bytes = decoder.operands.register_bytes


def _chosen(reader: Reader, targets: Lanes) -> Choice:
    """The block that each thread goes to, by its number in a list of them."""

    def choose(threads: Threads, to: Selection) -> Lanes:
        index = np.broadcast_to(reader(threads, to), size_of(to)).astype(np.int64)
        if (outside := index >= len(targets)).any():
            raise Fault(
                f"number {index[outside][0]} of a list of {len(targets)} labels",
                threads.numbers[to][outside] + threads.first_lane,
            )
        chosen: Lanes = targets[index]
        return chosen

    return choose


def pure(operands: Operands, instruction: Instruction) -> Step:
    """An instruction that only computes."""
    semantics = find(instruction.opcode, instruction.modifiers)
    destination, *sources = instruction.operands
    readers = [
        operands.reader(operand, type_)
        for operand, type_ in zip(sources, semantics.sources, strict=True)
    ]
    writer = operands.writer(destination)
    function = semantics.function

    def step(threads: Threads, to: Selection) -> None:
        writer(threads, to, function(*[reader(threads, to) for reader in readers]))

    return step


def move(operands: Operands, instruction: Instruction) -> Step:
    """A copy of a register, or of parts of one."""
    destination, source = instruction.operands
    (type_,) = instruction.modifiers
    to_parts, from_parts = vector(destination), vector(source)
    if len(to_parts) == len(from_parts) == 1:
        return pure(operands, instruction)
    bits = DTYPES[type_].itemsize * 8
    if len(from_parts) > 1:
        part = f"b{bits // len(from_parts)}"
        readers = [operands.reader(operand, part) for operand in from_parts]
        writer = operands.writer(destination)

        def pack(threads: Threads, to: Selection) -> None:
            parts = np.broadcast_arrays(*(reader(threads, to) for reader in readers))
            writer(threads, to, np.stack(parts, axis=-1).view(f"u{bits // 8}")[..., 0])

        return pack
    part = f"b{bits // len(to_parts)}"
    reader = operands.reader(source, type_)
    writers = [None if name == "_" else operands.writer(name) for name in to_parts]

    def unpack(threads: Threads, to: Selection) -> None:
        whole = np.ascontiguousarray(reader(threads, to))
        parts = whole.view(DTYPES[part]).reshape(-1, len(writers))
        for number, write in enumerate(writers):
            if write is not None:
                write(threads, to, parts[:, number])

    return unpack


def compare(operands: Operands, instruction: Instruction) -> Step:
    """A comparison. Of packed f16 there is one for each half (PTX ISA, "setp", half precision)."""
    *how, type_ = instruction.modifiers
    if type_ != "f16x2":
        return pure(operands, instruction)
    destination, *sources = instruction.operands
    semantics = find(instruction.opcode, (*how, "f16"))
    low, high = (operands.writer(name.strip()) for name in destination.split("|"))
    one, other = (operands.reader(source, type_) for source in sources)

    def step(threads: Threads, to: Selection) -> None:
        pairs = one(threads, to), other(threads, to)
        for write, bits in ((low, 0), (high, 16)):
            halves = (np.asarray(pair >> bits).astype(np.uint16) for pair in pairs)
            write(threads, to, semantics.function(*halves))

    return step


def trap(operands: Operands, instruction: Instruction) -> Step:
    """Ends in a fault."""

    def trap(threads: Threads, to: Selection) -> None:
        raise Fault("trap", threads.numbers[to] + threads.first_lane)

    return trap


_SPECIAL: Mapping[str, Callable[[Operands, Instruction], Step]] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "mov": move,
    "setp": compare,
    "cvta": convert_address,
    "cp": copy_async,
    "trap": trap,
    "mapa": map_address,
    "createpolicy": create_policy,
    "atom": change,
    "barrier": arrive,
    "mbarrier": mbarrier,
    "fence": fence,
}


def is_bulk_copy(instruction: Instruction) -> bool:
    """An instruction is cp.async.bulk, to shared memory."""
    return instruction.opcode == "cp" and instruction.modifiers[:3] == ("async", *_TO_SHARED)


def unknown_instruction(instruction: Instruction, error: Exception) -> Fault:
    """A fault that names the instruction."""
    why = f": {error}" if isinstance(error, PtxError) else ""
    name = ".".join((instruction.opcode, *instruction.modifiers))
    return Fault(f"unknown instruction {name}{why}")
