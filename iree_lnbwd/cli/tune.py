"""``iree-lnbwd tune``: the fastest schedules on this machine's GPU."""

from __future__ import annotations

import argparse
import signal
import time

from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_MISS,
    EXIT_OK,
    interrupted_by,
    say,
    show_progress,
)
from iree_lnbwd.cli.spec_options import (
    add_specs_options,
    specs_of,
)
from iree_lnbwd.stores import tuned_folder
from iree_lnbwd.tuning import tuner


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser(
        "tune",
        help="find the fastest schedules on this machine's GPU, and keep them for this user",
        epilog="Several shapes, types and ops are tuned one by one; each is kept when it is done.",
    )
    sub.add_argument("--device", default="cuda", help="IREE device URI (default: cuda)")
    add_specs_options(sub)
    sub.add_argument(
        "--candidates",
        type=int,
        default=tuner.CANDIDATES,
        help=f"schedules that compete for each (default: {tuner.CANDIDATES})",
    )
    sub.add_argument("--seed", type=int, default=0, help="decides which compete (default: 0)")
    sub.add_argument(
        "--again", action="store_true", help="time again what was found before and still holds"
    )
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    specs = specs_of(options)
    missed, start = False, time.perf_counter()
    with interrupted_by(signal.SIGTERM):
        for outcome in tuner.outcomes(
            specs,
            options.device,
            candidates=options.candidates,
            seed=options.seed,
            again=options.again,
            progress=show_progress,
        ):
            missed |= bool(outcome.wrong)
            _say_tuned(outcome, time.perf_counter() - start)
            start = time.perf_counter()
    return EXIT_MISS if missed else EXIT_OK


def _say_tuned(outcome: tuner.Outcome, seconds: float) -> None:
    for wrong in outcome.wrong:
        say(f"WRONG, and not kept: {wrong}")
    tuned = outcome.tuned
    if tuned is None:
        say(f"{outcome.spec.name}: nothing is kept: the choice without tuning is wrong")
        return
    how = f"the best of {tuned.candidates} schedules, {seconds:.0f} s"
    say(f"{outcome.spec.name}: {tuned.gain}")
    say(f"  {how if outcome.is_new else 'kept before; --again times it anew'}; {tuned.source}")
    say(f"  {tuned_folder.file_of(tuned)}")
