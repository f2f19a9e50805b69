"""The files of what was tuned: JSON with named fields, in the user's folder and to share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from iree_lnbwd.disk.json_values import (
    date_of,
    int_of,
    object_of,
    of_type,
    parsed,
    positive_of,
    wrong,
)
from iree_lnbwd.errors import one_line
from iree_lnbwd.hardware.targets import TARGETS
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import schedule_from_dict, schedule_to_dict
from iree_lnbwd.schedules.rules import MOST_NUMBER
from iree_lnbwd.stores.tuned import GpuSchedule, Tuned, subject, why_illegal

SCHEMA_VERSION = 1

MOST_BYTES = 1 << 24  # of a file: thousands of entries
_LONGEST = 256  # letters of a text, such as a GPU's name


def to_text(found: Iterable[Tuned]) -> str:
    """The file's text; the same entries give the same."""
    values = {"schema_version": SCHEMA_VERSION, "tuned": [_values(tuned) for tuned in found]}
    return json.dumps(values, indent=1) + "\n"


def from_text(text: str, source: str) -> tuple[Tuned, ...]:
    """The entries of a file; each schedule in it is legal.

    Args:
        text: Its content.
        source: The file's name, for messages.

    Raises:
        ValueError: It is no such file; the message names the file and the field.
    """
    try:
        values = parsed(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: expected JSON: {one_line(error)}") from error
    try:
        return _entries(values, source)
    except RecursionError as error:
        raise ValueError(f"{source}: expected JSON: it is too deep") from error


def _entries(values: Any, source: str) -> tuple[Tuned, ...]:
    top = object_of(values, f"{source}: $", ("schema_version", "tuned"))
    version = int_of(top["schema_version"], f"{source}: $.schema_version", least=1)
    if version != SCHEMA_VERSION:
        raise wrong(f"{source}: $.schema_version", str(SCHEMA_VERSION), version)
    given = of_type(list, top["tuned"], f"{source}: $.tuned")
    found: dict[object, Tuned] = {}
    for i, each in enumerate(given):
        place = f"{source}: $.tuned[{i}]"
        tuned = _tuned(each, place)
        if tuned.key in found:
            raise ValueError(f"{place}: expected one entry for each norm and GPU, got a second")
        found[tuned.key] = tuned
    return tuple(found.values())


def _values(tuned: Tuned) -> dict[str, Any]:
    return asdict(tuned) | {
        "spec": tuned.spec.to_dict(),
        "chosen": schedule_to_dict(tuned.chosen),
        "schedule": schedule_to_dict(tuned.schedule),
    }


def _tuned(values: Any, place: str) -> Tuned:
    given = object_of(values, place, tuple(field.name for field in fields(Tuned)))

    def text(name: str) -> str:
        found = of_type(str, given[name], f"{place}.{name}")
        if not 0 < len(found) <= _LONGEST or not found.isprintable():
            raise wrong(f"{place}.{name}", f"1 to {_LONGEST} printable letters", found)
        return found

    def number(name: str) -> int:
        return int_of(given[name], f"{place}.{name}", least=1, most=MOST_NUMBER)

    spec = _spec(given["spec"], f"{place}.spec")
    target = TARGETS.get(text("target"))
    if target is None or target.backend == "cpu":
        raise wrong(f"{place}.target", "the name of a GPU target", given["target"])
    chosen, schedule = (_schedule(given[n], f"{place}.{n}") for n in ("chosen", "schedule"))
    if why := why_illegal(spec, target, chosen, schedule):
        raise ValueError(f"{place}.schedule: illegal for {spec.name} on {target.name}: {why}")
    return Tuned(
        spec=spec,
        target=target.name,
        gpu=text("gpu"),
        processors=number("processors"),
        compiler=text("compiler"),
        code_sha256=text("code_sha256"),
        date=date_of(given["date"], f"{place}.date"),
        rows=number("rows"),
        candidates=number("candidates"),
        microseconds=positive_of(given["microseconds"], f"{place}.microseconds"),
        chosen_microseconds=positive_of(
            given["chosen_microseconds"], f"{place}.chosen_microseconds"
        ),
        chosen=chosen,
        schedule=schedule,
    )


def _spec(values: Any, place: str) -> NormSpec:
    try:
        spec = NormSpec.from_dict(of_type(dict, values, place))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from error
    if spec.rows is not None or spec != subject(spec):
        raise ValueError(f"{place}: expected any rows, one dimension and the usual eps")
    return spec


def _schedule(values: Any, place: str) -> GpuSchedule:
    """A schedule of a GPU; not yet a legal one."""
    schedule = schedule_from_dict(values, place)
    if not isinstance(schedule, GpuSchedule):
        raise wrong(place, "a schedule of a GPU", type(schedule).__name__)
    return schedule
