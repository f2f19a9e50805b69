"""The classes of replaced modules: each is a subclass of the module's own class.

A module stays the object that it was, with its parameters, hooks, name and mode: only its class
changes. ``fully_shard`` and ``register_parametrization`` do the same. Their classes stay outermost,
because PyTorch looks for the module's own class right below them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from iree_lnbwd.torch.replacement.form import Form

_FORM = "_iree_lnbwd_form"  # the attribute of a module; it is copied and pickled with it


class ReplacedNorm(nn.Module):
    """What is ours of a replaced module's class; the module's own class comes after it."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """The module's own output, but for rounding: see `Form`."""
        form = form_of(self)
        if len(inputs) + len(named) != 1 or not named.keys() <= {form.argument}:
            output: Tensor = super().forward(*inputs, **named)  # it refuses this, in its own words
            return output
        (input,) = (*inputs, *named.values())
        return form(self, input)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By the module's own class: pickle finds no class that was made in a running process."""
        get_state = getattr(self, "__getstate__", None)  # Python 3.10 has none by default
        state = vars(self) if get_state is None else get_state()
        return _new_replaced, (_before(_replaced_in(type(self))),), state

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` takes in place of the module: one of the module's own class."""
        own: nn.Module = object.__new__(_before(_replaced_in(type(self))))
        vars(own).update({name: value for name, value in vars(self).items() if name != _FORM})
        return own


def form_of(module: nn.Module) -> Form:
    """Of a replaced module."""
    form: Form = getattr(module, _FORM)
    return form


def replace(module: nn.Module, form: Form) -> None:
    """Makes a module compute its form by our functions."""
    own: type = own_class(module)
    setattr(module, _FORM, form)
    module.__class__ = _rebased(type(module), own, _replaced(own))


def restore(module: nn.Module) -> None:
    """The opposite of `replace`; what was done to the module since then stays.

    Raises:
        RuntimeError: Someone made a further class of the module's.
    """
    if not isinstance(module, ReplacedNorm):
        return
    replaced = _replaced_in(type(module))
    if own_class(module) is not replaced:
        raise RuntimeError(
            f"module: expected a class of PyTorch's around {replaced.__name__}, if any, got "
            f"{own_class(module).__name__}"
        )
    module.__class__ = _rebased(type(module), replaced, _before(replaced))
    delattr(module, _FORM)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, inside of those that FSDP2 and parametrizations made for it."""
    cls: type = type(module)
    while True:
        first, *others = cls.__bases__
        if others and first is _fsdp_module():
            cls = others[0]
        elif (
            parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{first.__name__}"
        ):
            cls = first
        else:
            return cls


def stand_in(module: nn.Module, cls: type, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module of a class with the attributes of another, but with parameters of its own.

    It has no hooks, buffers or modules: a parametrized parameter is a parameter here.

    Args:
        module: The other.
        cls: The class.
        make: A parameter for one of the other's.
    """
    copied: nn.Module = object.__new__(cls)
    nn.Module.__init__(copied)
    fresh = vars(copied).keys() - {"training"}
    vars(copied).update({name: v for name, v in vars(module).items() if name not in fresh})
    for name in parameter_names(module):
        parameter = getattr(module, name)
        if parameter is None:
            copied.register_parameter(name, None)
        else:
            made = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
            copied.register_parameter(name, made)
    return copied


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Of the parameters that a module has itself, parametrized ones too."""
    parametrized = module.parametrizations if parametrize.is_parametrized(module) else ()
    return (*module._parameters, *parametrized)


@functools.cache
def _replaced(own: type) -> type[nn.Module]:
    """The class of replaced modules of a class."""
    return type(f"Iree{own.__name__}", (ReplacedNorm, own), {"__doc__": own.__doc__})


def _replaced_in(cls: type) -> type:
    """The class that `_replaced` made, of those that a class derives from."""
    (replaced,) = (c for c in cls.__mro__ if c.__bases__[:1] == (ReplacedNorm,))
    return replaced


def _before(replaced: type) -> type:
    own: type
    _, own = replaced.__bases__
    return own


def _new_replaced(own: type) -> nn.Module:
    """An empty module, for pickle and copy."""
    module: nn.Module = object.__new__(_replaced(own))
    return module


def _rebased(cls: type, old: type, new: type) -> type:
    """A class with a base exchanged, through all classes that PyTorch made around it."""
    if cls is old:
        return new
    bases = tuple(
        _rebased(base, old, new) if issubclass(base, old) else base for base in cls.__bases__
    )
    of_any_class = ("__dict__", "__weakref__")
    content = {name: value for name, value in vars(cls).items() if name not in of_any_class}
    return type(cls.__name__.replace(old.__name__, new.__name__), bases, content)


def _fsdp_module() -> type | None:
    """``FSDPModule``; None if nobody has imported it, and so used it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, "FSDPModule", None)
