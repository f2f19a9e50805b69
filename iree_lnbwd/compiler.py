"""From a spec and a target to an artifact, by iree-compile."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from iree_lnbwd import artifact, ir, iree_compile, schedules
from iree_lnbwd.artifact import Artifact, Manifest
from iree_lnbwd.description import describe
from iree_lnbwd.devices import cpu_features, host_cpu
from iree_lnbwd.errors import ArtifactError, CompileError, shown
from iree_lnbwd.extra_flags import check_extra_flags
from iree_lnbwd.products import PRODUCTS, standing_for
from iree_lnbwd.schedules import Schedule, WholeTensors, check_numbers
from iree_lnbwd.schedules.sources import source_of
from iree_lnbwd.spec import NormSpec
from iree_lnbwd.targets import Target, find_target

if TYPE_CHECKING:
    from iree_lnbwd.tuning.tuned import Tuned

# f64 data must stay f64.
_COMMON_FLAGS = ("--iree-input-demote-f64-to-f32=false",)
_INPUT_TYPE = "none"  # linalg and the dialects below it


def compile(
    spec: NormSpec,
    target: str = "host",
    output_dir: str | os.PathLike[str] = ".",
    *,
    how: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> Artifact:
    """Compiles a spec for a target and writes the .vmfb and its manifest.

    Args:
        spec: What to compute.
        target: A name or alias of `iree_lnbwd.targets`.
        output_dir: Made if need be. Both files appear whole or not at all.
        how: The schedule. None takes what `tune` found for exactly the product that ``target``
            means, whichever GPU this machine has, and otherwise ``schedules.choose``'s.
        extra_flags: Further flags for iree-compile, recorded in the manifest.

    Returns:
        The artifact; the same arguments, and the same content of the user's tuning folder, give
        the same bytes. The manifest says where the schedule comes from.

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``target`` is unknown, the schedule is illegal for it and the spec, or a flag
            would make the module differ from its manifest.
        CompileError: The compiler is missing or failed.
        ArtifactError: ``output_dir`` cannot be written.
    """
    folder = _checked_folder(output_dir)
    found = find_target(target)
    _check_spec(spec)
    source = None
    if how is None and (tuned := tuned_for(spec, target)) is not None:
        how, source = tuned.schedule, tuned.source
    planned = plan(spec, found, how=how, source=source, extra_flags=extra_flags)
    return artifact.write(folder, *build_planned(*planned))


def tuned_for(spec: NormSpec, target: str) -> Tuned | None:
    """What `compile` takes before any choice: what was tuned on exactly the product that is meant.

    Args:
        spec: What to compute.
        target: The name of a product, or of a target, which means the product that stands for it.
    """
    from iree_lnbwd.tuning.found import for_product  # it plans by functions of this module

    found = find_target(target)
    if found.backend == "cpu":
        return None
    return for_product(spec, found, PRODUCTS.get(target.lower()) or standing_for(found.name))


def build(
    spec: NormSpec,
    target: Target,
    *,
    how: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> tuple[bytes, Manifest]:
    """The module in memory: its bytes and its manifest.

    Args:
        spec: What to compute.
        target: What to compile for.
        how: The schedule; None takes ``schedules.choose``'s.
        extra_flags: Further flags for iree-compile.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The schedule is illegal for the spec and the target, or a flag would make the
            module differ from its manifest.
        CompileError: The compiler is missing or failed.
    """
    return build_planned(*plan(spec, target, how=how, extra_flags=extra_flags))


def plan(
    spec: NormSpec,
    target: Target,
    *,
    how: Schedule | None = None,
    source: str | None = None,
    extra_flags: Sequence[str] = (),
) -> tuple[str, Manifest]:
    """The text that `build` compiles, and the manifest without the module's SHA-256.

    Args:
        spec: As `build`.
        target: As `build`.
        how: As `build`.
        source: Where the schedule comes from, in words; None finds that out.
        extra_flags: As `build`.

    Raises:
        TypeError, ValueError: As `build`.
        CompileError: The compiler is missing.
    """
    _check_spec(spec)
    how = schedules.choose(spec, target) if how is None else how
    text = source_text(spec, target, how=how)
    all_flags = flags(target, extra_flags=extra_flags)
    manifest = Manifest(
        spec=spec,
        target=target.name,
        schedule=how,
        schedule_source=source_of(how, spec, target) if source is None else source,
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
    name = ir.oracle(spec)
    text = _module({name: read_ir(name)}, spec, target, WholeTensors())
    return iree_compile.run(text, "stablehlo", flags(target), f"{spec.name}, StableHLO")


def source_text(spec: NormSpec, target: Target, *, how: Schedule | None = None) -> str:
    """The MLIR text that iree-compile is given.

    Raises:
        TypeError: The schedule is not one.
        ValueError: The schedule is illegal for the spec and the target.
    """
    if how is not None:
        _check_schedule(how)
    how = schedules.choose(spec, target) if how is None else how
    if not isinstance(how, WholeTensors) and (why := how.illegal(spec, target)) is not None:
        raise ValueError(
            f"schedule: illegal for {spec.name} on {target.name}: {why}; got {shown(how)}"
        )
    texts = {name: read_ir(name) for name in ir.sources(spec, target, how)}
    return _module(texts, spec, target, how)


def folded_text(spec: NormSpec, target: Target, *, how: Schedule | None = None) -> str:
    """The text of `source_text` with all that the compiler folds at once: the kernels that run.

    Raises:
        TypeError, ValueError: As `source_text`.
        CompileError: The compiler is missing or failed.
    """
    text = source_text(spec, target, how=how)
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
    package = Path(__file__).parent
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


def _module(texts: Mapping[str, str], spec: NormSpec, target: Target, how: Schedule) -> str:
    """The module of these files of ``ir/``, with what its CPU must have."""
    needed = cpu_features() if target.is_this_cpu else target.cpu_features
    return ir.module(texts, spec, target, how, host_cpu=_host_cpu(target), cpu_features=needed)


def _host_cpu(target: Target) -> str | None:
    return host_cpu() if target.is_this_cpu else None


def _check_spec(spec: object) -> None:
    if not isinstance(spec, NormSpec):
        raise TypeError(f"spec: expected a NormSpec, got {type(spec).__name__}")


def _check_schedule(how: object) -> None:
    if not isinstance(how, Schedule):
        raise TypeError(f"how: expected a schedule or None, got {type(how).__name__}")
    check_numbers(how, "how")


def _checked_folder(output_dir: object) -> Path:
    try:
        folder = Path(output_dir)  # type: ignore[arg-type]
        usable = b"\0" not in os.fsencode(folder)
    except TypeError as error:
        raise TypeError(f"output_dir: expected a path, got {shown(output_dir)}") from error
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ValueError(f"output_dir: expected a path, got {shown(output_dir)}")
    return folder
