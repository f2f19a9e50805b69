"""What is in a code object, an ELF file: sections, symbols, kernel descriptors."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from iree_lnbwd.emulator.amdgcn.metadata import Metadata
from iree_lnbwd.emulator.launch import CONFUSION, Fault

# EF_AMDGPU_MACH of the ELF header's flags (LLVM AMDGPU guide, "Header").
PROCESSORS = {
    0x3F: "gfx90a",
    0x41: "gfx1100",
    0x4C: "gfx942",
    0x4E: "gfx1201",
    0x4F: "gfx950",
}
_DESCRIPTOR_BYTES = 64
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
NOTES, _NO_BITS = 7, 8  # kinds of sections: SHT_NOTE, SHT_NOBITS
_LOADED = 2  # a flag of theirs: SHF_ALLOC
_SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM
_LONGEST_NAME = 4096


def symbols(elf: bytes) -> dict[str, bytes]:
    """The content of the functions and objects of an ELF file, by name.

    Raises:
        Fault: It is no 64-bit little-endian ELF file, or damaged.
    """
    with undamaged():
        return _symbols(sections(elf))


def loaded(elf: bytes) -> bytes:
    """The parts of an ELF file that a loader takes, in sequence: code, descriptors, notes.

    Raises:
        Fault: It is no 64-bit little-endian ELF file, or damaged.
    """
    with undamaged():
        return b"".join(section.content for section in sections(elf) if section.loaded)


@contextmanager
def undamaged() -> Iterator[None]:
    """Turns errors from wrong numbers in a code object into faults.

    Raises:
        Fault: They do.
    """
    try:
        yield
    except (*CONFUSION, struct.error) as error:
        raise Fault(f"a damaged code object: {type(error).__name__}: {error}") from error


class Section(NamedTuple):
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


def sections(elf: bytes) -> list[Section]:
    """The parts of an ELF file.

    Raises:
        Fault: It is no 64-bit little-endian ELF file, or damaged.
    """
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
        found.append(Section(kind, address, content, link, loaded=bool(flags & _LOADED)))
    return found


def _symbols(sections: list[Section]) -> dict[str, bytes]:
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


def launch(metadata: Metadata) -> dict[str, int]:
    """Directives of our own: what the assembler has in the metadata."""
    sizes = zip("xyz", metadata.required_size, strict=True)
    return {
        "max_flat_workgroup_size": metadata.max_threads,
        **{f"reqd_workgroup_size_{axis}": size for axis, size in sizes},
    }


def descriptor(content: bytes, target: str) -> dict[str, int]:
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
