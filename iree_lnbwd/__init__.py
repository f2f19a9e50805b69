"""Layer and RMS normalization, forward and backward: one IR, compiled by IREE for GPUs and the CPU.

``layer_norm``, ``rms_norm`` and their backwards compute; ``compile`` makes a module to ship,
``load`` loads one to run it, and ``bundle`` and ``Bundle`` do so with many in one file.
``targets`` lists the targets to compile for, ``tune`` finds the fastest schedules on a GPU of this
machine, and ``reference`` is the NumPy judge.
"""

from iree_lnbwd import reference
from iree_lnbwd.bundles.container import BundleFile
from iree_lnbwd.bundles.writing import bundle
from iree_lnbwd.calls.bundle import Bundle
from iree_lnbwd.errors import ArtifactError, CompileError, DeviceError
from iree_lnbwd.functional import (
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from iree_lnbwd.hardware.targets import Target, targets
from iree_lnbwd.ops.arguments import (
    GatedNormGrads,
    LayerNormGrads,
    NormGradsWithCopy,
    NormGradsWithSum,
    NormOutput,
    RMSNormGrads,
)
from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.runtime import LayerNorm, LayerNormBackward, Norm, RMSNorm, RMSNormBackward, load
from iree_lnbwd.stores.shipping import compile
from iree_lnbwd.tuning.tuner import tune
from iree_lnbwd.version import __version__
from iree_lnbwd.vmfb.artifact import Artifact, Manifest

__all__ = [
    "Artifact",
    "ArtifactError",
    "Bundle",
    "BundleFile",
    "CompileError",
    "DeviceError",
    "GatedNormGrads",
    "LayerNorm",
    "LayerNormBackward",
    "LayerNormGrads",
    "Manifest",
    "Norm",
    "NormGradsWithCopy",
    "NormGradsWithSum",
    "NormOutput",
    "NormSpec",
    "RMSNorm",
    "RMSNormBackward",
    "RMSNormGrads",
    "Target",
    "__version__",
    "bundle",
    "compile",
    "layer_norm",
    "layer_norm_backward",
    "load",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "targets",
    "tune",
]
