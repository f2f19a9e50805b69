"""Loads and stores: global and scalar memory, buffers, scratch, LDS; exchanges through LDS.

Sources: AMD's ISA documents ("Vector Memory Buffer Instructions", "Flat Memory Instructions", "Data
Share Operations", "Scalar Memory Operations").

A load's registers hold its data at once; `waits` makes sure that nobody reads them before s_waitcnt
allows it. Cache policies (glc, slc, dlc, sc0, sc1, nt) change nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.emulator.amdgcn.arguments import ARGUMENTS_END, KERNARG_ADDRESS
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    Operand,
    Reader,
    destination,
    operand,
    scalar_reader,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.waits import LDS, SCALAR, STORE, VECTOR
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask, Register
from iree_lnbwd.emulator.launch import Array, Bytes, Fault, Lanes

_CACHE_POLICIES = frozenset({"glc", "slc", "dlc", "sc0", "sc1", "nt", "scope", "th"})
_WIDEST = 16  # bytes of one access of memory
# gfx90a's descriptor of scratch, ahead of what is added for each wave: a base where there is no
# other memory, a swizzle, no bounds, and the lane's number added by itself.
SCRATCH_ADDRESS = 1 << 47
SCRATCH_WORDS = (0, 1 << 31 | SCRATCH_ADDRESS >> 32, 0xFFFFFFFF, 0x00E00000)


@dataclass(frozen=True)
class Item:
    """What one lane moves.

    Attributes:
        nbytes: In memory.
        signed: A narrow load repeats its sign.
        half: A 16-bit access uses this half of its register and keeps the other; None for the lower
            half, of which a load clears the other.
    """

    nbytes: int
    signed: bool = False
    half: int | None = None

    @property
    def registers(self) -> int:
        """How many a lane needs."""
        return -(-self.nbytes // 4)


_WIDE = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8}
_WIDE |= {"b96": 12, "b128": 16}
LOADS = {name: Item(size) for name, size in _WIDE.items()} | {
    "ubyte": Item(1),
    "sbyte": Item(1, signed=True),
    "ushort": Item(2),
    "sshort": Item(2, signed=True),
    "u8": Item(1),
    "i8": Item(1, signed=True),
    "u16": Item(2),
    "i16": Item(2, signed=True),
    "d16_b16": Item(2, half=0),
    "d16_hi_b16": Item(2, half=1),
    "d16_u8": Item(1, half=0),
    "d16_i8": Item(1, signed=True, half=0),
    "d16_hi_u8": Item(1, half=1),
    "d16_hi_i8": Item(1, signed=True, half=1),
    "ubyte_d16": Item(1, half=0),
    "sbyte_d16": Item(1, signed=True, half=0),
    "ubyte_d16_hi": Item(1, half=1),
    "sbyte_d16_hi": Item(1, signed=True, half=1),
    "short_d16": Item(2, half=0),
    "short_d16_hi": Item(2, half=1),
    "u8_d16": Item(1, half=0),
    "u8_d16_hi": Item(1, half=1),
    "i8_d16": Item(1, signed=True, half=0),
    "i8_d16_hi": Item(1, signed=True, half=1),
    "u16_d16": Item(2, half=0),
    "u16_d16_hi": Item(2, half=1),
}
STORES = {name: Item(size) for name, size in _WIDE.items()} | {
    "byte": Item(1),
    "b8": Item(1),
    "short": Item(2),
    "b16": Item(2),
    "short_d16_hi": Item(2, half=1),
    "d16_hi_b16": Item(2, half=1),
    "byte_d16_hi": Item(1, half=1),
    "d16_hi_b8": Item(1, half=1),
    "b8_d16_hi": Item(1, half=1),
    "b16_d16_hi": Item(2, half=1),
}


def _offset(instruction: Instruction, modifiers: dict[str, str], name: str = "offset") -> int:
    try:
        return int(modifiers.pop(name, "0"), 0)
    except ValueError:
        raise instruction.fault(f"{name}: no number") from None


def _modifiers(instruction: Instruction, *, known: frozenset[str]) -> dict[str, str]:
    unknown = instruction.modifiers.keys() - known - _CACHE_POLICIES
    if unknown:
        raise instruction.fault(f"modifiers not known: {', '.join(sorted(unknown))}")
    return {n: v for n, v in instruction.modifiers.items() if n not in _CACHE_POLICIES}


def _count(instruction: Instruction, expected: int) -> None:
    if len(instruction.operands) != expected:
        raise instruction.fault(f"expected {expected} operands")


def _data(instruction: Instruction, text: str, item: Item) -> Operand:
    """The registers that an access moves."""
    data = destination(instruction, text, vector=True)
    assert data.register is not None
    if data.register.count != item.registers:
        raise instruction.fault(f"{item.nbytes} bytes do not fit {text}")
    return data


def _put(group: Group, first: int, item: Item, loaded: Bytes, where: Mask) -> None:
    """Loaded bytes, of the lanes in a mask, go to their registers."""
    words = _words(loaded, item)
    if item.half is not None:
        kept = group.waves.vectors[first][group.index][where][:, None]
        shift = np.uint32(16 * item.half)
        low = np.uint32(0xFFFF)
        words = kept & ~(low << shift) | (words & low) << shift
    for n in range(words.shape[1]):
        whole = np.zeros(where.shape, np.uint32)
        whole[where] = words[:, n]
        group.set_vector(first + n, whole, where)


def _words(loaded: Bytes, item: Item) -> Array:
    """What goes to registers of an access's bytes: [T, registers]."""
    if item.nbytes >= 4:
        return np.ascontiguousarray(loaded).view(np.uint32)
    kind = f"{'i' if item.signed else 'u'}{item.nbytes}"
    narrow = np.ascontiguousarray(loaded).view(kind)[:, 0]
    return narrow.astype(np.int64).astype(np.uint32)[:, None]


