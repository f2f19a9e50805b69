"""Graphs of norms: what is valid, what is inferred, and in which order nodes are executed.

The rules are those that hipDNN tests (ROCm/rocm-libraries, projects/hipdnn/frontend/tests): of
TestLayerNormNode.cpp, TestLayernormBackwardNode.cpp, TestRMSNormNode.cpp,
TestRMSNormBackwardNode.cpp, TestGraphRMSNormBackward.cpp and TestTensorAttributes.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
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
    Tensor,
    TensorAttributes,
    ordering,
    tensors,
)
from iree_lnbwd.graph.inference import resolved
from iree_lnbwd.graph.nodes import LAYERNORM, GraphAttributes, Node

TRAINING, INFERENCE = NormFwdPhase.TRAINING, NormFwdPhase.INFERENCE
NHWC = (50176, 1, 1792, 64)  # of [2, 64, 28, 28]


def refuses(text: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(text)}$")


class Nodes:
    """A graph of FLOAT tensors by their dimensions, with one node."""

    def __init__(self, **options: Any) -> None:
        self.graph = Graph(io_data_type=DataType.FLOAT, **options)

    def tensor(
        self, dim: Iterable[int] | None, stride: tuple[int, ...] = (), **more: Any
    ) -> Tensor:
        return self.graph.tensor(None if dim is None else tuple(dim), stride or None, **more)

    def layernorm(
        self,
        x: tuple[int, ...] | None,
        scale: tuple[int, ...] | None,
        bias: tuple[int, ...] | None = None,
        *,
        stride: tuple[int, ...] = (),
        **attributes: Any,
    ) -> tuple[Tensor, ...]:
        """X, SCALE, BIAS and the outputs."""
        attributes = {"epsilon": 1e-5, "forward_phase": TRAINING, **attributes}
        given = (self.tensor(x, stride), self.tensor(scale), self.tensor(bias or scale))
        made = self.graph.layernorm(*given, LayernormAttributes(**attributes))
        return (*given, *(tensor for tensor in made if tensor is not None))

    def layernorm_backward(
        self,
        x: tuple[int, ...] = (16, 64, 32, 32),
        scale: tuple[int, ...] = (1, 64, 32, 32),
        *,
        dy: tuple[int, ...] | None = None,
        mean: tuple[int, ...] | None = None,
        inv_variance: tuple[int, ...] | None = None,
        **attributes: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = LayernormBackwardAttributes(
            mean=None if mean is None else self.tensor(mean),
            inv_variance=None if inv_variance is None else self.tensor(inv_variance),
            **attributes,
        )
        given = (self.tensor(dy or x), self.tensor(x), self.tensor(scale))
        return self.graph.layernorm_backward(*given, made)

    def rmsnorm(
        self, x: tuple[int, ...], scale: tuple[int, ...], **attributes: Any
    ) -> tuple[Tensor, Tensor | None]:
        attributes = {"epsilon": 1e-5, "forward_phase": TRAINING, **attributes}
        given = (self.tensor(x), self.tensor(scale))
        return self.graph.rmsnorm(*given, RMSNormAttributes(**attributes))

    def rmsnorm_backward(
        self,
        x: tuple[int, ...],
        scale: tuple[int, ...],
        inv_rms: tuple[int, ...],
        *,
        dy: tuple[int, ...] | None = None,
        **attributes: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        given = (self.tensor(dy or x), self.tensor(x), self.tensor(scale), self.tensor(inv_rms))
        return self.graph.rmsnorm_backward(*given, RMSNormBackwardAttributes(**attributes))


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


# --- what is inferred -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "scale", "padded"),
    [
        ((10,), (10,), (1,)),
        ((32, 512), (512,), (32, 1)),
        ((32, 512), (1, 512), (32, 1)),
        ((2, 64, 28, 28), (28,), (2, 64, 28, 1)),
        ((2, 3, 5, 7), (3, 5, 7), (2, 1, 1, 1)),
        ((2, 3, 5, 7), (1, 1, 5, 7), (2, 3, 1, 1)),
        ((2, 3), (2, 3), (1, 1)),
        ((4,), (1, 4), (1,)),
        ((8, 5, 1, 1), (1, 5, 1, 1), (8, 1, 1, 1)),  # cuDNN's way to write [8, 5]
        ((3, 1), (1,), (3, 1)),
        ((3, 1, 1), (1, 1, 1), (3, 1, 1)),
        ((2, 1, 4), (1, 4), (2, 1, 1)),
    ],
)
def test_statistics_are_of_what_scale_does_not_have(
    nodes: Nodes, x: tuple[int, ...], scale: tuple[int, ...], padded: tuple[int, ...]
) -> None:
    _, _, _, y, mean, inv_variance = nodes.layernorm(x, scale)
    nodes.graph.validate()
    assert y.get_dim() == x
    assert mean.get_dim() == inv_variance.get_dim() == padded


def test_strides_keep_the_order_of_x(nodes: Nodes) -> None:
    """InferPropertiesPreservesNhwcStrideOrder, InferPropertiesNhwcScaleStridesMatchX."""
    dim = (2, 64, 28, 28)
    given = nodes.layernorm(dim, (1, *dim[1:]), stride=NHWC)
    nodes.graph.validate()
    x, scale, bias, y, mean, inv_variance = given
    for tensor in (scale, bias, y):
        assert tensor.get_stride() == NHWC
    assert mean.get_stride() == inv_variance.get_stride() == (1, 1, 1, 1)
    assert x.get_uid() == 1
    assert [tensor.get_is_virtual() for tensor in given] == [False] * 3 + [True] * 3


def test_what_is_set_is_kept(nodes: Nodes) -> None:
    """InferPropertiesPreservesExplicitOutputShape, -MeanDims and -StatStrides."""
    _, _, _, y, mean, _ = nodes.layernorm((32, 512), (512,))
    y.set_dim((32, 512)).set_stride((1024, 1)).set_data_type(np.float32)
    mean.set_dim((32,)).set_stride((2,)).set_uid(77)
    nodes.graph.validate()
    assert (y.get_stride(), mean.get_dim(), mean.get_stride()) == ((1024, 1), (32,), (2,))
    assert mean.get_uid() == 77


def test_gradients_are_like_what_they_are_of(nodes: Nodes) -> None:
    """InferMinimalPropertiesNode, and InferPropertiesNode of RMSNorm's backward."""
    gradients = nodes.layernorm_backward()
    other = nodes.rmsnorm_backward(
        (2, 64, 32, 32), (1, 1, 32, 32), (2, 64, 1, 1), compute_dbias=True
    )
    nodes.graph.validate()
    assert [t.get_dim() for t in gradients] == [(16, 64, 32, 32), (1, 64, 32, 32), (1, 64, 32, 32)]
    assert [t.get_dim() for t in other if t] == [(2, 64, 32, 32), (1, 1, 32, 32), (1, 1, 32, 32)]
    assert other[0].get_name() == "rmsnorm_backward_1::DX"


