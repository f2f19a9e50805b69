"""Small kernels for AMD GPUs: memory, waits, branches, barriers, and how waves start."""

from __future__ import annotations

import numpy as np
import pytest
from support import random_generator

from iree_lnbwd.emulator import Binding, Fault, GlobalMemory, Launch
from iree_lnbwd.emulator import launch as emulator_launch
from iree_lnbwd.emulator.amdgcn import AmdgcnExecutor
from iree_lnbwd.ops.arguments import Array

_LDS = 4096


def assembly(body: str, *, lanes: int, workgroup_ids: str = "x", extra: str = "") -> str:
    """A kernel that has its arguments at s[0:1] and the workgroup's number in s2."""
    target, wave32 = ("gfx1100", 1) if lanes == 32 else ("gfx942", 0)
    ids = "".join(
        f"\t.amdhsa_system_sgpr_workgroup_id_{axis} {int(axis in workgroup_ids)}\n"
        for axis in "xyz"
    )
    return (
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"\n\t.text\n'
        f"\t.type k,@function\nk:\n{body}\n"
        ".Lfunc_end0:\n\t.amdhsa_kernel k\n"
        f"\t.amdhsa_group_segment_fixed_size {_LDS}\n\t.amdhsa_next_free_vgpr 32\n"
        f"\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n\t.amdhsa_user_sgpr_count 2\n"
        f"\t.amdhsa_wavefront_size32 {wave32}\n\t.amdhsa_kernarg_size 16\n{ids}{extra}"
        "\t.end_amdhsa_kernel\n"
    )


def run(
    body: str,
    given: Array,
    out_bytes: int,
    *,
    lanes: int = 64,
    threads: tuple[int, int, int] = (64, 1, 1),
    workgroups: tuple[int, int, int] = (1, 1, 1),
    workgroup_ids: str = "x",
    extra: str = "",
) -> Array:
    """Runs a kernel that reads one buffer and fills another; the words that it wrote."""
    memory = GlobalMemory()
    source = memory.allocate("given", given.nbytes, data=given)
    target = memory.allocate("out", out_bytes, write_once=True)
    bindings = (Binding(source.address, given.nbytes, False), Binding(target.address, out_bytes))
    launch = Launch("k", workgroups, threads, lanes, 0, (), bindings)
    memory.begin(launch)
    text = assembly(body, lanes=lanes, workgroup_ids=workgroup_ids, extra=extra)
    AmdgcnExecutor(text).run(launch, memory)
    return memory.read(target, 0, out_bytes).view(np.uint32)


# s[4:5] given, s[6:7] out, v1 the byte offset of a thread's word.
START = """
 s_load_dwordx4 s[4:7], s[0:1], 0x0
 v_and_b32_e32 v1, 0x3ff, v0
 v_lshlrev_b32_e32 v1, 2, v1
 s_waitcnt lgkmcnt(0)
"""
COPY = (
    START
    + """
 global_load_dword v2, v1, s[4:5]
 s_waitcnt vmcnt(0)
 global_store_dword v1, v2, s[6:7]
 s_endpgm
"""
)


def words(count: int) -> Array:
    return random_generator().integers(0, 1 << 32, count, np.uint32)


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("threads", [64, 100, 256])
def test_a_copy(threads: int, lanes: int) -> None:
    """Also where the last wave is not full."""
    given = words(threads)
    got = run(COPY, given, given.nbytes, lanes=lanes, threads=(threads, 1, 1))
    assert (got == given).all()


def test_where_threads_and_workgroups_are() -> None:
    """x, y and z of a thread in 10 bits each; the workgroup's numbers in scalar registers."""
    body = (
        START
        + """
 v_bfe_u32 v2, v0, 10, 10
 v_bfe_u32 v3, v0, 20, 10
 v_and_b32_e32 v4, 0x3ff, v0
 v_mad_u32_u24 v5, v3, 2, v2
 v_mad_u32_u24 v5, v5, 4, v4
 s_mul_i32 s8, s3, 3
 s_add_i32 s8, s8, s2
 s_lshl_b32 s8, s8, 4
 v_add_u32_e32 v5, s8, v5
 v_lshlrev_b32_e32 v6, 2, v5
 global_store_dword v6, v0, s[6:7]
 s_endpgm
"""
    )
    got = run(body, words(1), 384, threads=(4, 2, 2), workgroups=(3, 2, 1), workgroup_ids="xy")
    thread = [x | y << 10 | z << 20 for z in range(2) for y in range(2) for x in range(4)]
    assert got.tolist() == thread * 6


