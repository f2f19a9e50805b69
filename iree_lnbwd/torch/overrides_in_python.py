"""What C++ leaves to Python of ATen's operators: new kinds of call on a GPU, and all on the CPU.

Each operator ``iree_lnbwd::try_*`` has the schema of ATen's. It returns what that would return, or
nothing: then C++ goes to PyTorch's kernel. It raises no error, because PyTorch's would not.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from iree_lnbwd import notices
from iree_lnbwd.calls.calling import HostCall
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError, one_line, plain
from iree_lnbwd.ops.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Op,
    names,
)
from iree_lnbwd.runtime.gpu_module import KnownCall
from iree_lnbwd.torch import lasting, supported, tensor_calls
from iree_lnbwd.torch.operator_table import in_order

# ATen's names of the ops, as in torch_overrides.cpp.
ATENS = {
    LAYER_NORM: "native_layer_norm",
    RMS_NORM: "_fused_rms_norm",
    LAYER_NORM_BACKWARD: "native_layer_norm_backward",
    RMS_NORM_BACKWARD: "_fused_rms_norm_backward",
}
# What lasts, and takes long to find out: these kinds of call are not tried again.
_LASTING = (ArtifactError, CompileError, DeviceError, ImportError)
_KINDS_KEPT = 4096
_REASONS_KEPT = 256
_OTHER_REASONS = "other reasons; the log has some"

_log = logging.getLogger(__package__)


class Fallback(NamedTuple):
    """Why calls went to PyTorch's kernel.

    Attributes:
        op: What they compute.
        device_type: PyTorch's name of the device.
        reason: In words.
    """

    op: Op
    device_type: str
    reason: str


class _Record:
    """The fallbacks of this process, counted. Any number of threads may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Fallback] = Counter()
        self._refused: dict[Hashable, str] = {}
        # A thread that holds the lock does not exist in a forked process.
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def refusal(self, kind: Hashable) -> str | None:
        """Why a kind of call was refused before."""
        return self._refused.get(kind)

    def refuse(self, kind: Hashable, reason: str) -> None:
        """From now on such calls are not tried."""
        with self._lock:
            if len(self._refused) >= _KINDS_KEPT:
                self._refused.clear()
            self._refused[kind] = reason

    def add(self, fallback: Fallback) -> None:
        """Counts one; a new reason is told."""
        with self._lock:
            if fallback not in self._counts and len(self._counts) >= _REASONS_KEPT:
                fallback = fallback._replace(reason=_OTHER_REASONS)
            is_new = fallback not in self._counts
            self._counts[fallback] += 1
        if is_new:
            where = f"aten::{ATENS[fallback.op]} on {fallback.device_type}"
            message = "PyTorch's own kernel runs for some calls of %s: %s"
            notices.log(_log, message, where, fallback.reason)

    def counts(self) -> dict[Fallback, int]:
        """All of them."""
        with self._lock:
            return dict(self._counts)

    def forget(self) -> None:
        """Everything; what was told may be told again."""
        with self._lock:
            self._counts.clear()
            self._refused.clear()


RECORD = _Record()


class _NotTakenError(Exception):
    """A call that goes to PyTorch's kernel, and why."""


class _Call(NamedTuple):
    """A call of ATen's.

    Attributes:
        op: What it computes.
        tensors: In the order of the op's table.
        normalized_shape: The trailing dimensions.
        output_mask: Of a backward.
        eps: Of a forward.
    """

    op: Op
    tensors: tuple[Tensor | None, ...]
    normalized_shape: Sequence[int]
    output_mask: tuple[bool, ...]
    eps: float | None

    @property
    def data(self) -> Tensor:
        """The tensor that decides where and in which type it is computed."""
        tensor = self.tensors[names(self.op.arguments).index(self.op.data.name)]
        assert tensor is not None
        return tensor

    @property
    def kind(self) -> Hashable:
        """What such calls have in common, whatever the number of rows."""
        of_tensors = tuple(supported.kind(tensor) for tensor in self.tensors)
        return (self.op, of_tensors, tuple(self.normalized_shape), self.output_mask, self.eps)


