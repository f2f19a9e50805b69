"""The operands of the op, in one table; all other lists of them derive from it.

M is the number of rows, and N the number of columns. Another op of the family would have a list
like `BACKWARD`, with some of these rows and some of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What each element of an operand is for; the value ends its type's alias in ``ir/``."""

    CELLS = "mn"  # each cell of M rows and N columns
    ROWS = "m"  # each row: a statistic
    COLUMNS = "n"  # each column: a parameter, or its gradient
    PARTIALS = "pn"  # each column of P partial rows: scratch

    def shape(self, rows: int | None, columns: int) -> tuple[int | None, ...]:
        """The shape in modules; None is a number of rows or partial rows that calls decide."""
        match self:
            case Kind.CELLS:
                return (rows, columns)
            case Kind.ROWS:
                return (rows,)
            case Kind.COLUMNS:
                return (columns,)
            case Kind.PARTIALS:
                return (None, columns)

    def __str__(self) -> str:
        """Its shape in letters, e.g. ``[M, N]``."""
        return f"[{', '.join(self.value.upper())}]"


class Element(Enum):
    """The spec's element type that an operand has; the value is its alias in ``ir/``."""

    DY = "dy"
    X = "x"
    ACC = "acc"
    GAMMA = "gamma"
    BETA = "beta"


class Access(Enum):
    """What a module does with an operand."""

    READ = "read"
    WRITTEN = "written"
    TYPE_ALONE = "its element type counts"  # the caller gives it, the module does not take it


class When(Enum):
    """Whether a module has an operand; its spec decides."""

    ALWAYS = "always"
    STATISTICS_GIVEN = "the statistics are not recomputed"
    WEIGHT_GIVEN = "there is a weight"
    ASKED_FOR = "the mask asks for it"
    NEVER = "no module takes it"


@dataclass(frozen=True)
class Operand:
    """One row of the table.

    Attributes:
        name: ATen's.
        symbol: Its name in ``ir/``.
        kind: What each of its elements is for.
        element: Its element type.
        access: What a module does with it.
        when: Whether a module has it.
    """

    name: str
    symbol: str
    kind: Kind
    element: Element
    access: Access = Access.READ
    when: When = When.ALWAYS

    @property
    def alias(self) -> str:
        """Of its tensor's type, in ``ir/``."""
        return f"!{self.element.value}_{self.kind.value}"


GRAD_OUTPUT = Operand("grad_output", "dy", Kind.CELLS, Element.DY)
INPUT = Operand("input", "x", Kind.CELLS, Element.X)
MEAN = Operand("mean", "mean", Kind.ROWS, Element.ACC, when=When.STATISTICS_GIVEN)
RSTD = Operand("rstd", "rstd", Kind.ROWS, Element.ACC, when=When.STATISTICS_GIVEN)
WEIGHT = Operand("weight", "gamma", Kind.COLUMNS, Element.GAMMA, when=When.WEIGHT_GIVEN)
BIAS = Operand("bias", "beta", Kind.COLUMNS, Element.BETA, Access.TYPE_ALONE, When.NEVER)
GRAD_INPUT = Operand("grad_input", "dx", Kind.CELLS, Element.X, Access.WRITTEN, When.ASKED_FOR)
GRAD_WEIGHT = Operand(
    "grad_weight", "dgamma", Kind.COLUMNS, Element.GAMMA, Access.WRITTEN, When.ASKED_FOR
)
GRAD_BIAS = Operand(
    "grad_bias", "dbeta", Kind.COLUMNS, Element.BETA, Access.WRITTEN, When.ASKED_FOR
)

# Scratch that kernels of a call pass to each other.
PARTIAL_DGAMMA = Operand(
    "partial_dgamma", "partial_dgamma", Kind.PARTIALS, Element.ACC, Access.WRITTEN, When.NEVER
)
PARTIAL_DBETA = Operand(
    "partial_dbeta", "partial_dbeta", Kind.PARTIALS, Element.ACC, Access.WRITTEN, When.NEVER
)
SUM_H = Operand("sum_h", "sum_h", Kind.ROWS, Element.ACC, Access.WRITTEN, When.NEVER)
SUM_HX = Operand("sum_hx", "sum_hx", Kind.ROWS, Element.ACC, Access.WRITTEN, When.NEVER)


@dataclass(frozen=True)
class Operands:
    """The rows that one op of the family has, in ATen's order.

    Attributes:
        rows: The operands that callers give, then those that are written.
        scratch: The operands that its kernels pass to each other.
    """

    rows: tuple[Operand, ...]
    scratch: tuple[Operand, ...] = ()

    @functools.cached_property
    def arguments(self) -> tuple[Operand, ...]:
        """The operands that callers give."""
        return tuple(row for row in self.rows if row.access is not Access.WRITTEN)

    @functools.cached_property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that modules read."""
        return tuple(row for row in self.rows if row.access is Access.READ)

    @functools.cached_property
    def results(self) -> tuple[Operand, ...]:
        """The operands that modules write."""
        return tuple(row for row in self.rows if row.access is Access.WRITTEN)

    @functools.cached_property
    def statistics(self) -> tuple[Operand, ...]:
        """The statistics of each row, which modules read or recompute."""
        return tuple(row for row in self.inputs if row.kind is Kind.ROWS)

    def named(self, name: str) -> Operand:
        """The row with that name."""
        return next(row for row in (*self.rows, *self.scratch) if row.name == name)


BACKWARD = Operands(
    (GRAD_OUTPUT, INPUT, MEAN, RSTD, WEIGHT, BIAS, GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS),
    (PARTIAL_DGAMMA, PARTIAL_DBETA, SUM_H, SUM_HX),
)


def names(operands: Iterable[Operand]) -> tuple[str, ...]:
    """ATen's names of them."""
    return tuple(operand.name for operand in operands)
