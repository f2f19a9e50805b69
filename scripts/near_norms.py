"""Modules that are nearly norms, for `scripts/replaced_models` and its tests: none may be replaced.

Each is a norm, changed in one place: what goes in, its statistics, its weight, what comes out, or
its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

COLUMNS = 24
_EPS = 1e-5


class NearNorm(nn.Module):
    """A norm with a change in one of its places.

    Args:
        centres: Whether it is a layer norm.
        affine: Whether it has a weight, and a layer norm a bias.
        dim: What it normalizes: -1, or 1 of images.
        place: Of the change: "input", "mean", "square", "root", "weight", "output" or "gradient".
        change: What is done there.
    """

    def __init__(
        self, centres: bool, affine: bool, dim: int, place: str, change: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.centres, self.dim, self.place, self.change = centres, dim, place, change
        shape = (COLUMNS,) if dim == -1 else (COLUMNS, 1, 1)
        self.weight = nn.Parameter(torch.ones(shape)) if affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if affine and centres else None

    def _changed(self, place: str, value: Tensor) -> Tensor:
        return self.change(value, self) if place == self.place else value

    def forward(self, x: Tensor) -> Tensor:
        """As PyTorch's formula, but for the change."""
        given = self._changed("input", x)
        mean = given.mean(self.dim, keepdim=True) if self.centres else torch.zeros_like(given)
        centred = given - self._changed("mean", mean) if self.centres else given
        square = self._changed("square", centred.square().mean(self.dim, keepdim=True))
        y = centred * self._changed("root", torch.rsqrt(square + _EPS))
        if self.weight is not None:
            y = y * self._changed("weight", self.weight)
        if self.bias is not None:
            y = y + self.bias
        return self._changed("output", y)


def _noisy(x: Tensor, norm: NearNorm) -> Tensor:
    return x + 1e-3 * torch.randn_like(x) if norm.training else x


def _shifted(x: Tensor, norm: NearNorm) -> Tensor:
    return x + 1e-3 * x.roll(1, norm.dim)


