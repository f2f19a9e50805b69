"""The table of targets: what is in it, what names mean, and what is said of unknown ones."""

from __future__ import annotations

import re

import pytest

import iree_lnbwd as lnbwd
from iree_lnbwd.hardware.targets import (
    Target,
    find_target,
    generic_targets,
    older_targets,
    target_for_cuda_capability,
)

# name: (backend, driver, aliases)
TABLE = {
    "host": ("cpu", "local-task", ()),
    "generic": ("cpu", "local-task", ()),
    "generic-v3": ("cpu", "local-task", ()),
    "generic-aarch64": ("cpu", "local-task", ()),
    "sm_75": ("cuda", "cuda", ("t4",)),
    "sm_80": ("cuda", "cuda", ("a100", "h200_as_sm_80")),
    "sm_86": ("cuda", "cuda", ("rtx3090",)),
    "sm_89": ("cuda", "cuda", ("rtx4090", "l4", "l40s")),
    "sm_90": ("cuda", "cuda", ("h100", "h200")),
    "sm_100": ("cuda", "cuda", ("b200",)),
    "sm_103": ("cuda", "cuda", ("b300",)),
    "sm_120": ("cuda", "cuda", ("rtx5090",)),
    "sm_121": ("cuda", "cuda", ("gb10",)),
    "gfx90a": ("rocm", "hip", ("mi210", "mi250")),
    "gfx942": ("rocm", "hip", ("mi300x", "mi325x")),
    "gfx950": ("rocm", "hip", ("mi355x",)),
    "gfx1100": ("rocm", "hip", ("rx7900xtx",)),
    "gfx1201": ("rocm", "hip", ("rx9070xt",)),
}
ALIASES = [(alias, name) for name, (_, _, aliases) in TABLE.items() for alias in aliases]

# Shared memory that a block may ask for, CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability", in KiB; and the first PTX version that knows the architecture, PTX ISA,
# "Release History".
CUDA = {
    "sm_75": (64, 63),
    "sm_80": (163, 70),
    "sm_86": (99, 71),
    "sm_89": (99, 78),
    "sm_90": (227, 81),
    "sm_100": (227, 86),
    "sm_103": (227, 88),
    "sm_120": (99, 87),
    "sm_121": (99, 88),
}


def test_the_table() -> None:
    assert {t.name: (t.backend, t.driver, t.aliases) for t in lnbwd.targets()} == TABLE


@pytest.mark.parametrize("name", TABLE)
def test_found_by_name(name: str) -> None:
    assert find_target(name).name == name


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_found_by_alias_in_any_case(alias: str, name: str) -> None:
    assert find_target(alias) is find_target(alias.upper()) is find_target(name)


@pytest.mark.parametrize("target", lnbwd.targets(), ids=lambda t: t.name)
def test_flags_name_the_architecture(target: Target) -> None:
    flags = " ".join(target.flags)
    match target.backend:
        case "cuda":
            kib, ptx = CUDA[target.name]
            assert f'arch = "{target.name}", features = "+ptx{ptx}"' in flags
            assert f"max_workgroup_memory_bytes = {kib * 1024}," in flags
        case "rocm":
            assert flags == f"--iree-hal-target-device=hip --iree-rocm-target={target.name}"
        case _:
            assert f"--iree-llvmcpu-target-cpu={target.name.partition('-')[0]}" in flags
            assert target.is_this_cpu or f"-triple={target.architecture}-unknown-linux-gnu" in flags


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("sm90", "sm_90"),
        ("sm_91", "sm_90"),
        ("gfx940", "gfx942"),
        ("gfx1101", "gfx1100"),
        ("rtx4080", "rtx4090"),
        ("MI300", "mi300x"),
        ("Host ", "host"),
        ("generic-arm64", "generic-aarch64"),
    ],
)
def test_unknown_name_gets_the_list_and_the_nearest(unknown: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {unknown!r}. Did you mean ")) as caught:
        find_target(unknown)
    message = str(caught.value)
    assert message.startswith("target: expected one of ")
    assert message.endswith(f"Did you mean {nearest!r}?")
    listed = message.removeprefix("target: expected one of ").split(", got ")[0].split(", ")
    assert set(listed) == {*TABLE, *(alias for alias, _ in ALIASES)}


@pytest.mark.parametrize("unknown", ["", "tpu", "vulkan-spirv"])
def test_unlike_every_name_gets_the_list_alone(unknown: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {unknown!r}.") + "$"):
        find_target(unknown)


def test_name_is_a_string() -> None:
    with pytest.raises(TypeError, match="target: expected a string, got NoneType"):
        find_target(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("major", "minor", "name"),
    [
        (7, 5, "sm_75"),
        (8, 0, "sm_80"),
        (8, 6, "sm_86"),
        (8, 7, "sm_86"),
        (8, 9, "sm_89"),
        (9, 0, "sm_90"),
        (10, 0, "sm_100"),
        (10, 1, "sm_100"),
        (10, 3, "sm_103"),
        (11, 0, "sm_103"),
        (12, 0, "sm_120"),
        (12, 1, "sm_121"),
        (13, 0, "sm_121"),
    ],
)
def test_a_newer_gpu_runs_the_newest_older_target(major: int, minor: int, name: str) -> None:
    assert target_for_cuda_capability(major, minor).name == name


def test_too_old_a_gpu_has_no_target() -> None:
    with pytest.raises(ValueError, match=r"compute capability 7\.0"):
        target_for_cuda_capability(7, 0)


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("host", ()),
        ("gfx950", ()),
        ("sm_75", ()),
        ("sm_89", ("sm_86", "sm_75")),  # less shared memory than sm_80
        ("sm_103", ("sm_100", "sm_90", "sm_89", "sm_86", "sm_80", "sm_75")),
        ("sm_121", ("sm_120", "sm_89", "sm_86", "sm_75")),
    ],
)
def test_modules_of_older_targets_run_where_shared_memory_is_no_less(
    name: str, older: tuple[str, ...]
) -> None:
    assert tuple(target.name for target in older_targets(find_target(name))) == older


def test_which_gpus_compute_with_two_f32_at_once() -> None:
    assert [t.name for t in lnbwd.targets() if t.has_f32_pairs] == ["sm_100", "sm_103"]


@pytest.mark.parametrize(
    ("architecture", "names"),
    [("x86_64", ("generic", "generic-v3")), ("aarch64", ("generic-aarch64",)), ("riscv64", ())],
)
def test_any_cpu_of_an_architecture(architecture: str, names: tuple[str, ...]) -> None:
    assert tuple(target.name for target in generic_targets(architecture)) == names
