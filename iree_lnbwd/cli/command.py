"""The command line: one command is parsed and run, and its errors become one line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from iree_lnbwd.cli import (
    benchmark,
    bundle,
    compile,
    inspect,
    report,
    run,
    targets,
    tune,
    tuned,
    verify,
    words,
)
from iree_lnbwd.cli.output import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    expect_streams,
    tell,
)
from iree_lnbwd.errors import (
    CompileError,
    DeviceError,
)
from iree_lnbwd.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 if all went well, 1 if a verification missed, 2 if something could not be done; then one
        line on standard error says what.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        expect_streams()
        return _run_command(given)
    except KeyboardInterrupt:
        tell("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:  # Python itself would exit with 1, which means that something missed
        tell(f"error: {_explained(error)}")
        return EXIT_ERROR


def _run_command(given: Sequence[str]) -> int:
    """Runs the command of these words; returns the exit status."""
    # Words after "--" are for iree-compile, also those that look like options of ours.
    cut = given.index("--") if "--" in given else len(given)
    try:
        options = _parser().parse_args(given[:cut])
    except SystemExit as ended:  # argparse has said what is wrong, or printed the help
        return EXIT_ERROR if ended.code else EXIT_OK
    options.extra_flags = tuple(given[cut + 1 :])
    if options.extra_flags and not options.takes_flags(options):
        raise ValueError(
            f"flags: expected none after --, nothing is compiled here, got {options.extra_flags}"
        )
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _explained(error: Exception) -> str:
    match error:
        case CompileError() | DeviceError() | OSError() | TypeError() | ValueError():
            return str(error) or type(error).__name__
        case MemoryError():
            return f"out of memory: {error}" if str(error) else "out of memory"
    at = traceback.extract_tb(error.__traceback__)[-1]
    name = type(error).__name__
    return f"unexpected, please report: {name}: {error}, at {Path(at.filename).name}:{at.lineno}"


def _parser() -> argparse.ArgumentParser:
    parser = words.Parser(
        prog="iree-lnbwd", description="Layer and RMS normalization, compiled by IREE."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(takes_flags=lambda options: False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in (targets, compile, bundle, verify, run, benchmark, tune, tuned, inspect, report):
        each.add(commands)
    return parser
