"""The ops as functions: they compile on first use, then run."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from iree_lnbwd import runtime
from iree_lnbwd.arguments import (
    DEFAULT_EPS,
    LayerNormGrads,
    NormOutput,
    Options,
    Results,
    RmsNormGrads,
    bind_arrays,
    check_options,
    gradients_of,
    results_of,
    variant,
)
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, target_of
from iree_lnbwd.errors import CompileError
from iree_lnbwd.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    RSTD,
    names,
)
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.frameworks import interop
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target

_LOADED_MODULES = 256
_HOST = DeviceUri.parse(DEFAULT_DEVICE)

# A function that is told of each module that is about to be compiled.
Compiling = Callable[[NormSpec, Target], None]


class Modules(NamedTuple):
    """Where calls get their modules from.

    Attributes:
        load: The module for a spec on a device.
        known: Known kinds of call on a GPU; they are kept as long as their modules are loaded.
    """

    load: Callable[[NormSpec, DeviceUri], Norm]
    known: WeakValueDictionary[Hashable, KnownCall]


class HostCall(NamedTuple):
    """A kind of call on the CPU that was computed once.

    Attributes:
        norm: The module that computes it.
        rows: M, at least 1.
    """

    norm: Norm
    rows: int


_Key = tuple[NormSpec, DeviceUri]
_loading: dict[_Key, threading.RLock] = {}
_alive: WeakValueDictionary[_Key, Norm] = WeakValueDictionary()
_known: WeakValueDictionary[Hashable, KnownCall] = WeakValueDictionary()
# A thread that is loading does not exist in a forked process, and would never release its lock.
os.register_at_fork(after_in_child=_loading.clear)


def layer_norm(
    input: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = DEFAULT_EPS,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    device: str | None = None,
) -> NormOutput:
    """Layer normalization, with the statistics that its backward takes.

    The arguments and the first three results are those of ``aten::native_layer_norm``. Where there
    is a residual, ``input + residual`` is rounded to the residual's element type, and that sum is
    what is normalized. Element types, arrays, devices and compilation: as `layer_norm_backward`.

    Args:
        input: [..., *normalized_shape], any number of rows, zero too.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape]; None means ones.
        bias: [*normalized_shape]; None means zeros.
        eps: Added to the biased variance; finite.
        residual: As ``input``, of any element type that mixes with it; None means none.
        weight_offset: Added to the weight, in the type of sums: 1.0 where it is stored around zero.
        device: As `layer_norm_backward`.

    Returns:
        The output and the statistics, in new arrays of ``input``'s library.

    Raises:
        TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
    """
    options = check_options(LAYER_NORM, normalized_shape, (), eps, weight_offset)
    results, _ = call((input, residual, weight, bias), options, _parsed(device))
    return results  # type: ignore[return-value]


def rms_norm(
    input: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    eps: float | None = None,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    device: str | None = None,
) -> NormOutput:
    """RMS normalization, with the statistic that its backward takes.

    The arguments are those of ``aten::_fused_rms_norm``. The output is rounded once, after the
    weight.

    Args:
        input: As `layer_norm`.
        normalized_shape: The trailing dimensions to normalize.
        weight: [*normalized_shape]; None means ones.
        eps: Added to the mean of the squares; finite. None means the machine epsilon of f32, or of
            f64 for f64 data, as PyTorch has it.
        residual: As `layer_norm`.
        weight_offset: As `layer_norm`.
        device: As `layer_norm_backward`.

    Returns:
        The output and ``rstd``, in new arrays of ``input``'s library; ``mean`` is None.

    Raises:
        TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
    """
    options = check_options(RMS_NORM, normalized_shape, (), eps, weight_offset)
    results, _ = call((input, residual, weight), options, _parsed(device))
    return results  # type: ignore[return-value]


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
    grad_residual: Any = None,
    output: Any = None,
    weight_offset: float = 0.0,
    device: str | None = None,
) -> LayerNormGrads:
    """Gradients of layer normalization with respect to its input, weight and bias.

    The arguments are those of ``aten::native_layer_norm_backward``. Element types are f32, f16,
    bf16 (``ml_dtypes.bfloat16``) and f64; f64 does not mix with the others. Sums are in f32 (f64
    for f64). The formula is in ``ir/README.md``.

    The first call for a spec and device compiles it (about a second) and keeps the module in an
    on-disk cache, ``$IREE_LNBWD_CACHE``.

    Arrays may be NumPy's, PyTorch's, or any that support DLPack, all of one kind and in one place.
    `Norm` says how calls on a GPU are ordered.

    With the forward's ``output`` in place of ``input``, a caller need not keep the input:
    ``xhat = (output - bias) / g``, where ``g = weight_offset + weight``. If ``|g|`` is below 1e-5,
    it is divided by 1e-5 with g's sign, so that nothing is divided by zero. The output was rounded,
    which is an error of ``u * |output| / |g|`` in xhat, where u is half the distance of 1 and the
    next number of its type: large if the bias is large against g. Where g is zero, the output does
    not tell xhat, and this column's ``grad_weight`` means nothing.

    Args:
        grad_output: [..., *normalized_shape], the gradient that reached the output. Or a list of up
            to four, all of one type, which are added up in this order: the gradients of an output
            with several uses. Each sum is rounded, to their type if ``input`` has it, too, and else
            to that of sums.
        input: [..., *normalized_shape], any number of rows, zero too; None with ``output``.
        normalized_shape: The trailing dimensions that were normalized.
        mean: [...], with or without trailing dimensions of 1, f32 (f64 for f64 data). Used as
            given. If ``mean`` and ``rstd`` are None, both are recomputed from ``input``. None with
            ``output``, which needs no mean, but ``rstd``.
        rstd: As ``mean``: 1 / sqrt(biased variance + eps).
        weight: [*normalized_shape]; None means ones, and no ``grad_weight``.
        bias: [*normalized_shape]; only its element type matters, to ``grad_bias``. With
            ``output``, its values matter too; None means zeros.
        output_mask: Which of the three gradients to compute.
        eps: Used if the statistics are recomputed; finite.
        grad_residual: As ``input``: the gradient that reached ``residual_output`` past the norm. It
            is added to ``grad_input`` before that is rounded. None means none.
        output: As ``input``: what the forward returned, in its place. ``grad_input`` has its
            element type.
        weight_offset: Added to the weight, in the type of sums, as in the forward.
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
    op = variant(LAYER_NORM_BACKWARD, input, output, mean, rstd)
    options = check_options(op, normalized_shape, output_mask, eps, weight_offset)
    dy, *more = gradients_of(grad_output)
    given = (
        (dy, output, rstd, weight, bias, grad_residual, *more)
        if op.from_output
        else (dy, input, mean, rstd, weight, bias, grad_residual, *more)
    )
    results, _ = call(given, options, _parsed(device))
    return results  # type: ignore[return-value]


