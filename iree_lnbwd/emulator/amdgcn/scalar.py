"""Scalar ALU instructions: one value for each wave.

Source: AMD's ISA documents, chapters SOP1, SOP2, SOPC and SOPK.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.floats import fma_f32, maximum, minimum
from iree_lnbwd.emulator.amdgcn.operands import (
    constant,
    destination,
    operand,
    scalar_reader,
    write_scalar,
)
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, numbers
from iree_lnbwd.emulator.amdgcn.vector_table import ROUNDINGS, VECTOR
from iree_lnbwd.emulator.amdgcn.waves import EXEC, Group, Register
from iree_lnbwd.emulator.integers import (
    leading_zeros,
    population,
    reverse_bits,
    sign_bits,
    trailing_zeros,
)
from iree_lnbwd.emulator.launch import Array

_U32, _U64 = np.uint32, np.uint64


@dataclass(frozen=True)
class Scalar:
    """One instruction's arithmetic.

    Attributes:
        result: Type of what it writes; empty for a comparison, which only sets SCC.
        sources: Types of what it reads.
        compute: From arrays of the sources to the result; with ``sets_scc`` to (result, SCC); a
            comparison to SCC.
        sets_scc: It writes SCC.
        reads_scc: SCC is its last argument.
        immediate: Its last operand is a 16-bit constant (SOPK), extended as its type says.
        accumulates: The destination is its first source as well.
    """

    result: str
    sources: tuple[str, ...]
    compute: Callable[..., Any]
    sets_scc: bool = False
    reads_scc: bool = False
    immediate: bool = False
    accumulates: bool = False


def _wide(value: Array) -> Array:
    return value.astype(_U64)


def _nonzero(compute: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """SCC says whether the result is not 0."""

    def both(*sources: Array) -> tuple[Array, Array]:
        value = compute(*sources)
        return value, value != 0

    return both


def _carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b) + (_U64(0) if carry is None else _wide(carry))
    return total.astype(_U32), total >> _U64(32) != 0


def _borrow(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
    taken = _wide(b) + (_U64(0) if borrow is None else _wide(borrow))
    return (_wide(a) - taken).astype(_U32), taken > _wide(a)


def _signed_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    return total, ((a < 0) == (b < 0)) & ((total < 0) != (a < 0))


def _signed_difference(a: Array, b: Array) -> tuple[Array, Array]:
    total = a - b
    return total, ((a < 0) != (b < 0)) & ((total < 0) != (a < 0))


def _smaller(a: Array, b: Array) -> tuple[Array, Array]:
    return np.minimum(a, b), a < b


def _larger(a: Array, b: Array) -> tuple[Array, Array]:
    return np.maximum(a, b), a > b


def _shift(compute: Callable[[Array, Array], Array], bits: int) -> Callable[..., Any]:
    def shifted(value: Array, amount: Array) -> Array:
        kind = value.dtype.type
        return compute(value, (amount & _U32(bits - 1)).astype(kind))

    return _nonzero(shifted)


def _bits_of_u32(value: Array, field: Array) -> Array:
    offset, count = field & _U32(31), field >> _U32(16) & _U32(0x7F)
    kept = (_U64(1) << _wide(np.minimum(count, _U32(32)))) - _U64(1)
    return (_wide(value) >> _wide(offset) & kept).astype(_U32)


def _shift_and_add(amount: int) -> Callable[[Array, Array], tuple[Array, Array]]:
    def add(a: Array, b: Array) -> tuple[Array, Array]:
        total = (_wide(a) << _U64(amount)) + _wide(b)
        return total.astype(_U32), total >> _U64(32) != 0

    return add


def _high_product(a: Array, b: Array) -> Array:
    return (_wide(a) * _wide(b) >> _U64(32)).astype(_U32)


def _high_product_signed(a: Array, b: Array) -> Array:
    return (a.astype(np.int64) * b.astype(np.int64) >> np.int64(32)).astype(np.int32)


def _with_bit(bit: int, bits: int) -> Callable[[Array, Array], Array]:
    def replaced(before: Array, which: Array) -> Array:
        one: Array = np.left_shift(1, which & _U32(bits - 1), dtype=before.dtype)
        return before | one if bit else before & ~one

    return replaced


def _two(kind: str, compute: Callable[..., Any], **flags: bool) -> Scalar:
    return Scalar(kind, (kind, kind), compute, **flags)


def _logic() -> dict[str, Scalar]:
    operations: dict[str, Callable[[Array, Array], Array]] = {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "andn2": lambda a, b: a & ~b,
        "orn2": lambda a, b: a | ~b,
        "nand": lambda a, b: ~(a & b),
        "nor": lambda a, b: ~(a | b),
        "xnor": lambda a, b: ~(a ^ b),
    }
    operations["and_not1"], operations["or_not1"] = operations["andn2"], operations["orn2"]
    table = {}
    for bits in (32, 64):
        kind = f"u{bits}"
        for name, compute in operations.items():
            table[f"s_{name}_b{bits}"] = _two(kind, _nonzero(compute), sets_scc=True)
        table[f"s_brev_b{bits}"] = Scalar(kind, (kind,), reverse_bits)
        table[f"s_not_b{bits}"] = Scalar(kind, (kind,), _nonzero(np.invert), sets_scc=True)
        table[f"s_mov_b{bits}"] = Scalar(kind, (kind,), np.copy)
        table[f"s_cselect_b{bits}"] = Scalar(
            kind, (kind, kind), lambda a, b, scc: np.where(scc, a, b), reads_scc=True
        )
        signed, suffix = f"i{bits}", "" if bits == 32 else "_i64"
        for names, of, count in (  # gfx9; gfx11 and later
            ((f"s_ff1_i32_b{bits}", f"s_ctz_i32_b{bits}"), kind, trailing_zeros),
            ((f"s_flbit_i32_b{bits}", f"s_clz_i32_u{bits}"), kind, leading_zeros),
            ((f"s_flbit_i32{suffix}", f"s_cls_i32{suffix}"), signed, sign_bits),
        ):
            table |= dict.fromkeys(names, Scalar("i32", (of,), count))
        for bit in (0, 1):
            table[f"s_bitset{bit}_b{bits}"] = Scalar(
                kind, (kind, "u32"), _with_bit(bit, bits), accumulates=True
            )
        for bit, counted in ((0, lambda a: population(~a)), (1, population)):
            table[f"s_bcnt{bit}_i32_b{bits}"] = Scalar(
                "u32", (kind,), _nonzero(counted), sets_scc=True
            )
        for name, compute, letter in (
            ("lshl", np.left_shift, "u"),
            ("lshr", np.right_shift, "u"),
            ("ashr", np.right_shift, "i"),
        ):
            value = f"{letter}{bits}"
            suffix = value if letter == "i" else f"b{bits}"
            table[f"s_{name}_{suffix}"] = Scalar(
                value, (value, "u32"), _shift(compute, bits), sets_scc=True
            )
    return table


def _comparisons() -> dict[str, Scalar]:
    relations = {
        "eq": np.equal,
        "lg": np.not_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "lt": np.less,
        "le": np.less_equal,
    }
    table = {}
    for name, relation in relations.items():
        for kind in ("u32", "i32", "u64"):
            table[f"s_cmp_{name}_{kind}"] = _two_compared(kind, relation)
        for kind in ("i32", "u32"):
            table[f"s_cmpk_{name}_{kind}"] = _two_compared(kind, relation, immediate=True)
    for bit in (0, 1):
        table[f"s_bitcmp{bit}_b32"] = Scalar(
            "",
            ("u32", "u32"),
            lambda a, b, bit=bit: (a >> (b & _U32(31)) & _U32(1)) == bit,
            sets_scc=True,
        )
    return table


def _two_compared(kind: str, relation: Callable[..., Array], *, immediate: bool = False) -> Scalar:
    return Scalar("", (kind, kind), relation, sets_scc=True, immediate=immediate)


def _floats() -> dict[str, Scalar]:
    """gfx12's: what vector instructions compute, for one value."""
    table = {}
    for kind in ("f16", "f32"):
        for name in ("add", "sub", "mul"):
            table[f"s_{name}_{kind}"] = _two(kind, VECTOR[f"v_{name}_{kind}"].compute)
        table[f"s_min_num_{kind}"] = _two(kind, minimum)
        table[f"s_max_num_{kind}"] = _two(kind, maximum)
    for name, vector in VECTOR.items():
        if re.fullmatch(r"v_cmp_\w+_f(16|32)", name) and vector.sources[0] == vector.sources[1]:
            table[f"s_{name[2:]}"] = _two_compared(vector.sources[0], vector.compute)
    for pair in ("f32 i32", "f32 u32", "i32 f32", "u32 f32", "f16 f32", "f32 f16"):
        to, of = pair.split()
        table[f"s_cvt_{to}_{of}"] = Scalar(to, (of,), VECTOR[f"v_cvt_{to}_{of}"].compute)
    for name in ("rcp", "rsq", "sqrt"):
        table[f"v_s_{name}_f32"] = Scalar("f32", ("f32",), VECTOR[f"v_{name}_f32"].compute)
    for name, compute in ROUNDINGS.items():
        table[f"s_{name}_f32"] = Scalar("f32", ("f32",), compute)
    return table | {
        "s_fmac_f32": Scalar(
            "f32", ("f32",) * 3, lambda d, a, b: fma_f32(a, b, d), accumulates=True
        ),
        "s_cvt_hi_f32_f16": Scalar(
            "f32",
            ("u32",),
            lambda a: (a >> _U32(16)).astype(np.uint16).view(np.float16).astype(np.float32),
        ),
    }


