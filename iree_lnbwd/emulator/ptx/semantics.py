"""The results of PTX instructions without side effects, as functions of arrays over lanes.

`find` takes an opcode with its modifiers apart and says which types its operands have and what it
computes from them. Source: NVIDIA, "Parallel Thread Execution ISA", chapter 9.7. Types are PTX's
("s32", "f32", "b16", ...); a function gets one array for each source operand, of the NumPy type of
`DTYPES`, and returns one of its result's.

Arithmetic rounds to nearest even and keeps subnormals, but for ``.ftz``. NaN results are NVIDIA's
canonical NaN. Instructions with ``.approx`` are computed as exactly as NumPy does; hardware may be
off by the ulps that the manual states, so their results are not comparable bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from iree_lnbwd.emulator import floats
from iree_lnbwd.emulator.ptx.conversions import cvt
from iree_lnbwd.emulator.ptx.float_arithmetic import float_arithmetic, one_operand
from iree_lnbwd.emulator.ptx.integer_arithmetic import (
    abs_or_neg,
    add_or_sub,
    bit_field,
    copysign,
    count_bits,
    div,
    div_or_rem,
    find_bit,
    funnel_shift,
    logic,
    mad,
    min_or_max,
    mul,
    prmt,
    reversed_bits,
    shift,
)
from iree_lnbwd.emulator.ptx.types import (
    DTYPES,
    Array,
    Function,
    Semantics,
    UnknownInstructionError,
    is_float,
)


def find(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    """The semantics of an instruction.

    Raises:
        UnknownInstructionError: Naming it.
    """
    finder = _FINDERS.get(opcode)
    if finder is None or not modifiers:
        raise UnknownInstructionError(".".join((opcode, *modifiers)))
    try:
        found = finder(opcode, modifiers)
    except (KeyError, ValueError) as error:
        raise UnknownInstructionError(".".join((opcode, *modifiers))) from error
    if {found.result, *found.sources} - DTYPES.keys():
        raise UnknownInstructionError(".".join((opcode, *modifiers)))
    return found


_COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _float_comparison(name: str) -> Function:
    if name == "num":
        return lambda a, b: ~_unordered(a, b)
    if name == "nan":
        return _unordered
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        ordered = _COMPARISONS[name[:2]]
        return lambda a, b: ordered(a, b) | _unordered(a, b)
    ordered = _COMPARISONS[name]
    return lambda a, b: ordered(a, b) & ~_unordered(a, b)  # also "ne" is false of NaN


def _setp(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    name, *how, type_ = modifiers
    of_floats = is_float(type_)
    flushes = "ftz" in how
    if of_floats and type_ not in (("f32",) if flushes else ("f16", "f32", "f64")):
        raise UnknownInstructionError(opcode)
    plain = _float_comparison(name) if of_floats else _COMPARISONS[name]

    def compare(a: Array, b: Array) -> Array:
        if type_ == "f16":  # registers have its bits
            return plain(a.view(np.float16), b.view(np.float16))
        return plain(floats.flush32(a), floats.flush32(b)) if flushes else plain(a, b)

    how = [word for word in how if word != "ftz"]
    if not how:
        return Semantics("pred", (type_, type_), compare)
    (logic,) = how
    combinations: dict[str, Function] = {
        "and": np.logical_and,
        "or": np.logical_or,
        "xor": np.logical_xor,
    }
    combine = combinations[logic]
    return Semantics(
        "pred", (type_, type_, "pred"), lambda a, b, other: combine(compare(a, b), other)
    )


def _selp(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    return Semantics(type_, (type_, type_, "pred"), lambda a, b, chosen: np.where(chosen, a, b))


def _mov(opcode: str, modifiers: tuple[str, ...]) -> Semantics:
    (type_,) = modifiers
    return Semantics(type_, (type_,), lambda a: a)


_FINDERS: dict[str, Callable[[str, tuple[str, ...]], Semantics]] = {
    "add": add_or_sub,
    "sub": add_or_sub,
    "mul": mul,
    "mad": mad,
    "fma": float_arithmetic,
    "div": div,
    "rem": div_or_rem,
    "min": min_or_max,
    "max": min_or_max,
    "abs": abs_or_neg,
    "neg": abs_or_neg,
    "copysign": copysign,
    "and": logic,
    "or": logic,
    "xor": logic,
    "not": logic,
    "shl": shift,
    "shr": shift,
    "shf": funnel_shift,
    "bfe": bit_field,
    "bfi": bit_field,
    "prmt": prmt,
    "popc": count_bits,
    "clz": count_bits,
    "brev": reversed_bits,
    "bfind": find_bit,
    "rcp": one_operand,
    "sqrt": one_operand,
    "rsqrt": one_operand,
    "ex2": one_operand,
    "lg2": one_operand,
    "setp": _setp,
    "selp": _selp,
    "mov": _mov,
    "cvt": cvt,
}
