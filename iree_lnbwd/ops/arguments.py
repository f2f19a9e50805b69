"""An op's arguments, checked and brought into the form that a module takes, and its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from iree_lnbwd.errors import shown
from iree_lnbwd.ops import dtypes
from iree_lnbwd.ops.operands import (
    BIAS,
    FROM_OUTPUT,
    GATE,
    GATED,
    GIVEN_OUTPUT,
    GRAD_INPUT_COPY,
    GRAD_INPUT_SUM,
    GRAD_OUTPUT,
    GRAD_RESIDUAL,
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    MORE_GRAD_OUTPUTS,
    MOST_GRAD_OUTPUTS,
    OPS,
    RESIDUAL,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    VARIANTS,
    WITH_COPY,
    WITH_SUM,
    Access,
    Gate,
    Kind,
    Op,
    Operand,
    When,
    names,
    without_copy,
)
from iree_lnbwd.ops.sets import Sets, check_rows_per_set
from iree_lnbwd.ops.spec import (
    MOST_ROWS,
    NormSpec,
    check_mixture,
    check_normalized_shape,
    check_number,
    check_output_mask,
)
from iree_lnbwd.ops.strides import Strides

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GpuArray:
    """The facts known about an array in a GPU's memory, of any library.

    Attributes:
        shape: Its dimensions.
        dtype: NumPy's name of the element type; another library's where NumPy has none.
        device: IREE device URI, e.g. "cuda://0".
        contiguous: Whether its values follow each other in its memory, the last dimension fastest.
            If not, a call uses its strides, or works on a copy.
        writable: Whether its library lets others write to it.
        strides: Of its dimensions, in elements; None where they are not known, or count for
            nothing.
    """

    shape: tuple[int, ...]
    dtype: Any
    device: str
    contiguous: bool
    writable: bool = True
    strides: tuple[int, ...] | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def reshape(self, shape: tuple[int, ...]) -> GpuArray:
        """The same memory as an array of another shape."""
        return replace(self, shape=shape)


AnyArray = npt.NDArray[Any] | GpuArray

DEFAULT_EPS = 1e-5  # PyTorch's, of layer normalization

_ARRAY_TYPES = (np.ndarray, GpuArray)


class LayerNormGrads(NamedTuple):
    """The gradients, as ATen orders them; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: The shape of ``normalized_shape``; the element type of ``bias``, else of
            ``weight``, else of ``input``.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any


class RMSNormGrads(NamedTuple):
    """The gradients, as ATen orders them; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: The shape and element type of ``bias``; None without a bias.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any = None


class GatedNormGrads(NamedTuple):
    """The gradients of a gated norm; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: As that of the norm without a gate.
        grad_gate: The shape and element type of ``gate``.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any
    grad_gate: Any


class NormGradsWithCopy(NamedTuple):
    """The gradients of a norm, that of the input twice; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: As that of the norm without a copy.
        grad_input_copy: ``grad_input``, rounded to ``grad_input_copy_dtype``.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any
    grad_input_copy: Any


class NormGradsWithSum(NamedTuple):
    """The gradients of a norm, and a sum; None where one was not asked for.

    Attributes:
        grad_input: The shape and element type of ``input``.
        grad_weight: The shape and element type of ``weight``; None without a weight.
        grad_bias: As that of the norm without a sum.
        grad_input_sum: The sum of ``grad_input`` over rows, from before that is rounded: the shape
            of ``normalized_shape``, and ``grad_input_sum_dtype``.
    """

    grad_input: Any
    grad_weight: Any
    grad_bias: Any
    grad_input_sum: Any


class NormOutput(NamedTuple):
    """What a forward computes.

    Attributes:
        output: The shape of ``input``, and its element type unless ``output_dtype`` says another.
        mean: Of each row, [..., 1, ...] with a 1 for each normalized dimension; f32, or f64 for
            f64 data. None of ``rms_norm``.
        rstd: As ``mean``: 1 / sqrt(variance + eps), or 1 / sqrt(mean of squares + eps).
        residual_output: ``input + residual``, rounded to the element type of ``residual``: what is
            normalized. None without a residual.
    """

    output: Any
    mean: Any
    rstd: Any
    residual_output: Any


GradsWithMore = GatedNormGrads | NormGradsWithCopy | NormGradsWithSum
Results = LayerNormGrads | RMSNormGrads | GradsWithMore | NormOutput

_MORE = names(MORE_GRAD_OUTPUTS)

_RESULTS: Mapping[str, type[Results]] = {
    LAYER_NORM.name: NormOutput,
    RMS_NORM.name: NormOutput,
    LAYER_NORM_BACKWARD.name: LayerNormGrads,
    RMS_NORM_BACKWARD.name: RMSNormGrads,
}


def results_type(op: Op) -> type[Results]:
    """The tuple that calls of an op return."""
    if GRAD_INPUT_COPY in op.results:
        return NormGradsWithCopy
    if GRAD_INPUT_SUM in op.results:
        return NormGradsWithSum
    return GatedNormGrads if op.gate is not None and op.is_backward else _RESULTS[op.name]


def results_of(op: Op, computed: Mapping[str, Any]) -> Results:
    """The results of a call, from those that were computed, by ATen's names."""
    of = results_type(op)
    return of(*map(computed.get, of._fields))


