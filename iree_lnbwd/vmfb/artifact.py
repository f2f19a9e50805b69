"""The files to ship: a .vmfb and, beside it, a .json manifest that describes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from iree_lnbwd.disk import files
from iree_lnbwd.disk.json_values import parsed
from iree_lnbwd.errors import ArtifactError, one_line, shown
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import Schedule, schedule_from_dict, schedule_to_dict
from iree_lnbwd.version import __version__

SCHEMA_VERSION = 1
BUNDLE_SUFFIX = ".lnb"  # of files with many modules, which `iree_lnbwd.bundles` has

MOST_MANIFEST_BYTES = 1 << 20
MOST_VMFB_BYTES = 1 << 30


@dataclass(frozen=True)
class Manifest:
    """What a module is and how it was made.

    Attributes:
        spec: What it computes.
        target: Name of the target that it was compiled for.
        schedule: How it computes it.
        schedule_source: Where the schedule comes from, in words: rules, a measurement, tuning on
            some GPU, or whoever gave it.
        compiler_version: Of iree-base-compiler.
        flags: Exactly the flags that iree-compile was given, without the input and output.
        ir_sha256: Of the MLIR text that was compiled.
        vmfb_sha256: Of the module.
        host_cpu: The CPU that a module for "host" needs; None for other targets.
        package_version: Of iree-lnbwd.
        schema_version: Of this format.
    """

    spec: NormSpec
    target: str
    schedule: Schedule
    schedule_source: str
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
            "schedule": schedule_to_dict(self.schedule),
            "entry": self.spec.op,
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
            return _manifest(parsed(text), path)
        except ArtifactError:
            raise
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: not a manifest: {one_line(error)}") from error


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


def stem(spec: NormSpec, target: str) -> str:
    """File name, without its ending, of the module for a spec and a target."""
    return f"{spec.name}_{target}"


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write(directory: Path, vmfb: bytes, manifest: Manifest) -> Artifact:
    """Both files, whole, or neither of them.

    Raises:
        ArtifactError: The directory cannot be made or written, or the manifest is too long to be
            read again.
    """
    artifact = Artifact(directory / f"{manifest.stem}.vmfb", manifest)
    text = manifest.to_json().encode()
    if len(text) > MOST_MANIFEST_BYTES:
        raise ArtifactError(
            f"manifest: expected at most {MOST_MANIFEST_BYTES} bytes, got {len(text)}"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write({artifact.path: vmfb, artifact.manifest_path: text})
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"output_dir: cannot write to {directory}: {one_line(error)}"
        ) from error
    return artifact


def read(path: str | os.PathLike[str]) -> tuple[bytes, Manifest | None]:
    """A module's bytes and its manifest, checked against each other.

    Args:
        path: The .vmfb, or the .json beside it.

    Returns:
        The .vmfb's bytes, and the manifest or None where the .vmfb stands alone.

    Raises:
        ArtifactError: The .vmfb is not there, or is not the one that the manifest describes.
    """
    vmfb_path = Path(path)
    if vmfb_path.suffix == ".json":
        vmfb_path = vmfb_path.with_suffix(".vmfb")
    if vmfb_path.suffix == BUNDLE_SUFFIX:
        raise ArtifactError(f"{path}: expected a single module, got a bundle: see Bundle")
    try:
        vmfb = files.read(vmfb_path, most=MOST_VMFB_BYTES)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{vmfb_path}: cannot be read: {one_line(error)}") from error
    manifest_path = vmfb_path.with_suffix(".json")
    try:
        text = files.read(manifest_path, most=MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        return vmfb, None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{manifest_path}: cannot be read: {one_line(error)}") from error
    return vmfb, checked(vmfb, text, path=vmfb_path, manifest_path=manifest_path)


def checked(vmfb: bytes, text: bytes, *, path: Path, manifest_path: Path) -> Manifest:
    """The manifest of a module, checked against the module's bytes.

    Args:
        vmfb: The module.
        text: The manifest.
        path: Where the module came from, for messages.
        manifest_path: Where the manifest came from.

    Raises:
        ArtifactError: The text is no manifest, or not of this module.
    """
    try:
        manifest = Manifest.from_json(text.decode(), path=manifest_path)
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{manifest_path}: cannot be read: {one_line(error)}") from error
    if digest(vmfb) != manifest.vmfb_sha256:
        raise ArtifactError(
            f"{path}: truncated or altered: its SHA-256 is {digest(vmfb)}, the manifest "
            f"expects {manifest.vmfb_sha256}"
        )
    return manifest


def _manifest(values: Any, path: Path) -> Manifest:
    """The manifest of these values.

    Raises:
        ArtifactError: They are of another schema, or were altered.
        KeyError, RecursionError, TypeError, ValueError: They are no manifest's.
    """
    if not isinstance(values, dict) or "schema_version" not in values:
        raise ValueError("no schema_version")
    version = values["schema_version"]
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {shown(version)}"
        )
    if values.pop("manifest_sha256", None) != _digest_of_values(values):
        raise ArtifactError(f"{path}: altered: its manifest_sha256 does not match its content")
    flags, host_cpu = values["flags"], values["host_cpu"]
    if not isinstance(flags, list):
        raise TypeError(f"flags: expected a list, got {type(flags).__name__}")
    return Manifest(
        spec=NormSpec.from_dict(values["spec"]),
        target=_string("target", values["target"]),
        schedule=schedule_from_dict(values["schedule"]),
        schedule_source=_string("schedule_source", values["schedule_source"]),
        compiler_version=_string("compiler_version", values["compiler_version"]),
        flags=tuple(_string("flags", flag) for flag in flags),
        ir_sha256=_string("ir_sha256", values["ir_sha256"]),
        vmfb_sha256=_string("vmfb_sha256", values["vmfb_sha256"]),
        host_cpu=None if host_cpu is None else _string("host_cpu", host_cpu),
        package_version=_string("package_version", values["package_version"]),
    )


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {type(value).__name__}")
    return value


def _digest_of_values(values: Mapping[str, Any]) -> str:
    return digest(json.dumps(values, sort_keys=True).encode())
