"""Reads the assembly that LLVM writes for AMD GPUs: kernels, their instructions, their descriptors.

The syntax is that of LLVM's AMDGPU guide ("Syntax of AMDGPU Instruction Operands" and "...
Modifiers"). Nothing here knows what an instruction does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from iree_lnbwd.emulator.launch import Fault

_LABEL = re.compile(r"([.\w$]+):$")
_PRELOAD_PADDING = 256  # bytes ahead of the code where arguments come in registers


@dataclass(frozen=True)
class Instruction:
    """One instruction, or one half of a dual one.

    Attributes:
        line: In the assembly, from 1.
        text: As it stands there.
        mnemonic: Its first word.
        operands: What follows, split at commas.
        modifiers: What follows the operands, by name; the text after the colon, or nothing.
        second: The other half of a dual instruction.
    """

    line: int
    text: str
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    second: Instruction | None = None

    @property
    def where(self) -> str:
        """Text and line, for messages."""
        return f"{self.text!r} (line {self.line})"

    def fault(self, what: str) -> Fault:
        """A fault at this instruction."""
        fault = Fault(what)
        fault.instruction = self.where
        return fault


@dataclass(frozen=True)
class Kernel:
    """A kernel's code and descriptor.

    Attributes:
        name: Its symbol.
        instructions: In order.
        labels: The index of the instruction that each label stands before.
        entry: The index of the first instruction to run.
        descriptor: The ``.amdhsa_`` directives, without that prefix.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    entry: int
    descriptor: Mapping[str, str]

    def number(self, directive: str, default: int = 0) -> int:
        """A directive's value.

        Raises:
            Fault: It is no number, or less than 0.
        """
        text = self.descriptor.get(directive)
        if text is None:
            return default
        try:
            value = int(text, 0)
        except ValueError:
            value = -1
        if value < 0:
            raise Fault(f".amdhsa_{directive} of {self.name}: expected a number, got {text}")
        return value


def kernels(assembly: str) -> dict[str, Kernel]:
    """The kernels of a file, by name.

    Raises:
        Fault: A line is not understood.
    """
    bodies: dict[str, _Body] = {}
    descriptors: dict[str, dict[str, str]] = {}
    body: _Body | None = None
    descriptor: dict[str, str] | None = None
    functions = set(re.findall(r"^\s*\.type\s+(\S+),@function", assembly, re.MULTILINE))
    for number, line in enumerate(assembly.splitlines(), 1):
        text = line.split(";")[0].strip()
        if text == ".amdgpu_metadata":
            break
        if not text:
            continue
        if label := _LABEL.match(text):
            if label[1] in functions:
                body = bodies[label[1]] = _Body()
            elif label[1].startswith(".Lfunc_end"):
                body = None
            elif body is not None:
                body.labels[label[1]] = len(body.instructions)
        elif text.startswith(".amdhsa_kernel "):
            descriptor = descriptors[text.split()[1]] = {}
        elif text == ".end_amdhsa_kernel":
            descriptor = None
        elif text.startswith(".amdhsa_") and descriptor is not None:
            name, _, value = text.removeprefix(".amdhsa_").partition(" ")
            descriptor[name] = value.strip()
        elif body is not None:
            body.add(text, number)
    if without := sorted(descriptors.keys() - bodies.keys()):
        raise Fault(f"descriptors without code: {', '.join(without)}")
    return {name: bodies[name].kernel(name, descriptors[name]) for name in descriptors}


class _Body:
    """A function while it is read."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.padded: int | None = None  # the instruction that the preload's padding ends at

    def add(self, text: str, line: int) -> None:
        if text.startswith(".p2align"):
            if 1 << int(text.split()[1].rstrip(",")) == _PRELOAD_PADDING and self.padded is None:
                self.padded = len(self.instructions)
        elif text.startswith("."):
            raise Fault(f"line {line} of the assembly: not understood inside a function: {text}")
        else:
            self.instructions.append(parse(text, line))

    def kernel(self, name: str, descriptor: Mapping[str, str]) -> Kernel:
        whole = Kernel(name, tuple(self.instructions), self.labels, 0, descriptor)
        if not whole.number("user_sgpr_kernarg_preload_length"):
            return whole
        # Firmware that preloads arguments skips the code that loads them (LLVM AMDGPU guide,
        # "Preloaded Kernel Arguments").
        if self.padded is None:
            raise Fault(f"{name} preloads its arguments, but no padding of 256 bytes is there")
        return replace(whole, entry=self.padded)


def parse(text: str, line: int) -> Instruction:
    """One instruction from its text."""
    first, *others = (_single(part.strip(), text, line) for part in text.split("::"))
    if len(others) > 1:
        raise first.fault("more than two instructions in one")
    return replace(first, second=others[0]) if others else first


def _single(part: str, text: str, line: int) -> Instruction:
    mnemonic, _, rest = part.partition(" ")
    pieces = [piece.strip() for piece in _split(rest.strip(), ",")]
    modifiers: dict[str, str] = {}
    if pieces and pieces[-1]:
        pieces[-1], *words = _split(pieces[-1], " ")
        for word in words:
            name, _, value = word.partition(":")
            modifiers[name] = value
    return Instruction(line, text, mnemonic, tuple(p for p in pieces if p), modifiers)


def _split(text: str, separator: str) -> Iterator[str]:
    """At separators outside of brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter in "[(") - (letter in "])")
        if letter == separator and depth == 0:
            if separator != " " or text[start:at]:
                yield text[start:at]
            start = at + 1
    if separator != " " or text[start:]:
        yield text[start:]
