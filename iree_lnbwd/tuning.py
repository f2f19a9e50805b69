"""Schedules that were measured to be the fastest, by (target, bytes, columns).

Written by ``scripts/tune`` on NVIDIA H200, driver 580.159.04, iree-base-compiler
3.13.0, at 2**26 elements (768 and 1024 columns: 65536 and 16384 rows).
The values are the first fields of `schedule.OnePass` in order; behind them, the share of the
bandwidth of adding two tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TUNED: Mapping[
    tuple[str, int, int],
    tuple[int, int, int, int, int, int, bool, bool, bool, int],
] = MappingProxyType(
    {
        ("sm_90", 2, 768): (256, 6, 1, 4, 2, 3, False, False, False, 2),  # 93%
        ("sm_90", 2, 769): (132, 12, 1, 1, 1, 0, False, False, False, 1),  # 76%
        ("sm_90", 2, 1000): (264, 4, 2, 4, 1, 2, False, True, False, 2),  # 91%
        ("sm_90", 2, 1023): (132, 6, 2, 1, 1, 0, False, False, False, 1),  # 77%
        ("sm_90", 2, 1024): (256, 4, 2, 4, 1, 2, False, False, False, 2),  # 85%
        ("sm_90", 2, 1536): (132, 6, 2, 4, 2, 3, False, True, True, 1),  # 95%
        ("sm_90", 2, 2048): (384, 2, 4, 4, 1, 2, True, False, False, 3),  # 92%
        ("sm_90", 2, 2304): (128, 4, 5, 4, 1, 2, True, True, False, 1),  # 92%
        ("sm_90", 2, 3072): (132, 3, 4, 4, 2, 3, False, True, False, 1),  # 94%
        ("sm_90", 2, 3840): (132, 2, 8, 8, 3, 4, False, False, False, 1),  # 92%
        ("sm_90", 2, 4096): (132, 2, 7, 4, 3, 4, False, True, False, 1),  # 92%
        ("sm_90", 2, 5000): (132, 2, 10, 4, 2, 3, True, False, False, 1),  # 91%
        ("sm_90", 2, 5120): (132, 2, 6, 4, 2, 3, True, True, True, 1),  # 92%
        ("sm_90", 2, 6144): (128, 2, 7, 4, 1, 2, True, True, True, 1),  # 91%
        ("sm_90", 2, 8192): (132, 1, 8, 4, 2, 3, False, False, False, 1),  # 92%
        ("sm_90", 2, 10240): (132, 1, 12, 4, 1, 2, False, True, True, 1),  # 92%
        ("sm_90", 2, 12288): (132, 1, 12, 4, 1, 2, True, False, False, 1),  # 91%
        ("sm_90", 2, 12800): (132, 1, 20, 4, 1, 2, True, True, False, 1),  # 90%
        ("sm_90", 2, 14336): (132, 1, 14, 4, 2, 3, True, False, False, 1),  # 89%
        ("sm_90", 2, 15360): (132, 1, 15, 4, 1, 2, True, False, False, 1),  # 89%
        ("sm_90", 2, 16384): (128, 1, 16, 4, 3, 3, True, False, False, 1),  # 88%
        ("sm_90", 2, 18432): (132, 1, 18, 4, 2, 2, True, True, False, 1),  # 86%
        ("sm_90", 4, 768): (132, 6, 3, 4, 1, 2, False, False, False, 1),  # 98%
        ("sm_90", 4, 769): (132, 12, 1, 1, 0, 0, False, False, False, 1),  # 94%
        ("sm_90", 4, 1000): (132, 4, 4, 4, 2, 3, False, False, False, 1),  # 96%
        ("sm_90", 4, 1023): (264, 4, 2, 1, 0, 0, False, False, False, 2),  # 95%
        ("sm_90", 4, 1024): (128, 5, 4, 4, 1, 0, False, False, False, 1),  # 92%
        ("sm_90", 4, 1536): (132, 3, 6, 4, 1, 2, False, False, False, 1),  # 99%
        ("sm_90", 4, 2048): (264, 1, 8, 4, 3, 4, False, False, False, 2),  # 99%
        ("sm_90", 4, 2304): (132, 2, 4, 4, 3, 4, True, False, False, 1),  # 98%
        ("sm_90", 4, 3072): (132, 3, 4, 4, 0, 0, False, False, False, 1),  # 97%
        ("sm_90", 4, 3840): (132, 2, 8, 4, 0, 0, False, False, False, 1),  # 97%
        ("sm_90", 4, 4096): (132, 1, 8, 4, 3, 4, False, False, False, 1),  # 97%
        ("sm_90", 4, 5000): (128, 1, 8, 4, 2, 3, True, False, False, 1),  # 97%
        ("sm_90", 4, 5120): (132, 1, 8, 4, 1, 2, True, True, False, 1),  # 98%
        ("sm_90", 4, 6144): (128, 1, 10, 4, 1, 0, False, True, True, 1),  # 96%
        ("sm_90", 4, 8192): (132, 1, 16, 4, 1, 2, False, True, False, 1),  # 94%
        ("sm_90", 4, 10240): (128, 1, 16, 4, 0, 0, False, False, False, 1),  # 93%
        ("sm_90", 4, 12288): (128, 1, 24, 4, 1, 2, True, False, False, 1),  # 93%
        ("sm_90", 4, 12800): (128, 1, 20, 4, 1, 1, True, False, False, 1),  # 89%
        ("sm_90", 4, 14336): (132, 1, 16, 4, 1, 2, True, False, False, 1),  # 91%
        ("sm_90", 4, 15360): (132, 1, 24, 4, 1, 1, True, True, False, 1),  # 89%
        ("sm_90", 4, 16384): (132, 1, 16, 4, 1, 1, True, False, False, 1),  # 90%
        ("sm_90", 4, 18432): (132, 1, 24, 4, 1, 1, True, True, False, 1),  # 89%
    }
)
