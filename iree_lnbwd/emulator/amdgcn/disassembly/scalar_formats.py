"""Scalar instructions as text: SOP1, SOP2, SOPC, SOPK, SOPP."""

from __future__ import annotations

import re

from iree_lnbwd.emulator.amdgcn.disassembly.encoded import Encoded
from iree_lnbwd.emulator.amdgcn.operands import width
from iree_lnbwd.emulator.amdgcn.scalar import SCALAR

_BRANCHES = re.compile(r"s_c?branch")


def sop1(encoded: Encoded) -> str:
    """A scalar instruction of one source."""
    name = encoded.tables["sop1"][encoded.bits(15, 8)]
    if name == "s_barrier_signal":
        return f"{name} {encoded.source(encoded.bits(7, 0), 'i32')}"
    result, kinds = _scalar_signature(name)
    target = encoded.scalar(encoded.bits(22, 16), max(1, width(result) // 32))
    kind = kinds[-1]  # without the destination, where that is a source as well
    return f"{name} {target}, {encoded.source(encoded.bits(7, 0), kind)}"


def sop2(encoded: Encoded) -> str:
    """A scalar instruction of two sources."""
    name = encoded.tables["sop2"][encoded.bits(29, 23)]
    result, kinds = _scalar_signature(name)
    target = encoded.scalar(encoded.bits(22, 16), max(1, width(result) // 32))
    kinds = kinds[-2:]  # without the destination, where that is a source as well
    codes = (encoded.bits(7, 0), encoded.bits(15, 8))
    sources = [encoded.source(code, kind) for code, kind in zip(codes, kinds, strict=True)]
    return f"{name} {target}, {', '.join(sources)}"


def sopc(encoded: Encoded) -> str:
    """A scalar comparison."""
    name = encoded.tables["sopc"][encoded.bits(22, 16)]
    codes = (encoded.bits(7, 0), encoded.bits(15, 8))
    kinds = SCALAR[name].sources
    sources = [encoded.source(code, kind) for code, kind in zip(codes, kinds, strict=True)]
    return f"{name} {', '.join(sources)}"


def sopk(encoded: Encoded) -> str:
    """A scalar instruction of a register and a constant."""
    name = encoded.tables["sopk"][encoded.bits(27, 23)]
    register = encoded.scalar(encoded.bits(22, 16))
    return f"{name} {register}, {encoded.bits(15, 0):#x}"


def sopp(encoded: Encoded) -> str:
    """Branches, waits, barriers and the like."""
    name = encoded.tables["sopp"][encoded.bits(22, 16)]
    value = encoded.bits(15, 0)
    if _BRANCHES.match(name):
        return f"{name} {encoded.branch_to(value - (value >> 15 << 16))}"
    if name == "s_waitcnt":
        return f"{name} {_waits(encoded, value)}"
    if name == "s_sendmsg":
        return f"{name} {'sendmsg(MSG_DEALLOC_VGPRS)' if value == 3 else hex(value)}"
    if name in ("s_barrier", "s_endpgm", "s_code_end", "s_wait_idle") and value == 0:
        return name
    if name == "s_barrier_wait":
        return f"{name} {value - (value >> 15 << 16)}"
    return f"{name} {value:#x}"


def _scalar_signature(name: str) -> tuple[str, tuple[str, ...]]:
    if "_saveexec_" in name:
        kind = f"u{name[-2:]}"
        return kind, (kind,)
    return SCALAR[name].result, SCALAR[name].sources


def _waits(encoded: Encoded, value: int) -> str:
    if encoded.gfx9:
        fields = {"vmcnt": (value & 15 | value >> 14 << 4, 63)}
        fields |= {"expcnt": (value >> 4 & 7, 7), "lgkmcnt": (value >> 8 & 15, 15)}
    else:
        fields = {"vmcnt": (value >> 10, 63)}
        fields |= {"expcnt": (value & 7, 7), "lgkmcnt": (value >> 4 & 63, 63)}
    said = [f"{name}({count})" for name, (count, most) in fields.items() if count != most]
    return " ".join(said) or "vmcnt(63)"
