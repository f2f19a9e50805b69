"""Backwards in inductor's graphs, ours and PyTorch's own, as values that can be changed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.operands import GRAD_OUTPUT
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.served import Backward
from iree_lnbwd.torch.operator_table import ALL_GRADIENTS, GRADIENTS, Gradients, in_order
from iree_lnbwd.torch.overrides_in_python import ATENS

_EPS = DEFAULT_EPS  # not read where the statistics are given


def _pytorchs_of(gradients: Gradients) -> Any:
    """PyTorch's own operator that computes the same; None if it has none."""
    name = ATENS.get(gradients.op)
    return None if name is None else getattr(torch.ops.aten, name).default


_OURS = MappingProxyType({gradients.operator: gradients for gradients in ALL_GRADIENTS})
PYTORCHS = MappingProxyType(
    {operator: each for each in GRADIENTS if (operator := _pytorchs_of(each)) is not None}
)


class Call(NamedTuple):
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

    @property
    def is_ours(self) -> bool:
        """Whether it is a call of our operator, not of PyTorch's."""
        return self.node.target is self.gradients.operator

    @property
    def data(self) -> Node:
        """The input, or the output in its place."""
        data = self.tensor(self.gradients.op.data.name)
        assert data is not None
        return data

    @property
    def grad_output(self) -> Node:
        """The gradient of the output, or the first of several."""
        grad_output = self.tensor(GRAD_OUTPUT.name)
        assert grad_output is not None
        return grad_output

    def tensor(self, name: str) -> Node | None:
        """An argument; None if it is not given, or the op has no such."""
        found = zip(self.gradients.arguments, self.tensors, strict=True)
        return next((tensor for each, tensor in found if each == name), None)

    def takes(self, name: str) -> bool:
        """Whether the op has such an argument."""
        return name in self.gradients.arguments

    def backward(
        self,
        changed: Mapping[str, Node] = MappingProxyType({}),
        gradients: Gradients | None = None,
        options: tuple[Any, ...] | None = None,
    ) -> Backward:
        """What its module depends on, with other arguments, by another operator.

        Args:
            changed: Tensors by name; of these, element types count.
            gradients: The operator; None takes its own.
            options: The other arguments; None takes its own.
        """
        given = {**dict(zip(self.gradients.arguments, self.tensors, strict=True)), **changed}
        kinds = {name: supported.kind(graphs.value(node)) for name, node in given.items()}
        options = self.options if options is None else options
        return Backward(gradients or self.gradients, kinds, options)

    def with_tensors(self, changed: Mapping[str, Node]) -> Call:
        """With other arguments, by our operator; they may have other element types."""
        given = dict(zip(self.gradients.arguments, self.tensors, strict=True))
        return self.by(self.gradients, {**given, **changed}, self.options)

    def by(
        self, gradients: Gradients, given: Mapping[str, Node | None], options: tuple[Any, ...]
    ) -> Call:
        """By another operator of ours, whose results come in the same order."""
        graph, tensors = self.node.graph, tuple(map(given.get, gradients.arguments))
        with graph.inserting_before(self.node):
            node = graphs.call(graph, gradients.operator, *tensors, *options)
        graphs.stand_for(node, self.node)
        return Call(node, gradients, tensors, options)


def call_of(node: Node) -> Call | None:
    """The call that a node is, if ours can be called in its place."""
    gradients = _OURS.get(node.target)
    if gradients is not None:
        given = graphs.arguments(node)
        tensors = tuple(given.pop(name) for name in gradients.arguments)
        return Call(node, gradients, tensors, tuple(given.values()))
    gradients = PYTORCHS.get(node.target)
    if gradients is None:
        return None
    given = graphs.arguments(node)
    rstd = graphs.value(given["rstd"])
    # PyTorch's statistics in 16 bits, on the CPU: if they are widened, additions can be folded. But
    # a step of two blocks of 512 columns took 83 to 86 ms with it, and 84 without (2 cores, EPYC).
    if rstd is None or rstd.dtype in supported.HALF:
        return None
    return Call(node, gradients, *as_ours(gradients, given))


def as_ours(
    gradients: Gradients, given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors and options of our operator, from the arguments of PyTorch's by name."""
    tensors = dict(given)
    dims, mask = tensors.pop("normalized_shape"), tensors.pop("output_mask")
    in_place = in_order(gradients.op, grad_output=tensors.pop("grad_out"), **tensors)
    mask = (*mask, *(False for _ in gradients.results[len(mask) :]))
    return in_place, (dims, mask, _EPS, 0.0)
