"""What one pass over memory keeps where: shared memory, and registers."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import ADDED_BIAS, Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.amd_registers import registers_on_amd
from iree_lnbwd.schedules.elements import words
from iree_lnbwd.schedules.ir_types import bindings, private, shared, storage
from iree_lnbwd.schedules.one_pass_numbers import LINE_BYTES, OnePassNumbers
from iree_lnbwd.schedules.rules import (
    REGISTERS_OF_A_THREAD,
    RESERVED_BYTES,
    have_room,
    registers_of_thread,
    shared_at_once,
)

_MBARRIER_BYTES = 8
_SHARED_AT_ONCE = 128  # bytes of shared memory, allocated together (CUDA, "Occupancy Calculator")
# Workgroups that share a processor where rows are not copied ahead: a rule of thumb.
_LOADING_AT_ONCE = 4
# Registers of a thread besides its elements': estimated from ptxas's reports. AMD's hold addresses
# of 64 bits for each lane.
_REGISTERS_FIXED = {"cuda": 40, "rocm": 64}
# Where rows begin anywhere in an access, a thread keeps the edges of a row for later, and what it
# needs to find them; more so where rows are read again.
_SHIFTED = 1.18
_SHIFTED_READ_AGAIN = 1.42
# Registers that a gate's factor, its derivative and the norm's output take for an element, beside
# z: by ptxas's reports of 248 schedules of RMS norm's backward (sm_90).
_GATED = 0.75
_GATED_READ_AGAIN = 2.75
_GATED_CENTRED = 2.0  # more of layer norm's
# Likewise of dy and x, from which dz is computed, where the next row is fetched into registers. In
# f32, 2056 columns spilled nothing, and 24576 118 registers (ptxas 12.8, sm_90).
_OF_DZ = 0.3
# What another gradient of the output, or a gate, takes that is loaded late, without a mean and with
# one; layer norm's gate takes it twice. By ptxas's reports of schedules of eight widths (sm_80).
_LATE, _LATE_CENTRED = 0.4, 1.2
# What another gradient takes of this row and of the next, in times of its size; of layer norms, the
# gradients' sum beside rows that are read again; and how much too high the estimate is where rows
# stay in registers, without a mean and with one. By ptxas's reports of 398 schedules that were
# measured with one gradient (sm_80, sm_90): of 234 that spill at most 16 bytes, 198 fit by it, and
# of the others six, which spill up to 128.
_ANOTHER_GRADIENT = 1.6
_SUM_CENTRED = 0.5
_KEPT, _KEPT_CENTRED = 1.33, 1.25


@dataclass(frozen=True)
class OnePassMemory(OnePassNumbers):
    """The numbers of one pass, with the memory that they need."""

    def memory(self, spec: NormSpec, target: Target) -> dict[str, str]:
        """The aliases of its memory in ``ir/one_pass.mlir``."""
        padded, chunks = self.padded_columns(spec, target), self.chunks(spec, target)
        dy_bytes, x_bytes = self.row_bytes(spec, target)
        padding = self.padding(spec, target)
        columns = f"{self.groups}x{padded}"
        if self.slots:
            dy, x = (
                shared(f"{slots}x{self.groups}x{self.staged(spec, target, dtype)}x!{name}")
                for slots, dtype, name in (
                    (self.slots, spec.dy_dtype, "dy"),
                    (self.x_slots, spec.dtype, "x"),
                )
            )
        elif self.loads_twice:
            dy, x = (
                f"!{element.value}_lines"
                if spec.strided_rows
                else storage(f"?x{self.line(spec)}x!{element.value}")
                for element in (Element.DY, Element.X)
            )
        else:
            rows = f"2x{chunks}" if self.ahead else f"{chunks}"
            dy, x = private(f"{rows}x!dy_chunk"), private(f"{rows}x!x_chunk")
        weight = shared(f"{columns}x!{'acc' if self.widens_weight else 'gamma'}")
        held = {name: private(f"{chunks}x!{name}_chunk") for name in ("gamma", "beta")}
        if self.loads_twice:
            held["gamma"] = bindings(spec)["!gamma_row"]
            # Without a bias, nothing is there, and no set of it begins anywhere.
            held["beta"] = (
                bindings(spec)["!beta_row"]
                if spec.has(ADDED_BIAS)
                else storage(f"{spec.columns}x!beta")
            )
        stages_bias = self.stages_bias(spec, target)
        stages_inverse = self.stages_inverse(spec, target)
        return {
            "#dy_pitch": f"{self.staged(spec, target, spec.dy_dtype) // self.warps} : index",
            "#x_pitch": f"{self.staged(spec, target, spec.dtype) // self.warps} : index",
            "!dy_bytes": shared(f"{dy_bytes + padding}xi8"),
            "!x_bytes": shared(f"{x_bytes}xi8"),
            "!exchange": shared(f"{self.buffers}x{self.groups}x{self.senders}x2x!acc"),
            "!mbarriers": shared(f"{self.mbarriers(spec, target)}xi64"),
            "!group_sums": shared(f"{self.groups}x{padded}x!acc"),
            "!dy_room": dy,
            "!x_room": x,
            "!weight_room": weight if self.stages_weight else held["gamma"],
            "!bias_room": shared(f"{columns}x!beta") if stages_bias else held["beta"],
            "!inverse_room": shared(f"{columns}x!acc")
            if stages_inverse
            else private(f"{chunks}x!chunk"),
        }

    def mbarriers(self, spec: NormSpec, target: Target) -> int:
        """Memory for so many, of a workgroup.

        In bulk, rows are copied to whole lines, which follow the mbarriers in shared memory.
        """
        if not self.bulk:
            return self.buffers
        needed = self.exchange_mbarriers + self.copy_mbarriers
        beside = self._shared_beside_rows(spec, target)
        whole = -(-(beside + needed * _MBARRIER_BYTES) // LINE_BYTES) * LINE_BYTES
        return (whole - beside) // _MBARRIER_BYTES

    def row_bytes(self, spec: NormSpec, target: Target) -> tuple[int, int]:
        """Shared memory for rows of dy and of x; that for dy takes the groups' sums at the end."""
        acc = DTYPES[spec.acc_dtype].numpy.itemsize
        sums = self.groups * self.padded_columns(spec, target) * acc if self.groups > 1 else 0
        dy, x = (
            slots * self.groups * self.staged(spec, target, name) * DTYPES[name].numpy.itemsize
            for slots, name in ((self.slots, spec.dy_dtype), (self.x_slots, spec.dtype))
        )
        return max(sums, dy), x

    def crowds(self, spec: NormSpec, target: Target) -> bool:
        """Whether copies pass through an L1 cache that has little room beside shared memory."""
        at_once = shared_at_once(self.resident, self.shared_bytes(spec, target))
        return self._needs_l1(spec) and 0 < target.roomy_shared_bytes < at_once

    def has_room(self, spec: NormSpec, target: Target) -> bool:
        """Whether a multiprocessor's shared memory has room for ``resident`` workgroups."""
        return have_room(self.resident, self.shared_bytes(spec, target), target)

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
        if spec.has(ADDED_BIAS):
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
        copies = self.copy_mbarriers * _MBARRIER_BYTES + LINE_BYTES if self.bulk else 0
        rows = sum(self.row_bytes(spec, target))
        return self._exchange_and_weight(spec, target) + copies + rows

    @property
    def exchanges(self) -> bool:
        """Whether subgroups share a row's sums through shared memory."""
        return self.warps * self.cluster > 1

    def _exchange_and_weight(self, spec: NormSpec, target: Target) -> int:
        acc, gamma = (DTYPES[name].numpy.itemsize for name in (spec.acc_dtype, spec.gamma_dtype))
        exchange = self.buffers * self.groups * self.senders * 2 * acc if self.exchanges else 0
        weight = self.groups * self.padded_columns(spec, target) if self.stages_weight else 0
        weight *= acc if self.widens_weight else gamma
        return exchange + weight

    def registers(self, spec: NormSpec, target: Target) -> float:
        """Registers of a thread: an estimate.

        That from AMD's reports is below ptxas's for RMS norms whose rows stay in registers. There
        the higher one is kept, with the schedules that follow from it.
        """
        if target.backend != "rocm":
            return self._by_ptxas(spec, target)
        on_amd = registers_on_amd(self, spec, self.chunks(spec, target) * self.vector)
        return on_amd if self.rereads else max(on_amd, self._by_ptxas(spec, target))

    def _by_ptxas(self, spec: NormSpec, target: Target) -> float:
        """By ptxas's reports: two accumulators, the row, the weight."""
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
        if spec.grad_input_sum_dtype is not None:
            an_element += words(spec)
        if self.loads_late:
            centres, is_gated = spec.family.centres, spec.gate is not None
            each = _LATE_CENTRED if centres else _LATE
            an_element += each * (spec.grad_outputs - 1 + is_gated + (centres and is_gated))
        if spec.gate is not None and not self.loads_late:
            an_element += DTYPES[spec.element_type(Element.GATE)].numpy.itemsize / 2
            an_element += _GATED_READ_AGAIN if self.rereads else _GATED
            an_element += _GATED_CENTRED if spec.family.centres else 0
            an_element += _GATED if keeps_weight and not self.stages_weight else 0
            an_element += 0 if self.slots else _OF_DZ * (dy + x)
        elements = self.chunks(spec, target) * self.vector
        estimate = _REGISTERS_FIXED[target.backend] + elements * an_element
        # In bulk, no thread has to mask what is not its own.
        if self.shifted(spec) and not self.bulk:
            estimate *= _SHIFTED_READ_AGAIN if self.rereads else _SHIFTED
        if spec.grad_outputs == 1 or self.loads_late:
            return estimate
        return self._beside_others(spec, estimate, elements * dy, elements * words(spec))

    def _beside_others(
        self, spec: NormSpec, estimate: float, dy_words: float, row_words: int
    ) -> float:
        """An estimate for one gradient of the output, for several.

        Args:
            spec: What is computed.
            estimate: It.
            dy_words: Words of a thread's part of a row of dy, as it comes.
            row_words: In the type of the sums.
        """
        centres = spec.family.centres
        their_sum = self.rereads + (_SUM_CENTRED if self.rereads else 1) * centres
        estimate += _ANOTHER_GRADIENT * dy_words * (spec.grad_outputs - 1) + their_sum * row_words
        if self.rereads or spec.grad_input_sum_dtype is not None:
            return estimate
        return estimate / (_KEPT_CENTRED if centres else _KEPT)

    def registers_available(self, target: Target) -> int:
        """Registers that a thread can have if a multiprocessor holds ``resident`` workgroups."""
        return registers_of_thread(self.subgroups * self.resident, target)

    def surely_resident(self, spec: NormSpec, target: Target) -> int:
        """Workgroups that an NVIDIA multiprocessor holds at least, whatever ptxas does.

        Sets are shared out to as many as are said to run at once (``vmfb/counts.py``). If a
        schedule says fewer, the first wave leaves places empty: modulated layer norms of 1344 to
        1456 columns in bf16 took 1.2 to 1.3 times as long, with 31 to 34 samples (H200).
        """
        resident = self.resident
        while (
            registers_of_thread(self.subgroups * (resident + 1), target) == REGISTERS_OF_A_THREAD
        ) and have_room(resident + 1, self.shared_bytes(spec, target), target):
            resident += 1
        return resident
