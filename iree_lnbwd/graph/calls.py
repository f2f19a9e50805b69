"""From a valid graph to calls of ops: which module, which tensors, and how each is seen.

Each tensor is seen with its dimensions in the order in which X lies in memory: rows and columns of
that order are the same rows, and the same columns in another order, which is one order for all
tensors of a node. Where rows do not follow each other, the module is one for strided rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from iree_lnbwd.graph import ordering
from iree_lnbwd.graph.inference import epsilon_of
from iree_lnbwd.graph.nodes import GraphAttributes, Node, Port
from iree_lnbwd.graph.tensors import TensorAttributes, is_packed, memory_order
from iree_lnbwd.ops.operands import Kind, names
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.ops.strides import arranged


@dataclass(frozen=True)
class View:
    """A tensor as a module sees it.

    Attributes:
        uid: The tensor.
        order: Its dimensions, in the order in which they are seen.
        shape: [..., N], [..., 1], [N] or [G, N], which these dimensions are then.
        in_place: Whether modules take that as a view of an array with the tensor's strides.
        is_strided: Whether those are modules for strided rows.
    """

    uid: int
    order: tuple[int, ...]
    shape: tuple[int, ...]
    in_place: bool
    is_strided: bool


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        place: The node that it is for.
        spec: What the module computes.
        arguments: The tensors that it reads, by ATen's names.
        results: The tensors that it writes, by ATen's names.
        unread: The shapes of the results that it writes as well and that nobody asked for.
        rows_per_set: Neighbouring rows that take one set of weights; 1 without sets.
    """

    place: str
    spec: NormSpec
    arguments: Mapping[str, View]
    results: Mapping[str, View]
    unread: Mapping[str, tuple[int, ...]]
    rows_per_set: int


def calls_of(graph: GraphAttributes) -> tuple[Call, ...]:
    """The calls of a valid graph, in order.

    Raises:
        ValueError: All its outputs are virtual, so that nothing would be computed.
    """
    needed, tensors = ordering.needed(graph), graph.by_uid()
    each = (_call(node, tensors, needed) for node in ordering.executed(graph))
    calls = tuple(call for call in each if call is not None)
    if not calls:
        raise ValueError(
            "graph: expected an output that is not virtual, got none; call set_output(True)"
        )
    return calls


def _call(
    node: Node, tensors: Mapping[int, TensorAttributes], needed: frozenset[int]
) -> Call | None:
    """The call of one node, without the results that nobody needs."""
    op = node.kind.op
    placed = [port for port in node.kind.ports if port.kind and port.name in node.uids]
    views = {port.name: _view(port, node, tensors) for port in placed}
    types = {port.operand: _dtype(tensors[views[port.name].uid]) for port in placed}
    arguments = {p.operand: views[p.name] for p in placed if p.name in node.inputs}
    results = {
        p.operand: views[p.name]
        for p in placed
        if p.name in node.outputs and views[p.name].uid in needed
    }
    columns = arguments["input"].shape[-1]
    if not results:
        return None
    computes_statistics = not op.is_backward or "rstd" not in arguments
    has_bias = bool({"bias", "grad_bias"} & {*arguments, *results})
    gradients = op.gradients if has_bias else op.masked
    spec = NormSpec(
        (columns,),
        types["input"],
        grad_output_dtype=types.get("grad_output"),
        weight_dtype=types["weight"],
        bias_dtype=types.get("bias", types.get("grad_bias")),
        has_bias=has_bias and op.takes_bias,
        output_mask=tuple(name in results for name in names(gradients)),
        eps=epsilon_of(node, tensors) if computes_statistics else None,
        op=op.name,
        output_dtype=types.get("output"),
        weight_sets=node.kind.of_samples,
        strided_rows=any(view.is_strided for view in views.values()),
    )
    x = tensors[node.uids["X"]]
    unread = {
        result.name: _shape(result.kind, node, x)
        for result in op.results
        if spec.has(result) and result.name not in results
    }
    return Call(node.name, spec, arguments, results, unread, _rows_per_set(node, x))


def _view(port: Port, node: Node, tensors: Mapping[int, TensorAttributes]) -> View:
    """How a module sees the tensor at a port."""
    x = tensors[node.uids["X"]]
    uid = node.uids[port.name]
    tensor = tensors[uid]
    rank, split = len(x.dim), len(x.dim) - node.normalized_dim_count
    leading = _leading(node, x)
    normalized = memory_order(x.stride, range(split, rank))
    own = len(tensor.dim)
    assert port.kind is not None
    match port.kind:
        case Kind.CELLS:
            order: tuple[int, ...] = (*leading, *normalized)
        case Kind.ROWS:  # [N, 1, ...], [N], or [1] where there is but one row
            order = (*leading, *range(split, own))
        case _:  # of as many dimensions as are normalized, after ones, or samples and ones
            ones = own - len(normalized)
            order = (*range(ones), *(axis - split + ones for axis in normalized))
    shape, packed = _shape(port.kind, node, x), is_packed(tensor.dim, tensor.stride, order)
    strided = (
        not packed and port.kind is Kind.CELLS and _has_two_strides(tensor, leading, normalized)
    )
    return View(uid, order, shape, packed or strided, strided)


def _has_two_strides(
    tensor: TensorAttributes, leading: Sequence[int], normalized: Sequence[int]
) -> bool:
    """Whether rows are dense, apart, and where two strides say."""
    both = (leading, normalized)
    sizes, row = (tuple(tensor.dim[axis] for axis in axes) for axes in both)
    strides, of_row = (tuple(tensor.stride[axis] for axis in axes) for axes in both)
    if not is_packed(row, of_row, range(len(row))):
        return False
    columns = math.prod(row)
    found = arranged(sizes, columns, (("", strides),), ("",))
    return found is not None and found.of("").are_apart(
        math.prod(sizes), columns, found.inner_count
    )


def _leading(node: Node, x: TensorAttributes) -> tuple[int, ...]:
    """The dimensions of rows, in the order in which X has them in memory."""
    return memory_order(x.stride, range(len(x.dim) - node.normalized_dim_count))


def _rows_per_set(node: Node, x: TensorAttributes) -> int:
    """How many neighbouring rows of X, as it lies in memory, belong to one sample."""
    if not node.kind.of_samples:
        return 1
    leading = _leading(node, x)
    return math.prod(x.dim[axis] for axis in leading[leading.index(0) + 1 :])


def _shape(kind: Kind, node: Node, x: TensorAttributes) -> tuple[int, ...]:
    """The shape of a tensor for a module that normalizes one dimension."""
    columns = math.prod(x.dim[len(x.dim) - node.normalized_dim_count :])
    rows = tuple(x.dim[axis] for axis in _leading(node, x))
    match kind:
        case Kind.CELLS:
            return (*rows, columns)
        case Kind.ROWS:
            return (*rows, 1)
    return (x.dim[0], columns) if node.kind.of_samples else (columns,)


def _dtype(tensor: TensorAttributes) -> str:
    assert tensor.data_type is not None
    return tensor.data_type.dtype
