"""Every bound from both sides: derived here anew, term by term, and held against the judge's.

A term is one kind of rounding, or what is left out of numbers by their type. `Derivation` has each
under a name, so that a bound can be had of one term alone. Where that is nine tenths of the whole,
a result that is off by the term lies under the bound, and one that is off by 1.5 times as much
above it. Terms that are nowhere so large are in `ALWAYS_SMALL`, with the reason; those, too, are
parts of the sums that are compared in `test_bounds_are_the_sums_of_their_terms`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from norms import Way, computed
from support import random_generator

from iree_lnbwd import NormSpec
from iree_lnbwd.ops.arguments import Array, BoundCall
from iree_lnbwd.ops.dtypes import DTYPES
from iree_lnbwd.ops.operands import OPS, Element, Gate
from iree_lnbwd.ops.spec import LEAST_WEIGHT
from iree_lnbwd.reference import F64, compare, judge
from iree_lnbwd.verification import matrix
from iree_lnbwd.verification.row_block import Arithmetic, Gamma, Normalized

# What a term is, by its name.
TERMS = {
    "row sums": "4 sqrt(N) roundings of each sum over a row",
    "column sums": "4 sqrt(M) roundings of each sum over a column",
    "a mean's roundings": "2 of a mean: its products' or terms', and the division's",
    "a square's roundings": "5 of a mean of squares: 2 of each factor's difference, the square's, "
    "and 2 of a mean",
    "a mean of h * xhat's roundings": "3: 2 of a mean, and h's own, or the product's",
    "xhat's roundings": "a difference and a product; without a mean a product",
    "the sum with eps": "its rounding",
    "eps": "the number that is not in the type of sums",
    "the root": "square root and division, within 2 each",
    "the weight with its offset": "the rounding of their sum",
    "the offset": "the number that is not in the type of sums",
    "dx's roundings": "4 of each of its terms",
    "a column's products": "2: dy * xhat, and one more where it is added",
    "y's roundings": "of the product with the weight, and of the sum with the bias",
    "a sigmoid's roundings": "8: 4 of the exponential, of a sum, 2 of its inverse, of a product",
    "a sigmoid by a power of 2": "2 |z| + 3 of the exponential, in place of the 4",
    "a flushed exponential": "GPUs may flush a power of 2 that is subnormal",
    "a gate's products": "of z with its sigmoid, of that with another factor, and the slope's sum",
    "the residual's roundings": "of the sum, or of what is added to it before: twice the residual",
    "the division by a weight": "2, and of the product with the inverse; of the bias one more",
    "the least weight": "the number that is not in the type of sums",
    "a flushed inverse": "GPUs may flush a subnormal 1 / g'",
    "subnormal numbers": "steps of products among them",
    "the result": "its own rounding",
}


class Derivation:
    """The bounds of a call's results, by ATen's name, as [M, N], [M], [N] or [G, N].

    Args:
        call: The call.
        only: The terms that there are; the others are zero. None means all of them.
    """

    def __init__(self, call: BoundCall, only: str | None = None) -> None:
        assert call.spec is not None
        self.call, self.spec, self.only = call, call.spec, only
        self.acc = DTYPES[self.spec.acc_dtype]
        self.wide = {name: array.astype(np.float64) for name, array in call.arrays.items()}
        self.n, self.m = self.spec.columns, call.rows
        number, rows_per_set = call.sets or (1, max(1, call.rows))
        self.sets = np.array([row // rows_per_set % number for row in range(self.m)], int)
        self.number = number
        self.expected = judge(call).expected  # it is held against other formulas elsewhere

    def part(self, term: str, size: Any) -> Any:
        """A term, unless it is left out."""
        assert term in TERMS
        return size if self.only in (None, term) else size * 0

    def roundings(self, term: str, count: float) -> float:
        """So many unit roundoffs."""
        found: float = self.part(term, count * self.acc.unit_roundoff)
        return found

    @property
    def step(self) -> float:
        """Of subnormal numbers."""
        found: float = self.part("subnormal numbers", self.acc.smallest_subnormal)
        return found

    def left_out(self, term: str, number: float) -> float:
        """What the type of sums leaves out of a number."""
        found: float = self.part(term, abs(float(self.acc.numpy.type(number)) - number))
        return found

    def of_rows(self, name: str) -> F64:
        """What rows take of a parameter."""
        array: F64 = self.wide[name]
        return array if self.call.sets is None else array[self.sets]

    def over_rows(self, terms: F64) -> F64:
        """Sums over the rows of each set, or over all."""
        sums = np.array([terms[self.sets == one].sum(axis=0) for one in range(self.number)])
        return sums[0] if self.call.sets is None else sums

    def set_gate(self) -> None:
        """Sets ``silu`` and its ``slope``, and what they may be off."""
        z = self.wide["gate"]
        sigmoid, other = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
        self.silu, self.slope = z * sigmoid, sigmoid + z * sigmoid * other
        own: Any = self.roundings("a sigmoid's roundings", 8)
        product = self.roundings("a gate's products", 1)
        # an exponential that is subnormal, times z, until the product is below any step
        normal = self.acc.smallest_normal
        flushed = np.where(np.exp(-np.abs(z)) < 2 * normal, normal, 0.0)
        least = self.step * (flushed == 0) + self.part("a flushed exponential", flushed)
        size = np.minimum(np.abs(z), {"f32": 110, "f64": 760}[self.acc.name])
        if self.spec.element_type(Element.GATE) in ("bf16", "f16"):
            # of the exponential's error, the sigmoid has the part that the other sigmoid is
            more = np.maximum((2 * size + 3) * other - 4, 0)
            own = own + more * self.roundings("a sigmoid by a power of 2", 1)
        self.silu_off = (own + product) * np.abs(self.silu) + 2 * (size + 1) * least
        self.slope_off = (own + product) * sigmoid + 2 * (2 * size + 4) * least
        self.slope_off += (2 * own + 3 * product) * np.abs(self.silu * other)

    def product(self, one: F64, one_off: F64, other: F64, other_off: Any = 0) -> tuple[F64, F64]:
        """Of two numbers that may be off."""
        off = np.abs(one) * other_off + np.abs(other) * one_off + one_off * other_off
        own = self.roundings("a gate's products", 1) * np.abs(one * other)
        return one * other, off + own + self.step

    def bounds(self) -> dict[str, F64]:
        """Of all results."""
        with np.errstate(all="ignore"):
            off = self.gradients() if self.spec.family.is_backward else self.outputs()
        return {
            result.name: self.rounded(result.name, off[result.name], result.dtype)
            for result in self.spec.results
            if result.name in off
        }

    def rounded(self, name: str, off: F64, dtype: str) -> F64:
        """With the result's own rounding."""
        result = DTYPES[dtype]
        value = self.expected[name].reshape(off.shape)
        with np.errstate(all="ignore"):
            step = self.part("the result", result.smallest_subnormal)
            roundoff = self.part("the result", result.unit_roundoff)
            whole: F64 = off + np.maximum(roundoff * (np.abs(value) + off), step)
        whole[np.isnan(whole)] = np.inf
        return whole

    def statistics(self, x: F64, x_off: F64) -> None:
        """Sets ``mean``, ``rstd`` and what they may be off."""
        zeros = np.zeros((len(x), 1))
        self.mean, self.mean_off, self.rstd_relative = zeros, zeros, zeros
        if "rstd" in self.wide:
            self.rstd = self.wide["rstd"][:, None]
            if "mean" in self.wide:
                self.mean = self.wide["mean"][:, None]
            return
        assert self.spec.eps is not None
        sums = self.roundings("row sums", 4 * self.n**0.5)
        if self.spec.family.centres:
            self.mean = np.array([[sum(row) / self.n] for row in x.tolist()])
            size = np.array([[sum(map(abs, row)) / self.n] for row in x.tolist()])
            self.mean_off = size * (sums + self.roundings("a mean's roundings", 2)) + self.step
            self.mean_off += x_off.mean(axis=1, keepdims=True)
        square = ((x - self.mean) ** 2).mean(axis=1, keepdims=True)
        square_off = square * (sums + self.roundings("a square's roundings", 5))
        square_off = square_off + self.mean_off**2 + 2 * self.step
        # (c + off) ** 2 - c ** 2, which would cancel
        given = (2 * np.abs(x - self.mean) + x_off) * x_off
        square_off = square_off + given.mean(axis=1, keepdims=True)
        total = square + self.spec.eps
        off = square_off + self.left_out("eps", self.spec.eps)
        off = off + self.roundings("the sum with eps", 1) * np.abs(total)
        part = np.where(np.isinf(total), 0, np.minimum(1, off / total))
        self.rstd = total**-0.5
        # 1 / sqrt(total - off), against 1 / sqrt(total); part is often below f64's own rounding
        self.rstd_relative = part / (1 - part + np.sqrt(1 - part)) + self.roundings("the root", 4)

    def set_xhat(self) -> None:
        """Sets ``xhat``, and what it may be off."""
        x = self.wide[self.spec.family.data.name]
        if "residual" in self.wide:
            x = self.expected["residual_output"].reshape(x.shape)
        self.set_gamma()
        if self.spec.from_output:
            self.rstd, self.rstd_relative = self.wide["rstd"][:, None], np.zeros((self.m, 1))
            return self.set_xhat_of_output(x)
        x_off = np.zeros_like(x)
        if self.spec.gate is not None:
            self.set_gate()
        if self.spec.gate_first:
            x, x_off = self.product(self.silu, self.silu_off, x)
        self.statistics(x, x_off)
        self.centred = np.abs(x - self.mean)
        self.xhat = (x - self.mean) * self.rstd
        own = self.roundings("xhat's roundings", 2 if self.spec.family.centres else 1)
        rstd_off = np.abs(self.rstd) * self.rstd_relative
        self.xhat_off = np.abs(self.xhat) * own + np.abs(self.xhat) * self.rstd_relative
        self.xhat_off += (self.mean_off + x_off) * (np.abs(self.rstd) + rstd_off) + self.step
        return None

    def set_gamma(self) -> None:
        """Sets the weight with its offset, and what it may be off."""
        offset = self.spec.weight_offset
        self.gamma, self.gamma_off = np.ones(self.n), np.zeros(self.n)
        if "weight" in self.wide:
            self.gamma = self.of_rows("weight") + offset
            self.gamma_off = np.zeros_like(self.gamma)
            if offset:
                own = self.roundings("the weight with its offset", 1)
                self.gamma_off = own * np.abs(self.gamma) + self.left_out("the offset", offset)

    def set_xhat_of_output(self, y: F64) -> None:
        """From the output: the largest inverse that may be, less the one that is."""
        scaled = y - self.beta
        inverse, inverse_off = np.empty((2, *self.gamma.shape))
        for j, g in np.ndenumerate(self.gamma):
            off, size = float(self.gamma_off[j]), max(abs(float(g)), LEAST_WEIGHT)
            inverse[j] = np.copysign(1 / size, g)
            if off and abs(g) <= off:  # of either sign
                inverse_off[j] = 2 / LEAST_WEIGHT
            else:
                inverse_off[j] = 1 / max(abs(g) - off, LEAST_WEIGHT) - 1 / size
            if abs(g) - off <= LEAST_WEIGHT:
                left_out = self.left_out("the least weight", LEAST_WEIGHT)
                inverse_off[j] += left_out / LEAST_WEIGHT**2
            inverse_off[j] += self.part(
                "a flushed inverse", float(np.finfo(self.acc.numpy).smallest_normal)
            )
        self.xhat = scaled * inverse
        own = self.roundings("the division by a weight", 4 if "bias" in self.wide else 3)
        self.xhat_off = own * np.abs(self.xhat) + self.step
        self.xhat_off += (1 + own) * np.abs(scaled) * inverse_off

    @property
    def beta(self) -> F64:
        """The bias that rows take."""
        return self.of_rows("bias") if "bias" in self.wide else np.zeros(self.n)

    def shifted(self) -> tuple[F64, F64]:
        """``xhat * gamma + beta``, and what it may be off."""
        scaled = self.xhat * self.gamma
        y = scaled + self.beta
        own = self.roundings("y's roundings", 1)
        off = own * np.abs(scaled) + own * np.abs(y) + np.abs(self.gamma) * self.xhat_off
        return y, off + np.abs(self.xhat) * self.gamma_off + self.step

    def outputs(self) -> dict[str, F64]:
        """Of a forward."""
        self.set_xhat()
        y, output = self.shifted()
        output = output + self.step * self.centred
        if self.spec.gate == "after":
            _, output = self.product(self.silu, self.silu_off, y, output)
        return {
            "output": output,
            "mean": self.mean_off[:, 0],
            "rstd": (self.rstd * self.rstd_relative)[:, 0],
        }

    def gradients(self) -> dict[str, F64]:
        """Of a backward."""
        self.set_xhat()
        of_output = self.wide["grad_output"]
        dy_off = np.zeros_like(of_output)
        if self.spec.gate == "after":
            of_output, dy_off = self.product(self.silu, self.silu_off, of_output)
        dy, xhat, xhat_off = np.abs(of_output), np.abs(self.xhat), self.xhat_off
        summed = np.bincount(self.sets, minlength=1).max()
        columns = self.roundings("column sums", 4 * max(1, summed) ** 0.5)
        product = self.roundings("a column's products", 2)
        of_weight = (columns + product) * dy * xhat + dy * xhat_off + self.step
        of_weight += dy_off * (xhat + xhat_off)
        gamma = np.abs(self.gamma)
        h, h_off = dy * gamma, dy * self.gamma_off + dy_off * (gamma + self.gamma_off)
        signed = of_output * self.gamma
        rows = self.roundings("row sums", 4 * self.n**0.5)
        mean_h, mean_h_off = np.zeros((2, self.m, 1))
        value = signed - self.xhat * (signed * self.xhat).sum(axis=1, keepdims=True) / self.n
        if self.spec.family.centres:
            value = value - signed.sum(axis=1, keepdims=True) / self.n
            mean_h = np.abs(signed.sum(axis=1, keepdims=True) / self.n)
            mean_h_off = (rows + self.roundings("a mean's roundings", 2)) * h + h_off
            mean_h_off = mean_h_off.sum(axis=1, keepdims=True) / self.n + 2 * self.step
        mean_hx = np.abs((signed * self.xhat).sum(axis=1, keepdims=True) / self.n)
        own = self.roundings("a mean of h * xhat's roundings", 3)
        mean_hx_off = (rows + own) * h * xhat + h * xhat_off + xhat * h_off
        mean_hx_off = mean_hx_off + (xhat + 1) * self.step
        mean_hx_off = mean_hx_off.sum(axis=1, keepdims=True) / self.n
        sizes = h + mean_h + xhat * mean_hx
        rstd = np.abs(self.rstd)
        dx = sizes * self.roundings("dx's roundings", 4) + sizes * self.rstd_relative
        dx = dx + h_off + mean_h_off + mean_hx * xhat_off + 3 * self.step
        dx = dx + (xhat + xhat_off) * mean_hx_off
        # rstd / N may be subnormal, and then its products are off by N times as much
        early = (mean_h + xhat * mean_hx) * self.n + xhat + 3
        dx = rstd * dx + early * self.step / 2
        if "grad_residual" in self.wide:
            own = self.roundings("the residual's roundings", 1)
            dx = dx + own * rstd * sizes + own * 2 * np.abs(self.wide["grad_residual"])
        of_gate = {}
        if self.spec.gate is not None:
            there, norms = ("input", (self.rstd * value, dx))
            if not self.spec.gate_first:
                there, norms = "grad_output", self.shifted()
            slope = self.product(self.slope, self.slope_off, self.wide[there])
            of_gate["grad_gate"] = self.product(*slope, *norms)[1]
        if self.spec.gate_first:
            _, dx = self.product(self.silu, self.silu_off, self.rstd * value, dx)
        return {
            **of_gate,
            "grad_input": dx,
            "grad_weight": self.over_rows(of_weight),
            "grad_bias": self.over_rows(columns * dy + dy_off),
        }


