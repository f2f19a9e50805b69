"""The rules of legality that the schedules of GPUs have in common."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Protocol

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import MOST_ROWS, NormSpec
from iree_lnbwd.schedules.elements import widest_vector, words

MOST_NUMBER = 2**31 - 1  # of a schedule: kernels count in 32 bits
_MAY_BE_ZERO = ("ahead", "walks", "slots", "most_few_rows")
# Some loops are written out. These bounds keep a kernel's text, and the time to compile it, small;
# they are several times what was ever the fastest.
_MOST_VECTOR = 16  # elements of an access
_MOST_WORDS = 128  # 32-bit words of sums, for the elements that a thread has at once
_MOST_FINALIZE_ROWS = 64  # partial rows that a thread reads at once
_MOST_ALONG_Y = 65535  # workgroups (CUDA C++ Programming Guide, "Technical Specifications")
# Terms that are added one after the other: the rounding errors of equal ones accumulate.
MOST_TERMS = 1024

FEWEST_THREADS = 2  # of a row: a sum over one thread is none
RESERVED_BYTES = 1024  # of shared memory, of each workgroup (CUDA C++ Programming Guide)
MOST_BUSY = 2048  # threads of a multiprocessor (CUDA C++ Programming Guide, sm_80, sm_90, sm_100)
# Parts of a multiprocessor: each has its own scheduler and registers (NVIDIA, white papers since
# Volta's, "SM Architecture"; the four SIMD units of a CDNA compute unit, or of two of RDNA's).
QUARTERS = 4
REGISTERS_OF_A_THREAD = 255  # at most (CUDA C++ Programming Guide, "Technical Specifications")
_MOST_IN_CLUSTER = 8  # workgroups, on any GPU (CUDA C++ Programming Guide, "Thread Block Clusters")
MOST_THAT_POST = 32  # workgroups: a lane of any GPU's subgroup for each

Rule = tuple[bool, str]  # whether it is broken, and its message


class WritesPartialRows(Protocol):
    """A schedule whose workgroups leave partial rows to a last kernel."""

    @property
    def workgroups(self) -> int:
        """How many walk."""

    @property
    def warps(self) -> int:
        """Subgroups in a group."""

    @property
    def vector(self) -> int:
        """Neighbouring elements that a thread handles together."""

    @property
    def resident(self) -> int:
        """Workgroups that a multiprocessor must hold at once."""

    @property
    def finalize_slices(self) -> int:
        """Slices of the partial rows."""

    @property
    def finalize_rows(self) -> int:
        """Partial rows that a thread reads at once."""

    @property
    def finalize_columns(self) -> int:
        """Columns of a workgroup of the last kernel."""

    def threads(self, target: Target) -> int:
        """Of a group."""

    def teams(self, spec: NormSpec, target: Target) -> int:
        """Partial rows of a workgroup."""


def first_broken(rules: Iterable[Rule]) -> str | None:
    """The message of the first broken rule; None if all are kept."""
    return next((why for broken, why in rules if broken), None)


def out_of_bounds(form: Any) -> str | None:
    """Why a number of a schedule is none that the rules can compute with; None if all are."""
    kind: Any = type(form)
    for name, least in least_numbers(kind).items():
        number = getattr(form, name)
        if number < least:
            return f"a number below {least}"
        if number > MOST_NUMBER:
            return f"a number above {MOST_NUMBER}"
    return None


@functools.cache
def least_numbers(form: Any) -> Mapping[str, int]:
    """The fields of a schedule that are numbers, and the least that each can be."""
    return {
        field.name: 0 if field.name in _MAY_BE_ZERO else 1
        for field in fields(form)
        if field.type == "int"
    }


def finalize_cells(spec: NormSpec) -> int:
    """Columns of a thread that adds up partial rows.

    Sets of weights may be so many that workgroups with fewer columns take long to start.
    """
    return widest_vector(spec.columns, (spec.acc_dtype,)) if spec.weight_sets else 1


def finalize_threads(schedule: WritesPartialRows, spec: NormSpec) -> int:
    """Threads of a workgroup that adds up partial rows."""
    return schedule.finalize_columns // finalize_cells(spec) * schedule.finalize_slices


def gpu_rules(
    spec: NormSpec, target: Target, schedule: WritesPartialRows, threads: int
) -> tuple[Rule, ...]:
    """The rules for every such schedule.

    Args:
        spec: What is computed.
        target: Where.
        schedule: How.
        threads: Of a workgroup.
    """
    adding, cells = finalize_threads(schedule, spec), finalize_cells(spec)
    most_vector, most_rows = _MOST_VECTOR, _MOST_FINALIZE_ROWS
    return (
        (target.backend == "cpu", "workgroups of threads need a GPU"),
        (threads > target.max_threads, f"{threads} threads, at most {target.max_threads}"),
        (
            schedule.finalize_columns % cells != 0,
            f"threads of {cells} columns add up partial rows of {schedule.finalize_columns}",
        ),
        (
            adding > target.max_threads,
            f"{adding} threads add up partial rows, at most {target.max_threads}",
        ),
        (
            adding == 0 or adding % target.subgroup_size != 0,
            f"{adding} threads add up partial rows, in subgroups of {target.subgroup_size}",
        ),
        (schedule.warps > target.subgroup_size, "more subgroups than lanes"),
        (schedule.vector > most_vector, f"accesses of at most {most_vector} elements"),
        (schedule.finalize_rows > most_rows, f"at most {most_rows} partial rows at once"),
        resident_rule(schedule.resident, threads),
    )


def resident_rule(resident: int, threads: int) -> Rule:
    """The rule for workgroups of so many threads that a multiprocessor must hold at once."""
    return (
        resident > 1 and resident * threads > MOST_BUSY,
        f"{resident} workgroups of {threads} threads at once, at most {MOST_BUSY} threads",
    )


def shared_at_once(resident: int, shared_bytes: int) -> int:
    """Bytes of shared memory that so many workgroups of so many bytes take together."""
    return resident * (shared_bytes + RESERVED_BYTES)


def have_room(resident: int, shared_bytes: int, target: Target) -> bool:
    """Whether a multiprocessor's shared memory has room for so many workgroups."""
    return shared_at_once(resident, shared_bytes) <= target.shared_bytes + RESERVED_BYTES


