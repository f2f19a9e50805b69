"""LDS, and exchanges between lanes that go through its hardware."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from iree_lnbwd.emulator.amdgcn.accesses.items import (
    Decoder,
    Item,
    expect_operands,
    lanes_of,
    modifiers_of,
    offset_of,
    put,
    registers_of,
    taken,
)
from iree_lnbwd.emulator.amdgcn.accesses.scratch import of_these
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    destination,
    operand,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.waits import LDS
from iree_lnbwd.emulator.amdgcn.waves import Group
from iree_lnbwd.emulator.launch import Array, Lanes

# An address of 32 bits wraps around: LLVM adds a constant offset to a base that may be negative, on
# all GPUs since Sea Islands (AMDGPUISelDAGToDAG.cpp, isDSOffsetLegal).
_LDS_ADDRESS = (1 << 32) - 1

_Chosen = Callable[[Group], Array]  # the lane that each lane reads: [waves, lanes]


def _lds_offsets(instruction: Instruction, items: int, stride: int) -> list[int]:
    """The offsets of the one or two items that an instruction moves."""
    if items == 1:
        modifiers = modifiers_of(instruction, known=frozenset({"offset"}))
        return [offset_of(instruction, modifiers)]
    modifiers = modifiers_of(instruction, known=frozenset({"offset0", "offset1"}))
    return [stride * offset_of(instruction, modifiers, f"offset{n}") for n in range(2)]


def lds_load(item: Item, items: int = 1, stride: int = 0) -> Decoder:
    """A load of one item, or of two that are a stride apart."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        expect_operands(instruction, 2)
        offsets = _lds_offsets(instruction, items, stride)
        into = destination(instruction, instruction.operands[0], vector=True).register
        read = vector_reader(instruction, instruction.operands[1], "u32")
        if into is None or into.count != items * item.registers:
            raise instruction.fault(f"{items} times {item.nbytes} bytes do not fit")
        alignment = item.nbytes & -item.nbytes

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            lanes = of_these(group, machine, where)
            addresses = lanes_of(read(group), where)
            for n, offset in enumerate(offsets):
                at = addresses + offset & _LDS_ADDRESS
                loaded = machine.shared.load(lanes, at, item.nbytes, alignment=alignment)
                put(group, into.index + n * item.registers, item, loaded, where)
            _in_step(group, machine)
            group.waves.waits.issue(LDS, group.index, written)

        written = numbers([into])
        reads = numbers([operand(instruction, instruction.operands[1]).register])
        return Step(instruction, run, reads, written, LDS)

    return decode


def lds_store(item: Item, items: int = 1, stride: int = 0) -> Decoder:
    """A store of one item, or of two that are a stride apart."""

    def decode(instruction: Instruction, counts_stores: bool) -> Step:
        expect_operands(instruction, 1 + items)
        offsets = _lds_offsets(instruction, items, stride)
        read = vector_reader(instruction, instruction.operands[0], "u32")
        data = [registers_of(instruction, text, item) for text in instruction.operands[1:]]
        alignment = item.nbytes & -item.nbytes

        def run(group: Group, machine: Machine) -> None:
            where = group.active
            lanes = of_these(group, machine, where)
            addresses = lanes_of(read(group), where)
            for offset, source in zip(offsets, data, strict=True):
                assert source.register is not None
                values = taken(group, source.register.index, item, where, source.half)
                at = addresses + offset & _LDS_ADDRESS
                machine.shared.store(lanes, at, values, alignment=alignment)
            _in_step(group, machine)
            group.waves.waits.issue(LDS, group.index)

        used = [operand(instruction, text).register for text in instruction.operands]
        return Step(instruction, run, numbers(used))

    return decode


def _in_step(group: Group, machine: Machine) -> None:
    """A wave's LDS instructions are done one after the other: each orders its lanes."""
    ids = group.lane_ids - group.waves.lane_ids[0, 0]
    machine.shared.subgroup_barrier(ids[group.waves.exists[group.index]])


def exchange(decode_source: Callable[[Instruction], _Chosen]) -> Decoder:
    """Lanes read each other's registers."""

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


def by_address(instruction: Instruction) -> _Chosen:
    """ds_bpermute_b32: the lane that a register says, times 4."""
    offset = offset_of(instruction, modifiers_of(instruction, known=frozenset({"offset"})))
    read = vector_reader(instruction, instruction.operands[1], "u32")
    return lambda group: (read(group).astype(np.int64) + offset) // 4 % group.waves.lanes


def by_pattern(instruction: Instruction) -> _Chosen:
    """ds_swizzle_b32: lane and_mask or_mask xor_mask within 32 lanes, or any within 4."""
    pattern = modifiers_of(instruction, known=frozenset({"offset"})).get("offset", "0")
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
