"""Runs modules: loads them on a device, hands them the caller's arrays, returns the results."""

from iree_lnbwd.runtime.loading import load, load_built, probe
from iree_lnbwd.runtime.op import Norm
from iree_lnbwd.runtime.ops import LayerNorm, LayerNormBackward, RMSNorm, RMSNormBackward

__all__ = [
    "LayerNorm",
    "LayerNormBackward",
    "Norm",
    "RMSNorm",
    "RMSNormBackward",
    "load",
    "load_built",
    "probe",
]
