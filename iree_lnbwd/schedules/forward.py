"""The schedule of the forwards on a GPU, and of statistics that a backward recomputes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import INPUT, RESIDUAL
from iree_lnbwd.products import Product
from iree_lnbwd.schedules.elements import most_elements, widest_vector, words
from iree_lnbwd.schedules.rules import BELOW_ONE, first_broken
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

# Rules of thumb.
_WORDS = 16  # 32-bit words of a row that a thread has, in the type of sums, if rows are not wide
# Such words that a thread keeps, and one for each access: with more, ptxas or LLVM spills some.
_MOST_KEPT = 40
_MOST_WARPS = 16  # subgroups that share a row
_THREADS = 256  # of a workgroup whose rows are narrow
_LEAST_THREADS = 2  # of a row: a sum over one thread is none


@dataclass(frozen=True)
class Forward:
    """One kernel that normalizes rows, and saves their statistics (``ir/forward.mlir``).

    Attributes:
        rows: Rows of a workgroup; each has a group of threads.
        threads: Of a group: several subgroups, or a power of 2 of threads of one subgroup.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread loads at once.
        keeps: Rows stay in registers.
        shares: Rows stay in shared memory. If they stay nowhere, they are read again for each sum
            and for the output.
        weights_early: Weights are loaded with the row, before its sums; otherwise when they are
            used, so that registers are free for more workgroups meanwhile.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
    """

    rows: int
    threads: int
    vector: int
    chunks: int
    keeps: bool
    shares: bool = False
    weights_early: bool = False
    resident: int = 1

    @property
    def path(self) -> str:
        """Its use of memory, in words."""
        kept = "once, and kept in " + ("registers" if self.keeps else "shared memory")
        read = kept if self.keeps or self.shares else "again for each sum and for the output"
        return (
            f"one kernel: rows are read {read}; workgroups of {self.rows} x {self.threads} "
            f"threads, {self.vector} elements an access"
        )

    def steps(self, spec: NormSpec) -> int:
        """How many times the threads of a row load ``chunks`` vectors each to see all of it."""
        return -(-spec.columns // self._step)

    @property
    def _step(self) -> int:
        """Columns that the threads of a row load at once."""
        return self.vector * self.threads * self.chunks

    def padded_columns(self, spec: NormSpec) -> int:
        """Columns that the steps of a row cover."""
        return self.steps(spec) * self._step

    def span(self, spec: NormSpec) -> int:
        """Steps that are summed at a time, so that a sum has about as many terms as there are."""
        return max(1, math.isqrt(self.steps(spec) // self.chunks))

    def whole(self, spec: NormSpec) -> bool:
        """Whether every thread has all of its vectors in every step."""
        return spec.columns % self._step == 0

    def warps(self, target: Target) -> int:
        """Subgroups that share a row."""
        return -(-self.threads // target.subgroup_size)

    def cluster(self, target: Target) -> int:
        """Threads of a subgroup that share a row."""
        return min(self.threads, target.subgroup_size)

    def shared_bytes(self, spec: NormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup."""
        warps = self.warps(target)
        exchange = 2 * warps * DTYPES[spec.acc_dtype].numpy.itemsize if warps > 1 else 0
        kept = RESIDUAL if spec.has(RESIDUAL) else INPUT  # of their sum, the residual's type
        row = self.padded_columns(spec) * DTYPES[spec.element_type(kept.element)].numpy.itemsize
        return self.rows * (exchange + (row if self.shares else 0))

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        least = min(self.rows, self.threads, self.vector, self.chunks, self.resident)
        if least < 1:
            return BELOW_ONE
        lanes, threads = target.subgroup_size, self.rows * self.threads
        shared = self.shared_bytes(spec, target)
        rules = (
            (target.backend == "cpu", "workgroups of threads need a GPU"),
            (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
            (threads % lanes != 0, f"{threads} threads, in subgroups of {lanes}"),
            (self.threads < _LEAST_THREADS, "a row has at least two threads"),
            (
                self.threads % lanes != 0
                and (self.threads > lanes or self.threads & (self.threads - 1) != 0),
                f"{self.threads} threads are neither subgroups nor a power of 2 of a subgroup's",
            ),
            (spec.columns % self.vector != 0, f"N is no multiple of {self.vector}"),
            (
                self.chunks * self.vector > most_elements(spec),
                f"more than {most_elements(spec)} elements of a row to a thread at once",
            ),
            (self.keeps and self.steps(spec) > 1, "the threads of a row cannot keep it"),
            (self.keeps and self.shares, "a row is kept in one place"),
            (not (self.keeps or self.shares) and self.rows > 1, "several rows are kept"),
            (
                self.weights_early and not self.keeps,
                "a row that is not kept has its weights in steps",
            ),
            (
                shared > target.shared_bytes,
                f"{shared} bytes of shared memory, at most {target.shared_bytes}",
            ),
        )
        return first_broken(rules)


def choose_forward(spec: NormSpec, target: Target, product: Product) -> Forward:
    """A schedule that follows from rules: for any N, and for a backward's statistics, too.

    A thread has the elements of a few accesses. A wide row takes more subgroups, and then more
    elements of each thread, as long as registers hold them.

    Args:
        spec: What is computed; a forward, or a backward that recomputes its statistics.
        target: The GPU target to run on.
        product: One of the target's products: a fixed number of rows is spread over its processors.
    """
    dtypes = [spec.dtype]
    if spec.has(RESIDUAL):
        dtypes.append(spec.element_type(RESIDUAL.element))
    vector = widest_vector(spec.columns, dtypes)
    lanes, vectors = target.subgroup_size, spec.columns // vector
    few = max(1, _WORDS // words(spec) // vector)
    threads = -(-vectors // few)
    if threads <= lanes:
        threads = max(_LEAST_THREADS, 1 << (threads - 1).bit_length())
    else:
        threads = lanes * min(_MOST_WARPS, -(-threads // lanes))
    chunks = -(-vectors // threads)
    keeps = chunks * (vector * words(spec) + 1) <= _MOST_KEPT
    rows = max(1, _THREADS // threads)
    if spec.rows is not None:
        rows = min(rows, -(-spec.rows // product.processors))
    fill = max(1, lanes // threads)  # a subgroup
    return Forward(
        rows=-(-rows // fill) * fill if keeps else 1,
        threads=threads,
        vector=vector,
        chunks=chunks if keeps else few,
        keeps=keeps,
    )
