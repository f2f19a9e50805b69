"""The command ``iree-lnbwd``, a file for each of its commands."""

from iree_lnbwd.cli.command import main

__all__ = ["main"]
