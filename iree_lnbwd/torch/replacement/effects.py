"""What running a module's forward does beside returning its output, told without running it.

The forward runs on tensors without memory: nothing is computed, and no other process is asked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from iree_lnbwd.torch.replacement.watched import NotPlainError

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
_HALF = (torch.float16, torch.bfloat16)
# Whose backwards `enable` replaces.
_PYTORCHS = ("aten::native_layer_norm", "aten::_fused_rms_norm")


class Trace(NamedTuple):
    """What a run called.

    Attributes:
        roundings: How many operators returned new tensors of a half type: each rounds once.
        calls_pytorchs: Whether it called a norm of PyTorch's, whose backward `enable` replaces.
    """

    roundings: int
    calls_pytorchs: bool


class Observed(TorchDispatchMode):
    """Refuses operators that have effects, before they run, and counts others."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._kept: list[Tensor] = []  # so that no address is used twice
        self._roundings = 0
        self._calls_pytorchs = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Raises `NotPlainError` in place of a random number, a collective, or a mutation."""
        named = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotPlainError("its forward draws random numbers")
        if func.namespace in _COLLECTIVES:
            raise NotPlainError("its forward talks to other processes")
        if any(
            tensor.untyped_storage()._cdata not in self._made
            for tensor in _written(func, args, named)
        ):
            raise NotPlainError("its forward changes its input or its parameters")
        output = func(*args, **named)
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        results = output if isinstance(output, (tuple, list)) else (output,)
        new = [each for each in results if isinstance(each, Tensor) and not is_view]
        for tensor in new:
            self._made.add(tensor.untyped_storage()._cdata)
            self._kept.append(tensor)
        self._roundings += any(tensor.dtype in _HALF for tensor in new)
        self._calls_pytorchs |= func._schema.name in _PYTORCHS
        return output

    def begin(self) -> None:
        """What there is now was given; only what is made from now on may be changed."""
        self._made.clear()
        self._roundings = 0

    @property
    def trace(self) -> Trace:
        """What was called until now."""
        return Trace(self._roundings, self._calls_pytorchs)


def _written(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator changes."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else named.get(argument.name)
        yield from (t for t in (given if isinstance(given, (tuple, list)) else (given,))
                    if isinstance(t, Tensor))  # fmt: skip


@contextlib.contextmanager
def observed() -> Iterator[Observed]:
    """A block in which tensors have no memory, and effects are refused."""
    with quiet(), FakeTensorMode(), Observed() as mode:
        yield mode


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block in which PyTorch does not log what fails on tensors without memory."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
