"""Three ways in which IREE 3.13 makes wrong code without a word; the emulator notices each.

Each file of ``miscompiles/`` has IR that is compiled wrong and, beside it, a form that is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from iree.compiler.tools import compile_str
from support import random_generator

from iree_lnbwd.arguments import Array
from iree_lnbwd.emulator import Fault, Module
from iree_lnbwd.targets import find_target

_FOLDER = Path(__file__).parent / "miscompiles"

Reference = Callable[..., tuple[Array, ...]]


def _column_sums(*tensors: Array) -> tuple[Array, ...]:
    return tuple(tensor.sum(axis=0, dtype=np.float64) for tensor in tensors)


def _row_sums_added(x: Array) -> tuple[Array, ...]:
    return (x + x.sum(axis=1, dtype=np.float64, keepdims=True) + 1,)


# What the functions compute, and the shapes of their arguments in the wrong and the right form.
_CASES: dict[str, tuple[Reference, tuple[int, int], tuple[int, int], int]] = {
    "subgroups_beyond_lanes": (_column_sums, (32, 1024), (32, 1024), 1),
    "unpadded_tile": (_column_sums, (8, 769), (8, 784), 2),
    "rank_change": (_row_sums_added, (8, 1024), (8, 1024), 1),
}


@functools.cache
def _compiled(name: str, target: str) -> bytes:
    text = (_FOLDER / f"{name}.mlir").read_text(encoding="utf-8")
    vmfb: bytes = compile_str(text, input_type="none", extra_args=list(find_target(target).flags))
    return vmfb


def _largest_error(name: str, form: str, target: str) -> float:
    """Of a form of a case on random data, relative to the largest magnitude.

    Raises:
        Fault: The emulator refused to go on.
    """
    reference, wrong_shape, right_shape, count = _CASES[name]
    shape = wrong_shape if form == "wrong" else right_shape
    rng = random_generator()
    tensors = [rng.standard_normal(shape, dtype=np.float32) for _ in range(count)]
    module = Module(_compiled(name, target), find_target(target).backend)
    views = module.call(form, *(module.input(f"x{n}", x) for n, x in enumerate(tensors)))
    worst = 0.0
    for view, expected in zip(views, reference(*tensors), strict=True):
        error = np.abs(module.read(view, np.dtype(np.float32)) - expected).max()
        worst = max(worst, float(error / np.abs(expected).max()))
    return worst


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("name", _CASES)
class TestMiscompiles:
    def test_the_wrong_form_is_noticed(self, name: str, target: str) -> None:
        if name == "subgroups_beyond_lanes":  # it computes, but something else
            assert _largest_error(name, "wrong", target) > 0.1
            return
        with pytest.raises(Fault, match=r"a read of local memory at byte \d+, which nobody wrote"):
            _largest_error(name, "wrong", target)

    def test_the_right_form_passes(self, name: str, target: str) -> None:
        # A few roundings of sums of at most 1024 terms.
        assert _largest_error(name, "right", target) < 1e-5