SCALAR: Mapping[str, Scalar] = MappingProxyType(
    _logic()
    | _comparisons()
    | _floats()
    | {
        "s_add_u32": _two("u32", _carry, sets_scc=True),
        "s_addc_u32": _two("u32", _carry, sets_scc=True, reads_scc=True),
        "s_sub_u32": _two("u32", _borrow, sets_scc=True),
        "s_subb_u32": _two("u32", _borrow, sets_scc=True, reads_scc=True),
        # gfx12's names of the same.
        "s_add_co_u32": _two("u32", _carry, sets_scc=True),
        "s_add_co_ci_u32": _two("u32", _carry, sets_scc=True, reads_scc=True),
        "s_sub_co_u32": _two("u32", _borrow, sets_scc=True),
        "s_sub_co_ci_u32": _two("u32", _borrow, sets_scc=True, reads_scc=True),
        "s_add_i32": _two("i32", _signed_sum, sets_scc=True),
        "s_sub_i32": _two("i32", _signed_difference, sets_scc=True),
        "s_add_co_i32": _two("i32", _signed_sum, sets_scc=True),
        "s_sub_co_i32": _two("i32", _signed_difference, sets_scc=True),
        "s_add_nc_u64": _two("u64", np.add),
        "s_sub_nc_u64": _two("u64", np.subtract),
        **{
            f"s_lshl{n}_add_u32": _two("u32", _shift_and_add(n), sets_scc=True) for n in range(1, 5)
        },
        "s_mul_i32": _two("i32", np.multiply),
        "s_mul_u64": _two("u64", np.multiply),
        "s_mul_hi_u32": _two("u32", _high_product),
        "s_mul_hi_i32": _two("i32", _high_product_signed),
        "s_min_u32": _two("u32", _smaller, sets_scc=True),
        "s_min_i32": _two("i32", _smaller, sets_scc=True),
        "s_max_u32": _two("u32", _larger, sets_scc=True),
        "s_max_i32": _two("i32", _larger, sets_scc=True),
        "s_abs_i32": Scalar("i32", ("i32",), _nonzero(np.abs), sets_scc=True),
        "s_bfe_u32": Scalar("u32", ("u32", "u32"), _nonzero(_bits_of_u32), sets_scc=True),
        "s_sext_i32_i16": Scalar(
            "i32", ("u32",), lambda a: a.astype(np.uint16).view(np.int16).astype(np.int32)
        ),
        "s_sext_i32_i8": Scalar(
            "i32", ("u32",), lambda a: a.astype(np.uint8).view(np.int8).astype(np.int32)
        ),
        "s_pack_ll_b32_b16": _two("u32", lambda a, b: a & _U32(0xFFFF) | b << _U32(16)),
        "s_movk_i32": Scalar("i32", ("i32",), np.copy, immediate=True),
        "s_addk_i32": _two("i32", _signed_sum, sets_scc=True, immediate=True, accumulates=True),
        "s_addk_co_i32": _two("i32", _signed_sum, sets_scc=True, immediate=True, accumulates=True),
        "s_mulk_i32": _two("i32", np.multiply, immediate=True, accumulates=True),
    }
)


