"""What the pass needs of torch.fx's graphs: calls with their values, views, order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._guards import detect_fake_mode
from torch._prims_common import is_contiguous_or_false
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.node import map_arg

from iree_lnbwd.torch import supported

_ATEN = torch.ops.aten
# What a call's operators inherit: where it is in the model, and if a checkpoint recomputes it.
_OF_A_CALL = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag", "recompute",
              "ac_graph_id")  # fmt: skip
CONVERSION = torch.ops.prims.convert_element_type.default
_VIEWS = frozenset({_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default})


def value(node: object) -> Tensor | None:
    """The tensor without memory that stands for a node's value; None if it has none."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, Tensor) else None


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema."""
    schema = node.target._schema
    given = {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments}
    given.update(zip(given, node.args, strict=False))
    return {**given, **node.kwargs}


def call(graph: Graph, operator: Callable[..., Any], *given: Any) -> Node:
    """A call of an operator, where nodes are inserted now, with the value that it has."""
    node = graph.call_function(operator, given)
    values = map_arg(given, lambda each: each.meta["val"])
    mode = detect_fake_mode(values)
    # The caller's autograd and autocast are no part of the graph.
    with mode or nullcontext(), torch.no_grad(), torch._C._DisableAutocast():
        node.meta["val"] = operator(*values)
    return node


def stand_for(node: Node, old: Node) -> None:
    """Lets a call of several results stand in the place of another, which is erased."""
    node.meta.update({name: old.meta[name] for name in _OF_A_CALL if name in old.meta})
    for taker in list(old.users):
        taker.replace_input_with(old, node)
        taker.meta["val"] = node.meta["val"][taker.args[1]]
    node.graph.erase_node(old)


def take_apart(node: Node, compute: Callable[..., Any], decompositions: Callable[[], Any]) -> None:
    """Replaces a call by the operators that another function with its arguments calls."""
    graph, given = node.graph, tuple(arguments(node).values())
    nodes = [each for each in given if isinstance(each, Node)]

    def computed(*tensors: Tensor) -> Any:
        values = dict(zip(nodes, tensors, strict=True))
        return compute(*map_arg(given, lambda each: values.get(each, each.meta.get("val"))))

    values = [each.meta["val"] for each in nodes]
    mode = detect_fake_mode(values)  # for the tensors that it makes, too
    # The caller's autocast is no part of the graph.
    with mode or nullcontext(), torch._C._DisableAutocast():
        inner = make_fx(computed, decompositions(), tracing_mode="real")(*values).graph
    placeholders = inner.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, nodes, strict=True))
    with graph.inserting_before(node):
        computed_nodes = graph.graph_copy(inner, copies)
    told = {name: node.meta[name] for name in _OF_A_CALL if name in node.meta}
    for each in set(copies.values()) - {*nodes}:
        each.meta.update(told)
    for place, takers in results(node).items():
        for taker in takers:
            taker.replace_all_uses_with(computed_nodes[place])
            graph.erase_node(taker)
    graph.erase_node(node)


def like(graph: Graph, node: Node, other: Node) -> Node:
    """A dense tensor in the shape of another."""
    want = other.meta["val"]
    if have_one_shape(node.meta["val"], want):
        return node
    sizes = (
        call(graph, _ATEN.sym_size.int, other, dim) if isinstance(size, SymInt) else size
        for dim, size in enumerate(want.shape)
    )
    return call(graph, _ATEN.view.default, node, list(sizes))


def have_one_shape(one: Tensor, other: Tensor) -> bool:
    """Whether two shapes are known to be the same."""
    return has_shape(one, other.shape)


def has_shape(tensor: Tensor, shape: Sequence[Any]) -> bool:
    """Whether a tensor's shape is known to be this."""
    return len(tensor.shape) == len(shape) and statically_known_true(
        sym_eq(tuple(tensor.shape), tuple(shape))
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is known to have its elements in order, without gaps."""
    return bool(is_contiguous_or_false(tensor))


def below_views(node: Node) -> Node:
    """What a node is a view of, all elements in the same order."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def is_widened(node: Node) -> bool:
    """Whether a node is, but for views, a cast of a narrower tensor."""
    cast = below_views(node)
    if cast.target not in (CONVERSION, _ATEN._to_copy.default):
        return False
    before, after = value(cast.args[0]), value(cast)
    return before is not None and after is not None and before.itemsize < after.itemsize


def before_widening(node: Node) -> Node | None:
    """A dense tensor in half precision that a node, but for views, is a cast of to f32."""
    cast = below_views(node)
    source = cast.args[0] if cast.target is CONVERSION else None
    before, after = value(source), value(cast)
    if before is None or after is None or not is_dense(before):
        return None
    is_one = before.dtype in supported.HALF and after.dtype == torch.float32
    return source if is_one and isinstance(source, Node) else None


def last_view(node: Node) -> Node:
    """The last of the views that are the only users of each other."""
    while len(node.users) == 1 and (user := next(iter(node.users))).target in _VIEWS:
        node = user
    return node


def results(node: Node) -> Mapping[int, Sequence[Node]]:
    """The nodes that take one result of a call, by its place."""
    found: dict[int, list[Node]] = {}
    for user in node.users:
        found.setdefault(user.args[1], []).append(user)
    return found


def is_addition(node: object) -> bool:
    """Whether a node adds two dense tensors of one shape and type, as they are."""
    if not isinstance(node, Node) or node.target is not _ATEN.add.Tensor or node.kwargs:
        return False
    total, *terms = value(node), *map(value, node.args)
    return total is not None and all(
        term is not None
        and term.dtype == total.dtype
        and term.device == total.device
        and have_one_shape(term, total)
        and is_dense(term)
        for term in terms
    )


def users_below_views(node: Node) -> list[Node]:
    """What uses a node, or views of it that have all elements in the same order."""
    found: list[Node] = []
    for user in node.users:
        found += users_below_views(user) if user.target in _VIEWS else [user]
    return found


def is_in_memory(node: Node) -> bool:
    """Whether a node is a tensor that inductor stores anyway, and does not fuse with its user."""
    tags = getattr(node.target, "tags", ())
    return node.op != "call_function" or len(node.users) > 1 or torch.Tag.pointwise not in tags


def depends(node: Node, on: Node) -> bool:
    """Whether a node cannot be computed before another."""
    seen, ahead = {node}, [node]
    while ahead:
        each = ahead.pop()
        if each is on:
            return True
        new = set(each.all_input_nodes) - seen
        seen |= new
        ahead += new
    return False


def erase_unused(node: Node) -> None:
    """Removes a node that nothing uses, and what only it used."""
    while not node.users and node.op == "call_function":
        above = node.all_input_nodes
        node.graph.erase_node(node)
        if len(above) != 1:
            return
        (node,) = above
