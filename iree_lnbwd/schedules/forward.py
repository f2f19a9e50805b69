"""The schedule of the forwards on a GPU, and of statistics that a backward recomputes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.operands import ADDED_BIAS, INPUT, RESIDUAL, WEIGHT
from iree_lnbwd.products import Product
from iree_lnbwd.schedules.elements import most_elements, widest_vector, words
from iree_lnbwd.schedules.rules import BELOW_ONE, first_broken
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

# Rules for all GPUs, from an H200; the widths were 128 to 16384.
# 32-bit words of a row that a thread has, in the type of sums; the first that leaves a row few
# enough threads counts. The last is as many as there may be.
_WORDS = ((8, 512), (16, 512), (32, 512))
_NARROW_WORDS = ((16, 256), (32, 512))  # if elements have 16 bits: fewer threads load as many bytes
_CENTRED_WORDS = ((16, 128), (32, 512))  # and there are two sums, which each thread loads
_SINGLE_WORDS = 16  # at least, if accesses are of one element
_BUSY = 1024  # threads of a multiprocessor that there should be at once, which caps their registers
_BUSIER = 1536  # likewise, of a biased row that has few words in each
_EARLY_COLUMNS = 2048  # up to which rows of 32 bits are always loaded with their weights
_EARLY_ROWS = 256  # up to which a call's other rows are
_EARLY_ELEMENTS = 1 << 20  # likewise
_MOST_THREADS = 1024  # that share a row that is not in registers
_WARPS = 4  # subgroups of a workgroup whose rows are narrow
_LEAST_THREADS = 4  # of a row that has so many accesses: fewer load too few bytes side by side
_SHARED_BYTES = 1 << 16  # of a wide row without a residual; of a wider one, too few fit

_FEWEST_THREADS = 2  # of a row: a sum over one thread is none
_WORD_BYTES = 4


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
        early_rows: In calls of at most so many rows, weights are loaded with the row, before its
            sums; None if in all calls. Otherwise each is loaded when it is used, so that registers
            are free for more workgroups meanwhile.
        resident: Workgroups that a multiprocessor must hold at once; caps their registers.
    """

    rows: int
    threads: int
    vector: int
    chunks: int
    keeps: bool
    shares: bool = False
    early_rows: int | None = 0
    resident: int = 1

    @property
    def path(self) -> str:
        """Its use of memory, in words."""
        kept = "once, and kept in " + ("registers" if self.keeps else "shared memory")
        read = kept if self.keeps or self.shares else "again for each sum and for the output"
        weights = "with the row" if self.early_rows is None else "after its sums"
        return (
            f"one kernel: rows are read {read}; weights are read {weights}; workgroups of "
            f"{self.rows} x {self.threads} threads, {self.vector} elements an access"
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

    def forms(self, spec: NormSpec) -> tuple[Forward, ...]:
        """Its kernels; M decides which a call takes. If there are two, few rows' is first.

        Each loads the weights of all rows or of none with the row.
        """
        if self.early_rows in (0, None):
            return (self,)
        few = replace(self, early_rows=None, resident=1)
        many = replace(self, early_rows=0)
        if spec.rows is None:
            return (few, many)
        return (few if spec.rows <= (self.early_rows or 0) else many,)

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
        row = self.padded_columns(spec) * _bytes_of(_normalized(spec))
        return self.rows * (exchange + (row if self.shares else 0))

    def illegal(self, spec: NormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        least = min(self.rows, self.threads, self.vector, self.chunks, self.resident)
        if least < 1 or (self.early_rows or 0) < 0:
            return BELOW_ONE
        lanes, threads = target.subgroup_size, self.rows * self.threads
        shared = self.shared_bytes(spec, target)
        rules = (
            (target.backend == "cpu", "workgroups of threads need a GPU"),
            (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
            (threads % lanes != 0, f"{threads} threads, in subgroups of {lanes}"),
            (self.threads < _FEWEST_THREADS, f"a row has at least {_FEWEST_THREADS} threads"),
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
                self.early_rows != 0 and not self.keeps,
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
    elements of each thread, as long as registers hold them; then it is kept in shared memory, and
    the widest is read again.

    How a row is shared out among threads follows from what is normalized, with a residual their
    sum, and from the op. So the sums of a row have one order and the same bits, whether the
    residual is fused or added before, and for any M.

    Args:
        spec: What is computed; a forward, or a backward that recomputes its statistics.
        target: The GPU target to run on.
        product: One of the target's products: a fixed number of rows is spread over its processors.
    """
    vector = widest_vector(spec.columns, (_normalized(spec),))
    lanes, vectors = target.subgroup_size, spec.columns // vector
    shared_out = _shared_out(spec, vector)
    if shared_out is None:
        return _wide(spec, target, vector)
    words_of_thread, threads = shared_out
    threads = max(_FEWEST_THREADS, min(_LEAST_THREADS, vectors), threads)
    power_of_2, subgroups = 1 << (threads - 1).bit_length(), -(-threads // lanes)
    threads = power_of_2 if threads <= lanes else lanes * subgroups
    rows = max(1, _WARPS * lanes // threads)
    if spec.rows is not None:
        rows = min(rows, -(-spec.rows // product.processors))
    fill = max(1, lanes // threads)  # a subgroup
    rows = -(-rows // fill) * fill
    is_narrow, has_residual = _bytes_of(_normalized(spec)) < _WORD_BYTES, spec.has(RESIDUAL)
    is_biased = spec.has(ADDED_BIAS) and is_narrow
    busy = _BUSIER if is_biased and words_of_thread < most_elements(spec) else _BUSY
    early_rows: int | None = min(_EARLY_ROWS, _EARLY_ELEMENTS // spec.columns)
    if not is_narrow and (has_residual or spec.columns <= _EARLY_COLUMNS):
        early_rows = None
    if not (spec.has(WEIGHT) or spec.has(ADDED_BIAS)) or spec.family.is_backward:
        early_rows = 0
    return Forward(
        rows=rows,
        threads=threads,
        vector=vector,
        chunks=-(-vectors // threads),
        keeps=True,
        early_rows=early_rows,
        # f32 rows of two tensors take the registers that they need.
        resident=1 if has_residual and not is_narrow else max(1, busy // (rows * threads)),
    )


def _shared_out(spec: NormSpec, vector: int) -> tuple[int, int] | None:
    """Words of a thread, and the threads of a row; None if registers cannot keep it."""
    vectors = spec.columns // vector
    is_narrow = _bytes_of(_normalized(spec)) < _WORD_BYTES
    ladder = _WORDS if not is_narrow else _NARROW_WORDS
    if is_narrow and spec.family.centres:
        ladder = _CENTRED_WORDS
    for words_of_thread, most_threads in ladder:
        if vector == 1 and words_of_thread < _SINGLE_WORDS:
            continue
        of_thread = max(1, words_of_thread // words(spec) // vector)
        threads = -(-vectors // of_thread)
        if threads <= most_threads:
            return words_of_thread, threads
    return None


def _wide(spec: NormSpec, target: Target, vector: int) -> Forward:
    """For rows that registers cannot keep."""
    size = _bytes_of(_normalized(spec))
    fits = size < _WORD_BYTES and spec.columns * size <= _SHARED_BYTES
    threads = min(_MOST_THREADS, target.max_threads) // (2 if fits else 1)
    shared = _in_steps(spec, vector, threads, shares=True)
    if (fits or spec.has(RESIDUAL)) and shared.illegal(spec, target) is None:
        return shared
    return _in_steps(spec, vector, threads, shares=False)


def _in_steps(spec: NormSpec, vector: int, threads: int, *, shares: bool) -> Forward:
    """A row in as few steps as registers allow; it stays in shared memory, or is read again."""
    vectors = spec.columns // vector
    steps = -(-vectors // (threads * (most_elements(spec) // vector)))
    return Forward(
        rows=1,
        threads=threads,
        vector=vector,
        chunks=-(-vectors // (threads * steps)),
        keeps=False,
        shares=shares,
        resident=_BUSY // threads if shares else 1,
    )


def _normalized(spec: NormSpec) -> str:
    """Element type of what is normalized: the input, or its stored sum with the residual."""
    return spec.element_type((RESIDUAL if spec.has(RESIDUAL) else INPUT).element)


def _bytes_of(dtype: str) -> int:
    return DTYPES[dtype].numpy.itemsize
