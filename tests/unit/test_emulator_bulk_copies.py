"""Bulk copies (cp.async.bulk) in the emulator: who must know what, and what may go wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ptx_kernels import run_kernel

from iree_lnbwd.emulator import Fault
from iree_lnbwd.ops.arguments import Array

ROWS = 5
WORDS = 32  # of a warp's place in shared memory, and in a row
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r12], 1;"
KNOWN = "@%p1 fence.mbarrier_init.release.cluster;"
READY = "bar.warp.sync -1;  // ready"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], %r14;"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
COPY = f"@%p1 {BULK} [%r13], [%rd30], %r14, [%r12];"
WAIT = """WAIT:
\tmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r12], %r21;
\t@!%p3 bra WAIT;"""
READ = "ld.shared.u32 %r30, [%r16];"
RESULT = "st.global.u32 [%rd31], %r30;"
HAVE_READ = "bar.warp.sync -1;  // have read"
STORE = "st.shared.u32 [%r17], %r30;"
FENCE = "fence.proxy.async.shared::cta;"
STORED = "bar.warp.sync -1;  // stored"
# Of each row, lane 0 of a warp copies 32 words, or 16 in the second warp. Each lane reads the word
# of the next one, and stores to its own. Then the place is filled again.
COPIES = f"""
\tshr.u32 %r10, %r0, 5;              // the warp
\tand.b32 %r11, %r0, 31;
\tsetp.eq.u32 %p1, %r11, 0;          // the lane that copies
\tshl.b32 %r12, %r10, 3;             // its mbarrier
\tmad.lo.u32 %r13, %r10, 128, 128;   // its place
\tmov.u32 %r14, 128;
\tshr.b32 %r14, %r14, %r10;          // bytes
\tshr.u32 %r15, %r14, 2;
\tsub.u32 %r15, %r15, 1;
\tadd.u32 %r16, %r11, 1;
\tand.b32 %r16, %r16, %r15;
\tmad.lo.u32 %r16, %r16, 4, %r13;    // what this lane reads
\tmad.lo.u32 %r17, %r11, 4, %r13;    // its own word
\tmov.u32 %r18, %nctaid.x;
\tmov.u32 %r20, 0;                   // the row
\t{INIT}
\t{KNOWN}
\t{READY}
ROW:
\tand.b32 %r21, %r20, 1;             // the parity of its phase
\tmad.lo.u32 %r22, %r20, %r18, %r1;
\tmad.lo.u32 %r23, %r22, 2, %r10;
\tmul.wide.u32 %rd30, %r23, 128;
\tadd.s64 %rd30, %rd0, %rd30;
\tmad.lo.u32 %r24, %r22, %r2, %r0;
\tmul.wide.u32 %rd31, %r24, 4;
\tadd.s64 %rd31, %rd1, %rd31;
\t{EXPECT}
\t{COPY}
\t{WAIT}
\t{READ}
\t{RESULT}
\t{HAVE_READ}
\t{STORE}
\t{FENCE}
\t{STORED}
\tadd.u32 %r20, %r20, 1;
\tsetp.lt.u32 %p5, %r20, {ROWS};
\t@%p5 bra ROW;
"""
ONE_CLUSTER = ".explicitcluster\n.reqnctapercluster 2, 1, 1"


def words(workgroups: int = 2) -> Array:
    count = ROWS * workgroups * 2 * WORDS
    return (np.arange(count, dtype=np.uint32) * 2654435761 >> 5).astype(np.uint32)


def run(
    body: str,
    *,
    workgroups: int = 2,
    threads: int = 64,
    shared_bytes: int = 512,
    directives: str = "",
    given: Sequence[Array | int] = (),
) -> Array:
    """Results of each row, workgroup and thread."""
    results = run_kernel(
        body,
        given or [words(workgroups), ROWS * workgroups * threads],
        workgroups=workgroups,
        threads=(threads, 1, 1),
        shared_bytes=shared_bytes,
        directives=directives,
        read_only=[0],
    )
    return results[1].reshape(ROWS, workgroups, threads)


def expected(workgroups: int = 2, threads: int = 64) -> Array:
    rows = words(workgroups).reshape(ROWS, workgroups, 2, WORDS)
    lanes = np.arange(WORDS) + 1
    warps = [rows[:, :, 0, lanes % WORDS], rows[:, :, 1, lanes % (WORDS // 2)]]
    return np.concatenate(warps, axis=-1)[:, :, :threads]


def changed(*changes: tuple[str, str], of: str = COPIES) -> str:
    """The kernel with other text in places."""
    for before, after in changes:
        assert of.count(before) == 1, before
        of = of.replace(before, after)
    return of


@pytest.mark.parametrize("workgroups", [1, 2, 5])
@pytest.mark.parametrize("threads", [32, 48, 64])
def test_each_warp_copies_its_part(workgroups: int, threads: int) -> None:
    results = run(COPIES, workgroups=workgroups, threads=threads)
    np.testing.assert_array_equal(results, expected(workgroups, threads))


def test_workgroups_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iree_lnbwd.emulator.ptx.executor._LANES_AT_ONCE", 64)
    np.testing.assert_array_equal(run(COPIES, workgroups=3), expected(3))


@pytest.mark.parametrize("late", ["setp.ge.u32 %p6, %r0, 32", "setp.eq.u32 %p6, %r11, 0"])
def test_some_come_late(late: str) -> None:
    """A warp, or the lane that copies, takes a detour in each row."""
    detour = f"""mov.u32 %r50, 0;
