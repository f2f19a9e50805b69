"""The spec of one norm, forward or backward: its op, shape, types and options."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from iree_lnbwd.errors import counted, shown
from iree_lnbwd.ops.dtypes import DTYPES, unknown
from iree_lnbwd.ops.operands import (
    CELLS_NAMES,
    FROM_OUTPUT,
    GATED,
    GRAD_BIAS,
    GRAD_GATE,
    GRAD_INPUT,
    LAYER_NORM_BACKWARD,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    OPS,
    WITH_COPY,
    WITH_SUM,
    Access,
    Element,
    Gate,
    Kind,
    Op,
    Operand,
    When,
    with_own_output,
    without_copy,
)
from iree_lnbwd.ops.sets import Sets
from iree_lnbwd.ops.strides import Strides

MOST_DIMENSIONS = 64  # NumPy's, and PyTorch's
_BOOLS = (bool, np.bool_)
MOST_ROWS = 2**31 - 2**20  # kernels count rows in 32 bits, and some steps past the end
MOST_COLUMNS = 2**31 - 2**20
# Fields that came later. Modules without them keep their text, which has the other fields.
_LATER = (
    "output_dtype",
    "weight_sets",
    "gate",
    "gate_dtype",
    "strided_rows",
    "grad_input_copy_dtype",
    "grad_input_sum_dtype",
)
_WIDE, _NARROW = "f32", ("f16", "bf16")  # of a gradient of the input, and of its copy
# Backwards from the output divide by a weight of at least this magnitude, as apex's
# memory-efficient norms do by default.
LEAST_WEIGHT = 1e-5


@dataclass(frozen=True)
class TensorType:
    """One argument or result of a compiled module.

    Attributes:
        name: ATen's name of it.
        dtype: Element type, MLIR's name.
        shape: As the module sees it; None is the dynamic number of rows M, or of sets G. Rows that
            lie where a call says are in memory of one dimension.
        has_sets: Whether it is that of sets.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    has_sets: bool = False

    @property
    def is_strided(self) -> bool:
        """Whether its rows lie where a call says."""
        return self.name in CELLS_NAMES and len(self.shape) == 1

    def dims(
        self, rows: int, sets: Sets | None = None, strides: Strides | None = None
    ) -> tuple[int, ...]:
        """The shape for M rows, and for a call's sets and strides, where the spec has some."""
        if self.is_strided:
            assert strides is not None, self.name
            return (strides.extent(self.name, rows),)
        if self.has_sets:
            assert sets is not None, self.name
            rows = sets.number
        return tuple(rows if dim is None else dim for dim in self.shape)

    def __str__(self) -> str:
        """MLIR's spelling of the type, e.g. ``?x4096xbf16``."""
        return "x".join([*("?" if d is None else str(d) for d in self.shape), self.dtype])


