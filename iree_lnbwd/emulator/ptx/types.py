"""The types of PTX's operands, and what is known of an instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # over lanes, of a type of DTYPES; NumPy's own types lose track in such arithmetic

# f16 and bf16 stay bits: NumPy has no bf16, and its f16 arithmetic is f32's, rounded.
DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    **{f"{kind}8": np.dtype(np.uint8) for kind in "bu"},
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
}

Function = Callable[..., Array]


class UnknownInstructionError(ValueError):
    """An instruction, or a form of one, that is not implemented."""


@dataclass(frozen=True)
class Semantics:
    """What an instruction computes.

    Attributes:
        result: Type of the result.
        sources: Types of the source operands.
        function: From sources to result.
    """

    result: str
    sources: tuple[str, ...]
    function: Function


def is_float(type_: str) -> bool:
    """A type is one of floats."""
    return type_.startswith(("f", "bf"))


def bits_of(type_: str) -> int:
    """How many bits a type has."""
    return DTYPES[type_].itemsize * 8
