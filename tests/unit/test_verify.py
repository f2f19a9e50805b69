"""Verifying: cases from files, results that miss, and the lines that say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from norms import computed
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import Array, BoundCall, Results, results_of
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS, Gate, Op
from iree_lnbwd.verification import verify
from iree_lnbwd.verification.judge import Comparison
from iree_lnbwd.verification.matrix import random_call
from iree_lnbwd.verification.verify import Row

EVERY: list[Op] = [*OPS.values(), *FROM_OUTPUT.values()]
every_op = pytest.mark.parametrize(
    "op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output
)


def spec_of(op: Op, columns: int = 6, **options: Any) -> NormSpec:
    eps = None if op.is_backward else 1e-5 if op.centres else 2.0**-23
    return NormSpec((columns,), op=op.name, from_output=op.from_output, eps=eps, **options)


def call_of(op: Op, **options: Any) -> BoundCall:
    return random_call(spec_of(op, **options), 3, random_generator())


class Plainly:
    """A module that computes in NumPy, and may have a mistake in one result.

    Attributes:
        ran: How many calls.
    """

    def __init__(self, wrong: Mapping[str, float] | None = None) -> None:
        self.wrong, self.ran = wrong or {}, 0

    def run(self, call: BoundCall) -> Results:
        """As `Norm.run`."""
        self.ran += 1
        assert call.spec is not None
        results = computed(call)
        for name, off in self.wrong.items():
            results[name] = results[name] + np.asarray(off, results[name].dtype)
        shaped = {
            name: array.reshape(call.shape_of(call.spec.family.named(name)))
            for name, array in results.items()
        }
        return results_of(call.spec.family, shaped)


# --- runs ---------------------------------------------------------------------------------------


@every_op
def test_every_result_of_every_case_is_compared(op: Op) -> None:
    """By a module for each spec, which is loaded once."""
    cases = {"a": call_of(op), "b": call_of(op), "c": call_of(op, columns=5)}
    loaded: list[NormSpec] = []
    module = Plainly()

    def load(spec: NormSpec) -> Plainly:
        loaded.append(spec)
        return module

    rows = list(verify.verify(cases, load))
    assert loaded == [cases["a"].spec, cases["c"].spec]
    assert module.ran == 3
    names = [result.name for result in spec_of(op).results]
    assert [(row.case, row.result) for row in rows] == [(c, name) for c in "abc" for name in names]
    for row in rows:
        call = cases[row.case]
        assert (row.spec, row.shape) == (call.spec, call.shape)
        assert row.comparison.passed
        assert row.comparison.tolerance > 0


@every_op
def test_a_wrong_result_misses_and_the_others_do_not(op: Op) -> None:
    call = call_of(op)
    for name in (result.name for result in spec_of(op).results):
        wrong = Plainly({name: 0.5})
        rows = list(verify.verify({"it": call}, lambda spec: wrong))  # noqa: B023 - listed at once
        missed = {row.result: row.comparison for row in rows if not row.comparison.passed}
        assert missed.keys() == {name}
        assert missed[name].error == pytest.approx(0.5, rel=1e-4)


def test_a_case_that_computes_nothing_loads_nothing() -> None:
    nothing = call_of(OPS["rms_norm_backward"])._replace(spec=None)
    right = call_of(OPS["rms_norm"])
    rows = verify.verify({"nothing": nothing, "it": right}, lambda spec: Plainly())
    assert {row.case for row in rows} == {"it"}


# --- cases of files -----------------------------------------------------------------------------


def as_kept(call: BoundCall) -> dict[str, Array]:
    """The arrays of a case in a file."""
    assert call.spec is not None
    op = call.spec.family
    arrays: dict[str, Array] = dict(call.arrays)
    if call.sets is not None:
        arrays["rows_per_set"] = np.array(call.sets.rows_per_set)
    if op.gate is not None:
        arrays["gate_first"] = np.array(op.gate is Gate.BEFORE)
    return arrays if op.name == "layer_norm_backward" else arrays | {"op": np.array(op.name)}


@pytest.mark.parametrize("has_sets", [False, True])
@pytest.mark.parametrize("gate", [None, *(gate.value for gate in Gate)])
@every_op
def test_a_case_is_the_call_that_it_was_kept_of(op: Op, gate: str | None, has_sets: bool) -> None:
    """PyTorch's eps are the default: 1e-5 for layer norm, and f32's epsilon for RMS norm."""
    if op.from_output and gate is not None:
        pytest.skip("no backward takes the output beside a gate")
    call = call_of(op, gate=gate, weight_sets=has_sets)
    found = verify.bind_case(as_kept(call), source="it")
    assert found.spec == call.spec
    assert found.sets == call.sets
    assert found.arrays.keys() == call.arrays.keys()
    for name, array in call.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


@pytest.mark.parametrize(
    ("arrays", "dims"),
    [
        ({"weight": (4, 5), "bias": (4, 5)}, (4, 5)),
        ({"weight": (4, 5)}, (4, 5)),
        ({"bias": (4, 5)}, (4, 5)),
        ({}, (5,)),
    ],
)
def test_what_is_normalized_is_told_by_the_weight_or_the_bias(
    arrays: dict[str, tuple[int, ...]], dims: tuple[int, ...]
) -> None:
    given = {name: np.ones(shape, np.float32) for name, shape in arrays.items()}
    given |= {"input": np.ones((3, 4, 5), np.float32), "op": np.array("layer_norm")}
    found = verify.bind_case(given, source="it")
    assert found.spec is not None
    assert found.spec.normalized_shape == dims
    assert found.spec.eps == 1e-5


def test_the_bias_stands_for_the_weight_only_without_one() -> None:
    given = {"weight": np.ones(5, np.float32), "bias": np.ones((4, 5), np.float32)}
    given |= {"input": np.ones((3, 4, 5), np.float32), "op": np.array("layer_norm")}
    with pytest.raises(
        ValueError, match=r"^it: bias: expected shape \(5,\), that of weight, got \(4, 5\)$"
    ):
        verify.bind_case(given, source="it")


@pytest.mark.parametrize("first", [None, False])
def test_a_gate_is_after_the_norm_unless_the_case_says_so(first: bool | None) -> None:
    given = {"op": np.array("rms_norm"), "input": X, "gate": X, "weight": X[0]}
    given |= {} if first is None else {"gate_first": np.array(first)}
    found = verify.bind_case(given, source="it")
    assert found.spec is not None
    assert found.spec.gate == "after"


def test_sets_of_several_dimensions() -> None:
    ones = np.ones((6, 2, 4), np.float32)
    given = {"op": np.array("rms_norm"), "input": ones, "weight": ones[:3], "bias": ones[:3]}
    found = verify.bind_case(given | {"rows_per_set": np.array(2, np.uint8)}, source="it")
    assert found.spec is not None
    assert found.spec.normalized_shape == (2, 4)
    assert found.sets == (3, 2)


X = np.ones((2, 4), np.float32)
RUN = np.array(1)
BAD_CASES: dict[str, tuple[dict[str, Array], type[Exception], str]] = {
    "an unknown op": (
        {"op": np.array("x" * 99)},
        ValueError,
        f"op: expected one of {', '.join(OPS)}, got {'x' * 99!r}",
    ),
    "an unknown array": (
        {"grad_output": X, "input": X, "gamma": X, "beta": X},
        ValueError,
        r"unknown arrays \['beta', 'gamma'\], expected \('grad_output', 'input', 'mean', .*\)",
    ),
    "none of what is needed": (
        {"input": X},
        ValueError,
        r"grad_output is missing; got \['input'\]",
    ),
    "neither input nor output": (
        {"grad_output": X},
        ValueError,
        r"input is missing; got \['grad_output'\]",
    ),
    "an output without its statistic": (
        {"grad_output": X, "output": X},
        ValueError,
        "rstd: expected an array beside output, from which .*",
    ),
    "a number": (
        {"grad_output": X, "input": np.float32(1) * np.ones(())},
        ValueError,
        "input: expected one dimension or more, got none",
    ),
    "a weight that is a number": (
        {"grad_output": X, "input": X, "weight": np.ones((), np.float32)},
        ValueError,
        "weight: expected one dimension or more, got none",
    ),
    "a bias that is a number": (
        {"grad_output": X, "input": X, "bias": np.ones((), np.float32)},
        ValueError,
        "bias: expected one dimension or more, got none",
    ),
    "sets of no weight": (
        {"grad_output": X, "input": X, "rows_per_set": RUN},
        ValueError,
        r"weight: expected shape \(G, \*normalized_shape\) beside rows_per_set, got None",
    ),
    "sets of a bias": (
        {"grad_output": X, "input": X, "bias": X, "rows_per_set": RUN},
        ValueError,
        r"weight: expected shape \(G, \*normalized_shape\) beside rows_per_set, got None",
    ),
    "a weight without sets": (
        {"grad_output": X, "input": X, "weight": X[0], "rows_per_set": RUN},
        ValueError,
        r"weight: expected shape \(G, \*normalized_shape\) beside rows_per_set, got \(4,\)",
    ),
    "a weight of no sets": (
        {"grad_output": X, "input": X, "weight": X[:0], "rows_per_set": RUN},
        ValueError,
        r"weight: expected from 1 to \d+ sets, got shape \(0, 4\)",
    ),
    "sets of other columns": (
        {"grad_output": X, "input": X, "weight": X[:, :3], "rows_per_set": RUN},
        ValueError,
        r"input: expected a shape that ends in normalized_shape \(3,\), got \(2, 4\)",
    ),
    "a bias of other sets": (
        {"grad_output": X, "input": X, "weight": X, "bias": X[:1], "rows_per_set": RUN},
        ValueError,
        r"bias: expected shape \(2, 4\), that of weight, got \(1, 4\)",
    ),
    "rows of a set that are no int": (
        {"grad_output": X, "input": X, "weight": X, "rows_per_set": np.array(2.0)},
        TypeError,
        r"rows_per_set: expected an int without dimensions, got float64 of shape \(\)",
    ),
    "rows of a set that are a bool": (
        {"grad_output": X, "input": X, "weight": X, "rows_per_set": np.array(True)},
        TypeError,
        r"rows_per_set: expected an int without dimensions, got bool of shape \(\)",
    ),
    "rows of several sets": (
        {"grad_output": X, "input": X, "weight": X, "rows_per_set": np.array([1, 1])},
        TypeError,
        r"rows_per_set: expected an int without dimensions, got int64 of shape \(2,\)",
    ),
    "sets without rows": (
        {"grad_output": X, "input": X, "weight": X, "rows_per_set": np.array(0)},
        ValueError,
        "rows_per_set: expected an int >= 1, got 0",
    ),
    "a place of a gate that is no bool": (
        {"grad_output": X, "input": X, "gate": X, "gate_first": np.array(1)},
        TypeError,
        r"gate_first: expected a bool without dimensions, got int64 of shape \(\)",
    ),
    "a place of no gate": (
        {"grad_output": X, "input": X, "gate_first": np.array(True)},
        ValueError,
        "gate_first: expected False without a gate, got True",
    ),
    "a gate of another shape": (
        {"grad_output": X, "input": X, "gate": X[:1]},
        ValueError,
        r"gate: expected shape \(2, 4\), got \(1, 4\)",
    ),
    "a gate beside a residual": (
        {"op": np.array("rms_norm"), "input": X, "gate": X, "residual": X},
        ValueError,
        "residual: expected None beside gate, got one",
    ),
    "a type": (
        {"grad_output": X, "input": X.astype(np.int32)},
        TypeError,
        "input: expected an element type of .*, got int32",
    ),
    "a shape": (
        {"grad_output": X[:1], "input": X},
        ValueError,
        r"grad_output: expected shape \(2, 4\), got \(1, 4\)",
    ),
}


@pytest.mark.parametrize("name", BAD_CASES)
def test_a_bad_case_is_named_with_its_file(name: str) -> None:
    arrays, error, said = BAD_CASES[name]
    with pytest.raises(error, match=f"^the file: {said}$"):
        verify.bind_case(arrays, source="the file")


@every_op
def test_names_are_checked_alone(op: Op) -> None:
    """What every call needs, and no more, will do."""
    needed = {"grad_output", op.data.name} if op.is_backward else {op.data.name}
    needed |= {"rstd"} if op.from_output else set()
    verify.check_names(dict.fromkeys(needed, X), "it", op)
    for name in needed:
        others = {key: X for key in needed if key != name}
        said = re.escape(f"it: {name} is missing; got {sorted(others)}")
        with pytest.raises(ValueError, match=f"^{said}$"):
            verify.check_names(others, "it", op)


# --- the table ----------------------------------------------------------------------------------

HIT, MISS = Comparison(1.25e-9, 2.5e-9, 0.5), Comparison(5e-3, 2.5e-9, 2e6)


def test_the_table() -> None:
    """To the letter: people and scripts read it."""
    spec = NormSpec((4, 5), "bf16")
    lines = [
        *verify.table_header(9),
        verify.table_line(Row("a case", spec, (2, 3, 4, 5), "grad_input", HIT), 9),
        verify.table_line(Row("b\x1b[2K", spec, (2, 4, 5), "grad_weight", MISS), 9),
        verify.table_line(
            Row("c", replace(spec, grad_output_dtype="f32"), (4, 5), "output", HIT), 9
        ),
        verify.table_line(Row("d", replace(spec, weight_dtype="f16"), (4, 5), "output", HIT), 9),
    ]
    assert lines == [
        "case       shape           dtype          result               error  tolerance   err/tol",
        "-" * 89,
        "a case     2x3x4x5         bf16           grad_input        1.25e-09   2.50e-09     0.500"
        "    ok",
        "b\\x1b[2K   2x4x5           bf16           grad_weight       5.00e-03   2.50e-09  "
        "2000000.000  MISS",
        "c          4x5             bf16/f32/bf16  output            1.25e-09   2.50e-09     0.500"
        "    ok",
        "d          4x5             bf16/bf16/f16  output            1.25e-09   2.50e-09     0.500"
        "    ok",
    ]


def test_the_explanation_is_about_the_tables_columns() -> None:
    told = [line.split()[0] for line in verify.EXPLANATION.splitlines() if line[0] != " "]
    assert told == ["error", "tolerance"]
    assert set(told) < set(verify.table_header(4)[0].split())


def test_a_long_name_of_a_case_is_cut() -> None:
    assert verify.shown_case("x" * 120) == "x" * 120
    assert verify.shown_case("x" * 121) == "x" * 90 + "..." + "x" * 30


def test_the_types_of_a_row_of_the_table() -> None:
    """Of input, of output or its gradient, and of weight; one where they are the same."""
    forward = NormSpec((4,), "f32", op="rms_norm", eps=1e-5, output_dtype="bf16")
    assert verify._types(forward) == "f32/bf16/f32"
    assert verify._types(NormSpec((4,), "bf16", weight_dtype="f32")) == "bf16/bf16/f32"
    assert verify._types(NormSpec((4,), "f32", grad_output_dtype="f16")) == "f32/f16/f32"
    assert verify._types(NormSpec((4,), "f32")) == "f32"
