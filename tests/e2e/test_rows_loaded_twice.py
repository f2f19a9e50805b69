"""One pass over rows that the caches keep from their sums to their dx, on GPUs without clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import (
    assert_right_in_emulation,
    assert_rows_not_finite_apart,
    random_generator,
)

from iree_lnbwd.compiling import compiler
from iree_lnbwd.hardware.targets import find_target, targets
from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules import OnePass, choose
from iree_lnbwd.vmfb import inspection

LAYER, RMS = LAYER_NORM_BACKWARD.name, RMS_NORM_BACKWARD.name
TARGETS = ("sm_75", "sm_86", "gfx942", "gfx1100")
AMD = tuple(target.name for target in targets() if target.backend == "rocm")
WIDE_KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "f64": {"dtype": "f64"},
    "a residual": {"residual_dtype": "f32"},
    "three gradients": {"grad_outputs": 3},
    "from the output": {"from_output": True},
    "a gate": {"gate": "after"},
    "a gate before": {"gate": "before"},
    "sets": {"weight_sets": True},
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "f32": (1004, {"dtype": "f32"}),
    "odd": (1001, {"dtype": "bf16"}),
    "f64": (66, {"dtype": "f64"}),
    "a residual": (1000, {"dtype": "bf16", "residual_dtype": "f32"}),
    "statistics recomputed": (1002, {"dtype": "f16", "eps": 1e-5}),
    "from the output": (1004, {"dtype": "f16", "from_output": True}),
    "from the output, no bias": (999, {"dtype": "f32", "from_output": True, "has_bias": False}),
    "no dx": (1004, {"dtype": "bf16", "output_mask": (False, True, True)}),
    "dx alone": (1004, {"dtype": "bf16", "output_mask": (True, False, False)}),
    "several gradients": (1004, {"dtype": "bf16", "grad_outputs": 3}),
    "an offset and a weight of f32": (
        1004,
        {"dtype": "bf16", "weight_dtype": "f32", "weight_offset": 1.0},
    ),
    "RMS": (1001, {"dtype": "f32", "op": RMS}),
    "RMS with a bias": (1004, {"dtype": "bf16", "op": RMS, "has_bias": True}),
}


@pytest.mark.drawn
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_right(kind: str, target: str) -> None:
    """With more rows than workgroups, so that sums of columns go on from row to row."""
    columns, options = KINDS[kind]
    spec = NormSpec((columns,), **options)
    gpu = find_target(target)
    vector = next(v for v in (4, 2, 1) if columns % v == 0)
    how = OnePass(3, 1, 128 // gpu.subgroup_size, vector, rereads=True)
    vmfb, _ = compiler.build(spec, gpu, schedule=how)
    assert_right_in_emulation(vmfb, spec, 8, 1, adversarial=12)


def test_rows_that_are_not_finite_stay_apart() -> None:
    spec, gpu = NormSpec((1004,), "f32"), find_target("sm_86")
    vmfb, _ = compiler.build(spec, gpu, schedule=OnePass(3, 1, 4, 4, rereads=True))
    assert_rows_not_finite_apart(vmfb, spec)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("target", "columns", "dtype"),
    [
        ("sm_75", 18432, "f32"),
        ("sm_86", 18431, "bf16"),
        ("sm_120", 12467, "f32"),
        ("gfx90a", 18431, "bf16"),
        ("gfx942", 18432, "f32"),
        ("gfx942", 46000, "bf16"),
        ("gfx1100", 46001, "f32"),
        ("gfx1201", 17003, "f16"),
    ],
)
@pytest.mark.parametrize("op", [LAYER, RMS])
def test_the_widest_rows_that_are_chosen_for(
    op: str, target: str, columns: int, dtype: str
) -> None:
    spec, gpu = NormSpec((columns,), dtype, op=op), find_target(target)
    chosen = choose(spec, gpu)
    assert isinstance(chosen, OnePass)
    vmfb, _ = compiler.build(spec, gpu, schedule=replace(chosen, workgroups=2, few_rows=None))
    assert_right_in_emulation(vmfb, spec, 3, adversarial=12)


@pytest.mark.drawn
@pytest.mark.parametrize("target", AMD)
def test_no_memory_takes_what_registers_hold(target: str) -> None:
    """By what is chosen for drawn widths: estimates of registers are not below what LLVM needs."""
    gpu, rng = find_target(target), random_generator()
    for kind in rng.permutation(list(WIDE_KINDS))[:5]:
        columns = int(rng.integers(12000, 130000)) // (step := int(rng.choice([1, 2, 8]))) * step
        drawn = {"dtype": rng.choice(["bf16", "f16", "f32"]), "op": rng.choice([LAYER, RMS])}
        options = {name: str(value) for name, value in drawn.items()} | WIDE_KINDS[kind]
        spec = NormSpec((columns,), **options)
        vmfb, _ = compiler.build(spec, gpu)
        spilled = {kernel.name: kernel.stack_bytes for kernel in inspection.kernels(vmfb, gpu)}
        few = spilled.pop("few_rows", 0)
        assert set(spilled.values()) == {0}, (spec, spilled)
        assert few == 0 or spec.gate is not None, spec
