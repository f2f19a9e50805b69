"""What a time is a time of: the device, its driver, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from iree_lnbwd.errors import counted
from iree_lnbwd.hardware.devices import DeviceUri, gpu_of
from iree_lnbwd.version import __version__

_CPU_INFO = Path("/proc/cpuinfo")
# The kernel's driver for each kind of GPU, and where Linux has its version.
_DRIVERS = {
    "cuda": ("NVIDIA", Path("/proc/driver/nvidia/version"), r"Module.*?(\d+(?:\.\d+)+)"),
    "rocm": ("amdgpu", Path("/sys/module/amdgpu/version"), r"(\S+)"),
}


def cpu_name() -> str:
    """As the operating system has it."""
    info = _CPU_INFO.read_text(encoding="utf-8") if _CPU_INFO.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def device_facts(uri: DeviceUri) -> dict[str, str]:
    """What a device is, and what drives it.

    Raises:
        DeviceError: It is absent, or the driver does not tell.
    """
    if uri.backend == "cpu":
        cpus = len(os.sched_getaffinity(0))
        return {"device": f"{cpu_name()}, {counted(cpus, 'CPU')}, load {os.getloadavg()[0]:.1f}"}
    gpu = gpu_of(uri)
    unit = "multiprocessors" if uri.backend == "cuda" else "compute units"
    name, place, pattern = _DRIVERS[uri.backend]
    text = place.read_text(encoding="utf-8") if place.is_file() else ""
    found = re.search(pattern, text)
    return {
        "device": f"{gpu.name}, {gpu.processors} {unit}, {gpu.l2_bytes >> 20} MiB of L2 cache",
        "driver": f"{name} {found[1] if found else 'of unknown version'}",
    }


def version_facts() -> dict[str, str]:
    """Of this package, of what it needs, and of the system."""
    parts = {"iree-lnbwd": __version__}
    for package in ("iree-base-compiler", "iree-base-runtime"):
        parts[package] = version(package)
    said = ", ".join(f"{name} {number}" for name, number in parts.items())
    return {
        "versions": f"{said}, Python {platform.python_version()}",
        "system": platform.platform(),
    }


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
