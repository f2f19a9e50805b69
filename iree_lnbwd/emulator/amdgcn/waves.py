"""The registers of many waves, and which of them an instruction runs in.

Scalar registers are arrays [waves], vector registers [waves, lanes], both of 32-bit words. A
`Group` is the waves that run an instruction together: usually all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator.amdgcn.waits import Waits
from iree_lnbwd.emulator.launch import Array, Fault, Lanes

Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint32]

# Scalar registers that have names take the numbers behind s0 to s105 that the encodings give them,
# but for m0 and null, which change places between gfx10 and gfx11.
VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126
SCALARS = 128
MOST_VECTORS = 256  # of a lane; accumulation registers have the numbers behind them
_NAMED = {
    "vcc_lo": VCC,
    "vcc_hi": VCC + 1,
    "m0": M0,
    "null": NULL,
    "exec_lo": EXEC,
    "exec_hi": EXEC + 1,
} | {f"ttmp{n}": TTMP + n for n in range(16)}
_PAIRS = {"vcc": VCC, "exec": EXEC}
_FIRST = {"s": 0, "v": 0, "a": MOST_VECTORS, "ttmp": TTMP}
_REGISTER = re.compile(r"([sva]|ttmp)(?:(\d+)|\[(\d+):(\d+)\])$")


class Register:
    """A run of scalar, vector or accumulation registers, as an operand names it."""

    __slots__ = ("count", "index", "vector")

    def __init__(self, vector: bool, index: int, count: int) -> None:
        self.vector = vector
        self.index = index
        self.count = count

    @property
    def name(self) -> str:
        """For messages."""
        if not self.vector and self.index >= VCC:
            return next((n for n, at in _NAMED.items() if at == self.index), f"s{self.index}")
        if self.vector and self.index >= MOST_VECTORS:
            return f"a{self.index - MOST_VECTORS}"
        return f"{'v' if self.vector else 's'}{self.index}"

    def one(self, offset: int) -> Register:
        """One of the run."""
        return Register(self.vector, self.index + offset, 1)


def register(text: str) -> Register | None:
    """The registers that an operand names; None where it names none."""
    if text in _NAMED:
        return Register(False, _NAMED[text], 1)
    if text in _PAIRS:
        return Register(False, _PAIRS[text], 2)
    found = _REGISTER.match(text)
    if found is None:
        return None
    first = int(found[2] or found[3])
    count = 1 if found[2] else int(found[4]) - first + 1
    return Register(found[1] in "va", first + _FIRST[found[1]], count)


class Waves:
    """Registers of the waves of some workgroups, and where each wave is.

    Attributes:
        count: How many waves.
        lanes: Of one wave.
        scalars: [128, waves].
        vectors: [registers, waves, lanes].
        scc: The scalar condition code: [waves].
        pc: The next instruction of each wave.
        ended, waiting: Which waves have ended, and which wait at a barrier.
        signalled: Which have come to a barrier at which they do not wait yet.
        done_in_memory: Which had nothing under way to memory when they came to their barrier.
        waits: Memory accesses under way.
        scratch_at: Of the memory of all lanes' scratch, where each wave's begins: [waves].
        lane_ids: The thread of the launch that each lane is: [waves, lanes].
        exists: The lanes that are a thread: the last wave of a workgroup may have others.
    """

    def __init__(
        self, lane_ids: Lanes, exists: Mask, vector_registers: int, scratch_bytes: int = 0
    ) -> None:
        """Registers that nothing has written.

        Args:
            lane_ids: The thread of the launch that each lane is: [waves, lanes].
            exists: The lanes that are a thread.
            vector_registers: Of a lane.
            scratch_bytes: Of a lane.
        """
        self.count, self.lanes = lane_ids.shape
        self.scratch_at = np.arange(self.count) * self.lanes * scratch_bytes
        self.lane_ids = lane_ids
        self.exists = exists
        self.scalars: Words = np.zeros((SCALARS, self.count), np.uint32)
        self.vectors: Words = np.zeros((vector_registers, self.count, self.lanes), np.uint32)
        self.scc = np.zeros(self.count, np.bool_)
        self.pc = np.zeros(self.count, np.int64)
        self.ended = np.zeros(self.count, np.bool_)
        self.waiting = np.zeros(self.count, np.bool_)
        self.signalled = np.zeros(self.count, np.bool_)
        self.done_in_memory = np.zeros(self.count, np.bool_)
        self.waits = Waits(self.count)
        # Which registers were written, and those that were in every wave and lane.
        self.scalar_known = np.zeros((SCALARS, self.count), np.bool_)
        self.vector_known = np.zeros(self.vectors.shape, np.bool_)
        self.scc_known = np.zeros(self.count, np.bool_)
        self.all_known: set[tuple[bool, int]] = set()


class Group:
    """Waves that are at the same instruction."""

    def __init__(self, waves: Waves, members: Lanes) -> None:
        self.waves = waves
        self.members = members
        self.size = len(members)
        everyone = self.size == waves.count
        self.index: slice | Lanes = slice(None) if everyone else members
        self._active: Mask | None = None
        self._all_active = False
        self._tracing = False
        self._unknown: Mask | None = None

    @property
    def active(self) -> Mask:
        """EXEC: [waves, lanes]."""
        if self._active is None:
            self._active = self.mask(EXEC)
            self._all_active = bool(self._active.all())
        return self._active

    @property
    def all_active(self) -> bool:
        """Every bit of EXEC is set."""
        return self._all_active if self._active is not None else bool(self.active.all())

    @property
    def lane_ids(self) -> Lanes:
        """The threads of the launch that the lanes are: [waves, lanes]."""
        return self.waves.lane_ids[self.index]

    def scalar(self, index: int) -> Words:
        """A scalar register: [waves]."""
        if index == NULL:
            return np.zeros(self.size, np.uint32)
        if (False, index) not in self.waves.all_known:
            unknown = ~self.waves.scalar_known[index][self.index]
            if unknown.any():
                self._found_unknown(Register(False, index, 1), unknown[:, None] & self._exists)
        words: Words = self.waves.scalars[index][self.index]
        return words

    def set_scalar(self, index: int, value: Array) -> None:
        """Writes a scalar register: [waves], or one value."""
        if index == NULL:
            return
        self.waves.scalars[index][self.index] = value
        key = (False, index)
        if key not in self.waves.all_known:
            self.waves.scalar_known[index][self.index] = True
            if self.waves.scalar_known[index].all():
                self.waves.all_known.add(key)
        if index in (EXEC, EXEC + 1):
            self._active = None

    @property
    def _exists(self) -> Mask:
        mask: Mask = self.waves.exists[self.index]
        return mask

    def _found_unknown(self, source: Register, where: Mask) -> None:
        if not self._tracing:
            raise Fault(f"{source.name} is used and was never written", self.lane_ids[where])
        self._unknown = where if self._unknown is None else self._unknown | where

    def trace(self, readers: Sequence[Callable[[Group], Array]]) -> tuple[list[Array], Mask | None]:
        """What some readers read, and where that was never written: here no fault."""
        self._tracing, self._unknown = True, None
        values = [read(self) for read in readers]
        self._tracing = False
        return values, self._unknown

    def forget(self, register: tuple[bool, int], where: Mask) -> None:
        """What a register was given in some lanes depends on what was never written."""
        vector, index = register
        known = self.waves.vector_known if vector else self.waves.scalar_known
        known[index][self.index] &= ~(where if vector else where.any(axis=1))
        self.waves.all_known.discard(register)

    def forget_scalar(self, index: int) -> None:
        """What a scalar register was given is not known."""
        self.waves.scalar_known[index][self.index] = False
        self.waves.all_known.discard((False, index))

    def scc(self) -> Mask:
        """The scalar condition code: [waves]."""
        if not self.waves.scc_known[self.index].all():
            raise Fault("scc is read and was never written", self.lane_ids[:, 0])
        bits: Mask = self.waves.scc[self.index]
        return bits

    def set_scc(self, value: Mask) -> None:
        """Writes the scalar condition code."""
        self.waves.scc[self.index] = value
        self.waves.scc_known[self.index] = True

    def mask(self, index: int) -> Mask:
        """A lane mask, of one or two scalar registers, as booleans: [waves, lanes]."""
        count = self.waves.lanes // 32
        words = np.stack([self.scalar(index + n) for n in range(count)], axis=1)
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(np.bool_)

    def set_mask(self, index: int, value: Mask) -> None:
        """Writes a lane mask: [waves, lanes]."""
        bits = np.packbits(np.broadcast_to(value, self.active.shape), axis=1, bitorder="little")
        words = bits.view(np.uint32)
        for n in range(words.shape[1]):
            self.set_scalar(index + n, words[:, n])

    def vector(self, index: int, *, everywhere: bool = False) -> Words:
        """A vector register: [waves, lanes].

        Args:
            index: Its number.
            everywhere: Inactive lanes are read as well.
        """
        waves = self.waves
        if (True, index) not in waves.all_known:
            unknown = ~waves.vector_known[index][self.index]
            if not everywhere:
                unknown &= self.active
            if unknown.any():
                self._found_unknown(Register(True, index, 1), unknown)
        words: Words = waves.vectors[index][self.index]
        return words

    def set_vector(self, index: int, value: Array, where: Mask | None = None) -> None:
        """Writes a vector register, in the active lanes or in those of a mask."""
        waves = self.waves
        if where is None and self.all_active:
            waves.vectors[index][self.index] = value
            self._note_known(index, None)
            return
        mask = self.active if where is None else where
        words = waves.vectors[index][self.index]
        np.copyto(words, value, where=mask, casting="unsafe")
        if not isinstance(self.index, slice):
            waves.vectors[index][self.index] = words
        self._note_known(index, mask)

    def _note_known(self, index: int, mask: Mask | None) -> None:
        waves, key = self.waves, (True, index)
        if key in waves.all_known:
            return
        known = waves.vector_known[index]
        known[self.index] = True if mask is None else known[self.index] | mask
        if known.all():
            waves.all_known.add(key)
