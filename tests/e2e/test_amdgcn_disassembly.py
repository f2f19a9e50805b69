"""What is read of machine code for AMD GPUs is what LLVM's assembler makes the same bytes of."""

from __future__ import annotations

import re
import struct
import tempfile
from pathlib import Path

import pytest
from iree.compiler.tools import CompilerToolError, compile_str
from support import built

from iree_lnbwd.emulator import Fault
from iree_lnbwd.emulator.amdgcn import disassemble
from iree_lnbwd.emulator.amdgcn.disassembly import PROCESSORS, symbols
from iree_lnbwd.hardware.targets import find_target, targets
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.vmfb import executables

TARGETS = tuple(target.name for target in targets() if target.backend == "rocm")

# A module whose only purpose is its assembly.
_CARRIER = """\
#layout = #hal.pipeline.layout<bindings = [#hal.pipeline.binding<storage_buffer>]>
#none = #iree_codegen.no_pipeline
#how = #iree_codegen.translation_info<pipeline = #none workgroup_size = [1, 1, 1]>
hal.executable.source public @carrier {
  hal.executable.export public @carrier ordinal(0) layout(#layout)
      count(%device: !hal.device) -> (index, index, index) {
    %c1 = arith.constant 1 : index
    hal.return %c1, %c1, %c1 : index, index, index
  }
  builtin.module attributes {llvm.module_asm = [LINES]} {
    func.func @carrier() attributes {translation_info = #how} {
      return
    }
  }
}
"""


def assemble(text: str, target: str) -> dict[str, bytes]:
    """The functions of some assembly, by the assembler inside the compiler."""
    text = re.sub(r"\t\.amdhsa_kernel.*?\.end_amdhsa_kernel\n", "", text, flags=re.DOTALL)
    lines = [line.replace("\t", " ") for line in text.splitlines() if ".amdgcn_target" not in line]
    mlir = _CARRIER.replace("LINES", ", ".join(f'"{line}"' for line in lines))
    with tempfile.TemporaryDirectory() as folder:
        flags = [*find_target(target).flags, f"--iree-hal-dump-executable-binaries-to={folder}"]
        compile_str(mlir, input_type="none", extra_args=flags)
        (file,) = Path(folder).glob("*.hsaco")
        return symbols(file.read_bytes())


def code_objects(spec: NormSpec, target: str) -> set[bytes]:
    vmfb, _ = built(spec, find_target(target))
    return {export.code for export in executables.exports(vmfb)}


SPECS = [
    NormSpec((64,), "bf16"),
    NormSpec((769,), "f16"),
    NormSpec((1000,), "f32"),
    NormSpec((4096,), "bf16", weight_dtype="f32"),
    NormSpec((65536,), "bf16"),
    NormSpec((769,), "f32", eps=1e-5),
    NormSpec((769,), "bf16", output_mask=(False, True, True)),
    NormSpec((769,), "f64"),
    NormSpec((4096,), "f16", op="rms_norm", eps=1e-6, residual_dtype="f16"),
    NormSpec((769,), "bf16", op="layer_norm", eps=1e-5),
]
# Of a generation that another target has too, every other module.
SOME = ("gfx90a", "gfx950")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (spec, target)
        for target in TARGETS
        for spec in (SPECS[SOME.index(target) :: 2] if target in SOME else SPECS)
    ],
    ids=lambda value: value.name if isinstance(value, NormSpec) else value,
)
def test_modules(spec: NormSpec, target: str) -> None:
    for code in code_objects(spec, target):
        content = symbols(code)
        again = assemble(disassemble(code), target)
        kernels = [name.removesuffix(".kd") for name in content if name.endswith(".kd")]
        assert kernels
        for kernel in kernels:
            assert again[kernel] == content[kernel]


