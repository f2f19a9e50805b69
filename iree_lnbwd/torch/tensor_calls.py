"""This package's ops on PyTorch's tensors, without autograd."""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from iree_lnbwd import notices
from iree_lnbwd.calls import calling, modules
from iree_lnbwd.calls.calling import HostCall
from iree_lnbwd.errors import CompileError
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.arguments import (
    NormOutput,
    Options,
    Results,
    asked_of,
    check_options,
    results_of,
)
from iree_lnbwd.ops.operands import (
    GRAD_INPUT,
    GRAD_INPUT_COPY,
    GRAD_INPUT_SUM,
    OUTPUT,
    RESIDUAL_OUTPUT,
    Element,
    Kind,
    Op,
    Operand,
)
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.torch import aten, native, supported
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.tuning import tuner

_log = logging.getLogger(__package__)


def forward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    output_dtype: torch.dtype | None = None,
    rows_per_set: int | None = None,
) -> NormOutput:
    """A forward of ours, or PyTorch's operators where no module can be had.

    Args:
        op: The op.
        tensors: In the order of its table.
        normalized_shape: The trailing dimensions.
        eps: Added to the variance; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        output_dtype: Of the output; None means that of the input.
        rows_per_set: Neighbouring rows that take one set of weights; None where there are no sets.
    """
    given = (op, tensors, normalized_shape, eps, weight_offset, output_dtype, rows_per_set)
    if 0 in normalized_shape:  # PyTorch takes rows of no columns
        return fake_forward(*given)
    try:
        return known_forward(*given, modules=_OR_REFUSED)[0]
    except CompileError as error:
        REFUSALS.count(error)
        return aten.norm(*given)


def known_forward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    output_dtype: torch.dtype | None = None,
    rows_per_set: int | None = None,
    modules: modules.Modules | None = None,
) -> tuple[NormOutput, KnownCall | HostCall | None]:
    """A forward by ours alone, and the kind of the call where `calling.call` has one.

    Raises:
        CompileError: No module can be had.
    """
    supported.given_for(output_dtype, op, tensors)
    options = check_options(
        *(op, tuple(normalized_shape), (), eps, weight_offset),
        output_dtype=output_dtype,
        rows_per_set=rows_per_set,
    )
    return _call(tensors, options, modules)  # type: ignore[return-value]


def fake_forward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float | None,
    weight_offset: float,
    output_dtype: torch.dtype | None = None,
    rows_per_set: int | None = None,
) -> NormOutput:
    """As `forward`, but for the values; the tensors need no memory."""
    given = supported.given_for(output_dtype, op, tensors)
    _check_shapes(op, given, tuple(normalized_shape), has_sets=rows_per_set is not None)
    results = {
        result.name: _empty(result, given[op.data.name], given, normalized_shape)
        for result in op.results
        if result is not RESIDUAL_OUTPUT or "residual" in given
    }
    if output_dtype is not None:
        results[OUTPUT.name] = results[OUTPUT.name].to(output_dtype)
    return results_of(op, results)  # type: ignore[return-value]


def backward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
    grad_input_copy_dtype: torch.dtype | None = None,
    grad_input_sum_dtype: torch.dtype | None = None,
) -> Results:
    """The gradients.

    PyTorch's operators compute them where no module can be had.

    Args:
        op: The op.
        tensors: In the order of its table.
        normalized_shape: The trailing dimensions.
        output_mask: Which gradients to compute; that of a bias may be missing.
        eps: Used if the statistics are recomputed; None as in ``rms_norm``.
        weight_offset: Added to the weight.
        rows_per_set: Neighbouring rows that take one set of weights; None where there are no sets.
        grad_input_copy_dtype: Of the copy of the input's gradient, where the op stores one.
        grad_input_sum_dtype: Of its sum over rows, where the op sums it.
    """
    given = (
        *(op, tensors, normalized_shape, output_mask, eps, weight_offset),
        *(rows_per_set, grad_input_copy_dtype, grad_input_sum_dtype),
    )
    try:
        return known_backward(*given, modules=_OR_REFUSED)[0]
    except CompileError as error:
        REFUSALS.count(error)
        return aten.gradients(*given)


def known_backward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
    grad_input_copy_dtype: torch.dtype | None = None,
    grad_input_sum_dtype: torch.dtype | None = None,
    modules: modules.Modules | None = None,
) -> tuple[Results, KnownCall | HostCall | None]:
    """Gradients by ours alone, and the kind of the call where `calling.call` has one.

    Raises:
        CompileError: No module can be had.
    """
    given = supported.given(op, tensors)
    if given[op.data.name].numel() == 0:  # an empty sum is zero
        zeros = fake_backward(
            *(op, tensors, normalized_shape, output_mask),
            *(grad_input_copy_dtype, grad_input_sum_dtype),
        )
        return type(zeros)(*(None if g is None else g.zero_() for g in zeros)), None
    options = backward_options(
        *(op, given, normalized_shape, output_mask, eps, weight_offset, rows_per_set),
        *(grad_input_copy_dtype, grad_input_sum_dtype),
    )
    return _call(tensors, options, modules)


def backward_options(
    op: Op,
    given: Collection[str],
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    eps: float | None,
    weight_offset: float,
    rows_per_set: int | None = None,
    grad_input_copy_dtype: torch.dtype | None = None,
    grad_input_sum_dtype: torch.dtype | None = None,
) -> Options:
    """What `backward` has beside the tensors, checked; ``given`` are the names of these."""
    copied, summed = (
        None if given is None else dtypes.check(given, name)
        for name, given in (
            ("grad_input_copy_dtype", grad_input_copy_dtype),
            ("grad_input_sum_dtype", grad_input_sum_dtype),
        )
    )
    return Options(
        *(op, tuple(normalized_shape), _asked(op, given, output_mask), weight_offset, eps),
        rows_per_set=rows_per_set,
        grad_input_copy_dtype=copied,
        grad_input_sum_dtype=summed,
    )


