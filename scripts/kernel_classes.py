"""What the kernels of a training step on an NVIDIA GPU are for, by the names that CUPTI reports."""

from __future__ import annotations

import re

MATMUL, ATTENTION, NORM, OPTIMIZER, OTHER = CLASSES = (
    *("matmul", "attention", "norm", "optimizer", "other"),
)

# The kernels of ir/: a name, or one with a suffix. PyTorch's and Triton's have long names.
_OURS = re.compile(r"(few_rows|rows|finalize|normalize)(_\w+)?")
# The names of inductor's own kernels list the operators in them, in any class. Its templates are
# matrix products, or attention.
_INDUCTORS = re.compile(r"triton_(?!tem_)")
_INDUCTORS_NORM = re.compile(r"norm|rsqrt")
# In this order: cuDNN's and CUTLASS's attention names the instructions of matrix products, too.
# cuDNN's backward of attention has two kernels beside the main one: before it, and after it.
_OTHERS = (
    (ATTENTION, re.compile(r"flash|fmha|sdpa|attention|dot_do_o|convert_dq_to", re.IGNORECASE)),
    (MATMUL, re.compile(r"gemm|gemv|cutlass|nvjet|cublas|sm\d+_xmma|wgmma|triton_tem", re.I)),
    (OPTIMIZER, re.compile(r"multi_tensor|adam", re.IGNORECASE)),
    (NORM, re.compile(r"(layer|rms)_?norm|GammaBeta", re.IGNORECASE)),
)


def is_ours(kernel: str) -> bool:
    """Whether a kernel of this name is one of this package's."""
    return _OURS.fullmatch(kernel) is not None


def class_of(kernel: str) -> str:
    """The one of `CLASSES` that a kernel of this name belongs to."""
    if is_ours(kernel):
        return NORM
    if _INDUCTORS.match(kernel):
        return NORM if _INDUCTORS_NORM.search(kernel) else OTHER
    return next((name for name, pattern in _OTHERS if pattern.search(kernel)), OTHER)