# What modules do not have, but the reader knows: operands and modifiers of all kinds.
SHARED = """
s_mov_b64 s[0:1], exec
s_and_saveexec_b64 s[2:3], vcc
s_movk_i32 s0, 0xfffe
s_cmpk_lt_u32 s0, 0x8000
s_load_SCALAR s[8:15], s[2:3], 0x20
v_mov_b32_e32 v1, 0x12345678
v_add_f32_e64 v1, -|v2|, |s3|
v_add_f32_e64 v1, v2, neg(1.0) clamp
v_fma_f32 v1, -v2, v3, |v4|
v_fmamk_f32 v1, v2, 0x44000000, v3
v_fmaak_f32 v1, v2, v3, 0x44000000
v_cndmask_b32_e64 v1, -v2, |v3|, MASK
v_cmp_class_f32_e64 MASK, v1, v2
v_mad_i32_i24 v1, v2, s3, -4
v_mad_u32_u24 v1, v2, s3, 64
v_pk_add_f16 v1, v2, v3
v_pk_add_f16 v1, s2, v3 op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0] neg_hi:[0,1]
v_pk_mul_f16 v1, v2, -4.0 op_sel:[1,0] op_sel_hi:[0,0]
v_pk_fma_f16 v1, v2, v3, v4 op_sel:[0,0,1] op_sel_hi:[1,1,0] neg_lo:[0,0,1] neg_hi:[0,1,0]
v_readlane_b32 s0, v1, s3
v_writelane_b32 v1, s0, 63
v_add_f32_dpp v1, -v2, |v3| quad_perm:[3,2,1,0] row_mask:0x3 bank_mask:0x5
v_mov_b32_dpp v1, v2 row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:1
v_mov_b32_dpp v1, v2 row_ror:15 row_mask:0xf bank_mask:0xf
global_load_LOAD v[4:7], v[2:3], off offset:-16
global_store_LOAD v1, v[4:7], s[2:3] offset:4095
buffer_load_LOAD v[4:7], v1, s[4:7], 0 offen offset:12
buffer_store_LOAD v[4:7], off, s[4:7], s9 offset:12
scratch_load_LOAD v[4:7], v1, off offset:8
scratch_store_LOAD off, v[4:7], s3
s_nop 0x3
BARRIER
s_endpgm
"""
OWN = {
    "gfx942": """
v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[1,0,0]
v_pk_add_f32 v[0:1], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[1,1]
v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]
v_mov_b32_dpp v1, v2 row_bcast:15 row_mask:0xa bank_mask:0xf
v_mov_b32_dpp v1, v2 row_newbcast:3 row_mask:0xf bank_mask:0xf
v_cvt_f32_f16_sdwa v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1
v_addc_co_u32_e32 v1, vcc, v2, v3, vcc
v_mad_u64_u32 v[0:1], s[2:3], v4, v5, v[6:7]
v_lshl_add_u64 v[0:1], v[2:3], 3, v[4:5]
ds_read2st64_b32 v[0:1], v2 offset0:1 offset1:2
ds_write_b128 v0, v[4:7] offset:65520
ds_bpermute_b32 v0, v1, v2 offset:4
global_load_dword v1, v[2:3], off sc0 nt sc1
v_accvgpr_write_b32 a1, v2
v_accvgpr_write_b32 a1, s2
v_accvgpr_write_b32 a255, 64
v_accvgpr_read_b32 v1, a2
global_load_dwordx4 a[4:7], v[2:3], off
global_store_dword v1, a2, s[2:3]
ds_read2st64_b32 a[0:1], v2 offset0:1 offset1:2
ds_write_b128 v0, a[4:7]
buffer_load_dwordx4 a[4:7], v1, s[4:7], 0 offen
buffer_store_dword a4, off, s[4:7], s9 offset:12
scratch_load_dword a4, v1, off offset:8
scratch_store_dword off, a4, s3
s_waitcnt vmcnt(63) expcnt(7) lgkmcnt(0)
s_waitcnt vmcnt(17)
buffer_inv sc1
""",
    "gfx950": """
v_permlane16_swap_b32_e32 v1, v2
v_permlane32_swap_b32_e32 v1, v2
v_bitop3_b32 v1, v2, s3, v4 bitop3:0x36
v_bitop3_b32 v1, 1, v3, v4 bitop3:0xc9
""",
    "gfx1100": """
v_cndmask_b16 v6.l, 0, v4.h, vcc_lo
v_cndmask_b16 v6.h, v4.l, 0, s0
v_dual_mov_b32 v1, 0x42280000 :: v_dual_cndmask_b32 v4, v3, v5
v_dual_fmac_f32 v0, v2, v3 :: v_dual_add_nc_u32 v1, 1, v5
v_dual_fmamk_f32 v0, v2, 0x42280000, v3 :: v_dual_mul_f32 v1, 2.0, v5
v_dual_fmaak_f32 v0, v2, v3, 0x42280000 :: v_dual_fmamk_f32 v1, v4, 0x42280000, v5
v_mov_b16_e32 v1.h, v2.l
v_mov_b16_e32 v1.l, 0x3c00
v_cvt_f32_f16_e32 v1, v2.h
v_fma_mix_f32 v0, -v1, |v2|, v3 op_sel:[1,0,0] op_sel_hi:[1,0,1]
v_fma_mixhi_f16 v0, v1, 1.0, v3 op_sel_hi:[1,0,1]
v_permlanex16_b32 v1, v2, -1, s4 op_sel:[1,0]
v_mov_b32_dpp v1, v2 row_xmask:7 row_mask:0xf bank_mask:0xf fi:1
v_mov_b32_dpp v1, v2 row_share:3 row_mask:0xf bank_mask:0xf
v_cmpx_lt_u32_e32 v1, v2
v_cmp_class_f32_e64 s6, v1, 0x260
v_cmpx_lt_u64_e64 v[0:1], s[2:3]
v_add_co_ci_u32_e64 v1, null, v2, v3, s0
v_mad_u64_u32 v[0:1], null, v4, v5, v[6:7]
ds_load_2addr_stride64_b64 v[0:3], v4 offset1:1
ds_store_b96 v0, v[4:6] offset:8
global_load_d16_hi_b16 v1, v[2:3], off
global_load_b32 v1, v[2:3], off glc slc dlc
s_waitcnt vmcnt(3) lgkmcnt(0)
s_waitcnt_vscnt null, 0x0
s_clause 0x2
s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)
buffer_gl0_inv
""",
    "gfx1201": """
v_cndmask_b16 v6.h, v4.l, 0, s0
v_dual_max_num_f32 v0, v2, v3 :: v_dual_min_num_f32 v1, 1.0, v5
v_dual_fmaak_f32 v0, v2, v3, 0x42280000 :: v_dual_mov_b32 v1, v5
v_dual_mov_b32 v1, 0x42280000 :: v_dual_cndmask_b32 v4, v3, v5
v_add_f64_e32 v[0:1], v[2:3], v[4:5]
v_max_num_f32_e64 v1, |v2|, -v3
v_lshlrev_b64_e32 v[0:1], 3, v[4:5]
v_mad_co_u64_u32 v[0:1], null, v4, v5, v[6:7]
v_s_sqrt_f32 s0, s1
v_s_rcp_f32 s0, s1
v_s_rsq_f32 s0, 2.0
s_add_f32 s0, s1, 0x42280000
s_fmac_f32 s0, s1, s2
s_mul_f16 s0, s1, s2
s_cmp_nlt_f32 s0, s1
s_cvt_f32_f16 s0, s1
s_cvt_hi_f32_f16 s0, s1
s_rndne_f32 s0, s1
s_add_co_ci_u32 s0, s1, s2
s_add_nc_u64 s[0:1], s[2:3], s[4:5]
s_mul_u64 s[0:1], s[2:3], 0x10
s_addk_co_i32 s0, 0xfffe
s_load_u16 s0, s[2:3], 0x12
s_load_b96 s[4:6], s[2:3], s7 offset:0x10
s_load_b32 s0, s[2:3], -0x10 th:TH_LOAD_NT scope:SCOPE_SE
global_load_b32 v1, v[2:3], off th:TH_LOAD_LU
global_load_d16_hi_b16 v1, v[2:3], off th:TH_LOAD_BYPASS scope:SCOPE_SYS
global_store_b32 v[2:3], v1, off offset:-8388608 th:TH_STORE_NT_WB scope:SCOPE_DEV
global_store_b32 v[2:3], v1, off offset:8388607 th:TH_STORE_BYPASS scope:SCOPE_SYS
scratch_load_b32 v1, v2, s3 offset:8
scratch_store_b32 off, v1, off offset:-4
buffer_load_b32 v1, off, s[4:7], null offset:8388607 th:TH_LOAD_HT
global_inv scope:SCOPE_SE
global_wb scope:SCOPE_SYS
global_wbinv scope:SCOPE_DEV
s_wait_loadcnt 0x3
s_wait_storecnt 0x3
s_wait_dscnt 0x3
s_wait_kmcnt 0x3
s_wait_samplecnt 0x3
s_wait_bvhcnt 0x3
s_wait_expcnt 0x3
s_wait_loadcnt_dscnt 0x304
s_wait_storecnt_dscnt 0x304
s_wait_alu 0xfffd
s_wait_idle
s_barrier_signal -1
s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)
v_readlane_b32 ttmp9, v1, 0
s_mov_b32 s0, ttmp7
""",
}
_CDNA_WORDS = {"SCALAR": "dwordx8", "LOAD": "dwordx4", "MASK": "s[6:7]", "BARRIER": "s_barrier"}
_RDNA_WORDS = {
    "SCALAR": "b256",
    "LOAD": "b128",
    "MASK": "s6",
    "_b64 s[2:3], vcc": "_b32 s2, vcc_lo",
}
_WORDS = {
    "gfx942": _CDNA_WORDS,
    "gfx950": _CDNA_WORDS,
    "gfx1100": _RDNA_WORDS | {"BARRIER": "s_barrier"},
    "gfx1201": _RDNA_WORDS
    | {"BARRIER": "s_barrier_wait -1", "s_cmpk_lt_u32 s0, 0x8000": "s_mulk_i32 s0, 0x8000"}
    | {"v[4:7], v1, s[4:7], 0 offen": "v[4:7], v1, s[4:7], null offen"},
}


