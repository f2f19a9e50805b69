"""``iree-lnbwd compile``: a .vmfb and its manifest, or the text that it is made of."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    put,
    say,
)
from iree_lnbwd.cli.spec_options import (
    add_spec_options,
    spec_of,
)
from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.schedules import (
    Schedule,
    WholeTensors,
)
from iree_lnbwd.stores import shipping


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "compile",
        help="make a .vmfb and its manifest",
        epilog="Flags after -- go to iree-compile and into the manifest.",
    )
    sub.add_argument("--target", default="host", help="a name of 'targets' (default: host)")
    add_spec_options(sub)
    sub.add_argument(
        "--whole-tensors",
        action="store_true",
        help="the algorithm as it stands, lowered by IREE alone (default: the best schedule)",
    )
    sub.add_argument(
        "-o", "--output-dir", type=words.path, help="made if need be (default: this folder)"
    )
    shown = sub.add_mutually_exclusive_group()
    shown.add_argument("--print-ir", action="store_true", help="print the MLIR, compile nothing")
    shown.add_argument(
        "--print-command",
        action="store_true",
        help="print the iree-compile command that takes --print-ir's output, compile nothing",
    )
    sub.add_argument(
        "--folded",
        action="store_true",
        help="with --print-ir: inlined and folded by the compiler, as the kernels run",
    )
    sub.set_defaults(command=_run, takes_flags=lambda options: not options.print_ir)


def _run(options: argparse.Namespace) -> int:
    spec, target = spec_of(options), find_target(options.target)
    how: Schedule | None = WholeTensors("asked for") if options.whole_tensors else None
    if options.folded and not options.print_ir:
        raise ValueError("folded: expected only with --print-ir")
    if options.print_ir or options.print_command:
        if options.output_dir is not None:
            raise ValueError(
                f"output_dir: expected none where nothing is compiled, got {options.output_dir}"
            )
        if options.print_ir:
            if how is None and (tuned := shipping.tuned_for(spec, options.target)) is not None:
                how = tuned.schedule
            shown = compiler.folded_text if options.folded else compiler.source_text
            put(shown(spec, target, schedule=how), sys.stdout)
            return EXIT_OK
        command = compiler.command_line(spec, target, extra_flags=options.extra_flags)
        if not command.isprintable():
            raise ValueError(f"flags: expected printable ones, got {options.extra_flags}")
        say(command)
        return EXIT_OK
    folder = Path() if options.output_dir is None else options.output_dir
    start = time.perf_counter()
    made = shipping.compile(
        spec, options.target, folder, schedule=how, extra_flags=options.extra_flags
    )
    size = made.path.stat().st_size
    say(f"{made.path}  {size} bytes, {time.perf_counter() - start:.1f} s")
    say(str(made.manifest_path))
    return EXIT_OK