def test_no_dbias_unless_it_is_asked_for(nodes: Nodes) -> None:
    """TestGraphRMSNormBackward.BuildGraph."""
    assert nodes.rmsnorm_backward((4, 3), (1, 3), (4, 1))[2] is None


def test_inference_saves_no_statistics(nodes: Nodes) -> None:
    assert len(nodes.layernorm((32, 512), (512,), forward_phase=INFERENCE)) == 4
    assert nodes.rmsnorm((32, 512), (1, 512), forward_phase=INFERENCE)[1] is None


@pytest.mark.parametrize("data", DataType)
def test_types_follow_the_data(data: DataType) -> None:
    graph = Graph(io_data_type=data)
    x, scale = graph.tensor((4, 6)), graph.tensor((6,))
    y, mean, inv = graph.layernorm(x, scale, scale, LayernormAttributes(1e-5, TRAINING))
    assert mean is not None
    made = LayernormBackwardAttributes(mean, inv)
    gradients = graph.layernorm_backward(y, x, scale, made)
    graph.validate()
    assert {t.get_data_type() for t in (x, scale, y, *gradients)} == {data}
    assert mean.get_data_type() is data.statistics
    assert data.statistics is (DataType.DOUBLE if data is DataType.DOUBLE else DataType.FLOAT)


# --- what is refused --------------------------------------------------------------------------

