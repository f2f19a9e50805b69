"""What `eps` may be in PyTorch's functions: all that PyTorch's forwards take, or what sums hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor
from torch.nn import functional

from iree_lnbwd.torch import add_layer_norm, add_rms_norm, layer_norm, rms_norm

COLUMNS = 24
NEVER_HELD = (1e-50, 7e-46, -1e-46, 1e39)
# Those whose forwards are ours.
OURS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, eps: layer_norm(x, COLUMNS, eps=eps, own_forward=True),
    "memory_efficient": lambda x, eps: layer_norm(x, COLUMNS, eps=eps, memory_efficient=True),
    "rms_norm": lambda x, eps: rms_norm(x, COLUMNS, eps=eps),
    "add_layer_norm": lambda x, eps: add_layer_norm(x, x, COLUMNS, eps=eps),
    "add_rms_norm": lambda x, eps: add_rms_norm(x, x, COLUMNS, eps=eps),
}


def rows(dtype: torch.dtype) -> Tensor:
    """One that is constant, and one that is not."""
    return torch.stack([torch.full((COLUMNS,), 3.0), torch.arange(COLUMNS)]).to(dtype)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("eps", NEVER_HELD)
def test_what_sums_cannot_hold_is_refused(name: str, eps: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"^eps: expected 0, or a number from 1.4e-45 to "):
            OURS[name](rows(dtype), eps)


@pytest.mark.parametrize("eps", [*NEVER_HELD, 0.0, -1e-3])
def test_a_layer_norm_takes_what_pytorchs_does(eps: float) -> None:
    x = rows(torch.float32)
    expected = functional.layer_norm(x, (COLUMNS,), eps=eps)
    torch.testing.assert_close(layer_norm(x, COLUMNS, eps=eps), expected, equal_nan=True)


@pytest.mark.drawn
@pytest.mark.parametrize("eps", [1e-50, 1e39, 0.0, -1e-3, None])
def test_sums_of_f64_hold_more(eps: float | None) -> None:
    x = rows(torch.float64)
    expected = functional.rms_norm(x, (COLUMNS,), eps=eps)
    torch.testing.assert_close(rms_norm(x, COLUMNS, eps=eps), expected, equal_nan=True)


@pytest.mark.parametrize("eps", [0.0, -0.0, -1e-3, None])
def test_zero_negative_and_none_are_pytorchs(eps: float | None) -> None:
    x = rows(torch.float32)
    expected = functional.rms_norm(x, (COLUMNS,), eps=eps)
    torch.testing.assert_close(rms_norm(x, COLUMNS, eps=eps), expected, equal_nan=True)
