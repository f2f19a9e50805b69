"""The assembly behind a module's code objects, and the proof that it is theirs.

A module holds machine code. What is run here is text, from a second compilation of the same module
that also writes its intermediate files. Two things tie the one to the other: that compilation's
code objects are the module's, byte for byte; and the text, given back to the compiler to assemble,
becomes the machine code and the kernel descriptors of the code object, byte for byte.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from iree_lnbwd.emulator.launch import Fault

Compile = Callable[[str, Sequence[str]], object]
"""Compiles MLIR text with some more flags of iree-compile than a target's."""

_DUMP = "--iree-hal-dump-executable-files-to={}"
_DESCRIPTOR_BYTES = 64
_ENTRY_OFFSET = slice(16, 24)  # in a descriptor: from it to the code, a matter of layout

# A module whose only purpose is its assembly.
_CARRIER = """\
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#one = #iree_codegen.translation_info<pipeline = #iree_codegen.no_pipeline workgroup_size = [1, 1, 1]>
hal.executable.source public @carrier {
  hal.executable.export public @carrier ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %c1 = arith.constant 1 : index
    hal.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module attributes {llvm.module_asm = [LINES]} {
    func.func @carrier() attributes {translation_info = #one} {
      return
    }
  }
}
"""


@dataclass(frozen=True)
class CodeObject:
    """An AMD GPU's code object, and the assembly that it was made from."""

    code: bytes
    assembly: str


def code_objects(text: str, compile_text: Compile) -> tuple[CodeObject, ...]:
    """Compiles MLIR text again, for the assembly of its executables.

    Raises:
        Fault: The assembly does not assemble to the code object.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_text(text, (_DUMP.format(folder),))
        found = tuple(
            CodeObject(file.with_suffix(".hsaco").read_bytes(), file.read_text(encoding="utf-8"))
            for file in sorted(Path(folder).glob("*.rocmasm"))
        )
    for one in found:
        _check(one, assemble(one.assembly, compile_text))
    return found


def assemble(assembly: str, compile_text: Compile) -> bytes:
    """A code object with the functions and the descriptors of some assembly."""
    lines = assembly.split("\t.amdgpu_metadata")[0].splitlines()
    quoted = ", ".join(f'"{_escaped(line)}"' for line in lines if line.split(";")[0].strip())
    with tempfile.TemporaryDirectory() as folder:
        compile_text(_CARRIER.replace("LINES", quoted), (_DUMP.format(folder),))
        (file,) = Path(folder).glob("*.hsaco")
        return file.read_bytes()


def _escaped(line: str) -> str:
    return line.split(";")[0].replace("\\", "\\\\").replace('"', '\\"').replace("\t", " ")


def _check(ours: CodeObject, assembled: bytes) -> None:
    expected, got = symbols(ours.code), symbols(assembled)
    for name, content in expected.items():
        if _without_layout(content) != _without_layout(got.get(name, b"")):
            raise Fault(f"{name}: the assembly is not that of the code object")


def _without_layout(content: bytes) -> bytes:
    if len(content) != _DESCRIPTOR_BYTES:
        return content
    return content[: _ENTRY_OFFSET.start] + content[_ENTRY_OFFSET.stop :]


def symbols(elf: bytes) -> dict[str, bytes]:
    """The content of the functions and objects of an ELF file, by name.

    Raises:
        Fault: It is no 64-bit little-endian ELF file with symbols.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise Fault("a code object: no ELF file of 64 bits, little end first")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + n * size) for n in range(count)]
    found = {}
    for _, kind, _, _, start, length, link, _, _, each in sections:
        if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
            continue
        names = sections[link][4]
        for at in range(start, start + length, each):
            name, info, _, section, value, nbytes = struct.unpack_from("<IBBHQQ", elf, at)
            if not nbytes or info & 15 not in (1, 2) or not 0 < section < count:
                continue  # neither an object nor a function with a content
            _, _, _, address, offset, *_ = sections[section]
            begin = value - address + offset
            label = elf[names + name : elf.index(b"\0", names + name)].decode()
            found[label] = elf[begin : begin + nbytes]
    return found


_ = re
