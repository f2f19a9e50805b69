"""Whether a candidate computes what it should: every result of every call is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from norms import computed
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import Array
from iree_lnbwd.ops.operands import FROM_OUTPUT, OPS, Kind, Op
from iree_lnbwd.schedules import FewRows, Forward, OnePass, Schedule, TwoPass, most_few_rows
from iree_lnbwd.tuning import checks
from iree_lnbwd.tuning.checks import Check
from iree_lnbwd.verification.matrix import random_call

EVERY: list[Op] = [*OPS.values(), *FROM_OUTPUT.values()]
every_op = pytest.mark.parametrize(
    "op", EVERY, ids=lambda op: op.name + "_from_output" * op.from_output
)


def spec_of(op: Op, columns: int = 8, dtype: str = "f32") -> NormSpec:
    eps = None if op.is_backward else 1e-5
    return NormSpec((columns,), dtype, op=op.name, from_output=op.from_output, eps=eps)


def check_of(spec: NormSpec, rows: int, *, is_finite: bool = True) -> Check:
    call = random_call(spec, rows, random_generator())
    return checks._check("it", call, is_finite=is_finite)


def with_one(
    results: Mapping[str, Array], name: str, place: int, value: object
) -> dict[str, Array]:
    changed = results[name].copy()
    changed.reshape(-1)[place] = value
    return {**results, name: changed}


# --- one call -----------------------------------------------------------------------------------


@every_op
def test_every_result_is_judged(op: Op) -> None:
    """Wherever it is wrong, and though all before it are right."""
    spec = spec_of(op)
    check = check_of(spec, 5)
    right = computed(check.call)
    assert check.wrong(right) is None
    for result in spec.results:
        array = right[result.name]
        for place in (0, array.size // 2, array.size - 1):
            far = np.float32(array.reshape(-1)[place] + 1)
            why = check.wrong(with_one(right, result.name, place, far))
            assert why is not None, result.name
            assert why.startswith(f"{result.name} of it: its error is 1, ")
            assert why.endswith(" of what is allowed")
            times = float(why.split(", ")[1].split(" ")[0])
            assert times == pytest.approx(
                1 / check.judgement.tolerance[result.name].reshape(-1)[place], rel=1e-2
            )


@every_op
def test_what_was_not_written_is_told(op: Op) -> None:
    """Bits that are all set, where nothing can be NaN; elsewhere they are a NaN like any other."""
    for dtype in ("f32", "bf16", "f64"):
        spec = spec_of(op, dtype=dtype)
        check = check_of(spec, 5)
        right = computed(check.call)
        for result in spec.results:
            array = right[result.name].copy()
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[-1] = np.iinfo(bits.dtype).max
            why = check.wrong({**right, result.name: array})
            assert why == f"{result.name} of it: some elements were not written"
            bits[-1] -= 1  # a NaN that a kernel may have made
            why = check.wrong({**right, result.name: array})
            assert why is not None
            assert ": its error is " in why


def test_a_row_that_may_be_nan_may_have_any() -> None:
    spec = spec_of(OPS["rms_norm"])
    call = random_call(spec, 5, random_generator())
    x = call.arrays["input"].copy()
    x[2, 3] = np.nan
    check = checks._check("it", call._replace(arrays={**call.arrays, "input": x}), is_finite=False)
    results = computed(check.call)
    results["output"][2].view(np.uint32)[:] = 0xFFFFFFFF
    assert check.wrong(results) is None
    results["output"][1].view(np.uint32)[0] = 0xFFFFFFFF
    assert check.wrong(results) is not None


@every_op
def test_of_many_rows_some_are_compared_and_sums_are_of_all(op: Op) -> None:
    """The first and the last among them, whatever else."""
    spec, rows = spec_of(op, columns=4), 1001
    check = check_of(spec, rows)
    right = computed(check.call)
    assert check.wrong(right) is None
    compared = set(check.compared.tolist())
    assert {0, rows - 1} < compared < set(range(rows))
    assert 128 <= len(compared) <= 130
    between = next(row for row in range(rows) if row not in compared)
    for result in spec.results:
        if spec.family.named(result.name).kind is Kind.COLUMNS:
            places = dict.fromkeys(range(4), False)
        else:
            width = right[result.name].size // rows
            places = {0: False, (rows - 1) * width: False, between * width: True}
        for place, passes in places.items():
            wrong = with_one(right, result.name, place, 1e6)
            assert (check.wrong(wrong) is None) is passes, (result.name, place)


@pytest.mark.parametrize("rows", [1, 37, 127, 128])
def test_of_few_rows_all_are_compared(rows: int) -> None:
    assert check_of(spec_of(OPS["rms_norm"]), rows).compared.tolist() == list(range(rows))


# --- which calls --------------------------------------------------------------------------------

ONE_PASS = OnePass(workgroups=8, groups=2, warps=1, vector=2)
FEW = FewRows(rows=300, warps=4, tile=32, tile_vector=2)
FORWARD = Forward(rows=4, threads=32, vector=4, chunks=1, in_registers=True)
MANY: dict[str, tuple[Op, tuple[Schedule, ...], int]] = {
    "walkers of one pass": (OPS["rms_norm_backward"], (ONE_PASS,), 5 * 16 + 2 + 1),
    "the most of all": (
        OPS["rms_norm_backward"],
        (ONE_PASS, replace(ONE_PASS, workgroups=9), ONE_PASS),
        5 * 18 + 2 + 1,
    ),
    "walkers of two passes": (
        OPS["layer_norm_backward"],
        (TwoPass(workgroups=6, warps=2, vector=2, chunks=1, rows=3),),
        5 * 18 + 2 + 1,
    ),
    "more than count as few": (
        OPS["layer_norm_backward"],
        (replace(ONE_PASS, few_rows=FEW), ONE_PASS),
        301,
    ),
    "rows of a forward's workgroup": (OPS["layer_norm"], (FORWARD,), 5 * 4 + 2 + 1),
    "an odd number": (OPS["rms_norm_backward"], (replace(ONE_PASS, groups=1),), 5 * 8 + 2 + 1),
}


@pytest.mark.parametrize("name", MANY)
def test_calls_take_every_form_of_every_candidate(name: str) -> None:
    """One row, few, hard ones, and so many that each walker has several, but not equally many."""
    op, candidates, many = MANY[name]
    spec = spec_of(op)
    found = list(checks.checks(spec, candidates))
    assert [check.name for check in found] == [
        "1 random rows",
        "37 random rows",
        "adversarial rows",
        f"{many} random rows",
    ]
    assert [check.call.rows for check in found] == [1, 37, 37, many]
    assert [check.is_finite for check in found] == [True, True, False, True]
    assert many % 2
    for candidate in candidates:
        assert many > (most_few_rows(candidate, spec) or 0)
    for check in found:
        assert check.call.spec == spec
        assert check.judgement.expected.keys() == {result.name for result in spec.results}
        finite = [np.isfinite(array).all() for array in check.call.arrays.values()]
        assert all(finite) == check.is_finite
        assert check.wrong(computed(check.call)) is None


def test_a_wide_call_has_no_more_elements_than_take_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless few rows are more; but it has a row."""
    spec = spec_of(OPS["layer_norm_backward"])
    for most, how, many in (
        (400, ONE_PASS, 51),
        (400, replace(ONE_PASS, few_rows=FEW), 301),
        (7, ONE_PASS, 1),
    ):
        monkeypatch.setattr(checks, "_MOST_ELEMENTS", most)
        assert list(checks.checks(spec, [how]))[-1].call.rows == many


def test_data_are_the_same_in_every_run_and_differ_from_call_to_call() -> None:
    spec = spec_of(OPS["rms_norm"])
    many = replace(FORWARD, rows=40)  # of which some are compared
    one, other = (list(checks.checks(spec, [many])) for _ in range(2))
    for a, b in zip(one, other, strict=True):
        assert a.call.arrays["input"].tobytes() == b.call.arrays["input"].tobytes()
        assert a.compared.tolist() == b.compared.tolist()
    assert not np.array_equal(one[0].call.arrays["input"], one[1].call.arrays["input"][:1])
