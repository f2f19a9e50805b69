"""Launches and kernels that hardware would refuse, and beside each the most that it takes."""

from __future__ import annotations

import pytest
from test_amdgcn_execution import START, assembly, words

from iree_lnbwd.emulator import Binding, Executor, Fault, GlobalMemory, Launch, PtxExecutor
from iree_lnbwd.emulator.amdgcn import AmdgcnExecutor
from iree_lnbwd.emulator.launch import Dim3

_PTX = """
.version 8.0
.target {target}
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.shared .align 16 .b8 static[{static}];
.visible .entry k(
\t.param .u64 .ptr .global .align 16 k_param_0
)
{directive}
{{
\t.reg .b32 %r<2>;
\t.local .align 4 .b8 depot[{local}];
\tmov.u32 %r1, static;
\tmov.u32 %r1, depot;
\tret;
}}
"""


def _launch(
    executor: Executor,
    lanes: int,
    *,
    threads: Dim3 = (64, 1, 1),
    workgroups: Dim3 = (1, 1, 1),
    shared_bytes: int = 0,
    bindings: int = 1,
) -> None:
    memory = GlobalMemory()
    buffers = [memory.allocate(f"buffer {n}", 4096, data=words(1024)) for n in range(bindings)]
    given = tuple(Binding(buffer.address, buffer.nbytes) for buffer in buffers)
    launch = Launch("k", workgroups, threads, lanes, shared_bytes, (), given)
    memory.begin(launch)
    executor.run(launch, memory)


def _ptx(
    *,
    target: str = "sm_90",
    static: int = 0,
    local: int = 0,
    directive: str = "",
    threads: Dim3 = (64, 1, 1),
    workgroups: Dim3 = (1, 1, 1),
    shared_bytes: int = 0,
) -> None:
    text = _PTX.format(target=target, static=static, local=local, directive=directive)
    _launch(
        PtxExecutor(text), 32, threads=threads, workgroups=workgroups, shared_bytes=shared_bytes
    )


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ((2048, 1, 1), "2048 threads of a workgroup along x: the GPU takes at most 1024"),
        ((1, 2048, 1), "2048 threads of a workgroup along y: the GPU takes at most 1024"),
        ((1, 1, 128), "128 threads of a workgroup along z: the GPU takes at most 64"),
        ((64, 32, 1), "2048 threads of a workgroup: the GPU takes at most 1024"),
        ((0, 1, 1), r"of \(0, 1, 1\): 0 threads, the emulator takes 1 to 8388608"),
    ],
)
def test_threads_of_a_workgroup(threads: Dim3, message: str) -> None:
    with pytest.raises(Fault, match=message):
        _ptx(threads=threads)


@pytest.mark.parametrize("threads", [(1024, 1, 1), (1, 1024, 1), (4, 4, 64)])
def test_the_most_threads_of_a_workgroup(threads: Dim3) -> None:
    _ptx(threads=threads)


@pytest.mark.parametrize(
    ("workgroups", "message"),
    [
        ((1, 65536, 1), "65536 workgroups along y: the GPU takes at most 65535"),
        ((1, 1, 65536), "65536 workgroups along z: the GPU takes at most 65535"),
        ((1 << 31, 65535, 1), "9007061815787520 threads, the emulator takes 1 to 8388608"),
    ],
)
def test_workgroups(workgroups: Dim3, message: str) -> None:
    with pytest.raises(Fault, match=message):
        _ptx(threads=(64, 1, 1), workgroups=workgroups)
    _ptx(threads=(32, 1, 1), workgroups=(1, 65535, 1))


@pytest.mark.parametrize(
    ("target", "most"),
    [
        ("sm_75", 65536),
        ("sm_80", 166912),
        ("sm_90", 232448),
        ("sm_90a", 232448),
        ("sm_120", 101376),
        ("sm_87", 232448),  # none of ours: the most of any
    ],
)
def test_shared_memory(target: str, most: int) -> None:
    _ptx(target=target, static=1024, shared_bytes=most - 1024)
    with pytest.raises(Fault, match=f"{most + 1} bytes of shared memory, {most - 1023} of them"):
        _ptx(target=target, static=1024, shared_bytes=most - 1023)
    with pytest.raises(Fault, match="1048576 bytes of shared memory, 1048576 of them dynamic"):
        _ptx(target=target, shared_bytes=1 << 20)