GRADIENT = (32, 64, 32, 32)
BAD_BACKWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "dy": (
        {"dy": GRADIENT},
        "layernorm_backward_0.DY: expected (16, 64, 32, 32), as X, got (32, 64, 32, 32)",
    ),
    "only mean": (
        {"mean": (16, 1, 1, 1)},
        "layernorm_backward_0.INV_VARIANCE: expected both MEAN and INV_VARIANCE or neither, got "
        "only MEAN",
    ),
    "only inv_variance": (
        {"inv_variance": (16, 1, 1, 1)},
        "layernorm_backward_0.MEAN: expected both MEAN and INV_VARIANCE or neither, got only "
        "INV_VARIANCE",
    ),
    "statistics that differ": (
        {"mean": (16, 1, 1, 1), "inv_variance": (32, 1, 1, 1)},
        "layernorm_backward_0.INV_VARIANCE: expected (16, 1, 1, 1) or (16,), got (32, 1, 1, 1)",
    ),
    "statistics of each channel": (
        {"mean": (16, 64, 1, 1), "inv_variance": (16, 64, 1, 1)},
        "layernorm_backward_0.MEAN: expected (16, 1, 1, 1) or (16,), got (16, 64, 1, 1)",
    ),
    "negative count": (
        {"normalized_dim_count": -1},
        "layernorm_backward_0.normalized_dim_count: expected an int from 0 to 4, got -1",
    ),
    "count of too many": (
        {"normalized_dim_count": 5},
        "layernorm_backward_0.normalized_dim_count: expected an int from 0 to 4, got 5",
    ),
    "count of another scale": (
        {"normalized_dim_count": 2},
        "layernorm_backward_0.SCALE: expected the last 2 dimensions of X, (16, 64, 32, 32), alone "
        "or after ones, got (1, 64, 32, 32)",
    ),
    "scale of another width": (
        {"scale": (32,), "x": (4, 64)},
        "layernorm_backward_0.SCALE: expected the last few dimensions of X, (4, 64), alone or "
        "after ones, got (32,)",
    ),
    "scale of each channel": (
        {"scale": (1, 64, 1, 1)},
        "layernorm_backward_0.SCALE: expected the last few dimensions of X, (16, 64, 32, 32), "
        "alone or after ones, got (1, 64, 1, 1)",
    ),
}


@pytest.mark.parametrize("case", BAD_BACKWARDS)
def test_a_bad_backward_is_refused(nodes: Nodes, case: str) -> None:
    changes, message = BAD_BACKWARDS[case]
    nodes.layernorm_backward(**changes)
    with refuses(message):
        nodes.graph.validate()


@pytest.mark.parametrize(("port", "place"), [("DX", 0), ("DSCALE", 1), ("DBIAS", 2)])
def test_gradients_of_other_dimensions_are_refused(nodes: Nodes, port: str, place: int) -> None:
    """PreValidateNodeMismatchingDxTensor, -DscaleTensor, -DbiasTensor."""
    gradient = nodes.layernorm_backward()[place].set_dim((1, 64, 64, 32))
    like = "(16, 64, 32, 32), as X" if port == "DX" else "(1, 64, 32, 32), as SCALE"
    with refuses(f"layernorm_backward_0.{port}: expected {like}, got (1, 64, 64, 32)"):
        nodes.graph.validate()
    gradient.set_dim((16, 64, 32, 32) if port == "DX" else (1, 64, 32, 32))
    nodes.graph.validate()


def test_a_forward_needs_its_phase_and_epsilon(nodes: Nodes) -> None:
    """PreValidateFailsForwardPhaseNotSet, PreValidateFailsMissingEpsilon."""
    nodes.layernorm((32, 512), (512,), forward_phase=None)
    with refuses(
        "layernorm_0.forward_phase: expected NormFwdPhase.TRAINING or NormFwdPhase.INFERENCE, got "
        "None"
    ):
        nodes.graph.validate()
    nodes = Nodes()
    nodes.rmsnorm((32, 512), (1, 512), epsilon=None)
    with refuses("rmsnorm_0.EPSILON: expected a tensor, got None"):
        nodes.graph.validate()


@pytest.mark.parametrize("dim", [None, (1,), (2,)])
def test_epsilon_is_one_number_that_the_graph_knows(
    nodes: Nodes, dim: tuple[int, ...] | None
) -> None:
    """PreValidateFailsEpsilonNotScalar, -NotPassByValue and -WithNoDimensions."""
    epsilon = nodes.tensor(dim, value=1e-5 if dim == (2,) else None)
    nodes.layernorm((32, 512), (512,), epsilon=epsilon)
    with pytest.raises(ValueError, match=r"^layernorm_0\.EPSILON: expected one number passed by"):
        nodes.graph.validate()