def _call(
    tensors: Sequence[Tensor | None], options: Options, modules: modules.Modules | None
) -> tuple[Results, KnownCall | HostCall | None]:
    """A call; C++ is told of it, and launches the next of its kind itself."""
    results, known = calling.call(tensors, options, modules=modules or _MODULES)
    # Without a compiler, IREE's runtime computes calls on the CPU, and nothing has to be said.
    needs_cpp = isinstance(known, KnownCall) or native.can_be_had()
    if known is not None and needs_cpp and native.load():
        native.remember(tensors, options, known)
    return results, known


def fake_backward(
    op: Op,
    tensors: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    output_mask: Sequence[bool],
    grad_input_copy_dtype: torch.dtype | None = None,
    grad_input_sum_dtype: torch.dtype | None = None,
) -> Results:
    """As `backward`, but for the values; the tensors need no memory."""
    given = supported.given(op, tensors)
    asked = _asked(op, given, output_mask)
    results = {
        result.name: _empty(result, given[op.data.name], given, normalized_shape)
        for result, wanted in zip(op.gradients_with(has_bias="bias" in given), asked, strict=True)
        if wanted
    }
    if grad_input_copy_dtype is not None:
        copied = torch.empty_like(results[GRAD_INPUT.name], dtype=grad_input_copy_dtype)
        results[GRAD_INPUT_COPY.name] = copied
    if grad_input_sum_dtype is not None:
        summed = results[GRAD_INPUT.name].new_empty(normalized_shape, dtype=grad_input_sum_dtype)
        results[GRAD_INPUT_SUM.name] = summed
    return results_of(op, results)


def tune(shapes: Collection[tuple[int, ...]]) -> None:
    """Tunes the norms over such dimensions that this process has modules for on GPUs.

    The modules are let go, so that later calls load those of the schedules that were found.
    """
    by_device: dict[DeviceUri, list[NormSpec]] = {}
    for spec, uri in modules.in_use():
        is_tuned = spec.normalized_shape in shapes and not spec.strided_rows
        if is_tuned and uri.backend != "cpu":
            by_device.setdefault(uri, []).append(spec)
    for uri, specs in by_device.items():
        for outcome in tuner.tune(specs, str(uri), progress=notices.log_progress(_log)):
            if outcome.is_new and outcome.tuned is not None:
                notices.log(_log, "tuned %s: %s", outcome.spec.name, outcome.tuned.gain)
        modules.forget(specs, uri)
        native.forget()


def _asked(op: Op, given: Collection[str], output_mask: Sequence[bool]) -> tuple[bool, ...]:
    """Which gradients to compute: of what is not there, none."""
    return asked_of(op, output_mask, has_weight="weight" in given, has_bias="bias" in given)


def _empty(
    result: Operand, data: Tensor, given: Mapping[str, Tensor], normalized_shape: Sequence[int]
) -> Tensor:
    """Storage for a result; ``data`` is the input, or the output in its place."""
    of_weight = given.get("weight", data)
    dtype = {
        Element.X: data.dtype,
        Element.ACC: supported.wide(data.dtype),
        Element.GAMMA: of_weight.dtype,
        Element.BETA: given.get("bias", of_weight).dtype,
        Element.RESIDUAL: given.get("residual", data).dtype,
        Element.GATE: given.get("gate", data).dtype,
    }[result.element]
    leading = data.shape[: data.ndim - len(normalized_shape)]
    shape = {
        Kind.CELLS: data.shape,
        Kind.ROWS: (*leading, *(1 for _ in normalized_shape)),
        Kind.COLUMNS: given["weight"].shape if "weight" in given else normalized_shape,
    }[result.kind]
    return data.new_empty(shape, dtype=dtype)


def _check_shapes(
    op: Op, given: Mapping[str, Tensor], dims: tuple[int, ...], *, has_sets: bool
) -> None:
    """As `bind_arrays` does, for shapes that a compiler may not know."""
    x = given["input"]
    if not dims or tuple(x.shape[max(0, x.ndim - len(dims)) :]) != dims:
        raise ValueError(
            f"input: expected a shape that ends in normalized_shape {dims}, got {tuple(x.shape)}"
        )
    for argument in op.arguments:
        tensor = given.get(argument.name)
        of_columns = (given["weight"].shape[0], *dims) if has_sets else dims
        expected = of_columns if argument.kind is Kind.COLUMNS else tuple(x.shape)
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{argument.name}: expected shape {expected}, got {tuple(tensor.shape)}"
            )


def _say_compiling(spec: NormSpec, target: Target) -> None:
    notices.log(_log, "compiling %s for %s", spec.name, target.name)


def expects(spec: NormSpec, uri: DeviceUri) -> bool:
    """Whether a call may find a module; without a compiler, it is loaded now if it is there."""
    return REFUSALS.expects(spec, uri, _say_compiling)


_MODULES = modules.telling(_say_compiling)
_OR_REFUSED = _MODULES._replace(
    load=functools.partial(REFUSALS.load, compiling=_say_compiling),
    missing=None,  # those know what there was not
)


# PyTorch keeps its operators' kernels, and so this module, until after the interpreter's end.
# IREE's devices and modules must be closed before that.
atexit.register(modules.loaded.cache_clear)