\t{late};
\t@!%p6 bra THERE;
DETOUR:
\tadd.u32 %r50, %r50, 1;
\tsetp.lt.u32 %p7, %r50, 9;
\t@%p7 bra DETOUR;
THERE:
\t"""
    for before in (EXPECT, COPY, WAIT, READ, STORE, FENCE):
        np.testing.assert_array_equal(run(changed((before, detour + before))), expected())


def test_reads_need_no_fence() -> None:
    body = changed((STORE, ""), (FENCE, ""), (STORED, ""))
    np.testing.assert_array_equal(run(body), expected())


@pytest.mark.parametrize("spelled", ["fence.proxy.async;", "fence.proxy.async.shared::cluster;"])
def test_other_fences(spelled: str) -> None:
    body = changed((FENCE, spelled), (KNOWN, f"@%p1 {spelled}"))
    np.testing.assert_array_equal(run(body), expected())


def test_bytes_may_come_before_they_are_expected() -> None:
    body = changed((f"\t{EXPECT}\n", ""), (COPY, f"{COPY}\n\t{EXPECT}"))
    np.testing.assert_array_equal(run(body), expected())


def test_several_copies_of_a_phase() -> None:
    halves = f"""shr.u32 %r40, %r14, 1;
\tadd.u32 %r41, %r13, %r40;
\tcvt.u64.u32 %rd40, %r40;
\tadd.s64 %rd40, %rd30, %rd40;
\t@%p1 {BULK} [%r13], [%rd30], %r40, [%r12];
\t@%p1 {BULK} [%r41], [%rd40], %r40, [%r12];"""
    np.testing.assert_array_equal(run(changed((COPY, halves))), expected())


def test_lanes_copy_at_once() -> None:
    """Each of four lanes copies 16 bytes."""
    quarters = f"""shl.b32 %r40, %r11, 4;
\tsetp.lt.u32 %p6, %r40, %r14;
\tadd.u32 %r41, %r13, %r40;
\tcvt.u64.u32 %rd40, %r40;
\tadd.s64 %rd40, %rd30, %rd40;
\t@%p6 {BULK} [%r41], [%rd40], 16, [%r12];"""
    np.testing.assert_array_equal(run(changed((COPY, quarters))), expected())


def test_workgroups_of_a_cluster_copy_to_themselves() -> None:
    np.testing.assert_array_equal(run(COPIES, workgroups=4, directives=ONE_CLUSTER), expected(4))
    mapped = f"""mov.u32 %r40, %cluster_ctarank;
