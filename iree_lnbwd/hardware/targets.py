"""Where a module runs: the table of targets, one row each, and IREE's flags for them.

A target is an instruction set and its limits. Facts that differ between GPUs of one target belong
to products (`iree_lnbwd.hardware.products`).
"""

from __future__ import annotations

import difflib
import itertools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from iree_lnbwd.errors import shown
from iree_lnbwd.hardware.products import products_of

_ANY_CPU_BYTES = 64  # of an accumulator: four vector registers, of sixteen or more
_ANY_X86_64 = (
    "--iree-llvmcpu-target-triple=x86_64-unknown-linux-gnu",
    "--iree-llvmcpu-target-cpu=generic",
)


@dataclass(frozen=True)
class Target:
    """One thing to compile for.

    Attributes:
        name: What ``--target`` takes.
        backend: "cpu", "cuda" or "rocm".
        driver: The IREE runtime driver that runs it: "local-task", "cuda" or "hip".
        flags: The flags of iree-compile that name it.
        subgroup_size: Threads that run in step; 1 on a CPU.
        shared_bytes: Shared memory (LDS) that a workgroup may have; 0 on a CPU.
        max_threads: Threads that a workgroup may have; 1 on a CPU.
        spread: Multiprocessors (NVIDIA) or compute units (AMD) that a workgroup is spread over.
        registers: 32-bit registers that the threads of these share; 0 on a CPU.
        registers_at_once: Registers of a thread that are allocated together.
        accumulator_bytes: Bytes of a CPU's vector registers that one accumulator takes; 0 on a GPU.
        architecture: The CPU's, as Linux names it: "x86_64", "aarch64"; "" of a GPU.
        cpu_features: What a CPU must have beyond its architecture's first model, as IREE's runtime
            names it. For "host", that is what this CPU has (``devices.cpu_features``).
    """

    name: str
    backend: str
    driver: str
    flags: tuple[str, ...]
    subgroup_size: int = 1
    shared_bytes: int = 0
    max_threads: int = 1
    spread: int = 1
    registers: int = 0
    registers_at_once: int = 8
    accumulator_bytes: int = 0
    architecture: str = ""
    cpu_features: tuple[str, ...] = ()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Product names that mean this target."""
        return tuple(product.name for product in products_of(self.name))

    @property
    def is_this_cpu(self) -> bool:
        """Whether it is the CPU that the compiler runs on, with all of its features."""
        return self.name == "host"

    @property
    def capability(self) -> int:
        """The compute capability of an NVIDIA GPU, 10 x major + minor; 0 of any other target."""
        return int(self.name.removeprefix("sm_")) if self.backend == "cuda" else 0

    @property
    def has_cp_async(self) -> bool:
        """Whether it can copy to shared memory in the background (cp.async, since sm_80)."""
        return self.capability >= 80

    @property
    def has_clusters(self) -> bool:
        """Whether workgroups can reach each other's shared memory (clusters, since sm_90)."""
        return self.capability >= 90

    @property
    def has_bulk_copies(self) -> bool:
        """Whether a thread can copy many bytes to shared memory at once (cp.async.bulk)."""
        return self.has_clusters

    @property
    def has_f32_pairs(self) -> bool:
        """Whether one instruction computes with two f32 (PTX's f32x2), by ptxas 12.9.

        It makes FADD2, FMUL2 and FFMA2 of them for compute capability 10, and two instructions of
        each for 12.
        """
        return self.capability // 10 == 10

    @property
    def has_cache_policies(self) -> bool:
        """Whether loads say how long their data stays in the L2 cache (createpolicy).

        GPUs since sm_80 could. Nothing older than an H200 was measured, so older ones do without.
        """
        return self.capability >= 90

    @property
    def roomy_shared_bytes(self) -> int:
        """Shared memory of a multiprocessor that leaves the L1 cache enough; 0 if not known.

        A kernel gets 196 or 228 KiB of the 256 that both share (NVIDIA, "Hopper Tuning Guide",
        "Unified Shared Memory/L1/Texture Cache"). With 228, eight kernels whose copies pass
        through the cache took 13 to 42 % longer on an H200. GPUs with less shared memory were not
        measured.
        """
        return 196 << 10 if self.shared_bytes == 227 << 10 else 0

    @property
    def group_barriers(self) -> int:
        """The number of barriers at which some subgroups of a workgroup can wait for each other.

        These are the barriers of PTX's ``bar.sync`` except number 0, which is the workgroup's.
        """
        return 15 if self.backend == "cuda" else 0


