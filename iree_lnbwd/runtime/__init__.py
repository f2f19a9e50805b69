"""Runs modules: loads them on a device, hands them the caller's arrays, returns the gradients."""

from iree_lnbwd.runtime.loading import load, load_built, probe
from iree_lnbwd.runtime.op import LayerNormBackward

__all__ = ["LayerNormBackward", "load", "load_built", "probe"]
