"""Relaxed atomic accesses of global memory, and threads that wait for what others store so."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_kernels import run_kernel

from iree_lnbwd.emulator import Fault, launch

COUNTS = np.zeros(4, np.uint32)
_STORE = """
\tadd.s64 %rd21, %rd1, %rd20;
\tst.global.b32 [%rd21], %r5;"""


def test_all_are_counted_and_each_sees_another_number() -> None:
    body = f"\tatom.relaxed.gpu.global.add.u32 %r5, [%rd0], 3;{_STORE}"
    counts, seen = run_kernel(body, [COUNTS, 128], workgroups=2)
    assert counts.tolist() == [384, 0, 0, 0]
    assert sorted(seen.tolist()) == list(range(0, 384, 3))


def test_one_of_all_swaps() -> None:
    body = f"""
\tadd.u32 %r6, %r3, 7;
\tatom.relaxed.gpu.global.cas.b32 %r5, [%rd0], 0, %r6;{_STORE}"""
    counts, seen = run_kernel(body, [COUNTS, 128], workgroups=2)
    assert counts[0] in range(7, 135)
    assert sorted(seen.tolist()) == [0] + 127 * [counts[0]]


WAITS = """
\tsetp.eq.u32 %p0, %r1, 0;
\t@%p0 bra $wait;
\tst.relaxed.gpu.global.b32 [%rd0+4], 9;
\tbra $end;
$again:
{rest}
$wait:
\tld.relaxed.gpu.global.b32 %r5, [%rd0+4];
\tsetp.eq.u32 %p1, %r5, 0;
\t@%p1 bra $again;
$end:
"""


def test_who_rests_lets_others_run() -> None:
    """Workgroup 0 waits for 1, whose code comes later."""
    late = WAITS.replace("\tst.relaxed", "\tbra $late;\n$back:\n\tst.relaxed")
    body = late.format(rest="\tnanosleep.u32 40;") + "\tret;\n$late:\n\tbra $back;"
    counts = run_kernel(body, [COUNTS], workgroups=2)[0]
    assert counts[1] == 9


def test_what_nobody_stores_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_WORK", 1 << 24)
    body = WAITS.format(rest="\tnanosleep.u32 40;")
    with pytest.raises(Fault, match="kernel kernel"):
        run_kernel(body, [COUNTS], workgroups=1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("st.relaxed.gpu.global.b32 [%rd0], 1", "st.global.b32 [%rd0], 1"),
        ("st.relaxed.gpu.global.b32 [%rd0], 1", "ld.global.b32 %r5, [%rd0]"),
        ("ld.relaxed.gpu.global.b32 %r5, [%rd0]", "st.global.b32 [%rd0], 1"),
        ("st.global.b32 [%rd0], 1", "ld.relaxed.gpu.global.b32 %r5, [%rd0]"),
        ("ld.global.b32 %r5, [%rd0]", "st.relaxed.gpu.global.b32 [%rd0], 1"),
        ("st.global.b32 [%rd0], 1", "atom.relaxed.gpu.global.add.u32 %r5, [%rd0], 1"),
    ],
)
def test_with_plain_accesses_they_race(one: str, other: str) -> None:
    body = f"""
\tsetp.eq.u32 %p0, %r3, 0;
\t@%p0 {one};
\tsetp.eq.u32 %p1, %r3, 64;
\t@%p1 {other};"""
    with pytest.raises(Fault, match=r"race in buffer 0 at byte 0"):
        run_kernel(body, [COUNTS], workgroups=2)


@pytest.mark.parametrize(
    "instruction",
    [
        "ld.relaxed.gpu.global.v2.b32 {%r5, %r6}, [%rd0]",
        "atom.acquire.gpu.global.add.u32 %r5, [%rd0], 1",
        "atom.relaxed.gpu.global.max.u32 %r5, [%rd0], 1",
        "atom.relaxed.gpu.shared.add.u32 %r5, [%rd0], 1",
        "nanosleep.u64 40",
    ],
)
def test_what_is_not_known_says_so(instruction: str) -> None:
    with pytest.raises(Fault, match=re.escape(instruction.split()[0].split(".")[0])):
        run_kernel(f"\t{instruction};", [COUNTS])


def test_they_keep_to_their_bindings() -> None:
    with pytest.raises(Fault, match="read-only"):
        run_kernel("\tst.relaxed.gpu.global.b32 [%rd0], 1;", [COUNTS], read_only=[0])
    with pytest.raises(Fault, match="misaligned"):
        run_kernel("\tatom.relaxed.gpu.global.add.u32 %r5, [%rd0+2], 1;", [COUNTS])
    with pytest.raises(Fault, match="nobody wrote"):
        run_kernel("\tld.relaxed.gpu.global.b32 %r5, [%rd0];", [4])