# --- the whole bound --------------------------------------------------------------------------


def options() -> list[NormSpec]:
    """Every op, with each option that a bound depends on."""
    found = []
    for op in OPS.values():
        plain = NormSpec((9,), op=op.name, eps=None if op.is_backward else 1e-3)
        found += [
            plain,
            replace(plain, dtype="bf16", residual_dtype="f32", weight_offset=0.1),
            replace(plain, dtype="f64", weight_offset=1.0),
            replace(plain, has_weight=False, residual_dtype="f32"),
        ]
        if op.is_backward:
            found += [replace(plain, eps=-0.75), replace(plain, eps=0.1, weight_offset=-1.1)]
            output = replace(plain, from_output=True, has_bias=None)
            found += [output, replace(output, weight_offset=0.1, dtype="f16")]
            found += [replace(output, has_weight=False, residual_dtype="f32")]
        else:
            found += [replace(plain, eps=-0.75), replace(plain, eps=0.1, weight_offset=-1.1)]
        found += [replace(plain, weight_sets=True, weight_offset=0.1)]
        found += [
            replace(plain, gate=gate.value, output_mask=(), **others)
            for gate in Gate
            for others in (
                {},
                {"dtype": "f64", "weight_offset": 0.1},
                {"eps": 1e-3},
                {"gate_dtype": "bf16"},
            )
        ]
    return found


