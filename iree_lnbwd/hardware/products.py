"""GPUs on the market: the number of processors and the size of the cache, one row each.

One is no GPU of its own: ``h200_as_sm_80``, an H200 that runs the code of sm_80 and stands in for
GPUs that were not measured.

Facts about the instruction set belong to the target (`targets`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from iree_lnbwd.errors import shown


@dataclass(frozen=True)
class Product:
    """A GPU. Where programs see a product as several GPUs, this is one of them.

    Attributes:
        name: What ``--target`` takes in place of the target's name.
        target: Name of the target that its code is compiled for.
        processors: Multiprocessors (NVIDIA) or compute units (AMD).
        l2_bytes: Bytes of the L2 cache; if a GPU has several, of the one that a processor uses.
        stands_for_target: Schedules are made for it if only the target is named.
        schedules_from: Name of a product, of this or another target, whose measured schedules serve
            where this one has none of its own (`iree_lnbwd.schedules.measured_files.serving`). That
            one may have others from a third.
    """

    name: str
    target: str
    processors: int
    l2_bytes: int
    stands_for_target: bool = False
    schedules_from: str | None = None

    def walkers(self, resident: int, cluster: int) -> int:
        """Clusters that all run at once, if a processor holds so many workgroups.

        One more than that would begin when the others end. The processors of a cluster are
        neighbours, so clusters of more than two leave some of them idle.

        Args:
            resident: Workgroups that a processor holds.
            cluster: Workgroups of a cluster; 1 if there are none.
        """
        processors = self.processors
        if cluster > _PAIR:
            processors = processors * _FILLED[0] // _FILLED[1]
        return resident * processors // cluster


_MIB = 1 << 20
_PAIR = 2
_STAND_IN = "h200_as_sm_80"  # for GPUs of sm_80 to sm_89
# Of 132 processors, clusters of 4 and of 8 workgroups fill 120, one workgroup to each: what
# cuOccupancyMaxActiveClusters said on an H200. Others are taken to be like it.
_FILLED = (10, 11)

# Sources. NVIDIA's white papers: "Turing GPU Architecture" (T4), "A100 Tensor Core GPU
# Architecture", "Ampere GA102 GPU Architecture", "Ada GPU Architecture" and "Ada GPU Architecture,
# L40S", "H100 Tensor Core GPU Architecture", "RTX Blackwell GPU Architecture". AMD's: ROCm's "AMD
# GPU specifications". NVIDIA's "Blackwell Tuning Guide" has the L2 cache of the B200, its talk at
# Hot Chips 2025 that of the GB10. What drivers reported to others: the L4's figures, and the
# processors of the B200, the B300 and the GB10 (NVIDIA says 160 of a whole Blackwell Ultra).
#
# Where schedules come from another product: the H100 has the H200's processors; with its schedules
# it reached 88 to 96 % of its own ceiling, in eight cells that were timed once. The B200 and B300
# have the registers and the shared memory of both, and more processors; neither was measured. Nor
# was any GPU of sm_80 to sm_89. An H200 that runs sm_80's code stands in for them: legal there are
# its schedules that need no more than such a GPU has. By the white papers, those GPUs have 0.14
# (L4) to 0.52 times (A100 of 80 GB) its bandwidth for each processor.
PRODUCTS: Mapping[str, Product] = MappingProxyType(
    {
        product.name: product
        for product in (
            Product("t4", "sm_75", 40, 4 * _MIB, stands_for_target=True),
            Product(
                "a100", "sm_80", 108, 40 * _MIB, stands_for_target=True, schedules_from=_STAND_IN
            ),
            Product(_STAND_IN, "sm_80", 132, 50 * _MIB, schedules_from="h200"),
            Product(
                "rtx3090", "sm_86", 82, 6 * _MIB, stands_for_target=True, schedules_from=_STAND_IN
            ),
            Product(
                "rtx4090", "sm_89", 128, 72 * _MIB, stands_for_target=True, schedules_from=_STAND_IN
            ),
            Product("l4", "sm_89", 58, 48 * _MIB, schedules_from=_STAND_IN),
            Product("l40s", "sm_89", 142, 96 * _MIB, schedules_from=_STAND_IN),
            # SXM5; the PCIe card has 114 processors.
            Product("h100", "sm_90", 132, 50 * _MIB, schedules_from="h200"),
            # The L2 cache is the H100's, which schedules have been made with so far; drivers of an
            # H200 are said to report 60 MiB.
            Product("h200", "sm_90", 132, 50 * _MIB, stands_for_target=True),
            Product(
                "b200", "sm_100", 148, 126 * _MIB, stands_for_target=True, schedules_from="h200"
            ),
            # The L2 cache is what a driver reported to others, and the B200's.
            Product(
                "b300", "sm_103", 148, 126 * _MIB, stands_for_target=True, schedules_from="h200"
            ),
            Product("rtx5090", "sm_120", 170, 96 * _MIB, stands_for_target=True),
            Product("gb10", "sm_121", 48, 24 * _MIB, stands_for_target=True),
            Product("mi210", "gfx90a", 104, 8 * _MIB, stands_for_target=True),
            Product("mi250", "gfx90a", 104, 8 * _MIB),  # one of its two dies: programs see two GPUs
            Product("mi300x", "gfx942", 304, 4 * _MIB, stands_for_target=True),  # L2 of a die
            Product("mi325x", "gfx942", 304, 4 * _MIB),  # L2 of a die
            Product("mi355x", "gfx950", 256, 4 * _MIB, stands_for_target=True),  # L2 of a die
            Product("rx7900xtx", "gfx1100", 96, 6 * _MIB, stands_for_target=True),
            Product("rx9070xt", "gfx1201", 64, 8 * _MIB, stands_for_target=True),
        )
    }
)


def find_product(name: str) -> Product:
    """The product of that name, in any case.

    Raises:
        ValueError: There is none; the message lists the known names.
    """
    product = PRODUCTS.get(name.lower())
    if product is None:
        raise ValueError(f"product: expected one of {', '.join(PRODUCTS)}, got {shown(name)}")
    return product


def lenders(product: Product) -> tuple[Product, ...]:
    """The product itself, the one that it has schedules from, and so on."""
    name = product.schedules_from
    return (product, *(lenders(find_product(name)) if name is not None else ()))


def products_of(target: str) -> tuple[Product, ...]:
    """The products that run a target's code, by the target's name; none for a CPU."""
    return tuple(product for product in PRODUCTS.values() if product.target == target)


def standing_for(target: str) -> Product:
    """The product that schedules are made for if only a GPU target is named.

    Raises:
        KeyError: It is no GPU target.
    """
    for product in products_of(target):
        if product.stands_for_target:
            return product
    raise KeyError(target)


def meant(name: str, target: str) -> Product:
    """The product of that name, in any case; for another name, the one that stands for a target.

    Raises:
        KeyError: The target is no GPU's.
    """
    return PRODUCTS.get(name.lower()) or standing_for(target)


def product_of_device(name: str, processors: int) -> Product:
    """The product that a driver's name of a GPU means.

    Args:
        name: E.g. "NVIDIA GeForce RTX 4090": some of its words, joined, are a product's name.
        processors: The driver's count; a variant or a part of a GPU has another one.

    Raises:
        ValueError: None is known by that name with so many processors.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    said = {"".join(words[i:j]) for j in range(len(words) + 1) for i in range(j)}
    for product in PRODUCTS.values():
        if product.name in said and product.processors == processors:
            return product
    known = ", ".join(f"{product.name} ({product.processors})" for product in PRODUCTS.values())
    raise ValueError(
        f"device: expected a known product (with its processors): {known}; "
        f"got {shown(name)} with {processors} processors"
    )
