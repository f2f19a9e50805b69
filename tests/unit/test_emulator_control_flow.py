"""How the emulator runs threads: loops, divergence, barriers, shuffles, special registers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from ptx_kernels import run_kernel
from support import random_generator

from iree_lnbwd.emulator import Fault, launch
from iree_lnbwd.emulator.memory import LocalMemory, cells
from iree_lnbwd.emulator.ptx import executor, threads
from iree_lnbwd.emulator.ptx.synchronisation import shuffle_source

_STORE = """
\tadd.s64 %rd21, %rd1, %rd20;
\tst.global.b32 [%rd21], %r5;
"""
_LOAD = """
\tadd.s64 %rd22, %rd0, %rd20;
\tld.global.b32 %r4, [%rd22];
"""


def test_threads_loop_as_often_as_they_need() -> None:
    """Each adds up the numbers from 1 to its own; workgroups and threads diverge."""
    counts = random_generator().integers(0, 40, 192).astype(np.uint32)
    body = f"""{_LOAD}
\tmov.b32 %r5, 0;
\tmov.b32 %r6, 0;
$loop:
\tsetp.ge.u32 %p0, %r6, %r4;
\t@%p0 bra $done;
\tadd.u32 %r6, %r6, 1;
\tadd.u32 %r5, %r5, %r6;
\tbra.uni $loop;
$done:
{_STORE}"""
    result = run_kernel(body, [counts, 192], workgroups=3)[1]
    assert result.tolist() == [n * (n + 1) // 2 for n in counts.tolist()]


def test_branches_part_and_meet() -> None:
    values = random_generator().integers(0, 100, 128).astype(np.uint32)
    body = f"""{_LOAD}
\tsetp.lt.u32 %p0, %r4, 50;
\t@%p0 bra $small;
\tsub.u32 %r5, %r4, 50;
\tsetp.lt.u32 %p1, %r5, 10;
\t@!%p1 bra $join;
\tadd.u32 %r5, %r5, 1000;
\tbra.uni $join;
$small:
\tshl.b32 %r5, %r4, 1;
$join:
\tadd.u32 %r5, %r5, 1;
{_STORE}"""
    result = run_kernel(body, [values, 128], workgroups=2)[1]
    want = [2 * v + 1 if v < 50 else v - 49 + (1000 if v < 60 else 0) for v in values.tolist()]
    assert result.tolist() == want


_CHOICE = f"""{_LOAD}
\tbra.uni $begin;
list:
\t.branchtargets
\t\t$one,
\t\t$two,
\t\t$one,
\t\t$three;
$begin:
\tmov.b32 %r5, 0;
\tsetp.lt.u32 %p0, %r4, 5;
\t@%p0 brx.idx %r4, list;
\tadd.u32 %r5, %r5, 100;
$one:
\tadd.u32 %r5, %r5, 1;
\tbra.uni $end;
$two:
\tadd.u32 %r5, %r5, 2;
$three:
\tadd.u32 %r5, %r5, 3;
$end:
{_STORE}"""


def test_a_branch_to_one_of_several_labels() -> None:
    numbers = random_generator().integers(0, 4, 128).astype(np.uint32)
    numbers[::5] = 5  # whose predicate is false
    result = run_kernel(_CHOICE, [numbers, 128], workgroups=2)[1]
    assert result.tolist() == [(1, 5, 1, 3, 0, 101)[n] for n in numbers.tolist()]


def test_a_branch_past_the_last_label() -> None:
    with pytest.raises(Fault, match="number 4 of a list of 4 labels; by workgroup 0 thread 7; at"):
        run_kernel(_CHOICE, [np.where(np.arange(64) == 7, 4, 1).astype(np.uint32), 64])


def test_predicated_instructions() -> None:
    body = f"""
\tmov.b32 %r5, 7;
\tsetp.lt.u32 %p0, %r0, 20;
\t@%p0 mov.b32 %r5, 8;
\t@!%p0 add.u32 %r5, %r5, %r0;
{_STORE}"""
    result = run_kernel(body, [1, 64])[1]
    assert result.tolist() == [8 if n < 20 else 7 + n for n in range(64)]


def test_early_return() -> None:
    """Threads that have ended neither store nor are waited for."""
    body = f"""
