"""Branches, barriers, waits, and instructions that affect only the hardware."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from iree_lnbwd.emulator.amdgcn.assembly import Instruction
from iree_lnbwd.emulator.amdgcn.steps import Machine, Step, Then, nothing, numbers
from iree_lnbwd.emulator.amdgcn.waits import LDS, SCALAR, STORE, VECTOR
from iree_lnbwd.emulator.amdgcn.waves import EXEC, VCC, Group, Mask, Register
from iree_lnbwd.emulator.launch import Fault

# Hints, cache maintenance (memory here has no caches), and waits for the pipeline that hardware
# needs for itself. s_nop and s_delay_alu as well: hazards are not modelled.
_NOTHING = frozenset(
    [
        "s_nop",
        "s_delay_alu",
        "s_clause",
        "s_setprio",
        "s_set_inst_prefetch_distance",
        "s_inst_prefetch",
        "s_waitcnt_depctr",
        "s_wait_alu",
        "buffer_gl0_inv",
        "buffer_gl1_inv",
        "buffer_inv",
        "buffer_wbl2",
        "buffer_wbinvl1",
        "global_inv",
        "global_wb",
        "global_wbinv",
        "s_sleep",
        "s_code_end",
    ]
)
_COUNTERS = {"vmcnt": (VECTOR,), "lgkmcnt": (LDS, SCALAR), "vscnt": (STORE,), "expcnt": ()}
# gfx12: what each waits for; of two, the first is counted in bits 13:8, the other in 5:0.
_COUNTERS_GFX12: Mapping[str, tuple[str, ...]] = {
    "s_wait_loadcnt": (VECTOR,),
    "s_wait_storecnt": (STORE,),
    "s_wait_dscnt": (LDS,),
    "s_wait_kmcnt": (SCALAR,),
    "s_wait_loadcnt_dscnt": (VECTOR, LDS),
    "s_wait_storecnt_dscnt": (STORE, LDS),
    # Images and exports, of which there are none here.
    "s_wait_samplecnt": (),
    "s_wait_bvhcnt": (),
    "s_wait_expcnt": (),
}
_MOST_COUNTED = 63
_WORKGROUP = ("-1",)  # the barrier of all waves of a workgroup


def _not_zero(first: int) -> Callable[[Group], Mask]:
    def test(group: Group) -> Mask:
        words = [group.scalar(first + n) for n in range(group.waves.lanes // 32)]
        result: Mask = np.any(np.stack(words) != 0, axis=0)
        return result

    return test


def _inverted(test: Callable[[Group], Mask]) -> Callable[[Group], Mask]:
    return lambda group: ~test(group)


_BRANCHES: Mapping[str, Callable[[Group], Mask] | None] = {
    "s_branch": None,
    "s_cbranch_scc0": lambda group: ~group.scc(),
    "s_cbranch_scc1": lambda group: group.scc(),
    "s_cbranch_vccz": _inverted(_not_zero(VCC)),
    "s_cbranch_vccnz": _not_zero(VCC),
    "s_cbranch_execz": _inverted(_not_zero(EXEC)),
    "s_cbranch_execnz": _not_zero(EXEC),
}


def decode_control(instruction: Instruction, labels: Mapping[str, int], lanes: int) -> Step | None:
    """An instruction that decides what comes next, or waits; None where it is none of those.

    Raises:
        Fault: A label or a counter is not known.
    """
    name = instruction.mnemonic
    if name in _NOTHING:
        return Step(instruction, nothing)
    if name == "s_sendmsg":
        if instruction.operands != ("sendmsg(MSG_DEALLOC_VGPRS)",):
            raise instruction.fault("message not known")
        return Step(instruction, nothing)  # its last words: registers go back
    if name == "s_endpgm":
        return Step(instruction, nothing, then=Then.END)
    if name == "s_barrier":
        return Step(instruction, _at_barrier, then=Then.BARRIER)
    if name in ("s_barrier_signal", "s_barrier_wait") and instruction.operands != _WORKGROUP:
        raise instruction.fault("a barrier that is not the workgroup's is not known")
    if name == "s_barrier_signal":
        return Step(instruction, _signal)
    if name == "s_barrier_wait":
        return Step(instruction, _after_signal, then=Then.BARRIER)
    if name == "s_waitcnt":
        return Step(instruction, _waiting(_waits(instruction)))
    if name == "s_waitcnt_vscnt":
        return Step(instruction, _waiting({STORE: int(instruction.operands[1], 0)}))
    if name == "s_wait_idle":
        return Step(instruction, _waiting(dict.fromkeys((VECTOR, STORE, LDS, SCALAR), 0)))
    if name in _COUNTERS_GFX12:
        counted = int(instruction.operands[0], 0)
        counters = _COUNTERS_GFX12[name]
        if len(counters) < 2:
            return Step(instruction, _waiting(dict.fromkeys(counters, counted)))
        numbers_of = (counted >> 8, counted & _MOST_COUNTED)
        return Step(instruction, _waiting(dict(zip(counters, numbers_of, strict=True))))
    if name in _BRANCHES:
        (label,) = instruction.operands
        if label not in labels:
            raise instruction.fault(f"no such label: {label}")
        mask = {"v": VCC, "e": EXEC}.get(name.removeprefix("s_cbranch_")[0])
        used = None if mask is None else Register(False, mask, lanes // 32)
        return Step(
            instruction,
            nothing,
            numbers([used]),
            then=Then.BRANCH,
            target=labels[label],
            taken=_BRANCHES[name],
        )
    return None


def _waits(instruction: Instruction) -> dict[str, int]:
    found = re.findall(r"(\w+)\((\d+)\)", instruction.text)
    if not found or any(name not in _COUNTERS for name, _ in found):
        raise instruction.fault("counters not understood")
    return {counter: int(most) for name, most in found for counter in _COUNTERS[name]}


def _waiting(most: dict[str, int]) -> Callable[[Group, Machine], None]:
    def run(group: Group, machine: Machine) -> None:
        for counter, number in most.items():
            group.waves.waits.wait(counter, group.index, number)

    return run


def _at_barrier(group: Group, machine: Machine) -> None:
    """Expects that a wave has waited for its LDS accesses before it comes to a barrier."""
    waves = group.waves
    if not waves.waits.idle(LDS)[group.index].all():
        raise Fault("a barrier while LDS accesses are under way: an s_waitcnt is missing")
    idle = waves.waits.idle(VECTOR) & waves.waits.idle(STORE)
    waves.done_in_memory[group.index] = idle[group.index]


def _signal(group: Group, machine: Machine) -> None:
    """A wave has come to a barrier, and goes on until it waits for the others."""
    if group.waves.signalled[group.index].any():
        raise Fault("a wave comes to a barrier, and has not waited at the one before")
    _at_barrier(group, machine)
    group.waves.signalled[group.index] = True


def _after_signal(group: Group, machine: Machine) -> None:
    if not group.waves.signalled[group.index].all():
        raise Fault("a wave waits at a barrier to which it has not come: no s_barrier_signal")
    group.waves.signalled[group.index] = False
