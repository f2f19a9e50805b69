"""The family's ops computed plainly in NumPy, in the types that our code has; or with a mistake.

They are what the judge is tried on: right ways have to pass, and mistakes have to miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import Element
from iree_lnbwd.ops.spec import LEAST_WEIGHT


@dataclass(frozen=True)
class Way:
    """How a norm is computed. Any of the first three is right; the rest are mistakes.

    Attributes:
        spans: Spans of 64 terms are added one after the other, and then their sums pairwise. (No
            sum of ours is longer: errors of like numbers do not walk at random.)
        fused: Products are added unrounded (almost: they are rounded to f64).
        rstd_first: Products begin with rstd, as on GPUs.
        half_sums: Sums are in f16.
        unbiased: The variance is divided by N - 1.
        expanded: The variance is the mean of squares minus the mean's square.
        centring: The other op's: rows are centred, or not.
        eps: Where it is: "in the root", "outside the root", "in the sum" or "nowhere".
        no_mean_h: dx without the mean of h; for RMS norm with it.
        no_mean_hx: dx without the part along xhat.
        no_offset: The weight's offset is forgotten.
        offset_added: xhat * weight + offset.
        no_bias: The bias is forgotten.
        exact_sum: What is normalized is the sum with the residual before it is stored.
        no_residual: What is normalized is the input alone.
        half_xhat: xhat is rounded to the output's type before the weight.
        no_grad_residual: It is forgotten.
        late_grad_residual: It is added to what is rounded.
        scaled_grad_residual: It is added before rstd.
        by_reciprocal: An output is multiplied by a rounded 1 / g'. (This is right, too.)
        unclamped: An output is divided by the weight, however small that is.
        unsigned_least: A small weight counts as positive.
        clamped_h: h has what an output is divided by in place of the weight.
        undivided: xhat is the output without its bias.
        late_bias: The bias is subtracted after the division.
    """

    spans: bool = False
    fused: bool = False
    rstd_first: bool = False
    half_sums: bool = False
    unbiased: bool = False
    expanded: bool = False
    centring: bool = False
    eps: str = "in the root"
    no_mean_h: bool = False
    no_mean_hx: bool = False
    no_offset: bool = False
    offset_added: bool = False
    no_bias: bool = False
    exact_sum: bool = False
    no_residual: bool = False
    half_xhat: bool = False
    no_grad_residual: bool = False
    late_grad_residual: bool = False
    scaled_grad_residual: bool = False
    by_reciprocal: bool = False
    unclamped: bool = False
    unsigned_least: bool = False
    clamped_h: bool = False
    undivided: bool = False
    late_bias: bool = False


def computed(call: BoundCall, way: Way | None = None) -> dict[str, Array]:
    """The results of a call, by ATen's name, of their types, as [M, N], [M], [N] or [G, N]."""
    assert call.spec is not None
    with np.errstate(all="ignore"):
        run = _Run(call, way or Way())
        values = run.backward() if call.spec.family.is_backward else run.forward()
        return {
            result.name: values[result.name].astype(DTYPES[result.dtype].numpy)
            for result in call.spec.results
        }


