"""What is legal: the rules that the schedules of GPUs have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target

BELOW_ONE = "a number below 1"

Rule = tuple[bool, str]  # it is broken, and what it says then


class _WritesPartialRows(Protocol):
    """What every schedule does whose workgroups leave partial rows to a last kernel."""

    @property
    def workgroups(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def vector(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def finalize_slices(self) -> int: ...
    @property
    def finalize_rows(self) -> int: ...
    @property
    def finalize_columns(self) -> int: ...


def first_broken(rules: Iterable[Rule]) -> str | None:
    """What the first broken one of some rules says; None where all are kept."""
    return next((why for broken, why in rules if broken), None)


def least(schedule: _WritesPartialRows, *own: int) -> int:
    """Of the numbers that must be there: those of every such schedule, and its own."""
    return min(
        schedule.workgroups,
        schedule.warps,
        schedule.vector,
        schedule.resident,
        schedule.finalize_slices,
        schedule.finalize_rows,
        schedule.finalize_columns,
        *own,
    )


def gpu_rules(
    spec: LayerNormSpec, target: Target, schedule: _WritesPartialRows, threads: int
) -> tuple[Rule, ...]:
    """What every such schedule is asked.

    Args:
        spec: What is computed.
        target: Where.
        schedule: How.
        threads: Of a workgroup.
    """
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


def wait_by_themselves(groups: int, warps: int, target: Target) -> bool:
    """Groups of so many subgroups need not wait for each other."""
    return min(groups, warps) == 1 or groups <= target.group_barriers
