"""Scratch: memory of each lane."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.amdgcn.accesses.items import (
    Data,
    Decoder,
    Item,
    Loaded,
    lane_load,
    lane_store,
)
from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.operands import (
    Reader,
    scalar_reader,
    vector_reader,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask
from iree_lnbwd.emulator.launch import Lanes


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


def scratch_load(item: Item) -> Decoder:
    """A load from the lane's own memory."""
    return lane_load(item, _scratch_address, load_scratch)


def scratch_store(item: Item) -> Decoder:
    """A store to the lane's own memory."""
    return lane_store(item, _scratch_address, store_scratch)


def load_scratch(group: Group, machine: Machine, where: Mask, first: Lanes, item: Item) -> Loaded:
    """What lanes in a mask read."""
    lanes = of_these(group, machine, where)
    places = [(first + at, size) for at, size in _pieces(item.nbytes)]
    parts = [machine.local.load(lanes, at, size) for at, size in places]
    unknown = [machine.local.unknown(lanes, at, size) for at, size in places]
    return Loaded(np.concatenate(parts, axis=1), np.stack(unknown, axis=1))


def store_scratch(group: Group, machine: Machine, where: Mask, first: Lanes, data: Data) -> None:
    """What lanes in a mask write. Compilers spill registers that were never written."""
    lanes = of_these(group, machine, where)
    values, unknown = data.traced()
    assert unknown is not None
    for n, (at, size) in enumerate(_pieces(values.shape[1])):
        machine.local.store(lanes, first + at, values[:, at : at + size], unknown[:, n])


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """Scratch asks for words to be aligned, no more: (offset, bytes) of each."""
    return [(at, min(4, nbytes)) for at in range(0, nbytes, 4)]


def of_these(group: Group, machine: Machine, where: Mask) -> Lanes:
    """The threads in a mask, counted from the first of the workgroups that run."""
    lanes: Lanes = group.lane_ids[where] - group.waves.lane_ids[0, 0]
    return lanes
