"""Graphs of norms, as hipDNN's and cuDNN's frontends have them: `Graph`.

The nodes, attributes and ports have hipDNN's names, and so has the JSON. Modules of this package
compute them: ``docs/graph.md``.
"""

from iree_lnbwd.graph.attributes import (
    AdaLayernormAttributes,
    AdaLayernormBackwardAttributes,
    LayernormAttributes,
    LayernormBackwardAttributes,
    NormFwdPhase,
    RMSNormAttributes,
    RMSNormBackwardAttributes,
)
from iree_lnbwd.graph.builder import Graph, Tensor
from iree_lnbwd.graph.tensors import DataType, TensorAttributes

__all__ = [
    "AdaLayernormAttributes",
    "AdaLayernormBackwardAttributes",
    "DataType",
    "Graph",
    "LayernormAttributes",
    "LayernormBackwardAttributes",
    "NormFwdPhase",
    "RMSNormAttributes",
    "RMSNormBackwardAttributes",
    "Tensor",
    "TensorAttributes",
]
