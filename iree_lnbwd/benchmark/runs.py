"""A whole benchmark: who times, each cell, and what is said of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from iree_lnbwd.benchmark import machine, report
from iree_lnbwd.benchmark.alone import OnGpu, OnHost
from iree_lnbwd.benchmark.cells import Cell
from iree_lnbwd.calls import modules
from iree_lnbwd.errors import one_line
from iree_lnbwd.hardware.devices import DeviceUri

if TYPE_CHECKING:
    from iree_lnbwd.benchmark.beside import Beside

Tell = Callable[[str], None]
Clock: TypeAlias = "Beside | OnHost"
OTHERS = ("eager", "compile")


def lines(
    cells: Sequence[Cell], uri: DeviceUri, others: Sequence[str], tell: Tell
) -> Iterator[str]:
    """The report's lines; each cell's comes when it was timed.

    Args:
        cells: At least one.
        uri: Where.
        others: What of PyTorch's is timed as well: some of `OTHERS`.
        tell: Is told what is being done, a line at a time.

    Raises:
        CompileError, DeviceError, MemoryError: As calls.
    """
    start = time.perf_counter()
    clock, alone = _clock(uri, others, tell)
    with contextlib.closing(clock):
        yield from report.header(clock.columns)
        for number, cell in enumerate(cells, 1):
            tell(f"{number} of {len(cells)}: {cell}")
            yield report.line(cell, clock.columns, clock.times(cell))
        facts = {"times": clock.how, **machine.device_facts(uri), **clock.facts()}
        if alone is not None:
            facts["PyTorch"] = f"{alone}: ours alone was timed"
        facts |= machine.version_facts()
        for spec in clock.specs(cells):
            made = modules.origin(spec, uri)
            facts[f"schedule of {spec.name}, {made.target}"] = made.schedule
        facts["took"] = f"{time.perf_counter() - start:.0f} s"
        yield ""
        yield from report.footer(facts)


def _clock(uri: DeviceUri, others: Sequence[str], tell: Tell) -> tuple[Clock, str | None]:
    """What times, and why it is not PyTorch, if it is not."""
    try:
        tell("importing PyTorch")
        from iree_lnbwd.benchmark import beside
    except (ImportError, OSError) as error:  # a library that it needs may be missing
        why: str | None = f"it cannot be imported ({one_line(error)})"
    else:
        why = beside.why_not(uri)
        if why is None:
            return beside.Beside(uri, others, tell), None
    tell(f"PyTorch: {why}: ours alone is timed")
    return OnHost() if uri.backend == "cpu" else OnGpu(uri), why
