"""Accesses of memory as text: SMEM, DS, FLAT, MUBUF, VFLAT, VBUFFER."""

from __future__ import annotations

import re

from iree_lnbwd.emulator.amdgcn.accesses import LOADS, STORES
from iree_lnbwd.emulator.amdgcn.disassembly.encoded import Encoded, run

# What the temporal hints of gfx12 are called, of a load and of a store; 3 with scope 3 is BYPASS.
_HINTS = {
    "LOAD": ("RT", "NT", "HT", "LU", "NT_RT", "RT_NT", "NT_HT"),
    "STORE": ("RT", "NT", "HT", "WB", "NT_RT", "RT_NT", "NT_HT", "NT_WB"),
}
_SCOPES = ("CU", "SE", "DEV", "SYS")
_LDS_VERB = re.compile(r"ds_(?:read|write|load|store)(?:2st64|2|_2addr_stride64|_2addr)?_")


def smem(encoded: Encoded) -> str:
    """A scalar load."""
    encoded.more()
    name = encoded.tables["smem"][encoded.bits(18, 13) if encoded.gfx12 else encoded.bits(25, 18)]
    words = _words_of(name.removeprefix("s_load_"))
    base = encoded.scalar(2 * encoded.bits(5, 0), 2)
    into = encoded.scalar(encoded.bits(12, 6), words)
    high = 55 if encoded.gfx12 else 52
    number = encoded.bits(high, 32)
    number -= number >> high - 32 << high - 31
    has_number, has_register = True, encoded.peek(63, 57) != 124
    if encoded.gfx9:
        has_number, has_register = bool(encoded.bits(17, 17)), bool(encoded.bits(14, 14))
    register = encoded.scalar(encoded.bits(63, 57)) if has_register else ""
    encoded.bits(63, 57)
    offset = register or hex(number)
    extra = f" offset:{number:#x}" if register and has_number and number else ""
    if encoded.gfx12:
        extra += _hints(encoded, "LOAD", encoded.bits(24, 23), encoded.bits(22, 21))
    return f"{name} {into}, {base}, {offset}{extra}"


def ds(encoded: Encoded) -> str:
    """An access of LDS, or an exchange between lanes."""
    encoded.more()
    name = encoded.tables["ds"][encoded.bits(24, 17) if encoded.gfx9 else encoded.bits(25, 18)]
    address = f"v{encoded.bits(39, 32)}"
    data = [encoded.bits(47, 40), encoded.bits(55, 48)]
    into, low, high = encoded.bits(63, 56), encoded.bits(7, 0), encoded.bits(15, 8)
    two = re.search(r"(read|write|load_|store_)2", name) is not None
    offset = f" offset:{high << 8 | low}" if high or low else ""
    if two:
        offset = "".join(f" offset{n}:{v}" for n, v in enumerate((low, high)) if v)
    if name == "ds_swizzle_b32":
        return f"{name} v{into}, {address}{offset}"
    if name == "ds_bpermute_b32":
        return f"{name} v{into}, {address}, v{data[0]}{offset}"
    what, letter = _LDS_VERB.sub("", name), encoded.moved(25)
    item = LOADS[what] if what in LOADS else STORES[what]
    if "read" in name or "load" in name:
        moved = [run(letter, into, (1 + two) * item.registers)]
        return f"{name} {', '.join([*moved, address])}{offset}"
    moved = [run(letter, number, item.registers) for number in data[: 1 + two]]
    return f"{name} {', '.join([address, *moved])}{offset}"


def flat(encoded: Encoded) -> str:
    """An access of global memory or scratch, before gfx12."""
    encoded.more()
    segment = encoded.bits(15, 14) if encoded.gfx9 else encoded.bits(17, 16)
    kind = {1: "scratch", 2: "global"}[segment]
    name = encoded.tables["global"][encoded.bits(24, 18)].replace("global", kind)
    offset = encoded.bits(12, 0)
    offset -= offset >> 12 << 13
    base, data = encoded.bits(54, 48), encoded.bits(47, 40)
    address, into = encoded.bits(39, 32), encoded.bits(63, 56)
    off = base == (127 if encoded.gfx9 else 124)
    if kind == "global":
        at = run("v", address, 2 if off else 1)
        scalar = "off" if off else encoded.scalar(base, 2)
    else:  # a bit says whether there is an address
        at = f"v{address}" if encoded.bits(*((13, 13) if encoded.gfx9 else (55, 55))) else "off"
        scalar = "off" if off else encoded.scalar(base)
    tail = f"{scalar}" + (f" offset:{offset}" if offset else "")
    if encoded.gfx9:
        tail += _policy(encoded, 16, 17, 25 if encoded.has_sc else 0)
    else:
        tail += _policy(encoded, 14, 15, 13)
    verb, count = _moved(name)
    letter = encoded.moved(55)
    if verb == "load":
        return f"{name} {run(letter, into, count)}, {at}, {tail}"
    return f"{name} {at}, {run(letter, data, count)}, {tail}"