\tmov.b32 %r5, %r0;
\tsetp.ge.u32 %p0, %r0, 32;
\t@%p0 ret;
\tbar.sync 0;
{_STORE}"""
    assert run_kernel(body, [1, 32])[1].tolist() == list(range(32))


def test_threads_that_end_while_others_wait() -> None:
    """A compiler may put the return behind everything else."""
    body = f"""
\tmov.b32 %r5, %r0;
\tsetp.ge.u32 %p0, %r0, 32;
\t@%p0 bra $end;
\tbar.sync 0;
{_STORE}
$end:"""
    assert run_kernel(body, [1, 32])[1].tolist() == list(range(32))


def test_special_registers() -> None:
    body = "\n".join(
        f"""
\tmov.u32 %r5, %{name};
\tadd.s64 %rd21, %rd{number}, %rd20;
\tst.global.b32 [%rd21], %r5;"""
        for number, name in enumerate(
            ("tid.x", "tid.y", "tid.z", "ctaid.x", "ntid.y", "nctaid.x", "laneid", "warpid")
        )
    )
    body = "\n".join(
        (
            "\tmov.u32 %r6, %tid.y; mov.u32 %r7, %tid.z;",
            "\tmad.lo.u32 %r8, %r7, 2, %r6; mad.lo.u32 %r8, %r8, 8, %r0;",
            "\tmad.lo.u32 %r8, %r1, 64, %r8; mul.wide.u32 %rd20, %r8, 4;",
            body,
        )
    )
    thread = np.arange(128)
    results = run_kernel(body, [128] * 8, workgroups=2, threads=(8, 2, 4))
    wanted = (
        thread % 8,
        thread // 8 % 2,
        thread // 16 % 4,
        thread // 64,
        np.full(128, 2),
        np.full(128, 2),
        thread % 32,
        thread % 64 // 32,
    )
    for result, want in zip(results, wanted, strict=True):
        assert result.tolist() == want.tolist()


_REVERSE = """
\tmov.b64 %rd23, __dynamic_shared_memory__;
\tmul.wide.u32 %rd24, %r0, 4;
\tadd.s64 %rd25, %rd23, %rd24;
\tst.shared.b32 [%rd25], %r3;
{barrier}
\tsub.s64 %rd26, %rd23, %rd24;
\tld.shared.b32 %r5, [%rd26+252];
"""
_DYNAMIC = ".extern .shared .align 16 .b8 __dynamic_shared_memory__[];"


def test_barriers_and_shared_memory() -> None:
    body = _REVERSE.format(barrier="\tbar.sync 0;") + _STORE
    result = run_kernel(body, [1, 192], workgroups=3, shared_bytes=256, module=_DYNAMIC)[1]
    assert result.tolist() == [64 * w + 63 - t for w in range(3) for t in range(64)]


def test_a_barrier_that_is_missing() -> None:
    body = _REVERSE.format(barrier="") + _STORE
    with pytest.raises(Fault, match="race in shared memory") as caught:
        run_kernel(body, [1, 64], shared_bytes=256, module=_DYNAMIC)
    assert "ld.shared.b32 %r5" in str(caught.value)
    assert "kernel kernel" in str(caught.value)


_OF_HALVES = """
\tshr.u32 %r6, %r0, 6;
\tadd.u32 %r6, %r6, 1;
\tbar.sync %r6, {count};"""


def test_groups_with_a_barrier_of_their_own() -> None:
    """Each half of a workgroup reads what its own other warp wrote; they loop unlike."""
    body = f"""
\tmov.b64 %rd23, __dynamic_shared_memory__;
\tmul.wide.u32 %rd24, %r0, 4;
\tadd.s64 %rd25, %rd23, %rd24;
\txor.b32 %r7, %r0, 32;
\tmul.wide.u32 %rd24, %r7, 4;
\tadd.s64 %rd26, %rd23, %rd24;
\tmov.b32 %r5, 0;
$loop:
\tadd.u32 %r8, %r5, %r3;
\tst.shared.b32 [%rd25], %r8;{_OF_HALVES.format(count=64)}
\tld.shared.b32 %r5, [%rd26];{_OF_HALVES.format(count=64)}
\tadd.u32 %r7, %r7, 64;
\tsetp.lt.u32 %p0, %r7, 192;
\t@%p0 bra $loop;
\tbar.sync 0;
{_STORE}"""
    result = run_kernel(
        body, [1, 256], workgroups=2, threads=(128, 1, 1), shared_bytes=512, module=_DYNAMIC
    )[1]
    thread = np.arange(256)
    other = thread ^ 32
    # What a thread has after two rounds, and the first half of a workgroup after three.
    wanted = np.where(thread % 128 < 64, thread + 2 * other, thread + other)
    assert result.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (128, "divergent bar: 128 of 128 threads of a workgroup wait for others"),
        (32, "64 threads at barrier 1, which is of 32"),
        (48, "barrier 1 of 48 threads: there are 16, of whole warps of 32"),
    ],
)
def test_groups_of_another_size_than_they_say(count: int, message: str) -> None:
    body = f"\tmov.b32 %r5, 0;{_OF_HALVES.format(count=count)}\n{_STORE}"
    with pytest.raises(Fault, match=message):
        run_kernel(body, [1, 128], threads=(128, 1, 1))


def test_static_shared_memory_lies_before_the_dynamic_one() -> None:
    body = f"""
