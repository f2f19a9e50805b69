"""Graphs as hipDNN's JSON: nothing is lost, hipDNN's own is read, and hostile text is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from iree_lnbwd.graph import (
    DataType,
    Graph,
    LayernormAttributes,
    LayernormBackwardAttributes,
    NormFwdPhase,
    RMSNormAttributes,
    RMSNormBackwardAttributes,
    graph_json,
)
from iree_lnbwd.graph.nodes import GraphAttributes
from iree_lnbwd.graph.tensors import LEAST_UID, MOST_UID, rounded

# As hipDNN writes it (flatbuffers_sdk/utilities/json): its names, null and numbers.
OF_HIPDNN: dict[str, Any] = {
    "name": "of hipDNN",
    "compute_data_type": "float",
    "io_data_type": "half",
    "intermediate_data_type": "unset",
    "is_override_shape_enabled": False,
    "preferred_engine_id": 42,
    "tensors": [
        {
            "uid": uid,
            "name": name,
            "data_type": data_type,
            "dims": dims,
            "strides": strides,
            "virtual": False,
            "alignment": 16,
            "is_runtime_pass_by_value": False,
            **more,
        }
        for uid, name, data_type, dims, strides, more in (
            (10, "DY", "half", [2, 3, 4], [12, 4, 1], {}),
            (11, "X", "half", [2, 3, 4], [12, 4, 1], {}),
            (12, "SCALE", "float", [1, 3, 4], [12, 4, 1], {}),
            (
                *(13, "EPSILON", "float", [1], [1]),
                {"value_type": "Float32Value", "value": 1e-05},
            ),
            (16, "DX", "half", [2, 3, 4], [12, 4, 1], {}),
            (17, "DSCALE", "float", [1, 3, 4], [12, 4, 1], {}),
            (18, "DBIAS", "float", [1, 3, 4], [12, 4, 1], {}),
        )
    ],
    "nodes": [
        {
            "type": "LayernormBackwardAttributes",
            "name": "node",
            "compute_data_type": "float",
            "inputs": {
                "dy_tensor_uid": 10,
                "x_tensor_uid": 11,
                "scale_tensor_uid": 12,
                "mean_tensor_uid": None,
                "inv_variance_tensor_uid": None,
                "epsilon_tensor_uid": 13,
            },
            "outputs": {"dx_tensor_uid": 16, "dscale_tensor_uid": 17, "dbias_tensor_uid": 18},
            "normalized_dim_count": 2,
        }
    ],
}


def test_hipdnns_own_is_read() -> None:
    graph = Graph.from_json(json.dumps(OF_HIPDNN))
    (spec,) = graph.specs
    assert (spec.op, spec.normalized_shape, spec.dtype, spec.gamma_dtype) == (
        *("layer_norm_backward", (12,), "f16", "f32"),
    )
    assert (
        spec.eps == rounded(1e-5, DataType.FLOAT, "eps") != 1e-5
    )  # it is a float of 32 bits there
    again = json.loads(graph.to_json())
    expected = copy.deepcopy(OF_HIPDNN)
    del expected["preferred_engine_id"]
    expected["tensors"][3]["value"] = spec.eps
    assert again == expected


types = st.none() | st.sampled_from(DataType)
names = st.text(max_size=5)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs of several nodes; any are valid."""
    data = draw(st.sampled_from(DataType))
    graph = Graph(draw(names), io_data_type=draw(types), compute_data_type=draw(st.none()))
    lead = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    last = draw(st.lists(st.integers(2, 5), min_size=1, max_size=2))
    uids = iter(
        draw(st.lists(st.integers(LEAST_UID, MOST_UID), min_size=2, max_size=2, unique=True))
    )
    x = graph.tensor((*lead, *last), data_type=data, uid=next(uids), name=draw(names))
    scale = graph.tensor((*(1 for _ in lead), *last), data_type=data, uid=next(uids))
    for _ in range(draw(st.integers(1, 3))):
        trains = draw(st.booleans())
        phase = NormFwdPhase.TRAINING if trains else NormFwdPhase.INFERENCE
        eps = draw(st.floats(1e-4, 1))
        epsilon = graph.tensor(value=eps, data_type=data) if draw(st.booleans()) else eps
        if draw(st.booleans()):
            count = draw(st.sampled_from((0, len(last))))
            made = LayernormAttributes(epsilon, phase, count, draw(names))
            y, mean, inv = graph.layernorm(x, scale, scale, made)
            back = LayernormBackwardAttributes(mean, inv, None if trains else epsilon)
            graph.layernorm_backward(y, x, scale, back)[0].set_output(True)
        else:
            y, inv = graph.rmsnorm(x, scale, RMSNormAttributes(epsilon, phase, name=draw(names)))
            if inv is not None:
                also = RMSNormBackwardAttributes(compute_dbias=draw(st.booleans()))
                graph.rmsnorm_backward(y, x, scale, inv, also)
        y.set_output(draw(st.booleans()))
        x = y
    return graph


