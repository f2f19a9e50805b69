"""Memory of a GPU that tensors of any width are parts of, so that none are made for each."""

from __future__ import annotations

import math
from typing import Any

from gpu_members import ELEMENTS, MEMBERS, Buffers, Member

# Whose tensors are dense, and of which a call has one of each kind.
SERVED = {
    name: member
    for name, member in MEMBERS.items()
    if not member.is_packed and member.grad_outputs == 1
}


class FlatMemory:
    """Two sets of tensors of 2**26 elements, of which every width takes a part.

    Attributes:
        other: Memory that is read between calls.
    """

    def __init__(self, member: Member, dtype: str) -> None:
        import torch

        from iree_lnbwd.benchmark.gpu_times import OTHER_BYTES
        from iree_lnbwd.torch.supported import BY_NAME

        kind = BY_NAME[dtype]
        self._member, self._dtype = member, dtype

        def normal(count: int) -> Any:
            return torch.randn(count, device="cuda").to(kind)

        self._cells = [[normal(ELEMENTS) for _ in range(5)] for _ in range(2)]
        self._parameters = [normal(ELEMENTS >> 7) for _ in range(2)]
        self._mean = torch.zeros(ELEMENTS >> 3, device="cuda")
        self._rstd = torch.ones(ELEMENTS >> 3, device="cuda")
        self.other = torch.ones(OTHER_BYTES // 4, device="cuda")

    def is_for(self, member: Member, dtype: str) -> bool:
        """Whether it has tensors of that type for that norm."""
        return (member, dtype) == (self._member, self._dtype)

    def buffers(self, rows: int, columns: int) -> list[Buffers]:
        """Tensors of M rows and N columns."""
        sets = self._member.sets(rows)
        weights = (sets.number, columns) if sets else (columns,)
        gamma, beta = (p[: math.prod(weights)].view(weights) for p in self._parameters)
        found = []
        for tensors in self._cells:
            x, dy, residual, z, filled = (t[: rows * columns].view(rows, columns) for t in tensors)
            mean, rstd = self._mean[:rows], self._rstd[:rows]
            found.append(Buffers(x, dy, (), residual, x, mean, rstd, gamma, beta, z, filled))
        return found
