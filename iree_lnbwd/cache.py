"""Modules that were compiled before, on disk."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from iree_lnbwd import artifact, compiler
from iree_lnbwd.artifact import Manifest
from iree_lnbwd.devices import host_cpu
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target


def directory() -> Path:
    """``$IREE_LNBWD_CACHE``, else ``iree-lnbwd`` in the user's cache folder."""
    if named := os.environ.get("IREE_LNBWD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iree-lnbwd"


def build(spec: LayerNormSpec, target: Target) -> tuple[bytes, Manifest]:
    """As `compiler.build`, once for each spec, target, compiler version, flags and IR.

    A damaged entry is compiled again. A folder that cannot be written costs a warning, no more.
    """
    text = compiler.source_text(spec, target)
    key = "\n".join(
        (
            text,
            *compiler.flags(target),
            compiler.compiler_version(),
            host_cpu() if target.name == "host" else "",
        )
    )
    folder = directory() / artifact.digest(key.encode())[:16]
    path = folder / f"{artifact.stem(spec, target.name)}.vmfb"
    try:
        vmfb, manifest = artifact.read(path)
        if manifest is not None:
            return vmfb, manifest
    except ArtifactError:
        pass  # not there yet, or damaged
    vmfb, manifest = compiler.build(spec, target)
    try:
        artifact.write(folder, vmfb, manifest)
    except ArtifactError as error:
        warnings.warn(f"compiled module not cached: {error}", RuntimeWarning, stacklevel=2)
    return vmfb, manifest
