"""Device URIs, and which target fits a device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from iree_lnbwd import DeviceError
from iree_lnbwd.hardware import devices
from iree_lnbwd.hardware.devices import DeviceUri, Gpu, gpu_of, host_cpu, target_of


@pytest.mark.parametrize(
    ("uri", "parsed", "spelled", "backend"),
    [
        ("local-task", DeviceUri("local-task", 0), "local-task", "cpu"),
        ("local-sync", DeviceUri("local-sync", 0), "local-sync", "cpu"),
        ("local-task://", DeviceUri("local-task", 0), "local-task", "cpu"),
        ("cuda", DeviceUri("cuda", 0), "cuda://0", "cuda"),
        ("cuda://0", DeviceUri("cuda", 0), "cuda://0", "cuda"),
        ("cuda://", DeviceUri("cuda", 0), "cuda://0", "cuda"),
        ("cuda://12", DeviceUri("cuda", 12), "cuda://12", "cuda"),
        ("hip://1", DeviceUri("hip", 1), "hip://1", "rocm"),
    ],
)
def test_parse(uri: str, parsed: DeviceUri, spelled: str, backend: str) -> None:
    assert DeviceUri.parse(uri) == parsed
    assert str(parsed) == spelled
    assert parsed.backend == backend
    assert DeviceUri.parse(spelled) == parsed


@pytest.mark.parametrize(
    "uri",
    ["", "gpu", "rocm", "vulkan", "cuda:1", "cuda:0", "cuda://x", "cuda://-1", "CUDA", " cuda"],
)
def test_parse_rejects(uri: str) -> None:
    said = (
        f"device: expected one of local-task, local-sync, cuda, hip, .* got {re.escape(repr(uri))}"
    )
    with pytest.raises(ValueError, match=said):
        DeviceUri.parse(uri)


def test_parse_rejects_what_is_no_string() -> None:
    with pytest.raises(TypeError, match="device: expected a string, got int"):
        DeviceUri.parse(0)  # type: ignore[arg-type]


@pytest.mark.parametrize("uri", ["local-task", "local-sync"])
def test_the_cpu_is_compiled_for_as_it_is(uri: str) -> None:
    assert target_of(DeviceUri.parse(uri)).name == "host"


def test_host_cpu_is_a_short_stable_fingerprint() -> None:
    assert re.fullmatch(r"\w+-[0-9a-f]{12}", host_cpu())
    assert host_cpu() == host_cpu()


@pytest.mark.parametrize("uri", ["cuda://97", "hip://97"])
def test_a_device_that_no_machine_has(uri: str) -> None:
    with pytest.raises(DeviceError, match=f"device: {uri} is absent: ") as caught:
        target_of(DeviceUri.parse(uri))
    assert "\n" not in str(caught.value)


def kernel_driver_list(folder: Path, *versions: int) -> Path:
    """The files of /sys/class/kfd/kfd/topology/nodes that matter; a CPU has version 0."""
    for node, version in enumerate(versions):
        (folder / str(node)).mkdir()
        (folder / str(node) / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count 304\ngfx_target_version {version}\nvendor_id 4098\n"
        )
    return folder


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
    ],
)
def test_amd_gpus_by_the_kernel_drivers_version(
    version: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_KFD_NODES", kernel_driver_list(tmp_path, 0, version))
    assert target_of(DeviceUri.parse("hip")).name == name


def test_amd_gpus_are_counted_without_cpus_in_numeric_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = kernel_driver_list(tmp_path, 0, 0, 90402, *[90010] * 7, 110000)  # node 10 is the last
    monkeypatch.setattr(devices, "_KFD_NODES", nodes)
    names = [target_of(DeviceUri("hip", index)).name for index in range(9)]
    assert names == ["gfx942", *["gfx90a"] * 7, "gfx1100"]
    with pytest.raises(DeviceError, match="hip://9 is absent: this machine has 9 AMD GPUs"):
        target_of(DeviceUri("hip", 9))


def test_the_kind_of_an_amd_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = kernel_driver_list(tmp_path, 0, 90402)
    monkeypatch.setattr(devices, "_KFD_NODES", nodes)
    with pytest.raises(DeviceError, match=r"hip://0: .*/1 does not tell its kind: "):
        gpu_of(DeviceUri.parse("hip"))
    with (nodes / "1" / "properties").open("a") as properties:
        properties.write("simd_per_cu 4\ndevice_id 29857\nunique_id 18446744073709551615\n")
    for number, (level, kib) in enumerate(((1, 32), (2, 4096), (3, 262144))):
        cache = nodes / "1" / "caches" / str(number)
        cache.mkdir(parents=True)
        (cache / "properties").write_text(f"level {level}\nsize {kib}\nsibling_map 1,0,1\n")
    assert gpu_of(DeviceUri.parse("hip")) == Gpu("gfx942, PCI device 0x74a1", 76, 4 << 20)


def test_an_amd_gpu_without_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_KFD_NODES", kernel_driver_list(tmp_path, 100300))
    with pytest.raises(DeviceError, match=r"no target fits hip://0: .* got 'gfx1030'"):
        target_of(DeviceUri.parse("hip"))
