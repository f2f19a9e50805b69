"""Instructions through which lanes see each other: DPP, permutes, and reads of a single lane.

Sources: AMD's ISA documents ("DPP", "V_PERMLANEX16_B32", "V_READLANE_B32", ...). A lane that DPP
reads from is valid where it exists and EXEC has it (or ``fi:1`` fetches inactive lanes). Of an
invalid lane comes 0 where ``bound_ctrl:1`` says so; otherwise the reading lane is not written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    Reader,
    destination,
    operand,
    scalar_reader,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask, Register
from iree_lnbwd.emulator.launch import Array, Lanes

_ROW = 16
_NUMBERED = re.compile(r"(quad_perm|dpp8)$")
_DPP_NAMES = frozenset(
    [
        "quad_perm",
        "dpp8",
        "row_shl",
        "row_shr",
        "row_ror",
        "wave_shl",
        "wave_rol",
        "wave_shr",
        "wave_ror",
        "row_mirror",
        "row_half_mirror",
        "row_bcast",
        "row_newbcast",
        "row_share",
        "row_xmask",
        "row_mask",
        "bank_mask",
        "bound_ctrl",
        "fi",
    ]
)


Decoder = Callable[[Instruction, int], Step]  # of an instruction, for waves of so many lanes


@dataclass(frozen=True)
class Dpp:
    """How an instruction's first source moves between lanes.

    Attributes:
        source: The lane that each lane reads: [lanes].
        exists: Where there is such a lane.
        written: Lanes that row_mask and bank_mask let through.
        zero: Invalid lanes read 0; otherwise they are not written.
        inactive: Lanes that EXEC has not are read as well.
    """

    source: Lanes
    exists: Mask
    written: Mask
    zero: bool
    inactive: bool

    def move(self, group: Group, value: Array) -> Array:
        """The first source as each lane sees it."""
        whole = np.broadcast_to(value, group.active.shape)[:, self.source]
        return np.where(self.valid(group), whole, whole.dtype.type(0))

    def valid(self, group: Group) -> Mask:
        """Where what is read is there: [waves, lanes]."""
        if self.inactive:
            return np.broadcast_to(self.exists, group.active.shape)
        return self.exists & group.active[:, self.source]

    def where(self, group: Group) -> Mask:
        """The lanes that are written: [waves, lanes]."""
        mask = group.active & self.written
        return mask if self.zero else mask & self.valid(group)


def take_dpp(instruction: Instruction, modifiers: dict[str, str], lanes: int) -> Dpp | None:
    """The DPP of an instruction, taken out of its modifiers; None where there is none.

    Raises:
        Fault: A control is not understood.
    """
    mine = {name: modifiers.pop(name) for name in _DPP_NAMES & modifiers.keys()}
    if not mine:
        return None
    row_mask, bank_mask = (int(mine.pop(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    bound, inactive = mine.pop("bound_ctrl", "-"), mine.pop("fi", "0")
    if bound not in "-1" or inactive not in "01" or len(mine) != 1:
        raise instruction.fault("DPP controls not understood")
    lane = np.arange(lanes)
    ((control, text),) = mine.items()
    source = _source(control, text, lane)
    if source is None:
        raise instruction.fault(f"DPP control not understood: {control}:{text}")
    exists = (source >= 0) & (source < lanes)
    row, bank = lane // _ROW, lane % _ROW // 4
    written = (row_mask >> row & 1 != 0) & (bank_mask >> bank & 1 != 0)
    return Dpp(np.where(exists, source, 0), exists, written, bound == "1", inactive == "1")


def _source(control: str, text: str, lane: Lanes) -> Lanes | None:
    """The lane that each lane reads; -1 where there is none. None for an unknown control."""
    row, at = lane // _ROW * _ROW, lane % _ROW
    if _NUMBERED.match(control):
        table = np.array([int(n) for n in text.strip("[]").split(",")])
        size = 4 if control == "quad_perm" else 8
        if len(table) != size:
            return None
        result: Lanes = lane // size * size + table[lane % size]
        return result
    if control == "row_mirror":
        return row + _ROW - 1 - at
    if control == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    if not text.isdecimal():
        return None
    n = int(text)
    match control:
        case "row_shl":
            return np.where(at + n < _ROW, lane + n, -1)
        case "row_shr":
            return np.where(at >= n, lane - n, -1)
        case "row_ror":
            return row + (at - n) % _ROW
        case "row_newbcast" | "row_share":
            return row + n
        case "row_xmask":
            return row + (at ^ n)
        case "row_bcast" if n == 15:  # the last lane of a row, to the row after it
            return np.where(row >= _ROW, row - 1, -1)
        case "row_bcast" if n == 31:  # the last lane of the first half, to the second
            return np.where(lane >= 32, lane // 32 * 32 - 1, -1)
        case _:
            return None


def _read_lane(instruction: Instruction, lanes: int) -> Step:
    """v_readlane_b32: one lane, active or not, to a scalar register."""
    into = destination(instruction, instruction.operands[0], vector=False).register
    source = operand(instruction, instruction.operands[1]).register
    chosen = scalar_reader(instruction, instruction.operands[2], "u32")
    which = operand(instruction, instruction.operands[2]).register
    if source is None or not source.vector or into is None:
        raise instruction.fault("expected a vector register to read")

    def run(group: Group, machine: Machine) -> None:
        lane = np.broadcast_to(chosen(group) & np.uint32(lanes - 1), group.size)
        group.set_scalar(into.index, _lane_of(group, source, lane))

    return Step(instruction, run, numbers((source, which)), numbers((into,)))


def _lane_of(group: Group, source: Register, lane: Array) -> Array:
    known = group.waves.vector_known[source.index][group.index]
    rows = np.arange(group.size)
    if not known[rows, lane].all():
        group.vector(source.index, everywhere=True)  # says so
    words: Array = group.waves.vectors[source.index][group.index]
    return words[rows, lane]


def _read_first_lane(instruction: Instruction, lanes: int) -> Step:
    """v_readfirstlane_b32: the first active lane, or lane 0 where none is."""
    into = destination(instruction, instruction.operands[0], vector=False).register
    source = operand(instruction, instruction.operands[1]).register
    if source is None or not source.vector or into is None:
        raise instruction.fault("expected a vector register to read")

    def run(group: Group, machine: Machine) -> None:
        first = np.argmax(group.active, axis=1)
        group.set_scalar(into.index, _lane_of(group, source, first))

    return Step(instruction, run, numbers((source,)), numbers((into,)))


def _write_lane(instruction: Instruction, lanes: int) -> Step:
    """v_writelane_b32: a scalar to one lane, active or not."""
    into = destination(instruction, instruction.operands[0], vector=True).register
    value, chosen = (scalar_reader(instruction, text, "u32") for text in instruction.operands[1:3])
    which = [operand(instruction, text).register for text in instruction.operands[1:3]]
    assert into is not None

    def run(group: Group, machine: Machine) -> None:
        lane = np.broadcast_to(chosen(group) & np.uint32(lanes - 1), group.size)
        here = np.arange(lanes) == lane[:, None]
        group.set_vector(into.index, value(group)[:, None], here)

    return Step(instruction, run, numbers(which), numbers((into,)))


def _permlane(across: bool) -> Decoder:
    def decode(instruction: Instruction, lanes: int) -> Step:
        """v_permlane(x)16_b32: lanes choose in their row (in the other row of its pair)."""
        into = destination(instruction, instruction.operands[0], vector=True)
        read = vector_reader(instruction, instruction.operands[1], "b32")
        selectors = [scalar_reader(instruction, t, "u32") for t in instruction.operands[2:4]]
        used = [operand(instruction, text).register for text in instruction.operands[1:4]]
        fetch_inactive, bound = (int(n) for n in _list(instruction.modifiers.get("op_sel"), 2))
        lane = np.arange(lanes)
        at, row = lane % _ROW, lane // _ROW * _ROW
        row = row ^ _ROW if across else row

        def run(group: Group, machine: Machine) -> None:
            words = np.stack([np.broadcast_to(s(group), group.size) for s in selectors], axis=1)
            source = words[:, at // 8] >> (at % 8 * 4).astype(np.uint32) & np.uint32(15)
            source = row + source.astype(np.int64)
            assert into.register is not None
            value = np.take_along_axis(read(group), source, axis=1)
            where = group.active
            if not fetch_inactive:
                valid = np.take_along_axis(group.active, source, axis=1)
                value = np.where(valid, value, np.uint32(0))
                where = where if bound else where & valid
            group.set_vector(into.register.index, value, where)

        return Step(instruction, run, numbers(used), numbers((into.register,)))

    return decode


def _swap(lanes_apart: int) -> Decoder:
    def decode(instruction: Instruction, lanes: int) -> Step:
        """v_permlane16/32_swap_b32: one's odd rows (its upper half) for the other's even (lower).

        Source: AMD's "CDNA4 Instruction Set Architecture". What inactive lanes do is not known
        here.
        """
        one, other = (destination(instruction, t, vector=True) for t in instruction.operands)
        low = np.broadcast_to(np.arange(lanes) & lanes_apart == 0, (1, lanes))
        exchanged = np.arange(lanes) ^ lanes_apart

        def run(group: Group, machine: Machine) -> None:
            if not group.active.all():
                raise instruction.fault("expected all lanes to be active")
            assert one.register is not None
            assert other.register is not None
            for_one = group.vector(other.register.index)[:, exchanged]
            for_other = group.vector(one.register.index)[:, exchanged]
            group.set_vector(one.register.index, for_one, ~low)
            group.set_vector(other.register.index, for_other, low)

        both = numbers((one.register, other.register))
        return Step(instruction, run, both, both)

    return decode


def _list(text: str | None, length: int) -> list[str]:
    return ["0"] * length if text is None else text.strip("[]").split(",")


def _count_below(first: int) -> Decoder:
    def decode(instruction: Instruction, lanes: int) -> Step:
        """v_mbcnt_lo/hi_u32_b32: how many of a mask's bits belong to lanes before this one."""
        into = destination(instruction, instruction.operands[0], vector=True).register
        mask: Reader = vector_reader(instruction, instruction.operands[1], "u32")
        addend: Reader = vector_reader(instruction, instruction.operands[2], "u32")
        used = [operand(instruction, text).register for text in instruction.operands[1:3]]
        assert into is not None
        before = np.clip(np.arange(lanes) - first, 0, 32)
        below = ((np.uint64(1) << before.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)

        def run(group: Group, machine: Machine) -> None:
            bits = mask(group) & below
            counts = np.unpackbits(bits[..., None].view(np.uint8), axis=-1).sum(-1, np.uint32)
            group.set_vector(into.index, counts + addend(group))

        return Step(instruction, run, numbers(used), numbers((into,)))

    return decode


LANES: Mapping[str, Decoder] = {
    "v_readlane_b32": _read_lane,
    "v_readfirstlane_b32": _read_first_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_b32": _permlane(across=False),
    "v_permlanex16_b32": _permlane(across=True),
    "v_permlane16_swap_b32": _swap(16),
    "v_permlane32_swap_b32": _swap(32),
    "v_mbcnt_lo_u32_b32": _count_below(0),
    "v_mbcnt_hi_u32_b32": _count_below(32),
}
