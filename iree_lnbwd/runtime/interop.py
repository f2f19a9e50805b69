"""The arrays that callers bring: NumPy's, PyTorch's, and whatever else speaks DLPack.

Nothing here imports a framework: an array whose framework were not loaded could not have come.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from iree_lnbwd.arguments import ARGUMENTS, AnyArray, Array, GpuArray, LayerNormGrads
from iree_lnbwd.devices import DeviceUri
from iree_lnbwd.runtime import dlpack
from iree_lnbwd.runtime.dlpack import view_of

# PyTorch's dispatch keys of a tensor that is nothing but a piece of memory with a shape. Wrappers,
# tensors of torch.func, sparse and nested ones have others.
_PLAIN_KEYS = frozenset(
    ("ADInplaceOrView", *(a + b for a in ("", "Autograd", "Autocast") for b in ("CPU", "CUDA")))
)
_NAMES = (*ARGUMENTS, *(f"out.{gradient}" for gradient in LayerNormGrads._fields))
_LAZY_KEYS = frozenset(("Negative", "ZeroTensor"))  # what a copy settles


class Framework(Protocol):
    """How a library's arrays on a GPU are read and made.

    Attributes:
        waits: Whether its later work would not know of ours, so that a call must wait at its end.
    """

    waits: bool

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        """All that `describe` depends on, and whether it would refuse, at little cost.

        Args:
            arrays: A call's arguments in ATen's order, and behind them its storage, if it has any.

        Raises:
            TypeError, ValueError: As `describe`.
        """

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

    def copy(self, name: str, array: Any) -> Any:
        """The values of an array, in memory of their own, one after the other.

        Raises:
            ValueError: The library cannot, naming the argument.
        """

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
        ValueError: It is nowhere, or its library does not say.
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
            f"{_kind(array)}"
        )
    return None if dlpack.place(name, array)[0] in dlpack.HOST_KINDS else _DLPACK


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
    """The values of an array in the host's memory as NumPy's: a view, unless that holds others.

    Raises:
        TypeError: It is no array, or has no memory for its values.
        ValueError: It is on a GPU, or its library does not give it away.
    """
    if _is_torch(array) and array.is_cpu:
        lazy = _check_memory(name, array, allowed=_LAZY_KEYS)
        return _tensors_memory(name, _torch_copy(array) if lazy else array)
    return memory_of(name, array)


def memory_of(name: str, array: Any) -> Array:
    """An array in the host's memory as NumPy's: what is written to the one is in the other.

    Raises:
        TypeError: It is no array, or one whose memory is not its values.
        ValueError: It is on a GPU, or its library does not give it away.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got a masked one")
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if on_gpu(name, array) is not None:
        raise ValueError(
            f"{name}: expected an array in the host's memory, as input is, got a GPU's"
        )
    if not _is_torch(array):
        return dlpack.to_numpy(name, array)
    _check_memory(name, array)
    return _tensors_memory(name, array)


def is_immutable(array: Any) -> bool:
    """Whether an array's library counts on its content, whatever its capsule says."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def _tensors_memory(name: str, tensor: Any) -> Array:
    # Not by Tensor.numpy(), after which PyTorch could not free the memory, as FSDP2 does; nor by
    # np.from_dlpack, which makes it read-only before NumPy 2.1.
    dtype = _numpy_types().get(tensor.dtype)
    if dtype is None:
        expected = ", ".join(map(str, _numpy_types().values()))
        raise TypeError(f"{name}: expected an element type of {expected}, got {tensor.dtype}")
    strides = None if tensor.is_contiguous() else tensor.stride()
    return view_of(tensor.data_ptr(), tuple(tensor.shape), strides, dtype, keeper=tensor)


def from_numpy(gradients: LayerNormGrads, like: Any) -> LayerNormGrads:
    """NumPy arrays as what the caller of ``like`` works with, without a copy.

    They stay NumPy's where nothing is known of that library but DLPack.
    """
    if isinstance(like, np.ndarray):
        return gradients
    wrap = _torch_tensor if _is_torch(like) else getattr(_namespace(like), "asarray", None)
    if wrap is None:
        return gradients
    return LayerNormGrads(*(None if array is None else wrap(array) for array in gradients))


def _torch_tensor(array: Array) -> Any:
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


@functools.cache
def _numpy_types() -> Mapping[Any, np.dtype[Any]]:
    """PyTorch's element types that the op knows, and NumPy's."""
    torch = sys.modules["torch"]
    return {
        torch.float16: np.dtype(np.float16),
        torch.float32: np.dtype(np.float32),
        torch.float64: np.dtype(np.float64),
        torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    }


def is_plain(tensor: Any) -> bool:
    """Whether a tensor of PyTorch's is a piece of memory that holds its values, and no more."""
    return not _strange_keys(_dispatch_keys(tensor))


def _check_memory(
    name: str, tensor: Any, *, allowed: frozenset[str] = frozenset()
) -> frozenset[str]:
    """What is strange about a tensor, of what is allowed to be.

    Raises:
        TypeError: Something else is, naming the argument.
        ValueError: Its memory is gone, or less than its shape says.
    """
    strange = _strange_keys(_dispatch_keys(tensor))
    if strange - allowed:
        raise TypeError(
            f"{name}: expected a tensor whose memory holds its values, got a "
            f"{_kind(tensor)} with {', '.join(sorted(strange))}"
        )
    elements = tensor.numel()
    if strange or not elements:
        return strange
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((n - 1) * stride for n, stride in steps)
    elements += tensor.storage_offset()
    there = tensor.untyped_storage().nbytes()
    if there < elements * tensor.element_size():
        raise ValueError(
            f"{name}: expected a tensor with {elements * tensor.element_size()} bytes of storage, "
            f"got one with {there}: it was freed or made smaller"
        )
    return strange