@pytest.mark.parametrize("epsilon", [1e-46, 1e39])
def test_epsilon_is_one_that_sums_hold(nodes: Nodes, epsilon: float) -> None:
    nodes.layernorm((32, 512), (512,), epsilon=epsilon)
    with pytest.raises(ValueError, match=r"^layernorm_0\.EPSILON: expected 0, or a number from "):
        nodes.graph.validate()


@pytest.mark.parametrize(("x", "scale"), [(None, (512,)), ((32, 512), None)])
def test_inputs_have_dimensions(nodes: Nodes, x: Any, scale: Any) -> None:
    """PreValidateFailsXWithNoDimensions, -ScaleWithNoDimensions and -BiasWithNoDimensions."""
    nodes.layernorm(x, scale)
    port = "X" if x is None else "SCALE"
    with refuses(f"layernorm_0.{port}: expected a tensor whose dimensions are set, got none"):
        nodes.graph.validate()


def test_bias_is_like_scale(nodes: Nodes) -> None:
    """PreValidateFailsScaleBiasMismatch."""
    nodes.layernorm((32, 512), (512,), (256,))
    with refuses("layernorm_0.BIAS: expected (512,), as SCALE, got (256,)"):
        nodes.graph.validate()


def test_y_is_like_x(nodes: Nodes) -> None:
    """PreValidateFailsXYShapeMismatch."""
    nodes.layernorm((32, 512), (512,))[3].set_dim((32, 256))
    with refuses("layernorm_0.Y: expected (32, 512), as X, got (32, 256)"):
        nodes.graph.validate()


BAD_RMSNORMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "one dimension": (((5,), (5,), (1,)), "X: expected at least 2 dimensions, got 1"),
    "rank": (
        ((2, 3, 4, 4), (1, 3, 4), (2, 3, 1, 1)),
        "SCALE: expected 4 dimensions, as X, of which the first is 1, got (1, 3, 4)",
    ),
    "batch": (
        ((2, 3, 4, 4), (2, 3, 4, 4), (1, 3, 4, 4)),
        "SCALE: expected 4 dimensions, as X, of which the first is 1, got (2, 3, 4, 4)",
    ),
    "of each channel": (
        ((2, 3, 4, 4), (1, 3, 1, 1), (2, 3, 1, 1)),
        "SCALE: expected the last few dimensions of X, (2, 3, 4, 4), alone or after ones, got "
        "(1, 3, 1, 1)",
    ),
    "a gap": (
        ((2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1)),
        "SCALE: expected the last few dimensions of X, (2, 3, 4, 5), alone or after ones, got "
        "(1, 3, 1, 5)",
    ),
    "all ones": (
        ((2, 3, 4, 5), (1, 1, 1, 1), (2, 3, 4, 1)),
        "SCALE: expected the last few dimensions of X, (2, 3, 4, 5), alone or after ones, got "
        "(1, 1, 1, 1)",
    ),
    "statistic": (
        ((2, 64, 32, 32), (1, 1, 32, 32), (2, 1, 1, 1)),
        "INV_RMS: expected (2, 64, 1, 1), got (2, 1, 1, 1)",
    ),
    "rank of the statistic": (
        ((2, 64, 32, 32), (1, 1, 32, 32), (2, 64)),
        "INV_RMS: expected (2, 64, 1, 1), got (2, 64)",
    ),
}


@pytest.mark.parametrize("case", BAD_RMSNORMS)
def test_a_bad_rmsnorm_is_refused(case: str) -> None:
    """PreValidateNodeWithInvalidInvRms, RMSNormFwd- and RMSNormBwdRejectsRankMismatch."""
    (x, scale, inv_rms), message = BAD_RMSNORMS[case]
    nodes = Nodes()
    nodes.rmsnorm_backward(x, scale, inv_rms)
    with refuses(f"rmsnorm_backward_0.{message}"):
        nodes.graph.validate()
    nodes = Nodes()
    statistic = nodes.rmsnorm(x, scale)[1]
    assert statistic is not None
    statistic.set_dim(inv_rms)
    with refuses(f"rmsnorm_0.{message}"):
        nodes.graph.validate()


def test_a_bias_of_rmsnorm_is_like_scale(nodes: Nodes) -> None:
    nodes.rmsnorm((4, 3), (1, 3), bias=nodes.tensor((1, 3)))
    nodes.graph.validate()
    nodes.rmsnorm((4, 3), (1, 3), bias=nodes.tensor((3,)))
    with refuses("rmsnorm_1.BIAS: expected (1, 3), as SCALE, got (3,)"):
        nodes.graph.validate()


