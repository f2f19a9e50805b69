"""Mbarriers and st.async in the emulator: exchanges of a cluster, and what may go wrong."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run_kernel

from iree_lnbwd.emulator import Fault
from iree_lnbwd.ops.arguments import Array

ROWS = 6
RELAXED = "barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;"
ORDERED = "barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;"
INIT = """@%p1 mbarrier.init.shared::cta.b64 [%r20], %r18;
\t@%p1 mbarrier.init.shared.b64 [%r20+8], %r18;
"""
FENCE = "@%p1 fence.mbarrier_init.release.cluster;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r24], %r26;"
SEND = """@%p2 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r28], \
{%r30, %r31}, [%r29];"""
WAIT = """WAIT:
\tmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r24], %r23;
\t@!%p3 bra WAIT;"""
READ = """mov.u32 %r40, 0;
\tmov.u32 %r41, 0;
\tmov.u32 %r42, %r25;
SLOT:
\tld.shared.v2.u32 {%r43, %r44}, [%r42];
\tadd.u32 %r40, %r40, %r43;
\txor.b32 %r40, %r40, %r44;
\tadd.u32 %r42, %r42, 8;
\tadd.u32 %r41, %r41, 1;
\tsetp.lt.u32 %p4, %r41, %r11;
\t@%p4 bra SLOT;
"""
MEETS = "bar.sync 0;"
HALF = "mad.lo.u32 %r25, %r22, 64, 64;      // this row's half of the data"
# For each row, every workgroup sends a number to all; all of its threads add up what came.
EXCHANGE = f"""
\tmov.u32 %r10, %cluster_ctarank;
\tmov.u32 %r11, %cluster_nctarank;
\tmov.u32 %r12, %nctaid.x;
\tsetp.eq.u32 %p1, %r0, 0;
\tsetp.lt.u32 %p2, %r0, %r11;        // thread n sends to workgroup n
\tmov.u32 %r18, 1;
\tmov.u32 %r20, 0;
\tmov.u32 %r21, 0;                   // the row
\t{INIT}
\t{FENCE}
\t{RELAXED}
ROW:
\tand.b32 %r22, %r21, 1;
\tshr.u32 %r23, %r21, 1;
\tand.b32 %r23, %r23, 1;             // the parity of its phase
\tshl.b32 %r24, %r22, 3;             // its mbarrier
\t{HALF}
\tshl.b32 %r26, %r11, 3;             // bytes that come
\t{MEETS}
\t{EXPECT}
\tmad.lo.u32 %r33, %r21, %r12, %r1;
\tmul.wide.u32 %rd30, %r33, 4;
\tadd.s64 %rd30, %rd0, %rd30;
\tld.global.u32 %r30, [%rd30];
\tshl.b32 %r31, %r30, 3;
\tmad.lo.u32 %r27, %r10, 8, %r25;
\tmapa.shared::cluster.u32 %r28, %r27, %r0;
\tmapa.shared::cluster.u32 %r29, %r24, %r0;
\t{SEND}
{WAIT}
\t{READ}
\tmul.lo.u32 %r34, %r12, %r2;
\tmul.lo.u32 %r34, %r34, %r21;
\tmul.wide.u32 %rd31, %r34, 4;
\tadd.s64 %rd31, %rd31, %rd20;
\tadd.s64 %rd31, %rd31, %rd1;
\tst.global.u32 [%rd31], %r40;
\tadd.u32 %r21, %r21, 1;
\tsetp.lt.u32 %p5, %r21, {ROWS};
\t@%p5 bra ROW;
"""


def run(body: str, *, size: int = 4, clusters: int = 2, threads: int = 64) -> Array:
    """Results of each row, cluster, workgroup and thread."""
    count = size * clusters
    results = run_kernel(
        body,
        [words(size, clusters).reshape(-1), ROWS * count * threads],
        workgroups=count,
        threads=(threads, 1, 1),
        shared_bytes=1024,
        directives=f".explicitcluster\n.reqnctapercluster {size}, 1, 1",
    )
    return results[1].reshape(ROWS, clusters, -1) if results[1].size else results[1]


def words(size: int, clusters: int) -> Array:
    numbers = np.arange(ROWS * clusters * size, dtype=np.uint32)
    return (numbers * 2654435761 >> 7).astype(np.uint32).reshape(ROWS, clusters, size)


def expected(size: int = 4, clusters: int = 2, threads: int = 64) -> Array:
    sent = words(size, clusters)
    sums: Array = np.zeros((ROWS, clusters), np.uint32)
    for rank in range(size):
        sums = sums + sent[:, :, rank] ^ sent[:, :, rank] << 3
    return np.broadcast_to(sums[:, :, None], (ROWS, clusters, size * threads))


def changed(*changes: tuple[str, str], of: str = EXCHANGE) -> str:
    """The kernel with other text in places."""
    for before, after in changes:
        assert before in of
        of = of.replace(before, after, 1)
    return of


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("threads", [32, 64, 80])
def test_workgroups_exchange_numbers(size: int, threads: int) -> None:
    results = run(EXCHANGE, size=size, threads=threads)
    np.testing.assert_array_equal(results, expected(size, threads=threads))


@pytest.mark.parametrize("late", ["setp.ge.u32 %p6, %r0, 32", "setp.eq.u32 %p6, %r10, 1"])
def test_some_come_late(late: str) -> None:
    """Warps or workgroups that take a detour in each row: others wait for what they send."""
    detour = f"""mov.u32 %r50, 0;
