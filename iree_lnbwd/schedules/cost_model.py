"""A schedule on paper: occupancy, bytes in flight, steps and tail, and the share that follows.

A processor is kept from its part of the memory's bandwidth by one of three things. The first is
Little's law: where a byte takes ``latency`` to come, ``latency x bandwidth`` bytes have to be under
way all the time. The second is its own work. The third is that some of it has nothing to do: lanes
without a column, groups without a row in the last step, workgroups that wait for others to end.

The costs were fitted to one GPU, an H200: to sweeps of one pass over rows of 32, 96, 49152, 81920
and 131072 columns. How well the model orders these and other schedules, `scripts/sweeps model`
says: it tells good ones from bad ones, and not the best from the second.

No AMD GPU was measured. For these, occupancy, steps, tail and partial rows are arithmetic.
Latencies and costs are guesses, and so are the bytes that are wanted and the share. Registers are
best taken from compiled code there, because estimates are high. Nothing is chosen by this model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import words
from iree_lnbwd.schedules.forward import Forward
from iree_lnbwd.schedules.ir_types import row_bytes
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.rules import REGISTERS_OF_A_THREAD, RESERVED_BYTES
from iree_lnbwd.schedules.two_pass import TwoPass

ELEMENTS = 1 << 26  # of a call, where M is not said: as many as were measured


@dataclass(frozen=True)
class _Chip:
    """What a product's memory can do.

    Attributes:
        gigabytes_per_s: Peak bandwidth.
        megahertz: Clock of the processors at most.
        latency: Cycles that a byte takes from memory which is busy.
    """

    gigabytes_per_s: int
    megahertz: int
    latency: int


@dataclass(frozen=True)
class _Processor:
    """What a multiprocessor holds, or the compute units that a workgroup is spread over.

    Its registers are the target's.

    Attributes:
        parts: With a scheduler and registers of its own each.
        lanes: That it computes for in a cycle.
        subgroups: At most.
        workgroups: At most.
        shared_bytes: Shared memory (LDS) of all its workgroups.
        reserved_bytes: Shared memory that each workgroup costs beside its own.
    """

    parts: int
    lanes: int
    subgroups: int
    workgroups: int
    shared_bytes: int
    reserved_bytes: int = 0


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; H100's white paper.
_HOPPER = _Processor(4, 128, 64, 32, 233472, RESERVED_BYTES)
# ROCm's "AMD GPU specifications"; white papers of CDNA 2, 3 and 4. The most waves are LLVM's
# (GCNSubtarget, AMDGPUBaseInfo).
_CDNA = _Processor(4, 64, 32, 32, 65536)
# A workgroup processor: 16 waves for each of four SIMDs.
_RDNA = _Processor(4, 128, 64, 32, 131072)
_PROCESSORS: Mapping[str, _Processor] = MappingProxyType(
    {
        "sm_90": _HOPPER,
        "gfx90a": _CDNA,
        "gfx942": _CDNA,
        "gfx950": _Processor(4, 64, 32, 32, 163840),
        "gfx1100": _RDNA,
        "gfx1201": _RDNA,
    }
)

# Bandwidths and clocks: the vendors' data sheets and white papers; of the MI250, one die's.
#
# Latencies: a pointer chase took 700 cycles on an H100 (github.com/markdewing/AI_kernels, latency/)
# and 551 on an RX 7900 (github.com/chanzhennan/ChipBenchmarker). The H200's schedules are explained
# by 1400, so memory that is busy is taken to be twice as slow everywhere. For CDNA there is no
# figure that could be looked up: the H200's time, 0.7 us, is taken for it.
_CHIPS: Mapping[str, _Chip] = MappingProxyType(
    {
        "h100": _Chip(3350, 1980, 1400),
        "h200": _Chip(4800, 1980, 1400),
        "mi210": _Chip(1638, 1700, 1200),
        "mi250": _Chip(1638, 1700, 1200),
        "mi300x": _Chip(5300, 2100, 1480),
        "mi325x": _Chip(6000, 2100, 1480),
        "mi355x": _Chip(8000, 2400, 1700),
        "rx7900xtx": _Chip(960, 2500, 1100),
        "rx9070xt": _Chip(640, 2970, 1300),
    }
)

# Costs, in cycles, fitted to the H200. Work is in instructions of a subgroup.
_REACHED = 0.94  # of the peak bandwidth: what adding two tensors did
_AT_BEST = 0.97  # of that
_ELEMENT = 3.3  # work for a column of a thread
_AGAIN = 1.6  # times as much where it is read again from shared memory
_ACCESS = 49.0  # work for the accesses of neighbouring columns
_ROW = 106.0  # work for a row of a subgroup
_SENDING = 49.0  # work to send sums to a cluster
_SUM = 50.0  # from a row's last column to its sums
_SENT = 37.0  # likewise, for each subgroup of a cluster that sends to each of its workgroups
_SPILLED = 186.0  # of a row, for each register that is missing
_SPILLED_BYTES = 0.026  # of memory, for each byte that goes to memory and back instead
_BEGIN = 1740.0  # of a call, beside the latency of its first row
_PARTIAL = 4.2  # times as long as memory takes to write and read the partial rows
_SHARPNESS = 3.9  # how nearly the longest of several times decides
_TWO_PASSES = 5 / 3  # times as many bytes as one pass moves
_OTHER_REGISTERS = 32  # of a thread besides its columns', in two passes or a forward: by guess

_WORD_BYTES = 4
_TO_AND_FRO = 2
_SUMS = 2  # of columns: dgamma and dbeta


@dataclass(frozen=True)
class Estimate:
    """What a schedule does to a processor.

    Attributes:
        registers: Of a thread: of the compiled code, or estimated.
        resident: Workgroups that a processor can hold.
        limit: What keeps it from holding one more.
        occupancy: Its subgroups, to the most that it can hold.
        waves: How many times workgroups take the place of others that have ended.
        steps: Of a group that has the most rows.
        last_step: Share of the groups that have a row in the last step.
        idle: Share of the lanes' columns that a row does not have.
        bytes_in_flight: That are read at once for a processor while its groups wait.
        bytes_wanted: Of them, so that memory never waits: latency x bandwidth.
        partial: Bytes of partial rows, written and read, to those of rows.
        share: Of the bandwidth that adding two tensors, or a copy, reaches.
    """

    registers: int
    resident: int
    limit: str
    occupancy: float
    waves: int
    steps: int
    last_step: float
    idle: float
    bytes_in_flight: int
    bytes_wanted: int
    partial: float
    share: float

    @property
    def said(self) -> str:
        """The figures in words, without the share."""
        waves = f", {self.waves} times one after the other" if self.waves > 1 else ""
        last = f", the last for {self.last_step:.0%} of the groups" if self.last_step < 1 else ""
        return (
            f"{self.resident} {'workgroup' if self.resident == 1 else 'workgroups'} to a processor "
            f"(limit: {self.limit}){waves}, {self.occupancy:.0%} of its subgroups; "
            f"{self.steps} {'step' if self.steps == 1 else 'steps'}{last}; "
            f"{self.idle:.0%} of columns idle; {self.bytes_in_flight} bytes in flight, "
            f"{self.bytes_wanted} wanted; partial rows are {self.partial:.0%} of the rows' bytes"
        )


def knows(product: Product) -> bool:
    """Whether the model has figures of a product."""
    return product.name in _CHIPS


def rows_of(spec: NormSpec) -> int:
    """M of a spec; where it has none, as many as make `ELEMENTS`."""
    return spec.rows or max(1, ELEMENTS // spec.columns)


def kernel(schedule: OnePass | TwoPass | Forward) -> str:
    """The name of the kernel that an estimate is about, in the module."""
    match schedule:
        case OnePass():
            return "rows"
        case TwoPass():
            return "columns"
        case Forward():
            return "normalize"


def estimate(
    spec: NormSpec,
    target: Target,
    product: Product,
    schedule: OnePass | TwoPass | Forward,
    *,
    rows: int | None = None,
    registers: int | None = None,
) -> Estimate:
    """A schedule on paper.

    Args:
        spec: What is computed.
        target: The product's target.
        product: One that the model `knows`.
        schedule: A legal schedule.
        rows: M; None takes `rows_of` the spec.
        registers: Of a thread of the `kernel`; None estimates them.

    Raises:
        KeyError: The model does not know the product.
    """
    rows = rows or spec.rows or max(1, ELEMENTS // spec.columns)
    chip, processor = _CHIPS[product.name], _PROCESSORS[target.name]
    product = replace(product, processors=product.processors // target.spread)
    rows = rows_of(spec) if rows is None else rows
    load = _load(spec, target, schedule, rows)
    used = registers or math.ceil(min(load.needed, load.had))
    resident, limit = _resident(load, target, processor, used)
    # ptxas takes the registers that are left, so no more workgroups fit than were asked for: 16
    # clusters of 8 took twice the time of 15 on an H200, whatever registers were estimated.
    asked = getattr(schedule, "resident", resident)
    if target.backend == "cuda" and registers is None and asked < resident:
        resident, limit = asked, "the schedule"
    most_at_once = (
        resident * product.processors // load.cluster
        if load.posts
        else product.walkers(resident, load.cluster)
    )
    at_once = min(load.workgroups, most_at_once)
    waves = load.workgroups / at_once
    # Workgroups of a busy processor, which gets no more of the bandwidth if others are idle.
    each = max(1.0, at_once * load.cluster / product.processors)

    # The bytes of a step, of all rows that a processor works on.
    bytes_per_cycle = chip.gigabytes_per_s * 1e3 / chip.megahertz / product.processors
    read, written = row_bytes(spec)
    rows_bytes = load.own_columns * load.rows * each
    in_flight = read * rows_bytes * max(1, load.ahead)
    wanted = chip.latency * bytes_per_cycle * read / (read + written)

    missing = max(0.0, load.needed - used) if registers is None else 0.0
    threads = load.subgroups * target.subgroup_size * each  # of a processor
    moved = (read + written) * rows_bytes + _SPILLED_BYTES * 2 * _WORD_BYTES * missing * threads
    of_memory = moved / (bytes_per_cycle * _REACHED * _AT_BEST)
    of_work = load.work * threads / processor.lanes
    chain = load.chain + load.waits * chip.latency + _SPILLED * missing
    of_chain = max(chain, chip.latency / load.ahead) if load.ahead >= 1 else chain + chip.latency

    def step(part: float) -> float:
        """Cycles of a step in which so many of the groups have a row."""
        return _longest(of_chain, of_memory * part, of_work * part)

    turns = load.steps if load.walks else waves
    full = math.floor(turns)
    last = turns - full
    cycles = full * step(1.0) + (step(last) if last else 0.0)
    if load.walks:
        cycles *= math.ceil(waves)
    partial_bytes = load.partial_rows * spec.columns * _WORD_BYTES * 2  # written and read
    whole = bytes_per_cycle * _REACHED * product.processors
    cycles += _BEGIN + chip.latency + _PARTIAL * partial_bytes / whole
    all_bytes = (read + written) * rows * spec.columns
    return Estimate(
        registers=used,
        resident=resident,
        limit=limit,
        occupancy=min(resident, each) * load.subgroups / processor.subgroups,
        waves=math.ceil(waves),
        steps=math.ceil(load.steps),
        last_step=last or 1.0,
        idle=1 - load.own_columns / load.covered,
        bytes_in_flight=round(in_flight),
        bytes_wanted=round(wanted),
        partial=partial_bytes / all_bytes,
        share=all_bytes / whole / (cycles * load.passes),
    )


@dataclass(frozen=True)
class _Load:
    """What a schedule gives the processors to do.

    Attributes:
        workgroups: In all; a cluster counts as one.
        cluster: Workgroups of a cluster.
        subgroups: Of a workgroup.
        rows: That a workgroup works on at once.
        own_columns: Columns of a row that are a workgroup's.
        covered: Columns that its threads cover.
        shared_bytes: Of a workgroup.
        needed: Registers that a thread would like to have.
        had: Registers that it has at most.
        work: Instructions of a subgroup, for its part of what the workgroup works on.
        chain: Cycles from a row's last byte to the next row.
        steps: Rows that a group works on, one after the other.
        walks: Whether they are several. Else workgroups take each other's place.
        waits: Times that a row is waited for again.
        ahead: Steps between a row's fetch and its use.
        partial_rows: Of f32.
        passes: Times as many bytes as one pass moves.
        posts: Whether a cluster's workgroups need not be neighbours.
    """

    workgroups: int
    cluster: int
    subgroups: int
    rows: int
    own_columns: int
    covered: int
    shared_bytes: int
    needed: float
    had: int
    work: float
    chain: float
    steps: float
    walks: bool = True
    waits: int = 0
    ahead: int = 0
    partial_rows: int = 0
    passes: float = 1.0
    posts: bool = False


def _load(
    spec: NormSpec, target: Target, schedule: OnePass | TwoPass | Forward, rows: int
) -> _Load:
    match schedule:
        case OnePass():
            return _of_one_pass(spec, target, schedule, rows)
        case TwoPass():
            return _of_two_passes(spec, target, schedule, rows)
        case Forward():
            return _of_forward(spec, target, schedule, rows)


def _of_one_pass(spec: NormSpec, target: Target, one: OnePass, rows: int) -> _Load:
    again = _AGAIN if one.rereads else 1.0
    access = one.vector * words(spec) * _ELEMENT * again + _ACCESS
    sends = one.cluster > 1
    to_shared = _SENT * one.warps * one.cluster * one.in_cluster
    return _Load(
        workgroups=one.workgroups,
        cluster=one.cluster,
        subgroups=one.subgroups,
        rows=one.groups,
        own_columns=one.own_columns(spec),
        covered=one.padded_columns(spec, target),
        shared_bytes=one.shared_bytes(spec, target),
        needed=one.registers(spec, target),
        had=one.registers_available(target),
        work=one.chunks(spec, target) * access + _ROW + _SENDING * sends,
        chain=_SUM + to_shared,
        steps=rows / (one.workgroups * one.groups),
        # A post goes to memory and comes back; received a row later, it is there.
        waits=one.posts * (1 if one.defers else _TO_AND_FRO),
        # A row's place is free when another is done with it, nearly a step later.
        ahead=one.ahead - one.in_place,
        partial_rows=_SUMS * one.workgroups if spec.sums_columns else 0,
        posts=one.posts,
    )


def _of_two_passes(spec: NormSpec, target: Target, two: TwoPass, rows: int) -> _Load:
    """Of the second pass, which moves more; the first is taken to be as fast."""
    tiles = -(-spec.columns // two.tile(target))
    access = two.vector * words(spec) * _ELEMENT + _ACCESS
    return _Load(
        workgroups=two.workgroups * tiles,
        cluster=1,
        subgroups=two.warps,
        rows=two.rows,
        own_columns=spec.columns // tiles,
        covered=two.tile(target),
        shared_bytes=0,
        needed=_OTHER_REGISTERS + words(spec) * two.vector * (2 * two.rows + 2),
        had=_registers_of(target, two.warps * two.resident),
        work=two.rows * access,
        chain=0.0,
        steps=rows / (two.workgroups * two.rows),
        partial_rows=_SUMS * two.workgroups,
        passes=_TWO_PASSES,
    )


def _of_forward(spec: NormSpec, target: Target, one: Forward, rows: int) -> _Load:
    chunks = one.steps(spec) * one.chunks
    kept = one.chunks * one.vector if one.in_registers else 0
    subgroups = max(1, one.rows * one.threads // target.subgroup_size)
    sums = 2 if spec.family.centres else 1
    # Each step waits for its loads. A row that is kept nowhere is read for each sum and for y.
    waits = one.steps(spec) * (1 if one.reads_once else 1 + sums) - 1
    sent = _SENT * one.warps(target) * one.cluster * (one.cluster > 1)
    return _Load(
        workgroups=-(-rows // one.rows),
        cluster=one.cluster,
        subgroups=subgroups,
        rows=one.rows,
        own_columns=one.own_columns(spec),
        covered=one.padded_columns(spec),
        shared_bytes=one.shared_bytes(spec, target),
        needed=_OTHER_REGISTERS + words(spec) * kept * (1 + one.early),
        had=_registers_of(target, subgroups * one.resident),
        work=chunks * (one.vector * words(spec) * _ELEMENT + _ACCESS) + _ROW,
        chain=(_SUM + sent) * sums,
        steps=1.0,
        walks=False,
        waits=waits,
    )


def _registers_of(target: Target, subgroups: int) -> int:
    """Registers that a thread has if a processor holds so many subgroups."""
    processor = _PROCESSORS[target.name]
    share = target.registers // processor.parts // -(-subgroups // processor.parts)
    return min(REGISTERS_OF_A_THREAD, share // target.subgroup_size)


def _resident(
    load: _Load, target: Target, processor: _Processor, registers: int
) -> tuple[int, str]:
    """Workgroups that a processor can hold, at least 1, and what keeps it from more."""
    granules = -(-registers // target.registers_at_once) * target.registers_at_once
    subgroups = target.registers // processor.parts // (granules * target.subgroup_size)
    shared = load.shared_bytes + processor.reserved_bytes
    limits = {
        "registers": subgroups * processor.parts // load.subgroups,
        "shared memory": processor.shared_bytes // max(1, shared),
        "subgroups": processor.subgroups // load.subgroups,
        "workgroups": processor.workgroups,
    }
    limit = min(limits, key=lambda name: limits[name])
    return max(1, limits[limit]), limit


def _longest(*times: float) -> float:
    """About the longest of several times, which get in each other's way."""
    return float(sum(time**_SHARPNESS for time in times) ** (1 / _SHARPNESS))