def _this_cpu(architecture: str) -> Target:
    # Measured on x86-64. Elsewhere nothing was, and accumulators are as small as any CPU's.
    widest = 256 if architecture == "x86_64" else _ANY_CPU_BYTES
    return _cpu("host", architecture, widest, "--iree-llvmcpu-target-cpu=host")


def _cpu(
    name: str,
    architecture: str,
    accumulator_bytes: int,
    *flags: str,
    features: tuple[str, ...] = (),
) -> Target:
    common = (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
    )
    if features:
        flags += (
            "--iree-llvmcpu-target-cpu-features=" + ",".join(f"+{name}" for name in features),
        )
    return Target(
        name,
        "cpu",
        "local-task",
        (*common, *flags),
        accumulator_bytes=accumulator_bytes,
        architecture=architecture,
        cpu_features=features,
    )


def _cuda(name: str, ptx: int, shared_bytes: int) -> Target:
    # The attribute is written out because IREE 3.13's own table has no sm_90, sm_100 and sm_103.
    # Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
    # (shared memory a block may ask for, its threads, registers of a multiprocessor); "Occupancy
    # Calculator" (eight at once); PTX ISA, "Release History" (first version of an arch). No name
    # ends in "a" or "f": only then does PTX run on newer GPUs, too.
    wgp = (
        "compute = fp64|fp32|fp16|int64|int32|int16|int8, storage = b64|b32|b16|b8, "
        "subgroup = shuffle|arithmetic, subgroup_size_choices = [32], "
        "max_workgroup_sizes = [1024, 1024, 64], max_thread_count_per_workgroup = 1024, "
        f"max_workgroup_memory_bytes = {shared_bytes}, "
        "max_workgroup_counts = [2147483647, 65535, 65535]"
    )
    gpu = f'#iree_gpu.target<arch = "{name}", features = "+ptx{ptx}", wgp = <{wgp}>>'
    executable = (
        f'#hal.executable.target<"cuda", "cuda-nvptx-fb", {{iree_codegen.target_info = {gpu}}}>'
    )
    flags = (f'--iree-hal-target-device=#hal.device.target<"cuda", [{executable}]>',)
    return Target(
        name,
        "cuda",
        "cuda",
        flags,
        subgroup_size=32,
        shared_bytes=shared_bytes,
        max_threads=1024,
        registers=65536,
    )


def _cdna(name: str) -> Target:
    # Four SIMDs of a compute unit, each of 512 registers for 64 lanes, allocated in eights (LLVM,
    # AMDGPUBaseInfo: getTotalNumVGPRs, getVGPRAllocGranule).
    return _rocm(name, subgroup_size=64, spread=1, registers=4 * 512 * 64, registers_at_once=8)


def _rdna(name: str) -> Target:
    # The code object asks for WGP mode, so a workgroup has both compute units of a workgroup
    # processor: four SIMDs, each of 1536 registers for 32 lanes, allocated in 24s. LLVM's AMDGPU.td
    # has gfx1100 and gfx12 among those with Feature1_5xVGPRs; others have 1024, in 16s.
    return _rocm(name, subgroup_size=32, spread=2, registers=4 * 1536 * 32, registers_at_once=24)