\tmov.b64 %rd23, two;
\tmov.b64 %rd24, __dynamic_shared_memory__;
\tsub.s64 %rd25, %rd24, %rd23;
\tcvt.u32.u64 %r5, %rd25;
{_STORE}"""
    module = ".shared .align 4 .b8 one[4];\n.shared .align 16 .b8 two[48];\n" + _DYNAMIC
    assert set(run_kernel(body, [1, 64], module=module)[1].tolist()) == {48}


def test_a_barrier_in_divergent_code() -> None:
    body = f"""
\tmov.b32 %r5, 0;
\tsetp.lt.u32 %p0, %r0, 16;
\t@%p0 bra $one;
\tbar.sync 0;
\tbra.uni $join;
$one:
\tbar.sync 0;
$join:
{_STORE}"""
    with pytest.raises(Fault, match=r"divergent bar: (16|48) of 64 threads"):
        run_kernel(body, [1, 64])


def test_warps_reach_a_barrier_at_different_times() -> None:
    """The second warp loops first; that is no divergence."""
    body = f"""
\tmov.b32 %r5, 0;
\tsetp.lt.u32 %p0, %r0, 32;
\t@%p0 bra $meet;
$loop:
\tadd.u32 %r5, %r5, 1;
\tsetp.lt.u32 %p1, %r5, %r0;
\t@%p1 bra $loop;
$meet:
\tbar.sync 0;
{_STORE}"""
    result = run_kernel(body, [1, 64])[1]
    assert result.tolist() == [0 if n < 32 else n for n in range(64)]


_MODES: dict[str, tuple[Callable[[int, int], int], int]] = {
    "up": (lambda lane, b: lane - b if lane - b >= 0 else lane, 0),
    "down": (lambda lane, b: lane + b if lane + b < 32 else lane, 31),
    "bfly": (lambda lane, b: lane ^ b, 31),
    "idx": (lambda lane, b: b, 31),
}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("distance", [0, 1, 5, 16, 31])
def test_shuffles(mode: str, distance: int) -> None:
    values = random_generator().integers(0, 1 << 32, 128, dtype=np.uint32)
    partner, bounds = _MODES[mode]
    body = f"""{_LOAD}
\tshfl.sync.{mode}.b32 %r5|%p3, %r4, {distance}, {bounds}, -1;
{_STORE}"""
    result = run_kernel(body, [values, 128], workgroups=2)[1]
    want = [values[n - n % 32 + partner(n % 32, distance)] for n in range(128)]
    assert result.tolist() == want


def test_shuffles_of_segments() -> None:
    """The manual's own pseudocode, for every bound and segment."""
    rng = random_generator()
    lane = np.arange(32)
    for mode in _MODES:
        for _ in range(40):
            b, bounds = (
                int(rng.integers(0, 32)),
                int(rng.integers(0, 32) << 8 | rng.integers(0, 32)),
            )
            source, in_range = shuffle_source(
                mode, lane, np.full(32, b, np.uint32), np.full(32, bounds, np.uint32)
            )
            clamp, segments = bounds & 31, bounds >> 8 & 31
            for n in range(32):
                highest = (n & segments) | (clamp & ~segments)
                lowest = n & segments
                j = {"up": n - b, "down": n + b, "bfly": n ^ b, "idx": lowest | b & ~segments}[mode]
                inside = j >= highest if mode == "up" else j <= highest
                assert (source[n], in_range[n]) == (j if inside else n, inside)


