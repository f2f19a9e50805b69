"""Backwards: the skip's gradient is added in the kernel; casts around it go, and sums of dx."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from iree_lnbwd.ops.operands import (
    GRAD_OUTPUT,
    GRAD_RESIDUAL,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    names,
)
from iree_lnbwd.torch import aten, supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.calls import Call, call_of
from iree_lnbwd.torch.operator_table import GRADIENTS, WITH_COPIES, WITH_SUMS, Gradients

# Measured on an H200: in Qwen3's steps, backwards of heads of 128 columns are faster fused.
_MOST_COLUMNS_OF_INDUCTORS = 256

_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
)


def lower(graph: Graph, decompositions: Callable[[], Any]) -> int:
    """Takes the backwards of a graph apart that inductor is to compute.

    These are those of narrow rows, and those that there is no module for.

    Args:
        graph: It may need sorting then.
        decompositions: Inductor's, of PyTorch's operators.

    Returns:
        How many.
    """
    return _lower(
        graph, decompositions, lambda call: _is_inductors(call) or call.backward().is_left_out()
    )


def lower_widened(graph: Graph, decompositions: Callable[[], Any]) -> int:
    """Takes those of narrow rows apart that were cast to a wider type, as `lower`."""
    return _lower(
        graph, decompositions, lambda call: _is_inductors(call) and graphs.is_widened(call.data)
    )


def _lower(
    graph: Graph, decompositions: Callable[[], Any], is_taken: Callable[[Call], bool]
) -> int:
    count = 0
    for node in list(graph.nodes):
        call = call_of(node)
        if call is not None and call.is_ours and is_taken(call):
            graphs.take_apart(node, functools.partial(_by_aten, call.gradients), decompositions)
            count += 1
    return count


def _is_inductors(call: Call) -> bool:
    return call.gradients in GRADIENTS and is_narrow(call.options[0])


def is_narrow(normalized_shape: Sequence[object]) -> bool:
    """Whether inductor's own backward is faster, fused with what is beside it."""
    dims = [dim for dim in normalized_shape if isinstance(dim, int)]
    return len(dims) == len(normalized_shape) and math.prod(dims) <= _MOST_COLUMNS_OF_INDUCTORS


def _by_aten(gradients: Gradients, *arguments: Any) -> tuple[Any, ...]:
    count = len(gradients.arguments)
    options = gradients.options(arguments[count:])
    return tuple(aten.gradients(gradients.op, arguments[:count], **options))


def fold(graph: Graph) -> tuple[int, int, int]:
    """Folds what is beside the backwards of a graph into them; it may need sorting then.

    Returns:
        How many additions, how many casts, and how many sums over rows.
    """
    additions = casts = sums = 0
    for node in list(graph.nodes):
        found = call_of(node)
        if found is not None:
            found, summed = _with_all_gradients(found)
            found, has_cast = _without_cast(found)
            additions += summed
            casts += has_cast
            found, has_addition = _with_addition(found)
            additions += has_addition
            has_copy = _with_copy(found)
            casts += has_copy
            sums += 0 if has_copy else _with_sum(found)
    return additions, casts, sums


def _with_all_gradients(call: Call) -> tuple[Call, int]:
    """The backward takes the terms of a sum: gradients of several uses of the output.

    The kernel rounds each partial sum as the graph does. What inductor would compute with the sum,
    and would have to store for the kernel, stays with the sum.
    """
    first = MORE_GRAD_OUTPUTS[0].name
    if not call.takes(first) or call.tensor(first) is not None:
        return call, 0
    dy, x = call.grad_output, call.data
    total = graphs.below_views(dy)
    terms = _terms(total, MOST_GRAD_OUTPUTS)
    is_used_here_alone = len(dy.users) == 1 and graphs.last_view(total) is dy
    if len(terms) == 1 or not is_used_here_alone:
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
    names_, graph = names((GRAD_OUTPUT, *MORE_GRAD_OUTPUTS)), call.node.graph
    if not call.backward(dict(zip(names_, given, strict=False))).is_served():
        return call, 0
    with graph.inserting_before(call.node):
        given = [graphs.like(graph, each, x) for each in given]
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


def _without_cast(call: Call) -> tuple[Call, bool]:
    """The backward takes what was widened as it was before: the kernel widens it."""
    if call.tensor(MORE_GRAD_OUTPUTS[0].name) is not None:
        return call, False
    dy, x = call.grad_output, call.data
    source = graphs.before_widening(dy)
    if source is None or x.meta["val"].dtype not in (source.meta["val"].dtype, torch.float32):
        return call, False
    if not call.backward({GRAD_OUTPUT.name: source}).is_served():
        return call, False
    graph = call.node.graph
    with graph.inserting_before(call.node):
        grad_output = graphs.like(graph, source, x)
    changed = call.with_tensors({GRAD_OUTPUT.name: grad_output})
    graphs.erase_unused(dy)
    return changed, True


