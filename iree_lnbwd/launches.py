"""Which kernels of a module run, in which order and on what: its host program, as a value.

IREE's host program in the .vmfb says the same. This one is for callers who bring a stream of their
own to launch the kernels on. It travels in the module's reflection, beside its spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.schedule import OnePass, Schedule, TwoPass
from iree_lnbwd.spec import GRADIENTS, LayerNormSpec
from iree_lnbwd.targets import Target


@dataclass(frozen=True)
class RowCount:
    """A number that follows from M: ``min(ceil(M / per), most)``.

    Attributes:
        per: Rows that count for one.
        most: None where there is no upper bound.
    """

    per: int = 1
    most: int | None = None

    def of(self, rows: int) -> int:
        """The number for M rows."""
        count = -(-rows // self.per)
        return count if self.most is None else min(count, self.most)


Count = int | RowCount


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        kernel: Its name in the module's code.
        workgroups: Along x, y and z.
        bindings: What its pointers point to: arguments of the spec, or scratch.
        constants: 32-bit numbers that follow the pointers.
    """

    kernel: str
    workgroups: tuple[Count, Count, Count]
    bindings: tuple[str, ...]
    constants: tuple[Count, ...]


@dataclass(frozen=True)
class Scratch:
    """Memory between kernels, and for results that nobody asked for.

    Attributes:
        name: As bindings speak of it.
        bytes: For each of ``count``.
        count: How often.
    """

    name: str
    bytes: int
    count: Count


@dataclass(frozen=True)
class Launches:
    """All of a call, for at least one row.

    Attributes:
        scratch: To have ready, with anything in it.
        kernels: In order; each may start when the one before is done.
    """

    scratch: tuple[Scratch, ...]
    kernels: tuple[Launch, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Launches:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: A field is unknown, missing or has a bad value.
        """
        scratch = tuple(
            Scratch(one["name"], one["bytes"], _count(one["count"])) for one in values["scratch"]
        )
        kernels = []
        for one in values["kernels"]:
            x, y, z = map(_count, one["workgroups"])
            bindings, constants = tuple(one["bindings"]), tuple(map(_count, one["constants"]))
            kernels.append(Launch(one["kernel"], (x, y, z), bindings, constants))
        return cls(scratch, tuple(kernels))


def count_of(count: Count, rows: int) -> int:
    """A count for M rows."""
    return count if isinstance(count, int) else count.of(rows)


def launches(spec: LayerNormSpec, target: Target, schedule: Schedule) -> Launches | None:
    """What a call launches; None where only IREE's host program says it.

    That is where IREE itself made the kernels: of whole tensors, and of recomputed statistics.
    """
    if not isinstance(schedule, OnePass | TwoPass) or spec.recompute_eps is not None:
        return None
    acc_bytes = DTYPES[spec.acc_dtype].numpy.itemsize
    inputs = ("grad_output", "input", "mean", "rstd", "weight")
    partials = ("partial_dgamma", "partial_dbeta")
    rows = RowCount()
    if isinstance(schedule, OnePass):
        walkers = RowCount(schedule.groups, schedule.workgroups)
        kernels = [Launch("rows", (walkers, 1, 1), (*inputs, "grad_input", *partials), (rows,))]
        sums: tuple[str, ...] = ()
    else:
        walkers = RowCount(schedule.rows, schedule.workgroups)
        tiles = math.ceil(spec.columns / schedule.tile(target))
        sums = ("sum_h", "sum_hx")
        kernels = [
            Launch("row_sums", (rows, 1, 1), (*inputs, *sums), (rows,)),
            Launch(
                "columns", (tiles, walkers, 1), (*inputs, *sums, "grad_input", *partials), (rows,)
            ),
        ]
    unasked = [] if spec.output_mask[0] else [Scratch("grad_input", 0, 1)]
    if any(spec.output_mask[1:]):
        tiles = math.ceil(spec.columns / schedule.finalize_columns)
        kernels.append(
            Launch("finalize", (tiles, 1, 1), (*partials, "grad_weight", "grad_bias"), (walkers,))
        )
        types = (spec.gamma_dtype, spec.beta_dtype)
        unasked += [
            Scratch(name, spec.columns * DTYPES[dtype].numpy.itemsize, 1)
            for name, dtype, asked in zip(GRADIENTS[1:], types, spec.output_mask[1:], strict=True)
            if not asked
        ]
    scratch = (
        *(Scratch(name, spec.columns * acc_bytes, walkers) for name in partials),
        *(Scratch(name, acc_bytes, rows) for name in sums),
        *unasked,
    )
    return Launches(scratch, tuple(kernels))


def _count(value: Any) -> Count:
    return value if isinstance(value, int) else RowCount(**value)
