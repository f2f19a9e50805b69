"""PyTorch's norms take their modules from a bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch

import iree_lnbwd as lnbwd
from iree_lnbwd import NormSpec
from iree_lnbwd.torch import rms_norm


def test_norms_come_from_the_users_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the empty cache shows that nothing is compiled."""
    monkeypatch.setenv("IREE_LNBWD_CACHE", str(tmp_path / "cache"))
    specs = (
        NormSpec((40,), op="rms_norm", eps=0.125),  # which no other test has loaded
        NormSpec((40,), op="rms_norm_backward", weight_offset=0.125),
        NormSpec((40,), op="rms_norm", eps=0.125, weight_offset=0.125),
    )
    lnbwd.bundle(specs, "generic", tmp_path / "norms.lnb")
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("IREE_LNBWD_BUNDLE", str(tmp_path / "norms.lnb"))
    x, weight = torch.randn(3, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    y = rms_norm(x, 40, weight, 0.125, weight_offset=0.125)
    expected = torch.nn.functional.rms_norm(x, (40,), weight + 0.125, 0.125)
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(
        torch.autograd.grad(y.square().sum(), (x, weight)),
        torch.autograd.grad(expected.square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not (tmp_path / "cache").exists()
