"""Backwards of norms without a weight whose output is scaled: the scale becomes a weight of sets.

``norm(x) * (1 + scale) + shift``, written out in a model, has in its backward a product with the
scale before the norm's kernel, which has to be stored for that, and two sums over a sample's rows.
A backward with a set of weights for each sample computes all of it in one pass.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from iree_lnbwd.ops.operands import (
    BIAS,
    GRAD_OUTPUT,
    GRAD_RESIDUAL,
    INPUT,
    MEAN,
    MORE_GRAD_OUTPUTS,
    OUTPUT,
    RESIDUAL_OUTPUT,
    RSTD,
    WEIGHT,
)
from iree_lnbwd.torch import supported
from iree_lnbwd.torch.inductor import graphs
from iree_lnbwd.torch.inductor.backwards import is_narrow
from iree_lnbwd.torch.inductor.calls import Call, call_of
from iree_lnbwd.torch.inductor.served import Backward
from iree_lnbwd.torch.operator_table import GRADIENTS, NORMS, OF_SETS

_ATEN = torch.ops.aten
_OF_SETS = {
    norm.gradients.op: OF_SETS[norm.name].gradients for norm in NORMS if norm.name in OF_SETS
}
_FORWARDS = {norm.operator: norm for norm in NORMS}


class _Scaled(NamedTuple):
    """A gradient that is scaled before it reaches a norm's backward.

    Attributes:
        gradient: Of the scaled output.
        scale: Of shape [B, 1, ..., 1, *normalized_shape].
    """

    gradient: Node
    scale: Node


class _Sum(NamedTuple):
    """A sum over the rows of each sample.

    Attributes:
        node: It, in the type of sums.
        product: Its terms, if those are computed for it alone.
    """

    node: Node
    product: Node | None = None


def fold(graph: Graph) -> int:
    """Folds scales into the backwards of a step's graph, which may need sorting then.

    It does so where the graph computes in the type of sums: any other rounds the products.

    Returns:
        How many.
    """
    found = (call_of(node) for node in list(graph.nodes))
    return sum(_fold(call) for call in found if call is not None)


def _fold(call: Call) -> bool:
    given = (WEIGHT, GRAD_RESIDUAL, *MORE_GRAD_OUTPUTS)
    if (
        call.gradients not in GRADIENTS
        or call.gradients.op not in _OF_SETS
        or any(call.tensor(operand.name) is not None for operand in given)
        or is_narrow(call.options[0])
    ):
        return False
    scaled = _scaled(call)
    if scaled is None:
        return False
    of_scale, of_shift = _sum_of_scale(call, scaled), _sum_of_shift(call, scaled)
    sums = [each for each in (of_scale, of_shift) if each is not None]
    tensors = dict(zip(call.gradients.arguments, call.tensors, strict=True))
    tensors.update({GRAD_OUTPUT.name: scaled.gradient, WEIGHT.name: scaled.scale})
    needed = [tensor for tensor in tensors.values() if tensor is not None]
    if any(graphs.depends(each, of_rows.node) for each in needed for of_rows in sums):
        return False
    dims, mask, eps, _ = call.options
    wanted = [mask[0], of_scale is not None, of_shift is not None]
    value = scaled.scale.meta["val"]
    dtype = value.dtype
    if {_type_of(each.node) for each in sums} - {dtype}:  # the sums are used as they are
        dtype = supported.wide(dtype)
    gradients = _OF_SETS[call.gradients.op]
    kinds = {name: supported.kind(graphs.value(node)) for name, node in tensors.items()}
    kinds[WEIGHT.name] = (value.device, dtype)
    kinds[BIAS.name] = kinds[WEIGHT.name] if of_shift else None
    if not Backward(gradients, kinds, (dims, wanted, eps, 0.0, 1)).is_served():
        return False
    graph, x = call.node.graph, call.data
    with graph.inserting_before(call.node):
        weight = scaled.scale
        if dtype != value.dtype:
            weight = graphs.call(graph, graphs.CONVERSION, weight, dtype)
        shape = [_size(graph, weight, 0), *dims]
        weight = graphs.call(graph, _ATEN.view.default, weight, shape)
        rows = _product(graph, [_size(graph, x, at) for at in range(1, _leading(call))])
    tensors.update({WEIGHT.name: weight, BIAS.name: weight if of_shift else None})  # for its type
    new = call.by(gradients, tensors, (dims, wanted, eps, 0.0, rows))
    for place, each in enumerate((of_scale, of_shift), start=1):
        if each is not None:
            _replace(new, place, each, scaled.scale)
    return True


def _leading(call: Call) -> int:
    return len(call.data.meta["val"].shape) - len(call.options[0])


def _scaled(call: Call) -> _Scaled | None:
    """What the gradient of the norm's output is a product of."""
    product, x = call.grad_output, call.data.meta["val"]
    if product.target is not _ATEN.mul.Tensor or _leading(call) < 2:
        return None
    sums = supported.wide(x.dtype)
    for gradient, scale in (product.args, product.args[::-1]):
        of_gradient, of_scale = graphs.value(gradient), graphs.value(scale)
        if (
            of_gradient is not None
            and of_scale is not None
            and of_gradient.dtype == product.meta["val"].dtype == sums
            and graphs.have_one_shape(of_gradient, x)
            and not graphs.have_one_shape(of_scale, x)
            and supported.are_taken(x, of_gradient, of_scale)
            and of_scale.device == x.device
            and graphs.has_shape(of_scale, _shape_of_scale(call))
        ):
            return _Scaled(gradient, scale)
    return None


