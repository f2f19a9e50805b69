"""The order in which nodes are executed, and which of them anybody needs."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from iree_lnbwd.graph.nodes import GraphAttributes, Node, listed, short


def producers(nodes: Sequence[Node]) -> dict[int, Node]:
    """The node that computes each computed tensor, by its uid.

    Raises:
        ValueError: Two nodes compute the same tensor.
    """
    found: dict[int, tuple[Node, str]] = {}
    for node in nodes:
        for port, uid in node.outputs.items():
            if uid in found:
                other, theirs = found[uid]
                raise ValueError(
                    f"{node.place(port)}: expected a tensor of its own, got uid {uid}, which "
                    f"{other.place(theirs)} computes, too"
                )
            found[uid] = (node, port)
    return {uid: node for uid, (node, _) in found.items()}


def executed(graph: GraphAttributes) -> tuple[Node, ...]:
    """The nodes in an order in which each comes after those that compute its inputs.

    Raises:
        ValueError: There is none, or two nodes compute the same tensor.
    """
    of = producers(graph.nodes)
    places = {id(node): place for place, node in enumerate(graph.nodes)}
    sorter: TopologicalSorter[int] = TopologicalSorter()
    for place, node in enumerate(graph.nodes):
        before = [places[id(of[uid])] for uid in node.inputs.values() if uid in of]
        sorter.add(place, *before)
    try:
        order = tuple(sorter.static_order())
    except CycleError as error:
        names = " -> ".join(short(graph.nodes[place].name) for place in reversed(error.args[1]))
        raise ValueError(f"graph: expected no cycle, got {listed(names)}") from None
    return tuple(graph.nodes[place] for place in order)


def needed(graph: GraphAttributes) -> frozenset[int]:
    """The tensors that must be computed: what the caller gets, and what that is computed from."""
    tensors = graph.by_uid()
    found = {uid for uid, tensor in tensors.items() if not tensor.is_virtual}
    for node in reversed(executed(graph)):
        if found.intersection(node.outputs.values()):
            found.update(node.inputs.values())
    return frozenset(found)
