"""What the models of `model_families` are run on: small inputs, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def _tokens(columns: int = 9) -> Tensor:
    return torch.randint(3, 100, (2, columns))


def _image(pixels: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, pixels, pixels)}


def _denoised(*shape: int, **others: Any) -> Callable[[], dict[str, Any]]:
    """Of a model of diffusion, with a text beside it.

    Args:
        *shape: Of what is denoised.
        **others: A tensor, a value, or the shape of further random numbers.
    """
    return lambda: {
        "hidden_states": torch.randn(shape),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "timestep": torch.tensor([0.1, 0.2]),
        **{n: torch.randn(v) if isinstance(v, torch.Size) else v for n, v in others.items()},
    }


_POOLED = torch.Size((2, 32))
_MASK = torch.ones(2, 5, dtype=torch.bool)
_PLACES = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
_PLACES_OF_4 = {"img_ids": torch.zeros(16, 4), "txt_ids": torch.zeros(5, 4)}

INPUTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "tokens": lambda: {"input_ids": _tokens()},
    "both": lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(5)},
    "image": _image(32),
    "image of 28": _image(28),
    "image of 64": _image(64),
    "clip": lambda: {"input_ids": _tokens(), **_image(32)()},
    "mel": lambda: {
        "input_features": torch.randn(2, 16, 128),
        "decoder_input_ids": _tokens(5),
    },
    "sound": lambda: {"input_values": torch.randn(2, 400)},
    "dit": lambda: {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 2]),
        "class_labels": torch.tensor([0, 1]),
    },
    "crossed": _denoised(2, 4, 8, 8),
    "pixart": _denoised(
        *(2, 4, 8, 8), added_cond_kwargs={"resolution": None, "aspect_ratio": None}
    ),
    "pooled": _denoised(2, 4, 8, 8, pooled_projections=_POOLED),
    "masked": _denoised(2, 4, 8, 8, encoder_attention_mask=_MASK),
    "flux": _denoised(2, 16, 4, pooled_projections=_POOLED, **_PLACES),
    "flux 2": _denoised(2, 16, 4, guidance=torch.ones(2), **_PLACES_OF_4),
    "chroma": _denoised(2, 16, 4, **_PLACES),
    "qwen": _denoised(2, 16, 4, encoder_hidden_states_mask=_MASK, img_shapes=[(1, 4, 4)] * 2),
    "ltx": _denoised(2, 16, 4, encoder_attention_mask=_MASK, num_frames=1, height=4, width=4),
    "video": _denoised(2, 4, 2, 8, 8),
    "frames": _denoised(2, 2, 4, 8, 8),
    "hunyuan": _denoised(
        *(2, 4, 2, 8, 8), encoder_attention_mask=_MASK, pooled_projections=torch.Size((2, 16)),
        guidance=torch.ones(2),
    ),
    "latents": lambda: {"sample": torch.randn(2, 3, 16, 16)},
    "latent video": lambda: {"sample": torch.randn(1, 3, 1, 16, 16)},
    "unet": lambda: {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": 1,
        "encoder_hidden_states": torch.randn(2, 5, 32),
    },
}  # fmt: skip
