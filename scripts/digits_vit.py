"""A ViT of timm that learns to read digits, for `scripts/train`.

The digits are the 1797 handwritten ones of 8 x 8 pixels that scikit-learn carries (UCI's "Optical
Recognition of Handwritten Digits"), enlarged to the model's image.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from small_gpt import Config
from torch import Tensor, nn

PATCH = 16  # pixels on a side
_DIGIT, _BRIGHTEST = 8, 16  # pixels on a side; the pixels' largest value


def vit(config: Config) -> nn.Module:
    """The ViT: images [batch, 1, height, width] to logits [batch, vocab_size].

    Raises:
        ImportError: timm is not installed.
    """
    model: nn.Module = importlib.import_module("timm.models").VisionTransformer(
        img_size=_side(config),
        patch_size=PATCH,
        in_chans=1,
        num_classes=config.vocab_size,
        embed_dim=config.d_model,
        depth=config.n_layer,
        num_heads=config.n_head,
    )
    return _Reader(model, _side(config))


class _Reader(nn.Module):  # type: ignore[misc]
    """Enlarges digits [batch, 64] to the images that the model takes."""

    def __init__(self, model: nn.Module, side: int) -> None:
        super().__init__()
        self.model, self.side = model, side

    def forward(self, digits: Tensor) -> Tensor:
        images = digits.unflatten(1, (1, _DIGIT, _DIGIT))
        images = F.interpolate(images, size=self.side, mode="bilinear")
        logits: Tensor = self.model(images)
        return logits


def digits(config: Config, seed: int) -> Iterator[Tensor]:
    """Batches without end, each uint8 [batch, 65]: what a digit is, and its pixels.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    found = importlib.import_module("sklearn.datasets").load_digits()
    columns = (torch.from_numpy(found.target)[:, None], torch.from_numpy(found.data))
    known = torch.cat(columns, 1).byte()
    generator = torch.Generator().manual_seed(seed)
    size = (config.batch_size,)
    draws = (torch.randint(len(known), size, generator=generator) for _ in itertools.count())
    return (known[draw] for draw in draws)


def digit_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the mean cross entropy, in nats, of reading each digit."""
    dtype = next(model.parameters()).dtype
    logits: Tensor = model(batch[:, 1:].to(dtype) / _BRIGHTEST)
    return F.cross_entropy(logits.float(), batch[:, 0].long())


def _side(config: Config) -> int:
    """Of the image, in pixels: of so many patches as the config's context has tokens."""
    return math.isqrt(config.context) * PATCH
