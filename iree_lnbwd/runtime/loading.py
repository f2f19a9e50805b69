"""From a .vmfb, on disk or in memory, to a module on a device."""

from __future__ import annotations

import os
from pathlib import Path

from iree_lnbwd import notices
from iree_lnbwd.errors import ArtifactError, DeviceError
from iree_lnbwd.hardware.devices import DEFAULT_DEVICE, DeviceUri, host_cpu, target_of
from iree_lnbwd.hardware.targets import Target, find_target, generic_targets, older_targets
from iree_lnbwd.runtime.iree_module import open_device
from iree_lnbwd.runtime.op import Norm
from iree_lnbwd.runtime.ops import CLASSES
from iree_lnbwd.vmfb import artifact, executables
from iree_lnbwd.vmfb.artifact import Manifest
from iree_lnbwd.vmfb.description import Description, OpenedModule, open_module


def load(path: str | os.PathLike[str], device: str = DEFAULT_DEVICE) -> Norm:
    """Loads a compiled module on a device. This needs only the runtime, no compiler.

    An NVIDIA GPU runs modules for older ones as well, with a warning: its own would be better.

    Args:
        path: The .vmfb (or the .json beside it). A .vmfb without its manifest is enough: it
            describes itself.
        device: IREE device URI: "local-task", "local-sync", "cuda", "hip", "cuda://1".

    Raises:
        TypeError, ValueError: ``path`` is no path, or ``device`` no such URI.
        ArtifactError: The file is missing, truncated, altered, or no module of this package.
        DeviceError: The device is absent or not the kind that the module is for, or an NVIDIA GPU
            that is too old or has too little shared memory for it.
    """
    uri = DeviceUri.parse(device)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a str or a path, got {type(path).__name__}")
    vmfb, manifest = artifact.read(path)
    return load_opened(open_module(vmfb, source=str(path)), manifest, Path(path), uri)


def load_opened(
    opened: OpenedModule, manifest: Manifest | None, path: Path, uri: DeviceUri
) -> Norm:
    """Loads a module that was read.

    Args:
        opened: The module.
        manifest: Its manifest, if it has one.
        path: Where it came from, for messages.
        uri: The device.

    Raises:
        ArtifactError: The manifest is that of another module.
        DeviceError: As `load`.
    """
    module = opened.description
    target = module.target
    if manifest is not None and (
        (manifest.spec, manifest.target, manifest.schedule, manifest.host_cpu)
        != (module.spec, target.name, module.schedule, module.host_cpu)
    ):
        raise ArtifactError(f"{path}: the manifest describes another module than the .vmfb holds")
    if target.backend != uri.backend:
        raise DeviceError(
            f"device: {path} was compiled for {target.name} ({target.backend}), got {uri}"
        )
    _check_cpu(module, path.name)
    if target.backend == "cuda":
        _check_gpu(opened, path.name, uri, target_of(uri))
    return CLASSES[module.spec.op](opened, uri)


def shared_bytes(vmfb: bytes) -> int:
    """Shared memory that the launches of a module for an NVIDIA GPU take for a workgroup."""
    return max(export.shared_bytes for export in executables.exports(vmfb))


def load_built(vmfb: bytes, device: str = DEFAULT_DEVICE) -> Norm:
    """As `load`, for a module in memory."""
    opened = open_module(vmfb, source="module")
    _check_cpu(opened.description, opened.description.spec.name)
    return CLASSES[opened.description.spec.op](opened, DeviceUri.parse(device))


def probe(device: DeviceUri) -> None:
    """Opens a device.

    Raises:
        DeviceError: It is absent.
    """
    open_device(device)


def _check_cpu(module: Description, name: str) -> None:
    """Expects this CPU, or one of this architecture.

    What else a CPU must have, the module itself asks for when it is loaded.
    """
    here, wanted = find_target("host").architecture, module.target.architecture
    if module.host_cpu not in (None, host_cpu()):
        generic = next((each.name for each in generic_targets(here)), None)
        otherwise = f", or ship one for the target {generic!r}" if generic else ""
        raise DeviceError(
            f"device: {name} was compiled for the CPU {module.host_cpu}, this one is "
            f"{host_cpu()}; compile it here{otherwise}"
        )
    if wanted not in ("", here):
        raise DeviceError(
            f"device: {name} was compiled for {module.target.name}, which is for {wanted} CPUs; "
            f"this CPU is {here}"
        )


def _check_gpu(opened: OpenedModule, name: str, uri: DeviceUri, gpu: Target) -> None:
    """Expects an NVIDIA GPU that runs the module; warns if one for a newer GPU would fit it.

    Args:
        opened: The module.
        name: Its file's.
        uri: The GPU.
        gpu: The best target for it.

    Raises:
        DeviceError: The GPU does not run it.
    """
    target = opened.description.target
    if target.capability > gpu.capability:
        raise DeviceError(
            f"device: {name} was compiled for {target.name}; {uri} runs modules for {gpu.name} and "
            "older"
        )
    if target == gpu:
        return
    if target not in older_targets(gpu):
        needed = shared_bytes(opened.vmfb)
        if needed > gpu.shared_bytes:
            raise DeviceError(
                f"device: {name} was compiled for {target.name} and needs {needed} bytes of shared "
                f"memory for a workgroup; {uri} ({gpu.name}) has {gpu.shared_bytes}"
            )
    notices.warn(
        f"device: {uri} is best served by modules for {gpu.name}, got one for {target.name}: it "
        "runs, but its schedule was chosen for another GPU"
    )
