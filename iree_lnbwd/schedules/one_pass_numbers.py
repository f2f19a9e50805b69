"""The numbers of one pass over memory, and what they are in ``ir/one_pass.mlir``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import MORE_GRAD_OUTPUTS, Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import HEAD_COLUMNS, WHOLE_LINES
from iree_lnbwd.schedules.few_rows import FewRows
from iree_lnbwd.schedules.ir_types import (
    beside_dy,
    copies,
    flag,
    gates,
    itemsize,
    kernel,
    private,
    reads_more,
    storage,
)
from iree_lnbwd.schedules.rules import own_columns, touched_columns

_PAST_L1_BYTES = 16  # that a copy must have to pass the L1 cache (PTX ISA, "cp.async": .cg)
_SECTOR_BYTES = 32  # that the L2 cache reads and writes together
BULK_BYTES = 16  # that bulk copies are multiples of (PTX ISA, "cp.async.bulk")
_POST_BYTES = 8
_UNSENT_THREADS = 256
_UNSENT_WORDS = 4 * _UNSENT_THREADS  # of a workgroup: a rule of thumb
LINE_BYTES = 128  # that the L2 cache keeps together, and bulk copies are aligned by
_LEGAL_TO_COPY = {"f32": 4, "f64": 2}  # elements, by the type of sums
# Numbers of a thread (``ir/parts/thread.mlir``), and with those of its workgroup's set of weights.
_OF_THREAD, _OF_SETS = 9, 14
# Of an NVIDIA GPU's memory: what is read and written together, however little of it is asked for.
# Without teams, backwards of RMS norms of 32 heads lost what the first and the last of these have
# beside a row: they reached 63 % of the ceiling at 56 columns in bf16, 73 at 88, 80 at 136, where
# 128 had 93 (H100).
_MEMORY_BYTES = 64
_MOST_TEAMS = 4  # what rows of any whole number of 16 bytes need
# Of sets whose rows alternate, fewer than these are few (``ir/parts/set_rows.mlir``).
_FEW_SETS = 24


@dataclass(frozen=True)
class OnePassNumbers:
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
        rereads: Read rows again for dx instead of keeping them in registers: from shared memory, or
            with 0 slots from memory, where the caches have them.
        loads_late: Load other gradients of the output, and a gate, when they are used: for a row's
            sums, and again for dx, where the caches have them. Otherwise they are in registers
            from a step before on.
        stages_weight: Keep the weight in shared memory instead of in registers.
        widens_weight: Keep it in shared memory in the type of the sums.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
        cluster: Workgroups that share a row, each a part of its columns; ``workgroups`` counts
            clusters then.
        posts: Have a cluster's workgroups post their sums in global memory, on any GPU, and not
            send them to each other's shared memory.
        defers: Compute a row's dx only when the sums of the row after it are on their way, so that
            a cluster's workgroups do not wait for them.
        bulk: Have each subgroup copy its own columns of a row together (cp.async.bulk), which may
            begin anywhere: a slot is refilled once the subgroup's part of dx is stored.
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
    x_later: bool = False
    posts: bool = False
    loads_late: bool = False
    finalize_slices: int = 8
    finalize_rows: int = 8
    finalize_columns: int = 32
    few_rows: FewRows | None = None

    def numbers(self, spec: NormSpec, target: Target) -> dict[str, str]:
        """Its aliases in ``ir/one_pass.mlir``, but for those of memory."""
        chunks = self.chunks(spec, target)
        more = beside_dy(spec).value
        defers = self.defers and spec.wants_dx
        return {
            "#least_last": f"{self.least_last(spec, target)} : index",
            "#dy_bits": f"{8 * itemsize(spec, Element.DY)} : index",
            "#x_bits": f"{8 * itemsize(spec, Element.X)} : index",
            **{
                f"!{element.value}_lines": storage(f"?x{self.line(spec)}x!{element.value}")
                for element in (
                    *(Element.DY, Element.X, Element.RESIDUAL),
                    *(*gates(spec), *copies(spec)),
                )
            },
            "#groups": f"{self.groups} : index",
            "#workgroups_i32": f"{self.workgroups} : i32",
            "#ahead_i32": f"{self.ahead} : i32",
            "#slots": f"{self.slots} : index",
            "#chunks": f"{chunks} : index",
            "#copied": f"{self._copied(spec)} : index",
            "#lines_behind": f"{self.lines_behind(spec, target)} : index",
            **{
                f"#{element.value}_chunk_bytes": f"{self.vector * itemsize(spec, element)} : i64"
                for element in (Element.DY, Element.X)
            },
            "#may_have_none": flag(self.has_idle_subgroups(spec, target)),
            "#chunks_a_load": f"{self.chunks_a_load} : index",
            "#x_later": flag(self.x_later),
            "#pending_i32": f"{max(self.slots - 1 - defers, 0)} : i32",
            "#pending_first_i32": f"{max(self.ahead - 1, 0)} : i32",
            "#defers": flag(defers),
            "#buffers": f"{self.buffers} : index",
            "#loads_late": flag(self.loads_late),
            "#rereads": flag(self.rereads and spec.wants_dx),
            "#gamma_copied": f"{self._gamma_copied(spec)} : index",
            "#warps": f"{self.warps} : index",
            "!warp_sums": f"vector<{self.warps}x2x!acc>",
            "#own_columns": f"{self.own_columns(spec)} : index",
            "#cluster": f"{self.cluster} : index",
            "!posted": storage(f"?x{self.posted_words}xi64"),
            **(self._posts(target) if self.posts_sums(spec) else {}),
            "#rows_kernel": kernel(self.groups * self.threads(target), target),
            "#has_more": flag(reads_more(spec)),
            "!more_lines": f"!{more}_lines",
            "!more_chunk": f"!{more}_chunk",
            "!more_dy_held": private(f"{len(MORE_GRAD_OUTPUTS)}x{chunks}x!more_chunk"),
            **{f"!{gate.value}_held": private(f"{chunks}x!z_chunk") for gate in gates(spec)},
            "!x_held": private(f"{chunks}x!x_chunk"),
            "!gamma_held": private(f"{chunks}x!gamma_chunk"),
            "!residual_held": private(f"{chunks}x!residual_chunk"),
            "!held": private(f"{chunks}x!chunk"),
            "!thread": f"vector<{_OF_SETS if spec.weight_sets else _OF_THREAD}xindex>",
            "!begin": "vector<4xindex>",
            "!rows_ahead": "vector<2xindex>",
            "!are_live": "vector<2xi1>",
            "!pair": "vector<2x!acc>",
            "!statistics": "vector<3x!acc>",
            **(self._walk(target) if spec.weight_sets else {}),
        }

    def _posts(self, target: Target) -> dict[str, str]:
        """The posts of a row, before and while they are made (``ir/unsent.mlir``)."""
        return {
            "!acc_mq": f"tensor<?x{2 * self.posted_words}x!acc>",
            "#posted_words": f"{self.posted_words} : index",
            "#unsent_rows": f"{self.unsent_rows} : index",
            "#unsent_threads": f"{_UNSENT_THREADS} : index",
            "#unsent_kernel": kernel(_UNSENT_THREADS, target),
        }

    def _walk(self, target: Target) -> dict[str, str]:
        """The rows that a walk over a set of them knows (``ir/parts/set_rows.mlir``)."""
        return {
            "#known_rows": f"{self.known_rows} : index",
            "#few_sets": f"{_FEW_SETS if target.backend == 'cuda' else 0} : i32",
            "!walk": private(f"{self.known_rows + 2}xi32"),
            "!set_step": "vector<3xi32>",
        }

    def teams(self, spec: NormSpec, target: Target) -> int:
        """Teams of a workgroup's subgroups, which have neighbouring sets of weights.

        A call whose sets have long runs of rows gives all teams of a workgroup one set
        (`LEAST_RUN` of `iree_lnbwd.ops.sets`). There are as many teams as it takes rows to fill
        whole pieces of memory.
        Kernels count them in 32 bits. More than those have would be of a billion sets, whose rows
        and weights no GPU has room for, unless rows are less than such a piece: these take no
        teams.
        """
        row = spec.columns * itemsize(spec, Element.X)
        is_known = spec.weight_sets and target.backend == "cuda" and row >= _MEMORY_BYTES
        if not is_known or self.warps > 1:
            return 1
        whole = math.lcm(row, _MEMORY_BYTES) // row
        return math.gcd(whole, _MOST_TEAMS, self.groups // self.subgroup_rows)

    @property
    def known_rows(self) -> int:
        """Rows of a set that a walk knows: of this step and of those that it prepares."""
        return max(self.ahead, 1) + 1

    def _copied(self, spec: NormSpec) -> int:
        """Elements of dy and x in one copy, or a legal number if there are no copies."""
        copied = self.slots > 0 and not self.bulk
        return self.vector if copied else _LEGAL_TO_COPY[spec.acc_dtype]

    def _gamma_copied(self, spec: NormSpec) -> int:
        """Elements of the weight in one copy, likewise."""
        copied = self.stages_weight and not self.widens_weight and not self.bulk
        return self.vector if copied else _LEGAL_TO_COPY[spec.acc_dtype]

    @property
    def in_place(self) -> bool:
        """Whether a row's slot is refilled while its dx is computed."""
        return 0 < self.slots == self.ahead

    @property
    def loads_twice(self) -> bool:
        """Whether the caches alone keep a row from its sums to its dx, and the weight."""
        return self.rereads and not self.slots

    @property
    def x_slots(self) -> int:
        """Rows of x in shared memory."""
        return self.slots - self.x_later

    @property
    def buffers(self) -> int:
        """Rows whose sums are exchanged at once: some threads may be a row ahead of others.

        If sums are sent a row ahead of their use, some send row r + 2 while others read r - 1.
        """
        return 4 if self.defers and not self.posts else 2

    @property
    def exchange_mbarriers(self) -> int:
        """Mbarriers of the exchange, which only clusters have."""
        return self.buffers if self.in_cluster else 0

    @property
    def in_cluster(self) -> bool:
        """Whether a row's workgroups reach each other's shared memory."""
        return self.cluster > 1 and not self.posts

    @property
    def senders(self) -> int:
        """Subgroups whose sums meet in shared memory."""
        return self.warps * (self.cluster if self.in_cluster else 1)

    def posts_sums(self, spec: NormSpec) -> bool:
        """Whether there are posts: nobody wants a row's sums without dx."""
        return self.posts and spec.wants_dx

    @property
    def posted_words(self) -> int:
        """Words of 64 bits of a row's posts: of each workgroup, and a count; in whole sectors."""
        of_sector = _SECTOR_BYTES // _POST_BYTES
        return -(-(self.cluster + 1) // of_sector) * of_sector

    @property
    def posted_bytes(self) -> int:
        """Bytes of a row's posts."""
        return self.posted_words * _POST_BYTES

    @property
    def unsent_rows(self) -> int:
        """Rows of posts that a workgroup of ``ir/unsent.mlir`` begins."""
        return max(1, _UNSENT_WORDS // self.posted_words)

    @property
    def copy_mbarriers(self) -> int:
        """Mbarriers that copies in bulk arrive at: one for each subgroup and slot."""
        return self.groups * self.warps * self.slots if self.bulk else 0

    @property
    def chunks_a_load(self) -> int:
        """Vectors of a thread that it reads from shared memory together."""
        return max(1, WHOLE_LINES // self.vector) if self.bulk else 1

    @staticmethod
    def of_16(dtype: str) -> int:
        """Elements of 16 bytes, which bulk copies come in."""
        return BULK_BYTES // DTYPES[dtype].numpy.itemsize

    @staticmethod
    def of_line(dtype: str) -> int:
        """Elements of 128 bytes, which the L2 cache keeps together."""
        return LINE_BYTES // DTYPES[dtype].numpy.itemsize

    def _last_columns(self, spec: NormSpec, target: Target) -> int:
        """Columns of a row's last subgroup; zero or less if it has none.

        That is about subgroups whose columns are neighbours, as those that copy in bulk.
        """
        of_others = (self.cluster - 1) * self.own_columns(spec)
        of_subgroup = self.padded_columns(spec, target) // self.warps
        return spec.columns - of_others - (self.warps - 1) * of_subgroup

    def has_idle_subgroups(self, spec: NormSpec, target: Target) -> bool:
        """Whether a subgroup of the last workgroup of a cluster, if none of all, has no columns.

        That is about such subgroups, too.
        """
        return self._last_columns(spec, target) <= 0

    def vectors_lacking(self, spec: NormSpec, target: Target) -> int:
        """Of a thread's vectors, those that such a last subgroup has in part, or not at all."""
        whole = self._last_columns(spec, target) // (self.vector * self.lanes(target))
        return self.chunks(spec, target) - max(0, whole)

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

    def own_columns(self, spec: NormSpec) -> int:
        """Columns of a workgroup; the last one of a cluster may have fewer."""
        return own_columns(spec, self.cluster, self.vector)

    def padded_columns(self, spec: NormSpec, target: Target) -> int:
        """Columns that a group's threads cover."""
        return self.chunks(spec, target) * self.vector * self.threads(target)

    def past_l1(self, row_bytes: int, element_bytes: int) -> bool:
        """Whether rows are copied past the L1 cache: not in copies of less than 16 bytes.

        Nor in clusters, or where rows begin within a sector of memory: there such copies read more
        than half as much again from the L2 cache. On an H200, 512 x 131072 in f32 took a fifth
        longer.
        """
        whole = self.cluster == 1 and row_bytes % _SECTOR_BYTES == 0
        return whole and self.vector * element_bytes >= _PAST_L1_BYTES

    def copies_last(self, spec: NormSpec, target: Target) -> bool:
        """Whether rows that threads copy leave the L2 cache late, and bring whole lines along.

        With sets of weights, workgroups read many places of memory at once. Modulated backwards in
        bf16 took up to 4 % less time so, and RMS norms of 72 columns 4 % more (H200). Copies past
        the L1 cache were not measured.
        """
        past_l1 = (self.past_l1(spec.columns * size, size) for size in _copied_sizes(spec))
        copies = self.slots > 0 and not self.bulk and not any(past_l1)
        is_wider = spec.weight_sets and spec.columns > HEAD_COLUMNS
        return is_wider and copies and target.has_cache_policies

    def _needs_l1(self, spec: NormSpec) -> bool:
        return (
            self.slots > 0
            and not self.bulk
            and not all(self.past_l1(spec.columns * b, b) for b in _copied_sizes(spec))
        )


def _copied_sizes(spec: NormSpec) -> set[int]:
    """Bytes of an element of dy, and of x."""
    return {itemsize(spec, element) for element in (Element.DY, Element.X)}
