"""Norms with sets of weights, and with gates, as formulas of PyTorch's: what `torch.compile` fuses.

They compute in f32 what `iree_lnbwd` computes in one kernel, and round the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_members import EPS, Buffers, Member
from torch import Tensor
from torch.nn.functional import silu

from iree_lnbwd.ops.operands import Gate


def formula(member: Member, rows: int) -> Callable[[Buffers], tuple[Tensor, ...]]:
    """A norm of so many rows, or its backward."""
    of_member = _Formula(member, rows)
    return of_member.backward if member.is_backward else of_member.forward


@dataclass(frozen=True)
class _Formula:
    """The arithmetic of a norm of M rows."""

    member: Member
    rows: int

    def forward(self, s: Buffers) -> tuple[Tensor, ...]:
        """The output and the statistics."""
        x = self._rows(s.x)
        factor = silu(self._rows(s.z)) if self.member.gate else None
        if self.member.gate is Gate.BEFORE:
            x = x * factor
        mean = x.mean(-1, keepdim=True) if self.member.centres else torch.zeros_like(x[..., :1])
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + EPS)
        y = self._affine((x - mean) * rstd, s)
        if self.member.gate is Gate.AFTER:
            y = y * factor
        return y.to(s.x.dtype), mean, rstd

    def backward(self, s: Buffers) -> tuple[Tensor, ...]:
        """The gradients of x, z, gamma and beta; those that there are."""
        dy, x = self._rows(s.dy), self._rows(s.x)
        if self.member.gate:
            z = self._rows(s.z)
            sigmoid = torch.sigmoid(z)
            factor, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
        v = x * factor if self.member.gate is Gate.BEFORE else x
        dn = dy * factor if self.member.gate is Gate.AFTER else dy
        xhat = v * self._column(s.rstd)
        if self.member.centres:
            xhat = (v - self._column(s.mean)) * self._column(s.rstd)
        h = dn * self._factor(s)
        means = xhat * (h * xhat).mean(-1, keepdim=True)
        if self.member.centres:
            means = means + h.mean(-1, keepdim=True)
        dv = (h - means) * self._column(s.rstd)
        sums = [self._sum(dn * xhat).to(s.gamma.dtype)]
        if self.member.centres:
            sums.append(self._sum(dn).to(s.beta.dtype))
        if self.member.gate is Gate.AFTER:
            dz = dy * self._affine(xhat, s) * slope
        elif self.member.gate is Gate.BEFORE:
            dv, dz = dv * factor, dv * x * slope
        else:
            return dv.to(s.x.dtype), *sums
        return dv.to(s.x.dtype), dz.to(s.x.dtype), *sums

    @property
    def _set_is_outer(self) -> bool:
        """Whether the rows of a set are neighbours."""
        return self.member.tokens is not None

    def _rows(self, tensor: Tensor) -> Tensor:
        """[M, N], or with a dimension for the sets, in f32."""
        sets = self.member.sets(self.rows)
        if sets is None:
            return tensor.float()
        shape = (sets.number, -1) if self._set_is_outer else (-1, sets.number)
        return tensor.float().view(*shape, tensor.shape[-1])

    def _column(self, statistic: Tensor) -> Tensor:
        return self._rows(statistic[:, None])

    def _factor(self, s: Buffers) -> Tensor:
        return self._of_rows(s.gamma) + self.member.weight_offset

    def _affine(self, xhat: Tensor, s: Buffers) -> Tensor:
        scaled = xhat * self._factor(s)
        return scaled + self._of_rows(s.beta) if self.member.centres else scaled

    def _of_rows(self, weight: Tensor) -> Tensor:
        wide = weight.float()
        return wide[:, None] if self._set_is_outer else wide

    def _sum(self, cells: Tensor) -> Tensor:
        return cells.sum(1 if self._set_is_outer else 0)
