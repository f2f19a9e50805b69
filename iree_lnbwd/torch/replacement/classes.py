"""The classes of replaced modules: each is a subclass of the module's own class.

A module stays the object that it was, with its parameters, hooks, name and mode: only its class
changes. ``fully_shard`` and ``register_parametrization`` do the same. Their classes stay outermost,
because PyTorch looks for the module's own class right below them.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iree_lnbwd import notices
from iree_lnbwd.torch.fallbacks import REFUSALS
from iree_lnbwd.torch.replacement import constants
from iree_lnbwd.torch.replacement.form import Form

OWN_FORWARD = "_iree_lnbwd_own_forward"  # an attribute of a replaced module's class
_FORM = "_iree_lnbwd_form"  # the attribute of a module; it is copied and pickled with it
# Attributes of a module that hold its own forward: accelerate puts its hooks around it.
_FORWARDS = ("forward", "_old_forward")

_log = logging.getLogger("iree_lnbwd.torch")


class ReplacedNorm(nn.Module):
    """What is ours of a replaced module's class; the module's own class comes after it."""

    def __init_subclass__(cls) -> None:
        """The own class, which may keep a register of its subclasses, is not told."""

    def _iree_lnbwd_forward(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The module's own output, but for rounding: see `Form`.

        What our functions do not take is the own forward's, in results and in errors. So is what
        TorchScript and torch.fx trace, and what there is no module for.
        """
        form: Form = self._iree_lnbwd_form  # as `form_of`
        output: Tensor | None = None
        if form.usual and len(inputs) == 1 and not named:
            if not form.has_own_forward:  # then it cannot lack a module
                output = form.at_once(self, inputs[0])
                if output is not None:
                    return output
            output = _computed(form, self, *inputs)
        else:
            given = inputs
            if named and not named.keys() - {*form.arguments[len(inputs) :]}:
                given = (*inputs, *(named[a] for a in form.arguments[len(inputs) :] if a in named))
            if len(given) == len(form.arguments) == len(inputs) + len(named):
                output = _computed(form, self, *given)
        if output is None:
            first = next(iter(inputs), named.get(form.argument))
            output = form.of_own_forward(super().forward(*inputs, **named), first)
        return output

    def __setattr__(self, name: str, value: Any) -> None:
        """Another value may make it another norm; then it is what it was before."""
        if _makes_another(self, name, value):
            _restore_for_a_change(self, name)
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As `__setattr__`."""
        if _makes_another(self, name, constants.ABSENT):
            _restore_for_a_change(self, name)
            delattr(self, name)
        else:
            super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By the module's own class: pickle finds no class that was made in a running process."""
        get_state = getattr(self, "__getstate__", None)  # Python 3.10 has none by default
        state = vars(self) if get_state is None else get_state()
        base, own = _replaced_in(type(self)).__bases__
        return _new_replaced, (own, base), state


def _computed(form: Form, module: nn.Module, *inputs: Tensor) -> Tensor | None:
    """The output by our kernels; None where the own forward has to compute it."""
    if torch.compiler.is_compiling():
        return form(module, *inputs)
    if torch.jit.is_tracing():
        return None
    before = REFUSALS.number
    output = form(module, *inputs)
    return output if REFUSALS.number == before else None


def form_of(module: nn.Module) -> Form:
    """Of a replaced module."""
    form: Form = getattr(module, _FORM)
    return form


def replace(module: nn.Module, form: Any, base: type[ReplacedNorm] = ReplacedNorm) -> None:
    """Makes a module compute its form by our functions.

    Args:
        module: It.
        form: What is known of it: a `Form`, unless the base takes something else.
        base: What is ours of its class.

    Raises:
        TypeError: Its class cannot have a subclass.
    """
    own = own_class(module)
    replaced = _replaced(own, base)
    rebased = _rebased(type(module), own, replaced)
    setattr(module, _FORM, form)
    module.__class__ = rebased
    _exchange_forwards(module, own.forward, replaced.forward)


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
    before = _before(replaced)
    module.__class__ = _rebased(type(module), replaced, before)
    delattr(module, _FORM)
    _exchange_forwards(module, replaced.forward, before.forward)


def sets_its_forward(module: nn.Module) -> bool:
    """Whether another forward than that of its class is set on a module itself.

    That of its class may be, and accelerate's, which calls it, too.
    """
    kept = vars(module)
    if "forward" not in kept or _is_method(kept["forward"], module, own_class(module).forward):
        return False
    is_accelerates = "_hf_hook" in kept and isinstance(kept["forward"], functools.partial)
    return not (
        is_accelerates and _is_method(kept.get("_old_forward"), module, own_class(module).forward)
    )


