"""The norms in PyTorch: its own kernels replaced, drop-ins, and forms with a fused residual.

``enable`` runs this package's kernels in place of PyTorch's own, in the whole process and without a
change to a model; ``status`` says what ran. Under ``torch.compile`` with inductor, a pass folds
what is around a norm into its kernel; ``use_inductor_pass(False)`` switches it off.

``layer_norm`` and ``rms_norm`` are drop-ins for the functions of ``torch.nn.functional``,
``LayerNorm`` and ``RMSNorm`` for the modules of ``torch.nn``. ``replace_norms`` makes the norms of
a model compute here. ``add_layer_norm`` and ``add_rms_norm``, and the modules ``AddLayerNorm`` and
``AddRMSNorm``, normalize the sum of two tensors and return that sum, too. ``gated_layer_norm``,
``gated_rms_norm``, ``GatedLayerNorm`` and ``GatedRMSNorm`` have a gate, after or before the norm.
``modulated_layer_norm`` and ``modulated_rms_norm`` have a scale and a shift for each sample.
``specs`` says which modules a model's norms need, and ``warmup`` loads them ahead.

All directions are operators of PyTorch's dispatcher, ``torch.ops.iree_lnbwd``. They are registered
with ``torch.library.Library`` and a ``torch.autograd.Function``. ``torch.compile`` and
``torch.export`` can see through operators that are registered in this way, and it takes the least
time in a call. A first call replaces all of them by those in C++, if these are there or can be
compiled: ``native``.
"""

import torch  # noqa: F401  (first: where IREE_LNBWD_ENABLE is set, it calls `enable` at its end)

from iree_lnbwd.torch import operators  # noqa: F401  (registers them)
from iree_lnbwd.torch.functions import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from iree_lnbwd.torch.gated import gated_layer_norm, gated_rms_norm
from iree_lnbwd.torch.inductor import switch
from iree_lnbwd.torch.inductor.state import Folded
from iree_lnbwd.torch.inductor.switch import InductorStatus, use_inductor_pass
from iree_lnbwd.torch.modulated import modulated_layer_norm, modulated_rms_norm
from iree_lnbwd.torch.modules import (
    AddLayerNorm,
    AddRMSNorm,
    GatedLayerNorm,
    GatedRMSNorm,
    LayerNorm,
    RMSNorm,
)
from iree_lnbwd.torch.override_status import Status
from iree_lnbwd.torch.overrides import disable, enable, enabled, status
from iree_lnbwd.torch.replacement.replace import replace_norms
from iree_lnbwd.torch.replacement.report import Report
from iree_lnbwd.torch.warmup import specs, warmup

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "Folded",
    "GatedLayerNorm",
    "GatedRMSNorm",
    "InductorStatus",
    "LayerNorm",
    "RMSNorm",
    "Report",
    "Status",
    "add_layer_norm",
    "add_rms_norm",
    "disable",
    "enable",
    "enabled",
    "gated_layer_norm",
    "gated_rms_norm",
    "layer_norm",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "replace_norms",
    "rms_norm",
    "specs",
    "status",
    "use_inductor_pass",
    "warmup",
]

switch.place()
