"""``iree-lnbwd inspect``: what a module is and what its kernels need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from iree_lnbwd import emulator
from iree_lnbwd.bundles.container import BundleFile, is_bundle
from iree_lnbwd.cli import words
from iree_lnbwd.cli.output import (
    EXIT_OK,
    say,
)
from iree_lnbwd.errors import (
    ArtifactError,
    counted,
)
from iree_lnbwd.hardware.products import standing_for
from iree_lnbwd.schedules import (
    Forward,
    OnePass,
    TwoPass,
    cost_model,
    paths,
)
from iree_lnbwd.verification import evidence
from iree_lnbwd.vmfb import artifact, inspection, raw_interface
from iree_lnbwd.vmfb.artifact import Manifest
from iree_lnbwd.vmfb.description import Description, describe
from iree_lnbwd.vmfb.inspection import KernelReport

_CALLS = ("through IREE's device, waiting for the result", "on the caller's stream, not waiting")


def add(commands: words.Commands) -> None:
    """Adds the command to the parser."""
    sub = commands.add_parser("inspect", help="what a module is and what its kernels need")
    sub.add_argument("artifact", type=words.path, help="a .vmfb, or a bundle")
    sub.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if is_bundle(options.artifact):
        return _inspect_bundle(BundleFile(options.artifact))
    vmfb, manifest = artifact.read(options.artifact)
    described = describe(vmfb, source=str(options.artifact))
    try:
        kernels = inspection.kernels(vmfb, described.target)
        run = _what_was_run(vmfb, described)
    except (ValueError, emulator.Fault, emulator.VmError) as error:
        raise ArtifactError(f"{options.artifact}: {error}") from error
    path = options.artifact.with_suffix(".vmfb")
    module = f"SHA-256 {artifact.digest(vmfb)}: {run}"
    for name, value in _facts(path, described, manifest, module, kernels):
        say(f"{name:<10}{value}")
    say("kernels")
    for kernel in kernels:
        say(f"  {kernel.name}")
        say(f"    {_needs(kernel)}")
    return EXIT_OK


def _inspect_bundle(file: BundleFile) -> int:
    size = sum(stored.size for member in file.members for _, stored in member.files)
    say(f"{file.path}: {counted(len(file.members), 'module')}, {size} bytes with manifests")
    width = max(len(member.name) for member in file.members)
    for member in file.members:
        needed = "" if member.host_cpu is None else f"  for the CPU {member.host_cpu}"
        said = f"{member.vmfb.size:>9} bytes, SHA-256 {member.vmfb.sha256}"
        say(f"{member.name:<{width}}  {said}{needed}")
    return EXIT_OK


def _what_was_run(vmfb: bytes, described: Description) -> str:
    if described.target.backend == "cpu":
        return f"{evidence.of_any(described.target)}, as others of its kind"
    from iree_lnbwd.verification import fingerprint  # it loads much of the emulator

    return evidence.of_module(fingerprint.of(vmfb, source=described.spec.name))


def _facts(
    path: Path,
    described: Description,
    manifest: Manifest | None,
    module: str,
    kernels: Sequence[KernelReport],
) -> list[tuple[str, object]]:
    spec, target, schedule, launches, *_ = described
    facts: list[tuple[str, object]] = [
        ("op", spec.name),
        ("target", f"{target.name} ({target.backend}): {evidence.of_any(target)}"),
        ("module", module),
        ("takes", ", ".join(f"{a.name} {a}" for a in spec.inputs)),
        ("fills", ", ".join(f"{r.name} {r}" for r in spec.results)),
        *(("path", path) for path in paths(schedule, spec)),
        *(("paper", line) for line in _on_paper(described, kernels)),
        *((("calls", _CALLS[launches is not None]),) if target.backend != "cpu" else ()),
        ("function", f"{described.declaration} of module {described.name}"),
        ("bare", raw_interface.command(path, spec, target)),
    ]
    if manifest is None:
        return [*facts, ("manifest", "none beside the .vmfb; the above is from the module itself")]
    return [
        *facts,
        ("schedule", manifest.schedule_source),
        ("compiler", f"iree-base-compiler {manifest.compiler_version}"),
        ("flags", " ".join(manifest.flags)),
        ("IR", f"SHA-256 {manifest.ir_sha256}"),
    ]


def _on_paper(described: Description, kernels: Sequence[KernelReport]) -> list[str]:
    """What the model says of the schedule of many rows, if it knows the target's product."""
    spec, target, schedule, *_ = described
    if target.backend == "cpu" or not isinstance(schedule, OnePass | TwoPass | Forward):
        return []
    product = standing_for(target.name)
    if not cost_model.knows(product) or schedule.illegal(spec, target) is not None:
        return []
    registers = {kernel.name: kernel.registers for kernel in kernels}
    paper = cost_model.estimate(
        spec, target, product, schedule, registers=registers.get(cost_model.kernel(schedule))
    )
    share = f"; about {paper.share:.0%} of the bandwidth" if target.backend == "cuda" else ""
    rows = counted(cost_model.rows_of(spec), "row")
    return [f"not measured: {product.name}, {rows}: {paper.said}{share}"]


def _needs(kernel: KernelReport) -> str:
    known = (
        ("threads", kernel.threads),
        ("registers", kernel.registers),
        ("bytes shared", kernel.shared_bytes),
        ("bytes stack", kernel.stack_bytes),
    )
    said = [f"{value} {unit}" for unit, value in known if value is not None]
    return ", ".join(said) or "CPU code"