def rms_norm_backward(
    grad_output: Any,
    input: Any,
    normalized_shape: int | Sequence[int],
    rstd: Any = None,
    weight: Any = None,
    output_mask: tuple[bool, bool] = (True, True),
    *,
    eps: float | None = None,
    grad_residual: Any = None,
    output: Any = None,
    weight_offset: float = 0.0,
    device: str | None = None,
) -> RmsNormGrads:
    """Gradients of RMS normalization with respect to its input and weight.

    The arguments are those of ``aten::_fused_rms_norm_backward``.

    Args:
        grad_output: As `layer_norm_backward`.
        input: As `layer_norm_backward`.
        normalized_shape: The trailing dimensions that were normalized.
        rstd: [...], with or without trailing dimensions of 1, f32 (f64 for f64 data):
            1 / sqrt(mean of squares + eps). None means that it is recomputed from ``input``.
        weight: [*normalized_shape]; None means ones, and no ``grad_weight``.
        output_mask: Which of the two gradients to compute.
        eps: Used if ``rstd`` is recomputed; None as in `rms_norm`.
        grad_residual: As `layer_norm_backward`.
        output: As `layer_norm_backward`.
        weight_offset: As `layer_norm_backward`.
        device: As `layer_norm_backward`.

    Returns:
        The gradients, in new arrays of ``input``'s library; None where not asked for.

    Raises:
        TypeError, ValueError, DeviceError, CompileError: As `layer_norm_backward`.
    """
    op = variant(RMS_NORM_BACKWARD, input, output, None, rstd)
    options = check_options(op, normalized_shape, output_mask, eps, weight_offset)
    data = output if op.from_output else input
    dy, *more = gradients_of(grad_output)
    given = (dy, data, rstd, weight, grad_residual, *more)
    results, _ = call(given, options, _parsed(device))
    return results  # type: ignore[return-value]