def test_types_that_no_kernel_has_are_refused() -> None:
    graph = Graph(io_data_type=DataType.HALF)
    x, scale = graph.tensor((4, 6)), graph.tensor((6,))
    y, mean, _ = graph.layernorm(x, scale, scale, LayernormAttributes(1e-5, TRAINING))
    assert mean is not None
    y.set_data_type(DataType.DOUBLE)
    with refuses("layernorm_0.Y: expected half or bfloat16 or float beside X of half, got double"):
        graph.validate()
    y.set_data_type(np.float16)
    mean.set_data_type(DataType.HALF)
    with refuses("layernorm_0.MEAN: expected float, as sums of half are, got half"):
        graph.validate()
    mean.set_data_type(DataType.FLOAT)
    scale.set_data_type(DataType.DOUBLE)
    with refuses(
        "layernorm_0.SCALE: expected half or bfloat16 or float beside X of half, got double"
    ):
        graph.validate()


def test_types_that_the_graph_says_are_kept_or_refused() -> None:
    graph = Graph(io_data_type=DataType.HALF, intermediate_data_type=DataType.FLOAT)
    x, scale = graph.tensor((4, 6)), graph.tensor((1, 6))
    attributes = RMSNormAttributes(1e-5, INFERENCE)
    y, _ = graph.rmsnorm(x, scale, attributes)
    graph.validate()  # nobody reads it, so its type makes no difference
    graph.rmsnorm(y, scale, attributes)
    graph.validate()  # Y is float, and the next node reads it so
    graph = Graph(io_data_type=DataType.HALF, compute_data_type=DataType.HALF)
    graph.rmsnorm(graph.tensor((4, 6)), graph.tensor((1, 6)), attributes)
    with refuses("rmsnorm_0.compute_data_type: expected float for X of half, got half"):
        graph.validate()


def test_a_type_must_be_somewhere() -> None:
    graph = Graph()
    x = graph.tensor((4, 6))
    graph.rmsnorm(x, graph.tensor((1, 6), data_type=np.float32), RMSNormAttributes(1, INFERENCE))
    with refuses("rmsnorm_0.X: expected a data_type, or io_data_type of the graph, got None"):
        graph.validate()


def test_outputs_do_not_overlap_themselves(nodes: Nodes) -> None:
    y = nodes.layernorm((32, 512), (512,))[3].set_stride((511, 1))
    with refuses(
        "layernorm_0.Y: expected strides that keep the elements of (32, 512) apart, got (511, 1)"
    ):
        nodes.graph.validate()
    y.set_stride((1,))
    with refuses("layernorm_0.Y: expected a stride for each dimension of (32, 512), got (1,)"):
        nodes.graph.validate()


def test_uids_are_unique_and_given_to_all(nodes: Nodes) -> None:
    _, scale, bias, *_ = given = nodes.layernorm((32, 512), (512,))
    scale.set_uid(2)
    bias.set_uid(2)
    with refuses("uid: expected one for each tensor, got 2 for '' and ''"):
        nodes.graph.validate()
    bias.set_uid(-7)
    nodes.graph.validate()
    uids = [tensor.get_uid() for tensor in given]
    assert len(set(uids)) == len(uids)
    assert uids[:3] == [1, 2, -7]


def test_tensors_are_used(nodes: Nodes) -> None:
    nodes.layernorm((32, 512), (512,))
    nodes.tensor((3,), name="alone")
    with refuses("'alone': expected a tensor of a node, got uid 8"):
        nodes.graph.validate()


def test_an_empty_graph_is_refused() -> None:
    with refuses("graph: expected at least one node, got none"):
        Graph().validate()


def test_too_many_rows_or_columns_are_refused(nodes: Nodes) -> None:
    nodes.layernorm((2**20, 2**20, 4), (4,))
    with pytest.raises(ValueError, match=r"^layernorm_0\.X: expected at most \d+ rows, got"):
        nodes.graph.validate()
    nodes = Nodes()
    nodes.layernorm((2, 2**20, 2**20), (2**20, 2**20))
    with pytest.raises(ValueError, match=r"^layernorm_0\.X: expected at most \d+ columns, got"):
        nodes.graph.validate()


