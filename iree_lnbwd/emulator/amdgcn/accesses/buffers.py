"""Buffers: global memory or scratch behind a descriptor of four registers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iree_lnbwd.emulator.amdgcn.accesses.global_memory import load
from iree_lnbwd.emulator.amdgcn.accesses.items import (
    Data,
    Decoder,
    Item,
    Loaded,
    alignment_of,
    expect_operands,
    load_step,
    modifiers_of,
    offset_of,
    store_step,
)
from iree_lnbwd.emulator.amdgcn.accesses.scratch import load_scratch, store_scratch
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    Reader,
    operand,
    scalar_reader,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask, Register
from iree_lnbwd.emulator.launch import Fault, Lanes

# gfx90a's descriptor of scratch, ahead of what is added for each wave: a base where there is no
# other memory, a swizzle, no bounds, and the lane's number added by itself.
SCRATCH_ADDRESS = 1 << 47
SCRATCH_WORDS = (0, 1 << 31 | SCRATCH_ADDRESS >> 32, 0xFFFFFFFF, 0x00E00000)


@dataclass(frozen=True)
class _BufferAccess:
    """Which part of memory a buffer instruction touches."""

    descriptor: Register
    scalar_offset: Reader
    vector_offset: Reader | None
    offset: int

    def scratch(self, instruction: Instruction, group: Group, where: Mask) -> Lanes | None:
        """Where lanes in a mask are in their own scratch; None of a descriptor of other memory.

        The descriptor of scratch swizzles: what lanes have at one offset lies side by side. An
        offset in a vector register or in the instruction is a lane's; one in a scalar register
        is of the memory of all lanes of the wave, one after the other.

        Raises:
            Fault: The descriptor is of another wave's scratch, or an offset has no meaning.
        """
        words = self._words(group)
        if (words[1] >> 16 != SCRATCH_WORDS[1] >> 16).any():
            return None
        own = SCRATCH_ADDRESS + group.waves.scratch_at[group.index]
        if (self._base(words) != own).any() or (words[3] != SCRATCH_WORDS[3]).any():
            raise Fault("scratch of another wave, or a changed descriptor", group.lane_ids[:, 0])
        of_wave = self.scalar_offset(group).astype(np.int64)
        if (of_wave % (4 * group.waves.lanes) != 0).any():
            raise instruction.fault(f"a scalar offset that is no word of {group.waves.lanes} lanes")
        own_offsets: Lanes = self._within(group, where) + (of_wave // group.waves.lanes)[:, None]
        return own_offsets[where]

    def _words(self, group: Group) -> list[Lanes]:
        first = self.descriptor.index
        return [group.scalar(first + n).astype(np.int64) for n in range(4)]

    def _base(self, words: list[Lanes]) -> Lanes:
        return words[0] | (words[1] & 0xFFFF) << 32

    def addresses(self, instruction: Instruction, group: Group, where: Mask) -> tuple[Lanes, Lanes]:
        """The address of each lane in a mask, and how many bytes there are from there to the end.

        Raises:
            Fault: The descriptor is of a kind that is not known here, or an offset has no meaning.
        """
        words = self._words(group)
        base = self._base(words)
        if (words[1] >> 16).any():
            raise instruction.fault("a buffer with a stride or a swizzle")
        within = self._within(group, where)
        within = within + self.scalar_offset(group).astype(np.int64)[:, None]
        return (base[:, None] + within)[where], (words[2][:, None] - within)[where]

    def _within(self, group: Group, where: Mask) -> Lanes:
        """What a lane adds to where a buffer begins."""
        within = np.full(where.shape, self.offset, np.int64)
        if self.vector_offset is not None:
            within = within + self.vector_offset(group)
        if (wraps := (within >> 32 != 0) & where).any():
            # A compiler that means a negative offset and a larger constant: LLVM itself takes it
            # for illegal (splitBufferOffsets), and no document says what it is.
            first = within[wraps][0] - self.offset
            raise Fault(
                f"a buffer's offset of {first:#x}, to which {self.offset} is added, wraps around",
                group.lane_ids[wraps],
            )
        return within


def _in_bounds(room: Lanes, nbytes: int) -> list[tuple[int, int, Mask]]:
    """The pieces of an access, (offset, bytes), and the lanes for which each is in bounds.

    All of it; or word by word, where it straddles the end for some lane: the bounds of a raw buffer
    are checked for each word.
    """
    if not ((room > 0) & (room < nbytes)).any():
        return [(0, nbytes, room >= nbytes)]
    size = min(nbytes, 4)
    return [(at, size, room >= at + size) for at in range(0, nbytes, size)]


def _buffer(instruction: Instruction) -> tuple[_BufferAccess, list[str]]:
    modifiers = modifiers_of(instruction, known=frozenset({"offset", "offen"}))
    expect_operands(instruction, 4)
    _, at, descriptor, scalar_offset = instruction.operands
    words = operand(instruction, descriptor).register
    if words is None or words.vector or words.count != 4:
        raise instruction.fault("expected a descriptor of four scalar registers")
    read = vector_reader(instruction, at, "u32") if "offen" in modifiers else None
    if read is None and at != "off":
        raise instruction.fault(f"expected off, got {at}")
    access = _BufferAccess(
        words,
        scalar_reader(instruction, scalar_offset, "u32"),
        read,
        offset_of(instruction, modifiers),
    )
    return access, [descriptor, scalar_offset] + ([] if read is None else [at])


def buffer_load(item: Item) -> Decoder:
    """A load behind a descriptor; what is out of its bounds is 0."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        access, used = _buffer(instruction)

        def load_there(group: Group, machine: Machine, where: Mask) -> Loaded:
            if (own := access.scratch(instruction, group, where)) is not None:
                return load_scratch(group, machine, where, own, item)
            addresses, room = access.addresses(instruction, group, where)
            loaded = np.zeros((len(addresses), item.nbytes), np.uint8)
            lanes = group.lane_ids[where]
            for at, size, inside in _in_bounds(room, item.nbytes):
                part = load(machine, lanes[inside], addresses[inside] + at, size)
                loaded[inside, at : at + size] = part
            return Loaded(loaded)

        return load_step(instruction, item, used, load_there)

    return decode


def buffer_store(item: Item) -> Decoder:
    """A store behind a descriptor; what is out of its bounds is dropped."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        access, used = _buffer(instruction)

        def store_there(group: Group, machine: Machine, where: Mask, data: Data) -> None:
            if (own := access.scratch(instruction, group, where)) is not None:
                store_scratch(group, machine, where, own, data)
                return
            values = data.values
            addresses, room = access.addresses(instruction, group, where)
            lanes = group.lane_ids[where]
            for at, size, inside in _in_bounds(room, item.nbytes):
                to = addresses[inside] + at
                part = np.ascontiguousarray(values[inside, at : at + size])
                alignment = alignment_of(to, size)
                machine.memory.store(lanes[inside], to, part, alignment=alignment)

        what = instruction.operands[0]
        return store_step(instruction, item, what, used, store_there, counts_stores=counts_stores)

    return decode
