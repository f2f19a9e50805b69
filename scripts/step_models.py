"""The models whose training steps `scripts/steps` times: of transformers, timm and diffusers.

Their weights are random, and there is no dropout. A library is imported when its model is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

FULL, SHORT, TINY = SIZES = ("full", "short", "tiny")
_VOCABULARY = 8192
_HEAD = 128  # the width of Qwen3's heads
_PATCH = 16  # pixels on a side
_CHANNELS = 4  # of a latent
_PACKED_CHANNELS = 16  # of Flux's latents
# In a Flux, the backward of cuDNN's attention fails (PyTorch 2.11, its own norms).
_NOT_CUDNNS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CHUNK = 32  # tokens; PyTorch's own code of Mamba2's scan takes memory of their square

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its batches.

    Attributes:
        layers: How many.
        width: Of the residual stream.
        heads: Of the attention.
        inner: The width of the MLP.
        batch: Sequences, or images, or latents.
        length: Tokens of a sequence, or pixels on an image's or a latent's side.
        classes: Tokens of the vocabulary, or kinds of images.
    """

    layers: int
    width: int
    heads: int
    inner: int
    batch: int
    length: int
    classes: int = _VOCABULARY

    def reduced(self, share: float) -> Shape:
        """With this part of the batch, and at least one of it."""
        return replace(self, batch=max(1, int(self.batch * share)))