def test_static_shared_memory() -> None:
    _ptx(static=48 << 10)
    with pytest.raises(Fault, match=r"49153 bytes of static shared memory: .* at most 49152"):
        _ptx(static=(48 << 10) + 1)


@pytest.mark.parametrize("local", [(512 << 10) + 1, 1 << 60])
def test_local_memory(local: int) -> None:
    with pytest.raises(Fault, match=f"{local} bytes of local memory of a thread: .* 524288"):
        _ptx(local=local)
    _ptx(local=512 << 10)
    with pytest.raises(Fault, match=r"a workgroup with 0 bytes of shared memory and 1024 threads"):
        _ptx(local=512 << 10, threads=(1024, 1, 1))


def test_what_a_kernel_says_of_its_workgroups() -> None:
    _ptx(directive=".maxntid 32, 2, 1")
    _ptx(directive=".maxntid 128")
    _ptx(directive=".reqntid 64")
    _ptx(directive=".reqntid 64, 1, 1\n.minnctapersm 1")
    with pytest.raises(Fault, match=r"workgroups of 64 threads: .maxntid allows 32"):
        _ptx(directive=".maxntid 32")
    with pytest.raises(Fault, match=r"of \(64, 1, 1\) threads: .reqntid asks for \(32, 2, 1\)"):
        _ptx(directive=".reqntid 32, 2")


def test_arguments_that_are_not_the_parameters() -> None:
    text = _PTX.format(target="sm_90", static=0, local=0, directive="")
    with pytest.raises(Fault, match=r"2 bindings and 0 constants for parameters of \[64\] bits"):
        _launch(PtxExecutor(text), 32, bindings=2)
    with pytest.raises(Fault, match=r"1 bindings and 0 constants for parameters of \[32\] bits"):
        _launch(PtxExecutor(text.replace(".u64 .ptr .global .align 16", ".u32")), 32)


_OF_AMD = """
 s_load_dwordx4 s[4:7], s[0:1], 0x0
 s_endpgm
"""


def _amdgcn(
    *changes: tuple[str, str],
    body: str = _OF_AMD,
    extra: str = "",
    lanes: int = 64,
    threads: Dim3 = (64, 1, 1),
    workgroups: Dim3 = (1, 1, 1),
    shared_bytes: int = 0,
) -> None:
    text = assembly(body, lanes=lanes, extra=f"\t{extra}\n" if extra else "")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    _launch(
        AmdgcnExecutor(text),
        lanes,
        threads=threads,
        workgroups=workgroups,
        shared_bytes=shared_bytes,
        bindings=2,
    )


@pytest.mark.parametrize("threads", [(2048, 1, 1), (32, 64, 1)])
def test_threads_of_a_workgroup_on_amd(threads: Dim3) -> None:
    _amdgcn(threads=(1024, 1, 1))
    with pytest.raises(Fault, match=r"2048 threads of a workgroup( along x)?: .* at most 1024"):
        _amdgcn(threads=threads)


@pytest.mark.parametrize(
    ("target", "lanes", "most"),
    [("gfx90a", 64, 65536), ("gfx942", 64, 65536), ("gfx950", 64, 163840), ("gfx1100", 32, 65536)],
)
def test_lds(target: str, lanes: int, most: int) -> None:
    """4096 of them are static."""
    change = ("gfx1100" if lanes == 32 else "gfx942", target)
    _amdgcn(change, lanes=lanes, shared_bytes=most - 4096)
    with pytest.raises(Fault, match=f"{most + 1} bytes of shared memory"):
        _amdgcn(change, lanes=lanes, shared_bytes=most - 4095)
    with pytest.raises(Fault, match="4294967295 bytes of static shared memory"):
        _amdgcn(change, ("fixed_size 4096", "fixed_size 0xffffffff"), lanes=lanes)


