"""PyTorch's tensors: on the CPU, their memory as NumPy arrays; and tensors on a GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.ops.arguments import Array, GpuArray
from iree_lnbwd.ops.layouts import ACCESS_BYTES
from iree_lnbwd.runtime.frameworks.dlpack import view_of
from iree_lnbwd.runtime.frameworks.framework import Framework, type_name

# Dispatch keys of a tensor that is only a piece of memory with a shape. Wrappers, tensors of
# torch.func, and sparse and nested tensors have other keys.
_PLAIN_KEYS = frozenset(
    ("ADInplaceOrView", *(a + b for a in ("", "Autograd", "Autocast") for b in ("CPU", "CUDA")))
)
LAZY_KEYS = frozenset(("Negative", "ZeroTensor"))  # a copy removes them


def is_torch(array: Any) -> bool:
    """Whether an object is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def uri_of(device: Any) -> DeviceUri:
    """A device of PyTorch's, a CPU or a GPU; without an index, the current one."""
    torch = sys.modules["torch"]
    if device.type == "cpu":
        return DeviceUri.parse(DEFAULT_DEVICE)
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceUri("hip" if torch.version.hip else "cuda", index)


def tensors_memory(name: str, tensor: Any) -> Array:
    """The memory of a tensor on the CPU as NumPy's array.

    Raises:
        TypeError: The op does not know its element type, naming the argument.
    """
    # After Tensor.numpy(), PyTorch could not free the memory, as FSDP2 does. np.from_dlpack gives a
    # read-only array before NumPy 2.1. So neither is used.
    dtype = _numpy_types().get(tensor.dtype)
    if dtype is None:
        expected = ", ".join(map(str, _numpy_types().values()))
        raise TypeError(f"{name}: expected an element type of {expected}, got {tensor.dtype}")
    strides = None if tensor.is_contiguous() else tensor.stride()
    return view_of(tensor.data_ptr(), tuple(tensor.shape), strides, dtype, keeper=tensor)


def as_tensor(array: Array) -> Any:
    """A tensor with the array's memory."""
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    # NumPy's strides of an array without elements may all be zero.
    return tensor if array.size else tensor.new_empty(tensor.shape)


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
    """Whether a PyTorch tensor is only a piece of memory that holds its values."""
    return not _strange_keys(_dispatch_keys(tensor))


