"""Wrappers whose forward is ``norm(x) * factor + shift``, with those of each sample.

A wrapper runs its own forward, whatever that does. Only what its norm returns is put off: it is a
`Deferred`, which knows the norm and its input. Multiplied by a factor and added to a shift, it
becomes one call of a norm with sets of weights; whatever else is asked of it, it is the norm's own
output. So nothing is taken from names, and nothing of the forward is remembered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules

from iree_lnbwd.torch import supported
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.functions import layer_norm, rms_norm
from iree_lnbwd.torch.operator_table import AUTOCAST
from iree_lnbwd.torch.replacement.classes import OWN_FORWARD, ReplacedNorm, form_of
from iree_lnbwd.torch.replacement.form import Autocast, Form

_PRODUCTS = (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_TENSORS = (Tensor, nn.Parameter, FakeTensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Modulation:
    """What is known of a wrapper.

    Attributes:
        norms: The names of its norms whose outputs are scaled, and whether something is added to
            all that is scaled: else that is computed at once.
        is_layer_norm: Whether they are layer norms.
        fixed: No attribute: the own forward reads them at each call.
    """

    norms: Mapping[str, bool]
    is_layer_norm: bool
    fixed: frozenset[str] = frozenset()

    def __str__(self) -> str:
        kind = "layer norm" if self.is_layer_norm else "RMS norm"
        return f"{kind}, modulated" + ("" if any(self.norms.values()) else ", no shift")


class ReplacedWrapper(ReplacedNorm):
    """What is ours of a wrapper's class."""

    def _iree_lnbwd_forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the own forward returns, by fewer kernels."""
        modulation: Any = form_of(self)
        own_forward = getattr(type(self), OWN_FORWARD)
        return settled(own_forward(View(self, modulation.norms), *inputs, **named))


class View:
    """A wrapper as its own forward sees it: its norms put off what they compute."""

    def __init__(self, module: nn.Module, norms: Mapping[str, bool]) -> None:
        # Dynamo of PyTorch 2.11 does not know how to update the dictionary of attributes.
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_norms", norms)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _PuttingOff(found, self._norms[name]) if name in self._norms else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, settled(value))

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)


class _PuttingOff:
    """A norm that puts off what it computes, where that can be."""

    def __init__(self, norm: Any, has_shift: bool) -> None:
        self._norm, self._has_shift = norm, has_shift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._norm, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        is_one = len(inputs) == 1 and not named and isinstance(inputs[0], Tensor)
        if is_one and not torch.jit.is_tracing() and _may_be_left_out(self._norm):
            return Deferred(self._norm, inputs[0], self._has_shift, _state(inputs[0]))
        return self._norm(*inputs, **named)


class _State(NamedTuple):
    """What decides how a norm is computed, beside the norm and its input.

    Attributes:
        has_gradients: Whether they are recorded.
        is_inference: Whether tensors are made for inference alone.
        autocast: Its element type, and whether it is on.
    """

    has_gradients: bool
    is_inference: bool
    autocast: tuple[torch.dtype | None, bool]


def _state(input: Tensor) -> _State:
    device = input.device.type
    is_eager = not torch.compiler.is_compiling()
    is_on = device != "meta" and torch.is_autocast_enabled(device)
    return _State(
        torch.is_grad_enabled(),
        is_eager and torch.is_inference_mode_enabled(),
        (torch.get_autocast_dtype(device) if is_on else None, is_on),
    )


def _version(tensor: Tensor | None) -> int | None:
    """It grows with each change in place; None where that is not told."""
    if tensor is None or torch.compiler.is_compiling() or tensor.is_inference():
        return None
    version: int = tensor._version
    return version


def _may_be_left_out(norm: nn.Module) -> bool:
    """Whether nobody sees that a norm is not called by itself."""
    if not isinstance(norm, ReplacedNorm) or "forward" in vars(norm):
        return False
    if any(getattr(norm, name) for name in _HOOKS):
        return False
    return not (
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


class Deferred:
    """What a norm returns, not yet computed.

    Attributes:
        norm: The module.
        input: Its input.
        has_shift: Whether something will be added, once it is multiplied.
        state: Of PyTorch, as the norm was called.
        factor: What the output is multiplied by; None is nothing yet.
    """

    def __init__(
        self, norm: Any, input: Tensor, has_shift: bool, state: _State, factor: Tensor | None = None
    ) -> None:
        self.norm, self.input, self.has_shift, self.factor = norm, input, has_shift, factor
        self.state = state
        self._versions = (_version(input), _version(factor))
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """It, computed as if it was at once."""
        if self._value is None:
            if self._is_now():
                self._value = self._computed()
            else:
                with (
                    torch.inference_mode(self.state.is_inference),
                    torch.set_grad_enabled(self.state.has_gradients),
                    torch.autocast(self.input.device.type, *self.state.autocast),
                ):
                    self._value = self._computed()
        return self._value

    def times(self, factor: Any) -> Any:
        """It, multiplied."""
        is_first = self.factor is None and self._value is None
        if not (is_first and isinstance(factor, Tensor) and self._is_now()):
            return self.value() * settled(factor)
        found = Deferred(self.norm, self.input, self.has_shift, self.state, factor)
        return found if self.has_shift else found.value()

    def plus(self, shift: Any) -> Tensor:
        """It, with something added."""
        is_last = self.factor is not None and self._value is None
        if is_last and isinstance(shift, Tensor) and self._is_now():
            return modulated(self.norm, self.input, self.factor, shift)
        return self.value() + settled(shift)

    def _computed(self) -> Tensor:
        if self.factor is not None:
            return modulated(self.norm, self.input, self.factor)
        found: Tensor = self.norm(self.input)
        return found

    def _is_now(self) -> bool:
        """Whether PyTorch's state is as it was.

        Raises:
            RuntimeError: The input or the factor is not as it was.
        """
        if (_version(self.input), _version(self.factor)) != self._versions:
            raise RuntimeError(
                f"{type(self.norm).__name__}: expected an input, and a factor of the output, that "
                "do not change before the norm's output is used, got one that was changed in place"
            )
        return _state(self.input) == self.state

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Products and sums are put off further; all else is computed."""
        if len(args) == 2 and not kwargs and func in (*_PRODUCTS, *_SUMS):
            ours, other = args if isinstance(args[0], cls) else args[::-1]
            return ours.times(other) if func in _PRODUCTS else ours.plus(other)
        return func(*settled(tuple(args)), **settled(dict(kwargs or {})))

    def __mul__(self, other: Any) -> Any:
        return self.times(other)

    def __add__(self, other: Any) -> Tensor:
        return self.plus(other)

    __rmul__ = mul = multiply = __mul__
    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)


