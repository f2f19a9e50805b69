"""Sets of weights in JAX: each row's set, and the sums of each set's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from iree_lnbwd.ops.spec import MOST_ROWS


def spread(sets: jax.Array, shape: Sequence[Any], rows_per_set: int) -> jax.Array:
    """The set of each row: row r takes set ``(r // rows_per_set) % G``.

    Args:
        sets: [G, *normalized_shape].
        shape: [..., *normalized_shape], of M rows; M may be a symbol of `jax.export`.
        rows_per_set: At least 1.

    Returns:
        Of that shape.
    """
    number, *dims = sets.shape
    rows = rows_of(shape, dims)
    if (rounds := _whole_rounds(rows, number, rows_per_set)) is None:
        return sets[_set_of(rows, number, rows_per_set)].reshape(shape)
    each = jnp.expand_dims(sets, (0, 2))
    return jnp.broadcast_to(each, (rounds, number, rows_per_set, *dims)).reshape(shape)


def summed(cells: jax.Array, shape: Sequence[Any], rows_per_set: int) -> jax.Array:
    """The sums over each set's rows.

    Args:
        cells: [..., *normalized_shape].
        shape: [G, *normalized_shape].
        rows_per_set: At least 1.

    Returns:
        Of that shape, with zeros in sets without rows.
    """
    number, *dims = shape
    rows = rows_of(cells.shape, dims)
    if (rounds := _whole_rounds(rows, number, rows_per_set)) is None:
        zeros = jnp.zeros(tuple(shape), cells.dtype)
        return zeros.at[_set_of(rows, number, rows_per_set)].add(cells.reshape(rows, *dims))
    return cells.reshape(rounds, number, rows_per_set, *dims).sum((0, 2))


def rows_of(shape: Sequence[Any], dims: Sequence[Any]) -> Any:
    """M of cells of a shape that ends in dims; a symbol where `jax.export` leaves one open."""
    return math.prod(shape[: len(shape) - len(dims)])


def _whole_rounds(rows: Any, number: Any, rows_per_set: int) -> int | None:
    """How often the sets take all rows in turn; None if the last time is not whole or not known."""
    if not (isinstance(rows, int) and isinstance(number, int)):
        return None
    rounds, rest = divmod(rows, number * rows_per_set)
    return None if rest else rounds or None


def _set_of(rows: Any, number: Any, rows_per_set: int) -> jax.Array:
    """Of each row. No call has more than `MOST_ROWS`."""
    return jnp.arange(rows) // min(rows_per_set, MOST_ROWS) % number