def rms_eps(dtype: str) -> float:
    """PyTorch's eps of ``rms_norm`` if none is given: the machine epsilon of the type of sums."""
    accumulator = dtypes.DTYPES[dtypes.DTYPES[dtype].accumulator]
    return 2 * accumulator.unit_roundoff


def named_gradients(grad_output: Any) -> dict[str, Any]:
    """As `gradients_of`, by ATen's name and ours for the others."""
    return dict(zip((GRAD_OUTPUT.name, *_MORE), gradients_of(grad_output), strict=True))


def gradients_of(grad_output: Any) -> tuple[Any, ...]:
    """The gradients of an output, from an array or a sequence of them, and None for the others.

    Raises:
        ValueError: It is a sequence of another length than 1 to `MOST_GRAD_OUTPUTS`.
    """
    if not isinstance(grad_output, list | tuple):
        return (grad_output, *(None for _ in _MORE))
    if not 1 <= len(grad_output) <= MOST_GRAD_OUTPUTS:
        raise ValueError(
            f"grad_output: expected an array, or from 1 to {MOST_GRAD_OUTPUTS} of them, got "
            f"{len(grad_output)}"
        )
    return (*grad_output, *(None for _ in _MORE[len(grad_output) - 1 :]))


class Options(NamedTuple):
    """The options of a call besides its arrays, checked.

    Attributes:
        op: The op.
        normalized_shape: Each dimension >= 1.
        output_mask: Which gradients to compute.
        weight_offset: Added to the weight; finite.
        eps: Added to the variance if statistics are computed; finite. None means that of PyTorch's
            ``rms_norm``: the machine epsilon of the type of sums.
        output_dtype: MLIR's name of the output's element type; None means ``input``'s.
        rows_per_set: Neighbouring rows that take one set of a weight's; at least 1. None where
            no weight may have sets.
        grad_input_copy_dtype: MLIR's name of the element type of ``grad_input_copy``; None of an
            op that has none.
        grad_input_sum_dtype: Likewise, of ``grad_input_sum``.
    """

    op: Op
    normalized_shape: tuple[int, ...]
    output_mask: tuple[bool, ...]
    weight_offset: float
    eps: float | None
    output_dtype: str | None = None
    rows_per_set: int | None = None
    grad_input_copy_dtype: str | None = None
    grad_input_sum_dtype: str | None = None

    @property
    def result_dtype(self) -> str | None:
        """Of the result that has an element type of its own; no op has several."""
        return self.output_dtype or self.grad_input_copy_dtype or self.grad_input_sum_dtype


