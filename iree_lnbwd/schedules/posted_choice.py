"""The choice where a row's workgroups post its sums in memory: rows too wide for one of them.

On GPUs without clusters, one pass reads a row that no workgroup has registers for only so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from iree_lnbwd.hardware.products import Product
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import (
    WHOLE_LINES,
    across_borders,
    copied_vector,
    vector_of,
    widest_access,
)
from iree_lnbwd.schedules.ir_types import reads_more
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.rules import MOST_THAT_POST, alike


class Way(NamedTuple):
    """How workgroups of a cluster have their part of a row.

    Attributes:
        warps: Subgroups of a workgroup.
        resident: Workgroups of a multiprocessor.
        ahead: Steps between a row's fetch and its use.
        slots: Rows in shared memory.
        defers: Whether a row's sums are received a row later.
    """

    warps: int
    resident: int
    ahead: int
    slots: int
    defers: bool


# Best first. Layer norm's backwards of 20480 to 100000 columns (five multiples of 8) by sm_80's
# modules on an H100 reached 80 to 86 % of the ceiling in bf16 by the first way for 16 bits, and of
# 20480 to 131072 columns 89 to 94 in f32 by the first of the others. One workgroup to a
# multiprocessor: 76 to 82, and 87 to 94. If sums are waited for at once: 48 to 64, and 63 to 80.
_WIDE = (Way(16, 1, 2, 3, True), Way(16, 1, 2, 2, True))
_OF_16_BITS = (Way(8, 2, 2, 3, True), *_WIDE)
_OF_MORE_BITS = (Way(8, 2, 2, 2, True), *_WIDE)
_LOADED = (Way(16, 1, 0, 0, False),)
# Columns of a thread: with 32, some spill 36 bytes (layer norm, bf16, ptxas 12.9, sm_80), and from
# the output, which needs more registers, 128 bytes with 24.
_MOST_COLUMNS = 24
_MOST_FROM_OUTPUT = 20
_IN_16_BITS = 8  # elements of the widest access
_IN_A_WORD = 2  # elements of 16 bits
# Of the L2 cache, for what all workgroups read again at once: a rule of thumb. No T4 was measured.
_OF_L2 = 2, 3
_MORE = 1.5  # times the fewest workgroups of a row, if so more processors have work
_BUSY = 0.85  # of the processors: enough for a way to come before others
# What more workgroups of a row cost, as a power of their number. By sm_80's modules on an H200, a
# layer norm's backward of 87000 columns in bf16 reached 78 % of the ceiling with 15 workgroups to a
# row and 255 of 264 at work, and 67 with 22 to a row and all of them.
_SHARING = 0.25


def posted(spec: NormSpec, target: Target, product: Product) -> Iterator[OnePass]:
    """Those that are legal, best first: few workgroups to a row, and few processors idle.

    Other gradients of the output, or a gate, are loaded late: of these, no step has a later row.
    """
    others = []
    ways, vectors = _ways(spec, target)
    for way in ways:
        for vector in vectors:
            found = list(fitting(spec, target, product, way, min(vector, WHOLE_LINES)))
            few = found[0].cluster if found else 0
            near = [one for one in found if one.cluster <= _MORE * few]
            for one in sorted(near, key=_at_work, reverse=True):
                if one.workgroups * one.cluster >= _BUSY * way.resident * product.processors:
                    yield one
                else:
                    others.append(one)
    yield from others


def _ways(spec: NormSpec, target: Target) -> tuple[tuple[Way, ...], Collection[int]]:
    """Ways, and elements of an access, best first.

    Odd rows in 16 bits are copied by words. So layer norm's backwards of 9679 to 98279 columns
    reached 70 to 71 % of the ceiling on an H100, and by two words 57 to 72.
    """
    if not target.has_cp_async:
        return _LOADED, (vector_of(spec),)
    is_narrow = widest_access((spec.dtype, spec.dy_dtype)) == _IN_16_BITS
    words = [vector for vector in across_borders(spec) if is_narrow and vector == _IN_A_WORD]
    vectors = dict.fromkeys((*words, copied_vector(spec), vector_of(spec)))
    return _OF_16_BITS if is_narrow else _OF_MORE_BITS, vectors


def fitting(
    spec: NormSpec, target: Target, product: Product, way: Way, vector: int
) -> Iterator[OnePass]:
    """Of any number of workgroups to a row, those that are legal and whose registers suffice."""
    at_once = way.resident * product.processors
    most_columns = _MOST_FROM_OUTPUT if spec.from_output else _MOST_COLUMNS
    # The estimate is high: 142 registers of 128 spilled 0 to 4 bytes. With 16 columns of a thread,
    # as it had it, layer norm's 98279 columns in bf16 reached 65 % of the ceiling on an H100, and
    # 70 with 22; 20001 in f32 85, and 91 with 20.
    loads_late = reads_more(spec)
    is_plain = not (spec.from_output or spec.residual_dtype or loads_late)
    for cluster in range(2, MOST_THAT_POST + 1):
        one = OnePass(
            workgroups=alike(at_once // cluster, spec.columns, vector),
            groups=1,
            vector=vector,
            rereads=True,
            cluster=cluster,
            posts=True,
            loads_late=loads_late,
            **way._asdict(),
        )
        again = 0 if way.slots else one.own_columns(spec) * _bytes(spec) * at_once
        if (
            one.workgroups * cluster <= at_once
            and _OF_L2[1] * again <= _OF_L2[0] * product.l2_bytes
            and one.has_room(spec, target)
            and one.chunks(spec, target) * vector <= most_columns
            and (is_plain or one.registers(spec, target) <= one.registers_available(target))
            and one.illegal(spec, target) is None
        ):
            yield one


def _at_work(one: OnePass) -> float:
    """Workgroups that run at once, less what it costs that they share rows."""
    return one.workgroups * one.cluster / math.pow(one.cluster, _SHARING)


def _bytes(spec: NormSpec) -> int:
    """Of an element of dy and one of x."""
    return sum(DTYPES[name].numpy.itemsize for name in (spec.dy_dtype, spec.dtype))
