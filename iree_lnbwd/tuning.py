"""Schedules that were measured to be the fastest, by (target, bytes, columns).

Written by ``scripts/tune`` on NVIDIA H200, driver 580.159.04, iree-base-compiler
3.13.0, at 2**26 elements (768 and 1024 columns: 65536 and 16384 rows).
The values are the fields of `schedule.OnePass` in order; behind them, the share of the bandwidth
of adding two tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TUNED: Mapping[
    tuple[str, int, int], tuple[int, int, int, int, int, int, bool, bool, bool, int, int, int]
] = MappingProxyType(
    {
        ("sm_90", 2, 768): (264, 6, 1, 8, 1, 2, False, True, False, 2, 16, 4),  # 93%
        ("sm_90", 2, 769): (396, 3, 2, 1, 0, 0, False, False, False, 3, 16, 4),  # 65%
        ("sm_90", 2, 1000): (264, 4, 2, 8, 1, 2, False, False, False, 2, 16, 4),  # 89%
        ("sm_90", 2, 1023): (264, 4, 2, 1, 0, 0, False, False, False, 2, 16, 4),  # 71%
        ("sm_90", 2, 1024): (264, 4, 2, 8, 1, 2, False, True, False, 2, 16, 4),  # 83%
        ("sm_90", 2, 1536): (132, 6, 2, 8, 2, 3, False, True, False, 1, 16, 4),  # 90%
        ("sm_90", 2, 2048): (264, 2, 3, 8, 2, 3, False, True, False, 2, 16, 4),  # 91%
        ("sm_90", 2, 2304): (132, 4, 2, 8, 1, 2, False, True, False, 1, 16, 4),  # 89%
        ("sm_90", 2, 3072): (396, 1, 4, 8, 1, 2, False, True, False, 3, 16, 4),  # 90%
        ("sm_90", 2, 3840): (264, 1, 8, 8, 2, 3, False, True, False, 2, 16, 4),  # 91%
        ("sm_90", 2, 4096): (132, 2, 8, 8, 1, 2, False, True, False, 1, 16, 4),  # 93%
        ("sm_90", 2, 5000): (132, 2, 4, 8, 1, 2, True, False, False, 1, 16, 4),  # 84%
        ("sm_90", 2, 5120): (132, 2, 4, 8, 2, 3, False, True, False, 1, 16, 4),  # 94%
        ("sm_90", 2, 6144): (132, 2, 8, 8, 2, 3, True, True, False, 1, 16, 4),  # 88%
        ("sm_90", 2, 8192): (132, 1, 8, 8, 1, 2, False, False, False, 1, 16, 4),  # 89%
        ("sm_90", 2, 10240): (132, 1, 8, 8, 2, 3, False, True, False, 1, 16, 4),  # 89%
        ("sm_90", 2, 12288): (132, 1, 16, 8, 1, 2, True, True, False, 1, 16, 4),  # 86%
        ("sm_90", 2, 14336): (132, 1, 8, 8, 2, 3, True, True, False, 1, 16, 4),  # 81%
        ("sm_90", 2, 16384): (132, 1, 8, 8, 1, 2, True, True, False, 1, 16, 4),  # 75%
        ("sm_90", 4, 768): (132, 8, 1, 4, 3, 4, False, True, False, 1, 16, 4),  # 95%
        ("sm_90", 4, 769): (264, 4, 5, 1, 0, 0, False, False, False, 2, 16, 4),  # 88%
        ("sm_90", 4, 1000): (132, 4, 2, 4, 3, 4, True, False, False, 1, 16, 4),  # 94%
        ("sm_90", 4, 1023): (264, 4, 2, 1, 2, 3, True, False, False, 2, 16, 4),  # 83%
        ("sm_90", 4, 1024): (396, 2, 4, 4, 1, 2, False, False, False, 3, 16, 4),  # 94%
        ("sm_90", 4, 1536): (132, 3, 6, 4, 1, 2, False, False, False, 1, 16, 4),  # 96%
        ("sm_90", 4, 2048): (264, 1, 16, 4, 2, 3, False, True, False, 2, 16, 4),  # 97%
        ("sm_90", 4, 2304): (132, 2, 5, 4, 3, 4, True, False, False, 1, 16, 4),  # 98%
        ("sm_90", 4, 3072): (132, 2, 5, 4, 1, 2, True, False, False, 1, 16, 4),  # 95%
        ("sm_90", 4, 3840): (264, 1, 10, 4, 0, 0, False, False, False, 2, 16, 4),  # 95%
        ("sm_90", 4, 4096): (132, 1, 16, 4, 2, 3, True, False, False, 1, 16, 4),  # 97%
        ("sm_90", 4, 5000): (132, 1, 8, 4, 2, 3, False, False, False, 1, 16, 4),  # 96%
        ("sm_90", 4, 5120): (132, 1, 10, 4, 2, 3, False, True, False, 1, 16, 4),  # 95%
        ("sm_90", 4, 6144): (132, 1, 10, 4, 1, 2, False, False, False, 1, 16, 4),  # 94%
        ("sm_90", 4, 8192): (132, 1, 32, 4, 1, 2, False, False, False, 1, 16, 4),  # 93%
        ("sm_90", 4, 10240): (132, 1, 16, 4, 1, 2, True, False, False, 1, 16, 4),  # 91%
        ("sm_90", 4, 12288): (132, 1, 12, 4, 1, 2, True, False, False, 1, 16, 4),  # 87%
        ("sm_90", 4, 14336): (132, 1, 8, 4, 1, 2, True, False, False, 1, 16, 4),  # 78%
    }
)
