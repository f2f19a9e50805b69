"""Registers of a thread of one pass on AMD's GPUs: an estimate by what LLVM reported.

From 1684 schedules of drawn widths, types, vectors and operands on five targets, whose estimates
were near what a thread can have. None spills whose estimate is at most that.
"""

from __future__ import annotations

from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Element
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.schedules.elements import words
from iree_lnbwd.schedules.one_pass_numbers import OnePassNumbers

# Beside its elements': addresses of 64 bits for each lane, and chunks that are loaded or worked on.
_FIXED_READ_AGAIN, _FIXED_HELD = 64, 50
_CENTRED_HELD = 4  # a mean: 25166 columns in f16 spilled 8 bytes, by an estimate of 237 of 240
_FROM_OUTPUT_READ_AGAIN = 16  # a chunk of the bias and of 1 / g, beside a mean
_LATE_READ_AGAIN = 8  # a chunk of a gate, or of each of the other gradients
_KEPT = 3  # numbers of an element between a row's sums and its dx: dy, xhat and dy * g
_ADDED_READ_AGAIN = 1.5  # times the other gradients, which are added up for the sums and for dx
# A gate's factor and its derivative; and of layer norms, what is before them.
_GATED, _GATED_CENTRED = 1.5, 2.0


def registers_on_amd(one: OnePassNumbers, spec: NormSpec, elements: int) -> float:
    """The estimate for a thread.

    Args:
        one: The schedule.
        spec: What is computed.
        elements: The columns of the thread.
    """

    def held(dtype: str) -> float:
        """Registers of an element as it came: two of 16 bits share one where they are a pair."""
        least = 4 if one.vector == 1 else 2
        return max(least, DTYPES[dtype].numpy.itemsize) / 4

    row = held(spec.dy_dtype) + held(spec.dtype)
    others = 2 * held(spec.dy_dtype) * (spec.grad_outputs - 1)  # of this row and of the next
    has_dbeta = spec.family.centres or bool(spec.has_bias)
    sums = 1.0 + has_dbeta + (spec.grad_input_sum_dtype is not None)  # of columns
    an_element = sums * words(spec)
    if one.rereads:
        fixed = _FIXED_READ_AGAIN
        fixed += _FROM_OUTPUT_READ_AGAIN if spec.from_output and spec.family.centres else 0
        fixed += _LATE_READ_AGAIN * max(1, spec.grad_outputs - 1) if one.loads_late else 0
        an_element += 0 if one.loads_late else _ADDED_READ_AGAIN * others
    else:
        is_short = spec.family.centres and words(spec) == 1
        fixed = _FIXED_HELD + (_CENTRED_HELD if is_short else 0)
        an_element += _KEPT * words(spec) + held(spec.gamma_dtype) + others
        an_element += row if one.ahead else 0
        an_element += words(spec) if spec.from_output else 0  # 1 / g
        if spec.residual_dtype is not None:
            an_element += held(spec.residual_dtype)
        if spec.gate is not None:
            an_element += 2 * held(spec.element_type(Element.GATE)) + _GATED
            an_element += _GATED_CENTRED if spec.family.centres else 0
            an_element += 0 if one.ahead else row  # which dz is computed from
    chunks = (1 + words(spec)) / 2  # their numbers take more registers in f64, addresses do not
    return fixed * chunks + elements * an_element