@given(graphs())
def test_nothing_is_lost(graph: Graph) -> None:
    text = graph.to_json()
    again = Graph.from_json(text)
    assert again.to_json() == text
    graph.validate()
    again.validate()
    assert again._valid == graph._valid
    assert isinstance(again._valid, GraphAttributes)


@pytest.mark.parametrize("data_type", DataType)
def test_values_are_exact(data_type: DataType) -> None:
    graph = Graph(io_data_type=DataType.DOUBLE if data_type is DataType.DOUBLE else DataType.FLOAT)
    epsilon = graph.tensor(value=1 / 3, data_type=data_type)
    graph.rmsnorm(
        graph.tensor((4, 6)),
        graph.tensor((1, 6)),
        RMSNormAttributes(epsilon, NormFwdPhase.INFERENCE),
    )[0].set_output(True)
    again = Graph.from_json(graph.to_json())
    assert again.specs == graph.specs
    assert graph.specs[0].eps == rounded(1 / 3, data_type, "eps")


def bad(path: str, value: Any) -> str:
    """hipDNN's text with another value at a path; REMOVED takes it out."""
    values = copy.deepcopy(OF_HIPDNN)
    at: Any = values
    *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in way:
        at = at[part]
    if value is REMOVED:
        del at[last]
    else:
        at[last] = value
    return json.dumps(values)


REMOVED = object()
BAD: tuple[tuple[str, Any, str], ...] = (
    ("nodes", REMOVED, "graph.nodes: missing"),
    ("nodes", {}, "graph.nodes: expected a list, got {}"),
    ("nodes.0", None, "graph.nodes[0]: expected an object, got None"),
    (
        "nodes.0.type",
        "SdpaAttributes",
        "graph.nodes[0].type: expected one of LayernormAttributes, ",
    ),
    ("nodes.0.type", ["x"], "graph.nodes[0].type: expected one of LayernormAttributes, "),
    ("nodes.0.forward_phase", 1, "graph.nodes[0]: unknown field 'forward_phase', expected type"),
    ("nodes.0.name", 3, "graph.nodes[0].name: expected a string, got 3"),
    (
        "nodes.0.inputs.x_tensor_uid",
        None,
        "graph.nodes[0].inputs.x_tensor_uid: expected an int from",
    ),
    (
        "nodes.0.inputs.x_tensor_uid",
        99,
        "graph.nodes[0].inputs.x_tensor_uid: expected the uid of a",
    ),
    (
        "nodes.0.inputs.x_tensor_uid",
        True,
        "graph.nodes[0].inputs.x_tensor_uid: expected an int from",
    ),
    ("nodes.0.inputs.x_tensor_uid", REMOVED, "graph.nodes[0].inputs.x_tensor_uid: missing"),
    (
        "nodes.0.inputs.bias_tensor_uid",
        12,
        "graph.nodes[0].inputs: unknown field 'bias_tensor_uid'",
    ),
    ("nodes.0.outputs", [], "graph.nodes[0].outputs: expected an object, got []"),
    (
        *("nodes.0.normalized_dim_count", -1),
        "graph.nodes[0].normalized_dim_count: expected an int from 0 to",
    ),
    (
        "nodes.0.normalized_dim_count",
        1.0,
        "graph.nodes[0].normalized_dim_count: expected an int from",
    ),
    ("tensors.1.uid", 10, "graph.tensors[1].uid: expected a uid of its own, got 10"),
    (
        "tensors.1.uid",
        2**63,
        "graph.tensors[1].uid: expected an int from",
    ),
    ("tensors.1.uid", "11", "graph.tensors[1].uid: expected an int from"),
    (
        "tensors.1.dims",
        [2, 3, 0],
        "graph.tensors[1].dims[2]: expected an int from 1 to 9223372036854775807, got 0",
    ),
    (
        "tensors.1.dims",
        [2, 3, -4],
        "graph.tensors[1].dims[2]: expected an int from 1 to 9223372036854775807, got -4",
    ),
    ("tensors.1.dims", "234", "graph.tensors[1].dims: expected a list, got '234'"),
    (
        "tensors.1.strides",
        [1, 1, False],
        "graph.tensors[1].strides[2]: expected an int from",
    ),
    (
        "tensors.1.data_type",
        "fp8_e4m3",
        "graph.tensors[1].data_type: expected half, bfloat16, float",
    ),
    ("tensors.1.data_type", ["half"], "graph.tensors[1].data_type: expected half, bfloat16, float"),
    ("tensors.1.virtual", 0, "graph.tensors[1].virtual: expected a bool, got 0"),
    (
        "tensors.1.alignment",
        0,
        "graph.tensors[1].alignment: expected an int from 1 to 9223372036854775807, got 0",
    ),
    ("tensors.1.ragged_offset_tensor_uid", 1, "graph.tensors[1]: unknown field 'ragged_offset_te"),
    (
        *("tensors.1.is_runtime_pass_by_value", True),
        "graph.tensors[1].is_runtime_pass_by_value: expected false, got True",
    ),
    ("tensors.3.value", REMOVED, "graph.tensors[3].value: expected a number beside value_type, or"),
    ("tensors.3.value", "1e-5", "graph.tensors[3].value: expected a number, got '1e-5'"),
    ("tensors.3.value", True, "graph.tensors[3].value: expected a number, got True"),
    ("tensors.3.value", 1e39, "graph.tensors[3].value: expected a finite number, got inf"),
    ("tensors.3.value", 10**400, "graph.tensors[3].value: expected a finite number, got inf"),
    ("tensors.3.value_type", "Float64Value", "graph.tensors[3].value_type: expected Float32Value"),
    ("tensors.3.value_type", "Int32Value", "graph.tensors[3].value_type: expected Float32Value"),
    (
        "is_override_shape_enabled",
        True,
        "graph.is_override_shape_enabled: expected false, got True",
    ),
    (
        "io_data_type",
        5,
        "graph.io_data_type: expected half, bfloat16, float, double or unset, got 5",
    ),
    ("extra", 1, "graph: unknown field 'extra', expected name, compute_data_type"),
)


