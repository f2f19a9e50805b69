"""Numbers of the instructions that are known here, by encoding.

Sources: AMD's "CDNA3", "RDNA3" and "RDNA4 Instruction Set Architecture" documents. LLVM's
assembler has confirmed every one of them: each instruction was assembled and its number read back.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[int, str]


def _table(text: str) -> Table:
    pairs = (item.split("=") for item in text.split())
    return {int(number): name for name, number in pairs}


# Place of the literal among the sources of an instruction that always has one.
WITH_A_CONSTANT: Mapping[str, int] = {"v_fmamk_f32": 1, "v_fmaak_f32": 2}


def _with_long_forms(tables: Mapping[str, Table], *, first_vop1: int) -> Mapping[str, Table]:
    """With VOP3's numbers of what has a short form as well: they follow from the short ones.

    Args:
        tables: Where VOP3 has its own instructions alone.
        first_vop1: VOP3's number for VOP1's 0; VOPC begins at 0, VOP2 at 256.
    """
    short = (("vopc", 0), ("vop2", 256), ("vop1", first_vop1))
    vop3 = {
        first + number: name
        for encoding, first in short
        for number, name in tables[encoding].items()
        if name != "v_readfirstlane_b32"
        and "_swap_" not in name  # none that is known
        and name not in WITH_A_CONSTANT
    }
    return {**tables, "vop3": {**vop3, **tables["vop3"]}}


_GFX9: Mapping[str, Table] = {
    "sop1": _table(
        """
        s_mov_b32=0 s_mov_b64=1 s_not_b32=4 s_not_b64=5 s_brev_b32=8 s_brev_b64=9
        s_bcnt0_i32_b32=10 s_bcnt0_i32_b64=11 s_bcnt1_i32_b32=12 s_bcnt1_i32_b64=13
        s_ff1_i32_b32=16 s_ff1_i32_b64=17 s_flbit_i32_b32=18 s_flbit_i32_b64=19 s_flbit_i32=20
        s_flbit_i32_i64=21 s_sext_i32_i8=22 s_sext_i32_i16=23
        s_bitset0_b32=24 s_bitset0_b64=25 s_bitset1_b32=26 s_bitset1_b64=27
        s_and_saveexec_b64=32 s_or_saveexec_b64=33 s_xor_saveexec_b64=34 s_andn2_saveexec_b64=35
        s_abs_i32=48
        """
    ),
    "sop2": _table(
        """
        s_add_u32=0 s_sub_u32=1 s_add_i32=2 s_sub_i32=3 s_addc_u32=4 s_subb_u32=5 s_min_i32=6
        s_min_u32=7 s_max_i32=8 s_max_u32=9 s_cselect_b32=10 s_cselect_b64=11 s_and_b32=12
        s_and_b64=13 s_or_b32=14 s_or_b64=15 s_xor_b32=16 s_xor_b64=17 s_andn2_b32=18
        s_andn2_b64=19 s_orn2_b32=20 s_orn2_b64=21 s_nand_b32=22 s_nand_b64=23 s_nor_b32=24
        s_nor_b64=25 s_xnor_b32=26 s_xnor_b64=27 s_lshl_b32=28 s_lshl_b64=29 s_lshr_b32=30
        s_lshr_b64=31 s_ashr_i32=32 s_ashr_i64=33 s_mul_i32=36 s_bfe_u32=37 s_mul_hi_u32=44
        s_mul_hi_i32=45 s_lshl1_add_u32=46 s_lshl2_add_u32=47 s_lshl3_add_u32=48
        s_lshl4_add_u32=49 s_pack_ll_b32_b16=50
        """
    ),
    "sopc": _table(
        """
        s_cmp_eq_i32=0 s_cmp_lg_i32=1 s_cmp_gt_i32=2 s_cmp_ge_i32=3 s_cmp_lt_i32=4
        s_cmp_le_i32=5 s_cmp_eq_u32=6 s_cmp_lg_u32=7 s_cmp_gt_u32=8 s_cmp_ge_u32=9
        s_cmp_lt_u32=10 s_cmp_le_u32=11 s_bitcmp0_b32=12 s_bitcmp1_b32=13 s_cmp_eq_u64=18
        s_cmp_lg_u64=19
        """
    ),
    "sopk": _table(
        """
        s_movk_i32=0 s_cmpk_eq_i32=2 s_cmpk_lg_i32=3 s_cmpk_gt_i32=4 s_cmpk_ge_i32=5
        s_cmpk_lt_i32=6 s_cmpk_le_i32=7 s_cmpk_eq_u32=8 s_cmpk_lg_u32=9 s_cmpk_gt_u32=10
        s_cmpk_ge_u32=11 s_cmpk_lt_u32=12 s_cmpk_le_u32=13 s_addk_i32=14 s_mulk_i32=15
        """
    ),
    "sopp": _table(
        """
        s_nop=0 s_endpgm=1 s_branch=2 s_cbranch_scc0=4 s_cbranch_scc1=5 s_cbranch_vccz=6
        s_cbranch_vccnz=7 s_cbranch_execz=8 s_cbranch_execnz=9 s_barrier=10 s_waitcnt=12
        s_sleep=14 s_setprio=15
        """
    ),
    "smem": _table(
        """
        s_load_dword=0 s_load_dwordx2=1 s_load_dwordx4=2 s_load_dwordx8=3 s_load_dwordx16=4
        """
    ),
    "vop1": _table(
        """
        v_mov_b32=1 v_readfirstlane_b32=2 v_cvt_f64_i32=4 v_cvt_f32_i32=5 v_cvt_f32_u32=6
        v_cvt_u32_f32=7 v_cvt_i32_f32=8 v_cvt_f16_f32=10 v_cvt_f32_f16=11 v_cvt_f32_f64=15
        v_cvt_f64_f32=16 v_cvt_f64_u32=22 v_trunc_f32=28 v_ceil_f32=29 v_rndne_f32=30 v_floor_f32=31
        v_exp_f32=32 v_log_f32=33 v_rcp_f32=34 v_rcp_iflag_f32=35 v_rsq_f32=36 v_rcp_f64=37
        v_rsq_f64=38
        v_sqrt_f32=39 v_sqrt_f64=40 v_not_b32=43 v_bfrev_b32=44 v_ffbh_u32=45
        v_ffbl_b32=46 v_ffbh_i32=47 v_mov_b64=56
        v_permlane16_swap_b32=89 v_permlane32_swap_b32=90
        """
    ),
    "vop2": _table(
        """
        v_cndmask_b32=0 v_add_f32=1 v_sub_f32=2 v_subrev_f32=3 v_fmac_f64=4 v_mul_f32=5
        v_mul_u32_u24=8 v_mul_hi_u32_u24=9 v_min_f32=10 v_max_f32=11 v_min_i32=12 v_max_i32=13
        v_min_u32=14 v_max_u32=15 v_lshrrev_b32=16 v_ashrrev_i32=17 v_lshlrev_b32=18 v_and_b32=19
        v_or_b32=20 v_xor_b32=21 v_fmamk_f32=23 v_fmaak_f32=24 v_add_co_u32=25 v_sub_co_u32=26
        v_subrev_co_u32=27 v_addc_co_u32=28 v_subb_co_u32=29 v_subbrev_co_u32=30 v_add_f16=31
        v_sub_f16=32 v_subrev_f16=33 v_mul_f16=34 v_add_u16=38 v_sub_u16=39 v_subrev_u16=40
        v_mul_lo_u16=41 v_lshlrev_b16=42 v_lshrrev_b16=43 v_ashrrev_i16=44 v_max_f16=45
        v_min_f16=46 v_add_u32=52 v_sub_u32=53 v_subrev_u32=54 v_fmac_f32=59 v_xnor_b32=61
        """
    ),
    "vopc": _table(
        """
        v_cmp_class_f32=16 v_cmp_class_f64=18
        v_cmp_lt_f16=33 v_cmp_eq_f16=34 v_cmp_le_f16=35 v_cmp_gt_f16=36
        v_cmp_lg_f16=37 v_cmp_ge_f16=38 v_cmp_o_f16=39 v_cmp_u_f16=40 v_cmp_nge_f16=41
        v_cmp_nlg_f16=42 v_cmp_ngt_f16=43 v_cmp_nle_f16=44 v_cmp_neq_f16=45 v_cmp_nlt_f16=46
        v_cmp_lt_f32=65 v_cmp_eq_f32=66 v_cmp_le_f32=67 v_cmp_gt_f32=68 v_cmp_lg_f32=69
        v_cmp_ge_f32=70 v_cmp_o_f32=71 v_cmp_u_f32=72 v_cmp_nge_f32=73 v_cmp_nlg_f32=74
        v_cmp_ngt_f32=75 v_cmp_nle_f32=76 v_cmp_neq_f32=77 v_cmp_nlt_f32=78 v_cmp_lt_f64=97
        v_cmp_eq_f64=98 v_cmp_le_f64=99 v_cmp_gt_f64=100 v_cmp_lg_f64=101 v_cmp_ge_f64=102
        v_cmp_o_f64=103 v_cmp_u_f64=104 v_cmp_nge_f64=105 v_cmp_nlg_f64=106 v_cmp_ngt_f64=107
        v_cmp_nle_f64=108 v_cmp_neq_f64=109 v_cmp_nlt_f64=110 v_cmp_lt_i16=161 v_cmp_eq_i16=162
        v_cmp_le_i16=163 v_cmp_gt_i16=164 v_cmp_ne_i16=165 v_cmp_ge_i16=166 v_cmp_lt_u16=169
        v_cmp_eq_u16=170 v_cmp_le_u16=171 v_cmp_gt_u16=172 v_cmp_ne_u16=173 v_cmp_ge_u16=174
        v_cmp_lt_i32=193 v_cmp_eq_i32=194 v_cmp_le_i32=195 v_cmp_gt_i32=196 v_cmp_ne_i32=197
        v_cmp_ge_i32=198 v_cmp_lt_u32=201 v_cmp_eq_u32=202 v_cmp_le_u32=203 v_cmp_gt_u32=204
        v_cmp_ne_u32=205 v_cmp_ge_u32=206 v_cmp_lt_i64=225 v_cmp_eq_i64=226 v_cmp_le_i64=227
        v_cmp_gt_i64=228 v_cmp_ne_i64=229 v_cmp_ge_i64=230 v_cmp_lt_u64=233 v_cmp_eq_u64=234
        v_cmp_le_u64=235 v_cmp_gt_u64=236 v_cmp_ne_u64=237 v_cmp_ge_u64=238
        """
    ),
    "vop3": _table(
        """
        v_mad_i32_i24=450 v_mad_u32_u24=451 v_bfe_u32=456 v_bfi_b32=458 v_fma_f32=459 v_fma_f64=460
        v_alignbit_b32=462 v_min3_f32=464 v_max3_f32=467 v_med3_i32=471 v_med3_u32=472
        v_div_fixup_f32=478 v_div_fixup_f64=479
        v_div_scale_f32=480 v_div_scale_f64=481 v_div_fmas_f32=482 v_div_fmas_f64=483
        v_mad_u64_u32=488 v_perm_b32=493 v_xad_u32=499 v_lshl_add_u32=509 v_add_lshl_u32=510
        v_add3_u32=511 v_lshl_or_b32=512 v_and_or_b32=513 v_or3_b32=514 v_lshl_add_u64=520
        v_bitop3_b32=564
        v_cvt_pk_f16_f32=615 v_cvt_pk_bf16_f32=616 v_add_f64=640 v_mul_f64=641 v_min_f64=642
        v_max_f64=643 v_ldexp_f64=644 v_mul_lo_u32=645 v_mul_hi_u32=646 v_ldexp_f32=648
        v_readlane_b32=649 v_writelane_b32=650 v_bcnt_u32_b32=651 v_mbcnt_lo_u32_b32=652
        v_mbcnt_hi_u32_b32=653 v_lshlrev_b64=655 v_lshrrev_b64=656 v_ashrrev_i64=657
        v_pack_b32_f16=672
        """
    ),
    "vop3p": _table(
        """
        v_pk_fma_f16=14 v_pk_add_f16=15 v_pk_mul_f16=16 v_pk_fma_f32=48 v_pk_mul_f32=49
        v_pk_add_f32=50 v_pk_mov_b32=51 v_accvgpr_read_b32=88 v_accvgpr_write_b32=89
        """
    ),
    "ds": _table(
        """
        ds_write_b32=13 ds_write2_b32=14 ds_write2st64_b32=15 ds_write_b8=30 ds_write_b16=31
        ds_read_b32=54 ds_read2_b32=55 ds_read2st64_b32=56 ds_read_i8=57 ds_read_u8=58
        ds_read_i16=59 ds_read_u16=60 ds_swizzle_b32=61 ds_bpermute_b32=63 ds_write_b64=77
        ds_write2_b64=78 ds_write2st64_b64=79 ds_write_b8_d16_hi=84 ds_write_b16_d16_hi=85
        ds_read_u8_d16=86 ds_read_u8_d16_hi=87 ds_read_i8_d16=88 ds_read_i8_d16_hi=89
        ds_read_u16_d16=90 ds_read_u16_d16_hi=91 ds_read_b64=118 ds_read2_b64=119
        ds_read2st64_b64=120 ds_write_b96=222 ds_write_b128=223 ds_read_b96=254 ds_read_b128=255
        """
    ),
    "global": _table(
        """
        global_load_ubyte=16 global_load_sbyte=17 global_load_ushort=18 global_load_sshort=19
        global_load_dword=20 global_load_dwordx2=21 global_load_dwordx3=22
        global_load_dwordx4=23 global_store_byte=24 global_store_byte_d16_hi=25
        global_store_short=26
        global_store_short_d16_hi=27 global_store_dword=28 global_store_dwordx2=29
        global_store_dwordx3=30 global_store_dwordx4=31 global_load_ubyte_d16=32
        global_load_ubyte_d16_hi=33 global_load_sbyte_d16=34 global_load_sbyte_d16_hi=35
        global_load_short_d16=36 global_load_short_d16_hi=37
        """
    ),
    "mubuf": _table(
        """
        buffer_load_ubyte=16 buffer_load_sbyte=17 buffer_load_ushort=18 buffer_load_sshort=19
        buffer_load_dword=20 buffer_load_dwordx2=21 buffer_load_dwordx3=22
        buffer_load_dwordx4=23 buffer_store_byte=24 buffer_store_byte_d16_hi=25
        buffer_store_short=26
        buffer_store_short_d16_hi=27 buffer_store_dword=28 buffer_store_dwordx2=29
        buffer_store_dwordx3=30 buffer_store_dwordx4=31 buffer_load_ubyte_d16=32
        buffer_load_ubyte_d16_hi=33 buffer_load_sbyte_d16=34 buffer_load_sbyte_d16_hi=35
        buffer_load_short_d16=36 buffer_load_short_d16_hi=37 buffer_wbl2=40 buffer_inv=41
        """
    ),
}

_GFX11: Mapping[str, Table] = {
    "sop1": _table(
        """
        s_mov_b32=0 s_mov_b64=1 s_brev_b32=4 s_brev_b64=5
        s_ctz_i32_b32=8 s_ctz_i32_b64=9 s_clz_i32_u32=10 s_clz_i32_u64=11 s_cls_i32=12
        s_cls_i32_i64=13 s_sext_i32_i8=14 s_sext_i32_i16=15 s_abs_i32=21 s_bcnt0_i32_b32=22
        s_bcnt0_i32_b64=23 s_bcnt1_i32_b32=24 s_bcnt1_i32_b64=25 s_not_b32=30
        s_not_b64=31 s_and_saveexec_b32=32 s_and_saveexec_b64=33 s_or_saveexec_b32=34
        s_or_saveexec_b64=35 s_xor_saveexec_b32=36 s_xor_saveexec_b64=37
        s_and_not1_saveexec_b32=48 s_and_not1_saveexec_b64=49
        """
    ),
    "sop2": _table(
        """
        s_add_u32=0 s_sub_u32=1 s_add_i32=2 s_sub_i32=3 s_addc_u32=4 s_subb_u32=5 s_lshl_b32=8
        s_lshl_b64=9 s_lshr_b32=10 s_lshr_b64=11 s_ashr_i32=12 s_ashr_i64=13 s_lshl1_add_u32=14
        s_lshl2_add_u32=15 s_lshl3_add_u32=16 s_lshl4_add_u32=17 s_min_i32=18 s_min_u32=19
        s_max_i32=20 s_max_u32=21 s_and_b32=22 s_and_b64=23 s_or_b32=24 s_or_b64=25 s_xor_b32=26
        s_xor_b64=27 s_nand_b32=28 s_nand_b64=29 s_nor_b32=30 s_nor_b64=31 s_xnor_b32=32
        s_xnor_b64=33 s_and_not1_b32=34 s_and_not1_b64=35 s_or_not1_b32=36 s_or_not1_b64=37
        s_bfe_u32=38 s_mul_i32=44 s_mul_hi_u32=45 s_mul_hi_i32=46 s_cselect_b32=48
        s_cselect_b64=49 s_pack_ll_b32_b16=50
        """
    ),
    "sopc": _table(
        """
        s_cmp_eq_i32=0 s_cmp_lg_i32=1 s_cmp_gt_i32=2 s_cmp_ge_i32=3 s_cmp_lt_i32=4
        s_cmp_le_i32=5 s_cmp_eq_u32=6 s_cmp_lg_u32=7 s_cmp_gt_u32=8 s_cmp_ge_u32=9
        s_cmp_lt_u32=10 s_cmp_le_u32=11 s_bitcmp0_b32=12 s_bitcmp1_b32=13 s_cmp_eq_u64=16
        s_cmp_lg_u64=17
        """
    ),
    "sopk": _table(
        """
        s_movk_i32=0 s_cmpk_eq_i32=3 s_cmpk_lg_i32=4 s_cmpk_gt_i32=5 s_cmpk_ge_i32=6
        s_cmpk_lt_i32=7 s_cmpk_le_i32=8 s_cmpk_eq_u32=9 s_cmpk_lg_u32=10 s_cmpk_gt_u32=11
        s_cmpk_ge_u32=12 s_cmpk_lt_u32=13 s_cmpk_le_u32=14 s_addk_i32=15 s_mulk_i32=16
        s_waitcnt_vscnt=24
        """
    ),
    "sopp": _table(
        """
        s_nop=0 s_sleep=3 s_set_inst_prefetch_distance=4 s_clause=5 s_delay_alu=7
        s_waitcnt_depctr=8 s_waitcnt=9 s_code_end=31 s_branch=32 s_cbranch_scc0=33
        s_cbranch_scc1=34 s_cbranch_vccz=35 s_cbranch_vccnz=36 s_cbranch_execz=37
        s_cbranch_execnz=38 s_endpgm=48 s_setprio=53 s_sendmsg=54 s_barrier=61
        """
    ),
    "smem": _table(
        """
        s_load_b32=0 s_load_b64=1 s_load_b128=2 s_load_b256=3 s_load_b512=4
        """
    ),
    "vop1": _table(
        """
        v_mov_b32=1 v_readfirstlane_b32=2 v_cvt_f64_i32=4 v_cvt_f32_i32=5 v_cvt_f32_u32=6
        v_cvt_u32_f32=7 v_cvt_i32_f32=8 v_cvt_f16_f32=10 v_cvt_f32_f16=11 v_cvt_f32_f64=15
        v_cvt_f64_f32=16 v_cvt_f64_u32=22 v_mov_b16=28 v_trunc_f32=33 v_ceil_f32=34 v_rndne_f32=35
        v_floor_f32=36
        v_exp_f32=37 v_log_f32=39 v_rcp_f32=42 v_rcp_iflag_f32=43 v_rsq_f32=46 v_rcp_f64=47
        v_rsq_f64=49 v_sqrt_f32=51 v_sqrt_f64=52 v_not_b32=55 v_bfrev_b32=56
        v_clz_i32_u32=57 v_ctz_i32_b32=58 v_cls_i32=59 v_cvt_i32_i16=106
        v_cvt_u32_u16=107
        """
    ),
    "vop2": _table(
        """
        v_cndmask_b32=1 v_add_f32=3 v_sub_f32=4 v_subrev_f32=5 v_mul_f32=8 v_mul_u32_u24=11
        v_mul_hi_u32_u24=12 v_min_f32=15 v_max_f32=16 v_min_i32=17 v_max_i32=18 v_min_u32=19
        v_max_u32=20 v_lshlrev_b32=24 v_lshrrev_b32=25 v_ashrrev_i32=26 v_and_b32=27 v_or_b32=28
        v_xor_b32=29 v_xnor_b32=30 v_add_co_ci_u32=32 v_sub_co_ci_u32=33 v_subrev_co_ci_u32=34
        v_add_nc_u32=37 v_sub_nc_u32=38 v_subrev_nc_u32=39 v_fmac_f32=43 v_fmamk_f32=44
        v_fmaak_f32=45 v_add_f16=50 v_sub_f16=51 v_subrev_f16=52 v_mul_f16=53 v_max_f16=57
        v_min_f16=58
        """
    ),
    "vopc": _table(
        """
        v_cmp_lt_f16=1 v_cmp_eq_f16=2 v_cmp_le_f16=3 v_cmp_gt_f16=4 v_cmp_lg_f16=5
        v_cmp_ge_f16=6 v_cmp_o_f16=7 v_cmp_u_f16=8 v_cmp_nge_f16=9 v_cmp_nlg_f16=10
        v_cmp_ngt_f16=11 v_cmp_nle_f16=12 v_cmp_neq_f16=13 v_cmp_nlt_f16=14 v_cmp_lt_f32=17
        v_cmp_eq_f32=18 v_cmp_le_f32=19 v_cmp_gt_f32=20 v_cmp_lg_f32=21 v_cmp_ge_f32=22
        v_cmp_o_f32=23 v_cmp_u_f32=24 v_cmp_nge_f32=25 v_cmp_nlg_f32=26 v_cmp_ngt_f32=27
        v_cmp_nle_f32=28 v_cmp_neq_f32=29 v_cmp_nlt_f32=30 v_cmp_lt_f64=33 v_cmp_eq_f64=34
        v_cmp_le_f64=35 v_cmp_gt_f64=36 v_cmp_lg_f64=37 v_cmp_ge_f64=38 v_cmp_o_f64=39
        v_cmp_u_f64=40 v_cmp_nge_f64=41 v_cmp_nlg_f64=42 v_cmp_ngt_f64=43 v_cmp_nle_f64=44
        v_cmp_neq_f64=45 v_cmp_nlt_f64=46 v_cmp_lt_i16=49 v_cmp_eq_i16=50 v_cmp_le_i16=51
        v_cmp_gt_i16=52 v_cmp_ne_i16=53 v_cmp_ge_i16=54 v_cmp_lt_u16=57 v_cmp_eq_u16=58
        v_cmp_le_u16=59 v_cmp_gt_u16=60 v_cmp_ne_u16=61 v_cmp_ge_u16=62 v_cmp_lt_i32=65
        v_cmp_eq_i32=66 v_cmp_le_i32=67 v_cmp_gt_i32=68 v_cmp_ne_i32=69 v_cmp_ge_i32=70
        v_cmp_lt_u32=73 v_cmp_eq_u32=74 v_cmp_le_u32=75 v_cmp_gt_u32=76 v_cmp_ne_u32=77
        v_cmp_ge_u32=78 v_cmp_lt_i64=81 v_cmp_eq_i64=82 v_cmp_le_i64=83 v_cmp_gt_i64=84
        v_cmp_ne_i64=85 v_cmp_ge_i64=86 v_cmp_lt_u64=89 v_cmp_eq_u64=90 v_cmp_le_u64=91
        v_cmp_gt_u64=92 v_cmp_ne_u64=93 v_cmp_ge_u64=94 v_cmp_class_f32=126 v_cmp_class_f64=127
        v_cmpx_lt_f16=129
        v_cmpx_eq_f16=130 v_cmpx_le_f16=131 v_cmpx_gt_f16=132 v_cmpx_lg_f16=133
        v_cmpx_ge_f16=134 v_cmpx_o_f16=135 v_cmpx_u_f16=136 v_cmpx_nge_f16=137
        v_cmpx_nlg_f16=138 v_cmpx_ngt_f16=139 v_cmpx_nle_f16=140 v_cmpx_neq_f16=141
        v_cmpx_nlt_f16=142 v_cmpx_lt_f32=145 v_cmpx_eq_f32=146 v_cmpx_le_f32=147
        v_cmpx_gt_f32=148 v_cmpx_lg_f32=149 v_cmpx_ge_f32=150 v_cmpx_o_f32=151 v_cmpx_u_f32=152
        v_cmpx_nge_f32=153 v_cmpx_nlg_f32=154 v_cmpx_ngt_f32=155 v_cmpx_nle_f32=156
        v_cmpx_neq_f32=157 v_cmpx_nlt_f32=158 v_cmpx_lt_f64=161 v_cmpx_eq_f64=162
        v_cmpx_le_f64=163 v_cmpx_gt_f64=164 v_cmpx_lg_f64=165 v_cmpx_ge_f64=166 v_cmpx_o_f64=167
        v_cmpx_u_f64=168 v_cmpx_nge_f64=169 v_cmpx_nlg_f64=170 v_cmpx_ngt_f64=171
        v_cmpx_nle_f64=172 v_cmpx_neq_f64=173 v_cmpx_nlt_f64=174 v_cmpx_lt_i16=177
        v_cmpx_eq_i16=178 v_cmpx_le_i16=179 v_cmpx_gt_i16=180 v_cmpx_ne_i16=181
        v_cmpx_ge_i16=182 v_cmpx_lt_u16=185 v_cmpx_eq_u16=186 v_cmpx_le_u16=187
        v_cmpx_gt_u16=188 v_cmpx_ne_u16=189 v_cmpx_ge_u16=190 v_cmpx_lt_i32=193
        v_cmpx_eq_i32=194 v_cmpx_le_i32=195 v_cmpx_gt_i32=196 v_cmpx_ne_i32=197
        v_cmpx_ge_i32=198 v_cmpx_lt_u32=201 v_cmpx_eq_u32=202 v_cmpx_le_u32=203
        v_cmpx_gt_u32=204 v_cmpx_ne_u32=205 v_cmpx_ge_u32=206 v_cmpx_lt_i64=209
        v_cmpx_eq_i64=210 v_cmpx_le_i64=211 v_cmpx_gt_i64=212 v_cmpx_ne_i64=213
        v_cmpx_ge_i64=214 v_cmpx_lt_u64=217 v_cmpx_eq_u64=218 v_cmpx_le_u64=219
        v_cmpx_gt_u64=220 v_cmpx_ne_u64=221 v_cmpx_ge_u64=222 v_cmpx_class_f32=254
        v_cmpx_class_f64=255
        """
    ),
    "vop3": _table(
        """
        v_mad_i32_i24=522 v_mad_u32_u24=523 v_bfe_u32=528 v_bfi_b32=530 v_fma_f32=531 v_fma_f64=532
        v_alignbit_b32=534 v_min3_f32=537 v_max3_f32=540 v_med3_i32=544 v_med3_u32=545
        v_div_fixup_f32=551 v_div_fixup_f64=552
        v_div_fmas_f32=567 v_div_fmas_f64=568 v_perm_b32=580 v_xad_u32=581
        v_lshl_add_u32=582 v_add_lshl_u32=583 v_add3_u32=597 v_lshl_or_b32=598 v_and_or_b32=599
        v_or3_b32=600 v_permlane16_b32=603 v_permlanex16_b32=604 v_cndmask_b16=605
        v_div_scale_f32=764
        v_div_scale_f64=765
        v_mad_u64_u32=766 v_add_co_u32=768 v_sub_co_u32=769 v_subrev_co_u32=770 v_add_nc_u16=771
        v_sub_nc_u16=772 v_mul_lo_u16=773 v_pack_b32_f16=785
        v_ldexp_f32=796 v_bcnt_u32_b32=798 v_mbcnt_lo_u32_b32=799 v_mbcnt_hi_u32_b32=800
        v_add_f64=807 v_mul_f64=808 v_min_f64=809 v_max_f64=810 v_ldexp_f64=811
        v_mul_lo_u32=812 v_mul_hi_u32=813 v_lshlrev_b16=824 v_lshrrev_b16=825 v_ashrrev_i16=826
        v_lshlrev_b64=828 v_lshrrev_b64=829 v_ashrrev_i64=830 v_readlane_b32=864
        v_writelane_b32=865 v_and_b16=866 v_or_b16=867 v_xor_b16=868
        """
    ),
    "vop3p": _table(
        """
        v_pk_fma_f16=14 v_pk_add_f16=15 v_pk_mul_f16=16 v_fma_mix_f32=32 v_fma_mixlo_f16=33
        v_fma_mixhi_f16=34
        """
    ),
    "ds": _table(
        """
        ds_store_b32=13 ds_store_2addr_b32=14 ds_store_2addr_stride64_b32=15 ds_store_b8=30
        ds_store_b16=31 ds_swizzle_b32=53 ds_load_b32=54 ds_load_2addr_b32=55
        ds_load_2addr_stride64_b32=56 ds_load_i8=57 ds_load_u8=58 ds_load_i16=59 ds_load_u16=60
        ds_store_b64=77 ds_store_2addr_b64=78 ds_store_2addr_stride64_b64=79 ds_load_b64=118
        ds_load_2addr_b64=119 ds_load_2addr_stride64_b64=120 ds_store_b8_d16_hi=160
        ds_store_b16_d16_hi=161 ds_load_u8_d16=162 ds_load_u8_d16_hi=163 ds_load_i8_d16=164
        ds_load_i8_d16_hi=165 ds_load_u16_d16=166 ds_load_u16_d16_hi=167 ds_bpermute_b32=179
        ds_store_b96=222 ds_store_b128=223 ds_load_b96=254 ds_load_b128=255
        """
    ),
    "global": _table(
        """
        global_load_u8=16 global_load_i8=17 global_load_u16=18 global_load_i16=19
        global_load_b32=20 global_load_b64=21 global_load_b96=22 global_load_b128=23
        global_store_b8=24 global_store_b16=25 global_store_b32=26 global_store_b64=27
        global_store_b96=28 global_store_b128=29 global_load_d16_u8=30
        global_load_d16_i8=31 global_load_d16_b16=32 global_load_d16_hi_u8=33
        global_load_d16_hi_i8=34
        global_load_d16_hi_b16=35 global_store_d16_hi_b8=36
        global_store_d16_hi_b16=37
        """
    ),
    "mubuf": _table(
        """
        buffer_load_u8=16 buffer_load_i8=17 buffer_load_u16=18 buffer_load_i16=19
        buffer_load_b32=20 buffer_load_b64=21 buffer_load_b96=22 buffer_load_b128=23
        buffer_store_b8=24 buffer_store_b16=25 buffer_store_b32=26 buffer_store_b64=27
        buffer_store_b96=28 buffer_store_b128=29 buffer_load_d16_u8=30
        buffer_load_d16_i8=31 buffer_load_d16_b16=32 buffer_load_d16_hi_u8=33
        buffer_load_d16_hi_i8=34
        buffer_load_d16_hi_b16=35 buffer_store_d16_hi_b8=36
        buffer_store_d16_hi_b16=37 buffer_gl0_inv=43 buffer_gl1_inv=44
        """
    ),
}


def _changed(encoding: str, text: str, *, gone: str = "") -> Table:
    """gfx11's table as gfx12 has it: with other names or numbers, and without some."""
    kept = {n: name for n, name in _GFX11[encoding].items() if name not in gone.split()}
    return {**kept, **_table(text)}


