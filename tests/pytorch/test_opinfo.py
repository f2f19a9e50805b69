"""The samples of PyTorch's OpInfo of ``nn.functional.rms_norm``, and what it refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from norm_support import FORMS, assert_gradients_right, gradients_of
from opinfo_samples import RMS_NORM, SAMPLES, Sample
from torch_support import TORCH_DTYPES

from iree_lnbwd.torch import rms_norm


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.name == RMS_NORM], ids=str)
def test_samples(sample: Sample, dtype: str, device: str) -> None:
    names = ("input", "weight")[: 1 + sample.parameters[0]]
    tensors = dict(zip(names, sample.tensors(TORCH_DTYPES[dtype], device), strict=True))
    ours = rms_norm(**tensors, normalized_shape=sample.dims, eps=sample.eps)
    theirs = sample(*tensors.values())
    torch.testing.assert_close(ours, theirs, equal_nan=True)  # PyTorch's own tolerance
    reached = (torch.randn_like(ours),)
    gradients = gradients_of((ours,), tensors, reached)
    form = FORMS["rms_norm"]
    assert_gradients_right(form, tensors, sample.dims, reached, gradients, eps=sample.eps)


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
