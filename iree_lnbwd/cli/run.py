"""``iree-lnbwd run``: a module on the arrays of an .npz."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from iree_lnbwd import runtime
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    say,
)
from iree_lnbwd.disk import files
from iree_lnbwd.errors import (
    plain,
)
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE
from iree_lnbwd.ops import npz
from iree_lnbwd.verification import verify


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser("run", help="run a module on the arrays of an .npz")
    sub.add_argument("artifact", type=words.path, help="a .vmfb")
    sub.add_argument("--device", default=DEFAULT_DEVICE, help="IREE device URI, e.g. cuda://1")
    sub.add_argument(
        "--input",
        required=True,
        type=words.path,
        help=".npz with the op's arguments, such as grad_output, input, mean, rstd, weight",
    )
    sub.add_argument(
        "--output",
        required=True,
        help=".npz to write the results to; - is standard output",
    )
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    source = plain(options.input)
    (rows_per_set, gate_first), arrays = verify.options_of(npz.read(options.input), source)
    op = runtime.load(options.artifact, options.device)
    verify.check_names(arrays, source, op.spec.family)
    if gate_first not in (None, op.spec.gate_first):
        expected = f"expected {op.spec.gate_first}, as this module has it"
        raise ValueError(f"{source}: gate_first: {expected}, got {gate_first}")
    results = op(**arrays, rows_per_set=1 if rows_per_set is None else rows_per_set)
    named = {k: v for k, v in results._asdict().items() if v is not None}
    output = Path("/dev/fd/1" if options.output == "-" else options.output)
    summary = sys.stderr if files.is_stdout(output) else sys.stdout
    npz.write(output, named)
    for name, array in named.items():
        say(f"{name}: {'x'.join(map(str, array.shape))} {array.dtype}", summary)
    say(options.output, summary)
    return EXIT_OK
