"""`replace_norms` on models of transformers and timm, with random weights, where these are."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import torch
from torch import Tensor, nn

from iree_lnbwd.torch import replace_norms

# They warn of their own future, each in its own way.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
# The name of a model of transformers, its settings, its norms, and what they compute.
ROUNDED_TWICE = "RMS norm, output type: promote(input, weight)"
MODELS: dict[str, tuple[Mapping[str, Any], int, str]] = {
    "LlamaForCausalLM": (SMALL, 5, ROUNDED_TWICE),
    "MistralForCausalLM": (SMALL, 5, ROUNDED_TWICE),
    "Qwen2ForCausalLM": (SMALL, 5, ROUNDED_TWICE),
    "Qwen3ForCausalLM": ({**SMALL, "head_dim": 16}, 9, ROUNDED_TWICE),
    "GemmaForCausalLM": ({**SMALL, "head_dim": 16}, 5, "RMS norm, 1 + weight"),
    "OlmoForCausalLM": (SMALL, 5, "layer norm, no weight"),
    "T5ForConditionalGeneration": (OF_T5, 12, "RMS norm, output type: the weight's"),
}

Run = Callable[[nn.Module], Tensor]


def results(model: nn.Module, run: Run) -> list[Tensor]:
    """The output and the gradients of all parameters that have one."""
    output = run(model)
    parameters = list(model.parameters())
    found = torch.autograd.grad(output.square().mean(), parameters, allow_unused=True)
    return [output, *(gradient for gradient in found if gradient is not None)]


def assert_trains_alike(model: nn.Module, run: Run, norm: str) -> int:
    """All norms are replaced, and outputs and gradients stay but for rounding; their number."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, float(parameter.detach().mean()), 0.2)
    replaced = copy.deepcopy(model)
    report = replace_norms(replaced)
    assert {entry.norm for entry in report.entries} == {norm}, str(report)
    count = len(report.replaced)
    # An output of a norm differs by three units of roundoff; what follows may double that often.
    bound = count * 3 * 2.0**-24 * 16
    for ours, theirs in zip(results(replaced, run), results(model, run), strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()
    return count


def of_transformers(name: str, settings: Mapping[str, Any]) -> tuple[nn.Module, Run]:
    """A model, and what runs it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**settings)).eval()
    tokens = torch.randint(3, 64, (2, 9))
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name.startswith("T5"):
        given["decoder_input_ids"] = tokens

    def run(model: nn.Module) -> Tensor:
        logits: Tensor = model(**given).logits
        return logits

    return model, run


def of_timm(name: str) -> tuple[nn.Module, Run]:
    """A model, and what runs it."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    size = {"img_size": 32} if name.startswith("vit") else {}
    model = timm.create_model(name, pretrained=False, num_classes=3, **size).eval()
    x = torch.randn(2, 3, 32, 32)
    return model, lambda model: model(x)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    settings, norms, norm = MODELS[name]
    model, run = of_transformers(name, settings)
    assert assert_trains_alike(model, run, norm) == norms


@pytest.mark.parametrize(
    ("name", "norms", "norm"),
    [
        ("vit_tiny_patch16_224", 25, "layer norm"),
        ("convnext_atto", 17, "layer norm, channels first"),
    ],
)
def test_models_of_timm(name: str, norms: int, norm: str) -> None:
    model, run = of_timm(name)
    assert assert_trains_alike(model, run, norm) == norms


# With 1 + weight, rounded twice, and with a gate.
SAMPLE = ("Gemma2ForCausalLM", "T5ForConditionalGeneration", "Mamba2ForCausalLM")


def test_a_sample_of_families() -> None:
    """`scripts/replaced_models families` has all."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = Path(__file__).parents[2] / "scripts" / "replaced_models"
    asked = ["families", f"--only={','.join(SAMPLE)}", "--share=1", "--ways=f32"]
    done = subprocess.run(
        [sys.executable, str(script), *asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| transformers ")]
    assert len(rows) == len(SAMPLE)
    assert not any("not built" in row or "does not run" in row for row in rows), rows
