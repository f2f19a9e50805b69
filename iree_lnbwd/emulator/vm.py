"""The host side of a compiled module: IREE VM bytecode, read by IREE and interpreted here.

``iree-dump-module`` disassembles the module's own bytecode. Its output is register code: 32-bit
registers ``%i0``, 64-bit pairs ``%i0:1``, references ``%r0``. Imported functions (HAL's) are Python
functions.
"""

from __future__ import annotations

import operator
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from iree_lnbwd.emulator.launch import CONFUSION

_IMPORT = re.compile(r'^vm\.import @(\S+) cconv "(?:\d)(\w*?)_(\w*)"', re.MULTILINE)
_RODATA = re.compile(r"^vm\.rodata\[(\d+)\] = ([0-9A-F]*)", re.MULTILINE)
_FUNCTION = re.compile(
    r"(?:^vm\.export @(?P<export>\S+)\n)?^vm\.func @(?P<name>\S+?)\((?P<takes>.*?)\) -> "
    r"\((?P<gives>.*?)\) \{\n(?P<body>.*?)^\}",
    re.MULTILINE | re.DOTALL,
)
_ARGUMENT = re.compile(r"%\S+: (\S+?)(?:,|$)")
_LABEL = re.compile(r"^(\^bb\d+):")
_CALL = re.compile(
    r"vm\.call(?:\.variadic)?(?P<yields>\.yieldable)? @(?P<name>[\w.:]+)"
    r"(?: segments\[(?P<segments>[^\]]*)\])?\((?P<arguments>[^)]*)\)(?: -> (?P<target>.*))?$"
)
_JUMP = re.compile(r"(\^bb\d+)\(([^)]*)\)")
_INDEX = re.compile(r"\[(\d+)\]")
_ONE_VALUE = 65535  # a segment that is not variadic

_MOST_STEPS = 1 << 18  # of a call; host programs of kernels take some hundred
_DEEPEST = 64  # calls of functions inside each other
_DUMP_SECONDS = 600

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_WIDTHS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
_FLOATS: Mapping[str, type[np.floating[Any]]] = {"f32": np.float32, "f64": np.float64}


class VmError(RuntimeError):
    """The host program failed, or uses something that this interpreter does not know."""


