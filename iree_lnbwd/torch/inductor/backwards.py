"""Backwards: the skip's gradient is added in the kernel, and a cast before it goes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.operands import GRAD_OUTPUT, MORE_GRAD_OUTPUTS, MOST_GRAD_OUTPUTS, names
from iree_lnbwd.torch import aten, supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.operator_table import GRADIENTS, Gradients
from iree_lnbwd.torch.overrides_in_python import ATENS, NOT_ATENS

# Measured on an H200: in Qwen3's steps, backwards of heads of 128 columns are faster fused.
_MOST_COLUMNS_OF_INDUCTORS = 256

_EPS = DEFAULT_EPS  # not read where the statistics are given
_WIDENED = MappingProxyType(dict.fromkeys(supported.HALF, torch.float32))


def pytorchs_of(gradients: Gradients) -> Any:
    """PyTorch's own operator that computes the same; None if it has none."""
    name = ATENS.get(gradients.op)
    return None if name is None else getattr(torch.ops.aten, name).default


_OURS = MappingProxyType({gradients.operator: gradients for gradients in GRADIENTS})
PYTORCHS = MappingProxyType(
    {operator: each for each in GRADIENTS if (operator := pytorchs_of(each)) is not None}
)


class _Call(NamedTuple):
    """A backward in a graph.

    Attributes:
        node: The call.
        gradients: What it computes.
        tensors: Its arguments in the order of the op's table.
        options: The other arguments of our operator.
    """

    node: Node
    gradients: Gradients
    tensors: tuple[Node | None, ...]
    options: tuple[Any, ...]

    def tensor(self, name: str) -> Node | None:
        """An argument."""
        return self.tensors[self.gradients.arguments.index(name)]

    def with_tensors(self, changed: Mapping[str, Node]) -> _Call:
        """With other arguments, by our operator."""
        graph, named = self.node.graph, zip(self.gradients.arguments, self.tensors, strict=True)
        tensors = tuple(changed.get(name, tensor) for name, tensor in named)
        given = (*tensors, *self.options)
        if self.node.target is self.gradients.operator:
            self.node.args, self.node.kwargs = given, {}
            return self._replace(tensors=tensors)
        with graph.inserting_before(self.node):
            node = graphs.call(graph, self.gradients.operator, *given)
        self.node.replace_all_uses_with(node)
        graph.erase_node(self.node)
        return self._replace(node=node, tensors=tensors)


def lower(graph: Graph, decompositions: Callable[[], Any]) -> int:
    """Takes the backwards of a graph apart that inductor is to compute: those of narrow rows.

    Args:
        graph: It may need sorting then.
        decompositions: Inductor's, of PyTorch's operators.

    Returns:
        How many.
    """
    return _lower(graph, decompositions, lambda data: True)


def lower_widened(graph: Graph, decompositions: Callable[[], Any]) -> int:
    """As `lower`, those alone whose rows were cast to a wider type."""
    return _lower(graph, decompositions, graphs.is_widened)


def _lower(
    graph: Graph, decompositions: Callable[[], Any], is_taken: Callable[[Node], bool]
) -> int:
    count = 0
    for node in list(graph.nodes):
        gradients = _OURS.get(node.target)
        if gradients is None:
            continue
        given = graphs.arguments(node)
        if is_narrow(given["normalized_shape"]) and is_taken(given[gradients.op.data.name]):
            graphs.take_apart(node, functools.partial(_by_aten, gradients), decompositions)
            count += 1
    return count


def is_narrow(normalized_shape: Sequence[object]) -> bool:
    """Whether inductor's own backward is faster, fused with what is beside it."""
    dims = [dim for dim in normalized_shape if isinstance(dim, int)]
    return len(dims) == len(normalized_shape) and math.prod(dims) <= _MOST_COLUMNS_OF_INDUCTORS


def _by_aten(gradients: Gradients, *arguments: Any) -> tuple[Any, ...]:
    count = len(gradients.arguments)
    return tuple(aten.gradients(gradients.op, arguments[:count], *arguments[count:]))


def fold(graph: Graph) -> tuple[int, int]:
    """Folds additions and casts into the backwards of a graph, which may need sorting then.

    Returns:
        How many additions, and how many casts.
    """
    additions = casts = 0
    for node in list(graph.nodes):
        found = _call_of(node)
        if found is not None:
            found, summed = _with_all_gradients(found)
            found, has_cast = _without_cast(found)
            additions += summed
            casts += has_cast
            additions += _with_addition(found)
    return additions, casts


def _call_of(node: Node) -> _Call | None:
    """The call that a node is, if ours can be called in its place."""
    gradients = _OURS.get(node.target)
    if gradients is not None:
        given = graphs.arguments(node)
        tensors = tuple(given.pop(name) for name in gradients.arguments)
        return _Call(node, gradients, tensors, tuple(given.values()))
    gradients = PYTORCHS.get(node.target)
    if gradients is None:
        return None
    dy, x, dims, *rest = graphs.arguments(node).values()
    *others, mask = rest
    rstd = graphs.value(others[1 if gradients.op.centres else 0])
    if rstd is None or rstd.dtype in supported.HALF:  # too coarse to be of use to ours
        return None
    return _Call(node, gradients, (dy, x, *others, *NOT_ATENS), (dims, mask, _EPS, 0.0))


