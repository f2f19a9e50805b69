"""What is timed at once: an op, a shape and a type."""

from __future__ import annotations

from dataclasses import dataclass

from iree_lnbwd.ops.arguments import DEFAULT_EPS
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, Kind, Op
from iree_lnbwd.ops.spec import NormSpec

EPS = DEFAULT_EPS


@dataclass(frozen=True)
class Cell:
    """An op at a shape, with every tensor of one type.

    Attributes:
        op: A name of `operands.OPS`.
        has_residual: Whether a forward adds a residual, or a backward its gradient.
        rows: M.
        normalized_shape: The dimensions of a row.
        dtype: Of all tensors.
    """

    op: str
    has_residual: bool
    rows: int
    normalized_shape: tuple[int, ...]
    dtype: str

    @property
    def family(self) -> Op:
        """The op."""
        return OPS[self.op]

    @property
    def spec(self) -> NormSpec:
        """Of our module."""
        return NormSpec(
            self.normalized_shape,
            self.dtype,
            op=self.op,
            eps=None if self.family.is_backward else EPS,
            residual_dtype=self.dtype if self.has_residual else None,
        )

    @property
    def bytes(self) -> int:
        """Of all tensors of the input's size that our module reads and writes."""
        spec = self.spec
        cells = [o for o in spec.family.rows if o.kind is Kind.CELLS and spec.has(o)]
        return len(cells) * self.tensor_bytes

    @property
    def tensor_bytes(self) -> int:
        """Of one such tensor."""
        return self.rows * self.spec.columns * DTYPES[self.dtype].numpy.itemsize

    @property
    def called(self) -> str:
        """The op, and whether it has a residual."""
        return f"{self.op} + residual" if self.has_residual else self.op

    @property
    def size(self) -> str:
        """The rows, and the dimensions of each."""
        return f"{self.rows} x {'x'.join(map(str, self.normalized_shape))}"

    def __str__(self) -> str:
        """For the reader of a terminal."""
        return f"{self.called} {self.size} {self.dtype}"
