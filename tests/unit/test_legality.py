"""Each rule of legality from both sides: what it just allows, and what it is first to forbid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from iree_lnbwd import NormSpec
from iree_lnbwd.hardware.targets import Target, find_target
from iree_lnbwd.schedules import FewRows, Forward, OnePass, RowBlocks, TwoPass, rules
from iree_lnbwd.schedules.schedule import Schedule
from iree_lnbwd.stores.tuned import why_illegal

Gpu = OnePass | TwoPass | Forward | RowBlocks

SPEC = NormSpec((4096,), "bf16")
STAGED = OnePass(
    workgroups=132, groups=2, warps=8, vector=8, ahead=2, slots=3, rereads=True, stages_weight=True
)
READ = OnePass(workgroups=132, groups=1, warps=8, vector=8)
BULK = OnePass(
    workgroups=64, groups=1, warps=8, vector=8, ahead=2, slots=2, rereads=True, bulk=True
)
CLUSTER = replace(READ, cluster=2)
POSTS = replace(CLUSTER, posts=True)
DEFERS = replace(CLUSTER, ahead=2, slots=3, rereads=True, defers=True)
SHARED = OnePass(workgroups=4, groups=8, warps=1, vector=4, subgroup_rows=4)
NARROW = NormSpec((64,), "bf16")
GATED = NormSpec((4096,), "bf16", gate="after")
FEW = FewRows(rows=132, warps=16, tile=32, tile_vector=2)
TWO = TwoPass(workgroups=66, warps=8, vector=8, chunks=1, rows=4)
FORWARD = Forward(rows=1, threads=256, vector=8, chunks=2, in_registers=True)
OF_FORWARD = NormSpec((4096,), "bf16", op="layer_norm", eps=1e-5)
BLOCKS = RowBlocks(64, 2, 16)
BELOW_ONE = "a number below 1"


class Border(NamedTuple):
    """Two schedules on both sides of a rule.

    Attributes:
        base: What both are changed from.
        legal: What the legal one has.
        illegal: What the other has.
        why: What is said of that.
        spec: What is computed.
        target: Where.
    """

    base: Gpu
    legal: Mapping[str, Any]
    illegal: Mapping[str, Any]
    why: str
    spec: NormSpec = SPEC
    target: str = "sm_90"


def below_one(base: Gpu, spec: NormSpec, target: str, *names: str) -> dict[str, Border]:
    """Each of some numbers may be 1, or what it is in the base, and not 0 or less."""
    form = type(base).__name__
    return {
        f"{form}: {name} of {number}": Border(base, {}, {name: number}, BELOW_ONE, spec, target)
        for name in names
        for number in (0, -1)
    }


FINALIZE = ("finalize_slices", "finalize_rows", "finalize_columns")
GPU = ("workgroups", "warps", "vector", "resident", *FINALIZE)
BORDERS: dict[str, Border] = {
    **below_one(STAGED, SPEC, "sm_90", *GPU, "groups", "cluster", "subgroup_rows"),
    **below_one(TWO, SPEC, "sm_90", *GPU, "chunks", "rows", "span_steps"),
    **below_one(
        FORWARD, OF_FORWARD, "sm_90", "rows", "threads", "vector", "chunks", "resident", "cluster"
    ),
    **below_one(
        BLOCKS,
        SPEC,
        "host",
        *("workgroups", "block", "vector", "share", "most_workgroups", "span_chunks"),
    ),
    "a forward's few rows": Border(
        FORWARD, {"most_few_rows": 0}, {"most_few_rows": -1}, "a number below 0", OF_FORWARD
    ),
    # --- every kernel of ours on a GPU
    "threads of a row": Border(READ, {"warps": 32}, {"warps": 33}, "1056 threads, at most 1024"),
    "threads of groups": Border(
        replace(READ, vector=8, warps=2),
        {"groups": 15},
        {"groups": 17},
        "1088 threads, at most 1024",
        NormSpec((1024,), "bf16"),
    ),
    "threads of two passes": Border(
        TWO, {"warps": 32}, {"warps": 33}, "1056 threads, at most 1024"
    ),
    "threads that add up": Border(
        TWO,
        {"finalize_slices": 32},
        {"finalize_slices": 33},
        "1056 threads add up partial rows, at most 1024",
    ),
    "subgroups that add up": Border(
        TWO,
        {"finalize_columns": 8},
        {"finalize_columns": 9},
        "36 threads add up partial rows, in subgroups of 32",
    ),
    "subgroups of 64 that add up": Border(
        TWO,
        {"finalize_columns": 16},
        {"finalize_columns": 8},
        "32 threads add up partial rows, in subgroups of 64",
        SPEC,
        "gfx942",
    ),
    "N and a vector of two passes": Border(
        TWO, {"vector": 4}, {"vector": 8}, "N is no multiple of 8", NormSpec((4100,), "bf16")
    ),
    # --- one pass
    "rows that begin anywhere": Border(
        replace(STAGED, groups=1, vector=2, workgroups=132),
        {},
        {"slots": 0, "ahead": 0, "rereads": False, "stages_weight": False},
        "N is no multiple of 2, and rows are not copied",
        NormSpec((4097,), "bf16"),
    ),
    "groups whose rows have different alignment phases": Border(
        replace(STAGED, vector=4, warps=4),
        {"workgroups": 132},
        {"workgroups": 131},
        "rows of a group have different alignment phases in 4 elements",
        NormSpec((2049,), "bf16"),
    ),
    "shared memory": Border(
        replace(STAGED, groups=1),
        {"ahead": 12, "slots": 13},
        {"ahead": 13, "slots": 14},
        "237696 bytes of shared memory, at most 232448",
    ),
    "cp.async": Border(
        replace(STAGED, groups=1), {"vector": 4}, {"vector": 1}, "cp.async copies (4, 8, 16) bytes"
    ),
    "cp.async of the weight": Border(
        replace(STAGED, groups=1, vector=1, warps=32),
        {"widens_weight": True},
        {},
        "cp.async copies (4, 8, 16) bytes",
        NormSpec((4096,), "f32", weight_dtype="bf16"),
    ),
    "cp.async of either row": Border(
        replace(STAGED, groups=1, vector=1, warps=32, widens_weight=True),
        {"slots": 0, "ahead": 1, "rereads": False},
        {},
        "cp.async copies (4, 8, 16) bytes",
        NormSpec((4096,), "f32", grad_output_dtype="bf16"),
    ),
    "cp.async of 32 bytes": Border(
        replace(STAGED, groups=1), {"vector": 8}, {"vector": 16}, "cp.async copies (4, 8, 16) bytes"
    ),
    "a target without cp.async": Border(
        replace(STAGED, groups=1, warps=16),
        {"ahead": 0, "slots": 0, "rereads": False, "stages_weight": False},
        {},
        "cp.async",
        SPEC,
        "sm_75",
    ),
    "a target without copies in bulk": Border(
        BULK, {"bulk": False}, {}, "cp.async.bulk", SPEC, "sm_80"
    ),
    "bulk that is read by three": Border(
        replace(BULK, workgroups=63),
        {"vector": 4},
        {"vector": 3},
        "shared memory is read by 3 elements, which are no power of 2",
    ),
    "bulk in a ring": Border(BULK, {}, {"slots": 3}, "whole subgroups copy in bulk, in place"),
    "bulk by parts of subgroups": Border(
        replace(BULK, warps=1, groups=4, vector=2),
        {},
        {"subgroup_rows": 4},
        "whole subgroups copy in bulk, in place",
        NormSpec((64,), "bf16"),
    ),
    "x later": Border(
        replace(BULK, x_later=True),
        {},
        {"bulk": False},
        "x is copied later than dy only in bulk, and into 2 slots of dy",
    ),
    "x later, of more slots": Border(
        replace(BULK, x_later=True, warps=16),
        {},
        {"slots": 3, "ahead": 3},
        "x is copied later than dy only in bulk, and into 2 slots of dy",
    ),
    "x later than sums": Border(
        replace(BULK, cluster=2, defers=True),
        {},
        {"x_later": True},
        "the next row's x is not there yet, for sums that are sent ahead",
    ),
    "clusters whose rows have different alignment phases": Border(
        replace(BULK, cluster=2, vector=4),
        {"workgroups": 64},
        {"workgroups": 63},
        "rows of a group have different alignment phases in 4 elements",
        NormSpec((4097,), "bf16"),
    ),
    "mbarriers": Border(
        replace(BULK, warps=16),
        {"ahead": 4, "slots": 4},
        {"ahead": 5, "slots": 5},
        "80 mbarriers, at most 64",
    ),
    "mbarriers of a cluster": Border(
        replace(BULK, warps=31, cluster=1),
        {"cluster": 2, "warps": 31},
        {"cluster": 2, "warps": 32},
        "66 mbarriers, at most 64",
        NormSpec((16384,), "bf16"),
    ),
    "parts of a subgroup, and subgroups": Border(
        replace(SHARED, groups=4),
        {},
        {"warps": 2},
        "4 groups, 4 to a subgroup of 32",
        NARROW,
    ),
    "parts of a subgroup, and clusters": Border(
        replace(SHARED, groups=4),
        {},
        {"cluster": 2},
        "4 groups, 4 to a subgroup of 32",
        NARROW,
    ),
    "parts of a subgroup that do not divide it": Border(
        SHARED, {}, {"subgroup_rows": 3, "groups": 9}, "9 groups, 3 to a subgroup of 32", NARROW
    ),
    "parts of a single thread": Border(
        replace(SHARED, groups=32),
        {"subgroup_rows": 16},
        {"subgroup_rows": 32},
        "32 groups, 32 to a subgroup of 32",
        NARROW,
    ),
    "parts that leave a subgroup": Border(
        SHARED, {"groups": 4}, {"groups": 6}, "6 groups, 4 to a subgroup of 32", NARROW
    ),
    "groups that wait": Border(
        replace(READ, warps=2),
        {"groups": 15},
        {"groups": 16},
        "16 groups of several subgroups, at most 15 can wait by themselves",
        NormSpec((1024,), "bf16"),
    ),
    "rows ahead of a ring": Border(
        replace(STAGED, groups=1), {"ahead": 3}, {"ahead": 4}, "4 rows ahead do not go with 3 slots"
    ),
    "rows behind a ring": Border(
        replace(STAGED, groups=1), {"ahead": 2}, {"ahead": 1}, "1 rows ahead do not go with 3 slots"
    ),
    "rows ahead of registers": Border(
        READ, {"ahead": 1}, {"ahead": 2}, "2 rows ahead do not go with 0 slots"
    ),
    "rows less than none ahead": Border(READ, {"ahead": 0}, {"ahead": -1}, "a number below 0"),
    "clusters": Border(CLUSTER, {"cluster": 1}, {}, "clusters", SPEC, "sm_80"),
    "workgroups of a cluster": Border(
        replace(READ, warps=2), {"cluster": 8}, {"cluster": 9}, "clusters of at most 8 workgroups"
    ),
    "sums that are posted": Border(
        POSTS, {"cluster": 2}, {"cluster": 1}, "a row of one workgroup has nobody to post sums to"
    ),
    "workgroups that post": Border(
        replace(POSTS, warps=1),
        {"cluster": 32},
        {"cluster": 33},
        "clusters of at most 32 workgroups",
    ),
    "posts on AMD's": Border(
        POSTS,
        {"posts": False, "cluster": 1},
        {},
        "sums that are posted in memory",
        SPEC,
        "gfx942",
    ),
    "posts of sets": Border(
        POSTS,
        {"posts": False},
        {},
        "clusters that post sums have one weight",
        replace(SPEC, weight_sets=True),
    ),
    "posts beside copies in bulk": Border(
        replace(BULK, cluster=2),
        {},
        {"posts": True},
        "only shared memory tells of sums and of copies in bulk",
    ),
    "a row for a cluster": Border(
        replace(READ, warps=1),
        {"cluster": 3},
        {"cluster": 4},
        "a row is too narrow for 4 workgroups",
        NormSpec((24,), "bf16"),
    ),
    "groups of a cluster": Border(
        CLUSTER, {}, {"groups": 2}, "a cluster shares one row at a time, and sums of f32"
    ),
    "f64 of a cluster": Border(
        replace(CLUSTER, vector=2),
        {"cluster": 1},
        {},
        "a cluster shares one row at a time, and sums of f32",
        NormSpec((4096,), "f64"),
    ),
    "sums that are received later": Border(
        DEFERS, {}, {"cluster": 1}, "only clusters receive sums later"
    ),
    "sums that are received later than rows come": Border(
        DEFERS,
        {},
        {"ahead": 1, "slots": 2},
        "a row whose sums are received later is read again, and fetched 2 rows ahead",
    ),
    "sums of a row that is not read again": Border(
        DEFERS,
        {},
        {"rereads": False},
        "a row whose sums are received later is read again, and fetched 2 rows ahead",
    ),
    "rows that are loaded twice": Border(
        READ,
        {"rereads": True},
        {"rereads": True, "ahead": 1},
        "a row that is loaded twice is not loaded ahead",
    ),
    **{
        f"sums that are received later, and {what}": Border(
            DEFERS,
            {"loads_late": True},
            {},
            "of other gradients of the output, and of a gate, only the next row is there",
            spec,
        )
        for what, spec in (("two gradients", replace(SPEC, grad_outputs=2)), ("a gate", GATED))
    },
    "a gate of rows that are loaded twice": Border(
        READ,
        {"rereads": True, "loads_late": True},
        {"rereads": True},
        "a gate is in registers, which have no room beside the sums of so wide a row",
        GATED,
    ),
    "a gate that is loaded late, of a row that is kept": Border(
        READ,
        {"rereads": True, "loads_late": True},
        {"loads_late": True},
        "other gradients, or a gate, are loaded late where rows are read again",
        GATED,
    ),
    "nothing that is loaded late": Border(
        replace(READ, rereads=True),
        {},
        {"loads_late": True},
        "other gradients, or a gate, are loaded late where rows are read again",
    ),
    "rows of sets": Border(
        replace(STAGED, groups=1),
        {"vector": 4},
        {"vector": 8},
        "N is no multiple of 8, and rows of a set begin anywhere in an access",
        NormSpec((4100,), "bf16", weight_sets=True),
    ),
    "strided rows": Border(
        replace(STAGED, groups=1),
        {"vector": 4},
        {"vector": 8},
        "N is no multiple of 8, and rows begin anywhere in an access",
        NormSpec((4100,), "bf16", strided_rows=True),
    ),
    "strided rows in bulk": Border(
        replace(BULK, vector=4),
        {"bulk": False},
        {},
        "strided rows that are no whole 16 bytes are not copied in bulk",
        NormSpec((4100,), "bf16", strided_rows=True),
    ),
    "few rows of sets": Border(
        READ,
        {},
        {"few_rows": FEW},
        "few rows have one weight, and the spec has sets",
        replace(SPEC, weight_sets=True),
    ),
    "rows of a step in a set": Border(
        READ,
        {"workgroups": 524287},
        {"workgroups": 524288},
        "steps of 1048576 rows, at most 1048575",
        replace(SPEC, weight_sets=True),
    ),
    "a weight that is copied": Border(
        READ, {}, {"stages_weight": True}, "the weight is copied with the first row"
    ),
    "a weight that is copied and widened": Border(
        READ,
        {"stages_weight": True, "widens_weight": True, "ahead": 1},
        {"stages_weight": True, "widens_weight": False, "ahead": 1},
        "the weight is copied with the first row",
    ),
    "a weight that is widened": Border(
        STAGED,
        {"widens_weight": True},
        {"widens_weight": True, "stages_weight": False},
        "a weight in registers is not widened",
    ),
    "a weight that is widened first": Border(
        READ,
        {"stages_weight": True, "widens_weight": True, "ahead": 1},
        {"stages_weight": True, "widens_weight": True, "ahead": 0},
        "the weight is widened before the first row",
    ),
    "groups whose rows begin at two places": Border(
        replace(STAGED, groups=3, vector=2, warps=4),
        {"workgroups": 132},
        {"workgroups": 131},
        "rows of a group have different alignment phases in 2 elements",
        NormSpec((2049,), "bf16"),
    ),
    "a single group whose rows begin at two places": Border(
        replace(BULK, x_later=True, vector=2),
        {"workgroups": 64},
        {"workgroups": 63},
        "rows of a group have different alignment phases in 2 elements",
        NormSpec((4097,), "bf16"),
    ),
    "a single slot": Border(
        replace(STAGED, groups=1, warps=16, ahead=1, slots=1, stages_weight=False),
        {"ahead": 0, "slots": 0, "rereads": False},
        {},
        "cp.async",
        SPEC,
        "sm_75",
    ),
    "halves that leave a subgroup": Border(
        replace(SHARED, subgroup_rows=2),
        {"groups": 4},
        {"groups": 3},
        "3 groups, 2 to a subgroup of 32",
        NARROW,
    ),
    "few rows: columns of a thread of one": Border(
        STAGED,
        {"few_rows": replace(FEW, tile_vector=1)},
        {"few_rows": replace(FEW, tile_vector=6)},
        "few rows: warps, tile and tile_vector are powers of 2",
    ),
    # --- few rows
    **{
        f"few rows: {name} of 0": Border(
            STAGED,
            {"few_rows": FEW},
            {"few_rows": replace(FEW, **{name: 0})},
            f"few rows: {BELOW_ONE}",
        )
        for name in ("rows", "warps", "tile", "tile_vector")
    },
    "few rows: one": Border(
        STAGED,
        {"few_rows": replace(FEW, rows=1)},
        {"few_rows": replace(FEW, rows=-1)},
        f"few rows: {BELOW_ONE}",
    ),
    "few rows: threads": Border(
        STAGED,
        {"few_rows": replace(FEW, warps=32)},
        {"few_rows": replace(FEW, warps=64)},
        "few rows: 2048 threads, at most 1024",
    ),
    **{
        f"few rows: {name} of {number}": Border(
            STAGED,
            {"few_rows": FEW},
            {"few_rows": replace(FEW, **{name: number})},
            "few rows: warps, tile and tile_vector are powers of 2",
        )
        for name, number in (("warps", 12), ("tile", 48), ("tile_vector", 3))
    },
    "few rows: columns of a thread": Border(
        STAGED,
        {"few_rows": replace(FEW, tile_vector=8)},
        {"few_rows": replace(FEW, tile_vector=16)},
        "few rows: 16 columns do not divide 8",
    ),
    "few rows: columns of a tile": Border(
        replace(STAGED, groups=1),
        {"few_rows": replace(FEW, tile=8, tile_vector=8)},
        {"few_rows": replace(FEW, tile=4, tile_vector=8)},
        "few rows: 8 columns of a tile of 4",
    ),
    "few rows: threads for sums": Border(
        STAGED,
        {"few_rows": replace(FEW, tile=128)},
        {"few_rows": replace(FEW, tile=256)},
        "few rows: 512 threads for 512 sums",
    ),
    "few rows: sums for threads": Border(
        STAGED,
        {"few_rows": replace(FEW, tile=8)},
        {"few_rows": replace(FEW, tile=4)},
        "few rows: 512 threads for 8 sums",
    ),
    "few rows: elements of a thread": Border(
        STAGED,
        {"few_rows": replace(FEW, warps=4)},
        {"few_rows": replace(FEW, warps=2, tile=16)},
        "few rows: more than 32 elements of a row to a thread",
    ),
    "few rows: shared memory": Border(
        replace(READ, warps=16),
        {"few_rows": replace(FEW, warps=32, tile=64, tile_vector=2)},
        {"few_rows": replace(FEW, warps=32, tile=64, tile_vector=8)},
        "few rows: 69888 bytes of shared memory, at most 65536",
        SPEC,
        "sm_75",
    ),
    "few rows: terms of a sum": Border(
        STAGED,
        {"few_rows": replace(FEW, rows=32768)},
        {"few_rows": replace(FEW, rows=32769)},
        "few rows: sums of 1025 terms, at most 1024",
    ),
    "a copy into one slot": Border(
        replace(READ, groups=1, warps=16, rereads=True),
        {"slots": 0, "ahead": 0, "vector": 1, "rereads": False},
        {"slots": 1, "ahead": 1, "vector": 1},
        "cp.async copies (4, 8, 16) bytes",
    ),
    # --- so that nothing that the rules compute, or that a kernel does, is too large
    "partial rows at once": Border(
        READ, {"finalize_rows": 64}, {"finalize_rows": 65}, "at most 64 partial rows at once"
    ),
    "threads at once": Border(
        READ,
        {"resident": 8},
        {"resident": 9},
        "9 workgroups of 256 threads at once, at most 2048 threads",
    ),
    "elements at once": Border(
        READ,
        {"warps": 2},
        {"warps": 1},
        "256 elements to a thread at once, at most 128",
        NormSpec((8192,), "bf16"),
    ),
    "rows of a step": Border(
        STAGED,
        {"workgroups": 174762},
        {"workgroups": 174763},
        "steps of 1048578 rows, at most 1048575",
    ),
    "two passes: elements at once": Border(
        TWO, {"chunks": 16}, {"chunks": 17}, "136 elements to a thread at once, at most 128"
    ),
    "two passes: terms of a sum": Border(
        TWO, {"span_steps": 256}, {"span_steps": 257}, "sums of 1028 terms, at most 1024"
    ),
    **{
        f"a CPU's {name}": Border(
            BLOCKS, {name: most}, {name: most + 1}, f"{why}, at most {most}", SPEC, "host"
        )
        for name, most, why in (
            ("vector", 256, "257 elements"),
            ("block", 256, "blocks of 257 rows"),
            ("workgroups", 65536, "65537 workgroups"),
            ("most_workgroups", 65536, "65537 workgroups"),
            ("share", 1024, "sums of 1025 terms"),
            ("span_chunks", 1024, "sums of 1025 terms"),
        )
    },
    # --- forwards
    "a forward's threads": Border(
        FORWARD, {"rows": 4}, {"rows": 5}, "1280 threads, at most 1024", OF_FORWARD
    ),
    "a forward's subgroups": Border(
        replace(FORWARD, threads=16),
        {"rows": 2},
        {"rows": 3},
        "48 threads, in subgroups of 32",
        replace(OF_FORWARD, normalized_shape=(128,)),
    ),
    "a forward's row of threads": Border(
        replace(FORWARD, chunks=1, vector=4),
        {"rows": 16, "threads": 2},
        {"rows": 32, "threads": 1},
        "a row has at least 2 threads",
        replace(OF_FORWARD, normalized_shape=(4,)),
    ),
    "a forward's part of a subgroup": Border(
        replace(FORWARD, chunks=1, rows=8),
        {"threads": 16},
        {"threads": 12},
        "12 threads are neither subgroups nor a power of 2 of a subgroup's",
        replace(OF_FORWARD, normalized_shape=(96,)),
    ),
    "a forward's subgroups and a half": Border(
        replace(FORWARD, chunks=2, rows=2),
        {"threads": 64},
        {"threads": 48},
        "48 threads are neither subgroups nor a power of 2 of a subgroup's",
        replace(OF_FORWARD, normalized_shape=(512,)),
    ),
    "a forward's subgroups of more than a power of 2": Border(
        replace(FORWARD, chunks=2),
        {"threads": 96},
        {"threads": 80, "rows": 2},
        "80 threads are neither subgroups nor a power of 2 of a subgroup's",
        replace(OF_FORWARD, normalized_shape=(512,)),
    ),
    "a forward's vector": Border(
        FORWARD,
        {"vector": 8},
        {"vector": 3},
        "N is no multiple of 3, and that is no power of 2",
        OF_FORWARD,
    ),
    "a forward's cluster": Border(
        replace(FORWARD, threads=128),
        {"cluster": 2},
        {"cluster": 9},
        "clusters of at most 8 workgroups",
        OF_FORWARD,
    ),
    "rows of a forward's cluster": Border(
        replace(FORWARD, threads=128, cluster=2),
        {},
        {"rows": 2},
        "a cluster shares one row at a time, and sums of f32",
        OF_FORWARD,
    ),
    "a forward's elements": Border(
        FORWARD,
        {"chunks": 4},
        {"chunks": 5},
        "more than 32 elements of a row to a thread at once",
        OF_FORWARD,
    ),
    "a forward's f64 elements": Border(
        replace(FORWARD, vector=2, threads=512),
        {"chunks": 8},
        {"chunks": 9},
        "more than 16 elements of a row to a thread at once",
        replace(OF_FORWARD, dtype="f64"),
    ),
    "a row that its threads keep": Border(
        FORWARD,
        {"threads": 256},
        {"threads": 224},
        "the registers of a row's threads cannot hold it",
        OF_FORWARD,
    ),
    "a row in one place": Border(
        FORWARD,
        {"in_registers": False, "in_shared_memory": True},
        {"in_shared_memory": True},
        "a row stays in registers or in shared memory, not in both",
        OF_FORWARD,
    ),
    "a narrow row": Border(
        replace(FORWARD, packs=True),
        {},
        {"in_registers": False},
        "only a narrow row of one tensor, in registers, is kept narrow",
        OF_FORWARD,
    ),
    "a narrow row of two tensors": Border(
        FORWARD,
        {},
        {"packs": True},
        "only a narrow row of one tensor, in registers, is kept narrow",
        replace(OF_FORWARD, residual_dtype="bf16"),
    ),
    "a row that is not narrow": Border(
        FORWARD,
        {},
        {"packs": True},
        "only a narrow row of one tensor, in registers, is kept narrow",
        replace(OF_FORWARD, dtype="f32"),
    ),
    "a narrow row of a product": Border(
        FORWARD,
        {},
        {"packs": True},
        "only a narrow row of one tensor, in registers, is kept narrow",
        replace(OF_FORWARD, gate="before"),
    ),
    **{
        f"a gate {gate} a shared row": Border(
            replace(FORWARD, in_registers=False),
            {},
            {"in_shared_memory": True},
            "a gated row is not kept in shared memory",
            replace(OF_FORWARD, gate=gate),
        )
        for gate in ("before", "after")
    },
    "several rows": Border(
        replace(FORWARD, in_registers=False),
        {"rows": 1},
        {"rows": 2},
        "a workgroup reads a single row again",
        OF_FORWARD,
    ),
    "several rows in shared memory": Border(
        replace(FORWARD, in_registers=False, rows=2),
        {"in_shared_memory": True},
        {},
        "a workgroup reads a single row again",
        OF_FORWARD,
    ),
    "early weights": Border(
        replace(FORWARD, early=True),
        {},
        {"in_registers": False},
        "a row that is not in registers has its weights in steps",
        OF_FORWARD,
    ),
    "early weights of few rows": Border(
        FORWARD,
        {"most_few_rows": 1},
        {"most_few_rows": 1, "in_registers": False},
        "a row that is not in registers has its weights in steps",
        OF_FORWARD,
    ),
    "early weights of a shared row": Border(
        replace(FORWARD, in_registers=False, in_shared_memory=True),
        {},
        {"early": True},
        "a row that is not in registers has its weights in steps",
        OF_FORWARD,
    ),
    "a forward's shared memory": Border(
        replace(FORWARD, in_registers=False, in_shared_memory=True, threads=32),
        {"rows": 28},
        {"rows": 29},
        "237568 bytes of shared memory, at most 232448",
        OF_FORWARD,
    ),
    # --- the CPU
    "a chunk of a row": Border(
        BLOCKS, {"vector": 15}, {"vector": 16}, "16 elements, a row has 15", NormSpec((15,)), "host"
    ),
}


def of(border: Border, changes: Mapping[str, Any]) -> str | None:
    how: Schedule = replace(border.base, **changes)
    assert isinstance(how, Gpu)
    return how.illegal(border.spec, find_target(border.target))


@pytest.mark.parametrize("name", BORDERS)
def test_a_rule_from_both_sides(name: str) -> None:
    border = BORDERS[name]
    assert of(border, border.illegal) == border.why
    if border.illegal:
        assert of(border, border.legal) is None


@pytest.mark.parametrize(
    ("base", "spec"), [(STAGED, SPEC), (TWO, SPEC), (FORWARD, OF_FORWARD), (BLOCKS, SPEC)]
)
def test_where_a_form_runs(base: Gpu, spec: NormSpec) -> None:
    on_cpu, on_gpu = (base.illegal(spec, find_target(name)) for name in ("host", "sm_90"))
    if isinstance(base, RowBlocks):
        assert (on_cpu, on_gpu) == (None, "it is for a CPU's threads and caches")
    else:
        assert (on_cpu, on_gpu) == ("workgroups of threads need a GPU", None)


def test_rules_are_told_in_their_order() -> None:
    assert rules.first_broken([]) is None
    assert rules.first_broken([(False, "a"), (True, "b"), (True, "c")]) == "b"
    assert rules.first_broken([(False, "a"), (False, "b")]) is None


@pytest.mark.parametrize("form", [OnePass(1, 1, 9, 8), TwoPass(1, 9, 8, 1, 1)])
def test_lanes_are_never_fewer_than_subgroups(form: OnePass | TwoPass) -> None:
    """IREE 3.13 sums wrongly where they are; no GPU of ours has so few lanes."""
    small: Target = replace(find_target("sm_90"), subgroup_size=8)
    assert form.illegal(SPEC, small) == "more subgroups than lanes"
    assert replace(form, warps=8).illegal(SPEC, small) != "more subgroups than lanes"
    few = replace(FEW, warps=16, tile=32)
    assert few.illegal(SPEC, small, 8) == "more subgroups than lanes"
    assert replace(few, warps=8, tile=16).illegal(SPEC, small, 8) != "more subgroups than lanes"


def test_groups_of_one_subgroup_wait_for_nobody() -> None:
    for target, most in (("sm_90", 15), ("gfx942", 0)):
        found = find_target(target)
        assert rules.wait_by_themselves(1, 9, found)
        assert rules.wait_by_themselves(99, 1, found)
        assert rules.wait_by_themselves(2, 2, found) is (most >= 2)
        assert rules.wait_by_themselves(15, 2, found) is (most >= 15)
        assert not rules.wait_by_themselves(16, 2, found)


@pytest.mark.parametrize(("dtype", "grad", "columns"), [("bf16", None, 8), ("bf16", "f32", 8)])
def test_bulk_copies_have_16_bytes_of_either_row(
    dtype: str, grad: str | None, columns: int
) -> None:
    how, target = replace(BULK, warps=1, vector=1), find_target("sm_90")
    assert how.illegal(NormSpec((columns,), dtype, grad_output_dtype=grad), target) is None
    less = NormSpec((columns - 1,), dtype, grad_output_dtype=grad)
    assert how.illegal(less, target) == "a row is less than 16 bytes, which bulk copies have"


@pytest.mark.parametrize(
    ("how", "spec"),
    [
        (replace(STAGED, groups=1), SPEC),
        (replace(READ, few_rows=FEW), SPEC),
        (replace(FORWARD, in_registers=False, in_shared_memory=True), OF_FORWARD),
    ],
)
def test_all_of_the_shared_memory_may_be_used(how: OnePass | Forward, spec: NormSpec) -> None:
    target = find_target("sm_80")
    few = how.few_rows if isinstance(how, OnePass) else None
    used = how.shared_bytes(spec, target) if few is None else few.shared_bytes(spec, target)
    said = f"{used} bytes of shared memory, at most {used - 1}"
    assert how.illegal(spec, replace(target, shared_bytes=used)) is None
    why = how.illegal(spec, replace(target, shared_bytes=used - 1))
    assert why == (said if few is None else f"few rows: {said}")


def test_ones_are_enough_for_a_cpu() -> None:
    least = RowBlocks(1, 1, 1, share=1, most_workgroups=1, span_chunks=1)
    assert least.illegal(NormSpec((1,)), find_target("host")) is None


STANDS_FOR: dict[str, tuple[NormSpec, Schedule, Schedule, str | None]] = {
    "itself": (SPEC, STAGED, STAGED, None),
    "another of its form": (SPEC, READ, STAGED, None),
    "two passes": (SPEC, READ, TWO, None),
    "one pass": (SPEC, TWO, READ, None),
    "an illegal one": (SPEC, READ, replace(READ, warps=33), "1056 threads, at most 1024"),
    "a forward": (OF_FORWARD, FORWARD, replace(FORWARD, resident=2), None),
    "an illegal forward": (
        OF_FORWARD,
        FORWARD,
        replace(FORWARD, rows=8),
        "2048 threads, at most 1024",
    ),
    "another order of sums": (
        OF_FORWARD,
        FORWARD,
        replace(FORWARD, threads=512, chunks=1),
        "it shares a row out in another way than the choice without tuning",
    ),
    "a forward's for a backward's": (
        SPEC,
        READ,
        FORWARD,
        "expected two schedules of a backward or of a forward, got Forward and OnePass",
    ),
    "a backward's for a forward's": (
        OF_FORWARD,
        FORWARD,
        TWO,
        "expected two schedules of a backward or of a forward, got TwoPass and Forward",
    ),
    "a CPU's": (
        SPEC,
        READ,
        BLOCKS,
        "expected two schedules of a backward or of a forward, got RowBlocks and OnePass",
    ),
    "for a CPU's": (
        SPEC,
        BLOCKS,
        READ,
        "expected two schedules of a backward or of a forward, got OnePass and RowBlocks",
    ),
    "both a forward's, of a backward": (
        SPEC,
        FORWARD,
        FORWARD,
        "Forward is no schedule of layer_norm_backward",
    ),
    "both a backward's, of a forward": (
        OF_FORWARD,
        READ,
        STAGED,
        "OnePass is no schedule of layer_norm",
    ),
}


@pytest.mark.parametrize("name", STANDS_FOR)
def test_what_may_stand_for_the_choice(name: str) -> None:
    spec, chosen, schedule, why = STANDS_FOR[name]
    assert why_illegal(spec, find_target("sm_90"), chosen, schedule) == why


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ("resident_rule", (1, 4096), (2, 1025)),
        ("resident_rule", (2, 1024), (3, 683)),
        ("stride_rule", (1048575,), (1048576,)),
        ("grid_rule", (65535,), (65536,)),
        ("terms_rule", (1024,), (1025,)),
    ],
)
def test_a_rule_of_numbers_from_both_sides(
    rule: str, kept: tuple[int, ...], broken: tuple[int, ...]
) -> None:
    assert not getattr(rules, rule)(*kept)[0]
    assert getattr(rules, rule)(*broken)[0]


def test_the_largest_number() -> None:
    assert rules.out_of_bounds(replace(READ, workgroups=2**31 - 1)) is None
    assert rules.out_of_bounds(replace(READ, workgroups=2**31)) == "a number above 2147483647"