def _rocm(
    name: str, *, subgroup_size: int, spread: int, registers: int, registers_at_once: int
) -> Target:
    # Sources: LLVM AMDGPU guide, "Processors"; ROCm, "AMD GPU specifications": 64 KiB of LDS, of
    # which gfx950 has more.
    flags = ("--iree-hal-target-device=hip", f"--iree-rocm-target={name}")
    return Target(
        name,
        "rocm",
        "hip",
        flags,
        subgroup_size=subgroup_size,
        shared_bytes=65536,
        max_threads=1024,
        spread=spread,
        registers=registers,
        registers_at_once=registers_at_once,
    )


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            _this_cpu(platform.machine()),
            # Any x86-64 CPU since 2013. Without F16C, IREE converts f16 in software, and flushes
            # its subnormals to zero.
            _cpu("generic", "x86_64", _ANY_CPU_BYTES, *_ANY_X86_64, features=("f16c",)),
            # What x86-64-v3 has for vectors: any server since 2017. The rest of that level is left
            # out, because IREE's runtime cannot tell whether a CPU has it. 128 was faster than 64
            # and 256.
            _cpu("generic-v3", "x86_64", 128, *_ANY_X86_64, features=("avx2", "fma", "f16c")),
            # Any AArch64 CPU: NEON and conversions of f16 belong to the architecture.
            _cpu(
                "generic-aarch64",
                "aarch64",
                _ANY_CPU_BYTES,
                "--iree-llvmcpu-target-triple=aarch64-unknown-linux-gnu",
                "--iree-llvmcpu-target-cpu=generic",
            ),
            _cuda("sm_75", 63, 65536),
            _cuda("sm_80", 70, 166912),
            _cuda("sm_86", 71, 101376),
            _cuda("sm_89", 78, 101376),
            _cuda("sm_90", 81, 232448),
            _cuda("sm_100", 86, 232448),
            _cuda("sm_103", 88, 232448),
            _cuda("sm_120", 87, 101376),
            _cuda("sm_121", 88, 101376),
            _cdna("gfx90a"),
            _cdna("gfx942"),
            _cdna("gfx950"),
            _rdna("gfx1100"),
            _rdna("gfx1201"),
        )
    }
)

_ALIKE = 0.6  # share of equal letters: difflib's own threshold of a close match
_BY_NAME = {name: t for t in TARGETS.values() for name in (t.name, *t.aliases)}


def targets() -> tuple[Target, ...]:
    """Every target that a module can be compiled for."""
    return tuple(TARGETS.values())


def find_target(name: str) -> Target:
    """The target of that name or alias, in any case.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: There is none; the message lists the known names and the nearest match.
    """
    if not isinstance(name, str):
        raise TypeError(f"target: expected a string, got {type(name).__name__}")
    target = _BY_NAME.get(name.lower())
    if target is None:
        near = _nearest(name.lower())
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"target: expected one of {', '.join(_BY_NAME)}, got {shown(name)}.{hint}")
    return target


def generic_targets(architecture: str) -> tuple[Target, ...]:
    """The targets of an architecture that are no particular CPU; what most CPUs run comes first."""
    fitting = (t for t in TARGETS.values() if t.architecture == architecture and not t.is_this_cpu)
    return tuple(sorted(fitting, key=lambda t: len(t.cpu_features)))


def older_targets(target: Target) -> tuple[Target, ...]:
    """The targets whose modules the GPUs of a target run as well; the newest of them first.

    An NVIDIA GPU runs PTX of any older architecture (PTX ISA, ".target"), if it has as much shared
    memory. An AMD GPU or a CPU has none.
    """
    return tuple(
        sorted(
            (
                other
                for other in TARGETS.values()
                if 0 < other.capability < target.capability
                and other.shared_bytes <= target.shared_bytes
            ),
            key=lambda other: other.capability,
            reverse=True,
        )
    )


def _nearest(name: str) -> str | None:
    """The known name that is most similar; of several, one with the same beginning."""

    def likeness(known: str) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, known, name).ratio()
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, name, strict=False))
        return ratio, len(list(same))

    best = max(_BY_NAME, key=likeness)
    return best if likeness(best)[0] >= _ALIKE else None


def target_for_cuda_capability(major: int, minor: int) -> Target:
    """The best target for an NVIDIA GPU: PTX of an older architecture runs on a newer one.

    Raises:
        ValueError: The GPU is older than every target.
    """
    fitting = [t for t in TARGETS.values() if 0 < t.capability <= 10 * major + minor]
    if not fitting:
        raise ValueError(f"target: no target for compute capability {major}.{minor}")
    return max(fitting, key=lambda t: t.capability)
