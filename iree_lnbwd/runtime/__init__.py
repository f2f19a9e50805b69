"""Runs modules: loads them on a device, hands them the caller's arrays, returns the results."""

from iree_lnbwd.runtime.loading import load, load_built, probe
from iree_lnbwd.runtime.op import Norm
from iree_lnbwd.runtime.ops import LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward

__all__ = [
    "LayerNorm",
    "LayerNormBackward",
    "Norm",
    "RmsNorm",
    "RmsNormBackward",
    "load",
    "load_built",
    "probe",
]
