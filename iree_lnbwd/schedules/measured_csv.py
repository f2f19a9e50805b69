"""The file of a product's measurements: a part for each run, and a line for each schedule."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from iree_lnbwd.disk import tables
from iree_lnbwd.disk.json_values import date_of, int_of, object_of, of_type, positive_of, wrong
from iree_lnbwd.disk.tables import Part, Row, value_of
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.schedules.measured import Key, Measurement, Run
from iree_lnbwd.schedules.one_pass import OnePass

FOLLOWING = ("finalize_slices", "finalize_rows", "finalize_columns", "few_rows")  # from the others
_KINDS = get_type_hints(OnePass)
_SCHEDULE = {f.name: _KINDS[f.name] for f in fields(OnePass) if f.name not in FOLLOWING}

_RUN = tuple(f.name for f in fields(Run) if f.name != "measurements")
_MEASURED = {n: kind for n, kind in get_type_hints(Measurement).items() if n != "schedule"}
_COLUMNS = (*_MEASURED, *_SCHEDULE)
_BACKWARDS = [op.name for op in OPS.values() if op.is_backward]


def measured_numbers(schedule: OnePass) -> dict[str, int | bool]:
    """The fields of a schedule that are measured, by name; the rest follows from them."""
    return {name: getattr(schedule, name) for name in _SCHEDULE}


def schedule_of_numbers(values: Any, place: str) -> OnePass:
    """The inverse of `measured_numbers`, of values from a file.

    Args:
        values: The object.
        place: Where the object is from, for messages.

    Raises:
        ValueError: A field is missing, unknown or of another type.
    """
    given = object_of(values, place, tuple(_SCHEDULE))
    numbers: dict[str, Any] = {
        name: of_type(bool, given[name], f"{place}.{name}")
        if kind is bool
        else int_of(given[name], f"{place}.{name}", least=0)
        for name, kind in _SCHEDULE.items()
    }
    return OnePass(**numbers)


def to_text(product: str, runs: tuple[Run, ...]) -> str:
    """The file's text; the same runs give the same."""
    return tables.to_text(
        _COLUMNS,
        (
            (
                {"product": product} | {name: getattr(run, name) for name in _RUN},
                map(_cells_of, run.measurements),
            )
            for run in runs
        ),
    )


def from_text(text: str, product: str, source: str) -> tuple[Run, ...]:
    """The measurements in a file.

    Args:
        text: Its content.
        product: The product that it must be about.
        source: The file's name, for messages.

    Raises:
        ValueError: It is no such file; the message names the file, the line and the field.
    """
    runs: list[Run] = []
    seen: set[Key] = set()
    for part in tables.from_text(text, source, _COLUMNS):
        measurements = []
        for row in part.rows:
            measurement = _measurement(row)
            _expect_another(measurement.key, seen, row.place)
            measurements.append(measurement)
        runs.append(_run(part, product, tuple(measurements)))
    return tuple(runs)


def _cells_of(measurement: Measurement) -> dict[str, Any]:
    plain = {name: getattr(measurement, name) for name in _MEASURED}
    return plain | measured_numbers(measurement.schedule)


def _run(part: Part, product: str, measurements: tuple[Measurement, ...]) -> Run:
    place = part.place
    given = object_of(part.facts, place, ("product", *_RUN))
    if given["product"] != product:
        raise wrong(f"{place}.product", repr(product), given["product"])
    date = given["date"]
    if date is not None:
        date_of(date, f"{place}.date", expected="a date of ISO 8601 or null")
    return Run(
        device=of_type(str, given["device"], f"{place}.device"),
        driver=of_type(str, given["driver"], f"{place}.driver"),
        iree_base_compiler=of_type(str, given["iree_base_compiler"], f"{place}.iree_base_compiler"),
        date=date,
        measurements=measurements,
    )


def _measurement(row: Row) -> Measurement:
    place = row.place
    given = {name: value_of(kind, row.cells[name]) for name, kind in _MEASURED.items()}
    numbers = {name: value_of(kind, row.cells[name]) for name, kind in _SCHEDULE.items()}
    if given["op"] not in _BACKWARDS:
        raise wrong(f"{place}.op", f"one of {', '.join(_BACKWARDS)}", given["op"])
    return Measurement(
        op=given["op"],
        has_residual=of_type(bool, given["has_residual"], f"{place}.has_residual"),
        from_output=of_type(bool, given["from_output"], f"{place}.from_output"),
        has_gate=of_type(bool, given["has_gate"], f"{place}.has_gate"),
        has_sets=of_type(bool, given["has_sets"], f"{place}.has_sets"),
        grad_outputs=int_of(given["grad_outputs"], f"{place}.grad_outputs", least=1),
        element_bytes=int_of(given["element_bytes"], f"{place}.element_bytes", least=1),
        columns=int_of(given["columns"], f"{place}.columns", least=1),
        rows=int_of(given["rows"], f"{place}.rows", least=1),
        share=positive_of(given["share"], f"{place}.share"),
        schedule=schedule_of_numbers(numbers, place),
    )


def _expect_another(key: Key, seen: set[Key], place: str) -> None:
    """Expects one measurement of each key, because `choose` could not decide between two."""
    if key in seen:
        raise ValueError(
            f"{place}: expected one schedule for each {', '.join(Key._fields)}, got a second one "
            f"for {', '.join(map(str, key))}"
        )
    seen.add(key)
