"""The ops of the family and their operands, in one table; all other lists derive from it.

M is the number of rows, and N the number of columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol


class Kind(Enum):
    """What each element of an operand is for; the value ends its type's alias in ``ir/``."""

    CELLS = "mn"  # each cell of M rows and N columns
    ROWS = "m"  # each row: a statistic
    COLUMNS = "n"  # each column: a parameter, or its gradient
    PARTIALS = "pn"  # each column of P partial rows: scratch
    SETS = "gn"  # each column of G sets: what COLUMNS are where the weight has sets
    POSTS = "mq"  # each of the Q words that workgroups post of a row: scratch

    def shape(self, rows: int | None, columns: int) -> tuple[int | None, ...]:
        """The shape in modules; None is a number that calls decide: of rows, or sets."""
        match self:
            case Kind.CELLS:
                return (rows, columns)
            case Kind.ROWS:
                return (rows,)
            case Kind.COLUMNS:
                return (columns,)
            case Kind.PARTIALS | Kind.SETS:
                return (None, columns)
            case Kind.POSTS:
                return (rows, None)

    def __str__(self) -> str:
        """Its shape in letters, e.g. ``[M, N]``."""
        return f"[{', '.join(self.value.upper())}]"


class Element(Enum):
    """The spec's element type that an operand has; the value is its alias in ``ir/``."""

    DY = "dy"
    X = "x"
    Y = "y"  # of an output that has another type than the input
    ACC = "acc"
    GAMMA = "gamma"
    BETA = "beta"
    RESIDUAL = "residual"
    GATE = "z"
    COPY = "copy"  # of a narrower copy of the input's gradient
    TOTAL = "total"  # of the sum of the input's gradient over rows


class Access(Enum):
    """What a module does with an operand."""

    READ = "read"
    WRITTEN = "written"
    TYPE_ALONE = "its element type counts"  # the caller gives it, the module does not take it


class Gate(Enum):
    """Where a gate z comes in: ``silu(z)`` is multiplied by what a norm gives, or takes."""

    AFTER = "after"  # y = norm(x) * silu(z)
    BEFORE = "before"  # y = norm(x * silu(z))


class When(Enum):
    """Whether a module has an operand; its spec decides."""

    ALWAYS = "always"
    STATISTICS_GIVEN = "the statistics are not recomputed"
    WEIGHT_GIVEN = "there is a weight"
    BIAS_GIVEN = "there is a bias"
    RESIDUAL_GIVEN = "there is a residual"
    SO_MANY_GIVEN = "the output has so many gradients"
    ASKED_FOR = "the mask asks for it"
    ASKED_FOR_WITH_BIAS = "there is a bias, and the mask asks for its gradient"
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
    def is_option(self) -> bool:
        """Whether a caller adds it to the op, and its kernels have no pointer to it otherwise."""
        return self.when in (
            When.RESIDUAL_GIVEN,
            When.BIAS_GIVEN,
            When.SO_MANY_GIVEN,
            When.ASKED_FOR_WITH_BIAS,
        )

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
# The gradient that reached the residual's sum past the norm; it is added to the input's gradient.
GRAD_RESIDUAL = Operand(
    "grad_residual", "dresidual", Kind.CELLS, Element.RESIDUAL, when=When.RESIDUAL_GIVEN
)
# Other gradients of the output, which are added to the first. The second is ``grad_output_2``.
MORE_GRAD_OUTPUTS = tuple(
    Operand(f"grad_output_{n}", f"dy{n}", Kind.CELLS, Element.DY, when=When.SO_MANY_GIVEN)
    for n in (2, 3, 4)
)
MOST_GRAD_OUTPUTS = 1 + len(MORE_GRAD_OUTPUTS)
GRAD_INPUT = Operand("grad_input", "dx", Kind.CELLS, Element.X, Access.WRITTEN, When.ASKED_FOR)
GRAD_WEIGHT = Operand(
    "grad_weight", "dgamma", Kind.COLUMNS, Element.GAMMA, Access.WRITTEN, When.ASKED_FOR
)
GRAD_BIAS = Operand(
    "grad_bias", "dbeta", Kind.COLUMNS, Element.BETA, Access.WRITTEN, When.ASKED_FOR
)
# The gradient of the input once more, in a narrower type: some read it, and others keep it.
GRAD_INPUT_COPY = Operand("grad_input_copy", "dx_copy", Kind.CELLS, Element.COPY, Access.WRITTEN)
# Its sum over rows: the gradient of a bias that was added to the input.
GRAD_INPUT_SUM = Operand("grad_input_sum", "dx_total", Kind.COLUMNS, Element.TOTAL, Access.WRITTEN)

# Of gated norms alone.
GATE = Operand("gate", "z", Kind.CELLS, Element.GATE)
GRAD_GATE = Operand("grad_gate", "dz", Kind.CELLS, Element.GATE, Access.WRITTEN, When.ASKED_FOR)

