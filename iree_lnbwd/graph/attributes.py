"""The attributes of norm nodes, by hipDNN's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iree_lnbwd.graph.builder import Tensor


class NormFwdPhase(Enum):
    """What a forward is for; the value is its number in hipDNN's and cuDNN's enums."""

    INFERENCE = 1  # the output alone
    TRAINING = 2  # the output, and the statistics that the backward takes


@dataclass(frozen=True)
class LayernormAttributes:
    """Of a layer normalization.

    Attributes:
        epsilon: Added to the variance: a number, or a tensor passed by value. Required.
        forward_phase: Whether there are statistics. Required.
        normalized_dim_count: How many of the last dimensions are normalized; 0 means those of SCALE
            that are not padded by ones.
        name: Of the node.
    """

    epsilon: Tensor | float | None = None
    forward_phase: NormFwdPhase | None = None
    normalized_dim_count: int = 0
    name: str = ""


@dataclass(frozen=True)
class LayernormBackwardAttributes:
    """Of the gradients of a layer normalization.

    Attributes:
        mean: The statistics that the forward saved, both or neither. Without them they are
            recomputed.
        inv_variance: As ``mean``: 1 / sqrt(variance + epsilon).
        epsilon: As in the forward, for statistics that are recomputed; None means 1e-5.
        normalized_dim_count: As in the forward.
        name: Of the node.
    """

    mean: Tensor | None = None
    inv_variance: Tensor | None = None
    epsilon: Tensor | float | None = None
    normalized_dim_count: int = 0
    name: str = ""


@dataclass(frozen=True)
class AdaLayernormAttributes:
    """Of a layer normalization with a scale and a bias for each sample.

    Attributes:
        epsilon: Added to the variance: a number, or a tensor passed by value. Required.
        forward_phase: Whether there are statistics. Required.
        name: Of the node.
    """

    epsilon: Tensor | float | None = None
    forward_phase: NormFwdPhase | None = None
    name: str = ""


@dataclass(frozen=True)
class AdaLayernormBackwardAttributes:
    """Of the gradients of a layer normalization with a scale and a bias for each sample.

    Attributes:
        mean: The statistics that the forward saved, both or neither. Without them they are
            recomputed.
        inv_variance: As ``mean``: 1 / sqrt(variance + epsilon).
        epsilon: As in the forward, for statistics that are recomputed; None means 1e-5.
        name: Of the node.
    """

    mean: Tensor | None = None
    inv_variance: Tensor | None = None
    epsilon: Tensor | float | None = None
    name: str = ""


@dataclass(frozen=True)
class RMSNormAttributes:
    """Of an RMS normalization.

    Attributes:
        epsilon: Added to the mean of the squares: a number, or a tensor passed by value. Required.
        forward_phase: Whether there is INV_RMS. Required.
        bias: As SCALE: what is added after it; None means nothing.
        name: Of the node.
    """

    epsilon: Tensor | float | None = None
    forward_phase: NormFwdPhase | None = None
    bias: Tensor | None = None
    name: str = ""


@dataclass(frozen=True)
class RMSNormBackwardAttributes:
    """Of the gradients of an RMS normalization.

    Attributes:
        compute_dbias: Whether there is DBIAS, the gradient of a bias: the sum of DY.
        name: Of the node.
    """

    compute_dbias: bool = False
    name: str = ""
