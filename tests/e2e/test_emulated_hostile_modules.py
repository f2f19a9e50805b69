"""Modules that are damaged, or meant to do harm: each ends in an error that says what, soon."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator, without_few_rows

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler
from iree_lnbwd.emulator import Fault, Module, PtxError, VmError, launch
from iree_lnbwd.emulator.amdgcn import disassemble
from iree_lnbwd.emulator.amdgcn.disassembly import symbols
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb import executables

TARGETS = ("sm_90", "gfx942")
_SPEC = NormSpec((64,), "f32")
Change = Callable[[bytes], bytes]


@functools.cache
def module(target: str) -> bytes:
    found = find_target(target)
    return compiler.build(_SPEC, found, schedule=without_few_rows(_SPEC, found))[0]


def altered(vmfb: bytes, change: Change) -> bytes:
    """A module whose executable is changed, to as many bytes; its checksum is right again."""
    with zipfile.ZipFile(io.BytesIO(vmfb)) as archive:
        (before,) = (archive.read(name) for name in archive.namelist() if name != "module.fb")
    after = change(before)
    assert len(after) == len(before)
    old, new = (struct.pack("<I", zlib.crc32(data)) for data in (before, after))
    assert (vmfb.count(before), vmfb.count(old)) == (1, 2)
    return vmfb.replace(before, after).replace(old, new)


def run(vmfb: bytes) -> None:
    op = EmulatedNorm(vmfb)
    op.run(matrix.random_call(_SPEC, 2, np.random.default_rng(0)))


def _place(executable: bytes, target: str) -> tuple[int, int]:
    """Where the code is in an executable: its first byte and the byte behind it."""
    (code,) = {export.code for export in executables.exports(module(target))}
    begin = executable.index(code[:-1])
    return begin, begin + len(code) - 1


def _damaged(executable: bytes, target: str, rng: np.random.Generator) -> bytes:
    """Bits are flipped, words overwritten, bytes moved, or all is zero from some byte on."""
    begin, end = _place(executable, target)
    code = bytearray(executable[begin:end])

    def somewhere() -> int:
        return int(rng.integers(len(code) - 16))

    match int(rng.integers(4)):
        case 0:
            for _ in range(int(rng.choice([1, 2, 16]))):
                code[somewhere()] ^= 1 << int(rng.integers(8))
        case 1:
            word = int(rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, int(rng.integers(1 << 32))]))
            at = somewhere() & ~3
            code[at : at + 4] = struct.pack("<I", word)
        case 2:
            at, source = somewhere(), somewhere()
            code[at : at + 16] = code[source : source + 16]
        case _:
            at = somewhere()
            code[at:] = bytes(len(code) - at)
    return executable[:begin] + bytes(code) + executable[end:]


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
def test_code_that_is_damaged(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of it is an error of ours, in one line; or nothing, where it is not run."""
    monkeypatch.setattr(launch, "_MOST_WORK", 1 << 31)
    rng = random_generator()
    run(module(target))
    said: list[str] = []
    for _ in range(40):
        vmfb = altered(module(target), lambda data: _damaged(data, target, rng))
        try:
            run(vmfb)
        except (Fault, VmError, PtxError, ArtifactError) as error:
            said.append(str(error))
    assert said
    assert all(text and "\n" not in text for text in said)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ((2048, 1, 1), "2048 threads of a workgroup along x: the GPU takes at most 1024"),
        ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "threads, the emulator takes 1 to 8388608"),
        ((0, 1, 1), ": 0 threads, the emulator takes 1 to 8388608"),
        ((512, 2, 1), "workgroups of 1024 threads: .maxntid allows|max_flat_workgroup_size is"),
    ],
)
def test_workgroups_of_another_size(threads: tuple[int, ...], message: str, target: str) -> None:
    """The executable says how many threads; the kernel, and the GPU, may not take them."""
    export = next(e for e in executables.exports(module(target)) if e.kernel == "rows")
    before, after = struct.pack("<3I", *export.threads), struct.pack("<3I", *threads)
    vmfb = altered(module(target), lambda data: data.replace(before, after))
    with pytest.raises(Fault, match=message):
        run(vmfb)