def check_options(
    op: Op,
    normalized_shape: object,
    output_mask: object = (),
    eps: object = None,
    weight_offset: object = 0.0,
    *,
    has_bias: bool = False,
    output_dtype: object = None,
    rows_per_set: object = None,
    grad_input_copy_dtype: object = None,
    grad_input_sum_dtype: object = None,
) -> Options:
    """The options of a call in one spelling.

    Args:
        op: The op.
        normalized_shape: As a caller gives it.
        output_mask: As a caller gives it; None means all gradients.
        eps: As a caller gives it.
        weight_offset: As a caller gives it.
        has_bias: Whether the caller gives a bias.
        output_dtype: As a caller gives it, of a forward.
        rows_per_set: As a caller gives it; None where no weight may have sets.
        grad_input_copy_dtype: As a caller gives it, of a backward; the op gets this result.
        grad_input_sum_dtype: Likewise.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    plain = op
    copied, summed = (
        None if given is None else _second(plain, given, name)
        for name, given in (
            ("grad_input_copy_dtype", grad_input_copy_dtype),
            ("grad_input_sum_dtype", grad_input_sum_dtype),
        )
    )
    if copied is not None and summed is not None:
        raise ValueError(
            f"grad_input_sum_dtype: expected None beside grad_input_copy_dtype, got {summed}"
        )
    if copied is not None or summed is not None:
        op = (WITH_SUM if copied is None else WITH_COPY)[plain]
    return Options(
        op,
        check_normalized_shape(normalized_shape),
        check_output_mask(output_mask, op, has_bias=has_bias),
        check_number(weight_offset, "weight_offset"),
        None if eps is None and not op.centres else check_number(eps),
        None if output_dtype is None else dtypes.check(output_dtype, "output_dtype"),
        None if rows_per_set is None else check_rows_per_set(rows_per_set),
        copied,
        summed,
    )


def _second(op: Op, dtype: object, name: str) -> str:
    """The element type of what is made of a gradient of the input besides."""
    found = dtypes.check(dtype, name)
    if (expected := without_copy(op)) is not None:
        raise ValueError(f"{name}: expected {expected}, got {found}")
    return found


class BoundCall(NamedTuple):
    """One call: what to compute, and the arrays to compute it from.

    Attributes:
        spec: With dynamic rows. None where the mask leaves nothing to compute.
        shape: Of ``input`` or ``output``; M rows and N columns in all.
        arrays: The arrays that are read, by ATen's name, C-contiguous, as [M, N], [M], [N], or
            [G, N] of a weight with sets; all of them NumPy's, or all of them `GpuArray`. Of a call
            with strides, those of M rows are the memory from the first element to the last.
        has_bias: Whether the caller gave one, so that ``grad_bias`` has its element type.
        sets: Those of the weight; None if it has none.
        strides: Where rows are; None if they follow each other.
    """

    spec: NormSpec | None
    shape: tuple[int, ...]
    arrays: Mapping[str, Any]
    has_bias: bool
    sets: Sets | None = None
    strides: Strides | None = None

    @property
    def rows(self) -> int:
        """M, of arrays as they were given, too."""
        if self.spec is not None:
            return math.prod(self.shape) // self.spec.columns
        return int(next(iter(self.arrays.values())).shape[0])  # every op's first has M rows

    def shape_of(self, result: Operand) -> tuple[int, ...]:
        """Of a result, as the caller sees it."""
        assert self.spec is not None
        dims = self.spec.normalized_shape
        match result.kind:
            case Kind.CELLS:
                return self.shape
            case Kind.ROWS:
                return (*self.shape[: len(self.shape) - len(dims)], *(1,) * len(dims))
        return dims if self.sets is None else (self.sets.number, *dims)


def bind(
    op: str,
    given: Mapping[str, AnyArray | None],
    normalized_shape: int | Sequence[int],
    output_mask: Sequence[bool] | None = None,
    *,
    eps: float | None = DEFAULT_EPS,
    weight_offset: float = 0.0,
    output_dtype: str | None = None,
    rows_per_set: int | None = None,
    gate_first: bool = False,
    grad_input_copy_dtype: str | None = None,
    grad_input_sum_dtype: str | None = None,
) -> BoundCall:
    """Checks the arguments of an op against each other.

    Args:
        op: The name of the op.
        given: The arrays, by ATen's names; those that are not there count as None.
        normalized_shape: The trailing dimensions.
        output_mask: Which gradients to compute; None means all that the op has.
        eps: Added to the variance, where statistics are computed.
        weight_offset: Added to the weight.
        output_dtype: Of a forward's output; None means that of ``input``.
        rows_per_set: Neighbouring rows that take one set of a weight's; None where it has none.
        gate_first: Whether a gate comes before the norm.
        grad_input_copy_dtype: Of a copy of the input's gradient; None means none.
        grad_input_sum_dtype: Of its sum over rows; likewise.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    family, has_bias = variant_of(OPS[op], given, gate_first), given.get(BIAS.name) is not None
    options = check_options(
        *(family, normalized_shape, output_mask, eps, weight_offset),
        has_bias=has_bias,
        output_dtype=output_dtype,
        rows_per_set=rows_per_set,
        grad_input_copy_dtype=grad_input_copy_dtype,
        grad_input_sum_dtype=grad_input_sum_dtype,
    )
    return densely(bind_arrays(given, options))


