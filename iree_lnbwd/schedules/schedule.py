"""Any schedule: its forms, its assumptions, and its JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

from iree_lnbwd.disk.json_values import of_type, wrong
from iree_lnbwd.errors import shown
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.few_rows import FewRows
from iree_lnbwd.schedules.forward import Forward
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.row_blocks import RowBlocks
from iree_lnbwd.schedules.rules import MOST_NUMBER, least_numbers
from iree_lnbwd.schedules.two_pass import TwoPass
from iree_lnbwd.schedules.whole_tensors import WholeTensors

# Bytes: the alignment that IREE's own CPU code assumes (IREE_HAL_HEAP_BUFFER_ALIGNMENT).
_IREE_ALIGNMENT = 64


Schedule = WholeTensors | OnePass | TwoPass | RowBlocks | Forward
Form = Schedule | FewRows
_FORMS: Mapping[str, type[Any]] = {
    form.__name__: form for form in (WholeTensors, OnePass, TwoPass, RowBlocks, Forward)
}


def forms(schedule: Schedule, spec: NormSpec) -> tuple[Form, ...]:
    """The forms of a module; M decides which a call takes. If there are two, few rows' is first."""
    if isinstance(schedule, Forward):
        return schedule.forms(spec)
    few = schedule.few_rows if isinstance(schedule, OnePass) else None
    if few is None:
        return (schedule,)
    if spec.rows is not None:
        return (few if spec.rows <= few.rows else schedule,)
    return (few, schedule)


def most_few_rows(schedule: Schedule, spec: NormSpec) -> int | None:
    """The most rows that the first of two forms is for; None if a module has one form."""
    if len(forms(schedule, spec)) == 1:
        return None
    if isinstance(schedule, Forward):
        return schedule.most_few_rows
    return schedule.few_rows.rows if isinstance(schedule, OnePass) and schedule.few_rows else None


def paths(schedule: Schedule, spec: NormSpec) -> tuple[str, ...]:
    """The use of memory, in words, for each of the module's forms."""
    first, *rest = forms(schedule, spec)
    most = most_few_rows(schedule, spec)
    if most is None:
        return (first.path(spec),)
    few, *many = (form.path(spec) for form in (first, *rest))
    return (f"M <= {most}: {few}", *(f"M > {most}: {path}" for path in many))


def host_alignment(schedule: Schedule) -> int:
    """The alignment in bytes that a schedule's code assumes of the host's memory.

    It may exceed the elements' own alignment. An aligned load from another address would end the
    process.
    """
    return 1 if isinstance(schedule, RowBlocks) else _IREE_ALIGNMENT


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule as JSON values."""
    return {"form": type(schedule).__name__, **asdict(schedule)}


def schedule_from_dict(values: Any, place: str = "schedule") -> Schedule:
    """The inverse of `schedule_to_dict`, of values from a file; not yet a legal schedule.

    Args:
        values: What was parsed.
        place: Where it is from, for messages.

    Raises:
        ValueError: It is no schedule, or a number in it is none that can be computed with. The
            message names the place.
    """
    given = dict(of_type(dict, values, place))
    name = given.pop("form", None)
    if not isinstance(name, str) or name not in _FORMS:
        raise wrong(place, f"a known form of a schedule ({', '.join(_FORMS)})", name)
    if given.get("few_rows") is not None:
        given["few_rows"] = _form(FewRows, given["few_rows"], f"{place}.few_rows")
    schedule: Schedule = _form(_FORMS[name], given, place)
    return schedule


def _form(form: Any, values: Any, place: str) -> Any:
    given = of_type(dict, values, place)
    known = {field.name: field for field in fields(form)}
    for name in given:
        if name not in known:
            raise ValueError(f"{place}: unknown field {shown(name)} of {form.__name__}")
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise ValueError(f"{place}.{name}: missing")
    made = form(**given)
    try:
        check_numbers(made, place)
    except TypeError as error:
        raise ValueError(str(error)) from error
    for name, least in least_numbers(form).items():
        if not least <= (number := getattr(made, name)) <= MOST_NUMBER:
            raise wrong(f"{place}.{name}", f"an int from {least} to {MOST_NUMBER}", number)
    return made


def check_numbers(form: Form, name: str) -> None:
    """Expects a value of its field's type in every field.

    Args:
        form: The schedule.
        name: What it is called, for messages.

    Raises:
        TypeError: A field has a value of another type.
    """
    types: dict[str, Any] = get_type_hints(type(form))
    for field in fields(form):
        value, expected = getattr(form, field.name), types[field.name]
        if isinstance(value, FewRows):
            check_numbers(value, f"{name}.{field.name}")
        elif not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
            wanted = getattr(expected, "__name__", expected)
            raise TypeError(f"{name}.{field.name}: expected {wanted}, got {shown(value)}")
