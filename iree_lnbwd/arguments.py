"""The op's arguments, checked and brought into the form that a module takes, and its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iree_lnbwd import dtypes
from iree_lnbwd.operands import BACKWARD, Access, Kind, Operand, When, names
from iree_lnbwd.spec import (
    MOST_ROWS,
    NormSpec,
    check_eps,
    check_mixture,
    check_normalized_shape,
    check_output_mask,
)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GpuArray:
    """The facts known about an array in a GPU's memory, of any library.

    Attributes:
        shape: Its dimensions.
        dtype: NumPy's name of the element type; another library's where NumPy has none.
        device: IREE device URI, e.g. "cuda://0".
        contiguous: Whether its values follow each other in its memory, the last dimension fastest.
            If not, a call works on a copy.
    """

    shape: tuple[int, ...]
    dtype: Any
    device: str
    contiguous: bool

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> GpuArray:
        """The same memory as an array of another shape."""
        return replace(self, shape=shape)


AnyArray = npt.NDArray[Any] | GpuArray

DEFAULT_EPS = 1e-5  # PyTorch's

_CELLS = Kind.CELLS
_ARRAY_TYPES = (np.ndarray, GpuArray)

ARGUMENTS = names(BACKWARD.arguments)  # arrays that a caller gives, in ATen's order


class LayerNormGrads(NamedTuple):
    """The gradients, as ATen orders them; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: The shape of ``normalized_shape``; the element type of ``bias``, else of
            ``weight``, else of ``input``.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any


class Options(NamedTuple):
    """The options of a call besides its arrays, checked.

    Attributes:
        normalized_shape: Each dimension >= 1.
        output_mask: Which gradients to compute.
        eps: Added to the variance if statistics are recomputed; finite.
    """

    normalized_shape: tuple[int, ...]
    output_mask: tuple[bool, bool, bool]
    eps: float


def check_options(normalized_shape: object, output_mask: object, eps: object) -> Options:
    """The options of a call in one spelling.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    dims = check_normalized_shape(normalized_shape)
    return Options(dims, check_output_mask(output_mask), check_eps(eps))


class BoundCall(NamedTuple):
    """One call: what to compute, and the arrays to compute it from.

    Attributes:
        spec: With dynamic rows. None where the mask leaves nothing to compute.
        shape: Of ``input``; M rows and N columns in all.
        arrays: The arrays that are read, by ATen's name, C-contiguous, as [M, N], [M] or [N]; all
            of them NumPy's, or all of them `GpuArray`.
        has_bias: Whether the caller gave one, so that ``grad_bias`` has its element type.
    """

    spec: NormSpec | None
    shape: tuple[int, ...]
    arrays: Mapping[str, Any]
    has_bias: bool

    @property
    def rows(self) -> int:
        """M."""
        return int(self.arrays["input"].shape[0])

    def shape_of(self, result: Operand) -> tuple[int, ...]:
        """Of a gradient, as the caller sees it."""
        assert self.spec is not None
        return self.shape if result.kind is _CELLS else self.spec.normalized_shape


def bind(
    grad_output: AnyArray,
    input: AnyArray,
    normalized_shape: int | Sequence[int],
    mean: AnyArray | None,
    rstd: AnyArray | None,
    weight: AnyArray | None,
    bias: AnyArray | None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    eps: float = DEFAULT_EPS,
) -> BoundCall:
    """Checks the arguments of a layer-norm backward against each other.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    options = check_options(normalized_shape, output_mask, eps)
    given = (grad_output, input, mean, rstd, weight, bias)
    return bind_arrays(dict(zip(ARGUMENTS, given, strict=True)), options)


def bind_arrays(given: Mapping[str, AnyArray | None], options: Options) -> BoundCall:
    """As `bind`, the arrays by name, and the options checked before."""
    dims, mask, eps = options
    x = _array("input", given["input"])
    if x.shape[max(0, x.ndim - len(dims)) :] != dims:
        raise ValueError(
            f"input: expected a shape that ends in normalized_shape {dims}, got {x.shape}"
        )
    leading = x.shape[: x.ndim - len(dims)]
    rows, columns = math.prod(leading), math.prod(dims)
    if rows > MOST_ROWS:
        raise ValueError(f"input: expected at most {MOST_ROWS} rows, got {rows}")
    dtype = _dtype("input", x)
    accumulator = dtypes.DTYPES[dtype].accumulator
    if (given["mean"] is None) != (given["rstd"] is None):
        there, missing = ("rstd", "mean") if given["mean"] is None else ("mean", "rstd")
        raise ValueError(f"{missing}: expected both mean and rstd or neither, got only {there}")

    shapes = ((x.shape,), (leading, (*leading, *(1,) * len(dims))), (dims,))
    flat = ((rows, columns), (rows,), (columns,))
    arrays: dict[str, AnyArray] = {}
    types: dict[str, str | None] = {}
    mixed: list[tuple[str, str]] = []
    for name, kind, is_required, is_read, is_statistic in _CHECKS:
        array = given[name]
        if array is None and not is_required:
            types[name] = None
            continue
        array = _array(name, array)
        if array.shape not in shapes[kind]:
            expected = " or ".join(map(str, shapes[kind]))
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
        types[name] = found = _dtype(name, array)
        if is_statistic:
            if found != accumulator:
                raise TypeError(f"{name}: expected element type {accumulator}, got {array.dtype}")
        elif found != dtype and (is_read or mask[2]):
            mixed.append((name, found))
        if is_read:
            dense = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
            arrays[name] = dense.reshape(flat[kind])
    _check_place(given)
    for name, found in mixed:
        check_mixture(name, found, dtype)
    has_weight = given["weight"] is not None
    asked = (mask[0], mask[1] and has_weight, mask[2])
    spec = None
    if any(asked):
        spec = _spec(
            normalized_shape=dims,
            dtype=dtype,
            grad_output_dtype=types["grad_output"],
            weight_dtype=types["weight"],
            bias_dtype=types["bias"],
            has_weight=has_weight,
            output_mask=asked,
            eps=eps if given["mean"] is None else None,
        )
    return BoundCall(spec, x.shape, arrays, given["bias"] is not None)


def _check_place(arrays: Mapping[str, AnyArray | None]) -> None:
    """All arrays are on one device, the bias too: its gradient is stored beside it."""
    places = {array.device for array in arrays.values() if isinstance(array, GpuArray)}
    if len(places) > 1:
        where = ", ".join(
            f"{name} on {array.device}"
            for name, array in arrays.items()
            if isinstance(array, GpuArray)
        )
        raise ValueError(f"input: expected all arrays on one device, got {where}")


# The rules for each argument, as a call looks them up. By ATen's name: the place of its kind, and
# whether it is required, is read, and is a statistic.
_CHECKS = tuple(
    (
        operand.name,
        tuple(Kind).index(operand.kind),
        operand.when is When.ALWAYS,
        operand.access is Access.READ,
        operand.kind is Kind.ROWS,
    )
    for operand in BACKWARD.arguments
)

_spec = functools.lru_cache(NormSpec)  # takes microseconds, and calls are alike


def _array(name: str, value: object) -> AnyArray:
    if not isinstance(value, _ARRAY_TYPES):
        raise TypeError(f"{name}: expected a NumPy array, got {type(value).__name__}")
    return value


def _dtype(name: str, array: AnyArray) -> str:
    known = dtypes.name_of(array.dtype)
    if known is None:
        raise TypeError(
            f"{name}: expected an element type of {', '.join(dtypes.DTYPES)}, got {array.dtype}"
        )
    return known