def call(
    given: Sequence[Any],
    options: Options,
    uri: DeviceUri | None = None,
    modules: Modules | None = None,
) -> tuple[Results, KnownCall | HostCall | None]:
    """Computes an op from its arguments, in the order of its table; they are bound only once.

    Args:
        given: The arrays.
        options: Checked; for a new kind of call, its spec checks them once more.
        uri: The device; None takes the one that ``input`` is on.
        modules: Where modules come from; None takes those of `loaded`.

    Returns:
        The results, and the kind of the call, if there was something to compute.
    """
    load, known_kinds = modules or _MODULES
    op = options.op
    arguments = names(op.arguments)
    data = given[arguments.index(op.data.name)]
    framework = interop.on_gpu(op.data.name, data)
    if framework is None:
        bound = bind_arrays(interop.views(None, dict(zip(arguments, given, strict=True))), options)
        if bound.spec is None:
            return results_of(op, {}), None
        norm = load(bound.spec, uri or _HOST)
        known_here = HostCall(norm, bound.rows) if bound.rows else None
        return interop.from_numpy(norm.run(bound), like=data), known_here
    kind = framework.signature(arguments, given)
    # Where the statistics are given, eps is no option: calls with any are of one kind.
    has_eps = not op.is_backward or given[arguments.index(RSTD.name)] is None
    key = (kind, options if has_eps else options._replace(eps=None), uri)
    if (known := known_kinds.get(key)) is None:
        views = interop.views(framework, dict(zip(arguments, given, strict=True)))
        bound = bind_arrays(views, options)
        if bound.spec is None:
            return results_of(op, {}), None
        where = DeviceUri.parse(bound.arrays[op.data.name].device)
        if uri not in (None, where):
            raise ValueError(
                f"device: expected {where}, where {op.data.name} is, or None, got {uri}"
            )
        norm = load(bound.spec, where)
        known = known_kinds[key] = norm.learn(kind, framework, views, bound)
    return known.run(framework, given), known


def _parsed(device: str | None) -> DeviceUri | None:
    return None if device is None else DeviceUri.parse(device)


@functools.lru_cache(maxsize=_LOADED_MODULES)
def loaded(spec: NormSpec, uri: DeviceUri, compiling: Compiling | None = None) -> Norm:
    """The module for a spec on a device: from memory, a bundle, the cache, or the compiler.

    The bundle is the one that ``$IREE_LNBWD_BUNDLE`` names, if any. What is not in it comes from
    the cache on disk or the compiler, with the schedule that was tuned on such a device, if any
    was, and otherwise the choice.

    Threads that need the same module wait for the first of them; if it fails, the next tries.

    Args:
        spec: What it computes.
        uri: The device.
        compiling: Is called if it has to be compiled.
    """
    from iree_lnbwd.bundles import serving  # the compiler is not needed to import the package

    key = (spec, uri)
    with _loading.setdefault(key, threading.RLock()):
        if (op := _alive.get(key)) is None:
            bundle = serving.named_by_user()
            op = None if bundle is None else serving.find(bundle, spec, uri)
            if op is None:
                try:
                    op = _compiled(spec, uri, compiling)
                except CompileError as error:
                    if bundle is None:
                        raise
                    said = serving.missing(bundle, spec, uri)
                    raise CompileError(f"{error}; {serving.VARIABLE}: {said}") from error
            _alive[key] = op
        return op


def _compiled(spec: NormSpec, uri: DeviceUri, compiling: Compiling | None) -> Norm:
    """As `loaded`, from the cache on disk or the compiler."""
    from iree_lnbwd import cache
    from iree_lnbwd.tuning import found

    target = target_of(uri)
    entry = cache.Entry(spec, target, found.for_device(spec, target, uri))
    if entry.can_be_compiled and compiling is not None:
        compiling(spec, target)
    vmfb, _ = entry.build()
    return runtime.load_built(vmfb, str(uri))


_MODULES = Modules(loaded, _known)


def modules(compiling: Compiling) -> Modules:
    """The modules of `loaded`, which tells of each that has to be compiled."""
    return _MODULES._replace(load=functools.partial(loaded, compiling=compiling))


def forget(specs: Collection[NormSpec], uri: DeviceUri) -> None:
    """Lets go of loaded modules, so that the next calls load them anew; running calls go on."""
    loaded.cache_clear()
    for spec in specs:
        _alive.pop((spec, uri), None)
    for key, known in tuple(_known.items()):
        if known.module.spec in specs:
            _known.pop(key, None)


def in_use() -> tuple[tuple[NormSpec, DeviceUri], ...]:
    """What this process has modules for, and on which devices."""
    return tuple(_alive)
