"""The file of a product's measurements: JSON with named fields, a line for each schedule."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_type_hints

from iree_lnbwd.disk.json_values import date_of, int_of, object_of, of_type, positive_of, wrong
from iree_lnbwd.errors import one_line
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.schedules.measured import Key, Measurement, Run
from iree_lnbwd.schedules.one_pass import OnePass

FOLLOWING = ("finalize_slices", "finalize_rows", "finalize_columns", "few_rows")  # from the others
_KINDS = get_type_hints(OnePass)
_SCHEDULE = {f.name: _KINDS[f.name] for f in fields(OnePass) if f.name not in FOLLOWING}

_BACKWARDS = [op.name for op in OPS.values() if op.is_backward]


def measured_numbers(schedule: OnePass) -> dict[str, int | bool]:
    """The fields of a schedule that are measured, by name; the rest follows from them."""
    return {name: getattr(schedule, name) for name in _SCHEDULE}


def schedule_of_numbers(values: Any, place: str) -> OnePass:
    """The inverse of `measured_numbers`, of JSON values.

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
    made = ",\n".join(map(_run_text, runs))
    return f'{{\n"product": {json.dumps(product)},\n"runs": [\n{made}\n]\n}}\n'


def from_text(text: str, product: str, source: str) -> tuple[Run, ...]:
    """The measurements in a file.

    Args:
        text: Its content.
        product: The product that it must be about.
        source: The file's name, for messages.

    Raises:
        ValueError: It is no such file; the message names the file and the field.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: expected JSON: {one_line(error)}") from error
    top = object_of(values, f"{source}: $", ("product", "runs"))
    if top["product"] != product:
        raise wrong(f"{source}: $.product", repr(product), top["product"])
    found = of_type(list, top["runs"], f"{source}: $.runs")
    runs = tuple(_run(run, f"{source}: $.runs[{i}]") for i, run in enumerate(found))
    _expect_one_of_each(runs, source)
    return runs


def _run_text(run: Run) -> str:
    facts = {field.name: getattr(run, field.name) for field in fields(run)}
    measurements = facts.pop("measurements")
    lines = [f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in facts.items()]
    made = ",\n".join(f"  {json.dumps(_measurement_values(m))}" for m in measurements)
    return f'{{\n{"".join(lines)} "measurements": [\n{made}\n ]\n}}'


def _measurement_values(measurement: Measurement) -> dict[str, Any]:
    values = {field.name: getattr(measurement, field.name) for field in fields(measurement)}
    return values | {"schedule": measured_numbers(measurement.schedule)}


def _run(values: Any, place: str) -> Run:
    given = object_of(values, place, tuple(field.name for field in fields(Run)))
    date = given["date"]
    if date is not None:
        date_of(date, f"{place}.date", expected="a date of ISO 8601 or null")
    found = of_type(list, given["measurements"], f"{place}.measurements")
    return Run(
        device=of_type(str, given["device"], f"{place}.device"),
        driver=of_type(str, given["driver"], f"{place}.driver"),
        iree_base_compiler=of_type(str, given["iree_base_compiler"], f"{place}.iree_base_compiler"),
        date=date,
        measurements=tuple(
            _measurement(value, f"{place}.measurements[{i}]") for i, value in enumerate(found)
        ),
    )


def _measurement(values: Any, place: str) -> Measurement:
    given = object_of(values, place, tuple(field.name for field in fields(Measurement)))
    op = of_type(str, given["op"], f"{place}.op")
    if op not in _BACKWARDS:
        raise wrong(f"{place}.op", f"one of {', '.join(_BACKWARDS)}", op)
    return Measurement(
        op=op,
        has_residual=of_type(bool, given["has_residual"], f"{place}.has_residual"),
        from_output=of_type(bool, given["from_output"], f"{place}.from_output"),
        element_bytes=int_of(given["element_bytes"], f"{place}.element_bytes", least=1),
        columns=int_of(given["columns"], f"{place}.columns", least=1),
        rows=int_of(given["rows"], f"{place}.rows", least=1),
        share=positive_of(given["share"], f"{place}.share"),
        schedule=schedule_of_numbers(given["schedule"], f"{place}.schedule"),
    )


def _expect_one_of_each(runs: tuple[Run, ...], source: str) -> None:
    """Expects one measurement of each key, because `choose` could not decide between two."""
    seen: set[Key] = set()
    for i, run in enumerate(runs):
        for j, measurement in enumerate(run.measurements):
            if measurement.key in seen:
                raise ValueError(
                    f"{source}: $.runs[{i}].measurements[{j}]: expected one schedule for each "
                    f"{', '.join(Key._fields)}, got a second one for "
                    f"{', '.join(map(str, measurement.key))}"
                )
            seen.add(measurement.key)
