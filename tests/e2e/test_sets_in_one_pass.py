"""Backwards of weights with sets in one pass: each way to fetch and to share rows, in the emulator.

A few workgroups walk, so that each takes many steps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from support import assert_right, assert_same_bits, built, random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.schedules import FewRows, OnePass, set_waves
from iree_lnbwd.verification import host_calls, matrix
from iree_lnbwd.verification.emulated_norm import EmulatedNorm
from iree_lnbwd.vmfb import inspection
from iree_lnbwd.vmfb.counts import CountInWaves, RowCount, count_of, of_each_set
from iree_lnbwd.vmfb.description import describe
from iree_lnbwd.vmfb.executables import exports

LAYER, RMS = "layer_norm_backward", "rms_norm_backward"
READ = OnePass(workgroups=5, groups=2, warps=2, vector=8)
COPIED = replace(READ, ahead=2, slots=3)
BULK = replace(READ, ahead=2, slots=2, rereads=True, bulk=True)
CLUSTER = OnePass(workgroups=5, groups=1, warps=2, vector=8, cluster=2)
AMD = replace(READ, groups=4, warps=1)  # no group of several subgroups waits by itself
NARROW = replace(READ, warps=1, groups=16, subgroup_rows=8)


class Way(NamedTuple):
    """A schedule, with what it computes and where."""

    how: OnePass
    columns: int
    op: str = LAYER
    dtype: str = "bf16"
    target: str = "sm_90"
    from_output: bool = False

    @property
    def spec(self) -> NormSpec:
        """With sets."""
        return NormSpec(
            (self.columns,),
            self.dtype,
            op=self.op,
            weight_sets=True,
            from_output=self.from_output,
        )


WAYS = {
    "read": Way(READ, 1000),
    "read, AMD": Way(AMD, 1000, RMS, target="gfx942"),
    "read, AMD's narrow subgroups": Way(AMD, 1000, target="gfx1100"),
    "a row ahead": Way(replace(READ, ahead=1), 1000, RMS),
    "a row ahead, AMD": Way(replace(AMD, ahead=1), 1000, target="gfx942"),
    "twice": Way(replace(READ, rereads=True), 1000),
    "twice, AMD": Way(replace(READ, groups=1, rereads=True), 1000, RMS, target="gfx942"),
    "twice, with a bias": Way(replace(READ, rereads=True), 1000, from_output=True),
    "copied": Way(COPIED, 1000),
    "copied, half as much at once": Way(replace(COPIED, vector=4), 1000),
    "copied, sm_80": Way(COPIED, 1000, RMS, target="sm_80"),
    "copied with the weight": Way(replace(COPIED, stages_weight=True), 1000, RMS),
    "a weight that is widened": Way(
        replace(COPIED, stages_weight=True, widens_weight=True, ahead=3, slots=4), 1000
    ),
    "copied in place": Way(replace(COPIED, ahead=2, slots=2, rereads=True), 1000),
    "one slot": Way(replace(COPIED, ahead=1, slots=1, rereads=True), 1000, RMS),
    "copied, f64": Way(replace(COPIED, vector=2), 200, dtype="f64"),
    "copied, with a bias": Way(COPIED, 1000, from_output=True),
    "in bulk": Way(BULK, 1000),
    "in bulk, N odd": Way(replace(BULK, vector=1), 333, RMS),
    "x later": Way(replace(BULK, x_later=True), 1000),
    "narrow rows": Way(NARROW, 64),
    "narrow rows, copied": Way(replace(NARROW, ahead=1, slots=2), 64, RMS),
    "two teams": Way(replace(NARROW, vector=4), 40, dtype="f32"),
    "four teams": Way(replace(NARROW, groups=32), 40),
    "four teams that copy": Way(replace(NARROW, groups=32, ahead=1, slots=2), 40, RMS),
    "teams of whole subgroups": Way(replace(READ, warps=1, groups=8), 1000, RMS, target="sm_80"),
    "teams that copy, with the weight": Way(
        replace(COPIED, warps=1, groups=4, stages_weight=True), 1000
    ),
    "teams in bulk": Way(replace(BULK, warps=1, groups=4), 520),
    "narrow rows, AMD": Way(NARROW, 40, RMS, target="gfx942"),
    "a cluster": Way(CLUSTER, 1000),
    "a cluster that copies": Way(replace(CLUSTER, ahead=1, slots=2), 1000, RMS),
    "sums that are received later": Way(
        replace(CLUSTER, ahead=2, slots=3, rereads=True, defers=True), 1000
    ),
    "later, and in bulk": Way(
        replace(CLUSTER, ahead=3, slots=3, rereads=True, defers=True, bulk=True), 1000, RMS
    ),
}
by_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
NARROW_WAYS = [name for name in WAYS if "narrow rows" in name or "teams" in name]


def module_of(way: Way, spec: NormSpec) -> EmulatedNorm:
    target = find_target(way.target)
    assert way.how.illegal(spec, target) is None
    return EmulatedNorm(built(spec, target, way.how)[0])


@pytest.mark.drawn
@by_way
def test_any_number_of_sets_and_rows(way: Way) -> None:
    """Runs of one row, of several, long ones, and longer than M; sets without rows; many sets.

    From 24 sets on, those of rows that alternate are many (``ir/parts/set_rows.mlir``).
    """
    module, rng = module_of(way, way.spec), random_generator()
    given = ((97, 1, 97), (80, 2, 7), (90, 3, 1), (61, 5, 20), (50, 7, 3), (23, 23, 1), (31, 9, 2))
    others = ((215, 5, 1), (132, 25, 1), (151, 30, 1), (329, 2, 64), (150, 4, 70))
    for rows, number, rows_per_set in (*given, *others, (1, 2, 1), (6, 4, 6), (0, 3, 1)):
        call = matrix.random_call(way.spec, rows, rng, Sets(number, rows_per_set))
        results = module.run(call)
        assert_right(results, call)
        if rows == 50:
            assert_same_bits(module.run(call), results)
    call = matrix.adversarial_call(way.spec, rng)
    assert_right(module.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in WAYS if "teams" in name])
def test_teams_walk_over_long_runs(name: str) -> None:
    """There, all teams of a workgroup have one set, and one partial row."""
    way, rng = WAYS[name], random_generator()
    module = module_of(way, way.spec)
    for rows, number, rows_per_set in ((329, 3, 64), (200, 2, 100), (137, 1, 137), (150, 7, 70)):
        call = matrix.random_call(way.spec, rows, rng, Sets(number, rows_per_set))
        assert_right(module.run(call), call)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["copied", "copied in place", "teams that copy, with the weight"])
def test_no_sum_is_the_address_of_a_copy_with_a_policy(name: str) -> None:
    """ptxas may take such a sum apart, and then the GPU stops at an illegal instruction."""
    way = WAYS[name]
    codes = {each.code for each in exports(built(way.spec, find_target("sm_90"), way.how)[0])}
    addresses = 0
    for text in (kernel for code in codes for kernel in inspection.ptx(code).split(".entry")):
        for address in re.findall(r"cp\.async\S*L2::cache_hint\S* \[(%r\d+)", text):
            addresses += 1
            assert all(maker.startswith("xor.b32") for maker in _makers(address, text)), address
    assert addresses


def _makers(register: str, text: str) -> list[str]:
    """The instructions of a kernel that make a register, but for a number that is added to it.

    Blocks need not stand in the order in which they run.
    """
    found = re.findall(rf"^\t(\S+ \t{register}, .*);$", text, re.MULTILINE)
    assert found, register
    added = (re.match(rf"add\.s32 \t{register}, (%r\d+), \d+$", one) for one in found)
    return [
        maker
        for one, before in zip(found, added, strict=True)
        for maker in (_makers(before[1], text) if before else [one])
    ]


def test_ways_with_teams_have_as_many_as_they_say() -> None:
    numbers = {"two teams": 2, "four teams": 4, "teams in bulk": 4, "narrow rows, AMD": 1}
    for name, way in WAYS.items():
        teams = way.how.teams(way.spec, find_target(way.target))
        assert teams == numbers.get(name, 4 if "teams" in name else 1), name


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in WAYS if "teams" not in name])
def test_one_set_has_the_bits_of_a_weight(name: str) -> None:
    """But of teams, whose rows are added up one team after another."""
    way, rng = WAYS[name], random_generator()
    call = matrix.random_call(way.spec, 71, rng, Sets(1, 4))
    plain_spec = replace(way.spec, weight_sets=False)
    flat = {n: a[0] if n in ("weight", "bias") else a for n, a in call.arrays.items()}
    plain = module_of(way, plain_spec).run(call._replace(spec=plain_spec, sets=None, arrays=flat))
    ours = module_of(way, way.spec).run(call)
    flattened = (a.reshape(b.shape) for a, b in zip(ours, plain, strict=True) if b is not None)
    assert_same_bits(type(plain)(*flattened), plain)


@pytest.mark.drawn
@pytest.mark.parametrize("name", NARROW_WAYS)
def test_a_row_of_another_set_leaves_no_nan(name: str) -> None:
    """Rows of a subgroup where the set has no more: they are not the last row of the call."""
    way = WAYS[name]
    call = matrix.random_call(way.spec, 30, random_generator(), Sets(3, 1))
    for given in call.arrays.values():
        if len(given) == call.rows:
            given[-1] = np.nan
    results = module_of(way, way.spec).run(call)
    assert_right(results, call)
    for sums in results[1:]:
        assert sums is None or np.isfinite(sums[:2].astype(DTYPES["f64"].numpy)).all()


def test_each_set_has_its_share_of_the_workgroups() -> None:
    """One wave of workgroups if that leaves few without a set, and else more."""
    for at_once, sets, each in (
        *((132, 1, 132), (132, 2, 66), (132, 32, 4), (132, 64, 2), (132, 132, 1)),
        *((132, 48, 5), (132, 100, 5), (132, 140, 7), (132, 256, 1), (132, 9999, 1)),
        *((132, 19, 6), (132, 35, 7), (264, 56, 4)),
        *((264, 32, 8), (5, 3, 3), (5, 6, 3), (1, 1, 1), (1, 7, 1)),
    ):
        plain, in_waves = RowCount(most=at_once), CountInWaves(most=at_once, lost=3667)
        assert of_each_set(plain, Sets(sets, 256), 10**6) == each, (at_once, sets)
        assert of_each_set(in_waves, Sets(sets, 1), 10**6) == each, (at_once, sets)
    for at_once in (1, 5, 60, 132, 304):
        assert all(
            1 <= of_each_set(CountInWaves(1, at_once, 0, lost), Sets(sets, 64), rows) <= at_once
            for sets in range(1, 3000)
            for rows in (1, 10**5)
            for lost in (1, 3667, 10**6)
        )


@pytest.mark.parametrize(
    ("at_once", "sets", "rows", "lost", "each"),
    [
        *((396, 78, 79872, 3667, 5), (396, 93, 95232, 3667, 4), (264, 37, 37888, 3667, 7)),
        *((264, 54, 55296, 3667, 9), (256, 256, 262144, 3667, 3), (256, 4, 4096, 3667, 64)),
        *((132, 128, 131072, 1833, 6), (132, 1, 10**7, 3667, 132), (132, 2000, 10**7, 3667, 1)),
    ],
)
def test_long_runs_take_the_waves_that_cost_least(
    at_once: int, sets: int, rows: int, lost: int, each: int
) -> None:
    """One busy wave, or more of them: where one leaves many without a set, and for many rows."""
    assert of_each_set(CountInWaves(1, at_once, 0, lost), Sets(sets, 64), rows) == each


@pytest.mark.drawn
@pytest.mark.parametrize("columns", [64, 88], ids=["without teams", "with teams"])
def test_host_programs_share_out_as_plans_do(columns: int) -> None:
    """Numbers of sets on all sides of that; of few rows, each set has few workgroups."""
    spec = NormSpec((columns,), "bf16", weight_sets=True)
    vmfb, _ = built(spec, find_target("sm_90"))
    described = describe(vmfb, source="a module")
    assert isinstance(described.schedule, OnePass)
    assert described.launches is not None
    assert set_waves.cost_of_partial_row(described.schedule, spec, described.target) is not None
    more = (1000, 10_000, 100_000, 1_000_000)
    runs = {1: 64, 2: 64, 7: 63, 48: 64, 100: 64, 140: 64, 300: 3, 5000: 64}
    for given in (Sets(number, run) for number, run in runs.items()):
        for rows, launched in host_calls.asked(vmfb, described, given, more).items():
            sets = given.for_rows(int(rows))
            kernels = [each for each in launched if each[0] not in ("fill", "write", "read")]
            for kernel, of_host in zip(
                described.launches.of(int(rows)).kernels, kernels, strict=True
            ):
                counted = [
                    [count_of(n, int(rows), sets) for n in numbers]
                    for numbers in (kernel.workgroups, kernel.constants)
                ]
                assert of_host[:3] == [kernel.kernel, *counted], (given, rows)


def test_few_rows_have_one_weight() -> None:
    few = replace(READ, few_rows=FewRows(rows=64, warps=8, tile=32, tile_vector=4))
    spec = WAYS["read"].spec
    why = few.illegal(spec, find_target("sm_90"))
    assert why == "few rows have one weight, and the spec has sets"