class Steps:
    """The steps of a host program in a call; with too many, it counts as endless."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    def begin(self) -> None:
        """A call begins."""
        self._left = _MOST_STEPS

    def take(self, count: int = 1) -> None:
        """So many steps are made.

        Raises:
            VmError: They are too many.
        """
        self._left -= count
        if self._left < 0:
            raise VmError(f"the host program does not end: {_MOST_STEPS} steps were made")


@dataclass(frozen=True)
class _Function:
    name: str
    arguments: tuple[tuple[str, str], ...]  # register and type
    results: tuple[str, ...]  # types
    blocks: Mapping[str, tuple[str, ...]]


@dataclass
class _Registers:
    """32-bit registers, unsigned, and references."""

    ints: dict[int, int] = field(default_factory=dict)
    refs: dict[int, Any] = field(default_factory=dict)

    def get(self, name: str, bits: int = 32) -> Any:
        kind, number = _register(name)
        if kind == "r":
            return self.refs.get(number)
        for half in range(bits // 32):
            if number + half not in self.ints:
                raise VmError(f"{name} is read and was never written")
        low = self.ints[number]
        return low | self.ints[number + 1] << 32 if bits == 64 else low

    def set(self, name: str, value: Any, bits: int = 32) -> None:
        kind, number = _register(name)
        if kind == "r":
            self.refs[number] = value
            return
        self.ints[number] = value & _U32
        if bits == 64:
            self.ints[number + 1] = value >> 32 & _U32


Imports = Mapping[str, Callable[..., Any]]


class Program:
    """A module's functions, with their globals."""

    def __init__(self, vmfb: bytes, imports: Imports, steps: Steps | None = None) -> None:
        """Disassembles a module and runs its initializers.

        Args:
            vmfb: The module.
            imports: Python functions by name, e.g. "hal.buffer.length". i64 come and go as
                unsigned ints, variadic arguments as lists (of tuples where they come in tuples).
                The caller gets a Fault, VmError or ValueError that they raise.
            steps: Counts the program's steps; imports may take some, too.

        Raises:
            VmError: It cannot be read, or an initializer failed.
        """
        text = disassemble(vmfb)
        self._imports = imports
        self._steps = steps or Steps()
        self._conventions = {name: (takes, gives) for name, takes, gives in _IMPORT.findall(text)}
        self._rodata = {int(n): bytes.fromhex(digits) for n, digits in _RODATA.findall(text)}
        self._functions: list[_Function] = []
        self._exports: dict[str, int] = {}
        for ordinal, match in enumerate(_FUNCTION.finditer(text)):
            if match["export"]:
                self._exports[match["export"]] = ordinal
            arguments = _argument_registers(_ARGUMENT.findall(match["takes"]))
            results = tuple(kind for kind in match["gives"].split(", ") if kind)
            self._functions.append(
                _Function(match["name"], arguments, results, _blocks(match["body"]))
            )
        self._globals: dict[str, Any] = {}
        if "__init" in self._exports:
            self.call("__init")

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of what can be called."""
        return tuple(name for name in self._exports if not name.startswith("__"))

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Calls a function with references, ints and floats; ints come back without a sign.

        Raises:
            VmError: There is no such function, it takes other arguments, it failed, or it uses
                something that is not known here.
        """
        if name not in self._exports:
            raise VmError(f"no function {name}; the module has {', '.join(self.functions)}")
        self._steps.begin()
        function = self._functions[self._exports[name]]
        _check_count(function, arguments)
        given = [
            _to_bits(f"{name}: argument {n}", kind, value)
            for n, ((_, kind), value) in enumerate(zip(function.arguments, arguments, strict=True))
        ]
        returned = self._run(function, given, 0)
        return tuple(
            _from_bits(kind, value) for kind, value in zip(function.results, returned, strict=True)
        )

    def _run(self, function: _Function, arguments: Sequence[Any], depth: int) -> tuple[Any, ...]:
        name = function.name
        if depth > _DEEPEST:
            raise VmError(f"{name}: more than {_DEEPEST} calls inside each other")
        _check_count(function, arguments)
        registers = _Registers()
        with _understood(name):
            for (register, kind), value in zip(function.arguments, arguments, strict=True):
                registers.set(register, value, _bits(kind))
        block = "^bb0"
        while True:
            if block not in function.blocks:
                raise VmError(f"{name}: a jump to {block}, which it does not have")
            for line in function.blocks[block]:
                self._steps.take()
                outcome = self._step(line, registers, function, depth)
                if isinstance(outcome, tuple):
                    return outcome
                if outcome is not None:
                    block = outcome
                    break
            else:
                raise VmError(f"{name}: {block} ends without a jump")

    def _step(
        self, line: str, registers: _Registers, function: _Function, depth: int
    ) -> str | tuple[Any, ...] | None:
        """One instruction: the block that it jumps to, the results where it returns, or None."""
        results, _, words = line.rpartition(" = ") if " = vm." in line else ("", "", line)
        if words.startswith("vm.call"):
            return self._call(words, results, registers, depth)
        with _understood(line):
            return self._simple(words, results, registers, function)

    def _simple(
        self, words: str, results: str, registers: _Registers, function: _Function
    ) -> str | tuple[Any, ...] | None:
        """One instruction that is no call."""
        opcode, _, rest = words.partition(" ")
        match opcode:
            case "vm.return":
                return tuple(
                    registers.get(name, _bits(kind))
                    for name, kind in zip(_names(rest), function.results, strict=True)
                )
            case "vm.br":
                return _jump(rest, registers)
            case "vm.cond_br":
                condition, _, targets = rest.partition(", ")
                taken, other = re.findall(r"\^bb\d+\([^)]*\)", targets)
                return _jump(taken if registers.get(condition) else other, registers)
            case "vm.fail":
                raise VmError(f"the module failed: {rest}")
            case "vm.discard.refs" | "vm.trace" | "vm.print":
                return None
            case "vm.const.ref.zero":
                registers.set(results, None)
            case "vm.const.ref.rodata":
                registers.set(results, self._rodata[int(rest.split()[0])])
            case "vm.assign.ref" | "vm.cast.any.ref":
                registers.set(results, registers.get(_names(rest)[0]))
            case _ if opcode.startswith("vm.global."):
                self._access_global(opcode, rest, results, registers)
            case _:
                _compute(opcode, rest, results, registers)
        return None

    def _access_global(self, opcode: str, rest: str, result: str, registers: _Registers) -> None:
        _, _, way, kind = opcode.split(".")
        index = _INDEX.search(rest)
        if index is None or kind not in ("ref", "i32", "i64"):
            raise VmError(f"unknown instruction {opcode} {rest}")
        key, bits = f"{kind == 'ref'} {index[1]}", 64 if kind == "i64" else 32
        if way == "load":
            registers.set(result, self._globals.get(key, None if kind == "ref" else 0), bits)
        else:
            self._globals[key] = registers.get(_names(rest)[0], bits)

    def _call(self, words: str, results: str, registers: _Registers, depth: int) -> str | None:
        """A call; the block that it jumps to, or None."""
        call = _CALL.match(words)
        if call is None:
            raise VmError(f"unknown call: {words}")
        name = call["name"]
        if name not in self._conventions:
            internal = self._internal(name)
            with _understood(words):
                arguments = [
                    registers.get(register, _bits(kind))
                    for register, (_, kind) in zip(
                        _names(call["arguments"]), internal.arguments, strict=True
                    )
                ]
            returned = self._run(internal, arguments, depth + 1)
            with _understood(words):
                for register, value, kind in zip(
                    _names(results), returned, internal.results, strict=True
                ):
                    registers.set(register, value, _bits(kind))
            return None
        takes, gives = (kinds.replace("v", "") for kinds in self._conventions[name])
        with _understood(words):
            segments = [int(n) for n in (call["segments"] or "").split(",") if n.strip()]
            values = _arguments(takes, segments, _names(call["arguments"]), registers)
        function = self._imports.get(name)
        if function is None:
            raise VmError(f"the import {name} is not known to the emulator")
        try:
            returned = function(*values)
        except ValueError:  # of what an executable holds
            raise
        except CONFUSION as error:
            raise VmError(f"{name} is given what it does not take: {error}") from error
        with _understood(words):
            given = returned if len(gives) > 1 else (returned,) if gives else ()
            if call["yields"]:
                # The results go to the registers that the block they arrive in names.
                jump = _JUMP.match(call["target"] or "")
                if jump is None:
                    raise VmError(f"unknown call: {words}")
                for register, value, kind in zip(_names(jump[2]), given, gives, strict=True):
                    registers.set(register, value, 64 if kind == "I" else 32)
                return jump[1]
            for register, value, kind in zip(_names(results), given, gives, strict=True):
                registers.set(register, value, 64 if kind == "I" else 32)
        return None

    def _internal(self, name: str) -> _Function:
        """A function of the module itself, as calls name it: @module:2 is number 2.

        Number 0, where it is not exported, goes by another's name (in IREE 3.13), in its own header
        as in calls of it.
        """
        module, _, number = name.partition(":")
        if number.isdecimal() and int(number) < len(self._functions):
            return self._functions[int(number)]
        local = module.partition(".")[2]
        for function in self._functions:
            if function.name == local:
                return function
        raise VmError(f"a call of {name}, which the module does not have")


