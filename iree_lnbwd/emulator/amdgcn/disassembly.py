"""From a code object to assembly: the encodings of gfx9 (CDNA), gfx11 (RDNA3) and gfx12 (RDNA4).

A module holds machine code, and the emulator runs text. The compiler's own listing of a module
cannot be used: it comes from a second run of the code generator, on a copy of the module, which
chooses other registers, another order, even other instructions. So the machine code itself is read.

LLVM's assembler turns the text into the same bytes again (tests check this). Any bit of an
instruction that is not understood is a fault.

Sources: AMD's ISA documents, "Microcode Formats"; LLVM's AMDGPU guide, "Kernel Descriptor".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from iree_lnbwd.emulator.amdgcn.accesses import LOADS, STORES
from iree_lnbwd.emulator.amdgcn.metadata import Metadata, of_kernels
from iree_lnbwd.emulator.amdgcn.opcodes import GFX9, GFX11, GFX12, WITH_A_CONSTANT
from iree_lnbwd.emulator.amdgcn.operands import width
from iree_lnbwd.emulator.amdgcn.scalar import SCALAR
from iree_lnbwd.emulator.amdgcn.vector_table import VECTOR
from iree_lnbwd.emulator.launch import CONFUSION, Fault

# EF_AMDGPU_MACH of the ELF header's flags (LLVM AMDGPU guide, "Header").
PROCESSORS = {
    0x3F: "gfx90a",
    0x41: "gfx1100",
    0x4C: "gfx942",
    0x4E: "gfx1201",
    0x4F: "gfx950",
}
_PRELOAD_PADDING = 256
_DESCRIPTOR_BYTES = 64
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_NOTES, _NO_BITS = 7, 8  # kinds of sections: SHT_NOTE, SHT_NOBITS
_LOADED = 2  # a flag of theirs: SHF_ALLOC
_SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
_NAME = re.compile(r"[\w.$]+")  # of a kernel
_LONGEST_NAME = 4096
_LITERAL, _DPP, _SDWA, _ZERO = 255, 250, 249, 128
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494")
_SELECTORS = ("BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD")
# Vector instructions with operands of their own kind; "s32" is in a scalar register.
_SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "v_readlane_b32": (("s32",), ("b32", "s32")),
    "v_readfirstlane_b32": (("s32",), ("b32",)),
    "v_writelane_b32": (("b32",), ("s32", "s32")),
    "v_permlane16_b32": (("b32",), ("b32", "s32", "s32")),
    "v_permlanex16_b32": (("b32",), ("b32", "s32", "s32")),
    "v_permlane16_swap_b32": (("b32",), ("b32",)),
    "v_permlane32_swap_b32": (("b32",), ("b32",)),
    "v_mbcnt_lo_u32_b32": (("b32",), ("b32", "b32")),
    "v_mbcnt_hi_u32_b32": (("b32",), ("b32", "b32")),
    "v_pk_add_f32": (("b64",), ("b64", "b64")),
    "v_pk_mul_f32": (("b64",), ("b64", "b64")),
    "v_pk_fma_f32": (("b64",), ("b64", "b64", "b64")),
    "v_pk_mov_b32": (("b64",), ("b64", "b64")),
    "v_pk_add_f16": (("b32",), ("b32", "b32")),
    "v_pk_mul_f16": (("b32",), ("b32", "b32")),
    "v_pk_fma_f16": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mix_f32": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mixlo_f16": (("b32",), ("b32", "b32", "b32")),
    "v_fma_mixhi_f16": (("b32",), ("b32", "b32", "b32")),
    "v_div_fmas_f32": (("f32",), ("f32", "f32", "f32")),  # VCC goes without saying
    "v_div_fmas_f64": (("f64",), ("f64", "f64", "f64")),
    **{f"v_s_{name}_f32": (("s32",), ("f32",)) for name in ("rcp", "rsq", "sqrt")},
}
_DUAL_X = {0: "fmac_f32", 3: "mul_f32", 4: "add_f32", 5: "sub_f32", 6: "subrev_f32", 8: "mov_b32"}
_DUAL_X |= {9: "cndmask_b32", 10: "max_f32", 11: "min_f32"}
_DUAL_Y = {16: "add_nc_u32", 17: "lshlrev_b32", 18: "and_b32"}
_DUAL_GFX12 = {10: "max_num_f32", 11: "min_num_f32"}
# What the temporal hints of gfx12 are called, of a load and of a store; 3 with scope 3 is BYPASS.
_HINTS = {
    "LOAD": ("RT", "NT", "HT", "LU", "NT_RT", "RT_NT", "NT_HT"),
    "STORE": ("RT", "NT", "HT", "WB", "NT_RT", "RT_NT", "NT_HT", "NT_WB"),
}
_SCOPES = ("CU", "SE", "DEV", "SYS")
_BRANCHES = re.compile(r"s_c?branch")
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
_LDS_VERB = re.compile(r"ds_(?:read|write|load|store)(?:2st64|2|_2addr_stride64|_2addr)?_")
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
    with _undamaged():
        return _disassemble(code_object, as_far_as_known)


def _disassemble(code_object: bytes, as_far_as_known: bool) -> str:
    found = symbols(code_object)
    (flags,) = struct.unpack_from("<I", code_object, 0x30)
    target = PROCESSORS.get(flags & 0xFF)
    if target is None:
        raise Fault(f"a code object for a processor that is not known: flags {flags:#x}")
    notes = [s.content for s in _sections(code_object) if s.kind == _NOTES]
    metadata = of_kernels(b"".join(notes))
    parts = []
    for name, descriptor in found.items():
        kernel = name.removesuffix(".kd")
        if kernel == name:
            continue
        if not _NAME.fullmatch(kernel) or kernel not in found:
            raise Fault(f"a code object with a descriptor, but no code, of {kernel!r}")
        directives = _descriptor(descriptor, target) | _launch(metadata.get(kernel, Metadata()))
        preloads = bool(directives["user_sgpr_kernarg_preload_length"])
        lanes = 32 if directives["wavefront_size32"] else 64
        code = _Code(kernel, found[kernel], target, lanes, as_far_as_known=as_far_as_known)
        body = code.text(_PRELOAD_PADDING if preloads else None)
        lines = (f"\t\t.amdhsa_{key} {value}" for key, value in directives.items())
        parts.append(
            f"\t.globl {kernel}\n\t.p2align 8\n\t.type {kernel},@function\n{kernel}:\n{body}"
            f".Lfunc_end_{kernel}:\n\t.size {kernel}, .Lfunc_end_{kernel}-{kernel}\n"
            f"\t.amdhsa_kernel {kernel}\n" + "\n".join(lines) + "\n\t.end_amdhsa_kernel\n"
        )
    return f'\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"\n\t.text\n' + "".join(parts)


def symbols(elf: bytes) -> dict[str, bytes]:
    """The content of the functions and objects of an ELF file, by name.

    Raises:
        Fault: It is no 64-bit little-endian ELF file, or damaged.
    """
    with _undamaged():
        return _symbols(_sections(elf))


def loaded(elf: bytes) -> bytes:
    """The parts of an ELF file that a loader takes, in sequence: code, descriptors, notes.

    Raises:
        Fault: It is no 64-bit little-endian ELF file, or damaged.
    """
    with _undamaged():
        return b"".join(section.content for section in _sections(elf) if section.loaded)


@contextmanager
def _undamaged() -> Iterator[None]:
    """Turns errors from wrong numbers in a code object into faults.

    Raises:
        Fault: They do.
    """
    try:
        yield
    except (*CONFUSION, struct.error) as error:
        raise Fault(f"a damaged code object: {type(error).__name__}: {error}") from error


class _Section(NamedTuple):
    """A part of an ELF file.

    Attributes:
        kind: What is in it.
        address: Of its first byte, once it is loaded.
        content: Its bytes.
        link: The number of another that belongs to it.
        loaded: Whether the GPU's memory gets it.
    """

    kind: int
    address: int
    content: bytes
    link: int
    loaded: bool


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise Fault("a code object: no ELF file of 64 bits, little end first")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    if size != _SECTION.size:
        raise Fault(f"a damaged code object: headers of {size} bytes, expected {_SECTION.size}")
    found = []
    for n in range(count):
        _, kind, flags, address, start, length, link, *_ = _SECTION.unpack_from(
            elf, table + n * size
        )
        content = elf[start : start + length] if kind != _NO_BITS else b""
        if kind != _NO_BITS and len(content) != length:
            raise Fault(
                f"a damaged code object: a section of {length} bytes at {start} of {len(elf)}"
            )
        found.append(_Section(kind, address, content, link, loaded=bool(flags & _LOADED)))
    return found


def _symbols(sections: list[_Section]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for kind in _SYMBOL_TABLES:
        tables = [section for section in sections if section.kind == kind]
        if len(tables) > 1:
            raise Fault("a damaged code object: more than one table of symbols")
        for table in tables:
            names = sections[table.link].content
            for name, info, _, number, value, nbytes in _SYMBOL.iter_unpack(table.content):
                if not nbytes or info & 15 not in (1, 2) or not 0 < number < len(sections):
                    continue  # neither an object nor a function with a content
                section = sections[number]
                begin = value - section.address
                label = names[name : names.index(b"\0", name, name + _LONGEST_NAME)].decode()
                if not 0 <= begin <= len(section.content) - nbytes:
                    raise Fault(f"a damaged code object: {label!r} is outside of its section")
                content = section.content[begin : begin + nbytes]
                if found.setdefault(label, content) != content:
                    raise Fault(f"a damaged code object: {label!r} is there twice")
    return found


def _launch(metadata: Metadata) -> dict[str, int]:
    """Directives of our own: what the assembler has in the metadata."""
    sizes = zip("xyz", metadata.required_size, strict=True)
    return {
        "max_flat_workgroup_size": metadata.max_threads,
        **{f"reqd_workgroup_size_{axis}": size for axis, size in sizes},
    }


def _descriptor(content: bytes, target: str) -> dict[str, int]:
    """The directives that a kernel descriptor was made from."""
    if len(content) != _DESCRIPTOR_BYTES:
        raise Fault(f"a kernel descriptor of {len(content)} bytes, expected {_DESCRIPTOR_BYTES}")
    shared, private, arguments = struct.unpack_from("<III", content, 0)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", content, 44)

    def bits(word: int, high: int, low: int) -> int:
        return word >> low & (1 << (high - low + 1)) - 1

    gfx9, wave32 = target.startswith("gfx9"), bits(properties, 10, 10)
    return {
        "group_segment_fixed_size": shared,
        "private_segment_fixed_size": private,
        "kernarg_size": arguments,
        # As many as are allocated: the code may use a few less.
        "next_free_vgpr": (8 if gfx9 or wave32 else 4) * (bits(rsrc1, 5, 0) + 1),
        "next_free_sgpr": 8 * (bits(rsrc1, 9, 6) + 1) if gfx9 else 106,
        **({"accum_offset": 4 * (bits(rsrc3, 5, 0) + 1)} if gfx9 else {}),
        "float_round_mode_32": bits(rsrc1, 13, 12),
        "float_round_mode_16_64": bits(rsrc1, 15, 14),
        "float_denorm_mode_32": bits(rsrc1, 17, 16),
        "float_denorm_mode_16_64": bits(rsrc1, 19, 18),
        "enable_private_segment": bits(rsrc2, 0, 0),
        "user_sgpr_count": bits(rsrc2, 5, 1),
        "system_sgpr_workgroup_id_x": bits(rsrc2, 7, 7),
        "system_sgpr_workgroup_id_y": bits(rsrc2, 8, 8),
        "system_sgpr_workgroup_id_z": bits(rsrc2, 9, 9),
        "system_sgpr_workgroup_info": bits(rsrc2, 10, 10),
        "system_vgpr_workitem_id": bits(rsrc2, 12, 11),
        "user_sgpr_private_segment_buffer": bits(properties, 0, 0),
        "user_sgpr_dispatch_ptr": bits(properties, 1, 1),
        "user_sgpr_queue_ptr": bits(properties, 2, 2),
        "user_sgpr_kernarg_segment_ptr": bits(properties, 3, 3),
        "user_sgpr_dispatch_id": bits(properties, 4, 4),
        "user_sgpr_flat_scratch_init": bits(properties, 5, 5),
        "user_sgpr_private_segment_size": bits(properties, 6, 6),
        "wavefront_size32": wave32,
        "uses_dynamic_stack": bits(properties, 11, 11),
        "user_sgpr_kernarg_preload_length": bits(preload, 6, 0),
        "user_sgpr_kernarg_preload_offset": bits(preload, 15, 7),
    }


def _run(letter: str, first: int, count: int) -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


class _Code:
    """The machine code of a function while it is read."""

    def __init__(
        self, name: str, code: bytes, target: str, lanes: int, *, as_far_as_known: bool
    ) -> None:
        self._name = name
        if len(code) % 4:
            raise Fault(f"{name}: {len(code)} bytes of code, expected a multiple of 4")
        self._words = struct.unpack(f"<{len(code) // 4}I", code)
        self._gfx9 = target.startswith("gfx9")
        self._gfx12 = target.startswith("gfx12")
        self._has_sc = target in ("gfx942", "gfx950")
        self._tables = GFX9 if self._gfx9 else GFX12 if self._gfx12 else GFX11
        self._lanes = lanes
        self._as_far_as_known = as_far_as_known
        self._at = 0
        self._used = 0  # bits of the current instruction that were looked at
        self._value = 0  # the current instruction
        self._length = 0  # in words
        self._has_literal = False
        self._literal_at = 0
        self._labels: set[int] = set()

    def text(self, padding: int | None) -> str:
        """All of it, with a mark where the padding for preloaded arguments ends."""
        lines = []
        while self._at < len(self._words):
            at = 4 * self._at
            lines.append((at, self._instruction()))
        marks = {} if padding is None else {padding: "\t.p2align 8\n"}
        return "".join(
            marks.get(at, "")
            + (f"{self._label(at)}:\n" if at in self._labels else "")
            + f"\t{line}\n"
            for at, line in lines
        )

    def _label(self, at: int) -> str:
        return f".L{self._name}_{at:x}"

    def _instruction(self) -> str:
        at = 4 * self._at
        self._used, self._length = 0, 0
        self._value = 0
        self._more()
        try:
            text = self._decode()
        except (KeyError, IndexError) as error:
            text = ""
            reason = f"number not known: {error}"
        else:
            left = self._value & ~self._used
            reason = f"bits not understood: {left:#x}" if left else ""
        if reason and not self._as_far_as_known:
            raise Fault(f"the instruction {self._value:#x} at byte {at}: {reason} {text}")
        self._at += self._length
        return self._skipped() if reason else text

    def _skipped(self) -> str:
        """An instruction that is not known, and what can be told of it: where it ends."""
        begin = self._at - self._length
        form = next(
            (
                decode.__name__.removeprefix("_")
                for prefix, low, decode in self._formats()
                if self._peek(31, low) == prefix
            ),
            "encoding",
        )
        length = _WORDS.get(form, len(self._words) - begin)
        with_literal = _SOURCES.get(form, ())
        words = self._words[begin : begin + length]
        value = sum(word << 32 * n for n, word in enumerate(words))
        behind = {_LITERAL, *((_DPP, _SDWA) if form.startswith("vop") and length == 1 else ())}
        if any(value >> low & (1 << bits) - 1 in behind for low, bits in with_literal):
            length += 1
        self._at = begin + length
        shown = " ".join(f"{word:#010x}" for word in self._words[begin : self._at][:_MOST_SHOWN])
        return f"unknown_{form} {shown}"

    def _more(self) -> None:
        """One word more belongs to the instruction."""
        word = self._words[self._at + self._length]
        self._value |= word << 32 * self._length
        self._length += 1

    def _bits(self, high: int, low: int) -> int:
        mask = (1 << high - low + 1) - 1
        self._used |= mask << low
        return self._value >> low & mask

    def _peek(self, high: int, low: int) -> int:
        return self._value >> low & (1 << high - low + 1) - 1

    def _literal(self) -> str:
        """The word behind an instruction."""
        if not self._has_literal:
            self._literal_at = 32 * self._length
            self._more()
            self._has_literal = True
        return hex(self._bits(self._literal_at + 31, self._literal_at))

    def _decode(self) -> str:
        self._has_literal = False
        for prefix, low, decode in self._formats():
            if self._peek(31, low) == prefix:
                self._bits(31, low)
                return decode()
        raise KeyError("encoding")

    def _formats(self) -> Iterable[tuple[int, int, Callable[[], str]]]:
        """Prefix, its lowest bit, and what reads the rest: the longer prefixes first."""
        yield 0b101111111, 23, self._sopp
        yield 0b101111110, 23, self._sopc
        yield 0b101111101, 23, self._sop1
        yield 0b1011, 28, self._sopk
        yield 0b10, 30, self._sop2
        yield 0b0111111, 25, self._vop1
        yield 0b0111110, 25, self._vopc
        yield 0b0, 31, self._vop2
        yield (0b110100111, 23, self._vop3p) if self._gfx9 else (0b11001100, 24, self._vop3p)
        yield (0b110100 if self._gfx9 else 0b110101), 26, self._vop3
        yield (0b110000 if self._gfx9 else 0b111101), 26, self._smem
        yield 0b110110, 26, self._ds
        if self._gfx12:
            yield 0b111011, 26, self._vflat
            yield 0b110001, 26, self._vbuffer
        else:
            yield 0b110111, 26, self._flat
            yield 0b111000, 26, self._mubuf
        if not self._gfx9:
            yield 0b110010, 26, self._vopd

    # Operands

    def _scalar(self, code: int, count: int = 1) -> str:
        """A scalar register by its number."""
        m0, null = (124, None) if self._gfx9 else (125, 124)
        if code + count <= (102 if self._gfx9 else 106):
            return _run("s", code, count)
        if 108 <= code <= 124 - count:
            return _run("ttmp", code - 108, count)
        if code == null:
            return "null"
        pairs = {106: "vcc", 126: "exec"}
        if count == 2:
            return pairs[code]
        if count != 1:
            raise KeyError(f"scalar {code}")
        return {106: "vcc_lo", 107: "vcc_hi", m0: "m0", 126: "exec_lo", 127: "exec_hi"}[code]

    def _source(self, code: int, kind: str) -> str:
        """A source operand by its number."""
        if code >= 256:
            return self._vector(code - 256, kind)
        if code < 128:
            count = self._lanes // 32 if kind == "mask" else max(1, width(kind) // 32)
            return self._scalar(code, count)
        if code <= 192:
            return str(code - 128)
        if code <= 208:
            return str(192 - code)
        if 240 <= code <= 248:
            return _FLOATS[code - 240]
        if code == _LITERAL:
            return self._literal()
        raise KeyError(f"source {code}")

    def _vector(self, number: int, kind: str, *, half: int | None = None) -> str:
        """A vector register; of 16 bits on gfx11, a half of one."""
        if kind != "mask" and width(kind) == 16 and not self._gfx9:
            if half is None:  # in the short encodings: 128 registers, and which half
                number, half = number & 127, number >> 7
            return f"v{number}.{'lh'[half]}"
        return _run("v", number, max(1, width(kind) // 32))

    # Scalar instructions

    def _sop1(self) -> str:
        name = self._tables["sop1"][self._bits(15, 8)]
        if name == "s_barrier_signal":
            return f"{name} {self._source(self._bits(7, 0), 'i32')}"
        result, kinds = self._scalar_signature(name)
        target = self._scalar(self._bits(22, 16), max(1, width(result) // 32))
        kind = kinds[-1]  # without the destination, where that is a source as well
        return f"{name} {target}, {self._source(self._bits(7, 0), kind)}"

    def _scalar_signature(self, name: str) -> tuple[str, tuple[str, ...]]:
        if "_saveexec_" in name:
            kind = f"u{name[-2:]}"
            return kind, (kind,)
        return SCALAR[name].result, SCALAR[name].sources

    def _sop2(self) -> str:
        name = self._tables["sop2"][self._bits(29, 23)]
        result, kinds = self._scalar_signature(name)
        target = self._scalar(self._bits(22, 16), max(1, width(result) // 32))
        kinds = kinds[-2:]  # without the destination, where that is a source as well
        codes = (self._bits(7, 0), self._bits(15, 8))
        sources = [self._source(code, kind) for code, kind in zip(codes, kinds, strict=True)]
        return f"{name} {target}, {', '.join(sources)}"

    def _sopc(self) -> str:
        name = self._tables["sopc"][self._bits(22, 16)]
        codes = (self._bits(7, 0), self._bits(15, 8))
        kinds = SCALAR[name].sources
        sources = [self._source(code, kind) for code, kind in zip(codes, kinds, strict=True)]
        return f"{name} {', '.join(sources)}"

    def _sopk(self) -> str:
        name = self._tables["sopk"][self._bits(27, 23)]
        register = self._scalar(self._bits(22, 16))
        return f"{name} {register}, {self._bits(15, 0):#x}"

    def _sopp(self) -> str:
        name = self._tables["sopp"][self._bits(22, 16)]
        value = self._bits(15, 0)
        if _BRANCHES.match(name):
            target = 4 * (self._at + 1 + value - (value >> 15 << 16))
            self._labels.add(target)
            return f"{name} {self._label(target)}"
        if name == "s_waitcnt":
            return f"{name} {self._waits(value)}"
        if name == "s_sendmsg":
            return f"{name} {'sendmsg(MSG_DEALLOC_VGPRS)' if value == 3 else hex(value)}"
        if name in ("s_barrier", "s_endpgm", "s_code_end", "s_wait_idle") and value == 0:
            return name
        if name == "s_barrier_wait":
            return f"{name} {value - (value >> 15 << 16)}"
        return f"{name} {value:#x}"

    def _waits(self, value: int) -> str:
        if self._gfx9:
            fields = {"vmcnt": (value & 15 | value >> 14 << 4, 63)}
            fields |= {"expcnt": (value >> 4 & 7, 7), "lgkmcnt": (value >> 8 & 15, 15)}
        else:
            fields = {"vmcnt": (value >> 10, 63)}
            fields |= {"expcnt": (value & 7, 7), "lgkmcnt": (value >> 4 & 63, 63)}
        said = [f"{name}({count})" for name, (count, most) in fields.items() if count != most]
        return " ".join(said) or "vmcnt(63)"

    def _smem(self) -> str:
        self._more()
        name = self._tables["smem"][self._bits(18, 13) if self._gfx12 else self._bits(25, 18)]
        words = self._words_of(name.removeprefix("s_load_"))
        base = self._scalar(2 * self._bits(5, 0), 2)
        into = self._scalar(self._bits(12, 6), words)
        high = 55 if self._gfx12 else 52
        number = self._bits(high, 32)
        number -= number >> high - 32 << high - 31
        has_number, has_register = True, self._peek(63, 57) != 124
        if self._gfx9:
            has_number, has_register = bool(self._bits(17, 17)), bool(self._bits(14, 14))
        register = self._scalar(self._bits(63, 57)) if has_register else ""
        self._bits(63, 57)
        offset = register or hex(number)
        extra = f" offset:{number:#x}" if register and has_number and number else ""
        if self._gfx12:
            extra += self._hints("LOAD", self._bits(24, 23), self._bits(22, 21))
        return f"{name} {into}, {base}, {offset}{extra}"

    def _words_of(self, name: str) -> int:
        if name in ("u8", "i8", "u16", "i16"):
            return 1
        if name.startswith("b"):
            return int(name[1:]) // 32
        return int(name.removeprefix("dword").removeprefix("x") or 1)

    # Vector instructions

    def _vector_signature(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if name in _SIGNATURES:
            return _SIGNATURES[name]
        operation = VECTOR[name.replace("v_cmpx_", "v_cmp_")]
        sources = operation.sources[:-1] if operation.accumulates else operation.sources
        return (() if name.startswith("v_cmpx_") else operation.results), sources

    def _implicit_mask(self) -> str:
        return "vcc" if self._lanes == 64 else "vcc_lo"

    def _vop1(self) -> str:
        name = self._tables["vop1"][self._bits(16, 9)]
        results, kinds = self._vector_signature(name)
        number = self._bits(24, 17)
        is_scalar = results == ("s32",)
        target = self._scalar(number) if is_scalar else self._vector(number, results[0])
        return self._short(name, [target], kinds, second=None)

    def _vop2(self) -> str:
        name = self._tables["vop2"][self._bits(30, 25)]
        results, kinds = self._vector_signature(name)
        targets = [self._vector(self._bits(24, 17), results[0])]
        targets += [self._implicit_mask()] * (len(results) - 1)
        if name in WITH_A_CONSTANT:
            sources = [
                self._source(self._bits(8, 0), kinds[0]),
                self._vector(self._bits(16, 9), kinds[1]),
            ]
            sources.insert(WITH_A_CONSTANT[name], self._literal())
            return f"{name} {', '.join(targets + sources)}"
        return self._short(name, targets, kinds, second=self._bits(16, 9))

    def _vopc(self) -> str:
        name = self._tables["vopc"][self._bits(24, 17)]
        results, kinds = self._vector_signature(name)
        targets = [self._implicit_mask()] if results else []
        return self._short(name, targets, kinds, second=self._bits(16, 9))

    def _short(
        self, name: str, targets: list[str], kinds: tuple[str, ...], *, second: int | None
    ) -> str:
        """VOP1, VOP2 or VOPC, perhaps with DPP or SDWA behind it."""
        code = self._bits(8, 0)
        numbers = [] if second is None else [second]
        if code == _DPP:
            self._more()
            form, modifiers = "dpp", self._dpp()
            numbers = [self._bits(39, 32), *numbers]
            sources = [
                _signed(self._vector(number, kind), *self._signs(52 + 2 * n))
                for n, (number, kind) in enumerate(zip(numbers, kinds, strict=False))
            ]
        elif code == _SDWA and self._gfx9:
            self._more()
            numbers = [self._bits(39, 32), *numbers]
            form, modifiers = "sdwa", self._sdwa(targets, len(numbers))
            sources = [
                _signed(self._sdwa_source(n, number, kind), *self._signs(52 + 8 * n))
                for n, (number, kind) in enumerate(zip(numbers, kinds, strict=False))
            ]
        else:
            form, modifiers = "e32", ""
            sources = [self._source(code, kinds[0])]
            sources += [self._vector(number, kinds[1]) for number in numbers]
        sources += [self._implicit_mask()] * (len(kinds) - len(sources))
        return f"{name}_{form} {', '.join(targets + sources)}{modifiers}"

    def _signs(self, low: int) -> tuple[int, int]:
        """Whether a source is negated, and whether its absolute value is taken before."""
        return self._bits(low, low), self._bits(low + 1, low + 1)

    def _dpp(self) -> str:
        control = self._bits(48, 40)
        text = f"{_dpp_control(control, self._gfx9)} row_mask:{self._bits(63, 60):#x}"
        text += f" bank_mask:{self._bits(59, 56):#x}"
        text += " bound_ctrl:1" if self._bits(51, 51) else ""
        if not self._gfx9 and self._bits(50, 50):
            text += " fi:1"
        return f" {text}"

    def _sdwa(self, targets: list[str], sources: int) -> str:
        """Which parts of registers are read and written; a comparison may name its target here."""
        if targets == [self._implicit_mask()]:
            if self._bits(47, 47):
                targets[0] = self._scalar(self._bits(46, 40), self._lanes // 32)
            text = ""
        else:
            selector = _SELECTORS[self._bits(42, 40)]
            unused = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")[self._bits(44, 43)]
            text = f" dst_sel:{selector} dst_unused:{unused}"
        for n in range(sources):
            text += f" src{n}_sel:{_SELECTORS[self._bits(50 + 8 * n, 48 + 8 * n)]}"
        return text

    def _sdwa_source(self, number: int, code: int, kind: str) -> str:
        """A vector register; or, as a bit says, a scalar one."""
        scalar = 55 + 8 * number
        return self._source(code, kind) if self._bits(scalar, scalar) else self._vector(code, kind)

    def _unused(self, sources: int) -> None:
        """What stands where sources are not there: nothing, or the constant 0."""
        for n in range(sources, 3):
            if self._peek(40 + 9 * n, 32 + 9 * n) in (0, _ZERO):
                self._bits(40 + 9 * n, 32 + 9 * n)

    def _vop3(self) -> str:
        self._more()
        name = self._tables["vop3"][self._bits(25, 16)]
        results, kinds = self._vector_signature(name)
        number = self._bits(7, 0)
        selected = 0
        sixteen = [kind != "mask" and width(kind) == 16 for kind in (*kinds, *results)]
        if len(results) < 2:
            if any(sixteen) or "permlane" in name:
                selected = self._bits(14, 11)
            absolute = self._bits(10, 8)
        else:
            absolute = 0
        targets = []
        if results and results[0] in ("mask", "s32"):
            targets = [self._scalar(number, self._lanes // 32 if results[0] == "mask" else 1)]
        elif results:
            targets = [self._vector(number, results[0], half=selected >> 3)]
        elif number != 126:
            raise KeyError(f"compares to {number}")
        if len(results) == 2:
            targets.append(self._scalar(self._bits(14, 8), self._lanes // 32))
        modifiers = " clamp" if self._bits(15, 15) else ""
        modifiers += ("", " mul:2", " mul:4", " div:2")[self._bits(60, 59)]
        negated = self._bits(63, 61)
        sources = []
        for n, kind in enumerate(kinds):
            code = self._bits(40 + 9 * n, 32 + 9 * n)
            if code >= 256 and sixteen[n]:
                text = self._vector(code - 256, kind, half=selected >> n & 1)
            else:
                text = self._source(code, kind)
            sources.append(_signed(text, negated >> n & 1, absolute >> n & 1))
        if selected and (self._gfx9 or "permlane" in name):
            count = 2 if "permlane" in name else len(kinds) + 1
            chosen = [selected >> n & 1 for n in range(count - 1)]
            chosen.append(selected >> 1 & 1 if "permlane" in name else selected >> 3)
            modifiers += f" op_sel:[{','.join(map(str, chosen))}]"
        self._unused(len(kinds))
        short = any(name in self._tables[form].values() for form in ("vop1", "vop2", "vopc"))
        return f"{name}{'_e64' if short else ''} {', '.join(targets + sources)}{modifiers}"

    def _vop3p(self) -> str:
        self._more()
        name = self._tables["vop3p"][self._bits(22, 16)]
        (result,), kinds = self._vector_signature(name)
        count = len(kinds)
        target = self._vector(self._bits(7, 0), result)
        low = [self._bits(11 + n, 11 + n) for n in range(3)]
        high = [self._bits(59, 59), self._bits(60, 60), self._bits(14, 14)]
        negated_high, negated = self._bits(10, 8), self._bits(63, 61)
        sources = [self._source(self._bits(40 + 9 * n, 32 + 9 * n), kinds[n]) for n in range(count)]
        self._unused(count)
        mixed = "_mix" in name
        if mixed:
            sources = [
                _signed(text, negated >> n & 1, negated_high >> n & 1)
                for n, text in enumerate(sources)
            ]
        modifiers = f" op_sel:{_list(low[:count])}" if any(low[:count]) else ""
        if high[:count] != [int(not mixed)] * count:
            modifiers += f" op_sel_hi:{_list(high[:count])}"
        for label, bits in (("neg_lo", negated), ("neg_hi", negated_high)):
            if bits and not mixed:
                modifiers += f" {label}:{_list(bits >> n & 1 for n in range(count))}"
        modifiers += " clamp" if self._bits(15, 15) else ""
        return f"{name} {', '.join([target, *sources])}{modifiers}"

    def _vopd(self) -> str:
        self._more()
        halves_of_x = _DUAL_X | (_DUAL_GFX12 if self._gfx12 else {})
        x, y = halves_of_x[self._bits(25, 22)], (halves_of_x | _DUAL_Y)[self._bits(21, 17)]
        target_x, target_y = self._bits(63, 56), self._bits(55, 49)
        target_y = target_y << 1 | (target_x & 1 ^ 1)
        halves = []
        for name, target, code, second in (
            (x, target_x, self._bits(8, 0), self._bits(16, 9)),
            (y, target_y, self._bits(40, 32), self._bits(48, 41)),
        ):
            operands = [f"v{target}", self._source(code, "b32")]
            if name != "mov_b32":
                operands.append(f"v{second}")
            halves.append(f"v_dual_{name} {', '.join(operands)}")
        return " :: ".join(halves)

    # Memory

    def _ds(self) -> str:
        self._more()
        name = self._tables["ds"][self._bits(24, 17) if self._gfx9 else self._bits(25, 18)]
        address = f"v{self._bits(39, 32)}"
        data = [self._bits(47, 40), self._bits(55, 48)]
        into, low, high = self._bits(63, 56), self._bits(7, 0), self._bits(15, 8)
        two = re.search(r"(read|write|load_|store_)2", name) is not None
        offset = f" offset:{high << 8 | low}" if high or low else ""
        if two:
            offset = "".join(f" offset{n}:{v}" for n, v in enumerate((low, high)) if v)
        if name == "ds_swizzle_b32":
            return f"{name} v{into}, {address}{offset}"
        if name == "ds_bpermute_b32":
            return f"{name} v{into}, {address}, v{data[0]}{offset}"
        what = _LDS_VERB.sub("", name)
        item = LOADS[what] if what in LOADS else STORES[what]
        if "read" in name or "load" in name:
            moved = [_run("v", into, (1 + two) * item.registers)]
            return f"{name} {', '.join([*moved, address])}{offset}"
        moved = [_run("v", number, item.registers) for number in data[: 1 + two]]
        return f"{name} {', '.join([address, *moved])}{offset}"

    def _policy(self, sc0: int, nt: int, sc1: int) -> str:
        """Cache policies, by the bits that say them."""
        names = ("sc0", "nt", "sc1") if self._has_sc else ("glc", "slc", "dlc")
        return "".join(
            f" {name}"
            for name, bit in zip(names, (sc0, nt, sc1), strict=True)
            if bit and self._bits(bit, bit)
        )

    def _flat(self) -> str:
        self._more()
        segment = self._bits(15, 14) if self._gfx9 else self._bits(17, 16)
        kind = {1: "scratch", 2: "global"}[segment]
        name = self._tables["global"][self._bits(24, 18)].replace("global", kind)
        offset = self._bits(12, 0)
        offset -= offset >> 12 << 13
        base, data = self._bits(54, 48), self._bits(47, 40)
        address, into = self._bits(39, 32), self._bits(63, 56)
        off = base == (127 if self._gfx9 else 124)
        if kind == "global":
            at = _run("v", address, 2 if off else 1)
            scalar = "off" if off else self._scalar(base, 2)
        else:  # a bit says whether there is an address
            at = f"v{address}" if self._bits(*((13, 13) if self._gfx9 else (55, 55))) else "off"
            scalar = "off" if off else self._scalar(base)
        tail = f"{scalar}" + (f" offset:{offset}" if offset else "")
        if self._gfx9:
            tail += self._policy(16, 17, 25 if self._has_sc else 0)
        else:
            tail += self._policy(14, 15, 13)
        verb, count = _moved(name)
        if verb == "load":
            return f"{name} {_run('v', into, count)}, {at}, {tail}"
        return f"{name} {at}, {_run('v', data, count)}, {tail}"

    def _hints(self, verb: str, hint: int, scope: int) -> str:
        """What gfx12 has in place of cache policies."""
        name = "BYPASS" if hint == scope == 3 else _HINTS[verb][hint]
        text = f" th:TH_{verb}_{name}" if hint else ""
        return text + (f" scope:SCOPE_{_SCOPES[scope]}" if scope else "")

    def _vflat(self) -> str:
        self._more()
        self._more()
        kind = {1: "scratch", 2: "global"}[self._bits(25, 24)]
        name = self._tables["global"][self._bits(21, 14)].replace("global", kind)
        scope, hint = self._bits(51, 50), self._bits(54, 52)
        base, address = self._bits(6, 0), self._bits(71, 64)
        into, data = self._bits(39, 32), self._bits(62, 55)
        has_address = self._bits(49, 49)
        if "_load_" not in name and "_store_" not in name:
            return name + self._hints("LOAD", hint, scope)
        off = base == 124
        if kind == "global":
            at = _run("v", address, 2 if off else 1)
            scalar = "off" if off else self._scalar(base, 2)
        else:
            at = f"v{address}" if has_address else "off"
            scalar = "off" if off else self._scalar(base)
        tail = scalar + self._offset_of_24_bits()
        verb, count = _moved(name)
        tail += self._hints(verb.upper(), hint, scope)
        if verb == "load":
            return f"{name} {_run('v', into, count)}, {at}, {tail}"
        return f"{name} {at}, {_run('v', data, count)}, {tail}"

    def _offset_of_24_bits(self) -> str:
        offset = self._bits(95, 72)
        offset -= offset >> 23 << 24
        return f" offset:{offset}" if offset else ""

    def _vbuffer(self) -> str:
        self._more()
        self._more()
        name = self._tables["mubuf"][self._bits(21, 14)]
        verb, count = _moved(name)
        hints = self._hints(verb.upper(), self._bits(54, 52), self._bits(51, 50))
        soffset = self._bits(6, 0)
        descriptor = self._scalar(self._bits(49, 41), 4)
        data, at = self._bits(39, 32), self._bits(71, 64)
        offen = self._bits(62, 62)
        if self._bits(61, 55) != 1:  # a format, of which raw buffers have none
            raise KeyError("format")
        text = f"{name} {_run('v', data, count)}, {f'v{at}' if offen else 'off'}, {descriptor}, "
        text += self._scalar(soffset) + (" offen" if offen else "")
        return text + self._offset_of_24_bits() + hints

    def _mubuf(self) -> str:
        self._more()
        number = self._bits(24, 18) if self._gfx9 else self._bits(25, 18)
        name = self._tables["mubuf"][number]
        if self._gfx9:
            policy = self._policy(14, 17, 15 if self._has_sc else 0)
        else:
            policy = self._policy(14, 12, 13)
        if not name.startswith(("buffer_load", "buffer_store")):
            return name + policy
        offen = self._bits(12, 12) if self._gfx9 else self._bits(54, 54)
        offset, soffset = self._bits(11, 0), self._bits(63, 56)
        descriptor = self._scalar(4 * self._bits(52, 48), 4)
        data, at = self._bits(47, 40), self._bits(39, 32)
        _, count = _moved(name)
        where = f"v{at}" if offen else "off"
        text = f"{name} {_run('v', data, count)}, {where}, {descriptor}, "
        text += self._source(soffset, "u32") + (" offen" if offen else "")
        return text + (f" offset:{offset}" if offset else "") + policy


def _moved(name: str) -> tuple[str, int]:
    """Load or store, and how many registers a lane moves."""
    _, verb, what = name.split("_", 2)
    return verb, (LOADS if verb == "load" else STORES)[what].registers


def _list(bits: Iterable[int]) -> str:
    return f"[{','.join(map(str, bits))}]"


def _signed(text: str, negated: int, absolute: int) -> str:
    if absolute:
        text = f"|{text}|"
    if not negated:
        return text
    return f"-{text}" if text[0] in "sv|" else f"neg({text})"


def _dpp_control(control: int, gfx9: bool) -> str:
    if control < 0x100:
        return f"quad_perm:{_list(control >> 2 * n & 3 for n in range(4))}"
    fixed = {0x140: "row_mirror", 0x141: "row_half_mirror"}
    if gfx9:
        fixed |= {0x142: "row_bcast:15", 0x143: "row_bcast:31"}
    if control in fixed:
        return fixed[control]
    ranges = {0x10: "row_shl", 0x11: "row_shr", 0x12: "row_ror"}
    ranges |= {0x15: "row_newbcast"} if gfx9 else {0x15: "row_share", 0x16: "row_xmask"}
    return f"{ranges[control >> 4]}:{control & 15}"