def decode_scalar(instruction: Instruction, lanes: int) -> Step | None:
    """A scalar ALU instruction, ready to run; None where it is none that is known.

    Raises:
        Fault: An operand is not understood.
    """
    if (saving := _SAVE_EXEC.get(instruction.mnemonic)) is not None:
        return _save_exec(instruction, saving, lanes)
    operation = SCALAR.get(instruction.mnemonic)
    if operation is None:
        return None
    if instruction.modifiers:
        raise instruction.fault("modifiers are not expected")
    texts = list(instruction.operands)
    target = None
    if operation.result:
        target = destination(instruction, texts[0], vector=False, kind=operation.result).register
    sources = texts if target is None else texts if operation.accumulates else texts[1:]
    if len(sources) != len(operation.sources):
        raise instruction.fault(f"{len(texts)} operands were not expected")
    readers = [
        scalar_reader(instruction, text, kind)
        for text, kind in zip(sources, operation.sources, strict=True)
    ]
    if operation.immediate:
        signed = operation.sources[-1] == "i32"
        narrow = constant(instruction, sources[-1], "u32").astype(np.uint16)
        value = narrow.view(np.int16).astype(np.int32) if signed else narrow.astype(_U32)
        readers[-1] = lambda group: value
    if operation.reads_scc:
        readers.append(lambda group: group.scc())

    def run(group: Group, machine: Machine) -> None:
        result = operation.compute(*(read(group) for read in readers))
        scc = None
        if target is None:
            scc = result
        elif operation.sets_scc:
            result, scc = result
        if target is not None:
            write_scalar(group, target, operation.result, result)
        if scc is not None:
            group.set_scc(scc)

    used = [operand(instruction, text).register for text in sources]
    return Step(instruction, run, numbers(used), numbers([target]))