@contextmanager
def _understood(line: str) -> Iterator[None]:
    """Turns errors of an instruction that makes no sense into errors of the program.

    Raises:
        VmError: It makes none.
    """
    try:
        yield
    except CONFUSION as error:
        raise VmError(f"{line}: {type(error).__name__}: {error}") from error


def _check_count(function: _Function, arguments: Sequence[Any]) -> None:
    expected = len(function.arguments)
    if len(arguments) != expected:
        raise VmError(f"{function.name}: expected {expected} arguments, got {len(arguments)}")


def _bits(kind: str) -> int:
    """Of a register, or a pair of them, for a type."""
    return 64 if kind in ("i64", "f64") else 32


def _to_bits(what: str, kind: str, value: Any) -> Any:
    """A number as registers hold it; a reference as it is.

    Raises:
        VmError: It is not of that type.
    """
    if kind.startswith("!"):
        if isinstance(value, int | float):
            raise VmError(f"{what}: expected a tensor, got {value}")
        return value
    bits = _bits(kind)
    if kind in _FLOATS and isinstance(value, int | float):
        return _float_bits(kind, value)
    if kind in _FLOATS or not isinstance(value, int) or not -(1 << bits - 1) <= value < 1 << bits:
        shown = value if isinstance(value, int | float) else type(value).__name__
        raise VmError(f"{what}: expected a number of the type {kind}, got {shown}")
    return value & (1 << bits) - 1


