"""The reference in NumPy, in f64: the family's ops, and how far a right answer may differ.

The functions take what those of `iree_lnbwd` take, NumPy's arrays only and no ``device``, and
return their results in f64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iree_lnbwd.calls.norms import Norms
from iree_lnbwd.errors import shown
from iree_lnbwd.ops.arguments import Options, Results, bind_arrays, densely, results_of
from iree_lnbwd.ops.operands import names
from iree_lnbwd.verification.judge import Comparison, Judgement, compare, judge
from iree_lnbwd.verification.row_block import F64, LAMBDA

__all__ = [
    "F64",
    "LAMBDA",
    "Comparison",
    "Judgement",
    "compare",
    "judge",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]


class _Reference(Norms):
    def _compute(self, given: Sequence[Any], options: Options, device: str | None) -> Results:
        if device is not None:
            raise ValueError(f"device: expected None: it is NumPy's, got {shown(device)}")
        arrays = dict(zip(names(options.op.arguments), given, strict=True))
        return results_of(options.op, judge(densely(bind_arrays(arrays, options))).expected)


_reference = _Reference()
layer_norm = _reference.layer_norm
layer_norm_backward = _reference.layer_norm_backward
rms_norm = _reference.rms_norm
rms_norm_backward = _reference.rms_norm_backward