_SAVE_EXEC: dict[str, Callable[[Array, Array], Array]] = {
    f"s_{name}_saveexec_b{bits}": compute
    for bits in (32, 64)
    for name, compute in (
        ("and", lambda source, mask: source & mask),
        ("or", lambda source, mask: source | mask),
        ("xor", lambda source, mask: source ^ mask),
        ("andn2", lambda source, mask: source & ~mask),
        ("and_not1", lambda source, mask: source & ~mask),
    )
}


def _save_exec(
    instruction: Instruction, compute: Callable[[Array, Array], Array], lanes: int
) -> Step:
    """EXEC to a register, and EXEC combined with a source to EXEC; SCC: it is not 0."""
    kind = f"u{lanes}"
    target = destination(instruction, instruction.operands[0], vector=False).register
    read = scalar_reader(instruction, instruction.operands[1], kind)
    read_exec = scalar_reader(instruction, "exec" if lanes == 64 else "exec_lo", kind)
    used = operand(instruction, instruction.operands[1]).register
    execution = Register(False, EXEC, lanes // 32)
    assert target is not None

    def run(group: Group, machine: Machine) -> None:
        saved = read_exec(group).copy()
        mask = compute(read(group), saved)
        write_scalar(group, target, kind, saved)
        write_scalar(group, execution, kind, mask)
        group.set_scc(mask != 0)

    return Step(instruction, run, numbers([used]), numbers([target]))