def compute(op: Op, *arguments: Any) -> tuple[Tensor | None, ...]:
    """A call of ATen's operator by ours, uncounted.

    Args:
        op: What it computes.
        arguments: ATen's.

    Raises:
        CompileError, DeviceError, TypeError, ValueError: As `iree_lnbwd.layer_norm`.
    """
    return _compute(_CALLS[op](*arguments))[0]


def _attempt(op: Op, *arguments: Any) -> tuple[Tensor | None, ...]:
    """The op's results, in ATen's order; None everywhere if PyTorch's kernel has to compute them.

    Args:
        op: The op.
        arguments: ATen's.
    """
    call = _CALLS[op](*arguments)
    kind = call.kind
    reason = RECORD.refusal(kind)
    if reason is None:
        try:
            results, known = _compute(call)
            if isinstance(known, KnownCall) and known.sequence is None:
                RECORD.refuse(kind, "the module does not run on PyTorch's stream")
            return results
        except _NotTakenError as error:
            reason = str(error)
        except Exception as error:  # tools that are not ours may raise anything
            reason = plain(f"{type(error).__name__}: {one_line(error)}")
            if isinstance(error, _LASTING):
                RECORD.refuse(kind, reason)
    RECORD.add(Fallback(op, call.data.device.type, reason))
    return (None,) * len(_results(op))


def _compute(call: _Call) -> tuple[tuple[Tensor | None, ...], KnownCall | HostCall | None]:
    """Raises what goes wrong."""
    if call.data.is_cuda and torch.cuda.is_current_stream_capturing():
        raise _NotTakenError("the first call of its kind was inside a capture of a CUDA graph")
    op, tensors, normalized_shape, output_mask, eps = call
    if op.is_backward:
        gradients, known = tensor_calls.known_backward(
            op, tensors, normalized_shape, output_mask, None, 0.0
        )
        return tuple(getattr(gradients, name) for name in _results(op)), known
    results, known = tensor_calls.known_forward(op, tensors, normalized_shape, eps, 0.0)
    return tuple(getattr(results, name) for name in _results(op)), known


def _results(op: Op) -> tuple[str, ...]:
    """The names of ATen's results."""
    return names(op.masked) if op.is_backward else ("output", *names(op.statistics))


def _statistic(tensor: Tensor) -> Tensor:
    """PyTorch's on the CPU is as coarse as the input; its own backward widens it, too."""
    return tensor.float() if tensor.dtype in supported.HALF else tensor


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> _Call:
    tensors = in_order(LAYER_NORM, input=input, weight=weight, bias=bias)
    return _Call(LAYER_NORM, tensors, normalized_shape, (), eps)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> _Call:
    tensors = in_order(RMS_NORM, input=input, weight=weight)
    return _Call(RMS_NORM, tensors, normalized_shape, (), eps)


def _layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> _Call:
    tensors = in_order(
        LAYER_NORM_BACKWARD,
        grad_output=grad_output,
        input=input,
        mean=_statistic(mean),
        rstd=_statistic(rstd),
        weight=weight,
        bias=bias,
    )
    return _Call(LAYER_NORM_BACKWARD, tensors, normalized_shape, tuple(output_mask), None)


def _rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> _Call:
    tensors = in_order(
        RMS_NORM_BACKWARD,
        grad_output=grad_output,
        input=input,
        rstd=_statistic(rstd),
        weight=weight,
    )
    return _Call(RMS_NORM_BACKWARD, tensors, normalized_shape, tuple(output_mask), None)


_CALLS: Mapping[Op, Callable[..., _Call]] = MappingProxyType(
    {
        LAYER_NORM: _layer_norm,
        RMS_NORM: _rms_norm,
        LAYER_NORM_BACKWARD: _layer_norm_backward,
        RMS_NORM_BACKWARD: _rms_norm_backward,
    }
)

_library = lasting.library("FRAGMENT")
for _op in _CALLS:
    _schema = str(getattr(torch.ops.aten, ATENS[_op]).default._schema)
    _library.define("try_" + _schema.removeprefix("aten::"))
    _function = functools.partial(_attempt, _op)
    _library.impl(f"try_{ATENS[_op]}", _function, "CompositeExplicitAutograd")
