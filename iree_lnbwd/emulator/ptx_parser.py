"""PTX text as data: kernels, their declarations and their instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from iree_lnbwd.emulator.launch import Dim3

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(
    r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)(?P<directives>[^{]*)\{", re.DOTALL
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", re.DOTALL)
_MAX_THREADS = re.compile(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_REGISTERS = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<names>[^;]+);")
_VARIABLE = re.compile(
    r"\.(?P<space>shared|local|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?\s*(?:=\s*\{(?P<values>[^}]*)\}\s*)?;"
)
_STATEMENT = re.compile(
    r"(?:@(?P<not>!?)(?P<predicate>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)(?:\s+(?P<operands>.*))?$",
    re.DOTALL,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ADDRESS = re.compile(r"(?P<base>[%$\w]+)(?:\s*\+\s*(?P<offset>-?\w+))?$")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


class PtxError(ValueError):
    """The text is not PTX that this parser knows."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: Without its modifiers: "ld" of "ld.global.v4.b32".
        modifiers: The rest of it: ("global", "v4", "b32").
        operands: As they are written, vectors and addresses in their brackets.
        predicate: The register that decides whether a thread takes part; "" where all do.
        negated: Threads take part where the predicate is false.
        text: All of it.
        line: Of the PTX, from 1.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str
    negated: bool
    text: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Variable:
    """A variable of a state space; extern ones have no length here.

    Attributes:
        space: "shared", "local", "global" or "const".
        name: Of the variable.
        offset: Of its first byte among the variables of its space.
        nbytes: Its length.
        content: What it holds from the start; empty where that is nothing.
    """

    space: str
    name: str
    offset: int
    nbytes: int
    content: bytes = b""


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: Of the entry.
        parameters: Types by name, in order, e.g. {"f_param_0": "u64"}.
        max_threads: ``.maxntid``.
        registers: Type of each register, by its name without the number: {"%r": "b32"}.
        variables: Of the kernel and of the module around it, by name.
        code: Instructions.
        labels: Index of the instruction that each label stands before.
    """

    name: str
    parameters: dict[str, str]
    max_threads: Dim3
    registers: dict[str, str]
    variables: dict[str, Variable]
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def nbytes(self, space: str) -> int:
        """Of all variables in a state space."""
        ends = [v.offset + v.nbytes for v in self.variables.values() if v.space == space]
        return max(ends, default=0)


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name.

    Raises:
        PtxError: Naming the line.
    """
    text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    kernels = {}
    bodies = []
    for entry in _ENTRY.finditer(text):
        end = _closing_brace(text, entry.end())
        bodies.append((entry, end))
    outside = _outside(text, [(entry.start(), end) for entry, end in bodies])
    for entry, end in bodies:
        kernels[entry["name"]] = _kernel(entry, text, end, outside)
    return kernels


def address(operand: str) -> tuple[str, int]:
    """Base and offset of an operand in brackets."""
    match = _ADDRESS.match(operand.strip("[] \t"))
    if match is None:
        raise PtxError(f"expected an address, got {operand}")
    return match["base"], int(match["offset"] or "0", 0)


def vector(operand: str) -> tuple[str, ...]:
    """The parts of an operand in braces; the operand itself where it has none."""
    return tuple(part.strip() for part in operand.strip("{}").split(","))


def _kernel(entry: re.Match[str], text: str, end: int, outside: str) -> Kernel:
    body = text[entry.end() : end]
    dims = _MAX_THREADS.search(entry["directives"])
    sizes = [int(size or 1) for size in dims.groups()] if dims else [1, 1, 1]
    registers: dict[str, str] = {}
    for declared in _REGISTERS.finditer(body):
        for name in declared["names"].split(","):
            stem = re.sub(r"<\d+>$", "", name.strip())
            if registers.setdefault(stem, declared["type"]) != declared["type"]:
                raise PtxError(f"{stem} is declared twice, with different types")
    code, labels = _statements(body, text.count("\n", 0, entry.end()) + 1)
    return Kernel(
        name=entry["name"],
        parameters={name: type_ for type_, name in _PARAM.findall(entry["params"])},
        max_threads=(sizes[0], sizes[1], sizes[2]),
        registers=registers,
        variables=_variables(outside + body),
        code=code,
        labels=labels,
    )


def _variables(text: str) -> dict[str, Variable]:
    """Laid out one after the other; what is extern has the memory behind them."""
    ends = {"shared": 0, "local": 0, "global": 0, "const": 0}
    found = {}
    for declared in _VARIABLE.finditer(text):
        size = _BYTES[declared["type"][1:]]
        align = int(declared["align"] or size)
        space, count = declared["space"], declared["count"]
        offset = -(-ends[space] // align) * align
        nbytes = size * int(count or "1") if count != "" else 0
        ends[space] = offset + nbytes
        content = b"".join(
            int(value, 0).to_bytes(size, "little", signed=value.startswith("-"))
            for value in re.findall(r"-?\w+", declared["values"] or "")
        )
        # Elements that are not spelled out are zero.
        content = content.ljust(nbytes, b"\0") if content else b""
        found[declared["name"]] = Variable(space, declared["name"], offset, nbytes, content)
    return found


def _statements(body: str, first_line: int) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    line = first_line
    for piece in re.split(r"(?<=[;])|(?<=:)(?=\s*\n)", body):
        # Braces around statements scope registers, whose names differ or mean the same here.
        words = piece.strip(" \t\n{}") if piece.strip()[:1] in ("{", "}") else piece.strip()
        at = line + piece[: piece.index(words)].count("\n")
        line += piece.count("\n")
        if not words:
            continue
        if words.endswith(":"):
            labels[words[:-1]] = len(code)
        elif words.startswith("."):  # a declaration or a pragma
            continue
        else:
            code.append(_instruction(words.rstrip(";").strip(), at))
    return tuple(code), labels


def _instruction(text: str, line: int) -> Instruction:
    match = _STATEMENT.match(text)
    if match is None:
        raise PtxError(f"line {line}: expected an instruction, got {text}")
    opcode, *modifiers = match["opcode"].split(".")
    return Instruction(
        opcode=opcode,
        modifiers=tuple(modifiers),
        operands=tuple(o.strip() for o in _OPERAND.findall(match["operands"] or "")),
        predicate=match["predicate"] or "",
        negated=match["not"] == "!",
        text=" ".join(text.split()),
        line=line,
    )


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("a kernel's body does not end")


def _outside(text: str, spans: list[tuple[int, int]]) -> str:
    """What stands between the kernels: the module's own variables."""
    parts, last = [], 0
    for start, end in spans:
        parts.append(text[last:start])
        last = end + 1
    return "".join([*parts, text[last:]])
