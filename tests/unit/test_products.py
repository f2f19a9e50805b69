"""The table of products: each is a target's, and one of them stands for it."""

from __future__ import annotations

import re

import pytest

from iree_lnbwd.hardware.products import (
    PRODUCTS,
    Product,
    find_product,
    meant,
    product_of_device,
    products_of,
    standing_for,
)
from iree_lnbwd.hardware.targets import TARGETS, find_target

GPUS = [target.name for target in TARGETS.values() if target.backend != "cpu"]
every_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=lambda p: p.name)


@every_product
def test_a_product_is_found_by_name_and_names_its_target(product: Product) -> None:
    assert find_product(product.name.upper()) is product
    assert find_target(product.name).name == product.target
    assert product.name in find_target(product.target).aliases


@every_product
def test_its_numbers_are_of_this_world(product: Product) -> None:
    assert 1 < product.processors < 1000
    assert 1 << 20 <= product.l2_bytes < 1 << 30
    assert product.l2_bytes % (1 << 20) == 0


@pytest.mark.parametrize("target", GPUS)
def test_one_product_stands_for_each_target(target: str) -> None:
    standing = [product for product in products_of(target) if product.stands_for_target]
    assert standing == [standing_for(target)]


def test_a_name_means_a_product_or_the_one_that_stands_for_the_target() -> None:
    assert meant("H200_as_sm_80", "sm_80") is PRODUCTS["h200_as_sm_80"]
    assert meant("sm_80", "sm_80") is PRODUCTS["a100"]


def test_a_cpu_has_no_product() -> None:
    assert products_of("host") == ()
    with pytest.raises(KeyError, match="host"):
        standing_for("host")


def test_an_unknown_name_gets_the_list() -> None:
    said = f"product: expected one of {', '.join(PRODUCTS)}, got 'sm_90'"
    with pytest.raises(ValueError, match=re.escape(said)):
        find_product("sm_90")


@pytest.mark.parametrize(
    ("device", "processors", "name"),
    [
        ("Tesla T4", 40, "t4"),
        ("NVIDIA A100-SXM4-80GB", 108, "a100"),
        ("NVIDIA GeForce RTX 3090", 82, "rtx3090"),
        ("NVIDIA L4", 58, "l4"),
        ("NVIDIA L40S", 142, "l40s"),
        ("NVIDIA H100 80GB HBM3", 132, "h100"),
        ("NVIDIA H200", 132, "h200"),
        ("NVIDIA B200", 148, "b200"),
        ("NVIDIA B300 SXM6 AC", 148, "b300"),
        ("NVIDIA GeForce RTX 5090", 170, "rtx5090"),
        ("NVIDIA GB10", 48, "gb10"),
        ("AMD Instinct MI300X", 304, "mi300x"),
        ("AMD Radeon RX 7900 XTX", 96, "rx7900xtx"),
    ],
)
def test_a_drivers_name_means_a_product(device: str, processors: int, name: str) -> None:
    assert product_of_device(device, processors).name == name


@pytest.mark.parametrize(
    ("device", "processors"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", 84),
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA GH200 480GB", 132),
        ("NVIDIA L40", 142),
        ("NVIDIA L40S", 58),
        ("NVIDIA GB200", 148),
        ("", 132),
    ],
)
def test_a_variant_or_another_gpu_is_no_known_product(device: str, processors: int) -> None:
    said = f"got {device!r} with {processors} processors"
    with pytest.raises(ValueError, match=r"^device: expected a known product") as caught:
        product_of_device(device, processors)
    assert str(caught.value).endswith(said)
    assert "h200 (132)" in str(caught.value)