def _from_bits(kind: str, value: Any) -> Any:
    return _float(kind, value) if kind in _FLOATS else value


def _float(kind: str, bits: int) -> float:
    number: float = np.array([bits], f"u{_bits(kind) // 8}").view(_FLOATS[kind])[0].item()
    return number


def _float_bits(kind: str, value: float) -> int:
    with np.errstate(all="ignore"):
        rounded = np.array([value], np.float64).astype(_FLOATS[kind])
    bits: int = rounded.view(f"u{_bits(kind) // 8}")[0].item()
    return bits


def imported(vmfb: bytes) -> tuple[str, ...]:
    """The functions that a module's host program may call, e.g. "hal.buffer.length".

    Raises:
        VmError: It cannot be read.
    """
    return tuple(name for name, _, _ in _IMPORT.findall(disassemble(vmfb)))


def disassemble(vmfb: bytes) -> str:
    """The output of ``iree-dump-module`` for a module.

    Raises:
        VmError: It cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "module.vmfb"
        path.write_bytes(vmfb)
        command = [sys.executable, "-m", "iree._runtime.scripts.iree_dump_module"]
        command += ["--output=all", str(path)]
        try:
            run = subprocess.run(command, capture_output=True, check=False, timeout=_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            raise VmError(f"iree-dump-module: no end after {_DUMP_SECONDS} seconds") from None
    if run.returncode:
        said = run.stderr.decode(errors="replace").strip() or f"exit status {run.returncode}"
        raise VmError(f"iree-dump-module failed: {said}")
    return run.stdout.decode(errors="backslashreplace")


def _blocks(body: str) -> dict[str, tuple[str, ...]]:
    blocks: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in body.splitlines():
        if label := _LABEL.match(line):
            lines = blocks.setdefault(label[1], [])
        elif words := line.partition("  //")[0].strip():
            lines.append(words)
    return {label: tuple(lines) for label, lines in blocks.items()}


def _argument_registers(kinds: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Where a function finds its arguments: 64-bit ones at even numbers (as headers do not say)."""
    assigned = []
    ints = refs = 0
    for kind in kinds:
        if kind.startswith("!"):
            assigned.append((f"%r{refs}", kind))
            refs += 1
            continue
        ints += ints % 2 if _bits(kind) == 64 else 0
        assigned.append((f"%i{ints}", kind))
        ints += _bits(kind) // 32
    return tuple(assigned)


def _register(name: str) -> tuple[str, int]:
    """Kind and number: %i4:5 is ("i", 4). Upper case moves a reference: no difference here."""
    match = re.match(r"%([irIR])(\d+)", name)
    if match is None:
        raise VmError(f"expected a register, got {name}")
    return match[1].lower(), int(match[2])


def _names(text: str) -> list[str]:
    return re.findall(r"%\w+(?::\d+)?", text)


def _jump(text: str, registers: _Registers) -> str:
    """The block that is jumped to; its arguments are set, one after the other.

    As IREE's runtime sets them: where two are swapped, the compiler names a third register first.
    """
    match = _JUMP.match(text)
    if match is None:
        raise VmError(f"unknown jump: {text}")
    for pair in match[2].split(", ") if match[2] else ():
        source, destination = pair.split("->")
        registers.set(destination, registers.get(source))
    return match[1]