def _shape_of_scale(call: Call) -> Sequence[Any]:
    x, leading = call.data.meta["val"], _leading(call)
    return (x.shape[0], *(1 for _ in range(1, leading)), *x.shape[leading:])


def _sum_of_shift(call: Call, scaled: _Scaled) -> _Sum | None:
    found = [user for user in scaled.gradient.users if _is_sum(user, call)]
    return _Sum(found[0]) if len(found) == 1 else None


def _sum_of_scale(call: Call, scaled: _Scaled) -> _Sum | None:
    for product in scaled.gradient.users:
        if product.target is not _ATEN.mul.Tensor or len(product.users) != 1:
            continue
        (user,) = product.users
        others = [each for each in product.args if each is not scaled.gradient]
        if len(others) == 1 and _is_sum(user, call) and _is_normalized(others[0], call):
            return _Sum(user, product)
    return None


def _is_sum(node: Node, call: Call) -> bool:
    """Whether a node adds up the rows of each sample, in the type of its terms."""
    if node.target is not _ATEN.sum.dim_IntList or node.kwargs:
        return False
    terms, dims, *_ = node.args
    assert isinstance(terms, Node)
    rank = len(call.data.meta["val"].shape)
    is_over_rows = sorted(dim % rank for dim in dims) == list(range(1, _leading(call)))
    return is_over_rows and graphs.have_one_shape(terms.meta["val"], call.data.meta["val"])


def _is_normalized(node: object, call: Call) -> bool:
    """Whether a node is the output of the norm, before it is scaled, in the type of sums."""
    x, mean, rstd = call.data, call.tensor(MEAN.name), call.tensor(RSTD.name)
    if not isinstance(node, Node) or rstd is None:
        return False
    value = graphs.value(node)
    if value is None or value.dtype != supported.wide(x.meta["val"].dtype):
        return False
    if node.target is getitem:
        return _is_output(node, call)
    if node.target is not _ATEN.mul.Tensor or rstd not in node.args:
        return False
    centred = node.args[0] if node.args[1] is rstd else node.args[1]
    if not call.gradients.op.centres:
        return centred is x
    is_difference = isinstance(centred, Node) and centred.target is _ATEN.sub.Tensor
    return is_difference and not centred.kwargs and centred.args == (x, mean)


def _is_output(node: Node, call: Call) -> bool:
    """Whether it is that of a forward of ours, whose input and statistics the backward takes."""
    forward, place = node.args
    assert isinstance(forward, Node)
    norm = _FORWARDS.get(forward.target)
    if norm is None or norm.gradients.op is not call.gradients.op:
        return False
    given = graphs.arguments(forward)
    if place != norm.results.index(OUTPUT.name) or given[WEIGHT.name] or given[BIAS.name]:
        return False

    def is_result(found: Node | None, name: str) -> bool:
        return found is not None and found.target is getitem and (
            found.args == (forward, norm.results.index(name)))  # fmt: skip

    statistics = [name for name in (MEAN.name, RSTD.name) if call.takes(name)]
    if not all(is_result(call.tensor(name), name) for name in statistics):
        return False
    if norm.takes_residual:
        return is_result(call.data, RESIDUAL_OUTPUT.name)
    return given[INPUT.name] is call.data


def _type_of(node: Node) -> torch.dtype:
    """The type that all users cast a sum to; else its own."""
    types = {user.args[1] if _is_cast(user) else None for user in node.users}
    of_sum: torch.dtype = node.meta["val"].dtype
    return types.pop() or of_sum if len(types) == 1 else of_sum


def _is_cast(node: Node) -> bool:
    return node.target is graphs.CONVERSION


def _replace(call: Call, place: int, summed: _Sum, scale: Node) -> None:
    """Takes a gradient of the backward in place of a sum, or in place of the casts of it."""
    graph, node = call.node.graph, summed.node
    with graph.inserting_after(call.node):
        gradient = graphs.call(graph, getitem, call.node, place)
    value = node.meta["val"]
    replaced = [node] if value.dtype == gradient.meta["val"].dtype else list(node.users)
    if graphs.have_one_shape(value, scale.meta["val"]):  # it has kept its dimensions
        with graph.inserting_after(gradient):
            gradient = graphs.like(graph, gradient, scale)
    for each in replaced:
        each.replace_all_uses_with(gradient)
    for each in dict.fromkeys((*replaced, node, *filter(None, [summed.product]))):
        graph.erase_node(each)


def _size(graph: Graph, node: Node, dim: int) -> Any:
    """A number, or a node that is it."""
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else graphs.call(graph, _ATEN.sym_size.int, node, dim)


def _product(graph: Graph, sizes: Sequence[Any]) -> Any:
    total, *others = sizes
    for size in others:
        both = (total, size)
        is_number = all(isinstance(each, int) for each in both)
        total = total * size if is_number else graphs.call(graph, operator.mul, *both)
    return total