class _Run:
    def __init__(self, call: BoundCall, way: Way) -> None:
        assert call.spec is not None
        self.spec, self.way, self.arrays = call.spec, way, call.arrays
        self.sets = None if call.sets is None else call.sets.of_rows(call.rows)
        self.number = 1 if call.sets is None else call.sets.number
        self.acc = DTYPES[self.spec.acc_dtype].numpy
        self.n = self.acc.type(self.spec.columns)
        self.centres = self.spec.family.centres != way.centring

    def wide(self, name: str) -> Array:
        array: Array = self.arrays[name].astype(self.acc)
        return array

    def of_rows(self, name: str) -> Array:
        """A parameter: [N], or [M, N] of the sets that rows take."""
        array = self.wide(name)
        return array if self.sets is None else array[self.sets]

    def over_rows(self, terms: Array) -> Array:
        """Sums over all rows, or over those of each set."""
        if self.sets is None:
            return self.total(terms, 0)
        return np.stack([self.total(terms[self.sets == one], 0) for one in range(self.number)])

    def silu(self) -> tuple[Array, Array]:
        """Of the gate, and its derivative."""
        z, one = self.wide("gate"), self.acc.type(1)
        e = np.exp(-np.abs(z))
        sigmoid, other = (np.where(z < 0, *part) / (one + e) for part in ((e, one), (one, e)))
        return z * sigmoid, sigmoid + z * sigmoid * other

    def gradient_of_output(self) -> Array:
        """The sum of all, each partial sum rounded as an addition of these types rounds it."""
        stored = DTYPES[self.spec.dy_sum_dtype].numpy
        first, *more = (name for name in self.arrays if name.startswith("grad_output"))
        total = self.wide(first)
        for name in more:
            total = (total + self.wide(name)).astype(stored).astype(self.acc)
        return total

    def total(self, terms: Array, axis: int) -> Array:
        """Sums in the accumulator's type; over columns they keep their dimension."""
        lines = np.ascontiguousarray(terms if axis == 1 else terms.T)
        if self.way.half_sums:
            half = np.dtype(np.float16)
            sums = np.cumsum(lines.astype(half), axis=1, dtype=half)[:, -1].astype(self.acc)
        else:
            if self.way.spans:
                lines = np.pad(lines, ((0, 0), (0, -lines.shape[1] % 64)))
                spans = lines.reshape(len(lines), -1, 64)
                lines = np.cumsum(spans, axis=2, dtype=self.acc)[:, :, -1]
            sums = lines.sum(axis=1, dtype=self.acc)
        return sums[:, None] if axis == 1 else sums

    def product_sum(self, a: Array, b: Array | float, c: Array | float) -> Array:
        """a * b + c."""
        if not self.way.fused:
            return np.asarray(a * b + c)
        exact: Array = np.asarray(a, np.float64) * b + c
        rounded: Array = exact.astype(self.acc)
        return rounded

    @property
    def gamma(self) -> Array:
        gamma: Array = np.ones(self.spec.columns, self.acc)
        if "weight" in self.arrays:
            offset = 0.0 if self.way.no_offset or self.way.offset_added else self.spec.weight_offset
            gamma = self.of_rows("weight") + self.acc.type(offset or -0.0)  # zeros keep their sign
        return gamma

    def statistics(self, x: Array) -> tuple[Array, Array]:
        """Mean and rstd as columns: those of the call, else the rows' own."""
        if "rstd" in self.arrays:
            rstd = self.wide("rstd")[:, None]
            return self.wide("mean")[:, None] if self.centres else np.zeros_like(rstd), rstd
        mean = self.total(x, 1) / self.n if self.centres else np.zeros((len(x), 1), self.acc)
        if self.way.expanded:
            squares = self.total(x * x, 1)
        else:
            centred = x - mean
            squares = self.total(centred * centred, 1)
        eps = self.acc.type(self.spec.eps)
        if self.way.eps == "in the sum":
            squares = squares + eps
        square = squares / (self.n - self.way.unbiased)
        if self.way.expanded:
            square = square - mean * mean
        if self.way.eps == "in the root":
            square = square + eps
        root = np.sqrt(square)
        if self.way.eps == "outside the root":
            root = root + eps
        return mean, 1 / root

    def forward(self) -> dict[str, Array]:
        x = self.wide("input")
        results = {}
        if "residual" in self.arrays:
            total = x + self.wide("residual")
            stored = total.astype(DTYPES[self.spec.element_type(Element.RESIDUAL)].numpy)
            results["residual_output"] = stored
            if not self.way.no_residual:
                x = total if self.way.exact_sum else stored.astype(self.acc)
        silu = self.silu()[0] if self.spec.gate is not None else self.acc.type(1)
        if self.spec.gate_first:
            x = x * silu
        mean, rstd = self.statistics(x)
        bias = self.bias
        if self.way.offset_added:
            bias = bias + self.acc.type(self.spec.weight_offset)
        if self.way.rstd_first:
            y = self.product_sum(x - mean, rstd * self.gamma, bias)
        else:
            xhat = (x - mean) * rstd
            if self.way.half_xhat:
                xhat = xhat.astype(DTYPES[self.spec.dtype].numpy).astype(self.acc)
            y = self.product_sum(xhat, self.gamma, bias)
        if not self.spec.gate_first:
            y = y * silu
        return results | {"output": y, "mean": mean[:, 0], "rstd": rstd[:, 0]}

    @property
    def bias(self) -> Array:
        there = "bias" in self.arrays and not self.way.no_bias
        return self.of_rows("bias") if there else np.zeros((), self.acc)

    @property
    def divisor(self) -> Array:
        """What an output without its bias is divided by."""
        g, least = self.gamma, self.acc.type(LEAST_WEIGHT)
        if self.way.unclamped:
            return g
        signed = least if self.way.unsigned_least else np.copysign(least, g)
        away: Array = np.where(np.abs(g) < least, signed, g)
        return away

    def xhat_of_output(self) -> Array:
        y, by = self.wide("output"), self.divisor
        bias = self.bias
        if self.way.undivided:
            return y - bias
        if self.way.late_bias:
            return y / by - bias
        return (y - bias) * (1 / by) if self.way.by_reciprocal else (y - bias) / by

    def backward(self) -> dict[str, Array]:
        dy = given = self.gradient_of_output()
        silu, slope = self.silu() if self.spec.gate is not None else (self.acc.type(1),) * 2
        if not self.spec.gate_first:
            dy = dy * silu
        if self.spec.from_output:
            rstd = self.wide("rstd")[:, None]
            xhat = self.xhat_of_output()
        else:
            x = self.wide("input")
            if self.spec.gate_first:
                given, x = x, x * silu
            mean, rstd = self.statistics(x)
            xhat = (x - mean) * rstd
        h = dy * (self.divisor if self.way.clamped_h else self.gamma)
        zeros = np.zeros_like(rstd)
        sum_h = self.total(h, 1) if self.centres != self.way.no_mean_h else zeros
        sum_hx = zeros if self.way.no_mean_hx else self.total(h * xhat, 1)
        more = self.wide("grad_residual") if "grad_residual" in self.arrays else self.acc.type(0)
        if self.way.no_grad_residual:
            more = self.acc.type(0)
        early = more if self.way.scaled_grad_residual else self.acc.type(0)
        if self.way.rstd_first:
            scale = rstd * (1 / self.n)
            dx = self.product_sum(h, rstd, -(sum_h * scale))
            dx = self.product_sum(xhat, -(sum_hx * scale), dx)
        else:
            rest = self.product_sum(xhat, -(sum_hx / self.n), h - sum_h / self.n)
            dx = rstd * (rest + early)
        if self.way.late_grad_residual:
            dx = dx.astype(DTYPES[self.spec.dtype].numpy).astype(self.acc)
        gated = dx if self.spec.gate_first else xhat * self.gamma + self.bias
        if self.spec.gate_first:
            dx = dx * silu
        grad_input = dx if self.way.scaled_grad_residual else dx + more
        return {
            "grad_input": grad_input,
            "grad_input_copy": grad_input,
            "grad_input_sum": self.over_rows(grad_input),
            "grad_weight": self.over_rows(dy * xhat),
            "grad_bias": self.over_rows(dy),
            "grad_gate": given * slope * gated,
        }