def _with_all_gradients(call: _Call) -> tuple[_Call, int]:
    """The backward takes the terms of a sum: gradients of several uses of the output.

    The kernel rounds each partial sum as the graph does. What inductor would compute with the sum,
    and would have to store for the kernel, stays with the sum.
    """
    dy, x = call.tensor(GRAD_OUTPUT.name), call.tensor(call.gradients.op.data.name)
    assert dy is not None
    assert x is not None
    total = graphs.below_views(dy)
    terms = _terms(total, MOST_GRAD_OUTPUTS)
    first = call.tensor(MORE_GRAD_OUTPUTS[0].name)
    is_used_here_alone = len(dy.users) == 1 and graphs.last_view(total) is dy
    if len(terms) == 1 or first is not None or not is_used_here_alone:
        return call, 0
    sources = [graphs.below_views(term) for term in terms]
    casts = [source for source in sources if source.target is graphs.CONVERSION]
    if casts:
        narrow = [cast.args[0] for cast in sources if cast.target is graphs.CONVERSION]
        given = [each for each in narrow if isinstance(each, Node)]
    else:
        given = terms
    values = [graphs.value(each) for each in given]
    of_sum, of_x, of_one = total.meta["val"].dtype, x.meta["val"].dtype, values[0]
    assert of_one is not None
    rounds_alike = (
        of_one.dtype == of_sum if of_one.dtype == of_x else of_sum == supported.wide(of_x)
    )
    if (
        len(casts) not in (0, len(terms))
        or not rounds_alike
        or not all(graphs.is_in_memory(graphs.below_views(each)) for each in given)
        or not all(
            value is not None and value.dtype == of_one.dtype and graphs.is_dense(value)
            for value in values
        )
    ):
        return call, 0
    graph = call.node.graph
    with graph.inserting_before(call.node):
        given = [graphs.like(graph, each, x) for each in given]
    names_ = names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS))
    changed = call.with_tensors(dict(zip(names_, given, strict=False)))
    graphs.erase_unused(dy)
    return changed, len(terms) - 1


def _terms(node: Node, most: int) -> list[Node]:
    """What is added up to a node, in the order of the additions; itself, if nothing is.

    A sum that is used elsewhere, or has views, is a term.
    """
    if most == 1 or not graphs.is_addition(node) or len(node.users) > 1:
        return [node]
    one, other = node.args
    assert isinstance(one, Node)
    assert isinstance(other, Node)
    before, last = (other, one) if graphs.is_addition(other) else (one, other)
    return [*_terms(before, most - 1), last]


def _without_cast(call: _Call) -> tuple[_Call, bool]:
    """The backward takes what was widened as it was before: the kernel widens it."""
    dy, x = call.tensor(GRAD_OUTPUT.name), call.tensor(call.gradients.op.data.name)
    assert dy is not None
    assert x is not None
    cast = graphs.below_views(dy)
    if cast.target is not graphs.CONVERSION or call.tensor(MORE_GRAD_OUTPUTS[0].name) is not None:
        return call, False
    source = cast.args[0]
    narrow, wide = graphs.value(source), graphs.value(cast)
    assert isinstance(source, Node)
    if (
        narrow is None
        or wide is None
        or _WIDENED.get(narrow.dtype) != wide.dtype
        or x.meta["val"].dtype != wide.dtype
        or not graphs.is_dense(narrow)
    ):
        return call, False
    graph = call.node.graph
    with graph.inserting_before(call.node):
        grad_output = graphs.like(graph, source, x)
    changed = call.with_tensors({GRAD_OUTPUT.name: grad_output})
    graphs.erase_unused(dy)
    return changed, True


def _with_addition(call: _Call) -> bool:
    """Adds the gradient of the input to another in the kernel, if all that it does is that."""
    dx = graphs.results(call.node).get(0, ())
    if len(dx) != 1 or call.tensor("grad_residual") is not None:
        return False
    last = graphs.last_view(dx[0])
    addition = next(iter(last.users), None)
    if len(last.users) != 1 or not graphs.is_addition(addition):
        return False
    assert addition is not None
    skips = [term for term in addition.args if term is not last]
    if len(skips) != 1:  # it is added to itself
        return False
    (skip,) = skips
    assert isinstance(skip, Node)
    if graphs.depends(skip, call.node):
        return False
    graph, x = call.node.graph, call.tensor(call.gradients.op.data.name)
    assert x is not None
    with graph.inserting_before(addition):
        residual = graphs.like(graph, skip, x)
    call.with_tensors({"grad_residual": residual})
    addition.replace_all_uses_with(last)
    graph.erase_node(addition)
    return True
