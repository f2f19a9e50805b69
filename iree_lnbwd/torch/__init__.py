"""The norms in PyTorch: drop-in functions and modules, and forms with a fused residual.

``layer_norm`` and ``rms_norm`` are drop-ins for the functions of ``torch.nn.functional``,
``LayerNorm`` and ``RMSNorm`` for the modules of ``torch.nn``. ``replace_norms`` makes the norms of
a model compute here. ``add_layer_norm`` and ``add_rms_norm``, and the modules ``AddLayerNorm`` and
``AddRMSNorm``, normalize the sum of two tensors and return that sum, too.

All directions are operators of PyTorch's dispatcher, ``torch.ops.iree_lnbwd``. They are registered
with ``torch.library.Library`` and a ``torch.autograd.Function``. ``torch.compile`` and
``torch.export`` can see through operators that are registered in this way, and it takes the least
time in a call. For tensors on a GPU, `torch_native` replaces two of them by C++, if it can be
compiled: ``layer_norm`` and ``layer_norm_backward``.
"""

from iree_lnbwd.torch import operators  # noqa: F401  (registers them)
from iree_lnbwd.torch.functions import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from iree_lnbwd.torch.modules import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    RMSNorm,
)
from iree_lnbwd.torch.replacement.replace import replace_norms
from iree_lnbwd.torch.replacement.report import Report
from iree_lnbwd.torch.warmup import warmup

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "LayerNorm",
    "RMSNorm",
    "Report",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "replace_norms",
    "rms_norm",
    "warmup",
]
