"""How a spec is computed on a target: which form of the IR, and its numbers.

A schedule is a value of its own. It is legal for a spec and a target or it is not, by the rules
below, and an illegal one is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target
from iree_lnbwd.tuning import TUNED

_ACCESS_BYTES = 16  # the widest global access that GPUs have
_COPY_BYTES = (4, 8, 16)  # what cp.async can copy
_WARPS_OF_A_PROCESSOR = 16
_ELEMENTS_IN_REGISTERS = 24  # of a row, a thread's; beyond it registers spill
_REGISTERS_OF_A_THREAD = 255
_REGISTERS_FIXED = 32
_REGISTERS_AN_ELEMENT = 4  # two accumulators, and the row itself
_DIRECT_THREADS = 256
_DIRECT_WORKGROUPS = 4
_TWO_PASS_WORKGROUPS = 4  # to a multiprocessor
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
class OnePass:
    """Workgroups walk over the rows and read each once (``ir/one_pass.mlir``).

    Attributes:
        workgroups: How many walk; also the number of partial rows that are added up at the end.
        groups: Groups of threads in a workgroup; each works on a row of its own.
        warps: Subgroups in a group.
        vector: Neighbouring elements that a thread handles together.
        ahead: Steps that rows are copied ahead of their use, to shared memory by cp.async; 0 reads
            them where they are used.
        rereads: Take rows from shared memory again for dx instead of keeping them in registers.
        stages_weight: Keep the weight in shared memory instead of registers.
        resident: Workgroups that shall fit a multiprocessor at once; caps their registers.
    """

    workgroups: int
    groups: int
    warps: int
    vector: int
    ahead: int = 0
    rereads: bool = False
    stages_weight: bool = False
    resident: int = 1

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        how = f"rows copied {self.ahead} steps ahead by cp.async" if self.ahead else "rows read"
        return (
            f"one pass: x and dy are read once; {self.workgroups} workgroups of {self.groups} x "
            f"{self.warps} subgroups, {how}, {self.vector} elements an access"
        )

    def threads(self, target: Target) -> int:
        """Of one group."""
        return self.warps * target.subgroup_size

    def chunks(self, spec: LayerNormSpec, target: Target) -> int:
        """How many vectors of a row each thread has."""
        return -(-spec.columns // (self.vector * self.threads(target)))

    def padded_columns(self, spec: LayerNormSpec, target: Target) -> int:
        """Columns that a group's threads cover."""
        return self.chunks(spec, target) * self.vector * self.threads(target)

    def shared_bytes(self, spec: LayerNormSpec, target: Target) -> int:
        """Shared memory (LDS) of a workgroup."""
        dy, x, gamma, acc = (
            DTYPES[name].numpy.itemsize
            for name in (spec.dy_dtype, spec.dtype, spec.gamma_dtype, spec.acc_dtype)
        )
        columns = self.padded_columns(spec, target)
        exchange = 2 * self.groups * self.warps * 2 * acc if self.warps > 1 else 0
        if not self.ahead:
            return exchange + self.groups * columns * acc
        rows = (self.ahead + 1) * self.groups * columns * (dy + x)
        return exchange + rows + (columns * gamma if self.stages_weight else 0)

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if min(self.workgroups, self.groups, self.warps, self.vector) < 1:
            return "a number below 1"
        shared = self.shared_bytes(spec, target)
        rules = (
            *_gpu_rules(spec, target, self, self.threads(target) * self.groups),
            (
                shared > target.shared_bytes,
                f"{shared} bytes of shared memory, at most {target.shared_bytes}",
            ),
            (self.ahead > 0 and not target.has_cp_async, "cp.async"),
            (
                self.ahead > 0 and not _copies(spec, self.vector),
                f"cp.async copies {_COPY_BYTES} bytes",
            ),
            (not self.ahead and (self.rereads or self.stages_weight), "nothing is staged"),
        )
        return next((why for broken, why in rules if broken), None)


@dataclass(frozen=True)
class TwoPass:
    """Row sums first, then dx by tiles of columns (``ir/two_pass.mlir``): for any N.

    Attributes:
        workgroups: How many walk over the rows of a tile; also the number of partial rows.
        warps: Subgroups in a workgroup.
        vector: Neighbouring elements that a thread handles together.
        chunks: Vectors of a row that a thread of the second pass has.
    """

    workgroups: int
    warps: int
    vector: int
    chunks: int

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
        return self.threads(target) * self.chunks * self.vector

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if min(self.workgroups, self.warps, self.vector, self.chunks) < 1:
            return "a number below 1"
        rules = _gpu_rules(spec, target, self, self.threads(target))
        return next((why for broken, why in rules if broken), None)


