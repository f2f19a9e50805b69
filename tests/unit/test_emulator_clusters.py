"""Clusters in the emulator: workgroups that reach each other's memory, and what may go wrong."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run_kernel

from iree_lnbwd.emulator import Fault
from iree_lnbwd.emulator.launch import Launch
from iree_lnbwd.ops.arguments import Array

MEET = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
PREPARE = f"""
\tmov.u32 %r10, %cluster_ctarank;
\tmov.u32 %r11, %cluster_nctarank;
\tadd.u32 %r12, %r10, 1;
\trem.u32 %r12, %r12, %r11;         // the next workgroup of the cluster
\tshl.b32 %r13, %r0, 2;             // this thread's place in shared memory
\tadd.s64 %rd30, %rd0, %rd20;
\tadd.s64 %rd31, %rd1, %rd20;
\tld.global.u32 %r20, [%rd30];
\t{MEET}
"""
MAP = "mapa.shared::cluster.u32 %r14, %r13, %r12;"
PULL = f"""{PREPARE}
\tst.shared.u32 [%r13], %r20;
\t{MEET}
\t{MAP}
\tld.shared::cluster.u32 %r21, [%r14];
\t{MEET}
\tst.global.u32 [%rd31], %r21;
"""
PUSH = f"""{PREPARE}
\t{MAP}
\tst.shared::cluster.u32 [%r14], %r20;
\t{MEET}
\tld.shared.u32 %r21, [%r13];
\tst.global.u32 [%rd31], %r21;
"""


def run(body: str, *, size: int = 4, clusters: int = 3, workgroups: int | None = None) -> Array:
    count = size * clusters if workgroups is None else workgroups
    words = np.arange(64 * count, dtype=np.uint32)
    directives = f".explicitcluster\n.reqnctapercluster {size}, 1, 1"
    results = run_kernel(
        body,
        [words, words.size],
        workgroups=count,
        shared_bytes=256,
        directives=directives,
    )
    return results[1].reshape(-1, size, 64)


def words(size: int = 4, clusters: int = 3) -> Array:
    return np.arange(64 * size * clusters, dtype=np.uint32).reshape(-1, size, 64)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_workgroups_read_what_others_hold(size: int) -> None:
    np.testing.assert_array_equal(run(PULL, size=size), np.roll(words(size), -1, axis=1))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_workgroups_write_to_others(size: int) -> None:
    np.testing.assert_array_equal(run(PUSH, size=size), np.roll(words(size), 1, axis=1))


def test_the_own_memory_is_part_of_the_clusters() -> None:
    own = PULL.replace("mov.u32 %r11, %cluster_nctarank;", "mov.u32 %r11, 1;").replace(
        "rem.u32 %r12, %r12, %r11;", "mov.u32 %r12, %r10;"
    )
    np.testing.assert_array_equal(run(own), words())


def test_warps_come_to_the_barrier_at_different_times() -> None:
    """The second warp of each workgroup takes a detour first."""
    detour = """
