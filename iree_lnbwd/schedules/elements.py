"""The elements of a row that a thread handles: in one access, and in total at most."""

from __future__ import annotations

from collections.abc import Sequence

from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.spec import NormSpec

HEAD_COLUMNS = 256  # of a row as narrow as those of heads, at most
# Bytes: the widest global access, of NVIDIA (PTX ISA, ld.v4.b32) and of AMD (global_load_dwordx4).
_ACCESS_BYTES = 16
_ACROSS_BYTES = 8  # of accesses across the borders of rows
_LEAST_ACROSS = 64  # columns of a row that touches few more accesses than it needs: a rule of thumb
# 32-bit words that a thread holds of each of its two sums. If a row needs more, two passes are
# faster (NVIDIA H200).
_MOST_WORDS = 32
# Elements of the widest access with which partial rows of f32 are stored in whole lines.
WHOLE_LINES = 4


def vector_of(spec: NormSpec) -> int:
    """Elements in the widest access that divides a row: 16 bytes of the wider of dy and x."""
    return widest_vector(spec.columns, (spec.dtype, spec.dy_dtype))


def widest_vector(columns: int, dtypes: Sequence[str]) -> int:
    """Elements in the widest access that divides a row of so many, of the widest of these types."""
    vector = widest_access(dtypes)
    while columns % vector:
        vector //= 2
    return vector


def widest_access(dtypes: Sequence[str]) -> int:
    """Elements in the widest access, of the widest of these types."""
    return _ACCESS_BYTES // max(DTYPES[name].numpy.itemsize for name in dtypes)


def copied_vector(spec: NormSpec) -> int:
    """Elements of the accesses with which rows are copied: the widest that divides a row.

    If it is narrow, accesses of 8 bytes go across the borders of rows; on an H200 they were faster
    than wider ones.
    """
    if spec.columns < _LEAST_ACROSS:
        return vector_of(spec)
    across = [vector for vector in across_borders(spec) if vector * _widest(spec) == _ACROSS_BYTES]
    return max([vector_of(spec), *across])


def across_borders(spec: NormSpec) -> tuple[int, ...]:
    """Elements of the accesses that would go across the borders of rows, narrowest first.

    They are of a word, two words and 16 bytes, of the wider of dy and x.
    """
    sizes = (size // _widest(spec) for size in (4, _ACROSS_BYTES, _ACCESS_BYTES))
    return tuple(vector for vector in sizes if vector and spec.columns % vector)


def _widest(spec: NormSpec) -> int:
    """Bytes of an element, of the wider of dy and x."""
    return max(DTYPES[name].numpy.itemsize for name in (spec.dtype, spec.dy_dtype))


def words(spec: NormSpec) -> int:
    """32-bit registers of a number in a sum."""
    return DTYPES[spec.acc_dtype].numpy.itemsize // 4


def most_elements(spec: NormSpec) -> int:
    """The most elements of a row whose sums its threads can hold."""
    return _MOST_WORDS // words(spec)