# Of the forwards alone.
RESIDUAL = Operand("residual", "residual", Kind.CELLS, Element.RESIDUAL, when=When.RESIDUAL_GIVEN)
ADDED_BIAS = replace(BIAS, access=Access.READ, when=When.BIAS_GIVEN)
OUTPUT = Operand("output", "y", Kind.CELLS, Element.X, Access.WRITTEN)
SAVED_MEAN = replace(MEAN, access=Access.WRITTEN, when=When.ALWAYS)
SAVED_RSTD = replace(RSTD, access=Access.WRITTEN, when=When.ALWAYS)
RESIDUAL_OUTPUT = Operand(  # input + residual, which is what is normalized
    "residual_output", "s", Kind.CELLS, Element.RESIDUAL, Access.WRITTEN, When.RESIDUAL_GIVEN
)

# Of the backwards from the output alone. It takes the place of x, in ``ir/`` too.
GIVEN_OUTPUT = replace(OUTPUT, symbol=INPUT.symbol, access=Access.READ)
GIVEN_RSTD = replace(RSTD, when=When.ALWAYS)  # an output does not tell it

# Scratch that kernels of a call pass to each other.
PARTIAL_DGAMMA = Operand(
    "partial_dgamma", "partial_dgamma", Kind.PARTIALS, Element.ACC, Access.WRITTEN, When.NEVER
)
PARTIAL_DBETA = Operand(
    "partial_dbeta", "partial_dbeta", Kind.PARTIALS, Element.ACC, Access.WRITTEN, When.NEVER
)
PARTIAL_DX = Operand(
    "partial_dx", "partial_dx", Kind.PARTIALS, Element.ACC, Access.WRITTEN, When.NEVER
)
SUM_H = Operand("sum_h", "sum_h", Kind.ROWS, Element.ACC, Access.WRITTEN, When.NEVER)
SUM_HX = Operand("sum_hx", "sum_hx", Kind.ROWS, Element.ACC, Access.WRITTEN, When.NEVER)
POSTED_SUMS = Operand("posted_sums", "posted", Kind.POSTS, Element.ACC, Access.WRITTEN, When.NEVER)


def _with_bias(operand: Operand) -> Operand:
    """What ATen's op has not: no kernel has it without a bias."""
    return replace(operand, when=When.ASKED_FOR_WITH_BIAS)


@dataclass(frozen=True, eq=False)  # each call looks its op up: by identity, not by all its rows
class Op:
    """One op of the family.

    Attributes:
        name: Of the Python function, and of the modules' public function.
        centres: Whether the mean of each row is subtracted.
        atens_bias: Whether ATen's op has a bias. Then ``grad_bias`` is there without one, too.
        rows: The operands that callers give, then those that are written, in ATen's order.
        scratch: The operands that its kernels pass to each other.
        from_output: Whether it is a backward that takes the forward's output and not its input.
        gate: Where the norm has a gate; None if it has none.
    """

    name: str
    centres: bool
    atens_bias: bool
    rows: tuple[Operand, ...]
    scratch: tuple[Operand, ...] = ()
    from_output: bool = False
    gate: Gate | None = None

    @functools.cached_property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return GRAD_OUTPUT in self.rows

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
    def masked(self) -> tuple[Operand, ...]:
        """The gradients that a caller's mask chooses among without a bias: those of ATen's op."""
        return tuple(row for row in self.results if row.when is When.ASKED_FOR)

    @functools.cached_property
    def gradients(self) -> tuple[Operand, ...]:
        """The gradients that a caller's mask chooses among with a bias."""
        own = self.results if self.is_backward else ()
        return tuple(row for row in own if row not in (GRAD_INPUT_COPY, GRAD_INPUT_SUM))

    def gradients_with(self, *, has_bias: bool) -> tuple[Operand, ...]:
        """The gradients that a caller's mask chooses among."""
        return self.gradients if has_bias else self.masked

    def asks_grad_bias(self, mask: Sequence[bool]) -> bool:
        """Whether a mask asks for the gradient of a bias; one without its bool asks for none."""
        return (
            self.is_backward
            and len(mask) == len(self.gradients)
            and mask[names(self.gradients).index(GRAD_BIAS.name)]
        )

    @functools.cached_property
    def statistics(self) -> tuple[Operand, ...]:
        """The statistics of each row, which modules read, recompute or save."""
        return tuple(row for row in self.rows if row.kind is Kind.ROWS)

    @functools.cached_property
    def data(self) -> Operand:
        """What a row's xhat is computed from."""
        return GIVEN_OUTPUT if self.from_output else INPUT

    @functools.cached_property
    def usual_bias(self) -> bool:
        """Whether a spec has a bias whose values count, unless it says otherwise."""
        return self.reads_bias and self.atens_bias

    @functools.cached_property
    def takes_bias(self) -> bool:
        """Whether there may be a bias that a spec has to know of."""
        return self.reads_bias or self.gradients != self.masked

    @functools.cached_property
    def reads_bias(self) -> bool:
        """Whether the values of a bias count, if there is one."""
        return ADDED_BIAS in self.rows

    @functools.cached_property
    def _by_name(self) -> dict[str, Operand]:
        return {row.name: row for row in (*self.rows, *self.scratch)}

    def find(self, name: str) -> Operand | None:
        """The row with that name, or None: none of its modules or kernels has such an operand."""
        return self._by_name.get(name)

    def named(self, name: str) -> Operand:
        """The row with that name, which is there."""
        return self._by_name[name]


