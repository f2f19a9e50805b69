"""``iree-lnbwd benchmark``: times of a user's own shapes, beside PyTorch's."""

from __future__ import annotations

import argparse

from iree_lnbwd.benchmark import runs
from iree_lnbwd.benchmark.cells import Cell
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import EXIT_OK, say, show_progress
from iree_lnbwd.hardware.devices import DeviceUri, fastest_device
from iree_lnbwd.ops.operands import OPS
from iree_lnbwd.ops.spec import MOST_ROWS

_ROWS = (64, 4096)


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "benchmark",
        help="time your shapes on this machine, beside PyTorch's eager mode and torch.compile",
        epilog="Prints a table and what it was measured with, to be pasted into a report. Without "
        "PyTorch, ours alone is timed.",
    )
    sub.add_argument(
        "--normalized-shape",
        required=True,
        type=words.shapes,
        help="shapes with commas, e.g. 1024,4096 or 16x64,8192",
    )
    sub.add_argument(
        "--rows",
        type=words.ints,
        default=_ROWS,
        help=f"how many rows, with commas (default: {','.join(map(str, _ROWS))})",
    )
    sub.add_argument(
        "--op",
        type=words.known(OPS),
        default=tuple(OPS),
        help="what to compute, with commas (default: all four)",
    )
    sub.add_argument(
        "--dtype",
        type=words.dtypes,
        default=("f32",),
        help="of all tensors, with commas (default: f32)",
    )
    sub.add_argument(
        "--residual",
        action="store_true",
        help="add a residual before a forward, and its gradient after a backward",
    )
    sub.add_argument("--device", help="IREE device URI (default: a GPU if there is one)")
    sub.add_argument(
        "--beside",
        type=words.known(runs.OTHERS),
        default=runs.OTHERS,
        help=f"what of PyTorch's to time as well (default: {','.join(runs.OTHERS)})",
    )
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if min(options.rows) < 1 or max(options.rows) > MOST_ROWS:
        raise ValueError(f"rows: expected ints from 1 to {MOST_ROWS}, got {options.rows}")
    uri = fastest_device() if options.device is None else DeviceUri.parse(options.device)
    cells = [
        Cell(op, options.residual, rows, shape, dtype)
        for shape in options.normalized_shape
        for dtype in options.dtype
        for op in options.op
        for rows in options.rows
    ]
    for cell in cells:
        _ = cell.spec  # what cannot be computed is refused before anything is timed
    for line in runs.lines(cells, uri, options.beside, show_progress):
        say(line)
    return EXIT_OK