@pytest.mark.parametrize(("path", "value", "message"), BAD)
def test_a_bad_field_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^graph") as caught:
        Graph.from_json(bad(path, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "NaN", '{"a": 1, "a": 1}', "[" * 100_000, "1" * 9999]
)
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^graph: ") as caught:
        Graph.from_json(text)
    assert "\n" not in str(caught.value)


def test_bytes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^text: expected a string, got bytes$"):
        Graph.from_json(b"{}")  # type: ignore[arg-type]


def test_every_node_can_be_hostile() -> None:
    """A phase that is none, of a forward, and statistics without a use for them."""
    graph = Graph(io_data_type=DataType.FLOAT)
    x, scale = graph.tensor((4, 6)), graph.tensor((1, 6))
    graph.rmsnorm(x, scale, RMSNormAttributes(1e-5, NormFwdPhase.TRAINING))
    values = json.loads(graph.to_json())
    node = values["nodes"][0]
    assert node["forward_phase"] == "TRAINING"
    node["forward_phase"] = 3
    with pytest.raises(
        ValueError, match=r"^graph\.nodes\[0\]\.forward_phase: expected 1 \(INFERENCE"
    ):
        Graph.from_json(json.dumps(values))
    node["forward_phase"] = "INFERENCE"
    with pytest.raises(
        ValueError, match=r"^rmsnorm_0\.INV_RMS: expected None in the inference phase"
    ):
        Graph.from_json(json.dumps(values)).validate()
    node["forward_phase"] = "NOT_SET"
    with pytest.raises(ValueError, match=r"^rmsnorm_0\.forward_phase: expected NormFwdPhase"):
        Graph.from_json(json.dumps(values)).validate()
    assert graph_json.from_text(json.dumps(values)).nodes[0].forward_phase is None
    node |= {"forward_phase": 2, "compute_data_type": "half"}
    with pytest.raises(ValueError, match=r"^rmsnorm_0\.compute_data_type: expected float for X of"):
        Graph.from_json(json.dumps(values)).validate()