def variant_of(op: Op, given: Mapping[str, object], gate_first: object = False) -> Op:
    """As `variant` or `gated`, from the arguments by name."""
    if given.get(GATE.name) is not None or gate_first is not False:
        return gated(op, given, gate_first)
    return variant(op, *(given.get(name) for name in ("input", "output", "mean", "rstd")))


def gated(op: Op, given: Mapping[str, object], gate_first: object) -> Op:
    """The op with a gate.

    Args:
        op: One of `OPS`.
        given: The arguments by name.
        gate_first: Whether the gate comes before the norm.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    if not isinstance(gate_first, bool):
        raise TypeError(f"gate_first: expected a bool, got {shown(gate_first)}")
    if given.get(GATE.name) is None:
        raise ValueError("gate_first: expected False without a gate, got True")
    for name in (RESIDUAL.name, GRAD_RESIDUAL.name, GIVEN_OUTPUT.name, _MORE[0]):
        if given.get(name) is not None:
            named = "grad_output: expected one array" if name in _MORE else f"{name}: expected None"
            raise ValueError(f"{named} beside gate, got {'more' if name in _MORE else 'one'}")
    return GATED[Gate.BEFORE if gate_first else Gate.AFTER][op.name]


def variant(op: Op, input: object, output: object, mean: object, rstd: object) -> Op:
    """The op as it stands, or from the output, by which of the two a caller gives.

    Args:
        op: One of `OPS`.
        input: The array that a caller gives, or None.
        output: Likewise; a backward takes one of the two.
        mean: Likewise.
        rstd: Likewise; given beside an output.

    Raises:
        TypeError, ValueError: Naming the argument, what came and what was expected.
    """
    if not op.is_backward:
        return op
    if input is None and output is None:
        raise TypeError("input: expected an array, or output in its place, got None")
    if input is not None and output is not None:
        raise ValueError("output: expected None beside input, got both")
    if output is None:
        return op
    if mean is not None:
        raise ValueError("mean: expected None beside output, which has no use for it, got one")
    if rstd is None:
        raise ValueError(
            "rstd: expected an array beside output, from which it cannot be recomputed, got None"
        )
    return FROM_OUTPUT[op.name]


def densely(call: BoundCall) -> BoundCall:
    """A call of arrays as they were given, with its arrays as modules without strides take them."""
    if call.spec is None:
        return call
    named, shapes = call.spec.family.named, flat_shapes(call)
    return call._replace(
        arrays={
            name: as_dense(array, shapes[named(name).kind]) for name, array in call.arrays.items()
        }
    )


def flat_shapes(call: BoundCall) -> dict[Kind, tuple[int, ...]]:
    """The shapes of arrays as modules take them, of a call that computes something."""
    assert call.spec is not None
    rows, columns = call.rows, call.spec.columns
    return {
        Kind.CELLS: (rows, columns),
        Kind.ROWS: (rows,),
        Kind.COLUMNS: (columns,) if call.sets is None else (call.sets.number, columns),
    }


def as_dense(array: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """An array whose elements follow each other; a GPU's is copied later."""
    dense = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array
    return dense.reshape(shape)


