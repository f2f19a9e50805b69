"""What sweeps of many legal schedules said on a product: the best of each form, for each width.

`iree_lnbwd.schedules.measured` has the fastest schedule of a width, which `choose` takes. This has
also what the other forms reached there, so that a choice can be judged without a GPU.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from iree_lnbwd.disk import files
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.measured_csv import FOLLOWING
from iree_lnbwd.schedules.one_pass import OnePass
from iree_lnbwd.schedules.two_pass import TwoPass

RESULTS = Path(__file__).parent / "results"
_KEPT = 2  # schedules of each form and cell
_MOST_BYTES = 1 << 20  # of such a file, several times its real size: a rule of thumb
_FORMS = {form.__name__: form for form in (OnePass, TwoPass)}
_KINDS = {name: get_type_hints(form) for name, form in _FORMS.items()}  # of their numbers
# Numbers that follow from the others, and that measured schedules are compared without.
_FOLLOW = {*FOLLOWING, "span_steps"}


class Cell(NamedTuple):
    """What was swept: a backward that adds nothing and takes its input, of one element type."""

    op: str
    dtype: str
    columns: int

    @property
    def spec(self) -> NormSpec:
        """What is computed."""
        return _spec(self)


@functools.cache
def _spec(cell: Cell) -> NormSpec:
    """Made once: it takes longer than most of what is asked of a cell."""
    return NormSpec((cell.columns,), cell.dtype, op=cell.op)


class Form(NamedTuple):
    """How a schedule goes about it, without its numbers.

    Attributes:
        passes: Over memory.
        cluster: Workgroups that share a row.
        shares_subgroup: Whether a subgroup has several rows.
        copies: Whether rows are copied into shared memory.
        bulk: Whether subgroups copy them in bulk.
        one_element: Whether an access has one element.
    """

    passes: int
    cluster: int = 1
    shares_subgroup: bool = False
    copies: bool = False
    bulk: bool = False
    one_element: bool = False


def form_of(schedule: OnePass | TwoPass) -> Form:
    """The form of a schedule."""
    one_element = schedule.vector == 1
    if isinstance(schedule, TwoPass):
        return Form(2, one_element=one_element)
    return Form(
        passes=1,
        cluster=schedule.cluster,
        shares_subgroup=schedule.subgroup_rows > 1,
        copies=schedule.slots > 0,
        bulk=schedule.bulk,
        one_element=one_element and not schedule.bulk,
    )


@dataclass(frozen=True)
class Swept:
    """A schedule that was timed.

    Attributes:
        cell: What it computed.
        share: Of the ceiling, as in `measured.Measurement`.
        schedule: Its last kernel and its few rows are not kept.
    """

    cell: Cell
    share: float
    schedule: OnePass | TwoPass

    @property
    def form(self) -> Form:
        """The schedule's form."""
        return form_of(self.schedule)


def same(one: OnePass | TwoPass, other: OnePass | TwoPass) -> bool:
    """Whether two schedules differ at most in numbers that follow from the others."""
    return _numbers(one) == _numbers(other) and type(one) is type(other)


def best_of_each_form(swept: Iterable[Swept]) -> tuple[Swept, ...]:
    """The fastest schedules of every form and cell, in order."""
    kept: dict[tuple[Cell, Form], list[Swept]] = {}
    for one in sorted(swept, key=lambda one: -one.share):
        best = kept.setdefault((one.cell, one.form), [])
        if len(best) < _KEPT and not any(same(one.schedule, other.schedule) for other in best):
            best.append(one)
    return tuple(one for key in sorted(kept) for one in kept[key])


def path_of(product: str, folder: Path = RESULTS) -> Path:
    """The file of a product."""
    return folder / product / "sweeps.csv"


def read(path: Path) -> tuple[Swept, ...]:
    """What a file has.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged; the message names the file and the line.
    """
    text = files.read(path, most=_MOST_BYTES).decode()
    found = []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        try:
            cell = Cell(row["op"], row["dtype"], int(row["columns"]))
            found.append(Swept(cell, float(row["share"]), _schedule_of(row["schedule"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    return tuple(found)


def write(path: Path, swept: Iterable[Swept]) -> None:
    """Writes a file; it changes completely or not at all.

    Raises:
        OSError: It cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*Cell._fields, "share", "schedule"))
    for one in swept:
        writer.writerow((*one.cell, f"{one.share:.3f}", _text_of(one.schedule)))
    files.write({path: text.getvalue().encode()})


def _numbers(schedule: OnePass | TwoPass) -> dict[str, Any]:
    return {name: value for name, value in asdict(schedule).items() if name not in _FOLLOW}


def _text_of(schedule: OnePass | TwoPass) -> str:
    """The form's name and the numbers that are not the usual ones."""
    usual = {field.name: field.default for field in fields(schedule)}
    said = (
        f"{name}={int(value)}"
        for name, value in _numbers(schedule).items()
        if usual[name] is MISSING or value != usual[name]
    )
    return " ".join((type(schedule).__name__, *said))


def _schedule_of(text: str) -> OnePass | TwoPass:
    name, *said = text.split(" ")
    form, kinds = _FORMS[name], _KINDS[name]
    return form(**{key: kinds[key](int(value)) for key, value in _split(said)})


def _split(said: Iterable[str]) -> Iterator[tuple[str, str]]:
    for each in said:
        key, _, value = each.partition("=")
        yield key, value
