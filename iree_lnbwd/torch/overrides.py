"""PyTorch's own kernels of norms, replaced by ours in the whole process: no model is changed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from iree_lnbwd import notices
from iree_lnbwd.ops.operands import Op
from iree_lnbwd.torch import native
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.override_places import KEPT, OFF, PLACES
from iree_lnbwd.torch.override_status import Calls, Operator, Status
from iree_lnbwd.torch.overrides_in_python import ATENS, RECORD

_OURS = "torch_overrides.cpp"  # where PyTorch's dispatcher says that our kernels are from
_KEYS = {"cuda": "CUDA", "cpu": "CPU"}  # PyTorch calls AMD GPUs "cuda" too
_NOT_ASKED = "enable(forwards=True) takes it, too"
_NO_CPP = "the C++ kernels could not be built; the log says why"
_NO_KERNEL = "this PyTorch has no such kernel"

_log = logging.getLogger(__package__)


# In the order of Outcome in C++, after those that ours computed.
_LEFT = ("PyTorch's kernel alone takes such arguments",)


class _Settings(NamedTuple):
    forwards: bool
    override_others: bool


class _Process:
    """What is registered in this process. Threads take turns."""

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.settings: _Settings | None = None
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self.changing = threading.RLock()

    def apply(self, wanted: _Settings | None) -> None:
        """Registers what is wanted, and removes everything else."""
        if wanted is not None:
            native.load()  # which may take a minute: `status` is not to wait for it
        with self.changing:
            if wanted is not None and self.settings is None:
                self._begin_anew()
            self.settings = wanted
            for device_type, op in PLACES:
                why_not = _why_not(device_type, op, wanted)
                if why_not is None:
                    why_not = _override(device_type, op)
                else:
                    _restore(device_type, op)
                KEPT[device_type, op] = why_not
        if wanted is not None:
            switch.place()

    def _begin_anew(self) -> None:
        RECORD.forget()
        if native.load():
            torch.ops.iree_lnbwd.forget_override_counts()
        else:
            notices.log(_log, "PyTorch's own kernels of norms stay: ours in C++ could not be built")


_PROCESS = _Process()


def enable(*, forwards: bool = False, override_others: bool = False) -> None:
    """Runs our kernels in place of PyTorch's own, in this process, until `disable` is called.

    These are ``aten::native_layer_norm_backward`` and ``aten::_fused_rms_norm_backward``: the
    backwards of ``nn.LayerNorm``, of ``nn.RMSNorm`` on GPUs, and of whatever else calls PyTorch's
    functions. The autograd formulas, batching rules and the like around them stay PyTorch's, and
    nothing changes for a model. On the CPU, ours run on PyTorch's threads.

    A call that ours does not take goes to PyTorch's kernel: of an element type or GPU that there is
    no module for, without IREE's compiler, or of a new kind inside the capture of a CUDA graph.
    `status` counts such calls; each reason is logged once.

    Under ``torch.compile``, inductor keeps these backwards whole in graphs that it compiles from
    then on, if they may find a module, and `use_inductor_pass` says what goes into them. Such a
    graph stays as it was compiled after `disable`.

    A first call compiles modules as `layer_norm` does. The kernels are C++, which a release's wheel
    has, or which is compiled once. Where neither can be, PyTorch's stay, which is logged.

    Once is as good as twice. Threads may call at any time; calls under way end as they began.

    Args:
        forwards: Whether to replace ``aten::native_layer_norm`` and ``aten::_fused_rms_norm`` on
            GPUs as well. Their outputs are within rounding of PyTorch's, not the same bits.
        override_others: Whether to replace kernels, too, that another library registered in place
            of PyTorch's. Otherwise they stay, which `status` says.

    Raises:
        TypeError: Naming the argument.
    """
    _PROCESS.apply(_checked(forwards, override_others))


def disable() -> None:
    """Puts PyTorch's kernels back; `status` still has the counts."""
    _PROCESS.apply(None)


