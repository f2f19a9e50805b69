"""The caller's arrays: NumPy's, PyTorch's, and those of any library that supports DLPack.

Nothing here imports a framework, because a framework whose array came is loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from iree_lnbwd.ops.arguments import AnyArray, Array, Results
from iree_lnbwd.runtime.frameworks import dlpack, dlpack_arrays, pytorch
from iree_lnbwd.runtime.frameworks.framework import Framework, type_name


def on_gpu(name: str, array: Any) -> Framework | None:
    """The framework of an array on a GPU; None for one in the host's memory.

    Raises:
        TypeError: It is no array; the message names the argument.
        ValueError: It is on no device, or its library does not say where.
    """
    if pytorch.is_torch(array):
        if array.is_cuda:
            return pytorch.on_gpu()
        if array.device.type == "cpu":
            return None
        raise ValueError(
            f"{name}: expected a tensor on the CPU or a GPU, got one on {array.device}"
        )
    if isinstance(array, np.ndarray):
        return None
    if is_tracer(array):
        raise TypeError(
            f"{name}: expected an array with values, got a JAX tracer; iree_lnbwd.jax has the "
            "norms for jax.jit, jax.grad, jax.vmap and the like"
        )
    if not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected a NumPy array, a PyTorch tensor or another array with DLPack, got "
            f"{type_name(array)}"
        )
    return None if dlpack.place(name, array)[0] in dlpack.HOST_KINDS else dlpack_arrays.ON_GPU


def views(framework: Framework | None, arrays: Mapping[str, Any]) -> dict[str, AnyArray | None]:
    """The arrays for `arguments.bind`, by name: NumPy's, or the known facts about a GPU's.

    Args:
        framework: That of ``input``, and of all others.
        arrays: The caller's arrays; None stays None.

    Raises:
        TypeError, ValueError: An array is of another kind or on another device; the message names
            the argument.
    """
    view = to_numpy if framework is None else framework.describe
    return {name: None if array is None else view(name, array) for name, array in arrays.items()}


def to_numpy(name: str, array: Any) -> Array:
    """The values of an array in the host's memory, as a NumPy array; copied if no view has them.

    Raises:
        TypeError: It is no array, or has no memory for its values.
        ValueError: It is on a GPU, or its library does not give it away.
    """
    if pytorch.is_torch(array) and array.is_cpu:
        lazy = pytorch.check_memory(name, array, allowed=pytorch.LAZY_KEYS)
        return pytorch.tensors_memory(name, pytorch.copied(array) if lazy else array)
    return memory_of(name, array)


def memory_of(name: str, array: Any) -> Array:
    """An array in the host's memory as a NumPy array that shares its memory.

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
            f"{name}: expected an array in the host's memory, as input or output is, got a GPU's"
        )
    if not pytorch.is_torch(array):
        return dlpack.to_numpy(name, array)
    pytorch.check_memory(name, array)
    return pytorch.tensors_memory(name, array)


def is_immutable(array: Any) -> bool:
    """Whether an array's library treats it as immutable, even if its capsule says otherwise."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def is_tracer(array: Any) -> bool:
    """Whether an array stands for values that one of JAX's transformations will give it."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def from_numpy(results: Results, like: Any) -> Results:
    """NumPy arrays as arrays of the library of ``like``, without a copy.

    They stay NumPy's if that library is known only by DLPack.
    """
    if isinstance(like, np.ndarray):
        return results
    wrap = (
        pytorch.as_tensor
        if pytorch.is_torch(like)
        else getattr(dlpack_arrays.namespace(like), "asarray", None)
    )
    if wrap is None:
        return results
    return type(results)(*(None if array is None else wrap(array) for array in results))