def test_shuffles_wait_for_those_that_are_named() -> None:
    """Both halves of a warp come by different ways."""
    body = f"""
\tmov.b32 %r4, %r0;
\tsetp.lt.u32 %p0, %r0, 16;
\t@%p0 bra $meet;
\tadd.u32 %r4, %r4, 100;
$meet:
\tshfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;
{_STORE}"""
    result = run_kernel(body, [1, 32], threads=(32, 1, 1))[1]
    assert result.tolist() == [n + 116 if n < 16 else n - 16 for n in range(32)]


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("@%p0 shfl.sync.bfly.b32 %r5, %r0, 1, 31, -1", "divergent shfl: 16 of 64"),
        ("shfl.sync.bfly.b32 %r5, %r0, 1, 31, 0xFFFF", "mask 0x0000ffff does not name the thread"),
        ("@%p0 shfl.sync.bfly.b32 %r5, %r0, 16, 31, 0xFFFF", "from thread 16 .*does not take part"),
        ("@%p0 bar.warp.sync -1", "divergent bar: 16 of 64"),
    ],
)
def test_member_masks(instruction: str, why: str) -> None:
    body = f"\tmov.b32 %r5, 0;\n\tsetp.lt.u32 %p0, %r0, 16;\n\t{instruction};\n{_STORE}"
    with pytest.raises(Fault, match=why):
        run_kernel(body, [1, 64])


def test_shuffles_of_part_of_a_warp() -> None:
    body = f"""
\tmov.b32 %r5, 99;
\tsetp.lt.u32 %p0, %r0, 16;
\t@%p0 shfl.sync.bfly.b32 %r5, %r0, 1, 31, 0xFFFF;
{_STORE}"""
    result = run_kernel(body, [1, 64])[1]
    assert result.tolist() == [n ^ 1 if n < 16 else 99 for n in range(64)]


def test_barriers_of_warps() -> None:
    body = _REVERSE.replace("252", "124").format(barrier="\tbar.warp.sync -1;") + _STORE
    result = run_kernel(body, [1, 32], threads=(32, 1, 1), shared_bytes=256, module=_DYNAMIC)[1]
    assert result.tolist() == list(range(31, -1, -1))


def test_asynchronous_copies() -> None:
    values = random_generator().integers(0, 1 << 32, 256, dtype=np.uint32)
    body = """
\tmov.b64 %rd23, __dynamic_shared_memory__;
\tmul.wide.u32 %rd24, %r0, 16;
\tadd.s64 %rd25, %rd23, %rd24;
\tadd.s64 %rd26, %rd0, %rd24;
\tcp.async.cg.shared.global [%rd25], [%rd26], 16{size};
\tcp.async.commit_group;
\tcp.async.wait_group {pending};
\tld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd25];
\tadd.s64 %rd27, %rd1, %rd24;
\tst.global.v4.b32 [%rd27], {{%r4, %r5, %r6, %r7}};
"""

    def run(pending: int, size: str = "") -> list[int]:
        text = body.format(pending=pending, size=size)
        copied: list[int] = run_kernel(text, [values, 256], shared_bytes=1024, module=_DYNAMIC)[
            1
        ].tolist()
        return copied

    assert run(0) == values.tolist()
    rest_is_zero = np.where(np.arange(256) % 4 < 2, values, 0)
    assert run(0, ", 8") == rest_is_zero.tolist()
    with pytest.raises(Fault, match="is read while an asynchronous copy"):
        run(1)


def test_an_asynchronous_copy_with_a_cache_policy() -> None:
    values = random_generator().integers(0, 1 << 32, 64, dtype=np.uint32)
    body = """
\t{policy} %rd40, {number};
\tmov.b64 %rd23, __dynamic_shared_memory__;
\tmul.wide.u32 %rd24, %r0, 4;
\tadd.s64 %rd25, %rd23, %rd24;
\tadd.s64 %rd26, %rd0, %rd24;
\tcp.async.ca.shared.global.L2::cache_hint.L2::128B [%rd25], [%rd26], 4{more};
\tcp.async.wait_all;
\tld.shared.b32 %r4, [%rd25];
\tadd.s64 %rd27, %rd1, %rd24;
\tst.global.b32 [%rd27], %r4;
"""
    policy, number = "createpolicy.fractional.L2::evict_last.b64", "1.0"

    def run(policy: str, number: str, more: str) -> list[int]:
        text = body.format(policy=policy, number=number, more=more)
        copied: list[int] = run_kernel(text, [values, 64], shared_bytes=256, module=_DYNAMIC)[
            1
        ].tolist()
        return copied

    assert run(policy, number, ", %rd40") == run(policy, number, ", 4, %rd40") == values.tolist()
    assert run(policy, number, ", 0, %rd40") == [0] * 64
    with pytest.raises(Fault, match="a cache hint that createpolicy has not made"):
        run("mov.u64", "7", ", 4, %rd40")
    for more in ("", ", 4, 4, %rd40"):
        with pytest.raises(Fault, match="unknown instruction"):
            run(policy, number, more)


