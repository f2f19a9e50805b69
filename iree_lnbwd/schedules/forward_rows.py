"""What kinds of rows forwards have, as their rules see them."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import HEAD_COLUMNS, widest_vector
from iree_lnbwd.schedules.forward import WORD_BYTES, bytes_of, normalized

# On NVIDIA's GPUs, from so many columns on, a thread has more elements of narrow accesses. From
# 1902 schedules of 19 widths from 265 to 13001, on an H200.
LEAST_OF_MORE = 193
# Rows of a head's width, from 251 schedules of 64, 128 and 256 columns: a thread has more of them,
# by their bytes, nothing caps its registers, and workgroups are larger, but for rows that have
# little to load.
HEAD_ELEMENTS = {2: 32, 4: 16}
LEAST_THREADS = 4  # of a row that has so many accesses: fewer load too few bytes side by side


def has_two(spec: NormSpec) -> bool:
    """Whether two tensors have what a row needs."""
    return spec.has(RESIDUAL) or spec.gate is not None


def is_slow(spec: NormSpec, vector: int) -> bool:
    """Whether accesses are so narrow that their number decides."""
    return vector * bytes_of(normalized(spec)) <= WORD_BYTES


def is_head(spec: NormSpec, vector: int) -> bool:
    """Whether rows are as narrow as those of a head, in wide accesses, and fill some threads."""
    elements = HEAD_ELEMENTS.get(bytes_of(normalized(spec)))
    if elements is None or is_slow(spec, vector):
        return False
    return LEAST_THREADS * elements <= spec.columns <= HEAD_COLUMNS


def has_more(spec: NormSpec, target: Target) -> bool:
    """Whether threads of a narrow row have more of it than elsewhere."""
    of_head = is_head(spec, widest_vector(spec.columns, (normalized(spec),)))
    return target.backend == "cuda" and spec.columns >= LEAST_OF_MORE and not of_head