\t{late};
\t@!%p6 bra THERE;
DETOUR:
\tadd.u32 %r50, %r50, 1;
\tsetp.lt.u32 %p7, %r50, 9;
\t@%p7 bra DETOUR;
THERE:
\t"""
    for before in (EXPECT, SEND, WAIT, READ):
        np.testing.assert_array_equal(run(changed((before, detour + before))), expected())


def test_other_words() -> None:
    """Two stores in place of one of a vector; every other form of an instruction."""
    store = "@%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes"
    sends = f"{store}.b32 [%r28], %r30, [%r29];\n\t{store}.u32 [%r28+4], %r31, [%r29];"
    body = changed(
        (SEND, sends),
        (RELAXED, ORDERED),
        ("arrive.expect_tx.shared::cta", "arrive.expect_tx.shared"),
        ("try_wait.parity.shared::cta", "try_wait.parity.shared"),
    )
    np.testing.assert_array_equal(run(body), expected())
    for spelled in (RELAXED.replace(".aligned", ""), ORDERED.replace(".aligned", "")):
        np.testing.assert_array_equal(run(changed((RELAXED, spelled))), expected())
    for scope in ("cta", "cluster"):
        acquires = changed(("parity.shared", f"parity.acquire.{scope}.shared"), of=body)
        np.testing.assert_array_equal(run(acquires), expected())


def test_bytes_may_come_before_they_are_expected() -> None:
    body = changed((f"\t{EXPECT}\n", ""), (SEND, f"{SEND}\n\t{EXPECT}"))
    np.testing.assert_array_equal(run(body), expected())


def test_one_buffer_with_an_ordered_barrier_of_the_cluster() -> None:
    one = (HALF, "mov.u32 %r25, 64;")
    np.testing.assert_array_equal(run(changed(one, (MEETS, ORDERED))), expected())
    with pytest.raises(Fault, match="is sent again by a thread that does not know"):
        run(changed(one, (MEETS, f"{MEETS}\n\t{RELAXED}")))


def test_a_group_of_warps_has_its_own_barrier() -> None:
    np.testing.assert_array_equal(run(changed((MEETS, "bar.sync 1, 64;"))), expected())


def test_memory_is_touched_while_the_cluster_meets() -> None:
    """A relaxed barrier orders nothing, so it is in nobody's way."""
    arrive, wait = RELAXED.split("\n\t")
    touch = "@%p1 st.shared.u32 [%r20+248], %r18;\n\t@%p1 ld.shared.u32 %r50, [%r20+248];"
    body = changed((RELAXED, f"{arrive}\n\t{touch}\n\t{wait}"))
    np.testing.assert_array_equal(run(body), expected())