def vflat(encoded: Encoded) -> str:
    """An access of global memory or scratch, since gfx12."""
    encoded.more()
    encoded.more()
    kind = {1: "scratch", 2: "global"}[encoded.bits(25, 24)]
    name = encoded.tables["global"][encoded.bits(21, 14)].replace("global", kind)
    scope, hint = encoded.bits(51, 50), encoded.bits(54, 52)
    base, address = encoded.bits(6, 0), encoded.bits(71, 64)
    into, data = encoded.bits(39, 32), encoded.bits(62, 55)
    has_address = encoded.bits(49, 49)
    if "_load_" not in name and "_store_" not in name:
        return name + _hints(encoded, "LOAD", hint, scope)
    off = base == 124
    if kind == "global":
        at = run("v", address, 2 if off else 1)
        scalar = "off" if off else encoded.scalar(base, 2)
    else:
        at = f"v{address}" if has_address else "off"
        scalar = "off" if off else encoded.scalar(base)
    tail = scalar + _offset_of_24_bits(encoded)
    verb, count = _moved(name)
    tail += _hints(encoded, verb.upper(), hint, scope)
    if verb == "load":
        return f"{name} {run('v', into, count)}, {at}, {tail}"
    return f"{name} {at}, {run('v', data, count)}, {tail}"


def vbuffer(encoded: Encoded) -> str:
    """An access of a buffer, since gfx12."""
    encoded.more()
    encoded.more()
    name = encoded.tables["mubuf"][encoded.bits(21, 14)]
    verb, count = _moved(name)
    hints = _hints(encoded, verb.upper(), encoded.bits(54, 52), encoded.bits(51, 50))
    soffset = encoded.bits(6, 0)
    descriptor = encoded.scalar(encoded.bits(49, 41), 4)
    data, at = encoded.bits(39, 32), encoded.bits(71, 64)
    offen = encoded.bits(62, 62)
    if encoded.bits(61, 55) != 1:  # a format, of which raw buffers have none
        raise KeyError("format")
    text = f"{name} {run('v', data, count)}, {f'v{at}' if offen else 'off'}, {descriptor}, "
    text += encoded.scalar(soffset) + (" offen" if offen else "")
    return text + _offset_of_24_bits(encoded) + hints


def mubuf(encoded: Encoded) -> str:
    """An access of a buffer, before gfx12."""
    encoded.more()
    number = encoded.bits(24, 18) if encoded.gfx9 else encoded.bits(25, 18)
    name = encoded.tables["mubuf"][number]
    if encoded.gfx9:
        policy = _policy(encoded, 14, 17, 15 if encoded.has_sc else 0)
    else:
        policy = _policy(encoded, 14, 12, 13)
    if not name.startswith(("buffer_load", "buffer_store")):
        return name + policy
    offen = encoded.bits(12, 12) if encoded.gfx9 else encoded.bits(54, 54)
    offset, soffset = encoded.bits(11, 0), encoded.bits(63, 56)
    descriptor = encoded.scalar(4 * encoded.bits(52, 48), 4)
    data, at = encoded.bits(47, 40), encoded.bits(39, 32)
    _, count = _moved(name)
    where = f"v{at}" if offen else "off"
    text = f"{name} {run(encoded.moved(55), data, count)}, {where}, {descriptor}, "
    text += encoded.source(soffset, "u32") + (" offen" if offen else "")
    return text + (f" offset:{offset}" if offset else "") + policy


def _words_of(name: str) -> int:
    if name in ("u8", "i8", "u16", "i16"):
        return 1
    if name.startswith("b"):
        return int(name[1:]) // 32
    return int(name.removeprefix("dword").removeprefix("x") or 1)


def _policy(encoded: Encoded, sc0: int, nt: int, sc1: int) -> str:
    """Cache policies, by the bits that say them."""
    names = ("sc0", "nt", "sc1") if encoded.has_sc else ("glc", "slc", "dlc")
    return "".join(
        f" {name}"
        for name, bit in zip(names, (sc0, nt, sc1), strict=True)
        if bit and encoded.bits(bit, bit)
    )


def _hints(encoded: Encoded, verb: str, hint: int, scope: int) -> str:
    """What gfx12 has in place of cache policies."""
    name = "BYPASS" if hint == scope == 3 else _HINTS[verb][hint]
    text = f" th:TH_{verb}_{name}" if hint else ""
    return text + (f" scope:SCOPE_{_SCOPES[scope]}" if scope else "")


def _offset_of_24_bits(encoded: Encoded) -> str:
    offset = encoded.bits(95, 72)
    offset -= offset >> 23 << 24
    return f" offset:{offset}" if offset else ""


def _moved(name: str) -> tuple[str, int]:
    """Load or store, and how many registers a lane moves."""
    _, verb, what = name.split("_", 2)
    return verb, (LOADS if verb == "load" else STORES)[what].registers