@dataclass(frozen=True)
class StepModel:
    """A model, and how a step trains it.

    Attributes:
        name: Its own.
        said: Its size, and that of a batch.
        make: Makes one; raises ImportError if its library is not there.
        draw: A batch, on the CPU, of a shape and a seed.
        loss: Of a model on a batch: the mean cross entropy, in nats; or the mean square error.
        full: Its shape where it is timed.
        tiny: A shape for tests.
    """

    name: str
    said: str
    make: Callable[[Shape], nn.Module]
    draw: Callable[[Shape, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    full: Shape
    tiny: Shape

    def shape(self, size: str) -> Shape:
        """The one of this size, of `SIZES`. A short model has the full width, and two layers."""
        if size == SHORT:
            images = self.draw is _images
            length = self.full.length if images else min(self.full.length, 256)
            return replace(self.full, layers=2, batch=2, length=length)
        return {FULL: self.full, TINY: self.tiny}[size]


# --- batches and losses ----------------------------------------------------------------------


def _tokens(shape: Shape, seed: int) -> Batch:
    """Int64 [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(shape.classes, (shape.batch, shape.length), generator=generator),)


def _images(shape: Shape, seed: int) -> Batch:
    """Images, f32 [batch, 3, length, length], and what they show, int64 [batch]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(shape.batch, 3, shape.length, shape.length, generator=generator)
    return images, torch.randint(shape.classes, (shape.batch,), generator=generator)


def _latents(shape: Shape, seed: int) -> Batch:
    """Latents and their noise, f32 [batch, 4, length, length]; their steps and kinds [batch]."""
    generator = torch.Generator().manual_seed(seed)
    of_both = torch.randn(
        *(2, shape.batch, _CHANNELS, shape.length, shape.length), generator=generator
    )
    steps = torch.randint(1000, (shape.batch,), generator=generator)
    kinds = torch.randint(shape.classes, (shape.batch,), generator=generator)
    return *of_both.unbind(), steps, kinds


def _packed_latents(shape: Shape, seed: int) -> Batch:
    """Patches of latents and their noise, what is said of them, and where patches and words are.

    That is f32 [batch, patches, 64] twice, features of words [batch, words, width] and of all
    [batch, width / 4], how noisy each latent is [batch], and twice f32 [tokens, 3].
    """
    generator = torch.Generator().manual_seed(seed)
    side, words = shape.length // 2, 4 * shape.length
    both = torch.randn(2, shape.batch, side * side, 4 * _PACKED_CHANNELS, generator=generator)
    features = torch.randn(shape.batch, words, shape.width, generator=generator)
    pooled = torch.randn(shape.batch, shape.width // 4, generator=generator)
    noisy = torch.rand(shape.batch, generator=generator)
    line = torch.arange(float(side))
    places = torch.cartesian_prod(torch.zeros(1), line, line)
    return *both.unbind(), features, pooled, noisy, places, torch.zeros(words, 3)


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, kinds = batch
    logits: Tensor = model(images.to(next(model.parameters()).dtype))
    return F.cross_entropy(logits.float(), kinds)


def _noise_loss(model: nn.Module, batch: Batch) -> Tensor:
    latents, noise, steps, kinds = batch
    own = latents.to(next(model.parameters()).dtype)
    (found,) = model(own, timestep=steps, class_labels=kinds, return_dict=False)
    return F.mse_loss(found[:, :_CHANNELS].float(), noise)  # the rest is the variance


def _packed_loss(model: nn.Module, batch: Batch) -> Tensor:
    dtype = next(model.parameters()).dtype
    latents, noise, features, pooled, noisy, *places = batch
    with sdpa_kernel(_NOT_CUDNNS):
        (found,) = model(
            latents.to(dtype),
            encoder_hidden_states=features.to(dtype),
            pooled_projections=pooled.to(dtype),
            timestep=noisy.to(dtype),
            img_ids=places[0],
            txt_ids=places[1],
            return_dict=False,
        )
    return F.mse_loss(found.float(), noise)


# --- the models ------------------------------------------------------------------------------


def _of_transformers(name: str, **settings: object) -> nn.Module:
    cls = getattr(importlib.import_module("transformers"), name)
    model: nn.Module = cls(cls.config_class(**settings))
    return model


def _llama_like(name: str, shape: Shape, **settings: object) -> nn.Module:
    usual = {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "vocab_size": shape.classes,
        "max_position_embeddings": 4096,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    return _of_transformers(name, **usual | settings)


def _llama(shape: Shape) -> nn.Module:
    return _llama_like("LlamaForCausalLM", shape, rms_norm_eps=1e-5)


def _qwen3(shape: Shape) -> nn.Module:
    return _llama_like("Qwen3ForCausalLM", shape, head_dim=_HEAD)


def _gemma3n(shape: Shape) -> nn.Module:
    return _llama_like(
        "Gemma3nForCausalLM",
        shape,
        intermediate_size=[shape.inner] * shape.layers,
        head_dim=2 * _HEAD,
        vocab_size_per_layer_input=shape.classes,
        hidden_size_per_layer_input=shape.width // 8,
        laurel_rank=shape.width // 32,
        num_kv_shared_layers=0,
        sliding_window=shape.length // 4,
        layer_types=["sliding_attention", "full_attention"] * (shape.layers // 2),
        activation_sparsity_pattern=[0.0] * shape.layers,
    )


def _mamba2(shape: Shape) -> nn.Module:
    return _of_transformers(
        "Mamba2ForCausalLM",
        hidden_size=shape.width,
        expand=shape.inner // shape.width,
        num_hidden_layers=shape.layers,
        num_heads=shape.heads,
        head_dim=shape.inner // shape.heads,
        n_groups=1,
        state_size=64,
        chunk_size=_CHUNK,
        vocab_size=shape.classes,
        use_cache=False,
    )


def _gpt2(shape: Shape) -> nn.Module:
    return _of_transformers(
        "GPT2LMHeadModel",
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.inner,
        vocab_size=shape.classes,
        n_positions=1024,
        use_cache=False,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )


def _bert(shape: Shape) -> nn.Module:
    return _of_transformers(
        "BertForMaskedLM",
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.classes,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,  # or an eager step waits for the GPU, to warn of padding
    )


def _vit(shape: Shape) -> nn.Module:
    model: nn.Module = importlib.import_module("timm").create_model(
        f"vit_base_patch{_PATCH}_224",
        embed_dim=shape.width,
        depth=shape.layers,
        num_heads=shape.heads,
        mlp_ratio=shape.inner / shape.width,
        img_size=shape.length,
        num_classes=shape.classes,
    )
    return model


def _dit(shape: Shape) -> nn.Module:
    model: nn.Module = importlib.import_module("diffusers").DiTTransformer2DModel(
        num_attention_heads=shape.heads,
        attention_head_dim=shape.width // shape.heads,
        in_channels=_CHANNELS,
        out_channels=2 * _CHANNELS,
        num_layers=shape.layers,
        sample_size=shape.length,
        patch_size=2,
        num_embeds_ada_norm=shape.classes,
    )
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of kinds
            module.dropout_prob = 0.0
    return model


def _flux(shape: Shape) -> nn.Module:
    head = shape.width // shape.heads
    of_sides = (head - head // 8) // 2
    model: nn.Module = importlib.import_module("diffusers").FluxTransformer2DModel(
        in_channels=4 * _PACKED_CHANNELS,
        num_layers=shape.layers,
        num_single_layers=2 * shape.layers,
        attention_head_dim=head,
        num_attention_heads=shape.heads,
        joint_attention_dim=shape.width,
        pooled_projection_dim=shape.width // 4,
        axes_dims_rope=(head // 8, of_sides, of_sides),
    )
    return model


_TINY = Shape(layers=2, width=64, heads=2, inner=128, batch=2, length=32, classes=64)
MODELS: Mapping[str, StepModel] = MappingProxyType(
    {
        "llama": StepModel(
            "Llama",
            "8 layers of 2048, grouped queries, 4 x 2048 tokens",
            *(_llama, _tokens, _token_loss),
            full=Shape(layers=8, width=2048, heads=16, inner=5632, batch=4, length=2048),
            tiny=_TINY,
        ),
        "gpt2": StepModel(
            "GPT-2",
            "12 layers of 1024, 8 x 1024 tokens",
            *(_gpt2, _tokens, _token_loss),
            full=Shape(layers=12, width=1024, heads=16, inner=4096, batch=8, length=1024),
            tiny=_TINY,
        ),
        "vit": StepModel(
            "ViT-B/16",
            "12 layers of 768, 64 images of 224 x 224",
            *(_vit, _images, _image_loss),
            full=Shape(
                layers=12, width=768, heads=12, inner=3072, batch=64, length=224, classes=1000
            ),
            tiny=replace(_TINY, length=2 * _PATCH, classes=8),
        ),
        "bert": StepModel(
            "BERT",
            "12 layers of 768, norms after additions, 32 x 512 tokens",
            *(_bert, _tokens, _token_loss),
            full=Shape(layers=12, width=768, heads=12, inner=3072, batch=32, length=512),
            tiny=_TINY,
        ),
        "qwen3": StepModel(
            "Qwen3",
            "14 layers of 1024, norms of queries and keys, 4 x 2048 tokens",
            *(_qwen3, _tokens, _token_loss),
            full=Shape(layers=14, width=1024, heads=16, inner=3072, batch=4, length=2048),
            tiny=_TINY,
        ),
        "dit": StepModel(
            "DiT-XL/2",
            "8 of its 28 layers of 1152, 32 latents of 64 x 64",
            *(_dit, _latents, _noise_loss),
            full=Shape(
                layers=8, width=1152, heads=16, inner=4608, batch=32, length=64, classes=1000
            ),
            tiny=replace(_TINY, length=8, classes=8),
        ),
        "flux": StepModel(
            "Flux",
            "1 of its 19 layers and 2 of its 38 single ones, of 3072, 4 latents of 64 x 64",
            *(_flux, _packed_latents, _packed_loss),
            full=Shape(layers=1, width=3072, heads=24, inner=12288, batch=4, length=64),
            tiny=replace(_TINY, layers=1, inner=256, length=8),
        ),
        "mamba2": StepModel(
            "Mamba2",
            "4 layers of 1024, gated norms, 4 x 1024 tokens, its scan in PyTorch's operators",
            *(_mamba2, _tokens, _token_loss),
            full=Shape(layers=4, width=1024, heads=32, inner=2048, batch=4, length=1024),
            tiny=_TINY,
        ),
        "gemma3n": StepModel(
            "Gemma 3n",
            "4 layers of 2048, four streams, norms of queries, keys and values, 2 x 2048 tokens",
            *(_gemma3n, _tokens, _token_loss),
            full=Shape(layers=4, width=2048, heads=8, inner=8192, batch=2, length=2048),
            tiny=_TINY,
        ),
    }
)