def test_an_arrival_tells_what_its_thread_has_done() -> None:
    """The first warp reads, the second one sends; an mbarrier is all that orders the two."""
    turn = """@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r20+16], 0;
TURN:
\tmbarrier.try_wait.parity.shared.b64 %p8, [%r20+16], %r22;
\t@!%p8 bra TURN;"""
    body = changed(
        (INIT, f"{INIT}\t@%p1 mbarrier.init.shared.b64 [%r20+16], %r18;\n"),
        ("setp.lt.u32 %p2, %r0, %r11;", "sub.u32 %r5, %r0, 32;\n\tsetp.lt.u32 %p2, %r5, %r11;"),
        (MEETS, turn),
        ("%r28, %r27, %r0", "%r28, %r27, %r5"),
        ("%r29, %r24, %r0", "%r29, %r24, %r5"),
        (READ, f"setp.ge.u32 %p9, %r0, 32;\n\t@%p9 bra OVER;\n\t{READ}\nOVER:\n"),
    )
    results = run(body).reshape(ROWS, 2, -1, 2, 32)[..., 0, :]
    np.testing.assert_array_equal(results.reshape(ROWS, 2, -1), expected(threads=32))
    with pytest.raises(Fault, match=r"st\.async writes what its workgroup may still read"):
        run(changed((turn, ""), of=body))


def test_every_warp_sends_for_itself() -> None:
    """No barrier of a workgroup: each warp's sends say that it has read the rows before."""
    body = changed(
        ("setp.lt.u32 %p2, %r0, %r11;", "and.b32 %r5, %r0, 31;\n\tsetp.lt.u32 %p2, %r5, %r11;"),
        (HALF, "mad.lo.u32 %r25, %r22, 64, 64;\n\tshr.u32 %r6, %r0, 5;"),
        (f"\t{MEETS}\n", ""),
        ("mad.lo.u32 %r27, %r10, 8, %r25;", "mad.lo.u32 %r27, %r10, 16, %r25;\n"
         "\tmad.lo.u32 %r27, %r6, 8, %r27;"),
        ("shl.b32 %r26, %r11, 3;", "shl.b32 %r26, %r11, 4;"),
        ("%r28, %r27, %r0", "%r28, %r27, %r5"),
        ("%r29, %r24, %r0", "%r29, %r24, %r5"),
        ("add.u32 %r42, %r42, 8;", "add.u32 %r42, %r42, 16;"),
    )  # fmt: skip
    np.testing.assert_array_equal(run(body), expected())


def test_workgroups_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iree_lnbwd.emulator.ptx.executor._LANES_AT_ONCE", 64)
    np.testing.assert_array_equal(run(EXCHANGE, clusters=3), expected(clusters=3))


