"""Forwards whose weight has sets: which of them were measured, and what their rules say."""

from __future__ import annotations

from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.operands import RESIDUAL, Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.forward import WORD_BYTES, bytes_of, bytes_of_weights, normalized
from iree_lnbwd.schedules.forward_rows import has_more, is_head, is_slow
from iree_lnbwd.schedules.ir_types import itemsize

# Rows whose weight is their set's: few rows share one, so that it comes from the L2 cache, and is
# loaded with the row. A thread has more elements of f32, workgroups are smaller, unless several
# rows share a subgroup, and a thread gets the registers that it needs: so many, by the bytes of an
# element, two for each element, and more where a subgroup has the row. From 1063 schedules of 8
# widths from 896 to 5120, on an H200, and 171 of 15 widths from 24 to 3208, on an H100: a layer
# norm of 800 columns in bf16 went from 54 % of the ceiling to 90.
ELEMENTS_OF_SETS = {2: 22, 4: 15}
WARPS_OF_SETS = 2
_REGISTERS_OF_SETS = {2: 8, 4: 32}
_LEAST_REGISTERS_OF_SETS = 48
_MORE_REGISTERS_OF_SUBGROUP = 8
# Those of 16 bits on NVIDIA's GPUs: by 720 more, of layer norms of 448 to 2768 columns (H200),
# instructions decide. Fewer columns are idle, and a subgroup keeps a whole row if it can, as narrow
# as it came if that is much: 1152 columns went from 91 % of a copy to 98, 640 from 84 to 94.
LESS_IDLE_OF_SETS = 0.95
IDLE_OF_SETS = 1.08
PACKED_ELEMENTS_OF_SETS = 28
_REGISTERS_IN_SUBGROUP = {True: 64, False: 96}  # of a thread, by whether rows stay narrow
_REGISTERS_ACROSS_SUBGROUPS = {12: 40, 16: 48, 24: 56}  # likewise, by its elements at most
_BYTES_OF_SETS = 4  # of the weight and the bias of a column, where these were measured


def has_sets(spec: NormSpec, vector: int) -> bool:
    """Whether a forward's weight has sets, and its rows are as those that were measured."""
    is_one = spec.weight_sets and not spec.family.is_backward and spec.gate is None
    is_known = bytes_of(normalized(spec)) in ELEMENTS_OF_SETS and not is_slow(spec, vector)
    return is_one and is_known and not is_head(spec, vector)


def has_known_sets(spec: NormSpec, target: Target, vector: int) -> bool:
    """Whether they are of 16 bits, which were measured in more ways."""
    is_narrow = bytes_of(normalized(spec)) < WORD_BYTES
    return has_sets(spec, vector) and is_narrow and has_more(spec, target)


def is_known(spec: NormSpec, target: Target, vector: int) -> bool:
    """Whether other ways to share out such rows were measured."""
    if has_sets(spec, vector):
        return has_known_sets(spec, target, vector)
    return has_more(spec, target)


def registers_of_sets(
    spec: NormSpec, target: Target, vector: int, way: tuple[int, int], *, packs: bool
) -> int:
    """Registers of a thread, of rows whose weight is their set's.

    Args:
        spec: What is computed.
        target: Where.
        vector: Elements of an access.
        way: Accesses of a thread, and the threads of a row.
        packs: Whether rows stay as narrow as they came.
    """
    (chunks, threads), lanes = way, target.subgroup_size
    elements, in_subgroup = chunks * vector, threads <= lanes
    as_needed = _REGISTERS_OF_SETS[bytes_of(normalized(spec))] + 2 * elements
    if not has_known_sets(spec, target, vector):
        more = _MORE_REGISTERS_OF_SUBGROUP if in_subgroup else 0
        return max(as_needed, _LEAST_REGISTERS_OF_SETS) + more
    beside = max(0, bytes_of_weights(spec) - _BYTES_OF_SETS)
    if spec.has(RESIDUAL):
        beside += itemsize(spec, Element.RESIDUAL)
    known = _REGISTERS_ACROSS_SUBGROUPS.items()
    usual = next((most for least, most in known if elements <= least), as_needed)
    if in_subgroup:
        usual = _REGISTERS_IN_SUBGROUP[packs]
    return usual + beside * elements // WORD_BYTES
