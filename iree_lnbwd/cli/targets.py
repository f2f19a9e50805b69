"""``iree-lnbwd targets``: what can be compiled for, and what is verified."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    put,
    say,
)
from iree_lnbwd.hardware.targets import targets
from iree_lnbwd.verification import evidence


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser("targets", help="what can be compiled for, and what is verified")
    sub.add_argument(
        "bundle",
        nargs="?",
        type=words.path,
        help="only the targets that this bundle has",
    )
    sub.add_argument("--json", action="store_true", help="for programs")
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    listed, counts = targets(), Counter[str]()
    if options.bundle is not None:
        counts.update(member.target.name for member in BundleFile(options.bundle).members)
        listed = tuple(target for target in listed if target.name in counts)
    if options.json:
        for_programs = [
            {
                "name": target.name,
                "backend": target.backend,
                "driver": target.driver,
                "aliases": target.aliases,
                "cpu_features": target.cpu_features,
                "verified": evidence.of_any(target),
                **({"modules": counts[target.name]} if counts else {}),
            }
            for target in listed
        ]
        put(json.dumps(for_programs, indent=2) + "\n", sys.stdout)
        return EXIT_OK
    rows = [("name", "backend", "aliases", "verified")]
    rows += [(t.name, t.backend, " ".join(t.aliases), evidence.of_any(t)) for t in listed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        say("  ".join([*cells, row[-1]]))
    return EXIT_OK
