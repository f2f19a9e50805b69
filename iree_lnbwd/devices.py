"""The devices of this machine, and the target that fits each."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from iree_lnbwd.errors import DeviceError, shown
from iree_lnbwd.targets import Target, find_target, target_for_cuda_capability

DEFAULT_DEVICE = "local-task"

_BACKENDS = {"local-task": "cpu", "local-sync": "cpu", "cuda": "cuda", "hip": "rocm"}
_URI = re.compile(r"(?P<driver>[a-z-]+)(?:://(?P<index>\d*))?")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class DeviceUri:
    """An IREE device URI: "local-task", "cuda", "hip", "cuda://1".

    Attributes:
        driver: IREE's name of the runtime driver.
        index: The number of the device in the driver.
    """

    driver: str
    index: int = 0

    @classmethod
    def parse(cls, uri: str) -> DeviceUri:
        """The parts of a URI.

        Raises:
            TypeError: It is no string.
            ValueError: It is not of that form or names another driver.
        """
        if not isinstance(uri, str):
            raise TypeError(f"device: expected a string, got {type(uri).__name__}")
        match = _URI.fullmatch(uri)
        if (
            match is None
            or match["driver"] not in _BACKENDS
            or (match["index"] and _BACKENDS[match["driver"]] == "cpu")
        ):
            raise ValueError(
                f"device: expected one of {', '.join(_BACKENDS)}, with ://INDEX to pick one of "
                f"several GPUs, got {shown(uri)}"
            )
        return cls(match["driver"], int(match["index"] or 0))

    def __str__(self) -> str:
        """IREE's spelling."""
        return f"{self.driver}://{self.index}" if self.backend != "cpu" else self.driver

    @property
    def backend(self) -> str:
        """Which of `Target.backend` runs there: "cpu", "cuda" or "rocm"."""
        return _BACKENDS[self.driver]


def target_of(uri: DeviceUri) -> Target:
    """The target to compile for, for a device of this machine.

    Raises:
        DeviceError: The device is absent, or no target fits it.
    """
    if uri.backend == "cpu":
        return find_target("host")
    name = _gfx_name(uri) if uri.backend == "rocm" else None
    try:
        if name is not None:
            return find_target(name)
        return target_for_cuda_capability(*_cuda_capability(uri))
    except ValueError as error:
        raise DeviceError(f"device: no target fits {uri}: {error}") from error


def host_cpu() -> str:
    """A fingerprint of this machine's CPU: code for "host" runs on CPUs that share it."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = platform.processor()
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    words = sorted(set(features[1].split())) if features else [info]
    return f"{platform.machine()}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"


def _cuda_capability(uri: DeviceUri) -> tuple[int, int]:
    """Compute capability, asked of the CUDA driver (cuDeviceGetAttribute)."""
    major_attribute, minor_attribute = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"device: {uri} is absent: no CUDA driver on this machine") from error
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), uri.index):
        raise DeviceError(f"device: {uri} is absent: the CUDA driver has no such device")
    capability = []
    for attribute in (major_attribute, minor_attribute):
        if status := cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise DeviceError(f"device: {uri}: cuDeviceGetAttribute failed with {status}")
        capability.append(value.value)
    return capability[0], capability[1]


def _gfx_name(uri: DeviceUri) -> str:
    """LLVM's name of an AMD GPU, from the kernel driver's list; its CPUs have version 0."""
    versions = []
    for node in sorted(_KFD_NODES.glob("*"), key=lambda path: int(path.name)):
        text = (node / "properties").read_text(encoding="utf-8")
        version = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        if version and int(version[1]):
            versions.append(int(version[1]))
    if uri.index >= len(versions):
        raise DeviceError(f"device: {uri} is absent: this machine has {len(versions)} AMD GPUs")
    major, minor, step = (
        versions[uri.index] // 10000,
        versions[uri.index] // 100 % 100,
        versions[uri.index] % 100,
    )
    return f"gfx{major}{minor:x}{step:x}"
