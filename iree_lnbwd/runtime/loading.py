"""From a .vmfb, on disk or in memory, to a module on a device."""

from __future__ import annotations

import os
from pathlib import Path

from iree_lnbwd import artifact
from iree_lnbwd.description import Description, open_module
from iree_lnbwd.devices import DEFAULT_DEVICE, DeviceUri, host_cpu
from iree_lnbwd.errors import ArtifactError, DeviceError
from iree_lnbwd.runtime.iree_module import open_device
from iree_lnbwd.runtime.op import Norm
from iree_lnbwd.runtime.ops import CLASSES


def load(path: str | os.PathLike[str], device: str = DEFAULT_DEVICE) -> Norm:
    """Loads a compiled module on a device. This needs only the runtime, no compiler.

    Args:
        path: The .vmfb (or the .json beside it). A .vmfb without its manifest is enough: it
            describes itself.
        device: IREE device URI: "local-task", "local-sync", "cuda", "hip", "cuda://1".

    Raises:
        TypeError, ValueError: ``path`` is no path, or ``device`` no such URI.
        ArtifactError: The file is missing, truncated, altered, or no module of this package.
        DeviceError: The device is absent or not the kind that the module is for.
    """
    uri = DeviceUri.parse(device)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected a str or a path, got {type(path).__name__}")
    vmfb, manifest = artifact.read(path)
    opened = open_module(vmfb, source=str(path))
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
    _check_host_cpu(module, Path(path).name)
    return CLASSES[module.spec.op](opened, uri)


def load_built(vmfb: bytes, device: str = DEFAULT_DEVICE) -> Norm:
    """As `load`, for a module in memory."""
    opened = open_module(vmfb, source="module")
    _check_host_cpu(opened.description, opened.description.spec.name)
    return CLASSES[opened.description.spec.op](opened, DeviceUri.parse(device))


def probe(device: DeviceUri) -> None:
    """Opens a device.

    Raises:
        DeviceError: It is absent.
    """
    open_device(device)


def _check_host_cpu(module: Description, name: str) -> None:
    if module.host_cpu not in (None, host_cpu()):
        raise DeviceError(
            f"device: {name} was compiled for the CPU {module.host_cpu}, this one is "
            f"{host_cpu()}; compile it here, or ship one for the target 'generic'"
        )
