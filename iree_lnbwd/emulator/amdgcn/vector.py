"""Decodes vector ALU instructions: operands, modifiers, and the forms that an operation comes in.

An operation has the same name in all encodings: VOP1, VOP2 and VOPC ("_e32"), VOP3 ("_e64"), DPP
("_dpp"), SDWA ("_sdwa"), and as half of a dual instruction (VOPD, "v_dual_"). Packed f16 and f32
and the mixed-precision FMA read their sources in ways of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.floats import fma_f16, fma_f32
from iree_lnbwd.emulator.amdgcn.lanes import Dpp, take_dpp
from iree_lnbwd.emulator.amdgcn.operands import (
    Operand,
    Reader,
    constant,
    destination,
    is_literal,
    mask_reader,
    numpy_type,
    operand,
    vector_reader,
    width,
    write_vector,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.vector_table import VECTOR, Vector, by_table, pack
from iree_lnbwd.emulator.amdgcn.waves import Group, Mask, Register
from iree_lnbwd.emulator.launch import Array


@dataclass(frozen=True)
class _Result:
    """What an instruction is about to write.

    Attributes:
        write: Writes it.
        register: Where.
        unknown: The lanes that depend on what was never written.
    """

    write: Callable[[], None]
    register: Register
    unknown: Mask | None


Compute = Callable[[Group], list[_Result]]  # everything is read before anything is written

_FORM = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_READS_VCC = {"v_div_fmas_f32", "v_div_fmas_f64"}  # and says so nowhere
_SDWA_SELECTORS = {
    "DWORD": (0, 32),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
}


def base_name(instruction: Instruction) -> str:
    """Of an instruction, whatever its encoding."""
    return _FORM.sub("", instruction.mnemonic)


def decode_vector(instruction: Instruction, lanes: int) -> Step | None:
    """A vector ALU instruction, ready to run; None where it is none that is known.

    Raises:
        Fault: An operand or modifier is not understood.
    """
    halves = [instruction]
    if instruction.mnemonic.startswith("v_dual_") and instruction.second is not None:
        halves.append(instruction.second)
    decoded = [_decode(half, lanes) for half in halves]
    if any(half is None for half in decoded):
        return None
    parts = [half for half in decoded if half is not None]
    reads = tuple(register for _, used, _ in parts for register in used)
    writes = tuple(register for _, _, written in parts for register in written)
    computes = [compute for compute, _, _ in parts]

    def run(group: Group, machine: Machine) -> None:
        # Compilers leave elements of vectors undefined and compute on them, too: what comes of
        # that is as undefined, which is a fault only where it matters.
        results = [result for compute in computes for result in compute(group)]
        for result in results:
            result.write()
            if result.unknown is not None:
                unknown = result.unknown & group.active
                for register in numbers([result.register]):
                    group.forget(register, unknown)

    return Step(instruction, run, numbers(reads), numbers(writes))


_Decoded = tuple[Compute, list[Register | None], list[Register | None]]


def _decode(instruction: Instruction, lanes: int) -> _Decoded | None:
    name = base_name(instruction).replace("v_dual_", "v_")
    if name in _PACKED:
        return _packed(instruction, *_PACKED[name])
    if name in _MIXED:
        return _mixed(instruction, _MIXED[name])
    compares_to_exec = name.startswith("v_cmpx_")
    modifiers = dict(instruction.modifiers)
    operation = VECTOR.get(name.replace("v_cmpx_", "v_cmp_"))
    if name == "v_bitop3_b32":
        operation = by_table(int(modifiers.pop("bitop3", "0"), 0))
    if operation is None:
        return None
    texts = list(instruction.operands)
    if compares_to_exec:
        texts.insert(0, "exec" if lanes == 64 else "exec_lo")
    if name in _READS_VCC or instruction.mnemonic == "v_dual_cndmask_b32":
        texts.append("vcc" if lanes == 64 else "vcc_lo")
    dpp = take_dpp(instruction, modifiers, lanes)
    return _general(instruction, operation, texts, modifiers, dpp, lanes)


def _general(
    instruction: Instruction,
    operation: Vector,
    texts: list[str],
    modifiers: dict[str, str],
    dpp: Dpp | None,
    lanes: int,
) -> _Decoded:
    results = operation.results
    inputs = list(operation.sources[:-1] if operation.accumulates else operation.sources)
    if len(texts) != len(results) + len(inputs):
        raise instruction.fault(f"{len(instruction.operands)} operands were not expected")
    if operation.accumulates:
        texts, inputs = [*texts, texts[0]], list(operation.sources)
    selected = _bits(instruction, modifiers.pop("op_sel", ""), len(operation.sources) + 1)
    written_bits = _take_sdwa_result(instruction, modifiers, results)
    selects = _take_sdwa(instruction, modifiers)
    clamp = modifiers.pop("clamp", None) is not None
    _nothing_left(instruction, modifiers)
    readers = []
    for n, (kind, text) in enumerate(zip(inputs, texts[len(results) :], strict=True)):
        if kind == "mask":
            readers.append(mask_reader(instruction, text))
            continue
        if selected[n] and width(kind) != 16:
            raise instruction.fault(f"op_sel of {kind}")
        if n in selects:
            readers.append(_selected(instruction, text, kind, *selects[n]))
        else:
            half = int(selected[n]) if width(kind) == 16 else None
            readers.append(vector_reader(instruction, text, kind, half=half))
    targets = [
        destination(
            instruction, text, vector=kind != "mask", kind=kind.replace("mask", f"u{lanes}")
        )
        for kind, text in zip(results, texts, strict=False)
    ]
    if clamp and results[0] != "f32":
        raise instruction.fault(f"clamp of {results[0]}")
    if results[0][1:] == "16" and targets[0].half is None and selected[-1] == 0 and lanes == 32:
        raise instruction.fault("which half is written?")
    half = 1 if selected[-1] else None
    compute_values = operation.compute

    def compute(group: Group) -> list[_Result]:
        if operation.selects:
            sources, unknown = _read_selected(group, readers)
        else:
            sources, unknown = group.trace(readers)
        where = None
        if dpp is not None:
            if unknown is not None:
                unknown = _moved_unknown(group, readers, dpp)
            sources[0] = dpp.move(group, sources[0])
            where = dpp.where(group)
        values = compute_values(*sources)
        values = values if isinstance(values, tuple) else (values,)
        if clamp:
            values = (np.fmin(np.fmax(values[0], np.float32(0)), np.float32(1)), *values[1:])
        if written_bits is not None:
            first, count = written_bits
            bits = values[0].view(np.uint32) & np.uint32((1 << count) - 1)
            values = ((bits << np.uint32(first)).view(values[0].dtype), *values[1:])
        written = [
            _write(group, target, kind, value, where, half, unknown)
            for target, kind, value in zip(targets, results, values, strict=True)
        ]
        if unknown is not None and operation.low_apart:
            _, of_low = group.trace(low_words)
            written[:1] = _apart(written[0], of_low)
        return written

    low_words = [
        _low_word(instruction, text) for text in texts[len(results) :] if operation.low_apart
    ]
    used = [operand(instruction, text).register for text in texts[len(results) :]]
    return compute, used, [target.register for target in targets]


def _read_selected(group: Group, readers: list[Reader]) -> tuple[list[Array], Mask | None]:
    """Sources of a selection; a value that is not selected need not be known."""
    values, unknown = group.trace(readers)
    if unknown is not None:
        _, of_mask = group.trace(readers[2:])
        unknown = np.zeros_like(group.active) if of_mask is None else of_mask
        for read, selected in ((readers[0], ~values[2]), (readers[1], values[2])):
            _, of_source = group.trace([read])
            if of_source is not None:
                unknown = unknown | of_source & selected
    return values, unknown


def _moved_unknown(group: Group, readers: list[Reader], dpp: Dpp) -> Mask:
    """Where sources are unknown, the first of which comes from other lanes."""
    _, of_first = group.trace(readers[:1])
    _, of_others = group.trace(readers[1:])
    nowhere = np.zeros_like(group.active)
    moved: Mask = dpp.move(group, nowhere if of_first is None else of_first)
    return moved | (nowhere if of_others is None else of_others)


def _low_word(instruction: Instruction, text: str) -> Reader:
    source = operand(instruction, text).register
    if source is None:
        return lambda group: np.zeros((1, 1), np.uint32)
    if source.vector:
        return lambda group: group.vector(source.index)
    return lambda group: group.scalar(source.index)


def _apart(whole: _Result, of_low: Mask | None) -> list[_Result]:
    """The two words of a result of 64 bits, of which the lower may be known."""
    low, high = (whole.register.one(n) for n in range(2))
    return [_Result(whole.write, low, of_low), _Result(lambda: None, high, whole.unknown)]


def _write(
    group: Group,
    target: Operand,
    kind: str,
    value: Array,
    where: Array | None,
    half: int | None,
    unknown: Mask | None,
) -> _Result:
    register = target.register
    assert register is not None

    def write() -> None:
        if kind == "mask":
            group.set_mask(register.index, value & (group.active if where is None else where))
        else:
            write_vector(group, target, kind, value, where, half=half)

    return _Result(write, register, unknown)


def _bits(instruction: Instruction, text: str, most: int, default: int = 0) -> list[int]:
    """A list of bits such as [1,0,0], filled up."""
    if not text:
        return [default] * most
    bits = [int(bit) for bit in text.strip("[]").split(",")]
    if len(bits) > most:
        raise instruction.fault(f"expected at most {most} bits, got {text}")
    return bits + [default] * (most - len(bits))


def _nothing_left(instruction: Instruction, modifiers: dict[str, str]) -> None:
    if modifiers:
        raise instruction.fault(f"modifiers not known: {', '.join(modifiers)}")


def _take_sdwa_result(
    instruction: Instruction, modifiers: dict[str, str], results: Sequence[str]
) -> tuple[int, int] | None:
    """Which bits are written: (first, how many); None if all are. The others become zeros."""
    selector = modifiers.pop("dst_sel", "DWORD")
    unused = modifiers.pop("dst_unused", None)  # of a whole register nothing is unused
    if selector == "DWORD":
        return None
    if selector not in _SDWA_SELECTORS or unused != "UNUSED_PAD" or width(results[0]) != 32:
        raise instruction.fault("SDWA writes to part of a register, and keeps the rest")
    return _SDWA_SELECTORS[selector]


def _take_sdwa(instruction: Instruction, modifiers: dict[str, str]) -> dict[int, tuple[int, int]]:
    """Which bits of each source are read: (first, how many) by source."""
    selects = {}
    for n in range(2):
        selector = modifiers.pop(f"src{n}_sel", "DWORD")
        if selector not in _SDWA_SELECTORS:
            raise instruction.fault(f"SDWA selector not understood: {selector}")
        if selector != "DWORD":
            selects[n] = _SDWA_SELECTORS[selector]
    return selects


def _selected(instruction: Instruction, text: str, kind: str, first: int, count: int) -> Reader:
    """Reads some bits of a 32-bit source, extended by zeros."""
    if width(kind) not in range(count, 33) or operand(instruction, text).negated:
        raise instruction.fault(f"SDWA selects {count} bits for {kind}: {text}")
    read = vector_reader(instruction, text, "u32")
    mask = np.uint32((1 << count) - 1)
    unsigned = np.uint16 if width(kind) == 16 else np.uint32
    dtype = numpy_type(kind)
    return lambda group: (read(group) >> np.uint32(first) & mask).astype(unsigned).view(dtype)


_PACKED: dict[str, tuple[str, int, Callable[..., Array]]] = {
    "v_pk_add_f16": ("f16", 2, np.add),
    "v_pk_mul_f16": ("f16", 2, np.multiply),
    "v_pk_fma_f16": ("f16", 3, fma_f16),
    "v_pk_add_f32": ("f32", 2, np.add),
    "v_pk_mul_f32": ("f32", 2, np.multiply),
    "v_pk_fma_f32": ("f32", 3, fma_f32),
    "v_pk_mov_b32": ("f32", 2, np.copy),
}


def _packed(
    instruction: Instruction, kind: str, count: int, compute_one: Callable[..., Array]
) -> _Decoded:
    """Two operations: of f32 on pairs of registers, of f16 on the halves of registers.

    op_sel chooses from each source for the lower result, op_sel_hi for the upper.
    """
    if len(instruction.operands) != count + 1:
        raise instruction.fault(f"expected {count + 1} operands")
    modifiers = dict(instruction.modifiers)
    chosen = [
        _bits(instruction, modifiers.pop("op_sel", ""), count),
        _bits(instruction, modifiers.pop("op_sel_hi", ""), count, 1),
    ]
    negated = [_bits(instruction, modifiers.pop(name, ""), count) for name in ("neg_lo", "neg_hi")]
    _nothing_left(instruction, modifiers)
    target = destination(
        instruction, instruction.operands[0], vector=True, kind=f"b{2 * width(kind)}"
    )
    texts = instruction.operands[1:]
    moves = instruction.mnemonic == "v_pk_mov_b32"
    if moves:  # half n comes of source n, as op_sel chooses
        chosen[1] = chosen[0]
    one_of = _of_pair if kind == "f32" else _of_halves
    readers = [
        [
            one_of(instruction, text, chosen[half][n], bool(negated[half][n]))
            for n, text in enumerate(texts)
            if not moves or n == half
        ]
        for half in range(2)
    ]
    register = target.register
    assert register is not None
    parts = [Operand("", register.one(n)) for n in range(register.count)]

    def compute_pair(group: Group) -> list[_Result]:
        halves = [group.trace(row) for row in readers]
        return [
            _write(group, part, "f32", compute_one(*values), None, None, unknown)
            for part, (values, unknown) in zip(parts, halves, strict=True)
        ]

    def compute_halves(group: Group) -> list[_Result]:
        values, unknown = group.trace([*readers[0], *readers[1]])
        word = pack(compute_one(*values[:count]), compute_one(*values[count:]))
        return [_write(group, target, "b32", word, None, None, unknown)]

    compute = compute_pair if kind == "f32" else compute_halves
    return compute, [operand(instruction, text).register for text in texts], [register]


def _of_halves(instruction: Instruction, text: str, half: int, negated: bool) -> Reader:
    what = _packed_operand(instruction, text)
    if what.register is None and is_literal(text):
        raise instruction.fault(f"a literal of packed f16: {text}")
    read = vector_reader(instruction, text, "f16", half=half)
    return (lambda group: np.negative(read(group))) if negated else read


def _packed_operand(instruction: Instruction, text: str) -> Operand:
    what = operand(instruction, text)
    if what.negated or what.absolute or what.half is not None:
        raise instruction.fault(f"a packed operand takes neg_lo and neg_hi, got {text}")
    return what


def _of_pair(instruction: Instruction, text: str, half: int, negated: bool) -> Reader:
    what = _packed_operand(instruction, text)
    sign = np.float32(-1 if negated else 1)
    if what.register is None:
        value = constant(instruction, text, "f32")[None] * sign
        if half and value.view(np.uint32)[0, 0] & 0x7FFFFFFF:
            raise instruction.fault(f"the upper half of a constant: {text}")
        return lambda group: value
    if what.register.count != 2:
        raise instruction.fault(f"expected a pair of registers, got {text}")
    index = what.register.index + half
    if what.register.vector:
        read: Reader = lambda group: group.vector(index).view(np.float32)  # noqa: E731
    else:
        read = lambda group: group.scalar(index)[:, None].view(np.float32)  # noqa: E731
    return (lambda group: np.negative(read(group))) if negated else read


_MIXED = {"v_fma_mix_f32": -1, "v_fma_mixlo_f16": 0, "v_fma_mixhi_f16": 1}


def _mixed(instruction: Instruction, half: int) -> _Decoded:
    """An f32 FMA whose sources are f32, or where op_sel_hi says so a half of a register as f16.

    The f16 results are rounded twice, to f32 and to f16, as the documents write it.
    """
    if len(instruction.operands) != 4:
        raise instruction.fault("expected 4 operands")
    modifiers = dict(instruction.modifiers)
    upper = _bits(instruction, modifiers.pop("op_sel", ""), 3)
    is_f16 = _bits(instruction, modifiers.pop("op_sel_hi", ""), 3)
    _nothing_left(instruction, modifiers)
    target = destination(instruction, instruction.operands[0], vector=True, kind="b32")
    texts = instruction.operands[1:]
    readers = [_f16_or_f32(instruction, *what) for what in zip(texts, is_f16, upper, strict=True)]

    def compute(group: Group) -> list[_Result]:
        sources, unknown = group.trace(readers)
        value = fma_f32(*sources)
        if half < 0:
            return [_write(group, target, "f32", value, None, None, unknown)]
        return [_write(group, target, "f16", value.astype(np.float16), None, half, unknown)]

    return compute, [operand(instruction, t).register for t in texts], [target.register]


def _f16_or_f32(instruction: Instruction, text: str, is_f16: int, upper: int) -> Reader:
    if not is_f16:
        if upper:
            raise instruction.fault(f"op_sel of f32: {text}")
        return vector_reader(instruction, text, "f32")
    read = vector_reader(instruction, text, "f16", half=upper)
    return lambda group: read(group).astype(np.float32)
