"""The arrays that callers bring: NumPy's, PyTorch's, and whatever else speaks DLPack.

Nothing here imports a framework: an array whose framework were not loaded could not have come.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from iree_lnbwd.arguments import AnyArray, Array, GpuArray, LayerNormGrads
from iree_lnbwd.devices import DeviceUri

_HOST_KINDS = (1, 3)  # DLDeviceType: kDLCPU, kDLCUDAHost
_GPU_DRIVERS = {2: "cuda", 10: "hip"}  # kDLCUDA, kDLROCM
_DTYPES = {  # (DLDataTypeCode, bits)
    (2, 16): np.dtype(np.float16),
    (2, 32): np.dtype(np.float32),
    (2, 64): np.dtype(np.float64),
    (4, 16): np.dtype(ml_dtypes.bfloat16),
}
_LEGACY_DEFAULT_STREAM = 1  # what CUDA calls so, and DLPack too


class Framework(Protocol):
    """How a library's arrays on a GPU are read and made.

    Attributes:
        waits: Whether its later work would not know of ours, so that a call must wait at its end.
    """

    waits: bool

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """All that `describe` depends on, and whether it would refuse, at little cost."""

    def describe(self, name: str, array: Any) -> GpuArray:
        """Shape, type and place.

        Raises:
            TypeError: The array is none of this framework's, naming the argument.
            ValueError: It is on no GPU.
        """

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        """Where their elements are, and what keeps them there as long as it is referenced."""

    def capsule(self, array: Any) -> object:
        """The array as a DLPack capsule."""

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array on the device of another."""

    def empty_like(self, like: Any) -> Any:
        """A new array of another's shape and type, on its device."""

    def clear(self, array: Any) -> None:
        """Fills an array that is the caller's, or new, with zeros."""

    def is_captured(self) -> bool:
        """Whether the current stream's work goes into a graph, to be run later."""

    def stream(self, device: DeviceUri) -> int:
        """The stream that the caller's work is on, as the driver's handle."""


def on_gpu(name: str, array: Any) -> Framework | None:
    """The framework of an array on a GPU; None for one in the host's memory.

    Raises:
        TypeError: It is no array, naming the argument.
    """
    if _is_torch(array):
        if array.is_cuda:
            return _torch()
        if array.device.type == "cpu":
            return None
        raise ValueError(
            f"{name}: expected a tensor on the CPU or a GPU, got one on {array.device}"
        )
    if isinstance(array, np.ndarray):
        return None
    if not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected a NumPy array, a PyTorch tensor or another array with DLPack, got "
            f"{type(array).__name__}"
        )
    return None if array.__dlpack_device__()[0] in _HOST_KINDS else _DLPACK


def views(framework: Framework | None, arrays: Mapping[str, Any]) -> dict[str, AnyArray | None]:
    """What `arguments.bind` takes, by argument: NumPy's arrays, or what is known of a GPU's.

    Args:
        framework: That of ``input``; the others must be of it too.
        arrays: The caller's; None stays None.

    Raises:
        TypeError, ValueError: An array is of another kind or elsewhere, naming the argument.
    """
    view = to_numpy if framework is None else framework.describe
    return {name: None if array is None else view(name, array) for name, array in arrays.items()}


