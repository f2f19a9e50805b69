"""The samples of PyTorch's OpInfo of ``nn.functional.rms_norm``, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import FORMS, assert_gradients_right, gradients_of
from support import random_generator
from torch_support import TORCH_DTYPES

from iree_lnbwd.torch import rms_norm

# torch/testing/_internal/common_methods_invocations.py, sample_inputs_rms_norm: input shape,
# normalized shape, options, whether there is a weight. (That file needs more than PyTorch.)
SAMPLES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, float], bool]] = [
    ((1, 2, 3), (1, 2, 3), {"eps": 0.5}, True),
    ((2, 2, 3), (2, 3), {"eps": -0.5}, True),
    ((1,), (1,), {}, True),
    ((1, 2), (2,), {}, True),
    ((0, 1), (1,), {}, True),
    ((1, 2), (2,), {}, False),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("shape", "dims", "options", "has_weight"), SAMPLES)
def test_samples(
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    options: dict[str, Any],
    has_weight: bool,
    dtype: str,
    device: str,
) -> None:
    torch.manual_seed(int(random_generator().integers(2**62)))

    def sample(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.testing.make_tensor(
            shape, device=device, dtype=TORCH_DTYPES[dtype], high=1000, requires_grad=True
        )

    tensors = {"input": sample(shape)} | ({"weight": sample(dims)} if has_weight else {})
    ours = rms_norm(**tensors, normalized_shape=dims, **options)
    theirs = torch.nn.functional.rms_norm(**tensors, normalized_shape=dims, **options)
    torch.testing.assert_close(ours, theirs, equal_nan=True)  # PyTorch's own tolerance
    reached = (torch.randn_like(ours),)
    gradients = gradients_of((ours,), tensors, reached)
    eps = options.get("eps")
    assert_gradients_right(FORMS["rms_norm"], tensors, dims, reached, gradients, eps=eps)


ERRORS = [((1, 2, 3), (), None), ((1, 2, 3), (1, 2, 3), (1, 2)), ((2, 2, 3), (2, 2), None)]


@pytest.mark.parametrize(("shape", "dims", "of_weight"), ERRORS)
def test_errors(
    shape: tuple[int, ...], dims: tuple[int, ...], of_weight: tuple[int, ...] | None
) -> None:
    """What PyTorch refuses, is refused here by name."""
    weight = None if of_weight is None else torch.ones(of_weight)
    with pytest.raises(RuntimeError):
        torch.nn.functional.rms_norm(torch.ones(shape), dims, weight)
    with pytest.raises(ValueError, match=r"^(weight|input|normalized_shape): expected "):
        rms_norm(torch.ones(shape), dims, weight)
