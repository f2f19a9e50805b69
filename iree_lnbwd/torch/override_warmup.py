"""Calls that run our kernels in place of PyTorch's at any size, for `warmup`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from iree_lnbwd.torch import overrides_in_python
from iree_lnbwd.torch.override_places import is_in_place

_OPS = {getattr(torch.ops.aten, name).default: op for op, name in overrides_in_python.ATENS.items()}


class InPlace(TorchDispatchMode):
    """Within it, what `overrides.enable` has put in place computes calls of all sizes, uncounted.

    It sees the calls that autograd and autocast make, with their element types and masks.
    """

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """The results of ours, if it is in place, and else those of the function.

        Raises:
            CompileError, DeviceError, TypeError, ValueError: As `iree_lnbwd.layer_norm`.
        """
        op = _OPS.get(function)
        if op is not None and is_in_place(arguments[0].device.type, op):
            return overrides_in_python.compute(op, *arguments)
        return function(*arguments, **(named or {}))
