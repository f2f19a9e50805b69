"""The norms that `scripts/benchmark` and `scripts/tune` time on a GPU, and their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iree_lnbwd import NormSpec, runtime
from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import (
    LAYER_NORM,
    LAYER_NORM_BACKWARD,
    OPS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    Gate,
)
from iree_lnbwd.ops.sets import Sets

if TYPE_CHECKING:  # PyTorch is only there where they are timed
    from torch import Tensor

    from iree_lnbwd.benchmark.gpu_times import Contender

EPS = DEFAULT_EPS
ELEMENTS = 1 << 26  # of a large tensor, more than any L2 cache holds
_ROTATED_BYTES = 400_000_000  # several times the L2 cache of any GPU
_MOST_BUFFERS = 16
TOKENS = 1024  # of a sample of a DiT of 512 x 512 pixels
HEADS = 32


@dataclass(frozen=True)
class Member:
    """One norm, as a model calls it.

    Attributes:
        name: In the CSV and on the command line.
        op: A name of `operands.OPS`.
        has_residual: Whether a forward adds a residual, or a backward its gradient.
        from_output: Whether a backward takes the forward's output in place of its input.
        gate: Where a gate comes in, if there is one.
        tokens: Rows of a sample, where each sample has a scale and a shift.
        heads: Neighbouring rows of a token, where each has a weight of its own.
        grad_outputs: How many gradients of the output a backward adds up.
        is_packed: Whether x is q of a packed qkv: each token's rows, and a gap for k and v.
    """

    name: str
    op: str
    has_residual: bool = False
    from_output: bool = False
    gate: Gate | None = None
    tokens: int | None = None
    heads: int | None = None
    grad_outputs: int = 1
    is_packed: bool = False

    @property
    def centres(self) -> bool:
        """Whether it is layer normalization."""
        return OPS[self.op].centres

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return OPS[self.op].is_backward

    @property
    def has_one_weight_alone(self) -> bool:
        """Whether it has one weight and no gate."""
        return not (self.gate or self.tokens or self.heads)

    @property
    def is_plain(self) -> bool:
        """Whether it has one weight, no gate, one gradient of the output at most, dense rows."""
        return self.has_one_weight_alone and self.grad_outputs == 1 and not self.is_packed

    @property
    def weight_offset(self) -> float:
        """What is added to a weight: a scale is one around zero."""
        return 1.0 if self.tokens else 0.0

    @property
    def streams_of_ceiling(self) -> int:
        """Tensors of rows that the ceiling moves: a copy has two, an addition of two has three."""
        return 3 if self.is_backward else 2

    @property
    def streams(self) -> int:
        """Tensors of rows that it has to move.

        A residual is read and its sum is written; in a backward, its gradient is read. A gate is
        read; in a backward, its gradient is written. Each further gradient is read.
        """
        of_residual, of_gate = (1, 2) if self.is_backward else (2, 1)
        return (
            self.streams_of_ceiling
            + (of_residual if self.has_residual else 0)
            + (of_gate if self.gate else 0)
            + (self.grad_outputs - 1)
        )

    def sets(self, rows: int) -> Sets | None:
        """The sets of weights of so many rows; None where there is one weight."""
        if self.tokens:
            return Sets(max(1, rows // self.tokens), self.tokens)
        return Sets(self.heads, 1) if self.heads else None

    def whole_rows(self, rows: int) -> int:
        """At most so many rows: whole samples, or whole tokens."""
        unit = self.tokens or self.heads or (HEADS if self.is_packed else 1)
        return max(1, rows // unit) * unit

    def spec(self, columns: int, dtype: str) -> NormSpec:
        """Of one element type for all tensors."""
        return NormSpec(
            (columns,),
            dtype,
            op=self.op,
            eps=None if self.is_backward else EPS,
            residual_dtype=dtype if self.has_residual else None,
            from_output=self.from_output,
            has_bias=True if self.from_output and self.centres else None,
            gate=self.gate.value if self.gate else None,
            weight_sets=bool(self.tokens or self.heads),
            weight_offset=self.weight_offset,
            grad_outputs=self.grad_outputs,
            strided_rows=self.is_packed,
        )


MEMBERS = {
    member.name: member
    for member in (
        Member("layer_norm", LAYER_NORM.name),
        Member("rms_norm", RMS_NORM.name),
        Member("add_layer_norm", LAYER_NORM.name, has_residual=True),
        Member("add_rms_norm", RMS_NORM.name, has_residual=True),
        Member("layer_norm_backward", LAYER_NORM_BACKWARD.name),
        Member("rms_norm_backward", RMS_NORM_BACKWARD.name),
        Member("add_layer_norm_backward", LAYER_NORM_BACKWARD.name, has_residual=True),
        Member("add_rms_norm_backward", RMS_NORM_BACKWARD.name, has_residual=True),
        Member("layer_norm_from_output", LAYER_NORM_BACKWARD.name, from_output=True),
        Member("rms_norm_from_output", RMS_NORM_BACKWARD.name, from_output=True),
        Member("modulated_layer_norm", LAYER_NORM.name, tokens=TOKENS),
        Member("head_rms_norm", RMS_NORM.name, heads=HEADS),
        Member("gated_rms_norm", RMS_NORM.name, gate=Gate.AFTER),
        Member("gated_first_rms_norm", RMS_NORM.name, gate=Gate.BEFORE),
        Member("modulated_layer_norm_backward", LAYER_NORM_BACKWARD.name, tokens=TOKENS),
        Member("head_rms_norm_backward", RMS_NORM_BACKWARD.name, heads=HEADS),
        Member("gated_rms_norm_backward", RMS_NORM_BACKWARD.name, gate=Gate.AFTER),
        Member("gated_first_rms_norm_backward", RMS_NORM_BACKWARD.name, gate=Gate.BEFORE),
        Member("gated_layer_norm_backward", LAYER_NORM_BACKWARD.name, gate=Gate.AFTER),
        # Of gate and up; of queries, keys and values; of these and what is added to the norm.
        Member("add_rms_norm_backward_of_2", RMS_NORM_BACKWARD.name, True, grad_outputs=2),
        Member("add_rms_norm_backward_of_3", RMS_NORM_BACKWARD.name, True, grad_outputs=3),
        Member("rms_norm_backward_of_4", RMS_NORM_BACKWARD.name, grad_outputs=4),
        Member("add_layer_norm_backward_of_3", LAYER_NORM_BACKWARD.name, True, grad_outputs=3),
        Member("layer_norm_backward_of_2", LAYER_NORM_BACKWARD.name, grad_outputs=2),
        Member("layer_norm_backward_of_4", LAYER_NORM_BACKWARD.name, grad_outputs=4),
        Member("packed_rms_norm", RMS_NORM.name, is_packed=True),
        Member("packed_rms_norm_backward", RMS_NORM_BACKWARD.name, is_packed=True),
    )
}


@dataclass(frozen=True)
class Buffers:
    """One set of tensors on the GPU: what any of the norms takes, and storage for ceilings.

    Shapes: x, each dy, residual, y, filled [M, N]; mean, rstd [M], f32, or f64 for f64 data;
    gamma, beta [N], or [G, N] where there are sets of weights; z [M, N]. Where x is packed, tokens
    and heads are two dimensions in place of M.

    Attributes:
        x: What is normalized, or what was.
        dy: The gradient that reached the output.
        more_dy: Others, which are added to it.
        residual: What a forward adds to x; or the gradient of that sum.
        y: The output, which a backward takes.
        mean: Of each row of x.
        rstd: Of the same normalization.
        gamma: The weight.
        beta: The bias.
        z: The gate; x where there is none.
        filled: What the ceiling writes.
    """

    x: Tensor
    dy: Tensor
    more_dy: tuple[Tensor, ...]
    residual: Tensor
    y: Tensor
    mean: Tensor
    rstd: Tensor
    gamma: Tensor
    beta: Tensor
    z: Tensor
    filled: Tensor


def buffers(
    member: Member, rows: int, columns: int, dtype: str, most: int = _MOST_BUFFERS
) -> list[Buffers]:
    """As many sets of random tensors as it takes to exceed the L2 cache, and at most so many."""
    each = member.streams * rows * columns * DTYPES[dtype].numpy.itemsize
    count = max(1, min(most, -(-_ROTATED_BYTES // each)))
    return [_random(member, rows, columns, dtype) for _ in range(count)]


def _random(member: Member, rows: int, columns: int, dtype: str) -> Buffers:
    import torch

    from iree_lnbwd.torch.supported import BY_NAME

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(BY_NAME[dtype])

    cells = (rows // HEADS, HEADS, columns) if member.is_packed else (rows, columns)
    x = (torch.randn(*cells, device="cuda") * 2 + 0.5).to(BY_NAME[dtype])
    if member.is_packed:
        x = torch.stack([x, x, x], 1)[:, 0]
    sets = member.sets(rows)
    weights = (sets.number, columns) if sets else (columns,)
    gamma, beta = normal(*weights), normal(*weights)
    z = normal(*cells) if member.gate else x
    wide = x if dtype == "f64" else x.float()
    if member.gate is Gate.BEFORE:
        wide = wide * torch.nn.functional.silu(z.to(wide.dtype))
    mean = wide.mean(-1)
    centred = wide - mean[..., None] if member.centres else wide
    rstd = torch.rsqrt(centred.square().mean(-1) + EPS)
    y = centred * rstd[..., None]
    if member.from_output:
        y = y * gamma + (beta if member.centres else 0)
    dy, *more_dy = (normal(*cells) for _ in range(member.grad_outputs))
    return Buffers(
        x=x,
        dy=dy,
        more_dy=tuple(more_dy),
        residual=normal(*cells),
        y=y.to(x.dtype),
        mean=mean,
        rstd=rstd,
        gamma=gamma,
        beta=beta,
        z=z,
        filled=torch.empty_like(dy),
    )


def dy_of(given: Buffers) -> Tensor:
    """The gradient that reached the output; of several, the sum, rounded as additions round it."""
    return sum(given.more_dy, start=given.dy)


def ceiling(member: Member, sets: Sequence[Buffers]) -> Contender:
    """What no norm can beat by much: a copy, or an addition of two tensors; of dense rows."""
    import torch

    def call(i: int) -> object:
        s = sets[i % len(sets)]
        if member.is_backward:
            return torch.add(s.dy, s.residual, out=s.filled)
        return s.filled.copy_(s.residual)

    return call


def ours(member: Member, path: Path, sets: Sequence[Buffers]) -> Contender:
    """A compiled module, with new arrays for the results in each call."""
    module = runtime.load(path, "cuda")
    weights = member.sets(len(sets[0].x))

    def options(s: Buffers) -> dict[str, Any]:
        return {
            "gate": s.z if member.gate else None,
            "rows_per_set": weights.rows_per_set if weights else 1,
        }

    def call(i: int) -> object:
        s = sets[i % len(sets)]
        residual = s.residual if member.has_residual else None
        if member.op == LAYER_NORM.name:
            return module(s.x, s.gamma, s.beta, residual=residual, **options(s))
        if member.op == RMS_NORM.name:
            return module(s.x, s.gamma, residual=residual, **options(s))
        data = {"output": s.y} if member.from_output else {"input": s.x} | options(s)
        dy = (s.dy, *s.more_dy) if s.more_dy else s.dy
        if member.op == RMS_NORM_BACKWARD.name:
            return module(dy, rstd=s.rstd, weight=s.gamma, grad_residual=residual, **data)
        mean = None if member.from_output else s.mean
        return module(
            dy,
            mean=mean,
            rstd=s.rstd,
            weight=s.gamma,
            bias=s.beta,
            grad_residual=residual,
            **data,
        )

    return call
