"""The launch plan, which calls on a stream run, against the host program, both of them emulated.

By name and order of every binding, grid and constant; by the bits of every gradient; and scratch is
no larger than the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
from emulated_driver import EmulatedDriver
from support import built, random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.emulator import Fault
from iree_lnbwd.emulator.module import Module
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.runtime.gpu_driver import Driver
from iree_lnbwd.runtime.stream_module import StreamModule
from iree_lnbwd.schedules import OnePass, Schedule, TwoPass
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb.counts import RowCount, count_of
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.launches import LaunchPlans, Plan, Scratch

ONE_PASS = OnePass(4, 1, 2, 1)
TWO_PASS = TwoPass(2, 4, 4, 1, rows=2)
CASES: dict[str, tuple[NormSpec, Schedule | None]] = {
    "few rows and one pass": (NormSpec((769,), "bf16"), None),
    "types of their own": (
        NormSpec((64,), "f16", grad_output_dtype="f32", weight_dtype="f32", bias_dtype="f16"),
        None,
    ),
    "f64": (NormSpec((64,), "f64"), None),
    "statistics": (NormSpec((96,), eps=1e-5), None),
    "statistics, one pass": (NormSpec((96,), eps=1e-5), ONE_PASS),
    "no weight": (NormSpec((96,), has_weight=False), ONE_PASS),
    "no weight, f64": (NormSpec((96,), "f64", has_weight=False), None),
    "no bias": (NormSpec((96,), output_mask=(True, True, False)), ONE_PASS),
    "columns alone": (NormSpec((96,), output_mask=(False, True, True)), ONE_PASS),
    "rows alone": (NormSpec((96,), output_mask=(True, False, False)), ONE_PASS),
    "two passes": (NormSpec((96,)), TWO_PASS),
    "two passes, columns alone": (NormSpec((96,), output_mask=(False, False, True)), TWO_PASS),
    "two passes, statistics": (NormSpec((96,), eps=1e-5), TWO_PASS),
    "fixed rows": (NormSpec((96,), rows=5), None),
    "from the output": (NormSpec((96,), from_output=True, bias_dtype="bf16"), None),
    "from the output, no bias": (NormSpec((96,), from_output=True, has_bias=False), ONE_PASS),
    "from the output, two passes": (NormSpec((96,), from_output=True), TWO_PASS),
}


def check(vmfb: bytes, planned: LaunchPlans, rows: int, *, captured: bool = False) -> None:
    """For M rows, the plan launches what the host program does, and computes the same bits.

    A call that is captured launches kernels one by one; another one, by a graph where it can.
    """
    spec, target, *_ = describe(vmfb, source="it")
    call = matrix.random_call(spec, rows, random_generator())
    module = Module(vmfb, target.backend)
    views = {given.name: module.input(given.name, call.arrays[given.name]) for given in spec.inputs}
    for result in spec.results:
        dtype = DTYPES[result.dtype].numpy
        views[result.name] = module.output(result.name, result.dims(rows), dtype)
    module.call(spec.op, *views.values())

    driver = EmulatedDriver(target.backend)
    buffers = {
        given.name: driver.allocate(given.name, array.nbytes, array)
        for given in spec.inputs
        for array in [call.arrays[given.name]]
    }
    for result in spec.results:
        nbytes = views[result.name].span.length
        buffers[result.name] = driver.allocate(result.name, nbytes, write_once=True)
    on_stream = StreamModule(spec, planned, cast(Driver, driver), vmfb).sequence(rows)
    scratch = driver.allocate("scratch", on_stream.scratch_bytes)
    plan = planned.of(rows)
    sizes = {piece.name: piece.bytes * count_of(piece.count, rows) for piece in plan.scratch}
    driver.divide(scratch, on_stream.scratch, tuple(sizes.values()))
    addresses = [buffers[argument.name].address for argument in spec.arguments]
    on_stream.run(addresses, scratch.address, 0, captured=captured)
    fixed = {memory.pointer for memory in on_stream.fixed}
    kernels = {launch.kernel for launch in driver.launches}
    assert driver.staying == (fixed | kernels if captured else set())
    as_a_graph = driver.has_graphs and len(plan.kernels) > 1 and not captured
    assert driver.graphs == as_a_graph

    # A weight of ones of 64 bits, IREE fills by a kernel of its own.
    launched = [one for one in module.launches if not one.kernel.startswith("__builtin_splat")]
    assert len(driver.launches) == len(launched)
    places: dict[str, int] = {name: view.span.address for name, view in views.items()}
    for ours, hosts, one in zip(driver.launches, launched, plan.kernels, strict=True):
        assert ours.kernel == hosts.kernel
        assert ours.workgroup_count == hosts.workgroup_count
        assert ours.constants == hosts.constants
        for name, host in zip(one.bindings, hosts.bindings, strict=True):
            assert places.setdefault(name, host.address) == host.address, name
            assert sizes.get(name, 0) <= host.nbytes, name
    for result in spec.results:
        dtype = DTYPES[result.dtype].numpy
        got = driver.memory.read(buffers[result.name], 0, buffers[result.name].nbytes)
        assert got.tobytes() == module.read(views[result.name], dtype).tobytes(), result.name


def planned_module(name: str, target: str) -> tuple[bytes, LaunchPlans]:
    spec, how = CASES[name]
    vmfb, _ = built(spec, find_target(target), how)
    planned = describe(vmfb, source=name).launches
    assert planned is not None
    return vmfb, planned


@pytest.mark.drawn
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_host_programs(name: str, target: str) -> None:
    vmfb, planned = planned_module(name, target)
    spec = CASES[name][0]
    most = [plan.most_rows for plan in planned.plans if plan.most_rows is not None]
    many = [n + 1 for n in most if n * spec.columns < 1 << 18]
    for rows in (1, 7, *many) if spec.rows is None else (spec.rows,):
        check(vmfb, planned, rows)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["few rows and one pass", "statistics", "two passes", "no weight"])
def test_kernels_that_are_captured_are_the_same_and_stay(name: str) -> None:
    """Code, and a weight of ones: the caller's graph may outlive the module."""
    vmfb, planned = planned_module(name, "sm_90")
    check(vmfb, planned, 37, captured=True)


