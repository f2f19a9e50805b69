"""Puts libraries that `scripts/build_ahead` compiled into a wheel, and names the platform for them.

Without ``IREE_LNBWD_PREBUILT``, which names their folder, a wheel is the same for all platforms.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface):
    """For wheels, but not for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built."""
        folder = os.environ.get("IREE_LNBWD_PREBUILT")
        if not folder or version == "editable":
            return
        build_data["force_include"][folder] = "iree_lnbwd/native/built_ahead"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(Path(folder))}"


def platform_of(folder: Path) -> str:
    """The oldest platform that has what all libraries of a folder need.

    Raises:
        ValueError: There is none, or they are for several machines.
    """
    described = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    machines = {each["machine"] for each in described}
    if len(machines) != 1:
        raise ValueError(f"{folder}: expected libraries for one machine, got {sorted(machines)}")
    named = (re.search(r"@GLIBC_2\.(\d+)", name) for each in described for name in each["symbols"])
    oldest = max(int(found[1]) for found in named if found)
    return f"manylinux_2_{oldest}_{machines.pop()}"
