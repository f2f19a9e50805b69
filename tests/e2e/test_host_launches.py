"""The CPU's launches, as callers with threads run them, against what the host program dispatches.

By name and order of every binding, workgroups and constants; by the size of scratch; and by the
bits of every result, beside IREE's runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_hal import dispatches
from support import CPU_TARGETS, built, random_generator

from iree_lnbwd import ArtifactError, NormSpec, runtime
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.runtime.host_module import HostModule
from iree_lnbwd.schedules import RowBlocks, Schedule, WholeTensors
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb.counts import RowCount, RowShare, Shares, count_of
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.launches import LaunchPlans, Plan

BLOCKS = RowBlocks(3, 2, 16)
MANY = RowBlocks(3, 2, 16, share=4, most_workgroups=5, least=2)
LAYER, RMS = "layer_norm_backward", "rms_norm_backward"
MASKS = {
    op: [mask for mask in itertools.product((True, False), repeat=count) if any(mask)]
    for op, count in ((LAYER, 3), (RMS, 2))
}


def cases() -> dict[str, tuple[NormSpec, Schedule | None]]:
    """Every op, type, mask and option."""
    found: dict[str, tuple[NormSpec, Schedule | None]] = {}

    def add(spec: NormSpec, how: Schedule | None = None) -> None:
        found[spec.name + ("" if how is None else f" {how.most_workgroups}")] = (spec, how)  # type: ignore[union-attr]

    for op in OPS:
        eps: dict[str, Any] = {} if op in MASKS else {"eps": 1e-5}
        for dtype in DTYPES:
            add(NormSpec((77,), dtype, op=op, **eps))
        add(NormSpec((77,), op=op, has_weight=False, **eps))
        mixed: dict[str, Any] = {
            "weight_dtype": "f32",
            "residual_dtype": "f32",
            "weight_offset": 1.0,
        }
        add(NormSpec((40,), "bf16", op=op, **mixed, **eps))
        add(NormSpec((96,), op=op, rows=5, **eps))
        for how in (BLOCKS, MANY):
            add(NormSpec((48,), "f16", op=op, **eps), how)
        for mask in MASKS.get(op, ()):
            add(NormSpec((65,), op=op, output_mask=mask))
            add(NormSpec((65,), op=op, output_mask=mask, eps=1e-5))
        if op in MASKS:
            add(NormSpec((65,), "bf16", op=op, from_output=True))
            add(NormSpec((65,), op=op, from_output=True, has_weight=False))
    add(NormSpec((65,), op=LAYER, from_output=True, has_bias=False))
    add(NormSpec((40,), op="layer_norm", has_bias=False, eps=1e-5))
    return found


CASES = cases()


def planned_module(name: str, target: str = "generic") -> tuple[bytes, LaunchPlans]:
    spec, how = CASES[name]
    vmfb, _ = built(spec, find_target(target), how)
    planned = describe(vmfb, source=name).launches
    assert planned is not None
    return vmfb, planned


def computed(module: HostModule, arrays: dict[str, Array], rows: int) -> dict[str, Array]:
    """By the launches, into memory that was never written."""
    results = {
        result.name: np.full(result.dims(rows), 77, DTYPES[result.dtype].numpy)
        for result in module.spec.results
    }
    every = {**arrays, **results}
    module.sequence(rows).run([every[one.name].ctypes.data for one in module.spec.arguments])
    return results


def check(vmfb: bytes, planned: LaunchPlans, rows: int) -> None:
    """For M rows, the launches are those of the host program, and compute the same bits."""
    spec = describe(vmfb, source="it").spec
    hosts, places = dispatches(vmfb, spec, rows)
    sequence = HostModule(spec, planned, vmfb).sequence(rows)
    plan = planned.of(rows)
    sizes = {piece.name: piece.bytes * count_of(piece.count, rows) for piece in plan.scratch}
    ends = (*sequence.scratch, sequence.scratch_bytes)
    starts = dict(zip(sequence.scratch_names, itertools.pairwise(ends), strict=True))
    where = dict(places)
    assert len(sequence.launches) == len(hosts)
    for ours, theirs, planned_one in zip(sequence.launches, hosts, plan.kernels, strict=True):
        assert planned_one.kernel == theirs.kernel
        assert ours.workgroups == theirs.workgroup_count
        assert ours.constants == theirs.constants
        each = zip(ours.bindings, ours.lengths, theirs.bindings, strict=True)
        for name, length, binding in each:
            assert where.setdefault(name, binding.address) == binding.address, name
            assert length == binding.nbytes, name
            if name in sizes:
                begin, end = starts[name]
                assert length == sizes[name] <= end - begin, name
    call = matrix.random_call(spec, rows, random_generator())
    op = runtime.load_built(vmfb)
    expected = {r.name: np.empty(r.dims(rows), DTYPES[r.dtype].numpy) for r in spec.results}
    inputs = [call.arrays[given.name] for given in spec.inputs]
    op._iree().run(inputs, list(expected.values()))
    found = computed(HostModule(spec, planned, vmfb), dict(call.arrays), rows)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.drawn
@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_the_launches_are_the_host_programs(name: str, target: str) -> None:
    vmfb, planned = planned_module(name, target)
    rows = CASES[name][0].rows
    for each in (1, 7, 130) if rows is None else (rows,):
        check(vmfb, planned, each)


def of_the_first(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(
        plan, kernels=(replace(plan.kernels[0], **changes), *plan.kernels[1:])
    )


def swapped(one: str, other: str) -> Callable[[Plan], Plan]:
    names = {one: other, other: one}

    def change(plan: Plan) -> Plan:
        kernels = (
            replace(
                kernel,
                reads=tuple(names.get(name, name) for name in kernel.reads),
                writes=tuple(names.get(name, name) for name in kernel.writes),
            )
            if kernel.kernel == "rows"
            else kernel
            for kernel in plan.kernels
        )
        return replace(plan, kernels=tuple(kernels))

    return change


OTHER_SHARE = RowShare(1, 3, 1, 1, 3)
SABOTAGE: dict[str, Callable[[Plan], Plan]] = {
    "mean and rstd swapped": swapped("mean", "rstd"),
    "x and dy swapped": swapped("input", "grad_output"),
    "partial rows swapped": swapped("partial_dgamma", "partial_dbeta"),
    "scratch halved": lambda plan: replace(
        plan, scratch=tuple(replace(piece, bytes=piece.bytes // 2) for piece in plan.scratch)
    ),
    "another share": of_the_first(constants=(RowCount(), OTHER_SHARE)),
    "other workgroups": of_the_first(workgroups=(Shares(OTHER_SHARE), 1, 1)),
    "another M": of_the_first(constants=(36, RowShare(1, 64, 126, 512, 4096))),
    "another order": lambda plan: replace(plan, kernels=plan.kernels[::-1]),
    "a kernel left out": lambda plan: replace(plan, kernels=plan.kernels[:-1]),
}


@pytest.mark.parametrize("change", SABOTAGE)
def test_other_launches_are_noticed(change: str) -> None:
    """Before they run: some of them would write where nothing may be written."""
    vmfb, planned = planned_module(f"{LAYER}_n65_f32_eps1e-05")
    check(vmfb, planned, 130)
    wrong = replace(planned, plans=tuple(map(SABOTAGE[change], planned.plans)))
    assert wrong != planned
    with pytest.raises((AssertionError, ArtifactError)):
        check(vmfb, wrong, 130)


@pytest.mark.parametrize(
    ("share", "numbers"),
    [
        (RowShare(1, 64, 1, 1, 64), [(1, 1), (1, 63), (1, 64), (2, 33), (16, 63)]),
        (RowShare(1, 64, 8, 512, 4096), [(8, 1), (8, 8), (8, 8), (8, 9), (16, 63)]),
        (RowShare(4, 64, 1, 512, 4096), [(4, 1), (4, 16), (4, 16), (4, 17), (16, 63)]),
        (RowShare(2, 3, 1, 4, 5), [(2, 1), (14, 5), (14, 5), (14, 5), (200, 5)]),
    ],
)
def test_shares(share: RowShare, numbers: list[tuple[int, int]]) -> None:
    for rows, (each, groups) in zip((1, 63, 64, 65, 1000), numbers, strict=True):
        assert (share.of(rows), Shares(share).of(rows)) == (each, groups)


def test_modules_that_iree_alone_knows_the_kernels_of() -> None:
    vmfb, _ = built(NormSpec((40,)), find_target("generic"), WholeTensors("asked for"))
    op = runtime.load_built(vmfb)
    assert op.on_host(3) is None
    x = random_generator().standard_normal((3, 40), dtype=np.float32)
    assert op(x, x, x[:, 0], x[:, 0], x[0]).grad_bias.shape == (40,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "row"}, r"no kernel row in the module"),
        ({"constants": (1,)}, r"the kernel rows takes \(2, 8\) .*, its launch has \(1, 8\)"),
        ({"reads": ("input",)}, r"the kernel rows takes \(2, 8\) .*, its launch has \(2, 4\)"),
    ],
)
def test_launches_of_other_kernels_are_refused(change: dict[str, Any], message: str) -> None:
    vmfb, planned = planned_module(f"{LAYER}_n77_f32")
    wrong = replace(planned, plans=tuple(map(of_the_first(**change), planned.plans)))
    with pytest.raises(ArtifactError, match=message):
        HostModule(CASES[f"{LAYER}_n77_f32"][0], wrong, vmfb)
