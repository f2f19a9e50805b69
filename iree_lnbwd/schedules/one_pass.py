"""The schedule of one pass over memory: its parts, and when it is legal."""

from __future__ import annotations

from dataclasses import dataclass, replace

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import ADDED_BIAS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.ir_types import reads_more
from iree_lnbwd.schedules.one_pass_memory import OnePassMemory
from iree_lnbwd.schedules.one_pass_numbers import BULK_BYTES
from iree_lnbwd.schedules.partial_rows import partial_rows
from iree_lnbwd.schedules.rules import (
    FEWEST_THREADS,
    Rule,
    alike,
    cluster_rules,
    elements_rule,
    first_broken,
    gpu_rules,
    out_of_bounds,
    stride_rule,
    wait_by_themselves,
)

_MOST_MBARRIERS = 64  # of a workgroup: those that the emulator follows
_COPY_BYTES = (4, 8, 16)  # what cp.async can copy (PTX ISA, "cp.async": cp-size)
# Steps, at least, between a row's fetch and its dx, if the next row's sums come between the two.
AHEAD_OF_LATER_SUMS = 2
_SLOTS_IF_X_LATER = 2  # of dy; x has one


def _beside(spec: NormSpec) -> str:
    """What is read beside x and dy, in words."""
    return "other gradients of the output" if spec.gate is None else "the gate"