BAD_ARGUMENTS: dict[str, tuple[Callable[[Graph, Tensor], object], str]] = {
    "dim": (lambda graph, x: graph.tensor((4, 0)), "dim[1]: expected an int from 1 to "),
    "negative dim": (lambda graph, x: x.set_dim((-4,)), "dim[0]: expected an int from 1 to "),
    "bool dim": (lambda graph, x: x.set_dim((True,)), "dim[0]: expected an int, got bool"),
    "text dim": (lambda graph, x: x.set_dim("44"), "dim: expected a sequence of ints, got str"),  # type: ignore[arg-type]
    "zero stride": (lambda graph, x: x.set_stride((0,)), "stride[0]: expected an int from 1 to "),
    "float": (lambda graph, x: x.set_data_type(float), "data_type: expected DataType.HALF, "),
    "data_type": (lambda graph, x: x.set_data_type("float"), "data_type: expected DataType.HALF, "),
    "int type": (lambda graph, x: x.set_data_type(np.int32), "data_type: expected DataType.HALF, "),
    "graph type": (lambda graph, x: Graph(io_data_type=4), "io_data_type: expected DataType.HALF"),
    "uid": (
        lambda graph, x: x.set_uid(2**63),
        "uid: expected an int from -9223372036854775808 to ",
    ),
    "name": (lambda graph, x: x.set_name(None), "name: expected a string, got NoneType"),  # type: ignore[arg-type]
    "output": (lambda graph, x: x.set_output(1), "output: expected a bool, got int"),  # type: ignore[arg-type]
    "value": (lambda graph, x: graph.tensor(value=float("nan")), "value: expected a finite number"),
    "half value": (
        lambda graph, x: graph.tensor(value=1e5, data_type=DataType.HALF),
        "value: expected a finite number, got inf",
    ),
    "epsilon": (
        lambda graph, x: graph.rmsnorm(x, x, RMSNormAttributes("1e-5", TRAINING)),  # type: ignore[arg-type]
        "epsilon: expected a float, got str",
    ),
    "phase": (
        lambda graph, x: graph.rmsnorm(x, x, RMSNormAttributes(1e-5, "TRAINING")),  # type: ignore[arg-type]
        "forward_phase: expected a NormFwdPhase, got 'TRAINING'",
    ),
    "attributes": (
        lambda graph, x: graph.rmsnorm(x, x, LayernormAttributes()),  # type: ignore[arg-type]
        "attributes: expected RMSNormAttributes, got LayernormAttributes",
    ),
    "no x": (
        lambda graph, x: graph.rmsnorm(None, x, RMSNormAttributes(1e-5, TRAINING)),  # type: ignore[arg-type]
        "x: expected a tensor of this graph, got None",
    ),
    "no inv_rms": (
        lambda graph, x: graph.rmsnorm_backward(x, x, x, None),  # type: ignore[arg-type]
        "inv_rms: expected a tensor of this graph, got None",
    ),
    "another graph's": (
        lambda graph, x: graph.rmsnorm(x, Graph().tensor((3,)), RMSNormAttributes(1e-5, TRAINING)),
        "scale: expected a tensor of this graph, got another graph's",
    ),
    "dbias": (
        lambda graph, x: graph.rmsnorm_backward(x, x, x, x, RMSNormBackwardAttributes(1)),  # type: ignore[arg-type]
        "attributes.compute_dbias: expected a bool, got int",
    ),
    "find": (lambda graph, x: graph.find(5), "uid: expected that of a tensor, got 5"),
    "not built": (lambda graph, x: graph.execute({}), "graph: expected a graph that was built; "),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_named(case: str) -> None:
    call, message = BAD_ARGUMENTS[case]
    graph = Graph(io_data_type=DataType.FLOAT)
    x = graph.tensor((4, 6))
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call(graph, x)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_messages_stay_on_one_line(nodes: Nodes) -> None:
    nodes.layernorm((32, 512), (512,), forward_phase=None, name="a\nb" * 99)
    with pytest.raises(ValueError, match=r"^a\\nba\\nb.*expected NormFwdPhase") as caught:
        nodes.graph.validate()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_output_is_no_number(nodes: Nodes) -> None:
    nodes.layernorm((1,), (1,))[3].set_value(1.0)
    with refuses("layernorm_0.Y: expected a tensor to write to, got one passed by value"):
        nodes.graph.validate()


def test_a_number_is_what_its_type_holds() -> None:
    tensor = Graph().tensor(name="eps").set_value(1 / 3)
    assert (tensor.attributes.value, tensor.get_data_type()) == (1 / 3, DataType.DOUBLE)
    tensor.set_data_type(np.float32)
    assert tensor.attributes.value == float(np.float32(1 / 3))
    assert tensor.set_value(0.1).attributes.value == float(np.float32(0.1))
    assert (tensor.get_dim(), tensor.get_stride()) == ((1,), (1,))


# --- order ------------------------------------------------------------------------------------


def chain(places: list[int]) -> GraphAttributes:
    """Norms in a row from uid 1, which are listed in another order than that of execution."""
    number = len(places)
    made = [TensorAttributes(uid, f"t{uid}", is_virtual=uid > 1) for uid in range(1, number + 2)]
    made[0] = replace(made[0], dim=(4, 6), data_type=DataType.FLOAT)
    scale = TensorAttributes(100, "scale", (6,), (1,), DataType.FLOAT)
    eps = TensorAttributes(101, "eps", (1,), (1,), DataType.DOUBLE, value=1e-5)
    nodes = tuple(
        Node(
            LAYERNORM,
            f"n{place}",
            {"X": place + 1, "SCALE": 100, "BIAS": 100, "EPSILON": 101},
            {"Y": place + 2},
            forward_phase=INFERENCE,
        )
        for place in places
    )
    return GraphAttributes(tensors=(*made, scale, eps), nodes=nodes)


@given(st.permutations(range(5)))
def test_nodes_come_after_what_they_read(places: list[int]) -> None:
    graph = resolved(chain(places))
    assert [node.name for node in ordering.executed(graph)] == [f"n{i}" for i in range(5)]
    assert [node.name for node in graph.nodes] == [f"n{i}" for i in places]
    assert ordering.needed(graph) == {1, 100, 101}


def changed(graph: GraphAttributes, place: int, **fields: Any) -> GraphAttributes:
    nodes = list(graph.nodes)
    nodes[place] = replace(nodes[place], **fields)
    return replace(graph, nodes=tuple(nodes))


def test_cycles_and_dangling_uids_are_refused() -> None:
    graph = chain([0, 1, 2])
    first, last = graph.nodes[0].inputs, graph.nodes[2].outputs
    with pytest.raises(
        ValueError, match=r"^graph: expected no cycle, got n\d -> n\d -> n\d -> n\d$"
    ):
        resolved(changed(graph, 0, inputs={**first, "X": last["Y"]}))
    with refuses("n1.X: expected the uid of a tensor, got 55"):
        resolved(changed(graph, 1, inputs={**first, "X": 55}))
    with refuses("n2.Y: expected a tensor of its own, got uid 2, which n0.Y computes, too"):
        resolved(changed(graph, 2, outputs={"Y": 2}))
    with refuses(
        "n1.X: expected a tensor that an array is given for, or that a node computes, got the "
        "virtual uid 2"
    ):
        resolved(replace(graph, nodes=graph.nodes[1:]))


# --- layouts ----------------------------------------------------------------------------------

dims = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(dims, st.data())
def test_strides_tell_the_order_in_memory(dim: list[int], data: st.DataObject) -> None:
    """As NumPy has it: a packed array in any order of its dimensions."""
    order = data.draw(st.permutations(range(len(dim))))
    array = np.empty([dim[axis] for axis in order], np.float32).transpose(np.argsort(order))
    stride = tensors.packed_stride(dim, order)
    ours = [step for step, size in zip(stride, dim, strict=True) if size > 1]
    assert ours == [s // 4 for s, size in zip(array.strides, dim, strict=True) if size > 1]
    assert tensors.is_packed(dim, stride, order)
    assert tensors.is_packed(dim, stride, tensors.memory_order(stride, range(len(dim))))
    assert not tensors.overlaps(dim, stride)
    assert tensors.reach(dim, stride) == array.size


@given(dims, st.data())
def test_overlap_is_found(dim: list[int], data: st.DataObject) -> None:
    """Every real one; strides that interleave without one are refused as well."""
    stride = data.draw(st.lists(st.integers(1, 9), min_size=len(dim), max_size=len(dim)))
    places = sum(
        np.arange(size).reshape([-1 if a == axis else 1 for a in range(len(dim))]) * step
        for axis, (size, step) in enumerate(zip(dim, stride, strict=True))
    )
    if len(np.unique(places)) < np.prod(dim):
        assert tensors.overlaps(dim, stride)
    assert tensors.reach(dim, stride) == np.max(places) + 1