def _arguments(
    convention: str, segments: Sequence[int], names: Sequence[str], registers: _Registers
) -> list[Any]:
    """What a call passes, by its calling convention: "CrIID" are variadic tuples of (r, I, I)."""
    left = iter(names)

    def take(kind: str) -> Any:
        return registers.get(next(left, ""), 64 if kind == "I" else 32)

    values: list[Any] = []
    counts = iter(segments)
    kinds = re.findall(r"C\w+?D|\w", convention)
    for kind in kinds:
        count = next(counts, _ONE_VALUE)
        if not kind.startswith("C"):
            values.append(take(kind))
            continue
        parts = kind[1:-1]
        rows = [tuple(take(part) for part in parts) for _ in range(count)]
        values.append([row[0] for row in rows] if len(parts) == 1 else rows)
    return values


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _divide(a: int, b: int) -> int:
    """Toward zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}
# Of f32 in f64, and then rounded: the same as rounded once (Figueroa, "When is double rounding
# innocuous?", 1995).
_OF_FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
}


def _compute(opcode: str, rest: str, result: str, registers: _Registers) -> None:
    """Arithmetic: vm.add.i32, vm.min.i64.u, vm.cmp.lt.i64.s, vm.select.ref, ..."""
    words = opcode.split(".")[1:]
    names = _names(rest)
    match words:
        case ["const", kind, *zero]:
            registers.set(result, 0 if zero else int(rest), _WIDTHS[kind])
        case ["bitcast", _, kind]:
            registers.set(result, registers.get(names[0], _bits(kind)), _bits(kind))
        case [how, kind] if how in _OF_FLOATS and kind in _FLOATS:
            registers.set(result, _of_floats(how, kind, names, registers), _bits(kind))
        case ["select", kind]:
            bits = _bits(kind)
            chosen = names[1] if registers.get(names[0]) else names[2]
            registers.set(result, registers.get(chosen, bits), bits)
        case ["cmp", "nz", "ref"]:
            registers.set(result, int(registers.get(names[0]) is not None))
        case ["cmp", "eq" | "ne" as how, "ref"]:
            same = registers.get(names[0]) is registers.get(names[1])
            registers.set(result, int(same == (how == "eq")))
        case ["cmp", "nz", kind]:
            registers.set(result, int(registers.get(names[0], _WIDTHS[kind]) != 0))
        case ["cmp", how, kind, *sign] if how in _COMPARISONS:
            a, b = (_operand(registers, name, kind, sign) for name in names)
            registers.set(result, int(_COMPARISONS[how](a, b)))
        case ["trunc" | "ext", source, to, *sign]:
            bits = _WIDTHS[source]
            value = registers.get(names[0], 64 if bits == 64 else 32) & (1 << bits) - 1
            value = _signed(value, bits) if sign == ["s"] else value
            # What is narrower than 32 bits is kept in 32: sign and all.
            kept = 64 if to == "i64" else 32
            registers.set(result, value if sign else value & (1 << _WIDTHS[to]) - 1, kept)
        case ["not", kind]:
            registers.set(result, ~registers.get(names[0], _WIDTHS[kind]), _WIDTHS[kind])
        case ["abs", kind]:
            value = _operand(registers, names[0], kind, ["s"])
            registers.set(result, abs(value), _WIDTHS[kind])
        case ["ctlz", kind]:
            value = registers.get(names[0], _WIDTHS[kind])
            registers.set(result, _WIDTHS[kind] - value.bit_length(), _WIDTHS[kind])
        case ["fma", kind]:
            a, b, c = (registers.get(name, _WIDTHS[kind]) for name in names)
            registers.set(result, a * b + c, _WIDTHS[kind])
        case ["shl" | "shr" as how, kind, *sign]:
            value = _operand(registers, names[0], kind, sign)
            amount = registers.get(names[1]) & _WIDTHS[kind] - 1  # as CPUs take it
            registers.set(result, _BINARY[how](value, amount), _WIDTHS[kind])
        case [how, kind, *sign] if how in _BINARY and kind in _WIDTHS:
            a, b = (_operand(registers, name, kind, sign) for name in names)
            registers.set(result, _BINARY[how](a, b), _WIDTHS[kind])
        case _:
            raise VmError(f"unknown instruction {opcode} {rest}")


def _of_floats(how: str, kind: str, names: Sequence[str], registers: _Registers) -> int:
    a, b = (np.float64(_float(kind, registers.get(name, _bits(kind)))) for name in names)
    with np.errstate(all="ignore"):
        return _float_bits(kind, _OF_FLOATS[how](a, b))


def _operand(registers: _Registers, name: str, kind: str, sign: Sequence[str]) -> int:
    value: int = registers.get(name, _WIDTHS[kind])
    return _signed(value, _WIDTHS[kind]) if list(sign) == ["s"] else value
