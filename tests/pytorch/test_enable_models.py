"""`enable` in models of transformers and timm, with random weights: `status` says what ran.

It reaches what calls PyTorch's functions. transformers writes its RMS norms out in Python:
`replace_norms` alone reaches those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from test_replace_models import MODELS, Run, of_timm, of_transformers
from torch import nn

import iree_lnbwd.torch as lnbwd

# They warn of their own future, each in its own way.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("enable_ends")]
OF_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "eos_token_id": 2}
# The backwards of a step that call PyTorch's function.
OF_TRANSFORMERS = {name: (settings, 0) for name, (settings, *_) in MODELS.items()} | {
    "OlmoForCausalLM": (MODELS["OlmoForCausalLM"][0], 5),
    "GPT2LMHeadModel": (OF_GPT2, 5),
}
OF_TIMM = {"vit_tiny_patch16_224": 25, "convnext_atto": 17}


def assert_ours_in_a_step(model: nn.Module, run: Run, norms: int) -> None:
    """All backwards of norms that PyTorch's functions have, and right ones."""
    parameters = list(model.parameters())

    def step() -> tuple[torch.Tensor | None, ...]:
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            run(model).square().mean(), parameters, allow_unused=True
        )
        return found

    expected = step()
    lnbwd.enable()
    found = step()
    print(lnbwd.status())
    assert (lnbwd.status().ours, lnbwd.status().pytorchs) == (norms, 0)
    # A gradient of a norm differs by some units of roundoff; what follows may double that often.
    bound = max(norms, 1) * 3 * 2.0**-24 * 16
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_models_of_transformers(name: str) -> None:
    settings: Mapping[str, Any]
    settings, norms = OF_TRANSFORMERS[name]
    assert_ours_in_a_step(*of_transformers(name, settings), norms)


@pytest.mark.parametrize("name", OF_TIMM)
def test_models_of_timm(name: str) -> None:
    assert_ours_in_a_step(*of_timm(name), OF_TIMM[name])
