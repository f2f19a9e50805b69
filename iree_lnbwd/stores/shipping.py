"""Compiles a spec for a target into files to ship, by what was tuned for it, if anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from iree_lnbwd.compiling import compiler
from iree_lnbwd.compiling.compiler import check_spec
from iree_lnbwd.errors import shown
from iree_lnbwd.hardware.products import meant
from iree_lnbwd.hardware.targets import find_target
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Schedule
from iree_lnbwd.stores.tuned import Tuned
from iree_lnbwd.stores.tuned_choice import for_product
from iree_lnbwd.vmfb import artifact
from iree_lnbwd.vmfb.artifact import Artifact


def compile(
    spec: NormSpec,
    target: str = "host",
    output_dir: str | os.PathLike[str] = ".",
    *,
    schedule: Schedule | None = None,
    extra_flags: Sequence[str] = (),
) -> Artifact:
    """Compiles a spec for a target and writes the .vmfb and its manifest.

    Args:
        spec: What to compute.
        target: A name or alias of `iree_lnbwd.targets`.
        output_dir: Made if need be. Both files appear whole or not at all.
        schedule: The schedule. None takes what `tune` found for exactly the product that ``target``
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
    check_spec(spec)
    source = None
    if schedule is None and (tuned := tuned_for(spec, target)) is not None:
        schedule, source = tuned.schedule, tuned.source
    planned = compiler.plan(spec, found, schedule=schedule, source=source, extra_flags=extra_flags)
    return artifact.write(folder, *compiler.build_planned(*planned))


def tuned_for(spec: NormSpec, target: str) -> Tuned | None:
    """What `compile` takes before any choice: what was tuned on exactly the product that is meant.

    Args:
        spec: What to compute.
        target: The name of a product, or of a target, which means the product that stands for it.
    """
    found = find_target(target)
    if found.backend == "cpu":
        return None
    return for_product(spec, found, meant(target, found.name))


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