def test_workgroups_with_another_length_along_each_axis() -> None:
    """As many threads, but the code object says how they lie."""
    export = next(e for e in executables.exports(module("gfx942")) if e.kernel == "rows")
    x, y, z = export.threads
    before, after = struct.pack("<3I", x, y, z), struct.pack("<3I", x // 2, 2 * y, z)
    with pytest.raises(Fault, match=r"reqd_workgroup_size is \(\d+, 1, 1\)"):
        run(altered(module("gfx942"), lambda data: data.replace(before, after)))


def test_dynamic_shared_memory_that_no_gpu_has() -> None:
    spec = NormSpec((4096,), "bf16")
    target = find_target("sm_90")
    vmfb, _ = compiler.build(spec, target, schedule=without_few_rows(spec, target))
    export = next(e for e in executables.exports(vmfb) if e.kernel == "rows")
    before, after = struct.pack("<I", export.shared_bytes), struct.pack("<I", 1 << 20)

    def change(data: bytes) -> bytes:
        begin = data.index(export.code[:-1])  # the numbers stand before it or behind it
        end = begin + len(export.code) - 1
        ends = data[:begin].replace(before, after), data[end:].replace(before, after)
        return ends[0] + data[begin:end] + ends[1]

    op = EmulatedNorm(altered(vmfb, change))
    with pytest.raises(Fault, match="1048576 bytes of shared memory, 1048576 of them dynamic: the"):
        op.run(matrix.random_call(spec, 2, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("field", "mask", "value", "message"),
    [
        (48, 0x3F, 0, r"v\d+ is used, and the kernel has 8 such registers"),
        (48, 0x3C0, 0, r"s\d+ is used, and the kernel has 8 such registers"),
        (44, 0x3F, 0, r"v\d+ is used, and the kernel has 4 such registers"),
        (56, 1 << 10, 1 << 10, "waves of 32 lanes, which gfx942 does not have"),
        (52, 0x3E, 0, "0 user registers, expected"),
        (0, 0xFFFFFFFF, 65537, "65537 bytes of static shared memory: the GPU takes at most 65536"),
        (4, 0xFFFFFFFF, 1 << 20, "1048576 bytes of local memory of a thread: the GPU takes"),
        (8, 0xFFFFFFFF, 1 << 20, "1048576 bytes of arguments, expected at most 65536"),
    ],
)
def test_descriptors_of_kernels(field: int, mask: int, value: int, message: str) -> None:
    """They allocate less than the code uses, or more than there is."""
    (code,) = {export.code for export in executables.exports(module("gfx942"))}
    descriptor = symbols(code)["rows.kd"]
    (word,) = struct.unpack_from("<I", descriptor, field)
    changed = bytearray(descriptor)
    struct.pack_into("<I", changed, field, word & ~mask | value)
    with pytest.raises(Fault, match=message):
        run(altered(module("gfx942"), lambda data: data.replace(descriptor, bytes(changed))))


def test_code_objects_that_are_cut_off() -> None:
    (code,) = {export.code for export in executables.exports(module("gfx942"))}
    assert "v_add_f32" in disassemble(code)
    for length in range(0, code.rindex(b"\0", 0, -1) - 100, 211):
        with pytest.raises(Fault):
            disassemble(code[:length])


def _word(at: int, size: str, value: int) -> Change:
    def change(code: bytes) -> bytes:
        data = bytearray(code)
        struct.pack_into(f"<{size}", data, at, value)
        return bytes(data)

    return change


def _of_section(kind: int, field: int, size: str, value: int) -> Change:
    """A number in the header of the first section of a kind."""

    def change(code: bytes) -> bytes:
        (table,) = struct.unpack_from("<Q", code, 0x28)
        (count,) = struct.unpack_from("<H", code, 0x3C)
        headers = [table + 64 * n for n in range(count)]
        at = next(h for h in headers if struct.unpack_from("<I", code, h + 4)[0] == kind)
        return _word(at + field, size, value)(code)

    return change


def _of_symbol(field: int, size: str, value: int) -> Change:
    """A number in the entry of the first kernel's code."""

    def change(code: bytes) -> bytes:
        (table,) = struct.unpack_from("<Q", code, 0x28)
        (count,) = struct.unpack_from("<H", code, 0x3C)
        for n in range(count):
            kind, start, length = (
                struct.unpack_from(form, code, table + 64 * n + at)[0]
                for form, at in (("<I", 4), ("<Q", 24), ("<Q", 32))
            )
            if kind != 2:
                continue
            at = next(a for a in range(start, start + length, 24) if code[a + 4] & 15 == 2)
            code = _word(at + field, size, value)(code)
        return code

    return change


def _replaced(before: bytes, after: bytes) -> Change:
    def change(code: bytes) -> bytes:
        assert before in code
        return code.replace(before, after)

    return change


_SYMBOLS, _NOTES = 2, 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_word(0x28, "Q", 1 << 63), "a damaged code object"),
        (_word(0x28, "Q", (1 << 64) - 1), "a damaged code object"),
        (_word(0x3A, "H", 0), "headers of 0 bytes, expected 64"),
        (_word(0x3C, "H", 0xFFFF), "a damaged code object: (error|a section of)"),
        (_word(0x30, "I", 0xFF), "a code object for a processor that is not known"),
        (_of_section(_SYMBOLS, 32, "Q", 1 << 62), f"a section of {1 << 62} bytes at"),
        (_of_section(_SYMBOLS, 24, "Q", 1 << 40), f"at {1 << 40} of"),
        (_of_section(_SYMBOLS, 32, "Q", 25), "a damaged code object: error"),
        (_of_section(_SYMBOLS, 40, "I", 999), "IndexError"),
        (_of_section(_NOTES, 4, "I", _SYMBOLS), "more than one table of symbols"),
        (_of_symbol(0, "I", 1 << 31), "a damaged code object: ValueError"),
        (_of_symbol(8, "Q", 0), "is outside of its section"),
        (_of_symbol(16, "Q", 1 << 40), "is outside of its section"),
        (_of_symbol(16, "Q", 6), "'(rows|finalize)' is there twice"),
        (_replaced(b"finalize\0", b"final\nze\0"), "descriptor, but no code, of 'finalize'"),
        (_replaced(b"finalize", b"final\nze"), r"descriptor, but no code, of 'final\\nze'"),
        (_replaced(b"finalize\0", b"fin\xffl\xffze\0"), "UnicodeDecodeError"),
        (_replaced(b"amdhsa.kernels\x92", b"amdhsa.kernels\x9f"), "a damaged|whose metadata"),
        (_replaced(b"amdhsa.kernels\x92", b"amdhsa.kernels\xdd"), "metadata has .* items inside"),
        (_replaced(b".args", b".\xc1\xc1gs"), "UnicodeDecodeError"),
        (_replaced(b"\xa5.args", b"\xc1.args"), "the MessagePack tag 0xc1"),
    ],
)
def test_code_objects_that_lead_astray(change: Change, message: str) -> None:
    (code,) = {export.code for export in executables.exports(module("gfx942"))}
    with pytest.raises(Fault, match=message) as caught:
        disassemble(change(code))
    assert "\n" not in str(caught.value)


