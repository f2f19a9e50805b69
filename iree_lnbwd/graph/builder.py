"""A graph while it is being made, and its tensors by handles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iree_lnbwd.errors import shown
from iree_lnbwd.graph import graph_json
from iree_lnbwd.graph.attributes import (
    AdaLayernormAttributes,
    AdaLayernormBackwardAttributes,
    LayernormAttributes,
    LayernormBackwardAttributes,
    NormFwdPhase,
    RMSNormAttributes,
    RMSNormBackwardAttributes,
)
from iree_lnbwd.graph.calls import calls_of
from iree_lnbwd.graph.inference import resolved, with_uids
from iree_lnbwd.graph.nodes import (
    ADALAYERNORM,
    ADALAYERNORM_BACKWARD,
    LAYERNORM,
    LAYERNORM_BACKWARD,
    RMSNORM,
    RMSNORM_BACKWARD,
    GraphAttributes,
    Node,
    NodeKind,
)
from iree_lnbwd.graph.plan import Plan
from iree_lnbwd.graph.tensors import (
    LEAST_UID,
    DataType,
    TensorAttributes,
    check_data_type,
    check_int,
    check_sizes,
    packed_stride,
    rounded,
)
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri
from iree_lnbwd.ops.spec import NormSpec


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a graph. Its setters change the graph, and return the tensor itself.

    Attributes:
        graph: The graph that it belongs to.
        place: Its number among the tensors of that graph.
    """

    graph: Graph
    place: int

    @property
    def attributes(self) -> TensorAttributes:
        """What it is; after `Graph.validate`, with what was inferred."""
        return self.graph._attributes.tensors[self.place]

    def get_uid(self) -> int | None:
        """Its number; None until it is set or the graph is validated."""
        return self.attributes.uid

    def get_name(self) -> str:
        """Its name."""
        return self.attributes.name

    def get_dim(self) -> tuple[int, ...]:
        """Its dimensions; () until they are set or inferred."""
        return self.attributes.dim

    def get_stride(self) -> tuple[int, ...]:
        """Its strides in elements; () until they are set or inferred."""
        return self.attributes.stride

    def get_data_type(self) -> DataType | None:
        """The type of its elements; None until it is set or inferred."""
        return self.attributes.data_type

    def get_is_virtual(self) -> bool:
        """Whether it is only between nodes."""
        return self.attributes.is_virtual

    def set_uid(self, uid: int) -> Tensor:
        """Sets its number, by which arrays are given for it."""
        return self._set(uid=check_int(uid, "uid", least=LEAST_UID))

    def set_name(self, name: str) -> Tensor:
        """Sets its name, by which messages call it."""
        return self._set(name=_check_name(name))

    def set_dim(self, dim: Sequence[int]) -> Tensor:
        """Sets its dimensions."""
        return self._set(dim=check_sizes(dim, "dim"))

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        """Sets its strides, in elements."""
        return self._set(stride=check_sizes(stride, "stride"))

    def set_data_type(self, data_type: Any) -> Tensor:
        """Sets the type of its elements: a `DataType`, or NumPy's or PyTorch's type."""
        kind = check_data_type(data_type, "data_type")
        value = self.graph._tensors[self.place].value
        return self._set(
            data_type=kind, value=None if value is None else rounded(value, kind, "value")
        )

    def set_value(self, value: float) -> Tensor:
        """Sets the number that it is, as its type holds it: DOUBLE if none is set."""
        data_type = self.graph._tensors[self.place].data_type or DataType.DOUBLE
        number = rounded(value, data_type, "value")
        return self._set(value=number, data_type=data_type, dim=(1,), stride=(1,))

    def set_is_virtual(self, is_virtual: bool) -> Tensor:
        """Sets whether it is only between nodes."""
        return self._set(is_virtual=_check_bool(is_virtual, "is_virtual"))

    def set_output(self, output: bool) -> Tensor:
        """Sets whether the caller gets it. Outputs of nodes are virtual until then."""
        return self._set(is_virtual=not _check_bool(output, "output"))

    def __repr__(self) -> str:
        """Its attributes."""
        return repr(self.attributes)

    def _set(self, **changes: Any) -> Tensor:
        self.graph._replace(self.place, replace(self.graph._tensors[self.place], **changes))
        return self