\tmapa.shared::cluster.u32 %r41, %r13, %r40;
\tmapa.shared::cluster.u32 %r42, %r12, %r40;
\t{COPY.replace("[%r13]", "[%r41]").replace("[%r12]", "[%r42]")}"""
    results = run(changed((COPY, mapped)), workgroups=4, directives=ONE_CLUSTER)
    np.testing.assert_array_equal(results, expected(4))


def test_a_lane_knows_what_it_has_done_itself() -> None:
    body = changed(
        (READ, f"mov.u32 %r30, 0;\n\t@%p1 {READ}"),
        (STORE, f"@%p1 {STORE}"),
        (HAVE_READ, ""),
        (STORED, ""),
    )
    first = np.arange(64) % WORDS == 0
    np.testing.assert_array_equal(run(body), np.where(first, expected(), 0))


def test_what_another_workgroup_sends_needs_no_fence() -> None:
    """The first thread stores; the other workgroup's st.async takes the place, and then a copy."""
    body = f"""mov.u32 %r12, 0;
\tmov.u32 %r13, 128;
\tmov.u32 %r10, %cluster_ctarank;
\txor.b32 %r10, %r10, 1;
\tmapa.shared::cluster.u32 %r40, %r13, %r10;
\tmapa.shared::cluster.u32 %r41, %r12, %r10;
\tsetp.eq.u32 %p1, %r0, 0;
\tmov.u32 %r14, 16;
\tmul.wide.u32 %rd30, %r1, 128;
\tadd.s64 %rd30, %rd0, %rd30;
\tadd.s64 %rd31, %rd1, %rd20;
\t{INIT}
\t{KNOWN}
\t@%p1 st.shared.u32 [%r13], %r10;
\tbarrier.cluster.arrive.aligned;
\tbarrier.cluster.wait.aligned;
\t@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 4;
\t@%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r40], %r10, [%r41];
FIRST:
\tmbarrier.try_wait.parity.shared::cta.b64 %p3, [%r12], 0;
\t@!%p3 bra FIRST;
\tbar.sync 0;
\tmov.u32 %r21, 1;
\t{EXPECT}
\t{COPY}
\t{WAIT}
\tld.shared.u32 %r30, [%r13+4];
\t{RESULT}
"""
    given = words()
    results = run_kernel(body, [given, 128], workgroups=2, shared_bytes=256, directives=ONE_CLUSTER)
    np.testing.assert_array_equal(results[1], np.repeat(given[[1, 33]], 64))


# One place for the workgroup: the first thread copies, all read, the second warp stores.
SHARED = changed(
    ("shr.u32 %r10, %r0, 5;", "mov.u32 %r10, 0;"),
    ("setp.eq.u32 %p1, %r11, 0;", "setp.eq.u32 %p1, %r0, 0;\n\tsetp.ge.u32 %p4, %r0, 32;"),
    (READY, "bar.sync 0;  // ready"),
    (HAVE_READ, "bar.sync 0;  // have read"),
    (STORE, f"@%p4 {STORE}"),
    (STORED, "bar.sync 0;  // stored"),
)


def test_a_workgroup_shares_what_one_thread_copies() -> None:
    first = expected()[:, :, :WORDS]
    np.testing.assert_array_equal(run(SHARED), np.concatenate([first, first], axis=-1))


def test_an_arrival_tells_what_its_thread_has_read() -> None:
    """A lane of each warp arrives once the warp has read: no barrier of the workgroup."""
    turn = """bar.warp.sync -1;
\tsetp.eq.u32 %p6, %r11, 0;
\t@%p6 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12+16], 0;
TURN:
\tmbarrier.try_wait.parity.shared::cta.b64 %p7, [%r12+16], %r21;
\t@!%p7 bra TURN;"""
    body = changed(
        (INIT, f"{INIT}\n\t@%p1 mbarrier.init.shared::cta.b64 [%r12+16], 2;"),
        ("bar.sync 0;  // have read", ""),
        (f"@%p4 {STORE}", ""),
        (FENCE, ""),
        ("bar.sync 0;  // stored", turn),
        of=SHARED,
    )
    first = expected()[:, :, :WORDS]
    np.testing.assert_array_equal(run(body), np.concatenate([first, first], axis=-1))
    with pytest.raises(Fault, match="a bulk copy writes what its workgroup may still read"):
        run(changed((turn, "bar.warp.sync -1;"), of=body))


