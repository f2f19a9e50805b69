"""Integer operations for arrays of any shape that NumPy lacks."""

from __future__ import annotations

import numpy as np

from iree_lnbwd.emulator.launch import Array


def reverse_bits(value: Array) -> Array:
    """Unsigned numbers with their lowest bit highest."""
    digits = np.unpackbits(np.ascontiguousarray(value)[..., None].view(np.uint8), axis=-1)
    result: Array = np.packbits(digits, axis=-1, bitorder="little")[..., ::-1]
    return np.ascontiguousarray(result).view(value.dtype)[..., 0]