@contextlib.contextmanager
def enabled(*, forwards: bool = False, override_others: bool = False) -> Iterator[None]:
    """`enable` for the length of a block, in all threads; then it is as it was before.

    Args:
        forwards: As `enable`.
        override_others: As `enable`.

    Raises:
        TypeError: Naming the argument.
    """
    before, wanted = _PROCESS.settings, _checked(forwards, override_others)
    _PROCESS.apply(wanted)
    try:
        yield
    finally:
        _PROCESS.apply(before)


def status() -> Status:
    """What ran our kernels since `enable`, what went to PyTorch's, and why.

    It does not wait for an `enable` of another thread that compiles C++: it says for how long.
    """
    with _PROCESS.changing:
        is_enabled, kept = _PROCESS.settings is not None, dict(KEPT)
    operators = []
    for (device_type, op), why_not in kept.items():
        if why_not is None and (theirs := _on_top(device_type, op)) is not None:
            why_not = f"another kernel was registered later: {theirs}"
        operators.append(Operator(_named(op), device_type, why_not))
    fallbacks = RECORD.counts()
    calls = []
    for device_type, op in kept:
        ran, *left = _counts(device_type, op)
        of_both = (_named(op), device_type)
        calls.append(Calls(*of_both, None, ran))
        reasons = dict(zip(_LEFT, left, strict=True))
        reasons |= {
            fallback.reason: count
            for fallback, count in fallbacks.items()
            if (fallback.device_type, fallback.op) == (device_type, op)
        }
        calls += [Calls(*of_both, reason, count) for reason, count in reasons.items()]
    ran_or_not = tuple(each for each in calls if each.number)
    return Status(is_enabled, tuple(operators), ran_or_not, native.status(), switch.status())


def _checked(forwards: object, override_others: object) -> _Settings:
    for name, value in (("forwards", forwards), ("override_others", override_others)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return _Settings(bool(forwards), bool(override_others))


def _named(op: Op) -> str:
    return f"aten::{ATENS[op]}"


def _why_not(device_type: str, op: Op, wanted: _Settings | None) -> str | None:
    """Why PyTorch's kernel is to be kept, if it is."""
    if wanted is None:
        return OFF
    if not op.is_backward and not wanted.forwards:
        return _NOT_ASKED
    theirs = _registered(device_type, op)
    if not theirs:
        return _NO_KERNEL
    if len(theirs) > 1 and not wanted.override_others:
        return f"another kernel is in its place, enable(override_others=True) takes it: {theirs[0]}"
    return None if native.load() else _NO_CPP


def _override(device_type: str, op: Op) -> str | None:
    """Registers our kernel; why it could not be, if it could not."""
    try:
        torch.ops.iree_lnbwd.override_kernel(native.number_of(op), device_type == "cpu")
    except RuntimeError as error:  # a PyTorch that changed the operator
        said = str(error).strip().splitlines()[0]
        notices.log(_log, "PyTorch's own kernel of %s stays: %s", _named(op), said)
        return said
    return None


def _restore(device_type: str, op: Op) -> None:
    if _has_cpp():
        torch.ops.iree_lnbwd.restore_kernel(native.number_of(op), device_type == "cpu")


def _counts(device_type: str, op: Op) -> list[int]:
    if not _has_cpp():
        return [0] * (1 + len(_LEFT))
    found: list[int] = torch.ops.iree_lnbwd.override_counts(
        native.number_of(op), device_type == "cpu"
    )
    return found


def _has_cpp() -> bool:
    """Whether it was loaded before: asking for it must not build it."""
    return hasattr(torch.ops.iree_lnbwd, "override_kernel")


def _entries(device_type: str, op: Op) -> list[str]:
    """Where the kernels were registered, the one that runs first, as PyTorch's dispatcher says."""
    entry = re.compile(rf"^{_KEYS[device_type]}(?: \(inactive\))?: (.*?)(?: :: .*)?$", re.MULTILINE)
    return entry.findall(torch._C._dispatch_dump(_named(op)))


def _registered(device_type: str, op: Op) -> list[str]:
    """Where the kernels other than ours were registered; PyTorch's own is the last one."""
    return [entry for entry in _entries(device_type, op) if _OURS not in entry]


def _on_top(device_type: str, op: Op) -> str | None:
    """The kernel that runs in place of ours, although ours is registered."""
    first = next(iter(_entries(device_type, op)), _OURS)
    return None if _OURS in first else first