def _torch_copy(tensor: Any) -> Any:
    return tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _dispatch_keys(tensor: Any) -> int:
    keys: int = sys.modules["torch"]._C._dispatch_keys(tensor).raw_repr()
    return keys


@functools.cache
def _strange_keys(keys: int) -> frozenset[str]:
    """Of a set of dispatch keys, those that tell of more than a piece of memory."""
    text = str(sys.modules["torch"]._C.DispatchKeySet.from_raw_repr(keys))
    return frozenset(text.partition("(")[2].rstrip(")").split(", ")) - _PLAIN_KEYS


class _Torch:
    """PyTorch: its allocator knows streams, and its current one is asked for."""

    waits = False

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._tensor: Any = self._torch.Tensor
        self._driver = "hip" if self._torch.version.hip else "cuda"
        self._numpy = _numpy_types()
        self._dtypes = {ours: theirs for theirs, ours in self._numpy.items()}
        self._dtypes[np.dtype(np.uint8)] = self._torch.uint8
        self.empty_like = functools.partial(
            self._torch.empty_like, memory_format=self._torch.contiguous_format
        )
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

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        found: list[object] = []
        for array in arrays:
            if isinstance(array, self._tensor):
                found += (array.shape, array.dtype, array.get_device(), array.is_contiguous())
                found += (type(array), array.is_neg())
            else:  # None, or a mistake
                found.append(type(array))
        return tuple(found)

    def describe(self, name: str, array: Any) -> GpuArray:
        if not isinstance(array, self._torch.Tensor):
            raise TypeError(f"{name}: expected a PyTorch tensor, as input is, got {_kind(array)}")
        if array.device.type != "cuda":
            raise ValueError(
                f"{name}: expected a tensor on a GPU, as input is, got one on {array.device}"
            )
        lazy = _check_memory(name, array, allowed=_LAZY_KEYS)
        return GpuArray(
            shape=tuple(array.shape),
            dtype=self._numpy.get(array.dtype, array.dtype),
            device=str(DeviceUri(self._driver, array.get_device())),
            contiguous=not lazy and array.is_contiguous(),
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        return [array.data_ptr() for array in arrays], arrays

    def copy(self, name: str, array: Any) -> Any:
        _check_memory(name, array, allowed=_LAZY_KEYS)
        return _torch_copy(array)

    def capsule(self, array: Any) -> object:
        return array.detach().__dlpack__()

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def clear(self, array: Any) -> None:
        with self._torch.inference_mode(array.is_inference()):  # else PyTorch refuses
            array.detach().zero_()

    def stream(self, device: DeviceUri) -> int:
        return self._raw_stream(device.index)


@functools.cache
def _torch() -> _Torch:
    return _Torch()


class _DlPack:
    """Any other library (CuPy, JAX): work is put on the default stream and waited for."""

    waits = True

    def signature(self, arrays: Sequence[Any]) -> Hashable:
        return tuple(
            None if array is None else self.describe(name, array)
            for name, array in zip(_NAMES, arrays, strict=False)
        )

    def describe(self, name: str, array: Any) -> GpuArray:
        if not hasattr(array, "__dlpack_device__"):
            raise TypeError(
                f"{name}: expected an array with DLPack, as input is, got {_kind(array)}"
            )
        kind, index = dlpack.place(name, array)
        driver = dlpack.GPU_DRIVERS.get(kind)
        if driver is None:
            raise ValueError(f"{name}: expected an array on a GPU, as input is, got one elsewhere")
        given = dlpack.exported(name, array)
        return GpuArray(
            shape=given.shape,
            dtype=given.dtype or str(getattr(array, "dtype", "an unknown one")),
            device=str(DeviceUri(driver, index)),
            contiguous=given.strides is None or _is_dense(given.shape, given.strides),
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        exported = [dlpack.exported("array", array) for array in arrays]
        return [one.address for one in exported], exported

    def capsule(self, array: Any) -> object:
        return array.__dlpack__(**dlpack.on_default_stream(array))

    def copy(self, name: str, array: Any) -> Any:
        described = self.describe(name, array)
        new = self.empty(array, described.shape, described.dtype)
        try:
            new[...] = array
        except TypeError as error:  # such arrays are immutable
            raise ValueError(
                f"{name}: expected a contiguous array on {described.device} at an aligned address, "
                f"got one that {type(array).__module__} would have to copy, and cannot"
            ) from error
        return new

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        empty_like = _namespace(like).empty_like
        try:
            return empty_like(like, shape=shape, dtype=dtype, order="C")
        except TypeError:  # of a library that has no other order
            return empty_like(like, shape=shape, dtype=dtype)

    def empty_like(self, like: Any) -> Any:
        return _namespace(like).empty_like(like)

    def is_captured(self) -> bool:
        return False

    def clear(self, array: Any) -> None:
        if hasattr(array, "fill"):  # where not, arrays are immutable, and new ones are zeros
            array.fill(0)

    def stream(self, device: DeviceUri) -> int:
        return dlpack.DEFAULT_STREAMS[device.driver]


_DLPACK = _DlPack()


def _kind(array: Any) -> str:
    return type(array).__name__


def _namespace(array: Any) -> Any:
    """The library with ``empty_like`` and the like: as the array API has it, else its package."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(type(array).__module__.split(".")[0])


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