@pytest.mark.parametrize(
    ("load", "store", "width"),
    [("dwordx2", "dwordx2", 2), ("dwordx3", "dwordx3", 3), ("dwordx4", "dwordx4", 4)],
)
def test_wide_accesses(load: str, store: str, width: int) -> None:
    given = words(64 * width)
    last = 3 + width
    body = (
        START
        + f"""
 v_mul_u32_u24_e32 v1, {width}, v1
 global_load_{load} v[4:{last}], v1, s[4:5]
 s_waitcnt vmcnt(0)
 global_store_{store} v1, v[4:{last}], s[6:7]
 s_endpgm
"""
    )
    assert (run(body, given, given.nbytes) == given).all()


@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        ("ubyte", np.uint8, 1),
        ("sbyte", np.int8, 1),
        ("ushort", np.uint16, 2),
        ("sshort", np.int16, 2),
    ],
)
def test_narrow_loads(name: str, dtype: type[np.integer], scale: int) -> None:
    given = words(64)
    body = (
        START
        + f"""
 v_and_b32_e32 v3, 0x3ff, v0
 v_mul_u32_u24_e32 v3, {scale}, v3
 global_load_{name} v2, v3, s[4:5] offset:4
 s_waitcnt vmcnt(0)
 global_store_dword v1, v2, s[6:7]
 s_endpgm
"""
    )
    expected = given.view(dtype)[4 // scale : 4 // scale + 64].astype(np.int64).astype(np.uint32)
    assert (run(body, given, 256) == expected).all()


def test_narrow_stores() -> None:
    given = words(64)
    body = (
        START
        + """
 global_load_dword v2, v1, s[4:5]
 s_waitcnt vmcnt(0)
 global_store_short v1, v2, s[6:7] offset:2
 global_store_short_d16_hi v1, v2, s[6:7]
 s_endpgm
"""
    )
    assert (run(body, given, 256) == (given << np.uint32(16) | given >> np.uint32(16))).all()


def test_halves_are_loaded_apart() -> None:
    given = words(64)
    body = (
        START.replace("dwordx4", "b128")
        + """
 v_mov_b32_e32 v2, 0
 global_load_d16_b16 v2, v1, s[4:5] offset:2
 global_load_d16_hi_b16 v2, v1, s[4:5]
 s_waitcnt vmcnt(0)
 global_store_b32 v1, v2, s[6:7]
 s_endpgm
"""
    )
    got = run(body, given, 256, lanes=32)
    assert (got == (given << np.uint32(16) | given >> np.uint32(16))).all()


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize(
    ("load", "dtype"),
    [
        ("global_load_ubyte_d16{} v2, v1, s[4:5]", np.uint8),
        ("global_load_sbyte_d16{} v2, v1, s[4:5]", np.int8),
        ("global_load_short_d16{} v2, v1, s[4:5]", np.uint16),
        ("ds_read_u8_d16{} v2, v1", np.uint8),
        ("ds_read_i8_d16{} v2, v1", np.int8),
        ("ds_read_u16_d16{} v2, v1", np.uint16),
    ],
)
def test_narrow_loads_of_halves(load: str, dtype: type[np.integer], high: bool) -> None:
    """16 bits are written, and the others kept."""
    given, end = words(64), "_hi" if high else ""
    body = (
        START
        + f"""
 global_load_dword v3, v1, s[4:5]
 v_mov_b32_e32 v2, 0x12345678
 s_waitcnt vmcnt(0)
 ds_write_b32 v1, v3
 s_waitcnt lgkmcnt(0)
 {load.format(end)}
 s_waitcnt vmcnt(0) lgkmcnt(0)
 global_store_dword v1, v2, s[6:7]
 s_endpgm
"""
    )
    narrow = given.view(dtype)[:: 4 // np.dtype(dtype).itemsize].astype(np.int64) & 0xFFFF
    expected = narrow << 16 | 0x5678 if high else narrow | 0x12340000
    assert (run(body, given, 256) == expected).all()


@pytest.mark.parametrize(
    ("store", "dtype"),
    [
        ("global_store_byte_d16_hi v3, v2, s[6:7]", np.uint8),
        ("ds_write_b8_d16_hi v3, v2", np.uint8),
        ("ds_write_b16_d16_hi v3, v2", np.uint16),
    ],
)
def test_narrow_stores_of_halves(store: str, dtype: type[np.integer]) -> None:
    given, size = words(64), np.dtype(dtype).itemsize
    back = f"""
 s_waitcnt lgkmcnt(0)
 v_cmp_gt_u32_e32 vcc, {64 * size}, v1
 s_and_b64 exec, exec, vcc
 ds_read_b32 v4, v1
 s_waitcnt lgkmcnt(0)
 global_store_dword v1, v4, s[6:7]
"""
    body = (
        START
        + f"""
 global_load_dword v2, v1, s[4:5]
 v_lshrrev_b32_e32 v3, {2 // size}, v1
 s_waitcnt vmcnt(0)
 {store}
{back if store.startswith("ds") else ""}
 s_endpgm
"""
    )
    got = run(body, given, 64 * size)
    assert (got.view(dtype) == (given >> np.uint32(16)).astype(dtype)).all()


def test_buffers_have_bounds() -> None:
    """Loads beyond the descriptor's length give 0, stores beyond it are dropped."""
    given = words(64)
    body = (
        START
        + """
 s_mov_b32 s10, 128
 s_mov_b32 s11, 0x27000
 s_mov_b64 s[8:9], s[4:5]
 buffer_load_dword v2, v1, s[8:11], 0 offen
 s_mov_b64 s[8:9], s[6:7]
 s_movk_i32 s12, 0x4
 s_waitcnt vmcnt(0)
 v_add_u32_e32 v3, -4, v1
 v_cmp_lt_u32_e32 vcc, 3, v1
 s_and_saveexec_b64 s[14:15], vcc
 buffer_store_dword v2, v3, s[8:11], s12 offen offset:0
 s_mov_b64 exec, s[14:15]
 v_cmp_gt_u32_e32 vcc, 4, v1
 s_and_b64 exec, exec, vcc
 buffer_store_dword v2, off, s[8:11], 0
 s_endpgm
"""
    )
    assert (run(body, given, 128) == given[:32]).all()


def test_lds_between_waves() -> None:
    given = words(256)
    body = (
        START
        + """
 global_load_dword v2, v1, s[4:5]
 v_sub_u32_e32 v3, 0x3fc, v1
 s_waitcnt vmcnt(0)
 ds_write_b32 v1, v2
 s_waitcnt lgkmcnt(0)
 s_barrier
 ds_read_b32 v4, v3
 s_waitcnt lgkmcnt(0)
 global_store_dword v1, v4, s[6:7]
 s_endpgm
"""
    )
    assert (run(body, given, 1024, threads=(256, 1, 1)) == given[::-1]).all()
    with pytest.raises(Fault, match="a barrier while LDS accesses are under way"):
        run(
            body.replace("lgkmcnt(0)\n s_barrier", "vmcnt(0)\n s_barrier"),
            given,
            1024,
            threads=(256, 1, 1),
        )
    with pytest.raises(Fault, match=r"race in shared memory|nobody wrote"):
        run(body.replace(" s_barrier\n", ""), given, 1024, threads=(256, 1, 1))


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("bits", [32, 64])
def test_lds_two_at_once(bits: int, far: bool) -> None:
    """Offsets count in items, or in 64 items."""
    given = words(256)
    count = bits // 32
    name = f"{'2st64' if far else '2'}_b{bits}"
    step = bits // 8 * (1 if far else 2)
    first, second = (f"v[{a}:{a + count - 1}]" if count > 1 else f"v{a}" for a in (4, 6))
    both = f"v[8:{7 + 2 * count}]"
    body = (
        START
        + f"""
 v_mul_u32_u24_e32 v3, {step // 4}, v1
 v_mul_u32_u24_e32 v2, {count}, v1
 global_load_dword{"x2" if count > 1 else ""} {first}, v2, s[4:5]
 global_load_dword{"x2" if count > 1 else ""} {second}, v2, s[4:5] offset:{256 * count}
 s_waitcnt vmcnt(0)
 ds_write{name} v3, {first}, {second} offset1:1
 ds_read{name} {both}, v3 offset1:1
 s_waitcnt lgkmcnt(0)
 v_lshlrev_b32_e32 v1, {count}, v1
 global_store_dword{"x4" if count > 1 else "x2"} v1, {both}, s[6:7]
 s_endpgm
"""
    )
    got = run(body, given, 64 * 8 * count)
    pairs = given[: 128 * count].reshape(2, 64, count).transpose(1, 0, 2).reshape(-1)
    assert (got == pairs).all()


def test_an_lds_address_wraps_around() -> None:
    """LLVM adds offsets to bases that it knows nothing of, so that a base may be negative."""
    given = words(64)
    body = (
        START
        + """
 global_load_dword v2, v1, s[4:5]
 v_subrev_u32_e32 v3, 64, v1
 s_waitcnt vmcnt(0)
 ds_write_b32 v3, v2 offset:64
 ds_read_b32 v4, v3 offset:64
 ds_read2_b32 v[6:7], v3 offset0:16 offset1:17
 s_waitcnt lgkmcnt(0)
 global_store_dword v1, v4, s[6:7]
 s_endpgm
"""
    )
    without = body.replace(" ds_read2_b32 v[6:7], v3 offset0:16 offset1:17\n", "")
    assert (run(without, given, given.nbytes) == given).all()
    with pytest.raises(Fault, match="byte 256, which nobody wrote"):
        run(body, given, given.nbytes)
    with pytest.raises(Fault, match="byte 4294967236 is out of bounds"):
        run(without.replace("offset:64", "offset:4"), given, given.nbytes)


@pytest.mark.parametrize("width", [2, 4])
def test_lds_wide(width: int) -> None:
    given = words(64 * width)
    body = (
        START
        + f"""
 v_mul_u32_u24_e32 v1, {width}, v1
 global_load_dwordx{width} v[4:{3 + width}], v1, s[4:5]
 s_waitcnt vmcnt(0)
 ds_write_b{32 * width} v1, v[4:{3 + width}] offset:16
 ds_read_b{32 * width} v[8:{7 + width}], v1 offset:16
 s_waitcnt lgkmcnt(0)
 global_store_dwordx{width} v1, v[8:{7 + width}], s[6:7]
 s_endpgm
"""
    )
    assert (run(body, given, given.nbytes) == given).all()


def test_scratch() -> None:
    """Each lane has its own."""
    given = words(64)
    body = (
        START
        + """
 global_load_dword v2, v1, s[4:5]
 v_mov_b32_e32 v4, 8
 s_mov_b32 s8, 4
 s_waitcnt vmcnt(0)
 v_not_b32_e32 v3, v2
 scratch_store_dwordx2 off, v[2:3], off offset:4
 scratch_load_dword v5, v4, off
 scratch_load_dword v6, off, s8
 s_waitcnt vmcnt(0)
 v_xor_b32_e32 v7, v5, v6
 global_store_dword v1, v7, s[6:7]
 s_endpgm
"""
    )
    size = "\t.amdhsa_private_segment_fixed_size 16\n"
    assert (run(body, given, 256, extra=size) == 0xFFFFFFFF).all()
    with pytest.raises(Fault, match="a read of local memory at byte 4, which nobody wrote"):
        run(body.replace("off offset:4", "off offset:8"), given, 256, extra=size)


def test_undefined_registers_may_be_spilled_and_not_be_used() -> None:
    """Of a pair, a compiler may have written one half alone."""
    given = words(64)
    body = (
        START
        + """
 global_load_dword v2, v1, s[4:5]
 s_waitcnt vmcnt(0)
 scratch_store_dwordx2 off, v[2:3], off
 scratch_load_dwordx2 v[4:5], off, off
 s_waitcnt vmcnt(0)
 v_mov_b32_e32 v6, v5
 global_store_dword v1, v4, s[6:7]
 s_endpgm
"""
    )
    size = "\t.amdhsa_private_segment_fixed_size 8\n"
    assert (run(body, given, 256, extra=size) == given).all()
    with pytest.raises(Fault, match=r"v6 is used and was never written; .*global_store_dword"):
        run(body.replace("v1, v4, s", "v1, v6, s"), given, 256, extra=size)
    written = body.replace(
        " scratch_load", " scratch_store_dword off, v2, off offset:4\n scratch_load"
    )
    assert (run(written.replace("v1, v4, s", "v1, v6, s"), given, 256, extra=size) == given).all()


def test_waves_that_part_meet_again() -> None:
    """Each wave goes round a loop as often as it is numbered; lanes leave a loop one by one."""
    body = (
        START
        + """
 v_lshrrev_b32_e32 v2, 8, v1
 v_readfirstlane_b32 s8, v2
 s_mov_b32 s9, 0
 s_cmp_eq_u32 s8, 0
 s_cbranch_scc1 .Ldone
.Lagain:
 s_add_i32 s9, s9, 10
 s_sub_i32 s8, s8, 1
 s_cmp_lg_u32 s8, 0
 s_cbranch_scc1 .Lagain
.Ldone:
 v_and_b32_e32 v3, 3, v0
 v_mov_b32_e32 v4, s9
 s_mov_b64 s[10:11], 0
.Llanes:
 v_add_u32_e32 v4, 1, v4
 v_cmp_eq_u32_e32 vcc, 0, v3
 v_subrev_u32_e32 v3, 1, v3
 s_or_b64 s[10:11], vcc, s[10:11]
 s_andn2_b64 exec, exec, s[10:11]
 s_cbranch_execnz .Llanes
 s_or_b64 exec, exec, s[10:11]
 s_barrier
 global_store_dword v1, v4, s[6:7]
 s_endpgm
"""
    )
    got = run(body, words(1), 1024, threads=(256, 1, 1))
    thread = np.arange(256)
    assert (got == thread // 64 * 10 + thread % 4 + 1).all()


PARTING = START + " v_lshrrev_b32_e32 v2, 8, v1\n v_readfirstlane_b32 s8, v2\n s_cmp_eq_u32 s8, 0\n"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            COPY.replace(" s_waitcnt vmcnt(0)\n", ""),
            "v2 is touched while a load from vector memory",
        ),
        (COPY.replace("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)"), "v2 is touched while"),
        (
            COPY.replace(" s_waitcnt lgkmcnt(0)\n", ""),
            "s4 is touched while a load from scalar memory",
        ),
        (COPY.replace("s_waitcnt lgkmcnt(0)", "s_waitcnt lgkmcnt(1)"), "s4 is touched while"),
        (COPY.replace("s_waitcnt vmcnt(0)", "v_mov_b32_e32 v2, 0"), "v2 is touched while"),
        (COPY.replace("s[4:5]\n", "s[4:5] offset:4\n", 1), "out of bounds"),
        (COPY.replace("v2, s[6:7]", "v2, s[4:5]"), "a store to read-only given"),
        (
            COPY.replace("global_store_dword v1", "global_store_dword v9"),
            "v9 is used and was never",
        ),
        (COPY.replace("s[0:1], 0x0", "s[0:1], 0x40"), "out of bounds of the kernel's arguments"),
        (COPY.replace("s[0:1], 0x0", "s[0:1], 0x2"), "no multiple of 4"),
        (COPY.replace(" s_endpgm\n", ""), "runs past the end"),
        (COPY.replace("s_endpgm", "s_branch .Lnowhere"), "no such label"),
        (COPY.replace("s_endpgm", "s_nonsense"), "instruction not known: s_nonsense"),
        (COPY.replace("vmcnt(0)", "wmcnt(0)"), "counters not understood"),
        (START + ".Lself:\n s_branch .Lself\n", "the kernel does not end"),
        (
            START + " ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(0)\n s_endpgm\n",
            "a read of shared memory at byte 0, which nobody wrote",
        ),
        (START + " ds_write_b32 v1, v1 offset:4092\n s_endpgm\n", "out of bounds of shared memory"),
        (START + " ds_write_b32 v1, v1 offset:2\n s_endpgm\n", "misaligned"),
        (
            PARTING + " s_cbranch_scc1 .Lend\n s_barrier\n.Lend:\n s_endpgm\n",
            "a barrier that waves of the workgroup never reach",
        ),
        (
            PARTING
            + " s_cbranch_scc1 .Lelse\n s_barrier\n s_endpgm\n.Lelse:\n s_barrier\n s_endpgm\n",
            "waves of a workgroup wait at different barriers",
        ),
    ],
)
def test_what_hardware_would_hide(body: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator_launch, "_MOST_WORK", 10_000 << 16)
    given = words(128)
    with pytest.raises(Fault, match=what):
        run(body, given, 512, threads=(128, 1, 1))


