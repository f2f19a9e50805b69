"""The ops as functions: they compile on first use, then run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iree_lnbwd.calls.calling import call
from iree_lnbwd.calls.norms import Norms
from iree_lnbwd.hardware.devices import DeviceUri
from iree_lnbwd.ops.arguments import Options, Results

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


class _Functions(Norms):
    """Each call is computed where its arrays are, by a module for exactly its kind."""

    def _compute(self, given: Sequence[Any], options: Options, device: str | None) -> Results:
        return call(given, options, None if device is None else DeviceUri.parse(device))[0]


_functions = _Functions()
layer_norm = _functions.layer_norm
layer_norm_backward = _functions.layer_norm_backward
rms_norm = _functions.rms_norm
rms_norm_backward = _functions.rms_norm_backward
