"""Which modules scale what their norms return: told by tracing their forwards."""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from inspect import getattr_static
from types import CodeType, FunctionType
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
_ASKING = ("isinstance", "issubclass", "type", "is_tensor", "is_tensor_like")


_HAS_GRADIENTS = "has_gradients"  # of a node: whether they are recorded there


class _Tracer(fx.Tracer):
    """It does not look into modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        node = super().create_node(*arguments, **options)
        node.meta[_HAS_GRADIENTS] = torch.is_grad_enabled()
        return node


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
    if any(map(_changes_in_place, dis.get_instructions(code))) or _asks_for_types(forward, module):
        return None  # what is put off is no tensor
    graph = _traced(module)
    if graph is None:
        return None
    norms: dict[str, bool] = {}
    others = {
        name
        for name, each in module.named_modules()
        if each not in forms and type(each).__module__.partition(".")[0] != "torch"
    }
    for name, norm in children.items():
        calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
        uses = [use for call in calls for use in call.users]
        if not uses or not is_simple(forms[norm]) or not _are(uses, _PRODUCTS):
            continue
        if any(_is_in_a_function(call) or _may_change(graph, call, others) for call in calls):
            continue
        norms[name] = all(use.users and _are(use.users, _SUMS) for use in uses)
    if not norms:
        return None
    return Modulation(norms, forms[children[next(iter(norms))]].op.centres)


def _is_in_a_function(call: fx.Node) -> bool:
    """Whether what a norm returns is used in one of autograd's, which finds no tensor then."""
    uses = {*call.users, *(use for product in call.users for use in product.users)}
    return bool(call.meta[_HAS_GRADIENTS]) and not all(u.meta[_HAS_GRADIENTS] for u in uses)


def _may_change(graph: fx.Graph, call: fx.Node, others: Collection[str]) -> bool:
    """Whether modules get a norm's input, a factor, or views of them before the output is used.

    Args:
        graph: A wrapper's.
        call: Of the norm.
        others: The names of modules that may change what they get.
    """
    nodes = list(graph.nodes)
    ends = (nodes.index(use) for product in call.users for use in (product, *product.users))
    between = nodes[nodes.index(call) + 1 : max(ends)]
    given = {node for node in between if node.op == "call_module" and node.target in others}
    if not given:
        return False
    views = [node for node in nodes if node.op in _CALLS and not _is_arithmetic(node)]
    shared = {*call.all_input_nodes, *(f for use in call.users for f in use.all_input_nodes)}
    shared.discard(call)
    found: set[fx.Node] = set()
    while found != shared:
        found = set(shared)
        for view in views:
            if found.intersection((view, *view.all_input_nodes)):
                shared.update((view, *view.all_input_nodes))
    return any(shared.intersection(node.all_input_nodes) for node in given)


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether it returns a new tensor, for certain."""
    of_python = getattr(node.target, "__module__", "") == "_operator"
    return node.target in (*_PRODUCTS, *_SUMS) or (of_python and node.target != operator.getitem)


def _are(nodes: Iterable[fx.Node], targets: tuple[Any, ...]) -> bool:
    return all(n.op in _CALLS and n.target in targets for n in nodes)


def _traced(module: nn.Module) -> fx.Graph | None:
    """Its forward, without values; None if that has effects, or decides by values."""
    copied: nn.Module = object.__new__(type(module))  # what it sets, it sets there
    vars(copied).update({
        name: value.copy() if isinstance(value, (dict, list, set)) else value
        for name, value in vars(module).items()
    })  # fmt: skip
    try:
        with torch.device("cpu"), torch.enable_grad(), effects.observed() as mode:
            mode.begin()
            graph = _Tracer().trace(copied)
    except Exception:  # code that is not ours
        return None
    kept = (each for value in vars(copied).values() for each in _elements(value))
    if any(isinstance(each, fx.Proxy) for each in kept):
        return None  # which a `Deferred` would be in, later
    return None if any(_node_changes_in_place(module, node) for node in graph.nodes) else graph


def _elements(value: object) -> Collection[object]:
    """What is in a container that is an attribute: it is not settled there."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | set) else ()


def _asks_for_types(forward: FunctionType, module: nn.Module) -> bool:
    """Whether a forward, or a function or a method of the module that it calls, asks for types."""
    seen: set[FunctionType] = set()
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in seen or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(function)
        for each in _instructions(function.__code__):
            name = each.argval
            if name in _ASKING and (each.opname == "LOAD_GLOBAL" or name.startswith("is_")):
                return True
            if isinstance(name, str) and each.opname.startswith("LOAD_"):
                found = (function.__globals__.get(name), getattr_static(type(module), name, None))
                waiting += [f for f in found if isinstance(f, FunctionType)]
    return False


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Those of a function, and of what is written in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


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