@pytest.mark.parametrize(
    ("directive", "what"),
    [
        (".amdhsa_float_denorm_mode_32 0", "only 3 is known"),
        (".amdhsa_uses_dynamic_stack 1", "a stack of dynamic size is not known"),
    ],
)
def test_modes_that_are_not_known(directive: str, what: str) -> None:
    with pytest.raises(Fault, match=what):
        run(COPY, words(64), 256, extra=f"\t{directive}\n")


def test_a_wave_of_another_width_is_refused() -> None:
    text = assembly(COPY, lanes=64)
    memory = GlobalMemory()
    launch = Launch("k", (1, 1, 1), (64, 1, 1), 32, 0, (), ())
    memory.begin(launch)
    with pytest.raises(Fault, match="waves of 64 lanes, launched with 32"):
        AmdgcnExecutor(text).run(launch, memory)
    assert AmdgcnExecutor(text).subgroup_size("k") == 64
    with pytest.raises(Fault, match="no such kernel"):
        AmdgcnExecutor(text).subgroup_size("other")


# gfx90a: s[0:3] the descriptor of scratch, s[4:5] the arguments, s6 the workgroup, s7 the wave's
# part of scratch.
BUFFER_START = (
    START.replace("s[4:7], s[0:1]", "s[8:11], s[4:5]")
    + """
 s_add_u32 s0, s0, s7
 s_addc_u32 s1, s1, 0
 global_load_dword v2, v1, s[8:9]
 s_waitcnt vmcnt(0)
"""
)
BUFFER_SCRATCH = (
    BUFFER_START
    + """
 v_mov_b32_e32 v4, 4
 s_movk_i32 s12, 0x200
 buffer_store_dword v2, v4, s[0:3], 0 offen offset:4
 buffer_load_dword v3, off, s[0:3], s12
 s_waitcnt vmcnt(0)
 global_store_dword v1, v3, s[10:11]
 s_endpgm
"""
)
BUFFER_DIRECTIVES = """\
\t.amdhsa_user_sgpr_private_segment_buffer 1
\t.amdhsa_user_sgpr_count 6
\t.amdhsa_enable_private_segment 1
\t.amdhsa_private_segment_fixed_size 16
"""


