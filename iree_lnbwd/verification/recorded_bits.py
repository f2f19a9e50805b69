"""Results of small calls, kept to the last bit, so that another machine can compare its own.

Each module has a file in NumPy's .npz format: its SHA-256, the seed and the SHA-256 of the inputs,
and the results of each call. The inputs are made again from the seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iree_lnbwd.ops import npz
from iree_lnbwd.ops.arguments import Array, BoundCall, Results
from iree_lnbwd.ops.operands import Kind
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Schedule
from iree_lnbwd.verification import matrix
from iree_lnbwd.vmfb import artifact

_ROWS = (1, 5, 37)
_MOST_ELEMENTS = 1 << 14  # keeps the files of all modules below 10 MB
_MOST_ELEMENTS_OF_MANY = 1 << 20  # can be emulated in two seconds

Compute = Callable[[BoundCall], Results]


@dataclass(frozen=True)
class Difference:
    """The differences between two results.

    Attributes:
        rows: Of the call.
        result: ATen's name.
        elements: How many there are.
        different: How many differ in a bit; NaN is like NaN, whatever its bits.
        largest: The largest distance of two elements, in steps from one number of the element type
            to the next.
    """

    rows: int
    result: str
    elements: int
    different: int
    largest: int


def save(
    folder: Path,
    name: str,
    spec: NormSpec,
    schedule: Schedule,
    fingerprint: str,
    compute: Compute,
) -> None:
    """Computes a module's small calls on fresh random data and keeps the results.

    Raises:
        ValueError: The file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbits(63)
    arrays: dict[str, Array] = {"fingerprint": np.array(fingerprint), "seed": np.array(seed)}
    for call in _calls(spec, schedule, seed):
        arrays[f"{call.rows}/inputs_sha256"] = np.array(_inputs_digest(call))
        for result, values in _kept(spec, compute(call)):
            arrays[f"{call.rows}/{result}"] = values
    npz.write(folder / f"{name}.npz", arrays)


def compare(
    path: Path, spec: NormSpec, schedule: Schedule, fingerprint: str, compute: Compute
) -> Iterator[Difference]:
    """Computes the same calls of the same module and compares them with the kept results.

    Raises:
        ValueError: The file is of another module, or its inputs cannot be made again.
    """
    kept = npz.read(path)
    if (other := str(kept["fingerprint"])) != fingerprint:
        raise ValueError(f"{path}: of a module with code {other}, expected {fingerprint}")
    for call in _calls(spec, schedule, int(kept["seed"])):
        if str(kept[f"{call.rows}/inputs_sha256"]) != _inputs_digest(call):
            raise ValueError(
                f"{path}: this NumPy ({np.__version__}) makes other data from the seed"
            )
        for result, values in _kept(spec, compute(call)):
            yield _difference(call.rows, result, values, kept[f"{call.rows}/{result}"])


def _calls(spec: NormSpec, schedule: Schedule, seed: int) -> Iterator[BoundCall]:
    """Calls of few rows, and of one row more than that if the module has another form for it."""
    rng = np.random.default_rng(seed)
    for rows in _ROWS:
        if rows == 1 or rows * spec.columns <= _MOST_ELEMENTS:
            yield matrix.random_call(spec, rows, rng)
    for rows in matrix.both_sides(spec, schedule)[1:]:
        if rows * spec.columns <= _MOST_ELEMENTS_OF_MANY:
            yield matrix.random_call(spec, rows, rng)


def _kept(spec: NormSpec, results: Results) -> Iterator[tuple[str, Array]]:
    """The results of a call; only the first rows if there are many."""
    for result in filter(spec.has, spec.family.results):
        values = getattr(results, result.name)
        yield result.name, values if result.kind is Kind.COLUMNS else values[: _ROWS[-1]]


def _inputs_digest(call: BoundCall) -> str:
    return artifact.digest(b"".join(call.arrays[name].tobytes() for name in sorted(call.arrays)))


def _difference(rows: int, result: str, actual: Array, expected: Array) -> Difference:
    nan = np.isnan(actual) & np.isnan(expected)
    steps = np.where(nan, 0, np.abs(_ordinal(actual) - _ordinal(expected)))
    different = (actual.view(f"u{actual.itemsize}") != expected.view(f"u{actual.itemsize}")) & ~nan
    largest = int(steps.max(initial=0))
    return Difference(rows, result, actual.size, int(different.sum()), largest)


def _ordinal(values: Array) -> Array:
    """Numbers of an element type counted from zero, the negative ones downwards."""
    bits = values.view(f"i{values.itemsize}").astype(np.int64)
    magnitude = bits & np.iinfo(f"i{values.itemsize}").max
    return np.where(bits < 0, -magnitude, magnitude)
