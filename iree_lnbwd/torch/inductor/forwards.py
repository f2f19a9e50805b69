"""Forwards: inductor's own code where it is as fast, and ours with the addition before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import getitem
from typing import Any

from torch.fx import Graph, Node

from iree_lnbwd.ops.operands import RESIDUAL, RESIDUAL_OUTPUT, names
from iree_lnbwd.torch.inductor import backwards, graphs
from iree_lnbwd.torch.operator_table import ALL_NORMS, BY_ATEN, NORMS, Norm, operator

# Measured on an H200: inductor's kernels run at the speed of a copy up to there, and ours beyond.
_LEAST_COLUMNS_OF_OURS = 16384

_NORMS = {norm.operator: norm for norm in ALL_NORMS}
_NARROW = {norm.operator: norm for norm in NORMS}
_SUMS_OF = {(norm.op, norm.takes_sets): norm for norm in ALL_NORMS if norm.takes_residual}


def lower(graph: Graph, decompositions: Callable[[], Any]) -> tuple[int, int]:
    """Takes the forwards of a graph apart that inductor is to compute.

    Norms of sums stay ours: they promise the bits of an addition and a norm, and inductor
    normalizes the sum before it is rounded.

    Args:
        graph: It may need sorting then.
        decompositions: Inductor's, of PyTorch's operators.

    Returns:
        How many it took apart, and how many additions went into those that stay.
    """
    apart = additions = 0
    for node in list(graph.nodes):
        norm = _NORMS.get(node.target)
        if norm is None or norm.takes_residual:
            continue
        if norm.own_forward and _is_wide(node):
            additions += _with_addition(node, norm)
        else:
            _take_apart(node, norm, decompositions)
            apart += 1
    return apart, additions


def lower_widened(graph: Graph, decompositions: Callable[[], Any]) -> int:
    """Takes the forwards of narrow rows apart that were cast, as `lower`; the number of them."""
    count = 0
    for node in list(graph.nodes):
        norm = _NARROW.get(node.target)
        if norm is None or norm.takes_residual:
            continue
        given = graphs.arguments(node)
        if backwards.is_narrow(given["normalized_shape"]) and graphs.is_widened(given["input"]):
            _take_apart(node, norm, decompositions)
            count += 1
    return count


def _is_wide(node: Node) -> bool:
    dims = graphs.arguments(node)["normalized_shape"]
    has_numbers = all(isinstance(dim, int) for dim in dims)
    return has_numbers and math.prod(dims) >= _LEAST_COLUMNS_OF_OURS


def _take_apart(node: Node, norm: Norm, decompositions: Callable[[], Any]) -> None:
    """Replaces a norm by what PyTorch's operators compute."""
    graphs.take_apart(node, operator(norm.name + BY_ATEN), decompositions)


def _with_addition(node: Node, norm: Norm) -> bool:
    """The norm adds what was added before it."""
    given = graphs.arguments(node)
    normalized = given["input"]
    addition = graphs.below_views(normalized)
    of_sum = _SUMS_OF.get((norm.op, norm.takes_sets))  # None of one with a gate
    if of_sum is None or not graphs.is_addition(addition):
        return False
    others = [each for each in node.all_input_nodes if each is not normalized]
    if any(graphs.depends(each, addition) for each in others):
        return False
    graph = node.graph
    with graph.inserting_before(node):
        terms = [graphs.like(graph, term, normalized) for term in addition.args]
    given["input"], residual = terms
    tensors = [
        residual if argument is RESIDUAL else given[argument.name] for argument in of_sum.arguments
    ]
    options = list(given.values())[len(names(norm.arguments)) :]
    with graph.inserting_before(node):
        new = graphs.call(graph, of_sum.operator, *tensors, *options)
        summed = graphs.call(graph, getitem, new, of_sum.results.index(RESIDUAL_OUTPUT.name))
        total = graphs.like(graph, summed, addition.args[0])
    places = [of_sum.results.index(name) for name in norm.results]
    for place, takers in graphs.results(node).items():
        for taker in takers:
            taker.args = (new, places[place])
    graph.erase_node(node)
    graphs.erase_unused(normalized)
    addition.replace_all_uses_with(total)
    graphs.erase_unused(addition)
    return True
