"""Which modules scale what their norms return: told by tracing their forwards."""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from iree_lnbwd.torch.replacement import effects
from iree_lnbwd.torch.replacement.classes import own_class
from iree_lnbwd.torch.replacement.form import Form
from iree_lnbwd.torch.replacement.modulated import Modulation, is_simple

_PRODUCTS = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
_IN_PLACE = frozenset(name for name in vars(operator) if name.startswith("i") and "_" not in name)
_SUMS = (operator.add, torch.add, "add")
_CALLS = ("call_function", "call_method")


class _Posing(fx.Proxy):
    """Passes for a tensor where a forward asks whether it is one.

    It passes for one in C++, too, which then reads its memory where it expects a number: so no size
    may pose.
    """

    _is_param = False  # or it would pass for a parameter, too
    __class__ = property(lambda self: torch.Tensor)


class _Tracer(fx.Tracer):
    """It does not look into modules. What they return, and products of it, passes for a tensor.

    Args:
        put_off: The names of norms whose output does not, as a `Deferred` does not.
    """

    def __init__(self, put_off: Collection[str] = ()) -> None:
        super().__init__()
        self._norms = put_off
        self._put_off: set[fx.Node] = set()
        self._posing: set[fx.Node] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        is_product = node.op in _CALLS and node.target in _PRODUCTS
        if (node.op == "call_module" and node.target in self._norms) or (
            is_product and self._put_off.intersection(node.all_input_nodes)
        ):
            self._put_off.add(node)
        elif node.op == "call_module" or (
            is_product and self._posing.intersection(node.all_input_nodes)
        ):
            self._posing.add(node)
            return _Posing(node, self)
        return fx.Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Posing else super().create_arg(a)


def modulation_of(module: nn.Module, forms: Mapping[nn.Module, Form]) -> Modulation | None:
    """What a wrapper does to its norms; None if it is none.

    Args:
        module: Any.
        forms: The norms that are replaced, and what they compute.
    """
    children = {name: each for name, each in module.named_children() if each in forms}
    if not any(is_simple(forms[each]) for each in children.values()):
        return None
    forward = own_class(module).forward
    code = getattr(forward, "__code__", None)
    if code is None or forward.__closure__ or hasattr(forward, "_torchdynamo_orig_callable"):
        return None  # ``super()`` would see that its forward gets a `View`, others may
    if any(map(_changes_in_place, dis.get_instructions(code))):
        return None
    graph = _traced(module)
    if graph is None:
        return None
    norms: dict[str, bool] = {}
    for name, norm in children.items():
        calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
        uses = [use for call in calls for use in call.users]
        if not uses or not is_simple(forms[norm]) or not _are(uses, _PRODUCTS):
            continue
        norms[name] = all(use.users and _are(use.users, _SUMS) for use in uses)
    if not norms or _said(graph) != _said(_traced(module, norms)):
        return None
    return Modulation(norms, forms[children[next(iter(norms))]].op.centres)


def _are(nodes: Iterable[fx.Node], targets: tuple[Any, ...]) -> bool:
    return all(n.op in _CALLS and n.target in targets for n in nodes)


def _said(graph: fx.Graph | None) -> list[str]:
    """All that a graph computes, to be compared."""
    return [] if graph is None else [f"{node.target} {node.format_node()}" for node in graph.nodes]


def _traced(module: nn.Module, put_off: Collection[str] = ()) -> fx.Graph | None:
    """Its forward, without values; None if that has effects, or decides by values.

    Args:
        module: A wrapper.
        put_off: The names of norms whose output is no tensor.
    """
    copied: nn.Module = object.__new__(type(module))  # what it sets, it sets there
    vars(copied).update({
        name: value.copy() if isinstance(value, (dict, list, set)) else value
        for name, value in vars(module).items()
    })  # fmt: skip
    try:
        with torch.device("cpu"), effects.observed() as mode:
            mode.begin()
            graph = _Tracer(put_off).trace(copied)
    except Exception:  # code that is not ours
        return None
    kept = (each for value in vars(copied).values() for each in _elements(value))
    if any(type(each) in (fx.Proxy, _Posing) for each in kept):
        return None  # which a `Deferred` would be in, later
    return None if any(_node_changes_in_place(module, node) for node in graph.nodes) else graph


def _elements(value: object) -> Collection[object]:
    """What is in a container that is an attribute: it is not settled there."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | set) else ()


def _changes_in_place(instruction: dis.Instruction) -> bool:
    """Whether a forward may change its input before a norm's output is used; it counts anywhere."""
    name, argument = instruction.opname, instruction.argrepr
    return (
        name.startswith(("INPLACE_", "STORE_SUBSCR", "STORE_SLICE"))
        or (name == "BINARY_OP" and argument.endswith("="))
        or (name in ("LOAD_ATTR", "LOAD_METHOD") and _is_in_place(str(instruction.argval)))
    )


def _node_changes_in_place(module: nn.Module, node: fx.Node) -> bool:
    """As `_changes_in_place`, of what the forward calls, too."""
    if node.op == "call_method":
        return _is_in_place(str(node.target))
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op != "call_function" or not callable(node.target):
        return False
    name = getattr(node.target, "__name__", "")
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # one of C++'s
        given = node.kwargs
    is_asked = given.get("out") is not None or bool(given.get("inplace"))
    return is_asked or name == "setitem" or name in _IN_PLACE or _is_in_place(name)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")