# Of each: where the change is made, and the change.
CHANGES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "input clamped": ("input", lambda x, _: x.clamp(-50.0, 50.0)),
    "input without NaN": ("input", lambda x, _: torch.nan_to_num(x)),
    "input of one sign": ("input", lambda x, _: x.abs()),
    "input scaled": ("input", lambda x, _: x * 1.001),
    "input cubed where large": ("input", lambda x, _: torch.where(x > 100.0, x * x, x)),
    "input detached": ("input", lambda x, _: x.detach() + 0.5 * (x - x.detach())),
    "input mixed with its neighbour": ("input", _shifted),
    "input added to": ("input", lambda x, _: x + 1e-4),
    "input with noise": ("input", _noisy),
    "input rounded": ("input", lambda x, _: x.half().to(x.dtype)),
    "input quantized": ("input", lambda x, _: (x * 64).round() / 64),
    "square unbiased": ("square", lambda s, _: s * (COLUMNS / (COLUMNS - 1))),
    "square clamped": ("square", lambda s, _: s.clamp(min=1e-4)),
    "square clamped above": ("square", lambda s, _: s.clamp(max=1e3)),
    "square of the batch": ("square", lambda s, _: s.mean(0, keepdim=True).expand_as(s)),
    "square of two rows": ("square", lambda s, _: (s + s.flip(0)) / 2),
    "square mixed with its neighbour": ("square", lambda s, _: s + 1e-3 * s.roll(1, 0)),
    "square without gradient": ("square", lambda s, _: s.detach()),
    "square without half its gradient": ("square", lambda s, _: (s + s.detach()) / 2),
    "square sign": ("square", lambda s, _: s * 0.999),
    "square with more eps": ("square", lambda s, _: s + 3e-5),
    "square with eps of its own": ("square", lambda s, _: s * (1 + 1e-4)),
    "square momentum": ("square", lambda s, _: 0.99 * s + 0.01),
    "square in training": ("square", lambda s, norm: s * (1.01 if norm.training else 1.0)),
    "square in evaluation": ("square", lambda s, norm: s * (1.0 if norm.training else 1.01)),
    "square of long batches": ("square", lambda s, _: s * 1.01 if s.shape[0] > 11 else s),
    "square of one row": ("square", lambda s, _: s * 1.01 if s.shape[0] == 1 else s),
    "root clamped": ("root", lambda r, _: r.clamp(max=100.0)),
    "root clamped below": ("root", lambda r, _: r.clamp(min=0.02)),
    "root with eps": ("root", lambda r, _: 1 / (1 / r + 1e-5)),
    "root to another power": ("root", lambda r, _: r.pow(1.001)),
    "root scaled": ("root", lambda r, _: r * 1.0005),
    "root without gradient": ("root", lambda r, _: r.detach()),
    "root rounded": ("root", lambda r, _: r.bfloat16().to(r.dtype)),
    "root of small rows": ("root", lambda r, _: torch.where(r > 2e2, r * 1.01, r)),
    "output clamped": ("output", lambda y, _: y.clamp(-3.0, 3.0)),
    "output without NaN": ("output", lambda y, _: torch.nan_to_num(y)),
    "output relu": ("output", lambda y, _: torch.relu(y)),
    "output leaky": ("output", lambda y, _: torch.nn.functional.leaky_relu(y, 0.999)),
    "output tanh": ("output", lambda y, _: 1e3 * torch.tanh(y / 1e3)),
    "output scaled": ("output", lambda y, _: y * 1.0005),
    "output added to": ("output", lambda y, _: y + 1e-4),
    "output of large batches": ("output", lambda y, _: -y if y.shape[0] == 12 else y),
    "output of other dimensions": ("output", lambda y, _: -y if y.ndim == 4 else y),
    "output with noise": ("output", _noisy),
    "output dropped": ("output", lambda y, n: torch.nn.functional.dropout(y, 0.1, n.training)),
    "output quantized": ("output", lambda y, _: (y * 256).round() / 256),
    "output rounded": ("output", lambda y, _: y.bfloat16().to(y.dtype)),
    "output without gradient": ("output", lambda y, _: y.detach()),
    "output with half its gradient": ("output", lambda y, _: (y + y.detach()) / 2),
    "output mixed with its neighbour": ("output", _shifted),
    "output permuted": ("output", lambda y, norm: y.flip(norm.dim)),
    "output of the first row": ("output", lambda y, _: torch.cat((y[:1] * 1.01, y[1:]))),
    "output of zeros": ("output", lambda y, _: torch.where(y == 0, 1e-3 + y, y)),
    "mean scaled": ("mean", lambda m, _: m * 0.999),
    "mean without gradient": ("mean", lambda m, _: m.detach()),
    "mean of the batch": ("mean", lambda m, _: m.mean(0, keepdim=True).expand_as(m)),
    "mean clamped": ("mean", lambda m, _: m.clamp(-3.0, 3.0)),
    "mean rounded": ("mean", lambda m, _: m.bfloat16().to(m.dtype)),
    "mean with eps": ("mean", lambda m, _: m + 1e-4),
    "mean in training": ("mean", lambda m, norm: m if norm.training else 0 * m),
    "mean of positive rows": ("mean", lambda m, _: torch.relu(m)),
    "weight of one sign": ("weight", lambda w, _: w.abs()),
    "weight clamped": ("weight", lambda w, _: w.clamp(-100.0, 100.0)),
    "weight clamped below": ("weight", lambda w, _: w.clamp(min=-2.0)),
    "weight squared": ("weight", lambda w, _: w * w),
    "weight through a sigmoid": ("weight", lambda w, _: torch.sigmoid(w)),
    "weight through softplus": ("weight", lambda w, _: torch.nn.functional.softplus(w)),
    "weight through tanh": ("weight", lambda w, _: 1e3 * torch.tanh(w / 1e3)),
    "weight without gradient": ("weight", lambda w, _: w.detach()),
    "weight with half its gradient": ("weight", lambda w, _: (w + w.detach()) / 2),
    "weight normalized": ("weight", lambda w, _: w / w.norm()),
    "weight around two": ("weight", lambda w, _: w + 2.0),
    "weight around nearly one": ("weight", lambda w, _: w + 0.999),
    "weight permuted": ("weight", lambda w, _: w.flip(0)),
    "weight rounded": ("weight", lambda w, _: w.bfloat16().to(w.dtype)),
    "weight in training": ("weight", lambda w, norm: w if norm.training else w * 1.01),
    "weight exponential": ("weight", lambda w, _: (w / 100).exp()),
    "weight of zero": ("weight", lambda w, _: torch.where(w == 0, torch.ones_like(w), w)),
}


_silu = torch.nn.functional.silu


