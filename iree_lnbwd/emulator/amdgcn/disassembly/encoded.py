"""Machine code while it is read: the bits of an instruction, and its operands as text."""

from __future__ import annotations

import struct

from iree_lnbwd.emulator.amdgcn.opcodes import GFX9, GFX11, GFX12
from iree_lnbwd.emulator.amdgcn.operands import width
from iree_lnbwd.emulator.launch import Fault

LITERAL = 255  # the number of a source that is a word behind the instruction
ACCUMULATOR = "a32"  # the kind of an operand that is an accumulation register
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494")


def run(letter: str, first: int, count: int) -> str:
    """Registers in sequence."""
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


class Encoded:
    """The machine code of a function, and the instruction of it that is read.

    Attributes:
        name: Of the function.
        words: All of its code.
        at: The word that the instruction begins at.
        length: Words of the instruction that were read so far.
        value: These words as one number.
        labels: Bytes that branches go to.
        gfx9: It is for CDNA.
        gfx12: It is for RDNA4.
        has_sc: Cache policies are sc0, sc1 and nt.
        tables: Names of the instructions of each format, by number.
        lanes: Of a wave.
    """

    def __init__(self, name: str, code: bytes, target: str, lanes: int) -> None:
        """Code that begins at its first instruction.

        Raises:
            Fault: It is no sequence of words.
        """
        if len(code) % 4:
            raise Fault(f"{name}: {len(code)} bytes of code, expected a multiple of 4")
        self.name = name
        self.words = struct.unpack(f"<{len(code) // 4}I", code)
        self.gfx9 = target.startswith("gfx9")
        self.gfx12 = target.startswith("gfx12")
        self.has_sc = target in ("gfx942", "gfx950")
        self.tables = GFX9 if self.gfx9 else GFX12 if self.gfx12 else GFX11
        self.lanes = lanes
        self.labels: set[int] = set()
        self.at = 0
        self.length = 0
        self.value = 0
        self._used = 0  # bits that were looked at
        self._has_literal = False
        self._literal_at = 0

    @property
    def left(self) -> int:
        """The bits of the instruction that nothing has looked at."""
        return self.value & ~self._used

    def begin(self) -> None:
        """Reads the first word of the instruction at ``at``."""
        self._used, self.length, self.value = 0, 0, 0
        self._has_literal = False
        self.more()

    def branch_to(self, words: int) -> str:
        """The label so many words behind this instruction, of one word."""
        target = 4 * (self.at + 1 + words)
        self.labels.add(target)
        return self.label(target)

    def more(self) -> None:
        """One word more belongs to the instruction."""
        word = self.words[self.at + self.length]
        self.value |= word << 32 * self.length
        self.length += 1

    def bits(self, high: int, low: int) -> int:
        """Bits of the instruction, which are looked at now."""
        mask = (1 << high - low + 1) - 1
        self._used |= mask << low
        return self.value >> low & mask

    def peek(self, high: int, low: int) -> int:
        """Bits of the instruction, which still have to be looked at."""
        return self.value >> low & (1 << high - low + 1) - 1

    def literal(self) -> str:
        """The word behind an instruction."""
        if not self._has_literal:
            self._literal_at = 32 * self.length
            self.more()
            self._has_literal = True
        return hex(self.bits(self._literal_at + 31, self._literal_at))

    def label(self, at: int) -> str:
        """Of a byte of the code."""
        return f".L{self.name}_{at:x}"

    def scalar(self, code: int, count: int = 1) -> str:
        """A scalar register by its number."""
        m0, null = (124, None) if self.gfx9 else (125, 124)
        if code + count <= (102 if self.gfx9 else 106):
            return run("s", code, count)
        if 108 <= code <= 124 - count:
            return run("ttmp", code - 108, count)
        if code == null:
            return "null"
        pairs = {106: "vcc", 126: "exec"}
        if count == 2:
            return pairs[code]
        if count != 1:
            raise KeyError(f"scalar {code}")
        return {106: "vcc_lo", 107: "vcc_hi", m0: "m0", 126: "exec_lo", 127: "exec_hi"}[code]

    def source(self, code: int, kind: str) -> str:
        """A source operand by its number."""
        if code >= 256:
            return self.vector(code - 256, kind)
        if code < 128:
            count = self.lanes // 32 if kind == "mask" else max(1, width(kind) // 32)
            return self.scalar(code, count)
        if code <= 192:
            return str(code - 128)
        if code <= 208:
            return str(192 - code)
        if 240 <= code <= 248:
            return _FLOATS[code - 240]
        if code == LITERAL:
            return self.literal()
        raise KeyError(f"source {code}")

    def vector(self, number: int, kind: str, *, half: int | None = None) -> str:
        """A vector register; of 16 bits on gfx11, a half of one."""
        if kind != "mask" and width(kind) == 16 and not self.gfx9:
            if half is None:  # in the short encodings: 128 registers, and which half
                number, half = number & 127, number >> 7
            return f"v{number}.{'lh'[half]}"
        return run("a" if kind == ACCUMULATOR else "v", number, max(1, width(kind) // 32))

    def moved(self, accumulators: int) -> str:
        """The letter of registers that an access moves; on CDNA, by a bit."""
        return "a" if self.gfx9 and self.bits(accumulators, accumulators) else "v"
