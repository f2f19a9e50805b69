"""Records of runs, which ``scripts/gpu_verify`` and ``scripts/emulate`` wrote.

A record has the fingerprint of every module that was run, so it is about exactly that code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from iree_lnbwd.errors import plain
from iree_lnbwd.hardware.targets import Target

_FOLDER = "data/evidence"
_LONGEST_DEVICE = 200  # characters of its name and its driver


@dataclass(frozen=True)
class Record:
    """One run of ``scripts/gpu_verify`` or of ``scripts/emulate``.

    Attributes:
        target: Name of the target that the modules were compiled for.
        device: The product and its driver; "" if the modules ran in the emulator.
        passed: Fingerprints of modules whose every gradient was within tolerance and repeatable.
        missed: Fingerprints of the other modules.
    """

    target: str
    device: str
    passed: frozenset[str]
    missed: frozenset[str]


def records() -> tuple[Record, ...]:
    """Every record in the package; those of hardware first."""
    folder = resources.files("iree_lnbwd") / _FOLDER
    found = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        values = json.loads(file.read_text(encoding="utf-8"))
        modules = {module["fingerprint"]: module["passed"] for module in values["modules"]}
        found.append(
            Record(
                target=values["target"],
                device="" if values.get("emulated") else values["device"],
                passed=frozenset(code for code, passed in modules.items() if passed),
                missed=frozenset(code for code, passed in modules.items() if not passed),
            )
        )
    return tuple(sorted(found, key=lambda record: not record.device))


def of_any(target: Target) -> str:
    """A summary of the runs for a target, a CPU's or a GPU's, in words."""
    if target.architecture == "aarch64" and not target.is_this_cpu:
        return "disassembled by the tests; run in qemu against f64 NumPy, not on hardware"
    if target.backend == "cpu":
        return "run by the tests against f64 NumPy"
    return of_target(target.name)


def of_target(name: str) -> str:
    """A summary of the runs for a GPU target, in words."""
    said = [
        f"{len(record.passed)} of {len(record.passed | record.missed)} modules {_how(record)}"
        for record in records()
        if record.target == name
    ]
    return "; ".join(said) or "compiled only, never run"


def of_module(fingerprint: str, among: Sequence[Record] | None = None) -> str:
    """A summary of the runs of exactly this module's code, in words.

    Args:
        fingerprint: Of the module.
        among: The records to look at; None takes those in the package.
    """
    said = []
    for record in records() if among is None else among:
        if fingerprint in record.passed:
            said.append(_how(record))
        elif fingerprint in record.missed:
            said.append(f"FAILED on {_device(record)}" if record.device else "FAILED in emulation")
    return "; ".join(said) or "compiled only: this very module was never run"


def _how(record: Record) -> str:
    return f"verified on {_device(record)}" if record.device else "emulated"


def _device(record: Record) -> str:
    return plain(record.device, _LONGEST_DEVICE)
