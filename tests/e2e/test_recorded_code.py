"""What records tell of code by: fingerprints of today's modules are those that were written down.

`test_evidence` asks this of many modules; here are one of each backend, and what a host asks for.
"""

from __future__ import annotations

import pytest
from support import built

from iree_lnbwd import NormSpec
from iree_lnbwd.emulator import Fault
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import WholeTensors
from iree_lnbwd.verification import evidence, fingerprint, host_calls
from iree_lnbwd.vmfb.artifact import digest
from iree_lnbwd.vmfb.description import describe

SPEC = NormSpec((64,), "f32")


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_fingerprint_is_that_of_the_records(target: str) -> None:
    vmfb, _ = built(SPEC, find_target(target))
    code = fingerprint.of(vmfb, source="it")
    records = [record for record in evidence.records() if record.target == target]
    ran = {record.device for record in records if code in record.passed}
    emulated, devices = {""}, {record.device for record in records}  # some ran parts of the matrix
    assert emulated <= ran <= devices
    assert (ran > emulated) == (devices > emulated)


def test_what_a_host_asks_for() -> None:
    """Of both forms: kernels, workgroups, constants, and the memory that they are given."""
    vmfb, _ = built(SPEC, find_target("sm_90"))
    asked = host_calls.asked(vmfb, describe(vmfb, source="it"))
    most = 1024  # rows that count as few
    assert list(asked) == [str(rows) for rows in (1, 5, 37, most, most + 1, 1 << 20)]
    for key, launches in asked.items():
        rows = int(key)
        sizes = dict.fromkeys(("grad_output", "input", "grad_input"), 256 * rows)
        sizes |= dict.fromkeys(("mean", "rstd"), 4 * rows)
        sizes |= dict.fromkeys(("weight", "grad_weight", "grad_bias"), 256)
        given = [
            [f"argument {argument.name}", 0, sizes[argument.name]] for argument in SPEC.arguments
        ]
        if rows <= most:
            assert launches == [["few_rows", [rows + 2, 1, 1], [rows], given]]
            continue
        walkers = min(264, -(-rows // 32))
        partial = [["transient 1", 264 * 256 * part, 264 * 256] for part in (0, 1)]
        assert launches == [
            ["rows", [walkers, 1, 1], [rows], [*given[:6], *partial]],
            ["finalize", [4, 1, 1], [walkers], [*partial, *given[6:]]],
        ]


def test_what_a_host_asks_for_fixed_rows() -> None:
    vmfb, _ = built(NormSpec((64,), "f32", rows=5), find_target("sm_90"))
    assert list(host_calls.asked(vmfb, describe(vmfb, source="it"))) == ["5"]
    assert len(fingerprint.of(vmfb, source="it")) == len(digest(b""))


def test_what_a_host_asks_for_with_sets_of_weights() -> None:
    """Three sets of two rows each; one row has no more than its own set's."""
    spec = NormSpec((64,), "f32", op="rms_norm", eps=1e-5, weight_sets=True)
    vmfb, _ = built(spec, find_target("sm_90"))
    asked = host_calls.asked(vmfb, describe(vmfb, source="it"))
    for key, ((_, _, constants, given),) in asked.items():
        rows = int(key)
        assert constants == [rows, 3, min(rows, 2)]
        assert given[1] == ["argument weight", 0, 3 * 256]


def test_a_host_program_that_swaps_results() -> None:
    """As that of a gate's gradient: a third register has one of them while the others are set."""
    spec = NormSpec((64,), "f32", op="rms_norm_backward", gate="after")
    vmfb, _ = built(spec, find_target("sm_90"))
    asked = host_calls.asked(vmfb, describe(vmfb, source="it"))
    assert [launches[0][0] for launches in asked.values()] == ["few_rows"] * 4 + ["rows"] * 2


def test_a_module_without_a_plan_has_a_fingerprint() -> None:
    """IREE's device runs it; the host program tells what."""
    vmfb, _ = built(NormSpec((8,)), find_target("sm_90"), WholeTensors("asked for"))
    assert describe(vmfb, source="it").launches is None
    assert len(fingerprint.of(vmfb, source="it")) == len(digest(b""))


def test_of_ptx_comments_and_locations_are_left_out() -> None:
    said = b'.version 8.7\n// a\n\t.file 1 "x"\n  .loc 1 2 3\n mov.b32 a, b; // b\n\n.local x;\n'
    assert fingerprint._instructions(said) == b".version 8.7\nmov.b32 a, b;\n.local x;"


def test_addresses_of_what_a_host_asks_for() -> None:
    """Buffers lie apart, so that each address is a place in one of them, its end too."""
    ledger = host_calls._Ledger()
    first, second = ledger.allocate("a", 10), ledger.allocate("b", 600, write_once=True)
    assert (first.write_once, second.write_once) == (False, True)
    assert second.address == first.address + 256
    assert ledger.allocate("c", 0).address == second.address + 3 * 256
    assert ledger._place(first.address) == ("a", 0)
    assert ledger._place(first.address + 10) == ("a", 10)
    assert ledger._place(second.address + 599) == ("b", 599)
    lost = first.address + 11
    with pytest.raises(Fault, match=f"^no buffer at {lost:#x}$"):
        ledger._place(lost)