@pytest.mark.parametrize(
    ("instruction", "allocated", "message"),
    [
        ("v_mov_b32_e32 v32, 0", "", "v32 is used, and the kernel has 32 such registers"),
        ("v_mov_b64_e32 v[30:31], 0", "", ""),
        ("v_mov_b64_e32 v[31:32], 0", "", "v32 is used, and the kernel has 32"),
        ("v_mov_b32_e32 v5, v300", "", "v300 is used, and the kernel has 32"),
        ("v_mov_b32_e32 v24, 0", ".amdhsa_accum_offset 24", "v24 is used, and the kernel has 24"),
        ("v_accvgpr_read_b32 v0, a8", ".amdhsa_accum_offset 24", "a8 is used, .* has 8 such"),
        ("v_mov_b32_e32 v32, 0", ".amdhsa_next_free_vgpr 512", ""),
        ("v_mov_b32_e32 v256, 0", ".amdhsa_next_free_vgpr 512", "v256 is used, .* has 256 such"),
        ("s_mov_b32 s15, 0", ".amdhsa_next_free_sgpr 16", ""),
        ("s_mov_b32 s16, 0", ".amdhsa_next_free_sgpr 16", "s16 is used, .* has 16 such"),
        ("s_mov_b64 s[106:107], 0", "", "s107 is used, .* has 106 such"),
        ("s_mov_b64 s[5:4], 0", "", "s4 is used"),
    ],
)
def test_registers_on_amd(instruction: str, allocated: str, message: str) -> None:
    def run() -> None:
        _amdgcn(body=f"\n {instruction}{_OF_AMD}", extra=allocated)

    if not message:
        run()
        return
    with pytest.raises(Fault, match=message) as caught:
        run()
    assert instruction in str(caught.value)


@pytest.mark.parametrize("half", [0, 1])
def test_registers_of_dual_instructions(half: int) -> None:
    registers = ["v1", "v2"]
    registers[half] = "v32"
    body = f"\n v_dual_mov_b32 {registers[0]}, 0 :: v_dual_mov_b32 {registers[1]}, 0{_OF_AMD}"
    body = body.replace("dwordx4", "b128")
    with pytest.raises(Fault, match="v32 is used, and the kernel has 32 such registers"):
        _amdgcn(body=body, lanes=32)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (".amdhsa_wavefront_size32 1", "waves of 32 lanes, which gfx942 does not have"),
        (".amdhsa_max_flat_workgroup_size 32", "64 threads: max_flat_workgroup_size is 32"),
        (".amdhsa_reqd_workgroup_size_x 32", r"reqd_workgroup_size is \(32, 0, 0\)"),
        (".amdhsa_private_segment_fixed_size 131057", "of local memory of a thread: .* 131056"),
        (".amdhsa_private_segment_fixed_size 0xffffffff", "4294967295 bytes of local memory"),
        (".amdhsa_user_sgpr_count 1", "1 user registers, expected 2 or more"),
        (".amdhsa_user_sgpr_count 17", "17 user registers, expected 2 or more, and at most 16"),
        (".amdhsa_user_sgpr_dispatch_ptr 1", "2 user registers, expected 4 or more"),
        (".amdhsa_kernarg_size 0xffffffff", "4294967295 bytes of arguments, expected at most"),
        (".amdhsa_kernarg_size -1", "amdhsa_kernarg_size of k: expected a number, got -1"),
        (".amdhsa_next_free_vgpr many", "amdhsa_next_free_vgpr of k: expected a number, got many"),
    ],
)
def test_descriptors_on_amd(extra: str, message: str) -> None:
    lanes = 32 if "size32" in extra else 64
    change = ("gfx1100", "gfx942") if lanes == 32 else ("gfx942", "gfx942")
    with pytest.raises(Fault, match=message):
        _amdgcn(change, extra=extra, lanes=lanes)


def test_a_private_segment_has_to_be_enabled() -> None:
    size = ".amdhsa_private_segment_fixed_size 16\n\t.amdhsa_enable_private_segment"
    _amdgcn(extra=f"{size} 1")
    with pytest.raises(Fault, match="a kernel with a private segment, which it does not enable"):
        _amdgcn(extra=f"{size} 0")


_OF_BUFFERS = (
    START
    + """
 s_mov_b32 s10, 256
 s_mov_b32 s11, 0x27000
 s_mov_b64 s[8:9], s[4:5]
 v_add_u32_e32 v3, {first}, v1
 buffer_load_dword v2, v3, s[8:11], 0 offen offset:16
 s_waitcnt vmcnt(0)
 global_store_dword v1, v2, s[6:7]
 s_endpgm
"""
)


def test_buffers_whose_offset_wraps_around() -> None:
    """LLVM takes that for illegal, and makes it all the same: IREE 3.13 of f64 with fixed rows."""
    _amdgcn(body=_OF_BUFFERS.format(first=0))
    with pytest.raises(Fault, match="a buffer's offset of 0xfffffff0, to which 16 is added, wraps"):
        _amdgcn(body=_OF_BUFFERS.format(first=-16))
