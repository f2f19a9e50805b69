"""What is gfx12's own: counters apart, barriers in two steps, narrow scalar loads, ..."""

from __future__ import annotations

import numpy as np
import pytest
from support import random_generator

from iree_lnbwd.emulator import Binding, Fault, GlobalMemory, Launch
from iree_lnbwd.emulator.amdgcn import AmdgcnExecutor
from iree_lnbwd.ops.arguments import Array


def run(
    body: str,
    given: Array,
    out_bytes: int,
    *,
    threads: int = 64,
    workgroups: tuple[int, int, int] = (1, 1, 1),
    scratch: int = 0,
) -> Array:
    """Runs a kernel that reads one buffer and fills another; the words that it wrote."""
    memory = GlobalMemory()
    source = memory.allocate("given", given.nbytes, data=given)
    target = memory.allocate("out", out_bytes, write_once=True)
    bindings = (Binding(source.address, given.nbytes, False), Binding(target.address, out_bytes))
    launch = Launch("k", workgroups, (threads, 1, 1), 32, 0, (), bindings)
    memory.begin(launch)
    text = (
        '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1201"\n\t.text\n'
        f"\t.type k,@function\nk:\n{START}{body}\n s_endpgm\n"
        ".Lfunc_end0:\n\t.amdhsa_kernel k\n"
        "\t.amdhsa_group_segment_fixed_size 4096\n\t.amdhsa_next_free_vgpr 32\n"
        "\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n\t.amdhsa_user_sgpr_count 2\n"
        f"\t.amdhsa_private_segment_fixed_size {scratch}\n"
        "\t.amdhsa_wavefront_size32 1\n\t.amdhsa_kernarg_size 16\n\t.end_amdhsa_kernel\n"
    )
    AmdgcnExecutor(text).run(launch, memory)
    return memory.read(target, 0, out_bytes).view(np.uint32)


# s[4:5] given, s[6:7] out, v1 the byte offset of a thread's word.
START = """
 s_load_b128 s[4:7], s[0:1], 0x0
 v_and_b32_e32 v1, 0x3ff, v0
 v_lshlrev_b32_e32 v1, 2, v1
 s_wait_kmcnt 0x0
"""
COPY = """
 global_load_b32 v2, v1, s[4:5]
 s_wait_loadcnt 0x0
 global_store_b32 v1, v2, s[6:7]
"""
REVERSE = """
 global_load_b32 v2, v1, s[4:5]
 v_sub_nc_u32_e32 v3, 0x3fc, v1
 s_wait_loadcnt 0x0
 ds_store_b32 v1, v2
 s_wait_dscnt 0x0
 s_barrier_signal -1
 v_mov_b32_e32 v5, 0
 s_barrier_wait -1
 ds_load_b32 v4, v3
 s_wait_dscnt 0x0
 global_store_b32 v1, v4, s[6:7]
"""


def words(count: int) -> Array:
    return random_generator().integers(0, 1 << 32, count, np.uint32)


def test_a_copy() -> None:
    given = words(64)
    assert (run(COPY, given, 256) == given).all()


@pytest.mark.parametrize(
    ("wait", "enough"),
    [
        ("s_wait_loadcnt_dscnt 0x3f", True),
        ("s_wait_loadcnt_dscnt 0x100", False),
        ("s_wait_idle", True),
        ("s_wait_loadcnt 0x1", False),
        ("s_wait_dscnt 0x0", False),
        ("s_wait_storecnt 0x0", False),
        ("s_wait_storecnt_dscnt 0x0", False),
        ("s_wait_samplecnt 0x0", False),
        ("s_wait_bvhcnt 0x0", False),
        ("s_wait_kmcnt 0x0", False),
    ],
)
def test_waits_for_a_load(wait: str, enough: bool) -> None:
    given, body = words(64), COPY.replace("s_wait_loadcnt 0x0", wait)
    if enough:
        assert (run(body, given, 256) == given).all()
        return
    with pytest.raises(Fault, match="v2 is touched while a load from vector memory"):
        run(body, given, 256)


