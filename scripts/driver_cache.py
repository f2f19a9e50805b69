"""NVIDIA's driver keeps the machine code that it compiles: here, of many modules at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path

from iree_lnbwd import runtime

_BYTES = 1 << 32  # of code that is kept


def keep_much() -> None:
    """Gives the cache room for thousands of modules; the driver reads this as it begins."""
    os.environ["CUDA_CACHE_MAXSIZE"] = str(_BYTES)


def load_all(paths: Sequence[Path]) -> None:
    """Has the driver compile modules in several processes, and keep the code."""
    count = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(_load, [paths[n::count] for n in range(count)])


def _load(paths: Sequence[Path]) -> None:
    for path in paths:
        runtime.load(path, "cuda")