def test_scratch_behind_a_descriptor() -> None:
    """Each lane of each wave has its own; a scalar offset counts the bytes of all 64."""
    given = words(256)
    got = run(BUFFER_SCRATCH, given, 1024, threads=(256, 1, 1), extra=BUFFER_DIRECTIVES)
    assert (got == given).all()


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (" s_add_u32 s0, s0, s7\n", " s_add_u32 s0, s0, 0\n", "scratch of another wave"),
        ("s_movk_i32 s12, 0x200", "s_movk_i32 s12, 0x240", "no word of 64 lanes"),
        ("s_movk_i32 s12, 0x200", "s_movk_i32 s12, 0x400", "out of bounds of local memory"),
        ("offset:4", "offset:0", "a read of local memory at byte 8, which nobody wrote"),
        (" v_mov_b32_e32 v4, 4\n", " s_mov_b32 s3, 0\n v_mov_b32_e32 v4, 4\n", "changed desc"),
    ],
)
def test_scratch_behind_a_descriptor_has_bounds(old: str, new: str, what: str) -> None:
    assert old in BUFFER_SCRATCH
    with pytest.raises(Fault, match=what):
        run(
            BUFFER_SCRATCH.replace(old, new),
            words(256),
            1024,
            threads=(256, 1, 1),
            extra=BUFFER_DIRECTIVES,
        )