def on(call: BoundCall, **arrays: Any) -> BoundCall:
    """The call on other values; each is brought to the shape and type of what it is in place of."""
    changed = {
        name: np.broadcast_to(values, call.arrays[name].shape).astype(call.arrays[name].dtype)
        for name, values in arrays.items()
    }
    return call._replace(arrays={**call.arrays, **changed})


def as_it_is(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    return call


def of_all_sizes(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    """Every number of every argument from 1e-30 to 1e10, so that products are subnormal."""
    sizes = {
        name: array.astype(np.float64) * 10.0 ** rng.uniform(-30, 10, array.shape)
        for name, array in call.arrays.items()
    }
    with np.errstate(all="ignore"):
        return on(call, **sizes)


def far_from_zero(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    """Means of 100 to 10000 standard deviations."""
    assert call.spec is not None
    data = call.spec.family.data.name
    distance = 10.0 ** rng.uniform(2, 4, (call.rows, 1))
    return on(call, **{data: call.arrays[data].astype(np.float64) + distance})


def around_the_offset(call: BoundCall, rng: np.random.Generator) -> BoundCall:
    """Weights that cancel it: exactly, to some roundings of it, and to 100 times the least."""
    assert call.spec is not None
    if "weight" not in call.arrays:
        return call
    left = rng.standard_normal(call.spec.columns) * 10.0 ** rng.uniform(-10, -3, call.spec.columns)
    left[::4] = 0
    return on(call, weight=left - call.spec.weight_offset)


DATA: Mapping[str, Callable[[BoundCall, np.random.Generator], BoundCall]] = {
    "as it is": as_it_is,
    "of all sizes": of_all_sizes,
    "far from zero": far_from_zero,
    "around the offset": around_the_offset,
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("spec", options(), ids=lambda spec: spec.name)
def test_bounds_are_the_sums_of_their_terms(spec: NormSpec, data: str) -> None:
    rng = random_generator()
    for rows in (1, 13):
        call = DATA[data](matrix.random_call(spec, rows, rng), rng)
        judgement = judge(call)
        for name, bound in Derivation(call).bounds().items():
            got = judgement.tolerance[name].reshape(bound.shape)
            np.testing.assert_allclose(got, bound, rtol=1e-7, err_msg=name)


@pytest.mark.parametrize("op", OPS)
def test_bounds_of_rows_that_are_not_finite(op: str) -> None:
    """Nothing is said of what they reach, and as much as ever of the rest."""
    rng = random_generator()
    call = matrix.adversarial_call(NormSpec((9,), op=op, eps=1e-3), rng)
    judgement = judge(call)
    for name, bound in Derivation(call).bounds().items():
        got = judgement.tolerance[name].reshape(bound.shape)
        assert not np.isnan(got).any(), name
        finite = np.isfinite(bound)
        np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
        np.testing.assert_allclose(got[finite], bound[finite], rtol=1e-7, err_msg=name)


def test_an_output_has_no_mean() -> None:
    """Of a backward from it: neither it nor rstd is off."""
    call = matrix.random_call(
        NormSpec((9,), op="layer_norm_backward", from_output=True), 5, random_generator()
    )
    arithmetic = Arithmetic.of(NormSpec((9,)), 5)
    row = Normalized.of_output(
        call,
        slice(1, 4),
        call.arrays["output"][1:4].astype(np.float64),
        Gamma.of(call, slice(1, 4), arithmetic),
        arithmetic,
    )
    for none in (row.mean, row.mean_off, row.rstd_relative):
        np.testing.assert_array_equal(none, np.zeros((3, 1)))
    np.testing.assert_array_equal(row.rstd[:, 0], call.arrays["rstd"][1:4])


# --- each term from both sides ------------------------------------------------------------------


def call_of(op: str, rows: int, columns: int, **others: Any) -> BoundCall:
    """Any call, as `on` changes it."""
    rng = np.random.default_rng(0)
    return matrix.random_call(NormSpec((columns,), op=op, **others), rows, rng)


def alternating(count: int) -> F64:
    """Plus and minus one: as large as can be for what they add up to."""
    return np.where(np.arange(count) % 2, 1.0, -1.0)


def beside_zero(count: int) -> F64:
    """As `alternating`, but for the first two, of which the first is 0 and the second 1."""
    values = alternating(count)
    values[:2] = 0, 1
    return values


def column_sums() -> BoundCall:
    dy = alternating(1600)[:, None]
    call = call_of("layer_norm_backward", 1600, 2)
    return on(call, grad_output=dy, input=3.0, mean=2.0, rstd=1.0)


def sums_of_a_row() -> BoundCall:
    """dx where h and xhat are zero is what the mean of h is off."""
    h = alternating(1024)
    h[:2] = 0
    call = call_of("layer_norm_backward", 1, 1024)
    return on(call, grad_output=h, input=0.0, mean=0.0, rstd=1.0, weight=1.0)


def products_of_a_row() -> BoundCall:
    """dx where h is zero is xhat, times what the mean of h * xhat is off."""
    h = alternating(1024)
    h[:2] = 0
    call = call_of("rms_norm_backward", 1, 1024)
    return on(call, grad_output=h, input=1.0, rstd=1.0, weight=1.0)


def a_mean() -> BoundCall:
    return on(call_of("layer_norm", 1, 1024, eps=1.0), input=alternating(1024))


def a_wide_variance() -> BoundCall:
    return on(call_of("rms_norm", 1, 1 << 16, eps=1e-30), input=alternating(1 << 16))


def a_far_mean(op: str) -> BoundCall:
    """Of 10000 standard deviations: what the mean is off is squared in the variance."""
    eps = 1e-30
    call = call_of(op, 1, 1024, eps=eps)
    x = 1e4 + alternating(1024)
    x[0] = 1e4  # about the mean
    dy = {"grad_output": beside_zero(1024)} if "grad_output" in call.arrays else {"bias": 0.0}
    return on(call, input=x, weight=1.0, **dy)


def a_cancelled_offset(op: str) -> BoundCall:
    """f32 has no 0.1; of weights that cancel it, its error is left."""
    call = call_of(op, 1, 64, weight_offset=0.1, eps=None if "backward" in op else 1.0)
    weight = np.float64(np.float32(-0.1)) + 1e-8
    if "backward" not in op:
        zero = {"bias": 0.0} if "bias" in call.arrays else {}
        return on(call, weight=weight, input=alternating(64), **zero)
    return on(call, weight=weight, grad_output=1.0, input=0.0, rstd=1.0)


def the_offsets_rounding() -> BoundCall:
    """Of dx; f32 has 1.0, and the weight is none beside it."""
    call = call_of("rms_norm_backward", 1, 64, weight_offset=1.0)
    return on(call, weight=0.0, grad_output=1.0, input=0.0, rstd=1.0)


def an_output_over_a_small_weight() -> BoundCall:
    """Its inverse is off as the offset's constant is: many roundings."""
    call = call_of("rms_norm_backward", 1, 64, weight_offset=0.1, from_output=True)
    weight = np.float64(np.float32(-0.1)) + 1e-4
    return on(call, weight=weight, output=1e-4, grad_output=1.0, rstd=1.0)


def an_output_over_any_sign() -> BoundCall:
    """What is left of the weight is less than it may be off: so is its sign."""
    call = call_of("rms_norm_backward", 1, 64, weight_offset=0.1, from_output=True)
    return on(call, weight=-0.1, output=1.0, grad_output=1.0, rstd=1.0)


def an_output_over_a_huge_weight() -> BoundCall:
    call = call_of("rms_norm_backward", 1, 64, from_output=True)
    return on(call, weight=1e34, output=1e34, grad_output=1.0, rstd=1.0)


def a_cancelled_variance() -> BoundCall:
    """dx where x is zero is off as rstd is: a negative eps leaves a thousandth of the squares."""
    x = alternating(1024) * 1.0005
    x[0] = 0
    call = call_of("rms_norm_backward", 1, 1024, eps=-1.0)
    dy = np.zeros(1024)
    dy[0] = 1
    return on(call, input=x, grad_output=dy, weight=1.0)


def subnormal_column_sums() -> BoundCall:
    call = call_of("rms_norm_backward", 64, 4)
    return on(call, grad_output=1e-44, input=1.0, rstd=1.0)


def subnormal_dx(op: str) -> BoundCall:
    """h is subnormal, and rstd is not small."""
    call = call_of(op, 1, 64)
    mean = {"mean": 0.0} if "mean" in call.arrays else {}
    return on(call, grad_output=0.0, input=0.0, rstd=1e10, **mean)


def subnormal_rstd() -> BoundCall:
    """N products with rstd / N, which is rounded to a step."""
    call = call_of("layer_norm_backward", 1, 64)
    return on(call, grad_output=1.0, weight=1.0, input=0.0, mean=0.0, rstd=1e-40)


def subnormal_rstd_of_products() -> BoundCall:
    """As `subnormal_rstd`, where the sum of h * xhat is what it is multiplied by."""
    call = call_of("rms_norm_backward", 1, 4096)
    return on(call, grad_output=1.0, weight=1.0, input=3e38, rstd=3e-39)


def subnormal_sums_of_products() -> BoundCall:
    """h * xhat is subnormal almost everywhere, and xhat is large in one place."""
    call = call_of("rms_norm_backward", 1, 1024)
    x = np.zeros(1024)
    x[0] = 10
    return on(call, grad_output=0.0, weight=1.0, input=x, rstd=10.0)


def subnormal_products() -> BoundCall:
    """xhat of 100, and rstd of next to nothing."""
    call = call_of("rms_norm_backward", 1, 64)
    return on(call, grad_output=0.0, weight=1.0, input=1e38, rstd=1e-36)


def subnormal_output(op: str) -> BoundCall:
    """rstd * gamma is subnormal, and x, or how far it is from its mean, makes that large."""
    call = call_of(op, 1, 64, eps=1e8)
    far, bias = (3e4, {"bias": 0.0}) if "bias" in call.arrays else (0.0, {})
    return on(call, input=1e4 * alternating(64) + far, weight=1e-38, **bias)


def subnormal_xhat() -> BoundCall:
    return on(call_of("rms_norm", 1, 64, eps=1.0), input=0.0, weight=100.0)


def subnormal_squares() -> BoundCall:
    """2**-133 is a number of f32, and a step of the squares is 2**-149."""
    return on(call_of("rms_norm", 1, 64, eps=2.0**-133), input=0.0)


def gated_call(columns: int, **others: Any) -> BoundCall:
    """Of a backward with a gate after the norm."""
    return call_of("rms_norm_backward", 1, columns, gate="after", output_mask=(), **others)


def a_gated_wide_variance() -> BoundCall:
    """What is gated is off as rstd is."""
    call = gated_call(1 << 16, eps=1e-30)
    return on(call, input=alternating(1 << 16), weight=1.0, gate=1.0, grad_output=1.0)


def a_gated_cancelled_offset() -> BoundCall:
    call = gated_call(64, weight_offset=0.1)
    weight = np.float64(np.float32(-0.1)) + 1e-8
    return on(call, weight=weight, grad_output=1.0, input=1.0, rstd=1.0, gate=1.0)


def subnormal_slopes() -> BoundCall:
    """The slope times dy is subnormal, and what it gates is large."""
    call = gated_call(64)
    return on(call, weight=100.0, grad_output=1e-44, input=1.0, rstd=1.0, gate=1.0)


def a_subnormal_gate() -> BoundCall:
    call = gated_call(64, has_bias=True)
    return on(call, weight=1.0, grad_output=1e3, input=1.0, rstd=1.0, gate=1e-44)


def a_flushed_gate(op: str, gate: str, size: float) -> BoundCall:
    """Of 16 bits: exp(-90) is subnormal, and what it is times 90 is most of what can be off."""
    others = {"output_mask": ()} if "backward" in op else {}
    call = call_of(op, 1, 64, gate=gate, gate_dtype="bf16", eps=1e-30, **others)
    values = {"weight": 1.0, "bias": 0.0, "grad_output": 1.0, "gate": -90.0}
    own = {name: value for name, value in values.items() if name in call.arrays}
    return on(call, input=size * alternating(64), **own)


def a_narrow_result(op: str, **arrays: Any) -> BoundCall:
    call = call_of(op, 1, 4, dtype="bf16", eps=None if "backward" in op else 1e-5)
    return on(call, **arrays)


# Term, result, and data where the term is nine tenths of the bound.
NINE_TENTHS: list[tuple[str, str, Callable[[], BoundCall]]] = [
    ("column sums", "grad_bias", column_sums),
    ("column sums", "grad_weight", column_sums),
    ("row sums", "grad_input", sums_of_a_row),
    ("row sums", "grad_input", products_of_a_row),
    ("row sums", "mean", a_mean),
    ("row sums", "rstd", a_wide_variance),
    ("row sums", "output", a_wide_variance),
    ("row sums", "grad_input", a_cancelled_variance),
    ("row sums", "rstd", lambda: a_far_mean("layer_norm")),
    ("row sums", "output", lambda: a_far_mean("layer_norm")),
    ("row sums", "grad_input", lambda: a_far_mean("layer_norm_backward")),
    ("row sums", "grad_weight", lambda: a_far_mean("layer_norm_backward")),
    ("row sums", "grad_gate", a_gated_wide_variance),
    ("the offset", "grad_gate", a_gated_cancelled_offset),
    ("the offset", "output", lambda: a_cancelled_offset("rms_norm")),
    ("the offset", "output", lambda: a_cancelled_offset("layer_norm")),
    ("the offset", "grad_input", lambda: a_cancelled_offset("rms_norm_backward")),
    ("the offset", "grad_weight", an_output_over_a_small_weight),
    ("the offset", "grad_weight", an_output_over_any_sign),
    ("a flushed inverse", "grad_weight", an_output_over_a_huge_weight),
    ("a flushed inverse", "grad_input", an_output_over_a_huge_weight),
    ("subnormal numbers", "grad_weight", subnormal_column_sums),
    ("subnormal numbers", "grad_input", lambda: subnormal_dx("rms_norm_backward")),
    ("subnormal numbers", "grad_input", lambda: subnormal_dx("layer_norm_backward")),
    ("subnormal numbers", "grad_input", subnormal_rstd),
    ("subnormal numbers", "grad_input", subnormal_products),
    ("subnormal numbers", "grad_input", subnormal_rstd_of_products),
    ("subnormal numbers", "grad_input", subnormal_sums_of_products),
    ("subnormal numbers", "output", lambda: subnormal_output("rms_norm")),
    ("subnormal numbers", "output", lambda: subnormal_output("layer_norm")),
    ("subnormal numbers", "output", subnormal_xhat),
    ("subnormal numbers", "rstd", subnormal_squares),
    ("subnormal numbers", "grad_gate", subnormal_slopes),
    ("subnormal numbers", "grad_bias", a_subnormal_gate),
    *(
        ("a flushed exponential", result, functools.partial(a_flushed_gate, op, gate, size))
        for op, gate, size, results in (
            ("layer_norm", "before", 1e20, ("output", "mean", "rstd")),
            ("layer_norm_backward", "after", 1.0, ("grad_input", "grad_bias")),
            ("layer_norm_backward", "before", 1e20, ("grad_weight", "grad_gate")),
        )
        for result in results
    ),
    ("the result", "grad_gate", lambda: gated_call(4, dtype="bf16")),
    ("the result", "grad_input", lambda: a_narrow_result("rms_norm_backward")),
    ("the result", "grad_weight", lambda: a_narrow_result("layer_norm_backward")),
    ("the result", "grad_bias", lambda: a_narrow_result("layer_norm_backward")),
    ("the result", "grad_bias", lambda: a_narrow_result("layer_norm_backward", grad_output=0.0)),
    ("the result", "output", lambda: a_narrow_result("layer_norm")),
    ("the result", "output", lambda: a_narrow_result("rms_norm")),
]

# Terms that are nowhere nine tenths of a bound, and why; of one result, or of any.
ALWAYS_SMALL: Mapping[str | tuple[str, str], str] = {
    "a mean's roundings": "2 beside the 4 sqrt(N) of the same sum",
    "a square's roundings": "5 halves beside the root's 4, and 4 sqrt(N) halves of the same sum",
    "a mean of h * xhat's roundings": "3 beside the 4 sqrt(N) of the same sum",
    "xhat's roundings": "2, and y or a column's sum of it has as many or more of its own",
    "the sum with eps": "half of one in the root, beside the root's 4",
    "eps": "at most half of one in the root, as the sum with eps; if a negative eps cancels the "
    "squares, they have 9 and more",
    "the root": "4 beside the result's own, which has as many bits, and half of the sum's",
    "the weight with its offset": "1 of h beside the 4 of dx, or of g beside the root's 4",
    "dx's roundings": "4 beside the result's own 1, or beside that of a narrower result",
    "a column's products": "2 beside the 4 sqrt(M) of the same sum",
    "y's roundings": "2 at most beside the root's 4, or, where the bias is large, the result's own",
    "a sigmoid's roundings": "8 beside the 4 sqrt(M) or the root's 4, and those of its products; "
    "of a slope 16 of 19",
    "a sigmoid by a power of 2": "140 of 156 at z = -72; below that, the flushed exponential's is "
    "larger",
    "a gate's products": "2 beside a sigmoid's 8, or 4 beside 16",
    "the residual's roundings": "2 beside the result's own 1",
    "the division by a weight": "3 or 4 beside the 4 sqrt(M) of the column's sum, and dx's",
    "the least weight": "less than half of one beside the division's",
    ("subnormal numbers", "mean"): "a step beside the result's own, which has the type of sums",
    ("the result", "mean"): "it has the type of sums, and they have 4 sqrt(N)",
    ("the result", "rstd"): "it has the type of sums, and the root has 4",
}


def many_calls() -> list[BoundCall]:
    """All data above, and random numbers for every option."""
    rng = random_generator()
    calls = [data() for *_, data in NINE_TENTHS]
    calls += [
        DATA[data](matrix.random_call(spec, rows, rng), rng)
        for spec in options()
        for data in ("as it is", "far from zero", "around the offset")
        for rows in (1, 13)
    ]
    return calls


@pytest.mark.drawn
def test_each_term_of_each_bound_is_tried_or_argued() -> None:
    """Any that is a part of a result's bound on some data."""
    found = {
        (term, name)
        for call in many_calls()
        for term in TERMS
        for name, alone in Derivation(call, only=term).bounds().items()
        if ((alone > 0) & np.isfinite(alone)).any()
    }
    tried = {(term, result) for term, result, _ in NINE_TENTHS}
    argued = {pair for pair in found if pair in ALWAYS_SMALL or pair[0] in ALWAYS_SMALL}
    assert tried | argued == found
    assert not tried & argued
    assert {pair[0] for pair in found} == set(TERMS)


@pytest.mark.parametrize(("term", "result", "data"), NINE_TENTHS)
def test_a_term_of_nine_tenths_from_both_sides(
    term: str, result: str, data: Callable[[], BoundCall]
) -> None:
    """What is computed rightly, in any way, lies under the bound, too."""
    call = data()
    judgement = judge(call)
    for name, bound in Derivation(call).bounds().items():
        got = judgement.tolerance[name].reshape(bound.shape)
        np.testing.assert_allclose(got, bound, rtol=1e-7, err_msg=name)
    expected, tolerance = judgement.expected[result], judgement.tolerance[result]
    alone = Derivation(call, only=term).bounds()[result].reshape(expected.shape)
    largest = np.argmax(alone / tolerance)
    assert (alone / tolerance).flat[largest] > 0.9

    def passes(times: float) -> bool:
        wrong = expected.copy()
        wrong.flat[largest] += times * alone.flat[largest]
        return compare(wrong, expected, tolerance).passed

    assert passes(0.99)
    assert passes(-0.99)
    assert not passes(1.5)
    assert not passes(-1.5)
    for way in (Way(), Way(spans=True), Way(fused=True, rstd_first=True, by_reciprocal=True)):
        right: Array = computed(call, way)[result].reshape(expected.shape)
        assert compare(right, expected, tolerance).passed, way


@pytest.mark.parametrize("gate", [-86.5, -86.0])
def test_an_exponential_that_is_barely_normal_is_not_flushed(gate: float) -> None:
    """2.3 and 3.8 times the least normal number."""
    call = on(a_flushed_gate("layer_norm_backward", "after", 1.0), gate=gate)
    tolerance = judge(call).tolerance
    for name, bound in Derivation(call).bounds().items():
        got = tolerance[name].reshape(bound.shape)
        np.testing.assert_allclose(got, bound, rtol=1e-7, err_msg=name)


@pytest.mark.drawn
def test_terms_that_are_argued_are_small() -> None:
    for call in many_calls():
        tolerance = judge(call).tolerance
        for term in ALWAYS_SMALL:
            term, only = (term, None) if isinstance(term, str) else term
            for name, alone in Derivation(call, only=term).bounds().items():
                whole = tolerance[name].reshape(alone.shape)
                if only in (None, name):
                    with np.errstate(all="ignore"):
                        assert not (alone / whole > 0.9).any(), (term, name, call.spec)


# --- the bound is the border --------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("times", "passes"), [(0.999, True), (1.001, False), (2.0, False)])
def test_the_bound_is_the_border(op: str, times: float, passes: bool) -> None:
    """On either side of what is expected, of every result, at any one of its elements."""
    rng = random_generator()
    call = matrix.random_call(NormSpec((8,), "bf16", op=op, eps=1e-3), 5, rng)
    judgement = judge(call)
    for name, expected in judgement.expected.items():
        for sign in (1, -1):
            wrong = expected.copy()
            place = rng.integers(wrong.size)
            wrong.flat[place] += sign * times * judgement.tolerance[name].flat[place]
            found = compare(wrong, expected, judgement.tolerance[name])
            assert found.passed is passes, name
            assert found.ratio == pytest.approx(times)
