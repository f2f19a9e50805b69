"""A graph as hipDNN's JSON, in which also hipDNN reads it.

Files may be hostile: every field is what it should be, or is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from iree_lnbwd.disk.json_values import int_of, object_of, of_type, parsed, wrong
from iree_lnbwd.errors import one_line
from iree_lnbwd.graph.attributes import NormFwdPhase
from iree_lnbwd.graph.nodes import KINDS, RMSNORM, GraphAttributes, Node, NodeKind, Port
from iree_lnbwd.graph.tensors import (
    LEAST_UID,
    MOST_UID,
    DataType,
    TensorAttributes,
    rounded,
)
from iree_lnbwd.ops.spec import MOST_DIMENSIONS

_TYPES = ("compute_data_type", "io_data_type", "intermediate_data_type")
_UNSET = "unset"
_VALUES = {
    DataType.HALF: "Float16Value",
    DataType.BFLOAT16: "BFloat16Value",
    DataType.FLOAT: "Float32Value",
    DataType.DOUBLE: "Float64Value",
}
# Fields of hipDNN's that say nothing about norms, and the one value that they may have.
_ONLY_GRAPH = {"is_override_shape_enabled": False}
_ONLY_TENSOR = {"is_runtime_pass_by_value": False}
_IGNORED_GRAPH = ("preferred_engine_id", "id", "min_required_engine_api_version")
_ALIGNMENT = 16  # hipDNN's default; a call copies what is not aligned


def to_text(graph: GraphAttributes) -> str:
    """The text of a valid graph; the same graph gives the same."""
    values = {
        "name": graph.name,
        **{name: _type_name(getattr(graph, name)) for name in _TYPES},
        **_ONLY_GRAPH,
        "nodes": [_node_values(node) for node in graph.nodes],
        "tensors": [_tensor_values(tensor) for tensor in graph.tensors],
    }
    return json.dumps(values, indent=1) + "\n"


def from_text(text: str) -> GraphAttributes:
    """A graph that need not be valid; each uid of a node is that of a tensor.

    Raises:
        ValueError: Naming the field, what came and what was expected.
    """
    try:
        values = parsed(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"graph: expected JSON, got {one_line(error)}") from None
    optional = {**_ONLY_GRAPH, **dict.fromkeys(_IGNORED_GRAPH)}
    given = _object(values, "graph", ("name", *_TYPES, "nodes", "tensors"), optional)
    _expect_only(given, "graph", _ONLY_GRAPH)
    listed = {name: of_type(list, given[name], f"graph.{name}") for name in ("tensors", "nodes")}
    tensors = [_tensor(each, f"graph.tensors[{i}]") for i, each in enumerate(listed["tensors"])]
    uids: set[int | None] = set()
    for i, tensor in enumerate(tensors):
        if tensor.uid in uids:
            raise wrong(f"graph.tensors[{i}].uid", "a uid of its own", tensor.uid)
        uids.add(tensor.uid)
    return GraphAttributes(
        name=of_type(str, given["name"], "graph.name"),
        tensors=tuple(tensors),
        nodes=tuple(
            _node(each, f"graph.nodes[{i}]", uids) for i, each in enumerate(listed["nodes"])
        ),
        **{name: _type(given[name], f"graph.{name}") for name in _TYPES},
    )


def _tensor_values(tensor: TensorAttributes) -> dict[str, Any]:
    values: dict[str, Any] = {
        "uid": tensor.uid,
        "name": tensor.name,
        "data_type": _type_name(tensor.data_type),
        "dims": list(tensor.dim),
        "strides": list(tensor.stride),
        "virtual": tensor.is_virtual,
        "alignment": _ALIGNMENT,
        **_ONLY_TENSOR,
    }
    if tensor.value is not None:
        assert tensor.data_type is not None
        values |= {"value_type": _VALUES[tensor.data_type], "value": tensor.value}
    return values


def _tensor(values: Any, place: str) -> TensorAttributes:
    names = ("uid", "name", "data_type", "dims", "strides", "virtual")
    optional = {**_ONLY_TENSOR, "alignment": _ALIGNMENT, "value_type": None, "value": None}
    given = _object(values, place, names, optional)
    _expect_only(given, place, _ONLY_TENSOR)
    int_of(given["alignment"], f"{place}.alignment", least=1, most=MOST_UID)
    data_type = _type(given["data_type"], f"{place}.data_type")
    value = given["value"]
    if (value is None) != (given["value_type"] is None):
        raise wrong(f"{place}.value", "a number beside value_type, or neither", value)
    if value is not None:
        if data_type is None or given["value_type"] != _VALUES[data_type]:
            expected = " or ".join(_VALUES.values()) if data_type is None else _VALUES[data_type]
            raise wrong(f"{place}.value_type", f"{expected}, as data_type", given["value_type"])
        if type(value) not in (int, float):
            raise wrong(f"{place}.value", "a number", value)
        value = rounded(value, data_type, f"{place}.value")
    return TensorAttributes(
        uid=_uid(given["uid"], f"{place}.uid"),
        name=of_type(str, given["name"], f"{place}.name"),
        dim=_sizes(given["dims"], f"{place}.dims"),
        stride=_sizes(given["strides"], f"{place}.strides"),
        data_type=data_type,
        is_virtual=of_type(bool, given["virtual"], f"{place}.virtual"),
        value=value,
    )


def _node_values(node: Node) -> dict[str, Any]:
    kind = node.kind
    values: dict[str, Any] = {
        "type": kind.name,
        "name": node.name,
        "compute_data_type": _type_name(node.compute_data_type),
        "inputs": _uid_values(kind, kind.inputs, node.inputs),
        "outputs": _uid_values(kind, kind.outputs, node.outputs),
    }
    if kind.counts_dims:
        values["normalized_dim_count"] = node.normalized_dim_count
    if kind.has_phase and node.forward_phase is not None:
        phase = node.forward_phase
        values["forward_phase"] = phase.name if kind is RMSNORM else phase.value
    return values


def _uid_values(
    kind: NodeKind, ports: tuple[Port, ...], uids: Mapping[str, int]
) -> dict[str, int | None]:
    """As in hipDNN: null where LayerNorm lacks a tensor, and nothing where RMSNorm does."""
    return {
        _field(port): uids.get(port.name) for port in ports if port.name in uids or kind.counts_dims
    }


def _node(values: Any, place: str, uids: set[int | None]) -> Node:
    kind = KINDS.get(_text(of_type(dict, values, place).get("type")))
    if kind is None:
        raise wrong(f"{place}.type", f"one of {', '.join(KINDS)}", values.get("type"))
    names = ["type", "name", "compute_data_type", "inputs", "outputs"]
    optional: dict[str, Any] = {"forward_phase": None} if kind.has_phase else {}
    if kind.counts_dims:
        names.append("normalized_dim_count")
    given = _object(values, place, tuple(names), optional)
    count = given.get("normalized_dim_count", 0)
    return Node(
        kind,
        of_type(str, given["name"], f"{place}.name"),
        _uids(given["inputs"], f"{place}.inputs", kind.inputs, uids),
        _uids(given["outputs"], f"{place}.outputs", kind.outputs, uids),
        int_of(count, f"{place}.normalized_dim_count", least=0, most=MOST_UID),
        _phase(given.get("forward_phase"), f"{place}.forward_phase"),
        _type(given["compute_data_type"], f"{place}.compute_data_type"),
    )


def _uids(
    values: Any, place: str, ports: tuple[Port, ...], known: set[int | None]
) -> dict[str, int]:
    """The tensors at ports; null counts as none."""
    required = tuple(_field(port) for port in ports if port.required)
    optional = {_field(port): None for port in ports if not port.required}
    given = _object(values, place, required, optional)
    found = {}
    for port in ports:
        field = _field(port)
        if given[field] is None and not port.required:
            continue
        uid = _uid(given[field], f"{place}.{field}")
        if uid not in known:
            raise wrong(f"{place}.{field}", "the uid of a tensor", uid)
        found[port.name] = uid
    return found


def _field(port: Port) -> str:
    return f"{port.name.lower()}_tensor_uid"


def _phase(value: Any, place: str) -> NormFwdPhase | None:
    """By number, as hipDNN writes LayerNorm's, or by name, as it writes RMSNorm's."""
    if value is None or value == "NOT_SET" or (type(value) is int and value == 0):
        return None
    for phase in NormFwdPhase:
        if value == phase.name or (type(value) is int and value == phase.value):
            return phase
    raise wrong(place, " or ".join(f"{p.value} ({p.name})" for p in NormFwdPhase), value)


def _type(value: Any, place: str) -> DataType | None:
    if value == _UNSET:
        return None
    for data_type in DataType:
        if value == data_type.value:
            return data_type
    raise wrong(place, f"{', '.join(t.value for t in DataType)} or {_UNSET}", value)


def _type_name(data_type: DataType | None) -> str:
    return _UNSET if data_type is None else data_type.value


def _sizes(values: Any, place: str) -> tuple[int, ...]:
    found = of_type(list, values, place)
    if len(found) > MOST_DIMENSIONS:
        raise wrong(place, f"at most {MOST_DIMENSIONS} ints", found)
    return tuple(
        int_of(size, f"{place}[{i}]", least=1, most=MOST_UID) for i, size in enumerate(found)
    )


def _uid(value: Any, place: str) -> int:
    return int_of(value, place, least=LEAST_UID, most=MOST_UID)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _object(
    values: Any, place: str, names: tuple[str, ...], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """An object that has these fields, and perhaps the optional ones."""
    filled = {**optional, **of_type(dict, values, place)}
    return object_of(filled, place, (*names, *optional))


def _expect_only(given: Mapping[str, Any], place: str, only: Mapping[str, bool]) -> None:
    for name, expected in only.items():
        if given[name] is not expected:
            raise wrong(f"{place}.{name}", json.dumps(expected), given[name])
