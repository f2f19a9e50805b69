"""A small GPT and its training, for `scripts/capture_training_step.py` and `scripts/train`.

Pre-LN, byte level, trained on the Python language reference that every Python installation carries
(`pydoc_data.topics`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of the model and of its training batches, and the optimizer's settings."""

    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 192
    context: int = 96
    batch_size: int = 16
    layer_norm_eps: float = 1e-5
    learning_rate: float = 1e-3
    warmup_steps: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


class Block(nn.Module):
    """A pre-LN transformer block: [batch, seq, d_model] to the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.d_model
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln_2 = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """Activations [batch, seq, d_model] to activations of the same shape."""
        # [batch, seq, 3 * d_model] to three of [batch, n_head, seq, d_model / n_head].
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Gpt(nn.Module):
    """A decoder-only language model: tokens [batch, seq] to logits [batch, seq, vocab_size]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.apply(_init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, seq] to logits [batch, seq, vocab_size]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def _init_weights(module: nn.Module) -> None:
    """Initializes as GPT-2 does: small normal weights and zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def batches(text: bytes, config: Config, seed: int) -> Iterator[Tensor]:
    """Yields random windows of the text without end, each int64 [batch, context + 1]."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(config.context + 1)
    while True:
        starts = torch.randint(
            len(data) - config.context, (config.batch_size, 1), generator=generator
        )
        yield data[starts + window]


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the mean cross entropy, in nats, of predicting each next byte."""
    logits: Tensor = model(batch[:, :-1])
    # The loss is taken in f32 in every precision, as training code commonly does.
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def corpus() -> bytes:
    """The text: the values of `topics.topics` in the order of their keys."""
    return "".join(topics.topics[key] for key in sorted(topics.topics)).encode()


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW, with weight decay for matrices: it would pull layer-norm weights from 1 towards 0."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    step: int,
    config: Config,
    autocast: torch.dtype | None = None,
    loss_of: Callable[[nn.Module, Any], Tensor] = next_byte_loss,
) -> Tensor:
    """Trains the model in place by one batch and returns its loss; ``step`` counts from 1.

    A batch is what ``loss_of`` takes.
    """
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, step / config.warmup_steps)
    optimizer.zero_grad()
    device = next(model.parameters()).device
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        loss = loss_of(model, batch)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(list(model.parameters()), config.max_grad_norm)
    optimizer.step()
    return loss.detach()
