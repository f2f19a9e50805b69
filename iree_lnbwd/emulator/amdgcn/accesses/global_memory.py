"""Global memory, and the kernel's arguments in it."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.amdgcn.accesses.items import (
    Data,
    Decoder,
    Item,
    Loaded,
    alignment_of,
    expect_operands,
    lane_load,
    lane_store,
    modifiers_of,
    offset_of,
    words_of,
)
from iree_lnbwd.emulator.amdgcn.arguments import ARGUMENTS_END, KERNARG_ADDRESS
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    Reader,
    destination,
    operand,
    scalar_reader,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.waits import SCALAR
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask
from iree_lnbwd.emulator.launch import Bytes, Fault, Lanes

_WIDEST = 16  # bytes of one access


def _global_address(instruction: Instruction, at: str, base: str) -> tuple[Reader, list[str]]:
    """A 64-bit address in registers; or a 32-bit offset from a scalar base."""
    if base == "off":
        return vector_reader(instruction, at, "u64"), [at]
    read_offset = vector_reader(instruction, at, "u32")
    read_base = scalar_reader(instruction, base, "u64")
    return lambda g: read_base(g)[:, None] + read_offset(g).astype(np.uint64), [at, base]


def global_load(item: Item) -> Decoder:
    """A load from global memory, or of arguments."""

    def load_items(
        group: Group, machine: Machine, where: Mask, addresses: Lanes, item: Item
    ) -> Loaded:
        return Loaded(load(machine, group.lane_ids[where], addresses, item.nbytes))

    return lane_load(item, _global_address, load_items)


def global_store(item: Item) -> Decoder:
    """A store to global memory."""

    def store(group: Group, machine: Machine, where: Mask, addresses: Lanes, data: Data) -> None:
        alignment = alignment_of(addresses, item.nbytes)
        machine.memory.store(group.lane_ids[where], addresses, data.values, alignment=alignment)

    return lane_store(item, _global_address, store)


def scalar_load(item: Item) -> Decoder:
    """A load of a wave into scalar registers."""
    nbytes, alignment = item.nbytes, min(4, item.nbytes)

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        modifiers = modifiers_of(instruction, known=frozenset({"offset"}))
        expect_operands(instruction, 3)
        into = destination(instruction, instruction.operands[0], vector=False).register
        read_base = scalar_reader(instruction, instruction.operands[1], "u64")
        read_offset = scalar_reader(instruction, instruction.operands[2], "u32")
        offset = offset_of(instruction, modifiers)
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
                words = words_of(load(machine, lanes, start + at, size), item)
                for n in range(words.shape[1]):
                    group.set_scalar(into.index + at // 4 + n, words[:, n])
                    if not _is_known(machine, int(start[0]) + at + 4 * n, min(4, nbytes)):
                        group.forget_scalar(into.index + at // 4 + n)
            group.waves.waits.issue(SCALAR, group.index, written)

        written = numbers([into])
        used = [operand(instruction, text).register for text in instruction.operands[1:]]
        return Step(instruction, run, numbers(used), written, SCALAR)

    return decode


def load(machine: Machine, lanes: Lanes, addresses: Lanes, nbytes: int) -> Bytes:
    """From global memory, or from the kernel's arguments."""
    if addresses.size and addresses.max() < ARGUMENTS_END:
        return _load_argument(machine, lanes, addresses, nbytes)
    alignment = alignment_of(addresses, nbytes)
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
