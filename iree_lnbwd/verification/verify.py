"""Runs the ops on real tensors and compares every result with the f64 reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from iree_lnbwd.errors import plain, shown
from iree_lnbwd.ops.arguments import DEFAULT_EPS, Array, BoundCall, Results, bind, variant_of
from iree_lnbwd.ops.operands import (
    GATE,
    LAYER_NORM_BACKWARD,
    OPS,
    OUTPUT,
    Element,
    Op,
    When,
    names,
)
from iree_lnbwd.ops.sets import check_rows_per_set
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import Norm
from iree_lnbwd.verification.judge import Comparison, compare, judge
from iree_lnbwd.verification.scattered import ScatteredNorm

EXPLANATION = """\
error      largest |computed - reference|; the reference is NumPy in f64
tolerance  what is allowed at the element that comes closest to missing it (err/tol of 1):
           half a unit in the last place of the output, plus roundings of the accumulator times
           the magnitudes they act on: a few for each product, 4*sqrt(length) for each sum
           (random walk of rounding errors: Higham and Mary, SISC 41(5), 2019);
           residual_output has to be right to the bit"""

_LONGEST_CASE = 120  # characters of its name


@dataclass(frozen=True)
class Row:
    """One result of one case.

    Attributes:
        case: Name of the case.
        spec: What was computed.
        shape: Of ``input``.
        result: ATen's name.
        comparison: How far it is from the reference.
    """

    case: str
    spec: NormSpec
    shape: tuple[int, ...]
    result: str
    comparison: Comparison


class Runs(Protocol):
    """A module that can compute calls: on a device (`Norm`), or in software."""

    def run(self, call: BoundCall) -> Results:
        """Computes a call for its spec."""


class CaseOptions(NamedTuple):
    """The options of a case: numbers among its arrays, by these names.

    Attributes:
        rows_per_set: Neighbouring rows that take one set of the weight's; None where that has none.
        gate_first: Whether the gate comes before the norm; None where the case does not say it.
    """

    rows_per_set: int | None
    gate_first: bool | None


def bind_case(arrays: Mapping[str, Array], *, source: str) -> BoundCall:
    """The call in a case of an .npz, whose arrays are named like ATen's arguments.

    An array ``op`` is the name of the op; without it, it is ``layer_norm_backward``.

    An array ``rows_per_set`` is an int, and says that the weight has sets; ``gate_first`` is a
    bool.

    ``normalized_shape`` is the weight's shape, without its first dimension if that is one of sets,
    else the bias's, else the last dimension of the input, or of the output where a backward has
    that in its place.

    Args:
        arrays: By ATen's name.
        source: The case, or the file if it has only one, for messages.

    Raises:
        TypeError, ValueError: Naming the source and the argument.
    """
    op, arrays = _op_of(arrays, source)
    (rows_per_set, gate_first), arrays = options_of(arrays, source)
    if GATE.name in arrays or gate_first or (op.is_backward and OUTPUT.name in arrays):
        with _naming(source):
            op = variant_of(op, arrays, bool(gate_first))
    check_names(arrays, source, op)
    data = op.data.name
    shaped_like = arrays.get("weight", arrays.get("bias"))
    shape = arrays[data].shape[-1:] if shaped_like is None else shaped_like.shape
    if rows_per_set is not None:
        of_weight = arrays["weight"].shape if "weight" in arrays else None
        if of_weight is None or len(of_weight) < 2:
            expected = "expected shape (G, *normalized_shape) beside rows_per_set"
            raise ValueError(f"{source}: weight: {expected}, got {of_weight}")
        shape = of_weight[1:]
    if not shape:
        name = next(name for name in ("weight", "bias", data) if name in arrays)
        raise ValueError(f"{source}: {name}: expected one dimension or more, got none")
    with _naming(source):
        return bind(
            *(op.name, arrays, shape),
            eps=DEFAULT_EPS if op.centres else None,
            rows_per_set=rows_per_set,
            gate_first=bool(gate_first),
        )


@contextlib.contextmanager
def _naming(source: str) -> Iterator[None]:
    """Errors with the source before what they say."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{source}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _op_of(arrays: Mapping[str, Array], source: str) -> tuple[Op, Mapping[str, Array]]:
    """The op of a case, and its other arrays."""
    if "op" not in arrays:
        return LAYER_NORM_BACKWARD, arrays
    name = str(arrays["op"])
    if name not in OPS:
        raise ValueError(f"{source}: op: expected one of {', '.join(OPS)}, got {shown(name)}")
    return OPS[name], {key: array for key, array in arrays.items() if key != "op"}