def bind_arrays(given: Mapping[str, AnyArray | None], options: Options) -> BoundCall:
    """As `bind`, with the options checked before, and with the arrays as they were given."""
    op, dims, mask, offset, eps, output_dtype, rows_per_set, copied, summed = options
    data = op.data.name
    x = _array(data, given.get(data))
    if x.shape[max(0, x.ndim - len(dims)) :] != dims:
        raise ValueError(
            f"{data}: expected a shape that ends in normalized_shape {dims}, got {x.shape}"
        )
    leading = x.shape[: x.ndim - len(dims)]
    rows = math.prod(leading)
    if rows > MOST_ROWS:
        raise ValueError(f"{data}: expected at most {MOST_ROWS} rows, got {rows}")
    dtype = _dtype(data, x)
    accumulator = dtypes.DTYPES[dtype].accumulator
    _check_statistics(op, given)
    sets = _sets(given.get("weight"), dims, rows_per_set)
    columns_shape = dims if sets is None else (sets.number, *dims)

    asks_grad_bias = op.asks_grad_bias(mask)
    shapes = ((x.shape,), (leading, (*leading, *(1,) * len(dims))), (columns_shape,))
    arrays: dict[str, AnyArray] = {}
    types: dict[str, str | None] = {}
    mixed: list[tuple[str, str]] = []
    for name, kind, is_required, is_read, is_statistic in _CHECKS[op.name, op.from_output, op.gate]:
        array = given.get(name)
        if array is None and not is_required:
            types[name] = None
            continue
        array = _array(name, array)
        if array.shape not in shapes[kind]:
            expected = " or ".join(map(str, shapes[kind]))
            about_sets = sets is not None or array.ndim > len(dims)
            if about_sets and kind == _COLUMNS and name != "weight":
                expected += ", that of weight" if types["weight"] else " without a weight"
            raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
        types[name] = found = _dtype(name, array)
        if is_statistic:
            if found != accumulator:
                raise TypeError(f"{name}: expected element type {accumulator}, got {array.dtype}")
        elif found != dtype and (is_read or asks_grad_bias):
            mixed.append((name, found))
        if is_read:
            arrays[name] = array
    _check_gradients(op, given, types)
    _check_place(data, given)
    if output_dtype is not None:
        mixed.append(("output_dtype", output_dtype))
    for name, found in mixed:
        check_mixture(name, found, dtype)
    has_weight = given.get("weight") is not None
    if offset and not has_weight:
        raise ValueError(f"weight_offset: expected 0.0 without a weight, got {offset}")
    has_bias = types["bias"] is not None
    asked = asked_of(op, mask, has_weight=has_weight, has_bias=has_bias)
    spec = None
    if any(asked) or not op.masked or (copied or summed) is not None:
        computes = not op.is_backward or given.get("rstd") is None
        spec = _spec(
            op=op.name,
            normalized_shape=dims,
            dtype=dtype,
            grad_output_dtype=types.get("grad_output"),
            weight_dtype=types["weight"],
            bias_dtype=types["bias"],
            has_weight=has_weight,
            has_bias=op.takes_bias and has_bias,
            residual_dtype=types.get("residual") or types.get("grad_residual"),
            grad_outputs=1 + sum(types[more] is not None for more in _MORE if more in types),
            weight_offset=offset,
            output_mask=asked,
            eps=(rms_eps(dtype) if eps is None else eps) if computes else None,
            from_output=op.from_output,
            output_dtype=output_dtype,
            weight_sets=sets is not None,
            gate=None if op.gate is None else op.gate.value,
            gate_dtype=types.get(GATE.name),
            grad_input_copy_dtype=copied,
            grad_input_sum_dtype=summed,
        )
    return BoundCall(spec, x.shape, arrays, has_bias, sets and sets.for_rows(rows))


