"""The matrix that is verified on a GPU or in the emulator: specs, and the data for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from iree_lnbwd.arguments import DEFAULT_EPS, Array, BoundCall, bind
from iree_lnbwd.dtypes import DTYPES
from iree_lnbwd.schedules import FewRows, Schedule, forms
from iree_lnbwd.spec import NormSpec

_WIDTHS = (1, 7, 64, 192, 768, 769, 1000, 1023, 1024, 1536, 4096, 5000, 8192, 12288, 16384, 65536)
_DTYPES = ("f32", "f16", "bf16")
ADVERSARIAL_ROWS = 37


def specs() -> Iterator[NormSpec]:
    """Widths, element types, masks and options."""
    for width in _WIDTHS:
        for dtype in _DTYPES:
            yield NormSpec((width,), dtype)
    for dtype in ("f32", "bf16"):
        yield NormSpec((5,), dtype, eps=DEFAULT_EPS)
        yield NormSpec((65536,), dtype, output_mask=(False, True, True))
    yield NormSpec((20000,), "f64")
    for width in (769, 4096):
        yield NormSpec((width,), "f64")
        yield NormSpec((width,), "f64", eps=DEFAULT_EPS)
        for half in ("f16", "bf16"):
            yield NormSpec((width,), "f32", grad_output_dtype=half, weight_dtype=half)
            yield NormSpec((width,), half, weight_dtype="f32")
        for dtype in ("f32", "bf16"):
            yield NormSpec((width,), dtype, has_weight=False)
            yield NormSpec((width,), dtype, eps=DEFAULT_EPS)
            for mask in ((True, False, False), (False, True, True), (False, False, True)):
                yield NormSpec((width,), dtype, output_mask=mask)


def both_sides(spec: NormSpec, schedule: Schedule) -> tuple[int, ...]:
    """The most rows that count as few, and one row more, if a module has two forms."""
    first, *rest = forms(schedule, spec)
    return (first.rows, first.rows + 1) if rest and isinstance(first, FewRows) else ()


def random_call(spec: NormSpec, rows: int, rng: np.random.Generator) -> BoundCall:
    """Rows from a normal distribution, with their true statistics."""
    return _call(spec, rng.standard_normal((rows, spec.columns)) * 2 + 0.5, rng)


def calls(
    spec: NormSpec,
    schedule: Schedule,
    row_counts: Sequence[int],
    most_elements: int,
    rng: np.random.Generator,
) -> Iterator[tuple[str, BoundCall]]:
    """The data that a module is verified on, by a name for each.

    Args:
        spec: What it computes.
        schedule: How; each of its forms is run, on random and on adversarial rows.
        row_counts: Numbers of random rows; those with too many elements are left out.
        most_elements: The most elements of a call, except where a form would not be run at all.
        rng: The source of random numbers.
    """
    sides = both_sides(spec, schedule)

    def fits(rows: int) -> bool:
        return rows * spec.columns <= most_elements

    for rows in sorted({*row_counts, *sides}):
        if rows in (1, *sides[1:]) or fits(rows):
            yield f"random {rows}", random_call(spec, rows, rng)
    for rows in (ADVERSARIAL_ROWS, *sides[1:]):
        if fits(rows):
            yield f"adversarial {rows}", adversarial_call(spec, rng, rows)


def adversarial_call(
    spec: NormSpec, rng: np.random.Generator, rows: int = ADVERSARIAL_ROWS
) -> BoundCall:
    """Random rows, and among them constant ones, ones far from zero, zeros, an Inf and a NaN."""
    x = rng.standard_normal((rows, spec.columns))
    x[0] = 3.0  # rstd is 1 / sqrt(eps)
    x[1] += 100.0
    x[2] = 0.0
    x[3, 0] = np.inf
    x[4, -1] = np.nan
    return _call(spec, x, rng)


def _call(spec: NormSpec, x64: Array, rng: np.random.Generator) -> BoundCall:
    """Random gradients and weights for these rows, and the rows' true statistics."""

    def of(dtype: str, values: Array) -> Array:
        return values.astype(DTYPES[dtype].numpy)

    x = of(spec.dtype, x64)
    mean = rstd = None
    if spec.eps is None:
        with np.errstate(all="ignore"):
            mean = of(spec.acc_dtype, x.astype(np.float64).mean(axis=1))
            var = x.astype(np.float64).var(axis=1)
            rstd = of(spec.acc_dtype, 1 / np.sqrt(var + DEFAULT_EPS))
    weight = of(spec.gamma_dtype, rng.standard_normal(spec.columns) + 1)
    dims = spec.normalized_shape
    return bind(
        of(spec.dy_dtype, rng.standard_normal(x.shape)).reshape(-1, *dims),
        x.reshape(-1, *dims),
        dims,
        mean,
        rstd,
        weight.reshape(dims) if spec.has_weight else None,
        None,
        spec.output_mask,
    )
