"""Barriers, mbarriers, fences and shuffles: what waits for other threads or orders them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from iree_lnbwd.emulator import mbarriers
from iree_lnbwd.emulator.launch import Array, Fault, Lanes
from iree_lnbwd.emulator.ptx.operands import Operands
from iree_lnbwd.emulator.ptx.parser import Instruction, PtxError
from iree_lnbwd.emulator.ptx.state_spaces import (
    mbarriers_of,
    of_cluster,
)
from iree_lnbwd.emulator.ptx.threads import (
    WARP,
    Selection,
    Step,
    Sync,
    Threads,
    compact,
    with_all_others,
)
from iree_lnbwd.emulator.ptx.types import UnknownInstructionError

_BARRIERS = 16  # of a workgroup


def arrive(operands: Operands, instruction: Instruction) -> Step:
    """At the barrier of a cluster, without waiting."""
    how = [word for word in instruction.modifiers[2:] if word != "aligned"]
    if how not in ([], ["release"], ["relaxed"]) or instruction.operands:
        raise UnknownInstructionError(instruction.text)
    ordered = how != ["relaxed"]

    def arrive(threads: Threads, to: Selection) -> None:
        of_cluster(threads).arrive(threads.numbers[to], ordered=ordered)

    return arrive


def mbarrier(operands: Operands, instruction: Instruction) -> Step:
    """Initialises an mbarrier, or arrives at one."""
    operation: Callable[[mbarriers.Mbarriers, Lanes, Lanes, Lanes], None]
    match instruction.modifiers, instruction.operands:
        case ("init", "shared" | "shared::cta", "b64"), (place, number):
            operation = mbarriers.Mbarriers.initialise
        case ("arrive", "expect_tx", "shared" | "shared::cta", "b64"), ("_", place, number):
            operation = mbarriers.Mbarriers.arrive
        case _:
            raise UnknownInstructionError(instruction.text)
    address, count = operands.address(place), operands.reader(number, "u32")

    def operate(threads: Threads, to: Selection) -> None:
        lanes = threads.numbers[to]
        at = np.broadcast_to(address(threads, to), lanes.shape)
        counts = np.broadcast_to(count(threads, to), lanes.shape).astype(np.int64)
        operation(mbarriers_of(threads), lanes, at, counts)

    return operate


def fence(operands: Operands, instruction: Instruction) -> Step:
    """Orders what comes before it ahead of bulk copies, or of other workgroups."""
    operation: Callable[[mbarriers.Mbarriers, Lanes], None]
    match instruction.modifiers:
        case ("mbarrier_init", "release", "cluster"):
            operation = mbarriers.Mbarriers.make_known
        case ("proxy", "async") | ("proxy", "async", "shared::cta" | "shared::cluster"):
            operation = mbarriers.Mbarriers.fence
        case _:
            raise UnknownInstructionError(instruction.text)

    def fence(threads: Threads, to: Selection) -> None:
        if threads.mbarriers is not None:
            operation(threads.mbarriers, threads.numbers[to])

    return fence


def wait_for_phase(operands: Operands, instruction: Instruction) -> Sync:
    """Waits until a phase of an mbarrier is over."""
    _, what, *acquires, space, type_ = instruction.modifiers
    if (
        (what, type_) != ("parity", "b64")
        or space not in ("shared", "shared::cta")
        or acquires not in ([], ["acquire", "cta"], ["acquire", "cluster"])
    ):
        raise UnknownInstructionError(instruction.text)
    destination, place, parity = instruction.operands
    writer = operands.writer(destination)
    if operands.dtype_of(destination) != np.bool_:
        raise PtxError(f"{destination} is no predicate")
    address, read_parity = operands.address(place), operands.reader(parity, "u32")

    def wait(threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        at = np.broadcast_to(address(threads, lanes), lanes.shape)
        parities = np.broadcast_to(read_parity(threads, lanes), lanes.shape)
        passes = mbarriers_of(threads).wait(lanes, at, parities.astype(np.int64))
        here = lanes[passes]
        writer(threads, compact(here), np.ones(here.size, np.bool_))
        return passes

    return wait


def rest(operands: Operands, instruction: Instruction) -> Sync:
    """Lets all others run first: who looks for what they store would look forever."""
    if instruction.modifiers != ("u32",):
        raise UnknownInstructionError(instruction.text)
    operands.reader(instruction.operands[0], "u32")

    def rest(threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        threads.rest(lanes)
        return np.zeros(len(lanes), np.bool_)

    return rest


def barrier(operands: Operands, instruction: Instruction) -> Sync:
    """A barrier of a warp, a cluster, a workgroup, or a group of its warps."""
    match instruction.modifiers:
        case ("warp", "sync"):
            mask = operands.reader(instruction.operands[0], "u32")

            def meet_warp(
                threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
            ) -> npt.NDArray[np.bool_]:
                passes = named_are_here(threads, lanes, alive, mask(threads, lanes))
                threads.shared.subgroup_barrier(lanes[passes])
                return passes

            return meet_warp
        case (
            ("cluster", "wait")
            | ("cluster", "wait", "aligned")
            | ("cluster", "wait", "acquire")
            | ("cluster", "wait", "acquire", "aligned")
        ):

            def meet_cluster(
                threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
            ) -> npt.NDArray[np.bool_]:
                passes, ordered = of_cluster(threads).passes(lanes, alive)
                threads.shared.cluster_barrier(ordered)
                return passes

            return meet_cluster
        case ("sync",) | ("cta", "sync") | ("sync", "aligned") | ("cta", "sync", "aligned"):
            if len(instruction.operands) == 2:
                return _group_barrier(operands, *instruction.operands)
            if instruction.operands != ("0",):
                raise UnknownInstructionError(instruction.text)

            def meet(
                threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
            ) -> npt.NDArray[np.bool_]:
                passes = with_all_others(lanes, alive, threads.threads)
                workgroups = np.unique(lanes[passes] // threads.threads)
                if threads.order is not None:
                    threads.order.meet(lanes[passes], lanes[passes] // threads.threads)
                threads.shared.barrier(workgroups)
                threads.memory.workgroup_barrier(workgroups + threads.first_lane // threads.threads)
                return passes

            return meet
    raise UnknownInstructionError(instruction.text)


def _group_barrier(operands: Operands, number: str, count: str) -> Sync:
    """So many threads of a workgroup meet at one of its barriers."""
    read_number, read_count = operands.reader(number, "u32"), operands.reader(count, "u32")

    def meet_group(
        threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        groups = np.broadcast_to(read_number(threads, lanes), lanes.shape).astype(np.int64)
        wanted = np.broadcast_to(read_count(threads, lanes), lanes.shape)
        if (bad := (groups >= _BARRIERS) | (wanted % WARP != 0)).any():
            raise Fault(
                f"barrier {groups[bad][0]} of {wanted[bad][0]} threads: there are {_BARRIERS}, "
                f"of whole warps of {WARP}",
                lanes[bad] + threads.first_lane,
            )
        places = lanes // threads.threads * _BARRIERS + groups
        here = np.bincount(places)[places]
        if (crowded := here > wanted).any():
            raise Fault(
                f"{here[crowded][0]} threads at barrier {groups[crowded][0]}, which is of "
                f"{wanted[crowded][0]}",
                lanes[crowded] + threads.first_lane,
            )
        passes: npt.NDArray[np.bool_] = here == wanted
        if threads.order is not None:
            threads.order.meet(lanes[passes], places[passes])
        threads.shared.group_barrier(lanes[passes], groups[passes])
        return passes

    return meet_group


def shuffle(operands: Operands, instruction: Instruction) -> Sync:
    """An exchange between the threads of a warp."""
    word, mode, type_ = instruction.modifiers
    if word != "sync" or type_ != "b32" or mode not in ("up", "down", "bfly", "idx"):
        raise UnknownInstructionError(instruction.text)
    destination, source, distance, bounds, mask = instruction.operands
    name, _, valid = destination.partition("|")
    writer = operands.writer(name)
    write_valid = operands.writer(valid) if valid else None
    read = operands.reader(source, "b32")
    read_distance, read_bounds, read_mask = (
        operands.reader(operand, "u32") for operand in (distance, bounds, mask)
    )

    def shuffle(
        threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        named = read_mask(threads, lanes)
        passes = named_are_here(threads, lanes, alive, named)
        if not passes.any():
            return passes
        whole = bool(passes.all())
        here = lanes if whole else lanes[passes]
        inside = threads.in_warp(here)
        partner, in_range = shuffle_source(
            mode, inside, read_distance(threads, here), read_bounds(threads, here)
        )
        takes_part = np.zeros(threads.lanes + 1, np.bool_)  # the last one is nobody
        takes_part[here] = True
        origin = threads.of_warp(here, partner)
        if not takes_part[origin].all():
            lost = ~takes_part[origin]
            raise Fault(
                f"a shuffle from thread {partner[lost][0]} of the warp, which does not take part",
                here[lost] + threads.first_lane,
            )
        values = np.zeros(threads.lanes, np.uint32)
        values[here] = read(threads, here)
        to = compact(here)
        writer(threads, to, values[origin])
        if write_valid is not None:
            write_valid(threads, to, in_range)
        return passes

    return shuffle


def named_are_here(
    threads: Threads, lanes: Lanes, alive: npt.NDArray[np.bool_], mask: Array
) -> npt.NDArray[np.bool_]:
    """Which threads are here with all that their member mask names, but for those that ended.

    Raises:
        Fault: A thread's mask does not name itself.
    """
    inside = threads.in_warp(lanes).astype(np.uint32)
    mask = np.broadcast_to(mask, lanes.shape)
    outside = (mask >> inside & np.uint32(1)) == 0
    if outside.any():
        raise Fault(
            f"the member mask {int(mask[outside][0]):#010x} does not name the thread itself",
            lanes[outside] + threads.first_lane,
        )
    present = np.zeros(len(alive), np.bool_)
    present[lanes] = True
    missing = threads.warp_bits(alive & ~present, lanes)
    passes: npt.NDArray[np.bool_] = (mask & missing) == 0
    return passes


def shuffle_source(
    mode: str, lane: Array, distance: Array, bounds: Array
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The thread whose value each thread of a warp gets, and whether it is in range (shfl.sync).

    Args:
        mode: "up", "down", "bfly" or "idx".
        lane: The thread's number in its warp.
        distance: Operand b: a distance, a mask, or a number.
        bounds: Operand c: the clamp, and from bit 8 on the mask of segments.
    """
    lane = lane.astype(np.int64)
    b, clamp = (distance & 31).astype(np.int64), (bounds & 31).astype(np.int64)
    segments = (bounds >> 8 & 31).astype(np.int64)
    lowest = lane & segments
    limit = lowest | clamp & ~segments
    match mode:
        case "up":
            source = lane - b
            in_range = source >= limit
        case "down":
            source = lane + b
            in_range = source <= limit
        case "bfly":
            source = lane ^ b
            in_range = source <= limit
        case _:
            source = lowest | b & ~segments
            in_range = source <= limit
    return np.where(in_range, source, lane), in_range