_OF_ANY_LENGTH = """
func.func @f(%n: index) -> tensor<?xf32> {
  %value = arith.constant 1.0 : f32
  %empty = tensor.empty(%n) : tensor<?xf32>
  %r = linalg.fill ins(%value : f32) outs(%empty : tensor<?xf32>) -> tensor<?xf32>
  return %r : tensor<?xf32>
}"""
_FOREVER = """
func.func @f(%n: index) -> index {
  %c1 = arith.constant 1 : index
  %r = scf.while (%k = %n) : (index) -> index {
    %odd = arith.ori %k, %c1 : index
    %more = arith.cmpi ne, %odd, %n : index
    scf.condition(%more) %odd : index
  } do {
  ^bb0(%k: index):
    %next = arith.muli %k, %k : index
    scf.yield %next : index
  }
  return %r : index
}"""
_MANY_WORKGROUPS = """
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#none = #iree_codegen.no_pipeline
#how = #iree_codegen.translation_info<pipeline = #none workgroup_size = [64, 1, 1]>
hal.executable.source private @many {
  hal.executable.export public @kernel ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %x = arith.constant 2147483648 : index
    %y = arith.constant 65535 : index
    %z = arith.constant 1 : index
    hal.return %x, %y, %z : index, index, index
  }
  builtin.module {
    func.func @kernel() attributes {translation_info = #how} {
      %c0 = arith.constant 0 : index
      %one = arith.constant 1.0 : f32
      %all = hal.interface.binding.subspan layout(#layout) binding(0) alignment(64) offset(%c0)
        : memref<4xf32>
      memref.store %one, %all[%c0] : memref<4xf32>
      return
    }
  }
}
func.func @f(%n: index) -> tensor<4xf32> {
  %r = flow.dispatch @many::@kernel() : () -> tensor<4xf32>
  return %r : tensor<4xf32>
}"""


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("text", "argument", "message"),
    [
        (_OF_ANY_LENGTH, 1 << 58, f"no memory for transient 1 of {1 << 60} bytes"),
        (_OF_ANY_LENGTH, 1 << 30, f"no memory for transient 1 of {1 << 32} bytes"),
        (_FOREVER, 2, "the host program does not end: 262144 steps were made"),
        (_MANY_WORKGROUPS, 0, r"workgroups \(2147483648, 65535, 1\) of \(64, 1, 1\): .* threads"),
    ],
    ids=["2^60 bytes", "2^32 bytes", "no end", "many workgroups"],
)
def test_host_programs_that_want_too_much(
    text: str, argument: int, message: str, target: str
) -> None:
    found = find_target(target)
    vmfb = compile_str(text, input_type="none", extra_args=list(found.flags))
    loaded = Module(vmfb, found.backend)
    with pytest.raises((Fault, VmError), match=message):
        loaded.call("f", argument)
