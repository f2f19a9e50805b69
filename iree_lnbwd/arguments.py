"""What goes into the op, checked and brought into the form of a module, and what comes out."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iree_lnbwd import dtypes
from iree_lnbwd.spec import (
    MOST_ROWS,
    LayerNormSpec,
    check_eps,
    check_mixture,
    check_normalized_shape,
    check_output_mask,
)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GpuArray:
    """What is known of an array in a GPU's memory, whoever's it is.

    Attributes:
        shape: Its dimensions.
        dtype: NumPy's name of the element type; another library's where NumPy has none.
        device: IREE device URI, e.g. "cuda://0".
        contiguous: Whether its values follow each other in its memory, the last dimension fastest.
            Where not, a call works on a copy.
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


@dataclass(frozen=True)
class Call:
    """One call: what to compute, and the arrays to compute it from.

    Attributes:
        spec: With dynamic rows. None where the mask leaves nothing to compute.
        shape: Of ``input``; M rows and N columns in all.
        arrays: By ATen's name, C-contiguous, as [M, N], [M] or [N]; all of them NumPy's,
            or all of them `GpuArray`.
    """

    spec: LayerNormSpec | None
    shape: tuple[int, ...]
    arrays: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """M."""
        return int(self.arrays["input"].shape[0])


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
) -> Call:
    """Checks the arguments of a layer-norm backward against each other.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    dims = check_normalized_shape(normalized_shape)
    mask = check_output_mask(output_mask)
    eps = check_eps(eps)
    x = _array("input", input)
    if x.shape[max(0, x.ndim - len(dims)) :] != dims:
        raise ValueError(
            f"input: expected a shape that ends in normalized_shape {dims}, got {x.shape}"
        )
    leading = x.shape[: x.ndim - len(dims)]
    rows, columns = math.prod(leading), math.prod(dims)
    if rows > MOST_ROWS:
        raise ValueError(f"input: expected at most {MOST_ROWS} rows, got {rows}")
    dtype = _dtype("input", x)
    statistics_dtype = dtypes.DTYPES[dtype].accumulator

    dy = _array("grad_output", grad_output)
    _expect_shape("grad_output", dy, x.shape)
    arrays: dict[str, AnyArray] = {"grad_output": dy, "input": x}
    if (mean is None) != (rstd is None):
        given, missing = ("rstd", "mean") if mean is None else ("mean", "rstd")
        raise ValueError(f"{missing}: expected both mean and rstd or neither, got only {given}")
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is not None:
            arrays[name] = _statistic(name, statistic, leading, len(dims), statistics_dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _expect_shape(name, _array(name, parameter), dims)
    if weight is not None:
        arrays["weight"] = weight

    flat = {"grad_output": (rows, columns), "input": (rows, columns), "weight": (columns,)}
    arrays = {
        name: (np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array).reshape(
            flat.get(name, (rows,))
        )
        for name, array in arrays.items()
    }
    places = {array.device for array in arrays.values() if isinstance(array, GpuArray)}
    if len(places) > 1:
        where = ", ".join(
            f"{name} on {array.device}"
            for name, array in arrays.items()
            if isinstance(array, GpuArray)
        )
        raise ValueError(f"input: expected all arrays on one device, got {where}")
    dy_dtype = _dtype("grad_output", dy)
    weight_dtype = None if weight is None else _dtype("weight", weight)
    bias_dtype = None if bias is None else _dtype("bias", bias)
    for name, other in (("grad_output", dy_dtype), ("weight", weight_dtype), ("bias", bias_dtype)):
        if other is not None and (mask[2] or name != "bias"):
            check_mixture(name, other, dtype)
    asked = (mask[0], mask[1] and weight is not None, mask[2])
    if not any(asked):
        return Call(None, x.shape, arrays)
    spec = _spec(
        normalized_shape=dims,
        dtype=dtype,
        grad_output_dtype=dy_dtype,
        weight_dtype=weight_dtype,
        bias_dtype=bias_dtype,
        has_weight=weight is not None,
        output_mask=asked,
        recompute_eps=eps if mean is None else None,
    )
    return Call(spec, x.shape, arrays)


class Memory(NamedTuple):
    """Where an argument is.

    Attributes:
        name: For messages.
        address: Of its first byte.
        nbytes: All of which are its own, or may be shared with others that are only read.
    """

    name: str
    address: int
    nbytes: int


def check_apart(inputs: Sequence[Memory], results: Sequence[Memory]) -> None:
    """Storage for gradients shares memory with nothing else of a call.

    Some kernels read a row again when parts of its gradient are written, others do not: no form
    could promise what it means.

    Raises:
        ValueError: Naming the two.
    """
    for place, result in enumerate(results):
        for other in (*inputs, *results[:place]):
            begins = max(result.address, other.address)
            ends = min(result.address + result.nbytes, other.address + other.nbytes)
            if begins < ends:
                raise ValueError(
                    f"{result.name}: expected memory of its own, got memory of which {other.name} "
                    f"has {ends - begins} bytes, too"
                )


_spec = functools.lru_cache(LayerNormSpec)  # calls are alike, and a spec takes microseconds


def _array(name: str, value: object) -> AnyArray:
    if not isinstance(value, np.ndarray | GpuArray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(value).__name__}")
    return value


def _dtype(name: str, array: AnyArray) -> str:
    known = dtypes.name_of(array.dtype)
    if known is None:
        raise TypeError(
            f"{name}: expected an element type of {', '.join(dtypes.DTYPES)}, got {array.dtype}"
        )
    return known


def _expect_shape(name: str, array: AnyArray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")


def _statistic(
    name: str, value: object, leading: tuple[int, ...], normalized_rank: int, dtype: str
) -> AnyArray:
    array = _array(name, value)
    with_ones = (*leading, *(1,) * normalized_rank)
    if array.shape not in (leading, with_ones):
        raise ValueError(f"{name}: expected shape {leading} or {with_ones}, got {array.shape}")
    if _dtype(name, array) != dtype:
        raise TypeError(f"{name}: expected element type {dtype}, got {array.dtype}")
    return array
