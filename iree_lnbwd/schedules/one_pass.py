"""The schedule of one pass over memory: its numbers, what they cost, when they are legal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.errors import counted
from iree_lnbwd.schedules.elements import WHOLE_LINES, words
from iree_lnbwd.schedules.few_rows import FewRows
from iree_lnbwd.schedules.rules import (
    FEWEST_THREADS,
    RESERVED_BYTES,
    Rule,
    cluster_rules,
    elements_rule,
    first_broken,
    gpu_rules,
    out_of_bounds,
    own_columns,
    registers_of_thread,
    stride_rule,
    touched_columns,
    wait_by_themselves,
)
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

_PAST_L1_BYTES = 16  # that a copy must have to pass the L1 cache (PTX ISA, "cp.async": .cg)
_SECTOR_BYTES = 32  # that the L2 cache reads and writes together
_BULK_BYTES = 16  # that bulk copies are multiples of (PTX ISA, "cp.async.bulk")
_LINE_BYTES = 128  # that the L2 cache keeps together, and bulk copies are aligned by
_MBARRIER_BYTES = 8
_MOST_MBARRIERS = 64  # of a workgroup: those that the emulator follows
_COPY_BYTES = (4, 8, 16)  # what cp.async can copy (PTX ISA, "cp.async": cp-size)
_SHARED_AT_ONCE = 128  # bytes of shared memory, allocated together (CUDA, "Occupancy Calculator")
# Steps, at least, between a row's fetch and its dx, if the next row's sums come between the two.
AHEAD_OF_LATER_SUMS = 2
_SLOTS_IF_X_LATER = 2  # of dy; x has one
# Workgroups that share a processor where rows are not copied ahead: a rule of thumb.
_LOADING_AT_ONCE = 4
# Registers of a thread besides its elements': estimated from ptxas's reports. AMD's hold addresses
# of 64 bits for each lane; the estimate is large enough that no module of the matrix spills.
_REGISTERS_FIXED = {"cuda": 40, "rocm": 64}
# Where rows begin anywhere in an access, a thread keeps the edges of a row for later, and what it
# needs to find them; more so where rows are read again.
_SHIFTED = 1.18
_SHIFTED_READ_AGAIN = 1.42


@dataclass(frozen=True)
class OnePass:
    """Workgroups walk over the rows and read each once (``ir/one_pass.mlir``).

    Attributes:
        workgroups: How many walk.
        groups: Groups of threads in a workgroup; each works on a row of its own.
        warps: Subgroups in a group.
        subgroup_rows: Groups of a subgroup, each with a part of its lanes; 1 if a group has whole
            subgroups.
        vector: Neighbouring elements that a thread handles together.
        ahead: Steps between a row's fetch and its use.
        slots: Rows of a group that cp.async copies into shared memory: one more than ``ahead``, or
            as many (in place: a chunk's slot is refilled once its dx is stored). With 0, rows are
            loaded into registers, at most one ahead.
        rereads: Read rows from shared memory again for dx instead of keeping them in registers.
        stages_weight: Keep the weight in shared memory instead of in registers.
        widens_weight: Keep it in shared memory in the type of the sums.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
        cluster: Workgroups that share a row, each a part of its columns; ``workgroups`` counts
            clusters then.
        defers: Compute a row's dx only when the sums of the row after it are on their way, so that
            a cluster's workgroups do not wait for them.
        bulk: Have each subgroup copy its own columns of a row together (cp.async.bulk), which may
            begin anywhere: a slot is refilled once the subgroup's part of dx is stored.
        refills: Parts in which it is refilled, each once its own dx is stored.
        x_later: Copy x a step later than dy, so that shared memory has two rows of dy and one of x.
        finalize_slices: Slices of the partial rows that threads of the last kernel add up.
        finalize_rows: Partial rows that such a thread reads at once.
        finalize_columns: Columns of a workgroup of that kernel.
        few_rows: The schedule of few rows; None if they are computed like any others.
    """

    workgroups: int
    groups: int
    warps: int
    vector: int
    ahead: int = 0
    slots: int = 0
    rereads: bool = False
    stages_weight: bool = False
    widens_weight: bool = False
    resident: int = 1
    cluster: int = 1
    subgroup_rows: int = 1
    defers: bool = False
    bulk: bool = False
    refills: int = 1
    x_later: bool = False
    finalize_slices: int = 8
    finalize_rows: int = 8
    finalize_columns: int = 32
    few_rows: FewRows | None = None

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        fetched = "copied by cp.async" if self.slots else "read"
        if self.bulk:
            parts = f" in {self.refills} parts" if self.refills > 1 else ""
            later = ", x a step later than dy," if self.x_later else ""
            fetched = f"copied in bulk by each subgroup{parts}{later}"
        walkers = counted(self.workgroups, "workgroup")
        if self.cluster > 1:
            walkers = f"{counted(self.workgroups, 'cluster')} of {self.cluster} workgroups"
        ahead = f"{counted(self.ahead, 'step')} ahead" if self.ahead else "where they are used"
        shared = f" with {self.subgroup_rows} rows each" if self.subgroup_rows > 1 else ""
        across = " across the borders of rows" if self.shifted(spec) else ""
        later = ", sums received a row later" if self.defers else ""
        return (
            f"one pass: x and dy are read once; {walkers} of "
            f"{self.groups // self.subgroup_rows} x {self.warps} subgroups{shared}, rows {fetched} "
            f"{ahead}, {counted(self.vector, 'element')} an access{across}{later}"
        )

    def parts(self, spec: NormSpec, target: Target) -> tuple[str, ...]:
        """The files of ``ir/parts/`` that its kernel takes of those with the same functions."""
        loads = "registers_ahead" if self.ahead else "registers"
        fetch = "bulk" if self.bulk else "async" if self.slots else loads
        shifted = self.shifted(spec)
        weight = "widened" if self.widens_weight else "copied" if self.stages_weight else "held"
        bias = "staged" if self.stages_bias(spec, target) else "held" if spec.has_bias else "none"
        sums = "cluster" if self.cluster > 1 else "workgroup" if self.warps > 1 else "subgroup"
        return (
            f"fetch/{fetch}",
            f"rows/{'shifted' if shifted else 'whole'}",
            f"begin/{'at_once' if shifted or self.bulk else 'in_two'}",
            f"weight/{weight}",
            f"bias/{bias}",
            f"inverse/{'staged' if self.stages_inverse(spec, target) else 'divided'}",
            f"sums/{sums}",
            f"partial_rows/{'groups' if self.groups > 1 else 'one_group'}",
        )

    @property
    def in_place(self) -> bool:
        """Whether a row's slot is refilled while its dx is computed."""
        return 0 < self.slots == self.ahead

    @property
    def x_slots(self) -> int:
        """Rows of x in shared memory."""
        return self.slots - self.x_later

    @property
    def buffers(self) -> int:
        """Rows whose sums are exchanged at once: some threads may be a row ahead of others.

        If sums are sent a row ahead of their use, some send row r + 2 while others read r - 1.
        """
        return 4 if self.defers else 2

    @property
    def exchange_mbarriers(self) -> int:
        """Mbarriers of the exchange, which only clusters have."""
        return self.buffers if self.cluster > 1 else 0

    @property
    def copy_mbarriers(self) -> int:
        """Mbarriers that copies in bulk arrive at: one for each subgroup and slot."""
        return self.groups * self.warps * self.slots if self.bulk else 0

    def mbarriers(self, spec: NormSpec, target: Target) -> int:
        """Memory for so many, of a workgroup.

        In bulk, rows are copied to whole lines, which follow the mbarriers in shared memory.
        """
        if not self.bulk:
            return self.buffers
        needed = self.exchange_mbarriers + self.copy_mbarriers
        beside = self._shared_beside_rows(spec, target)
        whole = -(-(beside + needed * _MBARRIER_BYTES) // _LINE_BYTES) * _LINE_BYTES
        return (whole - beside) // _MBARRIER_BYTES

    @property
    def chunks_a_load(self) -> int:
        """Vectors of a thread that it reads from shared memory together."""
        return max(1, WHOLE_LINES // self.vector) if self.bulk else 1

    @staticmethod
    def of_16(dtype: str) -> int:
        """Elements of 16 bytes, which bulk copies come in."""
        return _BULK_BYTES // DTYPES[dtype].numpy.itemsize

    @staticmethod
    def of_line(dtype: str) -> int:
        """Elements of 128 bytes, which the L2 cache keeps together."""
        return _LINE_BYTES // DTYPES[dtype].numpy.itemsize

    def has_idle_subgroups(self, spec: NormSpec, target: Target) -> bool:
        """Whether a subgroup of the last workgroup of a cluster, if none of all, has no columns.

        That is about subgroups whose columns are neighbours, as those that copy in bulk.
        """
        before = (self.cluster - 1) * self.own_columns(spec)
        of_subgroup = self.padded_columns(spec, target) // self.warps
        return spec.columns - before <= (self.warps - 1) * of_subgroup

    def lines_behind(self, spec: NormSpec, target: Target) -> int:
        """How often a subgroup's lanes store zeros behind its columns, as far as copies may go.

        A copy goes on to whole 16 bytes, and one before may have begun a line later.
        """
        most = max(self.of_line(d) + self.of_16(d) for d in (spec.dy_dtype, spec.dtype))
        return -(-(most + self.vector) // target.subgroup_size)

    def staged(self, spec: NormSpec, target: Target, dtype: str) -> int:
        """Elements of a row that shared memory has room for.

        What a subgroup copies in bulk is in whole lines, the first of which begins before its
        columns.
        """
        columns = self.padded_columns(spec, target)
        if not self.bulk:
            return columns
        line = self.of_line(dtype)
        return self.warps * (-(-columns // self.warps // line) + 1) * line

    @property
    def subgroups(self) -> int:
        """Of a workgroup."""
        return self.groups // self.subgroup_rows * self.warps

    def shifted(self, spec: NormSpec) -> bool:
        """Whether rows begin anywhere in an access; accesses then go across their borders."""
        return spec.columns % self.vector != 0

    def alignment_phases(self, spec: NormSpec) -> int:
        """Elements of an access that rows begin at."""
        return self.vector // math.gcd(self.vector, spec.columns)

    def least_last(self, spec: NormSpec, target: Target) -> int:
        """Of a thread's vectors, the first that may be a row's last.

        That depends on the row's alignment phase.
        """
        ends = (spec.columns, touched_columns(spec, self.vector))
        of_a_part = self.own_columns(spec) // self.vector
        lasts = [(end - 1) // self.vector % of_a_part for end in ends]
        if not self.bulk:
            return min(lasts) // self.threads(target)
        of_subgroup = self.chunks(spec, target) * self.lanes(target)
        return min(last % of_subgroup // self.lanes(target) for last in lasts)

    def line(self, spec: NormSpec) -> int:
        """Elements by which memory is addressed: those of a row, or of an access across borders."""
        return self.vector if self.shifted(spec) else spec.columns

    def few_vector(self, spec: NormSpec) -> int:
        """Neighbouring elements that a thread handles together where there are few rows."""
        return math.gcd(self.vector, spec.columns)

    def threads(self, target: Target) -> int:
        """Of one group."""
        return self.warps * self.lanes(target)

    def lanes(self, target: Target) -> int:
        """Threads of a subgroup that share a row."""
        return target.subgroup_size // self.subgroup_rows

    def chunks(self, spec: NormSpec, target: Target) -> int:
        """How many vectors of a row each thread has."""
        return -(-self.own_columns(spec) // (self.vector * self.threads(target)))

    def refill_chunks(self, spec: NormSpec, target: Target) -> int:
        """A thread's vectors that are refilled together; the last part may have fewer."""
        return -(-self.chunks(spec, target) // self.refills)

    def own_columns(self, spec: NormSpec) -> int:
        """Columns of a workgroup; the last one of a cluster may have fewer."""
        return own_columns(spec, self.cluster, self.vector)

    def padded_columns(self, spec: NormSpec, target: Target) -> int:
        """Columns that a group's threads cover."""
        return self.chunks(spec, target) * self.vector * self.threads(target)

    def row_bytes(self, spec: NormSpec, target: Target) -> tuple[int, int]:
        """Shared memory for rows of dy and of x; that for dy takes the groups' sums at the end."""
        acc = DTYPES[spec.acc_dtype].numpy.itemsize
        sums = self.groups * self.padded_columns(spec, target) * acc if self.groups > 1 else 0
        dy, x = (
            slots * self.groups * self.staged(spec, target, name) * DTYPES[name].numpy.itemsize
            for slots, name in ((self.slots, spec.dy_dtype), (self.x_slots, spec.dtype))
        )
        return max(sums, dy), x

    def past_l1(self, row_bytes: int, element_bytes: int) -> bool:
        """Whether rows are copied past the L1 cache: not in copies of less than 16 bytes.

        Nor in clusters, or where rows begin within a sector of memory: there such copies read more
        than half as much again from the L2 cache. On an H200, 512 x 131072 in f32 took a fifth
        longer.
        """
        whole = self.cluster == 1 and row_bytes % _SECTOR_BYTES == 0
        return whole and self.vector * element_bytes >= _PAST_L1_BYTES

    def crowds(self, spec: NormSpec, target: Target) -> bool:
        """Whether copies pass through an L1 cache that has little room beside shared memory."""
        wanted = (self.shared_bytes(spec, target) + RESERVED_BYTES) * self.resident
        return self._needs_l1(spec) and 0 < target.roomy_shared_bytes < wanted

    def _needs_l1(self, spec: NormSpec) -> bool:
        sizes = {DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype)}
        return (
            self.slots > 0
            and not self.bulk
            and not all(self.past_l1(spec.columns * b, b) for b in sizes)
        )

    def padding(self, spec: NormSpec, target: Target) -> int:
        """Shared memory that nothing uses, for the sake of copies through the L1 cache.

        The cache has the rest. A driver sets aside shared memory for as many workgroups as a
        multiprocessor can hold. Where these are more than ``resident``, and leave the cache too
        little, the padding makes them fewer. On an H200, this kernel took 189 us
        in place of 233, for an RMS norm of 12297 x 5457 in f32.
        """
        if not target.roomy_shared_bytes or not self._needs_l1(spec):
            return 0
        used = self._shared_used(spec, target)
        each, most = used + RESERVED_BYTES, target.shared_bytes + RESERVED_BYTES
        threads = self.subgroups * target.subgroup_size
        by_registers = int(target.registers / (threads * self.registers(spec, target)))
        held = min(most // each, by_registers)
        while held > self.resident and held * each > target.roomy_shared_bytes:
            each = (most // held // _SHARED_AT_ONCE + 1) * _SHARED_AT_ONCE
            held -= 1
        return each - RESERVED_BYTES - used if held * each <= target.roomy_shared_bytes else 0

    def stages_bias(self, spec: NormSpec, target: Target) -> bool:
        """Whether shared memory keeps the bias that a backward from the output reads.

        It does if there is room, because in registers it would be one value more an element.
        """
        return "bias" in self._staged_if_room(spec, target)

    def stages_inverse(self, spec: NormSpec, target: Target) -> bool:
        """Whether shared memory keeps 1 / g of a backward from the output.

        It does if there is room; otherwise each row computes it again.
        """
        return "inverse" in self._staged_if_room(spec, target)

    def _staged_if_room(self, spec: NormSpec, target: Target) -> dict[str, int]:
        """What shared memory keeps for a backward from the output, and bytes of each."""
        if not spec.from_output:
            return {}
        columns = self.groups * self.padded_columns(spec, target)
        wanted = {}
        if spec.has_bias:
            wanted["bias"] = columns * DTYPES[spec.beta_dtype].numpy.itemsize
        if spec.has_weight:
            wanted["inverse"] = columns * DTYPES[spec.acc_dtype].numpy.itemsize
        at_once = self.resident if self.slots else max(self.resident, _LOADING_AT_ONCE)
        room = target.shared_bytes // at_once - self._shared_anyway(spec, target)
        fitting = {}
        for name, size in wanted.items():
            if size <= room:
                fitting[name] = size
                room -= size
        return fitting

    def shared_bytes(self, spec: NormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup."""
        return self._shared_used(spec, target) + self.padding(spec, target)

    def _shared_used(self, spec: NormSpec, target: Target) -> int:
        more = self._staged_if_room(spec, target)
        return sum(more.values()) + self._shared_anyway(spec, target)

    def _shared_beside_rows(self, spec: NormSpec, target: Target) -> int:
        more = self._staged_if_room(spec, target)
        return sum(more.values()) + self._exchange_and_weight(spec, target)

    def _shared_anyway(self, spec: NormSpec, target: Target) -> int:
        copies = self.copy_mbarriers * _MBARRIER_BYTES + _LINE_BYTES if self.bulk else 0
        rows = sum(self.row_bytes(spec, target))
        return self._exchange_and_weight(spec, target) + copies + rows

    def _exchange_and_weight(self, spec: NormSpec, target: Target) -> int:
        acc, gamma = (DTYPES[name].numpy.itemsize for name in (spec.acc_dtype, spec.gamma_dtype))
        exchanged = self.warps * self.cluster
        exchange = self.buffers * self.groups * exchanged * 2 * acc if exchanged > 1 else 0
        weight = self.groups * self.padded_columns(spec, target) if self.stages_weight else 0
        weight *= acc if self.widens_weight else gamma
        return exchange + weight

    def registers(self, spec: NormSpec, target: Target) -> float:
        """Registers of a thread, by ptxas's reports: two accumulators, the row, the weight."""
        dy, x, gamma = (
            DTYPES[name].numpy.itemsize / 4
            for name in (spec.dy_dtype, spec.dtype, spec.gamma_dtype)
        )
        an_element = (2.0 if self.rereads else 4.0) * words(spec)
        # Rows that are read again have the weight again, too; but layer norm's across the borders
        # of rows keep it: 168 registers did not do for 8 accesses of 4 in 16 bits. So do those that
        # are copied in bulk; single elements have a register each.
        keeps_weight = not self.rereads or self.bulk or (self.shifted(spec) and spec.family.centres)
        if keeps_weight and not self.stages_weight:
            an_element += max(gamma, words(spec)) if self.bulk and self.vector == 1 else gamma
        if self.ahead and not self.slots:
            an_element += dy + x
        an_element += 2 * dy * (spec.grad_outputs - 1)  # of this row and of the next
        elements = self.chunks(spec, target) * self.vector
        estimate = _REGISTERS_FIXED[target.backend] + elements * an_element
        # In bulk, no thread has to mask what is not its own.
        if self.bulk or not self.shifted(spec):
            return estimate
        return estimate * (_SHIFTED_READ_AGAIN if self.rereads else _SHIFTED)

    def registers_available(self, target: Target) -> int:
        """Registers that a thread can have if a multiprocessor holds ``resident`` workgroups."""
        return registers_of_thread(self.subgroups * self.resident, target)

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        # The other rules divide by what these are about.
        if why := out_of_bounds(self) or first_broken(self._rules_of_threads(target)):
            return why
        shared = self.shared_bytes(spec, target)
        most_ahead = self.slots if self.slots else 1
        copies_weight = self.stages_weight and not self.widens_weight
        by_vector = not self.bulk  # what each thread copies
        copied = [
            DTYPES[name].numpy.itemsize
            for name in (self.slots > 0) * by_vector * [spec.dy_dtype, spec.dtype]
            + copies_weight * by_vector * [spec.gamma_dtype]
        ]
        rules = (
            (
                self.shifted(spec) and not self.slots,
                f"N is no multiple of {self.vector}, and rows are not copied",
            ),
            (
                self.workgroups * self.groups * spec.columns % self.vector != 0,
                f"rows of a group have different alignment phases in {self.vector} elements",
            ),
            (
                shared > target.shared_bytes,
                f"{shared} bytes of shared memory, at most {target.shared_bytes}",
            ),
            (self.slots > 0 and not target.has_cp_async, "cp.async"),
            (self.bulk and not target.has_bulk_copies, "cp.async.bulk"),
            (
                self.bulk and not (self.in_place and self.subgroup_rows == 1),
                "whole subgroups copy in bulk, in place",
            ),
            (
                # Of the last row alone may elements be left that no copy has.
                self.bulk
                and spec.columns < max(self.of_16(d) for d in (spec.dy_dtype, spec.dtype)),
                f"a row is less than {_BULK_BYTES} bytes, which bulk copies have",
            ),
            (self.refills > 1 and not self.bulk, "only copies in bulk refill a slot in parts"),
            (
                -(-self.chunks(spec, target) // self.refill_chunks(spec, target)) < self.refills,
                f"{self.chunks(spec, target)} vectors of a thread do not make {self.refills} parts",
            ),
            (
                self.x_later and not (self.bulk and self.slots == _SLOTS_IF_X_LATER),
                f"x is copied later than dy only in bulk, and into {_SLOTS_IF_X_LATER} slots of dy",
            ),
            (
                self.x_later and self.defers,
                "the next row's x is not there yet, for sums that are sent ahead",
            ),
            (
                self.exchange_mbarriers + self.copy_mbarriers > _MOST_MBARRIERS,
                f"{self.exchange_mbarriers + self.copy_mbarriers} mbarriers, at most "
                f"{_MOST_MBARRIERS}",
            ),
            (
                not wait_by_themselves(self.groups, self.warps, target),
                f"{self.groups} groups of several subgroups, at most {target.group_barriers} "
                "can wait by themselves",
            ),
            (
                not all(self.vector * size in _COPY_BYTES for size in copied),
                f"cp.async copies {_COPY_BYTES} bytes",
            ),
            (
                not max(0, self.slots - 1) <= self.ahead <= most_ahead,
                f"{self.ahead} rows ahead do not go with {self.slots} slots",
            ),
            *cluster_rules(spec, target, self.cluster, self.vector, self.groups),
            (self.defers and self.cluster == 1, "only clusters receive sums later"),
            (
                self.defers and not (self.rereads and self.ahead >= AHEAD_OF_LATER_SUMS),
                "a row whose sums are received later is read again, and fetched "
                f"{AHEAD_OF_LATER_SUMS} rows ahead",
            ),
            (
                spec.grad_outputs > 1 and self.defers,
                "of other gradients of the output, only the next row is there",
            ),
            (self.rereads and not self.slots, "nothing is staged"),
            (copies_weight and not self.slots, "the weight is copied with the first row"),
            (self.widens_weight and not self.stages_weight, "a weight in registers is not widened"),
            (self.widens_weight and not self.ahead, "the weight is widened before the first row"),
            elements_rule(spec, self.chunks(spec, target) * self.vector),
            stride_rule(self.workgroups * self.groups * (self.ahead + 1)),
        )
        why = first_broken(rules)
        if why is None and self.few_rows:
            why = self.few_rows.illegal(spec, target, self.few_vector(spec))
            return why and f"few rows: {why}"
        return why

    def _rules_of_threads(self, target: Target) -> tuple[Rule, ...]:
        lanes = target.subgroup_size
        return (
            *gpu_rules(target, self, self.groups * self.threads(target)),
            (
                self.subgroup_rows > 1
                and (
                    self.warps > 1
                    or self.cluster > 1
                    or lanes % self.subgroup_rows != 0
                    or self.lanes(target) < FEWEST_THREADS
                    or self.groups % self.subgroup_rows != 0
                ),
                f"{self.groups} groups, {self.subgroup_rows} to a subgroup of {lanes}",
            ),
        )