def _exchange_forwards(module: nn.Module, old: Any, new: Any) -> None:
    """Among the attributes of a module itself."""
    for name in _FORWARDS:
        if _is_method(vars(module).get(name), module, old):
            vars(module)[name] = types.MethodType(new, module)


def _is_method(value: object, module: nn.Module, function: object) -> bool:
    return (
        isinstance(value, types.MethodType)
        and value.__self__ is module
        and value.__func__ is function
    )


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


def stand_in(module: nn.Module, cls: type, vectors: Mapping[str, Tensor | None]) -> nn.Module:
    """A module of a class with the attributes of another, but with tensors of its own.

    It has no hooks, other buffers or modules, and no other forward than its class's.

    Args:
        module: The other.
        cls: The class.
        vectors: The parameters, and buffers which are none, by name.
    """
    copied: nn.Module = object.__new__(cls)
    nn.Module.__init__(copied)
    left_out = (vars(copied).keys() | vectors.keys() | {*_FORWARDS}) - {"training"}
    attributes = object.__getattribute__(module, "__dict__")
    vars(copied).update({name: v for name, v in attributes.items() if name not in left_out})
    # Not by `register_parameter`: libraries exchange that, to make models on the meta device.
    for name, vector in vectors.items():
        is_buffer = vector is not None and not isinstance(vector, nn.Parameter)
        (copied._buffers if is_buffer else copied._parameters)[name] = vector
    return copied


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Of the parameters that a module has itself, parametrized ones too."""
    parametrized = module.parametrizations if parametrize.is_parametrized(module) else ()
    return (*module._parameters, *parametrized)


def _replaced(own: type[nn.Module], base: type[ReplacedNorm]) -> type[nn.Module]:
    """The class of replaced modules of a class; it lives as long as it has any.

    Its module is that of the class: so torch.fx takes PyTorch's norms for what they are.
    """
    bases = (base, own)
    there = (cls for cls in own.__subclasses__() if cls.__bases__ == bases)
    if (found := next(there, None)) is not None:
        return found
    content = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "forward": _forward_in_place_of(own.forward),
        OWN_FORWARD: staticmethod(own.forward),
    }
    return type(f"Iree{own.__name__}", bases, content)


def _forward_in_place_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that calls ours.

    TorchScript reads a function's source, by ``__wrapped__``, and finds the names in it by its
    globals: so it takes this one for the own one.
    """

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        return self._iree_lnbwd_forward(inputs, named)  # not unpacked, which takes longer

    names = getattr(own, "__globals__", {})
    if cells := getattr(own, "__closure__", None):
        closed_over = zip(own.__code__.co_freevars, cells, strict=True)
        names = {**names, **{name: cell.cell_contents for name, cell in closed_over}}
    # torch.compile compiles a code only so often: each class has one of its own.
    made = types.FunctionType(forward.__code__.replace(), names)
    # Without the own one's attributes: torch.compile has put its own into those that it compiled.
    return functools.update_wrapper(made, own, updated=())


def _makes_another(module: nn.Module, name: str, value: object) -> bool:
    """Whether an attribute decides what a replaced module computes, and is to have another value.

    `constants.ABSENT` is the value of one that is not there.
    """
    form = vars(module).get(_FORM)
    if form is None or name not in form.fixed:
        return False
    try:
        before = vars(module).get(name, constants.ABSENT)
        return constants.key(value) != constants.key(before)
    except constants.NotConstantError:
        return True


def _restore_for_a_change(module: nn.Module, name: str) -> None:
    message = "%s computes by its own forward again, because %s has changed"
    notices.log(_log, message, type(module).__name__, name)
    restore(module)


def _replaced_in(cls: type) -> type[nn.Module]:
    """The class that `_replaced` made, of those that a class derives from."""
    (replaced,) = (c for c in cls.__mro__ if len(c.__bases__) == 2 and _is_base(c.__bases__[0]))
    return replaced


def _is_base(cls: type) -> bool:
    """Whether a class is what is ours of those of replaced modules."""
    return cls is ReplacedNorm or cls.__bases__ == (ReplacedNorm,)


def _before(replaced: type) -> type[nn.Module]:
    own: type[nn.Module]
    _, own = replaced.__bases__
    return own


def _new_replaced(own: type, base: type[ReplacedNorm] = ReplacedNorm) -> nn.Module:
    """An empty module, for pickle and copy."""
    module: nn.Module = object.__new__(_replaced(own, base))
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
