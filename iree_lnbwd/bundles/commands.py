"""The command that adds a norm to a bundle, for messages."""

from __future__ import annotations

import shlex
from pathlib import Path

from iree_lnbwd.ops.operands import LAYER_NORM_BACKWARD
from iree_lnbwd.ops.spec import NormSpec

_DTYPES = (
    *("output_dtype", "grad_output_dtype", "weight_dtype", "bias_dtype", "residual_dtype"),
    *("gate_dtype", "grad_input_copy_dtype", "grad_input_sum_dtype"),
)


def adding(spec: NormSpec, target: str, path: Path) -> str:
    """The shell command that adds the module for a spec and a target to a bundle."""
    words = ["iree-lnbwd", "bundle", f"--with={path}", f"--target={target}"]
    return shlex.join([*words, *spec_words(spec), "-o", str(path)])


def spec_words(spec: NormSpec) -> list[str]:
    """The words of ``iree-lnbwd bundle`` that mean a spec."""
    words = [f"--normalized-shape={'x'.join(map(str, spec.normalized_shape))}"]
    words.append(f"--dtype={spec.dtype}")
    if spec.op != LAYER_NORM_BACKWARD.name:
        words.append(f"--op={spec.op}")
    for name in _DTYPES:
        if (dtype := getattr(spec, name)) is not None:
            words.append(f"--{name.replace('_', '-')}={dtype}")
    if spec.grad_outputs > 1:
        words.append(f"--grad-outputs={spec.grad_outputs}")
    if not spec.has_weight:
        words.append("--no-weight")
    if spec.has_bias != spec.family.usual_bias:
        words.append("--bias" if spec.has_bias else "--no-bias")
    if spec.from_output:
        words.append("--from-output")
    if spec.gate is not None:
        words.append(f"--gate={spec.gate}")
    if spec.weight_sets:
        words.append("--weight-sets")
    if spec.strided_rows:
        words.append("--strided-rows")
    if spec.weight_offset:
        words.append(f"--weight-offset={spec.weight_offset!r}")
    if not all(spec.output_mask):
        words.append("--output-mask=" + "".join("01"[asked] for asked in spec.output_mask))
    if spec.rows is not None:
        words.append(f"--rows={spec.rows}")
    if spec.eps is not None:
        option = "recompute-statistics" if spec.family.is_backward else "eps"
        words.append(f"--{option}={spec.eps!r}")
    return words
