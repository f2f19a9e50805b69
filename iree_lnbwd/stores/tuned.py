"""What tuning found about one norm on one kind of GPU, and whether it still holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from iree_lnbwd import schedules
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Forward, OnePass, TwoPass
from iree_lnbwd.schedules.candidates import shares_out_alike
from iree_lnbwd.vmfb.artifact import digest

GpuSchedule = OnePass | TwoPass | Forward


@dataclass(frozen=True)
class Tuned:
    """The fastest schedule that was found.

    Attributes:
        spec: The norm, as `subject` has it.
        target: Name of the target.
        gpu: Name of the GPU, as its driver has it.
        processors: The GPU's; parts and variants of a product differ in them.
        compiler: Version of iree-base-compiler.
        code_sha256: `code_sha256` of the schedule, when it was timed.
        date: ISO 8601, "2026-11-21".
        rows: M of the calls that were timed.
        candidates: How many schedules competed.
        microseconds: Of a call by the schedule; the median.
        chosen_microseconds: Of a call by the choice without tuning, in the same turns.
        chosen: The choice without tuning.
        schedule: The fastest; the choice itself, unless another one was faster by more than noise.
    """

    spec: NormSpec
    target: str
    gpu: str
    processors: int
    compiler: str
    code_sha256: str
    date: str
    rows: int
    candidates: int
    microseconds: float
    chosen_microseconds: float
    chosen: GpuSchedule
    schedule: GpuSchedule

    @property
    def key(self) -> tuple[NormSpec, str, str, int]:
        """What it is about; a folder keeps one for each."""
        return self.spec, self.target, self.gpu, self.processors

    @property
    def source(self) -> str:
        """Where the schedule comes from, in words."""
        return f"tuned on {self.gpu} ({self.processors} processors) on {self.date}"

    @property
    def gain(self) -> str:
        """What it saves, in words."""
        if self.schedule == self.chosen:
            return f"{self.microseconds:.1f} us: the choice without tuning is the fastest"
        saved = 1 - self.microseconds / self.chosen_microseconds
        return (
            f"{self.microseconds:.1f} us, {saved:.1%} less than the {self.chosen_microseconds:.1f} "
            "of the choice without tuning"
        )


def subject(spec: NormSpec) -> NormSpec:
    """The norm that is tuned in place of a spec: without what no schedule depends on.

    Specs that differ in ``normalized_shape`` alone, but not in N, or in the values of ``eps`` and
    ``weight_offset``, share what was tuned.
    """
    return replace(
        spec,
        normalized_shape=(spec.columns,),
        eps=None if spec.eps is None else DEFAULT_EPS,
        weight_offset=0.0,
    )


def code_sha256(spec: NormSpec, target: Target, schedule: GpuSchedule) -> str:
    """SHA-256 of everything that decides the code of a module.

    Raises:
        CompileError: The compiler is missing.
        ValueError: The schedule is illegal.
    """
    _, planned = compiler.plan(spec, target, schedule=schedule)
    made_of = (planned.ir_sha256, planned.flags, planned.compiler_version)
    return digest(json.dumps(made_of).encode())


def why_illegal(spec: NormSpec, target: Target, chosen: object, schedule: object) -> str | None:
    """Why a schedule cannot stand for the choice without tuning; None if it can.

    A forward's must share a row out as it is chosen, so that fused and unfused calls have the same
    bits (see `schedules.candidates`).
    """
    if isinstance(chosen, Forward) and isinstance(schedule, Forward):
        if not shares_out_alike(schedule, chosen):
            return "it shares a row out in another way than the choice without tuning"
    elif not (isinstance(chosen, OnePass | TwoPass) and isinstance(schedule, OnePass | TwoPass)):
        names = " and ".join(type(how).__name__ for how in (schedule, chosen))
        return f"expected two schedules of a backward or of a forward, got {names}"
    if spec.family.is_backward == isinstance(chosen, Forward):
        return f"{type(chosen).__name__} is no schedule of {spec.op}"
    return schedule.illegal(spec, target)


def why_stale(tuned: Tuned) -> str | None:
    """Why what was found no longer holds; None as long as it does.

    It holds as long as the same code would be compiled, and the choice that it beat is the choice.

    Raises:
        CompileError: The compiler is missing.
    """
    target = find_target(tuned.target)
    if schedules.choose(tuned.spec, target) != tuned.chosen:
        return "the choice without tuning is another one now"
    if why := why_illegal(tuned.spec, target, tuned.chosen, tuned.schedule):
        return why
    if code_sha256(tuned.spec, target, tuned.schedule) != tuned.code_sha256:
        return f"other code would be compiled now, by {compiler.compiler_version()}"
    return None
