"""What is shipped: a .vmfb and, beside it, a .json manifest that says all about it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from iree_lnbwd import schedule
from iree_lnbwd.errors import ArtifactError
from iree_lnbwd.schedule import Schedule
from iree_lnbwd.spec import ENTRY, LayerNormSpec
from iree_lnbwd.version import __version__

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a module is and how it came about.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        schedule: How it computes it.
        compiler_version: Of iree-base-compiler.
        flags: Exactly what iree-compile was given, less the input and output.
        ir_sha256: Of the MLIR text that was compiled.
        vmfb_sha256: Of the module.
        host_cpu: What a module for "host" needs its CPU to be, else None.
        package_version: Of iree-lnbwd.
        schema_version: Of this format.
    """

    spec: LayerNormSpec
    target: str
    schedule: Schedule
    compiler_version: str
    flags: tuple[str, ...]
    ir_sha256: str
    vmfb_sha256: str
    host_cpu: str | None = None
    package_version: str = __version__
    schema_version: int = SCHEMA_VERSION

    @property
    def stem(self) -> str:
        """File name without its ending."""
        return stem(self.spec, self.target)

    def to_json(self) -> str:
        """The same text for the same manifest, ending in its own SHA-256."""
        values: dict[str, Any] = asdict(self) | {
            "spec": self.spec.to_dict(),
            "schedule": schedule.to_dict(self.schedule),
            "entry": ENTRY,
            "arguments": [asdict(argument) for argument in self.spec.arguments],
            "results": [asdict(result) for result in self.spec.results],
        }
        values["manifest_sha256"] = _digest_of_values(values)
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, path: Path) -> Manifest:
        """The inverse of `to_json`.

        Args:
            text: The manifest.
            path: Where it came from, for messages.

        Raises:
            ArtifactError: It is no manifest, of another schema, or was altered.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{path}: not a manifest: {error}") from error
        if not isinstance(values, dict) or "schema_version" not in values:
            raise ArtifactError(f"{path}: not a manifest: no schema_version")
        if (version := values["schema_version"]) != SCHEMA_VERSION:
            raise ArtifactError(
                f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}"
            )
        if values.pop("manifest_sha256", None) != _digest_of_values(values):
            raise ArtifactError(f"{path}: altered: its manifest_sha256 does not match its content")
        try:
            return cls(
                spec=LayerNormSpec.from_dict(values["spec"]),
                target=values["target"],
                schedule=schedule.from_dict(values["schedule"]),
                compiler_version=values["compiler_version"],
                flags=tuple(values["flags"]),
                ir_sha256=values["ir_sha256"],
                vmfb_sha256=values["vmfb_sha256"],
                host_cpu=values["host_cpu"],
                package_version=values["package_version"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: not a manifest: {error}") from error


@dataclass(frozen=True)
class Artifact:
    """A module on disk.

    Attributes:
        path: The .vmfb.
        manifest: What it is.
    """

    path: Path
    manifest: Manifest

    @property
    def manifest_path(self) -> Path:
        """The .json beside the .vmfb."""
        return self.path.with_suffix(".json")


def stem(spec: LayerNormSpec, target: str) -> str:
    """File name, without its ending, of the module for a spec and a target."""
    return f"{spec.name}_{target}"


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write(directory: Path, vmfb: bytes, manifest: Manifest) -> Artifact:
    """Both files, each of them whole or not there at all.

    Raises:
        ArtifactError: The directory cannot be made or written.
    """
    artifact = Artifact(directory / f"{manifest.stem}.vmfb", manifest)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(artifact.path, vmfb)
        write_atomically(artifact.manifest_path, manifest.to_json().encode())
    except OSError as error:
        raise ArtifactError(f"output_dir: cannot write to {directory}: {error}") from error
    return artifact


def write_atomically(path: Path, data: bytes) -> None:
    """A file with ``data``, or what was there before; never something between."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)  # mkstemp makes files that only their owner reads
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[bytes, Manifest | None]:
    """A module's bytes and its manifest, checked against each other.

    Args:
        path: The .vmfb, or the .json beside it.

    Returns:
        The .vmfb's bytes, and the manifest or None where the .vmfb stands alone.

    Raises:
        ArtifactError: The .vmfb is not there, or not the one that the manifest speaks of.
    """
    vmfb_path = Path(path)
    if vmfb_path.suffix == ".json":
        vmfb_path = vmfb_path.with_suffix(".vmfb")
    try:
        vmfb = vmfb_path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{vmfb_path}: cannot be read: {error.strerror}") from error
    manifest_path = vmfb_path.with_suffix(".json")
    try:
        text = manifest_path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return vmfb, None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{manifest_path}: cannot be read: {error}") from error
    manifest = Manifest.from_json(text, path=manifest_path)
    if digest(vmfb) != manifest.vmfb_sha256:
        raise ArtifactError(
            f"{vmfb_path}: truncated or altered: its SHA-256 is {digest(vmfb)}, the manifest "
            f"expects {manifest.vmfb_sha256}"
        )
    return vmfb, manifest


def _digest_of_values(values: Mapping[str, Any]) -> str:
    return digest(json.dumps(values, sort_keys=True).encode())