\tmov.u32 %r30, 0;
\tsetp.lt.u32 %p1, %r0, 32;
\t@%p1 bra DONE;
LOOP:
\tadd.u32 %r30, %r30, 1;
\tsetp.lt.u32 %p2, %r30, 9;
\t@%p2 bra LOOP;
DONE:
"""
    body = PULL.replace(f"\t{MAP}", f"{detour}\t{MAP}")
    np.testing.assert_array_equal(run(body), np.roll(words(), -1, axis=1))


def test_clusters_along_y() -> None:
    """Their workgroups have one place along x, and follow each other in the launch."""
    launch = Launch("kernel", (3, 4, 1), (1, 1, 1), 32, 0, (), (), cluster=(1, 2, 1))
    places = [launch.name(lane).split(" thread")[0] for lane in range(launch.lanes)]
    assert places[:4] == [f"workgroup {(x, y, 0)}" for x, y in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(places)) == 12


def test_clusters_in_turn_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iree_lnbwd.emulator.ptx.executor._LANES_AT_ONCE", 64)
    np.testing.assert_array_equal(run(PULL), np.roll(words(), -1, axis=1))


MISSING = {
    "before the first access": (
        PUSH.replace(f"\t{MEET}\n\n", "\n", 1),
        "another workgroup's memory before a barrier of the cluster: it may not have begun",
    ),
    "between a write and another's read": (
        PULL.replace(f"[%r13], %r20;\n\t{MEET}", "[%r13], %r20;\n\tbar.sync 0;"),
        r"race in shared memory at byte \d+ with another workgroup",
    ),
    "between another's write and a read": (
        PUSH.replace(f"[%r14], %r20;\n\t{MEET}", "[%r14], %r20;\n\tbar.sync 0;"),
        r"race in shared memory at byte \d+ with another workgroup",
    ),
    "after the last access": (
        PULL.replace(f"[%r14];\n\t{MEET}", "[%r14];"),
        "a workgroup ends, and no barrier of its cluster since another touched its memory"
        "|shared memory of a workgroup that has ended",
    ),
    "of writes of two": (
        PUSH.replace(f"\t{MAP}", f"\tmov.u32 %r12, 0;\n\t{MAP}"),
        "two threads write at once|race in shared memory",
    ),
}


@pytest.mark.parametrize(("body", "why"), MISSING.values(), ids=MISSING)
def test_a_barrier_that_is_missing(body: str, why: str) -> None:
    assert body not in (PULL, PUSH)
    with pytest.raises(Fault, match=why):
        run(body)


RELAXED = MEET.replace("arrive", "arrive.relaxed")


@pytest.mark.parametrize("body", [PULL, PUSH])
def test_relaxed_barriers_order_nothing(body: str) -> None:
    """The cluster has met, and that is all."""
    first, rest = body.split(MEET, 1)
    begun = first + RELAXED + rest
    expected = run(body)
    np.testing.assert_array_equal(run(begun), expected)
    with pytest.raises(Fault, match=r"race in shared memory at byte \d+ with another workgroup"):
        run(begun.replace(MEET, RELAXED, 1))
    some = "setp.eq.u32 %p1, %r10, 1;\n\t@%p1 bra RELAXED;\nbarrier.cluster.arrive.aligned;\n"
    some += "\tbra WAIT;\nRELAXED:\nbarrier.cluster.arrive.relaxed.aligned;\nWAIT:\n"
    some += "barrier.cluster.wait.aligned;"
    with pytest.raises(Fault, match=r"race in shared memory at byte \d+ with another workgroup"):
        run(begun.replace(MEET, some, 1))


def test_nothing_is_ordered_in_a_workgroup_by_a_relaxed_barrier() -> None:
    body = f"""{PREPARE}
\tst.shared.u32 [%r13], %r20;
\t{MEET}
\txor.b32 %r13, %r13, 128;
\tld.shared.u32 %r21, [%r13];
\tst.global.u32 [%rd31], %r21;
"""
    run(body)
    before, after = body.rsplit(MEET, 1)
    with pytest.raises(Fault, match="race in shared memory at byte 128: the first thread reads"):
        run(before + RELAXED + after)


def test_a_workgroup_ends_after_a_relaxed_barrier() -> None:
    before, after = PULL.rsplit(MEET, 1)
    why = "a workgroup ends, and no barrier of its cluster since another touched its memory"
    with pytest.raises(Fault, match=why):
        run(before + RELAXED + after)


WRONG = {
    "a rank that there is not": (
        PULL.replace(f"\t{MAP}", f"\tmov.u32 %r12, 4;\n\t{MAP}"),
        "rank 4 of a cluster of 4 workgroups",
    ),
    "out of bounds": (PULL.replace("[%r14]", "[%r14+256]"), "byte 256 is out of bounds of shared"),
    "never written": (PULL.replace("st.shared.u32 [%r13], %r20;", ""), "which nobody wrote"),
    "no wait": (
        PULL.replace("barrier.cluster.wait.aligned;", ""),
        "touches shared memory between coming to a barrier and waiting",
    ),
    "two arrivals": (
        PULL.replace("barrier.cluster.wait.aligned;", "barrier.cluster.arrive.aligned;"),
        "arrives at the cluster's barrier twice",
    ),
    "no arrival": (
        PULL.replace("barrier.cluster.arrive.aligned;", ""),
        "waits for a cluster's barrier that it has not come to",
    ),
    "some do not come": (
        PULL.replace(f"\t{MAP}", f"\tsetp.eq.u32 %p1, %r10, 1;\n\t@%p1 bra OVER;\n\t{MAP}").replace(
            f"[%r14];\n\t{MEET}\n\tst.global",
            f"[%r14];\n\t{MEET}\nOVER:\n\tmov.u32 %r21, 0;\n\tst.global",
        ),
        "a workgroup ends, and no barrier|has ended",
    ),
}


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_what_no_kernel_may_do(body: str, why: str) -> None:
    assert body != PULL
    with pytest.raises(Fault, match=why):
        run(body)


def test_launches_that_make_no_clusters() -> None:
    with pytest.raises(Fault, match=r"^kernel kernel; 6 workgroups along x, in clusters of 4"):
        run(PULL, workgroups=6)
    with pytest.raises(Fault, match=r"clusters of \(16, 1, 1\) workgroups: expected up to 8"):
        run(PULL, size=16)


def test_a_kernel_without_clusters_has_none() -> None:
    with pytest.raises(Fault, match=r"an instruction of clusters in a kernel without"):
        run_kernel(MEET, [np.zeros(64, np.uint32)])