def _sets(weight: object, dims: tuple[int, ...], rows_per_set: int | None) -> Sets | None:
    """The sets of a weight, if it has a dimension more than those that are normalized."""
    if rows_per_set is None:
        return None
    shape = weight.shape if isinstance(weight, _ARRAY_TYPES) else ()
    if shape[1:] == dims:
        if not 1 <= shape[0] <= MOST_ROWS:
            raise ValueError(f"weight: expected from 1 to {MOST_ROWS} sets, got shape {shape}")
        return Sets(shape[0], rows_per_set)
    if rows_per_set != 1:
        expected = f"(G, {', '.join(map(str, dims))})"
        got = shape if weight is not None else None
        raise ValueError(
            f"rows_per_set: expected 1 where weight has no sets, and is not {expected}, got "
            f"{rows_per_set} and weight {got}"
        )
    return None


def asked_of(op: Op, mask: Sequence[bool], *, has_weight: bool, has_bias: bool) -> tuple[bool, ...]:
    """Which gradients a call computes, as `NormSpec` has them: of what is not there, none.

    Args:
        op: The op.
        mask: A bool for each of its gradients; that of a bias may be missing.
        has_weight: Whether there is a weight.
        has_bias: Whether there is a bias.
    """
    said = op.gradients if len(mask) == len(op.gradients) else op.masked
    wanted = dict(zip(names(said), mask, strict=True))
    return tuple(
        wanted.get(gradient.name, False) and (has_weight or gradient.name != "grad_weight")
        for gradient in op.gradients_with(has_bias=has_bias)
    )


def _check_statistics(op: Op, given: Mapping[str, AnyArray | None]) -> None:
    """Expects all statistics of a backward, or none."""
    read = [operand.name for operand in op.statistics if operand.access is Access.READ]
    missing = [name for name in read if given.get(name) is None]
    if missing and len(missing) < len(read):
        (there,) = set(read) - set(missing)
        raise ValueError(f"{missing[0]}: expected both mean and rstd or neither, got only {there}")


def _check_gradients(
    op: Op, given: Mapping[str, AnyArray | None], types: Mapping[str, str | None]
) -> None:
    """Expects gradients of the output without a gap, all of one type."""
    if not op.is_backward:
        return
    before = GRAD_OUTPUT.name
    for name in _MORE:
        if types.get(name) is None:
            before = name
            continue
        if given.get(before) is None:
            raise ValueError(f"{before}: expected an array, because {name} is one, got None")
        if types[name] != types[GRAD_OUTPUT.name]:
            raise TypeError(
                f"{name}: expected the element type of {GRAD_OUTPUT.name}, "
                f"{types[GRAD_OUTPUT.name]}, got {types[name]}"
            )


def _check_place(data: str, arrays: Mapping[str, AnyArray | None]) -> None:
    """All arrays are on one device, the bias too: its gradient is stored beside it."""
    places = {array.device for array in arrays.values() if isinstance(array, GpuArray)}
    if len(places) > 1:
        where = ", ".join(
            f"{name} on {array.device}"
            for name, array in arrays.items()
            if isinstance(array, GpuArray)
        )
        raise ValueError(f"{data}: expected all arrays on one device, got {where}")


# The rules for each argument of an op, as a call looks them up. By ATen's name: the place of its
# kind, and whether it is required, is read, and is a statistic.
_CHECKS = {
    (op.name, op.from_output, op.gate): tuple(
        (
            operand.name,
            tuple(Kind).index(operand.kind),
            operand.when is When.ALWAYS,
            operand.access is Access.READ,
            operand.kind is Kind.ROWS,
        )
        for operand in op.arguments
    )
    for op in VARIANTS
}

_COLUMNS = tuple(Kind).index(Kind.COLUMNS)
_spec = functools.lru_cache(NormSpec)  # takes microseconds, and calls are alike


def _array(name: str, value: object) -> AnyArray:
    if not isinstance(value, _ARRAY_TYPES):
        raise TypeError(f"{name}: expected a NumPy array, got {type(value).__name__}")
    return value


def _dtype(name: str, array: AnyArray) -> str:
    known = dtypes.name_of(array.dtype)
    if known is None:
        raise TypeError(
            f"{name}: expected an element type of {', '.join(dtypes.DTYPES)}, got {array.dtype}"
        )
    return known
