"""The devices of this machine, and the target that fits each."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from iree_lnbwd.errors import DeviceError, shown
from iree_lnbwd.hardware.targets import Target, find_target, target_for_cuda_capability

DEFAULT_DEVICE = "local-task"

_BACKENDS = {"local-task": "cpu", "local-sync": "cpu", "cuda": "cuda", "hip": "rocm"}
_URI = re.compile(r"(?P<driver>[a-z-]+)(?:://(?P<index>\d*))?")
# What an x86-64 CPU can have, by Linux's names and by those that IREE's runtime knows.
_CPU_FEATURES = {
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    **{name: name for name in ("avx", "f16c", "fma", "avx2")},
    **{f"avx512{name}": f"avx512{name}" for name in ("f", "cd", "bw", "dq", "vl", "ifma", "vbmi")},
    **{
        f"avx512_{name}": f"avx512{name}"
        for name in ("vbmi2", "vnni", "bitalg", "vpopcntdq", "bf16", "fp16")
    },
}
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


@dataclass(frozen=True)
class Gpu:
    """What tells a GPU's kind, and what schedules follow from.

    Attributes:
        name: Its name in the driver; of an AMD GPU, LLVM's name and the PCI device.
        processors: Multiprocessors (NVIDIA) or compute units (AMD).
        l2_bytes: Bytes of the L2 cache.
    """

    name: str
    processors: int
    l2_bytes: int


def gpu_of(uri: DeviceUri) -> Gpu:
    """The kind of a GPU of this machine.

    Raises:
        DeviceError: It is absent, or the driver does not tell.
    """
    if uri.backend == "rocm":
        return _amd_gpu(uri)
    cuda, device = _cuda_device(uri)
    name = ctypes.create_string_buffer(256)
    if status := cuda.cuDeviceGetName(name, len(name), device):
        raise DeviceError(f"device: {uri}: cuDeviceGetName failed with {status}")
    processors, l2_bytes = (_cuda_attribute(uri, cuda, device, n) for n in (16, 38))
    return Gpu(name.value.decode(errors="replace"), processors, l2_bytes)


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


def fastest_device() -> DeviceUri:
    """The first GPU of this machine that a target fits, or else its CPU."""
    for driver in ("cuda", "hip"):
        try:
            target_of(uri := DeviceUri(driver))
        except DeviceError:
            continue
        return uri
    return DeviceUri(DEFAULT_DEVICE)


def host_cpu() -> str:
    """A fingerprint of this machine's CPU: code for "host" runs on CPUs that share it."""
    words = " ".join(_cpu_words())
    return f"{platform.machine()}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def cpu_features() -> tuple[str, ...]:
    """What this machine's CPU can do, as far as IREE's runtime can tell of another one.

    Code for "host" may use all of it. A CPU that is no x86-64 has none that is listed here.
    """
    words = _cpu_words()
    return tuple(known for name, known in _CPU_FEATURES.items() if name in words)


def _cpu_words() -> list[str]:
    """What Linux says that this CPU can do, or else the name that Python has for it."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        info = platform.processor()
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    return sorted(set(features[1].split())) if features else [info]


def _cuda_capability(uri: DeviceUri) -> tuple[int, int]:
    """Compute capability, asked of the CUDA driver."""
    cuda, device = _cuda_device(uri)
    major, minor = (_cuda_attribute(uri, cuda, device, number) for number in (75, 76))
    return major, minor


def _cuda_device(uri: DeviceUri) -> tuple[ctypes.CDLL, ctypes.c_int]:
    """The CUDA driver, and its number of a device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"device: {uri} is absent: no CUDA driver on this machine") from error
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), uri.index):
        raise DeviceError(f"device: {uri} is absent: the CUDA driver has no such device")
    return cuda, device


def _cuda_attribute(uri: DeviceUri, cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    """An attribute of a device, by its number in the CUDA driver API (CUdevice_attribute).

    16 is the number of multiprocessors, 38 the bytes of the L2 cache, 75 and 76 are the compute
    capability.
    """
    value = ctypes.c_int()
    if status := cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device):
        raise DeviceError(f"device: {uri}: cuDeviceGetAttribute failed with {status}")
    return value.value


def _gfx_name(uri: DeviceUri) -> str:
    """LLVM's name of an AMD GPU."""
    version = _kfd_numbers(_kfd_gpu(uri) / "properties")["gfx_target_version"]
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _amd_gpu(uri: DeviceUri) -> Gpu:
    """The kind of an AMD GPU, from the kernel driver's list; it has never been read on hardware."""
    node = _kfd_gpu(uri)
    numbers = _kfd_numbers(node / "properties")
    caches = [_kfd_numbers(path) for path in node.glob("caches/*/properties")]
    try:
        name = f"{_gfx_name(uri)}, PCI device {numbers['device_id']:#06x}"
        processors = numbers["simd_count"] // numbers["simd_per_cu"]
        l2_kib = max(cache["size"] for cache in caches if cache["level"] == 2)
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise DeviceError(f"device: {uri}: {node} does not tell its kind: {error!r}") from error
    return Gpu(name, processors, l2_kib << 10)


def _kfd_gpu(uri: DeviceUri) -> Path:
    """The folder of an AMD GPU in the kernel driver's list; its CPUs have version 0."""
    nodes = sorted(_KFD_NODES.glob("*"), key=lambda path: int(path.name))
    gpus = [n for n in nodes if _kfd_numbers(n / "properties").get("gfx_target_version")]
    if uri.index >= len(gpus):
        raise DeviceError(f"device: {uri} is absent: this machine has {len(gpus)} AMD GPUs")
    return gpus[uri.index]


def _kfd_numbers(path: Path) -> dict[str, int]:
    """The named numbers in a file of the kernel driver's list."""
    found = re.findall(r"^(\w+) (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(number) for name, number in found}
