"""A graph on a device: its modules, and their calls on the caller's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from iree_lnbwd.calls import modules
from iree_lnbwd.errors import shown
from iree_lnbwd.graph import arrays
from iree_lnbwd.graph.calls import Call, calls_of
from iree_lnbwd.graph.nodes import GraphAttributes, listed, short
from iree_lnbwd.graph.ordering import producers
from iree_lnbwd.graph.tensors import TensorAttributes
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import BIAS, GRAD_BIAS
from iree_lnbwd.runtime import Norm
from iree_lnbwd.runtime.storage import Extent, check_apart


class Plan:
    """A valid graph whose modules are loaded. Any number of threads may execute it.

    Attributes:
        device: Where it runs.
    """

    def __init__(self, graph: GraphAttributes, device: DeviceUri) -> None:
        """Compiles and loads the modules that are not there yet.

        Raises:
            ValueError: No output is asked for.
            CompileError, DeviceError: As `iree_lnbwd.layer_norm_backward`.
        """
        self.device = device
        self._calls = calls_of(graph)
        self._modules = tuple(modules.loaded(call.spec, device) for call in self._calls)
        self._tensors = graph.by_uid()
        written = producers(graph.nodes)
        used = {uid for node in graph.nodes for uid in node.uids.values()}
        self._given = {
            uid: (_name(tensor), uid in written)
            for uid, tensor in self._tensors.items()
            if uid in used and not tensor.is_virtual and tensor.value is None
        }

    def execute(self, pack: Mapping[int, Any]) -> None:
        """Computes all outputs that are not virtual, into the caller's arrays.

        Args:
            pack: An array for each tensor that is neither virtual nor passed by value, by uid.

        Raises:
            TypeError, ValueError: Naming the tensor, what came and what was expected.
            DeviceError: The GPU's driver refuses.
        """
        self._check_uids(pack)
        first = next(iter(self._given))
        kind = arrays.of(self._given[first][0], pack[first])
        bound = {}
        read: list[Extent] = []
        written: list[Extent] = []
        for uid, (name, is_written) in self._given.items():
            tensor = self._tensors[uid]
            array = kind.checked(name, pack[uid], tensor, written=is_written)
            bound[uid] = array
            (written if is_written else read).append(kind.extent(name, array, tensor))
        check_apart(read, written)
        for call, module in zip(self._calls, self._modules, strict=True):
            try:
                _run(call, module, kind, bound, self._tensors)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{short(call.place)}: {error}") from error

    def _check_uids(self, pack: Mapping[int, Any]) -> None:
        for uid, (name, _) in self._given.items():
            if pack.get(uid) is None:
                raise ValueError(f"{name}: expected an array, got none for uid {uid}")
        for uid in pack:
            if uid in self._given:
                continue
            tensor = self._tensors.get(uid)
            if tensor is None:
                uids = listed(", ".join(map(str, self._given)))
                raise ValueError(f"variant_pack: expected the uids {uids}, got {shown(uid)}, too")
            why = "is virtual" if tensor.is_virtual else "has its value in the graph"
            raise ValueError(f"{_name(tensor)}: expected no array, for it {why}, got one")


def _run(
    call: Call,
    module: Norm,
    kind: arrays.Arrays,
    bound: dict[int, Any],
    tensors: Mapping[int, TensorAttributes],
) -> None:
    """Runs a call; what it computes for later calls is bound then."""
    given = {
        name: arrays.seen(bound[view.uid], view.order, view.shape)
        for name, view in call.arguments.items()
    }
    out, copied = {}, []
    for result in call.spec.results:
        dtype = DTYPES[result.dtype].numpy
        if result.name in call.unread:
            out[result.name] = kind.empty(call.unread[result.name], dtype, module.alignment)
            continue
        view = call.results[result.name]
        if view.uid not in bound:  # virtual: packed in the order of this module
            dim = tensors[view.uid].dim
            room = kind.empty(tuple(dim[axis] for axis in view.order), dtype, module.alignment)
            bound[view.uid] = arrays.reordered(room, _inverse(view.order))
            out[result.name] = arrays.seen(room, range(len(dim)), view.shape)
        elif view.in_place and (not view.is_strided or kind.is_aligned(bound[view.uid])):
            out[result.name] = arrays.seen(bound[view.uid], view.order, view.shape)
        else:
            out[result.name] = kind.empty(view.shape, dtype, module.alignment)
            copied.append((view, out[result.name]))
    if call.spec.has_bias and BIAS.name not in given:  # its type counts: that of its gradient
        given[BIAS.name] = out[GRAD_BIAS.name]
    given["rows_per_set"] = call.rows_per_set
    module(**given, out=results_of(call.spec.family, out))
    for view, array in copied:
        target = arrays.reordered(bound[view.uid], view.order)
        target[...] = array.reshape(tuple(target.shape))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that undoes another."""
    return tuple(int(axis) for axis in np.argsort(order))


def _name(tensor: TensorAttributes) -> str:
    """A tensor as messages name it."""
    return short(tensor.name) or f"uid {tensor.uid}"