LAYER_NORM = Op(
    "layer_norm",
    True,
    True,
    (INPUT, RESIDUAL, WEIGHT, ADDED_BIAS, OUTPUT, SAVED_MEAN, SAVED_RSTD, RESIDUAL_OUTPUT),
)
RMS_NORM = Op(
    "rms_norm",
    False,
    False,
    (INPUT, RESIDUAL, WEIGHT, ADDED_BIAS, OUTPUT, SAVED_RSTD, RESIDUAL_OUTPUT),
)
LAYER_NORM_BACKWARD = Op(
    "layer_norm_backward",
    True,
    True,
    (
        *(GRAD_OUTPUT, INPUT, MEAN, RSTD, WEIGHT, BIAS, GRAD_RESIDUAL, *MORE_GRAD_OUTPUTS),
        *(GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS),
    ),
    (PARTIAL_DGAMMA, PARTIAL_DBETA, SUM_H, SUM_HX, POSTED_SUMS),
)
RMS_NORM_BACKWARD = Op(
    "rms_norm_backward",
    False,
    False,
    (
        *(GRAD_OUTPUT, INPUT, RSTD, WEIGHT, BIAS, GRAD_RESIDUAL, *MORE_GRAD_OUTPUTS),
        *(GRAD_INPUT, GRAD_WEIGHT, _with_bias(GRAD_BIAS)),
    ),
    (PARTIAL_DGAMMA, _with_bias(PARTIAL_DBETA), SUM_HX, POSTED_SUMS),
)
OPS = {op.name: op for op in (LAYER_NORM, RMS_NORM, LAYER_NORM_BACKWARD, RMS_NORM_BACKWARD)}


def _from_output(op: Op) -> Op:
    """The same gradients, from the forward's output: no mean, and the values of the bias."""
    others = {INPUT: GIVEN_OUTPUT, RSTD: GIVEN_RSTD, BIAS: ADDED_BIAS}
    rows = tuple(others.get(row, row) for row in op.rows if row is not MEAN)
    return replace(op, rows=rows, from_output=True)


FROM_OUTPUT = {op.name: _from_output(op) for op in OPS.values() if op.is_backward}


def _gated(op: Op, gate: Gate) -> Op:
    """The same norm with a gate: its gradient counts the values of a bias that comes before it."""
    left_out = (RESIDUAL, RESIDUAL_OUTPUT, GRAD_RESIDUAL, *MORE_GRAD_OUTPUTS)
    others = {BIAS: ADDED_BIAS} if gate is Gate.AFTER else {}
    rows = [others.get(row, row) for row in op.rows if row not in left_out]
    first_result = next(i for i, row in enumerate(rows) if row.access is Access.WRITTEN)
    rows.insert(first_result, GATE)
    return replace(op, rows=(*rows, *([GRAD_GATE] if op.is_backward else [])), gate=gate)


GATED = {gate: {op.name: _gated(op, gate) for op in OPS.values()} for gate in Gate}


def _with_copy(op: Op) -> Op:
    """The same backward, which stores the gradient of the input twice."""
    return replace(op, rows=(*op.rows, GRAD_INPUT_COPY))


WITH_COPY = {
    op: _with_copy(op) for of in (OPS, FROM_OUTPUT) for op in of.values() if op.is_backward
}


def _with_sum(op: Op) -> Op:
    """The same backward, which sums the gradient of the input over rows, too."""
    return replace(op, rows=(*op.rows, GRAD_INPUT_SUM), scratch=(*op.scratch, PARTIAL_DX))


WITH_SUM = {op: _with_sum(op) for op in WITH_COPY}


def without_copy(op: Op) -> str | None:
    """What is expected of the type of a copy, or of a sum; None if the op may have one.

    Args:
        op: Without a copy and a sum.
    """
    if op in WITH_COPY:
        return None
    return "None with a gate" if op.is_backward else f"None for {op.name}"


# Each op as callers may ask for it.
VARIANTS = (
    *(op for of in (OPS, FROM_OUTPUT, *GATED.values()) for op in of.values()),
    *WITH_COPY.values(),
    *WITH_SUM.values(),
)
# What has M rows of N columns in any of them.
CELLS_NAMES = frozenset(row.name for op in VARIANTS for row in op.rows if row.kind is Kind.CELLS)


@functools.cache  # an op is itself: there is one of each
def with_own_output(op: Op) -> Op:
    """The same op, whose output has an element type of its own."""
    own = {OUTPUT: replace(OUTPUT, element=Element.Y)}
    return replace(op, rows=tuple(own.get(row, row) for row in op.rows))


class Named(Protocol):
    """An operand, or a tensor of a spec."""

    @property
    def name(self) -> str:
        """ATen's."""


def names(operands: Iterable[Named]) -> tuple[str, ...]:
    """ATen's names of them."""
    return tuple(operand.name for operand in operands)