def check_memory(
    name: str, tensor: Any, *, allowed: frozenset[str] = frozenset()
) -> frozenset[str]:
    """The unusual properties of a tensor that are allowed.

    Raises:
        TypeError: It has others; the message names the argument.
        ValueError: Its memory was freed, or is smaller than its shape says.
    """
    strange = _strange_keys(_dispatch_keys(tensor))
    if strange - allowed:
        raise TypeError(
            f"{name}: expected a tensor whose memory holds its values, got a "
            f"{type_name(tensor)} with {', '.join(sorted(strange))}"
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


def copied(tensor: Any) -> Any:
    """A contiguous copy of a tensor."""
    return tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _dispatch_keys(tensor: Any) -> int:
    keys: int = sys.modules["torch"]._C._dispatch_keys(tensor).raw_repr()
    return keys


@functools.cache
def _strange_keys(keys: int) -> frozenset[str]:
    """The keys in a set of dispatch keys that mean more than a piece of memory."""
    text = str(sys.modules["torch"]._C.DispatchKeySet.from_raw_repr(keys))
    return frozenset(text.partition("(")[2].rstrip(")").split(", ")) - _PLAIN_KEYS


def layout_of(tensor: Any) -> bool | tuple[int, ...] | None:
    """Whether a tensor's elements follow each other; else its strides, where kernels may use them.

    None where they may not.
    """
    return True if tensor.is_contiguous() else _strides(tensor)


def _strides(tensor: Any) -> tuple[int, ...] | None:
    """A tensor's strides, if its address is one that a row may have; its memory may be none."""
    try:
        is_aligned = tensor.data_ptr() % ACCESS_BYTES == 0
    except RuntimeError:
        return None
    return tuple(tensor.stride()) if is_aligned else None


def _extent(tensor: Any) -> int:
    """Bytes from a tensor's first to its last."""
    nbytes: int = tensor.nbytes
    if not nbytes or tensor.is_contiguous():
        return nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements: int = 1 + sum((n - 1) * stride for n, stride in steps)
    return elements * int(tensor.element_size())


class _TorchOnGpu:
    """PyTorch, whose allocator knows streams; calls use its current stream."""

    waits = False

    def __init__(self) -> None:
        self._torch: Any = sys.modules["torch"]
        self._tensor: Any = self._torch.Tensor
        # The class of such a wrapper looks like any tensor's. It has no address, but nobody asks
        # for one if only its element type matters.
        self._is_functional: Callable[[Any], bool] = self._torch._is_functional_tensor
        self._numpy = _numpy_types()
        self._dtypes = {ours: theirs for theirs, ours in self._numpy.items()}
        self._dtypes[np.dtype(np.uint8)] = self._torch.uint8
        self.empty_like = functools.partial(
            self._torch.empty_like, memory_format=self._torch.contiguous_format
        )
        # A PyTorch without GPU support lacks this function.
        self.is_captured: Callable[[], bool] = getattr(
            self._torch._C,
            "_cuda_isCurrentStreamCapturing",
            self._torch.cuda.is_current_stream_capturing,
        )
        # The public function takes ten times as long; Triton's launcher uses this one, too.
        self._raw_stream: Callable[[int], int] = getattr(
            self._torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: self._torch.cuda.current_stream(index).cuda_stream,
        )

    def signature(self, names: Sequence[str], arrays: Sequence[Any]) -> Hashable:
        found: list[object] = []
        for array in arrays:
            if not isinstance(array, self._tensor):  # None, or a mistake
                found.append(type(array))
                continue
            try:
                found += (array.shape, array.dtype, array.get_device(), layout_of(array))
            except RuntimeError:  # it has no shape or no strides, which `describe` refuses
                found.append(array.layout)
            found += (type(array), array.is_neg(), self._is_functional(array))
        return tuple(found)

    def describe(self, name: str, array: Any) -> GpuArray:
        if not isinstance(array, self._torch.Tensor):
            raise TypeError(
                f"{name}: expected a PyTorch tensor, as input or output is, got {type_name(array)}"
            )
        if array.device.type != "cuda":
            raise ValueError(
                f"{name}: expected a tensor on a GPU, as input or output is, got one on "
                f"{array.device}"
            )
        lazy = check_memory(name, array, allowed=LAZY_KEYS)
        return GpuArray(
            shape=tuple(array.shape),
            dtype=self._numpy.get(array.dtype, array.dtype),
            device=str(uri_of(array.device)),
            contiguous=not lazy and array.is_contiguous(),
            strides=_strides(array) if not lazy else None,
        )

    def addresses(self, arrays: Sequence[Any]) -> tuple[list[int], object]:
        # Storage may shrink after a kind of call is known, and the address stays.
        found = [
            array.data_ptr()
            if array.untyped_storage().nbytes()
            >= array.storage_offset() * array.element_size() + _extent(array)
            else 0
            for array in arrays
        ]
        return found, arrays

    def copy(self, name: str, array: Any) -> Any:
        check_memory(name, array, allowed=LAZY_KEYS)
        return copied(array)

    def capsule(self, array: Any) -> object:
        return array.detach().__dlpack__()

    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return self._torch.empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def assign(self, to: Any, array: Any) -> None:
        with self._torch.inference_mode(to.is_inference()):  # else PyTorch refuses
            to.detach().copy_(array)

    def clear(self, array: Any) -> None:
        with self._torch.inference_mode(array.is_inference()):  # else PyTorch refuses
            array.detach().zero_()

    def stream(self, device: DeviceUri) -> int:
        return self._raw_stream(device.index)


@functools.cache
def on_gpu() -> Framework:
    """PyTorch, for its tensors on a GPU."""
    return _TorchOnGpu()