@pytest.mark.parametrize("target", OWN)
def test_each_instruction(target: str) -> None:
    """Text to machine code, to text, to the same machine code."""
    body = SHARED
    for word, meaning in _WORDS[target].items():
        body = body.replace(word, meaning)
    lines = [line for line in (OWN[target] + body).splitlines() if line]
    head = "\t.text\n\t.globl k\n\t.type k,@function\nk:\n"
    tail = ".Lfunc_end_k:\n\t.size k, .Lfunc_end_k-k\n"
    first = assemble(head + "".join(f"\t{line}\n" for line in lines) + tail, target)["k"]
    text = disassemble(_code_object(first, target))
    body = text[text.index("k:\n") + 3 : text.index(".Lfunc_end_k:")]
    assert len(body.splitlines()) == len(lines)
    assert assemble(text, target)["k"] == first


def _code_object(code: bytes, target: str) -> bytes:
    """An ELF file with one function and its descriptor, as far as the reader looks."""
    (machine,) = (number for number, name in PROCESSORS.items() if name == target)
    descriptor = bytearray(64)
    struct.pack_into(
        "<H", descriptor, 56, 1 << 10 if find_target(target).subgroup_size == 32 else 0
    )
    names = b"\0k\0k.kd\0"
    content = code + bytes(descriptor) + names
    entries = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    entries += struct.pack("<IBBHQQ", 1, 2, 0, 1, 0, len(code))
    entries += struct.pack("<IBBHQQ", 3, 1, 0, 1, len(code), 64)
    content_at = 64
    entries_at = content_at + len(content)
    sections_at = entries_at + len(entries)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 0x28, sections_at)
    struct.pack_into("<I", header, 0x30, machine)
    struct.pack_into("<HH", header, 0x3A, 64, 4)
    sections = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, content_at, len(content), 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, entries_at, len(entries), 3, 0, 0, 24)
    names_at = content_at + len(code) + 64
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, names_at, len(names), 0, 0, 0, 0)
    return bytes(header) + content + entries + sections


@pytest.mark.parametrize(
    ("target", "word", "what"),
    [
        ("gfx942", "ffffffff", "number not known"),
        ("gfx942", "0000ffd3", "number not known"),
        ("gfx1100", "000000fc", "number not known"),
        ("gfx1201", "000000fc", "number not known"),
    ],
)
def test_what_is_not_known_is_a_fault(target: str, word: str, what: str) -> None:
    code = bytes.fromhex(word) + bytes(8)
    with pytest.raises(Fault, match=what):
        disassemble(_code_object(code, target))


def test_not_a_code_object() -> None:
    with pytest.raises(Fault, match="no ELF file"):
        disassemble(b"\x7fELG" + bytes(100))


def test_the_assembler_refuses_nonsense() -> None:
    """So what it accepts means something."""
    with pytest.raises(CompilerToolError):
        assemble("\t.text\n\t.type k,@function\nk:\n\tv_nonsense v0\n", "gfx942")
