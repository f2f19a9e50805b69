"""Which of PyTorch's kernels ours may stand in for in this process, and for which they do."""

from __future__ import annotations

from iree_lnbwd.ops.operands import OPS, Op

OFF = "not enabled"
PLACES = (
    *(("cuda", op) for op in OPS.values()),
    *(("cpu", op) for op in OPS.values() if op.is_backward),
)
# Why PyTorch's kernel was kept; None where ours is registered. `overrides` alone changes it.
KEPT: dict[tuple[str, Op], str | None] = dict.fromkeys(PLACES, OFF)


def is_in_place(device_type: str, op: Op) -> bool:
    """Whether a kernel of ours is registered in place of PyTorch's.

    Args:
        device_type: PyTorch's name of it.
        op: What it computes.
    """
    return KEPT.get((device_type, op), OFF) is None
