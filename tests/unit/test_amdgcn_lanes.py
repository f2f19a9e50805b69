"""Instructions through which lanes see each other, lane by lane as the documents have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from amdgcn_waves import WAVES, Registers, fault_of
from support import random_generator

from iree_lnbwd.ops.arguments import Array

# The lane that a lane reads; -1: there is none.
_Source = Callable[[int], int]


def _quad_perm(lane: int) -> int:
    return lane // 4 * 4 + [2, 0, 3, 3][lane % 4]


CONTROLS: dict[str, _Source] = {
    "quad_perm:[2,0,3,3]": _quad_perm,
    "dpp8:[7,6,5,4,0,1,2,3]": lambda lane: lane // 8 * 8 + [7, 6, 5, 4, 0, 1, 2, 3][lane % 8],
    "row_shl:3": lambda lane: lane + 3 if lane % 16 + 3 < 16 else -1,
    "row_shr:5": lambda lane: lane - 5 if lane % 16 >= 5 else -1,
    "row_ror:4": lambda lane: lane // 16 * 16 + (lane % 16 + 12) % 16,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else -1,
    "row_newbcast:6": lambda lane: lane // 16 * 16 + 6,
    "row_share:6": lambda lane: lane // 16 * 16 + 6,
    "row_xmask:5": lambda lane: lane ^ 5,
}


def _random(rng: np.random.Generator, lanes: int) -> Array:
    return rng.integers(0, 1 << 32, (WAVES, lanes), np.uint32)


def _some(rng: np.random.Generator, lanes: int) -> npt.NDArray[np.bool_]:
    return rng.random((WAVES, lanes)) < 0.7


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("rest", ["", " bound_ctrl:1", " bound_ctrl:1 fi:1", " fi:1"])
def test_dpp(rest: str, control: str, lanes: int) -> None:
    rng = random_generator()
    active = _some(rng, lanes)
    source, other, old = (_random(rng, lanes) for _ in range(3))
    rows, banks = (int(n) for n in rng.integers(0, 16, 2))
    registers = Registers(lanes, active)
    registers.fill({"v0": old, "v4": source, "v5": other})
    masks = f"row_mask:{rows:#x} bank_mask:{banks:#x}"
    registers.run(f"v_sub_u32_dpp v0, v4, v5 {control} {masks}{rest}")
    got = registers.read("v0")
    for wave in range(WAVES):
        for lane in range(lanes):
            at = CONTROLS[control](lane)
            valid = at >= 0 and ("fi" in rest or active[wave, at])
            written = active[wave, lane] and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1
            if written and (valid or "bound_ctrl" in rest):
                value = int(source[wave, at]) if valid else 0
                assert got[wave, lane] == value - int(other[wave, lane]) & 0xFFFFFFFF
            else:
                assert got[wave, lane] == old[wave, lane]


@pytest.mark.parametrize("lanes", [32, 64])
def test_single_lanes(lanes: int) -> None:
    rng = random_generator()
    active = _some(rng, lanes)
    active[0] = False
    values = _random(rng, lanes)
    lane = rng.integers(0, lanes, WAVES, np.uint32)
    registers = Registers(lanes, active)
    registers.fill({"v4": values, "v5": values, "s4": lane, "s5": lane + np.uint32(1)})
    registers.run("v_readlane_b32 s0, v4, s4", "v_readlane_b32 s1, v4, 7")
    registers.run("v_readfirstlane_b32 s2, v4", "v_writelane_b32 v5, s5, s4")
    first = [int(np.flatnonzero(row)[0]) if row.any() else 0 for row in active]
    for wave in range(WAVES):
        assert registers.read("s0")[wave] == values[wave, lane[wave]]
        assert registers.read("s1")[wave] == values[wave, 7]
        assert registers.read("s2")[wave] == values[wave, first[wave]]
        expected = values[wave].copy()
        expected[lane[wave]] = lane[wave] + 1
        assert (registers.read("v5")[wave] == expected).all()


@pytest.mark.parametrize("lanes", [32, 64])
@pytest.mark.parametrize("name", ["v_permlane16_b32", "v_permlanex16_b32"])
@pytest.mark.parametrize("options", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_permutations_of_rows(options: tuple[int, int], name: str, lanes: int) -> None:
    rng = random_generator()
    inactive, bound = options
    active = _some(rng, lanes)
    values, old = _random(rng, lanes), _random(rng, lanes)
    low, high = (rng.integers(0, 1 << 32, WAVES, np.uint32) for _ in range(2))
    registers = Registers(lanes, active)
    registers.fill({"v0": old, "v4": values, "s4": low, "s5": high})
    got = registers.run(f"{name} v0, v4, s4, s5 op_sel:[{inactive},{bound}]").read("v0")
    for wave in range(WAVES):
        selector = int(high[wave]) << 32 | int(low[wave])
        for lane in range(lanes):
            row = lane // 16 ^ (1 if name == "v_permlanex16_b32" else 0)
            at = row * 16 + (selector >> lane % 16 * 4 & 15)
            valid = inactive or active[wave, at]
            if active[wave, lane] and (valid or bound):
                assert got[wave, lane] == (values[wave, at] if valid else 0)
            else:
                assert got[wave, lane] == old[wave, lane]


@pytest.mark.parametrize("apart", [16, 32])
def test_swaps_of_rows(apart: int) -> None:
    rng = random_generator()
    one, other = _random(rng, 64), _random(rng, 64)
    registers = Registers(64)
    registers.fill({"v0": one, "v4": other})
    registers.run(f"v_permlane{apart}_swap_b32_e32 v0, v4")
    for wave in range(WAVES):
        for lane in range(64):
            upper = bool(lane & apart)
            assert registers.read("v0")[wave, lane] == (
                other[wave, lane - apart] if upper else one[wave, lane]
            )
            assert registers.read("v4")[wave, lane] == (
                other[wave, lane] if upper else one[wave, lane + apart]
            )


def test_a_swap_of_inactive_lanes_is_a_fault() -> None:
    rng = random_generator()
    registers = Registers(64, _some(rng, 64))
    registers.fill({"v0": _random(rng, 64), "v4": _random(rng, 64)})
    fault = fault_of(registers, "v_permlane16_swap_b32_e32 v0, v4")
    assert "expected all lanes to be active" in fault


def test_counts_of_lanes_below() -> None:
    rng = random_generator()
    mask = _random(rng, 64)
    registers = Registers(64)
    registers.fill({"v4": mask, "v5": np.full((WAVES, 64), 100, np.uint32)})
    registers.run("v_mbcnt_lo_u32_b32 v0, v4, v5", "v_mbcnt_hi_u32_b32 v1, v4, 0")
    for wave in range(WAVES):
        for lane in range(64):
            bits = int(mask[wave, lane])
            low, high = (1 << min(lane, 32)) - 1, (1 << max(lane - 32, 0)) - 1
            assert registers.read("v0")[wave, lane] == 100 + (bits & low).bit_count()
            assert registers.read("v1")[wave, lane] == (bits & high).bit_count()


@pytest.mark.parametrize("lanes", [32, 64])
def test_exchanges_through_the_crossbar(lanes: int) -> None:
    rng = random_generator()
    active = _some(rng, lanes)
    values, at = _random(rng, lanes), _random(rng, lanes) >> np.uint32(20)
    registers = Registers(lanes, active)
    registers.fill({"v0": values, "v1": values, "v4": values, "v5": at})
    registers.run("ds_bpermute_b32 v0, v5, v4", "s_waitcnt lgkmcnt(0)")
    registers.run("ds_swizzle_b32 v1, v4 offset:swizzle(SWAP,16)", "s_waitcnt lgkmcnt(0)")
    for wave in range(WAVES):
        for lane in range(lanes):
            if not active[wave, lane]:
                assert registers.read("v0")[wave, lane] == values[wave, lane]
                continue
            for name, source in (("v0", int(at[wave, lane]) // 4 % lanes), ("v1", lane ^ 16)):
                expected = values[wave, source] if active[wave, source] else 0
                assert registers.read(name)[wave, lane] == expected


@pytest.mark.parametrize(
    "text",
    [
        "v_mov_b32_dpp v0, v1 row_bcast:7",
        "v_mov_b32_dpp v0, v1 quad_perm:[0,1]",
        "v_mov_b32_dpp v0, v1 row_shl:x",
    ],
)
def test_controls_that_are_not_known(text: str) -> None:
    assert "DPP control not understood" in fault_of(Registers(64), text)
