"""The kinds of nodes and their ports, in one table, and a graph as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from iree_lnbwd.errors import plain
from iree_lnbwd.graph.attributes import NormFwdPhase
from iree_lnbwd.graph.tensors import DataType, TensorAttributes
from iree_lnbwd.ops.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Kind,
    Op,
)

# Characters in a message: of a name, and of names, dimensions or uids, which may be many.
_LONGEST_NAME = 80
_LONGEST_LIST = 300


def short(name: str) -> str:
    """The name of a node or tensor for a message, on one line."""
    return plain(name, _LONGEST_NAME)


def listed(text: str) -> str:
    """Names, dimensions or uids for a message, on one line."""
    return plain(text, _LONGEST_LIST)


@dataclass(frozen=True)
class Port:
    """A place of a node that a tensor is at.

    Attributes:
        name: hipDNN's.
        kind: What each of its elements is for; None of a scalar.
        operand: ATen's name of it.
        required: Whether every such node has it.
    """

    name: str
    kind: Kind | None
    operand: str
    required: bool = True

    @property
    def like(self) -> str:
        """The port whose dimensions an output has, if it is no statistic, and mostly its type."""
        return "X" if self.kind is Kind.CELLS else "SCALE"


_X = Port("X", Kind.CELLS, "input")
_DY = Port("DY", Kind.CELLS, "grad_output")
_SCALE = Port("SCALE", Kind.COLUMNS, "weight")
_BIAS = Port("BIAS", Kind.COLUMNS, "bias")
_EPSILON = Port("EPSILON", None, "eps")
_MEAN = Port("MEAN", Kind.ROWS, "mean", required=False)
_INV_VARIANCE = Port("INV_VARIANCE", Kind.ROWS, "rstd", required=False)
_Y = Port("Y", Kind.CELLS, "output")
_DX = Port("DX", Kind.CELLS, "grad_input")
_DSCALE = Port("DSCALE", Kind.COLUMNS, "grad_weight")
_DBIAS = Port("DBIAS", Kind.COLUMNS, "grad_bias")


@dataclass(frozen=True)
class NodeKind:
    """A kind of node.

    Attributes:
        name: Its type in hipDNN's JSON.
        method: The method of a graph that adds one.
        op: What computes it.
        inputs: The ports that it reads, in hipDNN's order.
        outputs: The ports that it writes, in hipDNN's order.
        least_rank: How many dimensions X must have.
        pads_scale: Whether SCALE and statistics have as many dimensions as X.
        of_samples: Whether each place in the first dimension of X has a SCALE of its own.
    """

    name: str
    method: str
    op: Op
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    least_rank: int = 1
    pads_scale: bool = False
    of_samples: bool = False

    @property
    def ports(self) -> tuple[Port, ...]:
        """All of them."""
        return (*self.inputs, *self.outputs)

    def requires(self, port: str) -> bool:
        """Whether every such node has that input."""
        return any(each.name == port and each.required for each in self.inputs)

    @property
    def has_phase(self) -> bool:
        """Whether it is a forward, which is for inference or for training."""
        return not self.op.is_backward

    @property
    def counts_dims(self) -> bool:
        """Whether it says how many dimensions are normalized; else SCALE alone does."""
        return not self.pads_scale


LAYERNORM = NodeKind(
    "LayernormAttributes",
    "layernorm",
    LAYER_NORM,
    (_X, _SCALE, _BIAS, _EPSILON),
    (_Y, _MEAN, _INV_VARIANCE),
)
LAYERNORM_BACKWARD = NodeKind(
    "LayernormBackwardAttributes",
    "layernorm_backward",
    LAYER_NORM_BACKWARD,
    (_DY, _X, _SCALE, _MEAN, _INV_VARIANCE, Port("EPSILON", None, "eps", required=False)),
    (_DX, _DSCALE, _DBIAS),
)
ADALAYERNORM = replace(
    LAYERNORM,
    name="AdaLayernormAttributes",
    method="adalayernorm",
    least_rank=2,
    pads_scale=True,
    of_samples=True,
)
ADALAYERNORM_BACKWARD = replace(
    LAYERNORM_BACKWARD,
    name="AdaLayernormBackwardAttributes",
    method="adalayernorm_backward",
    least_rank=2,
    pads_scale=True,
    of_samples=True,
)
RMSNORM = NodeKind(
    "RMSNormAttributes",
    "rmsnorm",
    RMS_NORM,
    (_X, _SCALE, _EPSILON, Port("BIAS", Kind.COLUMNS, "bias", required=False)),
    (_Y, Port("INV_RMS", Kind.ROWS, "rstd", required=False)),
    least_rank=2,
    pads_scale=True,
)
RMSNORM_BACKWARD = NodeKind(
    "RMSNormBackwardAttributes",
    "rmsnorm_backward",
    RMS_NORM_BACKWARD,
    (_DY, _X, _SCALE, Port("INV_RMS", Kind.ROWS, "rstd")),
    (_DX, _DSCALE, Port("DBIAS", Kind.COLUMNS, "grad_bias", required=False)),
    least_rank=2,
    pads_scale=True,
)
KINDS: Mapping[str, NodeKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            *(LAYERNORM, LAYERNORM_BACKWARD, RMSNORM, RMSNORM_BACKWARD),
            *(ADALAYERNORM, ADALAYERNORM_BACKWARD),
        )
    }
)


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        kind: What it computes.
        name: For messages.
        inputs: The uid of the tensor at each port that has one.
        outputs: As ``inputs``.
        normalized_dim_count: How many of the last dimensions of X are normalized; 0 until it is
            inferred.
        forward_phase: Of a forward; None until it is set.
        compute_data_type: The type of its sums; None means that of the graph.
    """

    kind: NodeKind
    name: str
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    normalized_dim_count: int = 0
    forward_phase: NormFwdPhase | None = None
    compute_data_type: DataType | None = None

    @property
    def uids(self) -> Mapping[str, int]:
        """Of all ports."""
        return {**self.inputs, **self.outputs}

    def place(self, port: str) -> str:
        """The port as messages name it."""
        return f"{short(self.name)}.{port}"


@dataclass(frozen=True)
class GraphAttributes:
    """A graph as a value.

    Attributes:
        name: For people.
        tensors: In the order in which they were made.
        nodes: In the order in which they were made, which need not be that of execution.
        io_data_type: Of inputs whose type is not set.
        intermediate_data_type: Of virtual tensors between nodes whose type is not set.
        compute_data_type: Of sums; None means that the data decides.
    """

    name: str = ""
    tensors: tuple[TensorAttributes, ...] = ()
    nodes: tuple[Node, ...] = ()
    io_data_type: DataType | None = None
    intermediate_data_type: DataType | None = None
    compute_data_type: DataType | None = None

    def by_uid(self) -> dict[int, TensorAttributes]:
        """The tensors by uid, all of which are set."""
        return dict(self._pairs())

    def _pairs(self) -> Iterator[tuple[int, TensorAttributes]]:
        for tensor in self.tensors:
            assert tensor.uid is not None, tensor
            yield tensor.uid, tensor
