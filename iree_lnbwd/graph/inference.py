"""Whether a graph is valid, and what its unset dimensions, strides and element types are.

The rules are those of hipDNN's nodes, and a few more: what no kernel of this package computes, and
what could be meant in two ways, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from iree_lnbwd.errors import shown
from iree_lnbwd.graph import ordering
from iree_lnbwd.graph.attributes import NormFwdPhase
from iree_lnbwd.graph.nodes import GraphAttributes, Node, Port, listed
from iree_lnbwd.graph.tensors import (
    DataType,
    TensorAttributes,
    memory_order,
    overlaps,
    packed_stride,
)
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.ops.spec import MOST_COLUMNS, MOST_ROWS, check_eps

_Tensors = dict[int, TensorAttributes]


def with_uids(graph: GraphAttributes) -> GraphAttributes:
    """Gives each tensor without a uid the least that is free.

    Raises:
        ValueError: Two tensors have one uid.
    """
    taken: dict[int, str] = {}
    for tensor in graph.tensors:
        if tensor.uid is None:
            continue
        if tensor.uid in taken:
            raise ValueError(
                f"uid: expected one for each tensor, got {tensor.uid} for "
                f"{shown(taken[tensor.uid])} and {shown(tensor.name)}"
            )
        taken[tensor.uid] = tensor.name
    free = (uid for uid in range(1, len(graph.tensors) + 1) if uid not in taken)
    tensors = (t if t.uid is not None else replace(t, uid=next(free)) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def resolved(graph: GraphAttributes) -> GraphAttributes:
    """A valid graph with nothing unset.

    Args:
        graph: With uids.

    Raises:
        ValueError: Naming the node and its port, what came and what was expected.
    """
    if not graph.nodes:
        raise ValueError("graph: expected at least one node, got none")
    tensors = graph.by_uid()
    for node in graph.nodes:
        for port, uid in node.uids.items():
            if uid not in tensors:
                raise ValueError(f"{node.place(port)}: expected the uid of a tensor, got {uid}")
    order = ordering.executed(graph)
    computed = ordering.producers(graph.nodes)
    for node in order:
        for port, uid in node.inputs.items():
            if tensors[uid].is_virtual and uid not in computed:
                raise ValueError(
                    f"{node.place(port)}: expected a tensor that an array is given for, or that a "
                    f"node computes, got the virtual uid {uid}"
                )
    read = {uid for node in graph.nodes for uid in node.inputs.values()}
    nodes = {id(node): _Inference(graph, node, tensors, read).resolve() for node in order}
    used = read.union(computed)
    for uid, tensor in tensors.items():
        if uid not in used:
            raise ValueError(f"{shown(tensor.name)}: expected a tensor of a node, got uid {uid}")
    return replace(
        graph,
        tensors=tuple(tensors.values()),
        nodes=tuple(nodes[id(node)] for node in graph.nodes),
    )


def epsilon_of(node: Node, tensors: Mapping[int, TensorAttributes]) -> float:
    """The number that a valid node adds to the variance or the mean of the squares."""
    uid = node.inputs.get("EPSILON")
    value = None if uid is None else tensors[uid].value
    return DEFAULT_EPS if value is None else value


class _Inference:
    """One node and its tensors, which are replaced by what is inferred of them."""

    def __init__(
        self, graph: GraphAttributes, node: Node, tensors: _Tensors, read: set[int]
    ) -> None:
        self._graph = graph
        self._node = node
        self._tensors = tensors
        self._read = read

    def resolve(self) -> Node:
        """The node with its count of dimensions; its tensors have nothing unset.

        Raises:
            ValueError: Naming a port.
        """
        node, kind = self._node, self._node.kind
        self._check_ports()
        x = self._input("X")
        if len(x.dim) < kind.least_rank:
            self._fail("X", f"at least {kind.least_rank} dimensions", len(x.dim))
        scale = self._input("SCALE", order=x)
        count = self._normalized_dims(x, scale)
        self._check_size(x, count)
        self._check_compute(x)
        self._check_mixture("SCALE", scale, x)
        for port in kind.ports:
            if port.name in ("X", "SCALE") or port.name not in node.uids:
                continue
            if port.kind is None:
                self._check_epsilon(port.name, x)
            elif port.kind is Kind.ROWS:
                self._infer_statistic(port.name, x, count)
            elif port.name in node.inputs:
                self._infer_input(port, scale if port.like == "SCALE" else x, x)
            else:
                self._infer_output(port, scale if port.like == "SCALE" else x, x)
        return replace(node, normalized_dim_count=count)

    def _get(self, port: str) -> TensorAttributes:
        return self._tensors[self._node.uids[port]]

    def _fail(self, port: str, expected: str, got: object) -> NoReturn:
        place, wanted = self._node.place(port), listed(expected)
        raise ValueError(f"{place}: expected {wanted}, got {listed(str(got))}")

    def _check_ports(self) -> None:
        """Expects a tensor wherever one is required, and none where it means nothing."""
        node, kind = self._node, self._node.kind
        if kind.has_phase and node.forward_phase is None:
            self._fail("forward_phase", "NormFwdPhase.TRAINING or NormFwdPhase.INFERENCE", None)
        for port in kind.ports:
            if port.required and port.name not in node.uids:
                self._fail(port.name, "a tensor", None)
        for port in kind.outputs:
            if (
                port.kind is Kind.ROWS
                and port.name in node.outputs
                and node.forward_phase is NormFwdPhase.INFERENCE
            ):
                self._fail(port.name, "None in the inference phase, which saves nothing", "one")
            if port.name in node.outputs and self._get(port.name).value is not None:
                self._fail(port.name, "a tensor to write to", "one passed by value")
        given = [port.name for port in kind.inputs if port.kind is Kind.ROWS]
        missing = [name for name in given if name not in node.inputs]
        if missing and len(missing) < len(given):
            (there,) = set(given) - set(missing)
            self._fail(missing[0], f"both {' and '.join(given)} or neither", f"only {there}")

    def _input(
        self,
        port: str,
        *,
        dim: tuple[int, ...] = (),
        data_type: DataType | None = None,
        order: TensorAttributes | None = None,
    ) -> TensorAttributes:
        """An input with nothing unset.

        Args:
            port: Where it is.
            dim: What unset dimensions are; () if they must be set.
            data_type: What an unset type is; None means that the graph says it.
            order: The tensor whose strides, or their order, unset strides have.
        """
        tensor, graph = self._get(port), self._graph
        if tensor.value is not None:
            self._fail(port, "a tensor that an array is given for", "one passed by value")
        dim = tensor.dim or dim
        if not dim:
            self._fail(port, "a tensor whose dimensions are set", "none")
        data_type = tensor.data_type or data_type or graph.io_data_type
        if data_type is None:
            self._fail(port, "a data_type, or io_data_type of the graph", None)
        return self._keep(port, replace(tensor, dim=dim, data_type=data_type), order)

    def _keep(
        self, port: str, tensor: TensorAttributes, order: TensorAttributes | None
    ) -> TensorAttributes:
        """Keeps what a tensor now is, with its strides."""
        dim = tensor.dim
        if not tensor.stride:
            if order is None or len(dim) != len(order.dim):
                stride = packed_stride(dim)
            elif dim == order.dim:
                stride = order.stride
            else:
                stride = packed_stride(dim, memory_order(order.stride, range(len(dim))))
            tensor = replace(tensor, stride=stride)
        if len(tensor.stride) != len(dim):
            self._fail(port, f"a stride for each dimension of {dim}", tensor.stride)
        if port in self._node.outputs and overlaps(dim, tensor.stride):
            self._fail(port, f"strides that keep the elements of {dim} apart", tensor.stride)
        self._tensors[self._node.uids[port]] = tensor
        return tensor

    def _normalized_dims(self, x: TensorAttributes, scale: TensorAttributes) -> int:
        """How many of the last dimensions of X are normalized; SCALE has them, after ones.

        Where each sample has its own SCALE, the number of samples comes before these.
        """
        node, rank = self._node, len(x.dim)
        count = node.normalized_dim_count
        if not 0 <= count <= rank:
            self._fail("normalized_dim_count", f"an int from 0 to {rank}", count)
        samples = x.dim[0] if node.kind.of_samples else 1
        if node.kind.pads_scale and (len(scale.dim) != rank or scale.dim[0] != samples):
            first = f"{rank} dimensions, as X, of which the first is {samples}"
            self._fail("SCALE", first, scale.dim)
        sizes = (1, *scale.dim[1:]) if node.kind.of_samples else scale.dim
        if not count and len(scale.dim) < rank:
            count = len(scale.dim)
        elif not count:
            last = len(scale.dim) - 1
            ones = next((axis for axis, size in enumerate(sizes) if size != 1), last)
            count = len(scale.dim) - ones
        ones = max(0, len(scale.dim) - count)
        if sizes[ones:] != x.dim[max(0, rank - count) :] or set(sizes[:ones]) - {1}:
            last_of_x = f"the last {node.normalized_dim_count or 'few'} dimensions of X, {x.dim}"
            self._fail("SCALE", f"{last_of_x}, alone or after ones", scale.dim)
        return count

    def _check_size(self, x: TensorAttributes, count: int) -> None:
        split = len(x.dim) - count
        for what, found, most in (
            ("rows", math.prod(x.dim[:split]), MOST_ROWS),
            ("columns", math.prod(x.dim[split:]), MOST_COLUMNS),
        ):
            if found > most:
                self._fail("X", f"at most {most} {what}", found)

    def _check_compute(self, x: TensorAttributes) -> None:
        expected = _type(x).statistics
        given = self._node.compute_data_type or self._graph.compute_data_type
        if given not in (None, expected):
            self._fail("compute_data_type", f"{expected} for X of {x.data_type}", given)

    def _check_mixture(self, port: str, tensor: TensorAttributes, x: TensorAttributes) -> None:
        """Expects an element type that can stand beside that of X."""
        expected = [each for each in DataType if each.statistics is _type(x).statistics]
        if tensor.data_type not in expected:
            names = " or ".join(map(str, expected))
            self._fail(port, f"{names} beside X of {x.data_type}", tensor.data_type)

    def _check_epsilon(self, port: str, x: TensorAttributes) -> None:
        tensor = self._get(port)
        if tensor.value is None or math.prod(tensor.dim) != 1:
            self._fail(
                port,
                "one number passed by value, for it is compiled into the code",
                f"a tensor of {tensor.dim}" + ("" if tensor.value is None else " with a value"),
            )
        check_eps(tensor.value, _type(x).statistics.dtype, self._node.place(port))

    def _infer_input(self, port: Port, like: TensorAttributes, x: TensorAttributes) -> None:
        """DY, which may have the dimensions of X, or BIAS, which has those of SCALE."""
        dim = like.dim if port.kind is Kind.CELLS else ()
        tensor = self._input(port.name, dim=dim, order=like)
        self._expect_dim(port.name, tensor, like, port.like)
        self._check_mixture(port.name, tensor, x)

    def _infer_output(self, port: Port, like: TensorAttributes, x: TensorAttributes) -> None:
        """An output, which has the dimensions of X or SCALE, and the type: Y and DBIAS need not."""
        name, tensor = port.name, self._get(port.name)
        tensor = replace(
            tensor,
            dim=tensor.dim or like.dim,
            data_type=tensor.data_type or self._between(tensor) or like.data_type,
        )
        self._expect_dim(name, tensor, like, port.like)
        if port.operand in ("output", "grad_bias"):
            self._check_mixture(name, tensor, x)
        elif tensor.data_type is not like.data_type:
            self._fail(name, f"{like.data_type}, as {port.like}", self._type_of(tensor))
        self._keep(name, tensor, like)

    def _infer_statistic(self, port: str, x: TensorAttributes, count: int) -> None:
        """A statistic: a number for each row of X, in the type of sums."""
        leading = x.dim[: len(x.dim) - count]
        padded = (*leading, *(1,) * count)
        expected = _type(x).statistics
        if port in self._node.inputs:
            tensor = self._input(port, dim=padded, data_type=expected, order=x)
        else:
            tensor = self._get(port)
            data_type = tensor.data_type or self._between(tensor) or expected
            tensor = replace(tensor, dim=tensor.dim or padded, data_type=data_type)
            tensor = self._keep(port, tensor, x)
        if tensor.data_type is not expected:
            self._fail(port, f"{expected}, as sums of {x.data_type} are", self._type_of(tensor))
        dims = [padded] if self._node.kind.pads_scale else [padded, leading or (1,)]
        if tensor.dim not in dims:
            self._fail(port, " or ".join(map(str, dict.fromkeys(dims))), tensor.dim)

    def _expect_dim(
        self, port: str, tensor: TensorAttributes, like: TensorAttributes, name: str
    ) -> None:
        if tensor.dim != like.dim:
            self._fail(port, f"{like.dim}, as {name}", tensor.dim)

    def _between(self, tensor: TensorAttributes) -> DataType | None:
        """What the graph says of the type of virtual tensors that a node reads."""
        if tensor.is_virtual and tensor.uid in self._read:
            return self._graph.intermediate_data_type
        return None

    def _type_of(self, tensor: TensorAttributes) -> str:
        """The type, and where it is from if the tensor does not say it."""
        is_set = self._get_original(tensor).data_type is not None
        return f"{tensor.data_type}" + ("" if is_set else ", the graph's intermediate_data_type")

    def _get_original(self, tensor: TensorAttributes) -> TensorAttributes:
        return next(each for each in self._graph.tensors if each.uid == tensor.uid)


def _type(tensor: TensorAttributes) -> DataType:
    """The type of a tensor that has one."""
    assert tensor.data_type is not None
    return tensor.data_type