@dataclass(frozen=True)
class OnePass(OnePassMemory):
    """Workgroups walk over the rows and read each once (``ir/one_pass.mlir``).

    Its numbers are those of `iree_lnbwd.schedules.one_pass_numbers.OnePassNumbers`.
    """

    def path(self, spec: NormSpec) -> str:
        """Its use of memory, in words."""
        fetched = "copied by cp.async" if self.slots else "read"
        if self.bulk:
            later = ", x a step later than dy," if self.x_later else ""
            fetched = f"copied in bulk by each subgroup{later}"
        walkers = counted(self.workgroups, "workgroup")
        if self.cluster > 1:
            walkers = f"{counted(self.workgroups, 'cluster')} of {self.cluster} workgroups"
            walkers += " that post their sums in memory" if self.posts else ""
        ahead = f"{counted(self.ahead, 'step')} ahead" if self.ahead else "where they are used"
        shared = f" with {self.subgroup_rows} rows each" if self.subgroup_rows > 1 else ""
        across = " across the borders of rows" if self.shifted(spec) else ""
        later = ", sums received a row later" if self.defers else ""
        again = ", and again from the caches" if self.loads_twice else ""
        if self.loads_late:
            again += f"; {_beside(spec)} once, and again from the caches"
        return (
            f"one pass: x and dy are read once{again}; {walkers} of "
            f"{self.groups // self.subgroup_rows} x {self.warps} subgroups{shared}, rows {fetched} "
            f"{ahead}, {counted(self.vector, 'element')} an access{across}{later}"
        )

    def parts(self, spec: NormSpec, target: Target) -> tuple[str, ...]:
        """The files of ``ir/parts/`` that its kernel takes of those with the same functions."""
        at_use = "twice" if self.loads_twice else "registers"
        loads = "registers_ahead" if self.ahead else at_use
        fetch = "bulk" if self.bulk else "async" if self.slots else loads
        shifted = self.shifted(spec)
        kept = "twice" if self.loads_twice else "held"
        weight = "widened" if self.widens_weight else "copied" if self.stages_weight else kept
        bias = (
            "staged" if self.stages_bias(spec, target) else kept if spec.has(ADDED_BIAS) else "none"
        )
        whole = "workgroup" if self.warps > 1 else "subgroup"
        hides = self.loads_twice and target.backend == "rocm"
        sums = "memory" if self.posts else "cluster" if self.in_cluster else whole
        return (
            f"fetch/{fetch}",
            f"rows/{'shifted' if shifted else 'whole'}",
            f"places/{'hidden' if hides else 'known'}",
            f"begin/{'at_once' if shifted or self.bulk else 'in_two'}",
            f"weight/{weight}",
            f"bias/{bias}",
            f"inverse/{'staged' if self.stages_inverse(spec, target) else 'divided'}",
            f"sums/{sums}",
            f"partial_rows/{'groups' if self.groups > 1 else 'one_group'}",
        )

    def aliases(self, spec: NormSpec, target: Target) -> dict[str, str]:
        """What it is in the text of a module."""
        few = self.few_rows.aliases(spec, target, self.few_vector(spec)) if self.few_rows else {}
        return {
            **partial_rows(self, spec, target),
            **self.numbers(spec, target),
            **self.memory(spec, target),
            **few,
        }

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        # The other rules divide by what these are about.
        if why := out_of_bounds(self) or first_broken(self._rules_of_threads(spec, target)):
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
                spec.weight_sets and self.shifted(spec),
                f"N is no multiple of {self.vector}, and rows of a set begin anywhere in an access",
            ),
            (
                spec.strided_rows and self.shifted(spec),
                f"N is no multiple of {self.vector}, and rows begin anywhere in an access",
            ),
            (
                spec.strided_rows
                and self.bulk
                and spec.columns % max(self.of_16(d) for d in (spec.dy_dtype, spec.dtype)) != 0,
                "strided rows that are no whole 16 bytes are not copied in bulk",
            ),
            (
                spec.weight_sets and self.few_rows is not None,
                "few rows have one weight, and the spec has sets",
            ),
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
                self.bulk and self.vector & (self.vector - 1) != 0,
                f"shared memory is read by {self.vector} elements, which are no power of 2",
            ),
            (
                # Of the last row alone may elements be left that no copy has.
                self.bulk
                and spec.columns < max(self.of_16(d) for d in (spec.dy_dtype, spec.dtype)),
                f"a row is less than {BULK_BYTES} bytes, which bulk copies have",
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
            *cluster_rules(spec, target, self.cluster, self.vector, self.groups, posts=self.posts),
            (self.defers and self.cluster == 1, "only clusters receive sums later"),
            (self.posts and self.cluster == 1, "a row of one workgroup has nobody to post sums to"),
            (self.posts and self.bulk, "only shared memory tells of sums and of copies in bulk"),
            (self.posts and spec.weight_sets, "clusters that post sums have one weight"),
            (
                self.defers and not (self.rereads and self.ahead >= AHEAD_OF_LATER_SUMS),
                "a row whose sums are received later is read again, and fetched "
                f"{AHEAD_OF_LATER_SUMS} rows ahead",
            ),
            (
                reads_more(spec) and self.defers and not self.loads_late,
                "of other gradients of the output, and of a gate, only the next row is there",
            ),
            (self.loads_twice and self.ahead > 0, "a row that is loaded twice is not loaded ahead"),
            (
                self.loads_twice and spec.gate is not None and not self.loads_late,
                "a gate is in registers, which have no room beside the sums of so wide a row",
            ),
            (
                self.loads_late and not (self.rereads and reads_more(spec)),
                "other gradients, or a gate, are loaded late where rows are read again",
            ),
            (copies_weight and not self.slots, "the weight is copied with the first row"),
            (self.widens_weight and not self.stages_weight, "a weight in registers is not widened"),
            (self.widens_weight and not self.ahead, "the weight is widened before the first row"),
            elements_rule(spec, self.chunks(spec, target) * self.vector),
            stride_rule(
                self.workgroups
                * self.groups
                * (self.known_rows if spec.weight_sets else self.ahead + 1)
            ),
        )
        why = first_broken(rules)
        if why is None and self.few_rows:
            why = self.few_rows.illegal(spec, target, self.few_vector(spec))
            return why and f"few rows: {why}"
        return why

    def all_at_once(self, columns: int, product: Product) -> OnePass:
        """The same, with as many workgroups as a product runs at once."""
        walkers = product.walkers(self.resident, self.cluster)
        return replace(self, workgroups=alike(walkers, self.groups * columns, self.vector))

    def _rules_of_threads(self, spec: NormSpec, target: Target) -> tuple[Rule, ...]:
        lanes = target.subgroup_size
        return (
            *gpu_rules(spec, target, self, self.groups * self.threads(target)),
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