@dataclass(frozen=True)
class NormSpec:
    """The computation of one compiled module. Two specs that mean the same are equal.

    The input is M rows (the product of the leading dimensions) of N columns (the product of
    ``normalized_shape``).

    Attributes:
        normalized_shape: The trailing dimensions that are normalized, each >= 1. An int is
            taken as a tuple of one.
        dtype: Element type of ``input``, and of ``grad_input`` or ``output``: "f32", "f16", "bf16"
            or "f64".
        grad_output_dtype: Of ``grad_output``; None means ``dtype``.
        weight_dtype: Of ``weight`` and ``grad_weight``; None means ``dtype``.
        bias_dtype: Of ``bias`` or ``grad_bias``; None means ``weight_dtype``.
        has_weight: False if the op has no weight: gamma is 1 and there is no ``grad_weight``.
        output_mask: Which gradients are computed: of (``grad_input``, ``grad_weight``,
            ``grad_bias``); an RMS norm has the last with a bias alone. () means all of them; a
            forward has none.
        rows: M, at least 1, if it is fixed; None leaves it dynamic.
        eps: The number that is added to the biased variance, or to the mean square, where a module
            computes statistics: 0, or one that is neither zero nor infinite in the type of sums. A
            forward has one. None in a backward whose statistics are
            arguments; a number if they are recomputed from ``input``.
        op: A name of ``operands.OPS``.
        has_bias: Whether there is a bias whose values count: one that a forward adds, or that is in
            the output which a backward takes. None means True for these two of layer norm, and
            False for all others. Of ``rms_norm_backward`` it also says whether there is a
            ``grad_bias``; without the output, it is False where the mask does not ask for that.
        residual_dtype: Of ``residual`` or ``grad_residual``; None if there is none.
        grad_outputs: How many gradients of the output a backward takes, from 1 to 4. They are added
            up one after the other; each sum is rounded to `dy_sum_dtype`.
        weight_offset: Added to the weight in the type of sums: 1.0 for Gemma's ``1 + weight``. 0.0
            without a weight.
        from_output: Whether a backward takes the forward's ``output`` in place of ``input``. Its
            ``rstd`` is an argument, and there is no ``mean``.
        output_dtype: Of a forward's ``output``; None means ``dtype``. A ``residual_output`` has the
            type of the residual.
        weight_sets: Whether weight and bias are G sets of N numbers, [G, N], and their gradients,
            too. A call says how rows take them: row r takes set ``(r // rows_per_set) % G``.
        gate: Where there is a ``gate`` z, of which ``silu(z)`` is a factor: "after" the norm,
            ``y = norm(x) * silu(z)``, or "before" it, ``y = norm(x * silu(z))``. None without one.
            A gated backward's ``output_mask`` ends with a bool for ``grad_gate``.
        gate_dtype: Of ``gate`` and ``grad_gate``; None means ``dtype``.
        strided_rows: Whether rows lie where a call says: each array of M rows has two strides of
            its own. False means that rows follow each other.
        grad_input_copy_dtype: Of ``grad_input_copy``, which is ``grad_input`` rounded: "f16" or
            "bf16", beside a ``grad_input`` of f32 that is asked for, without a gate. None if a
            backward stores no copy.
        grad_input_sum_dtype: Of ``grad_input_sum``, which is the sum of ``grad_input`` over rows,
            from before that is rounded. There is one beside a ``grad_input`` that is asked for,
            without a gate, sets of weights or a copy. None if a backward does not sum it.

    Raises:
        TypeError, ValueError: Naming the field, what came and what was expected.
    """

    normalized_shape: tuple[int, ...]
    dtype: str = "f32"
    grad_output_dtype: str | None = None
    weight_dtype: str | None = None
    bias_dtype: str | None = None
    has_weight: bool = True
    output_mask: tuple[bool, ...] = ()
    rows: int | None = None
    eps: float | None = None
    op: str = LAYER_NORM_BACKWARD.name
    has_bias: bool | None = None
    residual_dtype: str | None = None
    grad_outputs: int = 1
    weight_offset: float = 0.0
    from_output: bool = False
    output_dtype: str | None = None
    weight_sets: bool = False
    gate: str | None = None
    gate_dtype: str | None = None
    strided_rows: bool = False
    grad_input_copy_dtype: str | None = None
    grad_input_sum_dtype: str | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; this is its constructor
        if not isinstance(self.op, str) or self.op not in OPS:
            raise ValueError(f"op: expected one of {', '.join(OPS)}, got {shown(self.op)}")
        if not isinstance(self.from_output, bool):
            raise TypeError(f"from_output: expected a bool, got {shown(self.from_output)}")
        if self.from_output and self.op not in FROM_OUTPUT:
            raise ValueError(f"from_output: expected False for {self.op}, got True")
        self._check_gate()
        set_field(self, "normalized_shape", check_normalized_shape(self.normalized_shape))
        for field in (
            "dtype", "grad_output_dtype", "weight_dtype", "bias_dtype", "residual_dtype",
            "output_dtype",
            "gate_dtype",
            "grad_input_copy_dtype", "grad_input_sum_dtype",
        ):  # fmt: skip
            _check_dtype(field, getattr(self, field), required=field == "dtype")
        self._check_copy()
        self._check_sum()
        set_field(self, "grad_outputs", self._checked_gradients())
        if not isinstance(self.has_weight, bool):
            raise TypeError(f"has_weight: expected a bool, got {shown(self.has_weight)}")
        set_field(self, "has_bias", self._checked_bias())
        set_field(self, "output_mask", self._checked_mask())
        if self.has_bias and not self.family.reads_bias and not self._asks_grad_bias:
            asked = dict(zip(self.masked, self.output_mask, strict=True))
            set_field(self, "has_bias", False)
            set_field(self, "output_mask", tuple(asked[gradient] for gradient in self.masked))
        for field in ("grad_input_copy_dtype", "grad_input_sum_dtype"):
            if (dtype := getattr(self, field)) is not None and not self.has(GRAD_INPUT):
                raise ValueError(
                    f"{field}: expected None where output_mask does not ask for grad_input, got "
                    f"{dtype}"
                )
        self._expect_weight_for("weight_dtype", None)
        set_field(self, "weight_offset", check_number(self.weight_offset, "weight_offset"))
        self._expect_weight_for("weight_offset", 0.0)
        if not isinstance(self.weight_sets, bool):
            raise TypeError(f"weight_sets: expected a bool, got {shown(self.weight_sets)}")
        self._expect_weight_for("weight_sets", False)
        self._refuse_sum("None with sets of weights" if self.weight_sets else None)
        if not isinstance(self.strided_rows, bool):
            raise TypeError(f"strided_rows: expected a bool, got {shown(self.strided_rows)}")
        if abs(self.weight_offset) > (largest := DTYPES[self.acc_dtype].largest):
            raise ValueError(
                f"weight_offset: expected at most {largest} of {self.acc_dtype}, got "
                f"{self.weight_offset}"
            )
        if self.rows is not None:
            if not _is_int(self.rows) or not 1 <= self.rows <= MOST_ROWS:
                raise ValueError(
                    f"rows: expected None or an int from 1 to {MOST_ROWS}, got {shown(self.rows)}"
                )
            set_field(self, "rows", int(self.rows))
        if self.eps is not None:
            set_field(self, "eps", check_eps(self.eps, self.acc_dtype))
            if self.from_output:
                raise ValueError(
                    "eps: expected None with from_output, because statistics cannot be recomputed "
                    f"from an output, got {self.eps!r}"
                )
        elif not self.family.is_backward:
            raise ValueError(f"eps: expected a number for {self.op}, got None")
        # One spelling for specs that mean the same.
        if not (self.has_bias or self.has(GRAD_BIAS)):
            set_field(self, "bias_dtype", None)
        for field, default in (
            ("bias_dtype", self.weight_dtype or self.dtype),
            ("weight_dtype", self.dtype),
            ("grad_output_dtype", self.dtype),
            ("output_dtype", self.dtype),
            ("gate_dtype", self.dtype),
        ):
            if getattr(self, field) == default:
                set_field(self, field, None)
        field = "output_dtype" if OPS[self.op].is_backward else "grad_output_dtype"
        if (dtype := getattr(self, field)) is not None:
            raise ValueError(f"{field}: expected None for {self.op}, got {shown(dtype)}")
        for field, dtype in (
            ("grad_output_dtype", self.dy_dtype),
            ("weight_dtype", self.gamma_dtype),
            ("bias_dtype", self.beta_dtype),
            ("residual_dtype", self.element_type(Element.RESIDUAL)),
            ("output_dtype", self.element_type(Element.Y)),
            ("gate_dtype", self.element_type(Element.GATE)),
            ("grad_input_sum_dtype", self.element_type(Element.TOTAL)),
        ):
            check_mixture(field, dtype, self.dtype)

    def _check_gate(self) -> None:
        orders = [gate.value for gate in Gate]
        if self.gate is None:
            if self.gate_dtype is not None:
                raise ValueError(
                    f"gate_dtype: expected None without a gate, got {shown(self.gate_dtype)}"
                )
            return
        if not isinstance(self.gate, str) or self.gate not in orders:
            raise ValueError(
                f"gate: expected None or one of {', '.join(orders)}, got {shown(self.gate)}"
            )
        others = (("from_output", False), ("residual_dtype", None), ("grad_outputs", 1))
        for field, without in others:
            if (value := getattr(self, field)) != without:
                raise ValueError(f"{field}: expected {without} with a gate, got {shown(value)}")

    def _check_copy(self) -> None:
        dtype = self.grad_input_copy_dtype
        if dtype is None:
            return
        expected = without_copy(self._uncopied)
        if expected is None and self.dtype != _WIDE:
            expected = f"None beside an input of {shown(self.dtype)}"
        if expected is None and dtype not in _NARROW:
            expected = f"None, {' or '.join(_NARROW)}"
        if expected is None:
            return
        raise ValueError(f"grad_input_copy_dtype: expected {expected}, got {shown(dtype)}")

    def _check_sum(self) -> None:
        if self.grad_input_sum_dtype is None:
            return
        expected = without_copy(self._uncopied)
        if expected is None and self.grad_input_copy_dtype is not None:
            expected = "None beside grad_input_copy_dtype"
        self._refuse_sum(expected)

    def _refuse_sum(self, expected: str | None) -> None:
        if expected is not None and (dtype := self.grad_input_sum_dtype) is not None:
            raise ValueError(f"grad_input_sum_dtype: expected {expected}, got {shown(dtype)}")

    @property
    def _asks_grad_bias(self) -> bool:
        return self.family.asks_grad_bias(self.output_mask)

    def _checked_mask(self) -> tuple[bool, ...]:
        means_all = isinstance(self.output_mask, tuple) and not self.output_mask
        mask = check_output_mask(
            None if means_all else self.output_mask, self.family, has_bias=bool(self.has_bias)
        )
        asked = tuple(
            wanted and (self.has_weight or gradient.name != "grad_weight")
            for gradient, wanted in zip(self.masked, mask, strict=True)
        )
        if mask and not any(asked):
            raise ValueError(
                "output_mask: expected at least one gradient to compute, got none"
                + ("" if self.has_weight else " (without a weight there is no grad_weight)")
            )
        return asked

    def _checked_gradients(self) -> int:
        most = MOST_GRAD_OUTPUTS if self.family.is_backward else 1
        if not _is_int(self.grad_outputs) or not 1 <= self.grad_outputs <= most:
            expected = f"an int from 1 to {most}" if most > 1 else f"1 for {self.op}"
            raise ValueError(f"grad_outputs: expected {expected}, got {shown(self.grad_outputs)}")
        return int(self.grad_outputs)

    def _checked_bias(self) -> bool:
        if self.has_bias is None:
            return self.family.usual_bias
        if not isinstance(self.has_bias, bool):
            raise TypeError(f"has_bias: expected a bool or None, got {shown(self.has_bias)}")
        if self.has_bias and not self.family.takes_bias:
            raise ValueError(f"has_bias: expected False or None for {self.op}, got True")
        return self.has_bias

    def _expect_weight_for(self, field: str, without: object) -> None:
        """Expects a field to have the value that specs without a weight have, if this is one."""
        if not self.has_weight and (value := getattr(self, field)) != without:
            raise ValueError(f"{field}: expected {without} without a weight, got {shown(value)}")

    @property
    def masked(self) -> tuple[Operand, ...]:
        """The gradients that ``output_mask`` chooses among."""
        return self.family.gradients_with(has_bias=bool(self.has_bias))

    @property
    def family(self) -> Op:
        """The op and its operands."""
        op = self._uncopied
        if self.grad_input_copy_dtype is not None:
            op = WITH_COPY[op]
        if self.grad_input_sum_dtype is not None:
            op = WITH_SUM[op]
        return op if self.output_dtype is None else with_own_output(op)

    @property
    def _uncopied(self) -> Op:
        """The op without a copy or a sum of the input's gradient, and a type of the output's."""
        if self.gate is not None:
            return GATED[Gate(self.gate)][self.op]
        return (FROM_OUTPUT if self.from_output else OPS)[self.op]

    @property
    def columns(self) -> int:
        """N, the length of a normalized row."""
        return math.prod(self.normalized_shape)

    @property
    def dy_dtype(self) -> str:
        """Element type of ``grad_output``."""
        return self.grad_output_dtype or self.dtype

    @property
    def dy_sum_dtype(self) -> str:
        """Element type of sums of gradients of the output, which have that of the output.

        That is theirs, if the input has it, too; else that of sums.
        """
        return self.dtype if self.dy_dtype == self.dtype else self.acc_dtype

    @property
    def gamma_dtype(self) -> str:
        """Element type of ``weight``, or that of ``input`` where there is none."""
        return self.weight_dtype or self.dtype

    @property
    def beta_dtype(self) -> str:
        """Element type of ``bias`` or ``grad_bias``."""
        return self.bias_dtype or self.gamma_dtype

    @property
    def acc_dtype(self) -> str:
        """Element type of statistics and sums, which is f32, or f64 for f64 data."""
        return DTYPES[self.dtype].accumulator

    def element_type(self, element: Element) -> str:
        """MLIR's name of one of the spec's element types."""
        match element:
            case Element.DY:
                return self.dy_dtype
            case Element.X:
                return self.dtype
            case Element.Y:
                return self.output_dtype or self.dtype
            case Element.ACC:
                return self.acc_dtype
            case Element.GAMMA:
                return self.gamma_dtype
            case Element.BETA:
                return self.beta_dtype
            case Element.RESIDUAL:
                return self.residual_dtype or self.dtype
            case Element.GATE:
                return self.gate_dtype or self.dtype
            case Element.COPY:
                return self.grad_input_copy_dtype or self.dtype
            case Element.TOTAL:
                return self.grad_input_sum_dtype or self.dtype

    @property
    def wants_dx(self) -> bool:
        """Whether kernels compute the norm's gradient of its input.

        A gate before the norm has its own gradient from it.
        """
        return self.has(GRAD_INPUT) or (self.gate_first and self.has(GRAD_GATE))

    @property
    def gate_first(self) -> bool:
        """Whether a gate comes before the norm."""
        return self.gate == Gate.BEFORE.value

    @property
    def sums_columns(self) -> bool:
        """Whether a gradient is a sum over rows."""
        return any(r.kind is Kind.COLUMNS and self.has(r) for r in self.family.results)

    def has(self, operand: Operand) -> bool:
        """Whether a module for this spec takes the operand, or computes it."""
        own = self.family.find(operand.name)
        if own is None or own.access is Access.TYPE_ALONE:
            return False
        match own.when:
            case When.ALWAYS:
                return True
            case When.STATISTICS_GIVEN:
                return self.eps is None
            case When.WEIGHT_GIVEN:
                return self.has_weight
            case When.BIAS_GIVEN:
                return bool(self.has_bias)
            case When.RESIDUAL_GIVEN:
                return self.residual_dtype is not None
            case When.SO_MANY_GIVEN:
                return own in MORE_GRAD_OUTPUTS[: self.grad_outputs - 1]
            case When.ASKED_FOR:
                return self.output_mask[self.masked.index(own)]
            case When.ASKED_FOR_WITH_BIAS:
                return bool(self.has_bias) and self._asks_grad_bias
            case When.NEVER:
                return False

    def kind_of(self, operand: Operand) -> Kind:
        """What each element of an operand is for, in a module for this spec."""
        has_sets = self.weight_sets and operand.kind is Kind.COLUMNS
        return Kind.SETS if has_sets else operand.kind

    def is_strided(self, operand: Operand) -> bool:
        """Whether an operand's rows lie where a call says."""
        return self.strided_rows and operand.kind is Kind.CELLS

    @functools.cached_property
    def inputs(self) -> tuple[TensorType, ...]:
        """What a module reads, in order."""
        return self._tensors(self.family.inputs)

    @property
    def arguments(self) -> tuple[TensorType, ...]:
        """What a module takes, which is inputs and then the caller's storage for the results."""
        return (*self.inputs, *self.results)

    @functools.cached_property
    def results(self) -> tuple[TensorType, ...]:
        """What a module computes, in order; of gradients those that ``output_mask`` asks for."""
        return self._tensors(self.family.results)

    def _tensors(self, operands: tuple[Operand, ...]) -> tuple[TensorType, ...]:
        return tuple(
            TensorType(
                operand.name,
                self.element_type(operand.element),
                (None,)
                if self.is_strided(operand)
                else self.kind_of(operand).shape(self.rows, self.columns),
                self.kind_of(operand) is Kind.SETS,
            )
            for operand in operands
            if self.has(operand)
        )

    @property
    def name(self) -> str:
        """File name stem. Different specs have different names."""
        parts = [self.op, "n" + "x".join(map(str, self.normalized_shape)), self.dtype]
        if self.output_dtype:
            parts.append(f"y{self.output_dtype}")
        if self.grad_output_dtype:
            parts.append(f"dy{self.grad_output_dtype}")
        if self.weight_dtype:
            parts.append(f"w{self.weight_dtype}")
        if self.bias_dtype:
            parts.append(f"b{self.bias_dtype}")
        if not self.has_weight:
            parts.append("noweight")
        if self.weight_sets:
            parts.append("sets")
        if self.has_bias != self.family.usual_bias:
            parts.append("bias" if self.has_bias else "nobias")
        if self.from_output:
            parts.append("fromoutput")
        if self.residual_dtype is not None:
            parts.append(
                "residual" + ("" if self.residual_dtype == self.dtype else self.residual_dtype)
            )
        if self.grad_outputs > 1:
            parts.append(f"dys{self.grad_outputs}")
        if self.gate is not None:
            parts.append(f"gate{self.gate}{self.gate_dtype or ''}")
        if self.strided_rows:
            parts.append("strided")
        if self.grad_input_copy_dtype is not None:
            parts.append(f"copy{self.grad_input_copy_dtype}")
        if self.grad_input_sum_dtype is not None:
            parts.append(f"sum{self.grad_input_sum_dtype}")
        if self.weight_offset:
            parts.append(f"offset{self.weight_offset!r}")
        if self.output_mask != replace(self, output_mask=()).output_mask:
            parts.append("mask" + "".join(str(int(asked)) for asked in self.output_mask))
        if self.rows is not None:
            parts.append(f"m{self.rows}")
        if self.eps is not None:
            parts.append(f"eps{self.eps!r}")
        return "_".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, without those of ``_LATER`` that have their default."""
        values = asdict(self) | {
            "normalized_shape": list(self.normalized_shape),
            "output_mask": list(self.output_mask),
        }
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if name not in _LATER or value != defaults[name]
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NormSpec:
        """The inverse of `to_dict`.

        Raises:
            ValueError: A field is unknown, missing or has a bad value.
        """
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(
                f"spec: unknown fields {shown(sorted(unknown, key=str))}, expected {sorted(known)}"
            )
        if "normalized_shape" not in values:
            raise ValueError("spec: normalized_shape is missing")
        return cls(**values)


def check_mixture(name: str, dtype: str, of_input: str) -> None:
    """Expects element types that can be mixed: f64 only with itself.

    Raises:
        ValueError: Naming the argument.
    """
    accumulator = DTYPES[of_input].accumulator
    if DTYPES[dtype].accumulator != accumulator:
        expected = [other for other in DTYPES if DTYPES[other].accumulator == accumulator]
        raise ValueError(
            f"{name}: expected {' or '.join(expected)} beside an input or output of {of_input}, "
            f"got {dtype}"
        )


def check_normalized_shape(shape: object) -> tuple[int, ...]:
    """``normalized_shape`` as a tuple of ints >= 1; an int counts as a tuple of one."""
    dims: tuple[object, ...]
    if _is_int(shape):
        dims = (shape,)
    elif isinstance(shape, tuple | list):
        dims = tuple(shape)
    else:
        raise TypeError(
            f"normalized_shape: expected an int or a sequence of ints, got {type(shape).__name__}"
        )
    if len(dims) > MOST_DIMENSIONS:
        raise ValueError(
            f"normalized_shape: expected at most {MOST_DIMENSIONS} ints, got {len(dims)}"
        )
    checked = tuple(int(dim) for dim in dims if _is_int(dim) and int(dim) >= 1)  # type: ignore[call-overload]
    if math.prod(checked) > MOST_COLUMNS:
        raise ValueError(
            f"normalized_shape: expected at most {MOST_COLUMNS} columns, got {shown(shape)}"
        )
    if not dims or len(checked) != len(dims):
        raise ValueError(f"normalized_shape: expected one or more ints >= 1, got {shown(shape)}")
    return checked


def check_output_mask(mask: object, op: Op, *, has_bias: bool) -> tuple[bool, ...]:
    """``output_mask`` as a tuple of bools, one for each gradient; NumPy's bools are taken, too.

    Args:
        mask: What a caller gives; None means all.
        op: Has the gradients.
        has_bias: Whether there is a bias.
    """
    count = len(op.gradients_with(has_bias=has_bias))
    if mask is None:
        return (True,) * count
    if (
        not isinstance(mask, tuple | list)
        or len(mask) != count
        or not all(isinstance(asked, _BOOLS) for asked in mask)
    ):
        hint = "" if op.gradients == op.masked else "; grad_bias is one of them with a bias alone"
        raise ValueError(f"output_mask: expected {counted(count, 'bool')}, got {shown(mask)}{hint}")
    return tuple(map(bool, mask))


def check_number(value: object, name: str = "eps") -> float:
    """A finite float; NumPy's numbers are taken, too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number!r}")
    return number + 0.0  # -0.0 means 0.0


def check_eps(value: object, accumulator: str, name: str = "eps") -> float:
    """A number that statistics of a type can add: zero, or one that is not zero in this type."""
    number, kind = check_number(value, name), DTYPES[accumulator]
    if number and not kind.smallest_subnormal <= abs(number) <= kind.largest:
        raise ValueError(
            f"{name}: expected 0, or a number from {kind.smallest_subnormal:.3g} to "
            f"{kind.largest:.3g} in magnitude, for sums of {accumulator}, got {number!r}"
        )
    return number


def _is_int(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _check_dtype(field: str, value: object, *, required: bool) -> None:
    if value is None and not required:
        return
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"{field}: {unknown(value)}")
