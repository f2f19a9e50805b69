"""The devices and element types of tensors that an op has a module for."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from iree_lnbwd.errors import shown
from iree_lnbwd.ops.operands import GRAD_OUTPUT, MORE_GRAD_OUTPUTS, Op, names

BY_NAME = {  # PyTorch's element types by the names of `ops.dtypes`
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
DTYPES = tuple(BY_NAME.values())
HALF = (torch.float16, torch.bfloat16)
_DEVICE_TYPES = ("cpu", "cuda", "meta")  # PyTorch calls AMD GPUs "cuda" too

# A tensor's device and element type; None for a tensor that is not given.
TensorKind = tuple[torch.device, torch.dtype] | None


def kind(tensor: Tensor | None) -> TensorKind:
    """Of a tensor."""
    return None if tensor is None else (tensor.device, tensor.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and sums have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def given(op: Op, tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The arguments of an op that are there, by name; checked.

    Args:
        op: The op.
        tensors: In the order of its table.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.
    """
    there, found = {}, {}
    for name, tensor in zip(names(op.arguments), tensors, strict=True):
        if tensor is not None:
            there[name] = tensor
            found[name] = (tensor.device, tensor.dtype)
    check(op.data.name, **found)
    return there


def given_for(
    output_dtype: torch.dtype | None, op: Op, tensors: Iterable[Tensor | None]
) -> dict[str, Tensor]:
    """As `given`, of a forward whose output is to have an element type.

    Raises:
        TypeError, ValueError: As `given`; also if the input does not mix with this type.
    """
    there = given(op, tensors)
    if output_dtype is not None:
        check_output_dtype(output_dtype, there[op.data.name].dtype)
    return there


def check_output_dtype(output_dtype: torch.dtype, of_input: torch.dtype) -> None:
    """Expects the element type of an output that an input of another may have.

    Raises:
        TypeError: Saying what came and what was expected.
    """
    if output_dtype not in DTYPES:
        expected = ", ".join(map(str, DTYPES))
        raise TypeError(f"output_dtype: expected one of {expected}, got {shown(output_dtype)}")
    if wide(output_dtype) != wide(of_input):
        expected = ", ".join(str(dtype) for dtype in DTYPES if wide(dtype) == wide(of_input))
        raise TypeError(
            f"output_dtype: expected one of {expected} for an input of {of_input}, got "
            f"{output_dtype}"
        )


def are_taken(input: Tensor, *parameters: Tensor | None) -> bool:
    """Whether an op takes tensors of such element types, and an input of its device and layout.

    It is asked in each call of a replaced norm, and torch.compile reads it.
    """
    dtype = input.dtype
    if dtype not in DTYPES or input.device.type not in _DEVICE_TYPES:
        return False
    if input.layout is not (torch.jagged if input.is_nested else torch.strided):
        return False
    for parameter in parameters:
        if parameter is not None and parameter.dtype != dtype:
            other = parameter.dtype
            if other not in DTYPES or torch.float64 in (other, dtype):
                return False
    return True


@functools.lru_cache
def check(first: str, /, **kinds: TensorKind) -> None:
    """Expects kinds of tensors that the op has a module for.

    Args:
        first: The name of the one that decides the device.
        kinds: By name.

    Raises:
        TypeError, ValueError: Naming the tensor, what came and what was expected.
    """
    of_first = kinds.get(first)
    if of_first is None:
        raise TypeError(f"{first}: expected a tensor, got None")
    device, dtype = of_first
    if device.type not in _DEVICE_TYPES:
        raise ValueError(f"{first}: expected a tensor on the CPU or on a GPU, got one on {device}")
    for name, other in {first: of_first, **kinds}.items():
        if other is None:
            continue
        if other[0] != device:
            raise ValueError(f"{name}: expected a tensor on {device} like {first}, got {other[0]}")
        if other[1] not in DTYPES:
            expected = ", ".join(map(str, DTYPES))
            raise TypeError(f"{name}: expected an element type of {expected}, got {other[1]}")
        if other[1] != dtype and torch.float64 in (other[1], dtype):
            raise TypeError(f"{name}: expected {dtype} like {first}, got {other[1]}")
    of_output = kinds.get(GRAD_OUTPUT.name)
    for name in names(MORE_GRAD_OUTPUTS):
        other = kinds.get(name)
        if other is not None and of_output is not None and other[1] != of_output[1]:
            raise TypeError(f"{name}: expected {of_output[1]} like grad_output, got {other[1]}")
