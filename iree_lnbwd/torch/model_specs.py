"""The modules that a model needs once its norms are replaced, for types by our names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.torch.modules import check_model
from iree_lnbwd.torch.replacement.replace import replace_norms
from iree_lnbwd.torch.warmup import specs

_TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}


def of_model(
    model: object, dtypes: Sequence[str], weight_dtype: str | None
) -> tuple[NormSpec, ...]:
    """Replaces the norms of a model, and returns what they need.

    Args:
        model: A `torch.nn.Module`.
        dtypes: Of the norms' inputs.
        weight_dtype: Of the weights; None means that of the inputs.

    Raises:
        TypeError, ValueError: Naming the argument, also if there is no norm to be served.
    """
    check_model(model)
    assert isinstance(model, torch.nn.Module)
    replace_norms(model, dtypes={_TYPES[name] for name in (*dtypes, weight_dtype or dtypes[0])})
    found: dict[NormSpec, None] = {}
    for name in dtypes:
        weights = _TYPES[weight_dtype or name]
        found |= dict.fromkeys(specs(model, dtype=_TYPES[name], weight_dtype=weights))
    if not found:
        raise ValueError("model: expected one with norms of a known width, got none")
    return tuple(found)
