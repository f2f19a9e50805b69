"""Results that are kept to the last bit, and how far those of another machine are from them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from norms import computed

from iree_lnbwd import NormSpec
from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import Array, BoundCall, Results, results_of
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.schedules import FewRows, OnePass, Schedule
from iree_lnbwd.verification import matrix, recorded_bits
from iree_lnbwd.verification.recorded_bits import Difference
from iree_lnbwd.vmfb import artifact

SPEC = NormSpec((64,), "bf16")
ONE_FORM = OnePass(8, 1, 1, 2)


def plainly(call: BoundCall) -> Results:
    """A module that computes in NumPy."""
    assert call.spec is not None
    return results_of(call.spec.family, computed(call))


def changed(rows: int, name: str, change: Callable[[Array], None]) -> recorded_bits.Compute:
    """A module that has another result for a number of rows."""

    def compute(call: BoundCall) -> Results:
        results = plainly(call)
        if call.rows == rows:
            change(getattr(results, name))
        return results

    return compute


def saved(folder: Path, spec: NormSpec = SPEC, how: Schedule = ONE_FORM) -> Path:
    recorded_bits.save(folder / "deep" / "down", "it", spec, how, "code", plainly)
    return folder / "deep" / "down" / "it.npz"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm_backward"])
def test_the_same_results_differ_nowhere(op: str, dtype: str, tmp_path: Path) -> None:
    spec = NormSpec((64,), dtype, op=op, eps=1e-5)
    path = saved(tmp_path, spec)
    found = list(recorded_bits.compare(path, spec, ONE_FORM, "code", plainly))
    names = [result.name for result in spec.results]
    assert [(each.rows, each.result) for each in found] == [
        (rows, name) for rows in (1, 5, 37) for name in names
    ]
    for each in found:
        kind = spec.family.named(each.result).kind
        sizes = {Kind.CELLS: each.rows * 64, Kind.ROWS: each.rows, Kind.COLUMNS: 64}
        assert each == Difference(each.rows, each.result, sizes[kind], 0, 0)


def test_what_differs_is_counted_in_steps_between_numbers(tmp_path: Path) -> None:
    """Across zero, too; a NaN is like any other, and far from every number."""

    def change(array: Array) -> None:
        steps = array.view(np.uint16).reshape(-1)
        steps[3] += 1
        steps[7] -= 2

    path = saved(tmp_path)
    found = list(
        recorded_bits.compare(path, SPEC, ONE_FORM, "code", changed(5, "grad_input", change))
    )
    differ = [each for each in found if each.different]
    assert differ == [Difference(5, "grad_input", 5 * 64, 2, 2)]
    assert all(each.largest == 0 for each in found if each not in differ)


@pytest.mark.parametrize(
    ("kept", "got", "different", "largest"),
    [
        (0.0, -0.0, 1, 0),
        (2.0**-149, -(2.0**-149), 1, 2),
        (1.0, 1.0 + 2**-23, 1, 1),
        (-1.0, -1.0 - 2**-23, 1, 1),
        (np.nan, -np.nan, 0, 0),
        (np.inf, np.inf, 0, 0),
        (-3.0, -3.0, 0, 0),
    ],
)
def test_the_distance_of_two_numbers(
    kept: float, got: float, different: int, largest: int, tmp_path: Path
) -> None:
    spec = NormSpec((1,), "f32", op="rms_norm", eps=1e-5, has_weight=False)

    def giving(number: float) -> recorded_bits.Compute:
        def compute(call: BoundCall) -> Results:
            return changed(call.rows, "output", lambda array: array.fill(number))(call)

        return compute

    recorded_bits.save(tmp_path, "it", spec, ONE_FORM, "code", giving(kept))
    found = recorded_bits.compare(tmp_path / "it.npz", spec, ONE_FORM, "code", giving(got))
    (one, *_) = [each for each in found if each.result == "output"]
    assert (one.elements, one.different, one.largest) == (1, different, largest)


@pytest.mark.parametrize("got", [1.0, np.inf, -2.0])
def test_a_nan_is_no_number(got: float, tmp_path: Path) -> None:
    def compute(call: BoundCall) -> Results:
        return changed(1, "grad_bias", lambda array: array.fill(got))(call)

    path = tmp_path / "it.npz"
    nan = changed(1, "grad_bias", lambda array: array.fill(np.nan))
    recorded_bits.save(tmp_path, "it", SPEC, ONE_FORM, "code", nan)
    (one,) = (
        each
        for each in recorded_bits.compare(path, SPEC, ONE_FORM, "code", compute)
        if (each.rows, each.result) == (1, "grad_bias")
    )
    assert one.different == 64
    assert one.largest > 0


def few(rows: int) -> OnePass:
    """A schedule with a form for so many rows."""
    return replace(ONE_FORM, few_rows=FewRows(rows=rows, warps=4, tile=32, tile_vector=2))


@pytest.mark.parametrize(
    ("columns", "how", "asked"),
    [
        (64, ONE_FORM, [1, 5, 37]),
        (64, few(100), [1, 5, 37, 101]),
        (442, ONE_FORM, [1, 5, 37]),
        (443, ONE_FORM, [1, 5]),
        (20000, ONE_FORM, [1]),
        (1024, few(1023), [1, 5, 1024]),  # as many elements as can be emulated soon
        (1024, few(1024), [1, 5]),
    ],
)
def test_calls_take_both_forms_and_stay_small(
    columns: int, how: Schedule, asked: list[int], tmp_path: Path
) -> None:
    """Of many rows, the first are kept."""
    spec = NormSpec((columns,), "f32", op="rms_norm_backward")
    found: list[int] = []

    def compute(call: BoundCall) -> Results:
        found.append(call.rows)
        return plainly(call)

    recorded_bits.save(tmp_path, "it", spec, how, "code", compute)
    assert found == asked
    kept = npz.read(tmp_path / "it.npz")
    for rows in asked:
        assert kept[f"{rows}/grad_input"].shape == (min(rows, 37), columns)
        assert kept[f"{rows}/grad_weight"].shape == (columns,)
    compared = list(recorded_bits.compare(tmp_path / "it.npz", spec, how, "code", compute))
    assert [each.rows for each in compared] == [rows for rows in asked for _ in range(2)]
    assert found == asked * 2


def test_files_tell_what_they_are_of(tmp_path: Path) -> None:
    """Each has data of its own, by a seed in it."""
    one, other = (npz.read(saved(tmp_path / name)) for name in ("a", "b"))
    assert str(one["fingerprint"]) == "code"
    assert int(one["seed"]) != int(other["seed"])
    assert one["seed"].dtype == other["seed"].dtype == np.int64
    call = matrix.random_call(SPEC, 1, np.random.default_rng(int(one["seed"])))
    inputs = b"".join(call.arrays[name].tobytes() for name in sorted(call.arrays))
    assert str(one["1/inputs_sha256"]) == artifact.digest(inputs)


def test_any_seed_is_a_number_of_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda count: (1 << count) - 1)
    path = saved(tmp_path)
    assert npz.read(path)["seed"] == np.iinfo(np.int64).max
    assert all(
        each.different == 0 for each in recorded_bits.compare(path, SPEC, ONE_FORM, "code", plainly)
    )


def test_another_modules_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(ValueError, match=r"of a module with code code, expected other$"):
        next(recorded_bits.compare(path, SPEC, ONE_FORM, "other", plainly))


def test_data_that_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    kept = dict(npz.read(path))
    kept["5/inputs_sha256"] = np.array("0" * 64)
    npz.write(path, kept)
    found = recorded_bits.compare(path, SPEC, ONE_FORM, "code", plainly)
    said = rf"^{path}: this NumPy \({np.__version__}\) makes other data from the seed$"
    with pytest.raises(ValueError, match=said):
        list(found)