@dataclass(frozen=True)
class RowBlocks:
    """Workgroups take blocks of rows, which stay in the cache (``ir/row_blocks.mlir``): for a CPU.

    Attributes:
        workgroups: At most how many the rows are shared out to; also the most partial rows that are
            added up at the end.
        block: Rows that a worker keeps in its cache between their sums and dx.
        vector: Neighbouring elements that a worker handles together.
    """

    workgroups: int
    block: int
    vector: int

    @property
    def path(self) -> str:
        """What it does with memory, in words."""
        return (
            f"row blocks: x and dy come from memory once, {self.block} rows at a time; at most "
            f"{self.workgroups} workgroups, {self.vector} elements at a time"
        )

    def illegal(self, spec: LayerNormSpec, target: Target) -> str | None:
        """Why it cannot be compiled for a spec and a target; None where it can."""
        if min(self.workgroups, self.block, self.vector) < 1:
            return "a number below 1"
        rules = (
            (target.backend != "cpu", "it is for a CPU's threads and caches"),
            (not spec.output_mask[0], "it computes grad_input, which is not asked for"),
            (self.vector > spec.columns, f"{self.vector} elements, a row has {spec.columns}"),
            (spec.columns == 1, "a single column, whose dx is 0 and not a rounding error"),
        )
        return next((why for broken, why in rules if broken), None)


Schedule = WholeTensors | OnePass | TwoPass | RowBlocks


def _gpu_rules(
    spec: LayerNormSpec, target: Target, schedule: OnePass | TwoPass, threads: int
) -> tuple[tuple[bool, str], ...]:
    """What every schedule of a GPU asks for: (is broken, why)."""
    return (
        (target.backend == "cpu", "workgroups of threads need a GPU"),
        (spec.acc_dtype == "f64", "subgroups reduce no f64"),
        (not spec.output_mask[0], "it computes grad_input, which is not asked for"),
        (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
        (schedule.warps > target.subgroup_size, "more subgroups than lanes"),
        (spec.columns % schedule.vector != 0, f"N is no multiple of {schedule.vector}"),
    )


def choose(spec: LayerNormSpec, target: Target) -> Schedule:
    """The schedule for a spec on a target."""
    if not spec.output_mask[0]:
        return WholeTensors("grad_input is not asked for")
    if target.backend == "cpu":
        return _row_blocks(spec, target) if spec.columns > 1 else WholeTensors("a single column")
    if spec.acc_dtype == "f64":
        return WholeTensors("f64")
    reasoned = (*_staged(spec, target), *_direct(spec, target))
    for candidate in (
        *_tuned(spec, target),
        *(one for one in reasoned if _fits_registers(one, spec, target)),
    ):
        if candidate.illegal(spec, target) is None:
            return candidate
    return _two_pass(spec, target)


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
        warps = _warps(spec, target, vector, chunks)
        for ahead, stages_weight in ((2, True), (1, True), (1, False)):
            yield OnePass(
                workgroups=target.processors,
                groups=max(1, _WARPS_OF_A_PROCESSOR // warps),
                warps=warps,
                vector=vector,
                ahead=ahead,
                rereads=chunks * vector > _ELEMENTS_IN_REGISTERS,
                stages_weight=stages_weight,
            )


def _direct(spec: LayerNormSpec, target: Target) -> Iterator[OnePass]:
    """Without staging, best first: small workgroups, several of them on a multiprocessor."""
    vector = vector_of(spec)
    for chunks in (2, 3, 4, 1, 6, 8, 12, 16):
        warps = _warps(spec, target, vector, chunks)
        yield OnePass(
            workgroups=_DIRECT_WORKGROUPS * target.processors,
            groups=max(1, _DIRECT_THREADS // (warps * target.subgroup_size)),
            warps=warps,
            vector=vector,
        )


def _two_pass(spec: LayerNormSpec, target: Target) -> TwoPass:
    """Several small workgroups to a multiprocessor: there is nothing to wait for."""
    warps = _DIRECT_THREADS // target.subgroup_size
    one = TwoPass(1, warps, vector_of(spec), 1)
    tiles = -(-spec.columns // one.tile(target))
    workgroups = -(-_TWO_PASS_WORKGROUPS * target.processors // tiles)
    return replace(one, workgroups=workgroups)


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


def _fits_registers(schedule: OnePass, spec: LayerNormSpec, target: Target) -> bool:
    """A careful estimate, from what ptxas reports: it may reject what would fit."""
    elements = schedule.chunks(spec, target) * schedule.vector
    workgroup = schedule.groups * schedule.threads(target) * schedule.resident
    available = min(_REGISTERS_OF_A_THREAD, target.registers // workgroup)
    return _REGISTERS_FIXED + _REGISTERS_AN_ELEMENT * elements <= available


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
    schedule: Schedule = forms[fields.pop("form")](**fields)
    return schedule


def vector_of(spec: LayerNormSpec) -> int:
    """Elements in the widest access that divides a row: 16 bytes of the wider of dy and x."""
    widest = max(DTYPES[name].numpy.itemsize for name in (spec.dtype, spec.dy_dtype))
    vector = _ACCESS_BYTES // widest
    while spec.columns % vector:
        vector //= 2
    return vector


def _copies(spec: LayerNormSpec, vector: int) -> bool:
    return all(
        vector * DTYPES[name].numpy.itemsize in _COPY_BYTES for name in (spec.dtype, spec.dy_dtype)
    )