def to_numpy(name: str, array: Any) -> Array:
    """An array in the host's memory as NumPy's, without a copy.

    Raises:
        TypeError: It is no array.
        ValueError: It is on a GPU.
    """
    if isinstance(array, np.ndarray):
        return array
    if on_gpu(name, array) is not None:
        raise ValueError(
            f"{name}: expected an array in the host's memory, as input is, got a GPU's"
        )
    if not _is_torch(array):
        return np.asarray(array)
    # Not by Tensor.numpy(), after which PyTorch could not free the memory, as FSDP2 does.
    detached = array.detach()
    if detached.dtype == sys.modules["torch"].bfloat16:  # which NumPy has no name for
        return np.from_dlpack(detached.view(sys.modules["torch"].uint16)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(detached)


def from_numpy(gradients: LayerNormGrads, like: Any) -> LayerNormGrads:
    """NumPy arrays as what the caller of ``like`` works with, without a copy."""
    if isinstance(like, np.ndarray):
        return gradients
    wrap = _torch_tensor if _is_torch(like) else _namespace(like).asarray
    return LayerNormGrads(*(None if array is None else wrap(array) for array in gradients))


def _torch_tensor(array: Array) -> Any:
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


class _Torch:
    """PyTorch: its allocator knows streams, and its current one is asked for."""

    waits = False

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._driver = "hip" if self._torch.version.hip else "cuda"
        self._dtypes = {
            np.dtype(np.float16): self._torch.float16,
            np.dtype(np.float32): self._torch.float32,
            np.dtype(np.float64): self._torch.float64,
            np.dtype(ml_dtypes.bfloat16): self._torch.bfloat16,
            np.dtype(np.uint8): self._torch.uint8,
        }
        self.empty_like = self._torch.empty_like
        # Without a GPU, a PyTorch has no such function.
        self.is_captured: Callable[[], bool] = getattr(
            self._torch._C,
            "_cuda_isCurrentStreamCapturing",
            self._torch.cuda.is_current_stream_capturing,
        )
        # The public way takes ten times as long; Triton's launcher goes this way too.
        self._raw_stream: Callable[[int], int] = getattr(
            self._torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: self._torch.cuda.current_stream(index).cuda_stream,
        )
        self._numpy = {theirs: ours for ours, theirs in self._dtypes.items()}

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        found: list[object] = []
        try:
            for array in arrays:
                found += (array.shape, array.dtype, array.get_device(), array.is_contiguous())
        except AttributeError:  # not all are tensors: None, or a mistake
            tensors = [array for array in arrays if isinstance(array, self._torch.Tensor)]
            return (*map(type, arrays), self.signature(tensors))
        return tuple(found)

    def describe(self, name: str, array: Any) -> GpuArray:
        if not isinstance(array, self._torch.Tensor):
            raise TypeError(f"{name}: expected a PyTorch tensor, as input is, got {_kind(array)}")
        if array.device.type != "cuda":
            raise ValueError(
                f"{name}: expected a tensor on a GPU, as input is, got one on {array.device}"
            )
        return GpuArray(
            shape=tuple(array.shape),
            dtype=self._numpy.get(array.dtype, array.dtype),
            device=str(DeviceUri(self._driver, array.get_device())),
            contiguous=array.is_contiguous(),
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        return [array.data_ptr() for array in arrays], arrays

    def capsule(self, array: Any) -> object:
        return array.detach().__dlpack__()

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def clear(self, array: Any) -> None:
        array.zero_()

    def stream(self, device: DeviceUri) -> int:
        return self._raw_stream(device.index)


@functools.cache
def _torch() -> _Torch:
    return _Torch()


class _DlPack:
    """Any other library (CuPy, JAX): work is put on the default stream and waited for."""

    waits = True

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        return tuple(None if array is None else self.describe("", array) for array in arrays)

    def describe(self, name: str, array: Any) -> GpuArray:
        if not hasattr(array, "__dlpack_device__"):
            raise TypeError(
                f"{name}: expected an array with DLPack, as input is, got {_kind(array)}"
            )
        kind, index = array.__dlpack_device__()
        driver = _GPU_DRIVERS.get(int(kind))
        if driver is None:
            raise ValueError(f"{name}: expected an array on a GPU, as input is, got one elsewhere")
        _, tensor = _consumed(array)
        shape, dtype = tuple(tensor.shape[: tensor.ndim]), tensor.dtype
        return GpuArray(
            shape=shape,
            dtype=_DTYPES.get((dtype.code, dtype.bits), str(array.dtype)),
            device=str(DeviceUri(driver, index)),
            contiguous=not tensor.strides or _is_dense(shape, tensor.strides[: tensor.ndim]),
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        consumed = [_consumed(array) for array in arrays]
        return [(tensor.data or 0) + tensor.byte_offset for _, tensor in consumed], consumed

    def capsule(self, array: Any) -> object:
        return array.__dlpack__(stream=_LEGACY_DEFAULT_STREAM)

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return _namespace(like).empty_like(like, shape=shape, dtype=dtype)

    def empty_like(self, like: Any) -> Any:
        return _namespace(like).empty_like(like)

    def is_captured(self) -> bool:
        return False

    def clear(self, array: Any) -> None:
        if hasattr(array, "fill"):  # where not, arrays are immutable, and new ones are zeros
            array.fill(0)

    def stream(self, device: DeviceUri) -> int:
        return _LEGACY_DEFAULT_STREAM


_DLPACK = _DlPack()


def _kind(array: Any) -> str:
    return type(array).__name__


def _namespace(array: Any) -> Any:
    """The library with ``empty_like`` and the like: as the array API has it, else its package."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.split(".")[0]]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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


def _consumed(array: Any) -> tuple[object, _DLTensor]:
    """The array's capsule, which keeps it, and what it says; ordered before our stream's work."""
    capsule = array.__dlpack__(stream=_LEGACY_DEFAULT_STREAM)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return capsule, _DLTensor.from_address(pointer(capsule, b"dltensor"))