def swapped(one: str, other: str) -> Callable[[Plan], Plan]:
    return renamed({one: other, other: one})


def renamed(names: Mapping[str, str]) -> Callable[[Plan], Plan]:
    """What one kernel's pointers point to."""

    def change(plan: Plan) -> Plan:
        return replace(
            plan,
            kernels=tuple(
                replace(
                    k,
                    reads=tuple(names.get(n, n) for n in k.reads),
                    writes=tuple(names.get(n, n) for n in k.writes),
                )
                if k.kernel == "rows"
                else k
                for k in plan.kernels
            ),
        )

    return change


def of_the_first(**changes: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(
        plan,
        kernels=(replace(plan.kernels[0], **changes), *plan.kernels[1:]),  # type: ignore[arg-type]
    )


def halved(piece: Scratch) -> Scratch:
    return replace(piece, bytes=piece.bytes // 2)


SABOTAGE: dict[str, Callable[[Plan], Plan]] = {
    "mean and rstd swapped": swapped("mean", "rstd"),
    "x and dy swapped": swapped("input", "grad_output"),
    "partial rows swapped": swapped("partial_dgamma", "partial_dbeta"),
    "partial rows in one place": renamed({"partial_dbeta": "partial_dgamma"}),
    "scratch halved": lambda plan: replace(plan, scratch=tuple(map(halved, plan.scratch))),
    "a workgroup too many": of_the_first(workgroups=(RowCount(more=1), 1, 1)),
    "a workgroup too few": of_the_first(workgroups=(RowCount(most=1), 1, 1)),
    "another constant": of_the_first(constants=(36,)),
    "another order": lambda plan: replace(plan, kernels=plan.kernels[::-1]),
    "a kernel left out": lambda plan: replace(plan, kernels=plan.kernels[:-1]),
}


@pytest.mark.drawn
@pytest.mark.parametrize("change", SABOTAGE)
def test_another_plan_is_noticed(change: str) -> None:
    vmfb, planned = planned_module("statistics, one pass", "sm_90")
    check(vmfb, planned, 37)
    wrong = replace(planned, plans=tuple(map(SABOTAGE[change], planned.plans)))
    assert wrong != planned
    with pytest.raises((AssertionError, Fault)):
        check(vmfb, wrong, 37)
