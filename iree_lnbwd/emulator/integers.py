"""Integer operations for arrays of any shape that NumPy lacks."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.launch import Array

_NONE = np.int32(-1)


def reverse_bits(value: Array) -> Array:
    """Unsigned numbers with their lowest bit highest."""
    digits = np.unpackbits(np.ascontiguousarray(value)[..., None].view(np.uint8), axis=-1)
    result: Array = np.packbits(digits, axis=-1, bitorder="little")[..., ::-1]
    return np.ascontiguousarray(result).view(value.dtype)[..., 0]


def leading_zeros(value: Array) -> Array:
    """How many zeros an unsigned number begins with, as i32; -1 of 0."""
    if value.dtype == np.uint64:
        high, low = (value >> np.uint64(32)).astype(np.uint32), value.astype(np.uint32)
        below = leading_zeros(low)
        below = np.where(below < 0, below, below + np.int32(32))
        return np.where(high == 0, below, leading_zeros(high))
    bits = np.frexp(value.astype(np.float64))[1]
    return np.where(value == 0, _NONE, (8 * value.itemsize - bits).astype(np.int32))


def trailing_zeros(value: Array) -> Array:
    """How many zeros an unsigned number ends with, as i32; -1 of 0."""
    lowest = value & (~value + value.dtype.type(1))
    at = np.frexp(lowest.astype(np.float64))[1] - 1
    return np.where(value == 0, _NONE, at.astype(np.int32))


def sign_bits(value: Array) -> Array:
    """How many bits at the top of a signed number are its sign, as i32; -1 where all are."""
    unsigned = np.dtype(f"u{value.itemsize}")
    return leading_zeros((value ^ value >> value.dtype.type(8 * value.itemsize - 1)).view(unsigned))


def population(value: Array) -> Array:
    """How many ones an unsigned number has, as u32."""
    digits = np.unpackbits(np.ascontiguousarray(value)[..., None].view(np.uint8), axis=-1)
    result: Array = digits.sum(axis=-1, dtype=np.uint32)
    return result
