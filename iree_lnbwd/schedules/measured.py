"""The fastest schedules that were measured on a product, and how they were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from iree_lnbwd.schedules.one_pass import OnePass


class Key(NamedTuple):
    """What a measurement is about.

    Attributes:
        op: Name of the backward.
        element_bytes: Bytes of an element of dy or x.
        columns: N.
        has_residual: Whether it adds ``grad_residual``.
        from_output: Whether x is the forward's output.
        has_gate: Whether there is a gate, before or after.
        has_sets: Whether rows have weights of their own.
        grad_outputs: How many gradients of the output it takes.
    """

    op: str
    element_bytes: int
    columns: int
    has_residual: bool = False
    from_output: bool = False
    has_gate: bool = False
    has_sets: bool = False
    grad_outputs: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether it is about one dy, x and one weight alone."""
        has_more = self.has_residual or self.from_output or self.has_gate or self.has_sets
        return not has_more and self.grad_outputs == 1


# Share of the ceiling: two passes move five streams where one pass moves three. With accesses of
# single elements, they reached 20 to 32 % with two bytes, and 43 to 46 % with four (H200).
_TWO_PASSES_AT_BEST = 3 / 5
_TWO_PASSES_OF_ELEMENTS = {2: 0.32, 4: 0.46}


@dataclass(frozen=True)
class Measurement:
    """The fastest schedule of one op, width and element size.

    Attributes:
        op: Name of the backward.
        has_residual: Whether it adds ``grad_residual``.
        from_output: Whether x is the forward's output.
        has_gate: Whether there is a gate, before or after.
        has_sets: Whether rows have weights of their own.
        grad_outputs: How many gradients of the output it takes.
        element_bytes: Bytes of an element of dy or x.
        columns: N.
        rows: M of the calls that were timed; rows x columns is their number of elements.
        share: Share of the ceiling, which is the bandwidth of adding two tensors of that size (two
            streams are read and one is written; a residual and each other gradient are one more);
            1 is all of it.
        schedule: Its last kernel and its few rows were not measured; they follow from the rest.
    """

    op: str
    has_residual: bool
    from_output: bool
    has_gate: bool
    has_sets: bool
    grad_outputs: int
    element_bytes: int
    columns: int
    rows: int
    share: float
    schedule: OnePass

    @property
    def key(self) -> Key:
        """What it is about."""
        return Key(
            *(self.op, self.element_bytes, self.columns),
            *(self.has_residual, self.from_output, self.has_gate, self.has_sets),
            self.grad_outputs,
        )


@dataclass(frozen=True)
class Run:
    """Measurements that were made together.

    Attributes:
        device: The GPU, as its driver calls it.
        driver: The driver's version.
        iree_base_compiler: Version of the compiler that built the modules.
        date: ISO 8601, "2026-11-21"; None if unknown.
        measurements: One for each op, width and element size.
    """

    device: str
    driver: str
    iree_base_compiler: str
    date: str | None
    measurements: tuple[Measurement, ...]


def merged(runs: tuple[Run, ...], new: Run) -> tuple[Run, ...]:
    """Earlier runs and a new one, which replaces their measurements of the same keys.

    New measurements that two passes might beat are left out.
    """
    measured = {m.key for m in new.measurements}
    earlier = (
        replace(run, measurements=tuple(m for m in run.measurements if m.key not in measured))
        for run in runs
    )
    fast = (m for m in new.measurements if m.share > _two_passes_at_best(m))
    last = replace(new, measurements=tuple(sorted(fast, key=lambda m: m.key)))
    return tuple(run for run in (*earlier, last) if run.measurements)


def _two_passes_at_best(one: Measurement) -> float:
    if one.columns % 2:  # they read single elements
        return _TWO_PASSES_OF_ELEMENTS.get(one.element_bytes, _TWO_PASSES_AT_BEST)
    return _TWO_PASSES_AT_BEST