NO_SENDS = changed((SEND, ""), (f"\t{READ}", "\tmov.u32 %r40, 0;\n"))
ALONE = changed(("shl.b32 %r26, %r11, 3;", "mov.u32 %r26, 0;"), of=NO_SENDS)  # no bytes, either
WRONG = {
    "no mbarrier": (changed(("[%r20+8], %r18", "[%r20+16], %r18")), "byte 8 .* is no mbarrier"),
    "initialised twice": (
        changed(("[%r20+8]", "[%r20]")),
        "the mbarrier at byte 0 is initialised twice",
    ),
    "initialised by two threads": (
        changed(("@%p1 mbarrier.init", "mbarrier.init")),
        "the mbarrier at byte 0 is initialised twice",
    ),
    "no arrivals": (
        changed(("mov.u32 %r18, 1", "mov.u32 %r18, 0")),
        "an mbarrier of 0 arrivals: expected 1 to 1048575",
    ),
    "too many arrivals": (changed(("mov.u32 %r18, 1", "mov.u32 %r18, 1048576")), "of 1048576 arr"),
    "misaligned": (changed(("[%r20+8]", "[%r20+12]")), "misaligned: byte 12 of shared memory"),
    "misaligned arrival": (changed(("_, [%r24]", "_, [%r24+4]")), "misaligned: byte 4 of shared"),
    "out of bounds": (changed(("[%r20+8]", "[%r20+1024]")), "byte 1024 is out of bounds of shared"),
    "a wait out of bounds": (
        changed(("%p3, [%r24]", "%p3, [%r24+4096]")),
        "byte 4096 is out of bounds of shared",
    ),
    "too many mbarriers": (
        "\tmov.u32 %r20, 0;\n\tsetp.eq.u32 %p1, %r0, 0;\n\tmov.u32 %r18, 1;\n"
        + "".join(f"\t@%p1 mbarrier.init.shared.b64 [{8 * n}], %r18;\n" for n in range(65)),
        "more than 64 mbarriers of a workgroup",
    ),
    "a load of an mbarrier": (
        changed((WAIT, f"{WAIT}\n\tld.shared.u32 %r50, [%r20+4];")),
        "byte 4 of shared memory is touched, and belongs to an mbarrier",
    ),
    "a store to an mbarrier": (
        changed((WAIT, f"{WAIT}\n\tst.shared.u32 [%r20], %r18;")),
        "byte 0 of shared memory is touched, and belongs to an mbarrier",
    ),
    "st.async to an mbarrier": (
        changed((HALF, "mov.u32 %r25, 0;")),
        "byte 0 of shared memory is touched, and belongs to an mbarrier",
    ),
    "the cluster has not met": (
        changed((RELAXED, "")),
        "another workgroup's memory before a barrier of the cluster: it may not have begun",
    ),
    "no fence": (
        changed((FENCE, "")),
        "another workgroup's mbarrier: no fence.mbarrier_init after it was initialised",
    ),
    "a fence too early": (
        changed((FENCE, ""), (INIT, f"{FENCE}\n\t{INIT}")),
        "another workgroup's mbarrier: no fence.mbarrier_init after it was initialised",
    ),
    "a fence too late": (
        changed((FENCE, ""), (RELAXED, f"{RELAXED}\n\t{FENCE}")),
        "no barrier of the cluster since it was initialised",
    ),
    "not initialised yet": (
        changed((FENCE, ""), (MEETS, ""), of=ALONE),
        "the mbarrier at byte 0 may not be initialised yet: no barrier came since",
    ),
    "a workgroup that has ended": (
        changed(
            (f"{RELAXED}\nROW", f"{RELAXED}\n\tsetp.eq.u32 %p6, %r10, 1;\n\t@%p6 ret;\nROW"),
        ),
        "shared memory of a workgroup that has ended",
    ),
    "a rank that there is not": (
        changed(("%r28, %r27, %r0", "%r28, %r27, 4")),
        "rank 4 of a cluster of 4 workgroups",
    ),
    "a rank of an mbarrier that there is not": (
        changed(("%r29, %r24, %r0", "%r29, %r24, 4")),
        "rank 4 of a cluster of 4 workgroups",
    ),
    "the mbarrier of another workgroup": (
        changed(("%r29, %r24, %r0", "%r29, %r24, %r10")),
        "st.async to one workgroup with the mbarrier of another one",
    ),
    "st.async out of bounds": (changed(("[%r28]", "[%r28+1024]")), "is out of bounds of shared"),
    "misaligned st.async": (changed(("[%r28]", "[%r28+4]")), "misaligned: byte"),
    "two threads to one place": (
        changed(("%r10, 8, %r25", "0, 8, %r25")),
        "two threads write at once to one place",
    ),
    "one place in one phase": (
        changed((SEND, f"{SEND}\n\t{SEND}"), ("shl.b32 %r26, %r11, 3;", "shl.b32 %r26, %r11, 4;")),
        "is sent again by a thread that does not know that what was sent to it has arrived",
    ),
    "a read without a wait": (
        changed((WAIT, "")),
        "is touched by a thread that does not know that what was sent to it has arrived",
    ),
    "a store without a wait": (
        changed((WAIT, "@%p1 st.shared.u32 [%r25], %r18;")),
        "is touched by a thread that does not know that what was sent to it has arrived",
    ),
    "another one's load without a wait": (
        changed((WAIT, "ld.shared::cluster.u32 %r50, [%r28];"), ("%r28, %r27, %r0", "%r28, %r27, 1")
        , (SEND, f"mapa.shared::cluster.u32 %r29, %r24, 1;\n\t{SEND.replace('%p2', '%p1')}")),
        "is touched by a thread that does not know that what was sent to it has arrived",
    ),
    "a wait for the wrong parity": (
        changed(("and.b32 %r23, %r23, 1;", "mov.u32 %r23, 1;")),
        "divergent mbarrier.try_wait: .* a tx-count of 0 bytes in phase 1",
    ),
    "a parity of 2": (
        changed(("and.b32 %r23, %r23, 1;", "mov.u32 %r23, 2;")),
        "a parity of 2: expected 0 or 1",
    ),
    "one buffer": (
        changed((HALF, "mov.u32 %r25, 64;")),
        "is sent again by a thread that does not know that what was sent to it has arrived",
    ),
    "one mbarrier": (
        changed(("shl.b32 %r24, %r22, 3;", "mov.u32 %r24, 0;"), ("%r23, %r21, 1", "%r23, %r21, 0")),
        "a thread sends to phase 1 of the mbarrier at byte 0, and nothing tells it",
    ),
    "a read that nothing orders before the next store": (
        changed((f"\t{MEETS}\n", "")),
        r"race in shared memory at byte \d+: st.async writes what its workgroup may still read",
    ),
    "the workgroup's own store before": (
        changed((RELAXED, f"st.shared.u32 [128], %r18;\n\t{RELAXED}"), (", 64, 64;", ", 64, 64;"),
                (FENCE, f"{FENCE}\n\tsetp.eq.u32 %p6, %r0, 0;"),
                ("st.shared.u32 [128]", "@%p6 st.shared.u32 [64]")),
        "race in shared memory at byte 64: st.async writes what its workgroup may still read",
    ),
    "another one's store before": (
        changed(
            (SEND, "mov.u32 %r50, 64;\n\tmapa.shared::cluster.u32 %r51, %r50, 1;\n"
             "\tsetp.eq.u32 %p6, %r10, 0;\n\t@!%p1 bra NEXT;\n"
             "\t@%p6 st.shared::cluster.u32 [%r51], %r18;\nNEXT:\n"
             f"\tbar.sync 0;\n\t{SEND}\n\tret;"),
        ),
        r"race in shared memory at byte \d+ with another workgroup: no barrier of the cluster",
    ),
    "a read after telling others": (
        changed(
            (SEND, f"{SEND}\n\tsetp.gt.u32 %p6, %r21, 0;\n\txor.b32 %r50, %r25, 192;\n"
             "\t@%p6 ld.shared.u32 %r51, [%r50];"),
        ),
        r"race in shared memory at byte \d+: st.async writes what its workgroup may still read",
    ),
    "another one's load before": (
        changed(
            (RELAXED, f"@%p1 st.shared.u32 [%r20+64], %r18;\n\t{ORDERED}"),
            (SEND, "mov.u32 %r50, 64;\n\tmapa.shared::cluster.u32 %r51, %r50, 1;\n"
             f"\t@%p1 ld.shared::cluster.u32 %r52, [%r51];\n\tbar.sync 0;\n\t{SEND}\n\tret;"),
        ),
        "race in shared memory at byte 64 with another workgroup: no barrier of the cluster",
    ),
    "a wait that misses its phase": (
        """\tmov.u32 %r20, 0;
\tsetp.eq.u32 %p1, %r0, 0;
\t@%p1 mbarrier.init.shared.b64 [%r20], 1;
\tbar.sync 0;
\tsetp.lt.u32 %p2, %r0, 32;
\t@%p2 bra FIRST;
\tmbarrier.try_wait.parity.shared.b64 %p3, [%r20], 0;
\tret;
FIRST:
\t@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 0;
\tmbarrier.try_wait.parity.shared.b64 %p3, [%r20], 0;
\t@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 0;
""",
        "phase 1 of the mbarrier at byte 0 is over while a thread may still wait",
    ),
    "a wait that may miss its phase": (
        changed((f"\t{MEETS}\n", ""), (f"\t{READ}", "\tmov.u32 %r40, 0;\n")),
        "phase 1 of the mbarrier at byte 0 is over while a thread may still wait",
    ),
    "an arrival too early": (
        changed(
            (EXPECT, f"{EXPECT}\n\t{EXPECT}"), ("shl.b32 %r26, %r11, 3;", "mov.u32 %r26, 0;"),
            of=NO_SENDS,
        ),
        "a thread arrives at phase 1 of the mbarrier at byte 0, and nothing tells it",
    ),
    "two arrivals": (
        changed((EXPECT, f"{EXPECT}\n\t{EXPECT}")),
        "an arrival at the mbarrier at byte 0, and none is pending in its phase 0",
    ),
    "two arrivals at once": (
        changed((EXPECT, EXPECT.replace("@%p1", "@%p2"))),
        "an arrival at the mbarrier at byte 0, and none is pending in its phase 0",
    ),
    "an arrival too few": (
        changed(("mov.u32 %r18, 1;", "mov.u32 %r18, 2;")),
        r"divergent mbarrier.try_wait: 64 of 64 threads .* the mbarrier at byte 0 has 1 of 2 "
        "arrivals pending and a tx-count of 0 bytes in phase 0",
    ),
    "bytes that do not come": (
        changed(("shl.b32 %r26, %r11, 3;", "mov.u32 %r26, 40;")),
        r"divergent mbarrier.try_wait: 64 of 64 threads .* the mbarrier at byte 0 has 0 of 1 "
        "arrivals pending and a tx-count of 8 bytes in phase 0; .* mbarrier.try_wait.parity",
    ),
    "bytes that are not expected": (
        changed(("shl.b32 %r26, %r11, 3;", "mov.u32 %r26, 24;")),
        "more bytes than expected: the mbarrier at byte 0 has 0 of 1 arrivals pending and a "
        "tx-count of -8 bytes in phase 0",
    ),
    "more bytes than are counted": (
        changed(("shl.b32 %r26, %r11, 3;", "mov.u32 %r26, 1048576;")),
        "a tx-count of 1048576 bytes in phase 0: expected at most 1048575",
    ),
    "an end before bytes have come": (
        changed((WAIT, ""), (f"\t{READ}", "\tret;\n")),
        "a workgroup ends, and none of its threads has waited for bytes that are sent to it",
    ),
    "an end before all bytes have come": (
        changed((WAIT, ""), (f"\t{READ}", "\tret;\n"), (SEND, "")),
        "a workgroup ends, and none of .* has 0 of 1 arrivals pending and a tx-count of 32 bytes",
    ),
    "no predicate": (changed(("%p3, [%r24]", "%r50, [%r24]")), "%r50 is no predicate"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_what_no_kernel_may_do(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run(body)


@pytest.mark.parametrize(
    "text",
    [
        "mbarrier.arrive.shared::cta.b64 %rd50, [%r20]",
        "mbarrier.arrive.expect_tx.shared::cta.b64 %rd50, [%r20], 8",
        "mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 0",
        "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p3, [%r20], 0",
        "mbarrier.try_wait.shared::cta.b64 %p3, [%r20], %rd50",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v8.f32 [%r28], %r30, [%r29]",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b16 [%r28], %rs30, [%r29]",
        "st.async.release.global.b32 [%rd28], %r30",
        "fence.mbarrier_init.acquire.cluster",
        "barrier.cluster.arrive.acquire.aligned",
    ],
)
def test_other_instructions_are_unknown(text: str) -> None:
    with pytest.raises(Fault, match="unknown instruction"):
        run(f"\t{text};\n")


def test_a_workgroup_without_a_cluster_has_mbarriers_too() -> None:
    """Each warp arrives once; all threads wait for both."""
    body = """	mov.u32 %r20, 0;
\tsetp.eq.u32 %p1, %r0, 0;
\tand.b32 %r21, %r0, 31;
\tsetp.eq.u32 %p2, %r21, 0;
\t@%p1 mbarrier.init.shared.b64 [%r20], 2;
\tbar.sync 0;
\t@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 0;
\tmbarrier.try_wait.parity.shared.b64 %p3, [%r20], 0;
\tselp.b32 %r22, 1, 0, %p3;
\tadd.s64 %rd30, %rd0, %rd20;
\tst.global.u32 [%rd30], %r22;
"""
    (passed,) = run_kernel(body, [192], workgroups=3, shared_bytes=64)
    np.testing.assert_array_equal(passed, np.ones(192, np.uint32))
    with pytest.raises(Fault, match="may not be initialised yet: no barrier came since"):
        run_kernel(changed(("\tbar.sync 0;\n", ""), of=body), [192], workgroups=3, shared_bytes=64)


def test_lanes_of_a_warp_meet_once_an_mbarrier_is_initialised() -> None:
    body = """\tmov.u32 %r20, 0;
\tsetp.eq.u32 %p1, %r0, 0;
\t@%p1 mbarrier.init.shared.b64 [%r20], 1;
\tbar.warp.sync -1;
\t@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 0;
\tmbarrier.try_wait.parity.shared.b64 %p3, [%r20], 0;
"""
    run_kernel(body, [0], threads=(32, 1, 1), shared_bytes=64)
    apart = changed(("\tbar.warp.sync -1;\n", ""), of=body)
    with pytest.raises(Fault, match="may not be initialised yet: no barrier came since"):
        run_kernel(apart, [0], threads=(32, 1, 1), shared_bytes=64)


def test_a_kernel_that_initialises_none_has_none() -> None:
    body = f"\tmov.u32 %r28, 0;\n\tmov.u32 %r29, 8;\n\t{SEND}\n"
    with pytest.raises(Fault, match="an mbarrier in a kernel that initialises none"):
        run(body)