def elements_rule(spec: NormSpec, elements: int) -> Rule:
    """The rule for so many elements of a row, or of several, that a thread has at once."""
    most = _MOST_WORDS // words(spec)
    return elements > most, f"{elements} elements to a thread at once, at most {most}"


def stride_rule(rows: int) -> Rule:
    """The rule for so many rows that a kernel may count past M, in 32 bits."""
    most = MOST_NUMBER - MOST_ROWS
    return rows > most, f"steps of {rows} rows, at most {most}"


def grid_rule(workgroups: int) -> Rule:
    """The rule for workgroups along y."""
    return workgroups > _MOST_ALONG_Y, f"{workgroups} workgroups, at most {_MOST_ALONG_Y}"


def terms_rule(terms: int) -> Rule:
    """The rule for a sum that adds so many terms one after the other."""
    return terms > MOST_TERMS, f"sums of {terms} terms, at most {MOST_TERMS}"


def cluster_rules(
    spec: NormSpec, target: Target, cluster: int, vector: int, groups: int, *, posts: bool = False
) -> tuple[Rule, ...]:
    """The rules for rows that a cluster of workgroups shares.

    Args:
        spec: What is computed.
        target: Where.
        cluster: Workgroups that share a row; 1 if none does.
        vector: Neighbouring elements that a thread handles together.
        groups: Rows that a workgroup works on at once.
        posts: Whether its sums go through global memory.
    """
    most = MOST_THAT_POST if posts else _MOST_IN_CLUSTER
    return (
        (cluster > 1 and not (posts or target.has_clusters), "clusters"),
        (posts and target.backend != "cuda", "sums that are posted in memory"),
        (cluster > most, f"clusters of at most {most} workgroups"),
        (
            (cluster - 1) * own_columns(spec, cluster, vector) >= spec.columns,
            f"a row is too narrow for {cluster} workgroups",
        ),
        (
            cluster > 1 and (groups > 1 or spec.acc_dtype != "f32"),
            "a cluster shares one row at a time, and sums of f32",
        ),
    )


def own_columns(spec: NormSpec, cluster: int, vector: int) -> int:
    """Columns of each workgroup of a cluster; the last one may have fewer."""
    return -(-touched_columns(spec, vector) // (cluster * vector)) * vector


def touched_columns(spec: NormSpec, vector: int) -> int:
    """N, and what of an access may be before a row that begins anywhere in one."""
    return spec.columns + vector - math.gcd(vector, spec.columns)


def alike(workgroups: int, step: int, vector: int) -> int:
    """As many workgroups, or fewer, as leave all rows of a group in one alignment phase.

    Args:
        workgroups: The most.
        step: Elements of the rows that a workgroup works on at once.
        vector: Elements of an access.
    """
    parts = vector // math.gcd(vector, step)
    return max(1, workgroups // parts) * parts


def rows_of_a_subgroup(threads: int, target: Target) -> int:
    """As many as leave each of them so many threads, or the next power of 2."""
    return max(1, target.subgroup_size >> (max(FEWEST_THREADS, threads) - 1).bit_length())


def registers_of_thread(subgroups: int, target: Target) -> int:
    """That a thread can have if a multiprocessor holds so many subgroups.

    Each quarter of a multiprocessor has a quarter of the registers.
    """
    at_once = target.registers_at_once
    of_quarter = -(-subgroups // QUARTERS)
    share = target.registers // QUARTERS // (of_quarter * target.subgroup_size)
    return min(REGISTERS_OF_A_THREAD, share // at_once * at_once)


def wait_by_themselves(groups: int, warps: int, target: Target) -> bool:
    """Whether groups of so many subgroups can wait separately."""
    return min(groups, warps) == 1 or groups <= target.group_barriers
