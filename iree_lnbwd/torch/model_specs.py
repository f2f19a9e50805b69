"""The modules that a model needs once its norms are replaced, for types by our names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iree_lnbwd.ops.spec import NormSpec
from iree_lnbwd.torch.modules import check_model
from iree_lnbwd.torch.replacement.replace import replace_norms
from iree_lnbwd.torch.supported import BY_NAME
from iree_lnbwd.torch.warmup import specs


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
    replace_norms(model, dtypes={BY_NAME[name] for name in (*dtypes, weight_dtype or dtypes[0])})
    found: dict[NormSpec, None] = {}
    for name in dtypes:
        weights = BY_NAME[weight_dtype or name]
        found |= dict.fromkeys(specs(model, dtype=BY_NAME[name], weight_dtype=weights))
    if not found:
        raise ValueError("model: expected one with norms of a known width, got none")
    return tuple(found)