def options_of(arrays: Mapping[str, Array], source: str) -> tuple[CaseOptions, Mapping[str, Array]]:
    """The options of a case, and its other arrays.

    Raises:
        TypeError, ValueError: Naming the source and the option.
    """
    found = {name: arrays[name] for name in CaseOptions._fields if name in arrays}
    for name, array in found.items():
        expected = np.bool_ if name == "gate_first" else np.integer
        if array.shape or not np.issubdtype(array.dtype, expected):
            kind = "a bool" if expected is np.bool_ else "an int"
            got = f"{plain(array.dtype)} of shape {array.shape}"
            raise TypeError(f"{source}: {name}: expected {kind} without dimensions, got {got}")
    run, first = (found.get(name) for name in CaseOptions._fields)
    with _naming(source):
        options = CaseOptions(
            None if run is None else check_rows_per_set(run[()]),
            None if first is None else bool(first),
        )
    return options, {name: array for name, array in arrays.items() if name not in found}


def check_names(arrays: Mapping[str, Array], source: str, op: Op) -> None:
    """Expects arrays that are named like ATen's arguments, with all that every call needs.

    Raises:
        ValueError: Naming the source and the array.
    """
    known = names(op.arguments)
    if unknown := set(arrays) - set(known):
        raise ValueError(f"{source}: unknown arrays {shown(sorted(unknown))}, expected {known}")
    for operand in op.arguments:
        if operand.when is When.ALWAYS and operand.name not in arrays:
            raise ValueError(f"{source}: {operand.name} is missing; got {shown(sorted(arrays))}")


def verify(cases: Mapping[str, BoundCall], load: Callable[[NormSpec], Runs]) -> Iterator[Row]:
    """Computes and compares the cases, one after the other.

    Args:
        cases: Bound calls by name.
        load: A loaded module for a spec.
    """
    loaded: dict[NormSpec, Runs] = {}
    for case, call in cases.items():
        if call.spec is None:
            continue
        if call.spec not in loaded:
            loaded[call.spec] = _runner(load(call.spec))
        results = loaded[call.spec].run(call)
        judgement = judge(call)
        for name, expected in judgement.expected.items():
            comparison = compare(getattr(results, name), expected, judgement.tolerance[name])
            yield Row(case, call.spec, call.shape, name, comparison)


def _runner(module: Runs) -> Runs:
    """What runs dense calls by a module: one with strided rows gets them apart."""
    if isinstance(module, Norm) and module.spec.strided_rows:
        return ScatteredNorm(module)
    return module


def shown_case(name: str) -> str:
    """The name of a case, which a file may have, for people."""
    return plain(name, _LONGEST_CASE)


def table_header(case_width: int) -> tuple[str, str]:
    """The line above the rows, and one below it."""
    header = _line(
        case_width, "case", "shape", "dtype", "result", "error", "tolerance", "err/tol", ""
    )
    return header, "-" * len(header)


def table_line(row: Row, case_width: int) -> str:
    """One row for a person to read."""
    return _line(
        case_width,
        shown_case(row.case),
        "x".join(map(str, row.shape)),
        _types(row.spec),
        row.result,
        f"{row.comparison.error:.2e}",
        f"{row.comparison.tolerance:.2e}",
        f"{row.comparison.ratio:.3f}",
        "ok" if row.comparison.passed else "MISS",
    )


def _types(spec: NormSpec) -> str:
    """The types of input, output or its gradient, and weight; only one if they are the same."""
    reached = spec.dy_dtype if spec.family.is_backward else spec.element_type(Element.Y)
    types = (spec.dtype, reached, spec.gamma_dtype)
    return spec.dtype if len(set(types)) == 1 else "/".join(types)


def _line(case_width: int, case: str, *columns: str) -> str:
    widths = (14, 13, 15, 9, 9, 8, 4)
    shape, dtype, result, *numbers = columns
    words = [f"{case:<{case_width}}"]
    words += [f"{text:<{w}}" for text, w in zip((shape, dtype, result), widths, strict=False)]
    words += [f"{text:>{w}}" for text, w in zip(numbers, widths[3:], strict=True)]
    return "  ".join(words).rstrip()
