"""What inspection reads off a module's code, against what the compiler wrote beside it."""

from __future__ import annotations

import io
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from iree_lnbwd import NormSpec
from iree_lnbwd.compiling import compiler, ir
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.vmfb import inspection
from iree_lnbwd.vmfb.executables import exports
from iree_lnbwd.vmfb.inspection import KernelReport

SPEC = NormSpec((1000,), "bf16")


def built(target: Target, *flags: str) -> bytes:
    return compiler.build(SPEC, target, extra_flags=flags)[0]


def dumped(folder: Path, ending: str) -> str:
    """What iree-compile wrote of all kernels in one language."""
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"*{ending}")))


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx1100"])
def test_rocm_kernels_are_those_of_the_assembly(name: str, tmp_path: Path) -> None:
    """The assembler's metadata is YAML in the .rocmasm and MessagePack in the module."""
    target = find_target(name)
    vmfb = built(target, f"--iree-hal-dump-executable-files-to={tmp_path}")
    assembly = dumped(tmp_path, ".rocmasm")

    def values(key: str) -> list[str]:
        return re.findall(rf"^ +(?:- )?\.{key}: +(\S+)$", assembly, re.MULTILINE)

    expected = {
        KernelReport(kernel, int(threads), int(registers), int(shared), int(stack))
        for kernel, threads, registers, shared, stack in zip(
            [symbol.removesuffix(".kd") for symbol in values("symbol")],
            values("max_flat_workgroup_size"),
            values("vgpr_count"),
            values("group_segment_fixed_size"),
            values("private_segment_fixed_size"),
            strict=True,
        )
    }
    assert len(expected) >= 2
    assert set(inspection.kernels(vmfb, target)) == expected


@pytest.mark.parametrize("name", ["sm_75", "sm_90"])
def test_cuda_kernels_are_those_of_the_ptx(name: str, tmp_path: Path) -> None:
    target = find_target(name)
    vmfb = built(target, f"--iree-hal-dump-executable-files-to={tmp_path}")
    ptx = dumped(tmp_path, ".ptx")
    entries = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    threads = [int(x) for x in re.findall(r"^\.maxntid (\d+)", ptx, re.MULTILINE)]
    assert len(entries) >= 2
    found = inspection.kernels(vmfb, target)
    assert sorted((k.name, k.threads) for k in found) == sorted(zip(entries, threads, strict=True))


@pytest.mark.drawn
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
def test_ptxas_says_what_cuda_kernels_need() -> None:
    for kernel in inspection.kernels(built(find_target("sm_90")), find_target("sm_90")):
        assert kernel.registers is not None
        assert 8 <= kernel.registers <= 255
        assert kernel.shared_bytes == launched_with(built(find_target("sm_90")), kernel.name)
        assert kernel.stack_bytes == 0


def launched_with(vmfb: bytes, kernel: str) -> int:
    """Bytes of shared memory that a launch adds; kernels of IREE's declare none."""
    (export,) = (one for one in exports(vmfb) if one.kernel == kernel)
    assert export.shared_bytes > 0
    return export.shared_bytes


def test_without_ptxas_needs_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    target = find_target("sm_90")
    vmfb = built(target)
    monkeypatch.setenv("PATH", "")
    found = inspection.kernels(vmfb, target)
    assert len(found) >= 2
    for kernel in found:
        assert kernel.threads is not None
        assert (kernel.registers, kernel.stack_bytes) == (None, None)
        assert kernel.shared_bytes == launched_with(vmfb, kernel.name)


def test_what_ptx_declares_itself_only_ptxas_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    vmfb = built(find_target("sm_90"))
    before = inspection.ptx
    declared = ".shared .align 4 .b8 x[64];\n"
    monkeypatch.setattr(inspection, "ptx", lambda code: before(code) + declared)
    assert all(k.shared_bytes is None for k in inspection.kernels(vmfb, find_target("sm_90")))


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["host", "generic"])
def test_cpu_kernels_have_names_alone(name: str) -> None:
    """Those of ir/*row_blocks.mlir, or those that IREE makes of whole tensors."""
    target = find_target(name)
    spec = NormSpec((64,), eps=1e-5)
    text = compiler.read_ir(ir.ROW_BLOCKS) + compiler.read_ir(ir.FORWARD_ROW_BLOCKS)
    exported = re.findall(r"hal\.executable\.export public @(\w+)", text)
    vmfb, _ = compiler.build(spec, target)
    assert inspection.kernels(vmfb, target) == tuple(map(KernelReport, sorted(exported)))

    vmfb, _ = compiler.build(spec, target, schedule=WholeTensors())
    found = inspection.kernels(vmfb, target)
    assert len(found) >= 2
    assert all(re.fullmatch(r"layer_norm_backward_dispatch_\d+_\w+", k.name) for k in found)
    assert all(k == KernelReport(k.name) for k in found)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["host", "generic"])
def test_cpu_kernels_that_nobody_needs_are_left_out(name: str) -> None:
    target = find_target(name)
    for mask, expected in (
        ((True, True, True), ["finalize", "rows"]),
        ((True, False, False), ["rows"]),
    ):
        vmfb, _ = compiler.build(NormSpec((64,), output_mask=mask), target)
        assert [kernel.name for kernel in inspection.kernels(vmfb, target)] == expected


def test_ptx_is_whole() -> None:
    vmfb = built(find_target("sm_80"))
    text = inspection.ptx(vmfb)  # what is stored in a module is not compressed
    assert text.startswith("//\n// Generated by LLVM NVPTX")
    assert ".target sm_80" in text
    assert text.rstrip().endswith("}")


def test_ptx_of_anything_else_is_none() -> None:
    assert inspection.ptx(b"\x7fELF") == ""
    assert inspection.ptx(built(find_target("generic"))) == ""


METADATA = b"\x81\xaeamdhsa.kernels"
PTX = b"//\n// Generated by LLVM NVPTX"

# Code that a module could hold beside a host program and checksums that are right.
DAMAGED = {
    "an array of four thousand millions, without one of them": ("gfx942", METADATA + b"\xdd" * 5),
    "a table of as many": ("gfx942", METADATA + b"\xdf" * 5),
    "a string of as many letters": ("gfx942", METADATA + b"\xdb" * 5),
    "arrays in arrays": ("gfx942", METADATA + b"\x91" * 100_000),
    "no kernels": ("gfx942", METADATA + b"\x05"),
    "a kernel that is a number": ("gfx942", METADATA + b"\x91\x05"),
    "a kernel without a name": ("gfx942", METADATA + b"\x91\x81\xa1x\x05"),
    "a table with a table for a name": ("gfx942", METADATA + b"\x91\x81\x81\x05\x05\x05"),
    "an unknown tag": ("gfx942", METADATA + b"\x91\xc1"),
    "a name that is no UTF-8": ("gfx942", METADATA + b"\xa2\xff\xff"),
    "PTX that does not end": ("sm_90", PTX),
    "PTX that is no UTF-8": ("sm_90", PTX + b"\xff\xff\0"),
    "PTX with a count of too many digits": (
        "sm_90",
        PTX + b".entry k() .maxntid " + b"9" * 5000 + b", 1, 1\0",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_code(what: str) -> None:
    target, code = DAMAGED[what]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("code", code)
    with pytest.raises(ValueError, match=r"^kernels: damaged: [^\n]{1,300}$"):
        inspection.kernels(packed.getvalue(), find_target(target))
