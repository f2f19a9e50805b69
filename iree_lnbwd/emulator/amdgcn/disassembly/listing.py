"""The text of a code object: its kernels, instruction by instruction."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping

from iree_lnbwd.emulator.amdgcn.disassembly.code_objects import (
    NOTES,
    PROCESSORS,
    descriptor,
    launch,
    sections,
    symbols,
    undamaged,
)
from iree_lnbwd.emulator.amdgcn.disassembly.encoded import LITERAL, Encoded
from iree_lnbwd.emulator.amdgcn.disassembly.memory_formats import (
    ds,
    flat,
    mubuf,
    smem,
    vbuffer,
    vflat,
)
from iree_lnbwd.emulator.amdgcn.disassembly.scalar_formats import sop1, sop2, sopc, sopk, sopp
from iree_lnbwd.emulator.amdgcn.disassembly.vector_formats import (
    DPP,
    SDWA,
    vop1,
    vop2,
    vop3,
    vop3p,
    vopc,
    vopd,
)
from iree_lnbwd.emulator.amdgcn.metadata import Metadata, of_kernels
from iree_lnbwd.emulator.launch import Fault

_PRELOAD_PADDING = 256
_NAME = re.compile(r"[\w.$]+")  # of a kernel
# Words of an instruction of each encoding, without a literal; and its sources, which may say that
# one follows: lowest bit, and how many.
_WORDS = dict.fromkeys(("sopp", "sopc", "sop1", "sopk", "sop2", "vop1", "vopc", "vop2"), 1)
_WORDS |= dict.fromkeys(("vop3p", "vop3", "smem", "ds", "flat", "mubuf", "vopd"), 2)
_WORDS |= dict.fromkeys(("vflat", "vbuffer"), 3)
_SOURCES: Mapping[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("sopc", "sop2"), ((0, 8), (8, 8))),
    "sop1": ((0, 8),),
    **dict.fromkeys(("vop1", "vopc", "vop2"), ((0, 9),)),
    **dict.fromkeys(("vop3", "vop3p"), ((32, 9), (41, 9), (50, 9))),
    "vopd": ((0, 9), (32, 9)),
}
_MOST_SHOWN = 4  # words of an instruction that is not known


def disassemble(code_object: bytes, *, as_far_as_known: bool = False) -> str:
    """The kernels of a code object, an ELF file, as assembly, with their descriptors.

    Args:
        code_object: Its bytes.
        as_far_as_known: Instructions that are not known are "unknown_vop3p 0x..." in the text, by
            their encoding; of a kernel with an encoding that is not known, that is the last.

    Raises:
        Fault: Something in it is not known here, or damaged.
    """
    with undamaged():
        return _disassemble(code_object, as_far_as_known)


def _disassemble(code_object: bytes, as_far_as_known: bool) -> str:
    found = symbols(code_object)
    (flags,) = struct.unpack_from("<I", code_object, 0x30)
    target = PROCESSORS.get(flags & 0xFF)
    if target is None:
        raise Fault(f"a code object for a processor that is not known: flags {flags:#x}")
    notes = [s.content for s in sections(code_object) if s.kind == NOTES]
    metadata = of_kernels(b"".join(notes))
    parts = []
    for name, content in found.items():
        kernel = name.removesuffix(".kd")
        if kernel == name:
            continue
        if not _NAME.fullmatch(kernel) or kernel not in found:
            raise Fault(f"a code object with a descriptor, but no code, of {kernel!r}")
        directives = descriptor(content, target) | launch(metadata.get(kernel, Metadata()))
        preloads = bool(directives["user_sgpr_kernarg_preload_length"])
        lanes = 32 if directives["wavefront_size32"] else 64
        code = Encoded(kernel, found[kernel], target, lanes)
        body = _text(code, _PRELOAD_PADDING if preloads else None, as_far_as_known=as_far_as_known)
        lines = (f"\t\t.amdhsa_{key} {value}" for key, value in directives.items())
        parts.append(
            f"\t.globl {kernel}\n\t.p2align 8\n\t.type {kernel},@function\n{kernel}:\n{body}"
            f".Lfunc_end_{kernel}:\n\t.size {kernel}, .Lfunc_end_{kernel}-{kernel}\n"
            f"\t.amdhsa_kernel {kernel}\n" + "\n".join(lines) + "\n\t.end_amdhsa_kernel\n"
        )
    return f'\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"\n\t.text\n' + "".join(parts)


def _text(code: Encoded, padding: int | None, *, as_far_as_known: bool) -> str:
    """All of a function, with a mark where the padding for preloaded arguments ends."""
    lines = []
    while code.at < len(code.words):
        at = 4 * code.at
        lines.append((at, _instruction(code, as_far_as_known=as_far_as_known)))
    marks = {} if padding is None else {padding: "\t.p2align 8\n"}
    return "".join(
        marks.get(at, "") + (f"{code.label(at)}:\n" if at in code.labels else "") + f"\t{line}\n"
        for at, line in lines
    )


def _instruction(code: Encoded, *, as_far_as_known: bool) -> str:
    """The instruction at ``code.at``, which then is at the next one."""
    code.begin()
    try:
        text = _decode(code)
    except (KeyError, IndexError) as error:
        text = ""
        reason = f"number not known: {error}"
    else:
        reason = f"bits not understood: {code.left:#x}" if code.left else ""
    if reason and not as_far_as_known:
        raise Fault(f"the instruction {code.value:#x} at byte {4 * code.at}: {reason} {text}")
    code.at += code.length
    return _skipped(code) if reason else text


def _decode(code: Encoded) -> str:
    for prefix, low, decode in _formats(code):
        if code.peek(31, low) == prefix:
            code.bits(31, low)
            return decode(code)
    raise KeyError("encoding")


def _formats(code: Encoded) -> Iterable[tuple[int, int, Callable[[Encoded], str]]]:
    """Prefix, its lowest bit, and what reads the rest: the longer prefixes first."""
    yield 0b101111111, 23, sopp
    yield 0b101111110, 23, sopc
    yield 0b101111101, 23, sop1
    yield 0b1011, 28, sopk
    yield 0b10, 30, sop2
    yield 0b0111111, 25, vop1
    yield 0b0111110, 25, vopc
    yield 0b0, 31, vop2
    prefix, low = (0b110100111, 23) if code.gfx9 else (0b11001100, 24)
    yield prefix, low, vop3p
    yield (0b110100 if code.gfx9 else 0b110101), 26, vop3
    yield (0b110000 if code.gfx9 else 0b111101), 26, smem
    yield 0b110110, 26, ds
    if code.gfx12:
        yield 0b111011, 26, vflat
        yield 0b110001, 26, vbuffer
    else:
        yield 0b110111, 26, flat
        yield 0b111000, 26, mubuf
    if not code.gfx9:
        yield 0b110010, 26, vopd


def _skipped(code: Encoded) -> str:
    """An instruction that is not known, and what can be told of it: where it ends."""
    begin = code.at - code.length
    form = next(
        (decode.__name__ for prefix, low, decode in _formats(code) if code.peek(31, low) == prefix),
        "encoding",
    )
    length = _WORDS.get(form, len(code.words) - begin)
    with_literal = _SOURCES.get(form, ())
    words = code.words[begin : begin + length]
    value = sum(word << 32 * n for n, word in enumerate(words))
    behind = {LITERAL}
    if form.startswith("vop") and length == 1:
        behind |= {DPP, SDWA}
    if any(value >> low & (1 << bits) - 1 in behind for low, bits in with_literal):
        length += 1
    code.at = begin + length
    shown = " ".join(f"{word:#010x}" for word in code.words[begin : code.at][:_MOST_SHOWN])
    return f"unknown_{form} {shown}"