def _with_addition(call: Call) -> tuple[Call, bool]:
    """Adds the gradient of the input to another in the kernel, if all that it does is that."""
    name = GRAD_RESIDUAL.name
    dx = graphs.results(call.node).get(0, ())
    if len(dx) != 1 or not call.takes(name) or call.tensor(name) is not None:
        return call, False
    last = graphs.last_view(dx[0])
    addition = next(iter(last.users), None)
    if len(last.users) != 1 or not graphs.is_addition(addition):
        return call, False
    assert addition is not None
    skips = [term for term in addition.args if term is not last]
    if len(skips) != 1:  # it is added to itself
        return call, False
    (skip,) = skips
    assert isinstance(skip, Node)
    if graphs.depends(skip, call.node) or not call.backward({name: skip}).is_served():
        return call, False
    graph = call.node.graph
    with graph.inserting_before(call.node):
        residual = graphs.like(graph, skip, call.data)
    changed = call.with_tensors({name: residual})
    addition.replace_all_uses_with(last)
    graph.erase_node(addition)
    return changed, True


def _with_copy(call: Call) -> bool:
    """The backward stores the gradient of its input once more as it is cast, if that is stored.

    It is where a matrix product reads it. Elsewhere inductor fuses the cast with its reader.
    """
    gradients = WITH_COPIES.get(call.gradients.name)
    if gradients is None or call.data.meta["val"].dtype is not torch.float32:
        return False
    casts = [
        cast
        for dx in graphs.results(call.node).get(0, ())
        for cast in graphs.users_below_views(dx)
        if cast.target is graphs.CONVERSION and cast.args[1] in supported.HALF
    ]
    read = [cast for cast in casts if _is_multiplied(cast)]
    if not read:
        return False
    narrow, graph = read[0].args[1], call.node.graph
    if not call.backward(gradients=gradients, options=(*call.options, narrow)).is_served():
        return False
    given = dict(zip(call.gradients.arguments, call.tensors, strict=True))
    changed = call.by(gradients, given, (*call.options, narrow))
    with graph.inserting_after(changed.node):
        copied = graphs.call(graph, operator.getitem, changed.node, len(gradients.results) - 1)
    for cast in casts:
        if cast.args[1] == narrow:
            with graph.inserting_before(cast):
                copy = graphs.like(graph, copied, cast.args[0])
            cast.replace_all_uses_with(copy)
            graph.erase_node(cast)
    return True


def _with_sum(call: Call) -> int:
    """The backward sums the gradient of its input over rows: that of a bias before the norm.

    Returns:
        How many sums it takes the place of; all are one.
    """
    gradients, dims = WITH_SUMS.get(call.gradients.name), call.options[0]
    if gradients is None or not all(isinstance(dim, int) for dim in dims):
        return 0
    found = [
        user
        for dx in graphs.results(call.node).get(0, ())
        for user in graphs.users_below_views(dx)
        if _is_sum_over_rows(user, math.prod(dims))
    ]
    if not found:
        return 0
    dtype, graph = found[0].meta["val"].dtype, call.node.graph
    if not call.backward(gradients=gradients, options=(*call.options, dtype)).is_served():
        return 0
    sums = [node for node in found if node.meta["val"].dtype == dtype]
    given = dict(zip(call.gradients.arguments, call.tensors, strict=True))
    changed = call.by(gradients, given, (*call.options, dtype))
    with graph.inserting_after(changed.node):
        total = graphs.call(graph, operator.getitem, changed.node, len(gradients.results) - 1)
    for node in sums:
        with graph.inserting_before(node):
            taken = graphs.like(graph, total, node)
        node.replace_all_uses_with(taken)
        graph.erase_node(node)
    return len(sums)


def _is_sum_over_rows(node: Node, columns: int) -> bool:
    """Whether a node sums a tensor over all dimensions but those of a row."""
    if node.target is not _ATEN.sum.dim_IntList:
        return False
    summed, total = (graphs.value(each) for each in (node.args[0], node))
    if summed is None or total is None or not _may_be_summed_as(total.dtype, summed.dtype):
        return False
    dims = sorted(dim % summed.ndim for dim in graphs.arguments(node)["dim"] or ())
    of_row = summed.shape[len(dims) :]
    return (
        0 < len(dims) < summed.ndim
        and dims == list(range(len(dims)))
        and all(isinstance(size, int) for size in of_row)
        and math.prod(of_row) == columns
    )


def _may_be_summed_as(dtype: torch.dtype, of_cells: torch.dtype) -> bool:
    """Whether a kernel that stores cells of a type stores sums of the other: f64 only of f64."""
    known = supported.BY_NAME.values()
    return dtype in known and supported.wide(dtype) == supported.wide(of_cells)


def _is_multiplied(node: Node) -> bool:
    """Whether a matrix product reads a node, or a view of it."""
    return any(user.target in _PRODUCTS for user in graphs.users_below_views(node))