def _taken(group: Group, first: int, item: Item, where: Mask, half: int | None) -> Bytes:
    """The bytes that lanes in a mask store: [T, nbytes]."""
    words = np.stack([group.vector(first + n)[where] for n in range(item.registers)], axis=1)
    if (item.half if half is None else half) == 1:
        words = words >> np.uint32(16)
    return np.ascontiguousarray(words).view(np.uint8)[:, : item.nbytes]


def _alignment(addresses: Array, nbytes: int) -> int:
    """What all addresses have: hardware takes any (LLVM: "unaligned-access-mode" on HSA)."""
    together = int(np.bitwise_or.reduce(addresses, initial=0)) | nbytes
    return together & -together


# Global memory


def _global_address(instruction: Instruction, at: str, base: str) -> tuple[Reader, list[str]]:
    """A 64-bit address in registers; or a 32-bit offset from a scalar base."""
    if base == "off":
        return vector_reader(instruction, at, "u64"), [at]
    read_offset = vector_reader(instruction, at, "u32")
    read_base = scalar_reader(instruction, base, "u64")
    return lambda g: read_base(g)[:, None] + read_offset(g).astype(np.uint64), [at, base]


def _global_load(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        _count(instruction, 3)
        into = _data(instruction, instruction.operands[0], item).register
        read, used = _global_address(instruction, *instruction.operands[1:])
        offset = _offset(instruction, modifiers)
        assert into is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            addresses = _lanes_of(read(group), where) + offset
            lanes = group.lane_ids[where]
            loaded = _load(machine, lanes, addresses, item.nbytes)
            _put(group, into.index, item, loaded, where)
            group.waves.waits.issue(VECTOR, group.index, written)

        written = numbers([into])
        reads = numbers(operand(instruction, text).register for text in used)
        return Step(instruction, run, reads, written, VECTOR)

    return decode


def _global_store(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        _count(instruction, 3)
        at, what, base = instruction.operands
        read, used = _global_address(instruction, at, base)
        data = _data(instruction, what, item)
        offset = _offset(instruction, modifiers)
        counter = STORE if counts_stores else VECTOR
        source = data.register
        assert source is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            addresses = _lanes_of(read(group), where) + offset
            values = _taken(group, source.index, item, where, data.half)
            alignment = _alignment(addresses, item.nbytes)
            lanes = group.lane_ids[where]
            machine.memory.store(lanes, addresses, values, alignment=alignment)
            group.waves.waits.issue(counter, group.index)

        reads = numbers([source, *(operand(instruction, text).register for text in used)])
        return Step(instruction, run, reads)

    return decode


def _lanes_of(values: Array, where: Mask) -> Lanes:
    """The values of the lanes in a mask, as numbers with a sign."""
    return np.broadcast_to(values, where.shape)[where].astype(np.int64)


def _load(machine: Machine, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
    """From global memory, or from the kernel's arguments."""
    if addresses.size and addresses.max() < ARGUMENTS_END:
        return _load_argument(machine, lanes, addresses, nbytes)
    alignment = _alignment(addresses, nbytes)
    return machine.memory.load(lanes, addresses, nbytes, alignment=alignment)


def _load_argument(machine: Machine, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
    offsets = addresses - KERNARG_ADDRESS
    outside = (offsets < 0) | (offsets + nbytes > machine.arguments.content.size)
    if outside.any():
        raise Fault(
            f"byte {offsets[outside][0]} is out of bounds of the kernel's arguments, which have "
            f"{machine.arguments.content.size}",
            lanes[outside],
        )
    result: Bytes = machine.arguments.content[offsets[:, None] + np.arange(nbytes)]
    return result


def _is_known(machine: Machine, address: int, nbytes: int) -> bool:
    """Memory holds something, as far as that is known here: of arguments it may not."""
    offset = address - KERNARG_ADDRESS
    known = machine.arguments.known
    return not 0 <= offset < known.size or bool(known[offset : offset + nbytes].all())


# Buffers: global memory behind a descriptor of four registers


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
        """Of each lane in a mask, and how many bytes there are from there to the end.

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
    modifiers = _modifiers(instruction, known=frozenset({"offset", "offen"}))
    _count(instruction, 4)
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
        _offset(instruction, modifiers),
    )
    return access, [descriptor, scalar_offset] + ([] if read is None else [at])


def _buffer_load(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        access, used = _buffer(instruction)
        into = _data(instruction, instruction.operands[0], item).register
        assert into is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            if (own := access.scratch(instruction, group, where)) is not None:
                loaded = _load_scratch(group, machine, where, own, item)
            else:
                addresses, room = access.addresses(instruction, group, where)
                loaded = np.zeros((len(addresses), item.nbytes), np.uint8)  # what is outside is 0
                lanes = group.lane_ids[where]
                for at, size, inside in _in_bounds(room, item.nbytes):
                    part = _load(machine, lanes[inside], addresses[inside] + at, size)
                    loaded[inside, at : at + size] = part
            _put(group, into.index, item, loaded, where)
            group.waves.waits.issue(VECTOR, group.index, written)

        written = numbers([into])
        reads = numbers(operand(instruction, text).register for text in used)
        return Step(instruction, run, reads, written, VECTOR)

    return decode


def _buffer_store(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        access, used = _buffer(instruction)
        data = _data(instruction, instruction.operands[0], item)
        counter = STORE if counts_stores else VECTOR
        source = data.register
        assert source is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            values = _taken(group, source.index, item, where, data.half)
            if (own := access.scratch(instruction, group, where)) is not None:
                _store_scratch(group, machine, where, own, values)
            else:
                addresses, room = access.addresses(instruction, group, where)
                lanes = group.lane_ids[where]
                for at, size, inside in _in_bounds(room, item.nbytes):  # what is outside is dropped
                    to = addresses[inside] + at
                    part = np.ascontiguousarray(values[inside, at : at + size])
                    alignment = _alignment(to, size)
                    machine.memory.store(lanes[inside], to, part, alignment=alignment)
            group.waves.waits.issue(counter, group.index)

        reads = numbers([source, *(operand(instruction, text).register for text in used)])
        return Step(instruction, run, reads)

    return decode


# Scratch: memory of each lane


def _scratch_address(instruction: Instruction, at: str, base: str) -> tuple[Reader, list[str]]:
    """An offset in a vector register, in a scalar one, in both, or in neither."""
    if at != "off" and base != "off":
        read_vector = vector_reader(instruction, at, "i32")
        read_scalar = scalar_reader(instruction, base, "i32")
        return lambda group: read_vector(group) + read_scalar(group)[:, None], [at, base]
    if at != "off":
        return vector_reader(instruction, at, "i32"), [at]
    if base != "off":
        read = scalar_reader(instruction, base, "i32")
        return lambda group: read(group)[:, None], [base]
    return lambda group: np.zeros((1, 1), np.int32), []


def _scratch_load(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        _count(instruction, 3)
        into = _data(instruction, instruction.operands[0], item).register
        read, used = _scratch_address(instruction, *instruction.operands[1:])
        offset = _offset(instruction, modifiers)
        assert into is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            first = _lanes_of(read(group), where) + offset
            _put(group, into.index, item, _load_scratch(group, machine, where, first, item), where)
            group.waves.waits.issue(VECTOR, group.index, written)

        written = numbers([into])
        reads = numbers(operand(instruction, text).register for text in used)
        return Step(instruction, run, reads, written, VECTOR)

    return decode


def _scratch_store(item: Item) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        _count(instruction, 3)
        at_text, what, base = instruction.operands
        read, used = _scratch_address(instruction, at_text, base)
        data = _data(instruction, what, item)
        offset = _offset(instruction, modifiers)
        counter = STORE if counts_stores else VECTOR
        source = data.register
        assert source is not None

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            first = _lanes_of(read(group), where) + offset
            values = _taken(group, source.index, item, where, data.half)
            _store_scratch(group, machine, where, first, values)
            group.waves.waits.issue(counter, group.index)

        reads = numbers([source, *(operand(instruction, text).register for text in used)])
        return Step(instruction, run, reads)

    return decode


def _load_scratch(group: Group, machine: Machine, where: Mask, first: Lanes, item: Item) -> Bytes:
    lanes = _of_these(group, machine, where)
    parts = [machine.local.load(lanes, first + at, size) for at, size in _pieces(item.nbytes)]
    return np.concatenate(parts, axis=1)


def _store_scratch(
    group: Group, machine: Machine, where: Mask, first: Lanes, values: Bytes
) -> None:
    lanes = _of_these(group, machine, where)
    for at, size in _pieces(values.shape[1]):
        machine.local.store(lanes, first + at, values[:, at : at + size])


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """Scratch asks for words to be aligned, no more: (offset, bytes) of each."""
    return [(at, min(4, nbytes)) for at in range(0, nbytes, 4)]


# LDS

# An address of 32 bits wraps around: LLVM adds a constant offset to a base that may be negative, on
# all GPUs since Sea Islands (AMDGPUISelDAGToDAG.cpp, isDSOffsetLegal).
_LDS_ADDRESS = (1 << 32) - 1


def _lds_offsets(instruction: Instruction, items: int, stride: int) -> list[int]:
    """Of the one or two items that an instruction moves."""
    if items == 1:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        return [_offset(instruction, modifiers)]
    modifiers = _modifiers(instruction, known=frozenset({"offset0", "offset1"}))
    return [stride * _offset(instruction, modifiers, f"offset{n}") for n in range(2)]


def _lds_load(item: Item, items: int = 1, stride: int = 0) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        _count(instruction, 2)
        offsets = _lds_offsets(instruction, items, stride)
        into = destination(instruction, instruction.operands[0], vector=True).register
        read = vector_reader(instruction, instruction.operands[1], "u32")
        if into is None or into.count != items * item.registers:
            raise instruction.fault(f"{items} times {item.nbytes} bytes do not fit")
        alignment = item.nbytes & -item.nbytes

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            lanes = _of_these(group, machine, where)
            addresses = _lanes_of(read(group), where)
            for n, offset in enumerate(offsets):
                at = addresses + offset & _LDS_ADDRESS
                loaded = machine.shared.load(lanes, at, item.nbytes, alignment=alignment)
                _put(group, into.index + n * item.registers, item, loaded, where)
            _in_step(group, machine)
            group.waves.waits.issue(LDS, group.index, written)

        written = numbers([into])
        reads = numbers([operand(instruction, instruction.operands[1]).register])
        return Step(instruction, run, reads, written, LDS)

    return decode


def _lds_store(item: Item, items: int = 1, stride: int = 0) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        _count(instruction, 1 + items)
        offsets = _lds_offsets(instruction, items, stride)
        read = vector_reader(instruction, instruction.operands[0], "u32")
        data = [_data(instruction, text, item) for text in instruction.operands[1:]]
        alignment = item.nbytes & -item.nbytes

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            lanes = _of_these(group, machine, where)
            addresses = _lanes_of(read(group), where)
            for offset, source in zip(offsets, data, strict=True):
                assert source.register is not None
                values = _taken(group, source.register.index, item, where, source.half)
                at = addresses + offset & _LDS_ADDRESS
                machine.shared.store(lanes, at, values, alignment=alignment)
            _in_step(group, machine)
            group.waves.waits.issue(LDS, group.index)

        used = [operand(instruction, text).register for text in instruction.operands]
        return Step(instruction, run, numbers(used))

    return decode


def _of_these(group: Group, machine: Machine, where: Mask) -> Lanes:
    """The threads in a mask, counted from the first of the workgroups that run."""
    lanes: Lanes = group.lane_ids[where] - group.waves.lane_ids[0, 0]
    return lanes


def _in_step(group: Group, machine: Machine) -> None:
    """A wave's LDS instructions are done one after the other: each orders its lanes."""
    ids = group.lane_ids - group.waves.lane_ids[0, 0]
    machine.shared.subgroup_barrier(ids[group.waves.exists[group.index]])


_Chosen = Callable[[Group], Array]  # the lane that each lane reads: [waves, lanes]


def _exchange(decode_source: Callable[[Instruction], _Chosen]) -> _Decoder:
    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        """Lanes read each other's registers; an inactive lane gives 0. LDS itself is not used."""
        into = destination(instruction, instruction.operands[0], vector=True).register
        read = vector_reader(instruction, instruction.operands[-1], "b32")
        source = decode_source(instruction)
        assert into is not None

        def run(group: Group, machine: Machine) -> None:
            lanes = source(group)
            value = np.where(group.active, read(group), np.uint32(0))
            group.set_vector(into.index, np.take_along_axis(value, lanes, axis=1))
            group.waves.waits.issue(LDS, group.index, written)

        written = numbers([into])
        used = [operand(instruction, text).register for text in instruction.operands[1:]]
        return Step(instruction, run, numbers(used), written, LDS)

    return decode


def _by_address(instruction: Instruction) -> _Chosen:
    """ds_bpermute_b32: the lane that a register says, times 4."""
    offset = _offset(instruction, _modifiers(instruction, known=frozenset({"offset"})))
    read = vector_reader(instruction, instruction.operands[1], "u32")
    return lambda group: (read(group).astype(np.int64) + offset) // 4 % group.waves.lanes


def _by_pattern(instruction: Instruction) -> _Chosen:
    """ds_swizzle_b32: lane and_mask or_mask xor_mask within 32 lanes, or any within 4."""
    pattern = _modifiers(instruction, known=frozenset({"offset"})).get("offset", "0")
    if found := re.fullmatch(r"swizzle\(QUAD_PERM,(\d),(\d),(\d),(\d)\)", pattern):
        table = np.array([int(n) for n in found.groups()])
        return _of_lanes(lambda lane: lane // 4 * 4 + table[lane % 4])
    if found := re.fullmatch(r"swizzle\(SWAP,(\d+)\)", pattern):
        distance = int(found[1])
        return _of_lanes(lambda lane: lane ^ distance)
    if not pattern.isdecimal() or int(pattern) >= 1 << 15:
        raise instruction.fault(f"swizzle not understood: {pattern}")
    code = int(pattern)
    keep, put, turn = code & 31, code >> 5 & 31, code >> 10 & 31
    return _of_lanes(lambda lane: lane // 32 * 32 + ((lane % 32 & keep | put) ^ turn))


def _of_lanes(source: Callable[[Lanes], Lanes]) -> _Chosen:
    """The same in every wave."""
    return lambda group: np.broadcast_to(source(np.arange(group.waves.lanes)), group.active.shape)


# Scalar memory


def _scalar_load(item: Item) -> _Decoder:
    nbytes, alignment = item.nbytes, min(4, item.nbytes)

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = _modifiers(instruction, known=frozenset({"offset"}))
        _count(instruction, 3)
        into = destination(instruction, instruction.operands[0], vector=False).register
        read_base = scalar_reader(instruction, instruction.operands[1], "u64")
        read_offset = scalar_reader(instruction, instruction.operands[2], "u32")
        offset = _offset(instruction, modifiers)
        if into is None or into.count != item.registers:
            raise instruction.fault(f"{nbytes} bytes do not fit")

        def run(group: Group, machine: Machine) -> None:
            start = read_base(group).astype(np.int64) + read_offset(group) + offset
            start = np.broadcast_to(start, group.size)
            if (start & alignment - 1).any():
                raise Fault(f"a scalar load from an address that is no multiple of {alignment}")
            lanes = group.lane_ids[:, 0]
            for at in range(0, nbytes, _WIDEST):
                size = min(_WIDEST, nbytes - at)
                words = _words(_load(machine, lanes, start + at, size), item)
                for n in range(words.shape[1]):
                    group.set_scalar(into.index + at // 4 + n, words[:, n])
                    if not _is_known(machine, int(start[0]) + at + 4 * n, min(4, nbytes)):
                        group.forget_scalar(into.index + at // 4 + n)
            group.waves.waits.issue(SCALAR, group.index, written)

        written = numbers([into])
        used = [operand(instruction, text).register for text in instruction.operands[1:]]
        return Step(instruction, run, numbers(used), written, SCALAR)

    return decode


_Decoder = Callable[[Instruction, bool], Step]


def _table() -> dict[str, _Decoder]:
    table: dict[str, _Decoder] = {}
    for name, item in LOADS.items():
        table[f"global_load_{name}"] = _global_load(item)
        table[f"buffer_load_{name}"] = _buffer_load(item)
        table[f"scratch_load_{name}"] = _scratch_load(item)
    for name, item in STORES.items():
        table[f"global_store_{name}"] = _global_store(item)
        table[f"buffer_store_{name}"] = _buffer_store(item)
        table[f"scratch_store_{name}"] = _scratch_store(item)
    # gfx9's names, and those since gfx11.
    narrow = [f"{kind}{end}" for kind in ("u8", "i8", "u16") for end in ("", "_d16", "_d16_hi")]
    for name in ("b32", "b64", "b96", "b128", "i16", *narrow):
        for verb in ("read", "load"):
            table[f"ds_{verb}_{name}"] = _lds_load(LOADS[name])
    for name in ("b8", "b16", "b8_d16_hi", "b16_d16_hi", "b32", "b64", "b96", "b128"):
        for verb in ("write", "store"):
            table[f"ds_{verb}_{name}"] = _lds_store(STORES[name])
    for bits in (32, 64):
        item, size = Item(bits // 8), bits // 8
        for far, stride in (("", size), ("st64", 64 * size)):
            since_gfx11 = "_stride64" if far else ""
            load, store = _lds_load(item, 2, stride), _lds_store(item, 2, stride)
            table[f"ds_read2{far}_b{bits}"] = load
            table[f"ds_load_2addr{since_gfx11}_b{bits}"] = load
            table[f"ds_write2{far}_b{bits}"] = store
            table[f"ds_store_2addr{since_gfx11}_b{bits}"] = store
    for words in (1, 2, 3, 4, 8, 16):
        table[f"s_load_dword{f'x{words}' if words > 1 else ''}"] = _scalar_load(Item(4 * words))
        table[f"s_load_b{32 * words}"] = _scalar_load(Item(4 * words))
    for name in ("u8", "i8", "u16", "i16"):
        table[f"s_load_{name}"] = _scalar_load(LOADS[name])
    table["ds_bpermute_b32"] = _exchange(_by_address)
    table["ds_swizzle_b32"] = _exchange(_by_pattern)
    return table


ACCESSES: Mapping[str, _Decoder] = _table()