@pytest.mark.parametrize(
    ("wait", "enough"),
    [
        ("s_wait_loadcnt_dscnt 0x3f00", True),
        ("s_wait_storecnt_dscnt 0x3f00", True),
        ("s_wait_storecnt_dscnt 0x3f01", False),
    ],
)
def test_waits_for_lds(wait: str, enough: bool) -> None:
    given = words(256)
    body = REVERSE.replace("s_wait_dscnt 0x0\n s_barrier", f"{wait}\n s_barrier")
    if enough:
        assert (run(body, given, 1024, threads=256) == given[::-1]).all()
        return
    with pytest.raises(Fault, match="a barrier while LDS accesses are under way"):
        run(body, given, 1024, threads=256)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (" s_barrier_signal -1\n", "", "no s_barrier_signal"),
        (" s_barrier_wait -1\n", "", r"race in shared memory|nobody wrote"),
        (" s_barrier_wait -1\n", " s_barrier_signal -1\n", "has not waited at the one before"),
        ("s_barrier_signal -1", "s_barrier_signal 1", "not the workgroup's is not known"),
        ("s_barrier_wait -1", "s_barrier_wait 1", "not the workgroup's is not known"),
    ],
)
def test_barriers_in_two_steps(old: str, new: str, what: str) -> None:
    given = words(256)
    assert old in REVERSE
    with pytest.raises(Fault, match=what):
        run(REVERSE.replace(old, new), given, 1024, threads=256)


def test_a_store_that_is_waited_for_after_the_signal_is_not_seen() -> None:
    """What a barrier orders is what was done when a wave came to it."""
    body = """
 v_sub_nc_u32_e32 v3, 0xfc, v1
 global_store_b32 v1, v1, s[6:7]
 EARLY
 s_barrier_signal -1
 LATE
 s_barrier_wait -1
 global_load_b32 v2, v3, s[6:7]
 s_wait_loadcnt 0x0
 v_add_nc_u32_e32 v1, 0x100, v1
 global_store_b32 v1, v2, s[6:7]
"""
    wait, given = "s_wait_storecnt 0x0", words(1)
    early = body.replace("EARLY", wait).replace(" LATE\n", "")
    expected = np.arange(64)
    got = run(early, given, 512)
    assert got.tolist() == [*(4 * expected), *(252 - 4 * expected)]
    with pytest.raises(Fault, match="race in out"):
        run(body.replace("LATE", wait).replace(" EARLY\n", ""), given, 512)


def test_workgroups_are_numbered_in_trap_temporaries() -> None:
    body = """
 s_and_b32 s8, ttmp7, 0xffff
 s_lshr_b32 s9, ttmp7, 16
 s_mul_i32 s9, s9, 2
 s_add_co_i32 s8, s8, s9
 s_mul_i32 s8, s8, 3
 s_add_co_i32 s8, s8, ttmp9
 s_lshl_b32 s10, s8, 8
 v_add_nc_u32_e32 v1, s10, v1
 v_mov_b32_e32 v2, s8
 global_store_b32 v1, v2, s[6:7]
"""
    got = run(body, words(1), 12 * 256, workgroups=(3, 2, 2))
    assert (got == np.arange(12).repeat(64)).all()


@pytest.mark.parametrize(
    ("name", "dtype", "offset"),
    [("u8", np.uint8, 3), ("i8", np.int8, 1), ("u16", np.uint16, 6), ("i16", np.int16, 2)],
)
def test_narrow_scalar_loads(name: str, dtype: type[np.integer], offset: int) -> None:
    given = words(4) | np.uint32(0x80808080)
    body = f"""
 s_load_{name} s8, s[4:5], {offset:#x}
 s_wait_kmcnt 0x0
 v_mov_b32_e32 v2, s8
 global_store_b32 v1, v2, s[6:7]
"""
    expected = given.view(dtype)[offset // np.dtype(dtype).itemsize].astype(np.int64)
    assert (run(body, given, 256) == expected.astype(np.uint32)).all()
    if np.dtype(dtype).itemsize == 2:
        with pytest.raises(Fault, match="no multiple of 2"):
            run(body.replace(f"{offset:#x}", "0x1"), given, 256)


def test_scratch_at_two_registers() -> None:
    given = words(64)
    body = """
 global_load_b32 v2, v1, s[4:5]
 v_mov_b32_e32 v4, 8
 s_mov_b32 s8, 4
 s_wait_loadcnt 0x0
 scratch_store_b32 v4, v2, s8 offset:-4
 scratch_load_b32 v5, off, off offset:8
 s_wait_loadcnt 0x0
 global_store_b32 v1, v5, s[6:7]
"""
    assert (run(body, given, 256, scratch=16) == given).all()


def test_buffers() -> None:
    """No scalar offset is the register null."""
    given = words(64)
    body = """
 s_mov_b32 s10, 128
 s_mov_b32 s11, 0x31027000
 s_mov_b64 s[8:9], s[4:5]
 buffer_load_b32 v2, v1, s[8:11], null offen
 s_wait_loadcnt 0x0
 global_store_b32 v1, v2, s[6:7]
"""
    assert (run(body, given, 256) == [*given[:32], *[0] * 32]).all()
