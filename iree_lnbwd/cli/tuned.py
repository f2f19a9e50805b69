"""``iree-lnbwd tuned``: what was tuned, to and from files for other machines."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    say,
)
from iree_lnbwd.disk.user_folders import UnusableError
from iree_lnbwd.errors import (
    CompileError,
)
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.stores.tuned import why_stale


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser("tuned", help="what 'tune' found: to a file, or from one")
    actions = sub.add_subparsers(required=True, metavar="ACTION")
    for name, run, said in (
        ("export", _export, "write all that was found into a file"),
        ("import", _import, "keep what is in a file that 'export' wrote"),
    ):
        action = actions.add_parser(name, help=said)
        action.add_argument("file", type=words.path, help="JSON")
        action.set_defaults(command=run)


def _export(options: argparse.Namespace) -> int:
    path = options.file
    with _unusable_as_error():
        say(f"{path}: {tuned_folder.export(path)} entries")
    return EXIT_OK


def _import(options: argparse.Namespace) -> int:
    path = options.file
    with _unusable_as_error():
        found = tuned_folder.take(path)
        say(f"{tuned_folder.directory()}: {len(found)} entries from {path}")
    for tuned in found:
        try:
            why = why_stale(tuned)
        except CompileError as error:
            why = str(error)
        used = "used where the GPU is that" if why is None else f"not used: {why}"
        say(f"  {tuned.spec.name} for {tuned.gpu} ({tuned.processors} processors): {used}")
    return EXIT_OK


@contextlib.contextmanager
def _unusable_as_error() -> Iterator[None]:
    try:
        yield
    except UnusableError as error:
        raise OSError(str(error)) from error