def _by_value(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *others: Any) -> Any:
        return getattr(self.value(), name)(*map(settled, others))

    return method


for _name in (
    *("sub", "rsub", "truediv", "rtruediv", "floordiv", "pow", "rpow", "matmul", "rmatmul", "mod"),
    *("neg", "abs", "getitem", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge", "bool", "float"),
):
    setattr(Deferred, f"__{_name}__", _by_value(f"__{_name}__"))


def settled(value: Any) -> Any:
    """A value in which nothing is put off any more."""
    if isinstance(value, Deferred):
        return value.value()
    if type(value) in (tuple, list):
        return type(value)(settled(each) for each in value)
    if type(value) is dict:
        return {name: settled(each) for name, each in value.items()}
    return value


def modulated(
    norm: nn.Module, input: Tensor, factor: Tensor, shift: Tensor | None = None
) -> Tensor:
    """``norm(input) * factor + shift``: by one kernel, or as it stands.

    Args:
        norm: A replaced one.
        input: [B, ..., N].
        factor: [B, 1, ..., 1, N], or [1, ..., N]; of other shapes, it is computed as it stands.
        shift: As ``factor``; None means none.
    """
    before = REFUSALS.number
    found = _in_one(norm, input, factor, shift)
    if found is not None and (torch.compiler.is_compiling() or REFUSALS.number == before):
        return found
    if shift is not None:
        return modulated(norm, input, factor) + shift
    output: Tensor = norm(input)
    return output * factor


def _in_one(norm: nn.Module, input: Tensor, factor: Tensor, shift: Tensor | None) -> Tensor | None:
    form = form_of(norm)
    weight, bias = form.parameters(norm)
    given = [input, *(t for t in (factor, shift, weight, bias) if t is not None)]
    if not is_simple(form) or not all(type(t) in _TENSORS for t in given):
        return None
    if weight is None and (form.weight_name is not None and form.shape_name is None):
        return None  # a class that had a weight may do anything then
    columns = input.shape[-1]
    same = all(t.device == input.device for t in given) and supported.are_taken(*given)
    if not same or input.ndim < 2 or input.numel() == 0:
        return None
    if tuple(form.dims(norm, input.shape)) != (columns,):
        return None
    if not form.holds_for(norm, input, weight, bias, None):
        return None
    sets = {_sets(t, input) for t in (factor, shift) if t is not None}
    if None in sets:
        return None
    output_dtype = _type_of(form, input, weight)
    if output_dtype is None:
        return None
    for tensor in (factor, shift):
        output_dtype = output_dtype if tensor is None else torch.promote_types(
            output_dtype, tensor.dtype)  # fmt: skip
    number = input.shape[0] if input.shape[0] in sets else 1
    if number > 1 and input.ndim < 3:
        return None  # each row has its own, so there is nothing to be gained
    is_one = all(t is None or t.ndim == 1 for t in (factor, shift))
    shape = (columns,) if is_one else (number, columns)
    with _without_autocast(input.device.type):
        gamma, beta = _combined(factor, shift, weight, bias, form.weight_offset, shape)
        options: dict[str, Any] = {
            "output_dtype": None if output_dtype == input.dtype else output_dtype,
            "rows_per_set": 1 if number == 1 else math.prod(input.shape[1:-1]),
        }
        eps = form.eps_of(norm, (columns,))
        if form.op.centres:
            return layer_norm(input, columns, gamma, beta, eps, **options)
        return rms_norm(input, columns, gamma, eps, bias=beta, **options)


def _combined(
    factor: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    shape: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """A weight and a bias, of what is in a wrapper and what is in its norm, which comes first."""

    def arranged(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, shape[-1])
        return rows.expand(*shape) if len(shape) > 1 else rows[0]

    gamma, beta = arranged(factor), None if shift is None else arranged(shift)
    if weight is None and bias is None:
        return gamma, beta
    sums = supported.wide(gamma.dtype)
    wide = gamma.to(sums)
    if bias is not None:
        own = bias.to(sums) * wide
        beta = own if beta is None else own + beta.to(sums)
    return (wide if weight is None else (weight.to(sums) + offset) * wide), beta


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()  # in a graph, the other is a call
    without: contextlib.AbstractContextManager[Any] = torch.autocast(device, enabled=False)
    return without


def is_simple(form: Form) -> bool:
    """Whether a function of ours computes it, over the last dimension."""
    return (
        len(form.normalized_shape if isinstance(form.normalized_shape, tuple) else (1,)) == 1
        and form.gate is None
        and form.output_dtype is None
        and not (form.is_l2 or form.is_clamped or form.is_flattened or form.channels_first)
        and not (form.any_width and form.weight_name is not None)
    )


def _sets(tensor: Tensor, input: Tensor) -> int | None:
    """How many rows a factor has of its own: one for each sample, or one; None if neither."""
    columns = input.shape[-1]
    leading = tensor.shape[:-1]
    if tensor.ndim == 0 or tensor.shape[-1] != columns or tensor.ndim > input.ndim:
        return None
    if all(size == 1 for size in leading):
        return 1
    of_samples = (input.shape[0], *(1 for _ in input.shape[1:-1]))
    return input.shape[0] if tuple(leading) == of_samples else None


def _type_of(form: Form, input: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """The element type that the norm alone would return; None where only it knows."""
    usual = form.output_type.of(input.dtype, None if weight is None else weight.dtype)
    device = input.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return usual
    rule = form.on_cpus if device == "cpu" else form.on_gpus
    if rule is Autocast.NOTHING:
        return usual
    if rule is Autocast.WIDENS:
        return torch.float32
    if rule is not Autocast.OPERATORS:
        return None
    is_cast = device != "cpu" and any(norm.op is form.op for norm in AUTOCAST)
    return torch.float32 if is_cast else usual
