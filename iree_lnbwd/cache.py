"""Modules that were compiled before, on disk."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from iree_lnbwd import artifact, compiler
from iree_lnbwd.artifact import Manifest
from iree_lnbwd.devices import host_cpu
from iree_lnbwd.errors import ArtifactError, CompileError
from iree_lnbwd.spec import LayerNormSpec
from iree_lnbwd.targets import Target


def directory() -> Path:
    """``$IREE_LNBWD_CACHE``, else ``iree-lnbwd`` in the user's cache folder."""
    if named := os.environ.get("IREE_LNBWD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iree-lnbwd"


def find(spec: LayerNormSpec, target: Target) -> tuple[bytes, Manifest] | None:
    """What `build` built before; None where there is nothing, or it is damaged."""
    return _find(_path(spec, target), spec, target)


def _find(path: Path, spec: LayerNormSpec, target: Target) -> tuple[bytes, Manifest] | None:
    try:
        vmfb, manifest = artifact.read(path)
    except ArtifactError:
        return None
    if manifest is None or (manifest.spec, manifest.target) != (spec, target.name):
        return None
    return (vmfb, manifest) if manifest.host_cpu in (None, host_cpu()) else None


def build(spec: LayerNormSpec, target: Target) -> tuple[bytes, Manifest]:
    """As `compiler.build`, once for each spec, target, compiler version, flags and IR.

    A damaged entry is compiled again. A folder that cannot be written costs a warning, no more.
    """
    path = _path(spec, target)
    if (found := _find(path, spec, target)) is not None:
        return found
    vmfb, manifest = compiler.build(spec, target)
    try:
        artifact.write(path.parent, vmfb, manifest)
    except ArtifactError as error:
        warnings.warn(f"compiled module not cached: {error}", RuntimeWarning, stacklevel=2)
    return vmfb, manifest


def _path(spec: LayerNormSpec, target: Target) -> Path:
    name = f"{artifact.stem(spec, target.name)}.vmfb"
    try:
        version = compiler.compiler_version()
    except CompileError:
        # No compiler, so no key: what `iree-lnbwd compile` put into the folder itself.
        return directory() / name
    key = "\n".join(
        (
            compiler.source_text(spec, target),
            *compiler.flags(target),
            version,
        )
    )
    return directory() / artifact.digest(key.encode())[:16] / name
