"""The schedule of the forwards on a GPU, and of statistics that a backward recomputes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import ADDED_BIAS, INPUT, RESIDUAL, WEIGHT, Element, Kind
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import most_elements
from iree_lnbwd.schedules.ir_types import (
    flag,
    itemsize,
    kernel,
    output_types,
    private,
    shared,
    storage,
)
from iree_lnbwd.schedules.rules import (
    FEWEST_THREADS,
    Rule,
    cluster_rules,
    first_broken,
    have_room,
    out_of_bounds,
    own_columns,
    resident_rule,
)

WORD_BYTES = 4
_SUMS = 2
_SUMS_OF_CLUSTERS = 4
_SUM_BYTES = 4  # of a sum that workgroups send to each other
_LINE_BYTES = 128  # of memory; copies of rows begin at the same place in one as in shared memory
_FEWEST_SLOTS = 2
_WHOLE_BYTES = 16  # that are fetched into the cache together
# Words of a chunk that is cut out of two accesses (ir/parts/forward/chunks/shifted.mlir).
_LEAST_CUT_WORDS, _MOST_CUT_WORDS = 2, 8


@dataclass(frozen=True)
class Forward:
    """One kernel that normalizes rows, and saves their statistics (``ir/forward.mlir``).

    Attributes:
        rows: Rows of a workgroup; each has a group of threads.
        threads: Of a group: several subgroups, or a power of 2 of threads of one subgroup.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread loads at once.
        in_registers: Rows stay in registers.
        in_shared_memory: Rows stay there. If they stay in neither, they are read again for each sum
            and for the output.
        most_few_rows: Calls of at most so many rows take a kernel of their own, whose weights are
            early and whose rows do not last. If 0, there is one kernel.
        early: Weights are loaded with the row, before its sums. Otherwise each is loaded when it
            is used, so that registers are free for more workgroups meanwhile.
        lasts: Rows leave the L2 cache late, where the target can say so. Rows that fit there do
            not need it, and their loads took up to 5 % longer on an H200.
        packs: Rows that stay in registers stay as narrow as they came there, and are widened for
            each use.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
        cluster: Workgroups that share a row, each a part of its columns.
        rereads: Rows that begin anywhere in an access are read once more for the output, from the
            L1 cache. Otherwise registers keep them in two alignments.
        ahead: How many rows further on the row is that a group fetches into the L2 cache, where it
            has its own; 0 if it fetches none.
        walks: How many rows are at work at once, if workgroups walk over the rows, and read their
            weights once; 0 if a workgroup has one set of rows.
        slots: Sets of rows that a workgroup has in shared memory then, where the next are copied
            meanwhile; 1 if rows are loaded.
        stages_weights: Weights of a walk are kept in shared memory, not in registers.
    """

    rows: int
    threads: int
    vector: int
    chunks: int
    in_registers: bool
    in_shared_memory: bool = False
    most_few_rows: int = 0
    early: bool = False
    lasts: bool = True
    packs: bool = False
    resident: int = 1
    cluster: int = 1
    rereads: bool = False
    ahead: int = 0
    walks: int = 0
    slots: int = 1
    stages_weights: bool = False

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        kept = "once, and kept in " + ("registers" if self.in_registers else "shared memory")
        kept += " as narrow as they came" if self.packs else ""
        read = kept if self.reads_once else "again for each sum and for the output"
        weights = ""
        if self.walks:
            next_rows = f" the next are copied into {self.slots} slots of shared memory meanwhile;"
            where = ", and kept in shared memory" if self.stages_weights else ""
            weights = f"{next_rows if self.copies else ''} weights are read once{where};"
        elif weighs(spec):
            when = "with the row" if self.early else "after its sums"
            weights = f" weights are read {when};"
        workgroups = f"clusters of {self.cluster} workgroups" if self.cluster > 1 else "workgroups"
        workgroups = f"{workgroups} that walk over rows," if self.walks else workgroups
        return (
            f"one kernel: rows are read {read};{weights} {workgroups} of {self.rows} x "
            f"{self.threads} threads, {counted(self.vector, 'element')} an access"
        )

    def parts(self, spec: NormSpec, target: Target) -> tuple[str, ...]:
        """The files of ``ir/parts/forward/`` of those with the same functions."""
        chunks = "shifted" if self.shifted(spec) else "whole"
        sums = "workgroup" if self.warps(target) > 1 else "subgroup"
        return (f"chunks/{chunks}", f"sums/{'cluster' if self.cluster > 1 else sums}")

    def shifted(self, spec: NormSpec) -> bool:
        """Whether rows begin anywhere in an access."""
        return spec.columns % self.vector != 0

    @property
    def copies(self) -> bool:
        """Whether the rows of a walk that come next are copied into shared memory."""
        return self.walks > 0 and self.slots >= _FEWEST_SLOTS

    @property
    def reads_once(self) -> bool:
        """Whether a row stays somewhere between its first sum and the output."""
        return self.in_registers or self.in_shared_memory

    def steps(self, spec: NormSpec) -> int:
        """How many times the threads of a row load ``chunks`` vectors each to see all of it."""
        return -(-self.own_columns(spec) // self._step)

    def own_columns(self, spec: NormSpec) -> int:
        """Columns of a workgroup; the last one of a cluster may have fewer."""
        return own_columns(spec, self.cluster, self.vector)

    @property
    def _step(self) -> int:
        """Columns that the threads of a workgroup's row load at once."""
        return self.vector * self.threads * self.chunks

    def padded_columns(self, spec: NormSpec) -> int:
        """Columns that the steps of a workgroup's row cover."""
        return self.steps(spec) * self._step

    def span(self, spec: NormSpec) -> int:
        """Steps that are summed at a time, so that a sum has about as many terms as there are."""
        return max(1, math.isqrt(self.steps(spec) // self.chunks))

    def whole(self, spec: NormSpec) -> bool:
        """Whether every thread has all of its vectors in every step."""
        own = self.own_columns(spec)
        return own * self.cluster == spec.columns and own % self._step == 0

    def forms(self, spec: NormSpec) -> tuple[Forward, ...]:
        """Its kernels; M decides which a call takes. If there are two, few rows' is first."""
        if self.most_few_rows == 0:
            return (self,)
        many = replace(self, most_few_rows=0)
        few = replace(
            many,
            early=True,
            lasts=False,
            packs=False,
            resident=1,
            rereads=False,
            ahead=0,
            walks=0,
            stages_weights=False,
        )
        if spec.rows is None:
            return (few, many)
        return (few if spec.rows <= self.most_few_rows else many,)

    def warps(self, target: Target) -> int:
        """Subgroups of a workgroup that share a row."""
        return -(-self.threads // target.subgroup_size)

    def lanes(self, target: Target) -> int:
        """Threads of a subgroup that share a row."""
        return min(self.threads, target.subgroup_size)

    def sums(self, spec: NormSpec) -> int:
        """Numbers that subgroups exchange, with a place for each (``ir/forward.mlir``)."""
        if self.cluster == 1:
            return _SUMS
        return _SUMS_OF_CLUSTERS if spec.family.centres else 1

    def shared_bytes(self, spec: NormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup."""
        warps = self.warps(target) * self.cluster
        size = DTYPES[spec.acc_dtype].numpy.itemsize
        exchange = self.sums(spec) * warps * size if warps > 1 else 0
        row = self.padded_columns(spec) * bytes_of(normalized(spec))
        kept = self.rows * (self._turns * exchange + (row if self.in_shared_memory else 0))
        copies = self.slots * self._slot_elements(spec) * bytes_of(normalized(spec))
        staged = self.rows * self._step * bytes_of_weights(spec) if self.stages_weights else 0
        return kept + staged + (copies + _LINE_BYTES if self.copies else 0)

    @property
    def _staged(self) -> str:
        """The places of a workgroup's weights in shared memory."""
        return f"{self.chunks}x{self.rows * self.threads}" if self.stages_weights else "1x1"

    def _meets(self, spec: NormSpec, target: Target) -> bool:
        """Whether threads of a walk meet once more for each row.

        So they are done with what the next row's sums, or a copy, take the place of.
        """
        is_alone = self.cluster == 1 and self.warps(target) > 1
        meets_once = is_alone and not spec.family.centres
        return meets_once or (self.copies and not is_alone)

    def _exchange(self, spec: NormSpec, senders: int) -> str:
        """The shape of the places for sums: a cluster's subgroup sends all of its sums together."""
        if self.cluster > 1:
            return f"{self._turns}x{senders}x{self.sums(spec)}"
        return f"{self.sums(spec)}x{self.rows}x{senders}"

    @property
    def _turns(self) -> int:
        """How many rows' sums have places of their own: in a cluster, those of two in a walk."""
        return 2 if self.walks and self.cluster > 1 else 1

    def _slot_elements(self, spec: NormSpec) -> int:
        """Elements that there is room for in a slot: of the rows, and beside them."""
        of_line = _LINE_BYTES // bytes_of(spec.dtype)
        rows = (self.rows - 1) * spec.columns + self.own_columns(spec)
        return -(-(rows + 2 * self.vector) // of_line) * of_line + of_line

    def aliases(self, spec: NormSpec, target: Target) -> dict[str, str]:
        """What it is in the text of a module."""
        vector, chunks, warps = self.vector, self.chunks, self.warps(target)
        senders = warps * self.cluster
        is_forward = not spec.family.is_backward
        few, many = self.forms(spec)[0], self.forms(spec)[-1]
        shifted, cells = self.shifted(spec), ("x", "residual")
        accesses = 2 if shifted else 1
        named = ("x", "residual", "gamma", "beta")
        return {
            "#forward_columns": f"{self.own_columns(spec)} : index",
            "#forward_parts_alike": flag(self.cluster * self.own_columns(spec) == spec.columns),
            "#forward_cluster": f"{self.cluster} : index",
            "#forward_in_clusters": flag(self.cluster > 1),
            "#forward_senders": f"{senders} : index",
            "#forward_received": f"{-(-senders // target.subgroup_size)} : index",
            "#forward_sent_bytes": f"{senders * self.sums(spec) * _SUM_BYTES} : i32",
            "#forward_vector": f"{vector} : index",
            "#forward_chunks": f"{chunks} : index",
            "#forward_shifted": flag(shifted),
            "#forward_rereads": flag(many.rereads and not many.copies),
            "#forward_copies_again": flag(many.rereads and many.copies),
            "#forward_walks": f"{many.walks} : index",
            "#forward_meets": flag(self._meets(spec, target)),
            "#forward_copies": flag(many.copies),
            "#forward_stages_weights": flag(many.stages_weights),
            "#forward_slots": f"{many.slots} : index",
            "#forward_bytes_of_sender": f"{self.sums(spec) * _SUM_BYTES} : index",
            "#forward_line": f"{_LINE_BYTES // bytes_of(spec.dtype)} : index",
            "#forward_copies_first": f"{self._turns if self.cluster > 1 else 0} : index",
            "#few_walks": "0 : index",
            "!forward_staged": shared(
                f"{self.slots}x1x{self._slot_elements(spec) if self.copies else self.vector}x!x"
            ),
            **({"!mbarriers": shared(f"{self._turns + self.slots}xi64")} if self.walks else {}),
            **{
                f"!forward_{name}_staged": shared(f"{self._staged}x{vector}x!{name}")
                for name in ("gamma", "beta")
            },
            "#forward_accesses": f"{accesses} : index",
            "#forward_residual_from": f"{int(shifted and spec.gate is not None)} : index",
            **(self._shifted_aliases(spec) if shifted else {}),
            "#forward_threads": f"{self.threads} : index",
            "#forward_warps": f"{warps} : index",
            "#forward_rows": f"{self.rows} : index",
            "#forward_steps": f"{self.steps(spec)} : index",
            "#forward_span": f"{self.span(spec)} : index",
            "#forward_whole": flag(self.whole(spec)),
            "#forward_in_registers": flag(self.in_registers),
            "#forward_in_shared_memory": flag(self.in_shared_memory),
            "#forward_weights_early": flag(many.early),
            "#forward_lasts": flag(many.lasts),
            "#forward_ahead": f"{many.ahead} : index",
            "#forward_x_of_16": f"{_WHOLE_BYTES // bytes_of(spec.dtype)} : index",
            "#forward_residual_of_16": f"{_WHOLE_BYTES // itemsize(spec, _beside_x(spec))} : index",
            "#forward_packs": flag(many.packs),
            "!forward_thread": "vector<8xindex>",
            "#forward_resident": f"{many.resident} : i32",
            "#few_weights_early": flag(few.early),
            "#few_lasts": flag(few.lasts),
            "#few_ahead": f"{few.ahead} : index",
            "#few_packs": flag(few.packs),
            "#few_rereads": flag(few.rereads),
            "#few_resident": f"{few.resident} : i32",
            "#scales": flag(spec.has_weight and is_forward),
            "#forward_kernel": kernel(self.rows * self.threads, target),
            "!forward_exchange": shared(f"{self._exchange(spec, senders)}x!acc"),
            "!forward_sent": f"vector<{_SUMS_OF_CLUSTERS}x!acc>",
            "!forward_warps": f"vector<{warps}x!acc>",
            "!forward_chunk": f"vector<{vector}x!acc>",
            "!forward_held": private(f"{chunks}x!forward_chunk"),
            **{f"!forward_{name}": f"vector<{vector}x!{name}>" for name in named},
            **{f"!forward_{name}_rows": self._rows(spec, name) for name in cells},
            **output_types(
                spec,
                {
                    "!forward_y": f"vector<{vector}x!y>",
                    "!forward_y_rows": self._rows(spec, "y"),
                },
            ),
            **{f"!forward_{name}_held": private(f"{chunks}x!forward_{name}") for name in named},
            **{
                f"!forward_{name}_held": private(f"{accesses * chunks}x!forward_{name}")
                for name in cells
            },
            **{
                f"!forward_{name}_kept": shared(f"{self.rows}x{self.padded_columns(spec)}x!{name}")
                for name in cells
            },
        }

    def _rows(self, spec: NormSpec, name: str) -> str:
        """A tensor of rows in memory: as rows, or as accesses."""
        return storage(f"?x{self.vector}x!{name}") if self.shifted(spec) else f"!{name}_rows"

    def _shifted_aliases(self, spec: NormSpec) -> dict[str, str]:
        """What rows that begin anywhere in an access need beside."""
        of_last = spec.columns - (self.cluster - 1) * self.own_columns(spec)
        last = of_last // self.vector  # the chunk with the row's last column
        of_thread = [
            min(last + on, self.chunks * self.threads - 1) // self.threads for on in (-1, 0, 1)
        ]
        return {
            "#forward_unit": f"{math.gcd(self.vector, spec.columns)} : index",
            "#forward_last_chunk": f"{of_thread[1]} : index",
            "#forward_first_edge": f"{of_thread[0]} : index",
            # Threads without a chunk are there, too: those of other workgroups may have more.
            "#forward_last_edge": f"{max(of_thread[2], self.chunks - 1)} : index",
        }

    def fits(self, spec: NormSpec, target: Target) -> bool:
        """Whether it is legal, and a multiprocessor has room in shared memory for ``resident``."""
        has_room = have_room(self.resident, self.shared_bytes(spec, target), target)
        return has_room and self.illegal(spec, target) is None

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if why := out_of_bounds(self):
            return why
        lanes, threads = target.subgroup_size, self.rows * self.threads
        shared = self.shared_bytes(spec, target)
        rules = (
            (
                spec.gate is not None and self.in_shared_memory,
                "a gated row is not kept in shared memory",
            ),
            (target.backend == "cpu", "workgroups of threads need a GPU"),
            (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
            (threads % lanes != 0, f"{threads} threads, in subgroups of {lanes}"),
            (self.threads < FEWEST_THREADS, f"a row has at least {FEWEST_THREADS} threads"),
            (
                self.threads % lanes != 0
                and (self.threads > lanes or self.threads & (self.threads - 1) != 0),
                f"{self.threads} threads are neither subgroups nor a power of 2 of a subgroup's",
            ),
            *(self._shifted_rules(spec, target) if self.shifted(spec) else ()),
            *cluster_rules(spec, target, self.cluster, self.vector, self.rows),
            resident_rule(self.resident, threads),
            (
                self.chunks * self.vector > most_elements(spec),
                f"more than {most_elements(spec)} elements of a row to a thread at once",
            ),
            (
                self.in_registers and self.steps(spec) > 1,
                "the registers of a row's threads cannot hold it",
            ),
            (
                self.in_registers and self.in_shared_memory,
                "a row stays in registers or in shared memory, not in both",
            ),
            (
                self.packs
                and (
                    not self.in_registers
                    or spec.has(RESIDUAL)
                    or spec.gate_first
                    or bytes_of(normalized(spec)) >= WORD_BYTES
                ),
                "only a narrow row of one tensor, in registers, is kept narrow",
            ),
            (not self.reads_once and self.rows > 1, "a workgroup reads a single row again"),
            (
                self.rereads and (not self.shifted(spec) or spec.has(RESIDUAL)),
                "only rows of one tensor that begin anywhere in an access are read once more",
            ),
            (
                (self.early or self.most_few_rows > 0) and not self.in_registers,
                "a row that is not in registers has its weights in steps",
            ),
            (
                self.most_few_rows > 0 and not self._differs_for_few_rows(spec, target),
                "few rows would have the kernel that many have",
            ),
            (
                self.ahead > 0 and not target.has_bulk_copies,
                "rows are fetched ahead by cp.async.bulk.prefetch",
            ),
            *(self._walk_rules(spec, target) if self.walks else ()),
            (
                self.stages_weights and not self.walks,
                "weights stay in shared memory where workgroups walk over rows",
            ),
            (self.ahead > 0 and spec.strided_rows, "rows that are apart are not fetched ahead"),
            (
                shared > target.shared_bytes,
                f"{shared} bytes of shared memory, at most {target.shared_bytes}",
            ),
        )
        return first_broken(rules)

    def _differs_for_few_rows(self, spec: NormSpec, target: Target) -> bool:
        """Whether the two kernels are two: IREE keeps one of two whose code is the same."""
        few, *others = self.forms(spec)
        accesses = [
            self.vector * itemsize(spec, one.element)
            for one in (INPUT, RESIDUAL)
            if one is INPUT or spec.has(one)
        ]
        lasts = target.has_cache_policies and any(size % WORD_BYTES == 0 for size in accesses)
        return all(few != replace(many, lasts=many.lasts and lasts) for many in others)

    def _walk_rules(self, spec: NormSpec, target: Target) -> tuple[Rule, ...]:
        """The rules for workgroups that walk over the rows."""
        one = "workgroups walk over rows "
        phases = self.vector // math.gcd(self.vector, spec.columns)
        return (
            (self.copies and not target.has_bulk_copies, "cp.async.bulk"),
            (
                spec.gate is not None or (spec.has(RESIDUAL) and self.copies),
                f"{one}of one tensor",
            ),
            (spec.weight_sets, f"{one}that have one weight"),
            (spec.strided_rows, f"{one}that follow each other"),
            (not self.in_registers or not self.early, f"{one}in registers, with early weights"),
            (
                self.copies and self.vector * bytes_of(spec.dtype) != _WHOLE_BYTES,
                f"{one}in accesses of 16 bytes",
            ),
            (
                self.walks % self.rows != 0 or self.walks % phases != 0,
                f"{self.walks} rows at once, in {phases} phases and sets of {self.rows}",
            ),
        )

    def _shifted_rules(self, spec: NormSpec, target: Target) -> tuple[Rule, ...]:
        """The rules for rows that begin anywhere in an access."""
        of_last = spec.columns - (self.cluster - 1) * self.own_columns(spec)
        kinds = (Kind.CELLS, Kind.COLUMNS)
        sizes = [itemsize(spec, one.element) for one in spec.family.rows if one.kind in kinds]
        words = [self.vector * size / WORD_BYTES for size in sizes]
        alone = f"N is no multiple of {self.vector}, and "
        return (
            (target.backend != "cuda", f"{alone}the GPU is none of NVIDIA's"),
            (spec.weight_sets, f"{alone}the weight has sets"),
            (spec.strided_rows, f"{alone}rows are apart"),
            (spec.gate_first, f"{alone}the gate is before the norm"),
            (not self.in_registers, f"{alone}the row is not in registers"),
            (self.vector & (self.vector - 1) != 0, f"{alone}that is no power of 2"),
            (
                min(words) < _LEAST_CUT_WORDS or max(words) > _MOST_CUT_WORDS,
                f"{alone}accesses have other sizes",
            ),
            (of_last < 2 * self.vector, f"{alone}a part of a row has less than two accesses"),
        )


def weighs(spec: NormSpec) -> bool:
    """Whether weights are read with the rows."""
    return (spec.has(WEIGHT) or spec.has(ADDED_BIAS)) and not spec.family.is_backward


def bytes_of_weights(spec: NormSpec) -> int:
    """Of the weight and the bias of a column."""
    weights = ((WEIGHT, Element.GAMMA), (ADDED_BIAS, Element.BETA))
    return sum(itemsize(spec, element) for given, element in weights if spec.has(given))


def normalized(spec: NormSpec) -> str:
    """Element type of what is normalized: the input, or its stored sum with the residual."""
    return spec.element_type((RESIDUAL if spec.has(RESIDUAL) else INPUT).element)


def _beside_x(spec: NormSpec) -> Element:
    """What is read beside x, if anything is: a residual, or a gate in its place."""
    return Element.RESIDUAL if spec.gate is None else Element.GATE


def bytes_of(dtype: str) -> int:
    """Of an element."""
    return DTYPES[dtype].numpy.itemsize
