"""The op as a function: compiles on first use, then runs."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from iree_lnbwd import runtime
from iree_lnbwd.arguments import (
    ARGUMENTS,
    DEFAULT_EPS,
    LayerNormGrads,
    Options,
    bind_arrays,
    check_options,
)
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.runtime import LayerNormBackward
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

_LOADED_MODULES = 256
_INPUT, _MEAN = ARGUMENTS.index("input"), ARGUMENTS.index("mean")
_HOST = DeviceUri.parse(DEFAULT_DEVICE)

# A function that is told of each module that is about to be compiled.
Compiling = Callable[[NormSpec, Target], None]

_Key = tuple[NormSpec, DeviceUri]
_loading: dict[_Key, threading.RLock] = {}
_alive: WeakValueDictionary[_Key, LayerNormBackward] = WeakValueDictionary()
# Known kinds of call on a GPU; they are kept as long as their modules are loaded.
_known: WeakValueDictionary[Hashable, KnownCall] = WeakValueDictionary()
# A thread that is loading does not exist in a forked process, and would never release its lock.
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

    Arrays may be NumPy's, PyTorch's, or any that support DLPack, all of one kind and in one place.
    `LayerNormBackward` says how calls on a GPU are ordered.

    Args:
        grad_output: [..., *normalized_shape], the gradient that reached the output.
        input: [..., *normalized_shape], any number of rows, zero too.
        normalized_shape: The trailing dimensions that were normalized.
        mean: [...], with or without trailing dimensions of 1, f32 (f64 for f64 data). Used as
            given. If ``mean`` and ``rstd`` are None, both are recomputed from ``input``.
        rstd: As ``mean``: 1 / sqrt(biased variance + eps).
        weight: [*normalized_shape]; None means ones, and no ``grad_weight``.
        bias: [*normalized_shape]; only its element type matters, to ``grad_bias``.
        output_mask: Which of the three gradients to compute.
        eps: Used if the statistics are recomputed; finite.
        device: IREE device URI: "local-task" (the CPU), "cuda", "hip", "cuda://1". None takes the
            device that ``input`` is on.

    Returns:
        The gradients, in new arrays of ``input``'s library; None where not asked for.

    Raises:
        TypeError, ValueError: Before anything is compiled or run, naming the argument, what came
            and what was expected.
        DeviceError: The device is absent or no target fits it.
        CompileError: The compiler is missing or failed.
    """
    options = check_options(normalized_shape, output_mask, eps)
    uri = None if device is None else DeviceUri.parse(device)
    gradients, _ = backward((grad_output, input, mean, rstd, weight, bias), options, uri)
    return gradients


def backward(
    given: Sequence[Any],
    options: Options,
    uri: DeviceUri | None = None,
    compiling: Compiling | None = None,
) -> tuple[LayerNormGrads, KnownCall | None]:
    """As `layer_norm_backward`, for arguments in ATen's order, which are bound only once.

    Args:
        given: The arrays.
        options: Checked; for a new kind of call, its spec checks them once more.
        uri: The device; None takes the one that ``input`` is on.
        compiling: Is called if a module has to be compiled.

    Returns:
        The gradients, and the kind of the call, if the arrays are on a GPU and there was something
        to compute.
    """
    framework = interop.on_gpu("input", given[_INPUT])
    if framework is None:
        call = bind_arrays(interop.views(None, dict(zip(ARGUMENTS, given, strict=True))), options)
        if call.spec is None:
            return LayerNormGrads(None, None, None), None
        op = loaded(call.spec, uri or _HOST, compiling)
        return interop.from_numpy(op.run(call), like=given[_INPUT]), None
    kind = framework.signature(given)
    # Where the statistics are given, eps is no option: calls with any are of one kind.
    key = (kind, options if given[_MEAN] is None else options[:2], uri)
    if (known := _known.get(key)) is None:
        views = interop.views(framework, dict(zip(ARGUMENTS, given, strict=True)))
        call = bind_arrays(views, options)
        if call.spec is None:
            return LayerNormGrads(None, None, None), None
        where = DeviceUri.parse(call.arrays["input"].device)
        if uri not in (None, where):
            raise ValueError(f"device: expected {where}, where input is, or None, got {uri}")
        op = loaded(call.spec, where, compiling)
        known = _known[key] = op.learn(kind, framework, views, call)
    return known.run(framework, given), known


@functools.lru_cache(maxsize=_LOADED_MODULES)
def loaded(
    spec: NormSpec, uri: DeviceUri, compiling: Compiling | None = None
) -> LayerNormBackward:
    """The module for a spec on a device: from memory, the cache on disk, or the compiler.

    Threads that need the same module wait for the first of them; if it fails, the next tries.

    Args:
        spec: What it computes.
        uri: The device.
        compiling: Is called if it has to be compiled.
    """
    from iree_lnbwd import cache  # the compiler is not needed to import the package

    key = (spec, uri)
    with _loading.setdefault(key, threading.RLock()):
        if (op := _alive.get(key)) is None:
            target = target_of(uri)
            entry = cache.Entry(spec, target)
            if entry.kept is None and compiling is not None:
                compiling(spec, target)
            vmfb, _ = entry.build()
            op = _alive[key] = runtime.load_built(vmfb, str(uri))
        return op