def test_local_memory_and_generic_addresses() -> None:
    body = """
\t.local .align 16 .b8 depot[32];
\tmov.b64 %rd30, depot;
\tcvta.local.u64 %rd31, %rd30;
\tst.local.b32 [%rd30+4], %r3;
\tld.b32 %r4, [%rd31+4];
\tst.b32 [%rd31+16], %r4;
\tcvta.to.local.u64 %rd32, %rd31;
\tld.local.b32 %r5, [%rd32+16];
\tcvta.to.global.u64 %rd33, %rd1;
\tadd.s64 %rd34, %rd33, %rd20;
\tst.b32 [%rd34], %r5;
"""
    assert run_kernel(body, [1, 128], workgroups=2)[1].tolist() == list(range(128))


@pytest.mark.parametrize(
    ("type_", "want"),
    [
        ("u8", lambda v: v & 255),
        ("s8", lambda v: ((v & 255) ^ 128) - 128 & 0xFFFFFFFF),
        ("u16", lambda v: v & 0xFFFF),
    ],
)
def test_narrow_loads_are_extended(type_: str, want: object) -> None:
    values = random_generator().integers(0, 1 << 32, 64, dtype=np.uint32)
    body = f"\tadd.s64 %rd22, %rd0, %rd20;\n\tld.global.{type_} %r5, [%rd22];\n{_STORE}"
    assert callable(want)
    result = run_kernel(body, [values, 64])[1]
    assert result.tolist() == [want(v) for v in values.tolist()]


def test_registers_of_a_scope() -> None:
    """As LLVM writes the upper half of a register for PTX below 7.1."""
    body = f"""
\tmov.b32 %r4, 0x00070003;
\t{{ .reg .b16 tmp; mov.b32 {{tmp, %rs1}}, %r4; }}
\tcvt.u32.u16 %r5, %rs1;
{_STORE}"""
    assert set(run_kernel(body, [1, 64])[1].tolist()) == {7}


def test_faults_name_the_line() -> None:
    body = "\tadd.s64 %rd21, %rd1, %rd20;\n\tst.global.b32 [%rd21+4], %r0;"
    with pytest.raises(Fault) as caught:
        run_kernel(body, [1, 64])
    line = re.search(r"line (\d+): st.global.b32 \[%rd21\+4\], %r0", str(caught.value))
    assert line is not None
    assert "by workgroup 0 thread 63" in str(caught.value)
    assert "byte 256 of buffer 1" in str(caught.value)


def test_kernels_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_WORK", 1000 * launch._FEW_LANES)
    body = "$loop:\n\tsetp.ge.u32 %p0, %r0, 0;\n\t@%p0 bra $loop;"
    with pytest.raises(Fault, match="the kernel does not end"):
        run_kernel(body, [1])


