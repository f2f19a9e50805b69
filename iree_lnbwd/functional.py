"""The op as a function: compiles on first use, then runs."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from iree_lnbwd import runtime
from iree_lnbwd.arguments import DEFAULT_EPS, LayerNormGrads, bind
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.runtime import LayerNormBackward, interop
from iree_lnbwd.spec import LayerNormSpec

_LOADED_MODULES = 64

_Key = tuple[LayerNormSpec, DeviceUri]
_loading: dict[_Key, threading.RLock] = {}
_alive: WeakValueDictionary[_Key, LayerNormBackward] = WeakValueDictionary()
# A thread that loads is not there in a forked process, and never gives its lock back.
os.register_at_fork(after_in_child=_loading.clear)


def layer_norm_backward(
    grad_output: Any,
    input: Any,
    normalized_shape: int | Sequence[int],
    mean: Any = None,
    rstd: Any = None,
    weight: Any = None,
    bias: Any = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    *,
    eps: float = DEFAULT_EPS,
    device: str | None = None,
) -> LayerNormGrads:
    """Gradients of layer normalization with respect to its input, weight and bias.

    The arguments are those of ``aten::native_layer_norm_backward``. Element types are f32, f16,
    bf16 (``ml_dtypes.bfloat16``) and f64; f64 does not mix with the others. Sums are in f32 (f64
    for f64). The formula is in ``ir/README.md``.

    The first call for a spec and device compiles it (about a second) and keeps the module in an
    on-disk cache, ``$IREE_LNBWD_CACHE``.

    Arrays may be NumPy's, PyTorch's, or any that speak DLPack, all of one kind and in one place;
    how a call on a GPU is ordered is said at `LayerNormBackward`.

    Args:
        grad_output: [..., *normalized_shape], the gradient that reached the output.
        input: [..., *normalized_shape], any number of rows, zero too.
        normalized_shape: The trailing dimensions that were normalized.
        mean: [...], with or without trailing ones, f32 (f64 for f64 data). Taken as it is. None,
            with ``rstd``, recomputes both from ``input``.
        rstd: As ``mean``: 1 / sqrt(biased variance + eps).
        weight: [*normalized_shape]; None means ones, and no ``grad_weight``.
        bias: [*normalized_shape]; only its element type matters, to ``grad_bias``.
        output_mask: Which of the three gradients to compute.
        eps: Used where the statistics are recomputed; finite.
        device: IREE device URI: "local-task" (the CPU), "cuda", "hip", "cuda://1". None takes the
            one where ``input`` is.

    Returns:
        The gradients, in new arrays of ``input``'s library; None where not asked for.

    Raises:
        TypeError, ValueError: Before anything is compiled or run, naming the argument, what came
            and what was expected.
        DeviceError: The device is absent or no target fits it.
        CompileError: The compiler is missing or failed.
    """
    arrays: dict[str, Any] = {
        "grad_output": grad_output,
        "input": input,
        "mean": mean,
        "rstd": rstd,
        "weight": weight,
        "bias": bias,
    }
    framework = interop.on_gpu("input", input)
    views: dict[str, Any] = interop.views(framework, arrays)
    call = bind(normalized_shape=normalized_shape, output_mask=output_mask, eps=eps, **views)
    where = DEFAULT_DEVICE if framework is None else call.arrays["input"].device
    uri = DeviceUri.parse(where if device is None else device)
    if call.spec is None:
        return LayerNormGrads(None, None, None)
    op = loaded(call.spec, uri)
    if framework is not None:
        return op(**arrays)
    return interop.from_numpy(op.run(call), like=input)


@functools.lru_cache(maxsize=_LOADED_MODULES)
def loaded(spec: LayerNormSpec, uri: DeviceUri) -> LayerNormBackward:
    """The module for a spec on a device: from memory, the cache on disk, or the compiler.

    Threads that need the same one wait for the first of them; where that one fails, the next tries.
    """
    from iree_lnbwd import cache  # the compiler is not needed to import the package

    key = (spec, uri)
    with _loading.setdefault(key, threading.RLock()):
        if (op := _alive.get(key)) is None:
            vmfb, _ = cache.build(spec, target_of(uri))
            op = _alive[key] = runtime.load_built(vmfb, str(uri))
        return op
