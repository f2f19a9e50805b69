"""A small Llama-style model, for `scripts/capture_training_step.py` and `scripts/train`.

Each norm takes the residual stream and what the layer before added to it, as models with a fused
residual have it: `AddRMSNorm` returns the normalized sum and the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from small_gpt import Config
from torch import Tensor, nn

_ROTARY_BASE = 10000.0  # Llama's


class AddRMSNorm(nn.RMSNorm):
    """RMS normalization of a sum, after an addition: PyTorch's, or that of a further base class."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [batch, seq, d_model] to the normalized sum and the sum."""
        total = x + residual
        return super().forward(total), total


Norm = Callable[[int, float], nn.Module]  # of d_model and eps, with the forward of `AddRMSNorm`


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated MLP, each behind an `AddRMSNorm`."""

    def __init__(self, config: Config, norm: Norm) -> None:
        super().__init__()
        d, hidden = config.d_model, 8 * config.d_model // 3
        self.n_head = config.n_head
        self.input_norm = norm(d, config.layer_norm_eps)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.mlp_norm = norm(d, config.layer_norm_eps)
        self.gate_and_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor, residual: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """What is to be added to the residual stream, and the stream, to the same two.

        Args:
            x: [batch, seq, d_model].
            residual: As ``x``.
            turns: Cosines and sines of the positions: [2, seq, d_model / n_head / 2].
        """
        normed, residual = self.input_norm(x, residual)
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.qkv(normed).chunk(3, dim=-1)
        )
        cos, sin = turns.to(q.dtype)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        normed, residual = self.mlp_norm(self.proj(attended.transpose(1, 2).flatten(-2)), residual)
        gate, up = self.gate_and_up(normed).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up), residual


class Llama(nn.Module):
    """A decoder-only language model: tokens [batch, seq] to logits [batch, seq, vocab_size].

    The norms are of one kind; models with different kinds have the same state_dict.
    """

    def __init__(self, config: Config, norm: Norm = AddRMSNorm) -> None:
        super().__init__()
        self.d_head = config.d_model // config.n_head
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.h = nn.ModuleList(LlamaBlock(config, norm) for _ in range(config.n_layer))
        self.norm = norm(config.d_model, config.layer_norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, seq] to logits [batch, seq, vocab_size]."""
        x = self.token_embedding(tokens)
        residual = torch.zeros_like(x)
        turns = _turns(tokens.shape[1], self.d_head, x)
        for block in self.h:
            x, residual = block(x, residual, turns)
        logits: Tensor = self.head(self.norm(x, residual)[0])
        return logits


def _turns(count: int, d_head: int, like: Tensor) -> Tensor:
    """Cosines and sines of the first positions, [2, count, d_head / 2]."""
    half = d_head // 2
    rates = _ROTARY_BASE ** -(torch.arange(half, device=like.device) / half)
    angles = torch.arange(count, device=like.device)[:, None] * rates
    return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, n_head, seq, d_head] with each pair of features turned by its row's position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