_GFX12: Mapping[str, Table] = {
    "sop1": _changed(
        "sop1",
        """
        s_barrier_signal=78 s_ceil_f32=96 s_floor_f32=97 s_trunc_f32=98 s_rndne_f32=99
        s_cvt_f32_i32=100 s_cvt_f32_u32=101 s_cvt_i32_f32=102 s_cvt_u32_f32=103
        s_cvt_f16_f32=104 s_cvt_f32_f16=105 s_cvt_hi_f32_f16=106
        """,
    ),
    "sop2": _changed(
        "sop2",
        """
        s_add_co_u32=0 s_sub_co_u32=1 s_add_co_i32=2 s_sub_co_i32=3 s_add_co_ci_u32=4
        s_sub_co_ci_u32=5 s_add_f32=64 s_sub_f32=65 s_min_num_f32=66 s_max_num_f32=67
        s_mul_f32=68 s_fmac_f32=71 s_add_f16=73 s_sub_f16=74 s_min_num_f16=75 s_max_num_f16=76
        s_mul_f16=77 s_add_nc_u64=83 s_sub_nc_u64=84 s_mul_u64=85
        """,
    ),
    "sopc": _changed(
        "sopc",
        """
        s_cmp_lt_f32=65 s_cmp_eq_f32=66 s_cmp_le_f32=67 s_cmp_gt_f32=68 s_cmp_lg_f32=69
        s_cmp_ge_f32=70 s_cmp_o_f32=71 s_cmp_u_f32=72 s_cmp_nge_f32=73 s_cmp_nlg_f32=74
        s_cmp_ngt_f32=75 s_cmp_nle_f32=76 s_cmp_neq_f32=77 s_cmp_nlt_f32=78 s_cmp_lt_f16=81
        s_cmp_eq_f16=82 s_cmp_le_f16=83 s_cmp_gt_f16=84 s_cmp_lg_f16=85 s_cmp_ge_f16=86
        s_cmp_o_f16=87 s_cmp_u_f16=88 s_cmp_nge_f16=89 s_cmp_nlg_f16=90 s_cmp_ngt_f16=91
        s_cmp_nle_f16=92 s_cmp_neq_f16=93 s_cmp_nlt_f16=94
        """,
    ),
    "sopk": _table("s_movk_i32=0 s_addk_co_i32=15 s_mulk_i32=16"),
    "sopp": _changed(
        "sopp",
        """
        s_wait_alu=8 s_wait_idle=10 s_barrier_wait=20 s_wait_loadcnt=64 s_wait_storecnt=65
        s_wait_samplecnt=66 s_wait_bvhcnt=67 s_wait_expcnt=68 s_wait_dscnt=70 s_wait_kmcnt=71
        s_wait_loadcnt_dscnt=72 s_wait_storecnt_dscnt=73
        """,
        gone="s_set_inst_prefetch_distance s_waitcnt s_barrier",
    ),
    "smem": _changed("smem", "s_load_b96=5 s_load_i8=8 s_load_u8=9 s_load_i16=10 s_load_u16=11"),
    "vop1": _GFX11["vop1"],
    "vop2": _changed(
        "vop2",
        """
        v_add_f64=2 v_mul_f64=6 v_min_num_f64=13 v_max_num_f64=14 v_min_num_f32=21
        v_max_num_f32=22 v_lshlrev_b64=31 v_min_num_f16=48 v_max_num_f16=49
        """,
        gone="v_min_f32 v_max_f32 v_min_f16 v_max_f16",
    ),
    "vopc": _GFX11["vopc"],
    "vop3": _changed(
        "vop3",
        """
        v_min3_num_f32=553 v_max3_num_f32=554 v_s_rcp_f32=644 v_s_rsq_f32=646 v_s_sqrt_f32=648
        v_mad_co_u64_u32=766
        """,
        gone="v_min3_f32 v_max3_f32 v_add_f64 v_mul_f64 v_min_f64 v_max_f64 v_lshlrev_b64",
    ),
    "vop3p": _GFX11["vop3p"],
    "ds": _GFX11["ds"],
    "global": _changed("global", "global_inv=43 global_wb=44 global_wbinv=79"),
    "mubuf": _changed("mubuf", "", gone="buffer_gl0_inv buffer_gl1_inv"),
}

GFX9 = _with_long_forms(_GFX9, first_vop1=320)
GFX11 = _with_long_forms(_GFX11, first_vop1=384)
GFX12 = _with_long_forms(_GFX12, first_vop1=384)
