"""Runs single instructions for AMD GPUs on registers that a test fills."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator import Fault, GlobalMemory, Launch, SharedMemory
from iree_lnbwd.emulator.amdgcn.arguments import arguments
from iree_lnbwd.emulator.amdgcn.assembly import parse
from iree_lnbwd.emulator.amdgcn.executor import decode
from iree_lnbwd.emulator.amdgcn.steps import Machine
from iree_lnbwd.emulator.amdgcn.waves import EXEC, MOST_VECTORS, Group, Waves, register
from iree_lnbwd.emulator.launch import Array
from iree_lnbwd.emulator.memory import LocalMemory

WAVES = 3
_VECTORS = MOST_VECTORS + 16

Words = npt.NDArray[np.uint32]


class Registers:
    """Some waves of one workgroup each, at one instruction."""

    def __init__(self, lanes: int, execution: npt.NDArray[np.bool_] | None = None) -> None:
        """Nothing is known but EXEC: [waves, lanes]; None: every lane is active."""
        ids = np.arange(WAVES * lanes).reshape(WAVES, lanes)
        self.lanes = lanes
        self.waves = Waves(ids, np.ones((WAVES, lanes), np.bool_), _VECTORS)
        self.group = Group(self.waves, np.arange(WAVES))
        self.active = np.ones((WAVES, lanes), np.bool_) if execution is None else execution
        for n, word in enumerate(np.packbits(self.active, axis=1, bitorder="little").view("u4").T):
            self.group.set_scalar(EXEC + n, word)

    def fill(self, values: Mapping[str, Array]) -> None:
        """Writes registers in all lanes: vector ones [waves, lanes], scalar ones [waves]."""
        for name, value in values.items():
            target = register(name)
            assert target is not None
            words = np.ascontiguousarray(value).view(np.uint32).reshape(*value.shape, target.count)
            for n in range(target.count):
                word = words[..., n]
                if target.vector:
                    self.group.set_vector(target.index + n, word, np.ones_like(word, np.bool_))
                else:
                    self.group.set_scalar(target.index + n, word)

    def read(self, name: str, dtype: npt.DTypeLike = np.uint32) -> Array:
        """What registers hold, in all lanes."""
        source = register(name)
        assert source is not None
        of = self.waves.vectors if source.vector else self.waves.scalars
        words = np.stack([of[source.index + n] for n in range(source.count)], axis=-1)
        return np.ascontiguousarray(words).view(dtype)[..., 0]

    def mask(self, name: str) -> npt.NDArray[np.bool_]:
        """A lane mask in scalar registers: [waves, lanes]."""
        source = register(name)
        assert source is not None
        return self.group.mask(source.index)

    def run(self, *texts: str, generation: int = 9, machine: Machine | None = None) -> Registers:
        """Runs instructions one after the other."""
        launch = Launch("test", (WAVES, 1, 1), (self.lanes, 1, 1), self.lanes, 0, (), ())
        machine = machine or Machine(
            launch,
            GlobalMemory(),
            SharedMemory(1024, workgroups=WAVES, threads=self.lanes, subgroup_size=self.lanes),
            LocalMemory(0, lanes=WAVES * self.lanes),
            arguments(launch, 0),
            0,
        )
        for line, text in enumerate(texts, 1):
            step = decode(parse(text, line), {}, self.lanes, generation)
            self.waves.waits.check(slice(None), step.reads)
            self.waves.waits.check(slice(None), step.writes, loads=step.loads)
            with np.errstate(all="ignore"):
                step.run(self.group, machine)
        return self


def fault_of(registers: Registers, *texts: str, generation: int = 9) -> str:
    """What an instruction is a fault for; empty where it is none."""
    try:
        registers.run(*texts, generation=generation)
    except Fault as fault:
        return str(fault)
    return ""
