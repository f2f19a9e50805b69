"""Instructions for AMD GPUs that our modules seldom have: to machine code, to text, and back."""

from __future__ import annotations

import pytest
from test_amdgcn_disassembly import _code_object, assemble

from iree_lnbwd.emulator.amdgcn import disassemble

SHARED = """
s_brev_b32 s1, s2
s_brev_b64 s[2:3], s[4:5]
v_bfrev_b32_e32 v1, v2
v_bfrev_b32_e64 v1, s2
v_rcp_f64_e32 v[2:3], v[4:5]
v_rsq_f64_e64 v[2:3], |v[4:5]|
v_sqrt_f64_e32 v[2:3], v[4:5]
v_cmp_class_f64_e32 MASK, v[2:3], v4
v_cmp_class_f64_e64 SCALARS, v[2:3], v4
v_div_scale_f64 v[2:3], MASK, v[4:5], v[6:7], v[4:5]
v_div_fmas_f64 v[2:3], v[4:5], v[6:7], v[8:9]
v_div_fixup_f64 v[2:3], -v[4:5], v[6:7], v[8:9]
v_med3_i32 v1, v2, v3, v4
v_med3_u32 v1, v2, 7, s4
s_bcnt0_i32_b32 s1, s2
s_bcnt0_i32_b64 s1, s[2:3]
v_bcnt_u32_b32 v1, v2, 7
v_trunc_f32_e32 v1, v2
v_ceil_f32_e32 v1, v2
v_rndne_f32_e32 v1, v2
v_floor_f32_e64 v1, -s2
v_exp_f32_e32 v1, v2
v_log_f32_e32 v1, v2
v_min3EXTREME_f32 v1, v2, s3, |v4|
v_max3EXTREME_f32 v1, -v2, v3, v4
"""
OWN = {
    "gfx942": """
v_add_u16_e32 v1, v2, v3
v_sub_u16_e64 v1, v2, s3
v_subrev_u16_e32 v1, v2, v3
v_mul_lo_u16_e32 v1, v2, v3
v_lshlrev_b16_e32 v1, 8, v3
v_lshrrev_b16_e32 v1, 8, v3
v_ashrrev_i16_e32 v1, 8, v3
v_mul_u32_u24_sdwa v2, v0, s30 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD
v_add_f32_sdwa v1, -s2, |v3| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_add_f32_sdwa v1, |v2|, -v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_cmp_lt_i16_sdwa vcc, v1, v2 src0_sel:WORD_1 src1_sel:DWORD
v_cmp_lt_u32_sdwa s[6:7], v1, v2 src0_sel:BYTE_3 src1_sel:WORD_0
v_add_f32_dpp v1, |v2|, -v3 row_ror:15 row_mask:0xf bank_mask:0xf
s_flbit_i32_b32 s1, s2
s_flbit_i32_b64 s1, s[2:3]
s_flbit_i32 s1, s2
s_flbit_i32_i64 s1, s[2:3]
v_ffbh_u32_e32 v1, v2
v_ffbl_b32_e64 v1, s2
v_ffbh_i32_e32 v1, v2
ds_read_u8_d16 v1, v2
ds_read_u8_d16_hi v1, v2
ds_read_i8_d16 v1, v2
ds_read_i8_d16_hi v1, v2
ds_read_u16_d16 v1, v2 offset:6
ds_read_u16_d16_hi v1, v2
ds_write_b8_d16_hi v1, v2
ds_write_b16_d16_hi v1, v2 offset:6
global_load_ubyte_d16 v1, v[2:3], off
global_load_ubyte_d16_hi v1, v[2:3], off
global_load_sbyte_d16 v1, v[2:3], off
global_load_sbyte_d16_hi v1, v[2:3], off
global_load_short_d16 v1, v[2:3], off
global_load_short_d16_hi v1, v[2:3], off
global_store_byte_d16_hi v[2:3], v1, off
buffer_load_sbyte_d16_hi v1, off, s[4:7], 0
buffer_store_byte_d16_hi v1, off, s[4:7], 0
""",
    "gfx1100": """
v_cmpx_class_f64_e32 v[2:3], v4
v_cvt_u32_u16_e32 v1, v2.h
v_cvt_i32_i16_e32 v1, v2.l
v_add_nc_u16 v1.l, v2.l, v3.h
v_sub_nc_u16 v1.h, v2.l, v3.l
v_mul_lo_u16 v1.l, v2.l, v3.l
v_lshlrev_b16 v1.l, 8, v3.l
v_lshrrev_b16 v1.h, 8, v3.l
v_ashrrev_i16 v1.l, v2.h, v3.l
v_and_b16 v1.l, v2.l, v3.h
v_or_b16 v1.l, v2.h, v3.l
v_xor_b16 v1.h, v2.l, v3.l
s_clz_i32_u32 s1, s2
s_clz_i32_u64 s1, s[2:3]
s_cls_i32 s1, s2
s_cls_i32_i64 s1, s[2:3]
v_clz_i32_u32_e32 v1, v2
v_ctz_i32_b32_e64 v1, s2
v_cls_i32_e32 v1, v2
ds_load_u8_d16 v1, v2
ds_load_u8_d16_hi v1, v2
ds_load_i8_d16 v1, v2
ds_load_i8_d16_hi v1, v2
ds_load_u16_d16 v1, v2 offset:6
ds_load_u16_d16_hi v1, v2
ds_store_b8_d16_hi v1, v2
ds_store_b16_d16_hi v1, v2 offset:6
global_load_d16_u8 v1, v[2:3], off
global_load_d16_hi_u8 v1, v[2:3], off
global_load_d16_i8 v1, v[2:3], off
global_load_d16_hi_i8 v1, v[2:3], off
global_store_d16_hi_b8 v[2:3], v1, off
buffer_load_d16_hi_i8 v1, off, s[4:7], s8
buffer_store_d16_hi_b8 v1, off, s[4:7], s8
""",
}
OWN["gfx90a"], OWN["gfx1201"] = OWN["gfx942"], OWN["gfx1100"]
_WAVE64, _WAVE32 = ("vcc", "s[6:7]"), ("vcc_lo", "s6")
_MASKS = {"gfx90a": _WAVE64, "gfx942": _WAVE64, "gfx1100": _WAVE32, "gfx1201": _WAVE32}


@pytest.mark.parametrize("target", OWN)
def test_each_instruction(target: str) -> None:
    mask, scalars = _MASKS[target]
    body = SHARED.replace("MASK", mask).replace("SCALARS", scalars) + OWN[target]
    body = body.replace("EXTREME", "_num" if target == "gfx1201" else "")
    lines = [line for line in body.splitlines() if line]
    head = "\t.text\n\t.globl k\n\t.type k,@function\nk:\n"
    tail = ".Lfunc_end_k:\n\t.size k, .Lfunc_end_k-k\n"
    first = assemble(head + "".join(f"\t{line}\n" for line in lines) + tail, target)["k"]
    text = disassemble(_code_object(first, target))
    read = text[text.index("k:\n") + 3 : text.index(".Lfunc_end_k:")].splitlines()
    assert [line.split()[0] for line in read] == [line.split()[0] for line in lines]
    assert assemble(text, target)["k"] == first
