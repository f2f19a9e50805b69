"""Records of runs, which ``scripts/gpu_verify`` and ``scripts/emulate`` wrote.

A record has the fingerprint of every module that was run, so it is about exactly that code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from iree_lnbwd.disk import tables
from iree_lnbwd.disk.json_values import of_type
from iree_lnbwd.errors import plain
from iree_lnbwd.hardware.targets import Target

_FOLDER = "data/evidence"
_LONGEST_DEVICE = 200  # characters of its name and its driver


class Module(NamedTuple):
    """What a run said of a module.

    Attributes:
        name: The stem of its file.
        passed: Whether every result was within tolerance and repeatable.
        fingerprint: Of its code.
    """

    name: str
    passed: bool
    fingerprint: str


@dataclass(frozen=True)
class Record:
    """One run of ``scripts/gpu_verify`` or of ``scripts/emulate``.

    Attributes:
        target: Name of the target that the modules were compiled for.
        device: The product and its driver; "" if the modules ran in the emulator.
        names: Of the modules that ran.
        passed: Fingerprints of modules whose every gradient was within tolerance and repeatable.
        missed: Fingerprints of the other modules.
    """

    target: str
    device: str
    names: frozenset[str]
    passed: frozenset[str]
    missed: frozenset[str]


def records() -> tuple[Record, ...]:
    """Every record in the package; those of hardware first.

    Raises:
        ValueError: A file is damaged; the message names the file and the line.
    """
    folder = resources.files("iree_lnbwd") / _FOLDER
    found = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        facts, modules = from_text(file.read_text(encoding="utf-8"), file.name)
        found.append(
            Record(
                target=of_type(str, facts.get("target"), f"{file.name}: target"),
                device=""
                if of_type(bool, facts.get("emulated"), f"{file.name}: emulated")
                else of_type(str, facts.get("device"), f"{file.name}: device"),
                names=frozenset(m.name for m in modules),
                passed=frozenset(m.fingerprint for m in modules if m.passed),
                missed=frozenset(m.fingerprint for m in modules if not m.passed),
            )
        )
    return tuple(sorted(found, key=lambda record: not record.device))


def to_text(facts: Mapping[str, Any], modules: Iterable[Module]) -> str:
    """A record's file: facts of the run, and a line for each module in the order of names.

    Args:
        facts: ``target``, ``emulated``, ``device``, and whatever else there is to say.
        modules: Those that were run.
    """
    rows = (module._asdict() for module in sorted(modules))
    return tables.to_text(Module._fields, [(facts, rows)])


def from_text(text: str, source: str) -> tuple[dict[str, Any], list[Module]]:
    """The facts and the modules of a record's file.

    Args:
        text: Its content.
        source: Its name, for messages.

    Raises:
        ValueError: It is no such file; the message names the file and the line.
    """
    parts = tables.from_text(text, source, Module._fields)
    if len(parts) != 1:
        raise ValueError(f"{source}: expected the facts of one run, got {len(parts)}")
    (part,) = parts
    modules = []
    for row in part.rows:
        cells = row.cells
        passed = of_type(bool, tables.value_of(bool, cells["passed"]), f"{row.place}.passed")
        modules.append(Module(cells["name"], passed, cells["fingerprint"]))
    return of_type(dict, part.facts, part.place), modules


def of_any(target: Target) -> str:
    """A summary of the runs for a target, a CPU's or a GPU's, in words."""
    if target.architecture == "aarch64" and not target.is_this_cpu:
        return "disassembled by the tests; run in qemu against f64 NumPy, not on hardware"
    if target.backend == "cpu":
        return "run by the tests against f64 NumPy"
    return of_target(target.name)


def of_target(name: str) -> str:
    """A summary of the runs for a GPU target, in words."""
    ran: dict[str, list[Record]] = {}
    for record in records():
        if record.target == name:
            ran.setdefault(_how(record), []).append(record)
    said = []
    for how, runs in ran.items():
        passed = sum(len(run.passed) for run in runs)
        modules = sum(len(run.passed | run.missed) for run in runs)
        said.append(f"{passed} of {modules} modules {how}")
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
