"""What a lane moves, between which registers and how many bytes of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import Operand, Reader, destination, operand
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.waits import STORE, VECTOR
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask
from iree_lnbwd.emulator.launch import Array, Bytes, Lanes

_CACHE_POLICIES = frozenset({"glc", "slc", "dlc", "sc0", "sc1", "nt", "scope", "th"})

# From an instruction, and whether the GPU has a counter of its own for stores, to what it does.
Decoder = Callable[[Instruction, bool], Step]


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


def offset_of(instruction: Instruction, modifiers: dict[str, str], name: str = "offset") -> int:
    """The constant that an instruction adds to its address; it is taken from the modifiers."""
    try:
        return int(modifiers.pop(name, "0"), 0)
    except ValueError:
        raise instruction.fault(f"{name}: no number") from None


def modifiers_of(instruction: Instruction, *, known: frozenset[str]) -> dict[str, str]:
    """The modifiers that matter here; a fault where one is not known."""
    unknown = instruction.modifiers.keys() - known - _CACHE_POLICIES
    if unknown:
        raise instruction.fault(f"modifiers not known: {', '.join(sorted(unknown))}")
    return {n: v for n, v in instruction.modifiers.items() if n not in _CACHE_POLICIES}


def expect_operands(instruction: Instruction, expected: int) -> None:
    """Expects so many operands."""
    if len(instruction.operands) != expected:
        raise instruction.fault(f"expected {expected} operands")


def registers_of(instruction: Instruction, text: str, item: Item) -> Operand:
    """The registers that an access moves."""
    data = destination(instruction, text, vector=True)
    assert data.register is not None
    if data.register.count != item.registers:
        raise instruction.fault(f"{item.nbytes} bytes do not fit {text}")
    return data


def put(group: Group, first: int, item: Item, loaded: Bytes, where: Mask) -> None:
    """Loaded bytes, of the lanes in a mask, go to their registers."""
    words = words_of(loaded, item)
    if item.half is not None:
        kept = group.waves.vectors[first][group.index][where][:, None]
        shift = np.uint32(16 * item.half)
        low = np.uint32(0xFFFF)
        words = kept & ~(low << shift) | (words & low) << shift
    for n in range(words.shape[1]):
        whole = np.zeros(where.shape, np.uint32)
        whole[where] = words[:, n]
        group.set_vector(first + n, whole, where)


def words_of(loaded: Bytes, item: Item) -> Array:
    """What goes to registers of an access's bytes: [T, registers]."""
    if item.nbytes >= 4:
        return np.ascontiguousarray(loaded).view(np.uint32)
    kind = f"{'i' if item.signed else 'u'}{item.nbytes}"
    narrow = np.ascontiguousarray(loaded).view(kind)[:, 0]
    return narrow.astype(np.int64).astype(np.uint32)[:, None]


def taken(group: Group, first: int, item: Item, where: Mask, half: int | None) -> Bytes:
    """The bytes that lanes in a mask store: [T, nbytes]."""
    words = np.stack([group.vector(first + n)[where] for n in range(item.registers)], axis=1)
    if (item.half if half is None else half) == 1:
        words = words >> np.uint32(16)
    return np.ascontiguousarray(words).view(np.uint8)[:, : item.nbytes]


def alignment_of(addresses: Array, nbytes: int) -> int:
    """What all addresses have: hardware takes any (LLVM: "unaligned-access-mode" on HSA)."""
    together = int(np.bitwise_or.reduce(addresses, initial=0)) | nbytes
    return together & -together


def lanes_of(values: Array, where: Mask) -> Lanes:
    """The values of the lanes in a mask, as numbers with a sign."""
    return np.broadcast_to(values, where.shape)[where].astype(np.int64)


class Loaded(NamedTuple):
    """What lanes read, and which of its words depend on what was never written: [T, registers]."""

    values: Bytes
    unknown: Mask | None = None


