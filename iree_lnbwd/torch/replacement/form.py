"""The norm that a module computes, as a value."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from iree_lnbwd.ops.operands import Gate, Op
from iree_lnbwd.torch import sharding, supported
from iree_lnbwd.torch.functions import layer_norm, output_dtype_now, rms_norm
from iree_lnbwd.torch.gated import gated_rms_norm
from iree_lnbwd.torch.operator_table import PYTORCHS_LAYER_NORM
from iree_lnbwd.torch.replacement import clamped


class OutputType(enum.Enum):
    """The element type of a norm's output."""

    INPUTS = "the input's"
    WEIGHTS = "the weight's"
    PROMOTED = "promote(input, weight)"

    def of(self, input: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """It, from the element types of the input and of the weight."""
        if weight is None or self is OutputType.INPUTS:
            return input
        return weight if self is OutputType.WEIGHTS else torch.promote_types(input, weight)


class Order(enum.Enum):
    """The order of a norm's output in memory."""

    ROWS = "the normalized dimensions lie innermost"
    INPUTS = "the input's, as `torch.preserve_format` has it"
    CONTIGUOUS = "the dimensions lie in their own order"

    def strides(self, input: Tensor, channels_first: bool) -> tuple[int, ...]:
        """Those of an output for an input."""
        if self is Order.INPUTS:
            output = torch.empty_like(input, device="meta")
        elif self is Order.ROWS and channels_first:
            output = torch.empty(input.movedim(1, -1).shape, device="meta").movedim(-1, 1)
        else:
            output = torch.empty(input.shape, device="meta")
        return tuple(output.stride())


class Autocast(enum.Enum):
    """What autocast changes about a norm."""

    NOTHING = "nothing"
    OPERATORS = "what it changes about our operators"
    WIDENS = "the norm of the widened input, in f32"
    CASTS = "the norm of the input and the parameters, all cast to autocast's element type"
    UNKNOWN = "nobody knows, so the own forward computes"


# The element types of an input, of what it is scaled by (None without that), and of a gate's if
# there is one.
Types: TypeAlias = "tuple[torch.dtype | None, ...]"


def _columns(dims: Sequence[int]) -> int:
    """N; one for rows without elements, of which nothing is computed."""
    return math.prod(dims) or 1


@dataclass(frozen=True)
class Form:
    """A norm of one tensor, and of a gate.

    Parameters, eps and dimensions are read from the module at each call.

    Attributes:
        op: What it computes.
        normalized_shape: The dimensions that were normalized when the form was found.
        eps: Added to the variance; None as in ``rms_norm``.
        eps_name: The module's attribute that holds it; None if it is written in the code.
        weight_name: The module's attribute that holds the weight; None if there is none.
        bias_name: As ``weight_name``.
        weight_offset: Added to the weight.
        channels_first: Whether dimension 1 is normalized, and not the last one.
        argument: The name of the input in the module's forward.
        output_type: Outside of autocast.
        on_gpus: What autocast changes there.
        on_cpus: What autocast changes there.
        shape_name: The module's attribute that holds the dimensions. None if they are those of the
            weight, or without one, as many of the input's last dimensions.
        order: Of the output in memory.
        fixed: The names of the module's other attributes that its forward reads. With other values
            it may be another norm.
        is_l2: Whether squares are added up, in place of their mean: eps is added to that sum.
        is_clamped: Whether eps is not added, but the least length (the root of the sum of squares)
            that a row has in the formula.
        is_flattened: Whether the weight and the bias have further dimensions of one element, as
            those of images do.
        any_width: Whether the input alone says how long rows are: a weight is one number, and
            ``normalized_shape`` is that of a sample.
        types: The element types that it holds for; others are the own forward's. None means all
            that our functions take.
        ranks: The numbers of dimensions of inputs that it holds for; others are the own forward's.
            None means any.
        output_dtype: As our functions take it; None means ``output_type``.
        gate: Where a gate comes in; None if there is none. With one, ``op`` is an RMS norm.
        gate_argument: The name of the gate in the module's forward.
        groups: A row is so many rows of the norm, beside each other, each with its own weights.
            More than one only with a gate.
        of_heads: Whether the weight, and the bias if there is one, have a set for each head: each
            of the input's last two or more dimensions is as they are, and all but the first of
            these are normalized.
        usual: The element types of inputs, with parameters of the same type, for which there is
            nothing to do but to call an operator; they follow from the others. A call costs the
            host less then, and a compiled model has fewer guards.
        has_own_forward: Whether the forward is this package's, which may lack a module for it, and
            not PyTorch's; it follows from the others.
        is_pytorchs: Whether it is the norm that ``nn.LayerNorm`` computes, of all inputs that our
            functions take; it follows from the others.
    """

    op: Op
    normalized_shape: tuple[int, ...]
    eps: float | None
    eps_name: str | None = None
    weight_name: str | None = None
    bias_name: str | None = None
    weight_offset: float = 0.0
    channels_first: bool = False
    argument: str = "input"
    output_type: OutputType = OutputType.INPUTS
    on_gpus: Autocast = Autocast.OPERATORS
    on_cpus: Autocast = Autocast.OPERATORS
    shape_name: str | None = None
    order: Order = Order.ROWS
    fixed: frozenset[str] = frozenset()
    is_l2: bool = False
    is_clamped: bool = False
    is_flattened: bool = False
    any_width: bool = False
    types: tuple[Types, ...] | None = None
    ranks: tuple[int, ...] | None = None
    output_dtype: torch.dtype | str | None = None
    gate: Gate | None = None
    gate_argument: str = "gate"
    groups: int = 1
    of_heads: bool = False
    usual: tuple[torch.dtype, ...] = field(init=False, repr=False, compare=False)
    has_own_forward: bool = field(init=False, repr=False, compare=False)
    is_pytorchs: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "usual", tuple(filter(self._is_usual, supported.DTYPES)))
        own = not self.op.centres or self.weight_offset != 0.0
        object.__setattr__(self, "has_own_forward", own)
        all_are_usual = len(self.usual) == len(supported.DTYPES)
        pytorchs = all_are_usual and not own and self.ranks is None and self.shape_name is not None
        object.__setattr__(self, "is_pytorchs", pytorchs)

    def __str__(self) -> str:
        parts = ["L2 norm" if self.is_l2 else "layer norm" if self.op.centres else "RMS norm"]
        if self.weight_name is None:
            parts.append("no weight")
        elif self.any_width:
            parts.append("one weight")
        if self.bias_name is not None and not self.op.atens_bias:
            parts.append("bias")
        if self.is_clamped:
            parts.append("clamped")
        if self.gate is not None:
            parts.append(f"gate {self.gate.value}")
        if self.groups > 1:
            parts.append(f"{self.groups} groups")
        if self.of_heads:
            parts.append(f"{self.normalized_shape[0]} heads")
        if self.weight_offset:
            parts.append(f"{self.weight_offset:g} + {self.weight_name}")
        if self.channels_first:
            parts.append("channels first")
        if self.output_type is not OutputType.INPUTS:
            parts.append(f"output type: {self.output_type.value}")
        if self.output_dtype is not None:
            parts.append(f"output_dtype={self.output_dtype}")
        return ", ".join(parts)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the tensors that the module's forward takes."""
        return (self.argument,) if self.gate is None else (self.argument, self.gate_argument)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """What has a mean of its own, of ``normalized_shape``."""
        return self.normalized_shape[1:] if self.of_heads else self.normalized_shape

    def parameters(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The weight and the bias of a module of this form."""
        weight = None if self.weight_name is None else getattr(module, self.weight_name)
        bias = None if self.bias_name is None else getattr(module, self.bias_name)
        return weight, bias

    def dims(self, module: nn.Module, shape: Sequence[int]) -> Sequence[int]:
        """The dimensions that a module of this form normalizes now, of an input of a shape."""
        if self.shape_name is not None:
            found = getattr(module, self.shape_name)
            return (found,) if isinstance(found, int) else found
        weight, bias = self.parameters(module)
        vector = bias if weight is None else weight
        if vector is not None and not self.any_width:
            shape = tuple(vector.shape)[1 if self.of_heads else 0 :]
            return (vector.numel(),) if self.is_flattened else shape
        if self.channels_first:
            return (shape[1],)
        return tuple(shape[-len(self.normalized_shape) :])

    def scaling(
        self, weight: Tensor | None, bias: Tensor | None, dims: Sequence[int], input: Tensor
    ) -> tuple[Tensor | None, Tensor | None, float]:
        """What our functions take for a weight, a bias and the weight's offset.

        Args:
            weight: The module's.
            bias: The module's.
            dims: The normalized dimensions.
            input: Of the norm.
        """
        if self.any_width or self.is_flattened:
            weight, bias = (
                None
                if vector is None
                else (vector.reshape(()).expand(dims) if self.any_width else vector.reshape(dims))
                for vector in (weight, bias)
            )
        if not self.is_l2:
            return weight, bias, self.weight_offset
        root = _columns(dims) ** -0.5
        if weight is None:
            return input.new_full(tuple(dims), root, dtype=supported.wide(input.dtype)), bias, 0.0
        return (weight.to(supported.wide(input.dtype)) + self.weight_offset) * root, bias, 0.0

    def eps_of(self, module: nn.Module, dims: Sequence[int]) -> Any:
        """What is added to the mean of the squares; if clamped, the least that it may be."""
        eps: Any = self.eps if self.eps_name is None else getattr(module, self.eps_name)
        if self.is_clamped:
            return eps**2 / _columns(dims)
        return eps / _columns(dims) if self.is_l2 else eps

    def _can_clamp(self, module: nn.Module, input: Tensor) -> bool:
        if not clamped.takes(input):
            return False
        return clamped.is_possible(self.eps_of(module, self.dims(module, input.shape)))

    def holds_for(
        self,
        module: nn.Module,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
    ) -> bool:
        """Whether this form was found with such inputs and parameters."""
        if self.ranks is not None and input.dim() not in self.ranks:
            return False
        if not all(self._has_its_rank(module, vector) for vector in (weight, bias)):
            return False
        # Operators of sets have no rules for DTensors.
        if (self.of_heads or self.groups > 1) and any(
            map(sharding.is_dtensor, (input, weight, bias, gate))
        ):
            return False
        if self.of_heads and not self._has_heads(input, weight, bias):
            return False
        if gate is not None and (
            gate.shape != input.shape
            or gate.device != input.device
            or gate.is_nested
            or weight is None
            # The class may have groups of some length, or so many.
            or tuple(weight.shape) != self.normalized_shape
        ):
            return False
        if self.types is None:
            return True
        vector = bias if weight is None else weight
        if bias is not None and vector is not None and bias.dtype != vector.dtype:
            return False
        of_vector = None if vector is None else vector.dtype
        of_gate = () if gate is None else (gate.dtype,)
        return (input.dtype, of_vector, *of_gate) in self.types

    def _has_its_rank(self, module: nn.Module, vector: Tensor | None) -> bool:
        """Whether a parameter has as many dimensions as the normalized ones: more may be sets."""
        if vector is None or self.any_width or self.is_flattened:
            return True
        dims: Any = self.normalized_shape
        if self.shape_name is not None:
            dims = getattr(module, self.shape_name)
        rank: int = 1 if isinstance(dims, int) else len(dims)
        return bool(vector.dim() == rank)

    def _has_heads(self, input: Tensor, *vectors: Tensor | None) -> bool:
        """Whether an input ends in a parameter's dimensions, in their order in memory, too.

        A class may broadcast what has one head, and its output may lie as the parameters do.
        """
        dims = len(self.normalized_shape)
        given = [vector.shape for vector in vectors if vector is not None]
        if any(shape != input.shape[-dims:] for shape in given):
            return False
        strides = input.stride()[-dims:]
        return all(outer >= inner for outer, inner in itertools.pairwise(strides))

    def _is_usual(self, dtype: torch.dtype) -> bool:
        of_vector = None if self.weight_name is None and self.bias_name is None else dtype
        return (
            self._is_a_call
            and self.output_dtype is None
            and self.gate is None
            and not self.of_heads
            and (self.shape_name is not None or self.weight_name is not None)
            and (self.types is None or (dtype, of_vector) in self.types)
            and self.on_cpus is self.on_gpus is Autocast.OPERATORS
        )

    def at_once(self, module: nn.Module, input: Tensor) -> Tensor | None:
        """The output of a usual call; None where there is more to decide.

        What is written out here, and not called, takes a step as long as a norm of few rows does.
        """
        if type(input) is not Tensor:
            return None
        output: Tensor | None
        if self.is_pytorchs and not is_dynamo_compiling():
            own = module.__dict__  # what is not there, is looked for below
            there, weight_name, bias_name = own["_parameters"], self.weight_name, self.bias_name
            weight, bias = there.get(weight_name), there.get(bias_name)  # None has none
            dims = own.get(self.shape_name)
            if (
                type(dims) is tuple
                and len(dims) == 1
                and not (weight is None and weight_name)
                and not (bias is None and bias_name)
            ):
                given = self.eps if self.eps_name is None else own.get(self.eps_name)
                output = PYTORCHS_LAYER_NORM.plain_output(input, weight, bias, dims[0], given)
                if output is not None:
                    return output
        dtype = input.dtype
        if (
            dtype not in self.usual
            or not (input.is_cpu or input.is_cuda)
            or input.layout is not torch.strided
            or input.is_nested
            or (self.ranks is not None and input.dim() not in self.ranks)
        ):
            return None
        is_compiling = is_dynamo_compiling()
        if is_compiling:
            weight, bias = self.parameters(module)
        elif torch._C._get_tracing_state():  # as nn.Module asks for it
            return None
        else:  # what is a parameter is found at once so
            there, weight_name, bias_name = module._parameters, self.weight_name, self.bias_name
            weight, bias = there.get(weight_name), there.get(bias_name)  # None has none
            if (weight is None and weight_name) or (bias is None and bias_name):
                weight, bias = self.parameters(module)
        rank: int | None
        if self.shape_name is not None:
            dims = getattr(module, self.shape_name)
            rank = len(dims) if type(dims) is tuple else None
        else:
            dims = None if weight is None else weight.shape
            rank = len(self.normalized_shape)
        if dims is None or (weight is None and self.weight_name is not None):
            return None
        if weight is not None and (weight.dtype is not dtype or weight.dim() != rank):
            return None
        if bias is not None and (bias.dtype is not dtype or bias.dim() != rank):
            return None
        eps: Any = self.eps if self.eps_name is None else getattr(module, self.eps_name)
        if rank == 1 and not is_compiling and not self.has_own_forward:
            output = PYTORCHS_LAYER_NORM.output_alone(input, weight, bias, dims[0], eps)
            return output
        ours = torch.ops.iree_lnbwd
        options: tuple[Any, ...] = ()
        if not self.has_own_forward:
            operator = ours.layer_norm.default
        else:
            operator = ours.own_layer_norm.default if self.op.centres else ours.rms_norm.default
            options = (self.weight_offset, False, None)
        call = operator if is_compiling else operator._op
        output = call(input, weight, bias, dims, eps, *options)[0]
        return output

    def __call__(
        self, module: nn.Module, input: Tensor, gate: Tensor | None = None
    ) -> Tensor | None:
        """The output of a module of this form, by this package's functions.

        A layer norm without an offset has PyTorch's forward, and so its bits. An RMS norm is
        rounded once, after the weight and the bias.

        Returns:
            None where the functions do not take the input, with the parameters that the module has.
        """
        if self.usual and gate is None and (found := self.at_once(module, input)) is not None:
            return found
        weight, bias = self.parameters(module)
        # PyTorch's own norms take None as ones; a class that had a weight may do anything then.
        if (
            weight is None
            and self.weight_name is not None
            and (self.shape_name is None or self.weight_offset)
        ):
            return None
        if self.gate is not None and not isinstance(gate, Tensor):
            return None  # without its gate, a class may do anything
        if not isinstance(input, Tensor) or not supported.are_taken(input, weight, bias, gate):
            return None
        if not self.holds_for(module, input, weight, bias, gate):
            return None
        if self.is_clamped and not self._can_clamp(module, input):
            return None
        own = output_dtype_now(self.output_dtype, input)
        if own is not None and supported.wide(own) != supported.wide(input.dtype):
            return None
        device = input.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._computed(module, input, weight, bias, gate, own)
        rule = self.on_cpus if device == "cpu" else self.on_gpus
        if rule is Autocast.OPERATORS:
            return self._computed(module, input, weight, bias, gate, own)
        if rule is Autocast.UNKNOWN:
            return None
        if rule is Autocast.WIDENS:
            input = input.float()
        if rule is Autocast.CASTS:
            dtype = torch.get_autocast_dtype(device)
            if dtype not in supported.DTYPES:
                return None
            input = input.to(dtype)
            weight = None if weight is None else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return self._computed(module, input, weight, bias, gate, own)

    def of_own_forward(self, output: Tensor, input: object) -> Tensor:
        """An output of the module's own forward, in the type that is said."""
        if self.output_dtype is None or not isinstance(input, Tensor):
            return output
        own = output_dtype_now(self.output_dtype, input)
        return output if own is None else output.to(own)

    def _computed(
        self,
        module: nn.Module,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        own: torch.dtype | None,
    ) -> Tensor:
        """The output, in a type of its own if that is not None."""
        dims = self.dims(module, input.shape)
        eps = self.eps_of(module, dims)
        if gate is None and self._is_a_call:
            return self._called(input, dims, weight, bias, self.weight_offset, eps, own)
        wanted = self.output_type.of(input.dtype, None if weight is None else weight.dtype)
        weight, bias, offset = self.scaling(weight, bias, dims, input)
        rows = input
        if self.output_type is not OutputType.INPUTS:
            rows = rows.to(torch.promote_types(input.dtype, wanted))
        if self.channels_first:
            rows = rows.movedim(1, -1)
        if self.is_clamped:
            output = clamped.rms_norm(rows, dims, weight, offset, eps)
        elif gate is not None:
            output = self._gated(rows, gate, weight, offset, eps)
        else:
            output = self._called(rows, dims, weight, bias, offset, eps, own)
        if self.channels_first:
            output = output.movedim(-1, 1)
        if own is not None or self.output_type is not OutputType.INPUTS:
            output = output.to(own or wanted)
        return output if self.order is Order.ROWS else self._in_order(output, input)

    @property
    def _is_a_call(self) -> bool:
        """Whether a function of ours computes it, with nothing before it or behind."""
        return not (
            self.is_l2
            or self.is_clamped
            or self.is_flattened
            or self.any_width
            or self.channels_first
            or self.output_type is not OutputType.INPUTS
            or self.order is not Order.ROWS
        )

    def _called(
        self,
        rows: Tensor,
        dims: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        offset: float,
        eps: Any,
        own: torch.dtype | None,
    ) -> Tensor:
        options: dict[str, Any] = {"weight_offset": offset, "output_dtype": own}
        if self.op.centres:
            return layer_norm(rows, dims, weight, bias, eps, **options)
        return rms_norm(rows, dims, weight, eps, bias=bias, **options)

    def _gated(
        self, rows: Tensor, gate: Tensor, weight: Tensor | None, offset: float, eps: Any
    ) -> Tensor:
        options: dict[str, Any] = {"gate_first": self.gate is Gate.BEFORE, "weight_offset": offset}
        assert weight is not None
        if self.groups == 1:
            return gated_rms_norm(rows, gate, weight.shape, weight, eps, **options)
        rows, gate = (self.grouped(each) for each in (rows, gate))
        return gated_rms_norm(
            rows, gate, rows.shape[-1:], self.grouped(weight), eps, **options
        ).flatten(-2)

    def grouped(self, rows: Tensor) -> Tensor:
        """Rows, or a weight, with a dimension more: that of the groups."""
        return rows.unflatten(-1, (self.groups, -1))

    def _in_order(self, output: Tensor, input: Tensor) -> Tensor:
        """An output in the order in memory that the module's own forward has it in."""
        if self.order is Order.CONTIGUOUS:
            return output.contiguous()
        if input.is_nested or (input.is_contiguous() and not self.channels_first):
            return output
        like = torch.empty_like(input, dtype=output.dtype)
        return output if output.stride() == like.stride() else like.copy_(output)
