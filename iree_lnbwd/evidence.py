"""What was run on hardware: the records that ``scripts/gpu_verify`` wrote.

A record names the SHA-256 of every module that it ran, so it speaks of exactly those bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

_FOLDER = "data/evidence"


@dataclass(frozen=True)
class Record:
    """One run of ``scripts/gpu_verify``.

    Attributes:
        target: Name of the target that the modules were compiled for.
        device: The product and its driver.
        passed: SHA-256 of the modules whose every gradient was within tolerance and repeatable.
        missed: SHA-256 of the others.
    """

    target: str
    device: str
    passed: frozenset[str]
    missed: frozenset[str]


def records() -> tuple[Record, ...]:
    """Every record that the package carries."""
    folder = resources.files("iree_lnbwd") / _FOLDER
    found = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        values = json.loads(file.read_text(encoding="utf-8"))
        modules = {module["vmfb_sha256"]: module["passed"] for module in values["modules"]}
        found.append(
            Record(
                target=values["target"],
                device=values["device"],
                passed=frozenset(sha for sha, passed in modules.items() if passed),
                missed=frozenset(sha for sha, passed in modules.items() if not passed),
            )
        )
    return tuple(found)


def of_target(name: str) -> str:
    """What has been run of a GPU target, in words."""
    said = [
        f"{len(record.passed)} of {len(record.passed | record.missed)} modules verified on "
        f"{record.device}"
        for record in records()
        if record.target == name
    ]
    return "; ".join(said) or "compiled only, never run"


def of_module(vmfb_sha256: str) -> str:
    """What has been run of exactly this module, in words."""
    for record in records():
        if vmfb_sha256 in record.passed:
            return f"verified on {record.device}"
        if vmfb_sha256 in record.missed:
            return f"FAILED on {record.device}"
    return "this very module was not run on hardware"