NO_FENCE = (
    r"a bulk copy to byte \d+ of shared memory, to which a thread has stored: no fence\.proxy"
)
NOT_KNOWN = "by a thread that does not know that what was sent to it has arrived"
TOUCHED = "a bulk copy writes what another thread of the subgroup touches, with no barrier between"
WRONG = {
    "a misaligned source": (changed(("[%rd30]", "[%rd30+8]")), "misaligned: byte .* of buffer 0"),
    "a misaligned place": (changed(("[%r13], [%rd30]", "[%r13+8], [%rd30]")), "misaligned: byte"),
    "no whole 16 bytes": (
        changed((EXPECT, f"mov.u32 %r14, 24;\n\t{EXPECT}")),
        "a bulk copy of 24 bytes .* expected a multiple of 16",
    ),
    "no bytes": (
        changed((EXPECT, f"mov.u32 %r14, 0;\n\t{EXPECT}")),
        "a bulk copy of 0 bytes .* expected a multiple of 16",
    ),
    "more bytes than there are": (
        changed((f"{BULK} [%r13], [%rd30], %r14", f"{BULK} [%r13], [%rd30], 0xFFFFFFF0")),
        "a bulk copy of 4294967280 bytes to shared memory, which has 512",
    ),
    "a source out of bounds": (
        changed(("[%rd30]", "[%rd30+80]")),
        "out of bounds: byte 2560 of buffer 0",
    ),
    "a source before the buffer": (changed(("[%rd30]", "[%rd30+-16]")), "out of bounds"),
    "a place out of bounds": (
        changed(("[%r13], [%rd30]", "[%r13+272], [%rd30]")),
        "byte 512 is out of bounds of shared memory, which has 512",
    ),
    "a place before the memory": (
        changed((COPY, f"sub.u32 %r40, 0, 16;\n\t{COPY.replace('[%r13]', '[%r40]')}")),
        "rank 254 of a cluster of 1 workgroups",
    ),
    "an mbarrier's place": (
        changed(("[%r13], [%rd30]", "[0], [%rd30]"), (KNOWN, "@%p1 fence.proxy.async;"), of=SHARED),
        "byte 0 of shared memory is touched, and belongs to an mbarrier",
    ),
    "no mbarrier": (
        changed((COPY, COPY.replace("[%r12]", "[%r12+16]"))),
        "byte 16 of shared memory is no mbarrier that was initialised",
    ),
    "an mbarrier that copies do not see": (
        changed((KNOWN, "")),
        "a bulk copy tells the mbarrier at byte 0: no fence",
    ),
    "a fence before the mbarrier": (
        changed((KNOWN, ""), (INIT, f"{KNOWN}\n\t{INIT}")),
        "a bulk copy tells the mbarrier at byte 0: no fence",
    ),
    "an mbarrier that its warp does not see": (
        changed((READY, "")),
        "the mbarrier at byte 0 may not be initialised yet: no barrier came since",
    ),
    "bytes that nobody expects": (
        changed((EXPECT, "")),
        "divergent mbarrier.try_wait: .* 1 of 1 arrivals pending and a tx-count of -128 bytes",
    ),
    "fewer bytes than are expected": (
        changed((EXPECT, EXPECT.replace("%r14", "256"))),
        "divergent mbarrier.try_wait: .* 0 of 1 arrivals pending and a tx-count of 128 bytes",
    ),
    "more bytes than are expected": (
        changed((EXPECT, EXPECT.replace("%r14", "16"))),
        "more bytes than expected: the mbarrier at byte 0 has 0 of 1 arrivals pending",
    ),
    "a load without a wait": (changed((WAIT, "")), f"is touched {NOT_KNOWN}"),
    "a store without a wait": (
        changed((WAIT, f"mov.u32 %r30, 0;\n\t{STORE}")),
        f"is touched {NOT_KNOWN}",
    ),
    "cp.async without a wait": (
        changed((WAIT, "cp.async.ca.shared.global [%r17], [%rd30], 4;")),
        f"is touched {NOT_KNOWN}",
    ),
    "a second copy without a wait": (
        changed((COPY, f"{COPY}\n\t{COPY}"), (EXPECT, EXPECT.replace("%r14", "256"))),
        f"is sent again {NOT_KNOWN}",
    ),
    "a wait for another warp's": (
        changed((WAIT, WAIT.replace("[%r12]", "[0]")), (READY, "bar.sync 0;")),
        f"is touched {NOT_KNOWN}",
    ),
    "two lanes copy to one place": (
        changed((COPY, f"setp.lt.u32 %p6, %r11, 2;\n\t{COPY.replace('%p1', '%p6')}")),
        "two threads write at once to one place",
    ),
    "a copy to where cp.async writes": (
        changed((EXPECT, f"cp.async.ca.shared.global [%r17], [%rd30], 4;\n\t{EXPECT}")),
        "is copied to again while an asynchronous copy to it is under way",
    ),
    "a lane may still read": (
        changed((HAVE_READ, ""), (STORE, ""), (FENCE, ""), (STORED, "")),
        f"race in shared memory at byte 128: {TOUCHED}",
    ),
    "a lane may still store": (changed((STORED, "")), TOUCHED),
    "a warp may still read": (
        changed(("bar.sync 0;  // have read", ""), (f"@%p4 {STORE}", ""), (FENCE, ""),
                ("bar.sync 0;  // stored", "bar.warp.sync -1;"), of=SHARED),
        r"race in shared memory at byte \d+: a bulk copy writes what its workgroup may still read",
    ),
    "a warp may still store": (
        changed(("bar.sync 0;  // stored", "bar.warp.sync -1;"), of=SHARED),
        r"race in shared memory at byte \d+: a bulk copy writes what its workgroup may still read",
    ),
    "no fence": (changed((FENCE, "")), NO_FENCE),
    "a fence of other memory": (changed((FENCE, "fence.proxy.async.global;")), NO_FENCE),
    "another fence": (changed((FENCE, "membar.cta;\n\tfence.acq_rel.cta;")), NO_FENCE),
    "a fence before the store": (
        changed((f"\t{FENCE}\n", ""), (STORE, f"{FENCE}\n\t{STORE}")),
        NO_FENCE,
    ),
    "a fence of the lane that copies alone": (changed((FENCE, f"@%p1 {FENCE}")), NO_FENCE),
    "a fence of the other lanes alone": (changed((FENCE, f"@!%p1 {FENCE}")), NO_FENCE),
    "no fence of the lane that stored to half a word": (
        changed((STORE, "mad.lo.u32 %r17, %r11, 2, %r13;\n\tmov.u16 %rs1, 0;\n"
                 "\tst.shared.b16 [%r17], %rs1;"),
                (FENCE, "and.b32 %r40, %r11, 1;\n\tsetp.eq.u32 %p6, %r40, 1;\n"
                 f"\t@%p6 {FENCE}")),
        NO_FENCE,
    ),
    "no fence of the lane that copies": (
        changed((STORE, f"@%p1 {STORE}"), (FENCE, "")),
        NO_FENCE,
    ),
    "a fence that may come after the copy": (
        changed((f"\t{FENCE}\n", ""), (STORED, f"{STORED}\n\t{FENCE}")),
        NO_FENCE,
    ),
    "another warp's fence that may come after the copy": (
        changed((FENCE, ""), ("bar.sync 0;  // stored", f"bar.sync 0;\n\t@%p4 {FENCE}"), of=SHARED),
        r"race in shared memory at byte \d+: a bulk copy writes what its workgroup may still read",
    ),
    "cp.async without a fence": (
        changed((STORE, "cp.async.ca.shared.global [%r17], [%rd30], 4;\n\tcp.async.wait_all;"),
                (FENCE, "")),
        NO_FENCE,
    ),
    "cp.async with a fence before it has come": (
        changed((STORE, "cp.async.ca.shared.global [%r17], [%rd30], 4;"),
                (FENCE, f"{FENCE}\n\tcp.async.wait_all;")),
        NO_FENCE,
    ),
    "no fence, and then a narrower load": (
        changed((STORE, f"setp.eq.u32 %p6, %r20, 0;\n\t@%p6 {STORE}"),
                (FENCE, "ld.shared.u16 %rs1, [%r17];")),
        NO_FENCE,
    ),
    "an end before bytes have come": (
        changed((WAIT, "ret;")),
        "a workgroup ends, and none of its threads has waited for bytes that are sent to it",
    ),
    "a last copy that nobody waits for": (
        changed((STORED, f"{STORED}\n\tsetp.lt.u32 %p6, %r20, {ROWS - 1};\n\t@%p6 bra ON;\n"
                 f"\t{EXPECT}\n\t{COPY}\nON:")),
        "a workgroup ends, and none of its threads has waited for bytes that are sent to it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "why"), WRONG.values(), ids=WRONG)
def test_what_no_kernel_may_do(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run(body)


def test_a_source_that_nobody_wrote() -> None:
    with pytest.raises(Fault, match="a read of buffer 0 at byte 0, which nobody wrote"):
        run(COPIES, given=[words().size, ROWS * 2 * 64])


@pytest.mark.parametrize("which", ["[%r13]", "[%r12]"])
def test_a_copy_to_another_workgroup_is_not_followed(which: str) -> None:
    mapped = f"""mov.u32 %r40, %cluster_ctarank;
\txor.b32 %r40, %r40, 1;
\tmapa.shared::cluster.u32 %r41, {which[1:-1]}, %r40;
\t{COPY.replace(which, "[%r41]")}"""
    with pytest.raises(Fault, match="a bulk copy to another workgroup"):
        run(changed((COPY, mapped)), directives=ONE_CLUSTER)


def test_a_kernel_without_mbarriers_has_none_to_tell() -> None:
    body = f"\tmov.u32 %r13, 0;\n\t{BULK} [%r13], [%rd0], 16, [%r13];\n"
    with pytest.raises(Fault, match="an mbarrier in a kernel that initialises none"):
        run(body)


POLICY = "createpolicy.fractional.L2::evict_last.b64 %rd40, 1.0;"
PREFETCH = "cp.async.bulk.prefetch.L2.global.L2::cache_hint"


def prefetched(offset: str, size: str, policy: str = POLICY) -> str:
    """Prefetches bytes of the words."""
    return f"\t{policy}\n\tadd.s64 %rd30, %rd0, {offset};\n\t{PREFETCH} [%rd30], {size}, %rd40;\n"


def hinted(policy: str = POLICY) -> str:
    """The copies, with a hint."""
    copy = COPY.replace(BULK, f"{BULK}.L2::cache_hint").replace("[%r12];", "[%r12], %rd40;")
    return f"\t{policy}\n" + changed((COPY, copy))


def test_a_hint_changes_nothing() -> None:
    np.testing.assert_array_equal(run(hinted()), expected())


def test_a_hint_that_is_none() -> None:
    with pytest.raises(Fault, match="a cache hint that createpolicy has not made"):
        run(hinted("mov.u64 %rd40, 7;"))


def test_a_prefetch_changes_nothing() -> None:
    body = prefetched("0", str(words().nbytes)) + COPIES
    np.testing.assert_array_equal(run(body), expected())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (prefetched("0", "24"), "a prefetch of 24 bytes: expected a multiple of 16"),
        (prefetched("0", "0"), "a prefetch of 0 bytes: expected a multiple of 16"),
        (prefetched("4", "16"), "misaligned"),
        (prefetched("16", str(words().nbytes)), "out of bounds"),
        (prefetched("0", "16", "mov.u64 %rd40, 7;"), "a cache hint that createpolicy has not made"),
    ],
)
def test_a_wrong_prefetch(body: str, why: str) -> None:
    with pytest.raises(Fault, match=why):
        run(body)


@pytest.mark.parametrize(
    "text",
    [
        f"{BULK}.L2::cache_hint [%r13], [%rd30], 16, [%r12]",
        f"{BULK} [%r13], [%rd30], 16, [%r12], %rd31",
        f"{BULK} [%r13], [%rd30], [%r12]",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd30], [%r13], 16",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.prefetch.L2.global [%rd30], 16",
        "fence.proxy.async.shared",
    ],
)
def test_other_instructions_are_unknown(text: str) -> None:
    with pytest.raises(Fault, match="unknown instruction"):
        run(f"\t{text};\n")
