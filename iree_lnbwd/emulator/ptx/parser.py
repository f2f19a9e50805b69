"""PTX text as data: kernels, their declarations and their instructions."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from iree_lnbwd.emulator.launch import Dim3

# Each is tried once at a place, and reading continues at its end, so the time grows linearly with
# the text.
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_STRANGE = re.compile(r"[^\t-\r -~]")
_TARGET = re.compile(r"\.target\s+(sm_\w+)")
_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\(")
_DIRECTIVES = re.compile(r"[^{;]*")
_SIZES = re.compile(
    r"\.(?P<what>maxntid|reqntid|reqnctapercluster)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"
)
_DIRECTIVE = re.compile(r"\.[a-z]\w*")
# Directives of a kernel: the size of its workgroups, and some that only compilers use.
_KNOWN = (".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".pragma")
_OF_CLUSTERS = (".explicitcluster", ".reqnctapercluster")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>[busf](?:8|16|32|64))\s+(?:\.\S+\s+|\d+\s+)*"
)
_NAME = re.compile(r"[%\w$]+")
# A scope of one line, with a register: "{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r1; }".
_SCOPE = re.compile(
    r"\{[ \t]*\.reg[ \t]+\.(?P<type>\w+)[ \t]+(?P<name>[A-Za-z]\w*);(?P<rest>[^\n]*)\}"
)
_REGISTERS = re.compile(r"(?P<stem>[%\w$]+?)(?:<(?P<count>\d+)>)?")
_LIST = ".branchtargets"
_SPACE = re.compile(r"\.(?:shared|local|global|const)\s")
_VARIABLE = re.compile(
    r"\.(?P<space>\w+)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf](?:8|16|32|64))\s+"
    r"(?P<name>[\w$]+)(?:\[(?P<count>\d*)\])?\s*(?:=\s*\{(?P<values>[^}]*)\}\s*)?;?$"
)
_STATEMENT = re.compile(
    r"(?:@(?P<not>!?)(?P<predicate>[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?:\s+(?P<operands>.*))?$",
    re.DOTALL,
)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ADDRESS = re.compile(r"(?P<base>[%$\w]+)(?:\s*\+\s*(?P<offset>-?\w+))?$")
_LONGEST = 4096  # characters of an instruction
_MOST_CONTENT = 1 << 26  # bytes of a variable that is not all zero
_SHOWN = 80  # characters of a text that is not understood


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
        offset: Of its first byte among the variables of its space that a kernel uses.
        nbytes: Its length.
        align: Of what its address is a multiple.
        content: Its initial content; empty if it has none.
    """

    space: str
    name: str
    offset: int
    nbytes: int
    align: int
    content: bytes = b""


@dataclass(frozen=True)
class Registers:
    """Registers that are declared together.

    Attributes:
        type: Of each, e.g. "b32".
        count: They are numbered from 0 to one less; None where it is one, without a number.
    """

    type: str
    count: int | None

    def has(self, number: str) -> bool:
        """One of them has this number; "" for none."""
        if self.count is None or not number:
            return self.count is None and not number
        return number == str(int(number)) and int(number) < self.count


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        name: Of the entry.
        target: What the module is for, e.g. "sm_90".
        parameters: Types by name, in order, e.g. {"f_param_0": "u64"}.
        max_threads: Of a workgroup: ``.maxntid``; None where it does not say.
        required_size: Of a workgroup: ``.reqntid``; None where it does not say.
        cluster: Workgroups of a cluster: ``.reqnctapercluster``; one where it does not say.
        unknown_directives: Its other directives about launches, and all that are not known here.
        registers: By their name without the number.
        variables: Of the kernel and of the module around it, by name; those that it uses.
        nbytes: Of them, in a state space.
        code: Instructions.
        labels: Index of the instruction that each label stands before.
        lists: Labels that a branch chooses among, by the list's name: ``.branchtargets``.
    """

    name: str
    target: str
    parameters: dict[str, str]
    max_threads: int | None
    required_size: Dim3 | None
    cluster: Dim3
    unknown_directives: tuple[str, ...]
    registers: dict[str, Registers]
    variables: Mapping[str, Variable]
    nbytes: Mapping[str, int]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    lists: dict[str, tuple[str, ...]]

    def type_of(self, register: str) -> str:
        """The type of a register.

        Raises:
            PtxError: It was not declared.
        """
        for cut in range(len(register.rstrip("0123456789")), len(register) + 1):
            declared = self.registers.get(register[:cut])
            if declared is not None and declared.has(register[cut:]):
                return declared.type
        raise PtxError(f"{register} is not declared")


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name.

    Raises:
        PtxError: Naming the line, where there is one.
    """
    text = _COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    if (strange := _STRANGE.search(text)) is not None:
        line = text.count("\n", 0, strange.start()) + 1
        raise PtxError(f"line {line}: expected ASCII text, got {strange[0]!a}")
    target = _TARGET.search(text)
    if target is None:
        raise PtxError("the text does not say what it is for (.target)")
    outside: dict[str, Variable] = {}
    entries: dict[str, _Entry] = {}
    at, line = 0, 1
    while (entry := _ENTRY.search(text, at)) is not None:
        parameters_end = text.find(")", entry.end())
        if parameters_end < 0:
            raise PtxError(f"{entry['name']}: the parameters do not end")
        directives = _DIRECTIVES.match(text, parameters_end + 1)
        assert directives is not None
        begin = end = directives.end()
        outside |= _variables(text[at : entry.start()].split(";"))
        line += text.count("\n", at, begin)
        if text[begin : begin + 1] == "{":  # else it is declared, no more
            if entry["name"] in entries:
                raise PtxError(f"{entry['name']} is there twice")
            end = _closing_brace(text, begin + 1)
            parameters, body = text[entry.end() : parameters_end], text[begin + 1 : end]
            entries[entry["name"]] = _Entry(parameters, directives[0], body, line)
            line += text.count("\n", begin, end)
        at = end
    outside |= _variables(text[at:].split(";"))
    return {name: _kernel(name, entry, target[1], outside) for name, entry in entries.items()}