def test_work_is_counted_over_all_workgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one batch of them may do is not allowed to each."""
    body = "\n".join("\tadd.u32 %r5, %r0, 1;" for _ in range(100))
    monkeypatch.setattr(executor, "_LANES_AT_ONCE", 64)
    run_kernel(body, [1], workgroups=8)
    monkeypatch.setattr(launch, "_MOST_WORK", 400 * launch._FEW_LANES)
    run_kernel(body, [1], workgroups=2)
    with pytest.raises(Fault, match="the kernel does not end"):
        run_kernel(body, [1], workgroups=8)


@pytest.mark.parametrize("space", ["shared", "local"])
def test_workgroups_with_much_memory_run_in_turn(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what the emulator needs for them stays small; each has its own all the same."""
    body = f"""
\t.local .align 4 .b8 depot[4096];
\tmov.u64 %rd23, {"depot" if space == "local" else "__dynamic_shared_memory__"};
\tmul.wide.u32 %rd24, %r0, 4;
\tadd.s64 %rd25, %rd23, %rd24;
\tst.{space}.b32 [%rd25], %r3;
\tld.{space}.b32 %r5, [%rd25];
{_STORE}"""
    monkeypatch.setattr(cells, "_AT_ONCE", 2 << 20)
    made: list[int] = []

    def noticed(nbytes: int, *, lanes: int, first_lane: int) -> LocalMemory:
        made.append(lanes)
        return LocalMemory(nbytes, lanes=lanes, first_lane=first_lane)

    monkeypatch.setattr(threads, "LocalMemory", noticed)
    result = run_kernel(body, [1, 512], workgroups=8, shared_bytes=65536, module=_DYNAMIC)[1]
    assert result.tolist() == list(range(512))
    assert made == [64] * 8
    monkeypatch.setattr(cells, "_AT_ONCE", 1 << 20)
    with pytest.raises(Fault, match="a workgroup with 65536 bytes of shared memory and 64 threads"):
        run_kernel(body, [1, 512], workgroups=8, shared_bytes=65536, module=_DYNAMIC)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("add.u32 %r60, %r0, 1", "unknown instruction add.u32: %r60 is not declared"),
        ("add.u32 %r5, %q1, 1", "unknown instruction add.u32: %q1 is not declared"),
        ("st.global.b32 [%rd60], %r0", "unknown instruction st.global.b32: %rd60 is not declared"),
        ("@%p20 add.u32 %r5, %r0, 1", "%p20 is not declared"),
        ("@%p20 bra $end", "%p20 is not declared"),
        ("@!%r1 bra $end", "%r1 is no predicate"),
        ("bra", "no label ;"),
        ("bra $nowhere", r"no label \$nowhere;"),
        ("brx.idx %r0, $end", "unknown instruction brx.idx"),
        ("brx %r0, $end", "unknown instruction brx"),
        ("cvt.u31.u32 %r5, %r0", "unknown instruction cvt.u31.u32"),
        ("cvt.add.u32 %r5, %r0", "unknown instruction cvt.add.u32"),
        ("shl.f32 %r5, %r0, 1", "not understood: TypeError"),
        ("cp.async.wait_group -1", "expected a number of groups, got -1"),
        ("cp.async.wait_group", "unknown instruction cp.async.wait_group"),
        ("bar.warp.sync", "unknown instruction bar.warp.sync"),
        ("ld.global.b32 %r5, [%rd1+4294967296]", "expected an address, got"),
        ("mov.b32 %r5, 0f00", "unknown instruction mov.b32: expected an operand, got 0f00"),
        ("mov.b64 %rd5, 0f3F800000", "expected a constant of 8 bytes, got 0f3F800000"),
        ("add.u32 %r5, %r0,\n\n%r1 %r2", "expected an operand|%r1 %r2 is not declared"),
    ],
)
def test_instructions_that_make_no_sense(instruction: str, message: str) -> None:
    with pytest.raises(Fault, match=message) as caught:
        run_kernel(f"\t{instruction};\n$end:\n", [1, 64])
    assert "\n" not in str(caught.value)
    assert "line " in str(caught.value)


@pytest.mark.parametrize("threads", [1, 33, 48])
def test_warps_that_are_not_full(threads: int) -> None:
    """Barriers and shuffles are of the threads that there are."""
    body = """
\tmov.u32 %r4, %laneid;
\tmov.u32 %r6, %warpid;
\tmad.lo.u32 %r4, %r6, 1000, %r4;
\tmad.lo.u32 %r4, %r1, 100000, %r4;
\tshfl.sync.idx.b32 %r5, %r4, 0, 31, -1;
\tbar.warp.sync -1;
\tbar.sync 0;
\tadd.u64 %rd21, %rd0, %rd20;
\tst.global.b32 [%rd21], %r5;
"""
    count = 3
    (got,) = run_kernel(body, [threads * count], threads=(threads, 1, 1), workgroups=count)
    assert got.tolist() == [
        100000 * workgroup + 1000 * (thread // 32)
        for workgroup in range(count)
        for thread in range(threads)
    ]


@pytest.mark.parametrize("workgroups", [1, 2])
def test_a_shuffle_beyond_a_warp_that_is_not_full(workgroups: int) -> None:
    """It does not reach into the next workgroup."""
    body = "\tshfl.sync.bfly.b32 %r5, %r0, 16, 31, -1;"
    with pytest.raises(Fault, match="from thread 16 of the warp, which does not take part"):
        run_kernel(body, [1], threads=(48, 1, 1), workgroups=workgroups)
