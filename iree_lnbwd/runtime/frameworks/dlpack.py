"""DLPack, the protocol by which libraries export arrays in place.

The structures are those of dlpack.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from iree_lnbwd.ops.arguments import Array

HOST_KINDS = (1, 3, 11)  # DLDeviceType: kDLCPU, kDLCUDAHost, kDLROCMHost
GPU_DRIVERS = {2: "cuda", 10: "hip"}  # kDLCUDA, kDLROCM
DEFAULT_STREAMS = {"cuda": 1, "hip": 0}  # the default stream, for the driver and in DLPack

_DTYPES = {  # (DLDataTypeCode, bits)
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (2, 64): np.dtype(np.float64),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def place(name: str, array: Any) -> tuple[int, int]:
    """DLPack's kind of device, and the number of the device.

    Raises:
        ValueError: The library does not say where; the message names the argument.
    """
    try:
        kind, index = array.__dlpack_device__()
    except Exception as error:  # whatever a library raises
        raise ValueError(f"{name}: its library does not say where it is: {error}") from error
    return int(kind), int(index)


class _DType(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, which a ``DLManagedTensor`` begins with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``, of DLPack 1.0."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),  # read-only, or a copy: neither may be written to
        ("tensor", _DLTensor),
    )


class Exported(NamedTuple):
    """An array that a library exported.

    Attributes:
        capsule: Keeps the array's memory.
        address: Of the first element; 0 where there is none.
        shape: Of the array.
        strides: In elements; None where they follow each other.
        dtype: NumPy's of its elements, where the op knows that.
        writable: Writes reach the array. Assumed if the library says nothing.
    """

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    writable: bool


def exported(name: str, array: Any) -> Exported:
    """Exports an array. On a GPU, its pending work is ordered before the default stream's.

    Raises:
        ValueError: The library does not export it; the message names the argument.
    """
    try:
        stream = on_default_stream(array)
        try:
            capsule = array.__dlpack__(max_version=(1, 0), **stream)
        except TypeError:  # the library does not know max_version
            capsule = array.__dlpack__(**stream)
        if (address := _pointer(capsule, b"dltensor_versioned")) is not None:
            managed = _Versioned.from_address(address)
            return _read(capsule, managed.tensor, writable=not managed.flags)
        if (address := _pointer(capsule, b"dltensor")) is not None:
            return _read(capsule, _DLTensor.from_address(address), writable=True)
    except Exception as error:  # whatever a library raises
        raise ValueError(f"{name}: its library does not give it away: {error}") from error
    raise ValueError(f"{name}: expected a DLPack capsule of it, got {type(capsule).__name__}")


def _read(capsule: object, tensor: _DLTensor, *, writable: bool) -> Exported:
    """Reads everything now, because the memory behind ``tensor`` is freed with the capsule."""
    return Exported(
        capsule,
        address=int(tensor.data or 0) + int(tensor.byte_offset),
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        dtype=(
            _DTYPES.get((tensor.dtype.code, tensor.dtype.bits)) if tensor.dtype.lanes == 1 else None
        ),
        writable=writable,
    )


def on_default_stream(array: Any) -> dict[str, int]:
    """The arguments of ``__dlpack__`` that name the consumer's stream; none on a CPU."""
    kind, _ = array.__dlpack_device__()
    driver = GPU_DRIVERS.get(int(kind))
    return {} if driver is None else {"stream": DEFAULT_STREAMS[driver]}


def _pointer(capsule: object, name: bytes) -> int | None:
    """The pointer in a capsule of that name; None if it has another name."""
    return _get_pointer(capsule, name) if _is_valid(capsule, name) else None


def to_numpy(name: str, array: Any) -> Array:
    """An array in the host's memory as NumPy's, without a copy.

    NumPy's own ``from_dlpack`` does not support bf16.

    Raises:
        TypeError: The op does not know its element type; the message names the argument.
        ValueError: The library does not export it.
    """
    given = exported(name, array)
    if given.dtype is None:
        raise TypeError(
            f"{name}: expected an element type of {', '.join(map(str, _DTYPES.values()))}, got "
            f"{getattr(array, 'dtype', 'an unknown one')}"
        )
    return view_of(
        given.address,
        given.shape,
        given.strides,
        given.dtype,
        keeper=given.capsule,
        writable=given.writable,
    )


def view_of(
    address: int,
    shape: tuple[int, ...],
    strides: Sequence[int] | None,
    dtype: np.dtype[Any],
    *,
    keeper: object,
    writable: bool = True,
) -> Array:
    """Memory as NumPy's array.

    Args:
        address: Of the first element.
        shape: Of the array.
        strides: In elements; None where they follow each other.
        dtype: Of the elements.
        keeper: Keeps the memory; the array keeps this.
        writable: Whether it may be written to.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    size = dtype.itemsize
    interface = {
        "version": 3,
        "data": (address, not writable),
        "shape": shape,
        "strides": None if strides is None else tuple([size * stride for stride in strides]),
        "typestr": f"<u{size}",
    }
    return np.asarray(_Memory(interface, keeper)).view(dtype)


class _Memory:
    """Memory that a NumPy array keeps alive through this object."""

    def __init__(self, interface: dict[str, Any], keeper: object) -> None:
        self.__array_interface__ = interface
        self._keeper = keeper
