"""How a spec is computed on a target: which form of the IR, and its numbers.

A schedule is a value of its own. It is legal for a spec and a target or it is not, by the rules
below, and an illegal one is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from math import gcd
from typing import Any, TypeVar

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target
from iree_lnbwd.tuning import TUNED

_ACCESS_BYTES = 16  # the widest global access that GPUs have
_COPY_BYTES = (4, 8, 16)  # what cp.async can copy
_WARPS_OF_A_PROCESSOR = 16
_WORDS_IN_REGISTERS = 24  # of a row, a thread's, 32 bits each; beyond it registers spill
_MOST_WORDS = 32  # of each of its two sums that a thread holds
# Steps ahead, slots, and whether the weight is staged; best first.
_FETCHES = ((2, 3, True), (1, 2, True), (1, 2, False))
_WIDE_FETCHES = ((1, 2, False), (1, 1, False))
_WIDE_VECTOR = 4  # elements; more of them at a time spill, and store partial rows in half lines
_QUARTERS = 4
_REGISTERS_OF_A_THREAD = 255
_REGISTERS_FIXED = {"cuda": 40, "rocm": 64}  # AMD's hold addresses, of 64 bits, for each lane
_DIRECT_THREADS = 256
_LEAST_DIRECT_THREADS = 192
_DIRECT_WORKGROUPS = 4
_MOST_FEW_ROWS = 1024
_FEW_THREADS = 512
_FEW_TILES = (32, 64, 128)  # columns
_FEW_VECTOR = 4  # of them
_BANKS = 32  # of shared memory, of 4 bytes
_MOST_SLICES = 32
_FEW_SLICES = 8
_MOST_FINALIZE_ROWS = 16  # in a thread's registers
_FINALIZE_THREADS = 384
_MOST_FINALIZE_COLUMNS = 128
_SECTOR_COLUMNS = 16  # 64 bytes
_STATISTICS_CHUNKS = 4
_MOST_STATISTICS_WARPS = 16
_TWO_PASS_WORKGROUPS = 2  # to a multiprocessor
_MOST_TWO_PASS_CHUNKS = 8
_CPU_WORKGROUPS = 64  # enough for many threads, few enough for their partial rows to be cheap
_BLOCK_ROWS = ((1 << 14, 1), (1 << 18, 2))  # up to so many bytes of column sums
_MOST_BLOCK_ROWS = 4
_CHUNK_OVERHEAD = 8  # elements' worth
_IREE_ALIGNMENT = 64  # IREE_HAL_HEAP_BUFFER_ALIGNMENT: what the CPU code that it generates assumes


@dataclass(frozen=True)
class WholeTensors:
    """The algorithm as it is: IREE tiles and fuses it by itself. Right for every spec.

    Attributes:
        reason: Why nothing better was chosen; empty where this is the best there is.
    """

    reason: str = ""

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        why = f" ({self.reason})" if self.reason else ""
        return f"whole tensors: x and dy are read for the row sums, for dx and for the columns{why}"


@dataclass(frozen=True)
class FewRows:
    """One kernel without partial rows, for calls of few rows (``ir/few_rows.mlir``).

    Workgroups for tiles of columns run beside a workgroup for each row.

    Attributes:
        rows: The most rows that it is launched for.
        warps: Subgroups in a workgroup.
        tile: Columns that a workgroup sums over all rows.
        tile_vector: Neighbours among them that a thread handles together.
    """

    rows: int
    warps: int
    tile: int
    tile_vector: int

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        return (
            "one kernel: x and dy are read for dx, and again for the columns; a workgroup of "
            f"{self.warps} subgroups for each row and one for each {self.tile} columns"
        )

    def threads(self, target: Target) -> int:
        """Of a workgroup."""
        return self.warps * target.subgroup_size

    def chunks(self, spec: LayerNormSpec, target: Target, vector: int) -> int:
        """How many vectors of a row each thread has."""
        return -(-spec.columns // (vector * self.threads(target)))

    def slices(self, target: Target) -> int:
        """Slices of the rows that the threads of a tile sum side by side."""
        return self.threads(target) * self.tile_vector // self.tile

    def parts(self, target: Target) -> int:
        """Threads that share each of a tile's sums over the slices."""
        return self.threads(target) // (2 * self.tile)

    def padded_tile(self, target: Target) -> int:
        """Elements from a slice to the next in shared memory: parts use banks of their own."""
        return self.tile + _BANKS // self.parts(target)

    def shared_bytes(self, spec: LayerNormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup, of either kind."""
        acc = DTYPES[spec.acc_dtype].numpy.itemsize
        sums = 2 * self.slices(target) * self.padded_tile(target)
        return (sums + 2 * self.warps) * acc

    def illegal(self, spec: LayerNormSpec, target: Target, vector: int) -> str | None:
        """Why it cannot be compiled; None where it can.

        Args:
            spec: What is computed.
            target: Where.
            vector: Neighbouring elements of a row that a thread handles together.
        """
        if min(astuple(self)) < 1:
            return "a number below 1"
        threads = self.threads(target)
        powers = (self.warps, self.tile, self.tile_vector)
        rules = (
            (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
            (self.warps > target.subgroup_size, "more subgroups than lanes"),
            (any(n & (n - 1) for n in powers), "warps, tile and tile_vector are powers of 2"),
            (vector % self.tile_vector != 0, f"{self.tile_vector} columns do not divide {vector}"),
            (self.tile < self.tile_vector, f"{self.tile_vector} columns of a tile of {self.tile}"),
            (
                not 4 * self.tile <= threads <= 2 * self.tile * target.subgroup_size,
                f"{threads} threads for {2 * self.tile} sums",
            ),
            (
                self.chunks(spec, target, vector) * vector > _most_elements(spec),
                f"more than {_most_elements(spec)} elements of a row to a thread",
            ),
        )
        why = next((why for broken, why in rules if broken), None)
        if why is not None:
            return why
        shared = self.shared_bytes(spec, target)
        if shared > target.shared_bytes:
            return f"{shared} bytes of shared memory, at most {target.shared_bytes}"
        return None


@dataclass(frozen=True)
class OnePass:
    """Workgroups walk over the rows and read each once (``ir/one_pass.mlir``).

    Attributes:
        workgroups: How many walk; also the number of partial rows that are added up at the end.
        groups: Groups of threads in a workgroup; each works on a row of its own.
        warps: Subgroups in a group.
        vector: Neighbouring elements that a thread handles together.
        ahead: Steps between a row's fetch and its use.
        slots: Rows of a group that shared memory holds, where cp.async copies them to: one more
            than are ahead, or as many (in place: a chunk's slot is refilled once its dx is stored).
            With 0, rows are loaded into registers, at most one ahead.
        rereads: Take rows from shared memory again for dx instead of keeping them in registers.
        stages_weight: Keep the weight in shared memory instead of in registers.
        widens_weight: Keep it there in the type of the sums.
        resident: Workgroups that shall fit a multiprocessor at once; caps their registers.
        finalize_slices: Slices of the partial rows that threads of the last kernel add up.
        finalize_rows: Partial rows that such a thread reads at once.
        finalize_columns: Of a workgroup of that kernel.
        few_rows: How few rows are computed; None where they are like any others.
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
    finalize_slices: int = 8
    finalize_rows: int = 8
    finalize_columns: int = 32
    few_rows: FewRows | None = None

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        fetched = "copied by cp.async" if self.slots else "read"
        ahead = f"{self.ahead} steps ahead" if self.ahead else "where they are used"
        return (
            f"one pass: x and dy are read once; {self.workgroups} workgroups of {self.groups} x "
            f"{self.warps} subgroups, rows {fetched} {ahead}, {self.vector} elements an access"
        )

    @property
    def in_place(self) -> bool:
        """A row's slot is refilled while its dx is computed."""
        return 0 < self.slots == self.ahead

    def threads(self, target: Target) -> int:
        """Of one group."""
        return self.warps * target.subgroup_size

    def chunks(self, spec: LayerNormSpec, target: Target) -> int:
        """How many vectors of a row each thread has."""
        return -(-spec.columns // (self.vector * self.threads(target)))

    def padded_columns(self, spec: LayerNormSpec, target: Target) -> int:
        """Columns that a group's threads cover."""
        return self.chunks(spec, target) * self.vector * self.threads(target)

    def row_bytes(self, spec: LayerNormSpec, target: Target) -> tuple[int, int]:
        """Shared memory for rows of dy and of x; in dy's the groups' sums meet at the end."""
        columns = self.groups * self.padded_columns(spec, target)
        dy, x, acc = (
            DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype, spec.acc_dtype)
        )
        sums = columns * acc if self.groups > 1 else 0
        return max(sums, self.slots * columns * dy), self.slots * columns * x

    def shared_bytes(self, spec: LayerNormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup."""
        acc, gamma = (DTYPES[name].numpy.itemsize for name in (spec.acc_dtype, spec.gamma_dtype))
        exchange = 2 * self.groups * self.warps * 2 * acc if self.warps > 1 else 0
        weight = self.groups * self.padded_columns(spec, target) if self.stages_weight else 0
        weight *= acc if self.widens_weight else gamma
        return exchange + weight + sum(self.row_bytes(spec, target))

    def registers(self, spec: LayerNormSpec, target: Target) -> float:
        """Of a thread, about, from what ptxas reports: two accumulators, the row, the weight."""
        dy, x, gamma = (
            DTYPES[name].numpy.itemsize / 4
            for name in (spec.dy_dtype, spec.dtype, spec.gamma_dtype)
        )
        an_element = (2.0 if self.rereads else 4.0) * _words(spec)
        if not (self.stages_weight or self.rereads):
            an_element += gamma
        if self.ahead and not self.slots:
            an_element += dy + x
        return (
            _REGISTERS_FIXED[target.backend] + self.chunks(spec, target) * self.vector * an_element
        )

    def registers_available(self, target: Target) -> int:
        """To a thread, where as many workgroups fit a multiprocessor as shall.

        Each of its quarters has a quarter of the registers, and gives them out in eights.
        """
        warps = -(-self.groups * self.warps * self.resident // _QUARTERS)
        share = target.registers // _QUARTERS // (warps * target.subgroup_size)
        return min(_REGISTERS_OF_A_THREAD, share // 8 * 8)

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if _least(self, "groups") < 1:
            return "a number below 1"
        shared = self.shared_bytes(spec, target)
        most_ahead = self.slots if self.slots else 1
        copies_weight = self.stages_weight and not self.widens_weight
        copied = [
            DTYPES[name].numpy.itemsize
            for name in self.slots * [spec.dy_dtype, spec.dtype]
            + copies_weight * [spec.gamma_dtype]
        ]
        rules = (
            *_gpu_rules(spec, target, self, self.groups * self.threads(target)),
            (
                shared > target.shared_bytes,
                f"{shared} bytes of shared memory, at most {target.shared_bytes}",
            ),
            (self.slots > 0 and not target.has_cp_async, "cp.async"),
            (
                not _wait_by_themselves(self.groups, self.warps, target),
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
            (self.rereads and not self.slots, "nothing is staged"),
            (copies_weight and not self.slots, "the weight is copied with the first row"),
            (self.widens_weight and not self.stages_weight, "a weight in registers is not widened"),
            (self.widens_weight and not self.ahead, "the weight is widened before the first row"),
        )
        why = next((why for broken, why in rules if broken), None)
        if why is None and self.few_rows:
            why = self.few_rows.illegal(spec, target, self.vector)
            return why and f"few rows: {why}"
        return why


@dataclass(frozen=True)
class TwoPass:
    """Row sums first, then dx by tiles of columns (``ir/two_pass.mlir``): for any N.

    Attributes:
        workgroups: How many walk over the rows of a tile; also the number of partial rows.
        warps: Subgroups in a workgroup.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread of the first pass reads at once.
        rows: Rows that a thread of the second pass reads at once.
        resident: Workgroups that shall fit a multiprocessor at once; caps their registers.
        finalize_slices: Slices of the partial rows that threads of the last kernel add up.
        finalize_rows: Partial rows that such a thread reads at once.
        finalize_columns: Of a workgroup of that kernel.
        span_steps: Steps of a walker that make a sum, for a long sum of equal numbers is far off;
            its partial row adds up these.
    """

    workgroups: int
    warps: int
    vector: int
    chunks: int
    rows: int
    resident: int = 1
    finalize_slices: int = 4
    finalize_rows: int = 4
    finalize_columns: int = 32
    span_steps: int = 32

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        return (
            "two passes: x and dy are read for the row sums, and again for dx and the columns; "
            f"{self.workgroups} workgroups of {self.warps} subgroups to a tile of columns, "
            f"{self.vector} elements an access"
        )

    def threads(self, target: Target) -> int:
        """Of a workgroup."""
        return self.warps * target.subgroup_size

    def tile(self, target: Target) -> int:
        """Columns of a workgroup in the second pass."""
        return self.threads(target) * self.vector

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if _least(self, "chunks", "rows", "span_steps") < 1:
            return "a number below 1"
        rules = _gpu_rules(spec, target, self, self.threads(target))
        return next((why for broken, why in rules if broken), None)


@dataclass(frozen=True)
class RowStatistics:
    """The kernel ahead of the others that recomputes mean and rstd (``ir/row_statistics.mlir``).

    Attributes:
        rows: Of a workgroup, a group of threads for each.
        warps: Subgroups in a group.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread reads at once.
    """

    rows: int
    warps: int
    vector: int
    chunks: int

    def threads(self, target: Target) -> int:
        """Of a group."""
        return self.warps * target.subgroup_size


@dataclass(frozen=True)
class RowBlocks:
    """Workgroups take blocks of rows, which stay in the cache (``ir/row_blocks.mlir``): for a CPU.

    Equal numbers that are added one after the other round the same way, and the error grows with
    their count; so there is a most for how many of them make a sum.

    Attributes:
        workgroups: How many the rows are shared out to; also the partial rows that are added up at
            the end.
        block: Rows that a worker keeps in its cache between their sums and dx.
        vector: Neighbouring elements that a worker handles together.
        share: The most rows of a workgroup. Where M has more for each, there are more workgroups.
        most_workgroups: But no more than these, whose shares are longer then.
        span_chunks: Vectors of a row that are summed at a time.
    """

    workgroups: int
    block: int
    vector: int
    share: int = 512
    most_workgroups: int = 4096
    span_chunks: int = 128

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        return (
            f"row blocks: x and dy come from memory once, {self.block} rows at a time; "
            f"{self.workgroups} workgroups, more of them beyond {self.workgroups * self.share} "
            f"rows, {self.vector} elements at a time"
        )

    @property
    def span(self) -> int:
        """Columns of a row that are summed at a time."""
        return self.span_chunks * self.vector

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if min(astuple(self)) < 1:
            return "a number below 1"
        rules = (
            (target.backend != "cpu", "it is for a CPU's threads and caches"),
            (self.vector > spec.columns, f"{self.vector} elements, a row has {spec.columns}"),
        )
        return next((why for broken, why in rules if broken), None)


Schedule = WholeTensors | OnePass | TwoPass | RowBlocks
_Gpu = TypeVar("_Gpu", OnePass, TwoPass)
Form = Schedule | FewRows


def forms(schedule: Schedule, spec: LayerNormSpec) -> tuple[Form, ...]:
    """What calls of a module take, which M decides: that of few rows is the first of two."""
    few = schedule.few_rows if isinstance(schedule, OnePass) else None
    if few is None:
        return (schedule,)
    if spec.rows is not None:
        return (few if spec.rows <= few.rows else schedule,)
    return (few, schedule)


def paths(schedule: Schedule, spec: LayerNormSpec) -> tuple[str, ...]:
    """What calls do with memory, in words, for each of the module's forms."""
    first, *rest = forms(schedule, spec)
    if not rest or not isinstance(first, FewRows):
        return (first.path,)
    return (f"M <= {first.rows}: {first.path}", *(f"M > {first.rows}: {o.path}" for o in rest))


def _least(schedule: OnePass | TwoPass, *own: str) -> int:
    """Of the numbers that must be there: those of every schedule of a GPU, and its own."""
    finalize = ("finalize_slices", "finalize_rows", "finalize_columns")
    common = ("workgroups", "warps", "vector", "resident", *finalize)
    numbers = asdict(schedule)
    return int(min(numbers[name] for name in (*common, *own)))


def _gpu_rules(
    spec: LayerNormSpec, target: Target, schedule: OnePass | TwoPass, threads: int
) -> tuple[tuple[bool, str], ...]:
    """What every schedule of a GPU asks for: (is broken, why)."""
    finalize_threads = schedule.finalize_columns * schedule.finalize_slices
    return (
        (target.backend == "cpu", "workgroups of threads need a GPU"),
        (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
        (
            finalize_threads > target.max_threads,
            f"{finalize_threads} threads add up partial rows, at most {target.max_threads}",
        ),
        (
            finalize_threads % target.subgroup_size != 0,
            f"{finalize_threads} threads add up partial rows, in subgroups of "
            f"{target.subgroup_size}",
        ),
        (schedule.warps > target.subgroup_size, "more subgroups than lanes"),
        (spec.columns % schedule.vector != 0, f"N is no multiple of {schedule.vector}"),
    )


def choose(spec: LayerNormSpec, target: Target) -> Schedule:
    """The schedule for a spec on a target."""
    if target.backend == "cpu":
        return _row_blocks(spec, target)
    reasoned = (*_staged(spec, target), *_direct(spec, target))
    for candidate in (
        *_tuned(spec, target),
        *(o for o in reasoned if o.registers(spec, target) <= o.registers_available(target)),
    ):
        if candidate.illegal(spec, target) is None:
            one = with_finalize(candidate, spec, target)
            with_few = replace(one, few_rows=_few_rows(spec, target, one.vector))
            return with_few if with_few.illegal(spec, target) is None else one
    return with_finalize(_two_pass(spec, target), spec, target)


def with_finalize(schedule: _Gpu, spec: LayerNormSpec, target: Target) -> _Gpu:
    """A schedule whose last kernel reads all partial rows at once, if their number is a product.

    One step of loads is all that its threads wait for. Where P has no such divisors, several.
    """
    count, lanes = schedule.workgroups, target.subgroup_size
    # Columns, a power of 2, that make whole sectors of memory and whole subgroups.
    least = {s: max(_SECTOR_COLUMNS, lanes // gcd(s, lanes)) for s in range(1, _MOST_SLICES + 1)}
    divisors = (
        (slices, rows)
        for slices in least
        for rows in range(1, _MOST_FINALIZE_ROWS + 1)
        if count % (slices * rows) == 0 and slices * least[slices] <= target.max_threads
    )
    # In a single step, as many rows to a thread as can be; in several, as many as slices.
    slices, rows = max(
        divisors, key=lambda o: (o[0] * o[1], o[1] if o[0] * o[1] == count else min(o))
    )
    if slices * rows < min(count, _FEW_SLICES * _FEW_SLICES):
        slices = rows = _FEW_SLICES
    # Enough workgroups for every processor.
    most = min(
        _FINALIZE_THREADS // slices, spec.columns // target.processors, _MOST_FINALIZE_COLUMNS
    )
    columns = max(least[slices], 1 << max(most, 1).bit_length() - 1)
    return replace(schedule, finalize_slices=slices, finalize_rows=rows, finalize_columns=columns)


def _tuned(spec: LayerNormSpec, target: Target) -> Iterator[OnePass]:
    """What was measured to be the fastest for this width, where dy and x are of one size."""
    sizes = {DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype)}
    numbers = TUNED.get((target.name, sizes.pop(), spec.columns)) if len(sizes) == 1 else None
    if numbers is not None:
        yield OnePass(*numbers)


def _staged(spec: LayerNormSpec, target: Target) -> Iterator[OnePass]:
    """By cp.async, best first.

    One workgroup a multiprocessor, of 16 warps as far as rows go into it: that leaves a thread its
    full share of registers, and two rows in flight for each group cover the latency of memory.
    Two chunks a thread keep enough loads under way; more only where a row needs them.
    """
    if not target.has_cp_async:
        return
    vector = vector_of(spec)
    for chunks in (2, 3, 4, 1, 6, 8):
        if chunks * vector > _most_elements(spec):  # then two passes are faster
            continue
        warps = _warps(spec, target, vector, chunks)
        rereads = chunks * vector * _words(spec) > _WORDS_IN_REGISTERS
        fetches = _WIDE_FETCHES if rereads else _FETCHES
        for ahead, slots, stages_weight in fetches:
            yield OnePass(
                workgroups=target.processors,
                groups=max(1, _WARPS_OF_A_PROCESSOR // warps),
                warps=warps,
                vector=min(vector, _WIDE_VECTOR) if rereads else vector,
                ahead=ahead,
                slots=slots,
                rereads=rereads,
                stages_weight=stages_weight,
            )


def _direct(spec: LayerNormSpec, target: Target) -> Iterator[OnePass]:
    """Without staging, best first: small workgroups, several of them on a multiprocessor.

    Workgroups that are filled come first: by a row, or by groups that can wait by themselves.
    """
    vector = vector_of(spec)

    def schedule(chunks: int) -> OnePass:
        warps = _warps(spec, target, vector, chunks)
        groups = max(1, _DIRECT_THREADS // (warps * target.subgroup_size))
        return OnePass(
            workgroups=_DIRECT_WORKGROUPS * target.processors,
            groups=groups if _wait_by_themselves(groups, warps, target) else 1,
            warps=warps,
            vector=vector,
        )

    def shortcomings(one: OnePass) -> tuple[bool, int]:
        threads = one.groups * one.threads(target)
        words = one.chunks(spec, target) * vector * _words(spec)
        return words > _WORDS_IN_REGISTERS, max(0, _LEAST_DIRECT_THREADS - threads)

    yield from sorted(map(schedule, (2, 3, 4, 1, 6, 8, 12, 16)), key=shortcomings)


def _few_rows(spec: LayerNormSpec, target: Target, vector: int) -> FewRows | None:
    """For as many rows of dy and x as half of the L2 cache holds: they are read twice.

    More rows, whatever their width, keep the workgroups of the columns busy for too long. Their
    tiles are as narrow as leaves no more of them than multiprocessors.
    """
    sizes = (DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype))
    rows = min(_MOST_FEW_ROWS, target.l2_bytes // 2 // (spec.columns * sum(sizes)))
    if rows == 0:
        return None
    tiles = (t for t in _FEW_TILES if spec.columns <= t * target.processors)
    return FewRows(
        rows=rows,
        warps=_FEW_THREADS // target.subgroup_size,
        tile=next(tiles, _FEW_TILES[-1]),
        tile_vector=min(vector, _FEW_VECTOR),
    )


def _two_pass(spec: LayerNormSpec, target: Target) -> TwoPass:
    """As many small workgroups as fit a multiprocessor's registers: none waits for another."""
    warps = _DIRECT_THREADS // target.subgroup_size
    vector = vector_of(spec)
    chunks = min(_MOST_TWO_PASS_CHUNKS, _most_elements(spec) // vector)
    one = TwoPass(1, warps, vector, chunks, rows=4, resident=_TWO_PASS_WORKGROUPS)
    tiles = -(-spec.columns // one.tile(target))
    return replace(one, workgroups=max(1, _TWO_PASS_WORKGROUPS * target.processors // tiles))


def row_statistics(spec: LayerNormSpec, target: Target) -> RowStatistics:
    """Groups as large as leaves each thread a few chunks, and as many as fill a workgroup."""
    vector = _vector_of(spec, (spec.dtype,))
    of_a_chunk = vector * target.subgroup_size
    chunks = -(-spec.columns // of_a_chunk)
    warps = min(_MOST_STATISTICS_WARPS, 1 << (-(-chunks // _STATISTICS_CHUNKS) - 1).bit_length())
    return RowStatistics(
        rows=max(1, _DIRECT_THREADS // (warps * target.subgroup_size)),
        warps=warps,
        vector=vector,
        chunks=min(_STATISTICS_CHUNKS, -(-chunks // warps)),
    )


def _row_blocks(spec: LayerNormSpec, target: Target) -> RowBlocks:
    """Rows wait in the cache; more of them at a time mean fewer trips of the column sums to it."""
    acc = DTYPES[spec.acc_dtype].numpy.itemsize
    widest = target.accumulator_bytes // acc
    vectors = [1 << i for i in range(widest.bit_length()) if 1 << i <= spec.columns]
    # A last chunk that overlaps is work done twice; a narrow vector is work done slowly.
    vector = min(reversed(vectors), key=lambda v: -(-spec.columns // v) * (v + _CHUNK_OVERHEAD))
    sums = 2 * spec.columns * acc
    block = next((rows for cache, rows in _BLOCK_ROWS if sums <= cache), _MOST_BLOCK_ROWS)
    return RowBlocks(_CPU_WORKGROUPS, block, vector)


def _words(spec: LayerNormSpec) -> int:
    """32-bit registers of a number in a sum."""
    return DTYPES[spec.acc_dtype].numpy.itemsize // 4


def _most_elements(spec: LayerNormSpec) -> int:
    """Whose sums a thread holds."""
    return _MOST_WORDS // _words(spec)


def _wait_by_themselves(groups: int, warps: int, target: Target) -> bool:
    """Groups of so many subgroups need not wait for each other."""
    return min(groups, warps) == 1 or groups <= target.group_barriers


def _warps(spec: LayerNormSpec, target: Target, vector: int, chunks: int) -> int:
    return -(-spec.columns // (vector * chunks * target.subgroup_size))


def host_alignment(schedule: Schedule) -> int:
    """Bytes: what a schedule's code assumes of the host's memory beyond elements' own alignment.

    An aligned load from less than that ends the process.
    """
    return 1 if isinstance(schedule, RowBlocks) else _IREE_ALIGNMENT


def to_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule as JSON values."""
    return {"form": type(schedule).__name__, **asdict(schedule)}


def from_dict(values: dict[str, Any]) -> Schedule:
    """The inverse of `to_dict`."""
    forms = {form.__name__: form for form in (WholeTensors, OnePass, TwoPass, RowBlocks)}
    fields = dict(values)
    if few_rows := fields.get("few_rows"):
        fields["few_rows"] = FewRows(**few_rows)
    schedule: Schedule = forms[fields.pop("form")](**fields)
    return schedule


def vector_of(spec: LayerNormSpec) -> int:
    """Elements in the widest access that divides a row: 16 bytes of the wider of dy and x."""
    return _vector_of(spec, (spec.dtype, spec.dy_dtype))


def _vector_of(spec: LayerNormSpec, dtypes: Sequence[str]) -> int:
    """The same, of the widest of these types."""
    widest = max(DTYPES[name].numpy.itemsize for name in dtypes)
    vector = _ACCESS_BYTES // widest
    while spec.columns % vector:
        vector //= 2
    return vector
