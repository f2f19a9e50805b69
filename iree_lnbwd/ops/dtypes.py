"""The element types that the op knows, under MLIR's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from iree_lnbwd.errors import shown


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        name: MLIR's name, e.g. "bf16".
        numpy: The NumPy type that holds it.
        significand_bits: Including the implicit one.
    """

    name: str
    numpy: np.dtype[Any]
    significand_bits: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.numpy).max)

    @property
    def smallest_normal(self) -> float:
        """The smallest number of full precision."""
        return float(ml_dtypes.finfo(self.numpy).smallest_normal)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above zero."""
        return float(ml_dtypes.finfo(self.numpy).smallest_subnormal)

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number: 2**-significand_bits."""
        return 2.0**-self.significand_bits

    @property
    def accumulator(self) -> str:
        """The type that statistics and sums have: f32, or f64 for f64."""
        return "f64" if self.name == "f64" else "f32"


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("bf16", np.dtype(ml_dtypes.bfloat16), 8),
            DType("f16", np.dtype(np.float16), 11),
            DType("f32", np.dtype(np.float32), 24),
            DType("f64", np.dtype(np.float64), 53),
        )
    }
)

_NAMES = {dtype.numpy: dtype.name for dtype in DTYPES.values()}


# What others call them.
_OTHER_NAMES = {
    "bfloat16": "bf16",
    **dict.fromkeys(("fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("fp32", "float32", "float"), "f32"),
    **dict.fromkeys(("fp64", "float64", "double"), "f64"),
}


def unknown(value: object) -> str:
    """What is wrong with a value that is no name of a type, and which name may be meant."""
    named = str(getattr(value, "__name__", value)).rpartition(".")[-1].lower()
    meant = named if named in DTYPES else _OTHER_NAMES.get(named)
    hint = "" if meant is None else f". Did you mean {meant}?"
    return f"expected one of {', '.join(DTYPES)}, got {shown(value)}{hint}"


def name_of(dtype: npt.DTypeLike) -> str | None:
    """MLIR's name of a NumPy type, or None where the op does not know it."""
    try:
        return _NAMES.get(np.dtype(dtype))
    except TypeError:  # another library's type
        return None


def meant(value: object) -> str | None:
    """MLIR's name of an element type of NumPy or PyTorch; None of anything else.

    No name is taken, and Python's float is not: "float" is 32 bits wide for some, and 64 for NumPy.
    """
    if isinstance(value, np.dtype | type) and value is not float:
        return name_of(value)
    if type(value).__module__ == "torch":
        named = str(value).removeprefix("torch.")
        return next((dtype.name for dtype in DTYPES.values() if str(dtype.numpy) == named), None)
    return None


def check(value: object, name: str) -> str:
    """MLIR's name of an element type: that name, or NumPy's or PyTorch's type.

    Raises:
        ValueError: It is none of them; the message names the argument.
    """
    known = value if isinstance(value, str) and value in DTYPES else meant(value)
    if known is None:
        raise ValueError(f"{name}: {unknown(value)}")
    return known