class Graph:
    """A graph of norms, as hipDNN's and cuDNN's frontends have it.

    Make tensors (`tensor`) and nodes (`layernorm` and so on), ask for outputs
    (`Tensor.set_output`), then `validate`, `build` and `execute`. A node's outputs may be inputs of
    others. Not to be changed by several threads at once; any number may execute it.
    """

    def __init__(
        self,
        name: str = "",
        *,
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
    ) -> None:
        """Makes an empty graph.

        Args:
            name: For people.
            io_data_type: The type of inputs whose type is not set.
            intermediate_data_type: The type of virtual tensors that nodes pass on, if their type is
                not set; None means that of the node's op.
            compute_data_type: The type of sums: FLOAT, or DOUBLE for DOUBLE data. None means that.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        self._tensors: list[TensorAttributes] = []
        self._nodes: list[Node] = []  # their "uids" are places in the list of tensors
        self._header = GraphAttributes(
            name=_check_name(name),
            io_data_type=_type_or_none(io_data_type, "io_data_type"),
            intermediate_data_type=_type_or_none(intermediate_data_type, "intermediate_data_type"),
            compute_data_type=_type_or_none(compute_data_type, "compute_data_type"),
        )
        self._valid: GraphAttributes | None = None
        self._plan: Plan | None = None

    def tensor(
        self,
        dim: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        *,
        is_virtual: bool = False,
        uid: int | None = None,
        name: str = "",
        value: float | None = None,
    ) -> Tensor:
        """Adds a tensor.

        Args:
            dim: Its dimensions, each at least 1.
            stride: The distance of neighbours in each dimension, in elements; None means without
                gaps, the last dimension fastest, or as the node's other tensors.
            data_type: A `DataType`, or NumPy's or PyTorch's type.
            is_virtual: Whether it is only between nodes.
            uid: Its number; None means any.
            name: For messages.
            value: The number that a tensor is which is passed by value, such as EPSILON. It has one
                element then, of DOUBLE unless ``data_type`` says otherwise, to which it is rounded.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        if value is not None:
            data_type = DataType.DOUBLE if data_type is None else data_type
            value = rounded(value, check_data_type(data_type, "data_type"), "value")
            dim = (1,) if dim is None else dim
            stride = packed_stride(check_sizes(dim, "dim")) if stride is None else stride
        tensor = TensorAttributes(
            uid=None if uid is None else check_int(uid, "uid", least=LEAST_UID),
            name=_check_name(name),
            dim=() if dim is None else check_sizes(dim, "dim"),
            stride=() if stride is None else check_sizes(stride, "stride"),
            data_type=_type_or_none(data_type, "data_type"),
            is_virtual=_check_bool(is_virtual, "is_virtual"),
            value=value,
        )
        return self._add(tensor)

    def tensor_like(self, like: Tensor, name: str = "") -> Tensor:
        """Adds a tensor with the dimensions, strides and type of another."""
        given = self._tensors[self._place("like", like)]
        return self._add(replace(given, uid=None, name=_check_name(name), is_virtual=False))

    def layernorm(
        self, x: Tensor, scale: Tensor, bias: Tensor, attributes: LayernormAttributes
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Adds a layer normalization: ``y = (x - mean) * inv_variance * scale + bias``.

        Args:
            x: [N, ..., *normalized].
            scale: [*normalized], alone or after ones.
            bias: As ``scale``.
            attributes: The rest.

        Returns:
            Y, MEAN and INV_VARIANCE, which is 1 / sqrt(variance + epsilon); the last two are None
            in the inference phase. Statistics are [N, ..., 1, ...], FLOAT, or DOUBLE for DOUBLE.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        _check_attributes(attributes, LayernormAttributes)
        return self._layernorm(LAYERNORM, x, scale, bias, attributes)

    def layernorm_backward(
        self, dy: Tensor, x: Tensor, scale: Tensor, attributes: LayernormBackwardAttributes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the gradients of a layer normalization.

        Args:
            dy: As ``x``: the gradient that reached the output.
            x: As in `layernorm`.
            scale: As in `layernorm`.
            attributes: The rest, with the statistics that the forward saved.

        Returns:
            DX, as ``x``, and DSCALE and DBIAS, as ``scale``. One that is neither an output nor read
            by another node is not computed.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        _check_attributes(attributes, LayernormBackwardAttributes)
        return self._layernorm_backward(LAYERNORM_BACKWARD, dy, x, scale, attributes)

    def adalayernorm(
        self, x: Tensor, scale: Tensor, bias: Tensor, attributes: AdaLayernormAttributes
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Adds a layer normalization with a scale and a bias for each sample, as cuDNN's.

        Args:
            x: [B, ..., *normalized]: B samples.
            scale: [B, 1, ..., *normalized], of as many dimensions.
            bias: As ``scale``.
            attributes: The rest.

        Returns:
            As `layernorm`.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        _check_attributes(attributes, AdaLayernormAttributes)
        return self._layernorm(ADALAYERNORM, x, scale, bias, attributes)

    def adalayernorm_backward(
        self, dy: Tensor, x: Tensor, scale: Tensor, attributes: AdaLayernormBackwardAttributes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds the gradients of a layer normalization with a scale and a bias for each sample.

        Args:
            dy: As ``x``: the gradient that reached the output.
            x: As in `adalayernorm`.
            scale: As in `adalayernorm`.
            attributes: The rest, with the statistics that the forward saved.

        Returns:
            As `layernorm_backward`: DSCALE and DBIAS are sums over the rows of each sample.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        _check_attributes(attributes, AdaLayernormBackwardAttributes)
        return self._layernorm_backward(ADALAYERNORM_BACKWARD, dy, x, scale, attributes)

    def rmsnorm(
        self, x: Tensor, scale: Tensor, attributes: RMSNormAttributes
    ) -> tuple[Tensor, Tensor | None]:
        """Adds an RMS normalization: ``y = x * inv_rms * scale``, plus a bias if there is one.

        Args:
            x: [N, ..., *normalized], of at least two dimensions.
            scale: [1, ..., *normalized], of as many dimensions.
            attributes: The rest.

        Returns:
            Y, and INV_RMS, which is 1 / sqrt(mean of squares + epsilon), as the statistics of
            `layernorm`; None in the inference phase.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        _check_attributes(attributes, RMSNormAttributes)
        given = {"X": x, "SCALE": scale, "BIAS": attributes.bias}
        trains = attributes.forward_phase is NormFwdPhase.TRAINING
        made = self._node(RMSNORM, given, attributes, ("Y", "INV_RMS") if trains else ("Y",))
        return made["Y"], made.get("INV_RMS")

    def rmsnorm_backward(
        self,
        dy: Tensor,
        x: Tensor,
        scale: Tensor,
        inv_rms: Tensor,
        attributes: RMSNormBackwardAttributes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Adds the gradients of an RMS normalization.

        Args:
            dy: As ``x``: the gradient that reached the output.
            x: As in `rmsnorm`.
            scale: As in `rmsnorm`.
            inv_rms: The statistic that the forward saved.
            attributes: The rest; None means the default.

        Returns:
            DX, as ``x``, DSCALE, as ``scale``, and DBIAS, as ``scale``: the sum of DY over rows, or
            None if it is not asked for. What nobody reads is not computed.

        Raises:
            TypeError, ValueError: Naming the argument, what came and what was expected.
        """
        attributes = RMSNormBackwardAttributes() if attributes is None else attributes
        _check_attributes(attributes, RMSNormBackwardAttributes)
        _check_bool(attributes.compute_dbias, "attributes.compute_dbias")
        given = {"DY": dy, "X": x, "SCALE": scale, "INV_RMS": inv_rms}
        ports = ("DX", "DSCALE", "DBIAS") if attributes.compute_dbias else ("DX", "DSCALE")
        made = self._node(RMSNORM_BACKWARD, given, attributes, ports)
        return made["DX"], made["DSCALE"], made.get("DBIAS")

    def validate(self) -> None:
        """Checks the graph and infers what is unset; the tensors tell what it is then.

        Raises:
            ValueError: Naming the node and its port, what came and what was expected.
        """
        if self._valid is None:
            self._valid = resolved(self._numbered())

    @property
    def specs(self) -> tuple[NormSpec, ...]:
        """What the modules compute that the graph needs, for `iree_lnbwd.compile`.

        Raises:
            ValueError: As `validate`; or no output is asked for.
        """
        return tuple(dict.fromkeys(call.spec for call in calls_of(self._validated())))

    def build(self, device: str = DEFAULT_DEVICE) -> None:
        """Validates the graph, and compiles and loads its modules, or takes them from the cache.

        Args:
            device: IREE device URI: "local-task" (the CPU), "cuda", "hip", "cuda://1".

        Raises:
            TypeError, ValueError: As `validate`; or no output is asked for.
            CompileError, DeviceError: As `iree_lnbwd.layer_norm_backward`.
        """
        uri = DeviceUri.parse(device)
        self._plan = Plan(self._validated(), uri)

    def execute(
        self, variant_pack: Mapping[Tensor, Any] | Mapping[int, Any] | Mapping[Tensor | int, Any]
    ) -> None:
        """Computes the outputs, into the caller's arrays.

        On a GPU it returns when the kernels are in a queue, or are done: as `iree_lnbwd.Norm`.

        Args:
            variant_pack: An array for each tensor that is neither virtual nor passed by value, by
                tensor or uid: NumPy's, PyTorch's, or of any library that supports DLPack, all of
                one library on a GPU. Each has its tensor's dimensions, strides and type. Outputs
                are written to, and share no memory with other arrays.

        Raises:
            TypeError, ValueError: Naming the tensor, what came and what was expected.
            RuntimeError: The graph was not built, or was changed afterwards.
            DeviceError: The GPU's driver refuses.
        """
        if self._plan is None:
            raise RuntimeError("graph: expected a graph that was built; call build() first")
        if not isinstance(variant_pack, Mapping):
            raise TypeError(
                f"variant_pack: expected a mapping of arrays, got {type(variant_pack).__name__}"
            )
        tensors = self._validated().tensors
        pack: dict[int, Any] = {}
        for key, array in variant_pack.items():
            if isinstance(key, Tensor):
                uid = tensors[self._place("variant_pack", key)].uid
                assert uid is not None
            else:
                uid = check_int(key, "variant_pack", least=LEAST_UID)
            if uid in pack:
                raise ValueError(f"variant_pack: expected each tensor once, got uid {uid} twice")
            pack[uid] = array
        self._plan.execute(pack)

    def to_json(self) -> str:
        """The graph as hipDNN's JSON, with all that was inferred.

        Raises:
            ValueError: As `validate`.
        """
        return graph_json.to_text(self._validated())

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """A graph from hipDNN's JSON: of the four norms, and nothing else.

        Raises:
            TypeError: It is no string.
            ValueError: Naming the field, what came and what was expected.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected a string, got {type(text).__name__}")
        attributes = graph_json.from_text(text)
        graph = cls()
        graph._header = replace(attributes, tensors=(), nodes=())
        graph._tensors = list(attributes.tensors)
        places = {tensor.uid: place for place, tensor in enumerate(attributes.tensors)}
        graph._nodes = [
            replace(
                node,
                inputs={port: places[uid] for port, uid in node.inputs.items()},
                outputs={port: places[uid] for port, uid in node.outputs.items()},
            )
            for node in attributes.nodes
        ]
        return graph

    def find(self, uid: int) -> Tensor:
        """The tensor with a uid, as after `from_json`.

        Raises:
            ValueError: There is none.
        """
        for place, tensor in enumerate(self._attributes.tensors):
            if tensor.uid == uid:
                return Tensor(self, place)
        raise ValueError(f"uid: expected that of a tensor, got {shown(uid)}")

    @property
    def _attributes(self) -> GraphAttributes:
        """What is known: valid, or as it was made."""
        if self._valid is not None:
            return self._valid
        return replace(self._header, tensors=tuple(self._tensors), nodes=tuple(self._nodes))

    def _validated(self) -> GraphAttributes:
        self.validate()
        assert self._valid is not None
        return self._valid

    def _numbered(self) -> GraphAttributes:
        """As it was made, with uids in place of places."""
        graph = with_uids(replace(self._header, tensors=tuple(self._tensors)))
        uids = list(graph.by_uid())
        return replace(
            graph,
            nodes=tuple(
                replace(
                    node,
                    inputs={port: uids[place] for port, place in node.inputs.items()},
                    outputs={port: uids[place] for port, place in node.outputs.items()},
                )
                for node in self._nodes
            ),
        )

    def _changed(self) -> None:
        self._valid = self._plan = None

    def _add(self, tensor: TensorAttributes) -> Tensor:
        self._changed()
        self._tensors.append(tensor)
        return Tensor(self, len(self._tensors) - 1)

    def _replace(self, place: int, tensor: TensorAttributes) -> None:
        self._changed()
        self._tensors[place] = tensor

    def _place(self, name: str, tensor: object) -> int:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor of this graph, got {shown(tensor)}")
        if tensor.graph is not self:
            raise ValueError(f"{name}: expected a tensor of this graph, got another graph's")
        return tensor.place

    def _layernorm(
        self, kind: NodeKind, x: Tensor, scale: Tensor, bias: Tensor, attributes: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        given = {"X": x, "SCALE": scale, "BIAS": bias}
        trains = attributes.forward_phase is NormFwdPhase.TRAINING
        ports = ("Y", "MEAN", "INV_VARIANCE") if trains else ("Y",)
        made = self._node(kind, given, attributes, ports)
        return made["Y"], made.get("MEAN"), made.get("INV_VARIANCE")

    def _layernorm_backward(
        self, kind: NodeKind, dy: Tensor, x: Tensor, scale: Tensor, attributes: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = {
            "DY": dy,
            "X": x,
            "SCALE": scale,
            "MEAN": attributes.mean,
            "INV_VARIANCE": attributes.inv_variance,
        }
        made = self._node(kind, given, attributes, ("DX", "DSCALE", "DBIAS"))
        return made["DX"], made["DSCALE"], made["DBIAS"]

    def _node(
        self,
        kind: NodeKind,
        given: Mapping[str, Tensor | None],
        attributes: Any,
        outputs: Sequence[str],
    ) -> dict[str, Tensor]:
        """Adds a node and its outputs, which are virtual."""
        inputs = {
            port: self._place(port.lower(), tensor)
            for port, tensor in given.items()
            if tensor is not None or kind.requires(port)
        }
        count = getattr(attributes, "normalized_dim_count", 0)
        check_int(count, "normalized_dim_count", least=LEAST_UID)
        phase = getattr(attributes, "forward_phase", None)
        if phase is not None and not isinstance(phase, NormFwdPhase):
            raise TypeError(f"forward_phase: expected a NormFwdPhase, got {shown(phase)}")
        name = _check_name(attributes.name) or f"{kind.method}_{len(self._nodes)}"
        epsilon = getattr(attributes, "epsilon", None)
        if epsilon is not None:
            if not isinstance(epsilon, Tensor):
                value = rounded(epsilon, DataType.DOUBLE, "epsilon")
                epsilon = self.tensor(value=value, name=f"{name}::EPSILON")
            inputs["EPSILON"] = self._place("epsilon", epsilon)
        made = {
            port: self._add(TensorAttributes(name=f"{name}::{port}", is_virtual=True))
            for port in outputs
        }
        places = {port: tensor.place for port, tensor in made.items()}
        self._nodes.append(Node(kind, name, inputs, places, count, phase))
        return made


def _check_attributes(attributes: object, kind: type) -> None:
    if not isinstance(attributes, kind):
        raise TypeError(f"attributes: expected {kind.__name__}, got {type(attributes).__name__}")


def _type_or_none(value: Any, name: str) -> DataType | None:
    return None if value is None else check_data_type(value, name)


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    return name


def _check_bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return value