def address(operand: str) -> tuple[str, int]:
    """Base and offset of an operand in brackets.

    Raises:
        PtxError: It is none.
    """
    match = _ADDRESS.match(operand.strip("[] \t"))
    offset = 0 if match is None else _number(match["offset"] or "0")
    if match is None or not -(1 << 31) <= offset < 1 << 31:
        raise PtxError(f"expected an address, got {operand}")
    return match["base"], offset


def vector(operand: str) -> tuple[str, ...]:
    """The parts of an operand in braces; the operand itself where it has none."""
    return tuple(part.strip() for part in operand.strip("{}").split(","))


class _Entry(NamedTuple):
    """The text of a kernel, and the line that its body begins in."""

    parameters: str
    directives: str
    body: str
    line: int


def _kernel(name: str, entry: _Entry, target: str, outside: Mapping[str, Variable]) -> Kernel:
    sizes = {
        match["what"]: tuple(_number(size or "1") for size in match.groups()[1:])
        for match in _SIZES.finditer(entry.directives)
    }
    x, y, z = sizes.get("reqntid", (0, 0, 0))
    along_x, along_y, along_z = sizes.get("reqnctapercluster", (1, 1, 1))
    known_ones = _KNOWN + (_OF_CLUSTERS if "reqnctapercluster" in sizes else ())
    declarations: list[str] = []
    registers: dict[str, Registers] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    lists: dict[str, tuple[str, ...]] = {}
    label = ""
    for words, line in _statements(entry.body, entry.line):
        if words.endswith(":"):
            if words[:-1] in labels:
                raise PtxError(f"line {line}: the label {_short(words)} is there twice")
            label = words[:-1]
            labels[label] = len(code)
        elif words.startswith(_LIST) and label in labels:
            lists[label] = vector(words.removeprefix(_LIST).rstrip("; \t\n"))
            del labels[label]  # it is the list's name
        elif words.startswith(".reg"):
            _declare(words, line, registers)
        elif words.startswith("."):  # a variable, or a pragma
            declarations.append(words)
        else:
            code.append(_instruction(words.rstrip(";").strip(), line))
    known = ChainMap(_variables(declarations), dict(outside))
    used = {name for i in code for operand in i.operands for name in _NAME.findall(operand)}
    variables, nbytes = _laid_out([known[name] for name in sorted(used & known.keys())])
    return Kernel(
        name=name,
        target=target,
        parameters=_parameters(entry.parameters, name),
        max_threads=math.prod(sizes["maxntid"]) if "maxntid" in sizes else None,
        required_size=(x, y, z) if "reqntid" in sizes else None,
        cluster=(along_x, along_y, along_z),
        unknown_directives=tuple(
            word for word in _DIRECTIVE.findall(entry.directives) if word not in known_ones
        ),
        registers=registers,
        variables=variables,
        nbytes=nbytes,
        code=tuple(code),
        labels=labels,
        lists=lists,
    )


