"""Parameters of which a process holds a part, or nothing, outside of forwards.

What a process sees of them depends on its rank, so nothing is decided by that.
"""

from __future__ import annotations

from torch import Tensor, nn


def holder(module: nn.Module) -> str | None:
    """Who keeps a module's parameters in parts that are no DTensors; None if nobody does."""
    if getattr(module, "_fsdp_use_orig_params", True) is False:
        return "FSDP1"  # they are attributes, without memory
    return next(filter(None, map(holder_of, module.parameters())), None)


def holder_of(parameter: Tensor) -> str | None:
    """Who keeps a parameter in parts; None if nobody does."""
    if getattr(parameter, "_fsdp_flattened", False):
        return "FSDP1"
    return "ZeRO-3" if hasattr(parameter, "ds_id") else None