@dataclass(frozen=True)
class Data:
    """What lanes in a mask store, as it is in registers.

    Attributes:
        group: The waves.
        first: The number of the first register.
        item: What a lane moves.
        where: The lanes.
        half: As `Item` has it, where the operand says so.
    """

    group: Group
    first: int
    item: Item
    where: Mask
    half: int | None

    @property
    def values(self) -> Bytes:
        """All of it: [T, nbytes].

        Raises:
            Fault: Some of it depends on what was never written.
        """
        return taken(self.group, self.first, self.item, self.where, self.half)

    def traced(self) -> Loaded:
        """All of it, whatever it depends on."""
        unknown = []
        for n in range(self.item.registers):
            _, missing = self.group.trace([partial(Group.vector, index=self.first + n)])
            nothing = np.zeros_like(self.where) if missing is None else missing
            unknown.append(nothing[self.where])
        (values,), _ = self.group.trace([lambda group: self.values])
        return Loaded(values, np.stack(unknown, axis=1))


Address = Callable[[Instruction, str, str], tuple[Reader, list[str]]]  # and what it is read from
Load = Callable[[Group, Machine, Mask, Lanes, Item], Loaded]
Store = Callable[[Group, Machine, Mask, Lanes, Data], None]


def load_step(
    instruction: Instruction,
    item: Item,
    used: Iterable[str],
    load: Callable[[Group, Machine, Mask], Loaded],
) -> Step:
    """A load into the instruction's first operand, by the lanes of a mask, from what is used."""
    into = registers_of(instruction, instruction.operands[0], item).register
    assert into is not None

    def run(group: Group, machine: Machine) -> None:
        where = group.active
        values, unknown = load(group, machine, where)
        put(group, into.index, item, values, where)
        if unknown is not None and unknown.any():
            for n in range(item.registers):
                lost = np.zeros_like(where)
                lost[where] = unknown[:, n]
                group.forget((True, into.index + n), lost)
        group.waves.waits.issue(VECTOR, group.index, written)

    written = numbers([into])
    reads = numbers(operand(instruction, text).register for text in used)
    return Step(instruction, run, reads, written, VECTOR)


def store_step(
    instruction: Instruction,
    item: Item,
    what: str,
    used: Iterable[str],
    store: Callable[[Group, Machine, Mask, Data], None],
    *,
    counts_stores: bool,
) -> Step:
    """A store of the operand ``what``, by the lanes of a mask, to what is used."""
    data = registers_of(instruction, what, item)
    counter = STORE if counts_stores else VECTOR
    source = data.register
    assert source is not None

    def run(group: Group, machine: Machine) -> None:
        where = group.active
        store(group, machine, where, Data(group, source.index, item, where, data.half))
        group.waves.waits.issue(counter, group.index)

    reads = numbers([source, *(operand(instruction, text).register for text in used)])
    return Step(instruction, run, reads)


def lane_load(item: Item, address: Address, load: Load) -> Decoder:
    """A load of each lane from an address of its own."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = modifiers_of(instruction, known=frozenset({"offset"}))
        expect_operands(instruction, 3)
        read, used = address(instruction, *instruction.operands[1:])
        offset = offset_of(instruction, modifiers)

        def load_there(group: Group, machine: Machine, where: Mask) -> Loaded:
            return load(group, machine, where, lanes_of(read(group), where) + offset, item)

        return load_step(instruction, item, used, load_there)

    return decode


def lane_store(item: Item, address: Address, store: Store) -> Decoder:
    """A store of each lane to an address of its own."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = modifiers_of(instruction, known=frozenset({"offset"}))
        expect_operands(instruction, 3)
        at, what, base = instruction.operands
        read, used = address(instruction, at, base)
        offset = offset_of(instruction, modifiers)

        def store_there(group: Group, machine: Machine, where: Mask, data: Data) -> None:
            store(group, machine, where, lanes_of(read(group), where) + offset, data)

        return store_step(instruction, item, what, used, store_there, counts_stores=counts_stores)

    return decode