def _parameters(text: str, kernel: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in text.split(",") if text.strip() else ():
        words = piece.strip()
        type_ = _PARAMETER.match(words)
        name = None if type_ is None else _NAME.fullmatch(words, type_.end())
        if type_ is None or name is None or name[0] in found:
            raise PtxError(f"{kernel}: expected a parameter of its own, got {_short(words)}")
        found[name[0]] = type_["type"]
    return found


def _declare(words: str, line: int, registers: dict[str, Registers]) -> None:
    """Registers: ``.reg .b32 %r<10>, tmp;``."""
    _, _, rest = words.rstrip(";").partition(".reg")
    type_, *names = rest.split(maxsplit=1)
    for name in "".join(names).split(","):
        match = _REGISTERS.fullmatch(name.strip())
        if match is None or not type_.startswith("."):
            raise PtxError(f"line {line}: expected registers, got {_short(words)}")
        count = None if match["count"] is None else _number(match["count"])
        given = Registers(type_[1:], count)
        before = registers.setdefault(match["stem"], given)
        if before.type != given.type or (before.count is None) != (count is None):
            raise PtxError(f"{match['stem']} is declared twice, with different types")
        # In scopes of their own the same names may be more or fewer.
        if before.count is not None and count is not None and count > before.count:
            registers[match["stem"]] = given


def _variables(statements: Iterable[str]) -> dict[str, Variable]:
    """The variables that statements declare; the use of any other is an error.

    Raises:
        PtxError: That cannot be.
    """
    found = {}
    for statement in statements:
        begin = _SPACE.search(statement)
        declared = None if begin is None else _VARIABLE.match(statement, begin.start())
        if declared is not None:
            found[declared["name"]] = _variable(declared)
    return found


def _variable(declared: re.Match[str]) -> Variable:
    name, count = declared["name"], declared["count"]
    size = int(declared["type"][1:]) // 8
    align = _number(declared["align"] or str(size))
    if align < 1 or align & align - 1:
        raise PtxError(f"{name}: expected an alignment that is a power of two, got {align}")
    nbytes = size * _number(count or "1") if count != "" else 0
    content = b""
    if declared["values"] is not None:
        if nbytes > _MOST_CONTENT:
            raise PtxError(f"{name}: {nbytes} bytes, expected at most {_MOST_CONTENT}")
        values = [_number(value) for value in re.findall(r"-?\w+", declared["values"])]
        if size * len(values) > nbytes:
            raise PtxError(f"{name}: {len(values)} values for {nbytes} bytes")
        mask = (1 << 8 * size) - 1
        content = b"".join((value & mask).to_bytes(size, "little") for value in values)
        content = content.ljust(nbytes, b"\0")  # what is not spelled out
    return Variable(declared["space"], name, 0, nbytes, align, content)


def _laid_out(variables: Sequence[Variable]) -> tuple[dict[str, Variable], dict[str, int]]:
    """Variables in sequence, with the bytes of each space; extern ones have the memory behind."""
    ends = dict.fromkeys(("shared", "local", "global", "const"), 0)
    placed = {}
    for variable in variables:
        offset = -(-ends[variable.space] // variable.align) * variable.align
        ends[variable.space] = offset + variable.nbytes
        placed[variable.name] = replace(variable, offset=offset)
    return placed, ends


def _statements(body: str, first_line: int) -> Iterator[tuple[str, int]]:
    """Statements and labels, each with its line."""
    line = first_line
    body = _SCOPE.sub(_with_its_type, body)
    for piece in re.split(r"(?<=[;])|(?<=:)(?=\s*\n)", body):
        # Braces around statements scope registers, whose names differ or mean the same here.
        words = piece.strip(" \t\n{}") if piece.strip()[:1] in ("{", "}") else piece.strip()
        at = line + piece[: piece.index(words)].count("\n")
        line += piece.count("\n")
        if words:
            yield words, at


def _with_its_type(scope: re.Match[str]) -> str:
    """A scope whose register says its type: another scope may have one of that name."""
    name = f"{scope['name']}_{scope['type']}"
    rest = re.sub(rf"\b{scope['name']}\b", name, scope["rest"])
    return f"{{ .reg .{scope['type']} {name};{rest}}}"


def _instruction(text: str, line: int) -> Instruction:
    match = None if len(text) > _LONGEST else _STATEMENT.match(text)
    if match is None:
        raise PtxError(f"line {line}: expected an instruction, got {_short(text)}")
    opcode, *modifiers = match["opcode"].split(".")
    return Instruction(
        opcode=opcode,
        modifiers=tuple(modifiers),
        operands=tuple(" ".join(o.split()) for o in _OPERAND.findall(match["operands"] or "")),
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


def _number(text: str) -> int:
    """Decimal, or with a prefix."""
    try:
        return int(text, 0)
    except ValueError:
        raise PtxError(f"expected a number, got {_short(text)}") from None


def _short(text: str) -> str:
    """A text on one line, and cut if it is long."""
    line = " ".join(text[: 2 * _SHOWN].split())
    return line if len(text) <= _SHOWN else f"{line[:_SHOWN]}..."
