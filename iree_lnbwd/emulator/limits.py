"""The limits of launches: threads, workgroups and memory that a GPU has.

Sources: NVIDIA, "CUDA C++ Programming Guide", Technical Specifications per Compute Capability; AMD,
HIP's hipModuleLaunchKernel, and LLVM's GCNSubtarget (LDS, the scratch of a wave).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from iree_lnbwd.emulator.launch import Dim3, Fault, Launch

_MOST = 2**31 - 1
# Bytes of shared memory (LDS) that a workgroup may have.
CUDA_SHARED_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "sm_75": 64 << 10,
        "sm_80": 163 << 10,
        "sm_86": 99 << 10,
        "sm_89": 99 << 10,
        "sm_90": 227 << 10,
        "sm_100": 227 << 10,
        "sm_103": 227 << 10,
        "sm_120": 99 << 10,
        "sm_121": 99 << 10,
    }
)
ROCM_SHARED_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "gfx90a": 64 << 10,
        "gfx942": 64 << 10,
        "gfx950": 160 << 10,
        "gfx1100": 64 << 10,
        "gfx1201": 64 << 10,
    }
)


@dataclass(frozen=True)
class Limits:
    """The limits of one launch.

    Attributes:
        threads: Of a workgroup.
        size: Threads of a workgroup along x, y, z.
        count: Workgroups along x, y, z.
        grid: Threads of all workgroups along an axis.
        static_bytes: Shared memory (LDS) of a workgroup that the code itself asks for.
        shared_bytes: The same with the memory that the launch adds.
        local_bytes: Local memory (scratch) of a thread.
    """

    threads: int
    size: Dim3
    count: Dim3
    grid: int
    static_bytes: int
    shared_bytes: int
    local_bytes: int


def of_cuda(arch: str) -> Limits:
    """The limits of a PTX module's ``.target``; for an unknown one, the largest of all."""
    known = CUDA_SHARED_BYTES
    shared = known.get(re.sub(r"[af]$", "", arch), max(known.values()))
    return Limits(
        threads=1024,
        size=(1024, 1024, 64),
        count=(_MOST, 65535, 65535),
        grid=_MOST * 1024,
        static_bytes=48 << 10,
        shared_bytes=shared,
        local_bytes=512 << 10,
    )


_WAVE_SCRATCH = {9: ((1 << 13) - 1) * 1024, 10: ((1 << 13) - 1) * 1024, 11: ((1 << 15) - 1) * 256}
_WAVE_SCRATCH_SINCE_GFX12 = ((1 << 18) - 1) * 256


def of_rocm(processor: str, lanes: int) -> Limits:
    """The limits of a code object's processor, for waves of so many lanes."""
    shared = ROCM_SHARED_BYTES.get(processor, max(ROCM_SHARED_BYTES.values()))
    scratch = _WAVE_SCRATCH.get(generation(processor), _WAVE_SCRATCH_SINCE_GFX12)
    return Limits(
        threads=1024,
        size=(1024, 1024, 1024),
        count=(_MOST, _MOST, _MOST),
        grid=2**32 - 1,
        static_bytes=shared,
        shared_bytes=shared,
        local_bytes=scratch // lanes,
    )


def generation(processor: str) -> int:
    """The generation of a processor: 9 for gfx942. The last two characters are the stepping."""
    return int(processor.removeprefix("gfx")[:-2])


def check(launch: Launch, limits: Limits, *, static_bytes: int, local_bytes: int) -> None:
    """Expects a launch that hardware would accept.

    Raises:
        Fault: It exceeds a limit; the message names it.
    """
    size, count = launch.workgroup_size, launch.workgroup_count
    for axis, threads, groups, most_threads, most_groups in zip(
        "xyz", size, count, limits.size, limits.count, strict=True
    ):
        _at_most(threads, most_threads, f"threads of a workgroup along {axis}")
        _at_most(groups, most_groups, f"workgroups along {axis}")
        _at_most(threads * groups, limits.grid, f"threads along {axis}")
    _at_most(launch.threads, limits.threads, "threads of a workgroup")
    _at_most(static_bytes, limits.static_bytes, "bytes of static shared memory")
    _at_most(
        static_bytes + launch.shared_bytes,
        limits.shared_bytes,
        f"bytes of shared memory, {launch.shared_bytes} of them dynamic",
    )
    _at_most(local_bytes, limits.local_bytes, "bytes of local memory of a thread")


def _at_most(number: int, most: int, what: str) -> None:
    if number > most:
        raise Fault(f"{number} {what}: the GPU takes at most {most}")
