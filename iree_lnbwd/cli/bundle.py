"""``iree-lnbwd bundle``: many modules in one file."""

from __future__ import annotations

import argparse
import signal
import time

from iree_lnbwd.bundles import choosing
from iree_lnbwd.bundles.writing import bundle
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    interrupted_by,
    say,
    show_progress,
)
from iree_lnbwd.cli.spec_options import (
    add_specs_options,
    specs_of,
    specs_of_model,
)
from iree_lnbwd.errors import (
    counted,
)
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "bundle",
        help="make many modules in one file",
        epilog=(
            "Every op, shape and type is compiled for every target. What is done is kept in the "
            "cache, so the same command goes on after an interruption. Flags after -- go to "
            "iree-compile and into the manifests."
        ),
    )
    to_ship = choosing.target_to_ship(DeviceUri.parse(DEFAULT_DEVICE)).name
    sub.add_argument(
        "--target",
        type=words.listed,
        default=(to_ship,),
        help=f"names of 'targets', or of products, with commas (default: {to_ship})",
    )
    of_what = sub.add_mutually_exclusive_group(required=True)
    of_what.add_argument(
        "--model",
        metavar="FILE:FUNCTION",
        help=(
            "all that the norms of a PyTorch model need: FILE is a Python file, which is run, and "
            "FUNCTION returns the model; --dtype and --weight-dtype are those of calls"
        ),
    )
    add_specs_options(sub, shapes=of_what)
    sub.add_argument(
        "--with",
        dest="include",
        type=words.path,
        metavar="BUNDLE",
        help="take over the members of this bundle, which may be the output itself",
    )
    sub.add_argument("--jobs", type=int, help="modules at once (default: one for each CPU)")
    sub.add_argument("-o", "--output", required=True, type=words.path, help="the file, *.lnb")
    sub.set_defaults(command=_run, takes_flags=lambda options: True)


def _run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    specs = specs_of(options) if options.model is None else specs_of_model(options)
    with interrupted_by(signal.SIGTERM):
        made = bundle(
            specs,
            options.target,
            options.output,
            jobs=options.jobs,
            extra_flags=options.extra_flags,
            include=options.include,
            progress=show_progress,
        )
    size, seconds = made.path.stat().st_size, time.perf_counter() - start
    say(f"{made.path}  {counted(len(made.members), 'module')}, {size} bytes, {seconds:.1f} s")
    return EXIT_OK