class GatedNearNorm(NearNorm):
    """An RMS norm with a gate, with a change in one of its places.

    Args:
        is_first: Whether the gate comes before the norm.
        place: As `NearNorm`, or "gate", or "gated": what the gate's factor is multiplied by.
        change: What is done there.
    """

    def __init__(self, is_first: bool, place: str, change: Callable[..., Tensor]) -> None:
        super().__init__(False, True, -1, place, change)
        self.is_first = is_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """As Mamba2's formula or Qwen3-Next's, but for the change."""
        factor = self.change(gate, self) if self.place == "gate" else _silu(gate)
        given = self._changed("input", x)
        given = self._changed("gated", given) * factor if self.is_first else given
        square = self._changed("square", given.square().mean(-1, keepdim=True))
        y = given * self._changed("root", torch.rsqrt(square + _EPS))
        assert self.weight is not None
        y = y * self._changed("weight", self.weight)
        y = y if self.is_first else self._changed("gated", y) * factor
        return self._changed("output", y)


# What is made of a gate, in place of silu.
GATES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda z, _: torch.sigmoid(z),
    "tanh": lambda z, _: torch.tanh(z),
    "relu": lambda z, _: torch.relu(z),
    "gelu": lambda z, _: torch.nn.functional.gelu(z),
    "gelu's sigmoid": lambda z, _: z * torch.sigmoid(1.702 * z),
    "mish": lambda z, _: torch.nn.functional.mish(z),
    "hardswish": lambda z, _: torch.nn.functional.hardswish(z),
    "softplus": lambda z, _: torch.nn.functional.softplus(z),
    "itself": lambda z, _: z,
    "nothing": lambda z, _: torch.ones_like(z) + 0 * z,
    "silu around one": lambda z, _: 1 + _silu(z),
    "silu of the opposite": lambda z, _: _silu(-z),
    "silu scaled": lambda z, _: _silu(z) * 1.0005,
    "silu of a scaled gate": lambda z, _: _silu(1.001 * z),
    "silu of a clamped gate": lambda z, _: _silu(z.clamp(-20.0, 20.0)),
    "silu clamped": lambda z, _: _silu(z).clamp(max=30.0),
    "silu without NaN": lambda z, _: torch.nan_to_num(_silu(z)),
    "silu without gradient": lambda z, _: _silu(z).detach(),
    "silu without half its gradient": lambda z, _: z * torch.sigmoid(z).detach(),
    "silu rounded": lambda z, _: _silu(z.bfloat16()).to(z.dtype),
    "silu of its neighbour": lambda z, _: _silu(z.roll(1, -1)),
    "silu of another row": lambda z, _: _silu(z.roll(1, 0)),
    "silu of the row's mean": lambda z, _: _silu(z.mean(-1, keepdim=True)).expand_as(z),
    "silu twice": lambda z, _: _silu(_silu(z)),
    "silu squared": lambda z, _: _silu(z) * _silu(z),
    "silu in training": lambda z, norm: _silu(z) if norm.training else z,
    "silu with noise": lambda z, norm: _silu(_noisy(z, norm)),
    "silu and the weight": lambda z, norm: _silu(z * norm.weight),
}


def _gated_near_norms() -> Iterator[tuple[str, NearNorm]]:
    every = {
        **{f"gate: {name}": ("gate", change) for name, change in GATES.items()},
        **{name: each for name, each in CHANGES.items() if each[0] != "mean"},
        "gated in both places": ("gated", lambda v, _: v * torch.sigmoid(v)),
        "gated and scaled": ("gated", lambda v, _: v * 1.0005),
    }
    for is_first, (name, (place, change)) in itertools.product((True, False), every.items()):
        order = "before" if is_first else "after"
        yield f"RMS norm with a gate {order}: {name}", GatedNearNorm(is_first, place, change)


def near_norms() -> Iterator[tuple[str, NearNorm]]:
    """All of them, named."""
    yield from _gated_near_norms()
    for centres, affine, dim in itertools.product((True, False), (True, False), (-1, 1)):
        for name, (place, change) in CHANGES.items():
            if (place == "weight" and not affine) or (place == "mean" and not centres):
                continue
            kind = f"{'layer' if centres else 'RMS'} norm{'' if affine else ' without weight'}"
            where = "" if dim == -1 else " of images"
            yield f"{kind}{where}: {name}", NearNorm(centres, affine, dim, place, change)
