"""Backwards of norms in f32 whose input was cast to f32: they take it as it was before.

The kernel widens what it reads. Its gradient is rounded once to the narrow type, where the graph
casts it anyway; and what a forward keeps for the backward is half as large.
"""

from __future__ import annotations

from torch.fx import Graph

from iree_lnbwd.ops.operands import INPUT
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.backwards import is_narrow
from iree_lnbwd.torch.inductor.calls import Call, call_of


def fold(graph: Graph) -> int:
    """Folds these casts into the backwards of a step's graph, which may need sorting then.

    Returns:
        How many.
    """
    found = (call_of(node) for node in list(graph.nodes))
    return sum(_fold(call) for call in found if call is not None)


def _fold(call: Call) -> bool:
    if call.gradients.op.data is not INPUT or is_narrow(call.options[0]):
        return False
    source = graphs.before_widening(call.data)
    if source is None:
        return False
    narrow = source.meta["val"].dtype
    casts = [
        (cast, dx)
        for dx in graphs.results(call.node).get(0, ())
        for cast in graphs.users_below_views(dx)
    ]
    if any(cast.target is not graphs.CONVERSION or cast.args[1] != narrow for cast, _ in casts):
        return False
    if not call.backward({INPUT.name: source}).is_served():
        return False
    graph = call.node.graph
    with graph.inserting_before(call.node):
        data = graphs.like(graph, source, call.data)
    call.with_tensors({INPUT.name: data})
    for cast, dx in casts:
        with graph.inserting_before(cast):
            narrowed = graphs.like(graph, dx, cast.args[0])
        cast.replace_all_uses_with(narrowed)
        if narrowed.users:
            graphs.erase_unused(cast)
    return True
