"""From a spec and a target to a module, by iree-compile."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from iree_lnbwd import schedules
from iree_lnbwd.compiling import ir, iree_compile
from iree_lnbwd.compiling.extra_flags import check_extra_flags
from iree_lnbwd.errors import ArtifactError, CompileError, shown
from iree_lnbwd.hardware.devices import cpu_features, host_cpu
from iree_lnbwd.hardware.targets import Target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Schedule, WholeTensors, check_numbers
from iree_lnbwd.schedules.provenance import source_of
from iree_lnbwd.vmfb import artifact
from iree_lnbwd.vmfb.artifact import Manifest
from iree_lnbwd.vmfb.description import describe

# f64 data must stay f64.
_COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false",)
_INPUT_TYPE = "none"  # linalg and the dialects below it


def build(
    spec: NormSpec,
    target: Target,
    *,
    schedule: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> tuple[bytes, Manifest]:
    """The module in memory: its bytes and its manifest.

    Args:
        spec: What to compute.
        target: What to compile for.
        schedule: The schedule; None takes ``schedules.choose``'s.
        extra_flags: Further flags for iree-compile.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The schedule is illegal for the spec and the target, or a flag would make the
            module differ from its manifest.
        CompileError: The compiler is missing or failed.
    """
    return build_planned(*plan(spec, target, schedule=schedule, extra_flags=extra_flags))


def plan(
    spec: NormSpec,
    target: Target,
    *,
    schedule: Schedule | None = None,
    source: str | None = None,
    extra_flags: Sequence[str] = (),
) -> tuple[str, Manifest]:
    """The text that `build` compiles, and the manifest without the module's SHA-256.

    Args:
        spec: As `build`.
        target: As `build`.
        schedule: As `build`.
        source: Where the schedule comes from, in words; None finds that out.
        extra_flags: As `build`.

    Raises:
        TypeError, ValueError: As `build`.
        CompileError: The compiler is missing.
    """
    check_spec(spec)
    schedule = schedules.choose(spec, target) if schedule is None else schedule
    text = source_text(spec, target, schedule=schedule)
    all_flags = flags(target, extra_flags=extra_flags)
    manifest = Manifest(
        spec=spec,
        target=target.name,
        schedule=schedule,
        schedule_source=source_of(schedule, spec, target) if source is None else source,
        compiler_version=compiler_version(),
        flags=all_flags,
        ir_sha256=artifact.digest(text.encode()),
        vmfb_sha256="",
        host_cpu=_host_cpu(target),
    )
    return text, manifest


def build_planned(text: str, manifest: Manifest) -> tuple[bytes, Manifest]:
    """The module of a `plan`, and its whole manifest.

    Raises:
        CompileError: The compiler failed, or its module differs from the manifest.
    """
    what = f"{manifest.spec.name} for {manifest.target}"
    vmfb = iree_compile.run(text, _INPUT_TYPE, manifest.flags, what)
    try:
        described = describe(vmfb, source="what iree-compile wrote")
    except ArtifactError as error:
        raise CompileError(f"compiling {what} failed: {error}") from error
    made: dict[str, object] = {**described._asdict(), "target": described.target.name}
    for name in ("spec", "target", "schedule", "host_cpu"):
        if made[name] != (asked := getattr(manifest, name)):
            raise CompileError(
                f"compiling {what} made another module: its {name} is {made[name]}, not {asked}"
            )
    return vmfb, replace(manifest, vmfb_sha256=artifact.digest(vmfb))


def build_oracle(spec: NormSpec, target: Target) -> bytes:
    """The module that the StableHLO specification of the op compiles to; needs ``spec.rows``.

    Raises:
        CompileError: The compiler is missing or failed.
    """
    if spec.rows is None:
        raise ValueError("rows: expected a fixed number for StableHLO, got None")
    texts = {name: read_ir(name) for name in ir.oracle(spec)}
    text = _module(texts, spec, target, WholeTensors())
    return iree_compile.run(text, "stablehlo", flags(target), f"{spec.name}, StableHLO")


def source_text(spec: NormSpec, target: Target, *, schedule: Schedule | None = None) -> str:
    """The MLIR text that iree-compile is given.

    Raises:
        TypeError: The schedule is not one.
        ValueError: The schedule is illegal for the spec and the target.
    """
    if schedule is not None:
        _check_schedule(schedule)
    schedule = schedules.choose(spec, target) if schedule is None else schedule
    if (
        not isinstance(schedule, WholeTensors)
        and (why := schedule.illegal(spec, target)) is not None
    ):
        raise ValueError(
            f"schedule: illegal for {spec.name} on {target.name}: {why}; got {shown(schedule)}"
        )
    texts = {name: read_ir(name) for name in ir.sources(spec, target, schedule)}
    return _module(texts, spec, target, schedule)


def folded_text(spec: NormSpec, target: Target, *, schedule: Schedule | None = None) -> str:
    """The text of `source_text` with all that the compiler folds at once: the kernels that run.

    Raises:
        TypeError, ValueError: As `source_text`.
        CompileError: The compiler is missing or failed.
    """
    text = source_text(spec, target, schedule=schedule)
    return iree_compile.fold(text, f"{spec.name} for {target.name}")


def flags(target: Target, *, extra_flags: Sequence[str] = ()) -> tuple[str, ...]:
    """The flags that iree-compile is given.

    Raises:
        TypeError, ValueError: As `check_extra_flags`.
    """
    return (*target.flags, *_COMMON_FLAGS, *check_extra_flags(extra_flags))


def command_line(spec: NormSpec, target: Target, *, extra_flags: Sequence[str] = ()) -> str:
    """A shell command that compiles the text of `source_text`, given on its standard input."""
    output = f"{artifact.stem(spec, target.name)}.vmfb"
    return shlex.join(
        iree_compile.words(_INPUT_TYPE, flags(target, extra_flags=extra_flags), output)
    )


def read_ir(name: str) -> str:
    """The text of a file of ``ir/``: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    for folder in (package / "_ir", package.parent / "ir"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name}: not in {package / '_ir'} and not in {package.parent / 'ir'}")


def compiler_version() -> str:
    """Of the compiler that `build` uses.

    Raises:
        CompileError: It is not installed.
    """
    return iree_compile.version()


def _module(texts: Mapping[str, str], spec: NormSpec, target: Target, schedule: Schedule) -> str:
    """The module of these files of ``ir/``, with what its CPU must have."""
    if spec.strided_rows and isinstance(schedule, WholeTensors):
        raise ValueError("strided_rows: expected False for whole tensors, got True")
    needed = cpu_features() if target.is_this_cpu else target.cpu_features
    return ir.module(texts, spec, target, schedule, host_cpu=_host_cpu(target), cpu_features=needed)


def _host_cpu(target: Target) -> str | None:
    return host_cpu() if target.is_this_cpu else None


def check_spec(spec: object) -> None:
    """Raises a TypeError if it is none."""
    if not isinstance(spec, NormSpec):
        raise TypeError(f"spec: expected a NormSpec, got {type(spec).__name__}")


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule: expected a schedule or None, got {type(schedule).__name__}")
    check_numbers(schedule, "schedule")
